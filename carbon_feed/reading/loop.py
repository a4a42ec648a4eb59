"""Loop of one zone: hold the lease or follow its holder, poll, publish, keep history, wake watchers.

A zone whose provider is polled has one process that asks, the holder of `feed:<zone>`. The others read what it wrote
and serve that from memory. One of them takes over when the lease is free. What is at hand (a replay, a setting) is read
by each process; the holder writes.
Redis down: the reading is served from memory, and the holder continues to ask as long as no other process can
hold the role. Redis emptied, or the role lost: it is taken again under a higher epoch and everything is rewritten,
within a second of Redis answering.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import structlog

from carbon_feed.core.fallback import FallbackLadder, FallbackView, ProviderAnswer
from carbon_feed.core.history import History
from carbon_feed.core.hour_of_week import HourOfWeekProfile
from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import Cause, Refusal, order_fault, stored_fault
from carbon_feed.history.recorder import LocalRecorder, SharedRecorder
from carbon_feed.providers import LiveProvider, PolledProvider, Provider, ProviderFailure
from carbon_feed.reading.forecasts import ZoneForecasts
from carbon_feed.reading.leader_election import LeaderElection
from carbon_feed.reading.zone_metrics import ZoneMetrics
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Rung, Series, ZoneHealth
from trefoil.core.common import Lease
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock, SteadyClock
from trefoil.runtime.state import Put, State, Write
from trefoil.runtime.telemetry import Metrics

TICK_S: Final = 0.5  # an emptied Redis is noticed by the next renewal, and rewritten well within a second
TICK_MIN_S: Final = 0.002
FORECASTS_S: Final = 0.5


class ZoneLoop:
    """Loop of one zone. `reading` is the one in force."""

    def __init__(
        self,
        settings: CarbonFeedSettings,
        provider: Provider,
        state: State,
        clock: Clock,
        metrics: Metrics,
        secondary: Provider | None = None,
    ) -> None:
        self.series: Series = settings.series
        self.reading: CarbonReading | None = None
        self.speedup = provider.speedup
        self._settings = settings
        self._provider, self._secondary = provider, secondary
        self._state, self._clock = state, clock
        self._steady, self._ahead_s = SteadyClock(clock), 0.0
        self._metrics = ZoneMetrics(metrics, settings)
        self._ladder = FallbackLadder(settings.carry_max_s, settings.static_g_per_kwh, settings.late_max_s)
        self._accepted: CarbonReading | None = None
        self._suspect: Observation | None = None
        self._profile = HourOfWeekProfile()
        self._polled = tuple(one for one in (provider, secondary) if isinstance(one, PolledProvider))
        self._recorder = (
            SharedRecorder(state, settings, provider, self._profile)
            if isinstance(provider, PolledProvider)
            else LocalRecorder(state, settings, provider)
        )
        self.history: History = self._recorder.history
        self.forecasts = ZoneForecasts(settings, provider, self.history, lambda: self.reading, self._metrics)
        self._election = LeaderElection(
            state, clock, f"feed:{settings.zone}", settings.state_dir / f"epoch-{settings.zone}", metrics
        )
        self._written: CarbonReading | None = None
        self._synced_epoch = 0
        """The epoch under which Redis was compared with what we know."""
        self._verify_redis = True
        self._changed = asyncio.Event()
        self._redis_error = ""
        self._stood: CarbonReading | None = None  # in Redis, when it was looked at last
        self._not_believed = ""
        self._log = structlog.get_logger().bind(zone=settings.zone)

    @property
    def leading(self) -> bool:
        """Whether this process holds the zone's lease."""
        return self._election.lease is not None

    async def init(self) -> None:
        """Read once, so that the first caller is answered. Nothing is written, and no provider is called."""
        self._metrics.set_speedup(self.speedup)
        for polled in self._polled:
            polled.restore_usage(self._clock.now_s())
        if self._polled:
            try:
                self._adopt(await self._stored())
            except errors.StateUnavailable as error:
                self._redis_failed(str(error))
        await self._read(self._clock.now_s(), poll=not self._polled)

    async def run(self) -> None:
        """Run until cancelled: ticks, and forecasts in a separate task."""
        refreshing = asyncio.create_task(self._refresh_forecasts(), name=f"forecasts of {self.series.zone}")
        try:
            while True:
                next_tick_at_s = await self.tick()
                if refreshing.done():
                    refreshing.result()  # a bug in it is heard
                now_s = self._clock.now_s()
                await self._clock.sleep(min(TICK_S, max(TICK_MIN_S, next_tick_at_s - now_s)))
        finally:
            refreshing.cancel()
            await asyncio.gather(refreshing, return_exceptions=True)

    async def tick(self) -> float:
        """Run one round; returns when the next one is due at the latest."""
        await self._keep_lease()
        self._note_step()
        now_s = self._clock.now_s()
        next_tick_at_s = await self._read(now_s, poll=self._may_poll())
        lease = self._election.lease
        if lease is not None and self._is_synced() and not self._redis_error:
            await self._publish(lease)
            if self._recorder.backlog:
                next_tick_at_s = now_s
        self._metrics.update_state(now_s, self.reading, self.leading, self._polled)
        return next_tick_at_s

    async def shutdown(self) -> None:
        """Release the lease and close connections."""
        for provider in (self._provider, self._secondary):
            if isinstance(provider, LiveProvider):
                await provider.close()
        await self._election.release()

    async def watch(self) -> AsyncIterator[CarbonReading]:
        """Stream the reading now, then each new one; a slow watcher sees the latest only."""
        seen: CarbonReading | None = None
        while True:
            changed = self._changed
            if self.reading is not None and self.reading != seen:
                seen = self.reading
                yield seen
            else:
                await changed.wait()

    def health(self, now_s: float) -> ZoneHealth:
        """Health of the zone, as this process sees it."""
        made = ZoneHealth(
            series=self.series,
            provider=self._provider.name,
            secondary=self._secondary.name if self._secondary is not None else "",
            leading=self.leading,
            holder=self._election.identity if self.leading else self._election.holder,
            redis_answers=not self._redis_error,
            breaker="closed",
            history_intervals=len(self.history),
        )
        if isinstance(self._provider, PolledProvider):
            made = self._provider.fill_health(made, now_s, asking=self._may_poll())
        reading, forecast, newest = self.reading, self.forecasts.forecast, self.history.newest()
        if reading is None:
            why = f"no reading yet{f' ({made.last_error_cause})' if made.last_error_cause else ''}"
            made = replace(made, rung=int(Rung.EXPIRED), fallback_reason=why, hard_stale=True)
        else:
            made = replace(
                made,
                rung=reading.rung,
                fallback_reason=reading.fallback_reason,
                age_s=max(0.0, now_s - reading.observed_at_s),
                ends_at_s=reading.ends_at_s,
                hard_stale=reading.rung > Rung.SECONDARY or now_s > reading.ends_at_s + self._settings.late_max_s,
                simulated=reading.simulated,
            )
        if forecast is not None:
            made = replace(made, forecast_model=forecast.model, forecast_issued_at_s=forecast.issued_at_s)
        return replace(made, history_newest_s=newest.starts_at_s) if newest is not None else made

    @property
    def _now_key(self) -> str:
        return self._state.keys.carbon_now(self.series)

    def _may_poll(self) -> bool:
        """What is at hand is read by everyone; a provider is asked by the holder."""
        alone = self._settings.polling.ask_without_redis and bool(self._redis_error)
        return not self._polled or self.leading or alone

    def _is_synced(self) -> bool:
        """Whether Redis was compared with what we know since the role is ours."""
        lease = self._election.lease
        return lease is not None and lease.epoch == self._synced_epoch

    def _note_step(self) -> None:
        """Intervals are calendar time, which the feed follows; how long it waits is not."""
        ahead_s = self._steady.calendar_ahead_s()
        step_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
        if step_s:
            self._log.warning("the wall clock was stepped: ages of readings follow it", step_s=round(step_s, 1))
            for polled in self._polled:
                polled.clock_stepped(step_s)

    # What holds now

    async def _read(self, now_s: float, poll: bool) -> float:
        if not poll and not self._redis_error and self._election.holder:
            return now_s + TICK_S  # the holder decides, and we follow
        first = await read_provider(self._provider, now_s, poll)
        view = FallbackView(now_s, self.series, (first,), self.reading, self._accepted, self._suspect, self._profile)
        if (
            self._secondary is not None
            and self._ladder.refusal(first, view) is not None
            and not self._awaits_first_answer()
        ):
            view = replace(view, answers=(first, await read_provider(self._secondary, now_s, poll)))
        if self._polled and self._keeps_current(view, poll):
            return now_s + TICK_S
        decision = self._ladder.decide(view)
        reading, accepted, lease = decision.reading, decision.accepted, self._election.lease
        if reading is not None and reading is not self.reading and lease is not None:
            reading = replace(reading, epoch=lease.epoch)  # as it will be written: watchers are woken once
            accepted = reading if accepted is decision.reading else accepted
        if accepted is not None and accepted is not self._accepted:
            self._profile.observe(accepted.starts_at_s, accepted.intensity_g_per_kwh)
        self._accepted, self._suspect = accepted, decision.suspect
        self._metrics.count_refusals(decision.refusals, (self._provider, self._secondary))
        if reading is not None and reading != self.reading:
            self._put_in_force(reading, decision.why)
        if self.reading is not None and poll:
            self._recorder.record(self.reading, now_s)
        return decision.next_tick_at_s

    def _keeps_current(self, view: FallbackView, poll: bool) -> bool:
        """Whether the reading in force stays: no provider may be called, or the first answer is on its way."""
        reading, now_s = view.last, view.now_s
        if reading is None or reading.rung > Rung.SECONDARY or now_s < reading.starts_at_s:
            return False
        if not poll and now_s < reading.ends_at_s:
            return True
        silent = all(answer.observation is None for answer in view.answers)
        holds = now_s <= reading.ends_at_s + self._settings.late_max_s
        return silent and holds and (not poll or self._awaits_first_answer())

    def _awaits_first_answer(self) -> bool:
        return any(one.awaits_first_answer for one in self._polled)

    def _adopt(self, stored: CarbonReading | None) -> None:
        """Serve what the zone's holder wrote."""
        if stored is None or stored.simulated:  # a replay of the same name was here before
            return
        if stored.rung <= Rung.SECONDARY:
            self._accepted = stored
        held, stood, self._stood = self.reading, self._stood, stored
        if held is None or (stored.epoch, stored.as_of) > (held.epoch, held.as_of):
            self._put_in_force(stored, "as the zone's holder says")
        elif stored.epoch == held.epoch and stored == stood and stored != held:  # a lie does not stand that long
            self._put_in_force(stored, "as the zone's holder says again")

    async def _stored(self) -> CarbonReading | None:
        """What the zone's holder wrote; None where it is nothing that it can have written. Raises like `State.get`."""
        stored = await self._state.get(self._now_key, CarbonReading)
        if stored is None:
            return None
        as_of = self.reading.as_of if self.reading is not None else 0
        why = stored_fault(stored, self._clock.now_s())
        why = why or order_fault(stored, await self._election.counted_epoch(), as_of)
        if why and why != self._not_believed:
            self._log.warning("the reading in Redis is left out", key=self._now_key, why=why)
        self._not_believed = why
        return None if why else stored

    def _put_in_force(self, reading: CarbonReading, why: str) -> None:
        """Put a reading in force in this process: log it, count it, wake watchers."""
        is_new = self.reading is None or self.reading.as_of != reading.as_of
        self.reading = reading
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if is_new:
            self._metrics.count_reading(reading, why)

    # Redis

    async def _keep_lease(self) -> None:
        """Hold the role, or follow its holder and take the role when it is free."""
        if not self._election.check_due():
            return
        self._verify_redis = True
        try:
            if not await self._election.renew():
                free = await self._election.is_free()
                await self._follow()
                if free:
                    await self._election.acquire()
            lease = self._election.lease
            if lease is not None and lease.epoch != self._synced_epoch:
                await self._take_over(lease)
            self._redis_answered()
        except errors.StateUnavailable as error:
            self._redis_failed(str(error))
        except errors.Fenced as error:
            self._fenced(error)

    async def _follow(self) -> None:
        if not self._polled:
            return
        await self._recorder.read_new_entries(self._clock.now_s())
        self._adopt(await self._stored())
        if self._election.holder:
            await self.forecasts.follow(self._state, self._clock.now_s())

    async def _take_over(self, lease: Lease) -> None:
        """Go on from what Redis holds: with everything that a successor or an emptied Redis needs."""
        now_s = self._clock.now_s()
        for polled in self._polled:
            polled.start_leading(now_s, lease.epoch)
        stored = await self._stored()
        if self.reading is not None:
            as_of = max(self.reading.as_of, stored.as_of + 1 if stored is not None else 0)
            self._put_in_force(replace(self.reading, epoch=lease.epoch, as_of=as_of), "role taken")
        await self._recorder.start_leading(lease, self.reading, now_s)
        if self._accepted is None and isinstance(self._recorder, SharedRecorder):
            self._accepted = self._recorder.newest()
        self._written = None
        self.forecasts.forget_written()
        self._synced_epoch = lease.epoch
        self._log.info("leased", epoch=lease.epoch)

    async def _publish(self, lease: Lease) -> None:
        try:
            await self._write(lease)
        except errors.StateUnavailable as error:
            self._recorder.mark_uncertain()
            self._written = None
            self.forecasts.forget_written()
            self._redis_failed(str(error))
        except errors.Fenced as error:
            self._fenced(error)

    async def _write(self, lease: Lease) -> None:
        """Bring Redis up to what this process knows. Twice a second it is looked whether it still is."""
        if self.reading is None:
            return
        if self.reading.epoch != lease.epoch:
            self._put_in_force(replace(self.reading, epoch=lease.epoch), "role taken")
        if self._verify_redis:
            await self._recorder.check_stream()
        if self._recorder.is_uncertain:
            await self._recorder.start_leading(lease, self.reading, self._clock.now_s())
        if self._verify_redis:
            stored = await self._state.get(self._now_key, CarbonReading)
            if stored is None or codec.encode(stored) != codec.encode(self.reading):
                self._written = None
            self._verify_redis = False
        writes: list[Write] = []
        if self._written != self.reading:
            writes.append(Put(self._now_key, self.reading))
        writes += self.forecasts.writes(self._state.keys)
        appends = self._recorder.appends(lease.epoch)
        if not writes and not appends:
            return
        written = self.reading
        ids = await self._state.write(lease, [*writes, *appends])
        self._recorder.acknowledge(ids[len(writes) :])
        self._written = written

    async def _refresh_forecasts(self) -> None:
        """Forecasts, scores, and what the provider says of the past: while this process leads."""
        while True:
            if self._may_poll() and (not self.leading or self._is_synced()):
                await self.forecasts.refresh(self._clock.now_s())
            await self._clock.sleep(FORECASTS_S)

    def _fenced(self, error: errors.Fenced) -> None:
        self._election.forget()  # taken again in the next round
        self._log.warning("fenced", error=str(error))

    def _redis_answered(self) -> None:
        if self._redis_error:
            self._redis_error = ""
            self._log.info("redis answers again")

    def _redis_failed(self, error: str) -> None:
        if not self._redis_error:
            self._log.warning("redis does not answer, serving from memory", error=error)
        self._redis_error = error


async def read_provider(provider: Provider, now_s: float, poll: bool = True) -> ProviderAnswer:
    """Read a provider's answer for now; a polled one may be looked at without a question."""
    try:
        if not poll and isinstance(provider, PolledProvider):
            return ProviderAnswer(provider.name, observation=provider.peek(now_s))
        return ProviderAnswer(provider.name, observation=await provider.read(now_s))
    except ProviderFailure as failure:
        return ProviderAnswer(provider.name, refusal=failure.refusal)
    except errors.Unavailable as error:
        return ProviderAnswer(provider.name, refusal=Refusal(Cause.UNAVAILABLE, str(error)))
