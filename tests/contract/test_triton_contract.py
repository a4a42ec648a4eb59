"""The real Triton and the fake one of the fast tests answer alike to everything that the agent asks of them."""

import asyncio
import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from power_agent.triton.access import TritonFiles
from power_agent.triton.client import LoadFailed, StubDead, TritonClient, TritonUnready
from power_agent.triton.installation import TritonInstall
from power_agent.triton.slice_launch import SliceSpec, prepare_slice
from tests.support.certificates import Authority
from tests.support.fake_slice import FakeSlice
from tests.support.ports import free_ports
from tests.support.triton_process import MODELS, TritonProcess, hosted, install
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.tls import Tls

SMALL, LARGE = hosted(1), hosted(4)


@contextlib.asynccontextmanager
async def fake(folder: Path, **secured):
    ports = free_ports(2)
    nowhere = TritonInstall(Path("t"), Path("b"), Path("c"), folder, "3.11", "1", "1", "", True, "")
    spec = replace(SliceSpec("test", folder / "slice", MODELS, [SMALL], ports[0], ports[1], ""), **secured)
    launch = prepare_slice(nowhere, spec)
    triton = FakeSlice(launch.argv)
    await triton.start()

    def client(**options) -> TritonClient:
        return TritonClient(launch.grpc_target, launch.metrics_url, launch.repository, WallClock(), **options)

    def kill_stub() -> None:
        triton.stub_dead = True

    try:
        yield client, kill_stub
    finally:
        await triton.stop()


@contextlib.asynccontextmanager
async def real(folder: Path, **secured):
    triton = TritonProcess(folder, 1, **secured)
    try:
        yield triton.client, triton.kill_stubs
    finally:
        triton.close()


@contextlib.asynccontextmanager
async def closing(client: TritonClient):
    try:
        yield client
    finally:
        await client.close()


KINDS = pytest.mark.parametrize("kind", [fake, pytest.param(real, marks=[pytest.mark.integration, pytest.mark.slow])])


@KINDS
async def test_readiness_swap_death_of_the_stub_and_counters(kind, tmp_path):
    async with kind(tmp_path) as (client, kill_stub), closing(client()) as server:
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
        before = await server.swap(SMALL, LARGE)
        assert all((c.family, c.version) == ("digits", 1) for c in before)
        assert [c.version for c in await server.statistics()] == [4]
        with pytest.raises(LoadFailed):
            await server.swap(LARGE, replace(LARGE, version=9, variant="digits-none"))
        await server.probe("digits", 4)  # what was loaded before continues serving
        kill_stub()
        await asyncio.sleep(0.2)
        with pytest.raises(StubDead):
            await server.probe("digits", 4)
        await server.heal(LARGE)
        await server.probe("digits", 4)


@KINDS
async def test_what_is_the_agents_alone_opens_to_its_key_and_nothing_to_a_stranger(kind, tmp_path):
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    own, agent = ours.server("tritons.node0"), ours.service("node0")
    files = TritonFiles(own.certificate, own.key, ours.certificate)
    tls, name = Tls(agent.certificate, agent.key, ours.certificate), "tritons.node0"
    async with contextlib.AsyncExitStack() as stack:
        client, _ = await stack.enter_async_context(kind(tmp_path, key="secret", tls=files))

        async def connected(**options) -> TritonClient:
            return await stack.enter_async_context(closing(client(**options)))

        server = await connected(tls=tls, name=name, key="secret")
        await server.wait_ready([SMALL], 30)
        await server.swap(SMALL, LARGE)
        for key in ("", "wrong"):
            other = await connected(tls=tls, name=name, key=key)
            with pytest.raises(LoadFailed, match="This protocol is restricted"):
                await other.swap(LARGE, SMALL)
            with pytest.raises(TritonUnready, match="This protocol is restricted"):
                await other.loaded("digits", 4)
            if kind is real:
                for method, request in RESTRICTED:
                    with pytest.raises(grpc.aio.AioRpcError, match="This protocol is restricted"):
                        await other._call(method, request, 5.0)
            await other.probe("digits", 4)
            await other.statistics()
            await other.version()
        stranger = theirs.service("node0")
        for refused in (
            {},
            {"tls": tls, "name": "tritons.node1"},
            {"tls": Tls(None, None, ours.certificate)},
            *(
                {"tls": Tls(pair.certificate, pair.key, ours.certificate, signed=False), "name": name}
                for pair in (stranger, own)  # models can read their Triton's key
            ),
        ):
            with pytest.raises(TritonUnready, match="failed to connect"):
                await (await connected(**refused, key="secret")).version()


RESTRICTED = [
    ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/k", byte_size=1)),
    ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
    ("TraceSetting", pb.TraceSettingRequest()),
    ("LogSettings", pb.LogSettingsRequest()),
]


@pytest.mark.integration
@pytest.mark.slow
async def test_a_python_model_answers_below_paths_that_a_shell_would_read_otherwise(tmp_path):
    environment, found = tmp_path / "my $(false) 'environment'", install().backends
    backends = environment / "pytriton" / "tritonserver" / "backends"
    shutil.copytree(found, backends)
    libraries = "nvidia_pytriton.libs"  # beside it in the wheel
    (environment / libraries).symlink_to(found.parents[2] / libraries)
    folder = tmp_path / "a state; of & mine" / "slices"
    folder.mkdir(parents=True)
    async with real(folder, triton=replace(install(), backends=backends)) as (client, _), closing(client()) as server:
        await server.wait_ready([SMALL], 30)
