"""`exact` against brute force over layouts, by the queueing law and by the request-level kernel, and what must be
monotone whatever the numbers."""

import dataclasses
import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.planners.columns import columns
from controller.planners.exact.aim import NEARLY_FREE, nearly_free
from controller.planners.exact.milp import Limits, Program
from controller.planners.exact.model import Aim, Problem, groups_of
from controller.planners.exact.planner import classes_missing_slo
from controller.planners.exact.search import solve
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from tests.support.planning import digits, fleet, objective, row, view
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB
from trefoil.core.queueing import ServerClass, arrivals_s, rate_max, serve_weighted, service_time

TIGHT = Limits(nodes=100_000, gap=1e-9)
LARGE = ("3g.20gb", "4g.20gb", "7g.40gb")
SMALL = ("1g.5gb", "2g.10gb")
LAYOUTS = {  # of one GPU, with these types only
    LARGE: ((), ("7g.40gb",), ("3g.20gb", "4g.20gb"), ("3g.20gb", "3g.20gb")),
    SMALL: ((), *(("1g.5gb",) * ones + ("2g.10gb",) * twos for ones, twos in ((7, 0), (5, 1), (3, 2), (1, 3)))),
}
WITHIN = 5e-4  # the least joules are known to a tenth of what is nearly free
EXACT = ExactSettings(overhead_ms=0.0, transport_gap_ms=0.0)


def small_catalog(service_ms, accuracies, shapes=LARGE):
    """Two variants on a few slice types."""
    base = digits(accuracy={"s": accuracies[0], "l": accuracies[1]}, service_ms={"s": (1.0,) * 5, "l": (1.0,) * 5})
    rows = tuple(row(v, s, ms) for (v, s), ms in zip(itertools.product("sl", shapes), service_ms, strict=False))
    return Catalog(base.families, rows)


def problem_of(one):
    world = read_view(one, 1.0)
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, EXACT))
    return Problem(groups_of(world.devices), found, world.tasks, one.move_horizon_s)


def by_law(profile, slo_ms, quantile, slices):
    """What a pool serves within the SLO by the queueing law [1/s]."""
    return rate_max(profile, slo_ms, quantile, 1.0, slices)


@functools.cache
def by_kernel(profile, slo_ms, quantile, slices, requests=10_000):
    """What a pool serves within the SLO, request by request: the highest rate at which it attains it [1/s]."""
    low, high = 0.0, slices * profile.throughput_per_s
    for _ in range(9):
        rng, middle = np.random.default_rng(5), (low + high) / 2
        pool = (ServerClass(slices, service_time(profile)),)
        attained = serve_weighted(pool, arrivals_s(middle, 1.0, requests, rng), rng).attainment(slo_ms)
        low, high = (middle, high) if attained >= quantile else (low, middle)
    return low


def brute_force(one, gpus, value_j, target, shapes=LARGE, capacity=by_law, cap_w=math.inf):
    """The least watts over every layout, every variant on every slice and every split; None when nothing works."""
    best, seen = None, set()
    for layouts in itertools.combinations_with_replacement(LAYOUTS[shapes], gpus):
        slots = Counter(s for layout in layouts for s in layout)
        idle = sum(A100_40GB.idle_w if layout else A100_40GB.sleep_w for layout in layouts)
        choices = [
            [((shape, "s", small), (shape, "l", used - small)) for used in range(n + 1) for small in range(used + 1)]
            for shape, n in sorted(slots.items())
        ]
        for chosen in itertools.product(*choices):
            hosted = tuple(part for parts in chosen for part in parts if part[2])
            if (hosted, idle) in seen:
                continue
            seen.add((hosted, idle))
            if cap_w < math.inf:
                power = split_under(one, hosted, value_j, target, capacity, cap_w - idle)
            else:
                power = split(one, hosted, value_j, target, capacity)
            if power is not None and (best is None or idle + power < best):
                best = idle + power
    return best


def classes_of(one, hosted, value_j, target, capacity):
    """(cost, accuracy above the target, most traffic, joules) of hosted slices."""
    wanted, family = one.objectives[0], one.catalog.family("digits")
    top = max(v.accuracy for v in family.variants)
    classes = []
    for shape, name, count in hosted:
        profile = one.catalog.lookup(A100_40GB.name, shape, "digits", name, 1410)
        pooled = capacity(profile, wanted.slo_ms, wanted.slo_quantile, count)
        accuracy, joules = family.variant(name).accuracy, profile.energy_active_j_per_batch
        classes.append((joules + value_j * (top - accuracy), accuracy - target, pooled, joules))
    return classes


