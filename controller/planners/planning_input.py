"""Planning input that a planner reads out of a `PlanView`: plannable devices, what runs on them, demand, settings.

Shared by every planner, so that all of them see the same fleet. Everything is in canonical order (node, then device
index), so that equal views give equal plans.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from controller.observe.core.plannable import (
    AWAKE_STATES,
    loadable_catalog,
    taken_reason,
    unplannable_reason,
    usable_type,
)
from trefoil.core.brains import PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.device_types import DEVICE_TYPES, cpu_quota, placements
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import (
    DeviceKind,
    DeviceState,
    DeviceStatus,
    DeviceType,
    FleetState,
    SliceKey,
    SliceState,
    stage_model,
    why_missing,
)
from trefoil.core.objective import Objective

STANDING = frozenset({SliceState.PENDING, SliceState.STARTING, SliceState.READY, SliceState.SWAPPING})
LEVERS = ("clock_lock", "power_limit")


@dataclass(frozen=True, slots=True)
class HostedSlice:
    """Slice that stands and a family that it serves, or is about to. `beside`: (model, variant) of others on it.
    `stage` of `stages`, from 0, of a family that is split."""

    key: SliceKey
    family: str
    variant: str
    beside: tuple[tuple[str, str], ...] = ()
    stage: int = 0
    stages: int = 1

    @property
    def model(self) -> str:
        """Name of its model in Triton: the family's, or that of a stage."""
        return stage_model(self.family, self.stage, self.stages)

    @property
    def leads(self) -> bool:
        """Whether it is the first in order of those that share the slice: the one by which slices are counted."""
        return not self.beside or self.model < self.beside[0][0]


@lru_cache(maxsize=4096)  # of the same few devices, at every decision
def sharing(parts: tuple[HostedSlice, ...]) -> tuple[HostedSlice, ...]:
    """The same with what stands beside each on its slice."""
    on: dict[SliceKey, list[HostedSlice]] = {}
    for part in parts:
        on.setdefault(part.key, []).append(part)
    if len(on) == len(parts):
        return parts
    return tuple(
        replace(one, beside=tuple(sorted((other.model, other.variant) for other in together if other is not one)))
        for together in on.values()
        for one in together
    )


@dataclass(frozen=True, slots=True)
class Device:
    """Device that may be planned. `frozen`: its node is silent, so nothing may move there.

    `zone` is empty where the view's `carbon` holds. `clock_mhz` is the clock in force; 0 = the highest, not locked;
    below 0 the power limit [-W]. `clock_lockable`, `limitable`: its node does not say that it cannot lock clocks, or
    takes no power limit.
    """

    name: str
    node: str
    type: DeviceType
    awake: bool
    running: tuple[HostedSlice, ...]
    frozen: bool = False
    zone: str = ""
    clock_mhz: int = 0
    clock_lockable: bool = True
    limitable: bool = True

    @property
    def layout(self) -> tuple[tuple[str, int, int], ...]:
        """(slice type, start, size) of what stands, by start."""
        return tuple(sorted({(r.key.slice_type, r.key.start, r.key.size) for r in self.running}, key=lambda s: s[1]))


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a family: its objective with the demand that it has to meet, both with defaults filled in.

    `streams`: how many a slice of a generative family decodes together, its profile's largest batch; 0 of any other.
    `batching`: whether Triton joins its requests to batches.
    """

    objective: Objective
    demand: Demand
    streams: int = 0
    batching: bool = False

    @property
    def family(self) -> str:
        """Family of the objective."""
        return self.objective.family

    @property
    def mean_per_s(self) -> float:
        """Mean rate that energy and accuracy are counted at."""
        return self.demand.mean_per_s


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """A view, read.

    `lost` devices (or those out of service) are planned asleep until they may be used again. Planners cannot use
    `unplannable` devices; each has its reason. The view's catalogue has only variants that can be loaded; `known` has
    what runs as well.
    """

    view: PlanView
    known: Catalog
    devices: tuple[Device, ...]
    lost: tuple[tuple[str, str], ...]
    tasks: tuple[Task, ...]
    unplannable: tuple[tuple[str, str], ...] = ()

    @property
    def nothing_runs(self) -> bool:
        """Whether no device hosts anything."""
        return not any(d.running for d in self.devices)

    def task(self, family: str) -> Task:
        """Task of a family that has an objective."""
        return next(t for t in self.tasks if t.family == family)

    @property
    def in_ranges(self) -> "PlanningInput":
        """The same for planners that cut CPUs in ranges of cores: quotas there give way, but on a silent node, whose
        CPUs are left out."""
        quotas = {d.name for d in self.devices if any(cpu_quota(r.key.slice_type) for r in d.running)}
        if not quotas:
            return self
        why = "it is cut by quotas, and its node is silent"
        left = tuple((d.name, why) for d in self.devices if d.name in quotas and d.frozen)
        gone = dict(left)
        devices = (replace(d, running=()) if d.name in quotas else d for d in self.devices if d.name not in gone)
        return replace(self, devices=tuple(devices), unplannable=(*self.unplannable, *left))

    def intensity(self, zone: str) -> float:
        """Carbon intensity of a zone [g/kWh]; an empty zone is that of the view's `carbon`."""
        found = next((z for z in self.view.zones if zone and z.series.zone == zone), self.view.carbon)
        return found.intensity_g_per_kwh


