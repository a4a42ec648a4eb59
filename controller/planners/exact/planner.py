"""Planner `exact`, the default: the steps from a view to a decision.

Source: DESIGN section 4; docs/policies.md. The program is `model.py`, its aim `aim.py` and `frontier.py`, the way to
devices `placement.py`, what happens when nothing fits `relaxation.py`.
Data: a `PlanView`. Decision: variants, MIG configurations, sleeping devices and shares, in one program.
Formulation: aim -> solve -> check with the request-level kernel -> map to devices -> keep what runs -> check that the
rollout is possible. A class that fails the kernel's check is scaled by 0.95, at most 4 rounds. What runs is kept if the
real price of moving exceeds what the move gains. If the rollout is not possible, the planner solves again with
configurations pinned. The kernel serves every class separately: the split by weight makes classes independent, and a
small class would see too few requests of a common stream to judge a tail.
Deviations: none. Pure: equal views give equal plans; the kernel draws from a separate seed.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from numpy.random import Generator, default_rng

from controller.planners.columns import ClassKey, Column, columns, gap_scv
from controller.planners.exact.aim import NEARLY_FREE, FamilyAim, aim_of, last_point, next_tick_s
from controller.planners.exact.clock_ranges import lowest_clocks
from controller.planners.exact.flexible import PARTS, JobsRoom, at_load, awake_devices
from controller.planners.exact.milp import CpuLimitHit, Limits, NothingFound
from controller.planners.exact.model import (
    Aim,
    Problem,
    Solution,
    capped_w,
    frozen_groups,
    groups_of,
    pinned,
    weights_of,
)
from controller.planners.exact.placement import Moves, moves, place_clocked
from controller.planners.exact.relaxation import better_than_current, hard_minima, joint_targets, over_cap, relaxed
from controller.planners.exact.reuse import current_solution, on_grid, refit, rounded_demand, solve_or_reuse
from controller.planners.exact.search import solve
from controller.planners.fleet_power import unplanned_w
from controller.planners.plan_assembly import capacity_per_s, plan_of
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import (
    HostedSlice,
    PlanningInput,
    Task,
    pue_of,
    read_view,
)
from controller.planners.shared_columns import shared_columns
from trefoil.core.brains import Decision, PlanView
from trefoil.core.device_types import RANGED_CORES_MAX
from trefoil.core.objective import Objective
from trefoil.core.plan import Expected, Plan
from trefoil.core.plan_check import carries
from trefoil.core.queueing import ServerClass, ServiceTime, arrivals_s, serve_weighted
from trefoil.core.units import grams

TOLERANCE: Final = 0.25  # of the allowed misses: what a sample of the kernel's size can say
BACK_OFF: Final = 0.95
TARGET_STEP: Final = 1e-6  # of accuracy: what is less is the solver's tolerance
ACCURACY_NEAR: Final = 1e-6  # as accurate as another plan
ACCURACY_ABOVE: Final = 5e-4  # more than that is given away, where a budget pays for it
LATENCY_NEAR: Final = 0.01  # relative: what a sample of the kernel's size can say
ROUNDS_MAX: Final = 4
SEED: Final = 20231112  # any: the kernel's sample has to be one sample
SHARE_STEP: Final = 0.01  # of a family's traffic
RATE_STEP: Final = 1.02

Refusal = Callable[[PlanView, Plan], str]


def any_rollout(_view: PlanView, _plan: Plan) -> str:
    """Refusal of nothing: what a caller without a rollout check uses."""
    return ""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft of a plan: a solution on devices, with what it costs to get there."""

    problem: Problem
    solution: Solution
    hosted: Mapping[str, tuple[HostedSlice, ...]]
    moves: Moves
    clocks: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class ExactPlanner:
    """Planner `exact`. Stateless. `refuses(view, plan)` says why a plan cannot be rolled out, "" = it can."""

    settings: ExactSettings = ExactSettings()
    refuses: Refusal = any_rollout
    name: str = "exact"
    recast: Callable[[Objective], Objective] = field(default=lambda objective: objective)

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan the best for this view, or what remains possible, by a named rung; jobs never cost requests a rung."""
        alone = self._planned(replace(view, flexible=()))
        wanted = max((one.devices for one in view.flexible), default=0)
        if not wanted or alone.plan is None or alone.degraded:
            return alone
        devices = min(wanted, sum(len(node.devices) for node in alone.plan.nodes))
        found = self._with_jobs(view, alone, alone.plan, devices)
        if found.plan is None:
            need = f"requests and jobs of this hour need {devices} GPUs awake, which cannot be"
            return _because(alone, alone.plan, f"{need}: {found.degraded}")
        filled = "" if found is alone else "slices are planned that fill the GPUs of jobs; "
        return _because(found, found.plan, f"{filled}at least {devices} GPUs awake for requests and jobs of this hour")

    def _with_jobs(self, view: PlanView, alone: Decision, plan: Plan, devices: int) -> Decision:
        """A plan with room for jobs in so many devices; that of requests alone where it has the room."""
        inputs = self._read(view)
        room, most = JobsRoom.beyond(inputs, plan, devices), max(devices, awake_devices(plan))
        found, wakes = alone, any(room.woken.values())
        if any(room.lacking.values()):
            for part in PARTS if wakes else PARTS[:-1]:
                found = self._planned(room.view(part, self.settings), inputs)
                if found.plan is not None and (not part or awake_devices(found.plan) <= most):
                    return found
        return found if wakes else alone

    def _read(self, view: PlanView) -> PlanningInput:
        settings = self.settings
        view = replace(view, objectives=tuple(self.recast(o) for o in view.objectives))
        return read_view(
            view, settings.rate_floor_per_s, settings.clocks != "highest", cores_max=RANGED_CORES_MAX
        ).in_ranges

    def _planned(self, view: PlanView, real: PlanningInput | None = None) -> Decision:
        """Plan a view. `real`: what a view that `JobsRoom` raised was made of. Then no rung is tried, and the plan's
        text and figures, and the check of its rollout, are for the load of `real`."""
        settings, inputs = self.settings, self._read(view)
        next_at_s = next_tick_s(view, settings)
        if not inputs.tasks:
            return Decision(
                None, f"{self.name}: no family has an objective", next_at_s, "no_plan: no family has an objective"
            )
        try:
            return self._decide(inputs, settings, next_at_s, real)
        except (CpuLimitHit, NothingFound) as hit:
            limit = "node_limit" if isinstance(hit, NothingFound) else "cpu_limit"
            why = f"{self.name}: keeps the plan, the solver ended without one at its {limit} ({hit})"
            return Decision(None, why, next_at_s, limit)

    def _decide(
        self, inputs: PlanningInput, settings: ExactSettings, next_at_s: float, real: PlanningInput | None
    ) -> Decision:
        draft, degraded = None, ""
        if settings.demand_step > 1:
            coarse = replace(inputs, tasks=rounded_demand(inputs.tasks, settings.demand_step))
            coarse, problem, fine, family_aims = _posed_problem(coarse, settings, _at_mean)
            for up in (True, False):  # at the top of what can be reached there is no higher target
                aim = on_grid(problem, fine, up)
                draft = self._draft(coarse, problem, aim, settings)
                if draft is not None:
                    inputs = coarse
                    break
        if draft is None:
            for lean in (_at_mean, _without_margin):
                posed, problem, aim, family_aims = _posed_problem(inputs, settings, lean)
                draft = self._draft(posed, problem, aim, settings)
                if draft is None or posed is inputs:  # nothing, or the whole demand: there is nothing leaner to mend
                    break
                if all(carries(_capacity_per_s(draft, t.family), t.demand) for t in inputs.tasks):
                    break
            inputs = posed
        if draft is None and real is not None:
            over = over_cap(inputs, problem, aim, settings) or "no plan has them within SLO and floor"
            return Decision(None, over, next_at_s, over)
        if draft is None and (eased := joint_targets(inputs, problem, aim, family_aims, settings)):
            aim, family_aims = eased
            draft = self._draft(inputs, problem, aim, settings)
        if draft is None and (over := over_cap(inputs, problem, aim, settings)):
            return Decision(None, f"{self.name}: {over}; keeps the plan", next_at_s, over)
        if draft is None:
            problem, aim, degraded = relaxed(inputs, problem, hard_minima(inputs, aim), settings)
            if not better_than_current(inputs, problem, aim, settings):
                why = f"{self.name}: {degraded}; keeps the plan"
                return Decision(None, why, next_at_s, f"kept_last_plan: {degraded}")
            draft = self._draft(inputs, problem, aim, settings)
            if draft is None or not draft.solution.slices:
                why = f"{self.name}: {degraded}; there is nothing to plan with"
                return Decision(None, why, next_at_s, f"no_plan: {degraded}")
        plan, refusal = self._plan_with_rollout(inputs, draft, aim, family_aims, settings, degraded, real)
        if plan is None:
            why = f"{self.name}: no rollout leads to a plan: {refusal}; keeps the plan"
            return Decision(None, why, next_at_s, f"no_rollout: {refusal}")
        return Decision(plan, plan.why, next_at_s, degraded)

    def _draft(self, inputs: PlanningInput, problem: Problem, aim: Aim, settings: ExactSettings) -> Draft | None:
        """Solve, check and map; keep what runs where moving does not pay."""
        solution, problem, note = _solved_and_checked(problem, aim, settings)
        if solution is None:
            return None
        hosted, clocks = place_clocked(problem, solution)
        needed = moves(problem, hosted)
        draft = Draft(problem, solution, hosted, needed, clocks, note)
        if needed.any and not inputs.nothing_runs:
            stay = staying_draft(problem, aim, settings)
            if stay is not None and (_score(stay, aim) <= _score(draft, aim) + 1e-9 or _as_good(stay, draft, settings)):
                return stay
        return draft

    def _plan_with_rollout(
        self,
        inputs: PlanningInput,
        draft: Draft,
        aim: Aim,
        family_aims: Mapping[str, FamilyAim],
        settings: ExactSettings,
        degraded: str,
        real: PlanningInput | None,
    ) -> tuple[Plan | None, str]:
        """The first plan that a rollout leads to: the best; the best with the slices of serving devices; to stay."""
        refusal = ""
        if real is not None:
            family_aims = {
                name: replace(one, why="no less accurate than without jobs") for name, one in family_aims.items()
            }
        for attempt in ("free", "pinned", "stay"):
            found: Draft | None = draft
            if attempt == "pinned":
                narrowed = replace(draft.problem, groups=pinned(draft.problem.groups))
                found = self._draft(inputs, narrowed, aim, settings)
            elif attempt == "stay":
                found = staying_draft(draft.problem, aim, settings)
            if found is None:
                continue
            if attempt != "free":
                found = replace(found, note=f"{found.note}; configurations stay, because {refusal}")
            told, shown = real or inputs, found
            if real is not None:
                problem, solution = at_load(found.problem, found.solution, real.tasks)
                shown = replace(found, problem=problem, solution=solution)
            plan = self._assembled_plan(told, shown, family_aims, settings, degraded)
            reason = self.refuses(told.view, plan) if found.moves.any else ""
            if not reason:
                return plan, ""
            refusal = refusal or reason
        return None, refusal

    def _assembled_plan(
        self,
        inputs: PlanningInput,
        draft: Draft,
        family_aims: Mapping[str, FamilyAim],
        settings: ExactSettings,
        degraded: str,
    ) -> Plan:
        expected = {t.family: _expected(inputs, draft, t, settings) for t in inputs.tasks}
        why = explanation(self.name, inputs, draft, family_aims, expected, degraded)
        return plan_of(
            inputs,
            self.name,
            draft.hosted,
            draft.solution.traffic,
            draft.problem.columns,
            settings,
            expected,
            why,
            draft.solution.gap,
            degraded,
            clocks=draft.clocks,
            clock_ranges=_clock_ranges(draft, settings.clocks),
        )


def _clock_ranges(draft: Draft, clocks: str) -> dict[str, tuple[int, int]] | None:
    """What governors may choose from: what is planned is enough for the demand, the highest for unforeseen load.
    Where only the highest carries the mean, a governor has no choice: an end of 0 would be the lowest there is.
    """
    if clocks == "highest":
        return None
    lowest = lowest_clocks(draft.problem, draft.solution, draft.clocks)
    if clocks == "planned":
        return {name: (low, draft.clocks.get(name, 0)) for name, low in lowest.items()}
    devices = draft.problem.devices
    fixed = {d.type.name for d in devices if not (d.type.clock_lockable and d.clock_lockable)}
    tops = {d.name: max(d.type.clocks_mhz) for d in devices if d.type.name not in fixed}
    limits = {d.name: -round(d.type.power_limit_max_w) for d in devices if draft.clocks.get(d.name, 0) < 0}
    free = {name: (low or tops.get(name, 0), 0) for name, low in lowest.items() if name not in limits}
    return free | {name: (0, limit) for name, limit in limits.items()}


def _because(decision: Decision, plan: Plan, reason: str) -> Decision:
    """A decision for a plan, with one more reason."""
    why = f"{decision.why}; {reason}"
    return replace(decision, plan=replace(plan, why=why), why=why)


Posed = tuple[PlanningInput, Problem, Aim, dict[str, FamilyAim]]


def _posed_problem(inputs: PlanningInput, settings: ExactSettings, lean: Callable[[Task], Task]) -> Posed:
    """The program of a view and its aim.

    The floor comes before the margin of the demand, as in overload: a family whose budget needs more accuracy than
    there is at its high quantile, which every breach of the SLO raises, is planned by `lean`: at its mean, or, where
    that would not carry what plans are checked by, without the margin.
    """
    posed = _posed(inputs, settings)
    lacking = {family: aim.target for family, aim in posed[-1].items() if aim.lacks}
    if not lacking:
        return posed
    tasks = tuple(lean(t) if t.family in lacking else t for t in inputs.tasks)
    leaner = _posed(replace(inputs, tasks=tasks), settings)
    gains = any(leaner[-1][family].target > target + TARGET_STEP for family, target in lacking.items())
    return leaner if gains else posed


def _at_mean(task: Task) -> Task:
    return replace(task, demand=replace(task.demand, rate_p90_per_s=task.mean_per_s))


def _without_margin(task: Task) -> Task:
    return replace(task, demand=replace(task.demand, rate_p90_per_s=task.demand.rate_per_s))


def _posed(inputs: PlanningInput, settings: ExactSettings) -> Posed:
    found = tuple(c for t in inputs.tasks for c in columns(inputs.view.catalog, t, inputs.devices, settings))
    if settings.families_per_slice > 1:
        found += shared_columns(inputs.view.catalog, inputs.tasks, inputs.devices, settings, found)
    groups, (weights, _), cap_w = groups_of(inputs.devices, found), weights_of(inputs), inputs.view.max_watts
    max_watts = cap_w - unplanned_w(inputs) if cap_w else math.inf
    awake_min = max((one.devices for one in inputs.view.flexible), default=0)
    problem = Problem(
        groups, found, inputs.tasks, inputs.view.move_horizon_s, weights=weights, max_watts=max_watts,
        awake_min=awake_min,
    )  # fmt: skip
    return inputs, problem, *aim_of(inputs, problem, settings)


def _solved_and_checked(problem: Problem, aim: Aim, settings: ExactSettings) -> tuple[Solution | None, Problem, str]:
    """Solve and let the kernel check, at most `ROUNDS_MAX` rounds."""
    limits = Limits(settings.solver_nodes, settings.solver_gap)
    late: dict[ClassKey, float] = {}
    ladder = settings.demand_step > 1
    solution = solve_or_reuse(problem, aim, limits, ladder)
    for _ in range(ROUNDS_MAX):
        if solution is None or aim.shortage_allowed:
            break
        late = classes_missing_slo(solution, problem.columns, problem.tasks, settings, problem.scale)
        if not late:
            break
        scale = {**problem.scale, **{k: problem.scale.get(k, 1.0) * BACK_OFF for k in late}}
        tighter = solve_or_reuse(replace(problem, scale=scale), aim, limits, ladder)
        if tighter is None:  # the fleet has no more: the plan stands at the scale that it was solved at, with a note
            break
        solution, problem = tighter, replace(problem, scale=scale)
    note = "; ".join(
        f"the kernel sees {k[3]} on {k[2]} within its SLO for {a:.1%} only" for k, a in sorted(late.items())
    )
    return solution, problem, f"; {note}" if note else ""


def staying_draft(problem: Problem, aim: Aim, settings: ExactSettings) -> Draft | None:
    """Draft of what runs now, with the best shares; None when it cannot meet the aim."""
    whole = not aim.shortage_allowed and not any(g.must_stay for g in problem.groups)
    shared = any(column.limits for column in problem.columns)
    before = current_solution(problem) if whole and not shared else None
    solution = refit(problem, aim, before) if before is not None else None
    if before is None or (solution is None and problem.max_watts < math.inf):  # another split may keep the cap
        still = replace(problem, groups=frozen_groups(problem.devices))
        solution = solve(still, aim, Limits(settings.solver_nodes, settings.solver_gap))
    if solution is None:
        return None
    hosted = {d.name: d.running for d in problem.devices}
    clocks = {d.name: d.clock_mhz for d in problem.devices if d.clock_mhz and d.running}
    return Draft(problem, solution, hosted, Moves(0, 0, 0, 0, 0.0, 0.0), clocks)


def _score(draft: Draft, aim: Aim) -> float:
    """The program's objective with the real moves instead of their lower bound [W]."""
    gained = sum(
        value * next(t.mean_per_s for t in draft.problem.tasks if t.family == f) * draft.solution.accuracy[f]
        for f, value in aim.value_j.items()
    )
    horizon = draft.problem.horizon_s
    return draft.solution.weighed_w - gained + (draft.moves.weighed_j / horizon if horizon > 0 else 0.0)


