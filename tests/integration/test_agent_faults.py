"""Drivers that misbehave as real ones have been seen to: the agent says so, continues beside it, and recovers."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tests.support.agent_cluster import key, node_plan, planned
from tests.support.fast_checks import check, identity, untouched
from tests.support.fast_cluster import FastCluster
from tests.support.simulated_driver import is_reset
from trefoil.core.fleet import DeviceState, Hosted, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, PlannedSlice
from trefoil.core.plan_check import sealed

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RATE = 20.0  # the agent's clock against ours
MINUTES_S = 120.0 / RATE  # in ours: room for a machine that stands still while the other GPU continues
LASTING = 100_000
LEFT, RIGHT = key("4g.20gb", 0), key("3g.20gb", 4)
CREATE_GI, CREATE_CI = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"
DESTROY_CI, DESTROY_GI = "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(stage) -> Iterator[FastCluster]:
    one = FastCluster(stage)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def fresh(stage) -> Iterator[FastCluster]:
    """A separate node, so that no other test inherits its state."""
    one = FastCluster(stage)
    try:
        yield one
    finally:
        one.close()


def plan(*parts: PlannedSlice, clock_mhz: int = 0) -> NodePlan:
    whole = node_plan(next(numbers), *parts)
    if not clock_mhz:
        return whole
    devices = [replace(device, clock_max_mhz=clock_mhz if device.slices else 0) for device in whole.devices]
    return sealed(replace(whole, devices=tuple(devices), digest=""), whole.revision)


def before() -> NodePlan:
    """The right half of GPU 0 will be rebuilt, the left half and GPU 1's are there to be left alone."""
    return plan(planned("4g.20gb", 0, 1), planned("3g.20gb", 4, 2), planned("3g.20gb", 0, 3, gpu=1))


def after() -> NodePlan:
    parts = [planned("4g.20gb", 0, 1), planned("2g.10gb", 4, 2), planned("1g.5gb", 6, 4)]
    return plan(*parts, planned("3g.20gb", 0, 3, gpu=1), planned("3g.20gb", 4, 1, gpu=1))


def go(cluster: FastCluster, wanted: NodePlan) -> None:
    cluster.apply(wanted)
    cluster.settle(wanted)
    check(cluster, wanted)


def slices(cluster: FastCluster) -> dict[SliceKey, SliceStatus]:
    return {part.key: part for device in cluster.status().devices for part in device.slices}


def left_alone(cluster: FastCluster, old: NodePlan, new: NodePlan, was: dict) -> None:
    now = identity(cluster.inspect())
    assert {place: now.get(place) for place in untouched(old, new)} == {
        place: was[place] for place in untouched(old, new)
    }


def all_serve(cluster: FastCluster, wanted: NodePlan) -> bool:
    """A plan may have been applied on the devices that are there, before others came back."""
    status = cluster.status()
    states = {part.key: part.state for device in status.devices for part in device.slices}
    keys = {part.key for device in wanted.devices for part in device.slices}
    return status.applied == wanted.revision and states == dict.fromkeys(keys, SliceState.READY)


def rule(symbol: str, **more: Any) -> dict[str, Any]:
    return {"symbol": symbol, **more}


PASSING = {
    "IN_USE three times, CI": rule(DESTROY_CI, code=19, times=3),
    "IN_USE three times, GI": rule(DESTROY_GI, code=19, times=3),
    "destroyed, it says, but it stays": rule(DESTROY_GI, effect="pretend", times=2),
    "no compute instance after the GPU instance": rule(CREATE_CI, code=23, times=2),
    "no room for a moment": rule(CREATE_GI, code=23, times=2),
    "the answer to a creation was lost": rule(CREATE_GI, effect="fail_after", code=999),
    "the answer to the second creation was lost": rule(CREATE_CI, effect="fail_after", code=999),
    "the answer to a destruction was lost": rule(DESTROY_GI, effect="fail_after", code=999),
    "the answer to the first destruction was lost": rule(DESTROY_CI, effect="fail_after", code=999),
    "unknown error at each call now and then": rule("*", code=999, times=10, probability=0.05),
}


@pytest.mark.parametrize("name", PASSING)
def test_trouble_that_passes_only_costs_time(cluster, name):
    old, new = before(), after()
    go(cluster, old)
    was = identity(cluster.inspect())
    cluster.client.admin("fault", **PASSING[name])
    cluster.apply(new)
    cluster.settle(new)
    cluster.client.admin("clear_faults")
    check(cluster, new)
    left_alone(cluster, old, new, was)


