"""ALPASERVE, MUSERVE: which whole GPU serves which families, by AlpaServe's selection; mu-Serve sorts by sensitivity.

Source: AlpaServe (OSDI 23) section 4.2, mu-Serve sections 3.1, 3.2 (alpaserve.py, bins.py). Clocks are the governor's.
Data: of each family its best variant's profile on a whole GPU (time, `clock_sensitivity`, memory), SLO and demand.
Decision: the GPUs of each family; its requests are spread over them alike. As in the papers it is made offline: at the
    start, when an objective or a device comes or goes, or when a governor asks for capacity; ticks keep it.
Deviations: a family is one stage, so groups are single GPUs; mu-Serve's clusters then are whole models, and Algorithm 2
    runs over all GPUs. One type of GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from numpy.random import Generator

from controller.planners.columns import effective_row
from controller.planners.gpu_allocation import whole
from controller.planners.gpu_sharing import uniform_weights
from controller.planners.muserve.alpaserve import GPUS_MAX, Arrivals, Cluster, Model, Unit, by_sensitivity, place
from controller.planners.planning_input import PlanningInput, Task, constant_for, read_view
from controller.planners.wattwiser import CONSTANTS as WATTWISER
from controller.planners.wattwiser import WattWiserPlanner
from trefoil.core.brains import Decision, PlanView
from trefoil.core.device_types import slice_type
from trefoil.core.errors import Infeasible, InvalidInput
from trefoil.core.fleet import DeviceType, SliceType
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.queueing import service_time
from trefoil.core.units import MS_PER_S

SAMPLE_REQUESTS: Final = 500
CONSTANTS: Final[Mapping[str, float]] = {
    **{name: value for name, value in WATTWISER.items() if not name.startswith(("gpus_", "hysteresis", "wake_"))},
    "tick_s": 60.0,
    "replicas_max": 0.0,  # of a family; 0: one on each GPU
}


@dataclass(frozen=True, slots=True)
class AlpaServePlanner:
    """Planner of whole GPUs by AlpaServe; `sorts`: what feels the clock alike meets on a GPU. Its state is the plan."""

    constants: Mapping[str, float] = field(default_factory=dict)
    name: str = "alpaserve"
    sorts: bool = False

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan the placement, or keep it at a tick."""
        constants = {**CONSTANTS, **self.constants}
        inputs = read_view(view, constants["rate_floor_per_s"])
        try:
            homes = _homes(view) if view.trigger == "tick" else {}
            if any(task.family not in homes for task in inputs.tasks):
                homes = self._placed(inputs, constants, rng)
        except (InvalidInput, Infeasible) as error:
            return Decision(None, f"{self.name}: {error}", math.inf, f"no_plan: {error}")
        asked = tuple(replace(one, devices=homes.get(one.family, one.devices)) for one in view.objectives)
        shared = {**WATTWISER, **constants, "gpus_shared": 0.0}
        planner = WattWiserPlanner(shared, self.name, uniform_weights, dynamic=False)
        return planner.plan(replace(view, objectives=asked), rng)

    def _placed(
        self, inputs: PlanningInput, constants: Mapping[str, float], rng: Generator
    ) -> dict[str, tuple[str, ...]]:
        """Devices of each family.

        Raises:
            InvalidInput, Infeasible: naming what cannot be placed, and the remedy.
        """
        devices = [device for device in inputs.devices if not device.frozen]  # those of silent nodes stay as they are
        kinds = sorted({device.type.name for device in devices})
        if len(kinds) != 1:
            remedy = "plan a fleet of one type by this policy, with a node that reports"
            raise InvalidInput("families are placed on GPUs of one type", field="devices", value=kinds, remedy=remedy)
        kind = devices[0].type
        shape = slice_type(kind, whole(kind.name)[0])
        models = [_model(inputs, task, kind, shape, constants) for task in inputs.tasks]
        rates = {task.family: task.demand.rate_per_s for task in inputs.tasks}
        cluster = Cluster(min(len(devices), GPUS_MAX), shape.memory_mib - CONTEXT_MIB, max(kind.clocks_mhz, default=1))
        replicas_max = int(constants["replicas_max"]) or cluster.gpus
        found = place(models, cluster, _sample(rates, rng), replicas_max, group_sizes=(1,))
        if self.sorts:
            whole_fleet = replace(found, groups=(tuple(range(cluster.gpus)),))
            found = by_sensitivity(whole_fleet, models, cluster, rates, cluster.gpus)
        names = [device.name for device in devices]
        return {
            family: tuple(dict.fromkeys(names[stage.gpu] for stages in each for stage in stages))
            for family, each in found.replicas.items()
        }


def muserve(constants: Mapping[str, float]) -> AlpaServePlanner:
    """mu-Serve's placement: AlpaServe's, sorted by sensitivity."""
    return AlpaServePlanner(constants, "muserve", sorts=True)


def _homes(view: PlanView) -> dict[str, tuple[str, ...]]:
    """Devices of each family by the plan in force."""
    homes: dict[str, tuple[str, ...]] = {}
    for node in view.current.nodes if view.current else ():
        for device in node.devices:
            for family in {hosted.family for part in device.slices for hosted in part.hosted}:
                homes[family] = (*homes.get(family, ()), device.device)
    return homes


def _model(
    inputs: PlanningInput, task: Task, kind: DeviceType, shape: SliceType, constants: Mapping[str, float]
) -> Model:
    family = inputs.view.catalog.family(task.family)
    variant = family.best
    row = effective_row(inputs.known, kind, shape, family, variant, task.demand.items_mean)
    if row is None:
        raise InvalidInput(
            f"no profile of {variant.name} on {shape.name} of {kind.name}, or it does not fit its memory",
            field="family", value=task.family, remedy="profile this class, or use another policy",
        )  # fmt: skip
    unit = Unit(service_time(row).mean_ms / MS_PER_S, row.clock_sensitivity, float(variant.memory_mib))
    slo_ms = task.objective.slo_ms - constant_for(task.objective, constants, "overhead_ms")
    return Model(task.family, (unit,), slo_ms / MS_PER_S)


def _sample(rates: Mapping[str, float], rng: Generator) -> Arrivals:
    total = sum(rates.values())
    at = rng.exponential(1.0 / total, SAMPLE_REQUESTS).cumsum().tolist()
    families = rng.choice(len(rates), SAMPLE_REQUESTS, p=[rate / total for rate in rates.values()]).tolist()
    return list(zip(at, (list(rates)[one] for one in families), strict=True))