def _as_good(stay: Draft, draft: Draft, settings: ExactSettings) -> bool:
    """Whether what runs takes next to nothing more than a draft, with its accuracy and latency: then nothing moves."""
    if stay.solution.weighed_w > (1 + NEARLY_FREE) * draft.solution.weighed_w:
        return False
    accuracy = stay.solution.accuracy
    if any(not -ACCURACY_NEAR <= accuracy[f] - a <= ACCURACY_ABOVE for f, a in draft.solution.accuracy.items()):
        return False
    for task in draft.problem.tasks:
        mine = [c for c in draft.problem.columns if c.family == task.family]
        now_ms, then_ms = (latency_ms_p95(one.solution, mine, task, settings) for one in (stay, draft))
        if now_ms > (1 + LATENCY_NEAR) * then_ms:
            return False
    return True


def _expected(inputs: PlanningInput, draft: Draft, task: Task, settings: ExactSettings) -> Expected:
    solution, mine = draft.solution, [c for c in draft.problem.columns if c.family == task.family]
    rate = task.mean_per_s
    watts, weighed = family_power_w(draft.problem, solution, task)
    return Expected(
        grams_per_request=grams(weighed / rate, weights_of(inputs)[1], pue_of(inputs.view, task)),
        joules_per_request=watts / rate,
        latency_ms_p95=latency_ms_p95(solution, mine, task, settings),
        accuracy=solution.accuracy[task.family],
        capacity_per_s=_capacity_per_s(draft, task.family, governed=settings.clocks == "governed"),
        move_j=draft.moves.energy_j,
        move_s=draft.moves.longest_s,
    )


