"""Names and numbers from outside: names of code in plans, stray values in streams, absurd numbers in requests.

Each attack is well-formed. A module that is named writes a file when it is imported and then ends its process; no
service may import it. What is refused has to be refused by field, value and remedy, and nothing of it may be in force.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

from benchmarks.chaos_redis import connect
from benchmarks.chaos_rows import RATE_PER_S, Trouble
from benchmarks.echo_family import FAMILY
from benchmarks.echo_system import Arrangement, EchoSystem
from protos.controller.v1 import controller_pb2
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.cli.system_client import make_channel
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.energy import EnergySample
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.core.latency import build_histogram
from trefoil.core.objective import Objective
from trefoil.core.plan import NodePlan, Plan
from trefoil.installation import CHECKOUT
from trefoil.runtime import codec, rpc

LASTS_S: Final = 8.0
PAUSE_S: Final = 0.3
SETTLED_S: Final = 5.0
"""After a stray value: seconds in which the live writer's own values are planned by again."""
RATE_SHARE: Final = (0.2, 1.5)
"""Least and most that may be seen of the rate: a system that has just begun to serve sees a part of its window."""
MODULE: Final = "out.bench.redteam_evil"  # importable by services that `trefoil up` starts in a checkout
EVIL: Final = CHECKOUT / "out" / "bench" / "redteam_evil.py"
MARK: Final = EVIL.with_suffix(".imported")
NAMES: Final = (f"{MODULE}:Class", "nonsense", "nowhere_at_all:X", "sys:exit", ":", "os:system")

Tell = Callable[[str], None]
Play = Callable[[EchoSystem, Tell], Awaitable[None]]


def troubles() -> tuple[Trouble, ...]:
    """Attacks on the running system."""
    return (
        Trouble("pins that name code, or nonsense, as router, queue and governor", playing(pins), LASTS_S),
        Trouble("plans in Redis that name code as router, queue and governor", playing(stored_plans), LASTS_S),
        Trouble("stray load windows of a live worker: seq, time, counts, histograms", playing(windows), LASTS_S),
        Trouble("stray energy samples: 1e9 J, seq, time, devices, sums", playing(samples), LASTS_S),
        Trouble("absurd numbers in objectives and in the watt cap", playing(objectives), LASTS_S),
        Trouble("absurd numbers in every other request of controller and agent", playing(requests), LASTS_S),
    )


def playing(play: Play) -> Callable[[EchoSystem], AbstractAsyncContextManager[None]]:
    """Trouble that plays attacks and then says what was broken by them."""

    @asynccontextmanager
    async def make(system: EchoSystem) -> AsyncIterator[None]:
        broken: list[str] = []
        MARK.unlink(missing_ok=True)
        EVIL.parent.mkdir(parents=True, exist_ok=True)
        EVIL.write_text(f"open({str(MARK)!r}, 'w').close()\nraise SystemExit(7)\n")
        try:
            await play(system, broken.append)
            yield
        finally:
            EVIL.unlink()
        if MARK.exists():
            broken.append("the module was imported")
        assert not broken, "; ".join(broken[:4])

    return make


async def refused(what: str, ask: Awaitable[Any], tell: Tell) -> None:
    """Ask for what has to be refused with a remedy."""
    try:
        await ask
    except InvalidInput as error:
        if "Remedy: " not in str(error):
            tell(f"{what}: no remedy in {error}")
    except TrefoilError as error:
        tell(f"{what}: {type(error).__name__} {error}")
    else:
        tell(f"{what}: taken")


def naming(plan: Plan, name: str, column: str) -> Plan:
    """The plan, with another name in a column."""
    if column == "governor":
        nodes = tuple(
            replace(node, devices=tuple(replace(device, governor=name) for device in node.devices))
            for node in plan.nodes
        )
        return replace(plan, nodes=nodes)
    return replace(plan, routes=tuple(replace(route, **{column: name}) for route in plan.routes))


