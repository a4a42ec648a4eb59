"""Put one variant at a time on one slice of a node through its power agent, as a controller would.

The plans go under the node's own epoch, so a controller that is elected later outranks them. A node that serves is left
alone by default. The last plan is an empty one.
"""

from collections.abc import Sequence
from typing import Any

from protos.power_agent.v1 import power_agent_pb2
from trefoil.core.catalog import Variant
from trefoil.core.common import Revision
from trefoil.core.errors import SettingError, Unavailable
from trefoil.core.fleet import DeviceState, NodeStatus, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, PlannedDevice
from trefoil.core.plan_check import sealed
from trefoil.profiler.places import RPC_S, NodePlace, node_status, places_on, until
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import Clock


class ExclusiveNode:
    """A power agent's node that this command uses alone: plans of one slice at a time, applied and awaited."""

    def __init__(self, stub: Any, clock: Clock, status: NodeStatus) -> None:
        self.stub, self._clock, self._status = stub, clock, status
        newest = max(status.highest_epoch_seen, status.applied.epoch, 1)
        number = status.applied.number if status.applied.epoch == newest else 0
        self._revision = Revision(newest, number)
        self._taken = False

    @classmethod
    async def acquire(cls, stub: Any, target: str, clock: Clock, *, replace_running: bool) -> "ExclusiveNode":
        """Take a node for this command alone.

        Raises:
            Unavailable: no agent answers.
            SettingError: it serves, and that may not be ended.
        """
        try:
            node = cls(stub, clock, await node_status(stub))
        except Unavailable as error:
            raise Unavailable(
                "no power agent answers", field="--agent", value=target, remedy="name its admin address"
            ) from error
        running = [part.key.name for device in node._status.devices for part in device.slices]
        if running and not replace_running:
            raise SettingError(
                f"its slices serve: {', '.join(running)}", field="--agent", value=node._status.node,
                remedy="leave out --agent to borrow a device of the running system, or stop its controller and give "
                "--replace",
            )  # fmt: skip
        return node

    @property
    def simulated(self) -> bool:
        """Whether the node's devices are simulated."""
        return self._status.simulated

    def places(self, slices: Sequence[str], clocks: Sequence[int]) -> list[NodePlace]:
        """Places to measure at, on the node's first device of each type: `places_on`, with what it raises."""
        return places_on(self._status.devices, slices, clocks)

    async def serve(self, place: NodePlace, family: str, variant: Variant, max_batch: int) -> SliceStatus:
        """Serve one variant on one slice and nothing else, and wait until it is READY.

        Raises:
            PlanError: the agent cannot serve it; nothing has changed.
            Unavailable: it does not get ready; says what its slice says.
        """
        await self._apply(place.hosting(family, variant, max_batch))

        def ready(status: NodeStatus) -> SliceStatus | None:
            parts = {part.key: part for device in status.devices for part in device.slices}
            part = parts.get(place.key)
            done = status.applied == self._revision and part is not None and part.state == SliceState.READY
            return part if done and place.limits(status) else None

        self._status, found = await until(self.stub, self._clock, ready)
        return found

    async def empty(self) -> None:
        """Remove every slice from the node, where any was put there; returns when all are gone."""
        if self._taken:
            await self._apply(None)

    async def _apply(self, own: PlannedDevice | None) -> None:
        asleep = (PlannedDevice(status.device, DeviceState.ASLEEP) for status in self._status.devices)
        devices = tuple(own if own is not None and own.device == each.device else each for each in asleep)
        revision = Revision(self._revision.epoch, self._revision.number + 1)
        plan = sealed(NodePlan(node=self._status.node, devices=devices), revision)
        await rpc.call(self.stub.Apply, power_agent_pb2.ApplyRequest(plan=codec.to_proto(plan)), RPC_S)
        self._taken, self._revision = True, revision
        self._status, _ = await until(self.stub, self._clock, lambda status: status.applied == revision or None)