def _capacity_per_s(draft: Draft, family: str, *, governed: bool = False) -> float:
    """Capacity of a family within its SLO [1/s]; `governed`: at the highest clock, where a governor goes if it must, so
    that a load which the slices carry there starts no rollout."""
    solution, columns = draft.solution, {c.key: c for c in draft.problem.columns if c.family == family}
    traffic, slices = dict(solution.traffic), Counter(solution.slices)
    for key in [key for key in columns if governed and key.clock_mhz and traffic.get(key)]:
        top = key._replace(clock_mhz=0)
        if top in columns:
            traffic[top] = traffic.get(top, 0.0) + traffic.pop(key)
            slices[top] += slices.pop(key)
    scaled = tuple(_slowed(c, draft.problem.scale.get(c.key, 1.0)) for c in columns.values())
    return capacity_per_s(traffic, slices, scaled, family)


def _slowed(column: Column, scale: float) -> Column:
    return replace(column, tiers=tuple((size, rate * scale) for size, rate in column.tiers)) if scale != 1 else column


def family_power_w(problem: Problem, solution: Solution, task: Task) -> tuple[float, float]:
    """Power [W] of a family, plain and weighed: its active power and its share, by traffic, of what is drawn anyway."""
    shared, mine = [solution.power_w, solution.weighed_w], [0.0, 0.0]
    for column in problem.columns:
        watts = column.energy_j * solution.traffic.get(column.key, 0.0) * problem.mean_share(column.family)
        watts += column.running_w * solution.slices.get(column.key, 0)
        for at, weight in enumerate((1.0, problem.weight(column.key.zone))):
            shared[at] -= watts * weight
            mine[at] += watts * weight if column.family == task.family else 0.0
    share = task.mean_per_s / sum(t.mean_per_s for t in problem.tasks)
    return mine[0] + shared[0] * share, mine[1] + shared[1] * share


