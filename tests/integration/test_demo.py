"""The main job, end to end with real Tritons: it reports what it promises, and leaves nothing however it ends."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from controller.settings import Slo
from tests.support import leftovers
from tests.support.demo_reports import read_report, read_series
from tests.support.ports import free_offset
from trefoil.cli.demo.own_repository import with_own_repository
from trefoil.cli.demo.report import report_lines
from trefoil.cli.demo.results import Report
from trefoil.cli.load.process import merged, read_load_result, result_path, without_warmup
from trefoil.cli.run.scenario import DemoScenario, OwnLatency, load_system
from trefoil.simulator.books.intervals import Interval
from trefoil.simulator.engines.lines import FamilyLines
from trefoil.simulator.engines.request_engine import FamilyWindow, RequestEngine
from trefoil.simulator.scenario.demo import demo_scenario, simulate_demo

pytestmark = [pytest.mark.integration, pytest.mark.slow]
# The demo's own files and code, only shorter: two carbon steps of five seconds.
SHORT = {
    "carbon.steps": 2, "carbon.step_s": 5, "warmup_s": 2, "slo_rule.measure_s": 2, "load.ramp_s": 2,
    "simulated_seeds": 1,
}  # fmt: skip
INTERRUPT_SEEDS = (1, 2, 3)
A100 = "A100-SXM4-40GB"
USED = {"highperf": "01", "lowenergy": "23"}  # GPUs of the fleet; the other policies use both T4s and one A100


def start(out: Path, offset: int, **more: Any) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "trefoil.cli.main", "demo", "--out", str(out), "--port-offset", str(offset)]
    for key, value in {**SHORT, **more}.items():
        argv += ["--set", f"{key}={value}"]
    # A separate session, as a shell gives to a job: signals of the test runner are not meant for it.
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def ended(job: "subprocess.Popen[str]", timeout_s: float) -> str:
    try:
        said, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    return said


@pytest.mark.timeout(420)
def test_the_demo_reports_what_it_promises_and_leaves_nothing(tmp_path: Path) -> None:
    offset = free_offset()
    out = tmp_path / "out"
    job = start(out, offset)
    said = ended(job, 400)
    assert leftovers.all_of(tmp_path, offset) == leftovers.none()

    report = read_report(out / "report.json")
    assert job.returncode == bool(report.missed), said  # in ten seconds that is chance
    assert report.spread.seeds == (report.seed,)
    assert report.simulated
    assert report.triton_version == "2.51.0"
    assert report.carbon_speedup == pytest.approx(4 * 3600 / 5)
    assert report.pad_overrun_ratio is not None
    assert set(report.runs) == {"base", "static_mix", "static_miad", "exact_miad"}
    assert len({run.requests for run in report.runs.values()}) == 1, "the same arrivals"
    for name, run in report.runs.items():
        assert run.requests > 100
        assert run.answered == run.requests, (name, said)
        assert run.accuracy > 0.85, "real predictions on real images"
        assert run.joules_per_request is not None
        assert run.grams_per_request is not None
        assert 0 < run.joules_per_request < 100
        assert run.slo == next(iter(report.runs.values())).slo
    assert report.runs["base"].accuracy > 0.97
    assert not any(report.runs["base"].reconfigurations.values())

    for name in report.runs:
        series = read_series(out / name / "series.json")
        assert len(series.t_s) == 10
        assert sum(series.answered_per_s) == report.runs[name].answered
        assert sum(map(sum, series.answered_by_variant.values())) == report.runs[name].answered
        assert len({value for value in series.intensity_g_per_kwh if value is not None}) >= 2, "carbon moved"
        assert set(series.power_w) == {"node0/gpu0", "node0/gpu1"}
        metered = [g for g in series.grams if g is not None]
        assert metered == sorted(metered)
    assert "<html" in (out / "report.html").read_text()

    # Without a terminal: plain lines, no escape sequences, and the numbers at the end.
    assert "\x1b" not in said
    for part in (
        "SIMULATED",
        "SLO: 2 x",
        "fixed for all runs",
        "saving of exact_miad against static_miad",
        "simulated, 1 seed",
        "[exact_miad",
    ):
        assert part in said, part


@pytest.mark.timeout(900)
def test_two_families_share_a_gpu_that_sleeps_until_it_is_needed(tmp_path: Path) -> None:
    offset, out = free_offset(), tmp_path / "out"
    argv = [sys.executable, "-m", "trefoil.cli.main", "demo", "--policy", "wattwiser", "--out", str(out)]
    argv += ["--port-offset", str(offset), "--set", "simulated_seeds=1"]
    said = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=880, check=False)
    assert said.returncode == bool(read_report(out / "report.json").missed), said.stdout
    assert leftovers.all_of(tmp_path, offset) == leftovers.none()

    report = read_report(out / "report.json")
    assert list(report.runs) == ["uniform", "packed_uniform", "wattwiser"]
    for family in ("digits", "twin"):
        assert len({run.families[family].schedule_digest for run in report.runs.values()}) == 1, "the same arrivals"
    for name, run in report.runs.items():
        assert run.failed == 0, (name, said.stdout)
        assert all(each.accuracy > 0.95 for each in run.families.values()), "right values, of both families"
        asleep = [state == "ASLEEP" for state in read_series(out / name / "series.json").device_state["node0/gpu1"]]
        if name == "uniform":
            assert not any(asleep)
        else:
            assert asleep[0], "one GPU a family is enough"
            assert not all(asleep), "it was woken under load"
            assert asleep[-1], "and sleeps again"
    page = (out / "report.html").read_text()
    assert "Latency against the SLO: digits" in page
    assert "Latency against the SLO: twin" in page


def high_end_shares_simulated(folder: Path, report: Report, policy: str, models: Path) -> dict[str, float]:
    """Share of each family's answers that the A100s give where the very schedule of a live run is simulated."""
    demo = with_own_repository(load_system(Path("deploy/config/demo-carbondis.toml"), DemoScenario), models)
    slo_ms = {name: one.slo_ms for name, one in report.runs[policy].families.items()}
    others = tuple(
        each.model_copy(update={"slo": OwnLatency(latency_ms=slo_ms[each.name])}) for each in demo.more_families
    )
    judged = demo.model_copy(update={"more_families": others})
    sent = {name: read_load_result(result_path(folder / policy, name)).records for name in slo_ms}
    sizes = {name: iter([float(record.items) for record in records]) for name, records in sent.items()}
    answered = {name: Counter[str]() for name in sent}
    kept = RequestEngine._interval

    def counted(engine: RequestEngine, family: str, windows: Mapping[str, FamilyWindow]) -> Interval:
        for window in windows.values():
            if window.starts_s >= -1e-9:
                answered[family].update({key.device: count for key, count in window.answered_by.items()})
        return kept(engine, family, windows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FamilyLines, "items", lambda family: next(sizes[family.name]))
        patch.setattr(RequestEngine, "_interval", counted)
        simulate_demo(*demo_scenario(judged, policy, Slo(percentile=95.0, latency_ms=slo_ms["digits"])))
    return {name: (by["node0/gpu0"] + by["node0/gpu1"]) / by.total() for name, by in answered.items()}


