"""CARBONDIS by `trefoil up`: an A100 and two T4s, two jobs behind one router in one of two workers, which is killed, as
are the A100's Triton and the carbon feed: what fails is what was in flight there. Then the feed falls silent."""

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from dispatcher.routing.core.membership import rank_workers
from power_agent.runtimes.simulated_node import NodeRuntime
from tests.support.system import DEADLINE_S, RunningSystem, slices, until, windows
from tests.support.twin_family import TWIN, two_families
from trefoil.cli.load.generator import LoadSpec, RateProfile, run_load
from trefoil.cli.load.result import OK, LoadResult
from trefoil.core.demand import TableAck
from trefoil.core.fleet import SliceState
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FAMILIES = ("digits", TWIN)
RATE_PER_S, LOADED_S, SILENT_S = 12.0, 60.0, 10.0
SHARED, IN_FLIGHT = "node0/gpu0", 3  # one on each GPU


@pytest.fixture
def system(tmp_path):
    one = RunningSystem({
        "policy": "carbondis", "objective_type": "instant", "slo.latency_ms": 150.0, "workers": 2,
        "family.repository": str(two_families(tmp_path / "models")), "demand_initial_per_s": RATE_PER_S,
        "more_families": f'[{{name = "{TWIN}", demand_initial_per_s = {RATE_PER_S}}}]',
        "fleet.devices": json.dumps(["A100-SXM4-40GB", "Tesla T4", "Tesla T4"]),
        "carbon.step_s": 5.0, "carbon.steps": 12,  # a reading is old after seconds
        "availability.replicas_min": 1, "availability.spread_min": 1,
    })  # fmt: skip
    try:
        one.up()
        yield one
    finally:
        one.close()


def worker(system: RunningSystem, number: int) -> psutil.Process:
    found = [p for p in system.processes() if f"worker={number}" in p.cmdline()]
    assert len(found) == 1, [p.cmdline() for p in found]
    return found[0]


async def hurt(system: RunningSystem) -> dict[str, int]:
    """Kill the owner of the group, the A100's Triton and the feed, each once all is well again; the owner is another
    worker after its end."""
    async with system.client() as client:

        async def well() -> bool:
            states = {part.state for part in (await slices(client)).values()}
            acks = await client.state.scan(client.state.keys.ack_prefix(), TableAck)
            return states == {SliceState.READY} and len(acks) == 2

        (dispatcher,) = {
            ack.dispatcher for ack in (await client.state.scan(client.state.keys.ack_prefix(), TableAck)).values()
        }
        owner = rank_workers("carbondis fifo", [(dispatcher, 0), (dispatcher, 1)])[0][1]
        await asyncio.sleep(5)
        worker(system, owner).send_signal(signal.SIGKILL)
        await asyncio.sleep(8)
        await until(well, 60.0)
        (shared,) = [key for key in await slices(client) if key.device == SHARED]
        node = system.node()
        try:
            (triton,) = [p for p in NodeRuntime(node).list() if p.tag.startswith(f"{shared.name}.g") and p.alive]
        finally:
            node.close()
        psutil.Process(int(triton.id)).kill()
        await asyncio.sleep(8)
        await until(well, 60.0)
        psutil.Process(system.service_pid("carbon_feed")).kill()
        await asyncio.sleep(8)
        return {"owner": owner}


def test_a_killed_owner_triton_and_feed_cost_what_was_in_flight(system):
    async def load(seconds: float) -> list[LoadResult]:
        images, profile = Path("model_repository/digits/heldout.npz"), RateProfile.constant(RATE_PER_S, seconds)
        specs = [LoadSpec(profile, images, family, seed=3, deadline_s=DEADLINE_S) for family in FAMILIES]
        return await asyncio.gather(*(run_load(spec, system.inference, clock=WallClock()) for spec in specs))

    async def served() -> tuple[dict[str, LoadResult], list]:
        _, results = await asyncio.gather(hurt(system), load(LOADED_S))
        async with system.client() as client:
            return dict(zip(FAMILIES, results, strict=True)), await windows(client, 0.0)

    found, seen = asyncio.run(served())
    codes = {family: Counter(record.code for record in result.records) for family, result in found.items()}
    used: Counter[tuple[str, str]] = Counter()
    for window in seen:
        for cell in window.cells:
            if cell.key.slice is not None:
                used[cell.key.family, cell.key.slice.device] += cell.answered
    print(codes, dict(used))
    failed = sum(count for each in codes.values() for code, count in each.items() if code != OK)
    assert failed <= 2 * IN_FLIGHT  # the killed worker's, and the killed Triton's
    for family, result in found.items():
        right = [record.correct / record.items for record in result.records if record.code == OK]
        assert np.mean(right) > 0.95
        assert sum(count for (name, _), count in used.items() if name == family) > 0

    async def known() -> bool:
        return system.ask("status")["carbon_ratio"][0]["ratio"] is not None

    async def unknown() -> bool:
        return not await known()

    async def silent() -> list[LoadResult]:
        await until(unknown, 60.0)
        return await load(SILENT_S)

    asyncio.run(until(known, 60.0))
    feed = psutil.Process(system.service_pid("carbon_feed"))
    feed.suspend()  # alive, so that nobody starts another
    try:
        results = asyncio.run(silent())
        assert {record.code for result in results for record in result.records} == {OK}, "branch 3 needs no carbon"
        assert asyncio.run(unknown())
        assert "routers that go by it do without" in " ".join(system.run("status").stdout.split())
    finally:
        feed.resume()
