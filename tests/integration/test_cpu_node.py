"""A node without any GPU and without a simulated one: real Tritons on slices of this machine's CPUs.

The agent runs them as processes of the host (runtime `process`); nothing pads what they answer.
"""

import asyncio
import hashlib
import itertools
import json
import os
import signal
import time
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.agent_cluster import NODE, AgentCluster, Load, until
from tests.support.ports import free_block
from tests.support.triton_process import expected, heldout, hosted
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState, SliceKey, SliceState
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed
from trefoil.runtime import proc

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CPU = f"{NODE}/cpu"
FIRST, SECOND = SliceKey(CPU, "cpu:1", 0, 1), SliceKey(CPU, "cpu:1", 1, 1)
HALF, FIFTH = SliceKey(CPU, "quota:0.5", 0, 5), SliceKey(CPU, "quota:0.2", 5, 2)
BOOT_S = 60.0
numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    base = free_block(300)  # CPU slices come after the ports of 16 GPUs
    one = AgentCluster(
        node_socket=None,
        cpu="serve",
        triton_port_base=base,
        quiet_probe_s=3,
        drain_timeout_s=12,
        ready_timeout_s=BOOT_S,
    )
    try:
        await one.start()
        yield one
    finally:
        await run(one)  # an empty plan: Tritons outlive their agent
        await one.close()
    name = hashlib.sha256(os.fsencode(one.folder / "agent")).hexdigest()[
        :8
    ]  # other systems of this machine have theirs
    assert not list(Path("/sys/fs/cgroup").glob(f"*/trefoil-{name}"))
    assert not regions(one)


def plan(*parts: tuple[SliceKey, int]) -> NodePlan:
    slices = tuple(PlannedSlice(key, (hosted(version),), 2) for key, version in parts)
    device = PlannedDevice(CPU, DeviceState.AWAKE if slices else DeviceState.ASLEEP, slices)
    return sealed(NodePlan(node=NODE, devices=(device,)), Revision(1, next(numbers)))


async def run(cluster: AgentCluster, *parts: tuple[SliceKey, int]) -> NodePlan:
    wanted = plan(*parts)
    await cluster.acknowledge(Revision(9))  # a dispatcher that has nothing in flight
    await cluster.apply(wanted)
    await cluster.settled(wanted, BOOT_S)
    await cluster.ready(*(key for key, _ in parts))
    return wanted


def processes(cluster: AgentCluster, part: SliceKey) -> list[psutil.Process]:
    """Triton of a slice and its stubs, Triton first."""
    (record,) = (cluster.folder / "agent" / "runtime").glob(f"{part.name}.g*.json")
    leader = psutil.Process(json.loads(record.read_text())["pid"])
    return [leader, *leader.children(recursive=True)]


def any_left(parts: list[psutil.Process]) -> bool:
    """Whether one of them runs; one that has ended may wait for this machine's init to note it."""
    found = [proc.read_stat(part.pid) for part in parts if part.is_running()]
    return any(stat is not None and stat.state not in proc.ENDED for stat in found)


def regions(cluster: AgentCluster) -> list[str]:
    """What Tritons of this cluster left in shared memory; their ports are in the names. Simulated GPUs of other
    systems may have the same."""
    base = cluster._settings["triton_port_base"]
    ports = {str(port) for port in range(base, base + 500)}
    return [name for name in os.listdir("/dev/shm") if ports & set(name.split("-")) and "-gpu" not in name]


async def infer(target: str, version: int, images: np.ndarray) -> np.ndarray:
    request = service_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=images.shape)
    request.raw_input_contents.append(images.tobytes())
    async with grpc.aio.insecure_channel(target) as channel:
        reply = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=10)
    assert reply.model_version == str(version)
    return np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(-1, 10)


async def used_cores(parts: list[psutil.Process], seconds: float) -> float:
    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in parts)

    before, started_s = used(), time.monotonic()
    await asyncio.sleep(seconds)
    return (used() - before) / (time.monotonic() - started_s)


@pytest.mark.gate
async def test_pinned_cores_serve_right_answers_and_neither_triton_nor_stubs_leave_them(cluster, tmp_path):
    status = await cluster.node()
    assert not status.simulated
    assert "process" in " ".join(status.capabilities) or "triton" in status.capabilities
    assert [(device.device, device.type.name) for device in status.devices] == [(CPU, f"cpu:{os.cpu_count()}")]
    await run(cluster, (FIRST, 2), (SECOND, 4))
    found = await cluster.slices()
    images = heldout()[0].astype(np.uint8)[:8]
    for key, version in ((FIRST, 2), (SECOND, 4)):
        assert found[key].mig_uuid == ""
        answers = await infer(found[key].grpc_target, version, images)
        np.testing.assert_allclose(answers, expected(tmp_path)[version][:8], atol=1e-5)
        own = processes(cluster, key)
        assert len(own) >= 2, "a Triton and its stub"
        assert [process.cpu_affinity() for process in own] == [[key.start]] * len(own)
        environment = own[0].environ()
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert "TREFOIL_PACE_FILE" not in environment
    again = await cluster.apply(plan((FIRST, 2), (SECOND, 4)))
    assert list(again.steps) == []


