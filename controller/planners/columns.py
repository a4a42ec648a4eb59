"""Operating points: what one slice of a class can serve, at what cost, as a function of the pool it belongs to.

Data: profile rows of a slice type (latency percentiles, active joules per batch), SLO, SCV of gaps, items per request.
Result: per class (family, device type, slice type, variant) a `Column` with the rate of one slice for each pool tier.
A class whose memory does not fit, or that cannot meet the SLO even alone and idle, has no column. Dominated columns go.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations
from typing import Final, NamedTuple

from controller.planners.planning_input import Device, HostedSlice, Task, constant_for
from trefoil.core.catalog import Catalog, Family, ProfileRow, Variant
from trefoil.core.device_types import MEMORY_SLICES, slice_type
from trefoil.core.fleet import DeviceKind, DeviceType, SliceType
from trefoil.core.interference import stretch
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.power import active_w
from trefoil.core.queueing import ServiceTime, pool_rate_max, service_time, utilisation_max
from trefoil.core.units import MS_PER_S

TIERS: Final = (*range(1, 15), 20, 28, 40, 70, 280)  # pool sizes whose rate is computed; `Column.pieces` joins them
GAP_SCV_STEP: Final = 0.25  # a measured SCV is noisy: rounded, so that the plan does not follow its noise


class ClassKey(NamedTuple):
    """Key of slices that are alike. `clock_mhz` 0: the highest, not locked. `zone` empty: where the view's `carbon`
    holds. `beside`: (family, variant) of the others on each of these slices.
    """

    family: str
    device_type: str
    slice_type: str
    variant: str
    clock_mhz: int = 0
    zone: str = ""
    beside: tuple[tuple[str, str], ...] = ()

    @property
    def model(self) -> "ClassKey":
        """Key of what has to be loaded: a change of the clock or of a neighbour is no reload."""
        return self._replace(clock_mhz=0, beside=())

    @property
    def leads(self) -> bool:
        """Whether it is the first in order of the classes that share these slices: the one by which they count."""
        return not self.beside or self.family < self.beside[0][0]

    @property
    def partners(self) -> "tuple[ClassKey, ...]":
        """Classes that share these slices."""
        everyone = ((self.family, self.variant), *self.beside)
        return tuple(
            self._replace(family=f, variant=v, beside=tuple(sorted(one for one in everyone if one != (f, v))))
            for f, v in self.beside
        )


def class_of(device: Device, running: HostedSlice) -> ClassKey:
    """Class of a slice that stands or is planned on a device."""
    shape, clock_mhz = running.key.slice_type, device.clock_mhz
    return ClassKey(running.family, device.type.name, shape, running.variant, clock_mhz, device.zone, running.beside)


class Piece(NamedTuple):
    """Piece of a pool's capacity: slope_per_s * slices - less_per_s from `size` slices on, up to the next piece."""

    size: int
    slope_per_s: float
    less_per_s: float


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the program: one class of slices. `tiers`: (size of the pool, rate of one slice in it [1/s])."""

    key: ClassKey
    accuracy: float
    version: int
    max_batch: int
    clock_mhz: int
    service: ServiceTime
    energy_j: float
    load_j: float
    start_j: float
    load_s: float
    tiers: tuple[tuple[int, float], ...]

    def __hash__(self) -> int:
        return hash((self.key, self.energy_j))  # enough to tell most apart: columns are in the keys of many memos

    @property
    def family(self) -> str:
        """Family of the class."""
        return self.key[0]

    @property
    def device_type(self) -> str:
        """Device type of the class."""
        return self.key[1]

    @property
    def slice_type(self) -> str:
        """Slice type of the class."""
        return self.key[2]

    @property
    def variant(self) -> str:
        """Variant of the class."""
        return self.key[3]

    @property
    def saturation_per_s(self) -> float:
        """Rate at which one slice is always busy [1/s]."""
        return MS_PER_S / self.service.mean_ms

    def capacity_per_s(self, slices: int) -> float:
        """Rate of a whole pool of that many slices within the SLO [1/s]."""
        pieces = self.pieces
        at = bisect_right(pieces, slices, key=lambda piece: piece.size) - 1
        return pieces[at].slope_per_s * slices - pieces[at].less_per_s if at >= 0 else 0.0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of the capacity as a function of the pool's size, ascending."""
        return _pieces(self.tiers, self.saturation_per_s)


