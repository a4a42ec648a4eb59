"""A planner with somebody who takes notes: every candidate that was measured, in order, with what came of it."""

import math
from collections.abc import Mapping
from typing import Any

from numpy.random import Generator

from trefoil.core.brains import Candidate, Decision, Measurement, Planner, PlanView


class Watched:
    """Passes everything on to a planner and notes each measurement of one family."""

    def __init__(self, planner: Planner, family: str) -> None:
        self._inner: Any = planner
        self._family = family
        self._round = 0
        self._asked: dict[str, Any] = {}
        self.evaluations: list[dict[str, Any]] = []

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """As the planner itself."""
        decision: Decision = self._inner.plan(view, rng)
        return decision

    def asks(self, view: PlanView) -> bool:
        """Whether the planner wants to measure; one that cannot never does."""
        return bool(self._inner.asks(view)) if hasattr(self._inner, "asks") else False

    def ask(self, view: PlanView, rng: Generator) -> Candidate | Decision:
        """As the planner itself; a decision ends a round."""
        step: Candidate | Decision = self._inner.ask(view, rng)
        self._asked = {"at_s": view.now_s, "intensity": view.carbon.intensity_g_per_kwh, "round": self._round}
        if isinstance(step, Decision):
            self._round += 1
        return step

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """As the planner itself, and noted."""
        self._inner.tell(candidate, measurement)
        mine = next((m for m in measurement.measured if m.family == self._family), None)
        known = mine is not None and math.isfinite(mine.latency_ms_p95)
        self.evaluations.append(
            {
                **self._asked,
                "why": candidate.why,
                "spent_s": measurement.spent_s,
                "spent_j": measurement.spent_j,
                "violations": measurement.violations,
                "p95_ms": mine.latency_ms_p95 if known and mine else None,
                "accuracy": mine.accuracy if known and mine else None,
                "joules": mine.joules_per_request if known and mine else None,
            }
        )

    def memory(self) -> Mapping[str, Any]:
        """The planner's."""
        remembered: Mapping[str, Any] = self._inner.memory() if hasattr(self._inner, "memory") else {}
        return remembered

    def recall(self, memory: Mapping[str, Any]) -> None:
        """The planner's."""
        if hasattr(self._inner, "recall"):
            self._inner.recall(memory)
