"""Clocks and power limits on a simulated node: what the driver has after leases, plans and kills. What the keeper does
about faults and other hands: tests/unit/power_agent/test_clock_keeper.py."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos.power_agent.v1 import power_agent_pb2
from tests.support.clock_bench import HANDS, Hand
from tests.support.fast_cluster import NODE, FastCluster, Stage
from tests.support.triton_process import hosted
from trefoil.core.common import Revision
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.fleet import ClockLease, DeviceState, DeviceStatus, SliceKey
from trefoil.core.latency import build_histogram
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed
from trefoil.runtime import codec
from trefoil.runtime.state import State

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GPU = f"{NODE}/gpu0"
RATE = 10.0  # of the agent's clock: a lease of 10 s ends after one
DEVICES = ("A100-SXM4-40GB", "Tesla P4")


@pytest.fixture
def cluster(stage: Stage, request: pytest.FixtureRequest) -> Iterator[FastCluster]:
    one = FastCluster(stage, devices=DEVICES, rate=getattr(request, "param", RATE))
    try:
        yield one
    finally:
        one.close()


def lease(cluster: FastCluster, max_mhz: int, ttl_s: float, holder: str = "test", epoch: int = 1, gpu: int = 0) -> Any:
    return ask(cluster, ClockLease(f"{NODE}/gpu{gpu}", 0, max_mhz, holder, epoch), ttl_s)


def ask(cluster: FastCluster, asked: ClockLease, ttl_s: float) -> Any:
    request = power_agent_pb2.SetClocksRequest(lease=codec.to_proto(asked), ttl_s=ttl_s)
    return codec.from_proto(cluster.stub.SetClocks(request, timeout=20, wait_for_ready=True).lease)


def clocks(number: int, min_mhz: int = 0, max_mhz: int = 0, limit_w: float = 0.0, gpu: int = 0) -> NodePlan:
    """GPU 0 awake, the P4 asleep; `gpu` gets the clocks."""
    wishes: list[dict[str, Any]] = [{}, {}]
    wishes[gpu] = {"clock_min_mhz": min_mhz, "clock_max_mhz": max_mhz, "power_limit_w": limit_w}
    states = (DeviceState.AWAKE, DeviceState.ASLEEP)
    devices = tuple(PlannedDevice(f"{NODE}/gpu{i}", states[i], **wishes[i]) for i in range(2))
    return sealed(NodePlan(node=NODE, devices=devices), Revision(1, number))


def awake(cluster: FastCluster) -> None:
    """A sleeping GPU keeps its default clocks whatever is asked of it."""
    cluster.apply(clocks(1))
    cluster.settle(clocks(1))


def locked(cluster: FastCluster) -> list[int] | None:
    found: list[int] | None = cluster.inspect()["gpus"][0]["locked"]
    return found


def in_force(cluster: FastCluster, hand: Hand) -> float | None:
    """What the driver has; None: what it had at first."""
    gpu = cluster.inspect()["gpus"][0]
    if hand.is_clock:
        return gpu["locked"][1] if gpu["locked"] else None
    limit_w, default_w = gpu["limit_w"]
    return limit_w if limit_w != default_w else None


def admin(cluster: FastCluster, verb: str, **args: Any) -> None:
    """Somebody else does something to GPU 0."""
    cluster.client.call("admin", verb=verb, args={"index": 0, **args})


def device(cluster: FastCluster) -> DeviceStatus:
    return cluster.status().devices[0]


def refused(call: Any, *args: Any, **kwargs: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(*args, **kwargs)
    answer: Any = error.value
    return answer.code(), answer.details()


def test_a_lease_ends_by_itself_and_only_its_holder_may_end_it_before(cluster):
    lease(cluster, 907, 15.0)
    awake(cluster)
    held = lease(cluster, 907, 60.0)
    assert (held.min_mhz, held.max_mhz) == (210, 900)
    cluster.until(lambda: locked(cluster) == [210, 900], "the lock")
    assert device(cluster).clock_lease == held
    code, text = refused(lease, cluster, 600, 15.0, holder="other")
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "the clocks of node0/gpu0 are held by test under epoch 1 for another" in text
    cluster.until(lambda: locked(cluster) is None, "the end of the lease")
    assert device(cluster).clock_lease is None
    cluster.until(lambda: cluster.journal_state().overrides == {}, "a clean journal")
    lease(cluster, 600, 500.0, epoch=2)
    code, text = refused(lease, cluster, 600, 15.0, holder="other", epoch=1)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "node0/gpu0 obeys epoch 2; epoch 1 of other is older" in text
    assert cluster.status().highest_epoch_seen == cluster.journal_state().highest_epoch == 2  # also for plans
    cluster.until(lambda: locked(cluster) == [210, 600], "the second lease")
    request = power_agent_pb2.ReleaseClocksRequest(device=GPU, holder="test", epoch=2)
    cluster.stub.ReleaseClocks(request, timeout=20)
    cluster.until(lambda: locked(cluster) is None, "the release")


def test_what_a_gpu_cannot_do_is_refused_before_anything_is_touched(cluster):
    code, text = refused(lease, cluster, 600, 5.0, gpu=1)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "a Tesla P4 cannot lock clocks" in text
    for plan, said in (
        (clocks(1, 0, 600, gpu=1), "a Tesla P4 cannot lock clocks. Remedy: plan 0 and 0"),
        (clocks(1, 0, 601), "clock_mhz = 601: not a supported clock"),
        (clocks(1, limit_w=50.0), "power_limit_w = 50.0: not a power limit of a A100-SXM4-40GB. Remedy: 100 to 400 W"),
    ):
        code, text = refused(cluster.apply, plan)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert said in text
    assert locked(cluster) is None
    assert cluster.journal_state().plan is None


def test_a_plan_is_applied_when_its_clocks_are_in_force(cluster):
    wanted = clocks(1, 0, 900, limit_w=300.0)
    preview = cluster.stub.PreviewPlan(power_agent_pb2.PreviewPlanRequest(plan=codec.to_proto(wanted)), timeout=20)
    steps = [(step.verb, step.slice.device, step.why) for step in preview.steps]
    assert steps == [("lock_clock", GPU, "210-900 MHz"), ("limit_power", GPU, "300 W")]
    assert locked(cluster) is None
    assert [step.verb for step in cluster.apply(wanted).steps] == ["lock_clock", "limit_power"]
    cluster.settle(wanted)
    assert locked(cluster) == [210, 900]
    assert device(cluster).power_limit_w == 300.0
    assert device(cluster).clock_mhz <= 900
    none = clocks(2)
    cluster.apply(none)
    cluster.settle(none)
    assert locked(cluster) is None
    cluster.until(lambda: device(cluster).power_limit_w == 400.0, "the board's own limit")


# At its end the agent has 2.5 s for two changes a second apart: by a clock that runs ten times as fast, a machine that
# stands still for a tenth of a second has taken them.
@pytest.mark.parametrize(
    ("cluster", "number"),
    [(1.0, signal.SIGTERM), pytest.param(RATE, signal.SIGKILL, marks=pytest.mark.gate)],
    indirect=["cluster"],
)
def test_the_end_of_the_agent_is_the_end_of_its_clocks_and_limits(cluster, number):
    clock, limit = HANDS
    admin(cluster, "set_power_limit", watts=380.0)  # an operator's
    wanted = clocks(1, 0, 900, limit_w=250.0)
    cluster.apply(wanted)
    cluster.settle(wanted)
    ask(cluster, replace(clock.lease(600), power_limit_w=150.0), 500.0)
    cluster.until(lambda: locked(cluster) == [210, 600] and in_force(cluster, limit) == 150.0, "the lease")
    if number == signal.SIGTERM:
        time.sleep(1.0)  # the pause after a change is over
        assert cluster.end_agent() == 0
        assert (locked(cluster), in_force(cluster, limit)) == (None, 380.0)
        assert cluster.journal_state().overrides == {}
    else:
        cluster.kill_agent()
        assert (locked(cluster), in_force(cluster, limit)) == ([210, 600], 150.0)  # as on hardware
    cluster.start_agent()
    cluster.settle(wanted)
    assert (locked(cluster), in_force(cluster, limit)) == ([210, 900], 250.0)  # the plan's; the lease is gone
    assert device(cluster).clock_lease is None


class Reports:
    """A dispatcher's load windows on the real Redis, every 30 ms, of one family on one slice."""

    def __init__(self, cluster: FastCluster, redis_url: str, key: SliceKey, family: str) -> None:
        self.latency_ms, self._key, self._family = 5.0, key, family
        self._to, self._over = (redis_url, cluster.folder.name), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._report()))

    def __enter__(self) -> "Reports":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _report(self) -> None:
        state = State.connect(*self._to)
        seq = 0
        while not self._over.wait(0.03):
            seq += 1
            found = build_histogram([self.latency_ms] * 20)
            cell = LoadCell(LoadKey(self._family, "", self._key), answered=20, latency=found)
            window = LoadWindow("d", 0, seq, time.time(), time.time() + 0.3, cells=(cell,))
            await state.append_unfenced(state.keys.load("d", 0), window)
        await state.close()


