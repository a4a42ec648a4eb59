"""Recording of accepted readings in carbon:history: each once, none missing, whichever process writes.

Two kinds. What is at hand (a replay, a setting) knows its own past: the stream is brought up to it, and one of another
replay is replaced. Of a zone whose provider is polled the stream is what all processes know together: everyone reads
it, the holder appends, and a successor continues after its newest entry. A stream that was lost is written
again from memory. A write with an unknown outcome is looked up before it is repeated.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import structlog

from carbon_feed.core.history import AddResult, History
from carbon_feed.core.hour_of_week import HourOfWeekProfile
from carbon_feed.core.observation import Observation, reading_of
from carbon_feed.core.validation import check_content, stored_fault
from carbon_feed.providers import Provider
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core.carbon import CarbonReading, Rung, Series
from trefoil.core.common import Lease
from trefoil.runtime.state import Append, Delete, State

LOG = structlog.get_logger()
SAME_S: Final = 1e-3  # two interval starts that differ by less are one
PAGE: Final = 500  # entries that are read or written at once
HISTORY_MAX: Final = 115_200  # entries of carbon:history: 400 days of five minutes
BACKFILL_MAX: Final = 2_000  # entries written at once when the history was lost
FIRST_LOOK: Final = 4
LOOK_GROWS: Final = 4


class _HistoryStream:
    """What both kinds share: the queue of what the stream lacks."""

    def __init__(self, state: State, settings: CarbonFeedSettings, pending_max: int) -> None:
        self._state = state
        self._key = state.keys.carbon_history(settings.series)
        self._pending: deque[CarbonReading] = deque(maxlen=pending_max)
        self._until_s = float("-inf")
        """Start of the newest interval that is in the stream or about to be."""
        self._after_id = "0"
        self._uncertain = False

    def appends(self, epoch: int) -> list[Append]:
        """Appends of the next part that the stream lacks."""
        assert not self._uncertain, "`start_leading` looks first"
        part = [self._pending[index] for index in range(min(PAGE, len(self._pending)))]
        return [Append(self._key, replace(reading, epoch=epoch), HISTORY_MAX) for reading in part]

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Acknowledge that the first of `appends` are in the stream."""
        for at in ids:
            self._pending.popleft()
            self._after_id = at

    def mark_uncertain(self) -> None:
        """Note that the outcome of the last appends is unknown."""
        self._uncertain = True

    async def check_stream(self) -> None:
        """Become uncertain where the stream is empty, though this process has seen entries in it.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        if self._after_id != "0" and not await self._state.tail(self._key, CarbonReading, 1):
            self._after_id = "0"
            self.mark_uncertain()

    @property
    def is_uncertain(self) -> bool:
        """Whether the stream must be looked at before more is written."""
        return self._uncertain

    @property
    def backlog(self) -> bool:
        """Whether more waits than is written at once."""
        return len(self._pending) > PAGE


class LocalRecorder(_HistoryStream):
    """Recorder of what is at hand: a replay or a setting."""

    def __init__(self, state: State, settings: CarbonFeedSettings, provider: Provider) -> None:
        super().__init__(state, settings, BACKFILL_MAX)
        self.history = History(settings.series, HISTORY_MAX)
        self._provider = provider
        self._known_until_s = float("-inf")

    async def read_new_entries(self, now_s: float) -> None:
        """Read nothing: what others write is not new to a source at hand."""

    async def start_leading(self, lease: Lease, reading: CarbonReading | None, now_s: float) -> None:
        """Keep a stored history that ours continues; replace that of another replay. Raises like `State.write`."""
        kept = [stored for _, stored in await self._state.tail(self._key, CarbonReading, BACKFILL_MAX)]
        ours = [o for o in self._provider.history(now_s, BACKFILL_MAX) if o.record]
        self._uncertain = False
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
            self._queue([_as_published(o, reading) for o in missing])

    def record(self, reading: CarbonReading, now_s: float) -> None:
        """Record what is in force now; each tick."""
        new = [o for o in new_observations(self._provider, now_s, self._known_until_s, BACKFILL_MAX) if o.record]
        made = [_as_published(observation, reading) for observation in new]
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


class SharedRecorder(_HistoryStream):
    """Recorder of a zone whose provider is polled by one of many processes."""

    def __init__(
        self, state: State, settings: CarbonFeedSettings, provider: Provider, profile: HourOfWeekProfile
    ) -> None:
        super().__init__(state, settings, HISTORY_MAX)
        self.history: History = ObservedHistory(settings.series, HISTORY_MAX, self._append_entry)
        self._provider = provider
        self._profile = profile
        self._entries: deque[CarbonReading] = deque(maxlen=BACKFILL_MAX)
        """The end of the stream, to write it again when it is lost."""
        self._replay_found = False
        self.set_aside = 0
        """Entries that were left out: no feed can have written them."""
        self._recorded: CarbonReading | None = None

    async def read_new_entries(self, now_s: float) -> None:
        """Read the entries that others have written; what no feed can have written is left out.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        while True:
            found = await self._state.stream(self._key, CarbonReading, self._after_id, PAGE)
            for at, reading in found:
                self._apply_entry(reading, now_s)
                self._after_id = at
            if len(found) < PAGE:
                self._uncertain = False
                return
            await asyncio.sleep(0)  # others are answered in between

    async def start_leading(self, lease: Lease, _reading: CarbonReading | None, now_s: float) -> None:
        """Go on behind the stream's end, or write again what was lost. Raises like `State.write`."""
        await self.read_new_entries(now_s)
        if self._replay_found:
            await self._state.write(lease, [Delete(self._key)])
            self._replay_found = False
        if self._entries and not await self._state.tail(self._key, CarbonReading, 1):
            self._pending = deque(self._entries, maxlen=HISTORY_MAX)

    def record(self, reading: CarbonReading, now_s: float) -> None:
        """Record what this process has accepted; also intervals of its answer that are not recorded yet."""
        if reading is self._recorded or reading.rung > Rung.SECONDARY:
            return
        self._recorded = reading
        if reading.rung == Rung.NORMAL and self._until_s > float("-inf"):
            for o in new_observations(self._provider, now_s, self._until_s, BACKFILL_MAX):
                if (
                    o.starts_at_s < reading.starts_at_s - SAME_S
                    and o.record
                    and check_content(o, reading.series) is None
                ):
                    self._accept(_as_published(o, reading))
        self._accept(reading)

    def newest(self) -> CarbonReading | None:
        """Reading of the newest interval."""
        return max(self._entries, key=lambda reading: (reading.starts_at_s, reading.as_of), default=None)

    def _accept(self, reading: CarbonReading) -> None:
        fresh = reading.starts_at_s > self._until_s + SAME_S
        if (
            self.history.add(reading) is AddResult.STAND_IN and fresh
        ):  # a provider's forecast of now is what was planned by
            self._append_entry(reading)

    def _append_entry(self, reading: CarbonReading) -> None:
        """One more entry."""
        self._pending.append(reading)
        self._entries.append(reading)
        self._until_s = max(self._until_s, reading.starts_at_s)

    def _apply_entry(self, reading: CarbonReading, now_s: float) -> None:
        if reading.simulated:
            self._replay_found = True
            return
        if why := stored_fault(reading, now_s):
            self.set_aside += 1
            if self.set_aside.bit_count() == 1:  # 1, 2, 4, ...: a spoilt stream does not fill the log
                LOG.warning("an entry is left out", key=self._key, why=why, left_out=self.set_aside)
            return
        key = _entry_key(reading)
        if self._pending and any(_entry_key(waiting) == key for waiting in self._pending):
            self._pending = deque((w for w in self._pending if _entry_key(w) != key), maxlen=HISTORY_MAX)
            return
        fresh = reading.starts_at_s > self._until_s + SAME_S
        assert isinstance(self.history, ObservedHistory)
        kept = self.history.add_from_stream(reading)
        if fresh:
            self._profile.observe(reading.starts_at_s, reading.intensity_g_per_kwh)
        if fresh or kept in (AddResult.NEW, AddResult.REVISION):
            self._entries.append(reading)
            self._until_s = max(self._until_s, reading.starts_at_s)


