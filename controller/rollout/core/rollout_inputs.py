"""Inputs of a rollout, read out of a view: what stands, needs, capacities, memory; and the best path by them.

Formulation: capacity = `trefoil.core.queueing.rate_max` at the slice's highest clock and batch 1, by the objective's
SLO and the gaps of the demand. Relaxed inputs count a slice's saturation rate instead, less a reserve: for the seconds
of a rollout the SLO may be missed, requests may not pile up. They are the second choice, and the rollout says so. Where
what stands, or the target, misses the SLO anyway, saturation rates bind all the same: else nothing would.
A family without any profile: capacity in compute slices, need = half of what is routed to now. Nothing is known of its
speed before it is measured; what keeps half of the hardware serving leaves no request without a slice.
Deviations: none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from controller.observe.core.plannable import AWAKE_STATES, loadable_catalog, wrong_mig_mode
from controller.rollout.core.interim_routes import (
    RolloutInputs,
    interim_routes,
    routed_capacity,
    with_draining_targets,
)
from controller.rollout.core.path import FleetSnapshot, RolloutPath, plan_path
from trefoil.core.brains import PlanView
from trefoil.core.catalog import Catalog, memory_mib
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import CPUS, find_slice_type, profile_type
from trefoil.core.errors import NotFound
from trefoil.core.fleet import (
    SERVING,
    DeviceState,
    DeviceType,
    FleetState,
    Hosted,
    SliceKey,
    SliceState,
    family_of,
)
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.plan import NodePlan, Plan, PlannedDevice, PlannedSlice, Route
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.queueing import ServiceTime, StreamLaw, StreamLimits, rate_max, stream_answers, streams_rate_max

SATURATION: Final = 0.9  # of a slice's throughput that relaxed inputs count on
WAY_S: Final = 20.0  # that a way through faster variants takes; measured: 10 to 20 s
FLOOR_TOLERANCE: Final = 5e-4  # of the accuracy on a way, which lasts some seconds
UNREPORTED: Final = DeviceType()
UNPROFILED_SHARE: Final = 0.5  # of the compute slices that a family without a profile is routed to


def _row(catalog: Catalog, kind: DeviceType, shape: str, family: str, variant: str) -> ProfileRow | None:
    """Row of a class: batch 1, alone, whole, the highest clock; of CPU slices of any size. None: not profiled."""
    found = catalog.fastest_rows.get((kind.name, shape, family, variant))
    if found is None and profile_type(kind.name) == CPUS:
        found = next((row for row in catalog.cpu_rows.rows(shape, family, variant) if row.batch == 1), None)
    return found


def _streams(models: Catalog, row: ProfileRow, objective: Objective) -> tuple[tuple[ServiceTime, ...], float] | None:
    """Answers of a class by the streams that run, and steps of one; None: its family has no objective of tokens."""
    tokens_mean = models.family(row.family).tokens_mean
    if not objective.token_slo or not tokens_mean:
        return None
    key = (row.device_type, row.slice_type, row.family, row.variant, row.stage, row.clock_mhz, row.cohosted)
    return stream_answers(models.rows_by_batch.get(key, (row,))), tokens_mean + 1


def rollout_inputs(view: PlanView, relaxed: bool = False) -> RolloutInputs:
    """Inputs of a rollout decided on this view."""
    types = view.fleet.types
    objectives = {o.family: o for o in view.objectives}
    demand = {d.family: d for d in view.demand}
    models, profiled = view.catalog.by_model, view.catalog.profiled_families
    loadable = loadable_catalog(view.catalog, view.fleet)

    def type_of(device: str) -> DeviceType:
        return types.get(device) or UNREPORTED

    def sustained(model: str, device: str, kind: str, variant: str, count: int) -> float:
        family = family_of(model)
        if family not in profiled:
            return count * _compute_slices(type_of(device), kind)
        row = _row(models, type_of(device), kind, model, variant)
        if row is None or family not in objectives:
            return 0.0
        if streams := _streams(models, row, objectives[family]):
            return SATURATION * StreamLaw(*streams).saturation_per_s * count
        return SATURATION * row.throughput_per_s * count

    @lru_cache(maxsize=4096)
    def capacity(model: str, device: str, kind: str, variant: str, count: int) -> float:
        family, row = family_of(model), _row(models, type_of(device), kind, model, variant)
        if relaxed or row is None or family not in objectives:
            return sustained(model, device, kind, variant, count)
        gap_scv = demand[family].gap_scv if family in demand else 1.0
        objective = objectives[family]
        if streams := _streams(models, row, objective):
            limits = StreamLimits(objective.slo_ms, objective.slo_quantile, objective.token_slo)
            return count * streams_rate_max(*streams, limits)[0]
        return rate_max(row, objective.slo_ms, objective.slo_quantile, gap_scv, count)

    def faster(part: PlannedSlice, steps: int) -> PlannedSlice:
        kind = type_of(part.key.device)
        return replace(
            part, hosted=tuple(_faster(models, loadable, objectives, kind, part, h, steps) for h in part.hosted)
        )

    needs = {d.family: d.rate_per_s for d in view.demand if d.family in objectives and d.family in profiled}
    for route in view.current.routes if view.current else ():
        if route.family in objectives and route.family not in profiled:
            routed = [t.slice for t in route.targets if not t.draining]
            whole = sum(_compute_slices(type_of(key.device), key.slice_type) for key in routed)
            needs[route.family] = UNPROFILED_SHARE * whole
    return RolloutInputs(
        needs=needs,
        capacity=capacity,
        sustained=sustained,
        swappable=lambda old, new: _fits(view.catalog, type_of(old.key.device), old, new),
        faster=faster,
        same_type=lambda a, b: types.get(a) == types.get(b),
    )


def _compute_slices(kind: DeviceType, slice_type_name: str) -> int:
    shape = find_slice_type(kind, slice_type_name)
    return shape.compute_slices if shape is not None else 0


def _faster(
    models: Catalog,
    loadable: Catalog,
    objectives: Mapping[str, Objective],
    kind: DeviceType,
    part: PlannedSlice,
    hosted: Hosted,
    steps: int,
) -> Hosted:
    """So many steps towards the fastest variant that fits and is not below the hard floor, each to a faster one."""
    if hosted.stages > 1:  # stages are of one variant
        return hosted
    objective = objectives.get(hosted.family)
    best, best_row = hosted, _row(models, kind, part.key.slice_type, hosted.family, hosted.variant)
    for variant in reversed(loadable.family(hosted.family).by_accuracy()):
        row = _row(models, kind, part.key.slice_type, hosted.family, variant.name)
        if row is None or (objective is not None and variant.accuracy < objective.hard_min_accuracy):
            continue
        if steps and (best_row is None or row.throughput_per_s > best_row.throughput_per_s):
            best, best_row = replace(hosted, variant=variant.name, version=variant.version), row
            steps -= 1
    return best


def _fits(catalog: Catalog, kind: DeviceType, old: PlannedSlice, new: PlannedSlice) -> bool:
    """Whether a slice can swap in place: memory for old and new at once, and no sequences that would break."""
    kept = {(h.family, h.variant) for h in new.hosted}
    shape = find_slice_type(kind, old.key.slice_type)
    try:
        if any(catalog.family(h.family).sequence for h in old.hosted if (h.family, h.variant) not in kept):
            return False
        both = {(h.model, h.variant): memory_mib(catalog, h) for part in (old, new) for h in part.hosted}
    except NotFound:  # an agent reports what the repository has lost, or never had
        return False
    return shape is not None and CONTEXT_MIB + sum(both.values()) <= shape.memory_mib


def fleet_snapshot(fleet: FleetState, commanded: Mapping[str, NodePlan], routes: tuple[Route, ...]) -> FleetSnapshot:
    """Snapshot of the fleet by what the agents report; `commanded` only fills in what they cannot report (clocks,
    limits).
    """
    devices: dict[str, PlannedDevice] = {}
    present: set[SliceKey] = set()
    fixed: set[str] = set()
    closed: set[str] = set()
    wanted = {d.device: d for plan in commanded.values() for d in plan.devices}
    for node in fleet.nodes:
        for status in node.devices:
            base = wanted.get(status.device) or PlannedDevice(device=status.device)
            if not status.usable or wrong_mig_mode(status):
                closed.add(status.device)
            if status.state == DeviceState.LOST:
                fixed.add(status.device)
                devices[status.device] = replace(base, target=DeviceState.ASLEEP, slices=())
                continue
            if node.node in fleet.stale:
                fixed.add(status.device)
                devices[status.device] = base
            else:
                target = DeviceState.AWAKE if status.state in AWAKE_STATES else DeviceState.ASLEEP
                devices[status.device] = replace(base, target=target, slices=())
            present.update([p.key for p in status.slices if p.state not in (SliceState.GONE, SliceState.UNSPECIFIED)])
    ready = serving_slices(fleet, commanded)
    return FleetSnapshot(devices, ready, frozenset(present), routes, frozenset(fixed), frozenset(closed))


def serving_slices(fleet: FleetState, commanded: Mapping[str, NodePlan]) -> dict[SliceKey, PlannedSlice]:
    """Slices that serve, by what the agents report; credits that they do not report are those of `commanded`."""
    credits = {part.key: part.credits for plan in commanded.values() for d in plan.devices for part in d.slices}
    return {
        p.key: PlannedSlice(p.key, p.hosted, p.credits or credits.get(p.key, 1))
        for node in fleet.nodes
        for device in node.devices
        if device.state != DeviceState.LOST
        for p in device.slices
        if p.state in SERVING and p.hosted
    }


def rollout_refusal(view: PlanView, plan: Plan) -> str:
    """Reason why no rollout leads from the view to the plan; "" when one does. Planners ask before they decide."""
    current = view.current
    commanded = {node.node: node for node in current.nodes} if current else {}
    snapshot = fleet_snapshot(view.fleet, commanded, current.routes if current else ())
    inputs = rollout_inputs(view)
    found = best_path(view, snapshot, plan, inputs)
    if found.halted:
        return found.why
    now = routed_capacity(snapshot.routes, snapshot.ready, inputs)
    if found.misses_slo and _carries_and_keeps(view, snapshot.routes, now):
        return f"{found.misses_slo}, what runs carries the load without"
    return _below_floor(view, snapshot, now, found)


def _carries_and_keeps(view: PlanView, routes: Sequence[Route], now: Mapping[str, float]) -> bool:
    """Whether what is routed to now carries every family's load within its SLO, and keeps its floor. `now`: its
    capacity [1/s] by family.
    """
    floors = {o.family: o.min_accuracy - FLOOR_TOLERANCE for o in view.objectives if o.mode != ObjectiveMode.LAMBDA}
    needs = {d.family: d.rate_per_s for d in view.demand if not d.slo_class}
    return all(now.get(o.family, 0.0) >= needs.get(o.family, 0.0) for o in view.objectives) and all(
        _accuracy(view.catalog, route) >= floors.get(route.family, 0.0) for route in routes
    )


def _below_floor(view: PlanView, snapshot: FleetSnapshot, now: Mapping[str, float], path: RolloutPath) -> str:
    """Reason why a way is not worth its accuracy; "" if it is.

    The reason is a family whose load the present routes carry. On the way its accuracy would fall below its floor and
    below the present one, and `_made_up_for` does not allow it.
    """
    routes_now = {route.family: route for route in snapshot.routes}
    for objective in view.objectives:
        family, floor = objective.family, objective.min_accuracy - FLOOR_TOLERANCE
        need = next((d.rate_per_s for d in view.demand if d.family == family), 0.0)
        if now.get(family, 0.0) < need or family not in routes_now:
            continue
        ways = [_accuracy(view.catalog, r) for step in path.steps for r in step.routes if r.family == family]
        lowest, before = min(ways, default=1.0), _accuracy(view.catalog, routes_now[family])
        lower = lowest < min(floor, before - FLOOR_TOLERANCE)
        if lower and not _made_up_for(view, objective, before, lowest, ways[-1]):
            return f"{family} would have an accuracy of {lowest:.4f} on the way, what runs carries the load without"
    return ""


def _made_up_for(view: PlanView, objective: Objective, before: float, lowest: float, after: float) -> bool:
    """Whether a family may be served at a low accuracy on a way.

    It may if it has no floor, or if it is below a floor that holds at every instant already. In mode budget it may if
    it is below the floor already and gains by the end of the window. It also may if the mean of its window can still
    reach the floor afterwards.
    """
    floor = objective.min_accuracy
    if objective.mode == ObjectiveMode.INSTANT:
        return before < floor - FLOOR_TOLERANCE
    budget = next((b for b in view.budgets if b.family == objective.family), None)
    if objective.mode == ObjectiveMode.LAMBDA or budget is None:
        return True
    mean = budget.accuracy_sum / budget.requests if budget.requests else floor
    best = view.catalog.family(objective.family).best.accuracy
    left_s = max(0.0, budget.window_s - budget.elapsed_s)
    if before < floor - FLOOR_TOLERANCE and WAY_S * (after - lowest) < left_s * (after - before):
        return True
    room_s = budget.elapsed_s * (mean - floor) + left_s * (best - floor)
    return WAY_S * (floor - lowest) <= max(0.0, room_s)


def _accuracy(catalog: Catalog, route: Route) -> float:
    """Mean accuracy of a route's shares; 1.0 of one that leads nowhere, or to a family that the catalogue has lost."""
    known = {v.name: v.accuracy for family in catalog.families if family.name == route.family for v in family.variants}
    live = [(t.weight, known[t.variant]) for t in route.targets if not t.draining and t.variant in known]
    total = sum(weight for weight, _ in live)
    return sum(weight * accuracy for weight, accuracy in live) / total if total > 0 else 1.0


