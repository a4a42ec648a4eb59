"""Small worlds for the dispatcher's tests: slices, routes, plans, statuses, tickets."""

from collections.abc import Iterable, Sequence
from functools import partial

from dispatcher.queues import QUEUES
from dispatcher.queues.fair import FairQueue
from dispatcher.routers import ROUTERS
from trefoil.core.brains import Outcome, Router, Ticket
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import DeviceState, DeviceStatus, Hosted, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.parts import Kind, load_part
from trefoil.core.plan import Plan, Route, RouteTarget

OK = Outcome("OK", 10.0, 9.0, 0, True)
VERSIONS = {"digits-xs": 1, "digits-s": 2, "digits-m": 3, "digits-l": 4}
ACCURACIES = {"digits-xs": 0.886, "digits-s": 0.938, "digits-m": 0.96, "digits-l": 0.993}


def key(n: int, slice_type: str = "1g.5gb") -> SliceKey:
    return SliceKey(f"node0/gpu{n // 7}", slice_type, n % 7, 1)


def target(n: int, variant: str = "digits-l", weight: float = 1.0, credits: int = 2, draining: bool = False,
           slice_type: str = "1g.5gb") -> RouteTarget:  # fmt: skip
    known = (ACCURACIES.get(variant, 0.0), VERSIONS.get(variant, 0))
    return RouteTarget(key(n, slice_type), variant, 0, weight, credits, draining, "", *known)


def route(targets: Iterable[RouteTarget], router: str = "weighted", requests_max: int = 0, bytes_max: int = 0) -> Route:
    return Route("digits", router, "fifo", tuple(targets), requests_max, bytes_max, {})


def routing(name: str, family: str = "digits", queue: str = "fifo") -> Router:
    part = load_part(Kind.QUEUE, queue, QUEUES)
    return load_part(Kind.ROUTER, name, ROUTERS).make(family, FairQueue(family, partial(part.make, family)))


def ticket(
    id_: int,
    arrived_s: float | None = None,
    bytes_: int = 64,
    priority: int = 0,
    floor: float = 0.0,
) -> Ticket:
    return Ticket(
        id=id_, family="digits", slo_class="", tenant="", items=1, bytes=bytes_,
        arrived_s=float(id_) if arrived_s is None else arrived_s, deadline_s=None, min_accuracy=floor,
        priority=priority, sequence_id="", sequence_start=False, sequence_end=False, length_score=None,
    )  # fmt: skip


def status(n: int, grpc_target: str = "127.0.0.1:1", state: SliceState = SliceState.READY, variant: str = "digits-l",
           generation: int = 1, since_s: float = 1.0, slice_type: str = "1g.5gb") -> SliceStatus:  # fmt: skip
    return SliceStatus(
        key=key(n, slice_type), generation=generation, mig_uuid=f"MIG-{n}", state=state,
        hosted=(Hosted("digits", variant, VERSIONS[variant], 0, 1, 1, 8),), grpc_target=grpc_target, since_s=since_s,
        revision=Revision(1, 1, 0), credits=2,
    )  # fmt: skip


def node(statuses: Sequence[SliceStatus], name: str = "node0", observed_at_s: float = 1.0) -> NodeStatus:
    devices = sorted({each.key.device for each in statuses})
    return NodeStatus(
        node=name,
        epoch=1,
        simulated=True,
        observed_at_s=observed_at_s,
        devices=tuple(
            DeviceStatus(
                device=device,
                type=A100_40GB,
                state=DeviceState.AWAKE,
                slices=tuple(each for each in statuses if each.key.device == device),
            )
            for device in devices
        ),
    )


def plan(routes: Sequence[Route], number: int = 1, epoch: int = 1, step: int = 0, slo_ms: float = 200.0) -> Plan:
    objectives = tuple(
        Objective(family=each.family, mode=ObjectiveMode.INSTANT, slo_ms=slo_ms, slo_quantile=0.95) for each in routes
    )
    return Plan(
        revision=Revision(epoch, number, step), policy="exact", planner="exact", objectives=objectives,
        routes=tuple(routes), why="a test",
    )  # fmt: skip
