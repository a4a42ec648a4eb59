"""Request engines that serve from the first moment, for arrivals that a test gives itself."""

from collections.abc import Mapping
from typing import Any

from numpy.random import Generator

from trefoil.core.interference import INTERFERENCE
from trefoil.core.plan import Route
from trefoil.simulator.engines.engine import Flow, Services
from trefoil.simulator.engines.request_engine import RequestEngine


def request_engine(
    routes: Mapping[str, Route],
    services: Mapping[str, Services],
    rng: Generator,
    flows: Mapping[str, Flow] | None = None,
    overhead_ms: float = 0.0,
    **settings: Any,
) -> RequestEngine:
    """Engine with these routes, whose `windows` serves what it is given; families on one slice slow each other."""
    flows = flows or {family: Flow(None, 0.0) for family in routes}  # type: ignore[arg-type]
    made = RequestEngine(flows, rng, overhead_ms, **{"interference": INTERFERENCE, **settings})
    made.set_routes(0.0, routes, services)
    return made
