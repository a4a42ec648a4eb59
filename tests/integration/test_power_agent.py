"""The agent on a simulated node with real Redis and Tritons: plans, trouble, restarts, and where the joules went."""

import asyncio
import itertools
import json
import os
import signal
import time
import urllib.request
from collections import Counter

import psutil
import pytest
import pytest_asyncio

from power_agent.devices import nvml_shim
from power_agent.devices.inventory import Inventory
from protos.power_agent.v1 import power_agent_pb2
from tests.support.agent_cluster import NODE, AgentCluster, Load, key, node_plan, planned, until
from tests.support.awake import Awake
from tests.support.simulated_driver import create_slice, destroy_slice
from trefoil.core.accounting import active_j, check_conservation
from trefoil.core.common import Revision
from trefoil.core.demand import SliceLoad
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.errors import PlanError, StaleRevision
from trefoil.core.fleet import SERVING, DeviceState, Hosted, NodeStatus, SliceState
from trefoil.core.plan import NodePlan, PlannedSlice
from trefoil.runtime import codec

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

BACK_WITHIN_S = 15.0
BOOT_S = 40.0  # generous: a shared machine
WHOLE, LEFT, RIGHT = key("7g.40gb"), key("4g.20gb", 0), key("3g.20gb", 4)
GPUS = (f"{NODE}/gpu0", f"{NODE}/gpu1")
numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with AgentCluster(quiet_probe_s=3, drain_timeout_s=12, drift_poll_s=1) as one:
        yield one


def plan(*parts, epoch: int = 1) -> NodePlan:
    return node_plan(next(numbers), *parts, epoch=epoch)


async def run(cluster: AgentCluster, *parts) -> NodePlan:
    """Bring the node there, whatever ran before."""
    wanted = plan(*parts)
    await cluster.acknowledge(
        Revision(9)
    )  # a dispatcher that routes by a table of the future, and has nothing in flight
    await cluster.apply(wanted)
    await cluster.settled(wanted, BOOT_S)
    return wanted


async def state_of(cluster: AgentCluster, part) -> SliceState | None:
    found = (await cluster.slices()).get(part)
    return found.state if found else None


@pytest.mark.gate
async def test_a_plan_becomes_a_slice_that_infers_and_the_node_says_so(cluster):
    wanted = plan(planned("7g.40gb", 0, 4))
    answer = await cluster.apply(wanted)
    assert answer.accepted
    assert answer.changed
    assert [step.verb for step in answer.steps] == ["create_gi", "create_ci", "start", "load", "warm_up"]
    await cluster.ready(WHOLE, timeout_s=BOOT_S)
    await cluster.settled(wanted)
    load = Load((await cluster.slices())[WHOLE].grpc_target)
    await until(lambda: load.answered >= 10, 60)
    await load.stop()
    assert (load.failed, load.versions) == ([], {"4"})

    async def published() -> bool:
        status = await cluster.state.get(cluster.state.keys.node(NODE), NodeStatus)
        return status is not None and status.applied == wanted.revision and time.time() - status.observed_at_s < 3

    await until(published, 30)
    status = await cluster.node()
    assert (status.simulated, status.zone, status.highest_epoch_seen) == (True, "test", 1)
    assert [device.state for device in status.devices] == [DeviceState.AWAKE, DeviceState.ASLEEP]
    again = await cluster.apply(wanted)
    assert (again.accepted, again.changed, list(again.steps)) == (True, False, [])


async def test_watchers_see_each_change_and_metrics_say_that_they_are_simulated(cluster):
    await run(cluster, planned("7g.40gb", 0, 4))
    wanted = plan(planned("7g.40gb", 0, 2))
    seen: list[SliceState] = []
    watch = cluster.stub.WatchNode(power_agent_pb2.WatchNodeRequest(), timeout=20)
    await cluster.apply(wanted)
    async for answer in watch:
        status = codec.from_proto(answer.node)
        seen += [part.state for device in status.devices for part in device.slices]
        if status.applied == wanted.revision:
            break
    watch.cancel()
    assert [state for state, _ in itertools.groupby(seen)][-2:] == [SliceState.SWAPPING, SliceState.READY]
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics") as response:
        text = response.read().decode()
    name = WHOLE.name
    assert f'trefoil_slice_state{{simulated="true",slice="{name}",state="READY"}} 1.0' in text
    assert 'trefoil_steps_total{outcome="done",simulated="true",verb="create_gi"}' in text
    assert 'trefoil_device_energy_joules_total{device="node0/gpu0",share="idle",simulated="true"}' in text


