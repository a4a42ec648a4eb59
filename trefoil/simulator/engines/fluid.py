"""The fluid engine: no single requests. Per step, latency from core/queueing, energy from what was served.

Data: mean arrivals of the step, the classes of `dispatcher.routers.weighted` with their slices, their truth.
Formulation: a router's part says by which law it splits a flow. "shares" (`weighted`): class k gets its share; it is a
    pool of c_k equal servers, its latency the law of core/queueing at its utilisation. "pool" (`fifo`): one pool; slice
    s answers mu_s g / (mu_s + g), g such that the sum is the flow. An idle slice is as likely as another to be next;
    g -> infinity at saturation. Waits are those of the pool's mean server. Flow above capacity queues up to the route's
    bound and is refused beyond. A queued request waits for what was ahead of it.
Deviations from request by request: a step is in equilibrium (no memory but the backlog). Utilisation is rounded to
    1/100 (1/1000 above 0.9) so that laws are computed once. tests/simulation compares both fidelities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np

from dispatcher.routers import ROUTERS
from dispatcher.routers.weighted import group_equal_targets
from trefoil.core.device_types import slice_cores
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import BUCKETS, FLOOR_MS, PER_OCTAVE
from trefoil.core.parts import Kind, find
from trefoil.core.plan import Route
from trefoil.core.queueing import UTILISATIONS, ServiceTime, within, within_all
from trefoil.simulator.books.intervals import Answers, Counts, Interval
from trefoil.simulator.engines.engine import Flow, Services, SliceService, dispatchable

QUEUE_MAX: Final = 1024.0  # as dispatcher.queues.fifo.REQUESTS_MAX, where the route names no bound
NO_SLICE_WAIT_S: Final = 20.0
LATE: Final = np.linspace(0.05, 0.95, 10)  # of a backlog, at which those who queued are looked at


@dataclass(slots=True)
class Pool:
    """Slices behind one queue. `limits`: what each answers at most [1/s]; `share` of the family's flow."""

    share: float
    keys: list[SliceKey] = field(default_factory=list)
    services: list[SliceService] = field(default_factory=list)
    credits: list[int] = field(default_factory=list)
    queued: float = 0.0
    limits: Counts = field(init=False)
    capacity: float = field(init=False)
    servers: int = field(init=False)
    equal: bool = field(init=False)
    equal_slices: list[tuple[int, ServiceTime, list[int]]] = field(init=False)
    """Slices of one service and credit: the first of them, for how long a request takes each, and all."""

    def __post_init__(self) -> None:
        found: dict[tuple[SliceService, int], list[int]] = {}
        for i, kind in enumerate(zip(self.services, self.credits, strict=True)):
            found.setdefault(kind, []).append(i)
        self.equal_slices, limits = [], dict[int, float]()
        for (one, credits), indices in found.items():
            occupied = _occupied(one, credits)
            self.equal_slices.append((indices[0], occupied, indices))
            limits |= dict.fromkeys(indices, 1e3 * one.instances / occupied.mean_ms)
        self.limits = np.array([limits[i] for i in range(len(self.keys))])
        self.capacity = float(self.limits.sum())
        self.servers = sum([one.instances for one in self.services])
        self.equal = bool(limits) and max(limits.values()) - min(limits.values()) < 1e-9 * self.capacity

    def hidden_ms(self, index: int) -> float:
        """Time of the way there and back that does not take the slice [ms]."""
        return self.services[index].gap_ms if self.credits[index] > self.services[index].instances else 0.0


def _occupied(one: SliceService, credits: int) -> ServiceTime:
    """Time for which a request takes a slice: with one credit, also while it is on its way."""
    gap_ms = one.gap_ms if credits <= one.instances else 0.0
    mean_ms = one.service.mean_ms + gap_ms
    return ServiceTime(mean_ms, one.service.cv * one.service.mean_ms / mean_ms)


