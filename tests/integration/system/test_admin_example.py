"""The program of docs/monitoring.md, and commands by a controller's address, against a system of `trefoil up`."""

import asyncio
import csv
import io
import json
import os
import subprocess
import sys

import pytest

from tests.integration.system.conftest import Serving
from tests.support.system import TREFOIL, load

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

ALONE = """
import runpy, sys
sys.argv = ["admin.py", *sys.argv[1:]]
runpy.run_path("examples/admin.py", run_name="__main__")
assert not {"trefoil", "controller", "power_agent", "carbon_feed", "dispatcher"} & set(sys.modules)
"""


def test_the_example_calls_every_admin_service_with_the_stubs_alone(serving: Serving) -> None:
    launch = serving.system.launch
    words = [
        "--controller", launch.addresses["controller"], "--agent", launch.addresses["power_agent"],
        "--feed", launch.addresses["carbon_feed"], "--token-file", launch.token_file,
    ]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert ended.returncode == 0, ended.stderr
    said = {name: found for line in ended.stdout.splitlines() for name, found in json.loads(line).items()}
    assert list(said) == ["objective", "plan", "report", "freeze", "pin", "rollback", "drain", "clocks", "carbon"]
    before, changed, after = said["objective"]["slo_ms"]
    assert changed == before + 1 == after + 1
    assert said["freeze"]["frozen"] == [True, False]
    assert said["pin"]["pinned"] == [True, False]
    assert said["rollback"]["frozen"]
    assert said["drain"]["cordon"] == ["examples/admin.py", ""]
    assert 0 < said["clocks"]["mhz"][1] <= 1005
    assert min(said["carbon"]["g_per_kwh"].values()) > 0


def test_a_report_by_address_sums_to_what_the_system_counted(serving: Serving) -> None:
    launch = serving.system.launch
    there = ("--controller", launch.addresses["controller"], "--token-file", launch.token_file)
    asyncio.run(load(serving.system.inference, 20.0, 8.0))

    def report(*words: str) -> str:
        done = subprocess.run([str(TREFOIL), "report", *words, *there], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    found = json.loads(report("--since", "2h", "--json"))
    total = found["total"]
    assert found["simulated"]
    assert total["joules"] > 0
    for scope in ("families", "variants", "tenants"):
        assert sum(one["joules"] or 0.0 for one in found[scope]) == pytest.approx(total["joules"])
        assert sum(one["requests"] for one in found[scope]) == total["requests"]
    assert total["sci"]["sci"]["value"] or total["sci"]["sci"]["unknown"]
    rows = list(csv.DictReader(io.StringIO(report("--format", "csv"))))
    assert [row["scope"] for row in rows[:2]] == ["total", "family"]
    page = report("--format", "html")
    assert "SCI = (E x I + M) / R" in page
    assert "http" not in page
