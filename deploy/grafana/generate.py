"""`make dashboards`: writes the Grafana dashboards in the folder beside this file."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from node import NODE
from panels import Dashboard, by_state, current, leader, line, lines, quantile, rate, stat, table, variable

HERE: Final = Path(__file__).parent
GOOD_HIGH: Final = (("red", None), ("orange", 0.9), ("green", 0.95))
NONE_GOOD: Final = (("green", None), ("red", 1))
SLICE_COLORS: Final = {
    "READY": "green", "SWAPPING": "purple", "STARTING": "blue", "PENDING": "super-light-blue", "DRAINING": "orange",
    "FAILED": "red",
}  # fmt: skip
DEVICE_COLORS: Final = {"AWAKE": "green", "ASLEEP": "blue", "LOST": "red"}
GRAMS_PER_HOUR: Final = "suffix:g/h"
INTENSITY: Final = "suffix:g/kWh"
ATTAINED: Final = "1 - trefoil:slo_miss:ratio_rate5m"
PLANNED_FOR: Final = 'trefoil_demand_requests_per_second{quantile="0.9"}'

DEVICES: Final = stat(
    "Devices",
    'label_replace(count(trefoil_device_power_watts{simulated="true"}), "devices", "SIMULATED", "", "")'
    ' or label_replace(count(trefoil_device_power_watts{simulated="false"}), "devices", "real", "", "")',
    legend="{{devices}}",
    text="value_and_name",
    says="Whether figures are of GPUs, or of simulated ones.",
    w=3,
)

SAVED: Final = stat(
    "Saved against BASE, 1 h",
    "trefoil:saving:ratio_rate1h unless on () trefoil:saving_withheld:bool > 0",
    "percentunit",
    thresholds=(("red", None), ("green", 0)),
    decimals=1,
    least=None,
    no_value="none: SLO or floor missed, or under 200 answers",
)
CARBON_NOW: Final = line(
    "Carbon intensity", "max by (zone) (trefoil_carbon_intensity_grams_per_kwh)", "{{zone}}", INTENSITY, steps=True
)
EMISSIONS: Final = lines(
    "Emissions",
    [
        (f"3600 * {rate('trefoil_emissions_grams_total', '')}", "emitted"),
        (f"3600 * {rate('trefoil_base_emissions_grams_total', '')}", "BASE, modelled"),
    ],
    GRAMS_PER_HOUR,
)
FIRING: Final = 'count(ALERTS{alertstate="firing", alertname!="TrefoilWatchdog"}) or vector(0)'  # that one always fires
NO_TOKENS: Final = "this family streams no tokens"

FLEET: Final = Dashboard(
    "fleet",
    "fleet now",
    "What runs, how well it serves, and what it costs.",
    [
        [
            stat("Requests", rate("trefoil_requests_total", ""), "reqps", decimals=0, w=3),
            stat("Within the SLO", f"min({ATTAINED})", "percentunit", thresholds=GOOD_HIGH, decimals=1, most=1),
            stat("Power", "sum(trefoil:node_power:watts)", "watt", decimals=0, w=3),
            stat("Emissions", f"3600 * {rate('trefoil_emissions_grams_total', '')}", GRAMS_PER_HOUR, decimals=1),
            SAVED,
            stat("Alerts that fire", FIRING, thresholds=NONE_GOOD, w=3),
            DEVICES,
        ],
        [
            line("Requests", rate("trefoil_requests_total", "family"), "{{family}}", "reqps"),
            line("Within the SLO, 5 min", ATTAINED, "{{family}}", "percentunit", most=1),
            line("Power by node", "trefoil:node_power:watts", "{{node}}", "watt", stacked=True),
        ],
        [
            CARBON_NOW,
            EMISSIONS,
            line("Requests that wait", "sum by (family) (trefoil_queue_requests)", "{{family}}", soft_most=1),
        ],
        [
            by_state("Slices by state", "trefoil_slice_state", SLICE_COLORS),
            by_state("Devices by state", "trefoil_device_state", DEVICE_COLORS),
            table("Who leads", "max by (role, instance) (trefoil_lease_epoch) > 0", "epoch", decimals=0),
        ],
    ],
)

CARBON: Final = Dashboard(
    "carbon",
    "carbon and energy",
    "What the grid emits, where joules go, and what is saved.",
    [
        [
            stat(
                "Carbon intensity",
                "max by (zone) (trefoil_carbon_intensity_grams_per_kwh)",
                INTENSITY,
                "{{zone}}",
                decimals=0,
                w=4,
            ),
            current("It rests on", "rung", "(trefoil_carbon_rung)", 4),
            stat(
                "Reading observed",
                "min(trefoil_carbon_reading_age_seconds)",
                "s",
                decimals=0,
                w=4,
                thresholds=(("green", None), ("orange", 3600), ("red", 10800)),
            ),
            stat("Power", "sum(trefoil:node_power:watts)", "watt", decimals=0, w=4),
            replace(SAVED, w=5),
            DEVICES,
        ],
        [replace(CARBON_NOW, w=12), replace(EMISSIONS, w=12)],
        [
            line(
                "Power by what it is for",
                rate("trefoil_device_energy_joules_total", "share"),
                "{{share}}",
                "watt",
                stacked=True,
            ),
            line(
                "Active energy per request",
                f"{rate('trefoil_slice_energy_joules_total', 'family')} / "
                f"({rate('trefoil_requests_served_total', 'family')} > 0)",
                "{{family}}",
                "joule",
            ),
            line("Grams per request", f"max by (family) {leader('trefoil_grams_per_request')}", "{{family}}", "massg"),
        ],
        [
            line(
                "Energy that belongs to no slice, 15 min",
                "trefoil:node_energy_unallocated:ratio_rate15m",
                "{{node}}",
                "percentunit",
                most=1,
            ),
            line(
                "Stated error of attribution",
                "max by (device) (trefoil_energy_uncertainty_ratio)",
                "{{device}}",
                "percentunit",
            ),
            line(
                "Time that was not metered",
                "sum(increase(trefoil_energy_unknown_seconds_total[$__rate_interval])) or vector(0)",
                "all nodes",
                "s",
                soft_most=1,
            ),
        ],
        [
            line(
                "Readings by rung",
                f"60 * {rate('trefoil_carbon_readings_total', 'zone, rung')}",
                "{{zone}} rung {{rung}}",
                "suffix:/min",
            ),
            line("Age of the reading", "min by (zone) (trefoil_carbon_reading_age_seconds)", "{{zone}}", "s"),
            line(
                "Failed polls of providers",
                "sum by (provider, cause) (increase(trefoil_carbon_provider_errors_total[1h]))"
                ' or label_replace(vector(0), "cause", "none", "", "")',
                "{{provider}} {{cause}}",
                "short",
                says="Of the last hour.",
                soft_most=1,
            ),
        ],
        [
            line(
                "Jobs that are planned",
                f"max by (state) {leader('trefoil_jobs_planned')}",
                "{{state}}",
                steps=True,
                decimals=0,
                says="in_danger: they will miss their deadline.",
                no_value="no job is planned",
            ),
            line(
                "Grams of planned items, by rule",
                f"max by (rule) {leader('trefoil_jobs_planned_grams')}",
                "{{rule}}",
                "massg",
                says="What is planned, and the same items run at once or evenly.",
                no_value="no job is planned",
            ),
            line(
                "Items of jobs",
                rate("trefoil_job_items_total", "outcome"),
                "{{outcome}}",
                "suffix:/s",
                no_value="no job runs",
            ),
        ],
    ],
)

OF_FAMILY: Final = 'family="$family"'


def of_objective(of: str) -> str:
    """Labels of an objective of tokens, ttft or tpot, of the family that is shown."""
    return f'{OF_FAMILY}, objective="{of}"'


def token_slo(name: str, of: str) -> str:
    """A metric of an objective of tokens."""
    return f"{name}{{{of_objective(of)}}}"


FAMILY: Final = Dashboard(
    "family",
    "family",
    "One family: what is asked of it, what it answers, by what.",
    [
        [
            stat("Requests", rate("trefoil_requests_total", "", OF_FAMILY), "reqps", decimals=1, w=3),
            stat(
                "Within the SLO, 5 min",
                f"1 - trefoil:slo_miss:ratio_rate5m{{{OF_FAMILY}}}",
                "percentunit",
                thresholds=GOOD_HIGH,
                decimals=1,
                most=1,
            ),
            stat(
                "Misses over those allowed, 1 h",
                f"trefoil:slo_miss:ratio_rate1h{{{OF_FAMILY}}} / trefoil:slo_budget:ratio{{{OF_FAMILY}}}",
                "suffix:x",
                thresholds=(("green", None), ("orange", 1), ("red", 6)),
                decimals=2,
            ),
            stat("Accuracy", f"max({leader(f'trefoil_accuracy_ratio{{{OF_FAMILY}}}')})", "percentunit", decimals=2),
            stat("Grams per request", f"max({leader(f'trefoil_grams_per_request{{{OF_FAMILY}}}')})", "massg", w=3),
            stat("Waiting", f"sum(trefoil_queue_requests{{{OF_FAMILY}}})", w=3),
            DEVICES,
        ],
        [
            lines(
                "Load and capacity",
                [
                    (rate("trefoil_requests_total", "", OF_FAMILY), "arrives"),
                    (
                        f"max by (quantile) {leader(f'trefoil_demand_requests_per_second{{{OF_FAMILY}}}')}",
                        "planned for: {{quantile}}",
                    ),
                    (f"max({leader(f'trefoil_capacity_requests_per_second{{{OF_FAMILY}}}')})", "capacity"),
                ],
                "reqps",
                w=12,
                dashed=["capacity"],
            ),
            lines(
                "Latency",
                [
                    *(
                        (quantile(q, "trefoil_request_duration_seconds", OF_FAMILY), f"p{100 * q:g}")
                        for q in (0.5, 0.95, 0.99)
                    ),
                    (f"max({leader(f'trefoil_slo_latency_seconds{{{OF_FAMILY}}}')})", "SLO"),
                ],
                "s",
                w=12,
                dashed=["SLO"],
            ),
        ],
        [
            lines(
                "Within the SLO, 5 min",
                [
                    (f"1 - trefoil:slo_miss:ratio_rate5m{{{OF_FAMILY}}}", "within"),
                    (f"max({leader(f'trefoil_slo_quantile_ratio{{{OF_FAMILY}}}')})", "objective"),
                ],
                "percentunit",
                most=1,
                dashed=["objective"],
            ),
            lines(
                "Accuracy",
                [
                    (f"max({leader(f'trefoil_accuracy_ratio{{{OF_FAMILY}}}')})", "mean of answers"),
                    (f"max({leader(f'trefoil_accuracy_floor_ratio{{{OF_FAMILY}}}')})", "floor"),
                ],
                "percentunit",
                least=None,
                dashed=["floor"],
            ),
            line(
                "Answers by variant",
                rate("trefoil_requests_served_total", "variant", OF_FAMILY),
                "{{variant}}",
                "reqps",
                stacked=True,
            ),
        ],
        [
            line(
                "Requests by status",
                rate("trefoil_requests_total", "code", OF_FAMILY),
                "{{code}}",
                "reqps",
                stacked=True,
            ),
            lines(
                "Where time goes, p95",
                [
                    (quantile(0.95, "trefoil_queue_duration_seconds", OF_FAMILY), "waiting"),
                    (quantile(0.95, "trefoil_service_duration_seconds", OF_FAMILY, "variant"), "on {{variant}}"),
                ],
                "s",
            ),
            line(
                "Active power by variant",
                rate("trefoil_slice_energy_joules_total", "variant", OF_FAMILY),
                "{{variant}}",
                "watt",
                stacked=True,
            ),
        ],
        [
            *(
                lines(
                    title,
                    [
                        *((quantile(q, f"trefoil_{of}_seconds", OF_FAMILY), f"p{100 * q:g}") for q in (0.5, 0.95)),
                        (f"max({leader(token_slo('trefoil_token_slo_seconds', of))})", "SLO"),
                    ],
                    "s",
                    w=6,
                    no_value=NO_TOKENS,
                    dashed=["SLO"],
                )
                for of, title in (("ttft", "Time to the first token"), ("tpot", "Time from token to token"))
            ),
            lines(
                "Streams within the SLO of tokens",
                [
                    *(
                        (
                            f"{rate('trefoil_token_slo_within_total', '', of_objective(of))} / "
                            f"({rate('trefoil_token_slo_streams_total', '', of_objective(of))} > 0)",
                            of.upper(),
                        )
                        for of in ("ttft", "tpot")
                    ),
                    (f"min({leader(f'trefoil_token_slo_quantile_ratio{{{OF_FAMILY}}}')})", "objective"),
                ],
                "percentunit",
                w=6,
                no_value=NO_TOKENS,
                most=1,
                dashed=["objective"],
            ),
            lines(
                "Tokens and joules of each",
                [
                    (rate("trefoil_tokens_total", "", OF_FAMILY), "tokens/s"),
                    (
                        f"{rate('trefoil_slice_energy_joules_total', '', OF_FAMILY)} / "
                        f"({rate('trefoil_tokens_total', '', OF_FAMILY)} > 0)",
                        "active J per token",
                    ),
                ],
                "short",
                w=6,
                no_value=NO_TOKENS,
            ),
        ],
    ],
    [variable("family", "label_values(trefoil_requests_total, family)")],
)

DECISIONS: Final = Dashboard(
    "decisions",
    "decisions and why",
    "What the controller decided, what made it decide, and how far that is. The reasons in words: `trefoil plan`.",
    [
        [
            current("Mode", "mode", leader("trefoil_act_mode"), 3),
            stat("Plan in force", f"max({leader('trefoil_plan_revision_number')})", decimals=0),
            current("Rollout", "state", leader("trefoil_rollout_state"), 6),
            stat(
                "Plan stands on a rung",
                f"max({leader('trefoil_plan_degraded')})",
                thresholds=NONE_GOOD,
                mappings=[{"type": "value", "options": {"0": {"text": "no"}, "1": {"text": "yes"}}}],
            ),
            stat("Proven gap", f"max({leader('trefoil_optimality_gap_ratio')})", "percentunit", decimals=2, w=3),
            current("Forecast of carbon", "state", leader("trefoil_carbon_forecast"), 4),
        ],
        [
            table(
                "Decisions since the controller started",
                "sort_desc(sum by (trigger, outcome) (trefoil_decisions_total))",
                "decisions",
                w=12,
                decimals=0,
            ),
            table(
                "Plans put in force since then",
                "sort_desc(sum by (cause) (trefoil_replans_total))",
                "plans",
                w=12,
                decimals=0,
            ),
        ],
        [
            lines(
                "Plan: put in force, and routed by",
                [
                    (f"max({leader('trefoil_plan_revision_number')})", "controller"),
                    ("min(trefoil_table_revision_number)", "slowest dispatcher"),
                ],
                steps=True,
                decimals=0,
                least=None,
            ),
            line(
                "Decisions",
                f"60 * {rate('trefoil_decisions_total', 'outcome')}",
                "{{outcome}}",
                "suffix:/min",
                stacked=True,
            ),
            lines(
                "Time in the planner",
                [
                    (quantile(0.5, "trefoil_solve_duration_seconds", ""), "p50"),
                    (quantile(0.95, "trefoil_solve_duration_seconds", ""), "p95"),
                ],
                "s",
            ),
        ],
        [
            lines(
                "What it reacts to: load",
                [
                    (rate("trefoil_requests_total", "family"), "{{family}} arrives"),
                    (f"max by (family) {leader(PLANNED_FOR)}", "{{family}} planned for"),
                ],
                "reqps",
            ),
            replace(CARBON_NOW, title="What it reacts to: carbon"),
            line(
                "Steps on nodes", f"60 * {rate('trefoil_steps_total', 'verb')}", "{{verb}}", "suffix:/min", stacked=True
            ),
        ],
    ],
)

DASHBOARDS: Final = (FLEET, CARBON, FAMILY, DECISIONS, NODE)


def files() -> Iterable[tuple[Path, str]]:
    """Each dashboard's file and what stands in it."""
    for dashboard in DASHBOARDS:
        text = json.dumps(dashboard.json(), indent=1, ensure_ascii=False) + "\n"
        yield HERE / "dashboards" / f"{dashboard.name}.json", text


if __name__ == "__main__":
    for file, content in files():
        file.write_text(content)
