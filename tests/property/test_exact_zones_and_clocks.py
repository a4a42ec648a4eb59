"""Zones and clocks in `exact`: nothing that the program leaves out would have been better, and weights are right."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planners.columns import columns, undominated
from controller.planners.exact import ExactPlanner, search
from controller.planners.exact.clock_ranges import lowest_clocks
from controller.planners.exact.milp import Limits
from controller.planners.exact.model import Aim, Problem, groups_of, weights_of
from controller.planners.exact.placement import place_clocked
from controller.planners.exact.reuse import ClassShare, on_grid, refit, solve_or_reuse, split
from controller.planners.exact.search import solve
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from controller.planners.profile_rows import CatalogKey
from tests.property.test_exact_is_optimal import LARGE, small_catalog
from tests.support.planning import fleet, objective, reading, view
from trefoil.core.carbon import Series
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB, A100_80GB, device_type
from trefoil.core.fleet import FleetState
from trefoil.core.plan_check import check
from trefoil.core.power import active_w, at_clock

TIGHT = Limits(nodes=100_000, gap=1e-9)
CLOCKED = ExactSettings(overhead_ms=0.0, transport_gap_ms=0.0, clocks="planned")
CLOCKS = (1410, 1005, 705)
OTHER = dict(zip(LARGE, ("3g.40gb", "4g.40gb", "7g.80gb"), strict=True))


def clocked(catalog: Catalog, other: bool = False) -> Catalog:
    """The same rows at three clocks (slower and leaner), and a second device type that is faster and hungrier."""
    rows = list(catalog.rows)
    if other:
        rows += [
            dataclasses.replace(
                r,
                device_type=A100_80GB.name,
                slice_type=OTHER[r.slice_type],
                latency_ms_p50=0.8 * r.latency_ms_p50,
                latency_ms_p95=0.8 * r.latency_ms_p95,
                latency_ms_p99=0.8 * r.latency_ms_p99,
                energy_active_j_per_batch=1.1 * r.energy_active_j_per_batch,
            )
            for r in rows
        ]
    found = []
    for r, clock in itertools.product(rows, CLOCKS):
        slow = 0.3 + 0.7 * CLOCKS[0] / clock
        lean = active_w(A100_40GB, "7g.40gb", clock) / active_w(A100_40GB, "7g.40gb", CLOCKS[0])
        found.append(
            dataclasses.replace(
                r,
                clock_mhz=clock,
                latency_ms_p50=r.latency_ms_p50 * slow,
                latency_ms_p95=r.latency_ms_p95 * slow,
                latency_ms_p99=r.latency_ms_p99 * slow,
                energy_active_j_per_batch=r.energy_active_j_per_batch * slow * lean,
            )
        )
    return Catalog(catalog.families, tuple(found))


def mixed(kinds, zones):
    """One node per GPU, each with its type and zone."""
    base = fleet(len(kinds), nodes=len(kinds)).nodes
    return FleetState(
        tuple(
            dataclasses.replace(
                n, zone=zone, devices=tuple(dataclasses.replace(d, type=device_type(kind)) for d in n.devices)
            )
            for n, kind, zone in zip(base, kinds, zones, strict=True)
        )
    )


def zone_reading(zone, intensity):
    return dataclasses.replace(reading(intensity), series=Series(zone, reading(1.0).series.method))


def instance(service_ms, accuracies, rate, slo_ms, kinds, zones, dirty=300.0):
    one = view(
        100.0,
        rate=rate,
        catalog=clocked(small_catalog(service_ms, accuracies), other=True),
        devices=mixed(kinds, zones),
        wanted=[objective(slo_ms=slo_ms)],
        horizon_s=0.0,
    )
    return dataclasses.replace(one, zones=(zone_reading("far", dirty),))


def problem_of(one, settings=CLOCKED, pruned=True):
    world = read_view(one, 1.0, clocks=settings.clocks != "highest")
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, settings))
    weights, _ = weights_of(world)
    problem = Problem(groups_of(world.devices, found), found, world.tasks, one.move_horizon_s, weights=weights)
    return problem if pruned else dataclasses.replace(problem, columns=everything(one, world, settings))


def everything(one, world, settings):
    """Columns one by one, so that none can dominate another."""
    return tuple(
        c
        for shape, name in itertools.product((*LARGE, *OTHER.values()), "sl")
        for clock in CLOCKS
        for c in columns(
            Catalog(
                one.catalog.families,
                tuple(
                    r
                    for r in one.catalog.rows
                    if (r.slice_type, r.variant) == (shape, name) and r.clock_mhz in (clock, CLOCKS[0])
                ),
            ),
            world.tasks[0],
            world.devices,
            settings,
        )
        if (c.key.clock_mhz or CLOCKS[0]) == clock
    )


def value_of(problem, aim, solution):
    """The objective by hand: weighed watts and the accuracy that lacks, priced."""
    family = problem.tasks[0].family
    best = max(c.accuracy for c in problem.columns)
    return solution.weighed_w + aim.value_j.get(family, 0.0) * problem.tasks[0].mean_per_s * (
        best - solution.accuracy[family]
    )


service = st.tuples(*[st.floats(5.0, 60.0)] * 6)
accuracy = st.tuples(st.floats(0.6, 0.8), st.floats(0.8, 0.99))
KINDS = st.lists(st.sampled_from([A100_40GB.name, A100_80GB.name]), min_size=1, max_size=3)


@given(service, accuracy, st.floats(2.0, 90.0), st.floats(40.0, 150.0), KINDS, st.data())
@settings(max_examples=15, deadline=None)
def test_pruning_loses_nothing_over_types_zones_and_clocks(service_ms, accuracies, rate, slo_ms, kinds, data):
    zones = data.draw(st.lists(st.sampled_from(["test", "far"]), min_size=len(kinds), max_size=len(kinds)))
    one = instance(service_ms, accuracies, rate, slo_ms, kinds, zones)
    lean, full = problem_of(one), problem_of(one, pruned=False)
    assert {c.key for c in lean.columns} <= {c.key for c in full.columns}
    aim = Aim({"digits": data.draw(st.sampled_from([0.0, 30.0]))})
    a, b = solve(lean, aim, TIGHT), solve(full, aim, TIGHT)
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert value_of(full, aim, a) == pytest.approx(value_of(full, aim, b), rel=2e-5, abs=2e-3)


@given(service, accuracy, st.floats(2.0, 60.0), st.floats(60.0, 150.0), st.floats(10.0, 900.0))
@settings(max_examples=15, deadline=None)
def test_more_choice_never_costs_more(service_ms, accuracies, rate, slo_ms, dirty):
    """A fleet of two zones is as good as the worse of its zones with as many devices, and clocks only add."""
    kinds = [A100_40GB.name] * 2
    one = instance(service_ms, accuracies, rate, slo_ms, kinds, ["test", "far"], dirty)
    fast = CLOCKED.over({"clocks": "highest"})
    clocks, none = solve(problem_of(one), Aim(), TIGHT), solve(problem_of(one, fast), Aim(), TIGHT)
    if none is None:
        return
    assert clocks is not None
    assert clocks.weighed_w <= none.weighed_w * (1 + 1e-5) + 1e-3
    for zone, ci in (("test", 100.0), ("far", dirty)):
        alone = solve(
            problem_of(instance(service_ms, accuracies, rate, slo_ms, kinds, [zone] * 2, dirty)), Aim(), TIGHT
        )
        assert alone is not None
        if ci == max(100.0, dirty):
            assert clocks.weighed_w <= alone.weighed_w * (1 + 1e-5) + 1e-3


@given(service, accuracy, st.floats(20.0, 300.0), st.floats(50.0, 150.0), st.integers(8, 14), st.floats(5.0, 500.0))
@settings(max_examples=15, deadline=None)
def test_a_relaxation_and_a_restriction_enclose_the_optimum(service_ms, accuracies, rate, slo_ms, gpus, value_j):
    one = view(
        rate=rate,
        catalog=small_catalog(service_ms, accuracies),
        devices=fleet(gpus),
        wanted=[objective(slo_ms=slo_ms)],
        horizon_s=0.0,
    )
    problem, aim = problem_of(one, CLOCKED.over({"clocks": "highest"})), Aim({"digits": value_j})
    exact = solve(problem, aim, Limits(20_000, 1e-6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SMALL_FEW", 1)
        between = solve(problem, aim, Limits(4000, 1e-3))
    assert (exact is None) == (between is None)
    if exact is not None and between is not None:
        assert between.objective >= exact.objective * (1 - 2e-6) - 1e-6
        assert between.objective * (1 - between.gap) <= exact.objective * (1 + 2e-6) + 1e-6


@given(
    service,
    accuracy,
    st.floats(20.0, 250.0),
    st.integers(8, 12),
    st.floats(5.0, 800.0),
    st.floats(0.0, 1.0),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_a_remembered_answer_is_as_good_as_it_says(service_ms, accuracies, rate, gpus, value_j, share, ladder):
    target = accuracies[0] + share * (accuracies[1] - accuracies[0])
    one = view(
        rate=rate,
        catalog=small_catalog(service_ms, accuracies),
        devices=fleet(gpus),
        wanted=[objective(slo_ms=120.0)],
        horizon_s=3600.0,
    )
    problem = problem_of(one, CLOCKED.over({"clocks": "highest"}))
    aim, limits = Aim({"digits": value_j}, {"digits": target}), Limits(4000, 1e-3)
    if ladder:
        aim = on_grid(problem, aim, up=False)
        target = aim.target["digits"]
    found, exact = solve_or_reuse(problem, aim, limits, ladder), solve(problem, aim, Limits(20_000, 1e-6))
    assert (found is None) == (exact is None)
    if found is not None and exact is not None:
        assert found.accuracy["digits"] >= target - 1e-6
        assert found.gap <= 2 * limits.gap + 1e-12
        assert found.objective <= exact.objective / (1 - found.gap) * (1 + 1e-6) + 1e-6
        again = refit(problem, aim, found)
        assert again is not None
        assert again.objective == pytest.approx(found.objective, rel=1e-5, abs=1e-4)


@given(
    st.lists(st.tuples(st.floats(0.1, 9.0), st.floats(0.5, 1.0), st.floats(1.0, 50.0)), min_size=1, max_size=5),
    st.floats(1.0, 120.0),
    st.floats(0.5, 1.0),
)
@settings(max_examples=100, deadline=None)
def test_the_split_serves_all_at_the_floor_and_no_pair_trades_better(classes, demand, floor):
    shares = [ClassShare(str(i), *c) for i, c in enumerate(classes)]  # type: ignore[arg-type]
    rates = split(shares, demand, floor)
    if rates is None:
        best = sorted(shares, key=lambda c: -c.accuracy)
        left, gained = demand, 0.0
        for c in best:
            used = min(left, c.capacity_per_s)
            left, gained = left - used, gained + used * (c.accuracy - floor)
        assert left > 0 or gained < 1e-6 * demand
        return
    assert sum(rates.values()) == pytest.approx(demand)
    slack = sum(rates[c.key] * (c.accuracy - floor) for c in shares)
    assert slack >= -1e-6 * demand
    for a, b in itertools.permutations(shares, 2):
        moved = min(rates[a.key], b.capacity_per_s - rates[b.key], 1e-3)
        if moved > 1e-9 and slack + moved * (b.accuracy - a.accuracy) >= 1e-6 * demand:
            assert b.cost_j >= a.cost_j - 1e-6


def test_a_clean_zone_takes_the_load_and_its_grams_are_its_own():
    kinds = [A100_40GB.name] * 2
    one = instance((20.0,) * 6, (0.7, 0.9), 10.0, 100.0, kinds, ["test", "far"], dirty=1000.0)
    plan = ExactPlanner(ExactSettings(clocks="highest")).plan(one, np.random.default_rng(0)).plan
    hosting = {d.device for n in plan.nodes for d in n.devices if d.slices}
    assert hosting == {"node0/gpu0"}
    e = plan.expected["digits"]
    awake_j, asleep_j = e.joules_per_request - A100_40GB.sleep_w / 10.0, A100_40GB.sleep_w / 10.0
    assert e.grams_per_request == pytest.approx((awake_j * 100.0 + asleep_j * 1000.0) / 3.6e6, rel=1e-4)


def test_one_zone_under_another_name_changes_nothing():
    base = view(rate=20.0, devices=fleet(2))
    node = dataclasses.replace(base.fleet.nodes[0], zone="far")
    far = dataclasses.replace(base, fleet=FleetState((node,)), zones=(zone_reading("far", 250.0),))
    a, b = (ExactPlanner().plan(v, np.random.default_rng(0)).plan for v in (base, far))
    assert [n.digest for n in a.nodes] == [n.digest for n in b.nodes]
    assert a.expected == b.expected


def test_planned_clocks_are_locked_and_only_when_asked_for():
    one = instance((20.0,) * 6, (0.7, 0.9), 4.0, 400.0, [A100_40GB.name] * 2, ["test", "test"])
    locked = ExactPlanner(ExactSettings(clocks="planned")).plan(one, np.random.default_rng(0)).plan
    check(locked, one.fleet, one.catalog, one.demand)
    clocks = {d.clock_max_mhz for n in locked.nodes for d in n.devices if d.slices}
    assert clocks <= {705, 1005}
    assert all(d.clock_min_mhz <= d.clock_max_mhz for n in locked.nodes for d in n.devices)
    free = ExactPlanner().plan(one, np.random.default_rng(0)).plan
    assert {d.clock_max_mhz for n in free.nodes for d in n.devices} == {0}
    assert locked.expected["digits"].joules_per_request < free.expected["digits"].joules_per_request


@pytest.mark.parametrize(("mean", "p90"), [(12.0, 120.0), (60.0, 120.0), (110.0, 120.0)])
def test_a_range_begins_at_the_lowest_clock_that_carries_the_mean_and_ends_where_the_peaks_are_carried(mean, p90):
    kinds = [A100_40GB.name] * 2
    one = instance((20.0,) * 6, (0.7, 0.9), mean, 120.0, kinds, ["test", "test"])
    one = dataclasses.replace(one, demand=tuple(dataclasses.replace(d, rate_p90_per_s=p90) for d in one.demand))
    problem = problem_of(one)
    solution = solve(problem, Aim({"digits": 5.0}), TIGHT)
    _, clocks = place_clocked(problem, solution)
    lowest, columns_of = lowest_clocks(problem, solution, clocks), {c.key: c for c in problem.columns}
    ends = {(low or CLOCKS[0], clocks.get(name, 0) or CLOCKS[0]) for name, low in lowest.items()}
    assert all(low <= high for low, high in ends)
    for name, low in lowest.items():
        classes = {k: n for k, n in solution.slices.items() if n and k.clock_mhz == clocks.get(name, 0)}

        def carried(clock_mhz, classes=classes):
            at = {k: columns_of.get(k._replace(clock_mhz=clock_mhz)) for k in classes}
            return all(
                c is not None and c.capacity_per_s(classes[k]) >= solution.traffic[k] * mean / p90
                for k, c in at.items()
            )

        assert carried(low)
        lower = [clock for clock in CLOCKS if clock < (low or CLOCKS[0])]
        assert not classes or not any(carried(clock) for clock in lower)
    if mean < p90 / 4:
        assert ends == {(705, 1005)}, "there is room below the peaks"


def test_a_governor_has_no_way_down_where_only_the_highest_clock_carries_the_mean():
    """An end of 0 is the end of what the device has, at either end."""
    one = instance((20.0,) * 6, (0.7, 0.9), 4.0, 27.0, [A100_40GB.name] * 2, ["test", "test"])
    plan = ExactPlanner(ExactSettings(clocks="governed")).plan(one, np.random.default_rng(0)).plan
    check(plan, one.fleet, one.catalog, one.demand)
    ranges = {(d.clock_min_mhz, d.clock_max_mhz) for n in plan.nodes for d in n.devices if d.slices}
    assert ranges == {(CLOCKS[0], 0)}


def test_a_node_that_cannot_lock_has_its_type_planned_at_the_highest_clock():
    one = instance((20.0,) * 6, (0.7, 0.9), 4.0, 400.0, [A100_40GB.name] * 2, ["test", "test"])
    why = ("clock_lock gpu0: the driver says no. Remedy: none", "gpm: not here")
    nodes = (dataclasses.replace(one.fleet.nodes[0], missing=why), *one.fleet.nodes[1:])
    refused = dataclasses.replace(one, fleet=dataclasses.replace(one.fleet, nodes=nodes))
    plan = ExactPlanner(ExactSettings(clocks="planned")).plan(refused, np.random.default_rng(0)).plan
    assert {(d.clock_min_mhz, d.clock_max_mhz) for n in plan.nodes for d in n.devices} == {(0, 0)}


def test_shared_slices_and_parts_of_a_board_are_planned_without_limits():
    one = instance((20.0,) * 6, (0.7, 0.9), 4.0, 400.0, [A100_40GB.name] * 2, ["test", "test"])
    rows = one.catalog.rows
    limited = tuple(dataclasses.replace(row, clock_mhz=-200) for row in rows)
    seen = dataclasses.replace(one, catalog=Catalog(one.catalog.families, (*rows, *limited)))
    world = read_view(seen, 1.0, clocks=True)
    found = columns(seen.catalog, world.tasks[0], world.devices, CLOCKED)
    assert {column.slice_type for column in found if column.key.clock_mhz < 0} == {A100_40GB.largest.name}
    (group,) = groups_of(world.devices, found)
    assert group.clocks[0] == 0, "devices that stay count at no limit"
    assert group.clocks[-1] == -200


def test_a_clock_that_nobody_profiled_is_planned_by_the_law_of_the_simulated_driver():
    rows = small_catalog((20.0,) * 6, (0.7, 0.9)).rows
    catalog = Catalog(
        small_catalog((20.0,) * 6, (0.7, 0.9)).families,
        tuple(dataclasses.replace(r, clock_mhz=1410, clock_sensitivity=0.5) for r in rows),
    )
    same = CatalogKey(catalog)
    assert same.clocks(A100_40GB) == (0, 840, 975, 1125, 1260), "shares of the only clock, supported"
    for row in rows:
        at = A100_40GB, row.slice_type, row.family, row.variant
        (slow,) = same.rows(*at, 840)
        assert slow == at_clock(A100_40GB, next(r for r in same.rows(*at, 0) if r.batch == slow.batch), 840)
        assert slow.latency_ms_p50 == pytest.approx(row.latency_ms_p50 * (0.5 + 0.5 * 1410 / 840))
    assert same.rows(A100_40GB, LARGE[0], "nobody", "x", 840) == ()


def test_a_running_model_keeps_its_columns_at_every_clock():
    one = instance((20.0,) * 6, (0.7, 0.9), 10.0, 100.0, [A100_40GB.name], ["test"])
    world = read_view(one, 1.0, clocks=True)
    found = columns(one.catalog, world.tasks[0], world.devices, CLOCKED)
    assert undominated(found, world.devices) == found
