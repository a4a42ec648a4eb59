"""Joules in Redis against the node's own counters and hidden split, over a load in which the agent is killed."""

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from power_agent.runtimes.simulated_node import NodeRuntime
from tests.integration.system.conftest import Serving
from tests.support.system import energy_samples, load, metered_until, slices, until
from trefoil.cli.system_client import SystemClient
from trefoil.core.accounting import active_j
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import SliceState

pytestmark = pytest.mark.integration

RATE_PER_S, DURATION_S = 58.0, 26.0
KILL_AFTER_S = 8.0
WATCH_S, MARKS_WITHIN_S = 3.0, 90.0
MOMENT_S = 0.01  # samples follow each other without a gap; a late one is followed by a short one
COUNTER_ERROR_MAX = 0.001
SLICE_ERROR_MAX = 0.05
REQUESTS_MIN = 100
SliceName = tuple[str, str, int]  # device, type, start; no slice is made again meanwhile
Read = tuple[float, float, dict[str, Any]]  # when the node was asked for its books, when it had answered, what it said


@dataclass(frozen=True)
class Mark:
    """The end of one energy sample of a device, with what the node's own books said at that moment."""

    at_s: float
    counter_j: float
    slices: dict[SliceName, tuple[float, int]]  # (active joules, items), hidden from the agent


async def marks(serving: Serving, client: SystemClient) -> dict[str, Mark]:
    """For each device a recent end of a sample, and the truth then: read again and again around it."""
    node = serving.system.node()
    reads: list[Read] = []
    give_up_s = time.monotonic() + MARKS_WITHIN_S
    try:
        while True:
            began_s = time.time()
            while time.time() < began_s + WATCH_S:
                asked_s, found = time.time(), node.truth()
                reads.append((asked_s, time.time(), found))
                await asyncio.sleep(0.005)
            samples = await metered_until(client, reads[-1][1])
            devices = [each["device"] for each in reads[0][2]["devices"]]
            found_marks = {device: mark(index, device, reads, samples) for index, device in enumerate(devices)}
            if None not in found_marks.values():
                return {device: found for device, found in found_marks.items() if found is not None}
            assert time.monotonic() < give_up_s, f"the books moved around each end of a sample: {found_marks}"
    finally:
        node.close()


def mark(index: int, device: str, reads: list[Read], samples: list[EnergySample]) -> Mark | None:
    """The last end of a sample around which the node's books, that move in ticks, said the same before and after."""
    answered_s, asked_s = [read[1] for read in reads], [read[0] for read in reads]
    for at_s in sorted((sample.ends_at_s for sample in samples if sample.device == device), reverse=True):
        before, after = bisect_right(answered_s, at_s) - 1, bisect_left(asked_s, at_s)
        if before >= 0 and after < len(reads):
            own, later = (reads[number][2]["devices"][index] for number in (before, after))
            if own["counter_j"] == later["counter_j"]:
                return Mark(at_s, own["counter_j"], true_slices(own))
    return None


def pids(serving: Serving) -> dict[str, int]:
    node = serving.system.node()
    try:
        return {p.tag: int(p.id) for p in NodeRuntime(node).list() if p.alive}
    finally:
        node.close()


def true_slices(device: dict[str, Any]) -> dict[SliceName, tuple[float, int]]:
    return {
        (device["device"], part["slice_type"], part["start"]): (
            part["active_j"],
            sum(version["items"] for version in part["versions"]),
        )
        for part in device["slices"]
    }


def energy_by_slice(samples: list[EnergySample]) -> dict[SliceName, float]:
    total: dict[SliceName, float] = defaultdict(float)
    for sample in samples:
        for part in sample.slices:
            total[sample.device, part.key.slice_type, part.key.start] += part.active_j
    return dict(total)


async def test_joules_add_up_and_belong_to_the_right_slice_though_the_agent_is_killed(serving: Serving):
    system = serving.system
    async with system.client() as client:
        slices_before, tritons, agent = await slices(client), pids(serving), system.service_pid("power_agent")
        (epoch,) = [node.epoch for node in await client.nodes()]
        before = await marks(serving, client)
        loading = asyncio.create_task(load(system.inference, RATE_PER_S, DURATION_S))
        try:
            await asyncio.sleep(KILL_AFTER_S)
            psutil.Process(agent).kill()

            async def next_agent() -> bool:
                return all(node.epoch > epoch for node in await client.nodes())

            await until(next_agent, 60.0, "no agent of a later epoch within")
            result = await loading
        finally:
            loading.cancel()
        await asyncio.sleep(0.5)  # the last batches are booked
        after = await marks(serving, client)
        samples = [
            sample
            for sample in await energy_samples(client)
            if before[sample.device].at_s - MOMENT_S < sample.starts_at_s
            and sample.ends_at_s < after[sample.device].at_s + MOMENT_S
        ]
        slices_after = await slices(client)

    summary = result.summary(slo_ms=100.0)
    print(f"agent killed: {summary.failed} of {summary.requests} requests failed")
    assert summary.failed == 0
    assert system.service_pid("power_agent") != agent
    assert pids(serving) == tritons, "the next agent adopts what runs"
    assert {key: status.generation for key, status in slices_after.items()} == {
        key: status.generation for key, status in slices_before.items()
    }
    assert {status.state for status in slices_after.values()} == {SliceState.READY}

    assert {sample.method for sample in samples} == {EnergyMethod.NVML_COUNTER}
    split_j = sum(active_j(sample) + sample.idle_j + sample.unallocated_j for sample in samples)
    moved_j = sum(after[device].counter_j - before[device].counter_j for device in before)
    print(f"active + idle + unallocated {split_j:.1f} J, counter {moved_j:.1f} J ({split_j / moved_j - 1:+.4%})")
    assert split_j == pytest.approx(moved_j, rel=COUNTER_ERROR_MAX)
    ours = energy_by_slice(samples)
    for device in before:
        check_slices(ours, before[device].slices, after[device].slices)
    assert len(ours) == len(slices_before)


def check_slices(
    ours: dict[SliceName, float],
    before: dict[SliceName, tuple[float, int]],
    after: dict[SliceName, tuple[float, int]],
) -> None:
    """Each slice that worked, against the hidden truth."""
    for name, (end_j, end_items) in after.items():
        start_j, start_items = before.get(name, (0.0, 0))
        true_j, items = end_j - start_j, end_items - start_items
        if items == 0:
            continue
        error = ours[name] / true_j - 1
        print(f"{name}: {items} items, attributed {ours[name]:.1f} J, truth {true_j:.1f} J ({error:+.2%})")
        assert items >= REQUESTS_MIN, "too few to compare"
        assert abs(error) <= SLICE_ERROR_MAX
