"""`trefoil assess`: what a fleet costs and would save, files that other commands take, and refusals in one line."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.metric_pages import JOULES, SERVICE_S, World, long_csv, vllm
from tests.support.prometheus_api import Api, serving
from trefoil.assess.given import page_samples
from trefoil.assess.series import series_of
from trefoil.cli.main import app
from trefoil.cli.run.scenario import System, load_system
from trefoil.runtime.repository import load_family
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.schema import Scenario


def run(*words: str):
    return CliRunner().invoke(app, ["assess", *words])


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    """Export of 20 minutes of two servers on two GPUs without MIG."""
    path = tmp_path_factory.mktemp("export") / "fleet.csv"
    path.write_text(long_csv(World(base_per_s=12.0, period_s=1200.0).series(1200.0, 30.0)))
    return path


@pytest.mark.parametrize(("hours", "first", "covered"), [(72, 101.0, True), (24, 77.0, False)])
def test_a_trace_that_covers_the_time_is_read_by_its_calendar(hours, first, covered, export, tmp_path):
    begins = datetime(2025, 11, 27, tzinfo=UTC)  # a day before the export
    rows = (f"{(begins + timedelta(hours=n)).isoformat()},{77 + n}" for n in range(hours))
    trace = tmp_path / "trace.csv"
    trace.write_text("datetime,carbon_intensity_gCO2_per_kWh\n" + "\n".join(rows) + "\n")
    done = run(
        "--from-csv",
        str(export),
        "--seeds",
        "0",
        "--json",
        "--carbon",
        str(trace),
        "--zone",
        "DE",
        "--out",
        str(tmp_path / "o"),
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["intensity_g_per_kwh"] == [first] * len(told["intensity_g_per_kwh"])
    assert covered != any("does not cover" in line for line in told["assumed"])
    zone = Scenario.load(tmp_path / "o" / "scenario.toml").carbon.zones["DE"]
    assert (zone.trace, zone.offset_h) == (trace, 24.0 if covered else 0.0)
    assert load_system(tmp_path / "o" / "up.toml", System).carbon.trace == trace


@pytest.fixture(scope="module")
def answered(export, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "assessed"
    done = run("--from-csv", str(export), "--out", str(out), "--seeds", "2", "--jobs", "1", "--json", "--carbon", "250")
    assert done.exit_code == 0, done.output
    return out, json.loads(done.stdout)


def test_costs_and_savings_are_told_with_what_is_assumed(answered):
    _, told = answered
    world = World(base_per_s=12.0, period_s=1200.0)
    assert told["joules"] == pytest.approx(sum(world.joules(n, 1200.0) for n in (0, 1)), rel=1e-6)
    assert told["grams"] == pytest.approx(told["joules"] / 3.6e6 * 250.0 * 1.2, rel=1e-6)
    answers = {one["lever"]: one for one in told["savings"]}
    assert set(answers) == {"sleep", "clocks", "mig", "placing", "variants", "together"}
    assert answers["sleep"]["saving_pct"] > 5.0  # one of two devices carries the load
    assert answers["together"]["saving_pct"] > answers["sleep"]["saving_pct"]
    assert answers["sleep"]["low_pct"] <= answers["sleep"]["saving_pct"] <= answers["sleep"]["high_pct"]
    assert "alike" in answers["placing"]["why_none"]
    assert any("accuracy of resnet50: 1 assumed (--accuracy resnet50=0.76)" in line for line in told["assumed"])
    assert any("SLO of resnet50: p95 <= 110 ms, 2 times its p95" in line for line in told["assumed"])
    assert any("by a law" in line for line in told["risks"])


def test_the_files_are_taken_as_they_are(answered):
    out, _ = answered
    assert {"scenario.toml", "up.toml", "profile.csv", "assess.json", "report.html", "families"} == {
        p.name for p in out.iterdir()
    }
    scenario = Scenario.load(out / "scenario.toml")
    assert scenario.families[0].arrivals.points
    summary = simulate(scenario.model_copy(update={"duration_s": 300.0})).summary
    assert summary.answered > 0
    system = load_system(out / "up.toml", System)
    assert (system.fleet.devices, system.family.name) == (("A100-SXM4-40GB",) * 2, "resnet50")
    family, rows = load_family(system.family.repository / "resnet50", system.family.profile_override)
    (found,) = (row for row in rows if (row.device_type, row.slice_type) == ("A100-SXM4-40GB-nomig", "whole"))
    assert found.latency_ms_p50 == pytest.approx(1e3 * SERVICE_S, rel=1e-3)
    assert found.energy_active_j_per_batch == pytest.approx(JOULES, rel=0.02)
    assert system.slo_of("resnet50").latency_ms == family.classes[""][0] == 110.0
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "simulated" in page


def test_the_same_series_give_the_same_scenario(export, answered, tmp_path):
    done = run("--from-csv", str(export), "--out", str(tmp_path), "--seeds", "0", "--carbon", "250")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "scenario.toml").read_bytes() == (answered[0] / "scenario.toml").read_bytes()
    assert "Savings" not in done.stdout


def digits(folder: Path, *words: str):
    """Assessment of two servers of digits-l on boards with MIG."""
    world = World(model="digits", version="4", profile="7g.40gb", base_per_s=12.0, period_s=1200.0)
    (folder / "fleet.csv").write_text(long_csv(world.series(1200.0, 30.0)))
    given = ["--from-csv", str(folder / "fleet.csv"), "--jobs", "1", "--json", "--out", str(folder / "out")]
    done = run(*given, "--slo-latency-ms", "110", *words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_family_of_the_repository_keeps_its_variants_and_its_profile_times_factors(tmp_path):
    digits(tmp_path, "--seeds", "0", "--accuracy", "digits=0.5")
    scenario = Scenario.load(tmp_path / "out" / "scenario.toml")
    family, rows = load_family(scenario.families[0].repository / "digits", scenario.families[0].profile)
    assert len(family.variants) == 4
    key = ("A100-SXM4-40GB", "7g.40gb", "digits-l", 1)
    (found,) = (row for row in rows if (row.device_type, row.slice_type, row.variant, row.batch) == key)
    assert found.latency_ms_p50 == pytest.approx(1e3 * SERVICE_S, rel=1e-3)
    assert scenario.families[0].objective.accuracy.floor == pytest.approx(0.98 * 0.5), "as the served one's is stated"


@pytest.mark.long
def test_every_lever_of_such_a_family_is_played(tmp_path):
    answers = {one["lever"]: one for one in digits(tmp_path, "--seeds", "2")["savings"]}
    assert all(answers[name]["saving_pct"] is not None for name in ("sleep", "variants", "clocks", "mig", "together"))
    assert answers["together"]["saving_pct"] > answers["sleep"]["saving_pct"] > 5.0


def test_models_that_answer_the_same_question_are_variants_by_the_operators_word(tmp_path):
    small, large = World(model="small", servers=1), World(model="large", servers=1)
    samples = []
    for at_s in range(0, 1200, 30):
        for n, world in enumerate((small, large)):
            page = world.triton(0, at_s).replace("GPU-0", f"GPU-{n}")
            samples += page_samples(page, 1.7e9 + at_s, "t", instance=f"h{n}:8002", pod=f"triton-{n}")
        samples += page_samples(small.dcgm(at_s, devices=2), 1.7e9 + at_s, "d")
    (tmp_path / "fleet.csv").write_text(long_csv(series_of(samples)))
    words = ["--from-csv", str(tmp_path / "fleet.csv"), "--seeds", "0", "--out", str(tmp_path / "out")]
    done = run(*words, "--variants", "net=small,large", "--accuracy", "small=0.7", "--accuracy", "large=0.8")
    assert done.exit_code == 0, done.output
    family, _ = load_family(tmp_path / "out" / "families" / "net", tmp_path / "out" / "profile.csv")
    assert {v.name: v.accuracy for v in family.variants} == {"small-3": 0.7, "large-3": 0.8}
    assert Scenario.load(tmp_path / "out" / "scenario.toml").families[0].objective.accuracy.floor == pytest.approx(
        0.75 * 0.98
    )
    done = run(*words, "--variants", "net=small,medium")
    assert done.exit_code == 2
    assert "--variants = 'medium': no such model was asked" in done.stderr


def test_names_of_any_letters_reach_table_page_and_files(tmp_path):
    names = ["a$\\frac$b", "[/red]x", "a/b", "a-b", "<script>", "_hidden", "red\x1b[31m", "../etc"]
    samples = []
    for at_s in range(0, 1200, 60):
        for n, name in enumerate(names):
            page = World(model="NAME").triton(0, at_s)
            samples += [
                (one, {**labels, "model": name} if "model" in labels else {"gpu_uuid": f"GPU-{n}"}, time, value)
                for one, labels, time, value in page_samples(page, 1.7e9 + at_s, "t", pod=f"pod-{n}")
                if "summary" not in one
            ]
    boards = ["--device-type", "A100-SXM4-40GB", "--seeds", "0", "--out", str(tmp_path / "out")]
    (tmp_path / "fleet.csv").write_text(long_csv(series_of(samples)))
    done = run("--from-csv", str(tmp_path / "fleet.csv"), *boards)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    assert all(f"{name.replace(chr(27), '?')}:3" in done.stdout for name in names)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>:3" not in page
    assert "_hidden" in page
    families = [one.name for one in Scenario.load(tmp_path / "out" / "scenario.toml").families]
    assert sorted(families) == ["a-b", "a-b-2", "a-frac-b", "etc", "hidden", "red-31m", "red-x", "script"]
    assert not (tmp_path / "etc").exists()


def with_vllm(folder: Path, seeds: int):
    """Assessment of a vLLM on one of two boards."""
    world, samples = World(servers=1), []
    for at_s in range(0, 1200, 30):
        samples += page_samples(vllm("meta-llama/Llama-3-8B", 0.5 * at_s), 1.7e9 + at_s, "v", pod="triton-0")
        samples += page_samples(world.dcgm(at_s, devices=2), 1.7e9 + at_s, "d")
    (folder / "fleet.csv").write_text(long_csv(series_of(samples)))
    done = run("--from-csv", str(folder / "fleet.csv"), "--seeds", str(seeds), "--jobs", "1", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_vllm_is_assessed_too(tmp_path):
    told = with_vllm(tmp_path, seeds=0)
    assert told["models"]["meta-llama/Llama-3-8B"]["latency_basis"] == "histogram"
    assert told["models"]["meta-llama/Llama-3-8B"]["requests"] == pytest.approx(0.5 * 1170)
    assert told["joules"] > 0


@pytest.mark.long
def test_the_board_beside_a_vllm_may_sleep(tmp_path):
    told = with_vllm(tmp_path, seeds=1)
    assert any(one["lever"] == "sleep" and one["saving_pct"] > 0 for one in told["savings"]), told["savings"]
    assert any("whole batches" in line for line in told["risks"])


def test_a_token_is_sent_and_never_printed(tmp_path):
    token = tmp_path / "token"
    token.write_text("very-secret\n")
    token.chmod(0o600)
    api = Api(World().series(1200.0, 60.0), token="very-secret")
    with serving(api) as url:
        words = ["--prometheus", url, "--since", "2025-11-28T00:00Z", "--until", "2025-11-28T00:20Z", "--seeds", "0"]
        done = run(
            *words, "--token-file", str(token), "--header", "X-Scope-OrgID=hidden", "--out", str(tmp_path / "out")
        )
        assert done.exit_code == 0, done.output
        token.write_text("other-secret\n")
        refused = run(*words, "--token-file", str(token))
    assert refused.exit_code == 2
    assert "answered 401 (bad token)" in refused.stderr
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.is_file())
    for text in (done.output, refused.output, written):
        assert not any(word in text for word in ("secret", "hidden"))
    assert "requests" in done.stdout
    assert "samples" in done.stdout


def test_a_server_that_spans_boards_is_counted_and_not_simulated(tmp_path):
    world, samples = World(servers=1), []
    for at_s in range(0, 1200, 30):
        samples += page_samples(world.triton(0, at_s), 1.7e9 + at_s, "t", instance="h:8002", pod="triton-0")
        page = world.dcgm(at_s, devices=2).replace('Hostname="gpu-a"}', 'Hostname="gpu-a",pod="triton-0"}')
        samples += page_samples(page, 1.7e9 + at_s, "d")
    (tmp_path / "fleet.csv").write_text(long_csv(series_of(samples)))
    done = run("--from-csv", str(tmp_path / "fleet.csv"), "--json", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["models"]["resnet50:3"]["joules"] == pytest.approx(told["joules"])
    assert told["savings"] == []
    assert "each server spans several devices" in told["risks"][0]
    assert (tmp_path / "out" / "report.html").exists()


def test_without_a_time_of_requests_there_are_costs_and_no_savings(tmp_path):
    series = [one for one in World().series(1200.0, 30.0) if "duration" not in one.name]
    (tmp_path / "fleet.csv").write_text(long_csv(series))
    done = run("--from-csv", str(tmp_path / "fleet.csv"), "--json")
    told = json.loads(done.stdout)
    assert told["joules"] > 0
    assert told["savings"] == []
    assert "resnet50:3: no series says how long a request takes. Remedy" in told["risks"][0]


def test_a_board_that_no_table_has_is_simulated_by_what_its_driver_says(tmp_path):
    world = World(board="NVIDIA RTX Example", base_per_s=12.0, period_s=1200.0)
    (tmp_path / "fleet.csv").write_text(long_csv(world.series(1200.0, 30.0)))
    done = run(
        "--from-csv", str(tmp_path / "fleet.csv"), "--seeds", "1", "--jobs", "1", "--json", "--out", str(tmp_path)
    )
    assert done.exit_code == 0, done.output
    assert Scenario.load(tmp_path / "scenario.toml").nodes[0].devices == ("gpu:RTX Example:40GiB:400W",) * 2
    answers = {one["lever"]: one for one in json.loads(done.stdout)["savings"]}
    assert answers["sleep"]["saving_pct"] > 0
    assert answers["mig"]["why_none"] == "no board has MIG"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "give one of --prometheus URL, --scrape URL, --from-csv FILE"),
        (("--prometheus", "http://x", "--scrape", "http://y"), "source: give exactly one source"),
        (("--prometheus", "http://x", "--since", "soon"), "--since = 'soon': not a time"),
        (("--prometheus", "http://x", "--since", "1h", "--until", "2h"), "not before --until"),
        (("--prometheus", "http://127.0.0.1:9", "--user", "me"), "--user = 'me': no password"),
        (("--prometheus", "https://127.0.0.1:9", "--tls-ca", "/nowhere.pem"), "--tls-ca = '/nowhere.pem'"),
        (("--prometheus", "http://127.0.0.1:9", "--header", "X"), "no '=' in it"),
        (("--prometheus", "http://127.0.0.1:9", "--header", "X=é"), "not ASCII"),
        (("--from-csv", "/nowhere.csv"), "--from-csv = '/nowhere.csv': cannot be read"),
        (("--from-csv", "EXPORT", "--slo-latency-ms", "resnet50=-5"), "--slo-latency-ms resnet50 = -5.0: must be > 0"),
        (("--from-csv", "EXPORT", "--accuracy", "resnet51=0.7"), "did you mean resnet50"),
        (("--from-csv", "EXPORT", "--accuracy", "resnet50=76"), "--accuracy resnet50 = 76.0: must be > 0 and <= 1"),
        (("--from-csv", "EXPORT", "--accuracy", "0.7"), "--accuracy = '': no such model"),
        (("--from-csv", "EXPORT", "--slo-latency-ms", "inf"), "--slo-latency-ms = inf: must be > 0 and <= 1e+07"),
        (("--from-csv", "EXPORT", "--variants", "net="), "--variants = '': no such model"),
        (("--from-csv", "EXPORT", "--variants", "a=resnet50", "--variants", "b=resnet50:3"), "occurs twice"),
        (("--from-csv", "EXPORT", "--out", "EXPORT"), "--out = 'EXPORT': cannot be written (Not a directory)"),
        (("--from-csv", "EXPORT", "--accuracy", "resnet50=good"), "is not a number"),
        (("--from-csv", "EXPORT", "--carbon", "/nowhere.csv"), "/nowhere.csv"),
        (("--from-csv", "EXPORT", "--carbon", "-3"), "--carbon = '-3'"),
        (("--from-csv", "EXPORT", "--device-type", "A1000"), "--device-type = 'A1000': no such device type"),
    ],
)  # fmt: skip
def test_each_refusal_is_one_line_with_a_remedy(words, wanted, export, monkeypatch):
    monkeypatch.delenv("TREFOIL_ASSESS_TOKEN", raising=False)
    done = run(*(str(export) if word == "EXPORT" else word for word in words))
    assert done.exit_code == 2, done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("trefoil: ")]
    assert len(errors) == 1
    assert wanted.replace("EXPORT", str(export)) in errors[0]
    assert "Remedy" in errors[0]


@pytest.mark.parametrize("words", [("--step", "inf"), ("--step", "nan"), ("--pue", "inf"), ("--below-best-pct", "nan")])
def test_numbers_without_bounds_are_refused(words):
    done = run("--from-csv", "/nowhere.csv", *words)
    assert (done.exit_code, words[0] in done.stderr) == (2, True)


def test_a_family_named_as_another_model_is_refused(tmp_path):
    series = World().series(1200.0, 60.0)
    others = [replace(one, labels={**one.labels, "model": "other"}) for one in series if "model" in one.labels]
    (tmp_path / "fleet.csv").write_text(long_csv([*series, *others]))
    done = run("--from-csv", str(tmp_path / "fleet.csv"), "--seeds", "0", "--variants", "resnet50=other")
    assert done.exit_code == 2
    assert "--variants = 'resnet50': occurs twice" in done.stderr