@pytest.mark.timeout(1200)
def test_two_families_meet_on_one_high_end_gpu_more_often_when_carbon_is_high(tmp_path: Path) -> None:
    offset, out = free_offset(), tmp_path / "out"
    argv = [sys.executable, "-m", "trefoil.cli.main", "demo", "--policy", "carbondis", "--out", str(out)]
    argv += ["--port-offset", str(offset), "--set", "simulated_seeds=1"]
    said = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1100, check=False)
    assert said.returncode == bool(read_report(out / "report.json").missed), said.stdout
    assert leftovers.all_of(tmp_path, offset) == leftovers.none()

    report = read_report(out / "report.json")
    assert list(report.runs) == ["highperf", "lowenergy", "dybatch", "carbondis"]
    print("\n".join(report_lines(report)))
    for family in ("digits", "twin"):
        assert len({run.families[family].schedule_digest for run in report.runs.values()}) == 1, "the same arrivals"
        shares = {name: run.families[family].device_type_shares[A100] for name, run in report.runs.items()}
        assert (shares["highperf"], shares["lowenergy"]) == (1.0, 0.0)
        assert 0.1 < shares["carbondis"] < shares["dybatch"] < 0.9, "both types, and what can wait leaves the A100 free"
    for name, run in report.runs.items():
        assert run.failed == 0, (name, said.stdout)
        assert all(each.accuracy > 0.95 for each in run.families.values()), "right values, of both families"
        used = {
            device
            for device, states in read_series(out / name / "series.json").device_state.items()
            if "ASLEEP" not in states
        }
        assert used == {"node0/gpu" + number for number in USED.get(name, "023")}

    paths = {name: result_path(out / "carbondis", name) for name in ("digits", "twin")}
    records = merged({name: without_warmup(read_load_result(path), 6.0) for name, path in paths.items()}).records
    step_s = 15.0
    for step, way in ((2, "down"), (4, "up")):  # carbon falls below its average, and rises above it
        at_s = step * step_s
        before, after = (
            fmean("-gpu0-" in r.slice for r in records if from_s <= r.intended_s < until_s)
            for from_s, until_s in ((at_s - step_s, at_s), (at_s + 2.0, at_s + step_s))
        )
        print(f"carbon {way} at {at_s:.0f} s: share of the A100 {before:.3f}, from 2 s later on {after:.3f}")
        assert (after - before) * (1 if way == "up" else -1) > 0.3
    for name in ("dybatch", "carbondis"):
        simulated = high_end_shares_simulated(out, report, name, tmp_path / "models")
        live = {family: one.device_type_shares[A100] for family, one in report.runs[name].families.items()}
        print(f"{name}: share of the A100 live {live}, simulated {simulated}")
        if name == "dybatch":  # which of two that wait gets it turns on a millisecond: both together
            live, simulated = {"": fmean(live.values())}, {"": fmean(simulated.values())}
        assert simulated == pytest.approx(live, abs=0.02), name


