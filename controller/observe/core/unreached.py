"""Devices of silent nodes that no dispatcher reaches: their slices serve nothing, and plans leave them out.

A node whose agent alone is gone continues to serve: its status is stale, nothing moves there, and what it serves
counts. A device counts as lost if every live dispatcher has ejected, with all models, each of its slices that gets
requests. If that holds for all devices of the node that get requests, the whole node counts as lost. Lost devices stay
so until the node reports again. Then the node's status says what it runs, and the node takes part in the next plan.
Slices without requests prove nothing.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from trefoil.core.demand import TableAck
from trefoil.core.fleet import SERVING, DeviceState, FleetState


def unreached_devices(fleet: FleetState, acks: Sequence[TableAck], before: Set[str]) -> frozenset[str]:
    """Devices of stale nodes with slices that no dispatcher reaches, with those of `before` on nodes still stale."""
    acks = [ack for ack in acks if not ack.leaving]
    views = [
        {load.slice for load in ack.slices} - {load.slice for load in ack.slices if not load.ejected} for ack in acks
    ]
    unreached = set.intersection(*views) if views else set()
    asked = {load.slice for ack in acks for load in ack.slices}
    found: set[str] = set()
    for node in fleet.nodes:
        if node.node not in fleet.stale:
            continue
        devices = {device.device for device in node.devices}
        keys = [part.key for device in node.devices for part in device.slices if part.state in SERVING]
        used = {key.device for key in keys if key in asked}
        gone = used - {key.device for key in keys if key in asked - unreached}
        found |= devices if used and gone == used else gone | (before & devices)
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
