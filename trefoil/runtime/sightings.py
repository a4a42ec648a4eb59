"""Stamps of other processes, translated into this process's time. So another or a stepped clock makes no fresh value
old, and no old value fresh.

A writer stamps its values by its own clock. Two clocks that agree within AGREE_S count as one. Otherwise a value that
changes between two looks was written in between, whatever its stamp says. That gives the difference of the clocks, by
which all other stamps of this writer are translated.
"""

import math
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.demand import TableAck
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import ACK_TTL_S, State

AGREE_S: Final = 1.0  # by which two clocks may differ, with the time that a value is on its way
FRESH_S: Final = 5.0  # as old may a stamp be at the first look to be taken for one of a clock that agrees
WATCH_S: Final = 3.0  # of sight, after which who has renewed nothing is silent, and its clock no longer in question
GLANCE_S: Final = 1.0  # of sight that one reading is worth at most: between two, Redis may have been away
FIRST_S: Final = 2.0  # of sight before absence counts: workers write every second


@dataclass(slots=True)
class _Known:
    stamp_s: float  # as the writer wrote it
    own_s: float
    offset_s: float | None
    looked_s: float
    since_s: float


class Sightings:
    """Sightings of values that their writers stamp and renew, each by a name. Times are this clock's `now_s`."""

    def __init__(self, clock: Clock, lives_s: float | None = None) -> None:
        """`lives_s`: a value that is not renewed for so long is not found any more; None: it stays forever."""
        self._clock, self._lives_s = clock, lives_s
        self._known: dict[str, _Known] = {}

    def look(self, name: str, stamp_s: float) -> float:
        """Look at a value's stamp; when that was in own time [s].

        It is the stamp itself where the clocks agree, and 0 where there is none, else never later than now.
        """
        if not (stamp_s and math.isfinite(stamp_s)):
            return 0.0
        now_s, known = self._clock.now_s(), self._known.get(name)
        if known is None:
            offset_s = _offset_s(None, stamp_s, now_s - (self._lives_s or FRESH_S), now_s, self._lives_s is not None)
            known = self._known[name] = _Known(stamp_s, stamp_s, offset_s, now_s, now_s)
        elif stamp_s == known.stamp_s:
            known.looked_s = now_s
            return known.own_s
        else:
            known.offset_s = _offset_s(known.offset_s, stamp_s, known.looked_s, now_s, sure=True)
        known.stamp_s, known.looked_s = stamp_s, now_s
        known.own_s = stamp_s if known.offset_s == 0 else min(stamp_s + (known.offset_s or 0.0), now_s)
        return known.own_s

    def offset_s(self, name: str) -> float | None:
        """Seconds to add to a writer's stamps; 0 where its clock agrees; None: it is not known yet, look again."""
        known = self._known.get(name)
        if known is None:
            return 0.0
        if known.offset_s is None and self._clock.now_s() - known.since_s >= WATCH_S:
            return 0.0
        return known.offset_s

    def keep(self, names: Set[str]) -> None:
        """Keep what is known of these writers; the others are gone."""
        for name in self._known.keys() - names:
            del self._known[name]


@dataclass(frozen=True, slots=True)
class _Seen:
    ack: TableAck
    at_s: float  # in seconds of sight
    own: TableAck  # in own time


class LiveAcks:
    """Acknowledgements of live workers, to be read every second or so. `sight_s`: for how long Redis was read.

    An acknowledgement lives ACK_TTL_S after it was written, also one with a longer lifetime in Redis; a worker
    without one is dead. But an emptied Redis has none
    of the living either, and one that stood still has let them expire: who stopped a slice on that would stop it under
    its requests. So a reader remembers what it has seen, and counts its age only while Redis could be read.
    `observed_at_s` is given in the reader's own time; where the worker's clock is another, as of the look before the
    one that found it.
    """

    def __init__(self, state: State, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._sightings = Sightings(clock, ACK_TTL_S)
        self._read_at_s: float | None = None
        self._looked_s = 0.0  # as `now_s`
        self.sight_s = 0.0

    @property
    def blind(self) -> str:
        """Reason why the absence of acknowledgements proves nothing yet, "" when it does."""
        if self.sight_s >= FIRST_S:
            return ""
        return f"acknowledgements have been read for {self.sight_s:.1f} s only, of {FIRST_S:g} s"

    def offset_s(self, dispatcher: str, worker: int) -> float | None:
        """Seconds to add to a worker's stamps to have them in own time; None: no acknowledgement of it was seen."""
        if (dispatcher, worker) not in self._seen:
            return None
        return self._sightings.offset_s(_name((dispatcher, worker)))

    async def read(self) -> tuple[TableAck, ...]:
        """Read the last acknowledgement of every worker that may be alive.

        Raises:
            StateUnavailable: Redis does not answer; nothing ages meanwhile.
        """
        looked_s = self._clock.now_s() - ACK_TTL_S if self._read_at_s is None else self._looked_s
        found = (await self._state.scan(self._state.keys.ack_prefix(), TableAck)).values()
        self._looked_s, now_s = self._clock.now_s(), self._clock.monotonic_s()
        if self._read_at_s is not None:
            self.sight_s += min(GLANCE_S, now_s - self._read_at_s)
        self._read_at_s = now_s
        there = {(ack.dispatcher, ack.worker): ack for ack in found}
        unreadable = self._state.unreadable
        for worker, seen in self._seen.items() if unreadable else ():  # an unreadable value has an owner all the same
            if self._state.keys.ack(*worker) in unreadable:
                there.setdefault(worker, seen.ack)
                self._seen[worker] = replace(seen, at_s=self.sight_s)
        for worker, ack in there.items():
            known = self._seen.get(worker)
            if known is None or known.ack != ack:
                self._seen[worker] = _Seen(ack, self.sight_s, self._in_own_time(ack, looked_s))
        self._seen = {
            worker: seen
            for worker, seen in self._seen.items()
            if worker in there or (not seen.ack.leaving and self.sight_s - seen.at_s < ACK_TTL_S)
        }
        self._sightings.keep({_name(worker) for worker in self._seen})
        last = (self._seen[worker] for worker in sorted(self._seen))
        return tuple(seen.own for seen in last if self.sight_s - seen.at_s < ACK_TTL_S)

    def _in_own_time(self, ack: TableAck, looked_s: float) -> TableAck:
        """An acknowledgement with a time at which it was surely not written yet, where its clock is another one."""
        own_s = self._sightings.look(_name((ack.dispatcher, ack.worker)), ack.observed_at_s)
        return ack if own_s == ack.observed_at_s else replace(ack, observed_at_s=min(own_s, looked_s))


def _name(worker: tuple[str, int]) -> str:
    return f"{worker[0]}:{worker[1]}"


def _offset_s(known_s: float | None, stamp_s: float, from_s: float, until_s: float, sure: bool) -> float | None:
    """Offset of a stamp that was written between two times; the known offset as long as it may be true. A difference of
    clocks cannot be distinguished from a delay. Not `sure` that it was written then: None where clocks seem to
    differ."""
    for offset_s in (0.0, known_s):
        if offset_s is not None and from_s - AGREE_S <= stamp_s + offset_s <= until_s + AGREE_S:
            return offset_s
    return until_s - stamp_s if sure else None
