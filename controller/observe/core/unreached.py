"""Devices of silent nodes that nobody reaches: their slices carry nothing, and plans are made without them.

A node whose agent alone is gone goes on serving: its status is stale, nothing moves there, and what it serves counts.
Where every dispatcher that lives has ejected every slice of a device as well, the device is taken for lost, and stays
so until its node reports again: what it runs by then is of its own status, and it takes part in the next plan.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from trefoil.core.demand import TableAck
from trefoil.core.fleet import SERVING, DeviceState, FleetState


def unreached_devices(fleet: FleetState, acks: Sequence[TableAck], before: Set[str]) -> frozenset[str]:
    """Devices of stale nodes with slices that no dispatcher reaches, with those of `before` on nodes still stale."""
    views = [{load.slice for load in ack.slices if load.ejected} for ack in acks if not ack.leaving]
    nobody = set.intersection(*views) if views else set()
    found = set()
    for node in fleet.nodes:
        if node.node not in fleet.stale:
            continue
        for device in node.devices:
            serving = [part.key for part in device.slices if part.state in SERVING]
            if device.device in before or (serving and nobody.issuperset(serving)):
                found.add(device.device)
    return frozenset(found)


def with_lost(fleet: FleetState, devices: Set[str]) -> FleetState:
    """The fleet with these devices lost."""
    nodes = tuple(
        replace(
            node,
            devices=tuple(replace(d, state=DeviceState.LOST) if d.device in devices else d for d in node.devices),
        )
        if any(d.device in devices for d in node.devices)
        else node
        for node in fleet.nodes
    )
    return replace(fleet, nodes=nodes)
