"""Aim of the program by an objective's type: a price of accuracy and a target, with the reason.

budget: the window's dual over the frontier (`frontier.py`); instant: the floor at every instant; lambda: CLOVER Eq. 3.
In every mode accuracy has a least price. At this price, all accuracy above the target costs `NEARLY_FREE` of the least
joules above sleep. So where accuracy costs nothing, the most accurate plan is the best, and for accuracy no plan costs
more than that share.
Intensity multiplies every joule of a zone alike. So `instant` does not depend on carbon at all, and says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from controller.planners.base import base_reference
from controller.planners.columns import Column, undominated
from controller.planners.exact.frontier import (
    STEEP_J,
    FrontierPoint,
    cheapest,
    distribution,
    endless,
    frontier,
    power_at,
    price,
    required_mean,
    worth_later,
)
from controller.planners.exact.milp import Limits
from controller.planners.exact.model import Aim, Group, Problem, value_lambda, weights_of
from controller.planners.exact.reuse import Need, need_of, price_below
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import PlanningInput, Task
from trefoil.core.brains import PlanView
from trefoil.core.errors import InvalidInput
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.units import J_PER_KWH

INTENSITY_MIN: Final = 1e-3  # g/kWh: with carbon-free power every accuracy is free, not undefined
BASE_INTENSITY: Final = 250.0  # CLOVER's artifact, where the objective does not say
ACCURACY_NEAR: Final = 1e-9
NEARLY_FREE: Final = 5e-3  # of the least joules
POINT: Final = 0.01  # of accuracy
PART_MIN: Final = 1e-3  # of a point: what is less above the least accurate is rounding
DEMAND_STEP: Final = 1.08  # the frontier is that of the demand rounded up to such a step


@dataclass(frozen=True, slots=True)
class FamilyAim:
    """Aim of one family: value of accuracy beyond the target [J], target of its mean, and why; `lack_j`: value of what
    lacks of the target; `lacks`: a budget needs more than that."""

    value_j: float
    target: float
    why: str
    lacks: bool = False
    lack_j: float = 0.0


def aim_of(inputs: PlanningInput, problem: Problem, settings: ExactSettings) -> tuple[Aim, dict[str, FamilyAim]]:
    """Aim of all families together."""
    family_aims = {t.family: _family_aim(inputs, problem, t, settings) for t in inputs.tasks}
    target = {f: w.target for f, w in family_aims.items()}
    nearly_free_j = nearly_free(problem, target, settings)
    return Aim({f: max(w.value_j, nearly_free_j[f]) for f, w in family_aims.items()}, target), family_aims


def nearly_free(problem: Problem, target: Mapping[str, float], settings: ExactSettings) -> dict[str, float]:
    """Prices of accuracy [J per request] by family at which all above the targets costs at most `NEARLY_FREE` of the
    least joules above sleep; 0: there is no more accuracy, or no plan."""
    groups, columns = _bare(problem)
    floors = tuple((t.family, max(t.objective.hard_min_accuracy, target[t.family])) for t in problem.tasks)
    limits, weights = Limits(settings.solver_nodes, settings.frontier_gap), tuple(sorted(problem.weights.items()))
    for rounded in (True, False):
        needs = tuple(_need(t, rounded) for t in problem.tasks)
        least_w = _least_w(groups, columns, needs, floors, limits, problem.max_watts, weights, problem.awake_min)
        if least_w:
            break
    each_j, found = least_w / sum(need.rate_per_s for need in needs), {}
    for family, floor in floors:
        offered = [c.accuracy for c in problem.columns if c.family == family]
        more = max(offered, default=0.0) - max(floor, min(offered, default=0.0))
        found[family] = price_below(NEARLY_FREE * each_j / more) if more > ACCURACY_NEAR else 0.0
    return found


def last_point(problem: Problem, family: str, accuracy: float, joules: float) -> str:
    """Text with the price of the last point of accuracy, as joules of a request, on an infinite fleet. Empty: no price,
    because nothing serves the family, or nothing is less accurate."""
    hull = endless(problem, family)
    if not hull or joules <= 0:
        return ""
    below = max(accuracy - POINT, hull[0].accuracy)
    if accuracy - below < PART_MIN * POINT:
        return ""
    mean_per_s = next(t.mean_per_s for t in problem.tasks if t.family == family)
    more_j = (power_at(hull, accuracy) - power_at(hull, below)) / mean_per_s * POINT / (accuracy - below)
    if more_j <= ACCURACY_NEAR * joules:
        return "the last point of accuracy costs nothing"
    return f"the last point of accuracy costs some {more_j:.2g} J a request ({more_j / joules:.2%})"


def mode_of(objective: Objective) -> ObjectiveMode:
    """Mode of an objective; unset means budget."""
    return objective.mode or ObjectiveMode.BUDGET


def next_tick_s(view: PlanView, settings: ExactSettings) -> float:
    """After a tick, or when the present intensity ends, whichever is sooner."""
    later, ends_s = view.now_s + settings.tick_s, view.carbon.ends_at_s
    return min(later, ends_s) if ends_s > view.now_s else later


def floor_of(task: Task, settings: ExactSettings) -> float:
    """Floor of accuracy and its margin: accuracy is measured on a sample, and a mean on the floor misses by chance."""
    return task.objective.min_accuracy + settings.of(task.objective).accuracy_margin


def _family_aim(inputs: PlanningInput, problem: Problem, task: Task, settings: ExactSettings) -> FamilyAim:
    mode = mode_of(task.objective)
    if mode == ObjectiveMode.INSTANT:
        floor = floor_of(task, settings)
        return FamilyAim(0.0, floor, f"instant: accuracy >= {floor:.4f} at every instant, whatever the carbon")
    if mode == ObjectiveMode.LAMBDA:
        return _lambda(inputs, task, settings)
    if mode == ObjectiveMode.BUDGET:
        return _budget(inputs, problem, task, settings)
    raise InvalidInput("no such type", field="objective.type", value=int(mode), remedy="one of budget, instant, lambda")


def _lambda(inputs: PlanningInput, task: Task, settings: ExactSettings) -> FamilyAim:
    objective = task.objective
    reference = base_reference(inputs, task, settings)
    base_j = objective.base_j_per_request or reference.joules_per_request
    base_intensity = objective.base_intensity_g_per_kwh or BASE_INTENSITY
    intensity = max(weights_of(inputs)[1], INTENSITY_MIN)
    value = min(STEEP_J, value_lambda(task, intensity, base_j, reference.accuracy, base_intensity))
    where = "given" if objective.base_j_per_request else "BASE at this demand"
    return FamilyAim(
        value,
        objective.hard_min_accuracy,
        f"lambda {objective.lambda_weight:g} against {base_j:.2f} J ({where}) at {base_intensity:.0f} g/kWh: "
        f"a unit of accuracy is worth {value:.0f} J a request",
    )


def _budget(inputs: PlanningInput, problem: Problem, task: Task, settings: ExactSettings) -> FamilyAim:
    objective, view = task.objective, inputs.view
    budget = next((b for b in view.budgets if b.family == task.family), None)
    rate = task.mean_per_s
    floor = floor_of(task, settings)
    reaction_s = settings.of(objective).reaction_s
    required, left_s = required_mean(floor, budget, rate, objective.window_s, reaction_s, view.now_s)
    hull, hull_rate = _frontier(problem, task, settings)
    if not hull:
        return FamilyAim(0.0, objective.hard_min_accuracy, "")
    intervals, source = distribution(view, left_s, reaction_s, budget.day if budget is not None else ())
    intensity, ratio = _dirtiest_intensity(inputs)
    intervals = [(w, ci * ratio) for w, ci in intervals]
    found = price(hull, intervals, intensity, hull_rate, min(required, hull[-1].accuracy))
    worth = min(STEEP_J, found.grams * J_PER_KWH / max(intensity, INTENSITY_MIN))
    target = max(objective.hard_min_accuracy, min(found.target, hull[-1].accuracy))
    later = worth_later(hull, intervals, hull_rate, min(required, hull[-1].accuracy), target)
    value = min(STEEP_J, later * J_PER_KWH / max(intensity, INTENSITY_MIN))
    lacks = required > hull[-1].accuracy + 1e-9
    short = f", out of reach: {hull[-1].accuracy:.4f} is the most" if lacks else ""
    why = (
        f"budget: the remaining {left_s:.0f} s need a mean accuracy of {required:.4f} for {floor:.4f} "
        f"over the window{short}; price {found.grams * 1e3:.3f} mg per request and unit of accuracy ({source}), so "
        f">= {target:.4f} now"
    )
    return FamilyAim(value, target, why, lacks, worth)


def _dirtiest_intensity(inputs: PlanningInput) -> tuple[float, float]:
    """The intensity that watts are weighed with [g/kWh], over that of `carbon`: zones are taken to move together."""
    most, here = weights_of(inputs)[1], inputs.view.carbon.intensity_g_per_kwh
    return (here, 1.0) if most == here else (most, most / max(here, INTENSITY_MIN))


def _frontier(problem: Problem, task: Task, settings: ExactSettings) -> tuple[tuple[FrontierPoint, ...], float]:
    """The frontier at the demand rounded up (remembered: it is pure), or at the demand itself if that is too much."""
    groups, bare = _bare(problem)
    limits = Limits(settings.solver_nodes, settings.frontier_gap)
    for rounded in (True, False):
        needs = tuple(_need(t, rounded) for t in problem.tasks)
        solves_max, bounds = settings.frontier_solves, (problem.max_watts, problem.awake_min)
        hull = _hull(groups, bare, needs, task.family, limits, solves_max, *bounds)
        if hull:
            return hull, next(n.rate_per_s for n in needs if n.family == task.family)
    return (), task.mean_per_s


def _bare(problem: Problem) -> tuple[tuple[Group, ...], tuple[Column, ...]]:
    """Groups and columns without what runs: a key that many decisions have."""
    groups = tuple(
        Group(g.type, g.options, (), g.hosts, g.must_stay, g.clocks, g.zone, g.number) for g in problem.groups
    )
    return groups, undominated(problem.columns, problem.devices, keep_running=False)


def _need(task: Task, rounded: bool) -> Need:
    mean, high = task.mean_per_s, task.demand.rate_p90_per_s
    if rounded:
        mean, high = _step(mean), _step(high)
    return replace(need_of(task), rate_per_s=mean, rate_p90_per_s=high)


def _step(rate_per_s: float) -> float:
    return float(DEMAND_STEP ** math.ceil(math.log(rate_per_s, DEMAND_STEP) - 1e-9))


@lru_cache(maxsize=256)
def _hull(
    groups: tuple[Group, ...],
    columns: tuple[Column, ...],
    needs: tuple[Need, ...],
    family: str,
    limits: Limits,
    solves_max: int,
    max_watts: float,
    awake_min: int,
) -> tuple[FrontierPoint, ...]:
    tasks = tuple(n.task() for n in needs)
    problem = Problem(groups, columns, tasks, 0.0, max_watts=max_watts, awake_min=awake_min)
    return frontier(problem, family, limits, solves_max)


@lru_cache(maxsize=256)
def _least_w(
    groups: tuple[Group, ...],
    columns: tuple[Column, ...],
    needs: tuple[Need, ...],
    floors: tuple[tuple[str, float], ...],
    limits: Limits,
    max_watts: float,
    weights: tuple[tuple[str, float], ...],
    awake_min: int,
) -> float:
    """Least weighed power above sleep at these floors [W]; 0: there is no plan."""
    tasks = tuple(n.task() for n in needs)
    problem = Problem(
        groups, columns, tasks, 0.0, weights=dict(weights), max_watts=max_watts, awake_min=awake_min
    )  # fmt: skip
    found = cheapest(problem, needs[0].family, Aim(target=dict(floors)), limits)
    asleep_w = sum(g.type.sleep_w * g.number * problem.weight(g.zone) for g in groups)
    return 0.0 if found is None else max(0.0, found.power_w - asleep_w)
