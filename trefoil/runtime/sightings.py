"""Stamps of other processes in this process's own time, so that neither a clock that differs nor one that is stepped
makes a value old, or one that nobody renews look fresh.

A writer stamps what it renews by its own clock. Two clocks that agree within AGREE_S are taken for one. Where they do
not, what changes under a reader's eyes was written between this look and the last one, whatever its stamp says: the
difference is learnt from that, and with it every other stamp of the same writer can be read.
"""

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from trefoil.runtime.clock import Clock

AGREE_S: Final = 1.0  # by which two clocks may differ, with the time that a value is on its way
FRESH_S: Final = 5.0  # as old may a stamp be at the first look to be taken for one of a clock that agrees
WATCH_S: Final = 3.0  # of sight, after which who has renewed nothing is silent, and its clock no longer in question


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
        """`lives_s`: a value that is not renewed for so long is not found any more; None: it stays for ever."""
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


def _offset_s(known_s: float | None, stamp_s: float, from_s: float, until_s: float, sure: bool) -> float | None:
    """Offset of a stamp that was written between two times, the one known as long as it may be true; no difference of
    clocks is told from a value's way. Not `sure` that it was written then: None where clocks seem to differ."""
    for offset_s in (0.0, known_s):
        if offset_s is not None and from_s - AGREE_S <= stamp_s + offset_s <= until_s + AGREE_S:
            return offset_s
    return until_s - stamp_s if sure else None
