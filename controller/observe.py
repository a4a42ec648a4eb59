"""Gathers what planners may know. Everything that is old or missing is replaced by a named rung, never waited for."""

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from controller.forecasters.last_max import poisson_quantile
from controller.forecasters.table import Forecaster
from controller.settings import ControllerSettings
from controller.usable import profiled, unplannable
from controller.windows import Windows
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonForecast, CarbonReading, Quality
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand, LoadForecast, LoadWindow, Measured, TableAck
from trefoil.core.device_types import device_type
from trefoil.core.fleet import FleetState, NodeStatus
from trefoil.core.objective import Objective
from trefoil.core.plan import InputStamp, Plan
from trefoil.runtime.clock import Clock
from trefoil.runtime.store import Store

NEAR_INITIAL = 0.75  # of the configured demand: then the load itself is believed
RUNG_NORMAL, RUNG_CARRIED, RUNG_STATIC = 0, 1, 2


@dataclass(slots=True)
class Inputs:
    """The last value of everything read, kept when Redis or its writer is down."""

    nodes: dict[str, NodeStatus] = field(default_factory=dict)
    acks: tuple[TableAck, ...] = ()
    carbon: CarbonReading | None = None
    carbon_forecast: CarbonForecast | None = None
    carbon_history: "deque[CarbonReading]" = field(default_factory=deque)
    down: str = ""