@lru_cache(maxsize=65536)
def _pieces(tiers: tuple[tuple[int, float], ...], saturation_per_s: float) -> tuple[Piece, ...]:
    """Between two tiers every further slice adds what those up to the lower one added in the mean, and no more than it
    could do alone: the more slices, the more each adds, so that this lies below the law. The last tier is flat.
    """
    found = []
    for at, (size, rate) in enumerate(tiers):
        slope = rate
        if at and size < max(TIERS):
            before, slower = tiers[at - 1]
            slope = max(rate, min((size * rate - before * slower) / (size - before), saturation_per_s))
        found.append(Piece(size, slope, (slope - rate) * size))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _SloInputs:
    """What the operating points of a family depend on beside its profile."""

    slo_ms: float
    quantile: float
    scv: float
    items: float
    gap_ms: float
    start_s: float
    clocks: bool


def columns(
    catalog: Catalog, task: Task, devices: Sequence[Device], constants: Mapping[str, float]
) -> tuple[Column, ...]:
    """Columns of one family: every useful class on the device types, zones and (constant `clocks`) clocks at hand, in
    order.
    """
    terms = _SloInputs(
        task.objective.slo_ms - constant_for(task.objective, constants, "overhead_ms"),
        task.objective.slo_quantile,
        gap_scv(task),
        task.demand.items_mean,
        constant_for(task.objective, constants, "transport_gap_ms"),
        constants["start_s"],
        bool(constants.get("clocks", 0.0)),
    )
    kinds = {d.type.name: d.type for d in devices}
    numbers = Counter((d.type.name, d.zone) for d in devices)
    found: list[Column] = []
    for (name, zone), count in sorted(numbers.items()):
        known = _points(CatalogKey(catalog), task.family, kinds[name], min(count, max(TIERS)), terms)
        found += [replace(c, key=c.key._replace(zone=zone)) for c in known] if zone else known
    return undominated(found, devices)


