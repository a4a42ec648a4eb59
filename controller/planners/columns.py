"""Operating points: what one slice of a class can serve, at what cost, as a function of the pool it belongs to.

Data: profile rows of a slice type (latency percentiles, active joules per batch), SLO, SCV of gaps, items per request.
Result: per class (family, device type, slice type, variant) a `Column` with the rate of one slice for each pool tier.
A class whose memory does not fit, or that cannot meet the SLO even alone and idle, has no column. Dominated columns go.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Final, NamedTuple

from controller.planners.planner_settings import ExactSettings, PlannerSettings
from controller.planners.planning_input import Device, HostedSlice, Task
from controller.planners.profile_rows import CatalogKey, effective_row, fits
from trefoil.core.catalog import Catalog, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import COMPUTE_SLICES, device_share, engine_of, slice_servers, slice_type
from trefoil.core.errors import CatalogError
from trefoil.core.fleet import DeviceKind, DeviceType, SliceType
from trefoil.core.objective import NO_TOKEN_SLO, TokenSlo
from trefoil.core.queueing import (
    Z_95,
    ServiceTime,
    StreamLimits,
    pool_rate_max,
    service_time,
    stream_answers,
    streams_rate_max,
    utilisation_max,
)
from trefoil.core.units import MS_PER_S

TIERS: Final = (*range(1, 15), 20, 28, 40, 70, 280)  # pool sizes whose rate is computed; `Column.pieces` joins them
BISECTIONS: Final = 30
NO_TIME_MS: Final = 1e-3  # what is left of a TTFT that its way takes whole
GAP_SCV_STEP: Final = 0.25  # a measured SCV is noisy: rounded, so that the plan does not follow its noise


class ClassKey(NamedTuple):
    """Key of slices that are alike. `clock_mhz` 0: the highest, not locked; below 0: under a power limit [-W]. `zone`
    empty: where the view's `carbon` holds. `beside`: (family, variant) of the others on each of these slices.
    `family`: of a stage its model's name.
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
        """Key of what has to be loaded: a change of the clock or of a neighbour is not a reload."""
        return self._replace(clock_mhz=0, beside=()) if self.clock_mhz or self.beside else self

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
    return ClassKey(running.model, device.type.name, shape, running.variant, clock_mhz, device.zone, running.beside)


class Piece(NamedTuple):
    """Piece of a pool's capacity: slope_per_s * slices - less_per_s from `size` slices on, up to the next piece."""

    size: int
    slope_per_s: float
    less_per_s: float


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the program: one class of slices. `tiers`: (size of the pool, rate of one slice in it [1/s]).

    `batch`: requests that Triton joins to a batch at that rate; 0: every request is a batch. `service` is of a request:
    its part of the batch's time. `running_w`: what a slice draws beside `energy_j` of each request, see `power_line`.
    `alone`, `alone_j`: of a request that is a batch by itself: its time, and what it takes, which is the most; a cap of
    the fleet's watts counts that.
    `servers`: requests that one slice serves at once. `streams_ms_p95`: where streams run together, `batch` of them in
    the mean at that rate, of an answer beside so many. `limits` (x, y) of a class that leads: x times its rate and y
    times its partner's add up to at most the slices that they share.
    """

    key: ClassKey
    shape: SliceType
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
    alone: ServiceTime
    batch: float = 0.0
    running_w: float = 0.0
    limits: tuple[tuple[float, float], ...] = ()
    alone_j: float = 0.0
    servers: int = 1
    streams_ms_p95: float = 0.0

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
        return self.servers * MS_PER_S / self.service.mean_ms

    @property
    def unqueued_ms_p95(self) -> float:
        """p95 of a request that meets no queue; of one that joins a batch, with the batch before it."""
        batches_ms = self.streams_ms_p95 or 2 * self.batch * self.service.mean_ms
        return batches_ms or self.service.mean_ms * (1 + Z_95 * self.service.cv)

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
    """Rates between two tiers: each further slice adds the mean of the slices up to the lower tier, at most its own
    rate alone. By the law each further slice adds more, so this is a lower bound. The last tier is flat.
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
class Terms:
    """What the operating points of a family depend on beside its profile. `slo_ms`: less what clients add. `tokens`: of
    these TTFT is less what clients add, and less the gap."""

    slo_ms: float
    quantile: float
    scv: float
    items: float
    items_sd: float
    gap_ms: float
    start_s: float
    tokens: TokenSlo = NO_TOKEN_SLO
    steps: float = 0.0