def stable(cluster: FastCluster, part: SliceKey, *words: str) -> SliceStatus:
    """Wait until a slice is FAILED for that reason, and see that it stays so."""

    def failed() -> bool:
        found = slices(cluster).get(part)
        return found is not None and found.state == SliceState.FAILED and all(word in found.why for word in words)

    cluster.until(failed, f"{part.name} to be FAILED with {words}")
    for _ in range(10):
        time.sleep(0.02)
        assert failed(), slices(cluster).get(part)
    return slices(cluster)[part]


STAYING = {
    "IN_USE": (rule(DESTROY_GI, code=19), RIGHT, ("destroy_gi", "in use")),
    "pretends": (rule(DESTROY_GI, effect="pretend"), RIGHT, ("destroy_gi", "still lists it")),
    "no compute instance": (rule(CREATE_CI, code=23), key("2g.10gb", 4), ("create_ci",)),
    "unknown error": (rule(CREATE_GI, code=999), key("1g.5gb", 6), ("create_gi", "999")),
}


@pytest.mark.parametrize("name", STAYING)
def test_trouble_that_stays_is_reported_and_ends_with_its_cause(cluster, name):
    fault, part, words = STAYING[name]
    old, new = before(), after()
    go(cluster, old)
    was = identity(cluster.inspect())
    cluster.client.admin("fault", times=LASTING, **fault)
    cluster.apply(new)
    stable(cluster, part, *words)
    assert cluster.status().applied != new.revision
    left_alone(cluster, old, new, was)
    cluster.client.admin("clear_faults")
    cluster.settle(new)
    check(cluster, new)
    left_alone(cluster, old, new, was)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "hidden"])
def test_who_holds_an_instance_is_named_and_the_other_gpu_goes_on(cluster, listed):
    old, new = before(), after()
    go(cluster, old)
    if listed:
        cluster.client.admin("attach", index=0, start=4, pid=4_000_123)
    else:
        cluster.client.admin("leak_handle", index=0, start=4)
    cluster.apply(new)
    found = stable(cluster, RIGHT, "4000123" if listed else "DCGM")
    print(found.why)
    other = key("3g.20gb", 4, 1)
    cluster.until(lambda: slices(cluster)[other].state == SliceState.READY, "the other GPU")
    cluster.client.admin(*("detach",), pid=4_000_123) if listed else cluster.client.admin("release_handles", index=0)
    cluster.settle(new)
    check(cluster, new)


def test_clocks_that_cannot_be_locked_are_reported_and_locked_when_they_can(cluster):
    parts = planned("4g.20gb", 0, 1), planned("3g.20gb", 4, 2)
    go(cluster, plan(*parts))
    cluster.client.admin("fault", symbol="nvmlDeviceSetGpuLockedClocks", code=999, times=LASTING)
    wanted = plan(*parts, clock_mhz=1005)
    cluster.apply(wanted)
    cluster.until(lambda: any("1005" in text for text in cluster.status().devices[0].drift), "a report")
    assert {part.state for part in slices(cluster).values()} == {SliceState.READY}
    assert cluster.status().applied != wanted.revision
    cluster.client.admin("clear_faults")
    cluster.settle(wanted)
    cluster.until(lambda: cluster.status().devices[0].drift == (), "the report to be withdrawn")
    check(cluster, wanted)
    go(cluster, plan(*parts))
    assert cluster.journal_state().overrides == {}


def test_minutes_in_the_driver_of_one_gpu_do_not_stop_the_other(cluster, awake):
    go(cluster, before())
    cluster.client.admin("fault", symbol=DESTROY_GI, effect="delay", delay_s=MINUTES_S)
    new = after()
    started_s = time.monotonic()
    cluster.apply(new)
    other = key("3g.20gb", 4, 1)
    cluster.until(lambda: other in slices(cluster) and slices(cluster)[other].state == SliceState.READY, "the other")
    assert awake.between(started_s, time.monotonic()) < 60.0 / RATE
    assert cluster.status().applied != new.revision
    cluster.settle(new)
    assert time.monotonic() - started_s >= MINUTES_S
    check(cluster, new)


IN_MID_PLAN = [(DESTROY_CI, 0), (DESTROY_GI, 0), (CREATE_GI, 0), (CREATE_GI, 2), (CREATE_CI, 0), (CREATE_CI, 2)]


