"""From plan to node on every kind of device, and what the agent does when a device does not do as it should."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.power_agent.v1 import power_agent_pb2
from tests.support.fast_agent import Page
from tests.support.fast_checks import identity, problems
from tests.support.fast_cluster import NODE, FastCluster, Stage
from tests.support.ports import free_ports
from tests.support.simulated_driver import is_reset
from tests.support.triton_process import hosted
from trefoil.core.common import Revision
from trefoil.core.device_types import WHOLE, device_type, slice_type
from trefoil.core.fleet import DeviceState, DeviceStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed
from trefoil.runtime import codec

pytestmark = [pytest.mark.integration, pytest.mark.slow]

A100, T4, H100 = "A100-SXM4-40GB", "Tesla T4", "H100-SXM5-80GB"


class Bench:
    """A cluster and the plans for it."""

    def __init__(self, stage: Stage, *types: str, **settings: Any) -> None:
        self.stage, self.types = stage, types
        self.cluster = FastCluster(stage, devices=types, **settings)
        self._number = 0

    def part(self, gpu: int, kind: str, start: int = 0, version: int = 1) -> PlannedSlice:
        size = slice_type(device_type(self.types[gpu]), kind).memory_slices
        return PlannedSlice(SliceKey(f"{NODE}/gpu{gpu}", kind, start, size), (hosted(version),), 2)

    def plan(self, *parts: PlannedSlice, epoch: int = 1) -> NodePlan:
        self._number += 1
        devices = []
        for index in range(len(self.types)):
            name = f"{NODE}/gpu{index}"
            own = tuple(part for part in parts if part.key.device == name)
            devices.append(PlannedDevice(name, DeviceState.AWAKE if own else DeviceState.ASLEEP, own))
        return sealed(NodePlan(node=NODE, devices=tuple(devices)), Revision(epoch, self._number))

    def go(self, *parts: PlannedSlice) -> NodePlan:
        plan = self.plan(*parts)
        self.cluster.apply(plan)
        self.settled(plan)
        return plan

    def settled(self, plan: NodePlan) -> None:
        self.cluster.settle(plan)
        assert problems(self.cluster.inspect(), plan) == []

    def device(self, gpu: int) -> DeviceStatus:
        return next(d for d in self.cluster.status().devices if d.device == f"{NODE}/gpu{gpu}")

    def slice(self, key: SliceKey) -> SliceStatus | None:
        return next((s for d in self.cluster.status().devices for s in d.slices if s.key == key), None)

    def state(self, key: SliceKey) -> SliceState | None:
        found = self.slice(key)
        return found.state if found else None

    def drain(self, device: str = "", epoch: int = 1, why: str = "", patience_s: float = 0.0, release: bool = False):
        request = power_agent_pb2.DrainRequest(
            device=device, epoch=epoch, why=why, patience_s=patience_s, release=release
        )
        return self.cluster.stub.Drain(request, timeout=20)

    def preview(self, plan: NodePlan) -> Any:
        return self.cluster.stub.PreviewPlan(power_agent_pb2.PreviewPlanRequest(plan=codec.to_proto(plan)), timeout=20)


@pytest.fixture
def bench(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*types: str, **settings: Any) -> Bench:
        made.append(Bench(stage, *types, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.cluster.close()


def steps(answer: Any) -> list[tuple[str, str]]:
    return [(step.verb, step.state) for step in answer.steps]


# --- kinds of devices -------------------------------------------------------------------------------------------------


def test_a_whole_gpu_is_a_slice_like_any_other_without_steps_that_cut(bench):
    one = bench(A100, T4)
    whole, seventh = one.part(1, WHOLE), one.part(0, "1g.5gb", 3)
    plan = one.plan(whole, seventh)
    expected = [("start", "planned"), ("load", "planned"), ("warm_up", "planned")]
    assert [s for s in steps(one.preview(plan)) if s in expected] == 2 * expected
    assert {step.verb for step in one.preview(plan).steps if step.slice.slice_type == WHOLE} == {v for v, _ in expected}
    one.cluster.apply(plan)
    one.settled(plan)
    before = one.slice(whole.key)
    assert before is not None
    assert before.mig_uuid == one.cluster.inspect()["gpus"][1]["uuid"]
    starts = one.cluster.inspect()["starts"]
    one.cluster.kill_agent()
    one.cluster.start_agent()
    after = one.slice(whole.key)
    assert after == replace(before, since_s=after.since_s, why=after.why)
    assert one.cluster.inspect()["starts"] == starts
    other = one.part(1, WHOLE, version=2)
    swapped = one.go(other, seventh)
    assert one.slice(whole.key).generation == before.generation, "another variant is the same slice"
    one.go(seventh)
    assert one.slice(whole.key) is None
    one.go(*(p for d in swapped.devices for p in d.slices))
    assert one.slice(whole.key).generation > before.generation


def test_a_board_outside_mig_and_one_that_nobody_described_serve_whole_and_are_metered(bench):
    ada = "gpu:RTX 6000 Ada Generation:47GiB:300W:210-3105MHz/15"
    one = bench(A100, ada, node={"mig_enabled": False})
    one.types = tuple(one.device(gpu).type.name for gpu in (0, 1))
    assert one.types == (f"{A100}-nomig", ada)
    parts = tuple(one.part(gpu, WHOLE) for gpu in (0, 1))
    one.go(*parts)
    assert {one.state(part.key) for part in parts} == {SliceState.READY}
    one.cluster.until(lambda: all(one.device(gpu).power_w > 0.0 for gpu in (0, 1)), "both to be metered")
    one.go()
    assert {one.device(gpu).state for gpu in (0, 1)} == {DeviceState.ASLEEP}


def test_mig_mode_is_switched_on_where_that_is_asked_for_and_else_the_remedy_is_named(bench):
    one = bench(A100, H100, mig_mode="enable")
    for gpu in (0, 1):
        one.cluster.client.admin("set_mig_mode", index=gpu, enabled=False)
    one.cluster.kill_agent()
    one.cluster.until(lambda: is_reset(one.cluster.client, 0), "the agent's end")
    one.cluster.start_agent()
    remedy = f"Remedy: sudo nvidia-smi -i {one.cluster.inspect()['gpus'][0]['uuid']} --gpu-reset"
    waits = f"{NODE}/gpu0 mig: MIG mode waits for a reset of the GPU. This agent has let go of it. {remedy}"
    one.cluster.until(lambda: waits in one.cluster.status().missing, "Ampere pending")
    assert (one.device(0).mig_current, one.device(0).mig_pending) == (False, True)
    with pytest.raises(grpc.RpcError, match="MIG mode is off"):
        one.cluster.apply(one.plan(one.part(0, "7g.40gb")))
    one.cluster.until(lambda: is_reset(one.cluster.client, 0), "no look at it to be in the way")
    one.cluster.until(lambda: all(one.device(gpu).mig_current for gpu in (0, 1)), "MIG mode")
    one.cluster.until(lambda: not any("mig:" in entry for entry in one.cluster.status().missing), "nothing missing")
    one.go(one.part(0, "7g.40gb"), one.part(1, "7g.80gb"))


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_half_an_instance_is_completed_and_a_process_without_one_is_ended(bench):
    one = bench(A100, A100)
    parts = one.part(0, "3g.20gb", 4), one.part(1, "2g.10gb", 2)
    plan = one.go(*parts)
    one.cluster.kill_agent()
    for process in one.cluster.inspect()["processes"]:
        one.cluster.client.call("kill", tag=process["tag"])
    one.cluster.until(lambda: not any(p["alive"] for p in one.cluster.inspect()["processes"]), "their end")
    one.cluster.client.admin("destroy", index=0, start=4, compute_only=True)
    one.cluster.client.admin("destroy", index=1, start=2)
    generation = one.cluster.inspect()["gpus"][0]["instances"][0]["generation"]
    one.cluster.start_agent()
    one.settled(plan)
    assert one.cluster.inspect()["gpus"][0]["instances"][0]["generation"] == generation, "completed, not made anew"


def test_a_gpu_that_is_lost_while_no_agent_runs_stops_only_itself(bench):
    one = bench(A100, A100)
    parts = one.part(0, "3g.20gb", 4), one.part(1, "4g.20gb", 0)
    plan = one.go(*parts)
    there = identity(one.cluster.inspect())
    one.cluster.kill_agent()
    one.cluster.client.admin("lose", index=0)
    one.cluster.start_agent()
    assert one.state(parts[1].key) == SliceState.READY
    one.cluster.until(lambda: one.device(0).state == DeviceState.LOST, "the loss to be told")
    assert one.state(parts[0].key) == SliceState.FAILED
    one.cluster.until(lambda: one.cluster.inspect()["gpus"][0]["processes"] == 0, "its processes to end")
    one.cluster.until(lambda: is_reset(one.cluster.client, 0), "it to be let go of")
    one.cluster.until(lambda: one.state(parts[0].key) == SliceState.READY, "the slice to be back")
    one.settled(plan)
    assert identity(one.cluster.inspect())[1, "4g.20gb", 0] == there[1, "4g.20gb", 0]


@pytest.mark.parametrize(("own_state", "words"), [(False, "another power agent works in"), (True, "these GPUs")])
def test_only_one_agent_works_on_a_node(bench, stage, tmp_path, own_state, words):
    one = bench(A100)
    (port,) = free_ports(1)
    second = {**one.cluster._settings, "page": str(tmp_path / "page"), "admin_address": f"127.0.0.1:{port}"}
    if own_state:
        second["state_dir"] = str(tmp_path / "state")
    Page(tmp_path / "page")
    log = Path(tmp_path / "second.log")
    assert stage.zygote.wait(stage.zygote.run("agent", log, **second)) == 2
    assert words in log.read_text()
    one.go(one.part(0, "7g.40gb"))


# --- preview and cordon -----------------------------------------------------------------------------------------------


def test_a_preview_is_what_apply_answers_and_touches_nothing(bench):
    one = bench(A100)
    one.go(one.part(0, "7g.40gb"))
    there = one.cluster.inspect()
    wanted = one.plan(one.part(0, "1g.5gb", 6), one.part(0, "4g.20gb", 0))
    first = one.preview(wanted)
    assert first.changed
    assert [s for s, _ in steps(first)][:4] == ["drain", "stop", "destroy_ci", "destroy_gi"]
    time.sleep(0.1)
    assert one.cluster.inspect() == there
    assert steps(one.cluster.apply(wanted)) == steps(first)
    one.settled(wanted)
    again = one.preview(wanted)
    assert (again.changed, steps(again)) == (False, [])
    with pytest.raises(grpc.RpcError, match="overlap"):
        one.preview(one.plan(one.part(0, "7g.40gb"), one.part(0, "1g.5gb", 1)))
    with pytest.raises(grpc.RpcError, match="older"):
        one.preview(sealed(wanted, Revision(1, 1)))


def test_a_device_out_of_service_is_left_by_plan_or_emptied_and_comes_back_on_release(bench):
    one = bench(A100, A100)
    parts = one.part(0, "3g.20gb", 4), one.part(1, "4g.20gb", 0)
    plan = one.go(*parts)
    answer = one.drain(f"{NODE}/gpu0", why="a fan is broken", patience_s=60.0)
    assert [d.cordon for d in answer.node.devices] == ["a fan is broken", ""]
    assert one.state(parts[0].key) == SliceState.READY, "the plan has time to leave"
    with pytest.raises(grpc.RpcError, match="out of service: a fan is broken"):
        one.cluster.apply(one.plan(*parts, one.part(0, "1g.5gb", 0)))
    kept = one.plan(*parts)
    one.cluster.apply(kept)  # a rollout on its way may still name what is there
    one.drain(f"{NODE}/gpu0", why="it burns", patience_s=0.0)
    one.cluster.until(lambda: one.slice(parts[0].key) is None, "the device to be empty")
    assert one.state(parts[1].key) == SliceState.READY
    assert not one.cluster.inspect()["gpus"][0]["instances"]
    one.cluster.kill_agent()
    one.cluster.start_agent()
    assert [d.cordon for d in one.cluster.status().devices] == ["it burns", ""]
    time.sleep(0.2)
    assert one.slice(parts[0].key) is None, "a successor obeys it too"
    one.drain(f"{NODE}/gpu0", release=True)
    one.cluster.until(lambda: one.state(parts[0].key) == SliceState.READY, "the slice to be back")
    assert plan.digest == kept.digest
    one.settled(kept)
