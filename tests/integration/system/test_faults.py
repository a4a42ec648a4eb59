"""Processes are killed under load: what fails is what was in flight there, and nothing else notices."""

import asyncio
import time
from dataclasses import dataclass, field

import psutil
import pytest

from power_agent.runtimes.simulated_node import NodeRuntime
from tests.integration.system.conftest import Serving
from tests.support.system import load, plan_in_force, slices, until
from trefoil.cli.load.result import OK, LoadResult
from trefoil.cli.system_client import SystemClient
from trefoil.core.fleet import SliceKey, SliceState, SliceStatus

pytestmark = pytest.mark.integration

RATE_PER_S = 36.0  # about half of what the plan can take: one slice less still suffices
BEFORE_S, AFTER_S = 3.0, 2.0
NOTICED_WITHIN_S, BACK_WITHIN_S = 6.0, 15.0


@dataclass
class Watched:
    """What a slice was seen to do since it was hurt."""

    states: list[SliceState] = field(default_factory=list)
    back_s: float = 0.0


async def back_again(system: SystemClient, key: SliceKey, hurt_s: float) -> Watched:
    """Follow a slice until it has left READY and come back: then it is READY since later, whatever was seen of it."""
    seen = Watched()

    async def healed() -> bool:
        status = (await slices(system)).get(key)
        if status is None or status.since_s <= hurt_s:
            return False
        if status.state not in seen.states[-1:]:
            seen.states.append(status.state)
        seen.back_s = status.since_s - hurt_s
        return status.state == SliceState.READY

    await until(healed, BACK_WITHIN_S + 5.0, f"{key.name} saw {seen.states} and was not READY again within")
    return seen


def triton_of(serving: Serving, key: SliceKey) -> psutil.Process:
    """The Triton process of a slice, as the node lists it."""
    node = serving.system.node()
    try:
        (found,) = [p for p in NodeRuntime(node).list() if p.tag.startswith(f"{key.name}.g") and p.alive]
    finally:
        node.close()
    return psutil.Process(int(found.id))


def victim(status: dict[SliceKey, SliceStatus], slice_type: str) -> SliceKey:
    return min(key for key in status if key.slice_type == slice_type)


def failures(result: LoadResult, hurt_s: float) -> list[tuple[float, float, str]]:
    """When each failed request was due and when it ended, in seconds since the process was hurt, and its code."""
    found = []
    for record in (record for record in result.records if record.code != OK):
        due_s = result.started_at_s + record.intended_s - hurt_s
        found.append((round(due_s, 2), round(due_s + record.latency_ms / 1e3, 2), record.code))
    return found


@pytest.mark.parametrize(("what", "slice_type"), [("triton", "2g.10gb"), ("stub", "1g.5gb")])
async def test_a_killed_process_costs_what_was_in_flight_on_it(serving: Serving, what: str, slice_type: str):
    async with serving.system.client() as system:
        before = await slices(system)
        assert {part.state for part in before.values()} == {SliceState.READY}
        key = victim(before, slice_type)
        (credits,) = [t.credits for r in (await plan_in_force(system)).routes for t in r.targets if t.slice == key]
        process = triton_of(serving, key)
        enough = asyncio.Event()
        duration_s = BEFORE_S + BACK_WITHIN_S + AFTER_S
        loading = asyncio.create_task(load(serving.system.inference, RATE_PER_S, duration_s, stop=enough))
        try:
            await asyncio.sleep(BEFORE_S)
            hurt_s = time.time()
            if what == "triton":
                process.kill()
            else:
                for stub in [child for child in process.children() if "stub" in child.name()]:
                    stub.kill()
            seen = await back_again(system, key, hurt_s)
            await asyncio.sleep(AFTER_S)
            enough.set()
            result = await loading
        finally:
            loading.cancel()
        after = await slices(system)
    failed = failures(result, hurt_s)
    print(f"{what} of {key.name}: {len(failed)} of {len(result.records)} requests failed {failed}, credits {credits}, "
          f"READY again after {seen.back_s:.1f} s through {[state.name for state in seen.states]}")  # fmt: skip
    assert len(failed) <= credits
    assert all(due_s <= NOTICED_WITHIN_S and ended_s >= 0 for due_s, ended_s, _ in failed)
    assert seen.back_s <= BACK_WITHIN_S
    assert (triton_of(serving, key).pid == process.pid) == (what == "stub"), "a dead stub is healed in place"
    others = before.keys() - {key}
    assert {k: after[k].since_s for k in others} == {k: before[k].since_s for k in others}, "neighbours never stopped"
