"""Search for the best counts: the program at once while it is small, else between a relaxation and a restriction.

Data: a `Problem` and an `Aim`. Decision: the counts of `program.py`. Formulation:
  1 relaxation: a linear program in which every slice counts at the rate of the largest pool and counts are fractions.
    Its optimum is a bound that no plan beats; its prices say which classes and configurations a plan may need.
  2 restriction: the mixed-integer program over those alone. In a large fleet pools are large and fractions of a device
    do not matter, so that it meets the bound; classes that fill the top tier many times over have that tier only.
  3 where it does not: more classes, as far as prices allow (a variable whose price exceeds the gap is in no better
    plan), and the whole program's own bound.
The best plan found is the answer, with the gap to the best bound. Nodes bound the work, so that a decision replays.
Deviations: none; the gap is of the whole program, not of the restriction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from controller.planners.columns import ClassKey
from controller.planners.exact.milp import Limits, Result
from controller.planners.exact.model import Aim, Problem, Solution, judged, judged_counts, layouts_of
from controller.planners.exact.program import Builder, Shape

SMALL: Final = 400  # integers up to which the whole program is solved at once
SMALL_FEW: Final = 600  # the same with few devices, whose relaxation says little
MEDIUM: Final = 200  # devices
SLACK: Final = 1e-9
WORK: Final = 200_000  # nodes times integers of one solve of the whole program
NODES_MIN: Final = 20
GAP_WIDE: Final = 4e-3  # of a large program in a small fleet
FEW: Final = 32  # devices; below it a fraction of one is so much that a large program stays far from its bound
WHOLE_MAX: Final = 1000  # integers up to which the whole program is worth its time with so few devices
WIDER: Final = (40,)
EXTRAS: Final = (0, 24, 96)  # classes beyond those that the relaxation uses
PRICE_MAX_W: Final = 1.0  # configurations that cost at most that much more per device are worth a look
MANY: Final = 200  # slices; a class that large stays in the top tier, whatever rounding does

Counts = dict[ClassKey, int]


def solve(problem: Problem, aim: Aim, limits: Limits) -> Solution | None:
    """Solve the program: the best counts, or None when the constraints leave no plan.

    Raises:
        WallLimitHit: see `Program.solve`.
    """
    whole = Builder(problem, aim).build()
    if sum(whole.program.integer) <= (SMALL if problem.number >= MEDIUM else SMALL_FEW):
        result = whole.program.solve(limits)
        return None if result is None else _solution(whole, result, result.gap)
    return _between(problem, aim, limits)


def estimate(problem: Problem, aim: Aim, limits: Limits) -> tuple[Mapping[str, float], float] | None:
    """Estimate accuracy per family and weighed power [W] when counts may be fractions; None: there is no plan.

    Raises:
        WallLimitHit: see `Program.solve`.
    """
    builder = Builder(problem, aim).build()
    if sum(builder.program.integer) <= SMALL:
        builder.program.relax_counts()
    else:
        builder = Builder(problem, aim, Shape(best_rate=True)).build()
    result = builder.program.solve(limits)
    if result is None:
        return None
    traffic = {k: r for k, v in builder.traffic.items() if (r := result.values[v]) > 0}
    counts = [(g, option, clock, result.values[v]) for g, option, clock, v in builder.layouts]
    for index, group in enumerate(problem.groups):
        if group.must_stay:
            counts += [(index, option, group.clocks[0], float(n)) for option, n in layouts_of(group)]
    flat = judged_counts(problem, Solution((), {}, traffic, 0.0, {}, result.objective, 0.0), counts)
    return flat.accuracy, flat.weighed_w


def _between(problem: Problem, aim: Aim, limits: Limits) -> Solution | None:
    relaxed = Builder(problem, aim, Shape(best_rate=True)).build()
    bound = relaxed.program.solve(limits)
    if bound is None:
        return None
    lowest = bound.objective
    best = _restricted(relaxed, bound, limits, None, EXTRAS)
    if best is None or _gap(best, lowest) > limits.gap:
        caps = _caps(relaxed, bound, best.objective - lowest) if best else {}
        builder = Builder(problem, aim, _capped(problem, caps)).build()
        if best is None or problem.number >= FEW or sum(builder.program.integer) <= WHOLE_MAX:
            best, lowest = _whole(builder, best, lowest, limits)
        else:
            best = _restricted(relaxed, bound, limits, best, WIDER)
    return None if best is None else replace(best, gap=_gap(best, lowest))


def _gap(best: Solution, lowest: float) -> float:
    return max(0.0, (best.objective - lowest) / max(abs(best.objective), SLACK))


def _restricted(
    relaxed: Builder, bound: Result, limits: Limits, best: Solution | None, extras: Sequence[int]
) -> Solution | None:
    """The best plan from what the relaxation uses, from more where that leaves none."""
    for extra in extras:
        builder = Builder(relaxed.problem, relaxed.aim, _restriction(relaxed, bound, extra)).build()
        result = builder.program.solve(_bounded(builder, limits))
        if result is not None:
            better = best is None or result.objective < best.objective
            return _solution(builder, result, 0.0) if better else best
    return best


def _whole(builder: Builder, best: Solution | None, lowest: float, limits: Limits) -> tuple[Solution | None, float]:
    """All that may be in a better plan, within the nodes that its size allows."""
    result = builder.program.solve(_bounded(builder, limits))
    if result is None:  # not even the nodes' worth: what there is, with the bound that there is
        return best, lowest
    if best is None or result.objective < best.objective:
        best = _solution(builder, result, 0.0)
    return best, max(lowest, min(result.bound, best.objective))


def _bounded(builder: Builder, limits: Limits) -> Limits:
    """Fewer nodes and a wider gap for a larger program: the time of a node grows with it."""
    integers = max(1, sum(builder.program.integer))
    nodes = max(NODES_MIN, min(limits.nodes, WORK // integers))
    return Limits(nodes, max(limits.gap, min(GAP_WIDE, limits.gap * integers / SMALL)))


def _capped(problem: Problem, caps: Counts, best_rate: bool = False) -> Shape:
    hosted = {key for g in problem.groups for key, _ in g.hosts}
    columns = {c.key for c in problem.columns if caps.get(c.key, 1) > 0 or c.key in hosted}
    return Shape(best_rate, columns, counts={key: (0, n) for key, n in caps.items()})


def _caps(relaxed: Builder, bound: Result, slack_w: float) -> Counts:
    """How many slices of each class a plan can have that is better than the best by the relaxation's prices.

    A plan pays at least the prices of its slices and of their traffic above the bound. It needs no more slices than its
    traffic does, which is more than all but one of them serve at the lowest rate.
    """
    caps = {}
    least = {t.family: max(t.objective.replicas_min, t.objective.spread_min) for t in relaxed.problem.tasks}
    for column in relaxed.columns:
        for count, _ in relaxed.counts[column.key]:
            lowest = min(rate for _, rate in column.tiers) * relaxed.problem.scale.get(column.key, 1.0)
            extra = max(0.0, bound.reduced[relaxed.traffic[column.key]]) * lowest
            price = max(0.0, bound.reduced[count]) + extra
            if price > SLACK:
                caps[column.key] = max(int((slack_w + extra) / price + 1e-6), least[column.family] - 1)
    return caps


def _restriction(relaxed: Builder, bound: Result, extra: int) -> Shape:
    """What the relaxation uses, and that many more classes and configurations in the order of their prices."""
    by_price = []
    for column in relaxed.columns:
        flow = relaxed.traffic[column.key]
        price, used = bound.reduced[flow], bound.values[flow] > SLACK or not relaxed.counts[column.key]
        for count, rate in relaxed.counts[column.key]:
            price += bound.reduced[count] / rate
            used = used or bound.values[count] > SLACK
        demand = next(t.demand.rate_p90_per_s for t in relaxed.problem.tasks if t.family == column.family)
        by_price.append((not used, price * demand, column.key))
    by_price.sort()
    columns = {key for unused, _, key in by_price if not unused}
    columns |= {key for _, _, key in by_price[len(columns) :][:extra]}
    layouts = sorted((bound.values[v] <= SLACK, bound.reduced[v], g, o.slices, f, o) for g, o, f, v in relaxed.layouts)
    chosen = {(g, o, f) for unused, price, g, _, f, o in layouts if not unused or price <= PRICE_MAX_W}
    counts = {}
    for key, parts in relaxed.counts.items():
        number = sum(bound.values[v] for v, _ in parts)
        counts[key] = (int(number / 2) if number >= MANY else 0, int(2 * number) + MANY)
    return Shape(columns=columns, layouts=chosen, counts=counts)


def _solution(builder: Builder, result: Result, gap: float) -> Solution:
    values = result.values
    chosen = [(g, o, f, round(values[v])) for g, o, f, v in builder.layouts if round(values[v]) and o.slices]
    for index, group in enumerate(builder.problem.groups):
        if group.must_stay:
            chosen += [(index, option, group.clocks[0], n) for option, n in layouts_of(group)]
    slices = dict(builder.fixed)
    for key, parts in builder.counts.items():
        slices[key] = slices.get(key, 0) + sum(round(values[v]) for v, _ in parts)
    slices = {k: n for k, n in slices.items() if n}
    traffic = {k: max(0.0, values[v]) for k, v in builder.traffic.items() if k in slices}
    short = sum(values[v] for v in builder.short.values())
    found = Solution(
        tuple((g, o, n) for g, o, _, n in chosen),
        slices,
        traffic,
        0.0,
        {},
        result.objective,
        gap,
        max(0.0, short),
        tuple(f for _, _, f, _ in chosen),
    )
    return judged(builder.problem, found)