async def in_force(system: EchoSystem) -> Plan:
    """The plan that the controller has in force."""
    plan: Plan = codec.from_proto((await system.client.plan()).plan)
    return plan


async def pins(system: EchoSystem, tell: Tell) -> None:
    """Pins whose parts are not there."""
    plan = Arrangement().plan(await in_force(system))
    before = (await in_force(system)).revision
    for column in ("router", "queue", "governor"):
        for name in NAMES:
            request = controller_pb2.PinRequest(plan=codec.to_proto(naming(plan, name, column)))
            await refused(f"{column} {name!r}", system.client.call("Pin", request), tell)
    if (after := (await in_force(system)).revision) != before:
        tell(f"plan {after} is in force, {before} was")


async def stored_plans(system: EchoSystem, tell: Tell) -> None:
    """Plans of the leader's own epoch, the next number, put into Redis by somebody else."""
    state, keys, redis = system.client.state, system.client.state.keys, connect(system)
    for column in ("router", "queue", "governor"):
        for name in NAMES[:3]:
            plan = await state.get(keys.plan(), Plan)
            nodes = await state.scan(keys.plan_node_prefix(), NodePlan)
            if plan is None:
                tell("no plan in Redis")
                continue
            next_ = replace(plan.revision, number=plan.revision.number + 1)
            stray = naming(replace(plan, revision=next_), name, column)
            await redis.set(keys.plan(), codec.encode(stray))
            for key, node in nodes.items():
                (one,) = naming(Plan(nodes=(replace(node, revision=next_),)), name, column).nodes
                await redis.set(key, codec.encode(one))
            await redis.publish(keys.changed(), keys.plan())
            await system.clock.sleep(PAUSE_S)


def stray_windows(true: LoadWindow, now_s: float) -> Mapping[str, LoadWindow]:
    """Windows that a worker has not written, made of one that it has."""
    key = true.cells[0].key if true.cells else LoadKey(FAMILY)
    cell = LoadCell(key, arrived=7, answered=7, within_slo=7, latency=build_histogram([9.0] * 7))
    next_ = replace(true, seq=true.seq + 1, starts_at_s=true.ends_at_s, ends_at_s=true.ends_at_s + 0.5, cells=(cell,))
    late = {"starts_at_s": now_s + 3600.0, "ends_at_s": now_s + 3600.5}
    return {
        "seq 2^62": replace(next_, seq=2**62),
        "seq 2^63": replace(next_, seq=2**63),
        "seq 2^30": replace(next_, seq=2**30),
        "seq + 50": replace(next_, seq=true.seq + 50),
        "seq 0": replace(next_, seq=0),
        "the future": replace(next_, seq=true.seq + 9, **late),
        "until the future": replace(next_, ends_at_s=now_s + 3600.0),
        "the past": replace(next_, seq=true.seq + 9, starts_at_s=1.0, ends_at_s=2.0),
        "backwards": replace(next_, ends_at_s=true.starts_at_s - 9.0),
        "arrivals": replace(next_, cells=(replace(cell, arrived=2**63),)),
        "answers": replace(next_, cells=(replace(cell, answered=2**63, within_slo=2**63),)),
        "a histogram": replace(next_, cells=(replace(cell, answered=1, within_slo=1),)),
        "joules": replace(next_, cells=(replace(cell, receipt_j=1e300, receipts=1),)),
        "tokens": replace(next_, cells=(replace(cell, tokens_out=2**62),)),
    }


