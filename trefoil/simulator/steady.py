"""What a flow that stays as it is says again and again: made once, as long as its intervals are the same objects.

An engine that answers a step from memory gives an interval with the counts of the one before (`Interval.at`). What is
made of them is then the same too, and is the same object, so that whoever gets it can tell without comparing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from trefoil.core.demand import LoadCell, LoadWindow
from trefoil.core.fleet import SliceKey
from trefoil.simulator.serving import Interval, joined, load_cells

Work = dict[SliceKey, tuple[str, float]]


@dataclass(slots=True)
class Steady:
    """The intervals since the last load window, and the last of everything with what it was made of."""

    _since: dict[str, list[Interval]]
    _worked: tuple[list[Any], Work] = field(default_factory=lambda: ([], {}))
    _reported: tuple[list[Any], tuple[LoadCell, ...]] = ([], ())

    def work(self, found: Mapping[str, Interval]) -> Work:
        """Family and active joules of each slice."""
        parts = [one.joules for one in found.values()]
        if not _identical(parts, self._worked[0]):
            self._worked = parts, {k: (f, joules) for f, one in found.items() for k, joules in one.joules.items()}
        return self._worked[1]

    def add(self, found: Mapping[str, Interval]) -> None:
        """Go on with an interval of each family."""
        for family, one in found.items():
            self._since[family].append(one)

    def window(self, items: Mapping[str, float], seq: int, now_s: float) -> LoadWindow:
        """The load window of the intervals since the last one."""
        found = {family: joined(parts, now_s) for family, parts in self._since.items()}
        self._since = {family: [] for family in found}
        parts = [one.latency for one in found.values()]
        if not _identical(parts, self._reported[0]):
            self._reported = parts, load_cells(found, items)
        starts_s = min((one.starts_s for one in found.values()), default=now_s)
        return LoadWindow("simulated", 0, seq, starts_s, now_s, cells=self._reported[1])


def _identical(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))
