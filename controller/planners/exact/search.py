"""Search for the best counts: few devices by mixes, the program at once while it is small, else between a relaxation
and a restriction.

Data: a `Problem` and an `Aim`. Decision: the counts of `program.py`. Formulation:
  few devices (`FEW`), several families: the whole program starts from the best plan of mixes (`branching.py`). It has
    only to prove that there is nothing better, without the configurations that no better plan has.
  1 relaxation: a linear program in which every slice counts at the rate of the largest pool and counts are fractions.
    Its optimum is a bound that no plan beats; its prices say which classes and configurations a plan may need.
  2 restriction: the mixed-integer program over those alone. In a large fleet pools are large and fractions of a device
    do not matter, so that it meets the bound. Classes that fill the top tier many times over have that tier only.
  3 where it does not: the whole program, without the choices whose price there exceeds the gap: no better plan makes
    them. In a small fleet a fraction of a device is much, and only this proves anything.
The best plan found is the answer, with the gap to the best bound. Nodes bound the work, so that a decision replays.
Deviations: few devices are proven to within `PROOF_GAP` times the gap that is asked for, and are mostly nearer. The gap
is of the whole program, not of a restriction.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from controller.planners.columns import ClassKey
from controller.planners.exact.branching import MixedPlan, find_mixes
from controller.planners.exact.milp import Limits, NothingFound, Result
from controller.planners.exact.model import Aim, Problem, Solution, judged, judged_counts, layouts_of
from controller.planners.exact.program import Builder, Shape, slot_of

SMALL: Final = 400  # integers up to which the whole program is solved at once
SMALL_FEW: Final = 600  # the same with few devices, whose relaxation says little
MEDIUM: Final = 200  # devices
FEW: Final = 24  # devices up to which a plan of several families is first looked for among mixes
MIX_GAP: Final = 2e-3  # of the best plan of mixes
MIX_NODES: Final = 20
PROOF_GAP: Final = 8.0  # times the gap that is asked for: what is proven of few devices, whose proof takes longest
PROOF_DEVICES: Final = 6  # on more, the whole program proves nothing in time where it has more integers than
PROOF_INTEGERS: Final = 1000
PROOF_WORK: Final = 12_500.0  # times the nodes that are asked for: nodes times the square of the integers
SLACK: Final = 1e-9
WORK: Final = 1_000_000  # nodes times the square of the integers of one solve
NODES_MIN: Final = 2
GAP_WIDE: Final = 8e-3  # of a large program in a small fleet
PRICE_ERROR: Final = 1e-6
EXTRAS: Final = (0, 24, 96)  # classes beyond those that the relaxation uses
PRICE_MAX_W: Final = 1.0  # configurations that cost at most that much more per device are worth a look
ANY_PLAN: Final = Limits(nodes=100_000, gap=1.0)
MANY: Final = 200  # slices; a class that large stays in the top tier, whatever rounding does


def solve(problem: Problem, aim: Aim, limits: Limits, prove: bool = True) -> Solution | None:
    """Solve the program: the best counts, or None when the constraints leave no plan.

    `prove`: of few devices too, where the proof takes most of the time; without it the gap is infinite.
    Where the nodes end before the first plan, the first one is looked for as long as it takes.

    Raises:
        NothingFound, CpuLimitHit: see `Program.solve`.
    """
    if problem.number <= FEW and len(problem.tasks) > 1:
        try:
            found = find_mixes(problem, aim, MIX_GAP, MIX_NODES, PROOF_GAP * limits.gap if prove else 0.0)
        except NothingFound:  # a linear program without an answer: the whole program is left
            found = None
        known = _from_mixes(problem, aim, found, limits, prove) if found is not None else None
        if known is not None:
            return known
    whole = Builder(problem, aim).build()
    try:
        if sum(whole.program.integer) > (SMALL if problem.number >= MEDIUM else SMALL_FEW):
            return _between(problem, aim, limits)
        result = whole.program.solve(limits)
    except NothingFound:
        result = whole.program.solve(ANY_PLAN)
    return None if result is None else _solution(whole, result, result.gap)


def _from_mixes(problem: Problem, aim: Aim, found: MixedPlan, limits: Limits, prove: bool) -> Solution | None:
    """From the best plan of mixes on, the whole program without what no plan has that is better by more than the gap:
    what is left is mostly the proof."""
    places = [group.place for group in problem.groups]
    offered = {(*places[g], name, clock) for g, option, clock in found.useful for name, _ in option.slices}
    columns = {c.key for c in problem.columns if slot_of(c.key) in offered} | set(found.slices)
    shape = Shape(tight=True, columns=columns, layouts=found.useful | set(found.layouts))
    builder, gap = Builder(problem, aim, shape).build(), PROOF_GAP * limits.gap
    start = builder.program.fixed(builder.whole(found.layouts, found.slices))
    if start is None:  # split traffic under a cap, or a tolerance: the mixes are not a point of the whole program
        return None
    best = _solution(builder, start, 0.0)
    integers = sum(builder.program.integer)
    too_large = problem.number > PROOF_DEVICES and integers > PROOF_INTEGERS
    if not prove or too_large or _gap(best, found.bound) <= gap:
        return replace(best, gap=_gap(best, found.bound))
    work = PROOF_WORK * limits.nodes / max(1, integers) ** 2
    nodes = max(NODES_MIN, min(limits.nodes, int(work)))
    result = builder.program.solve(Limits(nodes, gap), start.values)
    if result is None:
        return replace(best, gap=_gap(best, found.bound))
    if result.objective < best.objective:
        best = _solution(builder, result, 0.0)
    lowest = result.bound
    if len(found.useful) < found.configurations:  # what was left out is no better than this
        lowest = min(lowest, found.objective - gap * abs(found.objective))
    return replace(best, gap=_gap(best, max(found.bound, lowest)))


def estimate(problem: Problem, aim: Aim, limits: Limits) -> tuple[Mapping[str, float], float] | None:
    """Estimate accuracy per family and weighed power [W] when counts may be fractions; None: there is no plan.

    Raises:
        NothingFound, CpuLimitHit: see `Program.solve`.
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
    slices = _counted(builder, result.values)
    flat = judged_counts(problem, Solution((), {}, traffic, 0.0, {}, result.objective, 0.0), counts, slices)
    return flat.accuracy, flat.weighed_w


