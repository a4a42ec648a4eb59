"""Ports of the control loop's core, and the record of a decision that goes through them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from controller.explore.core.ports import ExplorationPorts, PlannerAnswer
from controller.loop.core.decision import ControlState, Verdict
from controller.observe.core.triggers import Trigger
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.objective import Objective
from trefoil.core.plan import Plan


@dataclass(slots=True)
class TakenDecision:
    """Decision as the records keep it."""

    id: str
    view: PlanView
    trigger: Trigger
    answer: PlannerAnswer
    verdict: Verdict
    effect: str
    """reconfigure, reroute, or the outcome."""
    plan: Plan | None
    """What it led to."""
    versions: Mapping[str, str]
    causes: Mapping[str, int]
    reconfigurations: Mapping[str, int]


class ControlPorts(ExplorationPorts, Protocol):
    """Ports of control."""

    def show(self, view: PlanView, control: ControlState, verdict: Verdict | None) -> None:
        """Show the view that this step goes by, with how the system is controlled and what was decided last."""

    def open_records(self, epoch: int) -> int:
        """Number decisions under a new epoch; returns the highest number that is kept of it already, 0 for none."""

    async def record(self, taken: TakenDecision) -> None:
        """Record a decision. Raises Fenced, StateUnavailable, DiskUnavailable; then its plan must not come in force."""

    async def save_plans(self, plans: Sequence[Plan]) -> None:
        """Save the plans that can be gone back to on disk, the one in force last. Raises DiskUnavailable; then it must
        not come in force."""

    async def write_objectives(self, objectives: tuple[Objective, ...]) -> None:
        """Write objectives to Redis. Raises Fenced, StateUnavailable."""

    async def roll(self, plan: Plan, why: str, view: Callable[[], PlanView]) -> None:
        """Start the rollout of a numbered plan, in place of the one under way. Its path is found by `view`."""

    async def stop_rollout(self) -> None:
        """Stop the rollout under way where that is safe."""

    async def republish(self, revision: Revision) -> None:
        """Rewrite plan, rollout and node plans under a new revision. Raises Fenced, StateUnavailable."""