class ObservedHistory(History):
    """History that reports what is new to it, unless it came from the stream that would be written to."""

    def __init__(self, series: Series, intervals_max: int, on_change: Callable[[CarbonReading], None]) -> None:
        super().__init__(series, intervals_max)
        self._on_change = on_change

    def add(self, reading: CarbonReading) -> AddResult:
        kept = super().add(reading)
        if kept in (AddResult.NEW, AddResult.REVISION):
            self._on_change(reading)
        return kept

    def add_from_stream(self, reading: CarbonReading) -> AddResult:
        """Add a reading that the stream holds already."""
        return super().add(reading)


def new_observations(provider: Provider, now_s: float, until_s: float, count_max: int) -> list[Observation]:
    """Observations of intervals that start later, oldest first: the provider is asked for a few, then for more."""
    count = FIRST_LOOK if until_s > float("-inf") else count_max
    while True:
        found = provider.history(now_s, count)
        if count >= count_max or len(found) < count or found[0].starts_at_s <= until_s + SAME_S:
            return [o for o in found if o.starts_at_s > until_s + SAME_S]
        count = min(count_max, count * LOOK_GROWS)


def _as_published(observation: Observation, reading: CarbonReading) -> CarbonReading:
    """A history entry; what holds now is recorded as it was published."""
    if abs(observation.starts_at_s - reading.starts_at_s) < SAME_S and reading.rung == Rung.NORMAL:
        return reading
    past = reading_of(observation, reading.series, reading.fetched_at_s, reading.as_of)
    return replace(past, epoch=reading.epoch)


def _entry_key(reading: CarbonReading) -> tuple[Any, ...]:
    """Identity of an entry, whichever process wrote it."""
    return (
        round(reading.starts_at_s, 3),
        round(reading.ends_at_s, 3),
        reading.intensity_g_per_kwh,
        reading.quality,
        reading.provider,
        round(reading.fetched_at_s, 3),
    )
