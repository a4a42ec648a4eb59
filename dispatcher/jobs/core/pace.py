"""How many items a second of each job may run now: what a plan of jobs says, or as many as idle slices allow. Pure."""

import math
from dataclasses import dataclass
from typing import Final, Protocol

BURST_S: Final = 1.0  # of its rate, that a job which could not run makes up for at once


class Pace(Protocol):
    """Rates of jobs."""

    def items_per_s(self, job: str, now_s: float) -> float:
        """Most items a second of a job from now on [UTC s]; infinite = as many as idle slices allow."""
        ...


class AtOnce:
    """Rates without a plan: each job runs as soon as slices are idle."""

    def items_per_s(self, job: str, now_s: float) -> float:
        """Infinite."""
        return math.inf


@dataclass(slots=True)
class Allowance:
    """Items that a job may begin now, by its rate."""

    items: float = 0.0
    at_s: float = -math.inf

    def refill(self, items_per_s: float, now_s: float) -> float:
        """Items that may begin by a monotonic time."""
        if math.isinf(items_per_s):
            self.items = math.inf
        else:
            held = 0.0 if math.isinf(self.items) else self.items
            passed_s = min(BURST_S, now_s - self.at_s)
            self.items = min(max(1.0, items_per_s * BURST_S), held + items_per_s * passed_s)
        self.at_s = now_s
        return self.items

    def spend(self, items: int) -> None:
        """Begin items."""
        self.items -= items
