"""Logs and metrics. Every metric of every service is declared in METRICS, once, in base units.

`python -m trefoil.runtime.telemetry` prints docs/metrics.md. Every sample carries the label `simulated`, so that no
page built on it can pass simulated GPUs off as real ones.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Literal

import prometheus_client as prometheus
import structlog
from prometheus_client.metrics_core import Metric as Samples
from prometheus_client.registry import Collector, CollectorRegistry

from trefoil.core import errors

Kind = Literal["counter", "gauge", "histogram"]

ALL: Final = ("carbon_feed", "controller", "dispatcher", "power_agent")
CARBON_FEED: Final = ("carbon_feed",)
CONTROLLER: Final = ("controller",)
DISPATCHER: Final = ("dispatcher",)
POWER_AGENT: Final = ("power_agent",)

# 1 ms to 33 s in steps of sqrt(2): fine enough to read a p95 off a plot; the exact quantiles are in load windows.
LATENCY_BUCKETS_S: Final = tuple(round(0.001 * 2 ** (i / 2), 6) for i in range(31))
SOLVE_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
STEP_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One declaration. Names of counters end in _total, units stand before that."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    services: tuple[str, ...] = ALL
    buckets: tuple[float, ...] = ()


METRICS: Final[tuple[Metric, ...]] = (
    # Every service
    Metric("trefoil_build_info", "gauge", "Always 1; the labels tell what runs.", ("service", "version")),
    Metric("trefoil_rpc_requests_total", "counter", "Admin RPCs, by status code.", ("method", "code")),
    Metric(
        "trefoil_rpc_duration_seconds", "histogram", "Time in an admin RPC.", ("method",), buckets=LATENCY_BUCKETS_S
    ),
    Metric("trefoil_state_errors_total", "counter", "Calls that Redis did not answer in time."),
    Metric("trefoil_writes_fenced_total", "counter", "Writes and commands refused for an old epoch.", ("role",)),
    Metric("trefoil_lease_epoch", "gauge", "Epoch under which a role is held; 0 = not held.", ("role",)),
    # Carbon feed
    Metric(
        "trefoil_carbon_intensity_grams_per_kwh",
        "gauge",
        "Carbon intensity of the grid, the last accepted reading.",
        ("zone", "method", "factors"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_reading_age_seconds", "gauge", "Time since the reading was observed.", ("zone",), CARBON_FEED
    ),
    Metric(
        "trefoil_carbon_readings_total",
        "counter",
        "Readings published, by quality and rung.",
        ("zone", "quality", "rung"),
        CARBON_FEED,
    ),
    Metric(
        "trefoil_carbon_provider_errors_total",
        "counter",
        "Polls of a provider without an accepted reading.",
        ("zone", "provider", "cause"),
        CARBON_FEED,
    ),
    Metric("trefoil_carbon_trace_speedup_ratio", "gauge", "Trace seconds per wall second.", ("zone",), CARBON_FEED),
    # Dispatcher
    Metric("trefoil_requests_total", "counter", "Requests finished, by status.", ("family", "code"), DISPATCHER),
    Metric(
        "trefoil_requests_within_slo_total",
        "counter",
        "Requests answered within the SLO's latency.",
        ("family",),
        DISPATCHER,
    ),
    Metric(
        "trefoil_requests_served_total",
        "counter",
        "Requests executed, by the variant that answered.",
        ("family", "variant"),
        DISPATCHER,
    ),
    Metric("trefoil_items_total", "counter", "Items (rows of the batch dimension) answered.", ("family",), DISPATCHER),
    Metric(
        "trefoil_request_duration_seconds",
        "histogram",
        "Arrival to answer.",
        ("family",),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric(
        "trefoil_queue_duration_seconds",
        "histogram",
        "Arrival to dispatch.",
        ("family",),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric(
        "trefoil_service_duration_seconds",
        "histogram",
        "Dispatch to the slice's answer.",
        ("family", "variant"),
        DISPATCHER,
        LATENCY_BUCKETS_S,
    ),
    Metric("trefoil_queue_requests", "gauge", "Requests waiting for a credit.", ("family",), DISPATCHER),
    Metric("trefoil_queue_bytes", "gauge", "Payload bytes waiting for a credit.", ("family",), DISPATCHER),
    Metric("trefoil_in_flight_requests", "gauge", "Requests on a slice.", ("slice",), DISPATCHER),
    Metric("trefoil_credits", "gauge", "Requests that this worker may have on a slice.", ("slice",), DISPATCHER),
    Metric("trefoil_slice_ejected", "gauge", "1 while a slice is out after failures.", ("slice",), DISPATCHER),
    Metric("trefoil_ejections_total", "counter", "Slices taken out after failures.", ("slice", "cause"), DISPATCHER),
    Metric("trefoil_table_revision_epoch", "gauge", "Epoch of the plan routed by.", (), DISPATCHER),
    Metric("trefoil_table_revision_number", "gauge", "Number of the plan routed by.", (), DISPATCHER),
    # Controller
    Metric("trefoil_plan_revision_epoch", "gauge", "Epoch of the plan in force.", (), CONTROLLER),
    Metric("trefoil_plan_revision_number", "gauge", "Number of the plan in force.", (), CONTROLLER),
    Metric(
        "trefoil_decisions_total",
        "counter",
        "Planner calls, by trigger and outcome (new_plan, unchanged, degraded, failed, candidate).",
        ("trigger", "outcome"),
        CONTROLLER,
    ),
    Metric("trefoil_replans_total", "counter", "Plans put in force, by cause.", ("cause",), CONTROLLER),
    Metric(
        "trefoil_reconfigurations_total",
        "counter",
        "Plans that changed slices, variants or sleeping devices, by cause.",
        ("cause",),
        CONTROLLER,
    ),
    Metric(
        "trefoil_solve_duration_seconds", "histogram", "Time in the planner.", ("planner",), CONTROLLER, SOLVE_BUCKETS_S
    ),
    Metric("trefoil_optimality_gap_ratio", "gauge", "Proven gap of the plan, of its model.", (), CONTROLLER),
    Metric("trefoil_plan_degraded", "gauge", "1 while the plan stands on a named rung.", ("rung",), CONTROLLER),
    Metric("trefoil_rollout_state", "gauge", "1 for the state that the rollout is in.", ("state",), CONTROLLER),
    Metric(
        "trefoil_rollout_duration_seconds", "histogram", "Start to done of a rollout.", (), CONTROLLER, STEP_BUCKETS_S
    ),
    Metric("trefoil_act_mode", "gauge", "1 for the mode of operation.", ("mode",), CONTROLLER),
    Metric("trefoil_nodes_stale", "gauge", "Nodes whose status is older than its limit.", (), CONTROLLER),
    Metric("trefoil_demand_requests_per_second", "gauge", "Demand planned for.", ("family", "quantile"), CONTROLLER),
    Metric("trefoil_capacity_requests_per_second", "gauge", "Capacity of the plan.", ("family",), CONTROLLER),
    Metric("trefoil_latency_seconds", "gauge", "Measured latency.", ("family", "quantile"), CONTROLLER),
    Metric("trefoil_slo_attainment_ratio", "gauge", "Answered within the SLO over arrived.", ("family",), CONTROLLER),
    Metric(
        "trefoil_accuracy_ratio", "gauge", "Request-weighted mean accuracy of the variants.", ("family",), CONTROLLER
    ),
    Metric(
        "trefoil_emissions_grams_total", "counter", "All grams: active, idle, sleep and moves.", ("zone",), CONTROLLER
    ),
    Metric("trefoil_grams_per_request", "gauge", "Grams over answered requests.", ("family",), CONTROLLER),
    Metric("trefoil_exploring", "gauge", "1 while candidates are measured on the running system.", (), CONTROLLER),
    Metric(
        "trefoil_explorations_total",
        "counter",
        "Explorations that ended, by how (decided, interrupted).",
        ("outcome",),
        CONTROLLER,
    ),
    Metric(
        "trefoil_evaluations_total",
        "counter",
        "Candidates of explorations, by outcome (measured, refused, halted, broken_off, interrupted).",
        ("outcome",),
        CONTROLLER,
    ),
    Metric("trefoil_exploration_seconds_total", "counter", "Time spent exploring.", (), CONTROLLER),
    Metric("trefoil_exploration_joules_total", "counter", "Energy drawn while exploring.", (), CONTROLLER),
    Metric(
        "trefoil_exploration_violations_total",
        "counter",
        "Requests that missed the SLO while exploring, rejected and failed ones included.",
        (),
        CONTROLLER,
    ),
    Metric("trefoil_energy_unknown_seconds_total", "counter", "Gaps in the energy stream.", ("node",), CONTROLLER),
    # Power agent
    Metric("trefoil_device_power_watts", "gauge", "Power of a device.", ("device",), POWER_AGENT),
    Metric(
        "trefoil_device_energy_joules_total",
        "counter",
        "Energy of a device by share (active, idle, unallocated); they add up to the counter.",
        ("device", "share"),
        POWER_AGENT,
    ),
    Metric(
        "trefoil_slice_energy_joules_total",
        "counter",
        "Active energy attributed to a slice and variant.",
        ("slice", "family", "variant"),
        POWER_AGENT,
    ),
    Metric("trefoil_energy_uncertainty_ratio", "gauge", "Stated error of attribution.", ("device",), POWER_AGENT),
    Metric("trefoil_device_baseline_watts", "gauge", "Idle power that is booked as idle.", ("device",), POWER_AGENT),
    Metric(
        "trefoil_energy_samples_total",
        "counter",
        "Energy samples, by how joules were read and how they were split between slices.",
        ("device", "method", "attribution"),
        POWER_AGENT,
    ),
    Metric(
        "trefoil_energy_counter_resets_total", "counter", "Energy counters that began anew.", ("device",), POWER_AGENT
    ),
    Metric("trefoil_device_clock_hertz", "gauge", "SM clock.", ("device",), POWER_AGENT),
    Metric("trefoil_device_temperature_celsius", "gauge", "GPU temperature.", ("device",), POWER_AGENT),
    Metric("trefoil_device_state", "gauge", "1 for the state that a device is in.", ("device", "state"), POWER_AGENT),
    Metric("trefoil_slice_state", "gauge", "1 for the state that a slice is in.", ("slice", "state"), POWER_AGENT),
    Metric("trefoil_device_drift", "gauge", "Differences between hardware and plan.", ("device",), POWER_AGENT),
    Metric("trefoil_device_xids_total", "counter", "Errors that a GPU reported.", ("device", "xid"), POWER_AGENT),
    Metric("trefoil_steps_total", "counter", "Reconfiguration steps.", ("verb", "outcome"), POWER_AGENT),
    Metric("trefoil_step_duration_seconds", "histogram", "Time in a step.", ("verb",), POWER_AGENT, STEP_BUCKETS_S),
    Metric("trefoil_slice_restarts_total", "counter", "Tritons or stubs healed.", ("slice", "cause"), POWER_AGENT),
)


class Metrics(Collector):
    """The metrics of one process. `simulated` is true as soon as anything it reports rests on simulated devices."""

    def __init__(self, service: str, simulated: bool = False) -> None:
        assert service in ALL, f"{service} is not one of {ALL}"
        self.simulated = simulated
        self._registry = CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)
        self._by_name = {metric.name: _make(metric, self._registry) for metric in METRICS if service in metric.services}
        self.set("trefoil_build_info", 1, service=service, version=version("trefoil"))

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self.bind(name, **labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.bind(name, **labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        self.bind(name, **labels).observe(value)

    def set_one_of(self, name: str, label: str, chosen: str, choices: tuple[str, ...], **labels: str) -> None:
        """Set a state gauge: 1 for the state that holds, 0 for the others."""
        for choice in choices:
            self.set(name, float(choice == chosen), **{label: choice}, **labels)

    def bind(self, name: str, **labels: str) -> Any:
        """The prometheus child itself, for hot paths to keep."""
        metric = self._by_name[name]
        return metric.labels(**labels) if labels else metric

    def drop(self, name: str, *values: str) -> None:
        """Forget one labelled child, e.g. of a slice that is gone; label values in declared order."""
        self._by_name[name].remove(*values)

    def collect(self) -> Iterator[Samples]:
        """All samples with the label `simulated` (the custom collector of `serve`)."""
        extra = {"simulated": "true" if self.simulated else "false"}
        for family in self._registry.collect():
            family.samples = [sample._replace(labels={**sample.labels, **extra}) for sample in family.samples]
            yield family

    def text(self) -> str:
        """What the endpoint serves."""
        return prometheus.generate_latest(self._outer()).decode()

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serve in a thread; returns what stops it.

        Raises:
            errors.PortInUse: somebody else listens there.
        """
        try:
            server, thread = prometheus.start_http_server(port, host, self._outer())
        except OSError as error:
            raise errors.PortInUse(
                f"cannot listen ({error.strerror})",
                field="metrics_address",
                value=f"{host}:{port}",
                remedy="stop what listens there, or set another address",
            ) from error

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close

    def _outer(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.kind == "counter":
        return prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.kind == "gauge":
        return prometheus.Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


def setup_logging(service: str, level: str = "info", json: bool | None = None) -> None:
    """Structured logs to stderr: pretty on a terminal, JSON otherwise. Every line carries the service's name."""
    as_json = not sys.stderr.isatty() if json is None else json
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            partial(_add, service=service),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if as_json else []),
            structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=f"{service}: %(name)s: %(message)s")