def shared_columns(
    catalog: Catalog,
    tasks: Sequence[Task],
    devices: Sequence[Device],
    constants: Mapping[str, float],
    alone: Sequence[Column],
) -> tuple[Column, ...]:
    """Columns of two families on one slice: of every pair of columns that fit its memory together.

    Each computes as if the other always did, by the law of `trefoil.core.interference`: what one serves depends on the
    other's class, not on its load, and the program stays linear. Classes that miss their SLO so have no column.
    """
    kinds, by_family = {d.type.name: d.type for d in devices}, {task.family: task for task in tasks}
    at: dict[tuple[str, str, int, str], list[Column]] = {}
    for column in alone:
        at.setdefault((column.device_type, column.slice_type, *column.key[4:6]), []).append(column)
    sizes = Counter((d.type.name, d.zone) for d in devices)
    found: list[Column] = []
    for (name, shape_name, _, zone), here in at.items():
        kind, shape = kinds[name], slice_type(kinds[name], shape_name)
        pool = min(sizes[name, zone], max(TIERS)) * max(1, 7 // max(1, shape.compute_slices))
        for a, b in combinations(here, 2):
            variants = [catalog.family(c.family).variant(c.variant) for c in (a, b)]
            if a.family == b.family or not fits(shape, *variants):
                continue
            busy = {c.family: _alone(kind, c, by_family[c.family], constants) for c in (a, b)}
            pair = [_beside(m, o, busy, by_family[m.family], pool, constants) for m, o in ((a, b), (b, a))]
            found += [c for c in pair if c.tiers] if all(c.tiers for c in pair) else []
    return tuple(found)


def _beside(
    mine: Column,
    other: Column,
    busy: Mapping[str, tuple[float, float]],
    task: Task,
    pool: int,
    constants: Mapping[str, float],
) -> Column:
    """Column of a class on slices that it shares with another; without tiers where it misses its SLO there."""
    compute_ms, activity = busy[mine.family]
    longer_ms = compute_ms * (stretch(activity, busy[other.family][1]) - 1)
    service = replace(mine.service, mean_ms=mine.service.mean_ms + longer_ms)
    slo_ms = task.objective.slo_ms - constant_for(task.objective, constants, "overhead_ms")
    tiers = _tiers(service, slo_ms, task.objective.slo_quantile, gap_scv(task), pool)
    return replace(mine, key=mine.key._replace(beside=((other.family, other.variant),)), service=service, tiers=tiers)


def _alone(kind: DeviceType, column: Column, task: Task, constants: Mapping[str, float]) -> tuple[float, float]:
    """Time that a class computes alone [ms], and what part of its slice that keeps busy."""
    compute_ms = column.service.mean_ms - constant_for(task.objective, constants, "transport_gap_ms")
    if kind.kind == DeviceKind.CPU:
        return compute_ms, 1.0
    watts = column.energy_j / compute_ms * MS_PER_S
    return compute_ms, min(1.0, watts / active_w(kind, column.slice_type, column.clock_mhz))


@lru_cache(maxsize=256)
def _points(
    same: "CatalogKey", family_name: str, kind: DeviceType, count: int, terms: _SloInputs
) -> tuple[Column, ...]:
    """Columns of one family on that many devices of one type: pure, and needed at every decision."""
    catalog, family = same.catalog, same.catalog.family(family_name)
    found = []
    for shape in kind.slice_types:
        for variant in family.by_accuracy():
            for clock in same.clocks(kind, family_name) if terms.clocks and fits(shape, variant) else (0,):
                row = effective_row(catalog, kind, shape, family, variant, terms.items, clock)
                if row is None or not fits(shape, variant):
                    continue
                row = _occupied(row, terms.gap_ms)
                pool = count * max(1, 7 // max(1, shape.compute_slices))
                tiers = _tiers(service_time(row), terms.slo_ms, terms.quantile, terms.scv, pool)
                if tiers:
                    column = _column(kind, shape, variant, row, tiers, terms.start_s)
                    found.append(replace(column, key=column.key._replace(clock_mhz=clock)))
    return tuple(found)


def class_column(
    catalog: Catalog,
    task: Task,
    kind: DeviceType,
    shape_name: str,
    variant_name: str,
    slices: int,
    constants: Mapping[str, float],
) -> Column | None:
    """Column of one class, even if it cannot meet the SLO; None when it is not profiled or does not fit."""
    family = catalog.family(task.family)
    variant, shape = family.variant(variant_name), slice_type(kind, shape_name)
    row = effective_row(catalog, kind, shape, family, variant, task.demand.items_mean)
    if row is None or not fits(shape, variant):
        return None
    row = _occupied(row, constant_for(task.objective, constants, "transport_gap_ms"))
    slo_ms = task.objective.slo_ms - constant_for(task.objective, constants, "overhead_ms")
    tiers = _tiers(service_time(row), slo_ms, task.objective.slo_quantile, gap_scv(task), max(1, slices))
    return _column(kind, shape, variant, row, tiers, constants["start_s"])


def gap_scv(task: Task) -> float:
    """SCV of gaps, rounded, never below Poisson: what the split by weight leaves of a stream is close to it."""
    return max(1.0, round(task.demand.gap_scv / GAP_SCV_STEP) * GAP_SCV_STEP)


def fits(shape: SliceType, *variants: Variant) -> bool:
    """Whether these variants and a Triton fit the slice's memory."""
    return sum(variant.memory_mib for variant in variants) + CONTEXT_MIB <= shape.memory_mib


def effective_row(
    catalog: Catalog,
    kind: DeviceType,
    shape: SliceType,
    family: Family,
    variant: Variant,
    items: float,
    clock_mhz: int = 0,
) -> ProfileRow | None:
    """The profile at a clock (0: the highest) for requests of that many items: batches are interpolated, the largest
    goes on.

    `batch` of the result is the largest batch in the profile. None: not profiled.
    """
    rows = CatalogKey(catalog).rows(kind.name, shape.name, family.name, variant.name, clock_mhz)
    if not rows:
        return None
    largest = rows[-1].batch
    if items >= largest:
        return _scaled(rows[-1], rows[-1], 0.0, items / largest, largest)
    upper = next(i for i, row in enumerate(rows) if row.batch >= items)
    if upper == 0:
        return _scaled(rows[0], rows[0], 0.0, 1.0, largest)
    low, high = rows[upper - 1], rows[upper]
    return _scaled(low, high, (items - low.batch) / (high.batch - low.batch), 1.0, largest)


@dataclass(frozen=True, slots=True, eq=False)
class CatalogKey:
    """Key of a memo by the identity of a catalogue: it is never changed, and too long to compare."""

    catalog: Catalog

    def __hash__(self) -> int:
        return id(self.catalog.rows)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CatalogKey)
            and other.catalog.rows is self.catalog.rows
            and other.catalog.families is self.catalog.families
        )

    def rows(self, kind: str, shape: str, family: str, variant: str, clock_mhz: int) -> tuple[ProfileRow, ...]:
        """Rows of whole models alone on their slice at a clock (0: the highest that is profiled), by batch."""
        by_clock = _index(self).get((kind, shape, family, variant), {})
        return by_clock.get(clock_mhz or max(by_clock, default=0), ())

    def profiled(self, kind: str, shape: str, family: str, variant: str) -> tuple[int, ...]:
        """Clocks at which `rows` has any, ascending."""
        return tuple(sorted(_index(self).get((kind, shape, family, variant), {})))

    def clocks(self, kind: DeviceType, family: str) -> tuple[int, ...]:
        """Clocks that can be set and are profiled; the highest is 0, because it needs no lock."""
        if not kind.clock_lockable:
            return (0,)
        found = {c for (k, _, f, _), rows in _index(self).items() if (k, f) == (kind.name, family) for c in rows}
        known = {c for (k, _, _, _), rows in _index(self).items() if k == kind.name for c in rows}
        return (0, *sorted(c for c in found if c in kind.clocks_mhz and c < max(known)))


