"""What a scenario may say, and how what it may not say is refused: field, value, remedy."""

from pathlib import Path

import pytest

from tests.support.planning import digits
from trefoil.core.catalog import Catalog
from trefoil.core.errors import InvalidInput, ProfileMissing, SettingError, TraceError
from trefoil.simulator import Scenario, simulate
from trefoil.simulator.scenario.inputs import arrivals_of, prepare
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, Node, Noise, Served, Zone
from trefoil.simulator.scenario.truth import pair

ROOT = Path(__file__).resolve().parents[3]


def scenario(**changes: object) -> Scenario:
    values: dict[str, object] = {
        "duration_s": 60.0,
        "nodes": (Node(devices=("A100-SXM4-40GB",) * 2),),
        "families": (served(),),
    }
    return Scenario(**{**values, **changes})


def served(**changes: object) -> Served:
    values: dict[str, object] = {
        "name": "digits",
        "repository": ROOT / "model_repository",
        "arrivals": Arrivals(rate_per_s=20.0),
    }
    return Served(**{**values, **changes})


def test_every_scenario_that_ships_can_be_read():
    files = sorted((ROOT / "benchmarks" / "scenarios").glob("*.toml"))
    names = {Scenario.load(path).name for path in files}
    assert {"digits", "clover-fleet", "year-fluid"} <= names
    assert len(names) == len(files)


def test_unknown_key_names_those_that_are_known(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('duration_s = 60\nspeed = 1\n[[families]]\nname = "digits"\narrivals = {rate_per_s = 1.0}\n')
    with pytest.raises(SettingError, match=r"speed: unknown setting .*duration_s"):
        Scenario.load(path)


def test_overrides_are_dotted():
    found = Scenario.load(ROOT / "benchmarks/scenarios/digits.toml", {"policy": "base", "noise.latency": "0"})
    assert found.policy == "base"
    assert found.noise.latency == 0.0


def test_unknown_zone_names_node_zone_and_known_zones():
    with pytest.raises(SettingError, match=r"node node lies in zone 'mars', which has no carbon; known zones: demo"):
        scenario(nodes=(Node(zone="mars"),))


def test_empty_arrival_trace_is_named(tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("hour,requests\n")
    with pytest.raises(TraceError, match=r"empty\.csv.*Remedy"):
        prepare(scenario(families=(served(arrivals=Arrivals(trace=empty)),)))


def test_points_are_scaled_to_a_mean_rate_as_a_trace_is():
    points = ((0.0, 10.0), (30.0, 10.0), (40.0, 30.0))
    for given, mean in ((0.0, None), (50.0, 50.0)):
        one = scenario(duration_s=60.0, families=(served(arrivals=Arrivals(points=points, rate_per_s=given)),))
        source = arrivals_of(one)["digits"]
        assert mean is None or source.mean_per_s(0.0, 60.0) == pytest.approx(mean)
        assert source.mean_per_s(50.0, 60.0) == pytest.approx(3 * source.mean_per_s(0.0, 10.0))


def test_empty_carbon_trace_is_named(tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(TraceError, match=r"empty\.csv is empty"):
        prepare(scenario(carbon=Carbon(zones={"demo": Zone(trace=empty)})))


def test_profile_without_a_slice_names_variant_slice_and_device(tmp_path):
    whole = (ROOT / "model_repository/digits/profile.csv").read_text().splitlines(keepends=True)
    part = tmp_path / "profile.csv"
    part.write_text("".join(row for row in whole if "A100-SXM4-40GB,2g.10gb,digits-m," not in row))
    with pytest.raises(ProfileMissing, match=r"digits-m on 2g.10gb of A100-SXM4-40GB") as caught:
        prepare(scenario(families=(served(profile=part),)))
    assert "families.digits.profile" in str(caught.value)
    assert "allow_missing" in str(caught.value)
    assert prepare(scenario(families=(served(profile=part, allow_missing=True),))).truth.catalog.rows


def test_family_without_any_profile_on_the_fleet_is_refused():
    with pytest.raises(ProfileMissing, match="H100-SXM5-80GB"):
        prepare(scenario(nodes=(Node(devices=("H100-SXM5-80GB",)),)))


def test_slo_that_no_variant_meets_says_what_the_fastest_takes():
    with pytest.raises(InvalidInput, match=r"slo\.latency_ms = 2\.0: no variant of digits is that fast .*at least"):
        prepare(scenario(families=(served(objective=FamilyObjective(slo={"latency_ms": 2.0})),)))


def test_floor_that_no_variant_reaches_names_the_best():
    with pytest.raises(InvalidInput, match=r"accuracy\.floor = 0\.999.*digits-l"):
        prepare(scenario(families=(served(objective=FamilyObjective(accuracy={"floor": 0.999})),)))


def test_unknown_policy_and_constant_are_refused():
    with pytest.raises(
        SettingError,
        match=r"^policy = 'clever': unknown policy\. Remedy: did you mean clover\? Else use one of: .* exact,",
    ):
        scenario(policy="clever")
    with pytest.raises(InvalidInput, match=r"params\.speed"):
        prepare(scenario(policy="exact", params={"speed": 1.0}))


def test_truth_and_estimate_are_two_objects_and_differ_by_the_noise():
    quiet = prepare(scenario())
    assert quiet.truth.catalog is not quiet.estimate.catalog
    assert quiet.truth.hash == quiet.estimate.hash  # nothing was asked for
    noisy = prepare(scenario(noise={"latency": 0.1}))
    assert noisy.truth.hash != noisy.estimate.hash == quiet.estimate.hash
    assert prepare(scenario(noise={"latency": 0.1})).truth.hash == noisy.truth.hash
    assert prepare(scenario(noise={"latency": 0.1}, seed=5)).truth.hash != noisy.truth.hash
    assert prepare(scenario(noise={"latency": 0.1, "seed": 20261121}, seed=5)).truth.hash == noisy.truth.hash


def test_blind_planner_is_told_no_profile():
    blind = prepare(scenario(policy="clover", blind=True))
    assert not blind.estimate.catalog.rows
    assert blind.truth.catalog.rows
    with pytest.raises(SettingError, match=r"blind = True: oracle cannot plan without profiles.*clover"):
        prepare(scenario(policy="oracle", blind=True))


def test_a_planner_knows_the_truth_only_where_the_run_says_so():
    known, noise, names = digits(), Noise(latency=0.05, energy=0.05, device_power=0.03), ["n/gpu0"]
    truth, estimate = pair(known, names, noise, 1)
    assert estimate.catalog.rows == known.rows
    with pytest.raises(AssertionError, match="gets the truth"):
        pair(truth.catalog, names, noise, 1, known)  # what differs is the power of devices alone
    seen = Catalog(known.families, known.rows[:2])
    told, estimate = pair(seen, names, noise, 1, known, knows_truth=True)
    assert told.catalog.rows == truth.catalog.rows
    assert estimate.catalog.rows == truth.catalog.rows[:2]


def test_who_was_asked_nothing_has_no_attainment_no_accuracy_and_missed_nothing():
    found = simulate(scenario(policy="base", families=(served(arrivals=Arrivals(rate_per_s=1e-9)),)))
    one = found.summary.families["digits"]
    assert (one.arrived, one.slo_attainment, one.accuracy) == (0, None, None)
    assert not one.slo_missed
    assert not one.floor_missed
    assert found.rows()[0][-2:] == ("-", "-")
