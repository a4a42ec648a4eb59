"""The controller as a process: real Redis, a fake agent that watches for broken rules, a fake feed and dispatcher."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.__main__ import build
from controller.loop.decision_records import replay, stored_decisions
from controller.planners.policy_parts import planner_of
from protos.controller.v1 import controller_pb2 as pb
from tests.support.control_plane import ControlPlane
from tests.support.planners import layout, plan_of
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.objective import ActMode, Objective
from trefoil.core.plan import PlannedDevice, PlannedSlice, RolloutState
from trefoil.core.policies import policy
from trefoil.runtime import codec, service
from trefoil.runtime.repository import load_catalog

pytestmark = pytest.mark.integration
BY_CARBON = "tests.support.planners:ByCarbon"
Start = Callable[..., Awaitable[ControlPlane]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts control planes and ends them; whatever happened, no rule may have been broken on the way."""
    planes: list[ControlPlane] = []

    async def begin(intensity: float = 200.0, settled: bool = True, **settings: str) -> ControlPlane:
        plane = ControlPlane(**settings)
        planes.append(plane)
        plane.intensity = intensity
        await plane.start()
        if settled:
            await plane.until(plane.settled)
        return plane

    yield begin
    for plane in planes:
        await plane.close()
    for plane in planes:
        assert plane.agent.violations == []


def kinds(plane: ControlPlane) -> set[tuple[str, str]]:
    """(slice type, variant) of what serves now."""
    return {(k.slice_type, s.hosted[0].variant) for k, s in plane.agent.slices.items() if s.state.name == "READY"}


async def serves(plane: ControlPlane, *wanted: tuple[str, str]) -> None:
    async def done() -> bool:
        return kinds(plane) == set(wanted) and await plane.settled()

    await plane.until(done)


CLEAN_SLICES = (("7g.40gb", "digits-l"),)
DIRTY_SLICES = (("4g.20gb", "digits-s"), ("3g.20gb", "digits-s"))


async def test_a_lent_device_holds_what_is_asked_while_others_serve_and_comes_back(start):
    plane = await start(policy="exact")
    (busy,) = {key.device for key in plane.agent.slices}
    (spare,) = set(plane.agent.devices) - {busy}
    least: list[int] = []

    def holding(device: str, variant: str, version: int, kind: str = "7g.40gb") -> Any:
        part = PlannedSlice(SliceKey(device, kind, 0, 8), (Hosted("digits", variant, version, 0, 1, 1, 8),), 4)
        return codec.to_proto(PlannedDevice(device, DeviceState.AWAKE, (part,)))

    def ask(planned: Any, lease_s: float = 60.0, **more: Any) -> Awaitable[Any]:
        wanted = {"holder": "a profiler", "device": planned, "lease_s": lease_s}
        return plane.stub.LendDevice(pb.LendDeviceRequest(**(wanted | more)))

    async def serving(device: str, variant: str) -> bool:
        found = {(k.device, s.hosted[0].variant) for k, s in plane.agent.slices.items() if s.state.name == "READY"}
        plan = await plane.plan()
        least.append(len([t for route in plan.routes for t in route.targets if not t.draining]))
        return (device, variant) in found and await plane.settled()

    before = (await plane.plan()).routes
    for lease_s, planned, words in (
        (500.0, holding(spare, "digits-m", 3), "lease_s = 500"),
        (9.0, holding(spare, "digits-m", 9), "hosted.version = 9"),
        (9.0, holding(spare, "ghost", 3), "ghost"),
        (9.0, holding("node0/gpu7", "digits-m", 3), "node0/gpu7"),
        (9.0, holding(spare, "digits-m", 3, "8g.80gb"), "8g.80gb"),
    ):
        assert words in await refusal(ask(planned, lease_s))
    assert (await plane.plan()).routes == before, "what is refused changes nothing"

    await ask(holding(busy, "digits-m", 3), force=True)  # the one that serves: routes leave it first
    await plane.until(lambda: serving(busy, "digits-m"))
    assert {t.slice.device for r in (await plane.plan()).routes for t in r.targets if not t.draining} == {spare}
    assert "lent to a profiler" in await refusal(ask(holding(busy, "digits-m", 3), holder="another"))
    await ask(holding(busy, "digits-s", 2))
    await plane.until(lambda: serving(busy, "digits-s"))
    (loan,) = (await plane.stub.GetPlan(pb.GetPlanRequest())).loans
    assert (loan.device, loan.holder) == (busy, "a profiler")
    assert 0 < loan.left_s <= 60.0
    await ask(holding(busy, "digits-s", 2), lease_s=1.0)

    async def back() -> bool:  # nobody renews it: whoever borrowed was killed
        least.append(len([s for s in plane.agent.slices.values() if s.state.name == "READY"]))
        lent = [k for k in plane.agent.slices if k.device == busy and plane.agent.slices[k].hosted[0].version == 2]
        return not lent and await plane.settled()

    await plane.until(back)
    assert not (await plane.stub.GetPlan(pb.GetPlanRequest())).loans
    assert min(least) >= 1
    assert plane.stop_controller() == 0
    planner = planner_of("", policy("exact"))
    decided = stored_decisions(plane.folder / "controller" / "decisions")
    assert [r for r in (replay(record, planner, made) for record, made in decided) if not r.equal] == []