def _add(_: Any, __: str, event: dict[str, Any], *, service: str) -> dict[str, Any]:
    return {"service": service, **event}


def serve_metrics(address: str, metrics: Metrics) -> Callable[[], None]:
    """Serve at host:port; returns what stops it. Services list a `service.MetricsPart` instead."""
    host, _, port = address.rpartition(":")
    return metrics.serve(host.strip("[]"), int(port))


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m trefoil.runtime.telemetry`; do not edit. Served at each service's `metrics_address`.",
        "Units are base units (seconds, joules, watts, hertz, bytes, grams, ratios in 0..1); intensity alone is in",
        'g/kWh, as everywhere in Trefoil. Every sample also carries `simulated="true"` or `"false"`. The Prometheus',
        "client adds `process_*` (memory, CPU, file descriptors).",
    ]
    for service in ("every service", *ALL):
        rows = [metric for metric in METRICS if _section(metric) == service]
        lines += ["", f"## {service}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for metric in rows:
            also = f" Also by {', '.join(metric.services[1:])}." if 1 < len(metric.services) < len(ALL) else ""
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{also} |")
    return "\n".join(lines) + "\n"


def _section(metric: Metric) -> str:
    return "every service" if metric.services == ALL else metric.services[0]


if __name__ == "__main__":
    sys.stdout.write(markdown())
