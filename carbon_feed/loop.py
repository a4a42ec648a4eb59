"""The shell around the feed's brain: ask the provider, publish under a lease, keep history, wake the watchers.

Redis down: the reading goes on being served from memory. Redis emptied, or the lease lost: the role is taken again
under a higher epoch and everything is rewritten, within a second of Redis answering.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from carbon_feed.feed import Feed, FeedView, Observation, reading_of
from carbon_feed.providers import Provider
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Series
from trefoil.core.common import Lease
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import Append, Delete, Put, State, Write, series_name
from trefoil.runtime.telemetry import Metrics

TICK_S: Final = 0.5  # an emptied Redis is noticed by the next renewal, and rewritten well within a second
TICK_MIN_S: Final = 0.002
SAME_S: Final = 1e-3  # two interval starts that differ by less are one


class FeedLoop:
    """One zone. `reading` is what everybody is told."""

    def __init__(
        self, settings: CarbonFeedSettings, provider: Provider, state: State, clock: Clock, metrics: Metrics
    ) -> None:
        self.series: Series = settings.series
        self.reading: CarbonReading | None = None
        self._settings = settings
        self._provider = provider
        self._state = state
        self._clock = clock
        self._metrics = metrics
        self._brain = Feed(settings.carry_max_s, settings.static_g_per_kwh)
        self._role = f"feed:{settings.zone}"
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._epoch_file = settings.state_dir / f"epoch-{settings.zone}"
        self._lease: Lease | None = None
        self._recorded_until_s = float("-inf")
        self._news = asyncio.Event()
        self._silent = ""
        self._log = structlog.get_logger().bind(zone=settings.zone)

    async def init(self) -> None:
        """Read once, so that the first caller is answered."""
        self._settings.state_dir.mkdir(parents=True, exist_ok=True)
        self._metrics.set("trefoil_carbon_trace_speedup_ratio", self._provider.speedup, zone=self._settings.zone)
        await self._read()

    async def run(self) -> None:
        while True:
            next_tick_at_s = await self._read()
            await self._publish()
            now_s = self._clock.now_s()
            await self._clock.sleep(min(TICK_S, max(TICK_MIN_S, next_tick_at_s - now_s)))

    async def shutdown(self) -> None:
        """Give the role back, so that a successor need not wait for the lease to expire."""
        if self._lease is not None:
            await self._state.release(self._lease)

    async def watch(self) -> AsyncIterator[CarbonReading]:
        """The reading now, then each new one; a slow watcher sees the latest only."""
        seen: CarbonReading | None = None
        while True:
            news = self._news
            if self.reading is not None and self.reading != seen:
                seen = self.reading
                yield seen
            else:
                await news.wait()

    async def _read(self) -> float:
        observation: Observation | None = None
        failure = ""
        now_s = self._clock.now_s()
        try:
            observation = await self._provider.read(now_s)
        except errors.Unavailable as error:
            failure = str(error)
        decision = self._brain.decide(FeedView(now_s, self.series, observation, failure, self.reading))
        if not decision.accepted:
            cause = "unavailable" if failure else "refused"
            zone, provider = self._settings.zone, self._provider.name
            self._metrics.inc("trefoil_carbon_provider_errors_total", zone=zone, provider=provider, cause=cause)
        if decision.reading is not None and decision.reading != self.reading:
            self._tell(decision.reading, decision.why)
        if self.reading is not None:
            age_s = max(0.0, now_s - self.reading.observed_at_s)
            self._metrics.set("trefoil_carbon_reading_age_seconds", age_s, zone=self._settings.zone)
        return decision.next_tick_at_s

    def _tell(self, reading: CarbonReading, why: str) -> None:
        """Put a reading in force in this process: log it, count it, wake who watches."""
        changed = self.reading is None or self.reading.as_of != reading.as_of
        self.reading = reading
        news, self._news = self._news, asyncio.Event()
        news.set()
        if not changed:
            return
        quality, rung = reading.quality.name.lower(), str(reading.rung)
        zone, method, factors = series_name(self.series).rsplit(":", 2)
        self._metrics.simulated = reading.simulated
        intensity = self._metrics.bind(
            "trefoil_carbon_intensity_grams_per_kwh", zone=zone, method=method, factors=factors
        )
        intensity.set(reading.intensity_g_per_kwh)
        self._metrics.inc("trefoil_carbon_readings_total", zone=zone, quality=quality, rung=rung)
        self._log.info(
            "reading",
            intensity_g_per_kwh=round(reading.intensity_g_per_kwh, 2),
            quality=quality,
            rung=reading.rung,
            until_s=round(reading.ends_at_s, 3),
            as_of=reading.as_of,
            simulated=reading.simulated,
            why=why,
        )

    async def _publish(self) -> None:
        try:
            if self._lease is None or not await self._state.renew(self._lease):
                self._lease = await self._take()
            if self._lease is not None:
                await self._write(self._lease)
            self._heard()
        except errors.StateUnavailable as error:
            self._unheard(str(error))
        except errors.Fenced as error:
            self._lease = None  # taken again in the next round
            self._log.warning("fenced", error=str(error))

    async def _take(self) -> Lease | None:
        """Acquire the zone, with everything that a successor or an emptied Redis needs."""
        lease = await self._state.acquire(self._role, self._holder, floor_epoch=read_epoch(self._epoch_file))
        if lease is None:
            return None
        write_epoch(self._epoch_file, lease.epoch)
        stored = await self._state.get(self._state.keys.carbon_now(self.series), CarbonReading)
        if self.reading is not None:
            as_of = max(self.reading.as_of, stored.as_of + 1 if stored is not None else 0)
            self._tell(replace(self.reading, epoch=lease.epoch, as_of=as_of), "role taken")
        await self._reconcile_history(lease)
        self._log.info("leased", epoch=lease.epoch)
        return lease

    async def _reconcile_history(self, lease: Lease) -> None:
        """Keep a stored history that our provider's continues; replace one of another replay or an empty one."""
        key, count = self._state.keys.carbon_history(self.series), self._settings.backfill_max
        ours = [o for o in self._provider.history(self._clock.now_s(), count) if o.record]
        stored = [reading.starts_at_s for _, reading in await self._state.tail(key, CarbonReading, count)]
        starts = {round(o.starts_at_s / SAME_S) for o in ours}
        known = [at_s for at_s in stored if round(at_s / SAME_S) in starts]
        if stored and len(known) == len(stored) and known:
            self._recorded_until_s = known[-1]
            return
        self._recorded_until_s = float("-inf")
        if ours:
            await self._state.write(lease, [Delete(key)])

    async def _write(self, lease: Lease) -> None:
        """Bring Redis up to what this process knows; nothing to do costs one GET."""
        if self.reading is None:
            return
        if self.reading.epoch != lease.epoch:
            self._tell(replace(self.reading, epoch=lease.epoch), "role taken")
        writes: list[Write] = []
        key = self._state.keys.carbon_now(self.series)
        stored = await self._state.get(key, CarbonReading)
        if stored is None or codec.encode(stored) != codec.encode(self.reading):
            writes.append(Put(key, self.reading))
        new = [o for o in self._unrecorded() if o.record]
        history = self._state.keys.carbon_history(self.series)
        writes += [Append(history, self._record(o), self._settings.history_max) for o in new]
        if writes:
            await self._state.write(lease, writes)
        if new:
            self._recorded_until_s = new[-1].starts_at_s

    def _unrecorded(self) -> list[Observation]:
        past = self._provider.history(self._clock.now_s(), self._settings.backfill_max)
        return [o for o in past if o.starts_at_s > self._recorded_until_s + SAME_S]

    def _record(self, observation: Observation) -> CarbonReading:
        """A history entry; what holds now is recorded as it was published."""
        assert self.reading is not None
        if abs(observation.starts_at_s - self.reading.starts_at_s) < SAME_S and self.reading.rung == 0:
            return self.reading
        past = reading_of(observation, self.series, self.reading.fetched_at_s, self.reading.as_of)
        return replace(past, epoch=self.reading.epoch)

    def _heard(self) -> None:
        if self._silent:
            self._silent = ""
            self._log.info("redis answers again")

    def _unheard(self, error: str) -> None:
        if not self._silent:
            self._log.warning("redis does not answer, serving from memory", error=error)
        self._silent = error


def read_epoch(path: Path) -> int:
    """The highest epoch that this disk has seen; 0 when it never saw one.

    Raises:
        errors.StartError: the file holds something else.
    """
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise errors.StartError(
            "not a number", field=str(path), remedy="delete the file if no cluster uses it"
        ) from error


def write_epoch(path: Path, epoch: int) -> None:
    """Remember an epoch, whole or not at all."""
    beside = path.with_suffix(".new")
    beside.write_text(f"{epoch}\n")
    beside.replace(path)
