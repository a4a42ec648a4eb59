"""CO2OPT: the variant of least energy on the finest partition, whatever the accuracy.

Source: CLOVER (SC 23) section 5.1; its artifact holds no code for it, so this follows the text.
Data: devices, families, profile. Decision: the variant with the least active energy per request on the finest
configuration; every GPU awake. Neither carbon nor load nor the SLO is looked at.
Deviations: "lowest carbon" is read as least active joules: every GPU is awake in either case.
"""

from dataclasses import dataclass

from numpy.random import Generator

from controller.planners.base import MigSettings, layout_of
from controller.planners.columns import class_column
from controller.planners.planning_input import Device, PlanningInput, Task, read_view
from controller.planners.uniform import Uniform, decide
from trefoil.core.brains import Decision, PlanView
from trefoil.core.catalog import Variant
from trefoil.core.device_types import Placement, placements


def finest_layout(device: Device) -> Placement:
    """Layout with the most slices: seven 1g."""
    return min(placements(device.type), key=lambda p: (-len(p), p))


@dataclass(frozen=True, slots=True)
class Co2OptPlanner:
    """Planner CO2OPT (CLOVER section 5.1). Stateless."""

    settings: MigSettings = MigSettings()

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan CO2OPT for this fleet."""
        settings = self.settings
        inputs = read_view(view, settings.rate_floor_per_s)

        def leanest(inputs: PlanningInput, task: Task, device: Device, slice_type: str) -> Variant:
            family = inputs.view.catalog.family(task.family)
            found = []
            for variant in family.by_accuracy():
                column = class_column(inputs.view.catalog, task, device.type, slice_type, variant.name, 1, settings)
                if column is not None:
                    found.append((column.energy_j, -variant.accuracy, variant.name))
            return family.variant(min(found)[2]) if found else family.by_accuracy()[0]

        return decide(
            inputs, "co2opt", Uniform(layout_of(settings, finest_layout), leanest).host(inputs), settings, rng
        )
