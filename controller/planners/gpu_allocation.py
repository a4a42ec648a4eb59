"""Allocation of whole GPUs: which of them each family may use, and how many families share each.

Source: WattWiser section II (Fig. 1), section IV: users load a model to a given GPU, which updates `allocated_GPUs` and
`sharing_factor`.
Data: families and devices, both in order; settings `gpus_per_family` g and `gpus_shared` s; `Objective.devices`, an
operator's own, which goes before them family by family.
Decision: none here: the planner decides which of the allocated GPUs serve.
Formulation: family i may use devices [i (g - s), i (g - s) + g). Types on which all families are in time come first,
and among them those of fewer joules a request. So the order in which devices are listed changes nothing. A GPU is one
slice, and all families that may use it fit its memory together, with one CUDA context. Families that fit only as long
as one of them stays away are refused. The sharing factor counts the families that may use a GPU, whether they serve
there now or not, as the paper's does.
Deviations: GPUs that are lost or out of service keep their place, so that the others are not dealt again.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import Field

from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import PlanningInput, devices_by_type
from trefoil.core.device_types import profile_type
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import DeviceType
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.units import MS_PER_S


class GpuSettings(PlannerSettings):
    """Settings of planners that put families on whole GPUs."""

    model_max_rps: float = Field(default=0.0, ge=0)
    """Most requests/s that one GPU serves of a family; 0: what it carries within the SLO by its profile."""


class AllocationSettings(GpuSettings):
    """Settings of WattWiser's allocation of shared GPUs."""

    FLEET: ClassVar[frozenset[str]] = GpuSettings.FLEET | {
        "gpus_per_family",
        "gpus_shared",
        "hysteresis",
        "wake_lookahead_s",
    }

    tick_s: float = Field(default=1.0, gt=0)
    """Period after which the planner asks to be run again."""
    gpus_per_family: int = Field(default=2, ge=1)
    """GPUs of each family."""
    gpus_shared: int = Field(default=1, ge=0)
    """GPUs of a family that are shared with the next family in order."""
    hysteresis: float = Field(default=0.1, ge=0)
    """Share of a GPU's capacity that has to be free before the GPU falls asleep."""
    wake_lookahead_s: float = Field(default=0.0, ge=0)
    """How far ahead the load is looked at, so that a GPU is awake in time."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Allocation: the GPUs of each family, those of its own before those that it shares; families of each GPU."""

    gpus: Mapping[str, tuple[str, ...]]
    sharing_factor: Mapping[str, int]


def allocate(inputs: PlanningInput, settings: AllocationSettings) -> Allocation:
    """Allocate GPUs to the families that have an objective.

    Raises:
        InvalidInput: naming what was asked for, what is in its way, and the remedy.
    """
    here = {device.name for device in inputs.devices} | {name for _, name in inputs.lost}
    devices = sorted(devices_by_type(inputs.view.fleet), key=lambda status: _rank(inputs, status.type, settings))
    names = [status.device for status in devices if status.device in here]
    order = {name: at for at, name in enumerate(names)}
    given = {
        task.family: _asked(task.family, task.objective.devices, order, inputs)
        if task.objective.devices
        else _default(task.family, at, names, settings)
        for at, task in enumerate(inputs.tasks)
    }
    factor = Counter(name for mine in given.values() for name in mine)
    refuse_what_does_not_fit(inputs, given, factor)
    return Allocation({f: tuple(sorted(mine, key=lambda n: factor[n] > 1)) for f, mine in given.items()}, factor)


def _rank(inputs: PlanningInput, kind: DeviceType, settings: AllocationSettings) -> tuple[bool, float]:
    """Rank of a device type, the best first: whether a request is late even alone, joules of one on a busy GPU."""
    late, joules = False, 0.0
    for task in inputs.tasks:
        row = inputs.known.fastest_rows.get(
            (profile_type(kind.name), kind.largest.name, task.family, inputs.known.family(task.family).best.name)
        )
        if row is None:
            return True, math.inf
        own = settings.of(task.objective)
        late |= row.latency_ms_p95 + own.transport_gap_ms + own.overhead_ms > task.objective.slo_ms
        joules += row.energy_active_j_per_batch + kind.idle_w * row.latency_ms_p50 / MS_PER_S
    return late, joules


def _default(family: str, at: int, names: Sequence[str], settings: AllocationSettings) -> tuple[str, ...]:
    each, shared = settings.gpus_per_family, settings.gpus_shared
    if each < 1 or not 0 <= shared <= each:
        remedy = "at least one GPU each, and no more shared than each has"
        raise InvalidInput("no allocation", field="gpus_per_family, gpus_shared", value=(each, shared), remedy=remedy)
    first = at * (each - shared)
    if first + each > len(names):
        raise InvalidInput(
            f"{family} would need device {first + each} of {len(names)}, with {shared} shared by neighbours",
            field="gpus_per_family",
            value=each,
            remedy="add devices, share more of them (gpus_shared), or allocate them by hand",
        )
    return tuple(names[first : first + each])


def _asked(family: str, mine: Sequence[str], order: Mapping[str, int], inputs: PlanningInput) -> tuple[str, ...]:
    unplannable = dict(inputs.unplannable)
    for name in mine:
        if name not in order:
            why = unplannable.get(name, "no node reports this device")
            raise InvalidInput(why, field=f"devices of {family}", value=name, remedy=f"use some of {', '.join(order)}")
    return tuple(sorted(set(mine), key=lambda name: order[name]))


def with_device(
    inputs: PlanningInput, settings: AllocationSettings, family: str, device: str, load: bool
) -> Allocation:
    """Allocation once a family is loaded onto one more device, or unloaded from one of its own.

    Raises:
        InvalidInput: it cannot be; nothing else is changed by asking.
    """
    mine = allocate(inputs, settings).gpus[family]
    if load:
        mine = (*mine, device)
    elif device not in mine:
        remedy = f"unload it from one of {', '.join(mine)}"
        raise InvalidInput(f"{family} is not loaded there", field="device", value=device, remedy=remedy)
    elif len(mine) == 1:
        remedy = "load it onto another device first"
        raise InvalidInput(f"the last copy of {family}, which is served", field="device", value=device, remedy=remedy)
    else:
        mine = tuple(name for name in mine if name != device)
    tasks = tuple(
        replace(task, objective=replace(task.objective, devices=mine)) if task.family == family else task
        for task in inputs.tasks
    )
    return allocate(replace(inputs, tasks=tasks), settings)


def refuse_what_does_not_fit(
    inputs: PlanningInput, given: Mapping[str, Sequence[str]], factor: Mapping[str, int]
) -> None:
    """Refuse families that do not fit a whole GPU together, whether they are there now or not.

    Raises:
        InvalidInput: naming the device, its families and what is missing.
    """
    needs = dict.fromkeys(factor, CONTEXT_MIB)
    for family, mine in given.items():
        memory_mib = inputs.view.catalog.family(family).best.memory_mib
        for name in mine:
            needs[name] += memory_mib
    for device in inputs.devices:
        if device.name not in needs:
            continue
        memory_mib = device.type.largest.memory_mib
        missing = needs[device.name] - memory_mib
        if missing > 0:
            raise InvalidInput(
                f"together they need {needs[device.name]} MiB of {memory_mib}: {missing} MiB are missing",
                field=f"families on {device.name}",
                value=[family for family, mine in given.items() if device.name in mine],
                remedy="allocate fewer of them there",
            )
