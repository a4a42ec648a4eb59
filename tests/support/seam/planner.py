"""CEILING: one variant on whole GPUs, below a ceiling of the clock."""

from dataclasses import replace

from numpy.random import Generator

from controller.planners.base import largest_layout
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import Device, PlanningInput, Task, read_view
from controller.planners.uniform import Uniform, decide
from trefoil.core.brains import Decision, PlanView
from trefoil.core.catalog import Variant


class CeilingSettings(PlannerSettings):
    variant: str = ""  # the most accurate one
    ceiling_mhz: int = 1410


class Ceiling:
    settings = CeilingSettings
    label = "Ceiling"
    colour = "#123456"

    def __init__(self, settings: CeilingSettings) -> None:
        self._settings = settings

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        world = read_view(view, self._settings.rate_floor_per_s)

        def variant(world: PlanningInput, task: Task, _device: Device, _slice_type: str) -> Variant:
            family = world.view.catalog.family(task.family)
            return family.variant(name) if (name := self._settings.variant) else family.best

        chosen = Uniform(largest_layout, variant)
        found = decide(world, "ceiling", chosen.host(world), self._settings, rng)
        if found.plan is None:
            return found
        high = self._settings.ceiling_mhz
        nodes = tuple(
            replace(node, devices=tuple(replace(d, clock_min_mhz=210, clock_max_mhz=high) for d in node.devices))
            for node in found.plan.nodes
        )
        forecasts = ", ".join(sorted({d.forecast.model for d in view.demand if d.forecast}))
        why = f"below {high} MHz, demand by {forecasts or 'no host'}"
        return replace(found, plan=replace(found.plan, nodes=nodes, why=why), why=why)
