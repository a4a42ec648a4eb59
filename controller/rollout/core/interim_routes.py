"""Interim routes: each slice's share of traffic while a rollout is under way, and the capacity of a set of slices.

Data: the slices that serve, the target's shares, a capacity function. Decision: routes whose weights sum to 1.
Formulation: the target's shares over the slices that serve already, if they overload no pool; else shares in proportion
to capacity: a plan's accuracy may be missed for the seconds of a rollout, its SLO should not be.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.catalog import Catalog
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Plan, PlannedSlice, Route, RouteTarget

NEED_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class RolloutInputs:
    """Inputs of a rollout: what it has to respect, as functions so that it knows no profile.

    `capacity(family, device, slice_type, variant, count)` is the rate of a pool of equal slices [1/s] within the SLO,
    `sustained` the rate at which requests do not pile up;
    `swappable(old, new)` whether both fit the slice's memory at once; `faster(part, steps)` the same slice with faster
    variants that may serve for a moment, so many steps of accuracy below its own at most; `same_type(a, b)` whether two
    devices are interchangeable.
    """

    needs: Mapping[str, float]
    capacity: Callable[[str, str, str, str, int], float]
    sustained: Callable[[str, str, str, str, int], float]
    swappable: Callable[[PlannedSlice, PlannedSlice], bool]
    faster: Callable[[PlannedSlice, int], PlannedSlice]
    same_type: Callable[[str, str], bool]


def routed_capacity(
    routes: tuple[Route, ...], ready: Mapping[SliceKey, PlannedSlice], inputs: RolloutInputs
) -> dict[str, float]:
    """Capacity of what is routed to and ready, per family [1/s]."""
    found: dict[str, float] = {}
    for route in routes:
        live = [ready[t.slice] for t in route.targets if not t.draining and t.slice in ready]
        found[route.family] = capacity_of(route.family, live, inputs)
    return found


def capacity_of(family: str, live: Iterable[PlannedSlice], inputs: RolloutInputs) -> float:
    """Capacity of slices for a family, summed over pools of equal slices [1/s]."""
    pools: dict[tuple[str, str], int] = {}
    example: dict[tuple[str, str], str] = {}
    for part in live:
        key = part.key
        for hosted in part.hosted:
            if hosted.family == family:
                pool = key.slice_type, hosted.variant
                pools[pool] = pools.get(pool, 0) + 1
                example[pool] = key.device
    return sum([inputs.capacity(family, example[pool], pool[0], pool[1], n) for pool, n in sorted(pools.items())])


def serving_routes(routes: tuple[Route, ...], ready: Mapping[SliceKey, PlannedSlice]) -> tuple[Route, ...]:
    """Routes without slices that do not serve, shares made whole again."""
    found = []
    for route in routes:
        targets = tuple(t for t in route.targets if t.slice in ready and not t.draining)
        total = sum(t.weight for t in targets)
        if total > 0:
            targets = tuple(replace(t, weight=t.weight / total) for t in targets)
        else:
            targets = tuple(replace(t, weight=1 / len(targets)) for t in targets)
        found.append(replace(route, targets=targets))
    return tuple(found)


def with_draining_targets(route: Route, leaving: Mapping[SliceKey, PlannedSlice]) -> Route:
    """Route with the slices that leave as draining targets of weight 0."""
    extra = tuple(
        RouteTarget(slice=key, variant=h.variant, stage=h.stage, weight=0.0, credits=part.credits, draining=True)
        for key, part in sorted(leaving.items())
        for h in part.hosted
        if h.family == route.family
    )
    return replace(route, targets=route.targets + extra)


def interim_routes(
    target: Plan,
    ready: Mapping[SliceKey, PlannedSlice],
    inputs: RolloutInputs,
    current_routes: tuple[Route, ...],
    slow: Mapping[SliceKey, PlannedSlice] | None = None,
) -> tuple[Route, ...]:
    """Routes over what serves: the target's shares where no class is overloaded by them, else by capacity.

    `slow` are slices that will serve a slower variant before this step ends: their share is that of the new variant,
    and none of a family that they will not serve any more.
    """
    routes, slow = [], slow or {}
    families = {route.family for route in target.routes}
    for route in (*target.routes, *(r for r in current_routes if r.family not in families)):
        now = {k: p for k, p in ready.items() if _variant(p, route.family) and _variant(slow.get(k, p), route.family)}
        later = {**now, **{k: p for k, p in slow.items() if k in now}}
        planned = {(t.slice, t.stage): t for t in route.targets}
        limits = _limits(route.family, later, inputs)
        largest: dict[SliceKey, float] = {}
        for t in route.targets:
            largest[t.slice] = max(t.weight, largest.get(t.slice, t.weight))
        weights = {k: largest.get(k, 0.0) for k in now}
        if not _carries(route.family, weights, limits, later, inputs):
            weights = dict(limits) if any(limits.values()) else dict.fromkeys(now, 1.0)
        parts = [(key, h, p) for key, p in sorted(now.items()) for h in p.hosted if h.family == route.family]
        total = {h.stage: 0.0 for _, h, _ in parts}
        for key, h, _ in parts:
            total[h.stage] += weights[key]
        targets = tuple(
            _target(
                planned.get((key, h.stage)) or RouteTarget(slice=key, stage=h.stage, credits=max(1, p.credits)),
                h.variant,
                weights[key] / total[h.stage] if total[h.stage] else 1 / len(parts),
            )
            for key, h, p in parts
        )
        routes.append(replace(route, targets=targets))
    return tuple(routes)


def _variant(part: PlannedSlice, family: str) -> str | None:
    """What a slice serves of a family; None: nothing."""
    for hosted in part.hosted:
        if hosted.family == family:
            return hosted.variant
    return None


def with_catalog_facts(routes: tuple[Route, ...], catalog: Catalog) -> tuple[Route, ...]:
    """Routes with accuracy and version of what each target is to serve, as dispatchers need them for floors."""
    families = {family.name: family for family in catalog.families}
    found = []
    for route in routes:
        variants = {v.name: v for v in families[route.family].variants} if route.family in families else {}
        targets = tuple(
            replace(t, accuracy=variants[t.variant].accuracy, version=variants[t.variant].version)
            if t.variant in variants
            else t
            for t in route.targets
        )
        found.append(replace(route, targets=targets))
    return tuple(found)


def _target(planned: RouteTarget, variant: str, weight: float) -> RouteTarget:
    """A target that serves; the one that was planned where nothing of it changes."""
    if planned.weight == weight and planned.variant == variant and not planned.draining:
        return planned
    return replace(planned, variant=variant, weight=weight, draining=False)


def _limits(family: str, parts: Mapping[SliceKey, PlannedSlice], inputs: RolloutInputs) -> dict[SliceKey, float]:
    """Each slice's part of its pool's capacity [1/s]."""
    pools: dict[tuple[str, str], list[SliceKey]] = {}
    for key, part in parts.items():
        pools.setdefault((key.slice_type, _variant(part, family) or ""), []).append(key)
    return {
        key: inputs.capacity(family, keys[0].device, slice_type, variant, len(keys)) / len(keys)
        for (slice_type, variant), keys in pools.items()
        for key in keys
    }


def _carries(
    family: str,
    weights: Mapping[SliceKey, float],
    limits: Mapping[SliceKey, float],
    parts: Mapping[SliceKey, PlannedSlice],
    inputs: RolloutInputs,
) -> bool:
    """Whether these shares of the need overload no class."""
    total = sum(weights.values())
    if total <= 0:
        return not weights
    need = inputs.needs.get(family, 0.0)
    load: dict[tuple[str, str], float] = {}
    limit: dict[tuple[str, str], float] = {}
    for key, weight in weights.items():
        pool = key.slice_type, _variant(parts[key], family) or ""
        load[pool] = load.get(pool, 0.0) + need * weight / total
        limit[pool] = limit.get(pool, 0.0) + limits[key]
    return all(load[pool] <= limit[pool] + NEED_TOLERANCE for pool in load)
