"""The demo as a scenario: made from the same file, the same arrivals, and told the same."""

from pathlib import Path

import numpy as np
import pytest

from controller.settings import Slo
from trefoil.cli.demo.own_repository import with_own_repository
from trefoil.cli.load.arrivals import schedule
from trefoil.cli.load.process import LoadPlan
from trefoil.cli.run.scenario import DemoScenario, load_system
from trefoil.core import power
from trefoil.core.errors import SettingError
from trefoil.runtime.repository import load_family
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.demo import arrivals_s, demo_scenario, simulate_demo
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.simulation import Simulation

DEMO = Path("deploy/config/demo.toml")
SLO = Slo(percentile=95.0, latency_ms=75.0)
FIXED = {"causes": ["carbon"], "demand_fixed": {"digits": {"rate_per_s": 40.0, "rate_p90_per_s": 45.0}}}


def demo(**more: object) -> DemoScenario:
    return load_system(DEMO, DemoScenario, {"carbon.steps": 3, **{k.replace("__", "."): v for k, v in more.items()}})


def test_arrivals_are_those_that_the_player_sends():
    settings = demo()
    played = LoadPlan(settings.load.points(settings.duration_s), settings.warmup_s, "", "digits", settings.seed)
    sent_s = schedule(played.spec().arrivals, 100, (1,), settings.seed).times_s
    assert np.allclose(arrivals_s(settings, "digits"), sent_s - settings.warmup_s)
    assert arrivals_s(settings, "digits")[0] < 0 < arrivals_s(settings, "digits")[-1] < settings.duration_s


def test_the_same_settings_stand_in_the_scenario():
    settings = demo()
    scenario, _ = demo_scenario(settings, "exact", SLO, controller=FIXED)
    assert scenario.control.tick_s == 0.5
    assert scenario.control.move_horizon_s == settings.move_horizon_s
    assert scenario.control.causes == ("carbon",)
    assert scenario.control.demand_fixed["digits"].rate_p90_per_s == 45.0
    assert scenario.families[0].objective.window_s == settings.duration_s


def test_batches_of_the_schedule_are_batches_of_the_scenario():
    alike, drawn = demo(), demo(load__items_mean=3.0, load__items_sd=2.0, load__items_max=8)
    found = [demo_scenario(one, "exact", SLO)[0].families[0] for one in (alike, drawn)]
    assert [(one.items, one.items_sd) for one in found] == [(1.0, 0.0), (3.0, 2.0)]


def test_a_group_of_families_is_simulated_by_the_router_that_its_policy_names(tmp_path):
    settings = load_system(
        DEMO.with_name("demo-carbondis.toml"), DemoScenario, {"carbon.steps": 3, "carbon.step_s": 10}
    )
    settings = with_own_repository(settings, tmp_path / "models")
    highperf, lowenergy, carbondis = (
        simulate_demo(*demo_scenario(settings, policy, Slo(percentile=95.0, latency_ms=325.0))).summary
        for policy in ("highperf", "lowenergy", "carbondis")
    )
    assert carbondis.answered == pytest.approx(carbondis.arrived, abs=5)
    assert highperf.p95_ms < carbondis.p95_ms < lowenergy.p95_ms
    assert highperf.grams > carbondis.grams > lowenergy.grams
    assert carbondis.slo_attainment > 0.97 > lowenergy.slo_attainment


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> DemoScenario:
    """The demo of a family in two stages, over its own repository."""
    path = DEMO.with_name("demo-muserve-stages.toml")
    settings = load_system(path, DemoScenario)
    return with_own_repository(settings, tmp_path_factory.mktemp("staged") / "models")


def test_a_family_in_stages_is_simulated_and_each_gpu_has_the_clock_that_its_stage_lets_it(staged):
    runs = {}
    for policy in ("alpaserve", "muserve"):
        simulation = Simulation(prepare(*demo_scenario(staged, policy, Slo(percentile=95.0, latency_ms=150.0))))
        clocks = []
        for at_s in range(30, 91):
            simulation.run(float(at_s))
            clocks.append([device.clock_mhz for device in simulation.hardware.devices.values()])
        runs[policy] = result(simulation).summary, np.mean(clocks, axis=0)
        hosted = [part.hosted for node in simulation.core.current.nodes for d in node.devices for part in d.slices]
        assert [[hosted.model for hosted in each] for each in hosted] == [["digits@1of2"], ["digits@2of2"]]
    (fast, top), (slow, fallen) = runs.values()
    assert (fast.arrived, fast.rejected, slow.rejected) == (slow.arrived, 0, 0)
    assert slow.answered == pytest.approx(slow.arrived, abs=5)
    assert [slow.accuracy, fast.accuracy] == pytest.approx([0.993311, 0.993311])
    assert slow.slo_attainment > 0.99
    assert list(top) == [0, 0]  # the highest, not locked
    assert fallen[0] < 0.9 * fallen[1] < 0.9 * 1410
    assert slow.joules_per_request < 0.95 * fast.joules_per_request


def test_stages_have_their_part_of_the_whole_in_the_profile(staged):
    _, rows = load_family(staged.family.repository / "digits")
    whole, *stages = (
        next(r for r in rows if (r.variant, r.slice_type, r.batch, r.stage) == ("digits-l", "7g.40gb", 4, stage))
        for stage in range(3)
    )
    for name in ("latency_ms_p50", "latency_ms_p99", "energy_active_j_per_batch"):
        assert sum(getattr(one, name) for one in stages) == pytest.approx(getattr(whole, name), rel=1e-4)
    assert [one.clock_sensitivity for one in stages] == [0.0, pytest.approx(0.396, abs=0.01)]
    longer = [power.stretch(1410, 600, one.clock_sensitivity) * one.latency_ms_p50 for one in (whole, *stages)]
    assert sum(longer[1:]) == pytest.approx(longer[0], rel=1e-3)  # the law of the whole is that of its stages
    assert {r.clock_sensitivity for r in rows if r.variant == "digits-s"} == {1.0}


def test_a_flow_has_no_stages_and_says_so(staged):
    scenario, given = demo_scenario(staged, "muserve", SLO)
    simulation = Simulation(prepare(scenario.model_copy(update={"fidelity": "fluid"}), given))
    with pytest.raises(SettingError, match="fidelity = 'fluid': plays families whole here, and a plan splits one"):
        simulation.run(simulation.end_s)


def test_a_family_that_is_not_served_is_not_cut():
    with pytest.raises(SettingError, match=r"stages .*name families that are served, each with 2 or more"):
        demo(stages={"yolo": 2})
    with pytest.raises(SettingError, match="each with 2 or more"):
        demo(stages={"digits": 1})


def test_with_the_demand_fixed_only_carbon_decides():
    settings = demo(objective_type="lambda", lambda_weight=0.3)
    scenario, given = demo_scenario(settings, "exact", SLO, controller=FIXED)
    found, again = simulate_demo(scenario, given), simulate_demo(scenario, given)
    assert found.to_json() == again.to_json()
    assert {d["trigger"] for d in found.decisions} <= {"start", "tick", "objective", "carbon"}
    changed = [d["trigger"] for d in found.decisions if d["outcome"] == "new_plan"]
    assert changed[0] == "start"
    assert set(changed[1:]) == {"carbon"}
    assert found.summary.answered == pytest.approx(found.summary.arrived, abs=5)
