"""Places to measure at: a slice of a device at a clock, what is planned there, and waiting until it serves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from protos.power_agent.v1 import power_agent_pb2
from trefoil.core.catalog import Variant
from trefoil.core.device_types import find_slice_type, slice_servers
from trefoil.core.errors import NotFound, SettingError, Unavailable
from trefoil.core.fleet import (
    DeviceState,
    DeviceStatus,
    DeviceType,
    Hosted,
    NodeStatus,
    SliceKey,
    SliceType,
    why_missing,
)
from trefoil.core.plan import PlannedDevice, PlannedSlice
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import Clock

READY_TIMEOUT_S: Final = 180.0
POLL_S: Final = 0.2
CREDITS: Final = 4
LIMIT_TOLERANCE_W: Final = 0.5
RPC_S: Final = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Place to measure at: a device of the node, a slice of it, the clock to hold (0: as it is; below 0: the power
    limit of the board [-W]), the instances of a model there (0: as many as plans host, one for each core of CPUs), and
    which of how many stages of it."""

    device: str
    kind: DeviceType
    shape: SliceType
    clock_mhz: int
    instances: int = 0
    stage: int = 0
    stages: int = 1

    @property
    def key(self) -> SliceKey:
        """Key of the slice at the first start that the device allows."""
        return self.shape.key(self.device)

    def limits(self, node: NodeStatus) -> bool:
        """Whether the power limit that is to be held, if any, is in force.

        Raises:
            Unavailable: the node cannot set it.
        """
        if self.clock_mhz >= 0:
            return True
        if why := why_missing(node.missing, "power_limit", self.device):
            reason, _, remedy = why.partition(". Remedy: ")
            raise Unavailable(f"the power limit is not in force: {reason}", field="--limits", value=-self.clock_mhz,
                              remedy=remedy or "leave --limits out")  # fmt: skip
        found = next((device for device in node.devices if device.device == self.device), None)
        return found is not None and abs(found.power_limit_w + self.clock_mhz) <= LIMIT_TOLERANCE_W

    def hosting(self, family: str, variant: Variant, max_batch: int) -> PlannedDevice:
        """The device as planned with this variant on this slice, and nothing else."""
        instances = self.instances or slice_servers(self.shape.name)
        hosted = Hosted(family, variant.name, variant.version, self.stage, self.stages, instances, max_batch)
        clock_mhz, limit_w = max(0, self.clock_mhz) if self.kind.clock_lockable else 0, float(max(0, -self.clock_mhz))
        part = PlannedSlice(self.key, (hosted,), CREDITS)
        return PlannedDevice(self.device, DeviceState.AWAKE, (part,), clock_mhz, clock_mhz, power_limit_w=limit_w)


def places_on(devices: Iterable[DeviceStatus], slices: Sequence[str], clocks: Sequence[int]) -> list[NodePlace]:
    """Places to measure at, on the first device in service of each type.

    `slices`: slice types, default all. `clocks` [MHz], default the highest; below 0: power limits [-W]. A limit is held
    only on a slice that is a whole board.

    Raises:
        NotFound, SettingError: naming what there is.
    """
    kinds: dict[DeviceType, str] = {}
    for status in devices:
        if status.usable:
            kinds.setdefault(status.type, status.device)
    found, known = [], []
    for kind, device in kinds.items():
        known += [shape.name for shape in kind.slice_types]
        wanted = [find_slice_type(kind, name) for name in slices] if slices else kind.slice_types
        found += [
            NodePlace(device, kind, shape, mhz) for shape in wanted if shape for mhz in _held(kind, shape, clocks)
        ]
    missing = [name for name in slices if name not in {p.shape.name for p in found}]
    if missing or not found:
        raise NotFound(f"no device of the node has slices {missing}", remedy=f"one of {sorted(set(known))}")
    return found


def _held(kind: DeviceType, shape: SliceType, held: Sequence[int]) -> list[int]:
    """Clocks and power limits to hold, in this order."""
    limits, (low_w, high_w) = [mhz for mhz in held if mhz < 0], (kind.power_limit_min_w, kind.power_limit_max_w)
    wrong = [-mhz for mhz in limits if not low_w <= -mhz <= high_w or low_w == high_w]
    if wrong:
        remedy = f"choose from {low_w:g} to {high_w:g} W" if low_w < high_w else "leave it out: the board takes none"
        raise SettingError(f"{kind.name} has no such power limit", field="--limits", value=wrong, remedy=remedy)
    return _clocks(kind, [mhz for mhz in held if mhz >= 0]) + (limits if shape == kind.largest else [])


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


async def node_status(agent: Any) -> NodeStatus:
    """Status of the node that a stub of its power agent answers."""
    answer = await rpc.call(agent.GetNode, power_agent_pb2.GetNodeRequest(), RPC_S)
    status: NodeStatus = codec.from_proto(answer.node)
    return status


async def until(agent: Any, clock: Clock, found: Callable[[NodeStatus], T | None]) -> tuple[NodeStatus, T]:
    """Ask the agent until `found` returns something; the node then, and what it was.

    Raises:
        Unavailable: it does not within READY_TIMEOUT_S; says what the slices say.
    """
    deadline_s = clock.monotonic_s() + READY_TIMEOUT_S
    while True:
        status = await node_status(agent)
        if (answer := found(status)) is not None:
            return status, answer
        if clock.monotonic_s() > deadline_s:
            states = {part.key.name: f"{part.state.name} {part.why}" for d in status.devices for part in d.slices}
            raise Unavailable(
                f"not ready within {READY_TIMEOUT_S:g} s: {states}", field="node", value=status.node,
                remedy="read the agent's log",
            )  # fmt: skip
        await clock.sleep(POLL_S)
