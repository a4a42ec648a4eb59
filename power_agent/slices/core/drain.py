"""Drain rules: a slice may be stopped when no dispatcher worker can still send to it and nothing is in flight on it.

CONTRACTS section 4, rollout order. Every worker says in its TableAck by which table it routes and what it has in
flight. An ack older than its limit is that of a dead worker and does not count. The table that a worker must have
reached is the node plan's revision. When the published routes already leave the slice out, it is the revision of those
routes: a rollout publishes them before it takes the slice away, and later routes may wait for this very drain.

A slice that the agent takes away by itself (its device is out of service) is routed to still. Workers leave it because
its state says DRAINING, so only an acknowledgement made after they can have read that counts.
"""

import math
from collections.abc import Sequence
from typing import Final

from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.fleet import SliceKey, stage_model
from trefoil.core.plan import Plan

NOTICE_S: Final = 0.5  # a worker has read a published status by then; also covers clocks of hosts that differ a little


def still_routed(key: SliceKey, published: Plan | None, model: str = "") -> bool:
    """Whether the published routes send to the slice, of a model (a family, or a stage of one) or of any."""
    for route in published.routes if published else ():
        stages = 1 + max((target.stage for target in route.targets), default=0)
        for target in route.targets:
            named = model in ("", stage_model(route.family, target.stage, stages))
            if named and target.slice == key and not target.draining:
                return True
    return False


def routed_by(published: Plan | None, acks: Sequence[TableAck]) -> Plan | None:
    """The published plan, unless a worker routes by a newer one: then it is an old one that stands there again, and
    says nothing of what workers route by."""
    newest = max((ack.table for ack in acks), default=Revision())
    return published if published is None or published.revision >= newest else None


def required_table(key: SliceKey, node_revision: Revision, published: Plan | None, model: str = "") -> Revision:
    """Oldest routing table by which no worker routes to the slice any more, of a model or of any."""
    if published is None or published.revision >= node_revision or still_routed(key, published, model):
        return node_revision
    return published.revision


def drain_blocker(
    key: SliceKey, required: Revision, acks: Sequence[TableAck], made_after_s: float = -math.inf, model: str = ""
) -> str:
    """Reason why a slice is not drained yet, of a model or of any, by the acks of live workers; empty when it is.

    Acks made before `made_after_s` (UTC) do not show yet what matters; infinite: it has not been published at all.
    """
    if made_after_s == math.inf:
        return "its DRAINING is not published yet"
    for ack in sorted(acks, key=lambda a: (a.dispatcher, a.worker)):
        worker = f"worker {ack.dispatcher}:{ack.worker}"
        if ack.table < required:
            return f"{worker} routes by table {ack.table}, {required} is needed"
        if ack.observed_at_s < made_after_s:
            return f"{worker} has not said since that it knows of the draining"
        for load in ack.slices:
            if load.slice != key or (model and load.family not in ("", model)):
                continue
            if load.in_flight:
                return f"{worker} has {load.in_flight} requests in flight"
            if load.open_sequences:
                return f"{worker} has {load.open_sequences} open sequences"
    return ""
