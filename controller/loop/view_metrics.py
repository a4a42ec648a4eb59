"""Metrics of a view and of the state of control."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from controller.loop.core.decision import RUNG_DEGRADED, RUNG_KEPT, ControlState, Verdict
from controller.thresholds import REFUSABLE
from trefoil.core.brains import PlanView
from trefoil.core.objective import ActMode
from trefoil.core.plan import Rollout, RolloutState
from trefoil.runtime.telemetry import Metrics

TOKEN_SLO: Final = (
    "trefoil_token_slo_seconds", "trefoil_token_slo_quantile_ratio", "trefoil_token_slo_attainment_ratio"
)  # fmt: skip
MODES: Final = tuple(m.name.lower() for m in ActMode if m)
STATES: Final = tuple(s.name.lower() for s in RolloutState if s)
FORECASTS: Final = ("used", "refused", "none")
RUNGS: Final[Mapping[int, str]] = {RUNG_DEGRADED: "degraded", RUNG_KEPT: "kept"}


def set_view_metrics(
    metrics: Metrics,
    view: PlanView,
    control: ControlState,
    rollout: Rollout,
    last: Verdict | None,
    refused: str = "",
    set_aside: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Metrics of a view and of the state of control. `refused`: the rung in force, where it is not planned by;
    `set_aside`: values since the last time, by kind."""
    metrics.set_one_of("trefoil_carbon_refused", "rung", refused, REFUSABLE)
    forecast = view.carbon_forecast
    used = "none" if forecast is None else "used" if forecast.bands else "refused"
    metrics.set_one_of("trefoil_carbon_forecast", "state", used, FORECASTS)
    for kind, count in set_aside.items():
        metrics.inc("trefoil_set_aside_total", count, kind=kind)
    metrics.simulated = any(n.simulated for n in view.fleet.nodes)
    for node in view.fleet.nodes:
        metrics.set("trefoil_node_stale", node.node in view.fleet.stale, node=node.node)
    for objective in view.objectives:
        family = objective.family
        metrics.set("trefoil_slo_latency_seconds", objective.slo_ms / 1e3, family=family)
        metrics.set("trefoil_slo_quantile_ratio", objective.slo_quantile, family=family)
        metrics.set("trefoil_accuracy_floor_ratio", objective.min_accuracy, family=family)
        for of, limit_ms, quantile in objective.token_slo.each:
            if limit_ms:
                metrics.set("trefoil_token_slo_seconds", limit_ms / 1e3, family=family, objective=of)
                metrics.set("trefoil_token_slo_quantile_ratio", quantile, family=family, objective=of)
            else:
                for name in TOKEN_SLO:
                    metrics.drop(name, family, of)
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
        tokens = measured.tokens
        for of, attained in (("ttft", tokens.ttft_attainment), ("tpot", tokens.tpot_attainment)):
            if attained is not None:
                metrics.set("trefoil_token_slo_attainment_ratio", attained, family=family, objective=of)
            else:
                metrics.drop("trefoil_token_slo_attainment_ratio", family, of)
        if measured.grams_per_request is not None:
            metrics.set("trefoil_grams_per_request", measured.grams_per_request, family=family)
    if view.current is not None:
        metrics.set("trefoil_plan_revision_epoch", view.current.revision.epoch)
        metrics.set("trefoil_plan_revision_number", view.current.revision.number)
        metrics.set("trefoil_optimality_gap_ratio", view.current.optimality_gap)
        for family, expected in view.current.expected.items():
            metrics.set("trefoil_capacity_requests_per_second", expected.capacity_per_s, family=family)
