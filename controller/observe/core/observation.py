"""Observation of fleet, load and carbon, and the views that planners get of it.

Everything that is old or missing is replaced by a named rung, never waited for. Pure: the reader fills `inputs` and
`windows` (controller/observe/reader.py from Redis, trefoil/simulator/simulation.py from a simulation), time comes in.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Protocol

from controller.forecasters.last_max import poisson_quantile
from controller.observe.core.carbon_inputs import (
    FORECAST_AGE_SHARE_MAX,
    PlannableReading,
    carried_when_stale,
    clipped_forecast,
    forecast_refusal,
    plannable_reading,
    static_reading,
    without_bands,
    without_sign,
)
from controller.observe.core.cpu_uses import CpuUses
from controller.observe.core.load_windows import LoadWindows, ignore_window
from controller.observe.core.plannable import differing_models, unplannable_reason
from controller.observe.core.refusals import Refusals
from controller.observe.core.set_aside import SetAside
from controller.observe.core.unreached import unreached_devices, with_lost
from controller.settings import ControllerSettings
from controller.thresholds import CARBON_HISTORY_MAX
from trefoil.core.brains import Forecaster, PlanView, history_s_of
from trefoil.core.carbon import CarbonForecast, CarbonReading, Rung, Series, rung_name
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand, LoadForecast, LoadWindow, Measured, ScaleSignal, TableAck
from trefoil.core.fleet import FleetState, NodeStatus
from trefoil.core.jobs.planned import FlexibleDemand
from trefoil.core.objective import Objective
from trefoil.core.plan import InputStamp, Plan

BRIDGED_S = 60.0  # not counted, as during a restart: a shorter hole does not begin history again
INITIAL_HOLD_S = 60.0  # how long the configured demand is held when the load never comes near it
NEAR_INITIAL = 0.75  # of the configured demand: then the load itself is believed
RUNG_NORMAL, RUNG_CARRIED = int(Rung.NORMAL), int(Rung.CARRIED)


@dataclass(slots=True)
class LatestInputs:
    """Latest value of everything read, kept when Redis or its writer is down."""

    nodes: dict[str, NodeStatus] = field(default_factory=dict)
    clock_offsets_s: dict[str, float | None] = field(default_factory=dict)
    """Of nodes on another clock: what their stamps in streams lack to be in our time; None: it is not known yet."""
    acks: tuple[TableAck, ...] = ()
    carbon: CarbonReading | None = None
    carbon_allowed: CarbonReading | None = None
    """The last one on a rung that is not refused; unused while none is."""
    carbon_forecast: CarbonForecast | None = None
    carbon_history: "deque[CarbonReading]" = field(default_factory=deque)
    zones: tuple[CarbonReading, ...] = ()
    """Readings of the other zones that devices lie in."""
    scale_signals: tuple[ScaleSignal, ...] = ()
    """Of governors that are called up again at the top of their range."""
    blind: str = ""
    """Why there may be dispatcher workers that `acks` does not name; "" when there are none."""
    flexible: tuple[FlexibleDemand, ...] = ()
    """What jobs run in this hour, as planned."""
    set_aside: SetAside = field(default_factory=SetAside)
    """What contradicts itself, its writer or what is possible, and is not used."""
    down: str = ""


class KeyNames(Protocol):
    """Names of the keys that stand in a plan's input stamps: trefoil/runtime/keys.py."""

    def node(self, node: str) -> str:
        """Key of a node's status."""

    def carbon_now(self, series: Series) -> str:
        """Key of a series' reading."""

    def carbon_forecast(self, series: Series) -> str:
        """Key of a series' forecast."""

    def load_prefix(self) -> str:
        """Prefix of the streams of load windows."""


