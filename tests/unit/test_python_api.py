"""The Python API: plans and simulations in a line, and our errors only."""

import sys
from pathlib import Path

import pytest

import trefoil
from tests.support.planning import digits
from trefoil.core.errors import Infeasible, InvalidInput, NotFound, ProfileMissing, SettingError, StartError
from trefoil.simulator import Scenario

ROOT = Path(__file__).resolve().parents[2]
TINY = {"duration_s": 40, "warmup_s": 5}


def test_a_plan_says_slices_shares_and_grams():
    found = trefoil.plan({"A100-40GB": 4}, "digits", 40.0, 75.0, 250.0)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert sum(one.share for one in found.slices) == pytest.approx(1.0)
    assert {one.device_type for one in found.slices} == {"A100-SXM4-40GB"}
    assert {one.device for one in found.slices}.isdisjoint(found.asleep)
    assert found.latency_ms_p95 <= found.slo_ms == 75.0
    assert found.missed == ()
    assert found.grams_per_h == pytest.approx(found.power_w * 1.2 * 250.0 / 1000.0)
    assert found.basis == "synthetic"
    dirtier = trefoil.plan("4xA100-40GB", "digits", 40.0, 75.0, 500.0)
    assert dirtier.grams_per_request == pytest.approx(2 * found.grams_per_request)
    base = trefoil.plan("4xA100-40GB", "digits", 40.0, 75.0, 250.0, policy="base")
    assert base.grams_per_h > found.grams_per_h


def test_a_family_may_be_ones_own():
    catalog = digits()
    found = trefoil.plan("2xA100-40GB, 1xT4", catalog.families[0], 20.0, 0.0, 100.0, profile=catalog.rows)
    assert found.slo_ms == 75.0
    assert set(found.shares) <= {"xs", "s", "m", "l"}
    assert trefoil.plan("A100-40GB", ROOT / "model_repository" / "digits", 5.0, 75.0, 100.0).family == "digits"


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (
            ("10xA100-80GB", "digits", 80.0, 75.0, 250.0),
            ProfileMissing,
            "profiled on no GPU of the fleet, only on: A100-SX",
        ),
        (("2xA100", "digits", 80.0, 75.0, 250.0), NotFound, r"fleet = 'A100': may be several .*A100-SXM4-80GB"),
        (("0xT4", "digits", 80.0, 75.0, 250.0), SettingError, "fleet = '0xT4': no GPUs"),
        (("2xZ9", "digits", 80.0, 75.0, 250.0), NotFound, "unknown device type 'Z9'.*Tesla T4"),
        (("2xT4", "digit", 80.0, 75.0, 250.0), NotFound, "family = 'digit': no such family.*digits"),
        (("2xT4", "digits", 0.0, 75.0, 250.0), SettingError, "rate_per_s = 0.0"),
        (("2xT4", "digits", 10.0, 75.0, float("nan")), SettingError, "intensity = nan"),
        (("2xA100-40GB", "digits", 10.0, 2.0, 250.0), InvalidInput, "slo.latency_ms = 2.0: no variant .*at least"),
        (("2xA100-40GB", "digits", 1e4, 75.0, 250.0), Infeasible, "is the most that 2 devices serve.*more GPUs"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(arguments, error, named):
    with pytest.raises(error, match=named):
        trefoil.plan(*arguments)


def test_a_scenario_by_name_by_file_or_made_in_python_gives_the_same_bytes():
    named = trefoil.simulate("digits", policy="base", seed=3, overrides=TINY)
    assert (named.summary.policy, named.summary.seed) == ("base", 3)
    made = Scenario.load(ROOT / "benchmarks" / "scenarios" / "digits.toml")
    assert trefoil.simulate(made, policy="base", seed=3, overrides=TINY).to_json() == named.to_json()
    with pytest.raises(SettingError, match=r"did you mean arrivals\?"):
        trefoil.simulate(made, overrides={"families.0.arrival": 1})
    with pytest.raises(NotFound, match=r"no such scenario.*digits"):
        trefoil.simulate("digit")


def test_results_and_comparisons_are_drawn_and_without_pandas_say_what_is_missing(monkeypatch):
    found = trefoil.simulate("digits", policy="base", overrides=TINY)
    assert len(found.plot().axes) == 5
    compared = trefoil.compare("digits", ["base", "co2opt"], overrides=TINY, jobs=1)
    assert len(compared.plot().axes) == 3
    assert [row["policy"] for row in compared.records()] == ["base", "co2opt"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    for one in (found, compared):
        with pytest.raises(StartError, match=r"pandas is not installed\. Remedy: pip install pandas"):
            one.frame()


def test_the_simulator_package_is_still_there():
    import trefoil.simulator

    assert trefoil.simulator.simulate is not trefoil.simulate
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = trefoil.plans


def test_paths_are_meant_beside_the_file_first(tmp_path, monkeypatch):
    (tmp_path / "requests.csv").write_text("minute,requests\n0,600\n1,600\n")
    text = 'duration_s = 20\n[[families]]\nname = "digits"\narrivals = {trace = "requests.csv"}\n'
    (tmp_path / "own.toml").write_text('policy = "base"\n' + text)
    monkeypatch.chdir(tmp_path.parent)
    found = Scenario.load(tmp_path / "own.toml")
    assert found.families[0].arrivals.trace == tmp_path / "requests.csv"
    assert trefoil.simulate(found).summary.arrived == pytest.approx(200, rel=0.5), "its family is the one that ships"
