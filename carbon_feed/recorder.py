"""From what is accepted to carbon:history, and back: nothing twice, nothing left out, whoever writes.

Two kinds. What is at hand (a replay, a setting) knows its own past: the stream is brought up to it, and one of another
replay is replaced. Of a zone whose provider is polled the stream is what all processes know together: everyone reads
it, the holder appends, and whoever takes over goes on behind its newest entry. A stream that was lost is written again
from memory. A write whose outcome nobody heard is looked up before anything is repeated.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from carbon_feed.core.feed import Observation, reading_of
from carbon_feed.core.history import History, Kept
from carbon_feed.core.profile import HourOfWeek
from carbon_feed.core.validate import check_content
from carbon_feed.providers import Provider
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core.carbon import CarbonReading, Rung, Series
from trefoil.core.common import Lease
from trefoil.runtime.state import Append, Delete, State

SAME_S: Final = 1e-3  # two interval starts that differ by less are one
PAGE: Final = 500  # entries that are read or written at once
FIRST_LOOK: Final = 4
LOOK_GROWS: Final = 4


class _Stream:
    """What both kinds share: the queue of what the stream lacks."""

    def __init__(self, state: State, settings: CarbonFeedSettings, pending_max: int) -> None:
        self._state = state
        self._key = state.keys.carbon_history(settings.series)
        self._backfill_max, self._maxlen = settings.backfill_max, settings.history_max
        self._pending: deque[CarbonReading] = deque(maxlen=pending_max)
        self._until_s = float("-inf")
        """Start of the newest interval that is in the stream or about to be."""
        self._after_id = "0"
        self._unsure = False

    def appends(self, epoch: int) -> list[Append]:
        """The next part of what the stream lacks."""
        assert not self._unsure, "`taken` looks first"
        part = [self._pending[index] for index in range(min(PAGE, len(self._pending)))]
        return [Append(self._key, replace(reading, epoch=epoch), self._maxlen) for reading in part]

    def written(self, ids: Sequence[str]) -> None:
        """The first of `appends` are in the stream."""
        for at in ids:
            self._pending.popleft()
            self._after_id = at

    def unsure(self) -> None:
        """Nobody knows whether the last appends are in the stream."""
        self._unsure = True

    @property
    def lost_track(self) -> bool:
        """Whether the stream must be looked at before more is written."""
        return self._unsure

    @property
    def backlog(self) -> bool:
        """Whether more waits than is written at once."""
        return len(self._pending) > PAGE


class AtHand(_Stream):
    """A replay or a setting."""

    def __init__(self, state: State, settings: CarbonFeedSettings, provider: Provider) -> None:
        super().__init__(state, settings, settings.backfill_max)
        self.history = History(settings.series, settings.history_max)
        self._provider = provider
        self._known_until_s = float("-inf")

    async def catch_up(self) -> None:
        """Nothing that others write is new to it."""

    async def taken(self, lease: Lease, reading: CarbonReading | None, now_s: float) -> None:
        """Keep a stored history that ours continues; replace that of another replay. Raises like `State.write`."""
        kept = [stored for _, stored in await self._state.tail(self._key, CarbonReading, self._backfill_max)]
        ours = [o for o in self._provider.history(now_s, self._backfill_max) if o.record]
        self._unsure = False
        if ours and not any(o.simulated for o in ours):
            if any(stored.simulated for stored in kept):  # a replay of the same name was here before
                await self._state.write(lease, [Delete(self._key)])
                kept = []
            known = [stored.starts_at_s for stored in kept]
            fits = bool(kept)
        else:
            stored_at = [stored.starts_at_s for stored in kept]
            starts = {round(o.starts_at_s / SAME_S) for o in ours}
            known = [at_s for at_s in stored_at if round(at_s / SAME_S) in starts]
            fits = bool(known) and len(known) == len(stored_at)
            if ours and not fits:
                await self._state.write(lease, [Delete(self._key)])
        self._until_s = max(known) if fits else float("-inf")
        self._pending.clear()
        if reading is not None:
            missing = (o for o in ours if o.starts_at_s > self._until_s + SAME_S)
            self._queue([_record(o, reading) for o in missing])

    def tell(self, reading: CarbonReading, now_s: float) -> None:
        """What is in force now; each tick."""
        new = [o for o in unknown(self._provider, now_s, self._known_until_s, self._backfill_max) if o.record]
        made = [_record(observation, reading) for observation in new]
        for one in made:
            self.history.add(one)
            self._known_until_s = one.starts_at_s
        self._queue([one for one in made if one.starts_at_s > self._until_s + SAME_S])
        if reading.rung == Rung.SECONDARY and reading.starts_at_s > self._until_s + SAME_S:
            self.history.add(reading)
            self._queue([reading])

    def _queue(self, readings: Sequence[CarbonReading]) -> None:
        self._pending.extend(readings)
        if readings:
            self._until_s = readings[-1].starts_at_s


class Shared(_Stream):
    """A zone whose provider is polled by one of many."""

    def __init__(self, state: State, settings: CarbonFeedSettings, provider: Provider, profile: HourOfWeek) -> None:
        super().__init__(state, settings, settings.history_max)
        self.history: History = Heard(settings.series, settings.history_max, self._said)
        self._provider = provider
        self._profile = profile
        self._entries: deque[CarbonReading] = deque(maxlen=settings.backfill_max)
        """The end of the stream, to write it again when it is lost."""
        self._foreign = False
        self._told: CarbonReading | None = None

    async def catch_up(self) -> None:
        """Hear what others have written.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        while True:
            found = await self._state.stream(self._key, CarbonReading, self._after_id, PAGE)
            for at, reading in found:
                self._hear(reading)
                self._after_id = at
            if len(found) < PAGE:
                self._unsure = False
                return
            await asyncio.sleep(0)  # others are answered in between

    async def taken(self, lease: Lease, _reading: CarbonReading | None, _now_s: float) -> None:
        """The stream is ours: go on behind its end, or write again what was lost. Raises like `State.write`."""
        await self.catch_up()
        if self._foreign:
            await self._state.write(lease, [Delete(self._key)])
            self._foreign = False
        if self._entries and not await self._state.tail(self._key, CarbonReading, 1):
            self._pending = deque(self._entries, maxlen=self._maxlen)

    def tell(self, reading: CarbonReading, now_s: float) -> None:
        """What this process has accepted; also what its answer said of intervals that nobody recorded."""
        if reading is self._told or reading.rung > Rung.SECONDARY:
            return
        self._told = reading
        if reading.rung == Rung.NORMAL and self._until_s > float("-inf"):
            for o in unknown(self._provider, now_s, self._until_s, self._backfill_max):
                if (
                    o.starts_at_s < reading.starts_at_s - SAME_S
                    and o.record
                    and check_content(o, reading.series) is None
                ):
                    self._accept(_record(o, reading))
        self._accept(reading)

    def newest(self) -> CarbonReading | None:
        """The reading of the newest interval."""
        return max(self._entries, key=lambda reading: (reading.starts_at_s, reading.as_of), default=None)

    def _accept(self, reading: CarbonReading) -> None:
        fresh = reading.starts_at_s > self._until_s + SAME_S
        if self.history.add(reading) is Kept.STAND_IN and fresh:  # a provider's forecast of now is what was planned by
            self._said(reading)

    def _said(self, reading: CarbonReading) -> None:
        """One more entry."""
        self._pending.append(reading)
        self._entries.append(reading)
        self._until_s = max(self._until_s, reading.starts_at_s)

    def _hear(self, reading: CarbonReading) -> None:
        if reading.simulated:
            self._foreign = True
            return
        mark = _mark(reading)
        if self._pending and any(_mark(waiting) == mark for waiting in self._pending):
            self._pending = deque((w for w in self._pending if _mark(w) != mark), maxlen=self._maxlen)
            return
        fresh = reading.starts_at_s > self._until_s + SAME_S
        assert isinstance(self.history, Heard)
        kept = self.history.hear(reading)
        if fresh:
            self._profile.tell(reading.starts_at_s, reading.intensity_g_per_kwh)
        if fresh or kept in (Kept.NEW, Kept.REVISION):
            self._entries.append(reading)
            self._until_s = max(self._until_s, reading.starts_at_s)


