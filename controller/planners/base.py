"""BASE: the most accurate variant, one 7g slice per GPU, every GPU awake.

Source: CLOVER (SC 23) section 5.1: "the highest-quality model that runs on every GPU exclusively".
Data: devices, families. Decision: none; neither carbon nor load nor the SLO is looked at.
Constant `configuration`: another one of CLOVER's Fig. 1 instead of the first, as in section 5.2.1 (2: 4g and 3g).
Deviations: MIG mode stays on, so that the GPU is one 7g slice (98 of 108 SMs; without MIG: the device type
A100-SXM4-40GB-nomig, whose one slice `whole` has all 108); several families take the devices in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from numpy.random import Generator
from pydantic import Field

from controller.planners.clover.space import mig_configuration
from controller.planners.columns import class_column
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import Device, PlanningInput, Task, read_view
from controller.planners.uniform import Uniform, decide
from trefoil.core.brains import Decision, PlanView
from trefoil.core.catalog import Variant
from trefoil.core.device_types import Placement, device_type, placements, placements_of, profile_type
from trefoil.core.fleet import DeviceKind


class MigSettings(PlannerSettings):
    """Settings of `base` and `co2opt`."""

    FLEET: ClassVar[frozenset[str]] = PlannerSettings.FLEET | {"configuration"}

    configuration: int = Field(default=0, ge=0, le=19)
    """MIG configuration by its number in CLOVER's Fig. 1; 0: the planner's own."""


def largest_layout(device: Device) -> Placement:
    """Layout with the fewest slices: the whole GPU."""
    return min(placements(device.type), key=lambda p: (len(p), p))


def best_variant(inputs: PlanningInput, task: Task, _device: Device, _slice_type: str) -> Variant:
    """The most accurate variant of the family."""
    return inputs.view.catalog.family(task.family).best


BASE = Uniform(largest_layout, best_variant)


def layout_of(settings: MigSettings, otherwise: Callable[[Device], Placement]) -> Callable[[Device], Placement]:
    """The layout of the constant `configuration`; 0, a device without MIG or without room for it: `otherwise`."""
    number = settings.configuration

    def chosen(device: Device) -> Placement:
        if not number or device.type.kind != DeviceKind.MIG_GPU:
            return otherwise(device)
        board = device_type(profile_type(device.type.name))  # of which a part may be taken on this device
        found = placements_of(device.type, replace(mig_configuration(board, number), device_type=device.type.name))
        return found[0] if found else otherwise(device)

    return chosen


@dataclass(frozen=True, slots=True)
class BasePlanner:
    """Planner BASE (CLOVER section 5.1). Stateless."""

    settings: MigSettings = MigSettings()

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan BASE for this fleet."""
        settings = self.settings
        inputs = read_view(view, settings.rate_floor_per_s)
        chosen = Uniform(layout_of(settings, largest_layout), best_variant)
        return decide(inputs, "base", chosen.host(inputs), settings, rng)


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference of BASE for the same demand, from the same profile: joules and accuracy."""

    joules_per_request: float
    accuracy: float


def base_reference(inputs: PlanningInput, task: Task, settings: PlannerSettings) -> Reference:
    """Reference of BASE, for objectives that leave `base_j_per_request` at 0."""
    best = inputs.view.catalog.family(task.family).best
    rate = task.mean_per_s
    families = max(1, len(inputs.tasks))
    idle = sum(d.type.idle_w for d in inputs.devices) / rate / families
    active = []
    for device in inputs.devices:
        shape = largest_layout(device)[0][0]
        column = class_column(inputs.view.catalog, task, device.type, shape, best.name, 1, settings)
        active.append(column.energy_j if column else 0.0)
        idle += column.running_w / rate / families if column else 0.0
    return Reference(idle + sum(active) / max(1, len(active)), best.accuracy)
