"""Gathers what planners may know. Everything that is old or missing is replaced by a named rung, never waited for."""

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import is_

from controller.forecasters.last_max import poisson_quantile
from controller.intensity import Held, aged, cut, held, refusal, rung_name, unread, without_bands
from controller.settings import ControllerSettings
from controller.usable import profiled, unplannable
from controller.windows import Windows
from trefoil.core import errors
from trefoil.core.brains import Forecaster, PlanView
from trefoil.core.carbon import CarbonForecast, CarbonReading, Rung
from trefoil.core.catalog import Catalog
from trefoil.core.common import Same
from trefoil.core.demand import Demand, LoadForecast, LoadWindow, Measured, TableAck
from trefoil.core.device_types import device_type
from trefoil.core.fleet import FleetState, NodeStatus
from trefoil.core.objective import Objective
from trefoil.core.plan import InputStamp, NodePlan, Plan
from trefoil.runtime.acks import LiveAcks
from trefoil.runtime.clock import Clock
from trefoil.runtime.store import Store

NEAR_INITIAL = 0.75  # of the configured demand: then the load itself is believed
RUNG_NORMAL, RUNG_CARRIED = int(Rung.NORMAL), int(Rung.CARRIED)


@dataclass(slots=True)
class Inputs:
    """The last value of everything read, kept when Redis or its writer is down."""

    nodes: dict[str, NodeStatus] = field(default_factory=dict)
    acks: tuple[TableAck, ...] = ()
    carbon: CarbonReading | None = None
    carbon_allowed: CarbonReading | None = None
    """The last one on a rung that is not refused; unused while none is."""
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
        self._live = LiveAcks(state, clock)
        self._load_ids: dict[str, str] = {}
        self._history_id = "0"
        self._started_at_s = clock.now_s()
        self._arrived: set[str] = set()
        self._demand: dict[str, Demand] = {}
        self.forecasts: dict[str, LoadForecast] = {}
        self._known_of: frozenset[str] = frozenset()
        self._known_catalog = catalog.of(())
        self._fleet = FleetState((), ())
        self._refused = frozenset(settings.carbon.rungs_refused)
        self._cut: tuple[CarbonForecast, float, float, CarbonForecast] | None = None

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
        self.inputs.acks = await self._live.read()

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
        if self._refused:
            self._note_carbon(self.inputs.carbon)
        for key in await self._state.names(keys.load_prefix()):
            for entry_id, window in await self._state.stream(key, LoadWindow, self._load_ids.get(key, "0")):
                self._load_ids[key] = entry_id
                self.windows.add(window, self._catalog)

    def fleet(self) -> FleetState:
        """All nodes by name; stale are those whose status is older than its limit."""
        now_s = self._clock.now_s()
        nodes = tuple(self.inputs.nodes[name] for name in sorted(self.inputs.nodes))
        limit_s = self._settings.node_stale_s
        stale = tuple(n.node for n in nodes if now_s - n.observed_at_s > limit_s)
        known = self._fleet  # of the same statuses, the object of which others know already what they ask
        if stale != known.stale or len(nodes) != len(known.nodes) or not all(map(is_, nodes, known.nodes)):
            self._fleet = FleetState(nodes, stale)
        return self._fleet

    def acks(self) -> tuple[TableAck, ...]:
        """Acks of dispatcher workers that are alive, as far as can be told (`blind`)."""
        return self.inputs.acks

    @property
    def blind(self) -> str:
        """Why there may be workers that `acks` does not name, "" when there are none."""
        return self._live.blind

    def carbon(self) -> CarbonReading:
        """The reading in force: the last one, carried when it is old, static when there never was one."""
        now_s, reading = self._clock.now_s(), self.inputs.carbon
        if reading is None:
            return unread(self._settings.carbon.series, self._settings.carbon.static_g_per_kwh, now_s)
        return aged(reading, now_s, self._settings.carbon_stale_intervals)

    def held(self) -> Held:
        """The reading to plan by, and why it is not the one in force where that stands on a refused rung."""
        in_force = self.carbon()
        if not self._refused:
            return Held(in_force)
        static, now_s = self._settings.carbon.static_g_per_kwh, self._clock.now_s()
        return held(in_force, self.inputs.carbon_allowed, self._refused, static, now_s)

    def allowed(self, triggers: Sequence[str]) -> Sequence[str]:
        """The triggers that may fire now: a reading on a refused rung starts nothing."""
        return [name for name in triggers if name != "carbon"] if self.held().rung else triggers

    def _note_carbon(self, reading: CarbonReading | None) -> None:
        """Remember the last reading on an allowed rung; after a restart the newest one of the history is it."""
        known = self.inputs
        for one in (*known.carbon_history, reading) if known.carbon_allowed is None else (reading,):
            if one is not None and rung_name(one.rung) not in self._refused:
                known.carbon_allowed = one

    def carbon_forecast(self, ahead_s: float) -> CarbonForecast | None:
        """The forecast to plan by over the next seconds; without bands, and with the reason, where it is refused."""
        forecast, settings = self.inputs.carbon_forecast, self._settings.carbon
        if forecast is None or not settings.forecast or ahead_s <= 0:
            return None
        now_s = self._clock.now_s()
        why = refusal(forecast, settings.series, now_s, settings.forecast_age_share_max)
        if why:
            return without_bands(forecast, settings.series, why)
        known = self._cut  # until its first band is over
        if known is None or known[0] is not forecast or known[1] != ahead_s or now_s >= known[2]:
            shown = cut(forecast, now_s, ahead_s)
            until_s = shown.bands[0].ends_at_s if shown.bands else math.inf
            self._cut = known = forecast, ahead_s, until_s, shown
        return known[3]

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
        wake_s = _wake_s(Same(self.fleet()), Same(self._catalog))
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
            carbon=self.held().reading,
            carbon_forecast=self.carbon_forecast(_ahead_s(objectives)),
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
        fleet, carbon, forecast = self.fleet(), self.held().reading, self.inputs.carbon_forecast
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


@lru_cache(maxsize=64)
def _wake_s(fleet: Same[FleetState], catalog: Same[Catalog]) -> float:
    """How long the slowest device that can be planned takes to wake up."""
    types = profiled(catalog.value)
    usable = {d.type for n in fleet.value.nodes for d in n.devices if not unplannable(d, types)}
    return max((device_type(kind).wake_s for kind in usable), default=0.0)


def _hosted(fleet: FleetState, current: Plan | None) -> frozenset[str]:
    """Families that run, or are to run, without anybody asking for them: a rollout must know them too."""
    return _families(Same(fleet.nodes)) | _families(Same(current.nodes if current else ()))


@lru_cache(maxsize=64)
def _families(nodes: Same[tuple[NodeStatus, ...]] | Same[tuple[NodePlan, ...]]) -> frozenset[str]:
    return frozenset(h.family for n in nodes.value for d in n.devices for s in d.slices for h in s.hosted)


def _ahead_s(objectives: Mapping[str, Objective]) -> float:
    """How far the longest budget looks ahead."""
    return max((o.window_s for o in objectives.values()), default=0.0)


def _boosted(demand: Demand, boost: float) -> Demand:
    """Demand raised after an SLO breach: what was predicted to suffice did not."""
    return replace(demand, rate_p90_per_s=demand.rate_p90_per_s * (1 + boost)) if boost else demand