async def test_old_and_illegal_plans_are_refused_and_nothing_is_touched(cluster):
    await run(cluster, planned("7g.40gb", 0, 4))
    before = (await cluster.slices())[WHOLE]
    with pytest.raises(PlanError, match="overlap"):
        await cluster.apply(plan(planned("7g.40gb", 0, 4), planned("1g.5gb", 3, 1)))
    unknown = plan(PlannedSlice(WHOLE, (Hosted("digits", "digits-xl", 9, 0, 1, 1, 8),), 2))
    with pytest.raises(PlanError, match="digits-xl"):
        await cluster.apply(unknown)
    with pytest.raises(StaleRevision, match="epoch 0 and revision"):
        await cluster.apply(plan(planned("1g.5gb", 0, 1), epoch=0))
    with pytest.raises(StaleRevision):
        await cluster.apply(node_plan(1, planned("1g.5gb", 0, 1)))
    after = (await cluster.slices())[WHOLE]
    assert (after.state, after.generation, after.since_s) == (SliceState.READY, before.generation, before.since_s)


@pytest.mark.gate
async def test_a_variant_is_swapped_in_place_under_load_without_a_failure(cluster):
    await run(cluster, planned("7g.40gb", 0, 4))
    process = cluster.triton(WHOLE)
    load = Load((await cluster.slices())[WHOLE].grpc_target, clients=3)
    try:
        for version in (1, 3):
            await until(lambda: load.answered > 10, 60)
            await run(cluster, planned("7g.40gb", 0, version))
            load.versions.clear()
            answered = load.answered
            await until(lambda seen=answered: load.answered > seen + 10, 60)
            assert load.versions == {str(version)}
    finally:
        await load.stop()
    assert load.failed == []
    assert cluster.triton(WHOLE).pid == process.pid
    assert (await cluster.slices())[WHOLE].hosted[0].version == 3


@pytest.mark.gate
async def test_a_slice_stops_only_when_every_dispatcher_has_let_go_of_it(cluster):
    await run(cluster, planned("4g.20gb", 0, 2), planned("3g.20gb", 4, 2))
    kept = cluster.triton(LEFT)
    load = Load((await cluster.slices())[RIGHT].grpc_target, clients=1)
    wanted = plan(planned("4g.20gb", 0, 2), planned("2g.10gb", 4, 1))
    await cluster.acknowledge(Revision(1, 1), SliceLoad(RIGHT, in_flight=1))
    try:
        await cluster.apply(wanted)
        await until(lambda: _waits(cluster, RIGHT, "routes by table"), 60)
        for step in range(3):  # an old table, then requests in flight: it has to wait for both
            await asyncio.sleep(0.4)
            assert await state_of(cluster, RIGHT) == SliceState.DRAINING, step
            await cluster.acknowledge(wanted.revision, SliceLoad(RIGHT, in_flight=1))
        assert load.answered > 0
        assert load.failed == []
    finally:
        await load.stop()
    await until(lambda: _waits(cluster, RIGHT, "1 requests in flight"), 60)
    await cluster.acknowledge(wanted.revision, SliceLoad(RIGHT))
    await cluster.ready(LEFT, key("2g.10gb", 4), timeout_s=BOOT_S)
    assert cluster.triton(LEFT).pid == kept.pid
    await cluster.settled(wanted)


async def _waits(cluster: AgentCluster, part, words: str) -> bool:
    found = (await cluster.slices())[part]
    return found.state == SliceState.DRAINING and words in found.why


async def test_a_killed_triton_is_back_soon_and_its_neighbour_does_not_notice(cluster):
    await run(cluster, planned("4g.20gb", 0, 2), planned("3g.20gb", 4, 2))
    before = await cluster.slices()
    neighbour, own = (Load(before[part].grpc_target, clients=1) for part in (LEFT, RIGHT))
    try:
        await until(lambda: own.answered > 3, 60)
        killed_s = time.monotonic()
        cluster.triton(RIGHT).kill()
        await until(lambda: own.last_success_s > killed_s and len(own.failed) > 0, BACK_WITHIN_S)
        await cluster.ready(LEFT, RIGHT, timeout_s=BACK_WITHIN_S)
        print(f"killed Triton READY again after {time.monotonic() - killed_s:.1f} s")
        assert time.monotonic() - killed_s < BACK_WITHIN_S
    finally:
        await neighbour.stop()
        await own.stop()
    assert neighbour.failed == []
    after = await cluster.slices()
    assert after[RIGHT].generation == before[RIGHT].generation  # the instance stayed
    assert after[LEFT].since_s == before[LEFT].since_s