def early_routes(
    view: PlanView, serving: Mapping[SliceKey, PlannedSlice], routed: tuple[Route, ...], plan: Plan
) -> tuple[Route, ...] | None:
    """Routes that take in what is READY already, when what is routed now does not carry the load; else None."""
    inputs = rollout_inputs(view)
    now = routed_capacity(routed, serving, inputs)
    short = [family for family, need in inputs.needs.items() if now.get(family, 0.0) < need]
    if not short:
        return None
    leaving = {t.slice for route in routed for t in route.targets if t.draining}
    ready = {key: part for key, part in serving.items() if key not in leaving}
    routes = interim_routes(plan, ready, inputs, routed)
    more = routed_capacity(routes, ready, inputs)
    if not any(more.get(family, 0.0) > now.get(family, 0.0) for family in short):
        return None
    gone = {key: part for key, part in serving.items() if key in leaving}
    return tuple(with_draining_targets(route, gone) for route in routes)


class _PathKey:
    """What a way depends on, as the key of a memo: plans are asked for once before they are decided, and once after."""

    __slots__ = ("_hash", "inputs", "key", "plan", "snapshot", "view")

    def __init__(self, view: PlanView, snapshot: FleetSnapshot, plan: Plan, inputs: RolloutInputs | None) -> None:
        self.view, self.snapshot, self.plan, self.inputs = view, snapshot, plan, inputs
        demand = tuple((d.family, d.rate_per_s, d.gap_scv) for d in view.demand)
        wanted = tuple((o.family, o.slo_ms, o.slo_quantile, o.token_slo, o.hard_min_accuracy) for o in view.objectives)
        nodes = tuple((n.node, n.devices) for n in plan.nodes)
        profiled = view.catalog.profiled_families
        before = tuple(r for r in (view.current.routes if view.current else ()) if r.family not in profiled)
        self.key = (demand, wanted, view.fleet.types, nodes, plan.routes, snapshot, before)
        self._hash = hash((demand, wanted, tuple(n.digest for n in plan.nodes), len(snapshot.ready)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PathKey) and self.view.catalog is other.view.catalog and self.key == other.key


def best_path(view: PlanView, snapshot: FleetSnapshot, plan: Plan, inputs: RolloutInputs | None = None) -> RolloutPath:
    """Best path: under the SLO's capacities, else one on which requests at least do not pile up. `inputs`: those of
    the view, where the caller has them."""
    return _best_path(_PathKey(view, snapshot, plan, inputs))


@lru_cache(maxsize=64)
def _best_path(asked: _PathKey) -> RolloutPath:
    view, snapshot, plan = asked.view, asked.snapshot, asked.plan
    strict = plan_path(snapshot, plan, asked.inputs or rollout_inputs(view))
    if not strict.halted:
        return strict
    relaxed = plan_path(snapshot, plan, rollout_inputs(view, relaxed=True))
    if relaxed.halted:
        return strict
    why = f"{relaxed.why}; for a moment the SLO may be missed ({strict.why})"
    return replace(relaxed, why=why, misses_slo=strict.why)
