"""Reuse of solutions: a program that was solved before, or one between programs that were, needs no new search.

Source: linear programming folklore. f(v, t) is the least cost at a price of accuracy v and a target t, for a fixed
fleet and demand. It is concave in v (a minimum of straight lines) and never falls with t. The points of a grid of
prices and targets are solved once each, without the price of moves. Then f at the lower target, interpolated between
two prices, is a bound that no plan beats, whatever runs now.
Data: `Problem`, `Aim` of one family. Decision: counts. Formulation: candidates are the plans of the grid points around
an aim, their traffic split again for this very aim, with the moves that they take. The best of them is the answer if it
is proven to be within `WITHIN` gaps of the bound. Otherwise the program is solved.
`split` is the program of `program.py` with its integers fixed: one linear program per family with one coupling
constraint. It is min sum cost_k r_k subject to sum r_k = demand, sum (accuracy_k - floor) r_k >= 0, 0 <= r_k <=
capacity_k. Its multiplier solves it: the smallest price of accuracy at which filling classes by cost less price times
accuracy meets the floor. Two fillings of equal price are below and above the floor there; they are mixed to meet it
exactly.
Everything remembered is a function of its key alone, so that a decision does not depend on those before it.
Deviations: only for one family on many devices (`DEVICES_MIN`): there a search takes longer than the grid saves.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Final, NamedTuple

from controller.planners.columns import ClassKey, Column, class_of
from controller.planners.exact.milp import Limits
from controller.planners.exact.model import (
    Aim,
    Census,
    Group,
    Problem,
    Solution,
    awake_w,
    capped_w,
    judged,
    layouts_of,
    request_j,
    wake_j,
)
from controller.planners.exact.program import TIE_J
from controller.planners.exact.search import solve
from controller.planners.planning_input import Task
from trefoil.core.common import IdentityKey
from trefoil.core.demand import Demand
from trefoil.core.objective import Objective, ObjectiveMode

DEVICES_MIN: Final = 8
PRICE_STEP: Final = 1.1
TARGET_STEP: Final = 1e-3
BEYOND: Final = 1e-6  # of accuracy, above all that the solver's tolerance lets through
RUNG_STEPS: Final = 16  # of the targets, from which a ladder begins
RUNGS_MAX: Final = 4
DEVICES_MAX: Final = 64  # beyond it a search is short of a proof itself
WITHIN: Final = 2.0  # times the gap that a search stops at
SLACK_W: Final = 1e-9
FEASIBLE: Final = 1e-9  # relative


@dataclass(frozen=True, slots=True)
class Need:
    """Need of one family that a program depends on; hashable, unlike an objective with its `params`."""

    family: str
    rate_per_s: float
    rate_p90_per_s: float
    hard_min_accuracy: float
    replicas_min: int
    spread_min: int

    def task(self) -> Task:
        """Task that asks for exactly this."""
        objective = Objective(
            self.family,
            hard_min_accuracy=self.hard_min_accuracy,
            replicas_min=self.replicas_min,
            spread_min=self.spread_min,
        )
        return Task(objective, Demand(self.family, "", self.rate_per_s, self.rate_p90_per_s))


def need_of(task: Task) -> Need:
    """Need of a task."""
    o, d = task.objective, task.demand
    return Need(task.family, task.mean_per_s, d.rate_p90_per_s, o.hard_min_accuracy, o.replicas_min, o.spread_min)


@dataclass(frozen=True, slots=True)
class _ProblemValue:
    """A `Problem` by value, without the names of its devices; groups with what stands on them."""

    groups: tuple[tuple[Group, tuple[tuple[object, ...], ...]], ...]
    columns: tuple[Column, ...]
    needs: tuple[Need, ...]
    horizon_s: float
    scale: tuple[tuple[ClassKey, float], ...]
    weights: tuple[tuple[str, float], ...]
    max_watts: float
    awake_min: int


class _ProblemKey:
    """A problem under its key: what a memo is asked with."""

    __slots__ = ("_hash", "key", "problem")

    def __init__(self, problem: Problem, moves: bool) -> None:
        groups = []
        for g in problem.groups:
            bare = Group(g.type, g.options, (), g.hosts, g.must_stay, g.clocks, g.zone, g.number)
            if moves or g.must_stay:
                object.__setattr__(bare, "census", g.census)
            groups.append(bare)
        self.problem = replace(problem, groups=tuple(groups), horizon_s=problem.horizon_s if moves else 0.0)
        self.key = _ProblemValue(
            tuple((g, _counted(g.census)) for g in groups),
            problem.columns,
            tuple(need_of(t) for t in problem.tasks),
            self.problem.horizon_s,
            tuple(sorted(problem.scale.items())),
            tuple(sorted(problem.weights.items())),
            problem.max_watts,
            problem.awake_min,
        )
        self._hash = hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ProblemKey) and (self is other or self.key == other.key)


def _counted(census: Census) -> tuple[tuple[object, ...], ...]:
    layouts = sorted(((o.slices, n) for o, n in census.layouts.items()))
    return tuple(sorted(census.models.items())), tuple(sorted(census.shapes.items())), tuple(layouts), (census.awake,)


@lru_cache(maxsize=4096)
def _solved(
    asked: _ProblemKey,
    values: tuple[tuple[str, float], ...],
    targets: tuple[tuple[str, float], ...],
    shortage: bool,
    limits: Limits,
) -> Solution | None:
    return solve(asked.problem, Aim(dict(values), dict(targets), shortage), limits)


def solve_or_reuse(problem: Problem, aim: Aim, limits: Limits, ladder: bool = False) -> Solution | None:
    """Solution as `solve` finds it, or a plan proven to be nearly as good; None when the constraints leave no plan.

    `ladder`: many aims of the grid follow, so that what answers several of them is worth looking for.

    Raises:
        CpuLimitHit: see `Program.solve`.
    """
    if not aim.shortage_allowed and any(_out_of_reach(problem, aim, t) for t in problem.tasks):
        return None
    few = DEVICES_MIN <= problem.number <= DEVICES_MAX and len(problem.tasks) == 1 and not aim.shortage_allowed
    if few and aim.moves and not any(g.must_stay for g in problem.groups):
        found = _proven(problem, aim, limits, ladder)
        if found is not None:
            return found
    values, targets = tuple(sorted(aim.value_j.items())), tuple(sorted(aim.target.items()))
    if not aim.moves:
        return solve(problem, aim, limits)
    return _solved(_ProblemKey(problem, True), values, targets, aim.shortage_allowed, limits)


def has_plan(problem: Problem, aim: Aim, limits: Limits) -> bool:
    """Whether the constraints leave a plan, whatever its moves cost.

    Raises:
        CpuLimitHit: see `Program.solve`.
    """
    values, targets = tuple(sorted(aim.value_j.items())), tuple(sorted(aim.target.items()))
    return _solved(_ProblemKey(problem, False), values, targets, aim.shortage_allowed, limits) is not None


def _out_of_reach(problem: Problem, aim: Aim, task: Task) -> bool:
    """Whether a target that has to be met is above the most accurate class."""
    best = max((c.accuracy for c in problem.columns if c.family == task.family), default=0.0)
    return task.family not in aim.lack_j and aim.target.get(task.family, 0.0) > best + BEYOND


def _proven(problem: Problem, aim: Aim, limits: Limits, ladder: bool) -> Solution | None:
    """The best plan of the grid points around an aim, or what stands, if it is proven to be good enough."""
    family = problem.tasks[0].family
    v, t = aim.value_j.get(family, 0.0), aim.target.get(family, 0.0)
    asked, tight = _ProblemKey(problem, False), Limits(limits.nodes, limits.gap / 2)
    prices, (low, high) = _prices_around(v), _targets_around(t)
    part = (v - prices[0]) / (prices[1] - prices[0]) if prices[1] > prices[0] else 0.0
    best: Solution | None = None
    for target in _target_ladder(asked, family, prices[0], low, tight) if ladder and prices[0] == prices[1] else (low,):
        lows = [_solved(asked, ((family, at),), ((family, target),), False, tight) for at in dict.fromkeys(prices)]
        if None in lows:  # not even the lower target can be met
            return None
        bounds = [s.objective * (1 - s.gap) for s in lows if s is not None]
        bound = bounds[0] + part * (bounds[-1] - bounds[0])
        highs = prices if target == low < high else ()
        for candidate in _candidates(problem, lows, asked, family, highs, high, tight):
            fitted = refit(problem, aim, candidate)
            if fitted is not None and (best is None or fitted.objective < best.objective - SLACK_W):
                best = fitted
            if best is not None and best.objective - bound <= WITHIN * limits.gap * best.objective:
                return replace(best, gap=max(0.0, (best.objective - bound) / max(best.objective, SLACK_W)))
    return None


def _target_ladder(asked: _ProblemKey, family: str, value: float, target: float, limits: Limits) -> Iterator[float]:
    """Lower targets, then the target itself, while none of their plans is an answer.

    The best plan for a target often reaches more, and is then the best for every target up to there: where many targets
    are asked for, few plans answer them. A rung depends on the rungs below it and on nothing that was asked before.
    """
    rung = _targets_around(target, RUNG_STEPS)[0]
    for _ in range(RUNGS_MAX):
        if rung >= target - TARGET_STEP / 2:
            break
        yield rung
        found = _solved(asked, ((family, value),), ((family, rung),), False, limits)
        reached = found.accuracy[family] if found is not None else target
        rung = _targets_around(max(reached, rung + TARGET_STEP))[1]
    yield target


def _candidates(
    problem: Problem,
    lows: Sequence[Solution | None],
    asked: _ProblemKey,
    family: str,
    prices: Sequence[float],
    target: float,
    limits: Limits,
) -> Iterator[Solution]:
    """What stands first: it needs no moves. Then the plans of the lower target, then those of the higher one."""
    still = current_solution(problem)
    if still is not None:
        yield still
    yield from (s for s in lows if s is not None)
    for price in prices:
        high = _solved(asked, ((family, price),), ((family, target),), False, limits)
        if high is not None:
            yield high


def _prices_around(value: float) -> tuple[float, float]:
    """The grid's prices below and above one."""
    if value <= 0:
        return 0.0, 0.0
    step = math.floor(math.log(value, PRICE_STEP) + 1e-9)
    low = float(PRICE_STEP**step)
    return (low, low) if abs(value - low) < 1e-9 * low else (low, float(PRICE_STEP ** (step + 1)))


