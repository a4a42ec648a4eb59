"""Savings of the demo under several seeds: at equal accuracy, the live seed first."""

import subprocess
import sys
from pathlib import Path

import pytest

from controller.settings import Slo
from tests.support.demo_reports import comparison_of
from trefoil.cli.demo.spread import simulate_spread
from trefoil.cli.run.scenario import DemoScenario, load_system
from trefoil.comparison.saving import RunOutcome, saving_pct
from trefoil.simulator.scenario.demo import demo_scenario, simulate_demo

DEMO = Path("deploy/config/demo.toml")
SLO = Slo(percentile=95.0, latency_ms=105.0)
SHORT = {"carbon.steps": 2, "carbon.step_s": 4.0, "warmup_s": 2.0, "load.ramp_s": 1.0, "simulated_seeds": 2}


def test_the_first_seed_is_the_live_runs_and_accuracy_has_a_price():
    demo = load_system(DEMO, DemoScenario, SHORT)
    found = simulate_spread(demo, SLO, ("static_mix", "base"), 1)
    (case,) = found.cases
    assert found.seeds == (demo.seed, demo.seed + 1)
    twin = simulate_demo(*demo_scenario(demo, "static_mix", SLO)).summary
    first, second = case.row("static_mix").runs
    assert first.summary["grams_per_request"] == pytest.approx(twin.grams_per_request, rel=1e-8)
    assert first.arrivals != second.arrivals
    assert 0 < case.price_g < 0.1
    assert comparison_of(found.to_json()).to_json() == found.to_json()


@pytest.mark.parametrize("seed", [20261121, 2])
def test_the_demo_ends_above_its_floor(seed):
    """With rollouts by way of the fastest variants these two ended 0.0034 and 0.0013 below it."""
    demo = load_system(DEMO, DemoScenario, {"seed": seed})
    found = simulate_demo(*demo_scenario(demo, "exact", Slo(percentile=95.0, latency_ms=101.0))).summary
    assert not found.floor_missed
    assert found.slo_attainment > 0.95


def test_with_equal_joules_for_all_variants_the_demo_finds_no_saving_against_the_same_levers(tmp_path):
    profile, script = tmp_path / "equal.csv", Path("model_repository/digits/make_profile.py")
    subprocess.run([sys.executable, str(script), "--equal-joules", "--output", str(profile)], check=True)
    demo = load_system(DEMO, DemoScenario, {"family.profile_override": str(profile), "simulated_seeds": 1})
    found = simulate_spread(demo, SLO, ("static_mix", "static_miad", "exact_miad"), 1)
    (case,) = found.cases
    subject, opponent = found.headline(case)
    assert (subject.name, opponent.name) == ("exact_miad", "static_miad")
    assert abs(case.saving(subject, opponent).pct["mean"]) < 2.0
    assert case.saving(subject, case.row("static_mix")).pct["mean"] > 5.0, "which is clocks, and no carbon"


def test_on_cpus_accuracy_has_no_price_and_the_mix_is_planned_all_the_same():
    demo = load_system(DEMO.with_name("demo-infadapter.toml"), DemoScenario, {**SHORT, "simulated_seeds": 1})
    (case,) = simulate_spread(demo, demo.slo, ("infadapter", "ms_plus"), 1).cases
    assert case.price_g is None
    assert case.row("infadapter").runs[0].outcome.slo_attainment > 0


def test_a_simulation_is_the_last_once_nobody_wants_more():
    def go_on(_text: str) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        simulate_spread(load_system(DEMO, DemoScenario, SHORT), SLO, ("base", "exact"), 1, go_on)


def test_grams_saved_by_being_less_accurate_are_no_saving():
    cheap, dear = RunOutcome(0.9e-3, 5.0, 0.96, 1.0), RunOutcome(1.0e-3, 5.0, 0.97, 1.0)
    assert saving_pct(cheap, dear, 0.0) == pytest.approx(10.0)
    assert saving_pct(cheap, dear, 0.01) == pytest.approx(0.0)
    assert saving_pct(dear, cheap, 0.01) == pytest.approx(0.0)