@pytest.mark.parametrize("loaded", [True, False], ids=["under load", "idle"])
async def test_a_dead_stub_is_found_by_inference_and_healed_in_place(cluster, loaded):
    await run(cluster, planned("7g.40gb", 0, 1))
    process = cluster.triton(WHOLE)
    load = Load((await cluster.slices())[WHOLE].grpc_target, clients=1 if loaded else 0)
    started_s = time.monotonic()
    for child in process.children(recursive=True):
        if "stub" in child.name():
            child.kill()
    try:
        await until(lambda: _is(cluster, WHOLE, SliceState.FAILED, SliceState.STARTING), BACK_WITHIN_S)
        await cluster.ready(WHOLE, timeout_s=BACK_WITHIN_S)
        print(f"dead stub READY again after {time.monotonic() - started_s:.1f} s ({'loaded' if loaded else 'idle'})")
        assert time.monotonic() - started_s < BACK_WITHIN_S
        if loaded:
            await until(lambda: load.last_success_s > started_s, 60)
    finally:
        await load.stop()
    assert cluster.triton(WHOLE).pid == process.pid


async def _is(cluster: AgentCluster, part, *states: SliceState) -> bool:
    return await state_of(cluster, part) in states


@pytest.mark.gate
async def test_a_killed_agent_loses_neither_a_request_nor_a_joule(cluster):
    """Also: each slice's energy against the driver's hidden split."""
    await run(cluster, planned("4g.20gb", 0, 4), planned("3g.20gb", 4, 3), planned("7g.40gb", 0, 3, gpu=1))
    parts = (LEFT, RIGHT, key("7g.40gb", 0, 1))
    before = await cluster.slices()
    pids = {part: cluster.triton(part).pid for part in parts}
    await asyncio.sleep(1.2)  # the last reading has seen all work that was done before
    since_s, truth = time.time(), cluster.client.truth()
    loads = [Load(before[part].grpc_target, clients=1, gap_s=0.01) for part in parts]
    await asyncio.sleep(3.5)
    cluster.kill_agent()
    answered = [load.answered for load in loads]
    await cluster.start_agent()
    await cluster.ready(*parts)
    after = await cluster.slices()
    assert {part: after[part].generation for part in parts} == {part: before[part].generation for part in parts}
    await asyncio.sleep(3)
    for load, was in zip(loads, answered, strict=True):
        await load.stop()
        assert load.failed == []
        assert load.answered > was
    assert {part: cluster.triton(part).pid for part in parts} == pids
    await _settle_energy(cluster)
    _compare_with_truth(await cluster.samples(), since_s, truth, cluster.client.truth())


async def _settle_energy(cluster: AgentCluster) -> None:
    """Wait until the agent that came back has published what it had to catch up with."""
    now_s = time.time()

    async def caught_up() -> bool:
        tail = await cluster.state.tail(cluster.state.keys.energy(NODE), EnergySample, 100)
        seen = Counter(sample.device for _, sample in tail if sample.ends_at_s > now_s)
        return all(seen[gpu] > 1 for gpu in GPUS)

    await until(caught_up, 60)


def _compare_with_truth(samples, since_s: float, before: dict, after: dict) -> None:
    """Both ends of the comparison are idle, so that it does not matter that they are not read at one instant."""
    ours: dict[tuple, float] = {}
    for sample in samples:
        if sample.ends_at_s > since_s:
            for part in sample.slices:
                name = (sample.device, part.key.slice_type, part.key.start)
                ours[name] = ours.get(name, 0.0) + part.active_j

    def active(truth: dict) -> dict[tuple, float]:
        total: dict[tuple, float] = {}
        for device in truth["devices"]:
            for part in device["slices"]:
                name = (device["device"], part["slice_type"], part["start"])
                total[name] = total.get(name, 0.0) + part["active_j"]
        return total

    start, end = active(before), active(after)
    for name, joules in ours.items():
        true_j = end[name] - start.get(name, 0.0)
        print(f"{name}: attributed {joules:.0f} J, truth {true_j:.0f} J ({100 * (joules / true_j - 1):+.1f} %)")
        assert joules == pytest.approx(true_j, rel=0.05, abs=5)


