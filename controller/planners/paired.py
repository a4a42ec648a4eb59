"""GPU types paired: a separate low-end GPU for each job, and a high-end one for all of them.

Source: CARBONDIS sections III and V-A: every job has a low-end GPU (P4 or T4), and all share one high-end GPU (A100).
    HIGHPERF has only a high-end GPU per job, and LOWENERGY only a low-end one per job.
Data: families in order, one job each at its most accurate variant; devices in order, by `DeviceType.tier`.
Decision: which GPUs serve which families; all others sleep. Which GPU a request goes to is the router's.
Formulation: family i of n gets low-end GPU i, and of the high-end ones the first `high_shared`. HIGHPERF and LOWENERGY
    give it GPUs i, i + n, ... of their tier, all that there are.
    For a router that weighs joules (`least_grams`), a route names the joules of a request of n items on each tier as a
    line. The line goes through the profile at 1 and at twice the mean number of items: params `low_j` + n `low_item_j`,
    and likewise for `high`.
Deviations: GPUs that are lost or out of service keep their place, so that the others are not dealt again. A family that
    loses its low-end GPU is served by the high-end one alone. The paper's fleets have as many GPUs of a tier as jobs.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from numpy.random import Generator
from pydantic import Field

from controller.planners.gpu_allocation import refuse_what_does_not_fit
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import (
    Device,
    HostedSlice,
    PlanningInput,
    Task,
    devices_by_type,
    read_view,
    sharing,
)
from controller.planners.profile_rows import effective_row
from controller.planners.uniform import decide
from trefoil.core.brains import Decision, PlanView
from trefoil.core.errors import CatalogError, InvalidInput

LOW, HIGH = "low", "high"


class PairedSettings(PlannerSettings):
    """Settings of CARBONDIS's planners."""

    FLEET: ClassVar[frozenset[str]] = PlannerSettings.FLEET | {"high_shared"}

    credits: int = Field(default=1, ge=0)
    """Requests of a family in flight on one GPU; the paper's: one."""
    high_shared: int = Field(default=1, ge=0)
    """High-end GPUs that all families share."""


@dataclass(frozen=True, slots=True)
class PairedPlanner:
    """Planner of CARBONDIS's GPUs. `own` and `shared`: tier of each job's GPU, and of those that all share."""

    settings: PairedSettings = PairedSettings()
    name: str = "paired"
    own: str = LOW
    shared: str = HIGH

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan who serves on which GPU; what cannot be is not a plan."""
        settings = self.settings
        inputs = read_view(view, settings.rate_floor_per_s, whole=True)
        try:
            hosted = self._hosted(inputs, settings.high_shared)
            found = decide(inputs, self.name, hosted, settings, rng)
        except (InvalidInput, CatalogError) as error:
            return Decision(None, f"{self.name}: {error}", math.inf, f"no_plan: {error}")
        if found.plan is None:
            return found
        devices = {d.name: d for d in inputs.devices}
        params = {
            route.family: _joules(inputs, inputs.task(route.family), [devices[t.slice.device] for t in route.targets])
            for route in found.plan.routes
        }
        routes = tuple(replace(route, params=params[route.family]) for route in found.plan.routes)
        return replace(found, plan=replace(found.plan, routes=routes))

    def _hosted(self, inputs: PlanningInput, shared: int) -> dict[str, tuple[HostedSlice, ...]]:
        given, devices = self._given(inputs, shared), {d.name: d for d in inputs.devices}
        refuse_what_does_not_fit(inputs, given, Counter(name for mine in given.values() for name in mine))
        hosted: dict[str, tuple[HostedSlice, ...]] = {d.name: d.running if d.frozen else () for d in inputs.devices}
        for task in inputs.tasks:
            for name in given[task.family]:
                if name in devices and not devices[name].frozen:
                    _check_batch(inputs, task, devices[name])
                    key = devices[name].type.largest.key(name)
                    best = inputs.view.catalog.family(task.family).best.name
                    hosted[name] = (*hosted[name], HostedSlice(key, task.family, best))
        return {name: sharing(parts) for name, parts in hosted.items()}

    def _given(self, inputs: PlanningInput, shared: int) -> dict[str, tuple[str, ...]]:
        """GPUs of each family; those that are lost are among them."""
        left = dict(inputs.unplannable)
        tiers: dict[str, list[str]] = {LOW: [], HIGH: []}
        for status in devices_by_type(inputs.view.fleet):
            if status.device not in left and status.type.tier in tiers:
                tiers[status.type.tier].append(status.device)
        for tier, number in ((self.own, len(inputs.tasks)), (self.shared, shared if self.shared else 0)):
            if tier and len(tiers[tier]) < number:
                unused = "; ".join(f"{name}: {why}" for name, why in left.items())
                raise InvalidInput(
                    f"{len(inputs.tasks)} jobs need {number} {tier}-end GPUs{f' ({unused})' if unused else ''}",
                    field=f"{tier}-end GPUs",
                    value=len(tiers[tier]),
                    remedy="add GPUs of that tier, or serve fewer families",
                )
        if not self.shared:
            number = len(inputs.tasks)
            return {task.family: tuple(tiers[self.own][at::number]) for at, task in enumerate(inputs.tasks)}
        all_share = tiers[self.shared][:shared]
        return {task.family: (tiers[self.own][at], *all_share) for at, task in enumerate(inputs.tasks)}


def highperf(settings: PairedSettings) -> PairedPlanner:
    """HIGHPERF: a high-end GPU for each job."""
    return PairedPlanner(settings, "highperf", own=HIGH, shared="")


def lowenergy(settings: PairedSettings) -> PairedPlanner:
    """LOWENERGY: a low-end GPU for each job."""
    return PairedPlanner(settings, "lowenergy", own=LOW, shared="")


def _check_batch(inputs: PlanningInput, task: Task, device: Device) -> None:
    """Requests have to be no larger in the mean than the largest that is profiled."""
    family, items = inputs.view.catalog.family(task.family), task.demand.items_mean
    row = effective_row(inputs.view.catalog, device.type, device.type.largest, family, family.best, items)
    if row is not None and items > row.batch:
        raise InvalidInput(
            f"the profile of {family.best.name} on {device.type.name} ends at {row.batch} items a request",
            field=f"batch size of {task.family}",
            value=items,
            remedy="profile larger batches, or send smaller requests",
        )


def _joules(inputs: PlanningInput, task: Task, devices: list[Device]) -> dict[str, float]:
    family, far, found = inputs.view.catalog.family(task.family), max(2.0, 2 * task.demand.items_mean), {}
    for device in devices:
        shape = device.type.largest
        one, more = (effective_row(inputs.known, device.type, shape, family, family.best, n) for n in (1.0, far))
        if one is not None and more is not None:
            each = (more.energy_active_j_per_batch - one.energy_active_j_per_batch) / (far - 1)
            found[f"{device.type.tier}_j"] = one.energy_active_j_per_batch - each
            found[f"{device.type.tier}_item_j"] = each
    return found