async def windows(system: EchoSystem, tell: Tell) -> None:
    """Stray windows in each live worker's stream."""
    state, redis = system.client.state, connect(system)
    for key in await state.names(state.keys.load_prefix()):
        newest = await state.tail(key, LoadWindow)
        for name in stray_windows(newest[-1][1], 0.0):
            _, true = (await state.tail(key, LoadWindow, 1))[-1]
            await redis.xadd(key, {"d": codec.encode(stray_windows(true, system.clock.now_s())[name])})
            await system.clock.sleep(PAUSE_S / 2)
    await system.clock.sleep(SETTLED_S)
    served = (await system.client.served()).served
    rates = [one.rate_per_s for one in served if one.family == FAMILY and one.HasField("rate_per_s")]
    if not rates or not RATE_SHARE[0] <= rates[0] / RATE_PER_S <= RATE_SHARE[1]:
        tell(f"{rates} requests/s are seen of {RATE_PER_S:g}")
    if not any("load:" in line for line in (await system.client.plan()).set_aside):
        tell("nothing is said of what was set aside")


def stray_samples(true: EnergySample, now_s: float) -> Mapping[str, EnergySample]:
    """Samples that an agent has not written, made of one that it has."""
    end_s = true.ends_at_s
    idle = replace(true, seq=true.seq + 1, starts_at_s=end_s, ends_at_s=end_s + 1.0, slices=(), idle_j=50.0)
    idle = replace(idle, counter_j=50.0, unallocated_j=0.0)
    return {
        "1e9 J": replace(idle, idle_j=1e9, counter_j=1e9),
        "1e5 J": replace(idle, idle_j=1e5, counter_j=1e5),
        "a day's joules": replace(idle, starts_at_s=now_s - 86_000.0, idle_j=5e6, counter_j=5e6),
        "seq 2^62": replace(idle, seq=2**62),
        "seq + 2^25": replace(idle, seq=true.seq + 2**25),
        "the future": replace(idle, starts_at_s=now_s + 900.0, ends_at_s=now_s + 901.0),
        "until the future": replace(idle, ends_at_s=now_s + 900.0),
        "the past": replace(idle, starts_at_s=now_s - 7200.0, ends_at_s=now_s - 7199.0),
        "negative": replace(idle, idle_j=-50.0, counter_j=-50.0),
        "no sum": replace(idle, counter_j=99.0),
        "another device": replace(idle, device=f"{true.node}/gpu77"),
        "another node's": replace(idle, device="node9/gpu0"),
    }


async def samples(system: EchoSystem, tell: Tell) -> None:
    """Stray samples in the node's stream."""
    state, redis = system.client.state, connect(system)
    (node,) = await system.client.nodes()
    key = state.keys.energy(node.node)
    first = (await state.tail(key, EnergySample))[-1][1]
    for name in stray_samples(first, 0.0):
        _, true = (await state.tail(key, EnergySample))[-1]
        await redis.xadd(key, {"d": codec.encode(stray_samples(true, system.clock.now_s())[name])})
        await system.clock.sleep(PAUSE_S)
    await system.clock.sleep(SETTLED_S)
    if not any("energy:" in line for line in (await system.client.plan()).set_aside):
        tell("nothing is said of what was set aside")


ABSURD: Final[Mapping[str, tuple[float, ...]]] = {
    "pue": (1e300, 1e-300, -1.0, math.nan, math.inf),
    "window_s": (1e-300, 1e300, -1.0, math.nan),
    "slo_quantile": (1e-12, 1 - 1e-12, 1e300, -1.0),
    "slo_ms": (1e300, 1e-300, -1.0, math.inf),
    "min_accuracy": (1e300, -1.0, math.nan),
    "hard_min_accuracy": (1e300, -1.0),
    "lambda_weight": (1e300, -1.0),
    "replicas_min": (2**32 - 1, 2**31),
    "spread_min": (2**32 - 1, 2**31),
    "base_intensity_g_per_kwh": (1e300, -1.0),
    "base_j_per_request": (1e300, 1e-300, -1.0),
}


