"""The demo as a scenario: made from the same file, the same arrivals, and told the same."""

from pathlib import Path

import numpy as np
import pytest

from trefoil.cli.demo.own_repository import with_own_repository
from trefoil.cli.load.arrivals import schedule
from trefoil.cli.load.process import LoadPlan
from trefoil.cli.run.scenario import Scenario, Slo, load_system
from trefoil.simulator.scenario.demo import arrivals_s, demo_scenario, simulate_demo

DEMO = Path("deploy/config/demo.toml")
SLO = Slo(percentile=95.0, latency_ms=75.0)
FIXED = {"causes": ["carbon"], "demand_fixed": {"digits": {"rate_per_s": 40.0, "rate_p90_per_s": 45.0}}}


def demo(**more: object) -> Scenario:
    return load_system(DEMO, Scenario, {"carbon.steps": 3, **{k.replace("__", "."): v for k, v in more.items()}})


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
    assert scenario.policy.triggers == ("carbon",)
    assert scenario.control.demand_fixed["digits"].rate_p90_per_s == 45.0
    assert scenario.families[0].objective.window_s == settings.duration_s


def test_batches_of_the_schedule_are_batches_of_the_scenario():
    alike, drawn = demo(), demo(load__items_mean=3.0, load__items_sd=2.0, load__items_max=8)
    found = [demo_scenario(one, "exact", SLO)[0].families[0] for one in (alike, drawn)]
    assert [(one.items, one.items_sd) for one in found] == [(1.0, 0.0), (3.0, 2.0)]


def test_a_group_of_families_is_simulated_by_the_router_that_its_policy_names(tmp_path):
    settings = load_system(DEMO.with_name("demo-carbondis.toml"), Scenario, {"carbon.steps": 3, "carbon.step_s": 10})
    settings = with_own_repository(settings, tmp_path / "models")
    highperf, lowenergy, carbondis = (
        simulate_demo(*demo_scenario(settings, policy, Slo(percentile=95.0, latency_ms=325.0))).summary
        for policy in ("highperf", "lowenergy", "carbondis")
    )
    assert carbondis.answered == pytest.approx(carbondis.arrived, abs=5)
    assert highperf.p95_ms < carbondis.p95_ms < lowenergy.p95_ms
    assert highperf.grams > carbondis.grams > lowenergy.grams
    assert carbondis.slo_attainment > 0.97 > lowenergy.slo_attainment


def test_with_the_demand_fixed_only_carbon_decides():
    settings = demo(objective_mode="lambda", lambda_weight=0.3)
    scenario, given = demo_scenario(settings, "exact", SLO, controller=FIXED)
    found, again = simulate_demo(scenario, given), simulate_demo(scenario, given)
    assert found.to_json() == again.to_json()
    assert {d["trigger"] for d in found.decisions} <= {"start", "tick", "objective", "carbon"}
    changed = [d["trigger"] for d in found.decisions if d["outcome"] == "new_plan"]
    assert changed[0] == "start"
    assert set(changed[1:]) == {"carbon"}
    assert found.summary.answered == pytest.approx(found.summary.arrived, abs=5)