@pytest.mark.timeout(1200)
def test_a_spike_of_three_times_the_load_is_met_by_other_variants_on_cpus(tmp_path: Path) -> None:
    offset, out = free_offset(), tmp_path / "out"
    argv = [sys.executable, "-m", "trefoil.cli.main", "demo", "--policy", "infadapter", "--out", str(out)]
    argv += ["--port-offset", str(offset)]
    said = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1100, check=False)
    assert said.returncode == bool(read_report(out / "report.json").missed), said.stdout
    assert leftovers.all_of(tmp_path, offset) == leftovers.none()

    report = read_report(out / "report.json")
    print("\n".join(report_lines(report)))
    assert list(report.runs) == ["vpa_plus", "ms_plus", "infadapter"]
    assert len({run.families["resnets"].schedule_digest for run in report.runs.values()}) == 1, "the same arrivals"
    for run in report.runs.values():
        assert run.failed_by_code.keys() <= {"DEADLINE_EXCEEDED"}, "whoever fails has waited as long as clients wait"
        assert run.accuracy > 0.95, "right values"
        assert run.core_s
    ours = report.runs["infadapter"]
    assert ours.failed == 0, said.stdout
    assert ours.slo_attainment > report.runs["vpa_plus"].slo_attainment
    before, within, after = (ours.mixes[when].get("resnet26", 0.0) for when in ("before", "in", "after"))
    assert before > 0.9
    assert within < 0.7, "less accurate ones carry the spike"
    assert after > within, "and the best one is back"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", INTERRUPT_SEEDS)
def test_interrupted_at_any_moment_nothing_is_left(tmp_path: Path, seed: int) -> None:
    offset = free_offset()
    chance = random.Random(seed)
    number = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGINT])
    job = start(tmp_path / "out", offset)
    time.sleep(chance.uniform(0.0, 12.0) * seed)
    job.send_signal(number)
    if chance.random() < 0.5:  # out of patience
        time.sleep(chance.uniform(0.0, 1.0))
        job.send_signal(number)
    said = ended(job, 60)
    assert job.returncode in (128 + number, -number), said
    assert leftovers.all_of(tmp_path, offset) == leftovers.none(), said
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.timeout(300)
def test_a_killed_demo_is_cleaned_up_by_the_kernel(tmp_path: Path) -> None:
    offset = free_offset()
    job = start(tmp_path / "out", offset)
    deadline = time.monotonic() + 60
    while not leftovers.connectable(8001 + offset) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    job.kill()
    ended(job, 30)
    # A process that the kernel told to stop takes a moment: Redis, which names no folder, closes its port last.
    deadline = time.monotonic() + 30
    while (leftovers.processes(tmp_path) or leftovers.listening(offset)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert leftovers.processes(tmp_path) == []
    assert leftovers.listening(offset) == []
