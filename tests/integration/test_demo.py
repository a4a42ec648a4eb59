"""The main job, end to end with real Tritons: it reports what it promises, and leaves nothing however it ends."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import leftovers
from tests.support.ports import free_offset
from trefoil.cli.demo.results import read_report, read_series

pytestmark = [pytest.mark.integration, pytest.mark.slow]
# The demo's own files and code, only shorter: two carbon steps of five seconds.
SHORT = {
    "carbon.steps": 2, "carbon.step_s": 5, "warmup_s": 2, "slo_rule.measure_s": 2, "load.ramp_s": 2,
    "simulated_seeds": 1,
}  # fmt: skip
INTERRUPT_SEEDS = (1, 2, 3)


def start(out: Path, offset: int, **more: Any) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "trefoil.cli.main", "demo", "--out", str(out), "--port-offset", str(offset)]
    for key, value in {**SHORT, **more}.items():
        argv += ["--set", f"{key}={value}"]
    # A session of its own, as a shell gives to a job: signals of the test runner are not meant for it.
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
    assert job.returncode == report.missed_floor("exact"), said  # in ten seconds that is chance
    assert [one.seed for one in report.spread.seeds] == [report.seed]
    assert report.simulated
    assert report.triton_version == "2.51.0"
    assert report.carbon_speedup == pytest.approx(4 * 3600 / 5)
    assert report.pad_overrun_ratio is not None
    assert set(report.runs) == {"base", "static_mix", "exact"}
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
        "saving of exact against base",
        "simulated, 1 seed",
        "[exact",
    ):
        assert part in said, part


@pytest.mark.timeout(900)
def test_two_families_share_a_gpu_that_sleeps_until_it_is_needed(tmp_path: Path) -> None:
    offset, out = free_offset(), tmp_path / "out"
    argv = [sys.executable, "-m", "trefoil.cli.main", "demo", "--policy", "wattwiser", "--out", str(out)]
    argv += ["--port-offset", str(offset), "--set", "simulated_seeds=1"]
    said = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=880, check=False)
    assert said.returncode == 0, said.stdout
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