def terms_of(task: Task, settings: PlannerSettings, tokens_mean: float) -> Terms:
    """Terms of a family's operating points by its objective and demand. `tokens_mean`: of its answers, 0: it streams
    none."""
    own, objective = settings.of(task.objective), task.objective
    tokens, way_ms = objective.token_slo if tokens_mean else NO_TOKEN_SLO, own.overhead_ms + own.transport_gap_ms
    if tokens.ttft_ms:  # TPOT is between two tokens, and each takes this way
        tokens = replace(tokens, ttft_ms=max(NO_TIME_MS, tokens.ttft_ms - way_ms))
    return Terms(
        objective.slo_ms - own.overhead_ms,
        objective.slo_quantile,
        gap_scv(task),
        task.demand.items_mean,
        own.items_sd,
        own.transport_gap_ms,
        settings.start_s,
        tokens,
        tokens_mean + 1,  # a step for each token, and one that finds the end
    )


def columns(catalog: Catalog, task: Task, devices: Sequence[Device], settings: PlannerSettings) -> tuple[Column, ...]:
    """Columns of one family: every useful class on the device types, zones and (where `exact` plans them) clocks and
    power limits at hand, in order. A type of which one device cannot lock its clock runs at the highest, and one of
    which one takes no power limit gets none.
    """
    own, tokens_mean = settings.of(task.objective), catalog.family(task.family).tokens_mean
    terms = terms_of(task, settings, tokens_mean)
    clocks = isinstance(own, ExactSettings) and own.clocks != "highest"
    kinds = {d.type.name: d.type for d in devices}
    numbers = Counter((d.type.name, d.zone) for d in devices)
    found: list[Column] = []
    for (name, zone), count in sorted(numbers.items()):
        alike = [d for d in devices if d.type.name == name]
        locked, limited = all(d.clock_lockable for d in alike), all(d.limitable for d in alike)
        pool = min(count, max(TIERS))
        known = _points(
            CatalogKey(catalog), task.family, kinds[name], pool, terms, clocks and locked, clocks and limited
        )
        found += [replace(c, key=c.key._replace(zone=zone)) for c in known] if zone else known
    return undominated(found, devices)


@lru_cache(maxsize=256)
def _points(
    same: CatalogKey, family_name: str, kind: DeviceType, count: int, terms: Terms, clocks: bool, limits: bool
) -> tuple[Column, ...]:
    """Columns of one family on that many devices of one type: pure, and needed at every decision."""
    found = []
    for shape in kind.slice_types:
        for variant in same.catalog.family(family_name).by_accuracy():
            if not fits(shape, variant):
                continue
            pool = count * _most_of(kind, shape)
            held = same.clocks(kind) if clocks else (0,)
            if limits and shape == kind.largest:  # a limit is of the whole board, whatever else is on it
                held += same.limits(kind, shape.name)
            for clock in held:
                column = operating_point(same, family_name, kind, shape, variant, clock, pool, terms)
                if column is not None and column.tiers:
                    found.append(column)
    return tuple(found)


@lru_cache(maxsize=16384)
def operating_point(
    same: CatalogKey,
    family_name: str,
    kind: DeviceType,
    shape: SliceType,
    variant: Variant,
    clock_mhz: int,
    pool: int,
    terms: Terms,
) -> Column | None:
    """Column of one class in pools of up to so many slices, whatever its memory; None: not profiled.

    The one answer to how many requests/s a slice carries at an SLO: the law of a pool that serves requests one by one,
    or, of a family that forms them, of batches. On CPUs no more than what was carried when it was profiled, with
    batches of that size.
    """
    catalog, family = same.catalog, same.catalog.family(family_name)
    row = effective_row(catalog, kind, shape, family, variant, terms.items, clock_mhz)
    if row is None:
        return None
    row, servers = _occupied(row, terms.gap_ms), slice_servers(shape.name)
    service = service_time(row)
    if terms.items_sd:
        ends = (max(1.0, terms.items - terms.items_sd), terms.items + terms.items_sd)
        few, many = (effective_row(catalog, kind, shape, family, variant, n, clock_mhz) for n in ends)
        assert few is not None
        assert many is not None
        scatter_ms = (service_time(many).mean_ms - service_time(few).mean_ms) / 2
        service = replace(service, cv=math.hypot(service.cv, scatter_ms / service.mean_ms))
    tiers = tiers_of(service, terms.slo_ms, terms.quantile, terms.scv, pool, servers)
    if kind.kind == DeviceKind.CPU:
        tiers = tuple((size, min(rate, row.throughput_per_s / terms.items)) for size, rate in tiers)
    column = _column(kind, shape, variant, row, tiers, service, terms.start_s)
    column = replace(column, key=column.key._replace(clock_mhz=clock_mhz), servers=servers)
    if terms.tokens:
        rows = same.rows(kind, shape.name, family_name, variant.name, clock_mhz)
        return streaming(column, stream_answers(rows), partial(row_of, catalog, kind, column), terms)
    return (
        batching(catalog, kind, column, terms.slo_ms - terms.gap_ms, terms.items, pool) if family.batching else column
    )


