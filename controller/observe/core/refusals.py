"""Refusals: places that agents refused for reasons that stand, kept until the reason is gone.

Data: the agent's words; the statuses of nodes. A refused slice's place counts as taken, and a refused device as closed.
So every planner avoids both, like what a status itself reports as taken or closed.
A refusal is forgotten when its agent reports the device otherwise than before: instances, MIG mode, driver, boot,
capabilities, what it lacks. It is also forgotten when another agent takes over, when a slice that could not be made
serves, and after `retry_s`. By then, a reason that no status shows may be gone. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trefoil.core.fleet import SERVING, DeviceStatus, FleetState, NodeStatus, SliceKey, SliceState
from trefoil.core.plan import NodePlan

RETRY_S = 600.0
"""How long a refused place is planned around without a status to the contrary."""
UNMAKEABLE = ("create_gi: ", "create_ci: ")
"""Begin the reason of a slice that its driver does not make, after all of the agent's tries."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a place, or of a whole device (`key` names no slice type), until `ends_s` at the latest."""

    key: SliceKey
    why: str
    ends_s: float
    reported: tuple[object, ...]


class Refusals:
    """Refusals in force, by place."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self._retry_s = retry_s
        self._known: dict[SliceKey, Refusal] = {}
        self._fleet = FleetState(())
        self._before: tuple[FleetState, Mapping[SliceKey, Refusal], FleetState] | None = None

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why, by the name of the slice or device."""
        return {key.name if key.slice_type else key.device: one.why for key, one in sorted(self._known.items())}

    def note(self, keys: Iterable[SliceKey], why: str, now_s: float) -> None:
        """Note that the agents of these places refuse them, as their nodes were seen last."""
        reports = _reports(self._fleet)
        fresh = {k: Refusal(k, why, now_s + self._retry_s, reports[k.device]) for k in keys if k.device in reports}
        self._known = {**self._known, **fresh}

    def around(self, fleet: FleetState, now_s: float) -> FleetState:
        """The fleet with what is refused taken or closed; the same object for the same."""
        self._fleet = fleet
        if not self._known:
            return fleet
        reports = _reports(fleet)
        serving = {s.key for n in fleet.nodes for d in n.devices for s in d.slices if s.state in SERVING}
        kept = {
            key: one
            for key, one in self._known.items()
            if now_s < one.ends_s and reports.get(key.device, one.reported) == one.reported
            if not (key in serving and one.why.startswith(UNMAKEABLE))
        }
        if len(kept) < len(self._known):
            self._known = kept
        if not kept:
            return fleet
        if self._before is None or self._before[0] is not fleet or self._before[1] is not self._known:
            self._before = fleet, self._known, _without(fleet, self._known)
        return self._before[2]


def refused_keys(plan: NodePlan, why: str) -> tuple[SliceKey, ...]:
    """Places of a node plan that an agent's refusal names: the slice, else its device, else none."""
    for device in plan.devices:
        for part in device.slices:
            if part.key.name in why:
                return (part.key,)
    return tuple(SliceKey(d.device) for d in plan.devices if d.slices and f"device {d.device}" in why)[:1]


def unmakeable(fleet: FleetState, keys: Iterable[SliceKey]) -> dict[SliceKey, str]:
    """Slices of these that their driver does not make, each with the reason."""
    wanted = set(keys)
    parts = [s for n in fleet.nodes for d in n.devices for s in d.slices if s.key in wanted]
    return {s.key: s.why for s in parts if s.state == SliceState.FAILED and s.why.startswith(UNMAKEABLE)}


def _reports(fleet: FleetState) -> dict[str, tuple[object, ...]]:
    """What has to change for a device to be tried again, by device."""
    return {d.device: _reported(node, d) for node in fleet.nodes for d in node.devices}


def _reported(node: NodeStatus, device: DeviceStatus) -> tuple[object, ...]:
    agent = (node.boot_id, node.driver_load_id, node.epoch, node.agent_target, node.capabilities)
    mig = (device.mig_current, device.mig_pending, device.foreign, device.lacks)
    return (*agent, *mig, device.type.name, device.closed, device.cordon)


def _without(fleet: FleetState, refusals: Mapping[SliceKey, Refusal]) -> FleetState:
    by_device: dict[str, list[Refusal]] = {}
    for one in refusals.values():
        by_device.setdefault(one.key.device, []).append(one)

    def seen(device: DeviceStatus) -> DeviceStatus:
        mine = by_device.get(device.device, [])
        closed = next((one.why for one in mine if not one.key.slice_type), device.closed)
        return replace(device, foreign=(*device.foreign, *(o.key for o in mine if o.key.slice_type)), closed=closed)

    nodes = tuple(
        replace(node, devices=tuple(seen(d) if d.device in by_device else d for d in node.devices))
        if any(d.device in by_device for d in node.devices)
        else node
        for node in fleet.nodes
    )
    return replace(fleet, nodes=nodes)