def split_under(one, hosted, value_j, target, capacity, active_w):
    """`split` whose active power has a cap: a linear program of two coupling constraints."""
    demand, program = one.demand[0], Program()
    classes = classes_of(one, hosted, value_j, target, capacity)
    if active_w < 0 or sum(c[2] for c in classes) < demand.rate_p90_per_s:
        return None
    mean = demand.rate_per_s / demand.rate_p90_per_s
    flows = [program.variable(cost * mean, 0, most) for cost, _, most, _ in classes]
    program.row([(v, 1.0) for v in flows], low=demand.rate_p90_per_s, high=demand.rate_p90_per_s)
    program.row([(v, gain) for v, (_, gain, _, _) in zip(flows, classes, strict=True)], low=0)
    program.row([(v, joules * mean) for v, (_, _, _, joules) in zip(flows, classes, strict=True)], high=active_w)
    result = program.solve(TIGHT)
    return None if result is None else result.objective


def split(one, hosted, value_j, target, capacity):
    """The best split of the traffic over hosted slices: a linear program with one coupling constraint, by its dual."""
    demand, classes = one.demand[0], classes_of(one, hosted, value_j, target, capacity)
    if sum(c[2] for c in classes) < demand.rate_p90_per_s:
        return None

    def filled(order):
        left, cost, slack = demand.rate_p90_per_s, 0.0, 0.0
        for one_cost, gain, most, _ in sorted(classes, key=order):
            used = min(left, most)
            left, cost, slack = left - used, cost + used * one_cost, slack + used * gain
        return cost, slack

    if filled(lambda c: -c[1])[1] < -1e-9:
        return None
    multipliers = {0.0, 1e7}
    for a, b in itertools.combinations(classes, 2):
        if a[1] != b[1]:
            multipliers.add(max(0.0, (a[0] - b[0]) / (a[1] - b[1])))

    def dual(m):
        cost, slack = filled(lambda c: c[0] - m * c[1])
        return cost - m * slack

    return max(dual(m) for m in multipliers) * demand.rate_per_s / demand.rate_p90_per_s


instances = {
    "service_ms": st.tuples(*[st.floats(5.0, 60.0)] * 6),
    "accuracies": st.tuples(st.floats(0.6, 0.8), st.floats(0.8, 0.99)),
    "rate": st.floats(2.0, 90.0),
    "slo_ms": st.floats(30.0, 120.0),
    "gpus": st.integers(1, 2),
}


def view_of(service_ms, accuracies, rate, slo_ms, gpus):
    """View of an instance whose moves have no price."""
    return view(
        rate=rate,
        catalog=small_catalog(service_ms, accuracies),
        devices=fleet(gpus),
        wanted=[objective(slo_ms=slo_ms)],
        horizon_s=0.0,
    )


@given(**instances, value_j=st.sampled_from([0.0, 3.0, 30.0, 300.0]), share=st.sampled_from([0.0, 0.3, 0.9]))
@settings(max_examples=60, deadline=None)
def test_the_program_finds_what_brute_force_finds(service_ms, accuracies, rate, slo_ms, gpus, value_j, share):
    target = accuracies[0] + share * (accuracies[1] - accuracies[0]) if share else 0.0
    one = view_of(service_ms, accuracies, rate, slo_ms, gpus)
    problem = problem_of(one)
    aim = Aim({"digits": value_j}, {"digits": target})
    found = solve(problem, aim, TIGHT)
    expected = brute_force(one, gpus, value_j, target)
    if expected is None:
        assert found is None
        return
    assert found is not None
    top = max(c.accuracy for c in problem.columns)
    total = found.power_w + value_j * one.demand[0].rate_per_s * (
        max(v.accuracy for v in one.catalog.families[0].variants) - found.accuracy["digits"]
    )
    assert top <= max(accuracies)
    assert total == pytest.approx(expected, rel=2e-5, abs=2e-3)