class Observer:
    """Reads Redis into `inputs` and `windows`; builds views from them."""

    def __init__(
        self, settings: ControllerSettings, state: Store, catalog: Catalog, forecaster: Forecaster, clock: Clock
    ) -> None:
        self._settings, self._state, self._catalog, self._clock = settings, state, catalog, clock
        self._forecaster = forecaster
        self.inputs = Inputs(carbon_history=deque(maxlen=settings.carbon.history_max))
        self.windows = Windows(settings.windows)
        self._load_ids: dict[str, str] = {}
        self._history_id = "0"
        self._started_at_s = clock.now_s()
        self._arrived: set[str] = set()
        self._demand: dict[str, Demand] = {}
        self.forecasts: dict[str, LoadForecast] = {}
        self._known_of: frozenset[str] = frozenset()
        self._known_catalog = catalog.of(())

    async def refresh(self) -> None:
        """Read everything once; on trouble keep the last values and say in `inputs.down` why."""
        try:
            await self._refresh()
            self.inputs.down = ""
        except errors.StateUnavailable as error:
            self.inputs.down = str(error)
        except errors.InvalidInput as error:
            self.inputs.down = f"Redis holds what this version cannot read: {error}"
        self.windows.forget(self._clock.now_s())

    async def refresh_nodes(self) -> None:
        """Read node statuses and acks only: what a rollout waits for.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        keys = self._state.keys
        self.inputs.nodes |= {n.node: n for n in (await self._state.scan(keys.node_prefix(), NodeStatus)).values()}
        self.inputs.acks = tuple((await self._state.scan(keys.ack_prefix(), TableAck)).values())

    async def _refresh(self) -> None:
        keys, series = self._state.keys, self._settings.carbon.series
        await self.refresh_nodes()
        self.inputs.carbon = await self._state.get(keys.carbon_now(series), CarbonReading) or self.inputs.carbon
        self.inputs.carbon_forecast = await self._state.get(keys.carbon_forecast(series), CarbonForecast)
        count = self._settings.carbon.history_max
        if self._history_id == "0":
            entries = await self._state.tail(keys.carbon_history(series), CarbonReading, count)
        else:
            entries = await self._state.stream(keys.carbon_history(series), CarbonReading, self._history_id, count)
        for entry_id, reading in entries:
            self._history_id = entry_id
            self.inputs.carbon_history.append(reading)
        for key in await self._state.names(keys.load_prefix()):
            for entry_id, window in await self._state.stream(key, LoadWindow, self._load_ids.get(key, "0")):
                self._load_ids[key] = entry_id
                self.windows.add(window, self._catalog)

    def fleet(self) -> FleetState:
        """All nodes by name; stale are those whose status is older than its limit."""
        now_s = self._clock.now_s()
        nodes = tuple(self.inputs.nodes[name] for name in sorted(self.inputs.nodes))
        limit_s = self._settings.node_stale_s
        return FleetState(nodes, tuple(n.node for n in nodes if now_s - n.observed_at_s > limit_s))

    def acks(self) -> tuple[TableAck, ...]:
        """Acks of dispatcher workers that are alive."""
        return self.inputs.acks

    def carbon(self) -> CarbonReading:
        """The reading to plan by: the last one, carried when it is old, static when there never was one."""
        now_s, settings = self._clock.now_s(), self._settings.carbon
        reading = self.inputs.carbon
        if reading is None:
            return CarbonReading(
                series=settings.series,
                starts_at_s=now_s,
                ends_at_s=now_s,
                intensity_g_per_kwh=settings.static_g_per_kwh,
                quality=Quality.STATIC,
                provider="setting",
                observed_at_s=now_s,
                rung=RUNG_STATIC,
                fallback_reason=f"no reading of {settings.zone} yet: carbon.static_g_per_kwh",
            )
        interval_s = reading.ends_at_s - reading.starts_at_s
        age_s = now_s - reading.observed_at_s
        if interval_s > 0 and age_s > self._settings.carbon_stale_intervals * interval_s:
            why = f"the reading is {age_s:.0f} s old"
            return replace(reading, rung=max(reading.rung, RUNG_CARRIED), quality=Quality.CARRIED, fallback_reason=why)
        return reading

    def demand(self, families: Sequence[str], boosts: Mapping[str, float]) -> tuple[Demand, ...]:
        """Demand of the families that have an objective or are asked for."""
        now_s = self._clock.now_s()
        wanted = sorted({*families, *self.windows.families()} & {f.name for f in self._catalog.families})
        for family in wanted:
            # Without a live dispatcher arrivals are unknown, not zero: the last demand stands.
            if self.windows.live(now_s) or family not in self._demand:
                self._demand[family] = self._family_demand(family, now_s)
        return tuple(_boosted(self._demand[family], boosts.get(family, 0.0)) for family in wanted)

    def _family_demand(self, family: str, now_s: float) -> Demand:
        fixed = self._settings.demand_fixed.get(family)
        if fixed is not None:
            demand = fixed.demand(family, now_s)
            assert demand.forecast is not None
            self.forecasts[family] = demand.forecast
            return demand
        arrivals = self.windows.arrivals(family, now_s)
        bin_s = self._settings.windows.bin_s
        forecast = self._forecaster.forecast(family, arrivals, bin_s, now_s, self._lead_s(family))
        initial = self._initial(family, forecast.max_per_s)
        rate, p90 = forecast.max_per_s, forecast.p90_per_s
        if initial > rate:
            span_s = self._settings.smooth_s
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

    def _initial(self, family: str, rate_per_s: float) -> float:
        """The configured demand until the load has come near it, or the hold is over. A probe is not the load."""
        initial = self._settings.demand_initial_per_s.get(family, 0.0)
        held_s = self._clock.now_s() - self._started_at_s
        if rate_per_s >= NEAR_INITIAL * initial or held_s > self._settings.demand_initial_hold_s:
            self._arrived.add(family)
        return 0.0 if family in self._arrived else initial

    def _lead_s(self, family: str) -> float:
        """How long capacity takes to come: wake a device, start a Triton, load the slowest variant."""
        types = profiled(self._catalog)
        usable = {d.type for n in self.inputs.nodes.values() for d in n.devices if not unplannable(d, types)}
        wake_s = max((device_type(kind).wake_s for kind in usable), default=0.0)
        load_s = max((v.load_s for v in self._catalog.family(family).variants), default=0.0)
        return wake_s + load_s + self._settings.start_s

    def measured(self, families: Sequence[str], grams_per_request: Mapping[str, float | None]) -> tuple[Measured, ...]:
        """What each family got of late; families without requests are left out."""
        now_s = self._clock.now_s()
        found = (self.windows.measured(f, now_s, self._catalog, grams_per_request.get(f)) for f in families)
        return tuple(m for m in found if m is not None)

    def view(
        self,
        objectives: Mapping[str, Objective],
        current: Plan | None,
        boosts: Mapping[str, float],
        grams_per_request: Mapping[str, float | None],
    ) -> PlanView:
        """The view of this moment, its trigger still empty."""
        now_s = self._clock.now_s()
        families = sorted(objectives)
        fleet, demand = self.fleet(), self.demand(families, boosts)
        return PlanView(
            now_s=now_s,
            fleet=fleet,
            catalog=self._known({*families, *(d.family for d in demand), *_hosted(fleet, current)}),
            objectives=tuple(objectives[f] for f in families),
            demand=demand,
            carbon=self.carbon(),
            carbon_forecast=self.inputs.carbon_forecast,
            measured=self.measured(families, grams_per_request),
            current=current,
            trigger="",
            move_horizon_s=self._settings.move_horizon_s,
            pue=self._settings.pue,
            budgets=self.windows.budgets(now_s),
            carbon_history=tuple(self.inputs.carbon_history),
        )

    def _known(self, families: Set[str]) -> Catalog:
        """The catalogue of these families alone: every decision records its view, and a repository may hold many."""
        wanted = frozenset(families)
        if wanted != self._known_of:
            self._known_of, self._known_catalog = wanted, self._catalog.of(wanted)
        return self._known_catalog

    def stamps(self) -> tuple[InputStamp, ...]:
        """Of what a plan is decided on: age and rung of each input."""
        now_s, keys = self._clock.now_s(), self._state.keys
        fleet, carbon = self.fleet(), self.carbon()
        live = self.windows.live(now_s)
        newest_s = max((f.issued_at_s for f in self.forecasts.values()), default=math.nan)
        return (
            *(InputStamp(keys.node(n.node), n.observed_at_s, int(n.node in fleet.stale)) for n in fleet.nodes),
            InputStamp(keys.carbon_now(carbon.series), carbon.observed_at_s, carbon.rung),
            InputStamp(
                keys.load_prefix(), 0.0 if math.isnan(newest_s) else newest_s, RUNG_NORMAL if live else RUNG_CARRIED
            ),
        )


def _hosted(fleet: FleetState, current: Plan | None) -> set[str]:
    """Families that run, or are to run, without anybody asking for them: a rollout must know them too."""
    running = {h.family for n in fleet.nodes for d in n.devices for s in d.slices for h in s.hosted}
    planned = {
        h.family for n in (current.nodes if current else ()) for d in n.devices for s in d.slices for h in s.hosted
    }
    return running | planned


def _boosted(demand: Demand, boost: float) -> Demand:
    """Demand raised after an SLO breach: what was predicted to suffice did not."""
    return replace(demand, rate_p90_per_s=demand.rate_p90_per_s * (1 + boost)) if boost else demand