def read_view(
    view: PlanView,
    rate_floor_per_s: float,
    clocks: bool = False,
    unprofiled: bool = False,
    cores_max: float = 0.0,
    whole: bool = False,
) -> PlanningInput:
    """Read a view. Families without an objective are not planned; without demand, `rate_floor_per_s` is assumed.

    Without `clocks` every device is taken to run at its highest clock. `unprofiled`: devices of types without any
    profile count too, for planners that measure. CPUs with a profile count where they have no more than `cores_max`
    cores, for planners that cut them. `whole`: GPUs of which something is taken are left out, for planners that know
    whole GPUs only. Otherwise their type is what is left (`usable_type`).
    """
    before = [device for node in (view.current.nodes if view.current else ()) for device in node.devices]
    planned = {part.key: part for device in before for part in device.slices}
    locked = {d.device: d.held_mhz for d in before} if clocks else {}
    own = {z.series.zone for z in view.zones} - {view.carbon.series.zone}
    served = {o.family for o in view.objectives}
    devices, lost, left, types = [], [], [], frozenset(DEVICE_TYPES) if unprofiled else view.catalog.profiled_types
    for node in sorted(view.fleet.nodes, key=lambda n: n.node):
        for status in sorted(node.devices, key=lambda d: natural_sort_key(d.device)):
            if why := unplannable_reason(status, types):
                left.append((status.device, why))
                continue
            if status.type.kind == DeviceKind.CPU and status.type.cores > cores_max:
                most = f"of more than {cores_max:g} cores " if cores_max else ""
                left.append((status.device, f"CPUs {most}are not planned by this policy"))
                continue
            if not status.usable:
                lost.append((node.node, status.device))
                continue
            running = tuple(sorted(_running(status, planned, served), key=lambda r: r.key))
            kind = usable_type(status)
            if whole and kind != status.type:
                lost.append((node.node, status.device))
                continue
            if kind != status.type and not placements(kind):
                left.append((status.device, "no place is left on it"))
                continue
            awake = status.state in AWAKE_STATES or (status.state == DeviceState.UNSPECIFIED and bool(running))
            frozen, zone = node.node in view.fleet.stale, node.zone if node.zone in own else ""
            lockable, limitable = (not why_missing(node.missing, what, status.device) for what in LEVERS)
            placed = running, frozen, zone, _held_mhz(kind, locked.get(status.device, 0)), lockable, limitable
            devices.append(Device(status.device, node.node, kind, awake, *placed))
    demand = {d.family: d for d in view.demand if not d.slo_class}
    streams = {f.name: _streams(view.catalog, f.name) for f in view.catalog.families if f.generative}
    batching = {f.name for f in view.catalog.families if f.batching}
    tasks = tuple(
        Task(
            _filled(o, view),
            _floored(demand.get(o.family) or Demand(o.family, "", 0.0, 0.0), rate_floor_per_s),
            streams.get(o.family, 0),
            o.family in batching,
        )
        for o in sorted(view.objectives, key=lambda o: o.family)
    )
    seen = replace(view, catalog=loadable_catalog(view.catalog, view.fleet))
    return PlanningInput(seen, view.catalog, tuple(devices), tuple(lost), tasks, tuple(left))


def _held_mhz(kind: DeviceType, planned_mhz: int) -> int:
    """Clock or power limit that holds a device back; the limit that the board has anyway does not."""
    return 0 if planned_mhz < 0 and planned_mhz <= -kind.power_limit_max_w else planned_mhz


def devices_by_type(fleet: FleetState) -> list[DeviceStatus]:
    """Devices of a fleet, those that cannot be used among them, type by type: an order that naming does not change."""
    devices = [(status.type.name, node.node, natural_sort_key(status.device), status)
               for node in fleet.nodes for status in node.devices]  # fmt: skip
    return [status for *_, status in sorted(devices, key=lambda each: each[:3])]


def _streams(catalog: Catalog, family: str) -> int:
    return max((row.batch for row in catalog.rows if row.family == family), default=1)


def _running(status: DeviceStatus, planned: Mapping[SliceKey, object], served: set[str]) -> list[HostedSlice]:
    """What stands of families in service: what stands of others is not planned, and leaves."""
    found = []
    for part in status.slices:
        if part.state not in STANDING or taken_reason(status, part.key):
            continue
        hosted = getattr(planned.get(part.key), "hosted", ()) or part.hosted
        found += [
            HostedSlice(part.key, h.family, h.variant, (), h.stage, h.stages or 1) for h in hosted if h.family in served
        ]
    return list(sharing(tuple(found)))


def _filled(objective: Objective, view: PlanView) -> Objective:
    """An SLO that the objective leaves open is the one of the family's default class."""
    if objective.slo_ms > 0 and 0 < objective.slo_quantile < 1:
        return objective
    slo_ms, quantile = view.catalog.family(objective.family).classes.get("", (0.0, 0.0))
    slo_ms, quantile = objective.slo_ms or slo_ms, objective.slo_quantile or quantile
    if slo_ms > 0 and 0 < quantile < 1:
        return replace(objective, slo_ms=slo_ms, slo_quantile=quantile)
    raise InvalidInput(
        "an SLO needs a latency above 0 ms and a percentile between 0 and 1",
        field=f"objective {objective.family}: slo",
        value=(slo_ms, quantile),
        remedy="set slo.latency_ms and slo.percentile, or classes in family.toml",
    )


def _floored(demand: Demand, rate_floor_per_s: float) -> Demand:
    rate = max(demand.rate_per_s, rate_floor_per_s)
    return replace(demand, rate_per_s=rate, rate_p90_per_s=max(rate, demand.rate_p90_per_s))


@lru_cache(maxsize=4096)  # of the same few devices, at every decision
def natural_sort_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which gpu2 stands before gpu10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)


def pue_of(view: PlanView, task: Task) -> float:
    """PUE of the objective, else the view's."""
    return task.objective.pue or view.pue or 1.0
