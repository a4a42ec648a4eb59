"""Engine of requests one by one: what stands between the kernels and the simulation."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.random import Generator

from trefoil.core.device_types import slice_cores
from trefoil.core.fleet import SliceKey, family_of
from trefoil.core.plan import Route
from trefoil.simulator.books.intervals import Interval, histogram_of
from trefoil.simulator.engines.engine import Flow, Services, SliceService, dispatchable
from trefoil.simulator.engines.request_level import FamilyWindow, RequestLevel
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
        self.plays_stages = shares and not grouped
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
        for model, given in services.items():
            self._services.setdefault(model, {}).update(given)
        serving = {
            model: dispatchable(route, services.get(model, {}), self._router, self._queue)
            for model, route in routes.items()
        }
        self._level.set_routes(now_s, serving, services)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Set the carbon ratio, intensity over its mean, from now on; None = not known."""
        self._level.on_carbon(ratio, now_s)

    def serve(self, until_s: float) -> dict[str, Interval]:
        """Intervals of everything up to a time."""
        arrivals_s = {family: flow.source.until(until_s) for family, flow in self._flows.items()}
        windows = self._level.serve(arrivals_s, until_s)
        by_family: dict[str, dict[str, FamilyWindow]] = {}
        for model, window in windows.items():
            by_family.setdefault(family_of(model), {})[model] = window
        return {family: self._interval(family, each) for family, each in by_family.items()}

    def _interval(self, family: str, windows: Mapping[str, FamilyWindow]) -> Interval:
        """Interval of a family by its window or, where it is split, those of its stages: the last one's are answers."""
        every = tuple(windows.values())
        latency_ms = every[0].latency_ms if len(every) == 1 else np.concatenate([one.latency_ms for one in every])
        interval = Interval(
            every[0].starts_s,
            every[0].ends_s,
            sum([one.arrived for one in every]),
            sum([one.answered for one in every]),
            sum([one.rejected for one in every]),
            float(np.count_nonzero(latency_ms <= self._flows[family].slo_ms)),
            latency=histogram_of(latency_ms),
            sum_ms=float(latency_ms.sum()),
            max_ms=float(latency_ms.max(initial=0.0)),
            queued=sum([one.queued for one in every]),
            latencies_ms=[latency_ms] if self._keeps_latencies else [],
            latency_s_by=every[0].latency_s_by if len(every) == 1 else _latencies_by(every),
        )
        for model, window in windows.items():
            self._add_work(interval, model, window)
        return interval

    def _add_work(self, interval: Interval, model: str, window: FamilyWindow) -> None:
        answered_by = window.answered_by
        for key, joules in window.joules.items():
            service = self._services[model][key]
            if joules > 0:
                interval.joules[key] = interval.joules.get(key, 0.0) + joules
            if slice_cores(key.slice_type):
                interval.computed_s[key, service.variant] = window.busy_s[key]
            count = answered_by.get(key, 0)
            if count:
                interval.by_variant[service.variant] = interval.by_variant.get(service.variant, 0.0) + count
                interval.by_device[key.device] = interval.by_device.get(key.device, 0.0) + count
                interval.accuracy_sum += count * service.accuracy


def _latencies_by(windows: Iterable[FamilyWindow]) -> dict[SliceKey, list[float]]:
    """Latencies by slice, of the whole also where an earlier stage was done."""
    found: dict[SliceKey, list[float]] = {}
    for one in windows:
        for key, seen in (*one.latency_s_by.items(), *one.passed_s_by.items()):
            found[key] = found.get(key, []) + seen
    return found
