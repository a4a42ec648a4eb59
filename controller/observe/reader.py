"""Observation live: read from Redis, published as demand series and metrics.

On trouble the last values stand, and the observation says why."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from controller.loop.core.decision import RUNG_DEGRADED, RUNG_KEPT, ControlState, Verdict
from controller.loop.leadership import Leadership
from controller.observe.core.carbon_inputs import REFUSABLE
from controller.observe.core.observation import Observation
from controller.settings import CarbonSettings
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonForecast, CarbonReading
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import ActMode
from trefoil.core.plan import Rollout, RolloutState
from trefoil.runtime.acks import LiveAcks
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Append, Put, Write
from trefoil.runtime.state import Keys, State
from trefoil.runtime.telemetry import Metrics


class ObservationReader:
    """Reader of Redis into an observation; remembers how far each stream has been read."""

    def __init__(self, observation: Observation, state: State, carbon: CarbonSettings, clock: Clock) -> None:
        self.observation = observation
        self._state, self._carbon, self._clock = state, carbon, clock
        self._live = LiveAcks(state, clock)
        self._load_ids: dict[str, str] = {}
        self._history_id = "0"

    async def refresh(self) -> None:
        """Read everything once; on trouble keep the last values and say in `inputs.down` why."""
        inputs = self.observation.inputs
        try:
            await self._refresh()
            inputs.down = ""
        except errors.StateUnavailable as error:
            inputs.down = str(error)
        except errors.InvalidInput as error:
            inputs.down = f"Redis holds what this version cannot read: {error}"
        self.observation.windows.forget(self._clock.now_s())

    async def refresh_nodes(self) -> None:
        """Read node statuses and acks only: what a rollout waits for.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        keys, inputs = self._state.keys, self.observation.inputs
        inputs.nodes |= {n.node: n for n in (await self._state.scan(keys.node_prefix(), NodeStatus)).values()}
        inputs.acks = await self._live.read()
        inputs.blind = self._live.blind

    async def _refresh(self) -> None:
        keys, series, inputs = self._state.keys, self._carbon.series, self.observation.inputs
        await self.refresh_nodes()
        inputs.carbon = await self._state.get(keys.carbon_now(series), CarbonReading) or inputs.carbon
        inputs.carbon_forecast = await self._state.get(keys.carbon_forecast(series), CarbonForecast)
        count = self._carbon.history_max
        if self._history_id == "0":
            entries = await self._state.tail(keys.carbon_history(series), CarbonReading, count)
        else:
            entries = await self._state.stream(keys.carbon_history(series), CarbonReading, self._history_id, count)
        for entry_id, reading in entries:
            self._history_id = entry_id
            inputs.carbon_history.append(reading)
        await self._refresh_other_zones()
        self.observation.note_carbon()
        for key in await self._state.names(keys.load_prefix()):
            for entry_id, window in await self._state.stream(key, LoadWindow, self._load_ids.get(key, "0")):
                self._load_ids[key] = entry_id
                self.observation.windows.add(window, self.observation.catalog)

    async def _refresh_other_zones(self) -> None:
        """Readings of the other zones that nodes lie in."""
        series, inputs = self._carbon.series, self.observation.inputs
        held = {reading.series.zone: reading for reading in inputs.zones}
        for zone in sorted({node.zone for node in inputs.nodes.values()} - {series.zone, ""}):
            reading = await self._state.get(self._state.keys.carbon_now(replace(series, zone=zone)), CarbonReading)
            if reading is not None:
                held[zone] = reading
        inputs.zones = tuple(held[zone] for zone in sorted(held))


DEMAND_MAX: Final = 86_400  # 24 h of seconds
MODES: Final = tuple(m.name.lower() for m in ActMode if m)
STATES: Final = tuple(s.name.lower() for s in RolloutState if s)
FORECASTS: Final = ("used", "refused", "none")
RUNGS: Final[Mapping[int, str]] = {RUNG_DEGRADED: "degraded", RUNG_KEPT: "kept"}