@pytest.mark.gate
async def test_a_newer_plan_in_the_middle_of_a_rollout_takes_over(start):
    plane = await start(planner=BY_CARBON)
    plane.agent.holds_starts = True
    plane.intensity = 500.0
    await plane.until(lambda: any(s.state.name == "STARTING" for s in plane.agent.slices.values()))
    plane.intensity = 100.0
    await plane.until(lambda: _trigger_count(plane, "carbon", 2))
    plane.agent.holds_starts = False
    await serves(plane, *CLEAN_SLICES)
    assert '"state": "SUPERSEDED"' in plane.log


async def _trigger_count(plane: ControlPlane, cause: str, count: int) -> bool:
    return sum(d.trigger == cause for d in await plane.decisions()) >= count


async def test_modes_freeze_pin_and_rollback(start):
    plane = await start(planner=BY_CARBON, mode="advise", settled=False)
    advised = await plane.until(lambda: _advice(plane))
    assert "mode advise: digits: 0.001 g/request, nothing runs to compare with" in advised.advice
    assert plane.agent.plans == []
    assert (await refusal(plane.stub.Rollback(pb.RollbackRequest()))).startswith("mode = 'advise'")

    await plane.stub.SetMode(pb.SetModeRequest(mode=ActMode.ACT))
    await serves(plane, *CLEAN_SLICES)
    frozen = await plane.stub.Freeze(pb.FreezeRequest(frozen=True))
    assert frozen.frozen
    plane.intensity = 500.0
    advised = await plane.until(lambda: _advice(plane))
    assert advised.advice.startswith("frozen: digits: ")
    assert kinds(plane) == set(CLEAN_SLICES)
    await plane.stub.Freeze(pb.FreezeRequest(frozen=False))
    await serves(plane, *DIRTY_SLICES)

    pinned = plan_of({"node0/gpu0": layout((("7g.40gb", 0),), "digits-m", "node0/gpu0"), "node0/gpu1": ()})
    await plane.stub.Pin(pb.PinRequest(plan=codec.to_proto(pinned)))
    await serves(plane, ("7g.40gb", "digits-m"))
    plane.intensity = 100.0
    await plane.until(lambda: _trigger_count(plane, "carbon", 2))
    assert kinds(plane) == {("7g.40gb", "digits-m")}

    back = await plane.stub.Rollback(pb.RollbackRequest())
    assert "rolled back from" in back.why
    await serves(plane, *DIRTY_SLICES)
    state = await plane.stub.GetPlan(pb.GetPlanRequest())
    assert (state.frozen, state.pinned) == (True, True)
    await plane.stub.Pin(pb.PinRequest())
    await plane.stub.Freeze(pb.FreezeRequest(frozen=False))
    await serves(plane, *CLEAN_SLICES)


async def _advice(plane: ControlPlane) -> pb.ExplainResponse | None:
    found = await plane.stub.Explain(pb.ExplainRequest(family="digits"))
    return found if found.advice else None