@pytest.mark.parametrize(("symbol", "calls"), IN_MID_PLAN)
def test_a_gpu_lost_in_mid_plan_is_fenced_and_used_again_after_its_reset(fresh, symbol, calls):
    cluster, old, new = fresh, before(), after()
    go(cluster, old)
    cluster.client.admin("fault", symbol=symbol, effect="lose", after=calls, index=0)
    cluster.apply(new)
    cluster.until(lambda: cluster.status().devices[0].state == DeviceState.LOST, "LOST")
    other = key("3g.20gb", 4, 1)
    cluster.until(lambda: other in slices(cluster) and slices(cluster)[other].state == SliceState.READY, "the other")
    cluster.until(lambda: not _runs_on(cluster, 0), "the processes on the lost GPU to be ended")
    assert slices(cluster)[LEFT].state == SliceState.FAILED
    with pytest.raises(grpc.RpcError, match="LOST"):
        cluster.apply(plan(planned("7g.40gb", 0, 1)))
    cluster.until(lambda: is_reset(cluster.client, 0), "it to be let go of")
    cluster.until(lambda: cluster.status().devices[0].state == DeviceState.AWAKE, "the GPU to be back")
    cluster.until(lambda: all_serve(cluster, new), "all slices to serve again")
    check(cluster, new)


def _runs_on(cluster: FastCluster, gpu: int) -> list[str]:
    return [row["tag"] for row in cluster.inspect()["processes"] if row["alive"] and f"-gpu{gpu}-" in row["tag"]]


@pytest.mark.parametrize(("symbol", "calls"), [*IN_MID_PLAN, ("*", 5), ("*", 50)])
def test_a_driver_loaded_again_in_mid_plan_gets_all_slices_back(fresh, symbol, calls):
    cluster = fresh
    go(cluster, before())
    new = after()
    loaded = cluster.client.describe()["driver_load_id"]
    cluster.client.admin("fault", symbol=symbol, effect="reload", after=calls)
    cluster.apply(new)
    cluster.until(lambda: cluster.client.describe()["driver_load_id"] != loaded, "the reload")
    wanted = cluster.client.describe()["driver_load_id"]
    cluster.until(lambda: cluster.status().driver_load_id == wanted, "the agent to notice")
    cluster.until(lambda: all_serve(cluster, new), "all slices to serve again")
    check(cluster, new)


def test_instances_that_only_a_stale_listing_shows_stand_in_nobodys_way(stage):
    """Somebody makes an instance and destroys it; sessions that saw it continue listing it (seen with long-lived
    ones)."""
    cluster = FastCluster(stage, node={"stale_listing": True})
    try:
        go(cluster, plan(planned("4g.20gb", 0, 1)))
        cluster.client.admin("create_gi", index=0, slice_type="1g.5gb", start=6)
        cluster.until(lambda: cluster.status().devices[0].drift != (), "drift to be reported")
        cluster.client.admin("destroy", index=0, start=6)
        cluster.until(lambda: cluster.status().devices[0].drift == (), "drift to be over")
        go(cluster, plan(planned("4g.20gb", 0, 1), planned("3g.20gb", 4, 2)))
        go(cluster, plan(planned("1g.5gb", 6, 2)))
    finally:
        cluster.close()


def test_a_family_without_model_files_fails_on_its_slice_only_and_says_how_to_make_them(cluster):
    nowhere = replace(planned("3g.20gb", 4, 1), hosted=(Hosted("yolo", "yolov5l", 1, 0, 1, 1, 8),))
    wanted = plan(planned("4g.20gb", 0, 1), nowhere)
    cluster.apply(wanted)

    def said() -> bool:
        failed, neighbour = (slices(cluster)[part] for part in (RIGHT, LEFT))
        said_all = "no model files" in failed.why and "_training/export_yolo.py" in failed.why
        return (failed.state, neighbour.state, said_all) == (SliceState.FAILED, SliceState.READY, True)

    cluster.until(said, "the slice says what is missing, its neighbour serves")
    go(cluster, after())


# The node is not there when the agent starts


def test_an_agent_that_starts_before_its_node_waits_for_it(fresh):
    wanted = before()
    go(fresh, wanted)
    fresh.kill_agent()
    fresh.kill_node()
    log = fresh.folder / "agent.log"
    earlier = log.stat().st_size
    fresh.launch_agent()
    fresh.until(lambda: "waiting for the devices" in log.read_text()[earlier:], "the agent to say that it waits")
    fresh.start_node()
    fresh.until_agent_serves()
    fresh.settle(wanted)
    check(fresh, wanted)


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_an_agent_starts_although_its_node_comes_and_goes_meanwhile(fresh, pause_s):
    wanted = before()
    go(fresh, wanted)
    fresh.kill_agent()
    fresh.launch_agent()
    for _ in range(3):
        time.sleep(pause_s)
        fresh.kill_node()
        fresh.start_node()
    fresh.until_agent_serves()
    fresh.until(lambda: all_serve(fresh, wanted), "all slices to serve again")
    fresh.settle(wanted)
    check(fresh, wanted)
