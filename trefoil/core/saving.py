"""When a saving may be stated: the one rule of every command, report and dashboard.

A run has saved something against another one where each of its families kept its SLO and its accuracy floor, where
both answered equally many requests within the error of their sample, and where their accuracies are equal or have a
price (`trefoil.comparison.saving`). Source: DESIGN section 7.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trefoil.core.objective import FLOOR_TOLERANCE, floor_missed

WORK_TOLERANCE: Final = 1e-3  # of the requests: the last digit of a printed saving
ERRORS: Final = 3.0  # standard errors of the difference of two counts of unanswered requests


@dataclass(frozen=True, slots=True)
class FamilyOutcome:
    """Outcome of a run for one family, or one class of its requests, and what was asked for. None: not known."""

    name: str
    slo_quantile: float
    attainment: float | None
    floor: float
    accuracy: float | None
    arrived: float = 0.0
    answered: float = 0.0

    @property
    def slo_missed(self) -> bool:
        """Whether too few requests were answered in time."""
        return self.attainment is not None and self.attainment < self.slo_quantile

    @property
    def floor_missed(self) -> bool:
        """Whether the accuracy is below its floor by more than the tolerance of every report."""
        return self.accuracy is not None and floor_missed(self.accuracy, self.floor)

    @property
    def misses(self) -> list[str]:
        """What it missed, with the figure and what was asked for."""
        found = []
        if self.slo_missed:
            found.append(f"{self.name} misses its SLO ({self.attainment:.2%} in time, {self.slo_quantile:.2%} asked)")
        if self.floor_missed:
            found.append(f"{self.name} is below its accuracy floor ({self.accuracy:.4f}, {self.floor:.4f} asked)")
        return found


def missed(outcomes: Sequence[FamilyOutcome]) -> str:
    """What a run missed of what was asked for; "" if nothing."""
    return " and ".join(line for one in outcomes for line in one.misses)


def no_saving(ours: Sequence[FamilyOutcome], theirs: Sequence[FamilyOutcome], *, priced: bool) -> str:
    """Why a run has saved nothing against another one; "" where a saving may be stated.

    Args:
        ours: families of the run.
        theirs: families of the other run, in the same order.
        priced: whether accuracy has a price, so that runs of unequal accuracy can be compared.
    """
    if why := missed(ours):
        return why
    for mine, other in zip(ours, theirs, strict=True):
        unanswered = mine.arrived - mine.answered + other.arrived - other.answered
        allowed = max(WORK_TOLERANCE * other.arrived, ERRORS * math.sqrt(max(0.0, unanswered)))
        if abs(mine.answered - other.answered) > allowed:
            return f"unequal work: {mine.answered:,.0f} requests of {mine.name} answered against {other.answered:,.0f}"
        apart = (mine.accuracy or 0.0) - (other.accuracy or 0.0)
        if not priced and abs(apart) > FLOOR_TOLERANCE:
            return f"accuracy of {mine.name} differs by {apart:+.4f} and has no price here"
    return ""
