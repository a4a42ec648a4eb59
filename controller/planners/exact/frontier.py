"""Frontier of cost over accuracy, and the price of accuracy for a budget over a window.

Source: DESIGN section 4, mode budget. The window's problem, over intervals i with weight w_i and intensity CI_i, is:
  min sum_i w_i CI_i P(A_i)   subject to   sum_i w_i A_i >= required mean.
P is the power of the cheapest plan of accuracy A. On the lower convex hull of (A, P) the problem is solved by buying
accuracy where it is cheapest: the step from hull point j to j + 1 costs CI_i * slope_j per unit. The last step bought
is the window's dual, the price; it also says what accuracy the current interval has to reach.
Data: the frontier at the current demand; the distribution of intensity (a forecast, else what was seen); the budget.
Where a whole day is known, also the requests of each hour of the day: weights w_i are the requests of an interval then.
A fleet without end, where counts may be fractions, has a frontier that needs no solve (`endless`): each class costs its
energy and its part of a device that is always busy.
Deviations: an interval of another demand is taken to have the frontier of the current one, per request. Before a day is
known the rest of the window is taken to have the current demand. The budget spent corrects both tick by tick.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from controller.observe.core.carbon_inputs import forecast_refusal
from controller.planners.exact.milp import Limits, NothingFound
from controller.planners.exact.model import Aim, Problem, awake_w
from controller.planners.exact.program import place_of
from controller.planners.exact.search import estimate, solve
from trefoil.core.brains import BudgetState, PlanView
from trefoil.core.device_types import device_share
from trefoil.core.units import HOUR_S

RELATIVE_TOLERANCE: Final = 5e-3  # of power: a hull point that lies closer to the chord is not worth a solve
STEEP_J: Final = 1e5  # per request and unit of accuracy: more than any plan saves
WHOLE_DEVICES_MAX: Final = (
    8  # from so many devices on, a fraction of one says as much of the price, in a third of the time
)
REPAID: Final = 2.0  # times what a full window lacks: of a plan's steady error a third remains, and it swings little
LEFT_MIN: Final = 0.04  # of a window: its last part is planned as one, its first is too short to tell a rate


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A plan on the frontier; its power is weighed with the carbon of the zones."""

    accuracy: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Price:
    """The window's dual [grams per request and unit of accuracy], and what the current interval has to reach."""

    grams: float
    target: float
    required: float
    why: str


def frontier(problem: Problem, family: str, limits: Limits, solves_max: int) -> tuple[FrontierPoint, ...]:
    """The lower convex hull of (accuracy, power) by ascending accuracy; empty when there is no plan at all."""
    still = replace(problem, horizon_s=0.0)
    low = cheapest(still, family, Aim(), limits)
    if low is None:
        return ()
    high = _highest(still, family, limits) or low  # the node limit can end a search before its first plan
    left = solves_max - 3
    hull = [low, high] if high.accuracy > low.accuracy + 1e-7 else [low]
    gaps = list(pairwise(hull))
    while gaps and left > 0:
        a, b = gaps.pop(0)  # widest first would need an order; breadth first is as good and simple
        slope = (b.power_w - a.power_w) / (b.accuracy - a.accuracy)
        left -= 1
        middle = cheapest(still, family, Aim(value_j={family: _value(problem, family, slope)}), limits)
        if middle is None or not _below(middle, a, b, slope):
            continue
        hull.append(middle)
        gaps += [(a, middle), (middle, b)]
    return _convex(hull)


def endless(problem: Problem, family: str) -> tuple[FrontierPoint, ...]:
    """Frontier of one family on a fleet without end; power is above that of sleep."""
    kinds = {g.place: g.type for g in problem.groups}
    mean, mean_per_s = problem.mean_share(family), next(t.mean_per_s for t in problem.tasks if t.family == family)
    points = []
    for column in (c for c in problem.columns if c.family == family):
        kind, key = kinds[place_of(column.key)], column.key
        slice_w = column.running_w + awake_w(kind, key.clock_mhz) * device_share(kind, key.slice_type)
        rate_per_s = max(rate for _, rate in column.tiers) * problem.scale.get(key, 1.0)
        each_j = (column.energy_j + slice_w / (rate_per_s * mean)) * problem.weight(key.zone)
        points.append(FrontierPoint(column.accuracy, each_j * mean_per_s))
    return _convex(points)