async def refusal(call: Awaitable[object]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    return str(refused.value.details())


async def test_objectives_are_checked_put_in_force_and_degrade_by_a_named_rung(start):
    plane = await start(planner=BY_CARBON)
    [stored] = (await plane.stub.GetObjectives(pb.GetObjectivesRequest(family="digits"))).objectives
    assert stored.number == 1
    bad = pb.ObjectiveChange(objective=stored)
    bad.objective.slo_quantile = 95.0
    assert "slo_quantile = 95.0: must be 0 or between " in await refusal(
        plane.stub.SetObjectives(pb.SetObjectivesRequest(objectives=[bad]))
    )
    impossible = pb.ObjectiveChange(objective=stored)
    impossible.objective.min_accuracy = 0.999
    assert "accuracy.floor = 0.999: no variant of digits" in await refusal(
        plane.stub.SetObjectives(pb.SetObjectivesRequest(objectives=[impossible]))
    )
    late = pb.ObjectiveChange(objective=stored, expected_number=7)
    assert "number 1, not 7" in await refusal(plane.stub.SetObjectives(pb.SetObjectivesRequest(objectives=[late])))

    onto = pb.LoadFamilyRequest(family="digits", device="node0/gpu1")
    assert "decides itself where families live" in await refusal(plane.stub.LoadFamily(onto))
    wanted = pb.ObjectiveChange(objective=stored, expected_number=1)
    wanted.objective.min_accuracy = 0.94
    answer = await plane.stub.SetObjectives(pb.SetObjectivesRequest(objectives=[wanted]))
    assert (answer.objectives[0].number, answer.degraded) == (2, "")
    await plane.until(lambda: _trigger_count(plane, "objective", 1))
    written = await plane.state.get(plane.state.keys.objective("digits"), Objective)
    assert written.min_accuracy == pytest.approx(0.94)

    best = max(v.accuracy for v in load_catalog(Path("model_repository")).family("digits").variants)
    if best > 0.985:
        wanted.objective.min_accuracy, wanted.expected_number = 0.986, 2
        answer = await plane.stub.SetObjectives(pb.SetObjectivesRequest(objectives=[wanted]))
        assert "out of reach" in answer.degraded
        advice = await plane.until(lambda: _advice(plane))
        assert "rung 2: the last good plan stays" in advice.advice
    assert kinds(plane) == set(CLEAN_SLICES)
    malformed = plan_of({"node0/gpu0": layout((("7g.40gb", 0), ("3g.20gb", 4)), "digits-m", "node0/gpu0")})
    assert "two slices overlap" in await refusal(plane.stub.Pin(pb.PinRequest(plan=codec.to_proto(malformed))))


async def test_replans_on_demand_and_shows_each_decision_and_the_rollout(start):
    plane = await start(planner=BY_CARBON)
    before = (await plane.stub.GetPlan(pb.GetPlanRequest())).plan.revision
    answer = await plane.stub.Replan(pb.ReplanRequest(why="is it still right?", revision=before))
    assert (answer.outcome, answer.effect, answer.revision) == ("unchanged", "unchanged", before)
    assert answer.why.startswith("operator: asked for: is it still right?; ")
    shown = await plane.stub.GetDecision(pb.GetDecisionRequest(id=answer.decision_id))
    record = codec.from_proto(shown.decision)
    assert (record.id, record.trigger) == (answer.decision_id, "operator")
    again = replay(record, planner_of(BY_CARBON, policy("exact")), codec.from_proto(shown.made))
    assert again.equal
    assert (await plane.stub.GetDecision(pb.GetDecisionRequest())).decision.id == answer.decision_id, "the newest"

    plane.agent.holds_starts = True
    plane.intensity = 500.0
    await plane.until(lambda: _trigger_count(plane, "carbon", 1))

    async def moving() -> bool:
        return (await plane.stub.GetPlan(pb.GetPlanRequest())).rollout.state == RolloutState.WAITING_READY

    await plane.until(moving)
    running = await plane.stub.GetPlan(pb.GetPlanRequest())
    assert (running.plan.revision.number, running.rollout.target.number) == (before.number + 1, before.number + 1)
    assert running.rollout.moving
    assert "is in force, not" in await refusal(plane.stub.Replan(pb.ReplanRequest(revision=before)))
    assert "cause = 'whim': no such cause. Remedy: use one of: operator" in await refusal(
        plane.stub.Replan(pb.ReplanRequest(cause="whim"))
    )
    with pytest.raises(grpc.aio.AioRpcError, match="no such decision is kept"):
        await plane.stub.GetDecision(pb.GetDecisionRequest(id="../counts"))
    plane.agent.holds_starts = False
    await serves(plane, *DIRTY_SLICES)
    forced = await plane.stub.Replan(pb.ReplanRequest(cause="carbon"))
    assert forced.why.startswith("carbon: asked for; ")
    await plane.stub.SetMode(pb.SetModeRequest(mode=ActMode.OBSERVE))
    assert "observe plans nothing" in await refusal(plane.stub.Replan(pb.ReplanRequest()))


@pytest.mark.gate
async def test_sigkill_in_the_middle_of_a_rollout_and_a_restart_converge(start):
    plane = await start(planner=BY_CARBON)
    plane.agent.holds_starts = True
    plane.intensity = 500.0
    await plane.until(lambda: any(s.state.name == "STARTING" for s in plane.agent.slices.values()))
    epoch = plane.agent.highest_epoch
    plane.kill_controller()
    plane.agent.holds_starts = False
    plane.start_controller()
    await plane.until(plane._answers)
    await serves(plane, *DIRTY_SLICES)
    assert plane.agent.highest_epoch > epoch


async def test_a_lost_device_is_planned_around_and_a_silent_node_is_left_alone(start):
    plane = await start(planner=BY_CARBON)
    plane.agent.devices["node0/gpu0"] = DeviceState.LOST
    plane.agent.slices.clear()
    await plane.until(lambda: {k.device for k in plane.agent.slices} == {"node0/gpu1"} and kinds(plane))
    assert (await plane.decisions())[-1].trigger == "loss"
    plane.agent.silent = True
    await plane.until(lambda: _stale(plane))
    commanded = len(plane.agent.plans)
    plane.intensity = 500.0
    await asyncio.sleep(2)  # long enough for four ticks
    assert len(plane.agent.plans) == commanded
    plane.agent.silent = False
    # The only device that is left cannot be rebuilt under load: nothing is torn down, and the reason is given.
    halted = await plane.until(lambda: _halted(plane))
    assert "no order of steps keeps the capacity that the load needs: digits would have 0.0/s" in halted
    assert kinds(plane) == set(CLEAN_SLICES)
    plane.agent.devices["node0/gpu0"] = DeviceState.ASLEEP
    await serves(plane, *DIRTY_SLICES)


async def _halted(plane: ControlPlane) -> str:
    rollout = await plane.rollout()
    return rollout.why if rollout.state == RolloutState.HALTED else ""


async def _stale(plane: ControlPlane) -> bool:
    explained = await plane.stub.Explain(pb.ExplainRequest(family="digits"))
    return "stale nodes, nothing moves there: node0" in explained.why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('policy = "greedy"', "policy"),
        ("unknown = 1", "unknown setting"),
        ('planner = "nowhere:Nothing"', "planner = 'nowhere:Nothing'"),
        ('[[objectives]]\nfamily = "digits"\nslo.latency_ms = 1.0', "slo.latency_ms"),
        ('[[objectives]]\nfamily = "digits"\nslo.latency_ms = 80\naccuracy.floor = 0.9999', "accuracy.floor"),
        ('model_repository = "nowhere"', "model repository"),
    ],
)
def test_bad_settings_are_one_line_and_exit_two(tmp_path, capsys, text, words):
    (tmp_path / "c.toml").write_text(f'state_dir = "{tmp_path}/s"\nadmin_address = "127.0.0.1:0"\n{text}\n')
    assert service.main(build, ["--config", str(tmp_path / "c.toml")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Remedy" in errors[0]