def test_miad_steps_by_what_stands_in_redis_and_what_it_had_set_when_it_died_is_explained(cluster, stage):
    part = PlannedSlice(SliceKey(GPU, "7g.40gb", 0, 8), (hosted(4),), 2)  # its family's SLO: 75 ms
    on, asleep = clocks(1, 0, 1200).devices
    plan = replace(clocks(1), devices=(replace(on, slices=(part,), governor="miad"), asleep))
    plan = sealed(plan, plan.revision)
    cluster.apply(plan)
    cluster.settle(plan)
    assert locked(cluster) == [210, 1200], "nobody reports: the top of its range"

    def locked_at(low: int, high: int) -> bool:
        return low <= (locked(cluster) or [0, 0])[1] <= high

    with Reports(cluster, stage.redis.url, part.key, "digits") as reports:
        cluster.until(lambda: locked_at(210, 700), "steps down")
        reports.latency_ms = 100.0
        cluster.until(lambda: locked_at(1200, 1200), "the top")
        reports.latency_ms = 5.0
        cluster.until(lambda: locked_at(210, 1000), "steps down again")
        cluster.kill_agent()
        left, (override,) = locked(cluster), cluster.journal_state().overrides.values()
        assert left is not None
        assert override.low == left[0]
        assert left[1] <= 1200
        cluster.start_agent()
        cluster.until(lambda: locked_at(210, 300), "its successor to go on")
    cluster.until(lambda: locked_at(1200, 1200), "the top: nobody reports any more")
    cluster.apply(clocks(2))
    cluster.settle(clocks(2))
    cluster.until(lambda: locked(cluster) is None and not cluster.journal_state().overrides, "nothing to be left")
