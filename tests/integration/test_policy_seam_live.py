"""Your own policy on a whole system: `trefoil up` with your own row, and each column of it seen at work."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.seam import ROW
from tests.support.seam.router import HOLD_S
from tests.support.system import RunningSystem, load, running_system
from tests.support.triton_process import ROOT
from trefoil.cli.load.result import LoadResult

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NAME = "tests.support.seam:ROW"
ONE_GPU = {"policy": NAME, "fleet.devices": '["A100-SXM4-40GB"]', "demand_initial_per_s": 20}
ONE_GPU |= {"availability.replicas_min": 1, "availability.spread_min": 1}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@contextmanager
def running(**settings: object) -> Iterator[RunningSystem]:
    with running_system({**ONE_GPU, **settings}) as system:
        yield system


def served(system: RunningSystem, rate_per_s: float) -> LoadResult:
    return asyncio.run(load(system.inference, rate_per_s, 4.0))


def ceilings_mhz(system: RunningSystem) -> set[int]:
    """What the agent has locked so far."""
    return {int(mhz) for mhz in re.findall(r"210-(\d+) MHz", system.log("power_agent", 400))}


def climbed(system: RunningSystem, stairs: set[int]) -> set[int]:
    """What the agent has locked by the time that the stairs are among it."""
    give_up_s = time.monotonic() + 90.0
    while not stairs <= (found := ceilings_mhz(system)):
        assert time.monotonic() < give_up_s, f"the agent locked {found}"
        time.sleep(0.2)
    return found


@pytest.mark.gate
def test_every_column_of_the_row_is_at_work_in_a_live_system() -> None:
    with running() as system:
        climbed(system, {900, 1200})  # the governor's stairs
        plan, asked = system.ask("plan")["plan"], system.ask("explain-request")
        result = served(system, 10.0)  # seldom two at once: its queue lets a later one go first
        crowd = served(system, 200.0)  # ten of them come while the router holds the first
        log = system.log("controller", 200)
    assert (plan["policy"], plan["planner"]) == (NAME, "ceiling")
    assert "demand by promised" in plan["why"] or "demand by promised" in log
    assert [(route["router"], route["queue"]) for route in plan["routes"]] == [(ROW.router, ROW.queue)]
    assert {device["governor"] for node in plan["nodes"] for device in node["devices"]} == {ROW.governor}
    assert asked["router"] == ROW.router
    answered = sorted(record.latency_ms for record in result.records if record.code == "OK")
    assert answered[len(answered) // 2] >= 1e3 * HOLD_S, "the router's timer holds them back"
    assert any(record.code == "RESOURCE_EXHAUSTED" for record in crowd.records), "the queue lets few wait"


def test_another_part_in_a_column_takes_its_place() -> None:
    others = {"planner": "base", "forecaster": "last_max", "queue": "fifo", "governor": "fixed"}
    with running(**others) as system:
        time.sleep(6.0)  # the stairs would have been climbed
        assert ceilings_mhz(system) == set(), "base plans no clock, and fixed holds what is planned"
        assert system.ask("plan")["plan"]["planner"] == "base"
        assert system.ask("explain-request")["router"] == ROW.router
        result = served(system, 80.0)
    assert not any(record.code == "RESOURCE_EXHAUSTED" for record in result.records), result.records
    with running(router="least_loaded") as system:
        assert system.ask("explain-request")["router"] == "least_loaded"


BAD = {
    "policy": ("tests.support.seam:NONE", "tests.support.seam has no NONE"),
    "planner": ("best", "no such planner. Remedy: "),
    "forecaster": ("oracle", "knows what only a simulation knows. Remedy: lstm"),
    "router": ("roulette", "no such router. Remedy: "),
    "queue": ("sjf", "no such queue. Remedy: "),
    "governor": ("turbo", "no such governor. Remedy: "),
}


@pytest.mark.parametrize("column", BAD)
def test_a_part_that_is_not_there_ends_the_command_before_anything_starts(column: str) -> None:
    name, says = BAD[column]
    system = RunningSystem()
    try:
        line = system.refused("up", f"--{column}", name)
        assert says in line
        assert name in line
    finally:
        system.close()
