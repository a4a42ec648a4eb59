"""A view whose devices for jobs are full of slices.

Source: ours. Data: a view, its plan for requests alone. Result: the view with more demand.
Formulation: a device that is woken for jobs draws its idle power however little of it is cut into slices. So families
with jobs are planned as if the requests came that fill those devices within the objective. Routes spread requests over
all slices of the plan, so that each is an ordinary one, and jobs take the time that requests leave over.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Final

from controller.planners.columns import Column, columns
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import PlanningInput
from trefoil.core.brains import PlanView
from trefoil.core.demand import Demand
from trefoil.core.device_types import configurations
from trefoil.core.fleet import DeviceKind, DeviceType
from trefoil.core.objective import ObjectiveMode
from trefoil.core.plan import Plan

CRUMB: Final = 1e-6  # of accuracy: the solver's tolerance
PARTS: Final = (1.2, 1.0, 0.8)
"""Parts of the devices to fill: the first is taken that wakes no device more."""


def awake_devices(plan: Plan) -> int:
    """Number of devices with slices."""
    return sum(bool(device.slices) for node in plan.nodes for device in node.devices)


def filled_view(inputs: PlanningInput, alone: Plan, devices: int, part: float, settings: ExactSettings) -> PlanView:
    """The view with demand that fills this part of the devices that are awake for jobs alone, of so many in all.

    Those devices go to families with jobs, each to the one that lacks the most of its own.
    """
    planned = [device for node in alone.nodes for device in node.devices]
    serving = Counter(family for device in planned for family in device.families)
    lacks = {one.family: one.own_devices - serving[one.family] for one in inputs.view.flexible}
    added = Counter[str]()
    for _ in range(devices - awake_devices(alone)):
        family = max(sorted(lacks), key=lambda name: lacks[name] - added[name])
        added[family] += 1
    used = {device.device for device in planned if device.slices}
    asleep = {
        d.type.name: d.type
        for d in inputs.devices
        if d.name not in used and d.type.kind != DeviceKind.CPU and not (d.frozen or d.zone)
    }
    jobs = {one.family: one for one in inputs.view.flexible}
    demand, objectives = {}, {}
    for task in inputs.tasks:
        family, count = task.family, added[task.family]
        demand[family], objectives[family] = task.demand, task.objective
        if count:
            least = max(alone.expected[family].accuracy - CRUMB, jobs[family].accuracy_floor)
            found = columns(inputs.view.catalog, task, inputs.devices, settings)
            demand[family] = _raised(task.demand, part * _able_per_s(found, asleep, count, least))
            objectives[family] = replace(
                task.objective,
                mode=ObjectiveMode.INSTANT,
                min_accuracy=least,
                replicas_min=max(task.objective.replicas_min, serving[family] + count),
            )
    by_class = (one for one in inputs.view.demand if one.slo_class)
    return replace(
        inputs.view,
        flexible=tuple(replace(one, devices=devices) for one in inputs.view.flexible),
        demand=(*demand.values(), *by_class),
        objectives=tuple(objectives.values()),
    )


def _raised(demand: Demand, more_per_s: float) -> Demand:
    ahead = demand.forecast and replace(demand.forecast, mean_per_s=demand.forecast.mean_per_s + more_per_s)
    rates = {name: getattr(demand, name) + more_per_s for name in ("rate_per_s", "rate_p90_per_s")}
    return replace(demand, forecast=ahead, **rates)


def _able_per_s(found: Iterable[Column], kinds: Mapping[str, DeviceType], devices: int, accuracy: float) -> float:
    """Most requests a second that so many devices of a type answer at a mean accuracy, by two variants at most."""
    full: dict[float, float] = {}  # by accuracy of a variant
    for column in found:
        if kind := kinds.get(column.device_type):
            slices = devices * max(dict(one.slices).get(column.slice_type, 0) for one in configurations(kind))
            full[column.accuracy] = max(full.get(column.accuracy, 0.0), column.capacity_per_s(slices))
    above = {a - accuracy: per_s for a, per_s in full.items() if a >= accuracy and per_s}
    below = {accuracy - a: per_s for a, per_s in full.items() if a < accuracy and per_s}
    mixed = [
        (more + less) / (more / of_more + less / of_less)  # in shares `less` and `more` of the requests
        for (more, of_less), (less, of_more) in product(above.items(), below.items())
    ]
    return max([*above.values(), *mixed], default=0.0)