async def test_the_stream_holds_what_the_counter_counted(cluster):
    """After everything above: kills, swaps, repartitions and a restart of the agent."""
    inventory = Inventory(NODE)
    nvml_shim.install_simulated_node(cluster.folder / "node" / "node.sock")
    try:
        inventory.open()
        earlier_j = {f"{NODE}/gpu{index}": inventory.energy_j(f"{NODE}/gpu{index}") for index in range(2)}
        await _settle_energy(cluster)
        later_j = {f"{NODE}/gpu{index}": inventory.energy_j(f"{NODE}/gpu{index}") for index in range(2)}
    finally:
        inventory.close()
        nvml_shim.uninstall_simulated()
    samples = await cluster.samples()
    logs = (cluster.folder / "agent").glob("energy.*.jsonl")  # the counter readings themselves, by seq
    lines = [line for log in logs for line in log.read_text().splitlines()]
    states = [json.loads(line)["states"] for line in lines if line.startswith("{") and line.endswith("}}}")]
    counters = {
        (device, state["seq"]): state["counter_j"] for by_device in states for device, state in by_device.items()
    }
    for device in earlier_j:
        own = [sample for sample in samples if sample.device == device]
        assert [sample.seq for sample in own] == list(range(own[0].seq, own[0].seq + len(own)))
        for sample in own:
            check_conservation(sample)
            assert (sample.method, sample.simulated) == (EnergyMethod.NVML_COUNTER, True)
        for one, other in itertools.pairwise(own):
            assert other.starts_at_s == pytest.approx(one.ends_at_s, abs=1e-3)
        first_j, last_j = counters[device, own[0].seq - 1], counters[device, own[-1].seq]
        assert earlier_j[device] <= last_j
        assert counters[device, own[-2].seq] <= later_j[device]
        split_j = sum(active_j(sample) + sample.idle_j + sample.unallocated_j for sample in own)
        print(f"{device}: {len(own)} samples hold {split_j:.1f} J, the counter moved by {last_j - first_j:.1f} J")
        assert split_j == pytest.approx(last_j - first_j, rel=1e-3)


async def test_samples_are_sent_again_when_redis_comes_back_empty(cluster):
    before = await cluster.samples()
    cluster.redis.kill()
    await asyncio.sleep(2)
    cluster.redis.start()

    async def back() -> bool:
        again = await cluster.samples()
        return {(s.device, s.seq) for s in before} <= {(s.device, s.seq) for s in again}

    await until(back, 60)
    seqs = [(sample.device, sample.seq) for sample in await cluster.samples()]
    assert len(seqs) == len(set(seqs))
    assert (await cluster.node()).epoch >= 2


async def test_a_foreign_instance_is_reported_not_touched_and_planned_around(cluster):
    await run(cluster, planned("4g.20gb", 0, 1))
    inventory = Inventory(NODE)
    nvml_shim.install_simulated_node(cluster.folder / "node" / "node.sock")
    try:
        inventory.open()
        create_slice(inventory, f"{NODE}/gpu0", "1g.5gb", 6)

        async def drift() -> bool:
            return (await cluster.node()).devices[0].drift == ("foreign instance 1g.5gb@6",)

        await until(drift, 60)
        with pytest.raises(PlanError, match=r"1g\.5gb-6, which this agent did not make"):
            await cluster.apply(plan(planned("4g.20gb", 0, 1), planned("3g.20gb", 4, 1)))
        destroy_slice(inventory, key("1g.5gb", 6))
    finally:
        inventory.close()
        nvml_shim.uninstall_simulated()

    async def clean() -> bool:
        return (await cluster.node()).devices[0].drift == ()

    await until(clean, 60)


