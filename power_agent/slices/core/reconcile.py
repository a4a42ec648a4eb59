"""Reconciliation: the fewest steps from what a node runs to what it ought to, none on a slice that may stay.

Data: seen slices (driver, processes and journal agree), the desired NodePlan, the catalogue.
Decision: a partial order of tasks. `after` names the tasks that must be done first; all others may run at once, so that
a slice starts while its neighbour drains.
Rules: placements are explicit (the driver's own choice fragments the GPU). A slice that is planned with what it runs
gets no task. Another variant of the same families is loaded in place while the old one serves, if both fit into the
slice's memory. Else the slice drains and starts again. An instance is created after all that overlap it are destroyed.
A whole GPU and a range of cores are there anyway: nothing is created or destroyed, what runs there first ends.
Level-triggered: it is asked again after each task, so a new plan, a crash or a failed step needs no separate case.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from trefoil.core.catalog import Catalog, memory_mib
from trefoil.core.device_types import slice_type
from trefoil.core.errors import NotFound, PlanError
from trefoil.core.fleet import (
    DeviceKind,
    DeviceState,
    DeviceStatus,
    DeviceType,
    FleetState,
    Hosted,
    NodeStatus,
    SliceKey,
    SliceState,
    Step,
    serves_alike,
)
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import CONTEXT_MIB, check_node

CREATE: Final = ("create_gi", "create_ci")
REBUILD: Final = ("start", "load", "warm_up")
HAS_TRAFFIC: Final = frozenset({SliceState.READY, SliceState.SWAPPING, SliceState.DRAINING})


@dataclass(frozen=True, slots=True)
class SeenSlice:
    """Slice as it is now. `hosted`: the models that its Triton was last commanded to serve."""

    key: SliceKey
    state: SliceState
    hosted: tuple[Hosted, ...] = ()
    has_instance: bool = True
    has_compute: bool = True  # a crash may have left the GPU instance without its compute instance
    running: bool = False  # its Triton is alive
    loaded: bool = False  # ... and has loaded `hosted`
    drained: bool = False
    stale_files: bool = False  # ... and was started with files that are gone
    proven: bool = False  # adopted without a journal: of `hosted` only what a Triton tells is known


@dataclass(frozen=True, slots=True)
class SeenDevice:
    """Device as it is now. `foreign`: instances of other software; they are reported, never touched."""

    device: str
    type: DeviceType
    state: DeviceState
    mig_on: bool = True
    slices: tuple[SeenSlice, ...] = ()
    foreign: tuple[SliceKey, ...] = ()
    cordon: str = ""  # why it is out of service
    evicted: bool = False  # ... and shall be empty by now, whatever the plan says
    closed: str = ""  # why nothing may be planned on it, and what to do about it
    uuid: str = ""  # of a GPU: an operator's commands name it, since indices change
    lacks: tuple[str, ...] = ()  # slice types of its type that its driver does not offer

    @property
    def create(self) -> tuple[str, ...]:
        """Verbs of the steps that bring a slice into being."""
        return CREATE if self.type.kind == DeviceKind.MIG_GPU else ()


@dataclass(frozen=True, slots=True)
class Task:
    """Step to be taken, what it needs to know, and the indices of the tasks that come first."""

    slice: SliceKey
    verb: str
    hosted: tuple[Hosted, ...] = ()
    after: tuple[int, ...] = ()
    why: str = ""

    def step(self, state: str = "planned", took_ms: float = 0.0, why: str = "") -> Step:
        """Step as it is answered, journalled and logged."""
        return Step(self.slice, self.verb, state, took_ms, why or self.why)


@dataclass(slots=True)
class _TaskGraph:
    """Tasks in the making: a chain per slice, plus edges between slices that overlap."""

    tasks: list[Task] = field(default_factory=list)
    leaving: dict[SliceKey, tuple[int, ...]] = field(default_factory=dict)  # the task that makes its place free

    def chain(
        self,
        key: SliceKey,
        verbs: Sequence[str],
        hosted: tuple[Hosted, ...],
        why: str,
        previous: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        for verb in verbs:
            self.tasks.append(Task(key, verb, hosted, previous, why))
            previous = (len(self.tasks) - 1,)
        return previous

    def block_overlaps(self) -> None:
        """Let whatever begins in a place wait until that place is free."""
        for index, task in enumerate(self.tasks):
            if task.verb in (CREATE[0], REBUILD[0]) and not task.after:
                blockers = (last for key, last in self.leaving.items() if key.overlaps(task.slice))
                self.tasks[index] = replace(task, after=tuple(chain.from_iterable(blockers)))


def reconcile(devices: Sequence[SeenDevice], plan: NodePlan, catalog: Catalog) -> tuple[Task, ...]:
    """Reconcile: the tasks that lead from `devices` to `plan`; empty when nothing is left to do.

    The plan has passed `refuse_plan`. A device that the plan does not name ought to be empty: plans are complete.
    """
    planned = {part.key: part for device in plan.devices for part in device.slices}
    order = _TaskGraph()
    for device in sorted(devices, key=lambda d: d.device):
        wanted = {} if device.evicted else {key: planned[key] for key in sorted(planned) if key.device == device.device}
        if device.state == DeviceState.LOST:
            continue  # fenced: no call to it can succeed
        for seen in sorted(device.slices, key=lambda s: s.key):
            if seen.key in wanted:
                _keep(order, seen, wanted.pop(seen.key), device, catalog)
            else:
                why = f"out of service: {device.cordon}" if device.evicted else "not in the plan"
                order.leaving[seen.key] = order.chain(seen.key, tuple(_teardown(seen)), seen.hosted, why)
        for key, part in wanted.items():
            order.chain(key, (*device.create, *REBUILD), part.hosted, f"planned: {_names(part.hosted)}")
    order.block_overlaps()
    return tuple(order.tasks)


def _teardown(seen: SeenSlice) -> Iterator[str]:
    if seen.running:
        if seen.state in HAS_TRAFFIC and not seen.drained:
            yield "drain"
        yield "stop"
    if seen.has_instance and seen.has_compute:
        yield "destroy_ci"
    if seen.has_instance:
        yield "destroy_gi"


def _keep(order: _TaskGraph, seen: SeenSlice, wanted: PlannedSlice, device: SeenDevice, catalog: Catalog) -> None:
    """The chain of a slice that exists and is planned."""
    if seen.running and seen.state == SliceState.DRAINING:  # a drain is not taken back: routes have left it
        drain = () if seen.drained else ("drain",)
        order.chain(seen.key, (*drain, "stop", *REBUILD), wanted.hosted, "planned again while it drained")
    elif not seen.running:
        create = device.create if not seen.has_instance else () if seen.has_compute else CREATE[1:]
        why = "its Triton is gone" if seen.state == SliceState.FAILED else f"planned: {_names(wanted.hosted)}"
        order.chain(seen.key, (*create, *REBUILD), wanted.hosted, why)
    elif seen.state == SliceState.FAILED:
        order.chain(seen.key, ("load", "warm_up"), wanted.hosted, "answers no inference")
    elif _differs(seen, wanted) and seen.state in HAS_TRAFFIC:
        change = f"{_names(seen.hosted)} -> {_names(wanted.hosted)}"
        if why := _no_swap_reason(seen, wanted, device.type, catalog):
            order.chain(seen.key, ("drain", "stop", *REBUILD), wanted.hosted, f"{change}: {why}")
        else:
            order.chain(seen.key, ("load", "warm_up"), wanted.hosted, change)
    elif seen.state != SliceState.READY:
        rest = ("warm_up",) if seen.loaded else ("load", "warm_up")
        begun = order.chain(seen.key, rest, seen.hosted, f"planned: {_names(seen.hosted)}")
        if _differs(seen, wanted):  # what has begun to load is finished first: it cannot be taken back
            change = f"{_names(seen.hosted)} -> {_names(wanted.hosted)}"
            order.chain(seen.key, ("load", "warm_up"), wanted.hosted, change, begun)


def _differs(seen: SeenSlice, wanted: PlannedSlice) -> bool:
    if seen.proven:
        return not serves_alike(seen.hosted, wanted.hosted)
    return set(seen.hosted) != set(wanted.hosted)


def _no_swap_reason(seen: SeenSlice, wanted: PlannedSlice, kind: DeviceType, catalog: Catalog) -> str:
    """Why what a slice serves cannot change in place: old and new fit beside each other, and no family that changes has
    sequences, which would lose their state. "" if it can."""
    if seen.stale_files:
        return "the files that its Triton was started with are gone"
    try:
        if any(catalog.family(hosted.family).sequence for hosted in set(seen.hosted) - set(wanted.hosted)):
            return "sequences have to end first"
        need_mib = CONTEXT_MIB + sum(memory_mib(catalog, hosted) for hosted in {*seen.hosted, *wanted.hosted})
    except NotFound as error:
        return f"what it serves is not in the model repository any more ({error.message})"
    fits = need_mib <= slice_type(kind, seen.key.slice_type).memory_mib
    return "" if fits else "both do not fit at once"


def _names(hosted: Sequence[Hosted]) -> str:
    return "+".join(h.variant for h in hosted) or "nothing"


def refuse_plan(plan: NodePlan, node: str, devices: Sequence[SeenDevice], catalog: Catalog) -> None:
    """Refuse a plan that this node cannot carry out, before anything is touched.

    Raises:
        PlanError: the first rule broken, naming field, value and remedy.
    """
    if plan.node != node:
        raise PlanError(f"this is node {node}", field="node", value=plan.node, remedy="send it to that node's agent")
    if plan.digest and plan.digest != plan.content_digest:
        raise PlanError(
            f"the content has digest {plan.content_digest}",
            field="digest",
            value=plan.digest,
            remedy="seal the plan after its last change",
        )
    check_fits(plan, devices, catalog)
    seen = {device.device: device for device in devices}
    for planned in plan.devices:
        _refuse_device(planned, seen[planned.device])


def check_fits(plan: NodePlan, devices: Sequence[SeenDevice], catalog: Catalog) -> None:
    """Check that a plan fits these devices, whatever is on them.

    Raises:
        PlanError: the first rule broken.
    """
    statuses = tuple(DeviceStatus(seen.device, seen.type, seen.state) for seen in devices)
    check_node(plan, FleetState((NodeStatus(plan.node, devices=statuses),)), catalog)


def refuse_cordoned(plan: NodePlan, devices: Sequence[SeenDevice]) -> None:
    """Refuse what is new on a device that is out of service; what is there already may stay until it has to leave.

    Raises:
        PlanError: naming the slice, and why the device is out of service.
    """
    cordoned = {device.device: device for device in devices if device.cordon}
    for planned in plan.devices:
        seen = cordoned.get(planned.device)
        for part in planned.slices if seen is not None else ():
            assert seen is not None
            if seen.evicted or all(part.key != known.key for known in seen.slices):
                raise PlanError(
                    f"the device is out of service: {seen.cordon}",
                    field=f"device {seen.device}.slices",
                    value=part.key.name,
                    remedy="plan on the other devices, or take it back into service: trefoil node drain --release",
                )


def _refuse_device(planned: PlannedDevice, seen: SeenDevice) -> None:
    here = f"device {seen.device}"
    if planned.target not in (DeviceState.AWAKE, DeviceState.ASLEEP):
        raise PlanError("not a target", field=f"{here}.target", value=planned.target.name, remedy="AWAKE or ASLEEP")
    if planned.slices and seen.closed:
        raise PlanError(seen.closed, field=f"{here}.slices", value=planned.slices[0].key.name)
    if planned.slices and seen.create and not seen.mig_on:
        remedy = f"setting mig_mode = enable, or sudo nvidia-smi -i {seen.uuid} -mig 1 while the GPU is idle"
        raise PlanError("MIG mode is off", field=here, value="mig_current", remedy=remedy)
    for part in planned.slices:
        if part.key.slice_type in seen.lacks:
            raise PlanError(
                f"the driver of {seen.device} does not offer {part.key.slice_type}",
                field=f"{here}.slices",
                value=part.key.name,
                remedy="plan another slice type, or update the driver",
            )
        for foreign in seen.foreign:
            if part.key.overlaps(foreign):
                raise PlanError(
                    f"its place holds {foreign.name}, which this agent did not make",
                    field=f"{here}.slices",
                    value=part.key.name,
                    remedy="destroy that instance, or plan around it",
                )
