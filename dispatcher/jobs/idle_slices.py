"""Idle slices for jobs: which of a family are idle now, and whether a batch on one would delay interactive requests."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from dispatcher.jobs.core.job import Job
from dispatcher.jobs.core.reserve import SEEN_MIN, SHARE_MIN, Reserve, Waiting, allowed_share
from dispatcher.routers import ROUTERS
from dispatcher.routing.core.membership import WorkerId
from dispatcher.service.local_worker import LocalWorker
from trefoil.core.demand import LoadWindow
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import EMPTY, Histogram, merge, quantile_ms
from trefoil.core.parts import Kind, find
from trefoil.core.plan import RouteTarget

RATE_MEMORY_S: Final = 5.0
RATE_MIN_PER_S: Final = 0.01
LOOKED_S: Final = 1.0
LATENCIES_S: Final = 60.0


@dataclass(slots=True)
class _Arrivals:
    """Interactive arrivals at a worker by family; `at_s`: when it told last, on the monotonic clock."""

    at_s: float = 0.0
    mean_per_s: dict[str, float] = field(default_factory=dict)
    rate_per_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Latencies:
    """Latencies of the last LATENCIES_S to twice that."""

    since_s: float
    before: Histogram = EMPTY
    now: Histogram = EMPTY
    seen: Histogram = EMPTY

    def add(self, latency: Histogram, now_s: float) -> None:
        """Add those of a window."""
        if now_s - self.since_s > LATENCIES_S:
            self.since_s, self.before, self.now = now_s, self.now, EMPTY
        self.now = merge((self.now, latency))
        self.seen = merge((self.before, self.now))


class IdleSlices:
    """Idle slices of one worker, and the interactive arrivals of all workers, by their load windows. Belongs to one
    event loop."""

    def __init__(self, local: LocalWorker) -> None:
        self._routing, self._costs, self._clock, self._id = local.routing, local.costs, local.clock, local.id
        self._receipts = local.accounting.receipts
        self._reserve = Reserve()
        self._arrivals: dict[WorkerId, _Arrivals] = {}
        self._latencies: dict[str, _Latencies] = {}
        self._batch_s: dict[str, float] = {}  # by family: how long its last batch was expected to take
        self._since_s = math.inf  # when the first window came: before, nothing is known of the load

    def on_window(self, window: LoadWindow) -> None:
        """Count what has come to a worker in a window."""
        worker, now_s = (window.dispatcher, window.worker), self._clock.monotonic_s()
        self._since_s = min(self._since_s, now_s)
        self._arrivals = {key: each for key, each in self._arrivals.items() if now_s - each.at_s < RATE_MEMORY_S}
        arrivals = self._arrivals.setdefault(worker, _Arrivals())
        arrivals.at_s, length_s = now_s, max(1e-3, window.ends_at_s - window.starts_at_s)
        counts: Counter[str] = Counter()
        for cell in window.cells:
            family = self._routing.table.chains.get(cell.key.family, (cell.key.family,))[0]
            counts[family] += cell.arrived
            if cell.latency.total:
                self._latencies.setdefault(family, _Latencies(now_s)).add(cell.latency, now_s)
        keep = max(0.0, 1.0 - length_s / RATE_MEMORY_S)
        for family in {*arrivals.mean_per_s, *counts}:
            mean = arrivals.mean_per_s.get(family, 0.0) * keep + (1 - keep) * counts[family] / length_s
            arrivals.mean_per_s[family] = mean if mean > RATE_MIN_PER_S else 0.0
            arrivals.rate_per_s[family] = max(mean, counts[family] / length_s)  # a rise counts at once
            self._reserve.on_arrivals(family, mean * length_s, self._share(family))

    def rate_per_s(self, family: str, others: bool = False) -> float:
        """Interactive arrivals of a family, at all workers or at the others."""
        rates = (
            each.rate_per_s.get(family, 0.0) for key, each in self._arrivals.items() if not (others and key == self._id)
        )
        return sum(rates)

    def p95_s(self, family: str) -> float:
        """95th percentile of the latencies of late [s]; 0.0: too few are known."""
        known = self._latencies.get(family)
        return quantile_ms(known.seen, 0.95) / 1e3 if known is not None and known.seen.total >= SEEN_MIN else 0.0

    def _share(self, family: str) -> float:
        """Share of its requests that jobs may delay."""
        known, batch_s = self._latencies.get(family), self._batch_s.get(family)
        return SHARE_MIN if known is None or batch_s is None else allowed_share(known.seen, 1e3 * batch_s)

    def take(self, targets: Iterable[RouteTarget], batch_s: Callable[[RouteTarget], float]) -> RouteTarget | None:
        """Slice for a batch that takes so long there, charged to the requests that it may delay; None: none of them may
        be taken now."""
        if self._clock.monotonic_s() - self._since_s < LOOKED_S:
            return None
        for target in targets:
            waiting, length_s = self._waiting(target), batch_s(target)
            self._batch_s.update(dict.fromkeys((one.queue for one in waiting), length_s))
            if self._reserve.try_start(waiting, length_s):
                return target
        return None

    def idle(self, job: Job, busy: Collection[SliceKey]) -> list[RouteTarget]:
        """Slices that a job may have and that have nothing to do, for none of their families; the fewest joules an item
        first. `busy`: slices that are taken already."""
        in_flight = self._routing.in_flight()
        found = [
            target for target in self.allowed(job)
            if not in_flight[target.slice] and target.slice not in busy and self._is_idle(target.slice)
        ]  # fmt: skip
        return sorted(found, key=lambda target: self._joules(job.family, target))

    def allowed(self, job: Job) -> list[RouteTarget]:
        """Live slices that a job may have."""
        nodes = self._routing.nodes
        found = []
        for target in self._routing.table.live(job.family):
            node = nodes.get(target.slice.device.partition("/")[0])
            zone_fits = not job.zones or (node is not None and node.zone in job.zones)
            if target.credits > 0 and not target.draining and target.accuracy >= job.min_accuracy and zone_fits:
                found.append(target)
        return found

    def _is_idle(self, slice_: SliceKey) -> bool:
        queues = self._routing.queues
        return all(queues[family].is_idle(slice_) for family in self._routing.families_of(slice_))

    def _joules(self, family: str, target: RouteTarget) -> float:
        rate = self._receipts.rate(target.slice, family, target.variant)
        return rate.energy_j(1) if rate is not None else 0.0

    def _waiting(self, taken: RouteTarget) -> list[Waiting]:
        """Of each family that the slice serves: its arrivals, and the other slices that they would find idle."""
        found = []
        busy = self._routing.in_flight()
        for family in self._routing.families_of(taken.slice):
            live = self._routing.table.live(family)
            route = self._routing.table.routes[family]
            share = 1.0
            if not find(Kind.ROUTER, route.router, ROUTERS).traits.work_conserving:
                # Requests of one variant do not go to another one that is idle.
                variant = next((each.variant for each in live if each.slice == taken.slice), taken.variant)
                whole = sum(each.weight for each in live) or 1.0
                live = tuple(each for each in live if each.variant == variant)
                share = sum(each.weight for each in live) / whole
            idle = sum(not busy[each.slice] for each in live if each.slice != taken.slice)
            # Requests of other workers are on some of them, unseen from here: as many as come while one is served.
            idle -= math.ceil(share * self.rate_per_s(family, others=True) * self._costs.expected_s(family, 1))
            found.append(Waiting(family, share * self.rate_per_s(family), max(0, idle)))
        return found
