"""`exact` with two families on a slice: as good as brute force, and it saves a GPU where they cannot be cut."""

from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.planners.columns import columns
from controller.planners.exact.milp import Limits, Program
from controller.planners.exact.model import Aim, Problem, Solution, groups_of
from controller.planners.exact.placement import moves, place
from controller.planners.exact.reuse import refit
from controller.planners.exact.search import solve
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from controller.planners.shared_columns import shared_columns
from tests.support.engines import request_engine
from tests.support.planning import digits, fleet, objective, row, view
from tests.support.twin_family import TWIN, two_families
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.demand import Demand
from trefoil.core.device_types import A100_40GB, V100_32GB
from trefoil.core.fleet import Configuration, Hosted, SliceKey
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.queueing import arrivals_s
from trefoil.reproduce.wattwiser.experiment import MODELS, PAIRS, PairSpec, catalog_of
from trefoil.simulator.engines.engine import Flow
from trefoil.simulator.engines.hardware import true_service
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.inputs import Provided
from trefoil.simulator.scenario.schema import Scenario

SLO_MS = 300.0
HIGH = 1.2  # quantile of the demand that capacity is planned for, over its mean
WHOLE = "7g.40gb"
NAMES = ("digits", "letters", "words")


def catalog_for(families):
    """Digits in three variants, others in one, on GPUs that are not cut."""
    known = digits()
    letter = Variant("only", 1, 0.9, "made up", 32, 2.0, 10, "CC0-1.0")
    others = NAMES[1:families]
    rows = [r for r in known.rows if r.slice_type == WHOLE and r.variant != "xs"]
    return Catalog(
        (*known.families, *(Family(name, "top1", (letter,), {"": (80.0, 0.95)}) for name in others)),
        (*rows, *(row("only", WHOLE, 20.0, family=name) for name in others)),
    )


def problem_of(rates, slo_ms, gpus):
    """All families on one GPU where they fit."""
    names, catalog = NAMES[: len(rates)], catalog_for(len(rates))
    wanted = [objective(family=name, min_accuracy=0.9, slo_ms=slo_ms) for name in names]
    demand = [Demand(f, "", rate, HIGH * rate) for f, rate in zip(names, rates, strict=True)]
    world = read_view(view(devices=fleet(gpus), catalog=catalog, wanted=wanted, demand=demand), 1.0)
    alone = tuple(c for t in world.tasks for c in columns(catalog, t, world.devices, ExactSettings()))
    settings = ExactSettings(families_per_slice=len(rates))
    shared = shared_columns(catalog, world.tasks, world.devices, settings, alone)
    return Problem(groups_of(world.devices), alone + shared, world.tasks, 0.0)


def brute_force(problem, weighed):
    """The least objective over everything that every GPU may host; None: nothing works.

    `weighed` (slices by class, GPUs used): the least objective of one such choice, or None.
    """
    options = [()]
    for column in problem.columns:
        if column.key.leads:
            options.append((column.key, *column.key.partners))
    best = None
    for chosen in combinations_with_replacement(options, problem.number):
        slices = Counter(key for option in chosen for key in option)
        if len({key.family for key in slices}) == len(problem.tasks):
            found = weighed(slices, sum(map(bool, chosen)))
            if found is not None and (best is None or found < best):
                best = found
    return best


def by_refit(problem, aim):
    """Traffic split family by family: where requests are not joined, what one serves does not hang on the other."""
    on = Configuration(A100_40GB.name, ((WHOLE, 1),))

    def weighed(slices, used):
        found = refit(problem, aim, Solution(((0, on, used),), dict(slices), {}, 0.0, {}, 0.0, 0.0))
        return None if found is None else found.objective

    return weighed


