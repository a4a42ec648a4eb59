"""`exact` against brute force over the same capacity model, and what must be monotone whatever the numbers."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planners.columns import TIERS, columns
from controller.planners.exact.milp import Limits
from controller.planners.exact.model import Aim, Problem, groups_of
from controller.planners.exact.planner import CONSTANTS
from controller.planners.exact.search import solve
from controller.planners.planning_input import read_view
from tests.support.planning import digits, fleet, objective, row, view
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB
from trefoil.core.queueing import rate_max

TIGHT = Limits(nodes=100_000, gap=1e-9)
LARGE = ("3g.20gb", "4g.20gb", "7g.40gb")
LAYOUTS = ((), ("7g.40gb",), ("3g.20gb", "4g.20gb"), ("3g.20gb", "3g.20gb"))  # of one GPU, with these types only
EXACT = {**CONSTANTS, "overhead_ms": 0.0, "transport_gap_ms": 0.0}


def small_catalog(service_ms, accuracies):
    """Two variants on the three large slice types."""
    base = digits(accuracy={"s": accuracies[0], "l": accuracies[1]}, service_ms={"s": (1.0,) * 5, "l": (1.0,) * 5})
    rows = tuple(row(v, s, ms) for (v, s), ms in zip(itertools.product("sl", LARGE), service_ms, strict=True))
    return Catalog(base.families, rows)


def problem_of(one):
    world = read_view(one, 1.0)
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, EXACT))
    return Problem(groups_of(world.devices), found, world.tasks, one.move_horizon_s)


def brute_force(one, gpus, value_j, target):
    """The least watts over every layout, every variant on every slice and every split; None when nothing works."""
    best = None
    for layouts in itertools.combinations_with_replacement(LAYOUTS, gpus):
        slots = [s for layout in layouts for s in layout]
        idle = sum(A100_40GB.idle_w if layout else A100_40GB.sleep_w for layout in layouts)
        for hosted in {
            tuple(sorted(zip(slots, chosen, strict=True))) for chosen in itertools.product("sl-", repeat=len(slots))
        }:
            power = split(one, hosted, value_j, target)
            if power is not None and (best is None or idle + power < best):
                best = idle + power
    return best


def split(one, hosted, value_j, target):
    """The best split of the traffic over hosted slices: a linear program with one coupling constraint, by its dual."""
    demand, wanted = one.demand[0], one.objectives[0]
    family = one.catalog.family("digits")
    top = max(v.accuracy for v in family.variants)
    classes = []
    for shape, name in sorted({h for h in hosted if h[1] != "-"}):
        profile = one.catalog.lookup(A100_40GB.name, shape, "digits", name, 1410)
        count = hosted.count((shape, name))
        tier = max(t for t in TIERS if t <= count)
        pooled = rate_max(profile, wanted.slo_ms, wanted.slo_quantile, 1.0, tier) / tier * count
        accuracy = family.variant(name).accuracy
        cost = profile.energy_active_j_per_batch + value_j * (top - accuracy)
        classes.append((cost, accuracy - target, pooled))
    if sum(c[2] for c in classes) < demand.rate_p90_per_s:
        return None

    def filled(order):
        left, cost, slack = demand.rate_p90_per_s, 0.0, 0.0
        for one_cost, gain, most in sorted(classes, key=order):
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


@given(**instances, value_j=st.sampled_from([0.0, 3.0, 30.0, 300.0]), share=st.sampled_from([0.0, 0.3, 0.9]))
@settings(max_examples=60, deadline=None)
def test_the_program_finds_what_brute_force_finds(service_ms, accuracies, rate, slo_ms, gpus, value_j, share):
    target = accuracies[0] + share * (accuracies[1] - accuracies[0]) if share else 0.0
    one = view(
        rate=rate,
        catalog=small_catalog(service_ms, accuracies),
        devices=fleet(gpus),
        wanted=[objective(slo_ms=slo_ms)],
        horizon_s=0.0,
    )
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


@given(
    **instances, price_j=st.floats(1.0, 3000.0), intensities=st.tuples(st.floats(20.0, 500.0), st.floats(20.0, 500.0))
)
@settings(max_examples=40, deadline=None)
def test_dirtier_power_never_takes_more_joules_at_a_given_price(
    service_ms, accuracies, rate, slo_ms, gpus, price_j, intensities
):
    one = view(
        rate=rate,
        catalog=small_catalog(service_ms, accuracies),
        devices=fleet(gpus),
        wanted=[objective(slo_ms=slo_ms)],
        horizon_s=0.0,
    )
    problem = problem_of(one)
    clean, dirty = (solve(problem, Aim({"digits": price_j * 100.0 / ci}), TIGHT) for ci in sorted(intensities))
    assert (clean is None) == (dirty is None)
    if clean is not None and dirty is not None:
        assert dirty.power_w <= clean.power_w * (1 + 1e-5) + 1e-3
        assert dirty.accuracy["digits"] <= clean.accuracy["digits"] + 1e-5


@given(**instances, shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=40, deadline=None)
def test_a_higher_floor_never_takes_fewer_joules(service_ms, accuracies, rate, slo_ms, gpus, shares):
    one = view(
        rate=rate,
        catalog=small_catalog(service_ms, accuracies),
        devices=fleet(gpus),
        wanted=[objective(slo_ms=slo_ms)],
        horizon_s=0.0,
    )
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
    one = view(
        rate=rate,
        catalog=small_catalog(service_ms, accuracies),
        devices=fleet(gpus),
        wanted=[objective(slo_ms=slo_ms)],
        horizon_s=0.0,
    )
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