def price_below(value: float) -> float:
    """The next lower price that `on_grid` leaves as it is: prices of many demands and targets are few."""
    return float(PRICE_STEP ** (2 * math.floor(math.log(value, PRICE_STEP) / 2 + 1e-9))) if value > 0 else 0.0


def _targets_around(target: float, steps: int = 1) -> tuple[float, float]:
    """The grid's targets below and above one, on every so many steps of it."""
    step = math.floor(target / TARGET_STEP / steps + 1e-9) * steps
    low = step * TARGET_STEP
    return (low, low) if abs(target - low) < 1e-12 else (low, (step + steps) * TARGET_STEP)


def on_grid(problem: Problem, aim: Aim, up: bool) -> Aim:
    """The next higher targets of the grid (or lower, of a budget: what lacks is bought back) and the nearest of every
    second of its prices: aims of a kind, each solved once."""
    prices, targets = {}, {}
    for task in problem.tasks:
        value, target = aim.value_j.get(task.family, 0.0), aim.target.get(task.family, 0.0)
        prices[task.family] = PRICE_STEP ** (2 * round(math.log(value, PRICE_STEP) / 2)) if value > 0 else 0.0
        floating = up or task.objective.mode in (ObjectiveMode.UNSPECIFIED, ObjectiveMode.BUDGET)
        targets[task.family] = _targets_around(target)[up] if floating else target
    return replace(aim, value_j=prices, target=targets)


