"""Slices of CPUs for planners that decide how many cores each variant has: room, places, and the plan of both.

Data: devices that are CPUs, what runs there, sizes in units of `core_step` (1 or more: ranges of pinned cores; below 1:
quotas). Decision: where a slice lies, and the complete plan.
A slice that stays as large keeps its place. Another one is put where nothing runs, so that it serves before the slice
that it replaces goes. Where there is no such place for a range of cores, it is put into that of slices that go. Where
the free cores are in pieces, all slices are laid again. Places of quotas are names: they may reach beyond the cores, up
to `QUOTA_PLACES` times as many. So old and new stand side by side until the new one serves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, NamedTuple

from pydantic import Field

from controller.planners.columns import ClassKey, Column, class_column, class_of
from controller.planners.infadapter.capacity import Capacity, capacities
from controller.planners.plan_assembly import plan_of
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import Device, HostedSlice, PlanningInput, Task, pue_of, read_view
from trefoil.core.brains import Decision, PlanView
from trefoil.core.cpus.rows import QUOTAS, RANGES, cut_of, slice_name
from trefoil.core.device_types import QUOTA_PLACES, TENTHS, slice_cores
from trefoil.core.errors import CatalogError, InvalidInput
from trefoil.core.fleet import DeviceKind, SliceKey, SliceState
from trefoil.core.plan import Expected, Plan
from trefoil.core.units import grams


class InfAdapterSettings(PlannerSettings):
    """Settings of the planners of CPU slices. Source: InfAdapter (EuroMLSys 23) Eq. 1, and its public code."""

    FLEET: ClassVar[frozenset[str]] = frozenset()  # each holds for all, whichever objective gives it
    REMOVED: ClassVar = {
        **PlannerSettings.REMOVED,
        "normalised": "costs always are: cores over the budget, seconds over the slowest load",
    }

    tick_s: float = Field(default=30.0, gt=0)
    """Period after which the planner asks to be run again."""
    core_step: float = Field(default=1.0, gt=0)
    """Cores whose multiples are the sizes of slices."""
    budget_cores: float = Field(default=0.0, ge=0)
    """Cores of all slices together; 0: all cores of the devices."""
    cores_min: float = Field(default=0.0, ge=0)
    """Least cores of a slice."""
    capacity_share: float = Field(default=0.8, gt=0)
    """Share of the fitted capacity that is counted on."""
    load_margin: float = Field(default=0.1, ge=0)
    """Share by which the forecast load is raised."""
    intercept_truncated: bool = False
    """The intercept of a fitted capacity is cut to a whole number, as in the public code."""
    alpha: float = Field(default=1.0, ge=0)
    """Eq. 1: weight of the accuracy, a fraction."""
    beta: float = Field(default=0.05, ge=0)
    """Eq. 1: weight of the cores, over the budget."""
    gamma: float = Field(default=0.001, ge=0)
    """Eq. 1: weight of the slowest load's seconds, over those of the slowest variant."""
    resize_loads: bool = False
    """A variant whose size changes is loaded again."""
    skipped_max: int = Field(default=0, ge=0)
    """Decisions of no more load that are skipped after one that was taken."""


STARTING: Final = frozenset({SliceState.PENDING, SliceState.STARTING, SliceState.SWAPPING})


class Choice(NamedTuple):
    """Choice of cores for a variant on a device, and how much of its family's load it takes [1/s]."""

    device: str
    family: str
    variant: str
    cores: float
    load_per_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """Room for slices: cores by device, within a budget of them all; sizes are whole numbers of `step` cores.

    `held`: cores of each (device, family, variant) now, `loaded` the variants that run anywhere.
    """

    cores: Mapping[str, float]
    budget: float
    step: float
    held: Mapping[tuple[str, str, str], float] = field(default_factory=dict)

    @property
    def loaded(self) -> frozenset[tuple[str, str]]:
        """Family and variant of what runs."""
        return frozenset((family, variant) for _, family, variant in self.held)


@dataclass(frozen=True, slots=True)
class CpuInput:
    """A view as planners of CPU slices read it. `wanted`: load to plan for [1/s], by family."""

    inputs: PlanningInput
    settings: InfAdapterSettings
    room: Room
    capacities: Mapping[str, tuple[Capacity, ...]]
    wanted: Mapping[str, float]

    @property
    def fits(self) -> str:
        """Fitted capacities, for people."""
        return "th(n) = " + ", ".join(one.words for each in self.capacities.values() for one in each)


