"""The simulated hardware: devices, slices and what they draw. Obeys commands as an agent does, and takes its time.

A slice computes as its row at the device's clock says, or as `power.at_clock` where the profile has none. The clock is
what the agent's governors make of the plan's. Under a power limit a board lowers it until all that it hosts, computing
at once, fits (`power.clock_under`), and idles as without: rows that were measured at limits are the planner's
knowledge, not the truth.
Power: the law of trefoil/core/power (idle, sleep, saturation) times each device's own factor. Energy by the definitions
of CONTRACTS section 4: baseline while a slice serves is idle. Baseline while none does, and sleep, are unallocated. The
rest is active and belongs to the slice that computed. CPUs of whose profile no joules are known have no meter: what
they draw is NaN, null in JSON.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from controller.planners.profile_rows import CatalogKey, effective_row
from power_agent.clocks.core.clock_control import Ability, ClockRange, Lever, PowerLimit, planned_range
from power_agent.clocks.core.device_governor import DeviceGovernor
from power_agent.clocks.core.slice_latencies import SliceLatencies
from trefoil.core import power
from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.demand import ScaleSignal
from trefoil.core.device_types import CPUS, profile_type, slice_cores, slice_type
from trefoil.core.errors import ProfileMissing
from trefoil.core.fleet import (
    DeviceKind,
    DeviceState,
    DeviceStatus,
    DeviceType,
    Hosted,
    NodeStatus,
    SliceKey,
    SliceState,
    SliceStatus,
    same_variants,
)
from trefoil.core.plan import PlannedDevice, PlannedSlice
from trefoil.core.queueing import service_time
from trefoil.core.units import MS_PER_S
from trefoil.simulator.books.intervals import Interval
from trefoil.simulator.engines.engine import OperatingPoint, SliceService
from trefoil.simulator.scenario.inputs import Device
from trefoil.simulator.scenario.schema import Costs
from trefoil.simulator.scenario.truth import Truth

MIG_S: Final = 0.3  # to create the instances of a device
STOP_S: Final = 0.5  # to stop a Triton
DRAIN_SERVICES: Final = 3.0  # of the mean service time: by then what was in flight on a slice is answered
SERVES: Final = (SliceState.READY, SliceState.SWAPPING, SliceState.DRAINING)


@dataclass(slots=True)
class Slice:
    """Slice of a device. `next_hosted` loads while it is SWAPPING; `ready_s`: when STARTING or SWAPPING ends."""

    part: PlannedSlice
    state: SliceState
    since_s: float
    ready_s: float = math.inf
    next_hosted: tuple[Hosted, ...] = ()


@dataclass(slots=True)
class SimulatedDevice:
    """Device and what it has drawn so far [J]. `wanted`: its last commanded state."""

    place: Device
    type: DeviceType
    factor: float
    governed: DeviceGovernor
    ability: Ability = field(init=False)
    wanted: PlannedDevice = field(default_factory=PlannedDevice)
    state: DeviceState = DeviceState.ASLEEP
    awake_s: float = -math.inf
    clock_mhz: int = 0
    limit_w: float = 0.0
    slices: dict[SliceKey, Slice] = field(default_factory=dict)
    status: DeviceStatus | None = None  # as it was reported last; None: it has changed since
    served: dict[tuple[str, str], dict[SliceKey, SliceService]] | None = None  # as `_served` has it; None: the same
    rates: tuple[float, bool] | None = None  # as `_rates_of` has them; None: the same
    counter_j: float = 0.0
    active_j: float = 0.0
    idle_j: float = 0.0
    unallocated_j: float = 0.0

    def __post_init__(self) -> None:
        least_w, most_w = self.type.power_limit_min_w, self.type.power_limit_max_w
        self.ability = Ability(
            self.place.name,
            self.type.name,
            tuple(sorted(self.type.clocks_mhz)),
            "" if self.type.clock_lockable else "its type takes no lock",
            (least_w, most_w),
            "" if least_w < most_w else "its type takes no power limit",
        )

    @property
    def serves(self) -> bool:
        """True if any slice is READY, SWAPPING or DRAINING."""
        return any(s.state in SERVES for s in self.slices.values())


class DrawnEnergy(NamedTuple):
    """Energy that one device drew in an interval [J]."""

    device: str
    zone: str
    counter_j: float
    active_j: float
    by_family: Mapping[str, float]


class Hardware:
    """Devices of the whole fleet."""

    def __init__(
        self,
        devices: Iterable[Device],
        truth: Truth,
        items: Mapping[str, float],
        costs: Costs,
        governed: Callable[[SliceLatencies], DeviceGovernor],
        latencies: SliceLatencies,
    ) -> None:
        self.latencies = latencies
        self._truth, self._items, self._costs = truth, items, costs
        self.devices = {d.name: SimulatedDevice(d, d.type, truth.power[d.name], governed(latencies)) for d in devices}
        self._cpus = [d for d in self.devices.values() if d.type.kind == DeviceKind.CPU]
        cpu_rows = [row for row in truth.catalog.rows if profile_type(row.device_type) == CPUS]
        joules_known = any(row.energy_active_j_per_batch for row in cpu_rows)
        self._unmetered = frozenset(d.place.name for d in self._cpus if not joules_known)
        self._loads = {(f.name, v.name): v.load_s for f in truth.catalog.families for v in f.variants}
        self._services: dict[tuple[str, str, str, str, int], SliceService] = {}
        self._nodes: dict[str, NodeStatus] | None = None
        self._next_s: float | None = None

    # --- what agents report -----------------------------------------------------------------------------------------

    def _invalidate(self, device: SimulatedDevice) -> None:
        """Forget what was made of its state before."""
        device.status = device.served = device.rates = self._nodes = self._next_s = None

    def nodes(self) -> dict[str, NodeStatus]:
        """Status of every node; made again only when something has changed."""
        if self._nodes is None:
            held: dict[tuple[str, str], list[DeviceStatus]] = {}
            for device in self.devices.values():
                device.status = device.status or _status(device)
                held.setdefault((device.place.node, device.place.zone), []).append(device.status)
            self._nodes = {
                node: NodeStatus(node=node, zone=zone, devices=tuple(devices), simulated=True)
                for (node, zone), devices in held.items()
            }
        return self._nodes

    def services(self, family: str) -> dict[str, dict[SliceKey, SliceService]]:
        """Services of a family now, by model (itself, or stages of it), by what really is on each slice."""
        found: dict[str, dict[SliceKey, SliceService]] = {family: {}}
        for device in self.devices.values():
            for (of, model), known in self._served(device).items():
                if of == family:
                    found.setdefault(model, {}).update(known)
        return found

    def _served(self, device: SimulatedDevice) -> dict[tuple[str, str], dict[SliceKey, SliceService]]:
        """Services on a device by family and model."""
        if device.served is None:
            device.served = {}
            for key, one in device.slices.items():
                for hosted in one.part.hosted if one.state in SERVES else ():
                    service = self.service(device, key, hosted)
                    known = replace(service, instances=hosted.instances) if hosted.instances > 1 else service
                    device.served.setdefault((hosted.family, hosted.model), {})[key] = known
        return device.served

    def service(
        self, device: SimulatedDevice, key: SliceKey, hosted: Hosted, clock_mhz: int | None = None
    ) -> SliceService:
        """True service of a variant on a slice, at the device's clock or another one (0: the highest).

        Raises:
            ProfileMissing: unknown.
        """
        clock_mhz = device.clock_mhz if clock_mhz is None else clock_mhz
        index = (device.type.name, key.slice_type, hosted.model, hosted.variant, clock_mhz)
        if index not in self._services:
            items, gap_ms = self._items[hosted.family], self._costs.gap_ms
            catalog = self._truth.catalog
            self._services[index] = true_service(catalog, device.type, key.slice_type, hosted, items, gap_ms, clock_mhz)
        return self._services[index]

    def scale_signals(self) -> tuple[ScaleSignal, ...]:
        """Signals of governors that are called up again at the top of their range."""
        return tuple(
            ScaleSignal(device.place.node, name, device.wanted.families, decision.why)
            for name, device in self.devices.items()
            if (decision := device.governed.decision) is not None and decision.scale_out
        )

    @property
    def cores(self) -> float:
        """Cores of all slices of CPUs that stand, the old beside the new included."""
        return sum([slice_cores(key.slice_type) for device in self._cpus for key in device.slices])

    def drained_s(self, keys: Iterable[SliceKey]) -> float:
        """Time until these slices are idle [s]: every dispatcher knows, and what was in flight is answered."""
        times_ms = [0.0]
        for key in keys:
            device = self.devices[key.device]
            one = device.slices.get(key)
            hosted = one.part.hosted if one is not None else ()
            times_ms += [self.service(device, key, h).service.mean_ms for h in hosted]
        return self._costs.ack_s + DRAIN_SERVICES * max(times_ms) / 1e3

    # --- commands ---------------------------------------------------------------------------------------------------

    def drain(self, keys: Iterable[SliceKey], now_s: float) -> None:
        """Drain slices: they take no new requests and are about to be stopped."""
        for key in keys:
            device = self.devices[key.device]
            one = device.slices.get(key)
            if one is not None and one.state in SERVES:
                one.state, one.since_s = SliceState.DRAINING, now_s
                self._invalidate(device)

    def undrain(self, keys: Container[SliceKey], now_s: float) -> None:
        """Let draining slices take requests again: the plan that was to stop them was given up."""
        for device in self.devices.values():
            for key, one in device.slices.items():
                if one.state == SliceState.DRAINING and key in keys:
                    one.state, one.since_s = SliceState.READY, now_s
                    self._invalidate(device)

    def command(self, devices: Mapping[str, PlannedDevice], now_s: float) -> None:
        """Command every device to be what its plan says; what runs as it ought to is left alone."""
        for name, wanted in devices.items():
            device = self.devices.get(name)
            if device is not None:
                self._apply_plan(device, wanted, now_s)
                self._invalidate(device)

    def _apply_plan(self, device: SimulatedDevice, wanted: PlannedDevice, now_s: float) -> None:
        parts = {part.key: part for part in wanted.slices}
        gone = [key for key in device.slices if key not in parts]
        for key in gone:
            del device.slices[key]
        device.wanted = wanted
        device.clock_mhz = self._clock_mhz(device, now_s)
        if parts and device.state == DeviceState.ASLEEP:
            device.state, device.awake_s = DeviceState.WAKING, now_s + device.type.wake_s
        elif not parts and wanted.target == DeviceState.ASLEEP:
            device.state = DeviceState.ASLEEP
        elif device.state == DeviceState.ASLEEP and wanted.target == DeviceState.AWAKE:
            device.state, device.awake_s = DeviceState.WAKING, now_s + device.type.wake_s
        begin_s = max(now_s, device.awake_s) + (STOP_S if gone else 0.0)
        mig = device.type.kind == DeviceKind.MIG_GPU
        for key, part in parts.items():
            one = device.slices.get(key)
            load_s = self._load_s(part.hosted)
            if one is None:
                ready_s = begin_s + (MIG_S if mig else 0.0) + self._costs.start_s + load_s
                device.slices[key] = Slice(part, SliceState.STARTING, now_s, ready_s)
            elif same_variants(one.next_hosted or one.part.hosted, part.hosted):
                if one.state == SliceState.DRAINING:
                    one.state, one.since_s = SliceState.READY, now_s
                if one.part.credits != part.credits:
                    one.part = replace(one.part, credits=part.credits)
            elif one.state == SliceState.DRAINING or one.state == SliceState.STARTING:
                ready_s = begin_s + STOP_S + self._costs.start_s + load_s
                device.slices[key] = Slice(part, SliceState.STARTING, now_s, ready_s)
            else:
                load_s = self._load_s(h for h in part.hosted if h not in one.part.hosted)  # the others serve on
                one.state, one.since_s, one.ready_s = SliceState.SWAPPING, now_s, begin_s + load_s
                one.next_hosted = part.hosted

    def _load_s(self, hosted: Iterable[Hosted]) -> float:
        return max((self._loads.get((h.family, h.variant), 0.0) for h in hosted), default=0.0)

    def _clock_mhz(self, device: SimulatedDevice, now_s: float) -> int:
        """Clock under load: the plan's, where neither its governor nor its power limit wants a lower one."""
        wanted, ability = device.wanted, device.ability
        wishes = device.governed.wishes(wanted, ability, device.clock_mhz, True, now_s)
        found, limit = wishes[Lever.CLOCK], wishes[Lever.POWER_LIMIT]
        is_governed = isinstance(found, ClockRange) and found != planned_range(wanted, ability.supported_mhz)
        clock_mhz = found.max_mhz if isinstance(found, ClockRange) and is_governed else wanted.clock_max_mhz
        device.limit_w = limit.watts if isinstance(limit, PowerLimit) else 0.0
        if not 0 < device.limit_w < device.type.power_limit_max_w:
            return clock_mhz
        under_mhz = power.clock_under(device.type, device.limit_w, self._full_w(device))
        return min(clock_mhz or under_mhz, under_mhz)

    def _full_w(self, device: SimulatedDevice) -> float:
        """What all that a device is to host draws above idle at the highest clock, computing at once [W]."""
        watts = 0.0
        for part in device.wanted.slices:
            services = [self.service(device, part.key, hosted, 0) for hosted in part.hosted]
            watts += max((one.energy_j / one.service.mean_ms * MS_PER_S for one in services), default=0.0)
        return watts

    # --- time -------------------------------------------------------------------------------------------------------

    def next_s(self) -> float:
        """Time at which the next slice or device is ready, or a governor wants to be asked [s]."""
        if self._next_s is None:
            waking = [m.awake_s for m in self.devices.values() if m.state == DeviceState.WAKING]
            slices = [s.ready_s for m in self.devices.values() for s in m.slices.values()]
            governed = [m.governed.next_s for m in self.devices.values()]
            self._next_s = min(min(waking, default=math.inf), min(slices, default=math.inf), min(governed))
        return self._next_s

    def advance(self, now_s: float) -> bool:
        """Advance to a time; True if anything became ready, or runs at another clock."""
        if now_s < self.next_s():
            return False
        found = False
        for device in self.devices.values():
            changed = False
            if device.governed.next_s <= now_s:
                self._next_s, before = None, device.clock_mhz
                device.clock_mhz = self._clock_mhz(device, now_s)
                changed = device.clock_mhz != before
            if device.state == DeviceState.WAKING and device.awake_s <= now_s:
                device.state, changed = DeviceState.AWAKE, True
            for one in device.slices.values():
                if one.ready_s <= now_s:
                    if one.next_hosted:
                        one.part, one.next_hosted = replace(one.part, hosted=one.next_hosted), ()
                    one.state, one.since_s, one.ready_s = SliceState.READY, now_s, math.inf
                    changed = True
            if changed:
                self._invalidate(device)
                found = True
        return found

    def book_energy(self, dt_s: float, served: Mapping[str, Interval]) -> list[DrawnEnergy]:
        """Book the energy of an interval without events, given what each family was served in it."""
        by_device: dict[str, list[tuple[str, float]]] = {}
        for family, one in served.items():
            for key, joules in one.joules.items():
                by_device.setdefault(key.device, []).append((family, joules))
        return [self._book(device, dt_s, by_device.get(name, ())) for name, device in self.devices.items()]

    def _book(self, device: SimulatedDevice, dt_s: float, work: Sequence[tuple[str, float]]) -> DrawnEnergy:
        """Book a device's energy. `work`: active joules of each family there, by the profile's linear law."""
        idle_w, serves = self._rates_of(device)
        baseline_j = device.factor * dt_s * idle_w
        linear_j, active_j = sum([joules for _, joules in work]), 0.0
        if linear_j > 0:
            active_j = device.factor * dt_s * power.saturated_w(device.type, linear_j / dt_s)
        families: dict[str, float] = {}
        for family, joules in work:
            families[family] = families.get(family, 0.0) + active_j * joules / linear_j if linear_j else 0.0
        counter_j = math.nan if device.place.name in self._unmetered else baseline_j + active_j
        device.active_j += active_j
        device.counter_j += counter_j
        if serves:
            device.idle_j += baseline_j
        else:
            device.unallocated_j += baseline_j
        return DrawnEnergy(device.place.name, device.place.zone, counter_j, active_j, families)

    def _rates_of(self, device: SimulatedDevice) -> tuple[float, bool]:
        """What a device draws before it computes [W], and whether anything serves."""
        if device.rates is None:
            idle_mhz = device.wanted.clock_max_mhz if device.limit_w else device.clock_mhz
            idle_w = power.idle_w(device.type, device.state, idle_mhz)
            device.rates = idle_w, device.serves
        return device.rates