def explanation(
    planner: str,
    inputs: PlanningInput,
    draft: Draft,
    family_aims: Mapping[str, FamilyAim],
    expected: Mapping[str, Expected],
    degraded: str,
) -> str:
    """Reason of a decision in words and numbers: carbon, demand, the mix, its cost against now, price, moves."""
    carbon, cap_w, solution = inputs.view.carbon, inputs.view.max_watts, draft.solution
    awake = sum(n for _, _, n in solution.layouts)
    parts = [f"{planner} ({inputs.view.trigger}): {carbon.intensity_g_per_kwh:.0f} g/kWh"]
    for task in inputs.tasks:
        e, family_aim = expected[task.family], family_aims[task.family]
        parts.append(
            f"{task.family}: {task.mean_per_s:.1f}/s (plan for {task.demand.rate_p90_per_s:.1f}/s): "
            f"{_mix(solution, task.family)}; accuracy {e.accuracy:.4f}, p95 {e.latency_ms_p95:.0f} ms of "
            f"{task.objective.slo_ms:.0f} ms, {e.joules_per_request:.2f} J and {e.grams_per_request * 1e3:.3f} mg a "
            f"request{_against(inputs, task.family, e)}"
        )
        if family_aim.why:
            parts.append(family_aim.why)
        if last := last_point(draft.problem, task.family, e.accuracy, e.joules_per_request):
            parts.append(last)
    parts.append(f"{awake} of {len(inputs.devices)} GPUs awake{_lost(inputs)}")
    parts.append(_moves(draft.moves, inputs.view.move_horizon_s) + draft.note)
    if cap_w:
        watts = capped_w(draft.problem, solution) + unplanned_w(inputs)
        parts.append(f"{watts:.0f} W of the {cap_w:g} W that the fleet may take")
    if degraded:
        parts.append(f"degraded: {degraded}")
    return "; ".join(parts)


