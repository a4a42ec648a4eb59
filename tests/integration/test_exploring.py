"""Candidates measured on a whole system with real Tritons. Alone: tests/unit/controller/test_explore.py."""

import asyncio
import time

import pytest

from tests.support.system import FAMILY, RunningSystem, load, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]
RATE_PER_S, LOAD_S_MIN, LOAD_S_MAX = 20.0, 25.0, 150.0


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