@given(**instances, share=st.sampled_from([0.0, 0.3, 0.9]))
@example((20.0, 12.0, 9.0, 20.1, 12.05, 9.02), (0.6, 0.85), 60.0, 75.0, 2, 0.3)  # all accuracy for nearly nothing
@settings(max_examples=40, deadline=None)
def test_accuracy_that_costs_nearly_nothing_is_bought_and_no_plan_is_dearer_for_it(
    service_ms, accuracies, rate, slo_ms, gpus, share
):
    one = view_of(service_ms, accuracies, rate, slo_ms, gpus)
    target = accuracies[0] + share * (accuracies[1] - accuracies[0])
    problem, least = problem_of(one), brute_force(one, gpus, 0.0, target)
    price_j = nearly_free(problem, {"digits": target}, EXACT)["digits"]
    found = solve(problem, Aim({"digits": price_j}, {"digits": target}), TIGHT)
    assert (found is None) == (least is None)
    if found is None:
        return
    assert found.gap <= 1e-6
    asleep_w = gpus * A100_40GB.sleep_w
    assert found.power_w - asleep_w <= (least - asleep_w) * (1 + NEARLY_FREE + WITHIN) + 2e-3
    top = max(accuracies)
    total = found.power_w + price_j * one.demand[0].rate_per_s * (top - found.accuracy["digits"])
    assert total == pytest.approx(brute_force(one, gpus, price_j, target), rel=2e-5, abs=2e-3)


@given(**instances, value_j=st.sampled_from([30.0, 300.0, 3000.0]), part=st.floats(-0.2, 1.1))
@example((40.0, 30.0, 22.0, 60.0, 45.0, 30.0), (0.7, 0.95), 40.0, 90.0, 2, 3000.0, 0.5)  # the cap buys less accuracy
@settings(max_examples=15, deadline=None)
def test_under_a_cap_of_watts_the_program_finds_the_best_of_the_plans_that_keep_it(
    service_ms, accuracies, rate, slo_ms, gpus, value_j, part
):
    one = view_of(service_ms, accuracies, rate, slo_ms, gpus)
    problem, least = problem_of(one), brute_force(one, gpus, 0.0, 0.0)
    aim = Aim({"digits": value_j})
    free = solve(problem, aim, TIGHT)
    assert (free is None) == (least is None)
    if free is None:
        return
    cap_w = least + part * (free.power_w - least) + (0.1 if part > 0 else -0.1)
    found = solve(dataclasses.replace(problem, max_watts=cap_w), aim, TIGHT)
    expected = brute_force(one, gpus, value_j, 0.0, cap_w=cap_w)
    if cap_w < least:
        assert found is None
        assert expected is None
        return
    assert found is not None
    assert found.power_w <= cap_w * (1 + 1e-6)
    lacks = max(accuracies) - found.accuracy["digits"]
    total = found.power_w + value_j * one.demand[0].rate_per_s * lacks
    assert total == pytest.approx(expected, rel=2e-5, abs=2e-3)
    if cap_w > free.power_w:
        assert found.power_w == pytest.approx(free.power_w, rel=1e-5, abs=1e-3)


@given(
    rate=st.floats(20.0, 250.0),
    slo_ms=st.sampled_from([30.0, 40.0, 55.0, 80.0]),
    gpus=st.integers(1, 2),
    share=st.sampled_from([0.0, 0.5, 0.9]),
)
@example(rate=90.0, slo_ms=30.0, gpus=2, share=0.5)  # three slices of one variant, four of two
@example(rate=140.0, slo_ms=40.0, gpus=2, share=0.5)
@settings(max_examples=12, deadline=None)
def test_pools_of_any_number_of_small_slices_count_as_what_they_are(rate, slo_ms, gpus, share):
    one = small_view(rate, slo_ms, gpus)
    target = share and ACCURACIES[0] + share * (ACCURACIES[1] - ACCURACIES[0])
    found = solve(problem_of(one), Aim(target={"digits": target}), TIGHT)
    expected = brute_force(one, gpus, 0.0, target, SMALL)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.power_w == pytest.approx(expected, rel=2e-5, abs=2e-3)


ACCURACIES = (0.94, 0.96)
LAW_ERROR = 0.03  # of capacity, between the law and a sample of the kernel


def small_view(rate, slo_ms, gpus):
    """Two variants on small slices, as the digits' `s` and `m`."""
    catalog = small_catalog((22.0, 13.0, 30.0, 17.0), ACCURACIES, SMALL)
    wanted = [objective(slo_ms=slo_ms, min_accuracy=0.0)]
    return view(rate=rate, high=rate, catalog=catalog, devices=fleet(gpus), wanted=wanted, horizon_s=0.0)


