"""One whole system for all files of this folder: each test leaves it serving its first plan, see `serving`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.support import leftovers
from tests.support.system import RunningSystem

DEMAND_PER_S = 70.0  # needs both variants and eight slices on both GPUs
CARBON_STEP_S = 20.0


@dataclass
class Serving:
    """The running system, and the plan that it started with."""

    system: RunningSystem
    first_plan: dict[str, Any]


@pytest.fixture(scope="package")
def running() -> Iterator[Serving]:
    """`trefoil up`, the first plan frozen so that it stays until a test changes it; `trefoil down` at the end."""
    system = RunningSystem({"demand_initial_per_s": DEMAND_PER_S, "carbon.step_s": CARBON_STEP_S})
    try:
        system.up()
        system.ask("freeze")
        system.wait_for_rollout()  # the first slice that is READY answers already
        yield Serving(system, system.ask("plan"))
        everything = system.processes()
        assert system.ask("down")["stopped"]
        _, alive = psutil.wait_procs(everything, timeout=30)
        assert not alive, f"left running: {[process.cmdline() for process in alive]}"
        assert leftovers.shared_memory(system.port_offset) == []
        assert leftovers.listening(system.port_offset) == []
        assert not (system.state_dir / "lock").exists()
    finally:
        system.close()


@pytest.fixture
def serving(running: Serving) -> Serving:
    """Serving the first plan and nothing else, whatever the test before did to it."""
    system = running.system
    now = system.ask("plan")
    if now["mode"] != "act":
        system.ask("mode", "act")
    if not now["frozen"]:
        system.ask("freeze")
    if wanted(now) != wanted(running.first_plan):
        system.pin(running.first_plan)
        system.wait_for_rollout()
        system.ask("pin", "--off")  # frozen, it stays
    return running


def wanted(answer: dict[str, Any]) -> str:
    """What a plan asks for, without its revision."""
    return json.dumps([answer["plan"]["nodes"][0]["devices"], answer["plan"]["routes"]], sort_keys=True)
