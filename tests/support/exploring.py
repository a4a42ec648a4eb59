"""Shell for planners that measure: candidates are served by a profile (the truth), as in `profile_estimator.py`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator

from controller.planners.clover.graph import Graph
from controller.planners.clover.objective import Outcome
from controller.planners.clover.planner import CloverPlanner, goal_of
from controller.planners.clover.pods import pods_of
from controller.planners.clover.profile_estimator import profile_estimator
from controller.planners.clover.settings import CloverSettings
from controller.planners.planning_input import read_view
from tests.support.planning import applied, digits, fleet, objective, view
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Measured
from trefoil.core.objective import ObjectiveMode
from trefoil.core.plan import Plan
from trefoil.core.plan_check import check


def lambda_view(intensity: float = 250.0, weight: float = 0.1, gpus: int = 4, **changes: object) -> PlanView:
    """Ten requests per GPU and second of the digits family, an SLO that partitions can keep."""
    wanted = objective(
        mode=ObjectiveMode.LAMBDA, lambda_weight=weight, min_accuracy=0.0, slo_ms=75.0, base_intensity_g_per_kwh=250.0
    )
    made = view(intensity, 10.0 * gpus, devices=fleet(gpus, 2), wanted=[wanted])
    return replace(made, **changes)  # type: ignore[arg-type]


def served(one: PlanView, plan: Plan, family: str = "digits", truth: Catalog | None = None) -> Outcome:
    """What a plan does in truth."""
    world = read_view(replace(one, catalog=truth or one.catalog), 1.0)
    pod = next(p for p in pods_of(world, False) if p.family == family)
    weights: dict[tuple[str, str, str], int] = {}
    for node in plan.nodes:
        for device in node.devices:
            for part in device.slices:
                if part.hosted[0].family == family:
                    edge = (part.hosted[0].variant, "A100-SXM4-40GB", part.key.slice_type)
                    weights[edge] = weights.get(edge, 0) + 1
    look = profile_estimator(world.view.catalog, pod.task, pod.space, CloverSettings())
    return look(replace(pod.base, graph=Graph.from_weights(weights)))


@dataclass
class Explored:
    """What happened in one exploration."""

    decision: Decision
    candidates: list[Candidate] = field(default_factory=list)
    view: PlanView | None = None


def explore(
    planner: CloverPlanner,
    one: PlanView,
    rng: Generator,
    spent_s: float = 10.0,
    fails: Callable[[Candidate], bool] = lambda _: False,
    metered: bool = True,
    truth: Catalog | None = None,
) -> Explored:
    """Ask, check, measure, tell, until a decision comes; `view` is that of the fleet afterwards."""
    candidates: list[Candidate] = []
    while isinstance(step := planner.ask(one, rng), Candidate):
        candidates.append(step)
        assert len(candidates) <= 500, "the exploration does not end"
        check(step.plan, one.fleet, one.catalog, one.demand, one.objectives)
        told = []
        for route in step.plan.routes:
            out = served(one, step.plan, route.family, truth)
            late = fails(step)
            told.append(
                Measured(
                    route.family,
                    np.inf if late else out.p95_ms,
                    np.inf if late else out.p99_ms,
                    0.0 if late else 1.0,
                    out.accuracy,
                    None,
                    out.rate_per_s,
                    10.0,
                    out.joules if metered else None,
                )
            )
        planner.tell(step, Measurement(tuple(told), spent_s, 100.0, 0))
    if step.plan is not None:
        check(step.plan, one.fleet, one.catalog, one.demand, one.objectives)
        one = replace(one, fleet=applied(step.plan, one.fleet), current=step.plan)
    return Explored(step, candidates, one)


def value(one: PlanView, outcome: Outcome) -> float:
    """f of an outcome by the first objective of a view."""
    world = read_view(replace(one, catalog=digits()), 1.0)
    goal = goal_of(world, pods_of(world, True)[0], {}, CloverSettings())
    assert goal is not None
    return goal.value(outcome)