def _between(problem: Problem, aim: Aim, limits: Limits) -> Solution | None:
    relaxed = Builder(problem, aim, Shape(best_rate=True)).build()
    bound = relaxed.program.solve(limits)
    if bound is None:
        return None
    lowest = bound.objective
    best = _restricted(relaxed, bound, limits)
    if best is None or _gap(best, lowest) > limits.gap:
        best, lowest = _whole(Builder(problem, aim, Shape(tight=True)).build(), best, lowest, limits)
    return None if best is None else replace(best, gap=_gap(best, lowest))


def _gap(best: Solution, lowest: float) -> float:
    return max(0.0, (best.objective - lowest) / max(abs(best.objective), SLACK))


def _restricted(relaxed: Builder, bound: Result, limits: Limits) -> Solution | None:
    """The best plan from what the relaxation uses, from more where that leaves none."""
    for extra in EXTRAS:
        builder = Builder(relaxed.problem, relaxed.aim, _restriction(relaxed, bound, extra)).build()
        with suppress(NothingFound):
            result = builder.program.solve(_bounded(builder, limits))
            if result is not None:
                return _solution(builder, result, 0.0)
    return None


def _whole(builder: Builder, best: Solution | None, lowest: float, limits: Limits) -> tuple[Solution | None, float]:
    """All that may be in a better plan, within the nodes that its size allows.

    Raises:
        NothingFound: neither they nor the restriction have a plan.
    """
    program = builder.program
    whole, program.integer = program.integer, [False] * len(program.integer)
    bound = program.solve(limits)
    program.integer = whole
    if bound is None:
        return best, lowest
    lowest = max(lowest, bound.objective)
    if best is not None:
        _drop(builder, bound, best.objective - lowest)
    try:
        result = program.solve(_bounded(builder, limits))
    except NothingFound:
        if best is None:
            raise
        return best, lowest
    if result is None:  # no better plan, or none at all
        return best, lowest
    if best is None or result.objective < best.objective:
        best = _solution(builder, result, 0.0)
    return best, max(lowest, min(result.bound, best.objective))


def _drop(builder: Builder, bound: Result, slack_w: float) -> None:
    """Drop the choices that no plan makes that is better than the best, by the prices of the whole without integers.

    A plan pays at least the price of a choice above the bound, and that of the traffic that makes it worth while: it
    has no more slices of a class than that needs.
    """
    program = builder.program
    for variable, whole in enumerate(program.integer):
        key, rate = builder.needs.get(variable, (None, 0.0))
        price = bound.reduced[variable]
        if key is not None:
            price += max(0.0, bound.reduced[builder.traffic[key]]) * rate
        if whole and bound.values[variable] <= SLACK and price > slack_w * (1 + PRICE_ERROR) + PRICE_ERROR:
            program.upper[variable] = 0.0
            program.integer[variable] = False


def _bounded(builder: Builder, limits: Limits) -> Limits:
    """Fewer nodes and a wider gap for a larger program: the time of a node grows with it."""
    integers = max(1, sum(builder.program.integer))
    nodes = max(NODES_MIN, min(limits.nodes, WORK // integers**2))
    return Limits(nodes, max(limits.gap, min(GAP_WIDE, limits.gap * (integers / SMALL) ** 2)))


def _restriction(relaxed: Builder, bound: Result, extra: int) -> Shape:
    """What the relaxation uses, and that many more classes and configurations in the order of their prices."""
    by_price = []
    for column in relaxed.columns:
        flow = relaxed.traffic[column.key]
        price, used = bound.reduced[flow], bound.values[flow] > SLACK or not relaxed.counts[column.key]
        for count, _, rate in relaxed.counts[column.key]:
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
        number = sum(bound.values[p.variable] * p.slices for p in parts)
        counts[key] = (int(number / 2) if number >= MANY else 0, int(2 * number) + MANY)
    return Shape(tight=True, columns=columns, layouts=chosen, counts=counts)


def _counted(builder: Builder, values: Sequence[float]) -> dict[ClassKey, float]:
    counts = {k: sum(values[p.variable] * p.slices for p in parts) for k, parts in builder.counts.items()}
    return {key: number + builder.fixed.get(key, 0) for key, number in counts.items()}


def _solution(builder: Builder, result: Result, gap: float) -> Solution:
    values = result.values
    chosen = [(g, o, f, round(values[v])) for g, o, f, v in builder.layouts if round(values[v]) and o.slices]
    for index, group in enumerate(builder.problem.groups):
        if group.must_stay:
            chosen += [(index, option, group.clocks[0], n) for option, n in layouts_of(group)]
    slices = {k: round(n) for k, n in _counted(builder, [round(v) for v in values]).items() if n}
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
