"""Slots of the view's zone: carbon as forecast, and the device seconds that requests leave over.

Source: ours. Data: a planner's view, loads to come. Result: slots from now on.
Formulation: slices that stand serve jobs of their family with their variant, up to `FULL` of their time. The jobs run
in batches of the largest size profiled. Requests take their rate times their time on such a slice. Devices asleep could
serve any family with any variant that fits, whole. Slices that requests do not need at the 90 % line of their load form
a separate pool. `exact` puts them to sleep unless jobs use them, so their idle power counts as the jobs'. A load that
is not given keeps its present value. Left out: generative families, families in stages, shared slices, CPUs, devices of
other zones, silent nodes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from controller.planners.planning_input import Device, HostedSlice, PlanningInput, read_view
from controller.planners.profile_rows import CatalogKey, effective_row, fits
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonBand
from trefoil.core.catalog import Variant
from trefoil.core.common import ProfileRow
from trefoil.core.fleet import DeviceType, SliceType
from trefoil.core.jobs.planned import DevicePool, ItemCost, Portion, Slot
from trefoil.core.units import HOUR_S, MS_PER_S

WHOLE: Final = 1e-3  # of a device: the solver's tolerance
EXACT: Final = ("exact", "static_mix")  # the planners that put to sleep what is not needed, and wake for jobs
FULL: Final = 0.9  # of a slice's time that requests and jobs may take together


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """Load of a family in an interval to come: its mean and its 90 % line [requests/s]."""

    family: str = ""
    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    mean_per_s: float = 0.0
    p90_per_s: float = 0.0


def slots_of(view: PlanView, slot_s: float, until_s: float, ahead: Sequence[LoadAhead] = ()) -> tuple[Slot, ...]:
    """Slots from now until a time; the first ends with the slot that has begun, all others at multiples of `slot_s`."""
    assert slot_s > 0, slot_s
    inputs = read_view(view, 0.0)
    usable = [device for device in inputs.devices if not device.zone and not device.frozen]
    standing = _Standing(inputs, [device for device in usable if device.awake])
    wakes = view.current is None or view.current.planner in EXACT
    asleep = Counter(device.type for device in usable if not device.awake and wakes)
    found, starts_s = [], view.now_s
    while starts_s < until_s:
        ends_s = min(until_s, (math.floor(starts_s / slot_s + 1e-9) + 1) * slot_s)
        mean, high = ({f: rates[i] for f, rates in _load(view, ahead, starts_s).items()} for i in (0, 1))
        short = standing.short(high)
        pools = [*standing.pools(mean, high, ends_s - starts_s), *_asleep(inputs, asleep, short, ends_s - starts_s)]
        found.append(Slot(view.carbon.series.zone, _carbon(view, starts_s, ends_s), tuple(pools), view.pue))
        starts_s = ends_s
    return tuple(found)


def is_awake(pool: DevicePool) -> bool:
    """Whether a pool is of devices that are awake now."""
    return pool.stands or not pool.idle_w


def devices_needed(slots: Sequence[Slot], portions: Sequence[Portion], now_s: float, family: str = "") -> int:
    """Whole devices that requests, of one family if given, and these portions take in the slots that have begun. Those
    that are woken come on top of those that stand, however little of these is taken: the rest of them cannot take the
    place."""
    used = {True: 0.0, False: 0.0}  # by whether devices are awake
    for slot in (one for one in slots if one.carbon.starts_at_s <= now_s):
        length_s = slot.carbon.ends_at_s - slot.carbon.starts_at_s
        for pool in slot.pools:
            if family and family not in {cost.family for cost in pool.costs}:
                continue
            place = slot.zone, pool.name, slot.carbon.starts_at_s
            jobs_s = sum(one.device_s for one in portions if (one.zone, one.pool, one.starts_at_s) == place)
            requests_s, full = max(0.0, pool.total_s - pool.free_s), FULL if pool.total_s else 1.0
            used[is_awake(pool)] += pool.part * (requests_s + jobs_s) / length_s / full
    return sum(math.ceil(each - WHOLE) for each in used.values())


def load_ahead(view: PlanView, until_s: float) -> tuple[LoadAhead, ...]:
    """Load of the hours to come: that of the same hour a day ago, where a whole day is known.

    Its 90 % line is the most of that hour and its two neighbours, so that a peak may come an hour sooner or later.
    """
    found = []
    for budget in view.budgets:
        rates = [count / HOUR_S for count in budget.day]
        hour = math.floor(view.now_s / HOUR_S) + 1
        while rates and hour * HOUR_S < until_s:
            near = [rates[(hour + step) % len(rates)] for step in (-1, 0, 1)]
            found.append(LoadAhead(budget.family, hour * HOUR_S, (hour + 1) * HOUR_S, near[1], max(near)))
            hour += 1
    return tuple(found)


def _load(view: PlanView, ahead: Sequence[LoadAhead], at_s: float) -> dict[str, tuple[float, float]]:
    """Mean and high rate of each family at a time [1/s]."""
    found = {d.family: (d.mean_per_s, max(d.mean_per_s, d.rate_p90_per_s)) for d in view.demand if not d.slo_class}
    later = (one for one in ahead if one.starts_at_s <= at_s < one.ends_at_s and at_s > view.now_s)
    return found | {one.family: (one.mean_per_s, max(one.mean_per_s, one.p90_per_s)) for one in later}


def _carbon(view: PlanView, starts_s: float, ends_s: float) -> CarbonBand:
    """Band of an interval: the reading where it has begun; else the forecast's mean, and the reading beyond it."""
    now = view.carbon.intensity_g_per_kwh
    bands = view.carbon_forecast.bands if view.carbon_forecast is not None and starts_s > view.now_s else ()
    shares = [
        (max(0.0, min(b.ends_at_s, ends_s) - max(b.starts_at_s, starts_s)) / (ends_s - starts_s), b) for b in bands
    ]
    rest = max(0.0, 1.0 - sum(share for share, _ in shares)) * now
    lines = ("p10_g_per_kwh", "p50_g_per_kwh", "p90_g_per_kwh")
    return CarbonBand(starts_s, ends_s, *(rest + sum(s * getattr(b, name) for s, b in shares) for name in lines))


