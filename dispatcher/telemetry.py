"""Metrics of the dispatcher, from its load windows: the hot path touches none of them."""

from collections import Counter
from typing import Final

from dispatcher.core.rungs import CAUSES
from dispatcher.hub import Hub
from trefoil.core.demand import LoadWindow
from trefoil.core.latency import Histogram, bucket_middle_ms
from trefoil.runtime.telemetry import Metrics

BY_SLICE: Final = (
    "trefoil_in_flight_requests", "trefoil_open_sequences", "trefoil_credits", "trefoil_slice_ejected"
)  # fmt: skip


class Gauges:
    """Fills the process's metrics; called twice a second."""

    def __init__(self, hub: Hub, metrics: Metrics) -> None:
        self._hub = hub
        self._metrics = metrics
        self._slices: set[str] = set()
        self._ejections: dict[tuple[str, str], int] = {}
        self._retries: Counter[tuple[str, str]] = Counter()
        self._kept: Counter[tuple[str, str]] = Counter()
        self._forwarded: Counter[str] = Counter()

    def window(self, window: LoadWindow) -> None:
        """Add one window, and show how things stand."""
        self._metrics.simulated = self._hub.simulated()
        for cell in window.cells:
            family, variant = cell.key.family, cell.key.variant
            if cell.answered:
                self._metrics.inc("trefoil_requests_total", cell.answered, family=family, code="OK")
                self._metrics.inc("trefoil_requests_within_slo_total", cell.within_slo, family=family)
                self._metrics.inc("trefoil_requests_served_total", cell.answered, family=family, variant=variant)
                self._metrics.inc("trefoil_items_total", cell.items, family=family)
            for code, count in cell.failed_by_code.items():
                self._metrics.inc("trefoil_requests_total", count, family=family, code=code)
            self._observe("trefoil_request_duration_seconds", cell.latency, family=family)
            self._observe("trefoil_queue_duration_seconds", cell.queue, family=family)
            self._observe("trefoil_service_duration_seconds", cell.service, family=family, variant=variant)
        self._state()

    def _observe(self, name: str, histogram: Histogram, **labels: str) -> None:
        if not histogram.total:
            return
        child = self._metrics.bind(name, **labels)
        for index, count in zip(histogram.index, histogram.count, strict=True):
            self._metrics.observe_times(child, bucket_middle_ms(index) / 1e3, count)

    def _state(self) -> None:
        metrics, hub = self._metrics, self._hub
        metrics.set("trefoil_table_revision_epoch", hub.table.revision.epoch)
        metrics.set("trefoil_table_revision_number", hub.table.revision.number)
        for family, pump in hub.pumps.items():
            waiting, waiting_bytes = pump.waiting_of(family)
            metrics.set("trefoil_queue_requests", waiting, family=family)
            metrics.set("trefoil_queue_bytes", waiting_bytes, family=family)
        metrics.set("trefoil_open_streams", hub.open_streams)
        metrics.set("trefoil_workers", len(hub.crew.sharers))
        for family, count in hub.forwarded_total.items():
            if more := count - self._forwarded[family]:
                metrics.inc("trefoil_requests_forwarded_total", more, family=family)
                self._forwarded[family] = count
        credits = {t.slice: t.credits for route in hub.table.routes.values() for t in route.targets}
        names = set()
        for load in hub.loads():
            name = load.slice.name
            names.add(name)
            metrics.set("trefoil_in_flight_requests", load.in_flight, slice=name)
            metrics.set("trefoil_open_sequences", load.open_sequences, slice=name)
            metrics.set("trefoil_credits", credits.get(load.slice, 0), slice=name)
            metrics.set("trefoil_slice_ejected", load.ejected, slice=name)
        for name in self._slices - names:
            for metric in BY_SLICE:
                metrics.drop(metric, name)
        self._slices = names
        for cause in CAUSES:
            metrics.set("trefoil_dispatcher_rung", cause in hub.rungs, cause=cause)
        for (family, outcome), count in hub.retries_total.items():
            if more := count - self._retries[family, outcome]:
                metrics.inc("trefoil_retries_total", more, family=family, outcome=outcome)
                self._retries[family, outcome] = count
        for (slice_, cause), count in hub.kept_total.items():
            if more := count - self._kept[slice_.name, cause]:
                metrics.inc("trefoil_outliers_kept_total", more, slice=slice_.name, cause=cause)
                self._kept[slice_.name, cause] = count
        for (slice_, cause), count in hub.ejected_total.items():
            known = self._ejections.get((slice_.name, cause), 0)
            if count > known:
                metrics.inc("trefoil_ejections_total", count - known, slice=slice_.name, cause=cause)
                self._ejections[slice_.name, cause] = count
