"""Engines of either fidelity: what they are given and what they do; their intervals are in simulator/intervals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from trefoil.core.fleet import SliceKey
from trefoil.core.objective import TokenSlo
from trefoil.core.plan import Route
from trefoil.core.queueing import ServiceTime
from trefoil.simulator.books.intervals import Interval
from trefoil.simulator.scenario.arrivals import ArrivalSource


class OperatingPoint(NamedTuple):
    """Operating point of a batch of `items` alone on its slice. `activity`: what part of it that keeps busy."""

    items: float
    mean_ms: float
    cv: float
    active_w: float
    activity: float


@dataclass(frozen=True, slots=True)
class SliceService:
    """Service of a request by a slice. `gap_ms`: it is taken but does not compute. `energy_j`: active, per request.

    `points`, by batch, and `instances` say the same of batches.
    """

    service: ServiceTime
    accuracy: float
    energy_j: float
    variant: str
    family: str
    gap_ms: float
    points: tuple[OperatingPoint, ...] = ()
    instances: int = 1


class StreamTerms(NamedTuple):
    """Terms of a family whose streams run together: steps of its profile's answers, and objectives of its tokens."""

    steps: float
    slo: TokenSlo


Services = Mapping[SliceKey, SliceService]


class Engine(Protocol):
    """Engine of one family in simulated time, or of several behind one router. Routes and services are by family, or by
    stage of a family that is split, where it `plays_stages`.
    """

    families: tuple[str, ...]
    plays_stages: bool

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
    """Load of a family as an engine knows it: when its requests come, and when they are late.

    Items of a request: normal, rounded, from 1 to `items_max`; without `items_sd` all alike. `batch_delay_s`: how long
    a batch waits for more of them; None: every request is a batch. `confusion`, of a generative family: how often its
    predictor says each class of length of each true one; empty: it has none. None: the family is not generative.
    `streams`: its answers are streams that a slice runs together; None: it makes them one by one.
    """

    source: ArrivalSource
    slo_ms: float
    items: float = 1.0
    items_sd: float = 0.0
    items_max: float = math.inf
    batch_delay_s: float | None = None
    confusion: tuple[tuple[float, ...], ...] | None = None
    streams: StreamTerms | None = None


def dispatchable(route: Route, services: Services, router: str = "", queue: str = "") -> Route:
    """Route of a dispatcher: targets that serve and do not drain; `router` and `queue` instead of the route's."""
    targets = tuple([t for t in route.targets if not t.draining and t.slice in services])
    if len(targets) == len(route.targets) and router in ("", route.router) and queue in ("", route.queue):
        return route
    return replace(route, targets=targets, router=router or route.router, queue=queue or route.queue)