async def objectives(system: EchoSystem, tell: Tell) -> None:
    """Objectives with one absurd number each, alone and beside a good one; then the watt cap."""
    call = system.client.call
    before = await system.client.objectives()
    wanted: Objective = await system.client.objective(FAMILY)
    for name, values in ABSURD.items():
        for value in values:
            message = codec.to_proto(replace(wanted, **{name: value}))
            request = controller_pb2.SetObjectivesRequest(objectives=[{"objective": message}])
            await refused(f"{name} = {value:g}", call("SetObjectives", request), tell)
    for value in (1e300, -1e300, 1e-300, math.nan):
        message = codec.to_proto(wanted)
        message.params["accuracy_margin"] = value
        request = controller_pb2.SetObjectivesRequest(objectives=[{"objective": message}])
        await refused(f"params = {value:g}", call("SetObjectives", request), tell)
    for value in (1e300, 1e-300, -1.0, math.nan, math.inf):
        request = controller_pb2.SetObjectivesRequest(max_watts=value)
        await refused(f"max_watts = {value:g}", call("SetObjectives", request), tell)
    if (after := await system.client.objectives()) != before:
        tell(f"in force: {after}")


async def requests(system: EchoSystem, tell: Tell) -> None:
    """Loans, leases, drains and pins with absurd numbers."""
    plan = codec.to_proto(Arrangement().plan(await in_force(system)))
    (node,) = await system.client.nodes()
    device = node.devices[0].device
    for value in (1e300, 1e-300, -1.0, math.nan, math.inf):
        lend = controller_pb2.LendDeviceRequest(holder="redteam", lease_s=value)
        lend.device.device = device
        await refused(f"lease_s = {value:g}", system.client.call("LendDevice", lend), tell)
    pins_: dict[str, Callable[[Any], None]] = {
        "credits": lambda one: setattr(one.routes[0].targets[0], "credits", 2**32 - 1),
        "weight": lambda one: setattr(one.routes[0].targets[0], "weight", 1e300),
        "clock": lambda one: setattr(one.nodes[0].devices[0], "clock_max_mhz", 2**32 - 1),
        "power": lambda one: setattr(one.nodes[0].devices[0], "power_limit_w", 1e300),
        "a small power": lambda one: setattr(one.nodes[0].devices[0], "power_limit_w", 1.0),
        "batch": lambda one: setattr(one.nodes[0].devices[0].slices[0].hosted[0], "max_batch", 2**32 - 1),
        "instances": lambda one: setattr(one.nodes[0].devices[0].slices[0].hosted[0], "instances", 2**32 - 1),
        "start": lambda one: setattr(one.nodes[0].devices[0].slices[0].key, "start", 2**31),
        "class": lambda one: one.routes[0].class_slo_ms.update({"gold": 1e300}),
        "a class below 0": lambda one: one.routes[0].class_slo_ms.update({"gold": -1.0}),
        "params": lambda one: one.routes[0].params.update({"quantile": 1e300}),
    }
    for name, spoil in pins_.items():
        request = controller_pb2.PinRequest(plan=plan)
        spoil(request.plan)
        await refused(f"pin with {name}", system.client.call("Pin", request), tell)
    await _agent_requests(system, device, tell)


async def _agent_requests(system: EchoSystem, device: str, tell: Tell) -> None:
    channel = make_channel(system.launch.addresses["power_agent"], token=system.client.token)
    (node,) = await system.client.nodes()
    try:
        stub = power_agent_pb2_grpc.PowerAgentStub(channel)
        ask = partial(rpc.call, timeout_s=5.0)
        for value in (1e300, 1e-300, -1.0, math.nan):
            lease = power_agent_pb2.SetClocksRequest(ttl_s=value)
            lease.lease.device, lease.lease.holder, lease.lease.max_mhz = device, "redteam", 1410
            await refused(f"ttl_s = {value:g}", ask(stub.SetClocks, lease), tell)
            drain = power_agent_pb2.DrainRequest(device=device, epoch=node.highest_epoch_seen, patience_s=value)
            await refused(f"patience_s = {value:g}", ask(stub.Drain, drain), tell)
    finally:
        await channel.close()
