"""Which engines serve the families: request by request or as flows, and those of one router together."""

import numpy as np

from dispatcher.routers import ROUTERS
from trefoil.core.parts import Kind, find
from trefoil.simulator.fluid import FluidEngine
from trefoil.simulator.inputs import Inputs
from trefoil.simulator.serving import Engine, Flow, RequestEngine


def engines_for(inputs: Inputs, now_s: float) -> tuple[Engine, ...]:
    """The engines of all families, which stand in order; their draws depend on the seed and their place alone."""
    scenario = inputs.scenario
    chosen, queue, overhead_ms = scenario.policy.router, scenario.policy.queue, scenario.costs.overhead_ms
    flows = {
        family: Flow(inputs.arrivals[family], inputs.objectives[family].slo_ms) for family in sorted(inputs.objectives)
    }
    if scenario.fidelity == "fluid":
        gap_scv = {served.name: served.arrivals.gap_scv for served in scenario.families}
        return tuple(FluidEngine(f, flow, overhead_ms, now_s, gap_scv[f], chosen) for f, flow in flows.items())
    router = chosen or inputs.policy.router
    if find(Kind.ROUTER, router, ROUTERS).traits.group:
        return (RequestEngine(flows, _rng(inputs, 0), overhead_ms, now_s, router, queue),)
    return tuple(
        RequestEngine({family: flow}, _rng(inputs, place), overhead_ms, now_s, chosen, queue)
        for place, (family, flow) in enumerate(flows.items())
    )


def _rng(inputs: Inputs, place: int) -> np.random.Generator:
    return np.random.default_rng([inputs.scenario.seed, 0x5E21, place])
