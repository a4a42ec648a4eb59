"""Ports of an exploration: what it asks of what is around it, and of the control core that it belongs to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from controller.explore.core.exploration_state import Evaluation
from controller.observe.core.triggers import Trigger
from controller.rollout.core.ports import CorePorts
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannerAnswer:
    """Answer of a planner with all that is needed to ask again. `memory` is JSON from before; "" = it has none.

    `is_exploration`: a step of an exploration (`ask`), not a whole decision (`plan`).
    """

    step: Candidate | Decision
    seed: int
    solve_ms: float = 0.0
    wall_limit_hit: bool = False
    memory: str = ""
    is_exploration: bool = False

    @property
    def decision(self) -> Decision:
        """The step, where it is a decision."""
        assert isinstance(self.step, Decision), self.step
        return self.step

    @property
    def versions(self) -> dict[str, str]:
        """What a record keeps of it beside view and seed."""
        found = {"memory": self.memory} if self.memory else {}
        return found | ({"call": "ask"} if self.is_exploration else {})


class ExplorationPorts(CorePorts, Protocol):
    """Ports of an exploration."""

    def require_room(self) -> None:
        """Require room on the disk before deciding. Raises DiskUnavailable: its outcome could not be kept."""

    async def think(self, view: PlanView, seed: int, *, ask: bool = False) -> PlannerAnswer:
        """Call the planner on a view: `plan`, or `ask` of one that measures."""

    async def compute(self, function: Callable[[], T]) -> T:
        """Return what a function returns that grows with the fleet, changes nothing and reads nothing that changes
        meanwhile: live it runs in a thread."""

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """Tell a planner that measures the result of its candidate, and save its memory."""

    def save_memory(self) -> None:
        """Save on disk what the planner remembers."""

    def evaluated(self, trigger: Trigger, evaluation: Evaluation) -> None:
        """Evaluation of a candidate has ended: its outcome and its cost."""


class Control(Protocol):
    """Control core that an exploration belongs to."""

    def next_seed(self) -> int:
        """Seed of a new decision."""

    async def deploy(self, plan: Plan) -> Plan:
        """Put a plan in force in place of the candidate before it, and roll it out; returns the plan in force then."""

    async def record_candidate(self, view: PlanView, trigger: Trigger, answer: PlannerAnswer, refusal: str) -> Plan:
        """Record a candidate, a refused one with its refusal; returns its plan, numbered.

        Raises Fenced, StateUnavailable, DiskUnavailable; then the candidate must not be deployed.
        """

    async def conclude(
        self, view: PlanView, trigger: Trigger, answer: PlannerAnswer, decision: Decision, versions: Mapping[str, str]
    ) -> Plan | None:
        """Record a decision and put in force what it has become; returns the plan in force then. Raises as
        `record_candidate`.
        """
