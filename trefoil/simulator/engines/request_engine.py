"""Engine of requests one by one: what stands between the kernels and the simulation."""

from collections.abc import Mapping

import numpy as np
from numpy.random import Generator

from trefoil.core.device_types import slice_cores
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route
from trefoil.simulator.books.intervals import Interval, histogram_of
from trefoil.simulator.engines.engine import Flow, Services, SliceService, dispatchable
from trefoil.simulator.engines.request_level import RequestLevel, Window
from trefoil.simulator.engines.shared_slices import SharedLevel


class RequestEngine:
    """Engine of requests one by one, through the live queue and router; `router` and `queue` instead of the plan's.

    `keeps_latencies`: intervals hold the latency of each answer, for exact quantiles. `shares`: the families may live
    on the same slices; `grouped`: one router has all of them.
    """

    def __init__(
        self,
        flows: Mapping[str, Flow],
        rng: Generator,
        overhead_ms: float,
        now_s: float,
        router: str = "",
        queue: str = "",
        keeps_latencies: bool = False,
        shares: bool = False,
        grouped: bool = False,
        interference: float | None = None,
    ) -> None:
        self.families, self._keeps_latencies = tuple(flows), keeps_latencies
        self._flows, self._router, self._queue = flows, router, queue
        self._services: dict[str, dict[SliceKey, SliceService]] = {family: {} for family in flows}
        nowhere = {family: Route(family, router or "fifo", queue or "fifo") for family in flows}
        self._level: RequestLevel | SharedLevel
        if shares:
            self._level = SharedLevel(
                nowhere,
                self._services,
                rng,
                flows,
                overhead_ms,
                start_s=now_s,
                grouped=grouped,
                interference=interference,
            )
        else:
            slo_ms = {family: flow.slo_ms for family, flow in flows.items()}
            told = {family: flow.confusion for family, flow in flows.items() if flow.confusion is not None}
            self._level = RequestLevel(
                nowhere, self._services, rng, overhead_ms, start_s=now_s, slo_ms=slo_ms, confusions=told
            )

    def set_routes(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Set the tables by which requests are routed from now on."""
        for family, given in services.items():
            self._services[family] |= given
        serving = {
            family: dispatchable(route, services[family], self._router, self._queue) for family, route in routes.items()
        }
        self._level.set_routes(now_s, serving, services)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Set the carbon ratio, intensity over its mean, from now on; None = not known."""
        self._level.on_carbon(ratio, now_s)

    def serve(self, until_s: float) -> dict[str, Interval]:
        """Intervals of everything up to a time."""
        arrivals_s = {family: flow.source.until(until_s) for family, flow in self._flows.items()}
        windows = self._level.serve(arrivals_s, until_s)
        return {family: self._interval(family, window) for family, window in windows.items()}

    def _interval(self, family: str, window: Window) -> Interval:
        interval = Interval(
            window.starts_s,
            window.ends_s,
            window.arrived,
            window.answered,
            window.rejected,
            float(np.count_nonzero(window.latency_ms <= self._flows[family].slo_ms)),
            latency=histogram_of(window.latency_ms),
            sum_ms=float(window.latency_ms.sum()),
            max_ms=float(window.latency_ms.max(initial=0.0)),
            queued=window.queued,
            latencies_ms=[window.latency_ms] if self._keeps_latencies else [],
            latency_s_by=window.latency_s_by,
        )
        answered_by = window.answered_by
        for key, joules in window.joules.items():
            service = self._services[family][key]
            if joules > 0:
                interval.joules[key] = joules
            if slice_cores(key.slice_type):
                interval.computed_s[key, service.variant] = window.busy_s[key]
            count = answered_by.get(key, 0)
            if count:
                interval.by_variant[service.variant] = interval.by_variant.get(service.variant, 0.0) + count
                interval.by_device[key.device] = interval.by_device.get(key.device, 0.0) + count
                interval.accuracy_sum += count * service.accuracy
        return interval
