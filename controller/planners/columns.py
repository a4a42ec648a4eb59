"""Operating points: what one slice of a class can serve, at what cost, as a function of the pool it belongs to.

Data: profile rows of a slice type (latency percentiles, active joules per batch), SLO, SCV of gaps, items per request.
Result: per class (family, device type, slice type, variant) a `Column` with the rate of one slice for each pool tier.
A class whose memory does not fit, or that cannot meet the SLO even alone and idle, has no column. Dominated columns go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from controller.planners.world import Device, Task, setting
from trefoil.core.catalog import Catalog, Family, ProfileRow, Variant
from trefoil.core.device_types import MEMORY_SLICES, slice_type
from trefoil.core.fleet import DeviceType, SliceType
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.queueing import ServiceTime, rate_max, service_time, utilisation_max
from trefoil.core.units import MS_PER_S

TIERS: Final = (1, 2, 4, 7, 14, 28, 70)
GAP_SCV_STEP: Final = 0.25  # a measured SCV is noisy: rounded, so that the plan does not follow its noise

ClassKey = tuple[str, str, str, str]  # family, device type, slice type, variant


@dataclass(frozen=True, slots=True)
class Column:
    """One class of slices. `tiers` holds (pool size from which it holds, rate of one slice [1/s])."""

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

    @property
    def family(self) -> str:
        return self.key[0]

    @property
    def device_type(self) -> str:
        return self.key[1]

    @property
    def slice_type(self) -> str:
        return self.key[2]

    @property
    def variant(self) -> str:
        return self.key[3]

    @property
    def saturation_per_s(self) -> float:
        return MS_PER_S / self.service.mean_ms

    def rate_per_slice(self, slices: int) -> float:
        """Rate of one slice in a pool of that many [1/s]."""
        return max((rate for size, rate in self.tiers if size <= slices), default=0.0)


def columns(
    catalog: Catalog, task: Task, devices: Sequence[Device], constants: Mapping[str, float]
) -> tuple[Column, ...]:
    """Every useful class of one family on the device types at hand, in canonical order."""
    family = catalog.family(task.family)
    slo_ms = task.objective.slo_ms - setting(task.objective, constants, "overhead_ms")
    scv = gap_scv(task)
    kinds = {d.type.name: d.type for d in devices}
    found = []
    for name in sorted(kinds):
        count = sum(1 for d in devices if d.type.name == name)
        for shape in kinds[name].slice_types:
            for variant in family.by_accuracy():
                row = effective_row(catalog, kinds[name], shape, family, variant, task.demand.items_mean)
                if row is None or not fits(shape, variant):
                    continue
                row = _occupied(row, setting(task.objective, constants, "transport_gap_ms"))
                pool = count * max(1, 7 // max(1, shape.compute_slices))
                tiers = _tiers(row, slo_ms, task.objective.slo_quantile, scv, pool)
                if tiers:
                    found.append(_column(kinds[name], shape, variant, row, tiers, constants))
    return undominated(found, devices)


def class_column(
    catalog: Catalog,
    task: Task,
    kind: DeviceType,
    shape_name: str,
    variant_name: str,
    slices: int,
    constants: Mapping[str, float],
) -> Column | None:
    """One class as it is, even if it cannot meet the SLO; None when it is not profiled or does not fit."""
    family = catalog.family(task.family)
    variant, shape = family.variant(variant_name), slice_type(kind, shape_name)
    row = effective_row(catalog, kind, shape, family, variant, task.demand.items_mean)
    if row is None or not fits(shape, variant):
        return None
    row = _occupied(row, setting(task.objective, constants, "transport_gap_ms"))
    slo_ms = task.objective.slo_ms - setting(task.objective, constants, "overhead_ms")
    tiers = _tiers(row, slo_ms, task.objective.slo_quantile, gap_scv(task), max(1, slices))
    return _column(kind, shape, variant, row, tiers, constants)


def gap_scv(task: Task) -> float:
    """Rounded, and never below Poisson: what reaches a class after the split by weight is close to Poisson."""
    return max(1.0, round(task.demand.gap_scv / GAP_SCV_STEP) * GAP_SCV_STEP)


def fits(shape: SliceType, variant: Variant) -> bool:
    """Whether a variant and a Triton fit the slice's memory."""
    return variant.memory_mib + CONTEXT_MIB <= shape.memory_mib