class _Standing:
    """Slices that serve one family each, by what an item costs on them."""

    def __init__(self, inputs: PlanningInput, devices: Sequence[Device]) -> None:
        self._inputs = inputs
        self._slices: Counter[tuple[str, ItemCost, float, DeviceType]] = Counter()  # by pool, cost, part of a device
        self._requests_per_s: dict[str, float] = {}  # that all of a family's slices answer at most
        self._devices: dict[str, float] = {}  # that a family's slices are worth
        for device in devices:
            for part in device.running:
                self._add(inputs, device, part)

    def _add(self, inputs: PlanningInput, device: Device, part: HostedSlice) -> None:
        catalog = inputs.view.catalog
        family = catalog.family(part.family)
        if part.beside or part.stages > 1 or family.generative:
            return
        shape = next(one for one in device.type.slice_types if one.name == part.key.slice_type)
        variant, items = family.variant(part.variant), inputs.task(part.family).demand.items_mean
        rows = CatalogKey(catalog).rows(device.type, shape.name, family.name, variant.name, device.clock_mhz)
        row = effective_row(catalog, device.type, shape, family, variant, items, device.clock_mhz)
        if not rows or row is None:
            return
        name = f"{family.name}: {variant.name} on {shape.name} of {device.type.name}"
        name += f" at {device.clock_mhz} MHz" if device.clock_mhz > 0 else ""
        name += f" under {-device.clock_mhz} W" if device.clock_mhz < 0 else ""  # a power limit stands as one below 0
        part_of = shape.memory_slices / device.type.largest.memory_slices
        self._slices[name, _cost(family.name, variant, rows), part_of, device.type] += 1
        self._requests_per_s[family.name] = self._requests_per_s.get(family.name, 0.0) + MS_PER_S / row.latency_ms_p50
        self._devices[family.name] = self._devices.get(family.name, 0.0) + part_of

    def _busy(self, load: dict[str, float], family: str) -> float:
        return load.get(family, 0.0) / self._requests_per_s[family]

    def pools(self, load: dict[str, float], high: dict[str, float], length_s: float) -> Iterator[DevicePool]:
        """Slice seconds left over, one pool for each kind of slice that requests need, and one for the rest of it."""
        for (name, cost, part, kind), count in sorted(self._slices.items(), key=lambda one: one[0][0]):
            spare = math.floor(count * self._spare(high, cost.family) + WHOLE)
            total_s = (count - spare) * length_s * FULL
            free_s, sure_s = (max(0.0, total_s - count * length_s * self._busy(at, cost.family)) for at in (load, high))
            yield DevicePool(name, free_s, sure_s, (cost,), total_s=total_s, part=part)
            if spare:
                slowed, whole_s = replace(cost, device_s=cost.device_s / FULL), spare * length_s
                idle_w, wake_j = (part * each for each in _added(self._inputs, kind))
                yield DevicePool(
                    f"{name} kept", whole_s, whole_s, (slowed,), idle_w, wake_j, spare, part=part, stands=True
                )  # fmt: skip

    def _spare(self, high: dict[str, float], family: str) -> float:
        """Share of a family's devices that its requests do not need at a load within their objective."""
        current, devices = self._inputs.view.current, self._devices[family]
        if current is None or current.planner not in EXACT or family not in current.expected:
            return 0.0
        able_per_s = min(FULL * self._requests_per_s[family], current.expected[family].capacity_per_s)
        objective = self._inputs.task(family).objective
        needed = math.ceil(devices * high.get(family, 0.0) / able_per_s - WHOLE) if able_per_s else devices
        return max(0.0, 1 - max(1, needed, objective.replicas_min, objective.spread_min) / devices)

    def short(self, load: dict[str, float]) -> float:
        """Devices that requests need more than stand, at a load."""
        return sum(max(0.0, self._busy(load, f) - FULL) * count for f, count in self._devices.items())


