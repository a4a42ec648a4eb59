"""A short demo, whole: with shuffled labels and without a meter it must find neither accuracy nor joules."""

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_offset
from tests.support.system import TREFOIL
from tests.support.triton_process import ROOT

pytestmark = pytest.mark.integration

POLICIES = ("static_miad", "exact_miad")
SHORT = {
    "policies": json.dumps(POLICIES),
    "carbon.steps": "2",
    "carbon.step_s": "4",
    "warmup_s": "1",
    "slo_rule.measure_s": "1",
    "simulated_seeds": "1",
    "slo_rule.policy": "static_miad",
    "load.permute_labels": "true",
    "meter": "none",
}
DEADLINE_S = 360.0  # 105 s beside two other lanes; a feed that is slow to start has a run begin again


@pytest.mark.timeout(450)
def test_shuffled_labels_give_chance_and_no_meter_gives_null(tmp_path: Path):
    sets = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    argv = [str(TREFOIL), "demo", "--quick", "--json", "--out", str(tmp_path), "--port-offset", str(free_offset())]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TREFOIL_")}
    demo = subprocess.Popen(
        [*argv, *sets], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, complaint = demo.communicate(timeout=DEADLINE_S)
    finally:
        demo.terminate()  # it takes everything down; a second signal makes it hurry
        demo.wait(60)
    assert demo.returncode == 1, complaint  # below the floor, by far
    report = json.loads(said)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert report["saving_pct"] == {"static_miad": None}
    assert report["missed_floor"] == {"static_miad": True, "exact_miad": True}
    assert report["simulated"] is True
    for run in (report[name] for name in POLICIES):
        print(f"{run['answered']} answered, {run['failed']} failed, accuracy {run['accuracy']:.3f}")
        assert run["answered"] > 100
        assert run["failed"] == 0
        assert 0.02 < run["accuracy"] < 0.19  # ten classes; four standard deviations
        assert (run["joules_per_request"], run["grams_per_request"], run["idle_share"]) == (None, None, None)
    assert [p.pid for p in psutil.process_iter() if str(tmp_path) in " ".join(_words(p))] == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