def effective_row(
    catalog: Catalog, kind: DeviceType, shape: SliceType, family: Family, variant: Variant, items: float
) -> ProfileRow | None:
    """The profile at the highest clock for requests of that many items: batches are interpolated, the largest goes on.

    `batch` of the result is the largest batch in the profile. None: not profiled.
    """
    rows = _rows(catalog, kind, shape, family, variant)
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


def _rows(catalog: Catalog, kind: DeviceType, shape: SliceType, family: Family, variant: Variant) -> list[ProfileRow]:
    same = [
        row
        for row in catalog.rows
        if (row.device_type, row.slice_type, row.family, row.variant)
        == (kind.name, shape.name, family.name, variant.name)
        and row.stage == 0
        and not row.cohosted
    ]
    clock = max((row.clock_mhz for row in same), default=0)
    return sorted((row for row in same if row.clock_mhz == clock), key=lambda row: row.batch)


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


def _tiers(row: ProfileRow, slo_ms: float, quantile: float, scv: float, pool: int) -> tuple[tuple[int, float], ...]:
    if slo_ms <= 0:
        return ()
    rates = [(size, rate_max(row, slo_ms, quantile, scv, size) / size) for size in TIERS if size <= pool]
    return tuple((size, rate) for size, rate in rates if rate > 0)


def _column(
    kind: DeviceType,
    shape: SliceType,
    variant: Variant,
    row: ProfileRow,
    tiers: tuple[tuple[int, float], ...],
    constants: Mapping[str, float],
) -> Column:
    share = shape.memory_slices / MEMORY_SLICES  # the part of the device that serves nothing meanwhile
    return Column(
        key=(row.family, kind.name, shape.name, variant.name),
        accuracy=variant.accuracy,
        version=variant.version,
        max_batch=row.batch,
        clock_mhz=row.clock_mhz,
        service=service_time(row),
        energy_j=row.energy_active_j_per_batch,
        load_j=variant.load_s * kind.idle_w * share,
        start_j=constants["start_s"] * kind.idle_w * share,
        load_s=variant.load_s,
        tiers=tiers,
    )


def undominated(found: Sequence[Column], devices: Sequence[Device], keep_running: bool = True) -> tuple[Column, ...]:
    """Drop a column if slices of another class in its place are at least as good in everything, whatever their number.

    A class that runs now keeps its column: staying is free, its replacement is not.
    """
    running = {(r.family, d.type.name, r.key.slice_type, r.variant) for d in devices for r in d.running if keep_running}
    kinds = {d.type.name: d.type for d in devices}
    kept: list[Column] = []
    for b in sorted(found, key=lambda c: (c.energy_j, -c.accuracy, c.key)):  # who beats it comes before it
        if b.key in running or not any(_beats(a, b, kinds[b.device_type]) for a in kept):
            kept.append(b)
    return tuple(c for c in found if c in kept)


def _beats(a: Column, b: Column, kind: DeviceType) -> bool:
    if (a.family, a.device_type) != (b.family, b.device_type) or a.accuracy < b.accuracy or a.energy_j > b.energy_j:
        return False
    fitting = replaces(kind, a.slice_type, b.slice_type)
    if not fitting or a.load_j * fitting > b.load_j + 1e-9 or a.start_j * fitting > b.start_j + 1e-9:
        return False
    sizes = {size for size, _ in b.tiers} | {size - 1 for size, _ in b.tiers if size > 1} | {max(TIERS)}
    return all(
        a.rate_per_slice(fitting * size) * fitting * size >= b.rate_per_slice(size) * size - 1e-9 for size in sizes
    )


@cache
def replaces(kind: DeviceType, small: str, large: str) -> int:
    """How many slices of one type fit in the place of one of another, wherever that lies."""
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
    """The lowest SLO [ms] that anything in the fleet can keep when nearly idle, and what keeps it."""
    gap_ms, overhead_ms = (setting(task.objective, constants, n) for n in ("transport_gap_ms", "overhead_ms"))
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