def _asleep(inputs: PlanningInput, devices: Counter[DeviceType], short: float, length_s: float) -> Iterator[DevicePool]:
    """Devices that could be woken whole; those that requests may need are not sure."""
    for kind, count in sorted(devices.items(), key=lambda one: one[0].name):
        costs = tuple(_whole(inputs, kind, kind.largest))
        if costs:
            idle_w, wake_j = _added(inputs, kind)
            sure_s = max(0.0, count - math.ceil(short)) * length_s
            yield DevicePool(
                f"{kind.name} asleep", count * length_s, sure_s, costs, idle_w=idle_w, wake_j=wake_j
            )  # fmt: skip


def _added(inputs: PlanningInput, kind: DeviceType) -> tuple[float, float]:
    """What a device that is awake for jobs alone draws above sleep [W], and what it takes to wake it [J]."""
    loading_s = max(v.load_s for f in inputs.view.catalog.families for v in f.variants)
    return max(0.0, kind.idle_w - kind.sleep_w), (kind.wake_s + loading_s) * kind.idle_w


def _whole(inputs: PlanningInput, kind: DeviceType, shape: SliceType) -> Iterator[ItemCost]:
    catalog = inputs.view.catalog
    for task in inputs.tasks:
        family = catalog.family(task.family)
        for variant in family.variants if not family.generative else ():
            rows = CatalogKey(catalog).rows(kind, shape.name, family.name, variant.name, 0)
            if rows and fits(shape, variant):
                yield _cost(family.name, variant, rows)


def _cost(family: str, variant: Variant, rows: Sequence[ProfileRow]) -> ItemCost:
    """Cost of an item in a batch of the largest size, and of a request in one of the smallest."""
    (request_s, request_j), (item_s, item_j) = (
        (row.latency_ms_p50 / MS_PER_S / row.batch, row.energy_active_j_per_batch / row.batch)
        for row in (rows[0], rows[-1])
    )
    return ItemCost(family, item_s, item_j, variant.accuracy, request_s, request_j, variant.name)
