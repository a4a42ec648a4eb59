"""The hardest rollout of one GPU, under load: one slice becomes seven, while the other GPU carries on."""

import asyncio
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.system.conftest import Serving
from tests.support.system import load, plan_in_force
from trefoil.cli.output import as_json
from trefoil.cli.run.scenario import Ports
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.plan import NodePlan, Plan, PlannedDevice, PlannedSlice, RouteTarget
from trefoil.runtime.state import State

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RATE_PER_S = 15.0  # less than half of what one whole GPU can serve
WALL_MAX_S = 90.0  # ten seconds on an idle machine
LOAD_S_MAX = 240.0
TOTAL = re.compile(r'trefoil_step_duration_seconds_(sum|count)\{[^}]*verb="(\w+)"[^}]*\} ([\d.e+-]+)')


def whole(gpu: int) -> PlannedSlice:
    """A GPU in one slice with the best variant."""
    return PlannedSlice(SliceKey(f"node0/gpu{gpu}", "7g.40gb", 0, 8), (Hosted("digits", "digits-l", 4, 0, 1, 1, 8),), 2)


def seventh(start: int) -> PlannedSlice:
    """A seventh of GPU 0 with the smallest variant."""
    return PlannedSlice(SliceKey("node0/gpu0", "1g.5gb", start, 1), (Hosted("digits", "digits-xs", 1, 0, 1, 1, 8),), 2)


def plan_of(base: Plan, slices: Sequence[PlannedSlice]) -> dict[str, Any]:
    """The plan in force with other slices, all of equal weight per GPU, as `trefoil pin` takes it."""
    devices = []
    for device in ("node0/gpu0", "node0/gpu1"):
        own = tuple(part for part in slices if part.key.device == device)
        devices.append(PlannedDevice(device, DeviceState.AWAKE, own))
    targets = []
    for device in devices:
        for part in device.slices:
            weight = 1 / len(devices) / len(device.slices)
            targets.append(RouteTarget(part.key, part.hosted[0].variant, 0, weight, part.credits))
    routes = tuple(replace(route, targets=tuple(targets)) for route in base.routes)
    plan = replace(base, nodes=(NodePlan(node="node0", devices=tuple(devices)),), routes=routes, degraded="a rehearsal")
    return {"plan": as_json(plan)}


def step_seconds(url: str) -> dict[str, tuple[float, float]]:
    """Seconds and number of the agent's steps so far, by verb."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, dict[str, float]] = {}
    for kind, verb, value in TOTAL.findall(text):
        found.setdefault(verb, {})[kind] = float(value)
    return {verb: (row["sum"], row["count"]) for verb, row in found.items()}


async def applied(state: State, base: Plan, number_of_slices: int) -> None:
    """Until the plan in force routes to that many slices and to none that drains."""
    while True:
        (route,) = (await state.get(state.keys.plan(), Plan) or base).routes
        if len(route.targets) == number_of_slices and not any(target.draining for target in route.targets):
            return
        await asyncio.sleep(0.1)


@pytest.mark.gate
async def test_one_slice_becomes_seven_under_load_without_a_failed_request(serving: Serving):
    system = serving.system
    async with system.client() as client:
        base = await plan_in_force(client)
        await asyncio.to_thread(system.pin, plan_of(base, [whole(0), whole(1)]))
        await asyncio.to_thread(system.wait_for_rollout)
        metrics = f"http://127.0.0.1:{Ports().shifted(system.port_offset).power_agent_metrics}/metrics"
        before = step_seconds(metrics)
        stop = asyncio.Event()
        loading = asyncio.create_task(load(system.inference, RATE_PER_S, LOAD_S_MAX, stop))
        await asyncio.sleep(2)
        began_s = time.monotonic()
        await asyncio.to_thread(system.pin, plan_of(base, [*(seventh(start) for start in range(7)), whole(1)]))
        async with asyncio.timeout(WALL_MAX_S + 5):
            await applied(client.state, base, 8)
        await asyncio.to_thread(system.wait_for_rollout)
        took_s = time.monotonic() - began_s
        stop.set()
        summary = (await loading).summary(slo_ms=100.0)
    requests, answered = summary.requests, summary.answered
    after = step_seconds(metrics)
    for verb, (seconds, count) in sorted(after.items()):
        was_s, was = before.get(verb, (0.0, 0.0))
        if count > was:
            print(f"{verb}: {count - was:.0f} steps, {1e3 * (seconds - was_s) / (count - was):.0f} ms each")
    print(f"7g -> 7 x 1g in {took_s:.1f} s; {requests} requests, {requests - answered} failed")
    assert answered == requests >= 0.8 * RATE_PER_S * took_s
    assert took_s <= WALL_MAX_S
