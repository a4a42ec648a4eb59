"""Logs and metrics. Every metric of every service is declared in trefoil.runtime.metrics.

`python -m trefoil.runtime.telemetry` prints docs/metrics.md. Every sample carries the label `simulated`, so that no
page built on it can pass simulated GPUs off as real ones.
"""

import logging
import os
import socket
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from itertools import chain
from typing import Any, Final

import prometheus_client as prometheus
from prometheus_client.metrics_core import Metric as Samples
from prometheus_client.registry import Collector, CollectorRegistry

from trefoil.core import errors
from trefoil.runtime.metrics import ALL, METRICS, TRITON_METRICS, Metric

CLIENTS_MAX: Final = 32  # of the endpoint at once: Prometheus, probes, people
SILENT_S: Final = 10.0


class Metrics(Collector):
    """Metrics of one process. `simulated` is true as soon as anything it reports rests on simulated devices."""

    def __init__(self, service: str, simulated: bool = False) -> None:
        assert service in ALL, f"{service} is not one of {ALL}"
        self.simulated = simulated
        self._registry = CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)
        self._passed_on: list[Collector] = []
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

    def observe_times(self, child: Any, value: float, count: int) -> None:
        """Add an observation `count` times to a bound histogram, at the price of one.

        prometheus_client has no such call, so its own counters are added to (a test holds this to what single
        observations give).
        """
        child._sum.inc(value * count)
        child._buckets[bisect_left(child._upper_bounds, value)].inc(count)

    def set_one_of(self, name: str, label: str, chosen: str, choices: tuple[str, ...], **labels: str) -> None:
        """Set a state gauge: 1 for the state that holds, 0 for the others."""
        for choice in choices:
            self.set(name, float(choice == chosen), **{label: choice}, **labels)

    def bind(self, name: str, **labels: str) -> Any:
        """Bind labels: the prometheus child itself, for hot paths to keep."""
        metric = self._by_name[name]
        return metric.labels(**labels) if labels else metric

    def drop(self, name: str, *values: str) -> None:
        """Drop one labelled child, e.g. of a slice that is gone; label values in declared order."""
        self._by_name[name].remove(*values)

    def pass_on(self, collector: Collector) -> None:
        """Pass on what a collector finds, from now on. It may set metrics: it is asked before they are read."""
        self._passed_on.append(collector)

    def collect(self) -> Iterator[Samples]:
        """Collect all samples with the label `simulated` (the custom collector of `serve`)."""
        extra = {"simulated": "true" if self.simulated else "false"}
        passed_on = [family for collector in self._passed_on for family in collector.collect()]
        for family in chain(self._registry.collect(), passed_on):
            family.samples = [sample._replace(labels={**sample.labels, **extra}) for sample in family.samples]
            yield family

    def text(self) -> str:
        """Text that the endpoint serves."""
        return prometheus.generate_latest(self._outer()).decode()

    def serve(
        self, host: str, port: int, answer: Callable[[str], tuple[int, str] | None] = lambda _: None
    ) -> Callable[[], None]:
        """Serve metrics in a thread; returns what stops it. `answer` has other paths: their status and text.

        Raises:
            errors.PortInUse: another process listens there.
        """
        try:
            server, thread = prometheus.start_http_server(port, host, CollectorRegistry())
        except OSError as error:
            raise errors.listen_error(error, f"{host}:{port}", "metrics_address") from error
        metrics = prometheus.make_wsgi_app(self._outer())

        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            head = environ["REQUEST_METHOD"] == "HEAD"
            found = answer(environ["PATH_INFO"]) if head or environ["REQUEST_METHOD"] == "GET" else None
            if found is None:
                page: Iterable[bytes] = metrics(
                    environ | {"REQUEST_METHOD": "GET"} if head else environ, start_response
                )
                return [] if head else page
            code, text = found
            start_response(f"{code} {HTTPStatus(code).phrase}", [("Content-Type", "text/plain; charset=utf-8")])
            return [] if head else [text.encode()]

        server.set_app(app)
        _bound(server)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close

    def _outer(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


def _bound(server: Any) -> None:
    """Bound the clients of a threading HTTP server: one that is silent is left, and the oldest of too many gives way.
    Each has a thread and a descriptor of the service that it is about."""
    held = deque[socket.socket]()
    begin, end, report = server.process_request, server.shutdown_request, server.handle_error

    def process_request(client: socket.socket, address: Any) -> None:
        held.append(client)
        if len(held) > CLIENTS_MAX:
            with suppress(OSError):  # it has left
                held.popleft().shutdown(socket.SHUT_RDWR)
        begin(client, address)

    def shutdown_request(client: socket.socket) -> None:
        with suppress(ValueError):  # it gave way
            held.remove(client)
        end(client)

    def handle_error(client: socket.socket, address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # of a client that is silent or has left
            report(client, address)

    server.process_request, server.shutdown_request = process_request, shutdown_request
    server.handle_error = handle_error
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SILENT_S})


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.kind == "counter":
        return prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.kind == "gauge":
        return prometheus.Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


class LogStream:
    """Stream of log lines to stderr that never fails: where its disk is full, lines are lost, and counted afterwards.

    Straight to the descriptor: a buffer that cannot be written would raise at every later line, and again at the end.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._torn = False
        self._lost = 0

    def write(self, text: str) -> None:
        """Write whole lines, or lose them. Half a line is ended before the next, with how many were lost."""
        head = "\n" if self._torn else ""
        if self._lost:
            head += f'{{"event": "log lines lost: stderr could not be written", "count": {self._lost}}}\n'
        data = (head + text).encode(errors="backslashreplace")
        try:
            while data:  # a pipe takes parts; a disk that fills takes a part and says why at the next
                data = data[os.write(self._descriptor, data) :]
                self._torn = bool(data)
            self._lost = 0
        except OSError:
            self._lost += 1

    def flush(self) -> None:
        """Hold nothing back: there is nothing to flush."""


def setup_logging(service: str, level: str = "info", json: bool | None = None) -> None:
    """Set up structured logs to stderr: pretty on a terminal, JSON otherwise. Every line carries the service's name."""
    import structlog

    as_json = not sys.stderr.isatty() if json is None else json
    stream = LogStream()
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
        logger_factory=structlog.WriteLoggerFactory(stream),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=stream, level=logging.WARNING, format=f"{service}: %(name)s: %(message)s")
    logging.getLogger("grpc._cython.cygrpc").addFilter(_of_a_bug)


def _of_a_bug(record: logging.LogRecord) -> bool:
    """Leave out what gRPC logs with a traceback whenever a client leaves while its answer is being sent."""
    return not (record.exc_info and type(record.exc_info[1]).__name__ == "ExecuteBatchError")


def _add(_: Any, __: str, event: dict[str, Any], *, service: str) -> dict[str, Any]:
    return {"service": service, **event}


def markdown() -> str:
    """Markdown of docs/metrics.md."""
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
        lines += _table(service, rows)
    lines += _table("Triton, through the power agent", TRITON_METRICS)
    lines += [
        "",
        "The agent's page passes all `nv_*` metrics of its Tritons on, labelled by `slice`, `family` and `variant`.",
        "Dashboards use these.",
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Iterable[Metric]) -> list[str]:
    lines = ["", f"## {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in rows:
        also = f" Also by {', '.join(metric.services[1:])}." if 1 < len(metric.services) < len(ALL) else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{also} |")
    return lines


def _section(metric: Metric) -> str:
    return "every service" if metric.services == ALL else metric.services[0]


if __name__ == "__main__":
    sys.stdout.write(markdown())