def by_hand(problem, kind):
    """Watts beyond those of GPUs asleep: awake, `running_w` of slices, joules of traffic below every hull."""

    def weighed(slices, used):
        program, columns = Program(), {c.key: c for c in problem.columns}
        flows = {
            key: program.variable(columns[key].energy_j / HIGH, 0.0, columns[key].capacity_per_s(number))
            for key, number in slices.items()
        }
        for task in problem.tasks:
            wanted = task.demand.rate_p90_per_s
            program.row([(f, 1.0) for key, f in flows.items() if key.family == task.family], low=wanted, high=wanted)
        for key, number in slices.items():
            for x, y in columns[key].limits:
                program.row([(flows[key], x), *((flows[partner], y) for partner in key.partners)], high=number)
        found = program.solve(Limits())
        running = sum(number * columns[key].running_w for key, number in slices.items())
        return None if found is None else found.objective + running + used * (kind.idle_w - kind.sleep_w)

    return weighed


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(PAIRS), st.tuples(st.floats(0.1, 1.9), st.floats(0.1, 1.9)), st.integers(1, 4))
def test_no_way_to_share_batches_is_better_than_the_program_s(pair, loads, gpus):
    """Where Triton joins requests a slice draws watts beside the joules of requests: both are in what is compared."""
    rates = {name: load * MODELS[name].max_rps for name, load in zip(pair, loads, strict=True)}
    wanted = [objective(family=name, min_accuracy=0.0, slo_ms=MODELS[name].slo_ms) for name in pair]
    demand = [Demand(name, "", rate, HIGH * rate) for name, rate in rates.items()]
    catalog = catalog_of(PairSpec(*pair, "exact", 1, ((), ())))
    catalog = replace(catalog, families=tuple(replace(family, batching=True) for family in catalog.families))
    world = read_view(view(devices=fleet(gpus, kind=V100_32GB), catalog=catalog, wanted=wanted, demand=demand), 1.0)
    settings = ExactSettings(families_per_slice=2)
    alone = tuple(c for t in world.tasks for c in columns(catalog, t, world.devices, settings))
    shared = shared_columns(catalog, world.tasks, world.devices, settings, alone)
    problem = Problem(groups_of(world.devices), alone + shared, world.tasks, 0.0)
    best = brute_force(problem, by_hand(problem, V100_32GB))
    found = solve(problem, Aim(moves=False), Limits(100_000, 1e-9))
    assert (best is None) == (found is None)
    if found is not None:
        assert found.objective == pytest.approx(best, rel=1e-6, abs=1e-3)
        asleep_w = problem.number * V100_32GB.sleep_w
        assert found.power_w - asleep_w == pytest.approx(best, rel=1e-6, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1.0, 40.0), min_size=2, max_size=3), st.floats(60.0, 400.0), st.integers(1, 3),
       st.sampled_from([0.0, 60.0]))  # fmt: skip
@example([3.0, 26.0], 60.0, 2, 0.0)  # one family needs the slices that the other has enough of
def test_no_way_to_share_is_better_than_the_program_s(rates, slo_ms, gpus, value_j):
    problem = problem_of(rates, slo_ms, gpus)
    aim = Aim({"digits": value_j}, {"digits": 0.95}, moves=False)
    best, found = brute_force(problem, by_refit(problem, aim)), solve(problem, aim, Limits(100_000, 1e-9))
    assert (best is None) == (found is None)
    if found is None:
        return
    assert found.objective == pytest.approx(best, rel=1e-6, abs=1e-3)
    hosted = place(problem, found)
    placed = Counter((r.family, r.variant, r.beside) for parts in hosted.values() for r in parts)
    assert placed == {(key.family, key.variant, key.beside): n for key, n in found.slices.items()}
    assert sum(map(bool, hosted.values())) == sum(n for _, _, n in found.layouts)
    assert moves(problem, hosted).starts == len({r.key for parts in hosted.values() for r in parts})


