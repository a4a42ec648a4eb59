"""The price of accuracy: greedy purchase over a window, the budget's arithmetic, the distribution of intensity."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.planners.columns import columns, undominated
from controller.planners.exact import ExactPlanner
from controller.planners.exact.frontier import (
    FrontierPoint,
    distribution,
    frontier,
    load_ratio,
    price,
    required_mean,
    worth_later,
)
from controller.planners.exact.milp import Limits
from controller.planners.exact.model import Aim, Problem, groups_of, value_lambda
from controller.planners.exact.search import solve
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from tests.support.planning import DUCK, NOW_S, SERIES, fleet, objective, view
from trefoil.core.brains import BudgetState
from trefoil.core.carbon import CarbonBand, CarbonForecast, Series
from trefoil.core.demand import Demand

HULL = (
    FrontierPoint(0.90, 50.0),
    FrontierPoint(0.95, 60.0),
    FrontierPoint(0.99, 100.0),
)  # slopes 200 and 1000 W per unit


def test_accuracy_is_bought_where_it_is_cheapest():
    # Steps by CI * slope: (100, 200 W) = 20k, (300, 200 W) = 60k, (100, 1000 W) = 100k, (300, 1000 W) = 300k.
    intervals = [(1.0, 100.0), (1.0, 300.0)]
    half = price(HULL, intervals, 100.0, 10.0, 0.925)
    assert half.target == pytest.approx(0.95)
    assert price(HULL, intervals, 300.0, 10.0, 0.925).target == pytest.approx(0.90)
    more = price(HULL, intervals, 100.0, 10.0, 0.96)
    assert more.target == pytest.approx(0.97)  # 0.95 everywhere, then half of the last step where power is clean
    assert price(HULL, intervals, 300.0, 10.0, 0.96).target == pytest.approx(0.95)
    assert more.grams == pytest.approx(100.0 * 1000.0 / 10.0 / 3.6e6)


def test_with_one_intensity_the_target_is_the_requirement():
    assert price(HULL, [(3.0, 250.0)], 250.0, 10.0, 0.933).target == pytest.approx(0.933)


@given(
    weights=st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(10.0, 600.0)), min_size=1, max_size=12),
    required=st.floats(0.90, 0.99),
)
def test_the_targets_of_all_intervals_meet_the_requirement_exactly(weights, required):
    total = sum(w for w, _ in weights)
    mean = sum(w * price(HULL, weights, ci, 10.0, required).target for w, ci in weights) / total
    assert mean == pytest.approx(required, abs=1e-6)


@given(weights=st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(10.0, 600.0)), min_size=2, max_size=12))
def test_dirtier_intervals_never_get_more(weights):
    targets = [(ci, price(HULL, weights, ci, 10.0, 0.96).target) for _, ci in weights]
    for (a, at), (b, bt) in zip(sorted(targets), sorted(targets)[1:], strict=False):
        assert a <= b
        assert bt <= at + 1e-9


def test_out_of_reach_buys_everything_and_says_so():
    found = price(HULL, [(1.0, 100.0)], 100.0, 10.0, 0.999)
    assert found.target == pytest.approx(0.99)
    assert "out of reach" in found.why


def test_accuracy_above_the_target_is_worth_what_it_saves_later():
    even = [(1.0, 200.0)] * 100
    price_g = price(HULL, even, 200.0, 10.0, 0.925).grams
    assert worth_later(HULL, even, 10.0, 0.925, 0.925) == pytest.approx(price_g), "a day holds a surplus of one hour"
    last = [(1.0, 200.0), (0.2, 200.0)]
    assert worth_later(HULL, last, 10.0, 0.925, 0.925) == 0.0, "0.2 hours below 0.925 cannot spend an hour above it"
    assert worth_later(HULL, last[:1], 10.0, 0.925, 0.925) == 0.0
    dear = [(1.0, 100.0), (1.0, 300.0)]
    assert worth_later(HULL, dear, 10.0, 0.96, 0.97) == pytest.approx(300.0 * 200.0 / 10.0 / 3.6e6)


def test_budget_without_state_asks_for_the_floor():
    assert required_mean(0.97, None, 20.0, 84.0, 10.0) == (0.97, 84.0)


def test_debts_and_surpluses_are_spread_over_what_is_left():
    debt = BudgetState("digits", 100.0, 50.0, 1000, 960.0)  # mean 0.96
    needed, left_s = required_mean(0.97, debt, 20.0, 100.0, 10.0)
    assert left_s == 50.0
    assert needed == pytest.approx(0.97 + 10.0 / (40 * 20))  # nothing is paid while a move takes effect
    assert required_mean(0.97, debt, 40.0, 100.0, 10.0)[0] == pytest.approx(needed)  # few requests are sure
    surplus = BudgetState("digits", 100.0, 50.0, 1000, 980.0)
    assert required_mean(0.97, surplus, 20.0, 100.0, 10.0)[0] == pytest.approx(0.97 - 10.0 / (50 * 20))
    assert required_mean(0.97, surplus, 40.0, 100.0, 10.0)[0] == pytest.approx(0.97 - 10.0 / (50 * 40))


def test_a_full_window_rolls():
    debt = BudgetState("digits", 100.0, 100.0, 2000, 0.96 * 2000)
    needed, left_s = required_mean(0.97, debt, 20.0, 100.0, 0.0)
    assert left_s == 100.0, "a shorter time would not hold all hours of a day"
    assert needed == pytest.approx(0.99)  # twice what is lacking, so that little of a steady error remains


@given(elapsed=st.floats(0.0, 500.0), requests=st.integers(0, 100_000), mean=st.floats(0.8, 1.0))
def test_a_budget_is_finite_at_any_time(elapsed, requests, mean):
    needed, left_s = required_mean(0.97, BudgetState("f", 100.0, elapsed, requests, mean * requests), 20.0, 100.0, 10.0)
    assert left_s >= 1.0
    if mean < 0.97 - 1e-6:
        assert needed >= 0.97
    elif mean > 0.97 + 1e-6:
        assert needed <= 0.97


def test_history_counts_by_length_and_the_present_lasts_a_while():
    one = view(300.0, history=(100.0, 200.0))
    intervals, source = distribution(one, 70.0, 7.0)
    assert source == "3 readings"
    assert sum(w for w, _ in intervals) == pytest.approx(1.0)
    assert intervals[0] == (pytest.approx(0.2), 300.0)  # 7 s of its interval and 7 s to react, of 70 s
    assert distribution(one, 10.0, 7.0)[0] == [(1.0, 300.0)]


DAY = tuple(30.0 if 8 <= hour < 20 else 10.0 for hour in range(24))  # 20 in the mean
NIGHT_S, NOON_S = 24 * 3600.0 * 20_000, 24 * 3600.0 * 20_000 + 12 * 3600.0


def test_load_by_the_hour_weighs_what_is_to_come():
    assert load_ratio((), 0.0, 7200.0) == load_ratio((0.0,) * 24, 0.0, 7200.0) == 1.0
    assert load_ratio(DAY, NIGHT_S, NIGHT_S + 1800.0) == pytest.approx(0.5)
    assert load_ratio(DAY, NIGHT_S + 7.5 * 3600, NIGHT_S + 8.5 * 3600) == pytest.approx(1.0)
    assert load_ratio(DAY, NOON_S, NOON_S + 48 * 3600) == pytest.approx(1.0)


def test_a_clean_night_of_few_requests_weighs_less_than_a_dirty_day():
    dark = [
        CarbonBand(NIGHT_S + 3600.0 * h, NIGHT_S + 3600.0 * (h + 1), *3 * (300.0 if 8 <= h < 20 else 100.0,))
        for h in range(24)
    ]
    one = replace(view(100.0), now_s=NIGHT_S, carbon_forecast=CarbonForecast(SERIES, "m", NIGHT_S, tuple(dark)))
    one = replace(one, carbon=replace(one.carbon, starts_at_s=NIGHT_S, ends_at_s=NIGHT_S + 3600.0))
    for day, share in (((), 0.5), (DAY, 0.25)):
        intervals, _ = distribution(one, 24 * 3600.0, 10.0, day)
        assert sum(w for w, ci in intervals if ci == 100.0) / sum(w for w, _ in intervals) == pytest.approx(share)


def test_a_debt_is_spread_over_the_requests_that_the_hours_of_the_day_promise():
    budget = BudgetState(
        "f", 86_400.0, 43_200.0, 400, 0.96 * 400, DAY
    )  # 240 requests in the hours of the night to come
    night, _ = required_mean(0.97, budget, 30.0 / 3600, 86_400.0, 0.0, NOON_S + 8 * 3600.0)
    assert night == pytest.approx(0.97 + 4.0 / 120)
    day, _ = required_mean(0.97, budget, 10.0 / 3600, 86_400.0, 0.0, NIGHT_S + 8 * 3600.0)
    assert day == pytest.approx(0.97 + 4.0 / 360)


def ahead(*values: float, start_s: float = NOW_S, step_s: float = 7.0, series: Series = SERIES) -> CarbonForecast:
    """A forecast without spread, interval by interval."""
    starts = [start_s + step_s * i for i in range(len(values))]
    bands = tuple(CarbonBand(at, at + step_s, ci, ci, ci) for at, ci in zip(starts, values, strict=True))
    return CarbonForecast(series, "m", start_s, bands)


def test_a_forecast_replaces_history():
    one = view(250.0, history=DUCK, forecast=ahead(250.0, 90.0, 400.0))
    intervals, source = distribution(one, 14.0, 7.0)
    assert source == "forecast m"
    assert intervals == [(7.0, 250.0), (7.0, 90.0)]


def test_beyond_a_forecast_and_in_its_gaps_the_past_stands():
    """The present is the present: it does not stand for hours that nobody has forecast."""
    bands = ahead(250.0, 90.0, 400.0, math.nan, 80.0).bands
    one = view(250.0, history=(100.0,), forecast=CarbonForecast(SERIES, "m", NOW_S, (*bands[:2], *bands[3:])))
    intervals, source = distribution(one, 70.0, 7.0)
    assert source == "forecast m for 14 s, then 2 readings"
    assert intervals == [(7.0, 250.0), (7.0, 90.0), (7.0, 80.0), (24.5, 100.0), (24.5, 250.0)]
    assert sum(w for w, _ in intervals) == pytest.approx(70.0)


def test_a_reading_that_is_over_does_not_stand_for_the_present_interval():
    late = replace(view(250.0, forecast=ahead(90.0, 95.0, start_s=NOW_S + 21)), now_s=NOW_S + 23)
    intervals, _ = distribution(late, 12.0, 7.0)
    assert intervals == [(pytest.approx(0.012), 250.0), (5.0, 90.0), (7.0, 95.0)]


@pytest.mark.parametrize(
    ("forecast", "why"),
    [
        (ahead(9.0, series=Series("mars")), ", the forecast is of mars"),
        (ahead(9.0, start_s=NOW_S + 60), ", the forecast was issued 60 s in the future"),
        (ahead(9.0), ", the forecast does not reach beyond the present interval"),
        (
            CarbonForecast(SERIES, "m", NOW_S, fallback_reason="the newest value is 30 h old"),
            ", the newest value is 30",
        ),
    ],
)
def test_what_cannot_be_used_of_a_forecast_is_said(forecast, why):
    plain = distribution(view(250.0, history=DUCK), 70.0, 7.0)
    intervals, source = distribution(view(250.0, history=DUCK, forecast=forecast), 70.0, 7.0)
    assert intervals == plain[0]
    assert source.startswith(plain[1] + why)


@given(
    starts=st.lists(st.floats(-50.0, 300.0), max_size=12),
    length=st.floats(1.0, 40.0),
    left_s=st.floats(10.0, 300.0),
    values=st.lists(st.floats(0.0, 900.0), min_size=3, max_size=3),
)
def test_weights_are_those_of_the_window_whatever_the_bands(starts, length, left_s, values):
    bands = tuple(CarbonBand(NOW_S + at, NOW_S + at + length, *values) for at in sorted(starts))
    one = view(250.0, history=DUCK, forecast=CarbonForecast(SERIES, "m", NOW_S, bands))
    intervals, source = distribution(one, left_s, 7.0)
    if source.startswith("forecast"):
        assert sum(w for w, _ in intervals) == pytest.approx(left_s, rel=2e-3)
    assert all(w > 0 and ci >= 0 for w, ci in intervals)
    assert intervals[0][1] == 250.0


def played(true: Sequence[float], told: Callable[[int], CarbonForecast | None], required: float) -> tuple[float, float]:
    """A window of a made-up grid, interval by interval on HULL: (power times intensity, mean accuracy)."""
    spent, bought = 0.0, 0.0
    for i, ci in enumerate(true):
        one, shift_s = view(ci, history=true[:i], forecast=told(i)), 7.0 * i
        now, *past = (
            replace(r, starts_at_s=r.starts_at_s + shift_s, ends_at_s=r.ends_at_s + shift_s)
            for r in (one.carbon, *one.carbon_history)
        )
        one = replace(one, now_s=NOW_S + shift_s, carbon=now, carbon_history=tuple(past))
        left = len(true) - i
        intervals, _ = distribution(one, 7.0 * left, 0.0)
        owed = min(HULL[-1].accuracy, (required * len(true) - bought) / left)
        target = price(HULL, intervals, ci, 10.0, owed).target
        bought += target
        spent += ci * float(np.interp(target, [p.accuracy for p in HULL], [p.power_w for p in HULL]))
    return spent, bought / len(true)


def optimum(true: Sequence[float], mean: float) -> float:
    """Of the same window in hindsight: all steps of all intervals, bought in the order of their cost."""
    steps = sorted((ci * slope, gain) for ci in true for slope, gain in ((200.0, 0.05), (1000.0, 0.04)))
    lacking, spent = (mean - 0.90) * len(true), sum(50.0 * ci for ci in true)
    for cost, gain in steps:
        spent += cost * max(0.0, min(gain, lacking))
        lacking -= gain
    return spent


@given(true=st.lists(st.integers(20, 900), min_size=4, max_size=10, unique=True), required=st.floats(0.905, 0.985))
def test_a_perfect_forecast_finds_the_optimum_and_none_finds_no_better(true, required):
    perfect, reached = played(true, lambda i: ahead(*true[i:], start_s=NOW_S + 7.0 * i), required)
    assert reached == pytest.approx(required, abs=1e-6)
    assert perfect == pytest.approx(optimum(true, required), rel=1e-6)
    blind, kept = played(true, lambda _: None, required)
    assert kept <= required + 1e-6
    assert blind >= optimum(true, kept) * (1 - 1e-6)


def test_the_frontier_is_convex_and_its_points_are_plans():
    one = view(wanted=[objective(slo_ms=75.0)])
    world = read_view(one, 1.0)
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, ExactSettings()))
    problem = Problem(groups_of(world.devices), found, world.tasks, 0.0)
    hull = frontier(problem, "digits", Limits(gap=1e-6), 12)
    slopes = [(b.power_w - a.power_w) / (b.accuracy - a.accuracy) for a, b in itertools.pairwise(hull)]
    assert slopes == sorted(slopes)
    assert hull[-1].accuracy == pytest.approx(0.993, abs=1e-4)
    for point in hull:
        reached = solve(problem, Aim(target={"digits": point.accuracy - 1e-6}), Limits(gap=1e-6))
        assert reached is not None
        assert reached.power_w <= point.power_w * (1 + 1e-3)


def test_no_plan_is_taken_for_impossible_by_the_solvers_presolve():
    """A demand of which the solver, with its probing, said that no plan serves it as soon as accuracy had a price."""
    demand = Demand("digits", "", 127.55473818635774, 236.09491837372562, 1.0, 1.9290149861438821)
    one = view(wanted=[objective(slo_ms=150.0)], demand=[demand], devices=fleet(1))
    world = read_view(one, 1.0)
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, ExactSettings()))
    problem = Problem(groups_of(world.devices), found, world.tasks, 0.0)
    problem = replace(problem, columns=undominated(found, problem.devices, keep_running=False))
    cheapest = solve(problem, Aim(), Limits(gap=5e-3))
    assert cheapest is not None
    for value_j in (1e3, 1e4, 1e5):
        dearer = solve(problem, Aim(value_j={"digits": value_j}), Limits(gap=5e-3))
        assert dearer is not None
        assert dearer.accuracy["digits"] > cheapest.accuracy["digits"]


def test_a_search_that_ends_before_its_first_plan_leaves_the_cheapest_point(monkeypatch):
    one = view(wanted=[objective()])
    world = read_view(one, 1.0)
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, ExactSettings()))
    problem = Problem(groups_of(world.devices), found, world.tasks, 0.0)
    monkeypatch.setattr(
        "controller.planners.exact.frontier.solve",
        lambda problem, aim, limits, prove: None if aim.value_j else solve(problem, aim, limits, prove),
    )
    (only,) = frontier(problem, "digits", Limits(), 12)
    assert only.accuracy >= min(c.accuracy for c in found)


def test_lambda_prefers_what_clover_figure_6_prefers():
    # lambda 0.1, C_base 1000; A: e 0.4, dAcc -4 %; B: e 1.2, dAcc -2 %. A wins at 500 g/kWh, B at 100 (CLOVER Fig. 6).
    world = read_view(view(wanted=[objective(lambda_weight=0.1)]), 1.0)
    for intensity, winner in ((500.0, "A"), (100.0, "B")):
        value = value_lambda(world.tasks[0], intensity, 4.0, 1.0, 250.0)
        score = {name: e - value * a for name, e, a in (("A", 0.4, 0.96), ("B", 1.2, 0.98))}
        assert min(score, key=score.__getitem__) == winner


@pytest.mark.parametrize("rate", [110.0, 260.0, 400.0])
def test_the_frontier_of_a_large_fleet_asks_for_nothing_that_whole_devices_cannot_reach(rate):
    """Its inner points may take a fraction of a device; what is planned then still meets what can be met."""
    reached = {}
    for floor in (0.93, 0.975, 0.985, 0.999):
        one = view(rate=rate, devices=fleet(10), history=DUCK, wanted=[objective(slo_ms=75.0, min_accuracy=floor)])
        decision = ExactPlanner().plan(one, np.random.default_rng(0))
        assert decision.degraded == ""
        assert decision.plan is not None
        reached[floor] = decision.plan.expected["digits"].accuracy
    assert max(reached.values()) <= reached[0.999] + 1e-6, "out of reach: then the most that can be reached"
    assert reached[0.93] < reached[0.999]