def still_coming(view: PlanView) -> str:
    """Why a tick decides nothing: slices of the plan in force are being started."""
    if view.current is None or view.trigger != "tick":
        return ""
    planned = {part.key for node in view.current.nodes for device in node.devices for part in device.slices}
    slices = [part for node in view.fleet.nodes for device in node.devices for part in device.slices]
    coming = sorted(part.key.name for part in slices if part.key in planned and part.state in STARTING)
    return f"waits for {', '.join(coming)}" if coming else ""


def read_devices(view: PlanView, settings: InfAdapterSettings) -> PlanningInput:
    """Read a view whose CPUs are planned too."""
    return read_view(view, settings.rate_floor_per_s, cores_max=math.inf)


def has_only_gpus(inputs: PlanningInput) -> bool:
    """Whether a fleet has no CPUs to plan but GPUs."""
    return bool(inputs.devices) and all(d.type.kind != DeviceKind.CPU for d in inputs.devices)


def read_cpus(view: PlanView, settings: InfAdapterSettings) -> CpuInput:
    """Read a view as `cpus_of` does, raising as it does."""
    return cpus_of(read_devices(view, settings), settings)


def cpus_of(inputs: PlanningInput, settings: InfAdapterSettings) -> CpuInput:
    """CPUs, their room, fitted capacities and the load to plan for.

    Raises:
        InvalidInput, CatalogError: nothing can be planned, naming field, value and remedy.
    """
    if not inputs.tasks:
        raise InvalidInput("no family has an objective", field="objectives", remedy="set one: trefoil objective set")
    step, budget = settings.core_step, settings.budget_cores
    if abs(step * TENTHS - round(step * TENTHS)) > 1e-9 or step <= 0 or (step > 1 and step % 1):
        remedy = "1 or more whole cores, or tenths of a core for quotas"
        raise InvalidInput("no step of cores", field="core_step", value=step, remedy=remedy)
    cut = cut_of_step(step)
    cpus = [d for d in inputs.devices if d.type.kind == DeviceKind.CPU and not d.frozen]
    lacking = _without_groups(inputs.view) if cut == QUOTAS else {}
    cores = {d.name: float(d.type.cores) for d in cpus if d.node not in lacking}
    if not cores:
        why = "; ".join((*lacking.values(), *(f"{name}: {why}" for name, why in inputs.unplannable)))
        remedy = "let an agent serve on CPUs (cpu = serve), and profile the family there"
        raise InvalidInput(f"no CPUs to cut{f' ({why})' if why else ''}", field="fleet", remedy=remedy)
    held = {
        (d.name, r.family, r.variant): slice_cores(r.key.slice_type)
        for d in cpus for r in d.running if cut_of(r.key.slice_type) == cut
    }  # fmt: skip
    room = Room(cores, min(budget or sum(cores.values()), sum(cores.values())), step, held)
    if room.budget < max(step, settings.cores_min) - 1e-9:
        remedy = f"at least {max(step, settings.cores_min):g} cores, the smallest size"
        raise InvalidInput("below the smallest slice", field="budget_cores", value=budget, remedy=remedy)
    found = {task.family: _counted(capacities(inputs, task, cut, settings), settings) for task in inputs.tasks}
    wanted = {t.family: t.demand.rate_per_s * (1 + settings.load_margin) for t in inputs.tasks}
    return CpuInput(inputs, settings, room, found, wanted)


def cut_of_step(step: float) -> str:
    """How CPUs are cut for sizes in such steps: below one core by quotas."""
    return QUOTAS if step < 1 else RANGES


def _without_groups(view: PlanView) -> dict[str, str]:
    """Nodes that cannot limit cores: their control groups are not to be had."""
    return {
        node.node: f"{node.node} takes no quotas, {entry}"
        for node in view.fleet.nodes for entry in node.missing if entry.startswith("cpu_quota:")
    }  # fmt: skip


def _counted(found: Sequence[Capacity], settings: InfAdapterSettings) -> tuple[Capacity, ...]:
    """Capacities as they are counted on: with a smallest size, an intercept without its fraction, a share of all."""
    share, whole = settings.capacity_share, settings.intercept_truncated
    return tuple(
        replace(
            one,
            slope=one.slope * share,
            intercept=(float(int(min(one.intercept, 0.99))) if whole else one.intercept) * share,
            least=max(one.least, settings.cores_min),
        )
        for one in found
    )


