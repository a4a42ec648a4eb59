"""WattWiser's experiment, small: what is compared is equal, joules add up, and a model alone is as Table I has it."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from controller.planners.columns import columns
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import Device, Task
from controller.planners.shared_columns import shared_columns
from tests.support.engines import request_engine
from trefoil.core import power
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.device_types import device_type
from trefoil.core.fleet import Hosted, SliceKey
from trefoil.core.objective import Objective
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.queueing import arrivals_s
from trefoil.reproduce.tables import wattwiser_tables
from trefoil.reproduce.wattwiser.experiment import (
    DEVICE,
    GPUS_PER_MODEL,
    MODELS,
    PAIRS,
    PAPERS,
    POLICIES,
    PairSpec,
    catalog_of,
    scenario_of,
    shares_of_gpus,
    swim,
)
from trefoil.reproduce.wattwiser.study import QUICK, study
from trefoil.simulator.engines.engine import Flow
from trefoil.simulator.engines.hardware import true_service
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.simulation import Simulation

SENT_S = 60
LOADS = (0.3, 0.7, 0.5), (0.4, 0.6, 0.2)


def spec(policy, **changes):
    return PairSpec(*PAIRS[1], policy, 1, LOADS, step_s=20.0, **changes)


def joining(catalog: Catalog) -> Catalog:
    """The catalogue whose families form batches."""
    return replace(catalog, families=tuple(replace(family, batching=True) for family in catalog.families))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_alone_on_a_gpu_meets_table_i_at_its_greatest_rate(name):
    model, key = MODELS[name], SliceKey("node/gpu0", power.WHOLE, 0, 8)
    other = next(pair for pair in PAIRS if name in pair)
    catalog = catalog_of(PairSpec(*other, "uniform", 1, LOADS))
    hosted = Hosted(name, f"{name}-fp32", 1, 0, 1, 1, model.batch_max)
    service = true_service(catalog, device_type(DEVICE), power.WHOLE, hosted, 1.0, 0.0)
    table = Route(name, "weighted", "fifo", (RouteTarget(key, hosted.variant, 0, 1.0, 512),), 10**6, 0)
    flows = {name: Flow(None, model.slo_ms, batch_delay_s=0.0)}
    p95_ms = []
    for seed in range(3):
        level = request_engine({name: table}, {name: {key: service}}, np.random.default_rng(seed), flows, shares=True)
        at = arrivals_s(model.max_rps, 1.0, 40_000, np.random.default_rng(seed + 9))
        p95_ms.append(float(np.quantile(level.windows({name: at}, at[-1] + 60)[name].latency_ms, 0.95)))
    assert np.median(p95_ms) == pytest.approx(model.slo_ms, rel=0.04)
    in_flight = model.max_rps * model.slo_ms / 2e3
    assert 5.5 < in_flight < 29
    assert model.batch_max == round(in_flight)


@pytest.mark.parametrize(
    "pair", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.long) for pair in PAIRS[1:])], ids="-".join
)
def test_what_exact_counts_on_with_batches_is_in_time_alone_and_beside_another(pair):
    """The event loop at the very rates that columns promise: 95 % within the SLO, little of Table I given away, and the
    watts of `power_line`."""
    one = PairSpec(*pair, "uniform", 1, LOADS)
    catalog, kind, key = joining(catalog_of(one)), device_type(DEVICE), SliceKey("node/gpu0", power.WHOLE, 0, 8)
    tasks = [
        Task(Objective(name, slo_ms=MODELS[name].slo_ms, slo_quantile=0.95), Demand(name, "", 1.0, 1.0))
        for name in pair
    ]
    gpus = [Device("node/gpu0", "node", kind, True, ())]
    settings = ExactSettings(families_per_slice=2, overhead_ms=0.0, transport_gap_ms=0.0)
    alone = [column for task in tasks for column in columns(catalog, task, gpus, settings)]
    for column in alone:
        assert 0.9 < column.capacity_per_s(1) / MODELS[column.family].max_rps < 1.02
    beside = shared_columns(catalog, tasks, gpus, settings, alone)
    lead = beside[0]
    corners = [(0.0, 1 / lead.limits[0][1])]
    for (x, y), (u, v) in pairwise(lead.limits):
        corners.append(((v - y) / (x * v - u * y), (x - u) / (x * v - u * y)))
    corners.append((1 / lead.limits[-1][0], 0.0))
    between = [tuple(np.mean(pair, axis=0)) for pair in pairwise(corners)]
    alone.sort(key=lambda column: column.key)
    for rates in [(alone[0].capacity_per_s(1), 0.0), (0.0, alone[1].capacity_per_s(1)), *corners[1:-1], *between]:
        services, routes, arrivals = {}, {}, {}
        for at, (column, rate) in enumerate(zip(alone, rates, strict=True)):
            name = column.family
            hosted = Hosted(name, column.variant, 1, 0, 1, 1, MODELS[name].batch_max)
            services[name] = {key: true_service(catalog, kind, power.WHOLE, hosted, 1.0, 0.0)}
            routes[name] = Route(name, "weighted", "fifo", (RouteTarget(key, column.variant, 0, 1.0, 512),), 10**6, 0)
            if rate:
                arrivals[name] = arrivals_s(rate, 1.0, int(SENT_S * rate), np.random.default_rng(at))
        flows = {name: Flow(None, MODELS[name].slo_ms, batch_delay_s=0.0) for name in routes}
        level = request_engine(routes, services, np.random.default_rng(5), flows, shares=True)
        found = level.windows(arrivals, 90.0)
        for name, each in found.items():
            if name in arrivals:
                late = float(np.mean(np.asarray(each.latency_ms) > MODELS[name].slo_ms))
                used = next(c for c in (alone if 0.0 in rates else beside) if c.family == name)
                served = len(arrivals[name]) / SENT_S
                planned_w, watts = used.running_w + used.energy_j * served, sum(each.joules.values()) / SENT_S
                said = f"{late:.1%} late, {watts:.0f} W, planned {planned_w:.0f}"
                print(f"{name} {served:.0f}/s of {MODELS[name].max_rps:g}: {said}")
                assert late < 0.05
                if served > used.saturation_per_s / 2:
                    assert planned_w == pytest.approx(watts, rel=0.05 if used in alone else 0.2)
                else:
                    assert planned_w > 0.9 * watts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_that_take_turns_serve_what_exact_counts_on(name, slices):
    other = next(pair for pair in PAIRS if name in pair)
    catalog, kind, model = joining(catalog_of(PairSpec(*other, "uniform", 1, LOADS))), device_type(DEVICE), MODELS[name]
    task = Task(Objective(name, slo_ms=model.slo_ms, slo_quantile=0.95), Demand(name, "", 1.0, 1.0))
    gpus = [Device(f"node/gpu{at}", "node", kind, True, ()) for at in range(slices)]
    settings = ExactSettings(overhead_ms=0.0, transport_gap_ms=0.0)
    (column,) = columns(catalog, task, gpus, settings)
    rate = column.capacity_per_s(slices)
    keys = [SliceKey(gpu.name, power.WHOLE, 0, 8) for gpu in gpus]
    hosted = Hosted(name, column.variant, 1, 0, 1, 1, model.batch_max)
    service = true_service(catalog, kind, power.WHOLE, hosted, 1.0, 0.0)
    targets = tuple(RouteTarget(key, column.variant, 0, 1.0, 512) for key in keys)
    routes = {name: Route(name, "weighted", "fifo", targets, 10**6, 0)}
    flows = {name: Flow(None, model.slo_ms, batch_delay_s=0.0)}
    services = {name: dict.fromkeys(keys, service)}
    level = request_engine(routes, services, np.random.default_rng(5), flows, shares=True)
    arrivals = arrivals_s(rate, 1.0, int(SENT_S * rate), np.random.default_rng(1))
    found = level.windows({name: arrivals}, arrivals[-1] + 30)[name]
    late = float(np.mean(np.asarray(found.latency_ms) > model.slo_ms))
    watts, planned_w = sum(found.joules.values()) / SENT_S, slices * column.running_w + column.energy_j * rate
    print(f"{name}: {rate / slices:.0f}/s of {model.max_rps:g} each, {late:.1%} late, {watts:.0f} W of {planned_w:.0f}")
    assert late < 0.05
    assert planned_w == pytest.approx(watts, rel=0.05)


def played(policy):
    """A simulated minute, and what each interval drew."""
    one, drawn = spec(policy), []
    simulation = Simulation(prepare(scenario_of(one), Provided(catalog=catalog_of(one))))
    book = simulation.hardware.book_energy

    def booked(*given):
        drawn.append(book(*given))
        return drawn[-1]

    simulation.hardware.book_energy = booked
    simulation.run(60.0)
    return simulation, [one for each in drawn for one in each]


@pytest.mark.parametrize("policy", PAPERS)
def test_joules_of_families_add_up_to_those_of_their_gpu_and_these_to_its_counter(policy):
    simulation, drawn = played(policy)
    shared = 0
    for one in drawn:
        assert math.isclose(sum(one.by_family.values()), one.active_j, rel_tol=1e-6, abs_tol=1e-9)
        shared += sum(joules > 0 for joules in one.by_family.values()) > 1
    assert (shared > 0) == (policy != "uniform")
    for name, device in simulation.hardware.devices.items():
        assert math.isclose(device.active_j + device.idle_j + device.unallocated_j, device.counter_j, rel_tol=1e-6)
        assert math.isclose(sum(one.counter_j for one in drawn if one.device == name), device.counter_j, rel_tol=1e-6)


@pytest.mark.parametrize("policy", ["packed_uniform", "wattwiser", "exact"])
def test_a_flow_draws_the_joules_of_its_requests(policy):
    """Loads that GPUs carry: a backlog of wake-ups is not what is compared."""
    calm = PairSpec(*PAIRS[1], policy, 1, ((0.3, 0.5, 0.4), (0.3, 0.4, 0.55)), step_s=60.0)
    scenario = scenario_of(calm)
    found = {}
    for fidelity in ("request", "fluid"):
        one = scenario.model_copy(update={"fidelity": fidelity, "duration_s": 180.0})
        found[fidelity] = simulate(one, Provided(catalog=catalog_of(calm))).summary
    said = {name: (round(run.joules), round(run.slo_attainment, 3)) for name, run in found.items()}
    print(policy, said)
    assert found["fluid"].fidelity == "fluid"
    assert found["fluid"].joules == pytest.approx(found["request"].joules, rel=0.05)


def test_fig_3c_the_shared_gpu_serves_who_asks_for_more_than_one_gpu():
    shares = shares_of_gpus(spec("wattwiser"))
    assert [share > 0 for share in shares["resnet152"]["gpu1"][:2]] == [False, True], "0.3 and 0.7 of two GPUs"
    assert [share > 0 for share in shares["vgg19"]["gpu1"]] == [False, True, False], "0.4, 0.6 and 0.2"


@pytest.mark.long
def test_the_study_prints_what_was_played(tmp_path):
    found = study(replace(QUICK, step_s=8.0), tmp_path, lambda _text: None)
    rows = found["pairs"]["-".join(PAIRS[0])]
    sent = {row["requests"]["mean"] + row["rejected"]["mean"] for row in rows.values()}
    assert max(sent) - min(sent) <= 5e-3 * max(sent), "all meet the same arrivals; some may wait at the end"
    assert all(rows[name]["saving_pct"]["mean"] > 0 for name in PAPERS[1:]), (
        "exact wakes as much as it saves in hours of 8 s"
    )
    assert sum(one["mean"] for one in rows["uniform"]["hours_missed"].values()) == 0
    assert found["fig2"] == {"sharing_aware": [2.0, 1.0], "wattwiser": pytest.approx([5.0, 1.0])}
    assert {path.name for path in tmp_path.glob("fig0*")} == {"fig03.png", "fig03c.csv", "fig04.csv", "fig05.csv"}
    for by in found["fig3"]["shares"].values():
        assert sum(each[0] for each in by.values()) == pytest.approx(1), "all of a family's requests in the first hour"
        assert by["gpu3"] == [0.0] * 24
    savings = wattwiser_tables(found)["savings"]
    assert all(f"| {policy} |" in savings for policy in POLICIES[1:])
    assert min(swim(0)) == pytest.approx(0.2)
    assert max(swim(1)) * GPUS_PER_MODEL == pytest.approx(1.9)