@lru_cache(maxsize=16)
def _index(same: CatalogKey) -> dict[tuple[str, str, str, str], dict[int, tuple[ProfileRow, ...]]]:
    found: dict[tuple[str, str, str, str], dict[int, list[ProfileRow]]] = {}
    for row in same.catalog.rows:
        if row.stage == 0 and not row.cohosted:
            key = (row.device_type, row.slice_type, row.family, row.variant)
            found.setdefault(key, {}).setdefault(row.clock_mhz, []).append(row)
    return {
        key: {clock: tuple(sorted(rows, key=lambda row: row.batch)) for clock, rows in by_clock.items()}
        for key, by_clock in found.items()
    }


def _scaled(low: ProfileRow, high: ProfileRow, part: float, factor: float, batch: int) -> ProfileRow:
    def mix(a: float, b: float) -> float:
        return (a + part * (b - a)) * factor

    return replace(
        low,
        batch=batch,
        latency_ms_p50=mix(low.latency_ms_p50, high.latency_ms_p50),
        latency_ms_p95=mix(low.latency_ms_p95, high.latency_ms_p95),
        latency_ms_p99=mix(low.latency_ms_p99, high.latency_ms_p99),
        energy_active_j_per_batch=mix(low.energy_active_j_per_batch, high.energy_active_j_per_batch),
    )


def _occupied(row: ProfileRow, gap_ms: float) -> ProfileRow:
    """A slice is taken from the time a request is sent to it until its answer is back."""
    return replace(
        row,
        latency_ms_p50=row.latency_ms_p50 + gap_ms,
        latency_ms_p95=row.latency_ms_p95 + gap_ms,
        latency_ms_p99=row.latency_ms_p99 + gap_ms,
    )


def _tiers(
    service: ServiceTime, slo_ms: float, quantile: float, scv: float, pool: int
) -> tuple[tuple[int, float], ...]:
    if slo_ms <= 0:
        return ()
    rates = [(size, pool_rate_max(service, slo_ms, quantile, scv, size) / size) for size in TIERS if size <= pool]
    return tuple((size, rate) for size, rate in rates if rate > 0)


def _column(
    kind: DeviceType,
    shape: SliceType,
    variant: Variant,
    row: ProfileRow,
    tiers: tuple[tuple[int, float], ...],
    start_s: float,
) -> Column:
    share = shape.memory_slices / MEMORY_SLICES  # the part of the device that serves nothing meanwhile
    return Column(
        key=ClassKey(row.family, kind.name, shape.name, variant.name),
        accuracy=variant.accuracy,
        version=variant.version,
        max_batch=row.batch,
        clock_mhz=row.clock_mhz,
        service=service_time(row),
        energy_j=row.energy_active_j_per_batch,
        load_j=variant.load_s * kind.idle_w * share,
        start_j=start_s * kind.idle_w * share,
        load_s=variant.load_s,
        tiers=tiers,
    )