class DemandPublisher:
    """Publisher of arrivals per second and forecast of each family, once a second."""

    def __init__(self, keys: Keys, observation: Observation, leadership: Leadership, clock: Clock) -> None:
        self._keys, self._observation, self._leadership, self._clock = keys, observation, leadership, clock
        self._at_s = 0.0

    async def publish(self) -> None:
        """Publish when a second has passed since the last time."""
        now_s = self._clock.now_s()
        if now_s - self._at_s >= 1.0:
            self._at_s = now_s
            writes = demand_writes(self._keys, self._observation, now_s)
            if writes:
                await self._leadership.write(writes)


def demand_writes(keys: Keys, observation: Observation, now_s: float) -> list[Write]:
    """Redis writes of arrivals of the last second and of the forecast, of each family."""
    bins = round(1 / observation.windows.bin_s)
    writes: list[Write] = []
    for family, forecast in sorted(observation.forecasts.items()):
        arrived = round(sum(observation.windows.arrivals(family, now_s)[-bins:]))
        cell = LoadCell(LoadKey(family), arrived=arrived, arrived_per_s=(arrived,))
        window = LoadWindow(starts_at_s=now_s - 1, ends_at_s=now_s, cells=(cell,))
        writes.append(Append(keys.demand(family), window, DEMAND_MAX, ttl_s=float(DEMAND_MAX)))
        writes.append(Put(keys.forecast_load(family), forecast))
    return writes


def set_view_metrics(
    metrics: Metrics, view: PlanView, control: ControlState, rollout: Rollout, last: Verdict | None, refused: str = ""
) -> None:
    """Metrics of a view and of the state of control. `refused`: the rung in force, where it is not planned by."""
    metrics.set_one_of("trefoil_carbon_refused", "rung", refused, REFUSABLE)
    forecast = view.carbon_forecast
    used = "none" if forecast is None else "used" if forecast.bands else "refused"
    metrics.set_one_of("trefoil_carbon_forecast", "state", used, FORECASTS)
    metrics.simulated = any(n.simulated for n in view.fleet.nodes)
    metrics.set("trefoil_nodes_stale", len(view.fleet.stale))
    metrics.set_one_of("trefoil_act_mode", "mode", control.mode.name.lower(), MODES)
    metrics.set_one_of("trefoil_rollout_state", "state", rollout.state.name.lower(), STATES)
    rung = RUNGS.get(last.rung, "") if last else ""
    metrics.set_one_of("trefoil_plan_degraded", "rung", rung, tuple(RUNGS.values()))
    for wanted in view.demand:
        name = "trefoil_demand_requests_per_second"
        metrics.set(name, wanted.rate_per_s, family=wanted.family, quantile="mean")
        metrics.set(name, wanted.rate_p90_per_s, family=wanted.family, quantile="0.9")
    for measured in view.measured:
        family = measured.family
        metrics.set("trefoil_slo_attainment_ratio", measured.slo_attainment, family=family)
        metrics.set("trefoil_accuracy_ratio", measured.accuracy, family=family)
        metrics.set("trefoil_latency_seconds", measured.latency_ms_p95 / 1e3, family=family, quantile="0.95")
        metrics.set("trefoil_latency_seconds", measured.latency_ms_p99 / 1e3, family=family, quantile="0.99")
        if measured.grams_per_request is not None:
            metrics.set("trefoil_grams_per_request", measured.grams_per_request, family=family)
    if view.current is not None:
        metrics.set("trefoil_plan_revision_epoch", view.current.revision.epoch)
        metrics.set("trefoil_plan_revision_number", view.current.revision.number)
        metrics.set("trefoil_optimality_gap_ratio", view.current.optimality_gap)
        for family, expected in view.current.expected.items():
            metrics.set("trefoil_capacity_requests_per_second", expected.capacity_per_s, family=family)
