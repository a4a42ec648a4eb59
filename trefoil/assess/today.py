"""AS_FOUND: every device hosts what was found on it, awake, whatever load and carbon do.

Source: `trefoil assess`, which plays a fleet as it was found against each lever. Decision: none. Setting `placement`:
JSON, by device its slices (type, start, size) with family and variant of each model on one.
"""

import json
from dataclasses import replace

from numpy.random import Generator

from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import HostedSlice, read_view
from controller.planners.uniform import decide
from trefoil.core.brains import Decision, PlanView
from trefoil.core.fleet import DeviceState, SliceKey


class AsFoundSettings(PlannerSettings):
    """Settings of `AsFound`."""

    placement: str = "{}"  # {"node0/gpu0": [[["7g.40gb", 0, 8], [["digits", "digits-l"]]]]}
    families_per_slice: int = 1  # more: models share a slice


class AsFound:
    """Planner AS_FOUND. Stateless."""

    settings = AsFoundSettings

    def __init__(self, settings: AsFoundSettings) -> None:
        self._settings, self._placed = settings, json.loads(settings.placement)

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan what was found."""
        inputs = read_view(view, self._settings.rate_floor_per_s)
        kept = {
            device.name: tuple(
                HostedSlice(SliceKey(device.name, *place), f, v, tuple(map(tuple, pairs[:n] + pairs[n + 1 :])))
                for place, pairs in self._placed.get(device.name, ())
                for n, (f, v) in enumerate(pairs)
            )
            for device in inputs.devices
        }
        found = decide(inputs, "as_found", kept, self._settings, rng)
        if found.plan is None:
            return found
        nodes = tuple(
            replace(node, devices=tuple(replace(device, target=DeviceState.AWAKE) for device in node.devices))
            for node in found.plan.nodes
        )
        return replace(found, plan=replace(found.plan, nodes=nodes))
