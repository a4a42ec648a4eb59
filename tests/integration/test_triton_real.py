"""The real tritonserver with the real models: values are checked, not statuses."""

import asyncio
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from power_agent.triton.client import (
    LoadFailed,
    StubDead,
    TritonClient,
    TritonUnready,
    VersionCounters,
)
from power_agent.triton.slice_launch import SHARED_MEMORY
from tests.support.triton_process import (
    MODELS,
    VERSIONS,
    PaceFile,
    TritonProcess,
    expected,
    heldout,
    hosted,
)
from trefoil.runtime.model_files import contract

pytestmark = pytest.mark.integration
READY_S = 60.0

Start = Callable[..., TritonProcess]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, np.ndarray]:
    return expected(tmp_path_factory.mktemp("expected"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[TritonProcess] = []

    def launch(version: int, **more: object) -> TritonProcess:
        started.append(TritonProcess(tmp_path, version, **more))
        return started[-1]

    yield launch
    for one in started:
        one.close()


def request(images: np.ndarray, version: str = "") -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name="digits", model_version=version)
    message.inputs.add(name="IMAGE", datatype="UINT8", shape=images.shape)
    message.raw_input_contents.append(images.tobytes())
    return message


def values(reply: service_pb2.ModelInferResponse) -> np.ndarray:
    return np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(-1, 10)


async def counted(server: TritonClient, items: int) -> VersionCounters:
    """Triton's counters of the only version that it serves: it counts a request after it has answered it."""
    async with asyncio.timeout(60):
        while True:
            [counters] = await server.statistics()
            if counters.items >= items:
                break
            await asyncio.sleep(0.02)
    assert counters.items == items
    return counters


@dataclass
class Clients:
    """Closed-loop clients that check every answer against onnxruntime."""

    target: str
    answers: dict[int, np.ndarray]
    versions: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    wrong: int = 0

    async def run(self, count: int, stop: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(self.target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await asyncio.gather(*(self._one(stub, i, stop) for i in range(count)))

    async def _one(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, offset: int, stop: asyncio.Event) -> None:
        images, _ = heldout()
        i = offset
        while not stop.is_set():
            i = (i + 7) % len(images)
            try:
                reply = await stub.ModelInfer(request(images[i : i + 1]), timeout=10)
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name} {error.details()}")
                continue
            version = int(reply.model_version)
            self.versions[version] = self.versions.get(version, 0) + 1
            self.wrong += not np.allclose(values(reply)[0], self.answers[version][i], atol=1e-5)


def test_the_committed_graphs_have_the_accuracy_that_family_toml_states(tmp_path):
    family = tomllib.loads((MODELS / "digits" / "family.toml").read_text())
    answers, (_, labels) = expected(tmp_path, "validation.npz"), heldout("validation.npz")
    stated = {v["version"]: v["accuracy"] for v in family["variants"]}
    measured = {v: float(np.mean(answers[v].argmax(axis=1) == labels)) for v in VERSIONS}
    assert measured == pytest.approx(stated, abs=1e-6)
    macs = [v["macs"] for v in sorted(family["variants"], key=lambda v: v["accuracy"])]
    assert max(stated.values()) - min(stated.values()) >= 0.06
    assert macs[-1] >= 20 * macs[0]
    assert sum(p.stat().st_size for p in (MODELS / "digits").glob("*/model.onnx")) < 5e6


@pytest.mark.gate
async def test_every_variant_answers_what_onnxruntime_answers(start, answers):
    triton = start(1)
    server = triton.client()
    await server.wait_ready([hosted(1)], READY_S)
    images, _ = heldout()
    serving = hosted(1)
    async with grpc.aio.insecure_channel(triton.launch.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for version in VERSIONS:
            await server.swap(serving, hosted(version))
            serving = hosted(version)
            for first in range(0, len(images), 8):
                reply = await stub.ModelInfer(request(images[first : first + 8]), timeout=10)
                assert reply.model_version == str(version)
                np.testing.assert_allclose(values(reply), answers[version][first : first + 8], atol=1e-5)
    counters = await counted(server, len(images) + 1)  # and the probe
    assert (counters.family, counters.version) == ("digits", 4)
    assert counters.compute_batch_ns > 0
    assert await server.version() == "2.51.0"
    await server.close()


async def test_swapping_under_load_fails_nothing_and_answers_right(start, answers):
    triton = start(4)
    server = triton.client()
    await server.wait_ready([hosted(4)], READY_S)
    clients, stop = Clients(triton.launch.grpc_target, answers), asyncio.Event()
    load = asyncio.create_task(clients.run(4, stop))
    serving, before = 4, 0
    for version in (1, 3, 2, 4):
        unloaded = await server.swap(hosted(serving), hosted(version))
        assert [c.version for c in unloaded] == [serving]
        before += unloaded[0].successes
        assert contract(triton.launch.repository, "digits").version_policy.specific.versions == [version]
        serving = version
    stop.set()
    await load
    assert clients.failures == []
    assert clients.wrong == 0
    assert set(clients.versions) == set(VERSIONS)
    # What a swap reports of the old version misses at most one poll of it.
    assert before >= 0.5 * sum(clients.versions.values())
    assert await server.swap(hosted(4), hosted(4)) == ()
    await server.close()


async def test_a_dead_stub_shows_only_in_an_inference_and_is_healed(start, answers):
    triton = start(2)
    server = triton.client()
    await server.wait_ready([hosted(2)], READY_S)
    triton.kill_stubs()
    async with grpc.aio.insecure_channel(triton.launch.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        images, _ = heldout()
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as dead:
                await stub.ModelInfer(request(images[:1]), timeout=10)
            assert dead.value.code() is grpc.StatusCode.INTERNAL
        assert (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
        assert (await stub.ModelReady(service_pb2.ModelReadyRequest(name="digits", version="2"))).ready
        with pytest.raises(StubDead, match="not healthy"):
            await server.probe("digits", 2)
        async with asyncio.timeout(15):
            await server.heal(hosted(2))
        reply = await stub.ModelInfer(request(images[:1]), timeout=10)
        np.testing.assert_allclose(values(reply), answers[2][:1], atol=1e-5)
        # Triton still holds the dead stub now: neither a swap nor a second death may stumble over it.
        async with asyncio.timeout(15):
            await server.swap(hosted(2), hosted(1))
        triton.kill_stubs()
        with pytest.raises(StubDead):
            await server.probe("digits", 1)
        async with asyncio.timeout(15):
            await server.heal(hosted(1))
        reply = await stub.ModelInfer(request(images[:1]), timeout=10)
        np.testing.assert_allclose(values(reply), answers[1][:1], atol=1e-5)
    await server.close()


async def test_a_version_that_does_not_load_leaves_the_old_one_serving(start, tmp_path):
    source = tmp_path / "models"
    shutil.copytree(MODELS, source)
    (source / "digits" / "3" / "model.onnx").write_bytes(b"no graph")
    triton = start(1, source=source)
    server = triton.client()
    await server.wait_ready([hosted(1)], READY_S)
    with pytest.raises(LoadFailed, match="digits version"):
        await server.swap(hosted(1), hosted(3))
    await server.probe("digits", 1)
    assert contract(triton.launch.repository, "digits").version_policy.specific.versions == [1]
    await server.close()


async def test_a_simulated_slice_keeps_the_pace_of_its_table(start, tmp_path):
    pace = PaceFile(tmp_path / "pace", [(3, 1, 30.0, 0.0), (3, 2, 50.0, 0.0), (3, 8, 170.0, 0.0)])
    triton = start(3, pace=pace.path)
    server = triton.client()
    await server.wait_ready([hosted(3)], READY_S)
    images, _ = heldout()
    async with grpc.aio.insecure_channel(triton.launch.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def booked_ms(items: int) -> float:
            """What a request books as busy: all of it while its client waits, one batch, and nothing runs after it."""
            before, asked_ns = pace.read(3), time.monotonic_ns()
            await stub.ModelInfer(request(images[:items]), timeout=10)
            waited_ns, after = time.monotonic_ns() - asked_ns, pace.read(3)
            busy_ns = after["busy_ns"] - before["busy_ns"]
            assert 0 < busy_ns <= waited_ns
            assert (after["batches"], after["items"]) == (before["batches"] + 1, before["items"] + items)
            assert after["started_ns"] == 0
            return busy_ns / 1e6

        # Never faster than the table. A busy machine wakes sleepers late, by any time, but not each of them.
        singles = [await booked_ms(1) for _ in range(20)]
        assert 30.0 <= min(singles) < 40.0
        fours = [await booked_ms(4) for _ in range(10)]  # between the rows of 2 and 8: 90 ms
        assert 90.0 <= min(fours) < 100.0
        slot = pace.read(3)
        assert (slot["batches"], slot["items"]) == (31, 61)  # the probe is one of them
        assert slot["busy_ns"] <= (await counted(server, 61)).compute_batch_ns

        pace.write([(3, 1, 30.0, 0.5)], sequence=4)  # now around the table, some far below
        assert min([await booked_ms(1) for _ in range(20)]) < 20.0
        pace.write([(3, 1, 0.001, 0.0)], sequence=6)  # faster than the real work can be
        before, busy_ms, after = pace.read(3), await booked_ms(1), pace.read(3)
        assert after["overruns"] == before["overruns"] + 1
        assert 0 < after["overrun_ns"] - before["overrun_ns"] < busy_ms * 1e6
        pace.write([(1, 1, 1.0, 0.0)], sequence=8)  # nothing about version 3
        with pytest.raises(grpc.aio.AioRpcError, match="no service time for version 3"):
            await stub.ModelInfer(request(images[:1]), timeout=10)
    assert pace.read(3)["started_ns"] == 0
    await server.close()


async def test_pending_counts_what_waits(start, tmp_path):
    pace = PaceFile(tmp_path / "pace", [(1, 1, 500.0, 0.0)])
    triton = start(1, pace=pace.path)
    server = triton.client()
    await server.wait_ready([hosted(1)], READY_S)
    assert await server.pending() == 0
    images, _ = heldout()
    seen = 0
    async with grpc.aio.insecure_channel(triton.launch.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        async with asyncio.timeout(120):
            while seen < 3:  # on a busy machine the first may end before the last has come, or before anybody looks
                calls = [stub.ModelInfer(request(images[:1]), timeout=60) for _ in range(4)]
                while not all(call.done() for call in calls):
                    seen = max(seen, await server.pending())
                    await asyncio.sleep(0.02)
                await asyncio.gather(*calls)
    assert seen == 3  # the fourth executes
    assert await server.pending() == 0
    await server.close()


async def test_two_versions_share_a_pace_file_during_a_swap(start, tmp_path, answers):
    pace = PaceFile(tmp_path / "pace", [(v, 1, 10.0 * v, 0.05) for v in VERSIONS])
    triton = start(4, pace=pace.path)
    server = triton.client()
    await server.wait_ready([hosted(4)], READY_S)
    clients, stop = Clients(triton.launch.grpc_target, answers), asyncio.Event()
    load = asyncio.create_task(clients.run(2, stop))
    await server.swap(hosted(4), hosted(1))
    stop.set()
    await load
    assert (clients.failures, clients.wrong) == ([], 0)
    booked = {v: pace.read(v)["batches"] for v in VERSIONS}
    assert booked == {1: clients.versions.get(1, 0) + 1, 2: 0, 3: 0, 4: clients.versions[4] + 1}
    await server.close()


async def test_a_pace_file_that_is_missing_stops_the_start_with_its_reason(start, tmp_path):
    triton = start(1, pace=tmp_path / "absent")
    assert await asyncio.to_thread(triton.process.wait, 60) != 0
    assert "cannot be mapped" in triton.log.read_text()


async def test_a_slice_of_a_gpu_never_computes_on_the_cpu_unnoticed(start):
    triton = start(1, gpu="MIG-4f9f4a3a-41ff-5b5c-8d0a-6b2f3f7d1c55")
    assert await asyncio.to_thread(triton.process.wait, 60) != 0
    assert "this slice has a GPU, and onnxruntime" in triton.log.read_text()
    assert "Remedy: install onnxruntime-gpu" in triton.log.read_text()


@pytest.mark.gate
async def test_nothing_is_left_in_shared_memory_and_no_port_is_open_to_others(start):
    triton = start(1)
    server = triton.client()
    await server.wait_ready([hosted(1)], READY_S)
    log = triton.log.read_text()
    assert "0.0.0.0" not in log
    assert list(SHARED_MEMORY.glob(f"{triton.launch.shm_prefix}*"))
    triton.close()
    assert not list(SHARED_MEMORY.glob(f"{triton.launch.shm_prefix}*"))
    with pytest.raises(TritonUnready, match="did not become ready within"):
        await server.wait_ready([hosted(1)], 0.5)
    await server.close()