class Heard(History):
    """A history that says what is new to it, unless it came from where that would be written to."""

    def __init__(self, series: Series, intervals_max: int, said: Callable[[CarbonReading], None]) -> None:
        super().__init__(series, intervals_max)
        self._told_to = said

    def add(self, reading: CarbonReading) -> Kept:
        kept = super().add(reading)
        if kept in (Kept.NEW, Kept.REVISION):
            self._told_to(reading)
        return kept

    def hear(self, reading: CarbonReading) -> Kept:
        """Keep what the stream says."""
        return super().add(reading)


def unknown(provider: Provider, now_s: float, until_s: float, count_max: int) -> list[Observation]:
    """What a provider knows of intervals that start later, oldest first: it is asked for a few, then for more."""
    count = FIRST_LOOK if until_s > float("-inf") else count_max
    while True:
        found = provider.history(now_s, count)
        if count >= count_max or len(found) < count or found[0].starts_at_s <= until_s + SAME_S:
            return [o for o in found if o.starts_at_s > until_s + SAME_S]
        count = min(count_max, count * LOOK_GROWS)


def _record(observation: Observation, reading: CarbonReading) -> CarbonReading:
    """A history entry; what holds now is recorded as it was published."""
    if abs(observation.starts_at_s - reading.starts_at_s) < SAME_S and reading.rung == Rung.NORMAL:
        return reading
    past = reading_of(observation, reading.series, reading.fetched_at_s, reading.as_of)
    return replace(past, epoch=reading.epoch)


def _mark(reading: CarbonReading) -> tuple[Any, ...]:
    """What tells an entry from others, whoever wrote it down."""
    return (
        round(reading.starts_at_s, 3),
        round(reading.ends_at_s, 3),
        reading.intensity_g_per_kwh,
        reading.quality,
        reading.provider,
        round(reading.fetched_at_s, 3),
    )
