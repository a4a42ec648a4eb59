"""`trefoil up` and what follows: serving within 30 s in 3 GiB, operated by commands, gone after `down`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import leftovers
from tests.support.ports import free_offset
from trefoil.cli.run import processes
from trefoil.cli.run.state_directory import StatePaths
from trefoil.runtime import proc

pytestmark = [pytest.mark.integration, pytest.mark.slow]
GIB = 2**30


class System:
    """A system that `up` started, and its commands."""

    def __init__(self, folder: Path, offset: int) -> None:
        self.folder, self.offset = folder, offset

    def run(self, *arguments: str, timeout_s: float = 90) -> "subprocess.CompletedProcess[str]":
        argv = [sys.executable, "-m", "trefoil.cli.main", *arguments, "--state-dir", str(self.folder)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def until(self, holds: Callable[[Any], bool], *arguments: str, timeout_s: float = 60.0) -> Any:
        """Ask until the answer is as it should be: what services tell each other is a moment old."""
        give_up_s = time.monotonic() + timeout_s
        while not holds(found := self.json(*arguments)):
            assert time.monotonic() < give_up_s, f"{arguments} after {timeout_s:g} s: {found}"
        return found

    def up(self) -> Any:
        return self.json("up", "--port-offset", str(self.offset))

    @property
    def launch_id(self) -> str:
        launch = StatePaths(self.folder).read_launch()
        assert launch is not None
        return launch.launch_id


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    one = System(tmp_path / "state", free_offset())
    yield one
    one.run("down")


def serving(status: Any) -> bool:
    """Whether all services are healthy; on a busy machine one may not say so within its second."""
    return all(status["services"].values())


def memory_bytes(found: list[proc.Identity]) -> int:
    """Proportional set size: shared pages count once."""
    total = 0
    for identity in found:
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended between the listing and the look
            for line in Path(f"/proc/{identity.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


@pytest.mark.timeout(400)
def test_up_serves_soon_is_operated_and_goes_away(system: System) -> None:
    started = system.up()
    assert started["first_answer_s"] <= 30

    found = system.until(serving, "status")
    assert found["mode"] == "act"
    assert found["nodes"][0]["simulated"] is True

    (carbon,) = system.until(lambda told: told["readings"][0]["rung_name"] == "normal", "carbon", "now")["readings"]
    assert carbon["simulated"] is True
    system.until(lambda told: told["zones"][0]["leading"], "carbon", "health")

    load = system.json("load", "--rate", "10", "--duration", "5")
    assert load["failed"] == 0
    assert load["requests"] > 20
    assert load["accuracy"] > 0.85

    assert memory_bytes(processes.descendants(system.launch_id)) <= 3 * GIB

    plan = system.json("plan")
    assert plan["why"]
    file = system.folder / "plan.json"
    file.write_text(json.dumps(plan))
    assert system.json("pin", str(file))["pinned"] is True
    assert system.json("status")["pinned"] is True
    assert system.json("pin", "--off")["pinned"] is False
    assert system.json("mode", "advise")["mode"] == "advise"
    assert system.json("mode", "act")["mode"] == "act"
    assert system.json("freeze")["frozen"] is True
    assert system.json("freeze", "--off")["frozen"] is False
    impossible = system.run("objective", "set", "--accuracy-floor", "0.9999")
    assert impossible.returncode == 2
    assert impossible.stderr.count("\n") == 1
    assert "0.9999" in impossible.stderr
    assert {"plan", "objective:digits"} <= set(system.json("state", "dump"))
    assert all(decision["equal"] for decision in system.json("replay"))

    second = system.run("up", "--port-offset", str(system.offset + 100))
    assert second.returncode == 2
    assert "already running" in second.stderr
    elsewhere = System(system.folder.with_name("other"), system.offset).run("up", "--port-offset", str(system.offset))
    assert elsewhere.returncode == 2
    assert "port in use" in elsewhere.stderr

    assert system.json("down")["stopped"] is True
    assert leftovers.all_of(system.folder, system.offset) == leftovers.none()
    assert all(decision["equal"] for decision in system.json("replay")), "decisions outlive the system"


@pytest.mark.timeout(400)
@pytest.mark.gate
def test_a_killed_agent_comes_back_and_a_killed_supervisor_leaves_nothing(system: System) -> None:
    system.up()
    paths = StatePaths(system.folder)
    agent = json.loads((paths.run / "power_agent.json").read_text())["pid"]
    os.kill(agent, signal.SIGKILL)
    load = system.json("load", "--rate", "10", "--duration", "8")
    assert load["failed"] == 0, "serving goes on without the agent"
    system.until(serving, "status")
    assert json.loads((paths.run / "power_agent.json").read_text())["pid"] != agent

    launch = paths.running()
    os.kill(launch.supervisor.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while launch.supervisor.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert system.run("status").returncode == 2
    assert system.json("up", "--port-offset", str(system.offset))["first_answer_s"] > 0, "the next up cleans up"
    assert system.json("down")["stopped"] is True
    assert leftovers.all_of(system.folder, system.offset) == leftovers.none()