def power_at(hull: Sequence[FrontierPoint], accuracy: float) -> float:
    """Power on a frontier at an accuracy [W]; below its least accurate point that of this point."""
    return float(np.interp(accuracy, [p.accuracy for p in hull], [p.power_w for p in hull]))


def _value(problem: Problem, family: str, slope_w: float) -> float:
    """Watts per unit of accuracy as joules per request and unit of accuracy."""
    return slope_w / next(t.mean_per_s for t in problem.tasks if t.family == family)


def _highest(problem: Problem, family: str, limits: Limits) -> FrontierPoint | None:
    """The most accuracy, then the least power that reaches it. Whole devices: every target is below this point."""
    steep = _whole(problem, family, Aim(value_j={family: STEEP_J}), limits)
    best = max(c.accuracy for c in problem.columns if c.family == family)
    if steep is None or steep.accuracy > best - 1e-7:  # nothing lacks, so that only power was left to weigh
        return steep
    return _whole(problem, family, Aim(target={family: steep.accuracy - 1e-6}), limits) or steep


def cheapest(problem: Problem, family: str, aim: Aim, limits: Limits) -> FrontierPoint | None:
    """The cheapest plan for an aim, from some devices on with fractions of them; None: no plan was found."""
    if problem.number >= WHOLE_DEVICES_MAX:
        try:
            found = estimate(problem, aim, limits)
        except NothingFound:
            return None
        return None if found is None else FrontierPoint(found[0][family], found[1])
    return _whole(problem, family, aim, limits)


def _whole(problem: Problem, family: str, aim: Aim, limits: Limits) -> FrontierPoint | None:
    solution = solve(problem, aim, limits, prove=False)
    return None if solution is None else FrontierPoint(solution.accuracy[family], solution.weighed_w)


def _below(middle: FrontierPoint, a: FrontierPoint, b: FrontierPoint, slope: float) -> bool:
    inside = a.accuracy + 1e-7 < middle.accuracy < b.accuracy - 1e-7
    chord = a.power_w + slope * (middle.accuracy - a.accuracy)
    return inside and middle.power_w < chord * (1 - RELATIVE_TOLERANCE)


