"""Columns of families on one slice, by the law of interference.

Source: trefoil/core/interference.py; Triton's dynamic batcher. Data: columns of classes alone, their profile.
Result: for each pair of classes that fit a slice's memory together, a column of each with the other as `beside`. Sets
of up to `families_per_slice` classes get such columns too.
Where every request is a batch, the law stretches the time of each, in the mean over which other families compute. This
also adds to the scatter of that time. A family computes for as much of the time as all of its demand takes on one
slice. So what one family serves depends on the others' demand, not on how that is divided among slices. Where Triton
joins requests, a family's batches are smaller and keep less of the slice busy the lower its demand is. Points (rate,
partner's rate) at which both are in time are found over the batches of one. The program may plan what is below the hull
of those points (`Column.limits`, linear in both rates).
Deviations: all families of a set join requests or none does; sets that do are pairs. A family that is asked for less
than one request a batch counts as one.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations, pairwise, product
from typing import Final, NamedTuple

from controller.planners.columns import TIERS, Column, gap_scv, power_line, row_of, tiers_of
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import Device, Task
from controller.planners.profile_rows import CatalogKey, fits
from trefoil.core.catalog import Catalog
from trefoil.core.fleet import DeviceKind, DeviceType
from trefoil.core.interference import stretch
from trefoil.core.power import active_w
from trefoil.core.queueing import ServiceTime, service_time
from trefoil.core.units import MS_PER_S

LEVELS: Final = 6  # batches of one family at which the most of the other is found
BISECTIONS: Final = 20
ROUNDS: Final = 8
MARGIN: Final = 1.1  # of the time that neighbours compute: they are busy together more often than by chance
SCATTER: Final = 2.0  # deviations of a batch: more than alone, for a long batch of one makes a larger one of the other

Point = tuple[float, float]


def shared_columns(
    catalog: Catalog,
    tasks: Sequence[Task],
    devices: Sequence[Device],
    settings: ExactSettings,
    alone: Sequence[Column],
) -> tuple[Column, ...]:
    """Columns of several families on one slice: of every set of columns that fit its memory and all SLOs together."""
    kinds, by_family = {d.type.name: d.type for d in devices}, {task.family: task for task in tasks}
    at: dict[tuple[str, str, int, str], list[Column]] = {}
    for column in alone:
        if column.key.clock_mhz < 0:
            continue  # what a power limit leaves of the clock depends on all that computes
        at.setdefault((column.device_type, column.slice_type, *column.key[4:6]), []).append(column)
    sizes = Counter((d.type.name, d.zone) for d in devices)
    found: list[Column] = []
    for (name, _, _, zone), here in at.items():
        kind, shape = kinds[name], here[0].shape
        pool = min(sizes[name, zone], max(TIERS)) * max(1, 7 // max(1, shape.compute_slices))
        kept = sorted(here, key=lambda c: c.key)
        for number in range(2, settings.families_per_slice + 1):
            for together in combinations(kept, number):
                variants = [catalog.family(c.family).variant(c.variant) for c in together]
                if len({c.family for c in together}) < number or not fits(shape, *variants):
                    continue
                sides = [_side(c, by_family[c.family], settings) for c in together]
                if any(c.streams_ms_p95 for c in together):
                    continue  # how streams slow a neighbour is not profiled
                if not any(c.batch for c in together):
                    found += _each(kind, sides, pool)
                elif number == 2 and all(c.batch for c in together):
                    found += _joined(CatalogKey(catalog), kind, *sides)
    return tuple(found)


class Side(NamedTuple):
    """One of several families: its class alone, its SLO without transport, what a request is, how many come [1/s]."""

    column: Column
    slo_ms: float
    quantile: float
    scv: float
    gap_ms: float
    items: float
    per_s: float

    def beside(self, *others: "Side") -> Column:
        """Its column beside others, not yet with what it serves there."""
        beside = tuple(sorted((other.column.family, other.column.variant) for other in others))
        key = self.column.key._replace(beside=beside)
        return replace(self.column, key=key, tiers=())


def _side(column: Column, task: Task, settings: ExactSettings) -> Side:
    own = settings.of(task.objective)
    gap_ms, overhead_ms = own.transport_gap_ms, own.overhead_ms
    slo_ms = task.objective.slo_ms - overhead_ms
    demand, quantile = task.demand, task.objective.slo_quantile
    return Side(column, slo_ms, quantile, gap_scv(task), gap_ms, demand.items_mean, demand.rate_p90_per_s)


def _each(kind: DeviceType, sides: Sequence[Side], pool: int) -> list[Column]:
    """All where every request is a batch; none where one of them misses its SLO."""
    alone = [_alone(kind, side) for side in sides]
    longer = [Stretch(1.0, 0.0)] * len(sides)
    for _ in range(ROUNDS):  # each computes longer, and so more of the time, the longer the others do
        used = [
            min(1.0, MARGIN * side.per_s * ms / MS_PER_S * one.mean)
            for side, (ms, _), one in zip(sides, alone, longer, strict=True)
        ]
        beside = [(activity, busy) for (_, activity), busy in zip(alone, used, strict=True)]
        longer = [_stretch(beside[at][0], (*beside[:at], *beside[at + 1 :])) for at in range(len(sides))]
    found = []
    for mine, (compute_ms, _), one in zip(sides, alone, longer, strict=True):
        before = mine.column.service
        service = ServiceTime(before.mean_ms + compute_ms * (one.mean - 1), math.hypot(before.cv, one.cv))
        tiers = tiers_of(service, mine.slo_ms, mine.quantile, mine.scv, pool)
        found.append(replace(mine.beside(*(side for side in sides if side is not mine)), service=service, tiers=tiers))
    return found if all(column.tiers for column in found) else []


class Stretch(NamedTuple):
    """Time of a batch beside others over its time alone: mean and CV."""

    mean: float
    cv: float


def _stretch(activity: float, others: Sequence[tuple[float, float]]) -> Stretch:
    """Law of interference over who else computes: of each other its activity, and how much of the time."""
    mean = square = 0.0
    for who in product((False, True), repeat=len(others)):
        chance = math.prod(busy if on else 1 - busy for on, (_, busy) in zip(who, others, strict=True))
        one = stretch(activity, sum(use for on, (use, _) in zip(who, others, strict=True) if on))
        mean, square = mean + chance * one, square + chance * one * one
    return Stretch(mean, math.sqrt(max(0.0, square - mean * mean)) / mean)


def _alone(kind: DeviceType, side: Side) -> tuple[float, float]:
    """Time that a request of a class computes alone [ms], and what part of its slice that keeps busy."""
    column = side.column
    compute_ms = column.service.mean_ms - side.gap_ms
    return compute_ms, _activity(kind, column, column.energy_j, compute_ms)


def _activity(kind: DeviceType, column: Column, joules: float, compute_ms: float) -> float:
    if kind.kind == DeviceKind.CPU:
        return 1.0
    return min(1.0, joules / compute_ms * MS_PER_S / active_w(kind, column.slice_type, column.clock_mhz))


class Batch(NamedTuple):
    """Batch of a class alone: items, time [ms], activity; `late_`: of the largest that is likely."""

    size: float
    mean_ms: float
    late_ms: float
    activity: float
    late_activity: float
    cv: float


@lru_cache(maxsize=4096)
def _joined(same: CatalogKey, kind: DeviceType, a: Side, b: Side) -> tuple[Column, ...]:
    """Both where Triton joins requests; none where they cannot both be in time."""
    found: dict[Point, tuple[Batch, Batch]] = {}
    for mine, other, swapped in ((a, b, False), (b, a, True)):
        top = min(mine.column.batch * mine.items, _likely(mine.column.max_batch))
        for level in range(LEVELS):
            first = _batch(same, kind, mine, top ** (level / (LEVELS - 1)))
            most = _most_beside(same, kind, mine, first, other)
            if first is None or most is None:
                continue
            rates = _rate(mine, first, most), _rate(other, most, first)
            found[rates[::-1] if swapped else rates] = (most, first) if swapped else (first, most)
    hull = _hull(list(found))
    if not hull:
        return ()
    limits = tuple(_limit(one, two) for one, two in pairwise(hull))
    middle = found[min(found, key=lambda p: abs(p[0] / hull[-1][0] - p[1] / hull[0][1]))]
    columns = []
    for at, (mine, other) in enumerate(((a, b), (b, a))):
        batch, beside = middle[at], middle[1 - at]
        slower = stretch(batch.activity, beside.activity)
        per_s = max(point[at] for point in hull)
        row = partial(row_of, same.catalog, kind, mine.column)
        running_w, item_j = power_line(row, mine.items, batch.size, slower)
        service = ServiceTime(batch.mean_ms * slower / batch.size * mine.items, batch.cv)
        column = replace(
            mine.beside(other),
            service=service,
            energy_j=item_j * mine.items,
            running_w=running_w,
            tiers=tuple((size, per_s) for size, _ in mine.column.tiers),
            batch=batch.size / mine.items,
            limits=() if at else limits,
        )
        columns.append(column)
    return tuple(columns)


def _likely(most: float) -> float:
    """The batch that is likely to grow to `most`: b + SCATTER sqrt(b) = most."""
    return float((math.sqrt(SCATTER**2 / 4 + most) - SCATTER / 2) ** 2)


def _batch(same: CatalogKey, kind: DeviceType, side: Side, size: float) -> Batch | None:
    """A batch; None where the largest that is likely is beyond the profile."""
    column, most = side.column, size + SCATTER * math.sqrt(size)
    if most > column.max_batch:
        return None
    usual, late = (row_of(same.catalog, kind, column, n) for n in (size, most))
    service = service_time(usual)
    activity = _activity(kind, column, usual.energy_active_j_per_batch, service.mean_ms)
    late_activity = _activity(kind, column, late.energy_active_j_per_batch, service_time(late).mean_ms)
    return Batch(size, service.mean_ms, late.latency_ms_p95, activity, late_activity, service.cv)


def _most_beside(same: CatalogKey, kind: DeviceType, mine: Side, first: Batch | None, other: Side) -> Batch | None:
    """The largest batch of the other beside one of mine with which both are in time."""
    if first is None:
        return None
    best, low, high = None, 1.0, float(other.column.max_batch)
    for step in range(BISECTIONS):
        size = low if step == 0 else (low + high) / 2
        tried = _batch(same, kind, other, size)
        if tried is not None and _in_time(mine, first, tried) and _in_time(other, tried, first):
            best, low = tried, size
        elif step == 0:
            return None
        else:
            high = size
    return best


def _in_time(side: Side, batch: Batch, beside: Batch) -> bool:
    """Both at their largest: what delays one lets the other's requests gather."""
    return 2 * batch.late_ms * stretch(batch.late_activity, beside.late_activity) <= side.slo_ms - side.gap_ms


def _rate(side: Side, batch: Batch, beside: Batch) -> float:
    return batch.size / (batch.mean_ms * stretch(batch.activity, beside.activity)) * MS_PER_S / side.items


def _hull(points: Sequence[Point]) -> list[Point]:
    """Upper right hull of points and of what is below them, by the first rate, from 0 to its greatest."""
    if not points:
        return []
    corners = [(0.0, max(y for _, y in points)), *points, (max(x for x, _ in points), 0.0)]
    hull: list[Point] = []
    for point in sorted(corners, key=lambda p: (p[0], -p[1])):
        while len(hull) > 1 and _turns_left(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_left(one: Point, two: Point, three: Point) -> bool:
    return (two[0] - one[0]) * (three[1] - one[1]) - (two[1] - one[1]) * (three[0] - one[0]) >= 0


def _limit(one: Point, two: Point) -> Point:
    """(x, y) with x times the first rate and y times the second at most 1 below the line through two points."""
    x, y = one[1] - two[1], two[0] - one[0]
    at = x * one[0] + y * one[1]
    return x / at, y / at
