"""Scenario files: what ships loads; what is wrong is refused in one line that names field, value and remedy."""

from pathlib import Path

import pytest

from trefoil.cli.demo.schedule import left_s, run_s, simulated_s, total_s
from trefoil.cli.run.scenario import (
    CarbonTrace,
    DemoScenario,
    OfferedLoad,
    Ports,
    System,
    load_system,
    overrides_against_base,
)
from trefoil.comparison.comparison import subject_of
from trefoil.core.errors import NotFound, SettingError
from trefoil.core.objective import NO_TOKEN_SLO, TokenSlo

SHIPPED = Path(__file__).parents[3] / "deploy" / "config"


def demo(tmp_path: Path, text: str = "", **overrides: object) -> DemoScenario:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return load_system(path, DemoScenario, overrides)


def test_the_shipped_files_load() -> None:
    assert load_system(SHIPPED / "up.toml", System).policy == "exact"
    shipped = load_system(SHIPPED / "demo.toml", DemoScenario)
    assert shipped.policies == ("base", "static_mix", "static_miad", "exact_miad")
    assert shipped.duration_s == pytest.approx(108.0)
    assert shipped.carbon.speedup == pytest.approx(24 * 3600 / 108)
    assert (shipped.availability.replicas_min, shipped.availability.spread_min) == (1, 1)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("demo*.toml")), ids=lambda path: path.stem)
def test_every_shipped_demo_loads_and_is_about_the_policy_that_it_is_named_after(path: Path) -> None:
    shipped = load_system(path, DemoScenario)
    assert shipped.name == path.stem
    named = path.stem.removeprefix("demo").strip("-").partition("-")[0]  # what follows says how it is played
    assert subject_of(shipped.policies) == (named or "exact_miad")
    assert all(load.items_max <= 8 for load in shipped.loads.values()), "max_batch_size of digits"


def test_a_real_deployment_is_safer_than_the_demo() -> None:
    kept = load_system(SHIPPED / "up.toml", System).availability
    assert kept.replicas_min >= 2
    assert kept.spread_min >= 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("polices = ['base']", "polices"),
        ("[carbon]\nstep_s = -1", "carbon.step_s"),
        ("[carbon]\nsteps = 13", "trace"),
        ("[fleet]\ndevices = ['A100']", "A100"),
        ("[fleet]\ndevices = ['A100-SXM4-40GB-nomig']", "A100-SXM4-40GB-nomig"),  # no driver reports it
        ("policies = ['exact']", "base"),
        ("policies = ['base', 'exact', 'exact']", "twice"),
        ("policies = ['base', 'best']", "best"),
        ("[load]\npeak_from = 0.8\npeak_until = 0.2", "peak_from"),
        ("[load]\nitems_mean = 3", "items_mean 3.0 is above items_max 1; raise items_max"),
        ("[accuracy]\nbelow_best_pct = 5\nhard_below_best_pct = 2", "hard_below_best_pct"),
        ("[slo_rule]\npercentile = 100", "slo_rule.percentile"),
        ("[ports]\nredis = 8001", "8001"),
        ("port_offset = 60000", "60000"),
        ("cluster = 'Demo!'", "cluster"),
        ("[carbon", "TOML"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingError) as refused:
        demo(tmp_path, text)
    assert named in str(refused.value)
    assert "Remedy" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_further_family_has_the_first_ones_latency_but_objectives_of_tokens_of_its_own(tmp_path: Path) -> None:
    text = '[slo]\nlatency_ms = 80\n[[more_families]]\nname = "pydoc"\nslo = {latency_ms = 900, ttft_ms = 300}\n'
    several = demo(tmp_path, text + '[[more_families]]\nname = "letters"\n')
    assert several.slo_of("digits").tokens == several.slo_of("letters").tokens == NO_TOKEN_SLO
    assert several.slo_of("pydoc").tokens == TokenSlo(300.0, 0.95, 0.0, 0.0)
    assert [several.slo_of(name).latency_ms for name in ("digits", "pydoc", "letters")] == [80.0, 900.0, 80.0]
    judged = several.judged({"digits": 20.0, "pydoc": 300.0, "letters": 30.0})
    assert judged.slo_of("pydoc").tokens == TokenSlo(300.0, 0.95, 0.0, 0.0)


def test_any_two_policies_may_be_compared(tmp_path: Path) -> None:
    assert demo(tmp_path, "policies = ['base', 'static_mix']").policies == ("base", "static_mix")