def _mix(solution: Solution, family: str) -> str:
    total = sum(r for k, r in solution.traffic.items() if k[0] == family)
    shares: dict[str, float] = defaultdict(float)
    where: dict[str, list[str]] = defaultdict(list)
    for key in sorted(solution.traffic):
        if key[0] == family and total > 0:
            shares[key[3]] += solution.traffic[key] / total
            beside = "".join(f" beside {family}" for family, _ in key.beside)
            where[key[3]].append(f"{solution.slices[key]}x{key[2]}{beside}")
    return ", ".join(f"{v} {shares[v]:.1%} on {'+'.join(where[v])}" for v in sorted(shares, key=lambda v: -shares[v]))


def _against(inputs: PlanningInput, family: str, e: Expected) -> str:
    measured = next((m for m in inputs.view.measured if m.family == family), None)
    if measured is not None and measured.grams_per_request:
        return f" (now {measured.grams_per_request * 1e3:.3f} mg)"
    current = inputs.view.current.expected.get(family) if inputs.view.current else None
    if current is not None and current.joules_per_request > 0:
        change = e.joules_per_request / current.joules_per_request - 1
        return f" ({change:+.1%} joules against the plan in force)"
    return ""


def _lost(inputs: PlanningInput) -> str:
    stale = f", silent: {', '.join(inputs.view.fleet.stale)}" if inputs.view.fleet.stale else ""
    lost = f", {len(inputs.lost)} lost or out of service" if inputs.lost else ""
    left = (
        f", left out: {'; '.join(f'{name} ({why})' for name, why in inputs.unplannable)}" if inputs.unplannable else ""
    )
    return lost + left + stale


