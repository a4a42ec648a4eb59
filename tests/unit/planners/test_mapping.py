"""Counts to devices: legal placements, least moves, what runs stays."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planners.columns import ClassKey, columns
from controller.planners.exact.model import Problem, Solution, groups_of, pinned
from controller.planners.exact.placement import moves, place
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from tests.support.planning import digits, fleet, objective, view
from trefoil.core.device_types import A100_40GB, configurations, placements
from trefoil.core.fleet import DeviceState, FleetState, Hosted, SliceKey, SliceState, SliceStatus

SIZE = {s.name: s.memory_slices for s in A100_40GB.slice_types}


def stands(device: str, *parts: tuple[str, int, str]) -> tuple[SliceStatus, ...]:
    return tuple(
        SliceStatus(SliceKey(device, t, start, SIZE[t]), state=SliceState.READY, hosted=(Hosted("digits", v),))
        for t, start, v in parts
    )


def fleet_of(*running, asleep=()):
    base = fleet(len(running)).nodes[0]
    devices = tuple(
        dataclasses.replace(
            d,
            slices=stands(d.device, *parts),
            state=DeviceState.ASLEEP if i in asleep else DeviceState.AWAKE,
        )
        for i, (d, parts) in enumerate(zip(base.devices, running, strict=True))
    )
    return FleetState((dataclasses.replace(base, devices=devices),))


def problem_for(devices):
    one = view(devices=devices, catalog=digits(), wanted=[objective(slo_ms=400.0)])
    world = read_view(one, 1.0)
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, ExactSettings()))
    return Problem(groups_of(world.devices), found, world.tasks, 30.0)


def solution(problem, layouts, slices):
    """Layouts as ((slice type, count), ...) -> devices; slices as (type, variant) -> count."""
    known = {c.slices: c for c in configurations(A100_40GB)}
    return Solution(
        tuple((0, known[tuple(sorted(shape))], n) for shape, n in layouts),
        {ClassKey("digits", A100_40GB.name, t, v): n for (t, v), n in slices.items()},
        {},
        0.0,
        {},
        0.0,
        0.0,
    )


SEVENS = (("1g.5gb", 7),)
SEVEN = (("7g.40gb", 1),)
THREES = (("3g.20gb", 2),)
FOUR_THREE = (("3g.20gb", 1), ("4g.20gb", 1))


def test_what_runs_stays_where_it_is():
    devices = fleet_of((("7g.40gb", 0, "l"),), (("3g.20gb", 4, "l"),))
    problem = problem_for(devices)
    hosted = place(problem, solution(problem, [(THREES, 1), (SEVEN, 1)], {("7g.40gb", "l"): 1, ("3g.20gb", "l"): 2}))
    assert [r.key.slice_type for r in hosted["node0/gpu0"]] == ["7g.40gb"]
    assert {(r.key.start, r.variant) for r in hosted["node0/gpu1"]} == {(0, "l"), (4, "l")}
    assert moves(problem, hosted).loads == 1


def test_the_awake_device_keeps_working_and_the_sleeping_one_sleeps():
    devices = fleet_of((), (("3g.20gb", 4, "l"),), asleep=(0,))
    problem = problem_for(devices)
    hosted = place(problem, solution(problem, [(THREES, 1)], {("3g.20gb", "l"): 2}))
    assert hosted["node0/gpu0"] == ()
    assert len(hosted["node0/gpu1"]) == 2
    assert moves(problem, hosted).wakes == 0


def test_a_variant_change_is_a_swap_in_place_not_a_new_slice():
    devices = fleet_of((("3g.20gb", 0, "m"), ("3g.20gb", 4, "l")))
    problem = problem_for(devices)
    needed = moves(problem, place(problem, solution(problem, [(THREES, 1)], {("3g.20gb", "l"): 2})))
    assert (needed.loads, needed.starts) == (1, 0)


def test_an_idle_slice_is_left_out_of_the_plan():
    problem = problem_for(fleet_of(()))
    hosted = place(problem, solution(problem, [(FOUR_THREE, 1)], {("4g.20gb", "l"): 1}))
    assert [r.key.slice_type for r in hosted["node0/gpu0"]] == ["4g.20gb"]


def test_every_awake_device_gets_work_so_that_a_family_spreads():
    problem = problem_for(fleet_of((), ()))
    hosted = place(problem, solution(problem, [(THREES, 2)], {("3g.20gb", "l"): 2}))
    assert [len(parts) for parts in hosted.values()] == [1, 1]
    stacked = problem_for(fleet_of((("3g.20gb", 0, "l"), ("3g.20gb", 4, "l")), ()))
    hosted = place(stacked, solution(stacked, [(THREES, 2)], {("3g.20gb", "l"): 2}))
    assert [len(parts) for parts in hosted.values()] == [1, 1]


def test_two_awake_devices_of_two_nodes_rather_than_of_one():
    one = view(devices=fleet(4, nodes=2), wanted=[objective(slo_ms=400.0)])
    world = read_view(one, 1.0)
    found = tuple(c for t in world.tasks for c in columns(one.catalog, t, world.devices, ExactSettings()))
    problem = Problem(groups_of(world.devices), found, world.tasks, 30.0)
    hosted = place(problem, solution(problem, [(SEVEN, 2)], {("7g.40gb", "l"): 2}))
    assert {name.split("/")[0] for name, parts in hosted.items() if parts} == {"node0", "node1"}


def test_pinned_devices_only_swap_sleep_or_wake():
    problem = problem_for(fleet_of((("7g.40gb", 0, "l"),), (("3g.20gb", 4, "l"),), (), asleep=(2,)))
    options = {tuple(d.name for d in g.devices): {c.slices for c in g.options} for g in pinned(problem.groups)}
    assert options[("node0/gpu0",)] == {(("7g.40gb", 1),)}
    assert options[("node0/gpu1",)] == {(("3g.20gb", 1),)}
    assert len(options[("node0/gpu2",)]) == 14


@given(seed=st.integers(0, 2**32 - 1), gpus=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_any_counts_map_to_legal_placements_with_the_right_counts(seed, gpus):
    rng = np.random.default_rng(seed)
    every = placements(A100_40GB)
    names = ["xs", "s", "m", "l"]
    running = [
        tuple((t, start, str(rng.choice(names))) for t, start, _ in every[rng.integers(len(every))])
        if rng.random() < 0.7
        else ()
        for _ in range(gpus)
    ]
    problem = problem_for(fleet_of(*running))
    chosen = [configurations(A100_40GB)[i] for i in rng.integers(0, 14, size=int(rng.integers(1, gpus + 1)))]
    slices: dict[tuple[str, str], int] = {}
    for configuration in chosen:
        for name, count in configuration.slices:
            for variant in rng.choice(names, size=count):
                slices[(name, str(variant))] = slices.get((name, str(variant)), 0) + 1
    counts: dict[tuple[tuple[str, int], ...], int] = {}
    for configuration in chosen:
        counts[configuration.slices] = counts.get(configuration.slices, 0) + 1
    hosted = place(problem, solution(problem, list(counts.items()), slices))
    placed: dict[tuple[str, str], int] = {}
    for parts in hosted.values():
        taken = tuple(sorted((r.key.slice_type, r.key.start, r.key.size) for r in parts))
        assert not parts or any(set(taken) <= set(p) for p in every)
        for r in parts:
            placed[(r.key.slice_type, r.variant)] = placed.get((r.key.slice_type, r.variant), 0) + 1
    assert placed == slices
    assert sum(1 for parts in hosted.values() if parts) == len(chosen)


@pytest.mark.parametrize("gpus", [1000])
def test_a_thousand_devices_are_mapped_by_class(gpus):
    problem = problem_for(fleet_of(*[(("7g.40gb", 0, "l"),)] * gpus))
    hosted = place(
        problem,
        solution(problem, [(SEVEN, 600), (SEVENS, 300)], {("7g.40gb", "l"): 600, ("1g.5gb", "m"): 2100}),
    )
    needed = moves(problem, hosted)
    assert (needed.loads, needed.sleeps) == (2100, 100)
