"""A slower clock makes a real Triton on a simulated GPU slower, and the GPU draw less, while it continues serving."""

import asyncio
import time

import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from protos.power_agent.v1 import power_agent_pb2
from tests.support.agent_cluster import NODE, AgentCluster, key, node_plan, planned
from tests.support.triton_process import heldout
from trefoil.core.fleet import ClockLease
from trefoil.runtime import codec, rpc

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GPU = f"{NODE}/gpu0"
SLICE = key("4g.20gb")
REQUESTS = 40
BOOT_S = 40.0


def gpu(cluster: AgentCluster) -> int:
    handle: int = cluster.client.nvml("nvmlDeviceGetHandleByIndex_v2", [0])[1][0]
    return handle


def clock_mhz(cluster: AgentCluster) -> int:
    mhz: int = cluster.client.nvml("nvmlDeviceGetClockInfo", [gpu(cluster), 1])[1][0]
    return mhz


async def settled(cluster: AgentCluster, mhz: int) -> None:
    """The agent has set it, the clock has followed, and the pace file will at the next tick."""
    async with asyncio.timeout(60):
        while clock_mhz(cluster) != mhz:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)


async def latency_and_power(cluster: AgentCluster, stub) -> tuple[float, float, int]:
    """Latency [ms] of one client (its best tenth), mean power [W] of the GPU meanwhile, and its clock [MHz] after."""
    request = service_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
    request.raw_input_contents.append(heldout()[0][0].astype(np.uint8).tobytes())
    handle = gpu(cluster)
    taken_ms, watts = [], []
    for _ in range(REQUESTS):
        started_s = time.monotonic()
        await stub.ModelInfer(request, timeout=10)
        taken_ms.append((time.monotonic() - started_s) * 1e3)
        watts.append(cluster.client.nvml("nvmlDeviceGetPowerUsage", [handle])[1][0] / 1e3)
    # A busy machine wakes sleepers late, and never early.
    return float(np.quantile(taken_ms, 0.1)), float(np.mean(watts[5:])), clock_mhz(cluster)


async def test_a_slower_clock_slows_a_triton_and_saves_watts():
    async with AgentCluster() as cluster:
        wanted = node_plan(1, planned("4g.20gb", 0, 4))
        await cluster.apply(wanted)
        await cluster.settled(wanted, BOOT_S)
        channel = rpc.channel((await cluster.slices())[SLICE].grpc_target)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        free_ms, free_w, free_mhz = await latency_and_power(cluster, stub)
        asked = codec.to_proto(ClockLease(GPU, 0, 705, "test", 1))
        await cluster.stub.SetClocks(power_agent_pb2.SetClocksRequest(lease=asked, ttl_s=60.0), timeout=5)
        await settled(cluster, 705)
        slow_ms, slow_w, slow_mhz = await latency_and_power(cluster, stub)
        release = power_agent_pb2.ReleaseClocksRequest(device=GPU, holder="test", epoch=1)
        await cluster.stub.ReleaseClocks(release, timeout=5)
        await settled(cluster, 1410)  # at most one change a second
        again_ms, again_w, again_mhz = await latency_and_power(cluster, stub)
        await channel.close()
        print(f"\n{free_mhz} MHz: {free_ms:.1f} ms, {free_w:.0f} W; {slow_mhz} MHz: {slow_ms:.1f} ms, {slow_w:.0f} W; "
              f"{again_mhz} MHz: {again_ms:.1f} ms, {again_w:.0f} W")  # fmt: skip
        assert (free_mhz, slow_mhz, again_mhz) == (1410, 705, 1410)
        assert slow_ms > 1.5 * free_ms
        assert slow_w < free_w - 15
        assert again_ms < 1.3 * free_ms
        assert again_w > slow_w + 15
        assert (await cluster.node()).devices[0].drift == ()
