"""gRPC service PowerAgent: plans (Apply, PreviewPlan), Drain, clock leases, and streams of status and energy."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from power_agent.clocks.clock_keeper import ClockKeeper
from power_agent.energy.energy_log import EnergyFeed
from power_agent.slices.cordons import devices_named, refuse_old_epoch
from power_agent.slices.core.epochs import is_void, refuse_made_up_epoch, refuse_overtaken_epoch
from power_agent.slices.node_state import PLAN, Node
from power_agent.slices.reconciler import Reconciler
from power_agent.slices.unproven import Unproven
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.core.errors import Fenced, InvalidInput, StateUnavailable
from trefoil.core.fleet import Step
from trefoil.core.outside.plausible import LED_AHEAD_MAX
from trefoil.runtime import codec
from trefoil.runtime.state_errors import believed_epoch

FULL_NAME: Final = "trefoil.power_agent.v1.PowerAgent"


class PowerAgentServicer(power_agent_pb2_grpc.PowerAgentServicer):  # type: ignore[misc]
    """Servicer of PowerAgent: translates, decides nothing."""

    def __init__(
        self,
        node: Node,
        reconciler: Reconciler,
        clocks: ClockKeeper,
        energy: EnergyFeed,
        led_epoch: Callable[[], Awaitable[int]],
        unproven: Unproven,
    ) -> None:
        """`led_epoch` asks Redis for the epoch of the newest controller."""
        self._led_epoch = led_epoch
        self._node = node
        self._reconciler = reconciler
        self._clocks = clocks
        self._energy = energy
        self._unproven = unproven

    async def Apply(self, request: Any, context: Any) -> Any:
        """Apply a complete desired state; the answer has the steps that lead there."""
        if not request.HasField("plan"):
            raise InvalidInput("missing", field="plan", remedy="send a NodePlan")
        epoch = request.plan.revision.epoch
        led = await self._check_epoch(epoch)
        refuse_overtaken_epoch(epoch, led)
        plan = codec.from_proto(request.plan)
        try:
            applied = await self._reconciler.apply(plan)
        except Fenced as error:  # a plan that is wrong in itself is its sender's to show: the rollout halts
            if epoch == led:  # of the leader: an operator has to know; other callers do not count
                self._node.report_missing(PLAN, f"plan {plan.revision} of the controller is refused: {error}")
            raise
        self._node.report_missing(PLAN, "")
        return power_agent_pb2.ApplyResponse(
            accepted=True, changed=applied.changed, steps=[step_message(step) for step in applied.steps]
        )

    async def PreviewPlan(self, request: Any, context: Any) -> Any:
        """Preview the steps that Apply would take; touches nothing, refuses what Apply would refuse."""
        if not request.HasField("plan"):
            raise InvalidInput("missing", field="plan", remedy="send a NodePlan")
        found = self._reconciler.preview(codec.from_proto(request.plan))
        return power_agent_pb2.PreviewPlanResponse(
            changed=found.changed, steps=[step_message(step) for step in found.steps]
        )

    async def _check_epoch(self, epoch: int) -> int:
        """Refuse an epoch under which no controller leads; returns the leader's, 0 if Redis does not answer."""
        highest = self._node.journal.state.highest_epoch
        try:
            led = believed_epoch(await self._led_epoch(), highest, LED_AHEAD_MAX)
        except StateUnavailable:
            led = 0  # what this node has seen itself has to do
        refuse_made_up_epoch(epoch, highest, led)
        if is_void(highest, epoch, led):
            await self._reconciler.void_fence(epoch)
        return led

    async def Drain(self, request: Any, context: Any) -> Any:
        """Drain devices, or take them back into service; answered at once, the node's status shows the progress."""
        devices = devices_named(request.device, self._node.devices)
        refuse_old_epoch(request.epoch, self._node.journal.state.highest_epoch)
        if request.release:
            await self._node.cordons.release(devices)
        else:
            await self._node.cordons.set(devices, request.why, request.patience_s)
        return power_agent_pb2.DrainResponse(node=codec.to_proto(self._node.status()))

    async def SetClocks(self, request: Any, context: Any) -> Any:
        """Make or renew a clock lease; the answer names the supported clocks that it came to."""
        if not request.HasField("lease"):
            raise InvalidInput("missing", field="lease", remedy="send a ClockLease")
        await self._check_epoch(request.lease.epoch)
        held = self._clocks.set_clocks(codec.from_proto(request.lease), request.ttl_s)
        return power_agent_pb2.SetClocksResponse(lease=codec.to_proto(held))

    async def ReleaseClocks(self, request: Any, context: Any) -> Any:
        """End a clock lease early; one that has ended already is not an error."""
        self._clocks.release_clocks(request.device, request.holder, request.epoch)
        return power_agent_pb2.ReleaseClocksResponse()

    async def Adopt(self, request: Any, context: Any) -> Any:
        """Take over what is not proven to be this agent's; the answer says what is left."""
        refuse_old_epoch(request.epoch, self._node.journal.state.highest_epoch)
        await self._unproven.take_over(list(request.name))
        return power_agent_pb2.AdoptResponse(node=codec.to_proto(self._node.status()))

    async def Reset(self, request: Any, context: Any) -> Any:
        """End what is not proven to be this agent's; the answer says what is left."""
        refuse_old_epoch(request.epoch, self._node.journal.state.highest_epoch)
        await self._unproven.end(list(request.name), force=request.force)
        return power_agent_pb2.ResetResponse(node=codec.to_proto(self._node.status()))

    async def GetNode(self, request: Any, context: Any) -> Any:
        """NodeStatus now."""
        return power_agent_pb2.GetNodeResponse(node=codec.to_proto(self._node.status()))

    async def WatchNode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """NodeStatus now, then at each change."""
        seen = self._node.changes.count
        while True:
            yield power_agent_pb2.WatchNodeResponse(node=codec.to_proto(self._node.status()))
            seen = await self._node.changes.wait(seen)

    async def WatchEnergy(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """EnergySamples that the agent still holds beyond `after_seq` of their device, then each new one."""
        after = dict(request.after_seq)
        for device in after:
            if device not in self._node.devices:
                known = ", ".join(sorted(self._node.devices))
                raise InvalidInput("no such device here", field="after_seq", value=device, remedy=f"one of {known}")
        async with aclosing(self._energy.watch(after)) as samples:
            async for sample in samples:
                yield power_agent_pb2.WatchEnergyResponse(sample=codec.to_proto(sample))


def step_message(step: Step) -> Any:
    """Step as a message."""
    return power_agent_pb2.Step(
        slice=codec.to_proto(step.slice), verb=step.verb, state=step.state, took_ms=step.took_ms, why=step.why
    )