class FluidEngine:
    """Fluid engine of one family."""

    def __init__(
        self,
        family: str,
        flow: Flow,
        overhead_ms: float,
        now_s: float,
        gap_scv: float = 1.0,
        router: str = "",
    ) -> None:
        self.families: tuple[str, ...] = (family,)
        self.plays_stages = False
        self._family, self._router = family, router
        self._source, self._slo_ms, self._overhead_ms, self._now_s = flow.source, flow.slo_ms, overhead_ms, now_s
        self._gap_scv = max(1.0, gap_scv)
        self._pools: list[Pool] = []
        self._queue_max = QUEUE_MAX
        self._waiting = 0.0  # while no slice serves
        self._steady: dict[tuple[float, float], Interval] = {}  # by rate and length, under the present route
        self._unserved_s = 0.0
        self._installed: tuple[Route, list[SliceService]] | None = None

    def set_routes(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Set route and services from now on; who waits is shared out again."""
        self._install(dispatchable(routes[self._family], services[self._family], self._router), services[self._family])

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Ignore the carbon ratio: a flow has no router to tell."""

    def _install(self, wanted: Route, services: Services) -> None:
        waiting = sum(p.queued for p in self._pools) + self._waiting
        known = [services[t.slice] for t in wanted.targets]
        if waiting == 0.0 and (wanted, known) == self._installed:
            return  # what is served as before has its laws already
        self._installed = wanted, known
        shares = find(Kind.ROUTER, wanted.router, ROUTERS).traits.flow == "shares"
        total = sum(t.weight for t in wanted.targets)
        groups = [list(wanted.targets)] if wanted.targets else []
        if shares:
            kinds = group_equal_targets(t for t in wanted.targets if t.weight > 0 or total <= 0)
            groups = [group for kind in kinds.values() for group in kind]
        pools = []
        for group in groups:
            share = sum(t.weight / total if total > 0 else 1 / len(wanted.targets) for t in group)
            keys = [t.slice for t in group]
            credits = [t.credits for t in group]
            pools.append(Pool(share if shares else 1.0, keys, [services[key] for key in keys], credits))
        self._pools, self._steady = pools, {}
        for pool in self._pools:
            pool.queued = waiting * pool.share
        self._waiting = 0.0 if self._pools else waiting
        self._unserved_s = self._unserved_s if not self._pools else 0.0
        self._queue_max = float(wanted.queue_requests_max or QUEUE_MAX)

    def serve(self, until_s: float) -> dict[str, Interval]:
        """Serve one step, or the part of one up to an event."""
        return {self._family: self._step(until_s)}

    def _step(self, until_s: float) -> Interval:
        starts_s, dt_s = self._now_s, until_s - self._now_s
        if dt_s <= 0:
            return Interval(starts_s, until_s)
        self._now_s = until_s
        rate = round(self._source.mean_per_s(starts_s, until_s), 9)  # equal flows shall be equal
        steady = bool(self._pools) and not any(p.queued for p in self._pools)
        if steady and (known := self._steady.get((rate, dt_s))) is not None:
            return replace(known, starts_s=starts_s, ends_s=until_s)
        found = Interval(starts_s, until_s, arrived=rate * dt_s)
        if not self._pools:
            self._hold_unserved(found, dt_s)
        for pool in self._pools:
            self._serve_pool(pool, rate * pool.share, dt_s, found)
        found.queued = sum(p.queued for p in self._pools) + self._waiting
        if steady and found.queued == 0:
            self._steady[rate, dt_s] = found
        return found

    def _hold_unserved(self, found: Interval, dt_s: float) -> None:
        """Queue requests while no slice serves; after a while they fail."""
        self._unserved_s += dt_s
        self._waiting += found.arrived
        limit = 0.0 if self._unserved_s > NO_SLICE_WAIT_S else self._queue_max
        found.rejected = max(0.0, self._waiting - limit)
        self._waiting -= found.rejected

    def _serve_pool(self, pool: Pool, rate: float, dt_s: float, found: Interval) -> None:
        limits, capacity = pool.limits, pool.capacity
        queued, work = pool.queued, rate * dt_s
        served = min(queued + work, capacity * dt_s)
        left = queued + work - served
        refused = max(0.0, left - self._queue_max * max(pool.share, 1 / 8))
        pool.queued = left - refused
        found.rejected += refused
        answered = served
        if answered <= 0:
            return
        each = answered / dt_s
        even = pool.equal and each < capacity * (1 - 1e-9)
        flows = [each / limits.size] * limits.size if even else _rate_per_slice(limits, each).tolist()
        overloaded = left > 1e-6 * max(1.0, work)
        late = 1.0 if overloaded else min(1.0, queued / answered)  # share of the answers that had to queue up
        utilisation = _rounded_utilisation(min(answered / dt_s / capacity, UTILISATIONS[-1]))
        mean = ServiceTime(1e3 * pool.servers / capacity, pool.equal_slices[0][1].cv)
        counts = [flow * dt_s for flow in flows]
        for key, count, service in zip(pool.keys, counts, pool.services, strict=True):
            found.joules[key] = found.joules.get(key, 0.0) + count * service.energy_j
            found.by_device[key.device] = found.by_device.get(key.device, 0.0) + count
            if slice_cores(key.slice_type):
                found.computed_s[key, service.variant] = count * service.service.mean_ms / 1e3
        for i, occupied, indices in pool.equal_slices:
            service, keys = pool.services[i], [pool.keys[index] for index in indices]
            count = sum([counts[index] for index in indices])
            found.by_variant[service.variant] = found.by_variant.get(service.variant, 0.0) + count
            found.accuracy_sum += count * service.accuracy
            found.answered += count
            extra_ms = pool.hidden_ms(i) + self._overhead_ms
            # A slower slice than the pool's mean adds its own excess to what the mean server's law says.
            law = mean if len(pool.equal_slices) > 1 else occupied
            shift_ms = extra_ms + occupied.mean_ms - law.mean_ms
            if late < 1:
                spread = _client_latency(law, utilisation, pool.servers, self._gap_scv, shift_ms, self._slo_ms)
                add_answers(found, spread, count * (1 - late), keys)
            if late > 0:
                waits_s = (queued + LATE * (left - queued if overloaded else -queued)) / capacity
                latency_ms = np.maximum(0.0, waits_s) * 1e3 + occupied.mean_ms + extra_ms
                spread = answers_at(latency_ms, np.full(LATE.size, 1 / LATE.size), self._slo_ms)
                add_answers(found, spread, count * late, keys)


def answers_at(at_ms: Counts, shares: Counts, slo_ms: float) -> Answers:
    """Distribution of answers at these latencies [ms], ascending, with these shares."""
    latency_ms = np.maximum(FLOOR_MS, at_ms)
    index = np.minimum((np.log2(latency_ms / FLOOR_MS) * PER_OCTAVE).astype(np.int64), BUCKETS - 1)
    buckets = np.asarray(np.bincount(index, weights=shares, minlength=BUCKETS), dtype=np.float64)
    within = float(shares[latency_ms <= slo_ms].sum())
    return Answers(buckets, within, float(np.dot(latency_ms, shares)), float(latency_ms[-1]))


def add_answers(found: Interval, spread: Answers, count: float, keys: Sequence[SliceKey]) -> None:
    """Add so many answers of a distribution, spread over equal slices."""
    for key in keys:
        found.spread_by.setdefault(key, []).append((spread, count / len(keys)))
    found.latency += spread.buckets * count
    found.within_slo += count * spread.within_slo
    found.sum_ms += count * spread.mean_ms
    found.max_ms = max(found.max_ms, spread.max_ms)


def _rate_per_slice(limits: Counts, rate: float) -> Counts:
    """What each slice of a pool answers [1/s]; equal slices answer alike."""
    total = float(limits.sum())
    if rate >= total * (1 - 1e-9):
        return limits
    if float(np.ptp(limits)) < 1e-9 * total:
        return np.full(limits.size, rate / limits.size)
    low, high = 0.0, float(limits.max()) * rate / (total - rate)
    while float((limits * high / (limits + high)).sum()) < rate:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float((limits * middle / (limits + middle)).sum()) < rate else (low, middle)
    found = limits * high / (limits + high)
    return np.asarray(found * rate / found.sum())


def _rounded_utilisation(utilisation: float) -> float:
    step = 0.01 if utilisation < 0.9 else 0.001
    return min(max(UTILISATIONS[0], round(utilisation / step) * step), UTILISATIONS[-1])


@lru_cache(maxsize=8192)
def _client_latency(
    service: ServiceTime, utilisation: float, servers: int, gap_scv: float, shift_ms: float, slo_ms: float
) -> Answers:
    """Latency that clients see of a pool: its law, and what does not take the slice."""
    at_ms, shares = _latency_law(service, utilisation, servers, gap_scv)
    return answers_at(at_ms + shift_ms, shares, slo_ms)


@lru_cache(maxsize=8192)
def _latency_law(service: ServiceTime, utilisation: float, servers: int, gap_scv: float) -> tuple[Counts, Counts]:
    """Latencies [ms], ascending, and the share of requests at each."""
    low = max(0.0, service.mean_ms * (1 - 4 * service.cv))
    top = service.mean_ms * 1.5
    while within(service, top, utilisation, gap_scv, servers) < 0.9995 and top < 1e6 * service.mean_ms:
        top *= 1.5
    edges = low + (top - low) * np.linspace(0.0, 1.0, 97) ** 2
    cdf = within_all(service, edges, utilisation, gap_scv, servers)
    shares = np.diff(np.maximum.accumulate(np.clip(cdf, 0.0, 1.0)))
    total = float(shares.sum())
    return (edges[1:] + edges[:-1]) / 2, shares / total
