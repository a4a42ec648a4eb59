"""The live brains in simulated time: determinism, conservation, both fidelities, zones, families."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from controller.loop.core.decision import run_planner
from controller.planners.policy_parts import planner_of
from controller.settings import ControlSettings
from trefoil.core.brains import PlanView
from trefoil.core.policies import policy
from trefoil.runtime import codec
from trefoil.simulator import Provided, Scenario, simulate
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import (
    Arrivals,
    Carbon,
    FamilyObjective,
    Node,
    Noise,
    Served,
    Zone,
)
from trefoil.simulator.simulation import Simulation

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "model_repository"
A100 = "A100-SXM4-40GB"


def family(rate: float = 40.0, **wanted: object) -> Served:
    return Served(
        name="digits",
        repository=REPOSITORY,
        arrivals=Arrivals(rate_per_s=rate),
        objective=FamilyObjective(**{"accuracy": {"below_best_pct": 2.0, "hard_below_best_pct": 10.0}, **wanted}),
    )


def scenario(**changes: object) -> Scenario:
    values: dict[str, object] = {
        "duration_s": 240.0,
        "nodes": (Node(devices=(A100, A100)),),
        "families": (family(),),
        "carbon": Carbon(speedup=240.0),
        "noise": Noise(latency=0.05, energy=0.05, device_power=0.03),
    }
    return Scenario(**{**values, **changes})


@pytest.fixture(scope="module")
def exact():
    return simulate(scenario(), keep_records=True)


def test_same_scenario_and_seed_same_bytes(exact):
    again = simulate(scenario(), keep_records=True)
    assert again.to_json() == exact.to_json()
    assert simulate(scenario(seed=1)).to_json() != exact.to_json()


def test_energy_is_conserved_and_grams_are_counter_times_intensity(exact):
    shell = Simulation(prepare(scenario(carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=200.0)}))))
    shell.run(shell.end_s)
    for machine in shell.hardware.devices.values():
        parts = machine.active_j + machine.idle_j + machine.unallocated_j
        assert parts == pytest.approx(machine.counter_j, rel=1e-9)
        assert min(machine.active_j, machine.idle_j, machine.unallocated_j) >= 0
    found = result(shell).summary
    assert found.grams == pytest.approx(found.joules / 3.6e6 * 200.0 * 1.2)
    assert sum(f.grams_per_request * f.answered for f in found.families.values()) == pytest.approx(found.grams)


def test_nothing_is_lost(exact):
    s = exact.summary
    assert s.rejected == 0
    assert abs(s.arrived - s.answered) < 40  # what is in flight at both ends
    assert s.answered == pytest.approx(240 * 40, rel=0.05)
    assert s.slo_attainment > 0.9
    assert sum(s.families["digits"].mix.values()) == pytest.approx(1.0)


def test_every_decision_replays_from_its_record(exact):
    assert exact.records
    planner = planner_of("", policy("exact"))
    for record in exact.records:
        view = codec.from_json(PlanView, record.view_json)
        decision = run_planner(view, planner, record.seed)
        assert (decision.plan.content_digest if decision.plan else "") == record.versions["plan"]


def test_exact_saves_against_base_under_the_same_arrivals(exact):
    base = simulate(scenario(policy="base"))
    assert base.summary.arrived == exact.summary.arrived
    assert base.summary.truth_hash == exact.summary.truth_hash
    assert exact.summary.grams_per_request < 0.85 * base.summary.grams_per_request
    assert base.summary.accuracy == pytest.approx(0.993311)


def test_base_draws_what_the_power_law_says():
    quiet = scenario(policy="base", noise=Noise(), control=ControlSettings(pue=1.0))
    s = simulate(quiet).summary
    shell = Simulation(prepare(quiet))
    rows = shell.inputs.truth.catalog.rows
    row = next(r for r in rows if (r.slice_type, r.variant, r.batch) == ("7g.40gb", "digits-l", 1))
    assert s.joules_per_request == pytest.approx(row.energy_active_j_per_batch + 2 * 55.0 / 40.0, rel=0.04)


def test_rollout_takes_time_and_capacity():
    shell = Simulation(prepare(scenario(warmup_s=0.0)))
    shell.run(1.0)
    assert shell.rolling
    assert not shell.hardware.services("digits")["digits"]  # a Triton starts, a model loads
    shell.run(10.0)
    assert not shell.rolling
    assert shell.hardware.services("digits")["digits"]


def test_fluid_agrees_with_request_by_request():
    """BASE far from saturation: same energy, same tail."""
    still = scenario(policy="base", noise=Noise(), duration_s=1200.0)
    one = simulate(still).summary
    flow = simulate(still.model_copy(update={"fidelity": "fluid", "step_s": 60.0})).summary
    assert flow.joules_per_request == pytest.approx(one.joules_per_request, rel=0.03)
    assert flow.p50_ms == pytest.approx(one.p50_ms, rel=0.05)
    assert flow.p95_ms == pytest.approx(one.p95_ms, rel=0.12)
    assert flow.accuracy == pytest.approx(one.accuracy, abs=1e-6)


def test_fluid_overload_queues_and_refuses():
    s = simulate(scenario(families=(family(200.0),), policy="base", fidelity="fluid", step_s=60.0))
    assert s.summary.rejected > 1000
    assert s.summary.slo_attainment < 0.1


def test_zones_are_billed_by_their_own_intensity():
    zones = {"clean": Zone(constant_g_per_kwh=20.0), "dirty": Zone(constant_g_per_kwh=600.0)}
    nodes = (Node(name="a", zone="clean", devices=(A100,)), Node(name="b", zone="dirty", devices=(A100,)))
    s = simulate(scenario(nodes=nodes, carbon=Carbon(zones=zones), policy="base")).summary
    for zone, intensity in (("clean", 20.0), ("dirty", 600.0)):
        assert s.zones[zone]["grams"] == pytest.approx(s.zones[zone]["joules"] / 3.6e6 * intensity * 1.2)


def test_planner_sees_the_readings_of_all_zones():
    zones = {"clean": Zone(constant_g_per_kwh=20.0), "dirty": Zone(constant_g_per_kwh=600.0)}
    nodes = (Node(name="a", zone="clean", devices=(A100,)), Node(name="b", zone="dirty", devices=(A100,)))
    view = Simulation(prepare(scenario(nodes=nodes, carbon=Carbon(zones=zones)))).view()
    assert view.carbon.series.zone == "clean"
    assert [(z.series.zone, z.intensity_g_per_kwh) for z in view.zones] == [("dirty", 600.0)]


@pytest.mark.long
def test_two_families_share_a_fleet_and_its_energy():
    known = prepare(scenario()).truth.catalog
    other = dataclasses.replace(known.families[0], name="other")
    rows = (*known.rows, *(dataclasses.replace(r, family="other") for r in known.rows))
    both = dataclasses.replace(known, families=(known.families[0], other), rows=rows)
    families = (family(30.0, type="budget"), family(10.0, type="budget").model_copy(update={"name": "other"}))
    short = scenario(families=families, noise=Noise(), duration_s=120.0)
    found = simulate(short, Provided(catalog=both)).summary
    assert set(found.families) == {"digits", "other"}
    assert sum(f.joules_per_request * f.answered for f in found.families.values()) == pytest.approx(found.joules)
    assert all(f.slo_attainment > 0.85 for f in found.families.values())


def test_given_arrivals_and_intensities_are_played():
    times = -60.0 + np.arange(6000) / 20
    given = Provided(arrivals={"digits": times}, carbon={"demo": (60.0, [100.0, 300.0])})
    found = simulate(scenario(policy="base"), given)
    assert found.summary.arrived == 4800
    assert set(found.series["intensity_g_per_kwh"]) == {100.0, 300.0}


def test_result_is_plain_json(exact):
    plain = json.loads(exact.to_json())
    assert plain["summary"]["basis"] == "simulated"
    assert len(plain["series"]["power_w"]) == len(exact.series["at_s"]) > 100


def test_plans_keep_the_cap_of_the_scenario_and_take_fewer_watts_for_it():
    def run(max_watts: float):
        wanted = family(type="lambda", lambda_weight=0.1, accuracy={})
        control = ControlSettings(max_watts=max_watts)
        one = scenario(families=(wanted,), fidelity="fluid", step_s=60.0, control=control, noise=Noise())
        return simulate(one, keep_records=True)

    free_w = run(0.0).summary.power_w
    capped = run(0.9 * free_w)
    assert capped.summary.power_w <= 0.9 * free_w
    assert capped.summary.accuracy > 0.9
    assert capped.records
    assert all(f"of the {0.9 * free_w:g} W that the fleet may take" in record.why for record in capped.records)