async def test_a_quota_bounds_a_slice_under_load(cluster):
    await run(cluster, (HALF, 4), (FIFTH, 1))
    load = Load((await cluster.slices())[HALF].grpc_target, clients=4)
    try:
        await until(lambda: load.answered > 20, 60)
        used = await used_cores(processes(cluster, HALF), 3)
        print(f"quota 0.5 under closed load of 4 clients: {used:.2f} cores, {load.answered} answers")
        assert 0.05 < used < 0.6  # less where others want these cores too
    finally:
        await load.stop()
    assert load.failed == []


async def test_mixed_cuts_of_one_device_are_refused(cluster):
    with pytest.raises(PlanError):
        await cluster.apply(plan((HALF, 1), (SECOND, 1)))
    with pytest.raises(PlanError):
        await cluster.apply(plan((SliceKey(CPU, "cpu:1", 900, 1), 1)))


async def test_a_killed_agent_finds_its_tritons_serving_and_they_never_stop(cluster):
    await run(cluster, (FIRST, 1), (SECOND, 2))
    pids = {key: processes(cluster, key)[0].pid for key in (FIRST, SECOND)}
    before = await cluster.slices()
    load = Load(before[FIRST].grpc_target, clients=1, gap_s=0.01)
    try:
        await until(lambda: load.answered > 3, 60)
        cluster.kill_agent()
        answered = load.answered
        await until(lambda: load.answered > answered + 20, 60)  # nobody governs, and it serves
        await cluster.start_agent()
        await cluster.ready(FIRST, SECOND)
    finally:
        await load.stop()
    assert load.failed == []
    after = await cluster.slices()
    assert {key: processes(cluster, key)[0].pid for key in pids} == pids
    assert {key: part.generation for key, part in after.items()} == {
        key: part.generation for key, part in before.items()
    }


@pytest.mark.parametrize("what", ["triton", "adopted triton"])
async def test_a_killed_triton_comes_back_on_its_cores_and_its_neighbour_does_not_notice(cluster, what):
    await run(cluster, (FIRST, 1), (SECOND, 2))
    if what == "adopted triton":  # nobody's child: its end is seen, not told
        cluster.kill_agent()
        await cluster.start_agent()
        await cluster.ready(FIRST, SECOND)
    neighbour = Load((await cluster.slices())[SECOND].grpc_target, clients=1, gap_s=0.01)
    own = processes(cluster, FIRST)
    started_s = time.monotonic()
    own[0].kill()
    try:

        async def failed() -> bool:
            return (await cluster.slices())[FIRST].state != SliceState.READY

        await until(failed, 60)
        await cluster.ready(FIRST, SECOND, timeout_s=BOOT_S)
        print(f"killed {what} READY again after {time.monotonic() - started_s:.1f} s")
    finally:
        await neighbour.stop()
    assert neighbour.failed == []
    fresh = processes(cluster, FIRST)
    assert fresh[0].pid != own[0].pid
    assert not any_left(own)
    assert fresh[0].cpu_affinity() == [0]


async def test_from_pinned_cores_to_quotas_and_away_leaves_nothing(cluster):
    await run(cluster, (FIRST, 1), (SECOND, 2))
    pinned = processes(cluster, FIRST) + processes(cluster, SECOND)
    await run(cluster, (HALF, 1))
    assert not any_left(pinned)
    quota = processes(cluster, HALF)
    await run(cluster)
    assert not any_left(quota)
    assert list((cluster.folder / "agent" / "runtime").glob("*.json")) == []
    assert not regions(cluster)


async def test_variants_are_swapped_in_place_without_a_failure(cluster):
    await run(cluster, (HALF, 1))
    pid = processes(cluster, HALF)[0].pid
    load = Load((await cluster.slices())[HALF].grpc_target, clients=1, gap_s=0.02)
    try:
        await until(lambda: load.answered > 3, 60)
        await run(cluster, (HALF, 3))
        await until(lambda: "3" in load.versions, 60)
    finally:
        await load.stop()
    assert load.failed == []
    assert processes(cluster, HALF)[0].pid == pid


async def test_an_agent_that_is_told_to_end_leaves_them_serving(cluster):
    await run(cluster, (FIRST, 1))
    own = processes(cluster, FIRST)
    assert cluster.agent is not None
    cluster.agent.send_signal(signal.SIGTERM)
    await until(lambda: cluster.agent is not None and cluster.agent.poll() is not None, 60)
    assert cluster.agent.returncode == 0
    assert all(process.is_running() for process in own)
    await cluster.start_agent()
    await cluster.ready(FIRST)
    assert processes(cluster, FIRST)[0].pid == own[0].pid