def true_service(
    catalog: Catalog,
    kind: DeviceType,
    shape: str,
    hosted: Hosted,
    items: float,
    gap_ms: float,
    clock_mhz: int = 0,
) -> SliceService:
    """Service time, accuracy and energy of one request of `items` rows at a clock (0: the highest).

    Raises:
        ProfileMissing: no row.
    """
    catalog = catalog.by_model
    family = catalog.family(hosted.model)
    variant = family.variant(hosted.variant)
    row = effective_row(catalog, kind, slice_type(kind, shape), family, variant, items, clock_mhz)
    if row is None:
        raise ProfileMissing(
            f"the truth has no row for {hosted.variant} on {shape} of {kind.name}, and a plan put it there",
            field=f"families.{hosted.family}.profile",
            remedy="profile this slice",
        )
    rows = CatalogKey(catalog).rows(kind, shape, family.name, variant.name, clock_mhz)
    points = tuple(_operating_point(kind, one) for one in rows)
    joules = row.energy_active_j_per_batch
    return SliceService(service_time(row), variant.accuracy, joules, variant.name, family.name, gap_ms, points)


def _operating_point(kind: DeviceType, row: ProfileRow) -> OperatingPoint:
    time, activity = service_time(row), 1.0
    active_w = row.energy_active_j_per_batch / time.mean_ms * MS_PER_S
    if kind.kind != DeviceKind.CPU:
        activity = min(1.0, active_w / power.active_w(kind, row.slice_type, row.clock_mhz))
    return OperatingPoint(row.batch, time.mean_ms, time.cv, active_w, activity)


def _status(device: SimulatedDevice) -> DeviceStatus:
    return DeviceStatus(
        device=device.place.name,
        type=device.type,
        state=device.state,
        slices=tuple(
            SliceStatus(key=key, state=one.state, hosted=one.part.hosted, since_s=one.since_s, credits=one.part.credits)
            for key, one in sorted(device.slices.items())
        ),
        clock_mhz=device.clock_mhz,
        power_limit_w=device.limit_w,
        mig_current=device.type.kind == DeviceKind.MIG_GPU,
    )