def _convex(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    hull: list[FrontierPoint] = []
    for point in sorted(set(points), key=lambda p: (p.accuracy, p.power_w)):
        if hull and point.power_w <= hull[-1].power_w:
            while hull and point.power_w <= hull[-1].power_w:
                hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(hull)


def _slope(a: FrontierPoint, b: FrontierPoint) -> float:
    return (b.power_w - a.power_w) / max(1e-12, b.accuracy - a.accuracy)


def price(
    hull: Sequence[FrontierPoint],
    intervals: Sequence[tuple[float, float]],
    intensity: float,
    rate_per_s: float,
    required: float,
) -> Price:
    """Buy accuracy where it is cheapest until the window's mean is `required`. Intervals: (weight, intensity)."""
    total = sum(w for w, _ in intervals)
    mean = hull[0].accuracy
    cleanest, rises = sorted([(ci, w / total) for w, ci in intervals]), list(pairwise(hull))
    # Steps, each of one rise in one interval, the cheapest first; few of them are bought.
    clean, gains = [ci for ci, _ in cleanest], [b.accuracy - a.accuracy for a, b in rises]
    each = np.outer([max(0.0, _slope(a, b)) for a, b in rises], clean).ravel()
    cheapest = np.argsort(each, kind="stable")
    costs, gained = each[cheapest].tolist(), np.outer(gains, [w for _, w in cleanest]).ravel()[cheapest].tolist()
    present = np.flatnonzero(np.tile(np.equal(clean, intensity), len(rises))[cheapest]).tolist()[::-1]
    target, cost, at = hull[0].accuracy, 0.0, 0
    while at < len(costs) and mean < required - 1e-9:
        cost, begin, at = costs[at], at, at + 1
        limit = cost * (1 + 1e-9) + 1e-12
        while at < len(costs) and costs[at] <= limit:
            at += 1
        gain = sum(gained[begin:at])
        part = 1.0 if gain <= required - mean else (required - mean) / gain
        mean += part * gain
        while present and present[-1] < at:
            low, high = rises[cheapest[present.pop()] // len(cleanest)]
            target = max(target, low.accuracy + part * (high.accuracy - low.accuracy))
    why = "" if mean >= required - 1e-6 else f"; {required:.4f} is out of reach, {mean:.4f} is the most"
    return Price(cost / rate_per_s / 3.6e6, target, required, why)


def worth_later(
    hull: Sequence[FrontierPoint],
    intervals: Sequence[tuple[float, float]],
    rate_per_s: float,
    required: float,
    target: float,
) -> float:
    """What accuracy above the target is worth [grams per request and unit]: the price of the rest of the window once
    the present interval, the first, has reached the frontier's next plan. What cannot be spent is worth nothing.
    """
    (now, _), *rest = intervals
    left = sum(w for w, _ in rest)
    if left <= 0:
        return 0.0
    above = next((p.accuracy for p in hull if p.accuracy > target + 1e-9), target)
    return price(hull, rest, math.nan, rate_per_s, (required * (now + left) - now * above) / left).grams


def load_ratio(day: Sequence[float], begins_s: float, ends_s: float) -> float:
    """Requests of an interval over those of as long a time of a mean day; 1 where no `day` (by the hour) is known."""
    total = sum(day)
    if total <= 0 or ends_s <= begins_s:
        return 1.0
    found, at_s = 0.0, begins_s
    while at_s < ends_s - 1e-6:
        hour = math.floor(at_s / HOUR_S + 1e-9)
        until_s = min(ends_s, (hour + 1) * HOUR_S)
        found += day[hour % len(day)] * (until_s - at_s)
        at_s = until_s
    return len(day) * found / (total * (ends_s - begins_s))


def distribution(
    view: PlanView, left_s: float, reaction_s: float, day: Sequence[float] = ()
) -> tuple[list[tuple[float, float]], str]:
    """(weight, intensity) of the rest of the window: a forecast, else what was seen, and the present in either case.

    Weights are seconds, times the load of that hour of the `day` over its mean.

    The present reading counts to the end of its interval. A forecast counts from there on as far as it reaches. Beyond
    its end and in its gaps, the intensities seen stand for the rest. Without a forecast the present counts for
    `reaction_s` more, as long as a decision takes to change.
    """
    now = max(view.carbon.intensity_g_per_kwh, 0.0)
    bands, source = _ahead(view, left_s)
    past, readings = _past(view, day)
    here = load_ratio(day, view.now_s, view.now_s + min(left_s, HOUR_S))
    if not bands:
        present = min(1.0, (max(0.0, view.carbon.ends_at_s - view.now_s) + reaction_s) / left_s)
        rest = [(w * (1 - present), ci) for w, ci in past if present < 1]
        return [(here * present, now), *rest], f"{readings} readings{source}"
    present_s = min(left_s, max(view.carbon.ends_at_s - view.now_s, 1e-3 * left_s))
    ahead = [(load_ratio(day, begins_s, ends_s) * (ends_s - begins_s), ci) for begins_s, ends_s, ci in bands]
    covered_s = sum(ends_s - begins_s for begins_s, ends_s, _ in bands)
    unknown_s = left_s - present_s - covered_s
    if unknown_s <= 1e-6 * left_s:
        return [(here * present_s, now), *ahead], source
    rest = [(w * unknown_s, ci) for w, ci in past]
    return [(here * present_s, now), *ahead, *rest], f"{source} for {covered_s:.0f} s, then {readings} readings"


def _past(view: PlanView, day: Sequence[float]) -> tuple[list[tuple[float, float]], int]:
    """(share of the load, intensity) of what was seen, the present reading included, and the number of readings."""
    seen: dict[float, tuple[float, float]] = {}
    for reading in (*view.carbon_history, view.carbon):
        seen[reading.starts_at_s] = (max(0.0, reading.ends_at_s - reading.starts_at_s), reading.intensity_g_per_kwh)
    usual = [w for w, _ in seen.values() if w > 0]
    default = sum(usual) / len(usual) if usual else 1.0
    day_s = HOUR_S * max(1, len(day))
    ratios: dict[tuple[float, float], float] = {}  # the same hours of one day and the next have the same
    past = []
    for at_s, (w, ci) in seen.items():
        w = w or default
        hours = at_s % day_s, w
        if hours not in ratios:
            ratios[hours] = load_ratio(day, at_s, at_s + w)
        past.append((w * ratios[hours], max(0.0, ci)))
    total = sum([w for w, _ in past])
    return [(w / total, ci) for w, ci in past], len(past)


def _ahead(view: PlanView, left_s: float) -> tuple[list[tuple[float, float, float]], str]:
    """(begin, end, intensity) of the forecast from the present interval to the window's end; else why there is none.

    Medians: an hour taken for what it may turn out to be (its 10, 50 and 90 % lines as 30 : 40 : 30) was no better.
    """
    forecast = view.carbon_forecast
    if forecast is None:
        return [], ""
    why = forecast_refusal(forecast, view.carbon.series, view.now_s)
    if why:
        return [], f", {why}"
    at_s, ends_s = max(view.now_s, view.carbon.ends_at_s), view.now_s + left_s
    ahead: list[tuple[float, float, float]] = []
    for band in forecast.bands:
        begins_s, until_s = max(at_s, band.starts_at_s), min(ends_s, band.ends_at_s)
        if until_s > begins_s and math.isfinite(band.p50_g_per_kwh):
            ahead.append((begins_s, until_s, max(0.0, band.p50_g_per_kwh)))
            at_s = until_s
    return ahead, f"forecast {forecast.model}" if ahead else ", the forecast does not reach beyond the present interval"


def required_mean(
    floor: float, budget: BudgetState | None, rate_per_s: float, window_s: float, reaction_s: float, now_s: float = 0.0
) -> tuple[float, float]:
    """The mean accuracy that the rest of the window has to reach, and its length [s].

    Once a window is full it rolls, and as long again is planned ahead: no shorter time holds all hours of a day, and
    a plan of the night alone buys accuracy at night. What the window lacks is made up for in that time.
    A debt is spread over few requests (none while a move still takes effect): it must be payable by what will surely
    come. A surplus is spread over many, so that it lasts. Where a whole day is known, its hours say how many come.
    """
    if budget is None:
        return floor, max(window_s, 1.0)
    window_s = budget.window_s or window_s
    left_s = max(window_s - budget.elapsed_s, LEFT_MIN * window_s, 1.0)
    early = budget.elapsed_s < LEFT_MIN * window_s
    seen_per_s = rate_per_s if early else budget.requests / budget.elapsed_s
    debt = floor * budget.requests - budget.accuracy_sum
    if budget.elapsed_s >= window_s:
        left_s, debt = window_s, REPAID * debt
    paying_s = max(left_s - reaction_s, LEFT_MIN * window_s) if debt > 0 else left_s
    if sum(budget.day) > 0:
        mean_per_s = sum(budget.day) / len(budget.day) / HOUR_S
        ahead = paying_s * mean_per_s * load_ratio(budget.day, now_s, now_s + paying_s)
    else:
        ahead = paying_s * (min if debt > 0 else max)(rate_per_s, seen_per_s)
    return floor + debt / max(ahead, 1.0), left_s
