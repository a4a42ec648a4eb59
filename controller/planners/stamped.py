"""What a policy's row says of every plan: written once, onto whatever its planner answers.

A planner says what runs where and how much goes there; the row says by which router, queue and governor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from numpy.random import Generator

from trefoil.core.brains import Candidate, Decision, LivePlanner, Measurement, Planner, PlanView
from trefoil.core.common import Same
from trefoil.core.parts import LIVE
from trefoil.core.plan import NodePlan, Plan
from trefoil.core.plan_check import sealed
from trefoil.core.policies import Policy

Refusal = Callable[[PlanView, Plan], str]


@dataclass(frozen=True, slots=True)
class Stamped:
    """A planner whose plans bear the columns of its row."""

    planner: Planner
    row: Policy

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """As the planner decides."""
        return _decision(self.planner.plan(view, rng), self.row)


class Measuring:
    """The same of a planner that measures: it is told of the candidate that it asked for, as it asked for it."""

    def __init__(self, planner: LivePlanner, row: Policy) -> None:
        self.planner, self.row = planner, row
        self._asked: tuple[Candidate, Candidate] | None = None  # as it was stamped, as the planner made it

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """As the planner decides."""
        return _decision(self.planner.plan(view, rng), self.row)

    def asks(self, view: PlanView) -> bool:
        """Whether it wants to measure."""
        return self.planner.asks(view)

    def ask(self, view: PlanView, rng: Generator) -> Candidate | Decision:
        """The next candidate, or the decision."""
        step = self.planner.ask(view, rng)
        if isinstance(step, Decision):
            return _decision(step, self.row)
        found = replace(step, plan=stamp(step.plan, self.row))
        self._asked = found, step
        return found

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """What measuring the candidate told."""
        known = self._asked is not None and self._asked[0] is candidate
        self.planner.tell(self._asked[1] if self._asked and known else candidate, measurement)

    def memory(self) -> Mapping[str, Any]:
        """The planner's."""
        return self.planner.memory()

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on from a memory."""
        self.planner.recall(memory)


def stamped(planner: Planner, row: Policy) -> Planner:
    """The planner, its plans stamped; it measures where the planner does."""
    if all(callable(getattr(planner, name, None)) for name in LIVE):
        return Measuring(cast(LivePlanner, planner), row)
    return Stamped(planner, row)


def refusal(refuses: Refusal, row: Policy) -> Refusal:
    """A rollout check that sees plans as they will be."""
    return lambda view, plan: refuses(view, stamp(plan, row))


def _decision(decision: Decision, row: Policy) -> Decision:
    return decision if decision.plan is None else replace(decision, plan=stamp(decision.plan, row))


def stamp(plan: Plan, row: Policy) -> Plan:
    """The plan with router and queue of the row on every route, and its governor on every device that is planned."""
    return _stamped(Same(plan), row.router, row.queue, row.governor)


@lru_cache(maxsize=16)  # of a plan that is checked by the planner and then decided on
def _stamped(plan: Same[Plan], router: str, queue: str, governor: str) -> Plan:
    nodes = tuple(_node(node, governor) for node in plan.value.nodes)
    routes = tuple(replace(route, router=router, queue=queue) for route in plan.value.routes)
    return replace(plan.value, nodes=nodes, routes=routes)


@lru_cache(maxsize=4096)  # most nodes are planned as they were
def _node(node: NodePlan, governor: str) -> NodePlan:
    governed = tuple(replace(device, governor=governor) for device in node.devices)
    return sealed(replace(node, devices=governed), node.revision)
