"""Put one variant at a time on one slice of a node through its power agent, as a controller would.

The plans go under the node's own epoch, so a controller that is elected later outranks them; a node that serves is left
alone unless told otherwise, and an empty plan is the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from protos.power_agent.v1 import power_agent_pb2
from trefoil.core.catalog import Variant
from trefoil.core.common import Revision
from trefoil.core.device_types import device_type, slice_type
from trefoil.core.errors import NotFound, SettingError, Unavailable
from trefoil.core.fleet import DeviceState, DeviceType, Hosted, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import Clock

READY_TIMEOUT_S: Final = 180.0
POLL_S: Final = 0.2
CREDITS: Final = 4
RPC_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Place to measure at: a device of the node, a slice of it, the clock to hold (0: as it is)."""

    device: str
    kind: DeviceType
    slice_type: str
    clock_mhz: int

    @property
    def key(self) -> SliceKey:
        """Key of the slice at the first start that the device allows."""
        shape = slice_type(self.kind, self.slice_type)
        return SliceKey(self.device, shape.name, shape.starts[0], shape.memory_slices)

    @property
    def memory_mib(self) -> int:
        """Memory of the slice [MiB]."""
        return slice_type(self.kind, self.slice_type).memory_mib


class ExclusiveNode:
    """A power agent's node that this command uses alone: plans of one slice at a time, applied and awaited."""

    def __init__(self, stub: Any, clock: Clock, status: NodeStatus) -> None:
        self.stub, self._clock, self._status = stub, clock, status
        newest = max(status.highest_epoch_seen, status.applied.epoch, 1)
        number = status.applied.number if status.applied.epoch == newest else 0
        self._revision = Revision(newest, number)

    @classmethod
    async def acquire(cls, stub: Any, target: str, clock: Clock, *, replace_running: bool) -> "ExclusiveNode":
        """Take a node for this command alone.

        Raises:
            Unavailable: no agent answers.
            SettingError: it serves, and that may not be ended.
        """
        try:
            node = cls(stub, clock, await _status(stub))
        except Unavailable as error:
            raise Unavailable(
                "no power agent answers", field="--agent", value=target, remedy="name its admin address"
            ) from error
        running = [part.key.name for device in node._status.devices for part in device.slices]
        if running and not replace_running:
            raise SettingError(
                f"its slices serve: {', '.join(running)}", field="--agent", value=node._status.node,
                remedy="stop its controller and give --replace, or profile another node",
            )  # fmt: skip
        return node

    @property
    def simulated(self) -> bool:
        """Whether the node's devices are simulated."""
        return self._status.simulated

    def places(self, slices: Sequence[str], clocks: Sequence[int]) -> list[NodePlace]:
        """Places to measure at, on the node's first device of each type.

        `slices`: slice types, default all; `clocks` [MHz], default the highest.

        Raises:
            NotFound, SettingError: naming what there is.
        """
        kinds: dict[str, str] = {}
        for status in self._status.devices:
            if status.usable:
                kinds.setdefault(status.type, status.device)
        found, known = [], []
        for name, device in kinds.items():
            kind = device_type(name)
            known += [shape.name for shape in kind.slice_types]
            for wanted in slices or [shape.name for shape in kind.slice_types]:
                try:
                    slice_type(kind, wanted)
                except NotFound:
                    continue
                found += [NodePlace(device, kind, wanted, mhz) for mhz in self._clocks(kind, clocks)]
        missing = [name for name in slices if name not in {p.slice_type for p in found}]
        if missing or not found:
            raise NotFound(f"no device of the node has slices {missing}", remedy=f"one of {sorted(set(known))}")
        return found

    @staticmethod
    def _clocks(kind: DeviceType, clocks: Sequence[int]) -> list[int]:
        if not kind.clocks_mhz:
            return [0]
        wrong = [mhz for mhz in clocks if mhz not in kind.clocks_mhz]
        if wrong or (clocks and not kind.clock_lockable):
            raise SettingError(
                f"{kind.name} cannot hold it", field="--clocks", value=wrong or list(clocks),
                remedy=f"choose from {kind.clocks_mhz[0]} to {kind.clocks_mhz[-1]} MHz in its steps",
            )  # fmt: skip
        return list(clocks) or [max(kind.clocks_mhz)]

    async def serve(self, place: NodePlace, family: str, variant: Variant, max_batch: int) -> SliceStatus:
        """Serve one variant on one slice and nothing else, and wait until it is READY.

        Raises:
            Unavailable: it does not get ready; says what its slice says.
        """
        hosted = Hosted(family, variant.name, variant.version, 0, 1, 1, max_batch)
        part = PlannedSlice(place.key, (hosted,), CREDITS)
        await self._apply(place, (part,))
        return await self._ready(place.key)

    async def empty(self) -> None:
        """Remove every slice from the node; returns when all are gone."""
        await self._apply(None, ())

    async def _apply(self, place: NodePlace | None, parts: tuple[PlannedSlice, ...]) -> None:
        devices = []
        for status in self._status.devices:
            own = parts if place is not None and status.device == place.device else ()
            planned = PlannedDevice(status.device, DeviceState.AWAKE if own else DeviceState.ASLEEP, own)
            if own and place is not None and place.kind.clock_lockable:
                planned = replace(planned, clock_min_mhz=place.clock_mhz, clock_max_mhz=place.clock_mhz)
            devices.append(planned)
        self._revision = Revision(self._revision.epoch, self._revision.number + 1)
        plan = sealed(NodePlan(node=self._status.node, devices=tuple(devices)), self._revision)
        await rpc.call(self.stub.Apply, power_agent_pb2.ApplyRequest(plan=codec.to_proto(plan)), RPC_S)
        await self._until(None)

    async def _ready(self, key: SliceKey) -> SliceStatus:
        found = await self._until(key)
        assert found is not None
        return found

    async def _until(self, key: SliceKey | None) -> SliceStatus | None:
        """Until the plan is applied and, if asked, the slice is READY."""
        deadline_s = self._clock.monotonic_s() + READY_TIMEOUT_S
        while True:
            self._status = await _status(self.stub)
            parts = {part.key: part for device in self._status.devices for part in device.slices}
            if self._status.applied == self._revision:
                if key is None:
                    return None
                if key in parts and parts[key].state == SliceState.READY:
                    return parts[key]
            if self._clock.monotonic_s() > deadline_s:
                states = {part.key.name: f"{part.state.name} {part.why}" for part in parts.values()}
                raise Unavailable(
                    f"not ready within {READY_TIMEOUT_S:g} s: {states}", field="node", value=self._status.node,
                    remedy="read the agent's log",
                )  # fmt: skip
            await self._clock.sleep(POLL_S)


async def _status(stub: Any) -> NodeStatus:
    answer = await rpc.call(stub.GetNode, power_agent_pb2.GetNodeRequest(), RPC_S)
    status: NodeStatus = codec.from_proto(answer.node)
    return status