def smallest_on_all(cpu: CpuInput) -> list[Choice]:
    """The least accurate variant of each family on all cores: what is left where nothing carries the load.

    Raises:
        InvalidInput: the budget is too small for that.
    """
    room, number, chosen = cpu.room, len(cpu.capacities), []
    for family, found in cpu.capacities.items():
        smallest = min(found, key=lambda c: (c.variant.accuracy, c.variant.name))
        left = room.budget / number
        for device, cores in room.cores.items():
            most = int(min(left, cores / number) / room.step + 1e-9) * room.step
            if most > 0 and most >= smallest.least - 1e-9:
                chosen.append(Choice(device, family, smallest.variant.name, most, smallest.per_s(most)))
                left -= most
        if not any(one.family == family for one in chosen):
            raise InvalidInput(
                f"below the smallest size of {smallest.variant.name} that meets its SLO, {smallest.least:.2f} cores",
                field="budget_cores", value=room.budget / number, remedy="more cores, or a later SLO",
            )  # fmt: skip
    return chosen


def decide(cpu: CpuInput, planner: str, chosen: Sequence[Choice], why: str, degraded: str = "") -> Decision:
    """Decision for these sizes: where each slice lies, shares by load, and what is expected of it."""
    inputs, settings = cpu.inputs, cpu.settings
    devices, hosted = {d.name: d for d in inputs.devices}, {d.name: list(d.running) for d in inputs.devices if d.frozen}
    columns: dict[ClassKey, Column] = {}
    weights: dict[str, dict[SliceKey, float]] = {}
    loads = {t.family: sum(c.load_per_s for c in chosen if c.family == t.family) for t in inputs.tasks}
    for name in cpu.room.cores:
        here = [one for one in chosen if one.device == name]
        keys = lay_out(devices[name], [(one.family, one.variant, one.cores) for one in here], cpu.room.step)
        hosted[name] = [HostedSlice(key, one.family, one.variant) for key, one in zip(keys, here, strict=True)]
        for key, one, part in zip(keys, here, hosted[name], strict=True):
            weights.setdefault(one.family, {})[key] = one.load_per_s / (loads[one.family] or 1.0)
            of_class = class_of(devices[name], part)
            column = _column(inputs, of_class, devices[name], settings)
            columns[of_class] = replace(column, key=of_class)
    expected = {t.family: _expected(cpu, t, chosen, columns, devices) for t in inputs.tasks}
    cores = sum(one.cores for one in chosen)
    sizes = ", ".join(
        f"{one.variant} {one.cores:g} ({one.load_per_s / (loads[one.family] or 1.0):.0%})"
        for one in chosen
    )  # fmt: skip
    why = f"{planner}: {sizes} of {cpu.room.budget:g} cores, {cores:g} taken; {why}; {cpu.fits}"
    plan = plan_of(
        inputs,
        planner,
        hosted,
        {},
        tuple(columns.values()),
        settings,
        expected,
        why,
        degraded=degraded,
        weights=weights,
    )
    return Decision(planned_for(plan, cpu.wanted), why, inputs.view.now_s + settings.tick_s, degraded)


PLANNED: Final = "planned_per_s"
"""Parameter of a route, for the next decision: the load that its sizes were chosen for."""


def planned_for(plan: Plan, wanted: Mapping[str, float]) -> Plan:
    """The plan, with the load [1/s] that it was made for on the route of each family."""
    routes = tuple(replace(r, params={**r.params, PLANNED: wanted[r.family]}) for r in plan.routes)
    return replace(plan, routes=routes)


def refused(planner: str, error: InvalidInput | CatalogError, view: PlanView, settings: InfAdapterSettings) -> Decision:
    """Decision for no plan at all, with the reason."""
    return Decision(None, f"{planner}: {error}", view.now_s + settings.tick_s, f"no_plan: {error}")


def _column(inputs: PlanningInput, of: ClassKey, device: Device, settings: InfAdapterSettings) -> Column:
    found = class_column(inputs.known, inputs.task(of.family), device.type, of.slice_type, of.variant, 1, settings)
    if found is None:
        raise InvalidInput(
            f"{of.variant} has no profile, or needs more memory than {of.slice_type} has",
            field=f"family {of.family}", remedy="profile it on CPUs, or set cores_min to a size that fits",
        )  # fmt: skip
    return found