def test_few_requests_share_a_gpu_and_more_of_them_part():
    def awake(rate):
        problem, aim = problem_of((rate, rate), 120.0, 2), Aim({}, {"digits": 0.95}, moves=False)
        found = solve(problem, aim, Limits(10**5, 1e-9))
        return sum(n for _, _, n in found.layouts), any(key.beside for key in found.slices)

    assert awake(3.0) == (1, True)
    assert awake(20.0)[0] == 2


@pytest.mark.parametrize("families", [2, 3])
@pytest.mark.parametrize("slo_ms", [80.0, 120.0, 250.0])
def test_families_on_one_slice_at_the_most_that_is_planned_are_in_time(families, slo_ms):
    """The event loop at the greatest equal rates at which one slice has capacity for all."""

    def together(rate):
        every = {("digits", "l"), *((name, "only") for name in NAMES[1:families])}
        all_columns = problem_of([rate] * families, slo_ms, 1).columns
        found = [c for c in all_columns if {(c.family, c.variant), *c.key.beside} == every]
        return found if found and all(c.capacity_per_s(1) >= HIGH * rate for c in found) else []

    low, high = 0.5, 40.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if together(middle) else (low, middle)
    found = together(low)
    assert len(found) == families
    key = SliceKey("node0/gpu0", WHOLE, 0, 8)
    services, routes, arrivals, flows = {}, {}, {}, {}
    for at, column in enumerate(found):
        name = column.family
        hosted = Hosted(name, column.variant, column.version, 0, 1, 1, 1)
        services[name] = {key: true_service(catalog_for(families), A100_40GB, WHOLE, hosted, 1.0, 0.0)}
        routes[name] = Route(name, "weighted", "fifo", (RouteTarget(key, column.variant, 0, 1.0, 1),), 10**6, 0)
        arrivals[name] = arrivals_s(HIGH * low, 1.0, int(600 * HIGH * low), np.random.default_rng(at))
        flows[name] = Flow(None, slo_ms)
    served = request_engine(routes, services, np.random.default_rng(5), flows, shares=True).windows(arrivals, 700.0)
    late = [float(np.mean(np.asarray(one.latency_ms) > slo_ms)) for one in served.values()]
    print(f"{families} families, {slo_ms:g} ms: {HIGH * low:.1f}/s each, late {[f'{one:.1%}' for one in late]}")
    assert max(late) < 0.055


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return two_families(tmp_path_factory.mktemp("models") / "two")


def scenario(repository, families_per_slice):
    """Two families on GPUs that cannot be cut, each at a small part of what one carries."""
    points = ((0.0, 4.0), (120.0, 4.0), (180.0, 9.0), (400.0, 9.0), (460.0, 4.0), (600.0, 4.0))
    return Scenario(**{
        "name": "shares", "seed": 1, "duration_s": 600.0, "warmup_s": 60.0,
        "nodes": [{"name": "node0", "devices": [V100_32GB.name] * 3}],
        "families": [
            {"name": name, "repository": repository, "arrivals": {"points": points},
             "objective": {"type": "instant", "slo": {"latency_ms": SLO_MS}, "accuracy": {"below_best_pct": 5.0}}}
            for name in ("digits", TWIN)
        ],
        "policy": "exact", "parts": {"planner": {"families_per_slice": families_per_slice}},
    })  # fmt: skip


def test_two_families_on_a_gpu_save_one_and_keep_their_slo(repository):
    alone, beside = (simulate(scenario(repository, n), Provided()).summary for n in (1.0, 2.0))
    assert beside.arrived == alone.arrived
    one_gpu_j = (V100_32GB.idle_w - V100_32GB.sleep_w) * 600.0
    print(f"joules {alone.joules:.0f} -> {beside.joules:.0f}; a GPU asleep instead of awake: {one_gpu_j:.0f}")
    assert alone.joules - beside.joules == pytest.approx(one_gpu_j, rel=0.1)
    for family in beside.families.values():
        assert family.slo_attainment > 0.95
        assert not family.floor_missed
