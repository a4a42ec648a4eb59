"""What the controller tells others beside its plans: demand, receipt rates, metrics, the versions behind a decision."""

import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

from controller.authority import Authority
from controller.core.decide import RUNG_DEGRADED, RUNG_KEPT, Control, Verdict
from controller.core.intensity import REFUSABLE
from controller.core.observation import Observation
from controller.core.receipts import Key, Receipts, moved
from controller.settings import ControllerSettings
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.energy import ReceiptRates
from trefoil.core.objective import ActMode
from trefoil.core.plan import Plan, Rollout, RolloutState
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Append, Put, Write
from trefoil.runtime.state import Keys
from trefoil.runtime.telemetry import Metrics

DEMAND_MAX: Final = 86_400  # 24 h of seconds
MODES: Final = tuple(m.name.lower() for m in ActMode if m)
STATES: Final = tuple(s.name.lower() for s in RolloutState if s)
FORECASTS: Final = ("used", "refused", "none")
RUNGS: Final[Mapping[int, str]] = {RUNG_DEGRADED: "degraded", RUNG_KEPT: "kept"}


class DemandSeries:
    """Arrivals per second and forecast of each family, written once a second."""

    def __init__(self, keys: Keys, seen: Observation, authority: Authority, clock: Clock) -> None:
        self._keys, self._seen, self._authority, self._clock = keys, seen, authority, clock
        self._at_s = 0.0

    async def publish(self) -> None:
        """Write when a second has passed."""
        now_s = self._clock.now_s()
        if now_s - self._at_s >= 1.0:
            self._at_s = now_s
            writes = demand(self._keys, self._seen, now_s)
            if writes:
                await self._authority.write(writes)


class ReceiptSeries:
    """What answers cost, for the dispatchers: written when a rate has moved, and again before they call it old."""

    def __init__(
        self, settings: ControllerSettings, keys: Keys, receipts: Receipts, authority: Authority, clock: Clock
    ) -> None:
        self._settings, self._keys, self._receipts = settings, keys, receipts
        self._authority, self._clock = authority, clock
        self._told: dict[Key, float] = {}
        self._at_s = -math.inf
        self._told_at_s = -math.inf

    async def publish(self, plan: Plan | None) -> None:
        """Write if it is time to."""
        now_s, settings = self._clock.now_s(), self._settings.receipts
        if now_s - self._at_s < settings.publish_s:
            return
        self._at_s = now_s
        rates = self._receipts.rates(plan)
        if now_s - self._told_at_s < settings.repeat_s and not moved(self._told, rates, settings.publish_ratio):
            return
        revision = plan.revision if plan is not None else Revision()
        told = ReceiptRates(rates, now_s, self._settings.carbon.series, self._settings.pue, revision)
        await self._authority.write([Put(self._keys.receipts(), told)])
        self._told_at_s = now_s
        self._told = {(rate.slice, rate.family, rate.variant): rate.ratio for rate in rates}


def demand(keys: Keys, seen: Observation, now_s: float) -> list[Write]:
    """Arrivals of the last second and the forecast, of each family."""
    bins = round(1 / seen.windows.bin_s)
    writes: list[Write] = []
    for family, forecast in sorted(seen.forecasts.items()):
        arrived = round(sum(seen.windows.arrivals(family, now_s)[-bins:]))
        cell = LoadCell(LoadKey(family), arrived=arrived, arrived_per_s=(arrived,))
        window = LoadWindow(starts_at_s=now_s - 1, ends_at_s=now_s, cells=(cell,))
        writes.append(Append(keys.demand(family), window, DEMAND_MAX, ttl_s=float(DEMAND_MAX)))
        writes.append(Put(keys.forecast_load(family), forecast))
    return writes


def gauge(
    metrics: Metrics, view: PlanView, control: Control, rollout: Rollout, last: Verdict | None, refused: str = ""
) -> None:
    """The state of control as metrics. `refused`: the rung in force, where it is not planned by."""
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


def versions(planner: str, verdict: Verdict, effect: str) -> dict[str, str]:
    """What a decision rests on and what came of it. `plan`: digest of the planner's plan, which a replay must meet.

    `effect`: reconfigure (slices, variants, sleep or clocks change), reroute (shares alone), or the outcome.
    """
    return {
        "trefoil": version("trefoil"),
        "planner": planner,
        "numpy": version("numpy"),
        "highspy": version("highspy"),
        "plan": verdict.digest,
        "outcome": verdict.outcome,
        "effect": effect,
    }
