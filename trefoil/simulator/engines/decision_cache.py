"""Cache of decisions for long fluid runs: what was decided before on an equal view is not computed again.

A planner is a pure function of view and seed. In fluid runs it is shown time relative to now, and the seed comes from
the view itself: then days that repeat each other ask for equal decisions, and the second time the answer is known. Not
for planners that remember (they measure), and not request by request, where no two views are equal.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Final
from zlib import crc32

from controller.loop.core.decision import run_planner
from controller.planners.infadapter.cpu_slices import PLANNED
from controller.rollout.core.path import RolloutPath
from trefoil.core.brains import Decision, Planner, PlanView
from trefoil.core.carbon import CarbonForecast, CarbonReading
from trefoil.core.catalog import Catalog
from trefoil.core.common import Revision
from trefoil.core.fleet import FleetState

DECISIONS_MAX: Final = 4096
NO_CATALOG: Final = Catalog((), ())  # it never changes in a run


@dataclass(slots=True)
class CachedDecision:
    """Decision in relative time; `path` of the rollout that it led to, if it began at once."""

    decision: Decision
    seed: int
    path: RolloutPath | None = None


@dataclass(slots=True)
class DecisionCache:
    """Cache of decisions by the view that they were decided on; the least recently used are forgotten."""

    seed: int
    decisions: OrderedDict[str, CachedDecision] = field(default_factory=OrderedDict)
    lookups: int = 0

    def decide(self, view: PlanView, planner: Planner) -> tuple[PlanView, CachedDecision]:
        """View in relative time, and the decision on it: from the cache, else of the planner."""
        self.lookups += 1
        relative_view = relative(view)
        key = repr(replace(relative_view, catalog=NO_CATALOG))
        found = self.decisions.get(key)
        if found is None:
            seed = self.seed * 1_000_003 + crc32(key.encode())
            found = self.decisions[key] = CachedDecision(run_planner(relative_view, planner, seed), seed)
            if len(self.decisions) > DECISIONS_MAX:
                self.decisions.popitem(last=False)
        self.decisions.move_to_end(key)
        return relative_view, found


def relative(view: PlanView) -> PlanView:
    """View as of time zero, without what tells one day from another: numbers, reasons, since when."""
    now = view.now_s
    current = view.current
    if current is not None:
        aged = any(PLANNED in route.params for route in current.routes)  # its planner looks at how old it is
        created_at_s = round(current.created_at_s - now, 6) if aged else 0.0
        current = replace(current, revision=Revision(), why="", inputs=(), created_at_s=created_at_s, decision_id="")
    demand = tuple(replace(d, forecast=replace(d.forecast, issued_at_s=0.0)) if d.forecast else d for d in view.demand)
    return replace(
        view,
        now_s=0.0,
        fleet=FleetState(
            tuple(
                replace(
                    node,
                    devices=tuple(
                        replace(d, slices=tuple(replace(s, since_s=0.0) for s in d.slices)) for d in node.devices
                    ),
                )
                for node in view.fleet.nodes
            ),
            view.fleet.stale,
        ),
        demand=demand,
        carbon=_shifted(view.carbon, now),
        carbon_forecast=None if view.carbon_forecast is None else _moved(view.carbon_forecast, now),
        current=current,
        carbon_history=tuple(_shifted(r, now) for r in view.carbon_history),
        zones=tuple(_shifted(r, now) for r in view.zones),
        cpu_histories=tuple(replace(h, at_s=0.0) for h in view.cpu_histories),
    )


def _shifted(reading: CarbonReading, by_s: float) -> CarbonReading:
    return replace(
        reading,
        starts_at_s=round(reading.starts_at_s - by_s, 6),
        ends_at_s=round(reading.ends_at_s - by_s, 6),
        observed_at_s=round(reading.observed_at_s - by_s, 6),
        fetched_at_s=0.0,
    )


def _moved(forecast: CarbonForecast, by_s: float) -> CarbonForecast:
    bands = tuple(
        replace(b, starts_at_s=round(b.starts_at_s - by_s, 6), ends_at_s=round(b.ends_at_s - by_s, 6))
        for b in forecast.bands
    )
    return replace(forecast, issued_at_s=round(forecast.issued_at_s - by_s, 6), bands=bands, provenance=None)
