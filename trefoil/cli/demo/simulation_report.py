"""The report of simulated runs: the demo's page, made of what `trefoil simulate` has found."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from trefoil.cli.demo.report import report_html
from trefoil.cli.demo.results import (
    CAUSES,
    DemoFamilySummary,
    DemoSeries,
    DemoSummary,
    Exploration,
    PlanEvent,
    Report,
    git_commit,
    machine,
)
from trefoil.core.units import HOUR_S
from trefoil.runtime.clock import WallClock
from trefoil.simulator.report.result import FamilySummary as SimulatedFamily
from trefoil.simulator.report.result import Result
from trefoil.simulator.scenario.schema import Scenario

MADE = ("reconfigure", "reroute")


def write_simulation_report(folder: Path, scenario: Scenario, results: Mapping[str, Result], command: str) -> None:
    """Write report.html of runs of one scenario, by policy. `command`: what was run, as it stands in the report."""
    gpus = tuple(kind for node in scenario.nodes for _ in range(node.count) for kind in node.devices)
    first = next(iter(next(iter(results.values())).summary.families.values()))
    report = Report(
        simulated=True,
        triton_version="",
        gpus=gpus,
        duration_s=scenario.span_s,
        carbon_speedup=1.0,
        seed=scenario.seed,
        commit=git_commit(),
        pad_overrun_ratio=None,
        accuracy_floor=first.floor,
        command=command,
        machine=machine(),
        started_at=datetime.fromtimestamp(WallClock().now_s(), UTC).isoformat(timespec="seconds"),
        runs={name: _summary(one) for name, one in results.items()},
        simulated_time=True,
    )
    series = {name: _series(name, one) for name, one in results.items()}
    (folder / "report.html").write_text(report_html(report, series), encoding="utf-8")


def _summary(result: Result) -> DemoSummary:
    found = result.summary
    first = next(iter(found.families.values()))
    explored = Exploration(
        explorations=sum("exploration" in one for one in result.decisions),
        evaluations=found.evaluations,
        refused=sum(one["outcome"] == "refused" for one in result.evaluations),
        broken_off=sum(one["outcome"] == "broken_off" for one in result.evaluations),
        spent_s=found.exploration_s,
        spent_j=found.exploration_j,
        violations=found.exploration_violations,
    )
    return DemoSummary(
        requests=found.arrived,
        answered=found.answered,
        failed=found.rejected,
        slo={"percentile": 100 * first.slo_quantile, "latency_ms": first.slo_ms},
        latency_ms_p50=found.p50_ms,
        latency_ms_p95=found.p95_ms,
        latency_ms_p99=found.p99_ms,
        slo_attainment=found.slo_attainment,
        accuracy=found.accuracy,
        accuracy_profile=found.accuracy,
        joules_per_request=found.joules_per_request if found.answered else None,
        grams_per_request=found.grams_per_request if found.answered else None,
        idle_share=found.idle_share,
        replans=dict.fromkeys(CAUSES, 0) | dict(found.causes),
        reconfigurations={"all causes": found.reconfigurations},
        exploration=explored if found.evaluations else None,
        families={name: _family(one) for name, one in found.families.items()},
    )


def _family(one: SimulatedFamily) -> DemoFamilySummary:
    return DemoFamilySummary(
        requests=one.arrived,
        answered=one.answered,
        failed=one.rejected,
        schedule_digest="-",
        slo_ms=one.slo_ms,
        latency_ms_p95=one.p95_ms,
        slo_attainment=one.slo_attainment,
        accuracy=one.accuracy,
        accuracy_profile=one.accuracy,
        accuracy_floor=one.floor,
        device_type_shares=one.by_device_type,
        profile=one.profile,
    )


def _series(policy: str, result: Result) -> DemoSeries:
    """Series by bin, in hours, as the plots take them; which variant answered is known of the whole run only."""
    columns, families = result.series, list(result.summary.families)
    return DemoSeries(
        policy=policy,
        t_s=[float(at_s) / HOUR_S for at_s in columns["at_s"]],
        intensity_g_per_kwh=_known(columns["intensity_g_per_kwh"]),
        offered_per_s=[float(sum(rates)) for rates in _of_families(columns, families, "rate_per_s")],
        answered_per_s=[float(sum(rates)) for rates in _of_families(columns, families, "answered_per_s")],
        latency_ms_p95={name: _known(columns[f"{name}.p95_ms"]) for name in families},
        power_w={"all": _known(columns["power_w"])},
        grams=_known(np.cumsum(columns["grams"])),
        events=plan_events(result.decisions),
    )


def _of_families(columns: Mapping[str, Any], families: Sequence[str], name: str) -> Any:
    return zip(*(columns[f"{family}.{name}"] for family in families), strict=True)


def _known(values: Any) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


def plan_events(decisions: Sequence[Mapping[str, Any]]) -> list[PlanEvent]:
    """Decisions that put a plan in force. The next one says how far the rollout was that it met."""
    made = [one for one in decisions if one["effect"] in MADE and one["at_s"] >= 0]
    ends = [after["rollout_before"] for after in made[1:]] + ["done"] if made else []
    return [
        PlanEvent(
            at_s=one["at_s"] / HOUR_S,
            took_s=None,
            cause=one["trigger"],
            why=one["why"],
            plan="other slices, variants or devices" if one["effect"] == MADE[0] else "other shares, the same slices",
            answered=None,
            reconfigured=one["effect"] == MADE[0],
            superseded=end == "applying",
        )
        for one, end in zip(made, ends, strict=True)
    ]
