"""`exact` from one GPU to a hundred thousand: proven gaps, generous times, and nothing that grows with the square."""

import dataclasses
import itertools
import time
import tracemalloc

import numpy as np
import pytest

from benchmarks import planner as bench
from controller.planners.exact import ExactPlanner, reuse
from controller.planners.exact.milp import Limits
from controller.planners.exact.placement import moves, place_clocked
from controller.planners.exact.search import solve
from controller.planners.plan_assembly import plan_of
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from tests.support.planning import DUCK, applied, digits, fleet, objective, reading, view
from trefoil.core.fleet import DeviceState
from trefoil.core.plan_check import check

LIMITS = Limits(4000, 1e-3)


def problem_for(name, gpus):
    case = bench.CASES[name]
    world = read_view(bench.view_of(case, gpus, bench.LOAD), 1.0, clocks=True)
    return (world, *bench.problem_of(case, world))


def solved(name, gpus):
    world, problem, aim = problem_for(name, gpus)
    started = time.process_time()
    solution = solve(problem, aim, LIMITS)
    return solution, time.process_time() - started, (world, problem)


@pytest.mark.parametrize(("gpus", "gap"), [(10, 1e-3), (1000, 2e-3), (20_000, 1e-3)])
def test_one_type_and_four_clocks_at_any_size(gpus, gap):
    solution, took_s, _ = solved("A", gpus)
    assert solution.gap <= gap
    assert took_s < 5.0


@pytest.mark.long
def test_two_types_and_four_families_at_two_thousand():
    solution, took_s, _ = solved("B", 2000)
    assert solution.gap <= 1e-3
    assert took_s < 10.0


def test_a_gpu_costs_less_in_a_larger_fleet():
    """Larger pools, less of a device left over: per GPU the objective falls, towards the relaxation's."""
    per_gpu = [solved("A", gpus)[0].objective / gpus for gpus in (10, 100, 1000, 10_000)]
    assert all(a * (1 + 2e-3) >= b for a, b in itertools.pairwise(per_gpu))


def test_the_same_program_has_the_same_answer():
    assert solved("A", 100)[0] == solved("A", 100)[0]


def test_ten_thousand_devices_are_mapped_assembled_and_checked():
    solution, _, (world, problem) = solved("A", 10_000)
    tracemalloc.start()
    started = time.process_time()
    hosted, clocks = place_clocked(problem, solution)
    needed = moves(problem, hosted)
    took_s = time.process_time() - started
    assert tracemalloc.get_traced_memory()[1] < 500 * 2**20
    tracemalloc.stop()
    assert took_s < 10.0
    assert sum(1 for parts in hosted.values() if parts) == sum(n for _, _, n in solution.layouts)
    assert needed.starts == sum(solution.slices.values())
    plan = plan_of(world, "exact", hosted, solution.traffic, problem.columns, bench.SETTINGS, {}, "", clocks=clocks)
    started = time.process_time()
    check(plan, world.view.fleet, world.view.catalog)
    assert time.process_time() - started < 5.0
    planned = {d.device: d for n in plan.nodes for d in n.devices}
    assert all((d.target == DeviceState.AWAKE) == bool(d.slices) for d in planned.values())
    assert {d.clock_max_mhz for d in planned.values() if d.slices} <= {0, *bench.CLOCKS["A100-SXM4-40GB"]}


def test_a_change_of_the_load_moves_few_of_a_thousand():
    """What runs stays, although the mapping may use every device."""
    one = view(rate=4000.0, devices=fleet(300, nodes=40), wanted=[objective(slo_ms=75.0)], horizon_s=600.0)
    planner = ExactPlanner()
    first = planner.plan(one, np.random.default_rng(0)).plan
    check(first, one.fleet, one.catalog, one.demand)
    later = view(
        rate=4040.0,
        devices=applied(first, one.fleet),
        current=first,
        wanted=[objective(slo_ms=75.0)],
        horizon_s=600.0,
    )
    second = planner.plan(later, np.random.default_rng(0)).plan
    check(second, later.fleet, later.catalog, later.demand)
    before = {s.key: s.hosted for n in first.nodes for d in n.devices for s in d.slices}
    kept = sum(before.get(s.key) == s.hosted for n in second.nodes for d in n.devices for s in d.slices)
    assert kept > 0.85 * len(before)


def test_steady_decisions_at_ten_gpus_are_remembered(capsys):
    """Only the intensity changes: after a while nearly every answer follows from neighbouring ones."""
    plan, took = None, []
    devices, planner = fleet(10, nodes=5), ExactPlanner()
    catalog, wanted = digits(), [objective(slo_ms=75.0, window_s=86_400.0)]
    rng = np.random.default_rng(3)
    for hour in range(60):
        ci = 240 + 120 * np.sin(hour / 24 * 2 * np.pi) + rng.normal(0, 10)
        state = devices if plan is None else applied(plan, devices)
        one = view(
            ci, 160.0, catalog=catalog, devices=state, wanted=wanted, current=plan, history=DUCK, horizon_s=3600.0
        )
        started = time.process_time()
        plan = planner.plan(one, np.random.default_rng(0)).plan or plan
        took.append(time.process_time() - started)
    with capsys.disabled():
        print(f" steady decisions at 10 GPUs: median {1e3 * np.median(took[30:]):.1f} ms", end=";")
    assert np.median(took[30:]) < 0.05


@pytest.mark.parametrize("demand_step", [0.0, 1.05])
def test_an_answer_does_not_depend_on_the_ones_before_it(demand_step):
    planner = ExactPlanner(ExactSettings(demand_step=demand_step))
    one = view(rate=160.0, devices=fleet(10), history=DUCK, wanted=[objective(slo_ms=75.0)], horizon_s=3600.0)
    for ci in (90.0, 180.0, 300.0):
        planner.plan(
            view(ci, 160.0, devices=fleet(10), history=DUCK, wanted=[objective(slo_ms=75.0)]), np.random.default_rng(0)
        )
    again = [planner.plan(at_intensity(one, ci), np.random.default_rng(0)) for ci in (120.0, 250.0)]
    reuse._solved.cache_clear()
    fresh = [planner.plan(at_intensity(one, ci), np.random.default_rng(0)) for ci in (250.0, 120.0)]
    assert again == fresh[::-1]


def at_intensity(one, intensity):
    return dataclasses.replace(one, carbon=reading(intensity))
