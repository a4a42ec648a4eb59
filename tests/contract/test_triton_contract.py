"""The real Triton and the fake one of the fast tests answer alike to everything that the agent asks of them."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from power_agent.triton.client import LoadFailed, StubDead, TritonClient, TritonUnready
from power_agent.triton.installation import TritonInstall
from power_agent.triton.slice_launch import SliceSpec, prepare_slice
from tests.support.fake_slice import FakeSlice
from tests.support.ports import free_ports
from tests.support.triton_process import MODELS, TritonProcess, hosted
from trefoil.runtime.clock import WallClock

SMALL, LARGE = hosted(1), hosted(4)


@contextlib.asynccontextmanager
async def fake(folder: Path):
    ports = free_ports(2)
    install = TritonInstall(Path("t"), Path("b"), Path("c"), folder, "3.11", "1", "1", "", True, "")
    spec = SliceSpec("test", folder / "slice", MODELS, [SMALL], ports[0], ports[1], "")
    launch = prepare_slice(install, spec)
    triton = FakeSlice(launch.argv)
    await triton.start()
    server = TritonClient(launch.grpc_target, launch.metrics_url, launch.repository, WallClock())

    def kill_stub() -> None:
        triton.stub_dead = True

    try:
        yield server, kill_stub
    finally:
        await server.close()
        await triton.stop()


@contextlib.asynccontextmanager
async def real(folder: Path):
    triton = TritonProcess(folder, 1)
    server = triton.client()
    try:
        yield server, triton.kill_stubs
    finally:
        await server.close()
        triton.close()


@pytest.mark.parametrize("kind", [fake, pytest.param(real, marks=[pytest.mark.integration, pytest.mark.slow])])
async def test_readiness_swap_death_of_the_stub_and_counters(kind, tmp_path):
    async with kind(tmp_path) as (server, kill_stub):
        await server.wait_ready([SMALL], 30)
        assert await server.pending() == 0
        assert await server.loaded("digits", 1)
        assert not await server.loaded("digits", 4)
        async with asyncio.timeout(60):  # Triton counts an inference after it has answered it
            while not (await server.statistics())[0].successes:
                await asyncio.sleep(0.02)
        (counted,) = await server.statistics()
        assert (counted.family, counted.version, counted.failures) == ("digits", 1, 0)
        assert counted.successes >= 1  # the inference of wait_ready
        assert counted.compute_batch_ns > 0
        with pytest.raises(TritonUnready, match="version 4"):
            await server.probe("digits", 4)
        swapped = await server.swap(SMALL, LARGE)
        assert all((c.family, c.version) == ("digits", 1) for c in swapped.before)
        assert [c.version for c in await server.statistics()] == [4]
        with pytest.raises(LoadFailed):
            await server.swap(LARGE, replace(LARGE, version=9, variant="digits-none"))
        await server.probe("digits", 4)  # what was loaded before goes on serving
        kill_stub()
        await asyncio.sleep(0.2)
        with pytest.raises(StubDead):
            await server.probe("digits", 4)
        await server.heal(LARGE)
        await server.probe("digits", 4)
