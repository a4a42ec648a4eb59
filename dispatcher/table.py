"""The routing table: what the plan wants, of what is really there.

A pure function of the plan's routes, the nodes' statuses and the slices ejected here. A target is live when its agent
has published it READY or SWAPPING with an address and the family on it, the plan does not drain it, and it is not
ejected. Weights are made to sum to 1 over the live targets: what a dead slice was to serve is spread over the others by
their weights, and `why` says so. A plan that cannot be routed is refused whole: the last good table stays.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dispatcher.queues import QUEUES
from dispatcher.routers import resolve
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, StaleRevision
from trefoil.core.fleet import NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.objective import Objective
from trefoil.core.plan import Plan, Route, RouteTarget

SERVING: Final = frozenset({SliceState.READY, SliceState.SWAPPING})
LISTENING: Final = SERVING | {SliceState.DRAINING}  # connecting earlier would leave the channel in its backoff at READY
Worker = tuple[str, int]  # (dispatcher, worker)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a slice listens. Another generation at the same address is another Triton: no connection is shared."""

    target: str
    generation: int


@dataclass(frozen=True, slots=True)
class Table:
    """What to route by. `routes` hold live targets only; `planned` is what the plan asked for."""

    revision: Revision = Revision()
    routes: Mapping[str, Route] = field(default_factory=dict)
    planned: Mapping[str, Route] = field(default_factory=dict)
    endpoints: Mapping[SliceKey, Endpoint] = field(default_factory=dict)
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    variants: Mapping[tuple[str, int], str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    def live(self, family: str) -> tuple[RouteTarget, ...]:
        """The targets that a family can be sent to now."""
        route = self.routes.get(family)
        return route.targets if route is not None else ()

    @property
    def summary(self) -> str:
        """One line: every family that is not routed as planned, and why."""
        return "; ".join(f"{family}: {why}" for family, why in sorted(self.why.items()) if why)


def check(plan: Plan, seen: Revision) -> None:
    """Whether a plan can be routed here.

    Raises:
        StaleRevision: an older plan than one obeyed before (an emptied Redis must not send the system back).
        PlanError: a router, queue, weight or stage that this dispatcher cannot route by.
    """
    if plan.revision < seen:
        raise StaleRevision(f"plan {plan.revision} is older than {seen}, which was obeyed", remedy="write a newer plan")
    families = [route.family for route in plan.routes]
    if len(set(families)) < len(families):
        raise PlanError("a family has two routes", field="routes", value=families, remedy="one route a family")
    for route in plan.routes:
        here = f"routes[{route.family}]"
        resolve(route.router)
        if route.queue not in QUEUES:
            remedy = f"one of {', '.join(sorted(QUEUES))}"
            raise PlanError("no such queue", field=f"{here}.queue", value=route.queue, remedy=remedy)
        for target in route.targets:
            if target.stage:
                raise PlanError("stages are not routed yet", field=f"{here}.stage", value=target.stage)
            if not 0 <= target.weight < float("inf"):
                raise PlanError("a weight is finite and >= 0", field=f"{here}.weight", value=target.weight)
            if target.credits < 1 and not target.draining:
                raise PlanError("a live target has at least one credit", field=f"{here}.credits", value=target.credits)
        slices = [target.slice for target in route.targets]
        if len(set(slices)) < len(slices):
            raise PlanError("a slice is targeted twice", field=f"{here}.targets", value=[key.name for key in slices])


def build(
    plan: Plan,
    nodes: Iterable[NodeStatus],
    ejected: Mapping[SliceKey, str] | None = None,
    workers: Sequence[Worker] = (),
    me: Worker = ("", 0),
) -> Table:
    """The table of a plan that passed `check`. `ejected` gives the reason; `workers` share each slice's credits."""
    statuses = {s.key: s for node in nodes for device in node.devices for s in device.slices}
    routes, why = {}, {}
    for route in plan.routes:
        live, missing = _split(route, statuses, ejected or {}, workers, me)
        routes[route.family] = replace(route, targets=_renormalised(live))
        why[route.family] = _explain(route, live, missing)
    return Table(
        revision=plan.revision,
        routes=routes,
        planned={route.family: route for route in plan.routes},
        endpoints={
            s.key: Endpoint(s.grpc_target, s.generation)
            for s in statuses.values()
            if s.grpc_target and s.state in LISTENING
        },
        objectives={objective.family: objective for objective in plan.objectives},
        variants={(h.family, h.version): h.variant for s in statuses.values() for h in s.hosted},
        why=why,
    )


def share_credits(credits: int, key: SliceKey, workers: Sequence[Worker], me: Worker) -> int:
    """This worker's part of a slice's credits: equal parts, the remainder to the lowest worker ids.

    With fewer credits than workers the slice belongs to one of them alone, chosen by rendezvous hashing.
    """
    crew = sorted({*workers, me})
    if credits < len(crew):
        return credits if _rendezvous(key, crew) == me else 0
    part, remainder = divmod(credits, len(crew))
    return part + (crew.index(me) < remainder)


def _rendezvous(key: SliceKey, crew: Sequence[Worker]) -> Worker:
    def score(worker: Worker) -> bytes:
        return hashlib.sha256(f"{key.name}|{worker[0]}|{worker[1]}".encode()).digest()

    return max(crew, key=score)


def _split(
    route: Route,
    statuses: Mapping[SliceKey, SliceStatus],
    ejected: Mapping[SliceKey, str],
    workers: Sequence[Worker],
    me: Worker,
) -> tuple[list[RouteTarget], dict[SliceKey, str]]:
    live: list[RouteTarget] = []
    missing: dict[SliceKey, str] = {}
    for target in route.targets:
        if target.draining:
            continue
        reason = _not_live(route.family, statuses.get(target.slice)) or ejected.get(target.slice, "")
        if reason:
            missing[target.slice] = reason
        elif credits := share_credits(target.credits, target.slice, workers, me):
            live.append(replace(target, credits=credits))
    return live, missing


def _not_live(family: str, status: SliceStatus | None) -> str:
    if status is None:
        return "no agent reports it"
    if status.state not in SERVING:
        return f"{status.state.name}{f' ({status.why})' if status.why else ''}"
    if not status.grpc_target:
        return "it has no address"
    if not any(hosted.family == family for hosted in status.hosted):
        return f"it does not host {family}"
    return ""


def _renormalised(live: Sequence[RouteTarget]) -> tuple[RouteTarget, ...]:
    total = sum(target.weight for target in live)
    if total <= 0:
        return tuple(replace(target, weight=1.0 / len(live)) for target in live)
    return tuple(replace(target, weight=target.weight / total) for target in live)


def _explain(route: Route, live: Sequence[RouteTarget], missing: Mapping[SliceKey, str]) -> str:
    if not route.targets:
        return "the plan gives it no slice"
    reasons = ", ".join(f"{key.name} {reason}" for key, reason in missing.items())
    if not live:
        return f"no live slice: {reasons or 'all are draining, or belong to other dispatchers'}"
    if not missing:
        return ""
    total = sum(target.weight for target in route.targets if not target.draining) or 1.0
    lost = sum(target.weight for target in route.targets if target.slice in missing) / total
    classes = {(target.variant, target.slice.slice_type) for target in live}
    gone = {(t.variant, t.slice.slice_type) for t in route.targets if t.slice in missing} - classes
    whole = "".join(f", class {variant} on {slice_type} has no live slice" for variant, slice_type in sorted(gone))
    return f"share {lost:.3f} is spread over {len(live)} live slices: {reasons}{whole}"
