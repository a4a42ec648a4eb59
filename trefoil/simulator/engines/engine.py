"""Engines of either fidelity: what they are given and what they do; their intervals are in simulator/intervals."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route
from trefoil.core.queueing import ServiceTime
from trefoil.simulator.books.intervals import Interval
from trefoil.simulator.scenario.arrivals import ArrivalSource


@dataclass(frozen=True, slots=True)
class SliceService:
    """Service of a request by a slice. `gap_ms`: it is taken but does not compute. `energy_j`: active, per request."""

    service: ServiceTime
    accuracy: float
    energy_j: float
    variant: str
    family: str
    gap_ms: float


Services = Mapping[SliceKey, SliceService]


class Engine(Protocol):
    """Engine of one family in simulated time, or of several behind one router. Routes and services are by family."""

    families: tuple[str, ...]

    def set_routes(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Set each family's route and what its slices do from now on."""
        ...

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Tell routers the carbon intensity's ratio to its average; None = not known."""
        ...

    def serve(self, until_s: float) -> Mapping[str, Interval]:
        """Serve until then; what was served since the last call, by family."""
        ...


@dataclass(frozen=True, slots=True)
class Flow:
    """Load of a family as an engine knows it: when its requests come, and when they are late."""

    source: ArrivalSource
    slo_ms: float


def dispatchable(route: Route, services: Services, router: str = "", queue: str = "") -> Route:
    """Route of a dispatcher: targets that serve and do not drain; `router` and `queue` instead of the route's."""
    targets = tuple(t for t in route.targets if not t.draining and t.slice in services)
    return replace(route, targets=targets, router=router or route.router, queue=queue or route.queue)