@pytest.mark.parametrize(("rate", "slo_ms", "gpus", "target"), [
    (90.0, 30.0, 2, 0.95), (90.0, 45.0, 2, 0.955), (140.0, 40.0, 2, 0.95), (60.0, 40.0, 1, 0.95),
])  # fmt: skip
def test_no_layout_that_the_kernel_lets_pass_is_cheaper(rate, slo_ms, gpus, target):
    """Each class is served by itself: brute force with 3 % less than the kernel's capacity is never below the plan."""
    one = small_view(rate, slo_ms, gpus)
    problem = problem_of(one)
    found = solve(problem, Aim(target={"digits": target}), TIGHT)
    assert found is not None
    assert not classes_missing_slo(found, problem.columns, problem.tasks, EXACT)

    def scaled(factor):
        def capacity(*pool):
            return by_kernel(*pool) * factor

        return brute_force(one, gpus, 0.0, target, SMALL, capacity)

    dearest = scaled(1 - LAW_ERROR)
    assert dearest is None or found.power_w <= dearest + 2e-3
    cheapest = scaled(1 + LAW_ERROR)
    assert cheapest is not None
    assert found.power_w >= cheapest - 2e-3


@given(
    **instances, price_j=st.floats(1.0, 3000.0), intensities=st.tuples(st.floats(20.0, 500.0), st.floats(20.0, 500.0))
)
@settings(max_examples=40, deadline=None)
def test_dirtier_power_never_takes_more_joules_at_a_given_price(
    service_ms, accuracies, rate, slo_ms, gpus, price_j, intensities
):
    one = view_of(service_ms, accuracies, rate, slo_ms, gpus)
    problem = problem_of(one)
    clean, dirty = (solve(problem, Aim({"digits": price_j * 100.0 / ci}), TIGHT) for ci in sorted(intensities))
    assert (clean is None) == (dirty is None)
    if clean is not None and dirty is not None:
        assert dirty.power_w <= clean.power_w * (1 + 1e-5) + 1e-3
        assert dirty.accuracy["digits"] <= clean.accuracy["digits"] + 1e-5


@given(**instances, shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=40, deadline=None)
def test_a_higher_floor_never_takes_fewer_joules(service_ms, accuracies, rate, slo_ms, gpus, shares):
    one = view_of(service_ms, accuracies, rate, slo_ms, gpus)
    problem = problem_of(one)
    low, high = (accuracies[0] + s * (accuracies[1] - accuracies[0]) for s in sorted(shares))
    loose, strict = (solve(problem, Aim(target={"digits": t}), TIGHT) for t in (low, high))
    if strict is not None:
        assert loose is not None
        assert loose.power_w <= strict.power_w * (1 + 1e-5) + 1e-3
        assert strict.accuracy["digits"] >= high - 1e-6


@given(**instances, value_j=st.sampled_from([0.0, 30.0, 300.0]))
@settings(max_examples=40, deadline=None)
def test_dropping_dominated_columns_loses_nothing(service_ms, accuracies, rate, slo_ms, gpus, value_j):
    one = view_of(service_ms, accuracies, rate, slo_ms, gpus)
    lean = problem_of(one)
    world = read_view(one, 1.0)
    everything = [
        column
        for shape, name in itertools.product(LARGE, "sl")
        for column in columns(
            Catalog(
                one.catalog.families,
                tuple(r for r in one.catalog.rows if (r.slice_type, r.variant) == (shape, name)),
            ),
            world.tasks[0],
            world.devices,
            EXACT,
        )
    ]
    full = dataclasses.replace(lean, columns=tuple(everything))
    aim = Aim({"digits": value_j})
    a, b = solve(lean, aim, TIGHT), solve(full, aim, TIGHT)
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        top = max(c.accuracy for c in everything)

        def total(s):
            return s.power_w + value_j * one.demand[0].rate_per_s * (top - s.accuracy["digits"])

        assert math.isclose(total(a), total(b), rel_tol=2e-5, abs_tol=2e-3)


@pytest.mark.parametrize("slo_ms", [30.0, 40.0, 60.0])
def test_a_large_pool_counts_as_nearly_what_the_law_gives(slo_ms):
    one = small_view(90.0, slo_ms, 40)
    found = problem_of(one).columns
    assert found
    for column in found:
        profile = one.catalog.lookup(A100_40GB.name, column.slice_type, "digits", column.variant, 1410)
        for slices in (8, 17, 27, 39, 69, 150):
            law = by_law(profile, slo_ms, 0.95, slices)
            assert 0.988 * law <= column.capacity_per_s(slices) <= 1.002 * law