def rounded_demand(tasks: Sequence[Task], step: float) -> tuple[Task, ...]:
    """Tasks whose demand is rounded up to a power of `step`."""
    return tuple(replace(t, demand=_rounded_demand(t.demand, step)) for t in tasks)


def _rounded_demand(demand: Demand, step: float) -> Demand:
    def up(rate_per_s: float) -> float:
        return step ** math.ceil(math.log(rate_per_s, step) - 1e-9) if rate_per_s > 0 else rate_per_s

    ahead = demand.forecast
    return replace(
        demand,
        rate_per_s=up(demand.rate_per_s),
        rate_p90_per_s=up(demand.rate_p90_per_s),
        forecast=replace(ahead, mean_per_s=up(ahead.mean_per_s)) if ahead else None,
    )


def current_solution(problem: Problem) -> Solution | None:
    """Solution of what stands; None when it does not meet replicas and spread, or has no operating point."""
    return _current_solution(IdentityKey(problem))


@lru_cache(maxsize=8)  # what stands is an answer to try, and then what a plan with moves is weighed against
def _current_solution(asked: IdentityKey[Problem]) -> Solution | None:
    problem = asked.value
    columns = {c.key for c in problem.columns}
    slices = Counter(class_of(d, r) for d in problem.devices for r in d.running)
    layouts = [(i, option, n) for i, g in enumerate(problem.groups) for option, n in layouts_of(g)]
    if any(key not in columns for key in slices) or any(d.clock_mhz for d in problem.devices):
        return None
    awake = sum(n for _, _, n in layouts)
    for task in problem.tasks:
        least = max(1, task.objective.replicas_min, task.objective.spread_min)
        mine = sum(n for key, n in slices.items() if key.family == task.family)
        if mine < least or awake < max(task.objective.spread_min, problem.awake_min):
            return None
    return Solution(tuple(layouts), dict(slices), {}, 0.0, {}, 0.0, 0.0)


