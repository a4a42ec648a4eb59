"""The routing table: what the plan wants, of what is really there.

A pure function of the plan's routes, the nodes' statuses and the slices ejected here. A target is live when its agent
has published it READY or SWAPPING with an address and the family on it. Also, the plan must not drain it, and it must
not be ejected. Weights are made to sum to 1 over the live targets: what a dead slice was to serve is spread over the
others by their weights, and `why` says so. A plan that cannot be routed is refused whole: the last good table stays.

A family that is split has a route for each of its stages, named as the stage's Triton model is. Each route has a
separate queue and separate credits. One worker has all of its credits, so that no request changes workers between
stages.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dispatcher.queues import QUEUES
from dispatcher.routers import ROUTERS
from dispatcher.routing.core import credit_shares
from dispatcher.routing.core.accuracy_floors import (
    Accuracies,
    AccuracyReach,
    best_accuracy,
    with_guaranteed_accuracy,
)
from dispatcher.routing.core.credit_shares import Part
from dispatcher.routing.core.membership import WorkerId, rank_workers
from dispatcher.slice_health.core.ejection import Place
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, SettingError, StaleRevision
from trefoil.core.fleet import NodeStatus, SliceKey, SliceState, SliceStatus, family_of, stage_model
from trefoil.core.objective import Objective
from trefoil.core.outside.addresses import target_fault
from trefoil.core.parts import Kind, find
from trefoil.core.plan import Plan, Route, RouteTarget
from trefoil.core.plan_check import CREDITS_MAX

SERVING: Final = frozenset({SliceState.READY, SliceState.SWAPPING})
LISTENING: Final = SERVING | {SliceState.DRAINING}  # connecting earlier would leave the channel in its backoff at READY


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a slice. Another generation at the same address is another Triton: no connection is shared."""

    target: str
    generation: int


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """What to route by. `routes` hold live targets only, with this worker's credits; `planned` is what the plan asked
    for. `served_by` names the workers among which a family's credits are divided. `elsewhere` does so too, for families
    that are live and of which this worker has no credit: their requests are forwarded. `alive` names all live slices of
    a family, in any worker's credits; `held` the credits of this worker, live or not. All of these are by model: a
    family, or a stage of one; `chains` names the models of each family, in their order.
    `variants` names them by model and version: as the plan does, else as the nodes do."""

    revision: Revision = Revision()
    routes: Mapping[str, Route] = field(default_factory=dict)
    planned: Mapping[str, Route] = field(default_factory=dict)
    endpoints: Mapping[SliceKey, Endpoint] = field(default_factory=dict)
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    variants: Mapping[tuple[str, int], str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    served_by: Mapping[str, tuple[WorkerId, ...]] = field(default_factory=dict)
    elsewhere: Mapping[str, tuple[WorkerId, ...]] = field(default_factory=dict)
    alive: Mapping[str, tuple[SliceKey, ...]] = field(default_factory=dict)
    held: Mapping[str, Part] = field(default_factory=dict)
    reach: Mapping[str, AccuracyReach] = field(default_factory=dict)
    missing: Mapping[str, Mapping[SliceKey, str]] = field(default_factory=dict)
    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def live(self, family: str) -> tuple[RouteTarget, ...]:
        """Targets that a family can be sent to now, from here."""
        route = self.routes.get(family)
        return route.targets if route is not None else ()

    def served(self, family: str) -> bool:
        """Whether some slice is live for each stage of a family, through whichever worker."""
        models = self.chains.get(family, ())
        return bool(models) and all(self.live(model) or model in self.elsewhere for model in models)

    def why_not(self, family: str) -> str:
        """Why a family is not routed as planned, stage by stage; "" if it is."""
        return "; ".join(self.why[model] for model in self.chains[family] if self.why[model])

    @property
    def summary(self) -> str:
        """Summary in one line: every family that is not routed as planned, and why."""
        return "; ".join(f"{family}: {why}" for family, why in sorted(self.why.items()) if why)


def override_parts(plan: Plan, router: str, queue: str) -> Plan:
    """Replace router and queue of all routes by the operator's choice ("" = the plan's own)."""
    if not router and not queue:
        return plan
    chosen = (replace(route, router=router or route.router, queue=queue or route.queue) for route in plan.routes)
    return replace(plan, routes=tuple(chosen))


def check_plan(plan: Plan, seen: Revision) -> None:
    """Check that a plan can be routed here.

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
        _check_stages(route)
    for route in staged(plan.routes):
        here = f"routes[{route.family}]"
        _check_part_names(route, here)
        for target in route.targets:
            if not 0 <= target.weight < float("inf"):
                raise PlanError("a weight is finite and >= 0", field=f"{here}.weight", value=target.weight)
            if target.credits < 1 and not target.draining:
                raise PlanError("a live target has at least one credit", field=f"{here}.credits", value=target.credits)
            if target.credits > CREDITS_MAX:
                raise PlanError(f"more than {CREDITS_MAX}", field=f"{here}.credits", value=target.credits)
        slices = [target.slice for target in route.targets]
        if len(set(slices)) < len(slices):
            raise PlanError("a slice is targeted twice", field=f"{here}.targets", value=[key.name for key in slices])


def staged(routes: Iterable[Route]) -> Iterator[Route]:
    """Routes of a plan, one for each stage of a family that is split."""
    for route in routes:
        stages = max((target.stage for target in route.targets), default=0) + 1
        if stages == 1:
            yield route
            continue
        for stage in range(stages):
            targets = tuple(target for target in route.targets if target.stage == stage)
            yield replace(route, family=stage_model(route.family, stage, stages), targets=targets)


def _check_stages(route: Route) -> None:
    """What one stage says only the next one of its own variant understands."""
    here, there = f"routes[{route.family}]", {target.stage for target in route.targets}
    if missing := set(range(max(there, default=0))) - there:
        raise PlanError("a stage has no target", field=f"{here}.stage", value=sorted(missing), remedy="route them all")
    variants = sorted({target.variant for target in route.targets})
    if len(there) > 1 and len(variants) > 1:
        remedy = "split one variant, and serve the others by plans of their own"
        raise PlanError(
            "stages of one family are of one variant", field=f"{here}.variant", value=variants, remedy=remedy
        )


def _check_part_names(route: Route, here: str) -> None:
    try:
        router = find(Kind.ROUTER, route.router, ROUTERS)
        find(Kind.QUEUE, route.queue, QUEUES)
        router.settings_of(
            {name: value for name, value in route.params.items() if name in router.settings.model_fields}
        )
    except SettingError as error:
        raise PlanError(str(error), field=here) from error


def build_table(
    plan: Plan,
    nodes: Iterable[NodeStatus],
    ejected: Mapping[Place, str] | None = None,
    workers: Sequence[WorkerId] = (),
    me: WorkerId = ("", 0),
    slow_start_limits: Mapping[Place, int] | None = None,
    agreed: bool = True,
    before: Mapping[str, Part] | None = None,
) -> RoutingTable:
    """The routing table of a plan that passed `check_plan`.

    `ejected` gives the reason, of a slice whole or of one model there. `workers` share each slice's credits; if none
    are given, this one has all. `slow_start_limits` bound what slices get that have just come back. `agreed`: all
    workers share alike and route by this plan. `before`: the credits that this one held.
    """
    statuses = {s.key: s for node in nodes for device in node.devices for s in device.slices}
    routes, why, reach, absent = {}, {}, {}, {}
    served_by: dict[str, tuple[WorkerId, ...]] = {}
    elsewhere: dict[str, tuple[WorkerId, ...]] = {}
    alive: dict[str, tuple[SliceKey, ...]] = {}
    held: dict[str, Part] = {}
    planned = tuple(staged(plan.routes))
    accuracies = {(route.family, t.variant): t.accuracy for route in planned for t in route.targets}
    for route in planned:
        live, missing = _split(route, statuses, ejected or {}, accuracies)
        # By the plan, not by what is live: all workers read the same one, but each ejects for itself.
        dealt = credit_shares.credit_classes(route.targets)
        served_by[route.family] = among = _serving(route, tuple(workers) or (me,), dealt)
        right = credit_shares.entitled_credits(dealt, among, me)
        held[route.family] = credit_shares.usable_credits(right, (before or {}).get(route.family, {}), agreed)
        mine = credit_shares.own_targets(dealt, live, held[route.family])
        mine = [_limited(target, (slow_start_limits or {}).get((target.slice, route.family))) for target in mine]
        routes[route.family] = replace(route, targets=_renormalised(mine))
        absent[route.family], reach[route.family] = missing, _reach(route, live)
        why[route.family] = _explain(route, live, missing)
        alive[route.family] = tuple(target.slice for target in live)
        if live and not mine:
            elsewhere[route.family] = tuple(worker for worker in among if worker != me)
    return RoutingTable(
        revision=plan.revision,
        routes=routes,
        planned={route.family: route for route in planned},
        endpoints={
            s.key: Endpoint(s.grpc_target, s.generation)
            for s in statuses.values()
            if s.grpc_target and s.state in LISTENING and not target_fault(s.grpc_target)
        },
        objectives={objective.family: objective for objective in plan.objectives},
        variants=_variants(planned, statuses.values()),
        why=why,
        served_by=served_by,
        alive=alive,
        held=held,
        elsewhere=elsewhere,
        reach=reach,
        missing=absent,
        chains=_chains(planned),
    )


def _variants(planned: Iterable[Route], statuses: Iterable[SliceStatus]) -> dict[tuple[str, int], str]:
    reported = {(hosted.model, hosted.version): hosted.variant for s in statuses for hosted in s.hosted}
    return reported | {(r.family, t.version): t.variant for r in planned for t in r.targets if t.version}


def _chains(planned: Iterable[Route]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for route in planned:
        family = family_of(route.family)
        found[family] = (*found.get(family, ()), route.family)
    return found


def _serving(
    route: Route, workers: tuple[WorkerId, ...], dealt: Sequence[Sequence[RouteTarget]]
) -> tuple[WorkerId, ...]:
    """Workers that serve a route. A group of families has one, the same for all of them: its router needs to see all
    their requests. So have the stages of a family."""
    if find(Kind.ROUTER, route.router, ROUTERS).traits.group:
        return tuple(rank_workers(f"{route.router} {route.queue}", workers)[:1])
    if (family := family_of(route.family)) != route.family:
        return tuple(rank_workers(family, workers)[:1])
    return credit_shares.serving_workers(route.family, workers, dealt)


def _limited(target: RouteTarget, limit: int | None) -> RouteTarget:
    return target if limit is None or limit >= target.credits else replace(target, credits=limit)


def _reach(route: Route, live: Sequence[RouteTarget]) -> AccuracyReach:
    promised = [target for target in route.targets if not target.draining]
    return AccuracyReach(best_accuracy(live), best_accuracy(promised))


def _split(
    route: Route, statuses: Mapping[SliceKey, SliceStatus], ejected: Mapping[Place, str], accuracies: Accuracies
) -> tuple[list[RouteTarget], dict[SliceKey, str]]:
    live: list[RouteTarget] = []
    missing: dict[SliceKey, str] = {}
    for target in route.targets:
        if target.draining:
            continue
        out = ejected.get((target.slice, "")) or ejected.get((target.slice, route.family), "")
        reason = _not_live(route.family, statuses.get(target.slice)) or out
        if reason:
            missing[target.slice] = reason
        else:
            live.append(with_guaranteed_accuracy(target, route.family, statuses[target.slice], accuracies))
    return live, missing


def _not_live(family: str, status: SliceStatus | None) -> str:
    if status is None:
        return "no agent reports it"
    if status.state not in SERVING:
        return f"{status.state.name}{f' ({status.why})' if status.why else ''}"
    if not status.grpc_target:
        return "it has no address"
    if why := target_fault(status.grpc_target):
        return why
    if not any(hosted.model == family for hosted in status.hosted):
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
        return f"no live slice: {reasons or 'all are draining'}"
    if not missing:
        return ""
    total = sum(target.weight for target in route.targets if not target.draining) or 1.0
    lost = sum(target.weight for target in route.targets if target.slice in missing) / total
    classes = {(target.variant, target.slice.slice_type) for target in live}
    gone = {(t.variant, t.slice.slice_type) for t in route.targets if t.slice in missing} - classes
    whole = "".join(f", class {variant} on {slice_type} has no live slice" for variant, slice_type in sorted(gone))
    return f"share {lost:.3f} is spread over {len(live)} live slices: {reasons}{whole}"
