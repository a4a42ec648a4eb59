"""Metrics of the dispatcher: filled from its load windows (the request path touches none of them), and one Prometheus
endpoint for all workers: whichever of them is asked, it asks the others.

Each sample carries the label `worker`, the place of its worker: sums over it are the dispatcher's.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from itertools import groupby
from operator import attrgetter
from typing import Final

from dispatcher.service.core.fallback_rungs import CAUSES
from dispatcher.service.local_worker import LocalWorker
from trefoil.core.demand import LoadWindow, StreamCounts
from trefoil.core.errors import StartError
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import Histogram, bucket_middle_ms
from trefoil.runtime import rpc
from trefoil.runtime.service import probed
from trefoil.runtime.telemetry import Metrics

BY_SLICE: Final = (
    "trefoil_in_flight_requests", "trefoil_open_sequences", "trefoil_credits", "trefoil_slice_ejected"
)  # fmt: skip


class DispatcherMetrics:
    """Metrics of one worker, filled from its load windows twice a second."""

    def __init__(self, local: LocalWorker, metrics: Metrics) -> None:
        self._local = local
        self._metrics = metrics
        self._slices: set[str] = set()
        self._counted: Counter[tuple[str, ...]] = Counter()  # what each counter with a total of its own has shown

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._metrics.set(name, value, **labels)

    def window(self, window: LoadWindow) -> None:
        """Add one window, and show how things stand."""
        self._metrics.simulated = self._local.routing.simulated()
        for cell in window.cells:
            family, variant = cell.key.family, cell.key.variant
            if cell.answered:
                self._metrics.inc("trefoil_requests_total", cell.answered, family=family, code="OK")
                self._metrics.inc("trefoil_requests_within_slo_total", cell.within_slo, family=family)
                self._metrics.inc("trefoil_requests_served_total", cell.answered, family=family, variant=variant)
                self._metrics.inc("trefoil_items_total", cell.items, family=family)
            if cell.tokens_out:
                self._metrics.inc("trefoil_tokens_total", cell.tokens_out, family=family, variant=variant)
            if cell.unanswered:
                self._metrics.inc("trefoil_requests_unanswered_total", cell.unanswered, family=family, variant=variant)
            for code, count in cell.failed_by_code.items():
                self._metrics.inc("trefoil_requests_total", count, family=family, code=code)
            if cell.streams:
                self._streams(cell.streams, family, variant)
            self._observe("trefoil_request_duration_seconds", cell.latency, family=family)
            self._observe("trefoil_queue_duration_seconds", cell.queue, family=family)
            self._observe("trefoil_service_duration_seconds", cell.service, family=family, variant=variant)
        refused = self._local.budgets.refused
        for (tenant, family), count in refused.items():
            self._metrics.inc("trefoil_budget_refusals_total", count, tenant=tenant, family=family)
        refused.clear()
        self._state()

    def _streams(self, streams: StreamCounts, family: str, variant: str) -> None:
        if streams.tokens_in:
            self._metrics.inc("trefoil_prompt_tokens_total", streams.tokens_in, family=family, variant=variant)
        for objective, asked, within in (
            ("ttft", streams.ttft_asked, streams.ttft_within),
            ("tpot", streams.tpot_asked, streams.tpot_within),
        ):
            if asked:
                labels = {"family": family, "objective": objective}
                self._metrics.inc("trefoil_token_slo_streams_total", asked, **labels)
                self._metrics.inc("trefoil_token_slo_within_total", within, **labels)
        self._observe("trefoil_ttft_seconds", streams.ttft, family=family)
        self._observe("trefoil_tpot_seconds", streams.tpot, family=family, variant=variant)

    def _observe(self, name: str, histogram: Histogram, **labels: str) -> None:
        if not histogram.total:
            return
        child = self._metrics.bind(name, **labels)
        for index, count in zip(histogram.index, histogram.count, strict=True):
            self._metrics.observe_times(child, bucket_middle_ms(index) / 1e3, count)

    def _state(self) -> None:
        metrics, local = self._metrics, self._local
        metrics.set("trefoil_table_revision_epoch", local.routing.table.revision.epoch)
        metrics.set("trefoil_table_revision_number", local.routing.table.revision.number)
        for family, queue in local.routing.queues.items():
            waiting, waiting_bytes = queue.waiting_of(family)
            metrics.set("trefoil_queue_requests", waiting, family=family)
            metrics.set("trefoil_queue_bytes", waiting_bytes, family=family)
        metrics.set("trefoil_open_streams", local.accounting.open_streams)
        metrics.set("trefoil_workers", len(local.routing.membership.sharers))
        for family, count in local.accounting.forwarded_total.items():
            self._raise("trefoil_requests_forwarded_total", count, family=family)
        for (family, zone, outcome), count in local.accounting.zone_total.items():
            self._raise("trefoil_zone_requests_total", count, family=family, zone=zone, outcome=outcome)
        credits = Counter[SliceKey]()
        for route in local.routing.table.routes.values():
            credits.update({t.slice: t.credits for t in route.targets})
        names = set()
        for key, loads in groupby(local.routing.loads(), key=attrgetter("slice")):  # a family each
            name, of_families = key.name, list(loads)
            names.add(name)
            metrics.set("trefoil_in_flight_requests", sum(load.in_flight for load in of_families), slice=name)
            metrics.set("trefoil_open_sequences", sum(load.open_sequences for load in of_families), slice=name)
            metrics.set("trefoil_credits", credits[key], slice=name)
            metrics.set("trefoil_slice_ejected", any(load.ejected for load in of_families), slice=name)
        for name in self._slices - names:
            for metric in BY_SLICE:
                metrics.drop(metric, name)
        self._slices = names
        for cause in CAUSES:
            metrics.set("trefoil_dispatcher_rung", cause in local.active_rungs, cause=cause)
        for (family, outcome), count in local.accounting.retries_total.items():
            self._raise("trefoil_retries_total", count, family=family, outcome=outcome)
        for outcome, count in local.lengths.total.items():
            self._raise("trefoil_length_predictions_total", count, outcome=outcome)
        for (slice_, cause), count in local.health.kept_total.items():
            self._raise("trefoil_outliers_kept_total", count, slice=slice_.name, cause=cause)
        for (slice_, cause), count in local.health.ejected_total.items():
            self._raise("trefoil_ejections_total", count, slice=slice_.name, cause=cause)

    def _raise(self, name: str, total: int, **labels: str) -> None:
        shown = (name, *labels.values())
        if more := total - self._counted[shown]:
            self._metrics.inc(name, more, **labels)
            self._counted[shown] = total


REQUEST_BYTES_MAX: Final = 65536
ASK_TIMEOUT_S: Final = 5.0
_SAMPLE: Final = re.compile(rb"^([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")
TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class ExpositionComponent:
    """Metrics endpoint of all workers, with probes as `MetricsComponent` has them, a part of the service; every worker
    listens on the same port. An empty address means none."""

    def __init__(self, address: str, text: Callable[[], Awaitable[bytes]], not_ready: Callable[[], str]) -> None:
        self._address = address
        self._text = text
        self._not_ready = not_ready
        self._server: asyncio.Server | None = None

    async def init(self) -> None:
        """Listen on the metrics port; raises StartError."""
        if not self._address:
            return
        host, port = rpc.split_address(self._address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, reuse_port=True, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            remedy = "set another metrics_address"
            raise StartError(
                f"cannot listen ({error})", field="metrics_address", value=self._address, remedy=remedy
            ) from error

    async def run(self) -> None:
        """Serve until cancelled."""
        await asyncio.Event().wait()

    async def shutdown(self) -> None:
        """Close the metrics port."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                method, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b" ")
                path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
                code, text = probed(path, 0.0, self._not_ready) or (200, "")
                body = text.encode() or await self._text()
                head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                writer.write(head % (code, HTTPStatus(code).phrase.encode(), TYPE, len(body)))
                writer.write(b"" if method == b"HEAD" else body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the caller has gone, or was not an HTTP client
        finally:
            writer.close()


def exposition(texts: Mapping[int, bytes]) -> bytes:
    """Texts of several workers as one: every sample labelled, the samples of a metric together."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for worker, text in sorted(texts.items()):
        label = b'worker="%d"' % worker
        name = b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                _, kind, name, *_ = line.split(b" ", 3)
                if line not in heads.setdefault(name, []) and kind in (b"HELP", b"TYPE"):
                    heads[name].append(line)
            elif (found := _SAMPLE.match(line)) is not None:
                rest = line[found.end() :]
                labelled = b"{" + label + (b"," if rest[:1] != b"}" else b"") + rest if found[2] else b""
                samples.setdefault(name, []).append(found[1] + (labelled or b"{" + label + b"}" + rest))
    return b"".join(line + b"\n" for name in heads for line in (*heads[name], *samples.get(name, ())))