def refit(problem: Problem, aim: Aim, counts: Solution) -> Solution | None:
    """Solution with these slices and the best traffic for an aim. None if they cannot meet it, or if that traffic takes
    more than the fleet's cap (another split might not: the program decides)."""
    return _refit(IdentityKey(problem), IdentityKey(aim), IdentityKey(counts))


@lru_cache(maxsize=8)  # as above
def _refit(asked: IdentityKey[Problem], wanted: IdentityKey[Aim], given: IdentityKey[Solution]) -> Solution | None:
    problem, aim, counts = asked.value, wanted.value, given.value
    columns = {c.key: c for c in problem.columns}
    traffic: dict[ClassKey, float] = {}
    objective = fixed_w(problem, aim, counts)
    for task in problem.tasks:
        mine = [(columns[k], n) for k, n in sorted(counts.slices.items()) if k.family == task.family]
        best = max(c.accuracy for c in problem.columns if c.family == task.family)
        classes = [
            ClassShare(
                c.key,
                request_j(problem, aim, c, best),
                c.accuracy,
                c.capacity_per_s(n) * problem.scale.get(c.key, 1.0),
            )
            for c, n in mine
        ]
        floor = max(task.objective.hard_min_accuracy, aim.target.get(task.family, 0.0))
        rates = split(classes, task.demand.rate_p90_per_s, floor)
        if rates is None:
            return None
        traffic |= rates
        objective += sum(c.cost_j * rates[c.key] for c in classes)
    found = judged(problem, replace(counts, traffic=traffic, objective=objective, gap=0.0))
    return found if problem.max_watts == math.inf or capped_w(problem, found) <= problem.max_watts else None


class ClassShare(NamedTuple):
    """Share of a class as the split sees it: cost of one request, accuracy, and the most that it serves [1/s]."""

    key: ClassKey
    cost_j: float
    accuracy: float
    capacity_per_s: float


