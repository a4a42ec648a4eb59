"""Relaxation of objectives that no plan meets: joint targets first, then a ladder of what gives.

Joint targets (mode budget): a window's accuracy is owed over the window, and its price says what is worth paying now.
Every family's target (`aim.py`) comes from its own frontier, where the other families have no more than their hard
minimum. Two families that want the most accuracy in the same clean hour may ask for more than the fleet has. Then the
program has a price on missing accuracy instead of a target. This price is as high as the price of accuracy itself. The
accuracies of that plan become the targets; the window's budget owes the rest later. Hard minima and floors of other
modes stay.
Source: DESIGN section 4, mode budget.

A cap of the fleet's watts does not give: where a plan would be possible without it, `watt_cap` says what the least one
needs, and the plan in force stays.

The ladder where those cannot be met, first match wins; its names are what `Decision.degraded` starts with:
  slo_out_of_reach        nothing in the fleet is fast enough even when idle: the fastest is aimed at instead.
  accuracy_out_of_reach   nothing that meets the SLO is accurate enough: the most accurate is aimed at instead.
  short_of_capacity       the fleet cannot serve this demand within SLO and floor. All of it is served, with as large a
                          share within the SLO as every class can reach. Where the peak is too much for slices that are
                          always busy, the mean is served instead. Where the mean is too much too, as much as possible
                          is served within the SLO. Full queues refuse the rest.
With a plan in force the first two keep it (the objective is at fault, not the plan). The last keeps it too, unless
another plan serves more, or a share within the SLO below the objective's is aimed at. With nothing running, the
closest plan is taken.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from controller.planners.columns import columns, latency_best_ms
from controller.planners.exact.aim import FamilyAim, mode_of
from controller.planners.exact.milp import Limits
from controller.planners.exact.model import Aim, Problem, capped_w, frozen_groups
from controller.planners.exact.reuse import has_plan
from controller.planners.exact.search import solve
from controller.planners.fleet_power import unplanned_w
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import PlanningInput, Task
from trefoil.core.objective import Objective, ObjectiveMode

SLACK: Final = 1e-6  # of accuracy: below what the solver's tolerance moves
EASE: Final = 1.25  # the SLO grows by this until the fleet can serve something
SHARE_STEP: Final = 0.01  # of requests within the SLO, in overload
SERVED_GAIN: Final = 1.01  # a plan that serves less than this more is not worth a change


def relaxed(inputs: PlanningInput, problem: Problem, aim: Aim, settings: ExactSettings) -> tuple[Problem, Aim, str]:
    """Relaxed problem that has a solution, its aim, and what had to give."""
    reasons, tasks, target = [], [], dict(aim.target)
    for task in inputs.tasks:
        eased, reason = _eased(inputs, problem, task, settings)
        if reason:
            reasons.append(reason)
        accuracies = [c.accuracy for c in columns(inputs.view.catalog, eased, inputs.devices, settings)]
        best = max(accuracies, default=0.0)
        floor = max(eased.objective.hard_min_accuracy, target.get(task.family, 0.0))
        if floor > best:
            reasons.append(
                f"accuracy_out_of_reach: {task.family} asks for {floor:.4f}, {best:.4f} is the best within "
                f"{eased.objective.slo_ms:g} ms"
            )
            eased = replace(
                eased,
                objective=replace(eased.objective, hard_min_accuracy=min(best, eased.objective.hard_min_accuracy)),
            )
            target[task.family] = min(best, target.get(task.family, 0.0))
        tasks.append(eased)
    found = tuple(c for t in tasks for c in columns(inputs.view.catalog, t, inputs.devices, settings))
    problem = replace(problem, columns=found, tasks=tuple(tasks))
    limits = Limits(settings.solver_nodes, settings.solver_gap)
    aim = replace(aim, target=target)
    if solve(problem, aim, limits) is not None:
        return problem, aim, "; ".join(reasons)
    wanted = sum(t.demand.rate_p90_per_s for t in tasks)
    names = ", ".join(t.family for t in tasks)
    overload = _served_late(inputs, problem, aim, settings)
    if overload is not None:
        problem, share = overload
        served = sum(t.demand.rate_p90_per_s for t in problem.tasks)
        reasons.append(
            f"short_of_capacity: {names} need {wanted:.1f}/s within SLO and floor; {len(inputs.devices)} devices serve "
            f"{served:.1f}/s, {share:.0%} of it within the SLO"
        )
        return problem, aim, "; ".join(reasons)
    aim = replace(aim, shortage_allowed=True)
    short = solve(problem, aim, limits)
    missing = short.shortage_per_s if short else wanted
    reasons.append(
        f"short_of_capacity: {names} need {wanted:.1f}/s within SLO and floor, {wanted - missing:.1f}/s is the most "
        f"that {len(inputs.devices)} devices serve"
    )
    return problem, aim, "; ".join(reasons)


def _served_late(
    inputs: PlanningInput, problem: Problem, aim: Aim, settings: ExactSettings
) -> tuple[Problem, float] | None:
    """The problem at the highest share within the SLO at which the fleet serves all, and that share; None: at none.

    All is the demand's high quantile; where that is more than slices can serve that are always busy, its mean.
    """
    any_plan = Limits(settings.solver_nodes, gap=1.0)
    mean = tuple(replace(t, demand=replace(t.demand, rate_p90_per_s=t.mean_per_s)) for t in problem.tasks)
    for demanded in (problem.tasks, mean):
        best, low, high = None, 0, round(max(t.objective.slo_quantile for t in demanded) / SHARE_STEP)
        while high - low > 1:
            share = (middle := (low + high) // 2) * SHARE_STEP
            tasks = tuple(replace(t, objective=_kept_by(t.objective, share)) for t in demanded)
            found = tuple(c for t in tasks for c in columns(inputs.view.catalog, t, inputs.devices, settings))
            late = replace(problem, columns=found, tasks=tasks)
            if has_plan(late, aim, any_plan):
                best, low = (late, share), middle
            else:
                high = middle
        if best is not None:
            return best
    return None


def _kept_by(objective: Objective, share: float) -> Objective:
    """The objective that no more than a share of the requests has to keep."""
    return replace(
        objective,
        slo_quantile=min(share, objective.slo_quantile),
        ttft_quantile=min(share, objective.ttft_quantile),
        tpot_quantile=min(share, objective.tpot_quantile),
    )


def _eased(inputs: PlanningInput, problem: Problem, task: Task, settings: ExactSettings) -> tuple[Task, str]:
    if any(c.family == task.family for c in problem.columns):
        return task, ""
    best = latency_best_ms(inputs.view.catalog, task, inputs.devices, settings)
    if best is None:
        return task, f"no_profile: nothing in the fleet has a profile of {task.family}"
    tokens = task.objective.token_slo
    if tokens:
        eased, factor = task, 1.0
        for _ in range(20):
            factor *= EASE
            ttft_ms, tpot_ms = factor * tokens.ttft_ms, factor * tokens.tpot_ms
            eased = replace(task, objective=replace(task.objective, ttft_ms=ttft_ms, tpot_ms=tpot_ms))
            if columns(inputs.view.catalog, eased, inputs.devices, settings):
                asked = ", ".join(f"{name.upper()} {limit_ms:g} ms" for name, limit_ms, _ in tokens.each if limit_ms)
                return (
                    eased,
                    f"slo_out_of_reach: {task.family} asks for {asked}; {factor:.2g} times that is planned for",
                )
    slo_ms = best[0]
    for _ in range(20):
        slo_ms *= EASE
        eased = replace(task, objective=replace(task.objective, slo_ms=slo_ms))
        if columns(inputs.view.catalog, eased, inputs.devices, settings):
            break
    return eased, (
        f"slo_out_of_reach: {task.family} asks for {task.objective.slo_ms:g} ms at the "
        f"{task.objective.slo_quantile:.0%} quantile, {best[0]:.1f} ms ({best[1]}) is the fastest"
    )


def better_than_current(inputs: PlanningInput, problem: Problem, aim: Aim, settings: ExactSettings) -> bool:
    """Whether the relaxed plan should replace what runs."""
    if inputs.nothing_runs:
        return True
    if any(t.objective.slo_quantile < inputs.task(t.family).objective.slo_quantile for t in problem.tasks):
        return True
    if not aim.shortage_allowed or problem.columns == ():
        return False
    limits = Limits(settings.solver_nodes, settings.solver_gap)
    wanted = sum(t.demand.rate_p90_per_s for t in problem.tasks)
    best = solve(problem, aim, limits)
    still = solve(replace(problem, groups=frozen_groups(problem.devices)), aim, limits)
    if best is None or still is None:
        return best is not None
    return wanted - best.shortage_per_s > SERVED_GAIN * (wanted - still.shortage_per_s)


def windowed_families(inputs: PlanningInput, aim: Aim) -> frozenset[str]:
    """Families whose target is more than their hard minimum and owed over a window, not at this instant."""
    return frozenset(
        t.family
        for t in inputs.tasks
        if mode_of(t.objective) == ObjectiveMode.BUDGET
        and aim.target.get(t.family, 0.0) > t.objective.hard_min_accuracy
    )


def joint_targets(
    inputs: PlanningInput,
    problem: Problem,
    aim: Aim,
    family_aims: Mapping[str, FamilyAim],
    settings: ExactSettings,
) -> tuple[Aim, dict[str, FamilyAim]] | None:
    """Targets that families can reach together: the aim with them, and why; None: not even hard minima can be met.

    Raises:
        CpuLimitHit: see `Program.solve`.
    """
    families = windowed_families(inputs, aim)
    if not families:
        return None
    priced = replace(aim, lack_j={f: family_aims[f].lack_j for f in families})
    found = solve(problem, priced, Limits(settings.solver_nodes, settings.solver_gap))
    if found is None:
        return None
    targets, raised = dict(aim.target), dict(family_aims)
    for family in sorted(families):
        reached = found.accuracy[family] - SLACK
        if reached < targets[family]:
            targets[family] = reached
            raised[family] = replace(
                family_aims[family],
                target=reached,
                why=f"{family_aims[family].why}; the fleet has {reached:.4f} for it",
            )
    return replace(aim, target=targets), raised


def over_cap(inputs: PlanningInput, problem: Problem, aim: Aim, settings: ExactSettings) -> str:
    """Why no plan keeps the fleet's cap, and what the least one needs; "" where there would be none without it either.

    The least of all plans that serve the demand within SLOs, hard minima, and the floors that hold at every instant.
    """
    cap_w = inputs.view.max_watts
    if not cap_w:
        return ""
    free = replace(problem, max_watts=math.inf, weights={}, horizon_s=0.0)
    least = replace(hard_minima(inputs, aim), value_j={})
    found = solve(free, least, Limits(settings.solver_nodes, settings.solver_gap))
    if found is None:
        return ""
    needs_w = math.ceil(capped_w(free, found) + unplanned_w(inputs))
    return f"watt_cap: the fleet may take {cap_w:g} W, the least plan needs {needs_w} W"


def hard_minima(inputs: PlanningInput, aim: Aim) -> Aim:
    """Aim without the targets of windows: to serve comes before what a window is owed."""
    families = windowed_families(inputs, aim)
    return replace(aim, target={f: target for f, target in aim.target.items() if f not in families})