class Observation:
    """Observation of fleet, load and carbon, and views of it for planners."""

    def __init__(
        self,
        settings: ControllerSettings,
        keys: KeyNames,
        catalog: Catalog,
        forecaster: Forecaster,
        now_s: float,
        on_window: Callable[[LoadWindow], None] = ignore_window,
        stated: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Nothing is known yet. `on_window` gets each load window once; `stated`: see `differing_models`."""
        self._settings, self._keys, self.catalog, self._forecaster = settings, keys, catalog, forecaster
        self.inputs = LatestInputs(carbon_history=deque(maxlen=CARBON_HISTORY_MAX))
        self.history_s = history_s_of(forecaster)
        self.windows = LoadWindows(settings.windows, on_window, self.history_s)
        self.cpu = CpuUses()
        self._started_at_s = now_s
        self._arrived: set[str] = set()
        self._demand: dict[str, Demand] = {}
        self.forecasts: dict[str, LoadForecast] = {}
        self._found: tuple[NodeStatus, ...] = ()
        self._fleet = self._comparable = FleetState((), ())
        self._wake_of = self._fleet, catalog, 0.0
        self._stated = stated
        self.differing: Mapping[str, tuple[str, ...]] = {}
        """Variants of which a node has other files than those that are planned with, by node."""
        self._oldest_s = self._asked_nodes_s = math.inf
        self._nodes_seen = False
        self._unreached: frozenset[str] = frozenset()
        self._refused = frozenset(settings.carbon.rungs_refused)
        self.refusals = Refusals()
        self._clipped: tuple[CarbonForecast, float, float, CarbonForecast] | None = None

    def learn(self, catalog: Catalog, stated: Mapping[str, str]) -> None:
        """Go by another catalogue from now on."""
        self.catalog, self._stated = catalog, dict(stated)

    def hosted(self, current: Plan | None, now_s: float) -> frozenset[str]:
        """Families that run, or are to run."""
        return _hosted(self.fleet(now_s), current)

    def fleet(self, now_s: float) -> FleetState:
        """Fleet: all nodes by name; stale are those whose status is older than its limit.

        What `differing` names stands under `missing` of its node, as if the node had said so itself. Devices of stale
        nodes that no dispatcher reaches are lost. What agents refused is taken or closed (`refusals`).
        """
        before = self._fleet
        found, limit_s = tuple(self.inputs.nodes.values()), self._settings.node_stale_s
        if len(found) != len(self._found) or not all(map(is_, found, self._found)):
            self._found = found
            self._fleet = FleetState(tuple(sorted(found, key=attrgetter("node"))))
            self._oldest_s = min((n.observed_at_s for n in found), default=math.inf)
        if now_s - self._oldest_s > limit_s or self._fleet.stale:
            stale = tuple(n.node for n in self._fleet.nodes if now_s - n.observed_at_s > limit_s)
            if stale != self._fleet.stale:
                self._fleet = FleetState(self._fleet.nodes, stale)
        unreached = (
            unreached_devices(self._fleet, self.inputs.acks, self._unreached) if self._fleet.stale else frozenset()
        )
        if self._fleet is not before or unreached != self._unreached:
            self._unreached = unreached
            self.differing = differing_models(self._fleet, self.catalog, self._stated)
            seen = with_lost(self._fleet, unreached) if unreached else self._fleet
            self._comparable = (
                seen
                if not self.differing
                else replace(
                    seen,
                    nodes=tuple(replace(n, missing=(*n.missing, *self.differing.get(n.node, ()))) for n in seen.nodes),
                )
            )
        # Of the same statuses, the object of which others know already what they ask.
        return self.refusals.around(self._comparable, now_s)

    def awaits_nodes(self, plan: Plan | None, now_s: float) -> bool:
        """Whether nodes of a plan have not been seen since this was first asked, and may be any moment.

        Redis may have been emptied: what is found out from the little that is known would be about what does not run.
        """
        if not self._nodes_seen:
            self._asked_nodes_s = min(self._asked_nodes_s, now_s)
            seen = {node.node for node in self.fleet(now_s).nodes}
            whole = plan is None or seen.issuperset(node.node for node in plan.nodes)
            self._nodes_seen = whole or now_s - self._asked_nodes_s >= self._settings.node_stale_s
        return not self._nodes_seen

    def carbon(self, now_s: float) -> CarbonReading:
        """Carbon reading in force: the last one, carried when it is old, static when there never was one."""
        reading = self.inputs.carbon
        if reading is None:
            return static_reading(self._settings.carbon.series, self._settings.carbon.static_g_per_kwh, now_s)
        return carried_when_stale(reading, now_s, self._settings.carbon_stale_intervals)

    def plannable_carbon(self, now_s: float) -> PlannableReading:
        """Carbon reading to plan by, and why it is not the one in force where that stands on a refused rung."""
        in_force = self.carbon(now_s)
        if not self._refused:
            return PlannableReading(without_sign(in_force))
        static = self._settings.carbon.static_g_per_kwh
        return plannable_reading(in_force, self.inputs.carbon_allowed, self._refused, static, now_s)

    def allowed_triggers(self, triggers: Sequence[str], now_s: float) -> Sequence[str]:
        """Triggers that may fire now: a reading on a refused rung starts nothing."""
        refused = self._refused and self.plannable_carbon(now_s).rung
        return [name for name in triggers if name != "carbon"] if refused else triggers

    def note_carbon(self) -> None:
        """Remember the last reading on an allowed rung; after a restart the newest one of the history is it."""
        known = self.inputs
        if not self._refused:
            return
        for one in (*known.carbon_history, known.carbon) if known.carbon_allowed is None else (known.carbon,):
            if one is not None and rung_name(one.rung) not in self._refused:
                known.carbon_allowed = one

    def carbon_forecast(self, ahead_s: float, now_s: float) -> CarbonForecast | None:
        """Carbon forecast to plan by over the next seconds; without bands, and with the reason, where it is refused."""
        forecast, settings = self.inputs.carbon_forecast, self._settings.carbon
        if forecast is None or not settings.forecast or ahead_s <= 0:
            return None
        why = forecast_refusal(forecast, settings.series, now_s, FORECAST_AGE_SHARE_MAX)
        if why:
            return without_bands(forecast, settings.series, why)
        known = self._clipped  # until its first band is over
        if known is None or known[0] is not forecast or known[1] != ahead_s or now_s >= known[2]:
            shown = clipped_forecast(forecast, now_s, ahead_s)
            until_s = shown.bands[0].ends_at_s if shown.bands else math.inf
            self._clipped = known = forecast, ahead_s, until_s, shown
        return known[3]

    def demand(self, families: Sequence[str], slo_margins: Mapping[str, float], now_s: float) -> tuple[Demand, ...]:
        """Demand of the families that have an objective or are asked for."""
        wanted = sorted({*families, *self.windows.families()} & {f.name for f in self.catalog.families})
        for family in wanted:
            # Without a live dispatcher arrivals are unknown, not zero: the last demand stands.
            if self.windows.live(now_s) or family not in self._demand:
                self._demand[family] = self._family_demand(family, now_s)
        return tuple(_with_slo_margin(self._demand[family], slo_margins.get(family, 0.0)) for family in wanted)

    def _family_demand(self, family: str, now_s: float) -> Demand:
        fixed = self._settings.demand_fixed.get(family)
        if fixed is not None:
            demand = fixed.demand(family, now_s)
            assert demand.forecast is not None
            self.forecasts[family] = demand.forecast
            return demand
        arrivals, bin_s = self.windows.arrivals(family, now_s), self.windows.bin_s
        if self.history_s:
            _, arrivals = self.windows.steps(family, now_s, BRIDGED_S)
            bin_s = self.windows.step_s
        forecast = self._forecaster.forecast(family, arrivals, bin_s, now_s, self._lead_s(family, now_s))
        initial = self._initial(family, forecast.max_per_s, now_s)
        rate, p90 = forecast.max_per_s, forecast.p90_per_s
        if initial > rate:
            span_s = self._settings.rate_span_s
            rate, p90 = initial, max(p90, poisson_quantile(initial * span_s) / span_s)
            forecast = replace(
                forecast, mean_per_s=initial, max_per_s=rate, p90_per_s=p90, fallback_reason="demand_initial_per_s"
            )
        self.forecasts[family] = forecast
        return Demand(
            family=family,
            slo_class="",
            rate_per_s=rate,
            rate_p90_per_s=p90,
            items_mean=self.windows.items_mean(family),
            gap_scv=self.windows.gap_scv(family),
            forecast=forecast,
        )

    def _initial(self, family: str, rate_per_s: float, now_s: float) -> float:
        """The configured demand until the load has come near it, or the hold is over. A probe is not the load."""
        initial = self._settings.demand_initial_per_s.get(family, 0.0)
        held_s = now_s - self._started_at_s
        if rate_per_s >= NEAR_INITIAL * initial or held_s > INITIAL_HOLD_S:
            self._arrived.add(family)
        return 0.0 if family in self._arrived else initial

    def _lead_s(self, family: str, now_s: float) -> float:
        """How long capacity takes to come: wake a device, start a Triton, load the slowest variant."""
        fleet = self.fleet(now_s)
        if self._wake_of[0] is not fleet or self._wake_of[1] is not self.catalog:
            self._wake_of = fleet, self.catalog, _wake_s(fleet, self.catalog)
        load_s = max((v.load_s for v in self.catalog.family(family).variants), default=0.0)
        return self._wake_of[2] + load_s + self._settings.start_s

    def measured(
        self, families: Sequence[str], grams_per_request: Mapping[str, float | None], now_s: float
    ) -> tuple[Measured, ...]:
        """Measurements of each family of late; families without requests are left out."""
        found = (self.windows.measured(f, now_s, self.catalog, grams_per_request.get(f)) for f in families)
        return tuple(m for m in found if m is not None)

    def view(
        self,
        objectives: Mapping[str, Objective],
        current: Plan | None,
        slo_margins: Mapping[str, float],
        grams_per_request: Mapping[str, float | None],
        now_s: float,
    ) -> PlanView:
        """View of this moment, its trigger still empty."""
        families = sorted(objectives)
        fleet, demand = self.fleet(now_s), self.demand(families, slo_margins, now_s)
        # Every decision records its view, and a repository may hold many families.
        known = self.catalog.restrict({*families, *(d.family for d in demand), *_hosted(fleet, current)})
        return PlanView(
            now_s=now_s,
            fleet=fleet,
            catalog=known,
            objectives=tuple(objectives[f] for f in families),
            demand=demand,
            carbon=self.plannable_carbon(now_s).reading,
            carbon_forecast=self.carbon_forecast(_ahead_s(objectives), now_s),
            measured=self.measured(families, grams_per_request, now_s),
            current=current,
            trigger="",
            move_horizon_s=self._settings.move_horizon_s,
            pue=self._settings.pue,
            budgets=self.windows.budgets(now_s),
            carbon_history=tuple(self.inputs.carbon_history),
            zones=tuple(carried_when_stale(z, now_s, self._settings.carbon_stale_intervals) for z in self.inputs.zones),
            cpu_uses=self.cpu.uses(now_s),
            cpu_histories=self.cpu.histories(),
            flexible=self.inputs.flexible,
        )

    def input_stamps(self, now_s: float) -> tuple[InputStamp, ...]:
        """Age and rung of each input that a plan is decided on."""
        keys = self._keys
        fleet, carbon, forecast = self.fleet(now_s), self.plannable_carbon(now_s).reading, self.inputs.carbon_forecast
        live = self.windows.live(now_s)
        newest_s = max((f.issued_at_s for f in self.forecasts.values()), default=math.nan)
        return (
            *(InputStamp(keys.node(n.node), n.observed_at_s, int(n.node in fleet.stale)) for n in fleet.nodes),
            InputStamp(keys.carbon_now(carbon.series), carbon.observed_at_s, carbon.rung),
            *([InputStamp(keys.carbon_forecast(forecast.series), forecast.issued_at_s)] if forecast else ()),
            InputStamp(
                keys.load_prefix(), 0.0 if math.isnan(newest_s) else newest_s, RUNG_NORMAL if live else RUNG_CARRIED
            ),
        )


def _wake_s(fleet: FleetState, catalog: Catalog) -> float:
    """How long the slowest device that can be planned takes to wake up."""
    types = catalog.profiled_types
    usable = {d.type for n in fleet.nodes for d in n.devices if not unplannable_reason(d, types)}
    return max((kind.wake_s for kind in usable), default=0.0)


def _hosted(fleet: FleetState, current: Plan | None) -> frozenset[str]:
    """Families that run or are planned to, with or without an objective: a rollout must know them too."""
    return fleet.hosted_families | (current.hosted_families if current else frozenset())


def _ahead_s(objectives: Mapping[str, Objective]) -> float:
    """How far the longest budget looks ahead."""
    return max((o.window_s for o in objectives.values()), default=0.0)


def _with_slo_margin(demand: Demand, boost: float) -> Demand:
    """Demand raised after an SLO breach: what was predicted to suffice did not."""
    return replace(demand, rate_p90_per_s=demand.rate_p90_per_s * (1 + boost)) if boost else demand