def split(classes: Sequence[ClassShare], demand_per_s: float, floor: float) -> dict[ClassKey, float] | None:
    """Split of the demand: the cheapest rates [1/s] at a mean accuracy of at least the floor; None: there are none."""
    if sum(c.capacity_per_s for c in classes) < demand_per_s * (1 - FEASIBLE):
        return None
    steps = {
        max(0.0, (a.cost_j - b.cost_j) / (a.accuracy - b.accuracy))
        for a, b in combinations(classes, 2)
        if a.accuracy != b.accuracy
    }
    tolerance = FEASIBLE * demand_per_s
    for price in sorted({0.0, *steps}):
        above, slack = _filled(classes, demand_per_s, floor, price, -1)
        if slack < -tolerance:
            continue
        below, short = _filled(classes, demand_per_s, floor, price, 1)
        part = -short / (slack - short) if short < -tolerance else 0.0
        if price == 0.0 and short >= -tolerance:
            return below
        return {k: part * above[k] + (1 - part) * below[k] for k in above}
    return None


def _filled(
    classes: Sequence[ClassShare], demand_per_s: float, floor: float, price: float, sign: int
) -> tuple[dict[ClassKey, float], float]:
    """Classes filled in the order of cost less price; of equals the more (-1) or less (+1) accurate first."""
    left, slack, rates = demand_per_s, 0.0, {}
    for c in sorted(classes, key=lambda c: (round(c.cost_j - price * c.accuracy, 9), sign * c.accuracy, c.key)):
        rates[c.key] = used = min(left, c.capacity_per_s)
        left -= used
        slack += used * (c.accuracy - floor)
    return rates, slack


def fixed_w(problem: Problem, aim: Aim, counts: Solution) -> float:
    """Fixed cost of counts in the program's objective [W]: baseline power, `running_w` of slices, and the moves."""
    columns = {c.key: c for c in problem.columns}
    watts = sum(n * (TIE_J + columns[k].running_w * problem.weight(k.zone)) for k, n in counts.slices.items())
    for index, option, clock, number in counts.clocked():
        group = problem.groups[index]
        if option.slices:
            watts += number * awake_w(group.type, clock) * problem.weight(group.zone)
    if not aim.moves or problem.horizon_s <= 0:
        return watts
    models_j = {c.key.model: c.load_j for c in problem.columns}
    loaded, standing, awake = _before(problem)
    models, shapes, used = Counter[ClassKey](), Counter[tuple[str, str, str]](), Counter[tuple[str, str]]()
    for key, number in counts.slices.items():
        models[key.model] += number
        shapes[key.device_type, key.zone, key.slice_type] += number if key.leads else 0
    for index, option, number in counts.layouts:
        used[problem.groups[index].place] += number if option.slices else 0
    starts = {(c.device_type, c.key.zone, c.slice_type): c.start_j for c in problem.columns}
    kinds = {g.place: g.type for g in problem.groups}
    joules = sum(max(0, n - loaded[m]) * models_j[m] * problem.weight(m.zone) for m, n in models.items())
    joules += sum(max(0, n - standing[s]) * starts[s] * problem.weight(s[1]) for s, n in shapes.items())
    joules += sum(max(0, n - awake[p]) * wake_j(kinds[p]) * problem.weight(p[1]) for p, n in used.items())
    return watts + joules / problem.horizon_s


def _before(problem: Problem) -> tuple[Counter[ClassKey], Counter[tuple[str, str, str]], Counter[tuple[str, str]]]:
    loaded, standing, awake = Counter[ClassKey](), Counter[tuple[str, str, str]](), Counter[tuple[str, str]]()
    for group in problem.groups:
        loaded.update(group.census.models)
        standing.update({(*group.place, shape): n for shape, n in group.census.shapes.items()})
        awake[group.place] += group.census.awake
    return loaded, standing, awake