def _expected(
    cpu: CpuInput,
    task: Task,
    chosen: Sequence[Choice],
    columns: Mapping[ClassKey, Column],
    devices: Mapping[str, Device],
) -> Expected:
    """Expectation of a family. Joules are 0 where no profile knows any: CPUs without RAPL."""
    mine = [one for one in chosen if one.family == task.family]
    of = {(c.device_type, c.slice_type, c.variant): c for c in columns.values() if c.family == task.family}
    total = sum(one.load_per_s for one in mine) or 1.0
    cut = cut_of_step(cpu.room.step)
    parts = [
        (one.load_per_s / total, of[devices[one.device].type.name, slice_name(cut, one.cores), one.variant])
        for one in mine
    ]
    joules = sum(share * column.energy_j for share, column in parts)
    if joules:
        awake = {one.device for one in chosen}
        joules += sum(devices[name].type.idle_w for name in awake) / sum(t.demand.rate_per_s for t in cpu.inputs.tasks)
    overhead_ms = cpu.settings.of(task.objective).overhead_ms
    by_name = {one.variant.name: one for one in cpu.capacities[task.family]}
    return Expected(
        grams_per_request=grams(joules, cpu.inputs.view.carbon.intensity_g_per_kwh, pue_of(cpu.inputs.view, task)),
        joules_per_request=joules,
        latency_ms_p95=max((column.unqueued_ms_p95 for _, column in parts), default=0.0) + overhead_ms,
        accuracy=sum(share * column.accuracy for share, column in parts),
        capacity_per_s=sum(by_name[one.variant].per_s(one.cores) for one in mine),
    )


def lay_out(device: Device, sizes: Sequence[tuple[str, str, float]], step: float) -> list[SliceKey]:
    """Places of slices (family, variant, cores) on a device, in the same order; see above where that is."""
    cut = cut_of_step(step)
    unit, places = (TENTHS, QUOTA_PLACES) if cut == QUOTAS else (1, 1)
    room = device.type.cores * unit * places
    wanted = [(family, variant, round(cores * unit)) for family, variant, cores in sizes]
    running = {(r.family, r.variant, r.key.size): r.key for r in device.running if cut_of(r.key.slice_type) == cut}
    kept = {one: (running[one].start, one[2]) for one in wanted if one in running}
    there = {(key.start, key.size) for key in running.values()}
    for taken, fixed in ((there, kept), (set(), kept), (set(), {})):
        found = _placed(wanted, fixed, taken, room)
        if found is not None:
            break
    assert found is not None, "what fits the budget fits side by side"
    return [
        SliceKey(device.name, slice_name(cut, cores), found[one], one[2])
        for one, (_, _, cores) in zip(wanted, sizes, strict=True)
    ]


_Wanted = tuple[str, str, int]
_Range = tuple[int, int]  # start, size


def _placed(
    wanted: Sequence[_Wanted], kept: Mapping[_Wanted, _Range], taken: set[_Range], room: int
) -> dict[_Wanted, int] | None:
    """Start of each slice; None: a gap is missing.

    Kept ones stay where they are. The others come the largest first, each at an edge of a gap. The edge is the one that
    leaves the longest range free once the slices that go are gone.
    """
    found = dict(kept)
    for one in sorted((w for w in wanted if w not in kept), key=lambda w: (-w[2], w)):
        gaps = [gap for gap in _gaps({*found.values(), *taken}, room) if gap[1] >= one[2]]
        starts = sorted({at for start, size in gaps for at in (start, start + size - one[2])})
        if not starts:
            return None
        left = {at: max((s for _, s in _gaps({*found.values(), (at, one[2])}, room)), default=0) for at in starts}
        found[one] = max(starts, key=lambda at: (left[at], -at)), one[2]
    return {one: start for one, (start, _) in found.items()}


def _gaps(used: set[_Range], room: int) -> list[_Range]:
    """Free ranges (start, size) between those in use, which may overlap."""
    found, at = [], 0
    for start, size in sorted(used):
        if start > at:
            found.append((at, start - at))
        at = max(at, start + size)
    return [*found, (at, room - at)] if at < room else found
