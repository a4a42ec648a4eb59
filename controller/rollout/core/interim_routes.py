"""Interim routes: each slice's share of traffic while a rollout is under way, and the capacity of a set of slices.

Data: the slices that serve, the target's shares, a capacity function. Decision: routes whose weights sum to 1.
Formulation: the target's shares over the slices that serve already, if they overload no pool. Otherwise shares are in
proportion to capacity, which puts the SLO before the accuracy. Planners refuse a way that misses either while what runs
carries the load (`rollout_inputs.rollout_refusal`). For a family that is split, shares are those of a stage. It is
routed where all of its stages serve, else not at all.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.catalog import Catalog
from trefoil.core.fleet import SliceKey, split_model, stage_model
from trefoil.core.plan import Plan, PlannedSlice, Route, RouteTarget

NEED_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class RolloutInputs:
    """Inputs of a rollout: what it has to respect, as functions so that it knows no profile.

    `capacity(model, device, slice_type, variant, count)` is the rate of a pool of equal slices [1/s] within the SLO.
    `sustained` is the rate at which requests do not pile up. `swappable(old, new)` says whether both fit the slice's
    memory at once. `faster(part, steps)` is the same slice with faster variants that may serve for a moment. The faster
    variants are at most `steps` steps of accuracy below its own. `same_type(a, b)` says whether two devices are
    interchangeable.
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
    """Capacity of slices for a family, summed over pools of equal slices [1/s]; split, that of its slowest stage."""
    pools: dict[tuple[str, str, str], int] = {}
    example: dict[tuple[str, str, str], str] = {}
    models: dict[str, float] = {}
    for part in live:
        key = part.key
        for hosted in part.hosted:
            if hosted.family == family:
                pool = hosted.model, key.slice_type, hosted.variant
                pools[pool] = pools.get(pool, 0) + 1
                example[pool] = key.device
    for (model, kind, variant), n in sorted(pools.items()):
        models[model] = models.get(model, 0.0) + inputs.capacity(model, example[model, kind, variant], kind, variant, n)
    ways = (_chain(family, stages) for stages in {split_model(model)[2] for model in models})
    return max((min([models.get(model, 0.0) for model in way]) for way in ways), default=0.0)


def _chain(family: str, stages: int) -> list[str]:
    """Models of a family in so many stages."""
    return [stage_model(family, stage, stages) for stage in range(stages)]


def _split(route: Route, models: Collection[str]) -> int:
    """Into how many stages a family is to be routed now: as its route wants it where all of them serve, else as they
    do; 0: none of its ways is whole."""
    wanted = 1 + max((t.stage for t in route.targets), default=0)
    whole = {n for _, _, n in map(split_model, models) if set(_chain(route.family, n)) <= set(models)}
    return wanted if wanted in whole else max(whole, default=0)


def serving_routes(routes: tuple[Route, ...], ready: Mapping[SliceKey, PlannedSlice]) -> tuple[Route, ...]:
    """Routes without slices that do not serve, shares made whole again."""
    found = []
    for route in routes:
        live = tuple(t for t in route.targets if t.slice in ready and not t.draining)
        stages = {t.stage for t in route.targets if not t.draining}
        targets: tuple[RouteTarget, ...] = ()
        for stage in sorted(stages) if stages == {t.stage for t in live} else ():
            mine = tuple(t for t in live if t.stage == stage)
            total = sum(t.weight for t in mine)
            targets += tuple(replace(t, weight=t.weight / total if total > 0 else 1 / len(mine)) for t in mine)
        found.append(replace(route, targets=targets))
    return tuple(found)


def with_draining_targets(route: Route, leaving: Mapping[SliceKey, PlannedSlice]) -> Route:
    """Route with the slices that leave as draining targets of weight 0; none that served it split in another way."""
    stages = 1 + max((t.stage for t in route.targets), default=0)
    extra = tuple(
        RouteTarget(slice=key, variant=h.variant, stage=h.stage, weight=0.0, credits=part.credits, draining=True)
        for key, part in sorted(leaving.items())
        for h in part.hosted
        if h.family == route.family and ((h.stages or 1) == stages or not route.targets)
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
        stay = {k: _models(p, route.family) & _models(slow.get(k, p), route.family) for k, p in ready.items()}
        stages = _split(route, set().union(*stay.values()))
        now = {k: p for k, p in ready.items() if any(split_model(model)[2] == stages for model in stay[k])}
        later = {**now, **{k: p for k, p in slow.items() if k in now}}
        planned = {(t.slice, t.stage): t for t in route.targets}
        limits = _limits(route.family, later, inputs)
        largest: dict[SliceKey, float] = {}
        for t in route.targets:
            largest[t.slice] = max(t.weight, largest.get(t.slice, t.weight))
        weights = {k: largest.get(k, 0.0) for k in now}
        if not _carries(route.family, weights, limits, later, inputs):
            weights = dict(limits) if any(limits.values()) else dict.fromkeys(now, 1.0)
        parts = [(key, h, p) for key, p in sorted(now.items()) for h in p.hosted if h.model in stay[key]]
        parts = [part for part in parts if (part[1].stages or 1) == stages]
        total, number = {h.stage: 0.0 for _, h, _ in parts}, Counter(h.stage for _, h, _ in parts)
        for key, h, _ in parts:
            total[h.stage] += weights[key]
        targets = tuple(
            _target(
                planned.get((key, h.stage)) or RouteTarget(slice=key, stage=h.stage, credits=max(1, p.credits)),
                h.variant,
                weights[key] / total[h.stage] if total[h.stage] else 1 / number[h.stage],
            )
            for key, h, p in parts
        )
        routes.append(replace(route, targets=targets))
    return tuple(routes)


def _models(part: PlannedSlice, family: str) -> set[str]:
    """What a slice serves of a family: itself, or stages of it."""
    return {hosted.model for hosted in part.hosted if hosted.family == family}


def _first(part: PlannedSlice, family: str) -> tuple[str, str]:
    """Model and variant of what a slice serves of a family; of several stages the first."""
    return next((hosted.model, hosted.variant) for hosted in part.hosted if hosted.family == family)


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
    pools: dict[tuple[str, str, str], list[SliceKey]] = {}
    for key, part in parts.items():
        pools.setdefault((key.slice_type, *_first(part, family)), []).append(key)
    return {
        key: inputs.capacity(model, keys[0].device, slice_type, variant, len(keys)) / len(keys)
        for (slice_type, model, variant), keys in pools.items()
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
    need, total = inputs.needs.get(family, 0.0), dict[str, float]()
    load: dict[tuple[str, str, str], float] = {}
    limit: dict[tuple[str, str, str], float] = {}
    for key, weight in weights.items():
        model = _first(parts[key], family)[0]
        total[model] = total.get(model, 0.0) + weight
    if any(whole <= 0 for whole in total.values()):
        return False
    for key, weight in weights.items():
        pool = (key.slice_type, *_first(parts[key], family))
        load[pool] = load.get(pool, 0.0) + need * weight / total[pool[1]]
        limit[pool] = limit.get(pool, 0.0) + limits[key]
    return all(load[pool] <= limit[pool] + NEED_TOLERANCE for pool in load)