def _moves(moved: Moves, horizon_s: float) -> str:
    if not moved.any:
        return "nothing moves, only shares" if horizon_s >= 0 else ""
    words = [
        f"{number} {name if number == 1 else name + 's'}"
        for number, name in (
            (moved.starts, "slice start"),
            (moved.loads, "model load"),
            (moved.wakes, "wake-up"),
            (moved.sleeps, "sleep"),
        )
        if number
    ]
    return f"moves: {', '.join(words)} for {moved.energy_j:.0f} J, to pay back in {horizon_s:.0f} s"


def classes_missing_slo(
    solution: Solution,
    columns: Sequence[Column],
    tasks: Sequence[Task],
    settings: ExactSettings,
    scale: Mapping[ClassKey, float] = MappingProxyType({}),
) -> dict[ClassKey, float]:
    """Classes that miss the SLO too often, with their attainment.

    A pool is tried at its capacity first: what it keeps there it keeps at any rate below, and the answer is known from
    the last decision with a pool of that size.
    """
    found = {}
    requests = settings.kernel_requests
    for task in tasks:
        limit_ms = task.objective.slo_ms - settings.of(task.objective).overhead_ms
        allowed = (1 - task.objective.slo_quantile) * (1 + TOLERANCE)
        for column in columns:
            rate = solution.traffic.get(column.key, 0.0)
            if column.family != task.family or rate <= 0 or column.batch:  # the kernel forms no batches
                continue
            number = solution.slices[column.key]
            full = column.capacity_per_s(number) * scale.get(column.key, 1.0)
            trial = (number, column.service, gap_scv(task), requests, limit_ms)
            if full >= rate and 1 - _attained(full, *trial) <= allowed:
                continue
            attained = _attained(rate, *trial)
            if 1 - attained > allowed:
                found[column.key] = attained
    return found


