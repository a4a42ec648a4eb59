"""How the program is solved: at once while it is small, else between a relaxation and a restriction.

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

from collections.abc import Mapping
from typing import Final

from controller.planners.exact.milp import Limits, Result
from controller.planners.exact.model import Aim, Problem, Solution, judged, judged_counts, layouts_of
from controller.planners.exact.program import Builder, Shape

SMALL: Final = 400  # integers up to which the whole program is solved at once
SLACK: Final = 1e-9
EXTRAS: Final = (0, 24, 96)  # classes beyond those that the relaxation uses
PRICE_MAX_W: Final = 1.0  # configurations that cost at most that much more per device are worth a look
MANY: Final = 200  # slices; a class that large stays in the top tier, whatever rounding does


def solve(problem: Problem, aim: Aim, limits: Limits) -> Solution | None:
    """The best counts, or None when the constraints leave no plan.

    Raises:
        WallLimitHit: see `Program.solve`.
    """
    whole = Builder(problem, aim).build()
    if sum(whole.program.integer) <= SMALL:
        result = whole.program.solve(limits)
        return None if result is None else _solution(whole, result, result.gap)
    return _between(problem, aim, limits)


def estimate(problem: Problem, aim: Aim, limits: Limits) -> tuple[Mapping[str, float], float] | None:
    """Accuracy per family and weighed power [W] of the best plan when counts may be fractions; None: there is none.

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
    best: Solution | None = None
    for extra in EXTRAS:
        builder = Builder(problem, aim, _restriction(relaxed, bound, extra)).build()
        result = builder.program.solve(limits)
        if result is None:
            continue
        gap = max(0.0, (result.objective - bound.objective) / max(abs(result.objective), SLACK))
        if best is None or result.objective < best.objective:
            best = _solution(builder, result, gap)
        if best.gap <= limits.gap:
            break
    return best


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
        if number >= MANY:
            counts[key] = (int(number / 2), int(2 * number))
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
