"""Room for jobs: a view whose load fills the GPUs that jobs keep awake, and its solution at the load of requests.

Source: ours. Data: a view, its plan for requests alone. Result: the view with more demand.
Formulation: a GPU that is woken for jobs draws its idle power however little of it is cut into slices. So families
with jobs are planned as if the requests came that fill those GPUs within the objective. Routes spread requests over
all slices of the plan, so that each is an ordinary one, and jobs take the time that requests leave over. Every family
keeps the accuracy that it has without jobs; what is added has at least that of the jobs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from controller.planners.columns import Column, columns
from controller.planners.exact.model import Problem, Solution
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import PlanningInput, Task
from trefoil.core.brains import PlanView
from trefoil.core.demand import Demand
from trefoil.core.device_types import configurations, slice_type
from trefoil.core.fleet import DeviceKind, DeviceType
from trefoil.core.objective import ObjectiveMode
from trefoil.core.plan import Plan

CRUMB: Final = 1e-6  # of accuracy: the solver's tolerance
UNCUT_MAX: Final = 0.5  # of a GPU: less is not worth another plan
PARTS: Final = (1.2, 1.0, 0.8, 0.4, 0.0)
"""Parts of the GPUs to fill: the first is taken that wakes none beyond those asked for."""


def awake_devices(plan: Plan) -> int:
    """Number of devices with slices."""
    return sum(bool(device.slices) for node in plan.nodes for device in node.devices)


@dataclass(frozen=True, slots=True)
class JobsRoom:
    """Room that jobs need beyond `alone`, the plan for requests alone. `devices`: awake in all. `lacking`: GPUs to
    fill, by family. `woken`: those of them that have to wake."""

    inputs: PlanningInput
    alone: Plan
    devices: int
    lacking: Mapping[str, float]
    woken: Mapping[str, int]

    @classmethod
    def beyond(cls, inputs: PlanningInput, alone: Plan, devices: int) -> "JobsRoom":
        """Room in so many devices, in all: each goes to the family with jobs that lacks the most of its own."""
        kinds = {device.name: device.type for device in inputs.devices}
        cut: dict[str, float] = defaultdict(float)
        for device in (one for node in alone.nodes for one in node.devices if one.device in kinds):
            for part in device.slices:
                cut[part.hosted[0].family] += _part(kinds[device.device], part.key.slice_type)
        planned = {task.family for task in inputs.tasks}
        lacks = {one.family: one.own_devices - cut[one.family] for one in inputs.view.flexible if one.family in planned}
        lacking, woken = dict.fromkeys(lacks, 0.0), dict.fromkeys(lacks, 0)
        left, asleep = devices - sum(cut.values()) if lacks else 0.0, devices - awake_devices(alone)
        while left > UNCUT_MAX or (lacks and asleep > 0):
            family = max(sorted(lacks), key=lambda name: lacks[name] - lacking[name])
            lacking[family] += min(1.0, max(left, 0.0))
            woken[family] += int(asleep > 0)
            left, asleep = left - 1.0, asleep - 1
        return cls(inputs, alone, devices, lacking, woken)

    def view(self, part: float, settings: ExactSettings) -> PlanView:
        """The view with demand that fills this part of the room."""
        used = {device.device for node in self.alone.nodes for device in node.devices if device.slices}
        free = [d for d in self.inputs.devices if d.type.kind != DeviceKind.CPU and not (d.frozen or d.zone)]
        asleep = [d for d in free if d.name not in used] or free
        kinds, jobs = Counter(d.type for d in asleep), {one.family: one for one in self.inputs.view.flexible}
        demand, objectives = [], []
        for task in self.inputs.tasks:
            floor = self.alone.expected[task.family].accuracy - CRUMB
            more_per_s, lacking = 0.0, self.lacking.get(task.family, 0.0)
            if lacking and part:
                aimed = max(floor, jobs[task.family].accuracy_floor)
                found = columns(self.inputs.view.catalog, task, self.inputs.devices, settings)
                more_per_s = part * _able_per_s(found, kinds, lacking, aimed)
                floor = (task.mean_per_s * floor + more_per_s * aimed) / (task.mean_per_s + more_per_s)
            demand.append(_raised(task.demand, more_per_s))
            objectives.append(
                replace(
                    task.objective,
                    mode=ObjectiveMode.INSTANT,
                    min_accuracy=floor - settings.of(task.objective).accuracy_margin,
                    replicas_min=max(task.objective.replicas_min, self._replicas(task.family)),
                )
            )
        return replace(
            self.inputs.view,
            flexible=tuple(replace(one, devices=self.devices) for one in self.inputs.view.flexible),
            demand=(*demand, *(one for one in self.inputs.view.demand if one.slo_class)),
            objectives=tuple(objectives),
        )

    def _replicas(self, family: str) -> int:
        """Slices of a family that is to have GPUs of its own beyond those that serve it."""
        serving = sum(family in device.families for node in self.alone.nodes for device in node.devices)
        return serving + woken if (woken := self.woken.get(family, 0)) else 0


def at_load(problem: Problem, solution: Solution, tasks: Sequence[Task]) -> tuple[Problem, Solution]:
    """Problem and solution with the same slices and shares at the load of these tasks."""
    wanted = {task.family: task for task in tasks}
    real = replace(problem, tasks=tuple(wanted[task.family] for task in problem.tasks))
    ratio = {t.family: wanted[t.family].demand.rate_p90_per_s / t.demand.rate_p90_per_s for t in problem.tasks}
    traffic = {key: rate * ratio[key[0]] for key, rate in solution.traffic.items()}
    power_w, weighed_w = solution.power_w, solution.weighed_w
    for column in (one for one in problem.columns if solution.traffic.get(one.key)):
        planned_per_s = solution.traffic[column.key] * problem.mean_share(column.family)
        more_w = column.energy_j * (traffic[column.key] * real.mean_share(column.family) - planned_per_s)
        power_w, weighed_w = power_w + more_w, weighed_w + more_w * problem.weight(column.key.zone)
    return real, replace(solution, traffic=traffic, power_w=power_w, weighed_w=weighed_w)


def _part(kind: DeviceType, name: str) -> float:
    """Part of a device that a slice is: of its memory or of its compute, whichever is more."""
    shape, whole = slice_type(kind, name), kind.largest
    parts = ((shape.memory_slices, whole.memory_slices), (shape.compute_slices, whole.compute_slices))
    return max(one / of for one, of in parts if of)


def _raised(demand: Demand, more_per_s: float) -> Demand:
    ahead = demand.forecast and replace(demand.forecast, mean_per_s=demand.forecast.mean_per_s + more_per_s)
    rates = {name: getattr(demand, name) + more_per_s for name in ("rate_per_s", "rate_p90_per_s")}
    return replace(demand, forecast=ahead, **rates)


def _able_per_s(found: Iterable[Column], kinds: Mapping[DeviceType, int], devices: float, accuracy: float) -> float:
    """Most requests a second that so many devices of a type answer at a mean accuracy, by two variants at most."""
    by_name = {kind.name: (kind, min(devices, count)) for kind, count in kinds.items()}
    full: dict[float, float] = {}  # by accuracy of a variant
    for column in (one for one in found if one.device_type in by_name):
        kind, number = by_name[column.device_type]
        slices = int(number * max(dict(one.slices).get(column.slice_type, 0) for one in configurations(kind)))
        full[column.accuracy] = max(full.get(column.accuracy, 0.0), column.capacity_per_s(slices))
    above = {a - accuracy: per_s for a, per_s in full.items() if a >= accuracy and per_s}
    below = {accuracy - a: per_s for a, per_s in full.items() if a < accuracy and per_s}
    mixed = [
        (more + less) / (more / of_more + less / of_less)  # in shares `less` and `more` of the requests
        for (more, of_less), (less, of_more) in product(above.items(), below.items())
    ]
    return max([*above.values(), *mixed], default=0.0)