@lru_cache(maxsize=8192)
def _attained(rate: float, number: int, service: ServiceTime, scv: float, requests: int, limit_ms: float) -> float:
    """Attainment of one pool: the same draws for the same question, so that it has one answer."""
    rng = default_rng(SEED)
    return serve_weighted((ServerClass(number, service),), arrivals_s(rate, scv, requests, rng), rng).attainment(
        limit_ms
    )


def latency_ms_p95(solution: Solution, columns: Sequence[Column], task: Task, settings: ExactSettings) -> float:
    """Latency that clients will see at the mean rate, transport included [ms]; shares and rates rounded in steps."""
    mine = [c for c in columns if c.family == task.family and solution.traffic.get(c.key, 0.0) > 0]
    if not mine:
        return 0.0
    if any(c.batch for c in mine):  # a batch to wait for, and one's own
        return max(c.unqueued_ms_p95 for c in mine) + settings.of(task.objective).overhead_ms
    total = sum(solution.traffic[c.key] for c in mine)
    pools = tuple(
        ServerClass(solution.slices[c.key], c.service, max(SHARE_STEP, _step(solution.traffic[c.key] / total)))
        for c in mine
    )
    rate = RATE_STEP ** round(math.log(task.mean_per_s, RATE_STEP))
    seen_ms = _seen_ms(pools, rate, gap_scv(task), settings.kernel_requests)
    return seen_ms + settings.of(task.objective).overhead_ms


def _step(share: float) -> float:
    return round(share / SHARE_STEP) * SHARE_STEP


@lru_cache(maxsize=8192)
def _seen_ms(pools: tuple[ServerClass, ...], rate: float, scv: float, requests: int) -> float:
    rng = default_rng(SEED)
    return serve_weighted(pools, arrivals_s(rate, scv, requests, rng), rng).quantile_ms(0.95)