@pytest.mark.parametrize("after_s", [0.05, pytest.param(0.7, marks=pytest.mark.gate), 1.0])
async def test_an_agent_killed_in_the_middle_of_a_repartition_finishes_it(cluster, after_s):
    await run(cluster, planned("7g.40gb", 0, 1))
    wanted = plan(planned("4g.20gb", 0, 1), planned("2g.10gb", 4, 1), planned("1g.5gb", 6, 1))
    await cluster.apply(wanted)
    await asyncio.sleep(after_s)
    cluster.kill_agent()
    await cluster.start_agent()
    await cluster.settled(wanted, BOOT_S)
    await cluster.ready(LEFT, key("2g.10gb", 4), key("1g.5gb", 6))
    assert len(cluster.tritons()) == 3
    assert (await cluster.node()).devices[0].drift == ()


async def test_sleep_leaves_nothing_and_waking_takes_its_time(cluster):
    await run(cluster)
    status = await cluster.node()
    assert [device.state for device in status.devices] == [DeviceState.ASLEEP] * 2
    assert [device.slices for device in status.devices] == [(), ()]
    assert cluster.tritons() == []
    wanted = plan(planned("1g.5gb", 0, 1))
    seen: list[DeviceState] = []
    watch = cluster.stub.WatchNode(power_agent_pb2.WatchNodeRequest(), timeout=BOOT_S)
    answers = aiter(watch)
    await anext(answers)
    started_s = time.monotonic()
    await cluster.apply(wanted)
    async for answer in answers:  # each change, however short a while it is looked at
        status = codec.from_proto(answer.node)
        seen.append(status.devices[0].state)
        if status.applied == wanted.revision:
            break
    watch.cancel()
    assert time.monotonic() - started_s > 1.0  # wake_s of the device type
    assert DeviceState.WAKING in seen


async def test_an_agent_that_is_told_to_end_leaves_its_slices_serving(cluster):
    await run(cluster, planned("7g.40gb", 0, 1))
    process = cluster.triton(WHOLE)
    assert cluster.agent is not None
    with Awake() as took:
        cluster.agent.send_signal(signal.SIGTERM)
        await until(lambda: cluster.agent is not None and cluster.agent.poll() is not None, 60)
    assert cluster.agent.returncode == 0
    assert took.seconds < 5
    assert process.is_running()
    decided = plan(planned("7g.40gb", 0, 2))  # while no agent is there
    lease = await cluster.state.acquire("controller", "test")
    assert lease is not None
    await cluster.state.put(lease, cluster.state.keys.plan_node(NODE), decided)
    await cluster.start_agent()
    assert await state_of(cluster, WHOLE) in SERVING
    await cluster.settled(decided)
    assert (await cluster.slices())[WHOLE].hosted[0].version == 2
    assert cluster.triton(WHOLE).pid == process.pid


async def test_an_idle_agent_costs_little(cluster):
    assert cluster.agent is not None
    process = psutil.Process(cluster.agent.pid)
    used = []
    for _ in range(3):  # whoever shares the core's caches only makes it more
        await asyncio.sleep(1)
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(4)
        used.append((sum(process.cpu_times()[:2]) - before) / 4)
        if used[-1] < 0.06:
            break
    print("idle agent:", ", ".join(f"{100 * each:.1f} %" for each in used), "of a core")
    assert min(used) < 0.06  # 3 % on a quiet machine


async def test_a_stopped_meter_counts_work_but_no_joules_and_teardown_stops_all():
    async with AgentCluster(meter="none", stop_slices_on_exit="true") as one:
        wanted = node_plan(1, planned("7g.40gb", 0, 1))
        await one.apply(wanted)
        await one.settled(wanted, BOOT_S)
        load = Load((await one.slices())[WHOLE].grpc_target, clients=1)

        async def counted() -> bool:
            return sum(h.requests for s in await one.samples() for p in s.slices for h in p.hosted) >= 5

        await until(counted, 60)
        await load.stop()
        samples = await one.samples()
        assert {sample.method for sample in samples} == {EnergyMethod.NONE}
        assert sum(sample.counter_j for sample in samples) == 0
        process = one.triton(WHOLE)
        assert one.agent is not None
        one.agent.send_signal(signal.SIGTERM)
        await until(lambda: one.agent is not None and one.agent.poll() is not None, 30)
        assert one.agent.returncode == 0
        assert not process.is_running()
        assert not any(name.startswith(f"trefoil-{WHOLE.name}-{one.port_base}-") for name in os.listdir("/dev/shm"))
