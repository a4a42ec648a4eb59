"""Counts that are given: what they cost whatever they serve, and the best split of the traffic over them.

Source: the program of `program.py` with its integers fixed: one linear program per family with one coupling constraint,
  min sum cost_k r_k   subject to   sum r_k = demand, sum (accuracy_k - floor) r_k >= 0, 0 <= r_k <= capacity_k,
solved by its multiplier: at the smallest price of accuracy at which filling classes by cost less price times accuracy
meets the floor, the two fillings of equal price that lie below and above it are mixed to meet it exactly.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from controller.planners.columns import ClassKey
from controller.planners.exact.model import Aim, Problem, Solution, awake_w, wake_j
from controller.planners.exact.program import TIE_J

FEASIBLE = 1e-9  # relative


class Share(NamedTuple):
    """A class as the split sees it: cost of one request, accuracy, and the most that it serves [1/s]."""

    key: ClassKey
    cost_j: float
    accuracy: float
    capacity_per_s: float


def split(classes: Sequence[Share], demand_per_s: float, floor: float) -> dict[ClassKey, float] | None:
    """The cheapest rates [1/s] that serve the demand at a mean accuracy of at least the floor; None: there are none."""
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
    classes: Sequence[Share], demand_per_s: float, floor: float, price: float, sign: int
) -> tuple[dict[ClassKey, float], float]:
    """Classes filled in the order of cost less price; of equals the more (-1) or less (+1) accurate first."""
    left, slack, rates = demand_per_s, 0.0, {}
    for c in sorted(classes, key=lambda c: (round(c.cost_j - price * c.accuracy, 9), sign * c.accuracy, c.key)):
        rates[c.key] = used = min(left, c.capacity_per_s)
        left -= used
        slack += used * (c.accuracy - floor)
    return rates, slack


def fixed_w(problem: Problem, aim: Aim, counts: Solution) -> float:
    """What counts cost in the program's objective beside their traffic [W]: baseline power and the moves to them."""
    watts = TIE_J * sum(counts.slices.values())
    for index, option, clock, number in counts.clocked():
        group = problem.groups[index]
        if option.slices:
            watts += number * awake_w(group.type, clock) * problem.weight(group.zone)
    if not aim.moves or problem.horizon_s <= 0:
        return watts
    columns = {c.key.model: c for c in problem.columns}
    loaded, standing, awake = _before(problem)
    models, shapes, used = Counter[ClassKey](), Counter[tuple[str, str, str]](), Counter[tuple[str, str]]()
    for key, number in counts.slices.items():
        models[key.model] += number
        shapes[key.device_type, key.zone, key.slice_type] += number
    for index, option, number in counts.layouts:
        used[problem.groups[index].place] += number if option.slices else 0
    starts = {(c.device_type, c.key.zone, c.slice_type): c.start_j for c in problem.columns}
    kinds = {g.place: g.type for g in problem.groups}
    joules = sum(max(0, n - loaded[m]) * columns[m].load_j * problem.weight(m.zone) for m, n in models.items())
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
