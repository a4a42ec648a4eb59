"""Arrivals of each family over up to a day, one number a step: what load windows forget, kept for forecasters.

Memory: 4 bytes a step, so 345,600 bytes a family for 24 h of seconds; none where no forecaster asks for a past.
A step without a count, as while no controller ran, is a hole. A forecaster sees what came after the last hole.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Ring = npt.NDArray[np.float32]


class ArrivalHistory:
    """History of whole steps, counted from time 0; the same steps are known of all families."""

    def __init__(self, steps: int) -> None:
        """`steps`: how many are kept."""
        self.steps = steps
        self._rings: dict[str, Ring] = {}
        self._first = self._end = -1  # seen by this process: from the first step to before the end

    @property
    def end(self) -> int:
        """The step after the last one that is kept; -1 before any."""
        return self._end

    def advance(self, first: int, end: int) -> None:
        """Note that all steps from `first`, the first that was seen whole, to before `end` are over."""
        if self._first < 0:
            self._first = self._end = first
        passed = np.arange(max(self._end, end - self.steps), end)
        for ring in self._rings.values():
            ring[passed % self.steps] = 0.0
        self._end = max(self._end, end)

    def add(self, family: str, step: int, arrived: float) -> None:
        """Add arrivals to a step that is over; one that is not kept any more, or was not seen whole, is left out."""
        if max(self._first, self._end - self.steps) <= step < self._end:
            self._ring(family)[step % self.steps] += arrived

    def restore(self, family: str, counts: Mapping[int, float]) -> None:
        """Restore counts by step that another process wrote down; where both know one, the larger is right."""
        ring = self._ring(family)
        for step, arrived in counts.items():
            if self._end - self.steps <= step < self._end:
                ring[step % self.steps] = np.fmax(ring[step % self.steps], arrived)

    def since_hole(self, family: str, bridged: int = 0) -> Ring:
        """Counts of the steps after the last hole, oldest first, up to `end`.

        Args:
            bridged: a hole of at most so many steps is none; the count before it is taken for each of them.
        """
        ring = np.roll(self._ring(family), -(self._end % self.steps))
        places = np.arange(self.steps)
        known = np.maximum.accumulate(np.where(np.isnan(ring), -1, places))
        holes = np.flatnonzero((known < 0) | (places - known > bridged))
        return ring[known[holes[-1] + 1 if holes.size else 0 :]]

    def _ring(self, family: str) -> Ring:
        """Its steps; without requests those that were seen are zeros."""
        if family not in self._rings:
            seen = np.arange(max(self._first, self._end - self.steps), self._end)
            ring = self._rings[family] = np.full(self.steps, np.nan, dtype=np.float32)
            ring[seen % self.steps] = 0.0
        return self._rings[family]