def undominated(found: Sequence[Column], devices: Sequence[Device], keep_running: bool = True) -> tuple[Column, ...]:
    """Columns without those that are dominated: slices of another class in their place are as good in everything.

    A model that runs now keeps its columns: staying is free, its replacement is not.
    """
    running = frozenset(class_of(d, r).model for d in devices for r in d.running) if keep_running else frozenset()
    return _undominated(tuple(found), running, tuple({d.type.name: d.type for d in devices}.values()))


@lru_cache(maxsize=256)
def _undominated(
    found: tuple[Column, ...], running: frozenset[ClassKey], types: tuple[DeviceType, ...]
) -> tuple[Column, ...]:
    kinds = {kind.name: kind for kind in types}
    kept: dict[tuple[str, str, int, str], list[Column]] = {}  # in the place of a slice: one device, one clock
    alive = set()
    for b in sorted(found, key=lambda c: (c.energy_j, -c.accuracy, c.key)):  # who beats it comes before it
        rivals = kept.setdefault((b.family, b.device_type, b.key.clock_mhz, b.key.zone), [])
        if b.key.model in running or not any(_beats(a, b, kinds[b.device_type]) for a in rivals):
            rivals.append(b)
            alive.add(b.key)
    return tuple(c for c in found if c.key in alive)


def _beats(a: Column, b: Column, kind: DeviceType) -> bool:
    if a.accuracy < b.accuracy or a.energy_j > b.energy_j:
        return False
    fitting = replaces(kind, a.slice_type, b.slice_type)
    if not fitting or a.load_j * fitting > b.load_j + 1e-9 or a.start_j * fitting > b.start_j + 1e-9:
        return False
    ends = {size for size, _ in b.tiers} | {-(-size // fitting) for size, _ in a.tiers}
    ends |= {size - 1 for size in ends if size > 1} | {max(TIERS)}  # both are straight in between
    return all(a.capacity_per_s(fitting * size) >= b.capacity_per_s(size) - 1e-9 for size in sorted(ends))


@cache
def replaces(kind: DeviceType, small: str, large: str) -> int:
    """Number of slices of one type that fit in the place of one of another, wherever that lies."""
    a, b = slice_type(kind, small), slice_type(kind, large)
    counts = []
    for start in b.starts:
        free, number = start, 0
        for at in sorted(a.starts):
            if at >= free and at + a.memory_slices <= start + b.memory_slices:
                free, number = at + a.memory_slices, number + 1
        counts.append(min(number, b.compute_slices // max(1, a.compute_slices)))
    return min(counts, default=0)


def latency_best_ms(
    catalog: Catalog, task: Task, devices: Sequence[Device], constants: Mapping[str, float]
) -> tuple[float, str] | None:
    """Latency of the fastest class when nearly idle: the lowest SLO [ms] that the fleet can keep, and what keeps it."""
    gap_ms, overhead_ms = (constant_for(task.objective, constants, n) for n in ("transport_gap_ms", "overhead_ms"))
    family = catalog.family(task.family)
    best: tuple[float, str] | None = None
    for name in sorted({d.type.name for d in devices}):
        kind = next(d.type for d in devices if d.type.name == name)
        for shape in kind.slice_types:
            for variant in family.by_accuracy():
                row = effective_row(catalog, kind, shape, family, variant, task.demand.items_mean)
                if row is None or not fits(shape, variant):
                    continue
                service = service_time(_occupied(row, gap_ms))
                latency = _unloaded_ms(service, task.objective.slo_quantile) + overhead_ms
                if best is None or latency < best[0]:
                    best = (latency, f"{variant.name} on {shape.name}")
    return best


def _unloaded_ms(service: ServiceTime, quantile: float) -> float:
    low, high = 0.5 * service.mean_ms, 20.0 * service.mean_ms
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if utilisation_max(service, middle, quantile, 1.0, 1) > 0 else (middle, high)
    return high