def test_a_policy_against_base_gets_longer_steps_when_it_measures_candidates(tmp_path: Path) -> None:
    overrides = overrides_against_base("clover", "artifact")
    scenario = demo(tmp_path, **overrides)
    assert scenario.policies == ("base", "clover")
    assert scenario.preset == "artifact"
    assert scenario.carbon.steps <= 6
    assert 2 * scenario.duration_s + 120 < 15 * 60
    assert demo(tmp_path, **overrides_against_base("exact")).duration_s == demo(tmp_path).duration_s
    with pytest.raises(SettingError, match="artifact"):
        overrides_against_base("exact", "artifact")
    with pytest.raises(NotFound, match="clover"):
        overrides_against_base("best")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"nowhere\.toml"):
        load_system(tmp_path / "nowhere.toml", System)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    scenario = demo(tmp_path, "seed = 1\n[carbon]\nsteps = 6", **{"carbon.steps": "3"})
    assert (scenario.seed, scenario.carbon.steps) == (1, 3)


def test_the_load_doubles_once_and_returns() -> None:
    load = OfferedLoad()
    rates = [rate for _, rate in load.points(84.0)]
    times = [at_s for at_s, _ in load.points(84.0)]
    assert rates == [26.0, 26.0, 52.0, 52.0, 26.0, 26.0]
    assert times == sorted(set(times))
    assert times[-1] == 84.0
    assert 84 * 0.25 <= times[3] - times[2] + 6 <= 84 * 0.4, "about a third of the run is at the peak"


@pytest.mark.parametrize("duration_s", [3.0, 5.0, 15.0, 84.0, 1000.0])
def test_a_compressed_load_keeps_its_shape(duration_s: float) -> None:
    times = [at_s for at_s, _ in OfferedLoad().points(duration_s)]
    assert times == sorted(set(times)), "still rising, with a plateau"


def test_quick_plays_two_policies_through_the_same_day_by_a_given_slo() -> None:
    whole = load_system(SHIPPED / "demo.toml", DemoScenario)
    quick = whole.shortened()
    assert quick.policies == ("static_miad", "exact_miad")
    assert (quick.duration_s, quick.carbon.steps) == (60.0, whole.carbon.steps)
    assert quick.load.ramp_s == pytest.approx(10.0)
    assert (quick.slo_rule.factor, quick.slo.latency_ms) == (0.0, 110.0)
    assert total_s(quick) < 200 < total_s(whole)


def test_quick_measures_an_slo_that_is_not_given_and_leaves_candidates_their_time(tmp_path: Path) -> None:
    assert demo(tmp_path).shortened().slo_rule.factor > 0
    clover = demo(tmp_path, **overrides_against_base("clover"))
    quick = clover.shortened()
    assert (quick.carbon.steps, quick.carbon.step_s) == (3, clover.carbon.step_s)
    assert quick.policies == clover.policies


def test_the_time_that_is_left_falls_to_that_of_the_simulations() -> None:
    quick = load_system(SHIPPED / "demo.toml", DemoScenario).shortened()
    first, second = left_s(quick, 1, 0.0), left_s(quick, 2, 0.0)
    assert first - second == pytest.approx(run_s(quick))
    assert left_s(quick, 2, 60.0) == left_s(quick, 2, 61.0) == pytest.approx(simulated_s(quick))


def test_ports_move_together() -> None:
    ports = Ports().shifted(1000)
    assert (ports.inference, ports.redis, ports.triton_base) == (9001, 9179, 9200)
    every = ports.all(devices=2)
    assert len(every) == len(set(every.values())) == 11 + 32
    assert "rest" not in every, "0 stays 0: no REST"
    assert Ports(rest=8000).shifted(1000).all(devices=2)["rest"] == 9000


def test_the_speedup_scales_a_step_of_the_trace_to_a_step_of_the_wall() -> None:
    assert CarbonTrace(step_h=4, step_s=7).speedup == pytest.approx(14400 / 7)


def test_an_unknown_policy_and_fields_that_do_not_fit_together_are_one_short_line():
    with pytest.raises(
        SettingError,
        match=r"^policy = 'clever': unknown policy. Remedy: did you mean clover\? Else use one of: .*module:ROW$",
    ):
        load_system(SHIPPED / "up.toml", System, {"policy": "clever"})
    with pytest.raises(SettingError, match=r"^port_offset 64000 moves a port .* \(in [^{]*up.toml, flag port_offset\)"):
        load_system(SHIPPED / "up.toml", System, {"port_offset": 64000})
