"""One interval of one family, whatever the fidelity: what came, what was answered how fast, and what computed.

`Interval` is what both engines give; `RequestEngine` wraps the request-level engine. Latencies are counts in the
buckets of core/latency from the start, so that a long run needs no more memory than a short one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from trefoil.core.demand import LoadCell, LoadKey
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import BUCKETS, FLOOR_MS, PER_OCTAVE, Histogram
from trefoil.core.plan import Route
from trefoil.simulator.arrivals import ArrivalSource
from trefoil.simulator.request_level import RequestLevel, Services, SliceService, Window

Counts = npt.NDArray[np.float64]


@dataclass(slots=True)
class Interval:
    """What happened to a family in [starts_s, ends_s). Fluid counts may be fractions.

    `joules` are active, by the profile's linear law; `by_variant` counts answers, `accuracy_sum` adds theirs.
    """

    starts_s: float
    ends_s: float
    arrived: float = 0.0
    answered: float = 0.0
    rejected: float = 0.0
    within_slo: float = 0.0
    accuracy_sum: float = 0.0
    latency: Counts = field(default_factory=lambda: np.zeros(BUCKETS))
    sum_ms: float = 0.0
    max_ms: float = 0.0
    joules: dict[SliceKey, float] = field(default_factory=dict)
    by_variant: dict[str, float] = field(default_factory=dict)
    queued: float = 0.0

    def add(self, other: "Interval") -> None:
        """Go on with the interval that follows. `joules` stay those of the first: they are booked by interval."""
        self.ends_s, self.queued = other.ends_s, other.queued
        self.arrived += other.arrived
        self.answered += other.answered
        self.rejected += other.rejected
        self.within_slo += other.within_slo
        self.accuracy_sum += other.accuracy_sum
        self.latency += other.latency
        self.sum_ms += other.sum_ms
        self.max_ms = max(self.max_ms, other.max_ms)
        for variant, count in other.by_variant.items():
            self.by_variant[variant] = self.by_variant.get(variant, 0.0) + count

    def at(self, starts_s: float, ends_s: float) -> "Interval":
        """The same at another time; counts are shared: neither is to be added to."""
        return Interval(
            starts_s,
            ends_s,
            self.arrived,
            self.answered,
            self.rejected,
            self.within_slo,
            self.accuracy_sum,
            self.latency,
            self.sum_ms,
            self.max_ms,
            self.joules,
            self.by_variant,
            self.queued,
        )

    @property
    def histogram(self) -> Histogram:
        """The latencies as core/latency knows them (whole counts)."""
        whole = np.rint(self.latency).astype(np.int64)
        index = np.flatnonzero(whole)
        return Histogram(1, tuple(index.tolist()), tuple(whole[index].tolist()), self.sum_ms, self.max_ms)


class Engine(Protocol):
    """One family in simulated time, or several behind one router. Routes and services are given by family."""

    families: tuple[str, ...]

    def retable(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None: ...
    def on_carbon(self, ratio: float | None, now_s: float) -> None: ...
    def serve(self, until_s: float) -> Mapping[str, Interval]: ...


@dataclass(frozen=True, slots=True)
class Flow:
    """What an engine must know of a family: when its requests come, and when they are late."""

    source: ArrivalSource
    slo_ms: float


def joined(parts: Sequence[Interval], now_s: float) -> Interval:
    """One interval after the other as one; what happened while there was none is nothing."""
    if len(parts) == 1:
        return parts[0]
    whole = Interval(now_s, now_s) if not parts else Interval(parts[0].starts_s, now_s)
    for part in parts:
        whole.add(part)
    return whole


def load_cells(found: Mapping[str, Interval], items: Mapping[str, float]) -> tuple[LoadCell, ...]:
    """What a dispatcher would report of these intervals, in whole requests."""
    cells: list[LoadCell] = []
    for family, one in sorted(found.items()):
        failed = {"RESOURCE_EXHAUSTED": round(one.rejected)} if one.rejected else {}
        within, latency = round(one.within_slo), one.histogram
        cells.append(
            LoadCell(
                LoadKey(family), round(one.arrived), failed_by_code=failed, within_slo=within, latency=latency
            )
        )  # fmt: skip
        for variant, count in sorted(one.by_variant.items()):
            whole = round(count)
            cells.append(LoadCell(LoadKey(family, variant), answered=whole, items=round(whole * items[family])))
    return tuple(cells)


def live(route: Route, services: Services, router: str = "", queue: str = "") -> Route:
    """What a dispatcher routes by: targets that serve and do not drain; `router`, `queue` over those of the route."""
    targets = tuple(t for t in route.targets if not t.draining and t.slice in services)
    return replace(route, targets=targets, router=router or route.router, queue=queue or route.queue)


def quantile_ms(counts: Counts, q: float, max_ms: float = math.inf) -> float:
    """The q-quantile of counts in latency buckets [ms]; 0.0 for none."""
    total = float(counts.sum())
    if total <= 0:
        return 0.0
    bucket = int(np.searchsorted(np.cumsum(counts), q * total - 1e-9))
    return min(float(FLOOR_MS * 2 ** ((min(bucket, BUCKETS - 1) + 0.5) / PER_OCTAVE)), max_ms)


def counted(latency_ms: npt.NDArray[np.float64]) -> Counts:
    """Latencies in buckets."""
    if not latency_ms.size:
        return np.zeros(BUCKETS)
    index = (np.log2(np.maximum(latency_ms, FLOOR_MS) / FLOOR_MS) * PER_OCTAVE).astype(np.int64)
    return np.bincount(np.minimum(index, BUCKETS - 1), minlength=BUCKETS).astype(np.float64)


class RequestEngine:
    """Requests one by one, through the live queue and router. `router` and `queue` instead of the plan's."""

    def __init__(
        self,
        flows: Mapping[str, Flow],
        rng: Generator,
        overhead_ms: float,
        now_s: float,
        router: str = "",
        queue: str = "",
    ) -> None:
        self.families = tuple(flows)
        self._flows, self._router, self._queue = flows, router, queue
        self._services: dict[str, dict[SliceKey, SliceService]] = {family: {} for family in flows}
        nowhere = {family: Route(family, router or "fifo", queue or "fifo") for family in flows}
        slo_ms = {family: flow.slo_ms for family, flow in flows.items()}
        self._engine = RequestLevel(nowhere, self._services, rng, overhead_ms, start_s=now_s, slo_ms=slo_ms)

    def retable(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Route by these tables from now on."""
        for family, given in services.items():
            self._services[family] |= given
        serving = {family: live(route, services[family], self._router, self._queue) for family, route in routes.items()}
        self._engine.retable(now_s, serving, services)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Carbon against its mean from now on; None = not known."""
        self._engine.on_carbon(ratio, now_s)

    def serve(self, until_s: float) -> dict[str, Interval]:
        """Everything up to a time."""
        arrivals_s = {family: flow.source.until(until_s) for family, flow in self._flows.items()}
        windows = self._engine.serve(arrivals_s, until_s)
        return {family: self._interval(family, window) for family, window in windows.items()}

    def _interval(self, family: str, window: Window) -> Interval:
        interval = Interval(
            window.starts_s,
            window.ends_s,
            window.arrived,
            window.answered,
            window.rejected,
            float(np.count_nonzero(window.latency_ms <= self._flows[family].slo_ms)),
            latency=counted(window.latency_ms),
            sum_ms=float(window.latency_ms.sum()),
            max_ms=float(window.latency_ms.max(initial=0.0)),
            queued=window.queued,
        )
        for key, busy_s in window.busy_s.items():
            service = self._services[family][key]
            if busy_s > 0:
                interval.joules[key] = busy_s * 1e3 / service.service.mean_ms * service.energy_j
            count = window.answered_by.get(key, 0)
            if count:
                interval.by_variant[service.variant] = interval.by_variant.get(service.variant, 0.0) + count
                interval.accuracy_sum += count * service.accuracy
        return interval
