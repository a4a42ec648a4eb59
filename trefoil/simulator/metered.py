"""What the simulated controller knows of energy: the books, at once and without error."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from controller.core.measuring import Cost
from trefoil.simulator.books import Books
from trefoil.simulator.plant import Plant

Marks = dict[str, tuple[float, float]]


class Metered:
    """A meter that is never late. Between `hold` of a time and of inf it keeps what was noted since; else the last."""

    def __init__(self, books: Books, plant: Plant, measure_s: float) -> None:
        self._books, self._plant, self._measure_s = books, plant, measure_s
        self._at_s: list[float] = []
        self._marks: list[Marks] = []
        self._from_s = math.inf

    @property
    def unallocated_j(self) -> float:
        """What moves, sleep and devices without any serving slice have drawn."""
        return sum(machine.unallocated_j for machine in self._plant.machines.values())

    def grams_per_request(self, families: Iterable[str], now_s: float) -> dict[str, float | None]:
        """Over the last `measure_s`."""
        return self._books.grams_per_request(self._measure_s)

    def metered_until_s(self, devices: Sequence[str]) -> float:
        """All of it is known."""
        return math.inf

    def note(self, now_s: float) -> None:
        """Note what everything has cost until now."""
        self._at_s.append(now_s)
        self._marks.append(self._books.marks())
        self._forget()

    def hold(self, from_s: float) -> None:
        """Keep what is needed to tell the cost from a time on; inf: nothing."""
        self._from_s = from_s
        self._forget()

    def _forget(self) -> None:
        older = max(0, bisect_right(self._at_s, self._from_s) - 1)
        del self._at_s[:older], self._marks[:older]

    def cost(self, families: Sequence[str], starts_s: float, ends_s: float, pue: float) -> Cost:
        """What all devices drew between two times that were noted."""
        first, last = self._mark(starts_s), self._mark(ends_s)
        joules = {family: last[family][0] - first[family][0] for family in families}
        return Cost(joules, {family: last[family][1] - first[family][1] for family in families})

    def _mark(self, at_s: float) -> Marks:
        """The note of a time, or the last one before it."""
        return self._marks[max(0, bisect_right(self._at_s, at_s) - 1)]
