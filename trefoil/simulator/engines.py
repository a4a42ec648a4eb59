"""Which engine serves a family: request by request, or as a flow."""

import numpy as np

from trefoil.core.plan import Route
from trefoil.simulator.fluid import FluidEngine
from trefoil.simulator.inputs import Inputs
from trefoil.simulator.serving import Engine, RequestEngine


def engine_for(inputs: Inputs, index: int, family: str, route: Route, now_s: float) -> Engine:
    """The engine of a family; its draws depend on the seed and its index alone."""
    scenario = inputs.scenario
    slo_ms, source = inputs.objectives[family].slo_ms, inputs.arrivals[family]
    overhead_ms = scenario.costs.overhead_ms
    if scenario.fidelity == "fluid":
        served = next(s for s in scenario.families if s.name == family)
        return FluidEngine(source, slo_ms, overhead_ms, now_s, served.arrivals.gap_scv, scenario.policy.router)
    rng = np.random.default_rng([scenario.seed, 0x5E21, index])
    return RequestEngine(family, route, source, slo_ms, rng, overhead_ms, now_s, scenario.policy.router)