def _most_of(kind: DeviceType, shape: SliceType) -> int:
    """How many slices of a type a device has at most."""
    return max(1, kind.cores // shape.memory_slices if kind.cores else COMPUTE_SLICES // max(1, shape.compute_slices))


def batching(catalog: Catalog, kind: DeviceType, column: Column, slo_ms: float, items: float, pool: int) -> Column:
    """The class where Triton joins what waits to batches, if that serves more in pools of all sizes.

    While a batch of b computes, t(b), the next one gathers: b = rate x t(b). A request waits for at most one batch and
    takes its own: 2 t <= SLO. The arrivals in a batch's time vary by their square root, and each of n slices in turn
    gets every nth one. So the largest batch that is likely is b + Z_95 sqrt(b / n). It has to be in time and in the
    profile.
    """
    row = partial(row_of, catalog, kind, column)

    def per_s(batch: float) -> float:
        known = row(batch)
        most = known.throughput_per_s if kind.kind == DeviceKind.CPU else math.inf
        return min(most, batch / service_time(known).mean_ms * MS_PER_S) / items

    def largest(slices: int) -> float:
        """Batch of one of that many slices; 0: not even one request is in time."""

        def fits_slo(batch: float) -> bool:
            most = batch + Z_95 * math.sqrt(batch / slices)
            return most <= column.max_batch and 2 * row(most).latency_ms_p95 <= slo_ms

        low, high = 1.0, float(column.max_batch)
        if not fits_slo(low):
            return 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if fits_slo(middle) else (low, middle)
        return low

    batches = {size: largest(size) for size in TIERS if size <= pool}
    tiers = tuple((size, per_s(batch)) for size, batch in batches.items() if batch)
    rates = dict(tiers)
    if not rates or any(rates.get(size, 0.0) <= rate for size, rate in column.tiers):
        return column
    most = max(batches.values())
    service, (running_w, item_j) = service_time(row(most)), power_line(row, items, most, 1.0)
    return replace(
        column,
        service=ServiceTime(service.mean_ms * items / most, service.cv),
        energy_j=item_j * items,
        running_w=running_w,
        tiers=tiers,
        batch=most / items,
    )


def streaming(
    column: Column, answers: tuple[ServiceTime, ...], row: Callable[[float], ProfileRow], terms: Terms
) -> Column:
    """The class where streams run together, within the limits of its tokens: `StreamLaw` for each slice alone, which
    has its share of Poisson arrivals. A row's batch is the streams that run."""
    limits = StreamLimits(terms.slo_ms - terms.gap_ms, terms.quantile, terms.tokens)
    rate, running = streams_rate_max(answers, terms.steps, limits)
    if not rate:
        return replace(column, tiers=())
    most = max(1.0, running)
    answer, (running_w, energy_j) = service_time(row(most)), power_line(row, 1.0, most, 1.0)
    return replace(
        column,
        service=ServiceTime(answer.mean_ms / most, answer.cv),
        energy_j=max(0.0, energy_j),
        running_w=running_w,
        tiers=((1, rate),),
        batch=most,
        streams_ms_p95=answer.mean_ms * (1 + Z_95 * answer.cv),
    )


def power_line(row: Callable[[float], ProfileRow], least: float, most: float, slower: float) -> tuple[float, float]:
    """Power of a slice where Triton joins requests, as a line in its rate: (watts at rate 0, joules of an item).

    A batch of b items, t(b) x `slower` long, J(b) joules, is what arrives meanwhile: b = rate x t(b), not below
    `least`, one request. Where t and J grow straight with b, so does the power rate x J(b) / b from the rate of the
    least batch on. The line is through half the rate of the largest batch, `most`, and all of it; below, a slice draws
    less than the line says.
    """

    def per_s(batch: float) -> float:
        return batch / (service_time(row(batch)).mean_ms * slower) * MS_PER_S

    def item_j(batch: float) -> float:
        return row(batch).energy_active_j_per_batch / batch

    full = per_s(most)
    low, high = min(least, most), most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if per_s(middle) <= full / 2 else (low, middle)
    running_w = max(0.0, full * (item_j(low) - item_j(most)))
    return running_w, item_j(most) - running_w / full


def row_of(catalog: Catalog, kind: DeviceType, column: Column, items: float) -> ProfileRow:
    """`effective_row` of a class, which has one."""
    family, shape = catalog.family(column.family), column.shape
    variant = family.variant(column.variant)
    found = effective_row(catalog, kind, shape, family, variant, items, column.key.clock_mhz)
    assert found is not None, "a class without a profile has no column"
    return found


def class_column(
    catalog: Catalog,
    task: Task,
    kind: DeviceType,
    shape_name: str,
    variant_name: str,
    slices: int,
    settings: PlannerSettings,
) -> Column | None:
    """Column of one class, even if it cannot meet the SLO; None when it is not profiled or does not fit."""
    variant, shape = catalog.family(task.family).variant(variant_name), slice_type(kind, shape_name)
    if not fits(shape, variant):
        return None
    same, pool = CatalogKey(catalog), max(1, slices)
    terms = terms_of(task, settings, catalog.family(task.family).tokens_mean)
    return operating_point(same, task.family, kind, shape, variant, 0, pool, terms)


def unprofiled(family: str, variant: str, shape_name: str, kind: DeviceType) -> CatalogError:
    """Error of a class that cannot be planned: an engine serves another variant there, or it has no row or no room."""
    own = engine_of(kind)
    if own is not None and own != (family, variant):
        return CatalogError(
            f"the engine on {kind.name} serves {own[1]} of {own[0]} alone, and this policy puts {variant} there",
            field=f"family {family}",
            remedy="use a policy that leaves engines their variant: base, static_mix, exact, clover or muserve",
        )
    return CatalogError(
        f"no profile of {variant} on {shape_name} of {kind.name}, or it does not fit its memory",
        field=f"family {family}",
        remedy="profile this class, or use another policy",
    )


def gap_scv(task: Task) -> float:
    """SCV of gaps, rounded, never below Poisson: what the split by weight leaves of a stream is close to it."""
    return max(1.0, round(task.demand.gap_scv / GAP_SCV_STEP) * GAP_SCV_STEP)


def _occupied(row: ProfileRow, gap_ms: float) -> ProfileRow:
    """A slice is taken from the time a request is sent to it until its answer is back."""
    return replace(
        row,
        latency_ms_p50=row.latency_ms_p50 + gap_ms,
        latency_ms_p95=row.latency_ms_p95 + gap_ms,
        latency_ms_p99=row.latency_ms_p99 + gap_ms,
    )


def tiers_of(
    service: ServiceTime, slo_ms: float, quantile: float, scv: float, pool: int, servers: int = 1
) -> tuple[tuple[int, float], ...]:
    """Rate of one slice of so many servers [1/s] within the SLO, by the size of its pool; sizes at which none is left
    out.
    """
    if slo_ms <= 0:
        return ()
    rates = [(n, pool_rate_max(service, slo_ms, quantile, scv, n * servers) / n) for n in TIERS if n <= pool]
    return tuple((size, rate) for size, rate in rates if rate > 0)


def idle_share(kind: DeviceType, shape: SliceType) -> float:
    """Share of a device that serves nothing while such a slice of it starts: of its memory slices, or of its cores."""
    if kind.kind == DeviceKind.CPU:
        return device_share(kind, shape.name)
    return shape.memory_slices / max(other.memory_slices for other in kind.slice_types)


def _column(
    kind: DeviceType,
    shape: SliceType,
    variant: Variant,
    row: ProfileRow,
    tiers: tuple[tuple[int, float], ...],
    service: ServiceTime,
    start_s: float,
) -> Column:
    share = idle_share(kind, shape)
    return Column(
        key=ClassKey(row.family, kind.name, shape.name, variant.name),
        shape=shape,
        accuracy=variant.accuracy,
        version=variant.version,
        max_batch=row.batch,
        clock_mhz=row.clock_mhz,
        service=service,
        energy_j=row.energy_active_j_per_batch,
        load_j=variant.load_s * kind.idle_w * share,
        start_j=start_s * kind.idle_w * share,
        load_s=variant.load_s,
        tiers=tiers,
        alone=service,
        alone_j=row.energy_active_j_per_batch,
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
    if (
        not fitting
        or a.running_w * fitting > b.running_w
        or a.load_j * fitting > b.load_j + 1e-9
        or a.start_j * fitting > b.start_j + 1e-9
    ):
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
    catalog: Catalog, task: Task, devices: Sequence[Device], settings: PlannerSettings
) -> tuple[float, str] | None:
    """Latency of the fastest class when nearly idle: the lowest SLO [ms] that the fleet can keep, and what keeps it."""
    own, family = settings.of(task.objective), catalog.family(task.family)
    gap_ms, overhead_ms = own.transport_gap_ms, own.overhead_ms
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
