"""Whole GPUs, real Tritons: one has an energy counter (V100), one has only its power (P4). Watched over WatchEnergy."""

import asyncio
import os
import time
from collections.abc import Sequence
from unittest import mock

import pytest
import pytest_asyncio

from protos.power_agent.v1 import power_agent_pb2
from tests.support.agent_cluster import NODE, AgentCluster, Load
from tests.support.triton_process import hosted
from trefoil.core.accounting import active_j, check_conservation
from trefoil.core.common import Revision
from trefoil.core.energy import AttributionMethod, EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState, SliceKey
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed
from trefoil.runtime import codec

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

V100, P4 = f"{NODE}/gpu0", f"{NODE}/gpu1"
LOAD_S = 10.0
COUNTER_ERROR_MAX = {V100: 0.001, P4: 0.02}
SLICE_ERROR_MAX = 0.05
BOOT_S = 60.0
AT_ONCE_S = 0.05  # the books are of the moment that is noted with them


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    devices = '["Tesla V100-SXM2-32GB", "Tesla P4"]'
    one = AgentCluster(drain_timeout_s=12)
    try:
        with mock.patch.dict(os.environ, {"TREFOIL_NODE_DEVICES": devices, "TREFOIL_NODE_NOISE_RATIO": "0.01"}):
            await one.start()
        yield one
    finally:
        await one.close()


class Watcher:
    """Everything that WatchEnergy sends."""

    def __init__(self, cluster: AgentCluster) -> None:
        self.samples: list[EnergySample] = []
        self._call = cluster.stub.WatchEnergy(power_agent_pb2.WatchEnergyRequest(), timeout=120)
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async for answer in self._call:
            self.samples.append(codec.from_proto(answer.sample))

    async def until(self, at_s: float) -> None:
        """Wait for a sample of each device that began after that moment."""
        async with asyncio.timeout(60):
            while not all(any(s.starts_at_s >= at_s for s in self.samples if s.device == d) for d in (V100, P4)):
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def truth(cluster: AgentCluster) -> dict[str, tuple[float, float]]:
    """Counter and active joules of each device, by the node's own books."""
    return {d["device"]: (d["counter_j"], d["active_j"]) for d in cluster.client.truth()["devices"]}


async def moment(cluster: AgentCluster, watchers: Sequence[Watcher]) -> tuple[float, dict[str, tuple[float, float]]]:
    """Now and the books now, between two samples without any load, however late a busy machine makes samples."""
    await asyncio.sleep(0.5)  # what was in flight has been counted
    await watchers[0].until(time.time())
    while True:
        now_s, books = time.time(), truth(cluster)
        if time.time() - now_s < AT_ONCE_S:
            break
    await watchers[0].until(now_s)
    return now_s, books


async def test_joules_of_whole_gpus_with_and_without_a_counter_are_those_of_the_books(cluster):
    parts = [PlannedSlice(SliceKey(device, "whole", 0, 1), (hosted(2),), 2) for device in (V100, P4)]
    devices = tuple(PlannedDevice(part.key.device, DeviceState.AWAKE, (part,)) for part in parts)
    await cluster.apply(sealed(NodePlan(node=NODE, devices=devices), Revision(1, 1)))
    await cluster.ready(*(part.key for part in parts), timeout_s=BOOT_S)
    watchers = [Watcher(cluster) for _ in range(2)]
    before_s, before = await moment(cluster, watchers)
    targets = [status.grpc_target for status in (await cluster.slices()).values()]
    loads = [Load(target, clients=1, gap_s=gap_s) for target, gap_s in zip(targets, (0.01, 0.05), strict=True)]
    await asyncio.sleep(LOAD_S)
    for load in loads:
        await load.stop()
    after_s, after = await moment(cluster, watchers)
    for watcher in watchers:
        await watcher.until(after_s)
        await watcher.stop()

    for device, method in ((V100, EnergyMethod.NVML_COUNTER), (P4, EnergyMethod.POWER_INTEGRAL)):
        own = [s for s in watchers[0].samples if s.device == device]
        assert [s.seq for s in own] == list(range(own[0].seq, own[0].seq + len(own)))
        theirs = {s.seq for s in watchers[1].samples if s.device == device}
        assert theirs <= {s.seq for s in own} or theirs >= {s.seq for s in own}
        for sample in own:
            check_conservation(sample)
        inside = [s for s in own if before_s <= (s.starts_at_s + s.ends_at_s) / 2 < after_s]
        assert {s.method for s in inside} == {method}
        assert {s.attribution for s in inside} == {AttributionMethod.SOLE}
        true_j, true_active_j = (after[device][i] - before[device][i] for i in range(2))
        seconds = sum(s.ends_at_s - s.starts_at_s for s in inside)
        # Idle at both ends: the samples' length may differ from the span of the books by idle time only.
        idle_w = own[-1].counter_j / (own[-1].ends_at_s - own[-1].starts_at_s)
        split_j = sum(active_j(s) + s.idle_j + s.unallocated_j for s in inside) + idle_w * (
            after_s - before_s - seconds
        )
        found_j = sum(active_j(s) for s in inside)
        doubt = max(s.uncertainty_ratio for s in inside)
        print(
            f"{device} by {method.name}: {split_j:.1f} J of {true_j:.1f} J ({split_j / true_j - 1:+.2%}), active "
            f"{found_j:.1f} J of {true_active_j:.1f} J ({found_j / true_active_j - 1:+.2%}), stated doubt {doubt:.0%}"
        )
        assert split_j == pytest.approx(true_j, rel=COUNTER_ERROR_MAX[device] + 0.005)
        # What an integral of power gets wrong of the whole, it gets wrong of the active part: the rest is known.
        limit_j = SLICE_ERROR_MAX * true_active_j + COUNTER_ERROR_MAX[device] * true_j
        assert found_j == pytest.approx(true_active_j, abs=limit_j)
    assert all(not load.failed and load.answered > 30 for load in loads)
