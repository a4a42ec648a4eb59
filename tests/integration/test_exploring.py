"""Candidates measured on a running system: the controller between fakes, then the whole system with real Tritons."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from controller.loop.decision_records import replay, stored_decisions
from controller.planners.policy_parts import planner_of
from protos.controller.v1 import controller_pb2 as pb
from tests.support.control_plane import ControlPlane
from tests.support.system import FAMILY, RunningSystem, load, until
from trefoil.core.policies import policy

pytestmark = [pytest.mark.integration, pytest.mark.slow]
MEASURES = "tests.support.planners:Measures"
RATE_PER_S, LOAD_S_MIN, LOAD_S_MAX = 20.0, 25.0, 150.0


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ControlPlane]:
    monkeypatch.setenv("TREFOIL_CONTROLLER_EXPLORE__SETTLE_S", "0.6")
    plane = ControlPlane(planner=MEASURES)
    plane.intensity = 200.0
    try:
        await plane.start()
        yield plane
    finally:
        await plane.close()
    assert plane.agent.violations == []


async def explored(plane: ControlPlane) -> pb.Exploration:
    return (await plane.stub.Explain(pb.ExplainRequest(family="digits"))).exploration


async def ended(plane: ControlPlane, explorations: int = 1) -> pb.Exploration | None:
    now = await explored(plane)
    return now if now.explorations >= explorations and not now.under_way and await plane.settled() else None


async def has_evaluated(plane: ControlPlane, count: int) -> pb.Exploration | None:
    now = await explored(plane)
    return now if now.under_way and now.evaluations >= count else None


async def waits(plane: ControlPlane) -> bool:
    return "measuring" in (await explored(plane)).text


def variants(plane: ControlPlane) -> set[str]:
    return {s.hosted[0].variant for s in plane.agent.slices.values() if s.state.name == "READY"}


async def test_measures_each_candidate_decides_and_every_step_replays(plane: ControlPlane) -> None:
    found = await plane.until(lambda: ended(plane), 60)
    assert (found.evaluations, found.refused, found.broken_off) == (3, 0, 0)
    assert found.spent_s > 3 * 2.0
    assert found.spent_j > 0
    assert "candidate 2: layout 1: measured" in found.text
    plan = await plane.plan()
    assert not plan.exploration
    assert "layout 2 of [0, 1, 2]" in plan.why
    assert variants(plane) == {"digits-m"}
    taken = await plane.decisions()
    assert [d.versions["outcome"] for d in taken] == ["candidate"] * 3 + ["new_plan"]
    assert '"evaluations": 3' in taken[-1].versions["exploration"]
    assert plane.stop_controller() == 0
    row = policy("exact")
    again = [
        replay(r, planner_of(MEASURES, row), p) for r, p in stored_decisions(plane.folder / "controller" / "decisions")
    ]
    assert [r.equal for r in again] == [True] * 4


async def test_a_freeze_goes_back_and_a_killed_controller_remembers_what_it_measured(plane: ControlPlane) -> None:
    await plane.until(lambda: ended(plane), 60)
    plane.silent_while = "digits-m"  # the last layout: no exploration ends, however late we look
    plane.intensity = 300.0
    await plane.until(lambda: has_evaluated(plane, 4), 60)
    await plane.stub.Freeze(pb.FreezeRequest(frozen=True))
    found = await plane.until(lambda: ended(plane, 2), 30)
    assert "interrupted: frozen" in found.text
    assert variants(plane) == {"digits-m"}, "the plan of before"
    assert not (await plane.plan()).exploration

    await plane.stub.Freeze(pb.FreezeRequest(frozen=False))
    await plane.until(lambda: has_evaluated(plane, 5), 60)
    plane.kill_controller()
    told = json.loads((plane.folder / "controller" / "planner_memory.json").read_text())["memory"]["told"]
    assert len(told) == 2, "all but the last, measured before the freeze or after it"
    plane.start_controller()
    await plane.until(plane._answers, 30)
    await plane.until(lambda: waits(plane), 30)
    plane.silent_while = ""
    found = await plane.until(lambda: ended(plane, 3), 60)
    assert found.text.splitlines()[1].startswith("  candidate 1: layout 2: measured")
    assert found.text.count("candidate") == 1
    assert variants(plane) == {"digits-m"}, found.text


async def test_without_redis_it_pauses_and_then_goes_on(plane: ControlPlane) -> None:
    await plane.until(lambda: has_evaluated(plane, 1), 60)
    plane.redis.kill()
    await asyncio.sleep(7.0)
    plane.redis.start()
    found = await plane.until(lambda: ended(plane), 60)
    assert found.evaluations >= 2
    assert variants(plane) == {"digits-m"}


@pytest.mark.timeout(400)
async def test_clover_measures_on_real_tritons_and_no_request_fails() -> None:
    system = RunningSystem({"policy": "clover", "params.accuracy_margin": 0.0})
    stop = asyncio.Event()
    try:
        await asyncio.to_thread(system.up)
        offered, began_s = asyncio.create_task(load(system.inference, RATE_PER_S, LOAD_S_MAX, stop)), time.monotonic()
        async with system.client() as client:

            async def measured_two() -> bool:
                return (await client.explain(FAMILY)).exploration.evaluations >= 2

            await until(measured_two, 120.0, "no two candidates measured within")
        plan = await asyncio.to_thread(system.ask, "plan")
        assert "accuracy" in plan["exploration"]["text"]
        await asyncio.to_thread(system.ask, "freeze")
        status = await asyncio.to_thread(system.wait_for_rollout)
        assert (status["frozen"], status["exploring"]) == (True, False)
        await asyncio.sleep(began_s + LOAD_S_MIN - time.monotonic())  # however soon two were measured
        stop.set()
        result = await offered
        assert {r.code for r in result.records} == {"OK"}
        assert len(result.records) > 400
        assert {r["equal"] for r in await asyncio.to_thread(system.ask, "replay")} == {True}
    finally:
        stop.set()
        await asyncio.to_thread(system.close)
