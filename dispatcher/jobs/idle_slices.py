"""Idle slices for jobs, and whether a batch on one would delay interactive requests."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dispatcher.jobs.core.job import Job
from dispatcher.jobs.core.reserve import SHARE_MIN, Reserve, Waiting, allowed_share, expected_delayed
from dispatcher.routers import ROUTERS
from dispatcher.routing.core.membership import WorkerId
from dispatcher.service.local_worker import LocalWorker
from trefoil.core.demand import LoadWindow
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import EMPTY, Histogram, merge
from trefoil.core.parts import Kind, find
from trefoil.core.plan import RouteTarget

RATE_MEMORY_S: Final = 5.0
RATE_MIN_PER_S: Final = 0.01
LOOKED_S: Final = 1.0
LATENCIES_S: Final = 60.0
DELAYED_MIN: Final = 1e-6  # fewer are none
Size = tuple[int, float]
"""Rows of a batch, and how long it takes [s]."""


@dataclass(slots=True)
class _Arrivals:
    """Interactive arrivals at a worker by family; `at_s`: time of its last window, on the monotonic clock."""

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
        self._shares: dict[tuple[str, int], float] = {}
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
        self._shares.clear()
        keep = max(0.0, 1.0 - length_s / RATE_MEMORY_S)
        for family in {*arrivals.mean_per_s, *counts}:
            mean = arrivals.mean_per_s.get(family, 0.0) * keep + (1 - keep) * counts[family] / length_s
            arrivals.mean_per_s[family] = mean if mean > RATE_MIN_PER_S else 0.0
            arrivals.rate_per_s[family] = max(mean, counts[family] / length_s)  # a rise counts at once
            self._reserve.on_arrivals(family, mean * length_s, self._share(family, self._batch_s.get(family, 0.0)))

    def rate_per_s(self, family: str, others: bool = False) -> float:
        """Interactive arrivals of a family, at all workers or at the others."""
        rates = (
            each.rate_per_s.get(family, 0.0) for key, each in self._arrivals.items() if not (others and key == self._id)
        )
        return sum(rates)

    def _share(self, family: str, batch_s: float) -> float:
        """Share of its requests that batches of a length may delay, to the nearest eighth of an octave."""
        step = round(8 * math.log2(max(batch_s, 1e-6)))
        if (share := self._shares.get((family, step))) is None:
            known = self._latencies.get(family)
            share = SHARE_MIN if known is None else allowed_share(known.seen, 1e3 * 2 ** (step / 8))
            self._shares[family, step] = share
        return share

    def take(
        self, targets: Iterable[RouteTarget], sizes_of: Callable[[RouteTarget], Sequence[Size]]
    ) -> tuple[RouteTarget, int] | None:
        """Slice for a batch and its rows, charged to the requests that it may delay; None: none may start now. Of the
        sizes that a slice may have, that which answers most items for the requests that it delays."""
        if self._clock.monotonic_s() - self._since_s < LOOKED_S:
            return None
        busy = self._routing.in_flight()
        for target in targets:
            waiting = self._waiting(target, busy)

            def worth(size: Size, waiting: Sequence[Waiting] = waiting) -> float:
                rows, batch_s = size
                share = min((self._share(one.queue, batch_s) for one in waiting), default=1.0)
                return rows * share / max(_delayed(waiting, batch_s), DELAYED_MIN)

            rows, batch_s = max(sizes_of(target), key=worth)
            self._batch_s.update(dict.fromkeys((one.queue for one in waiting), batch_s))
            if self._reserve.try_start(waiting, batch_s):
                return target, rows
        return None

    def delayed(self, target: RouteTarget, batch_s: float) -> float:
        """Requests expected to come for a slice in a time, since they find no other one idle."""
        return _delayed(self._waiting(target, self._routing.in_flight()), batch_s)

    def idle(self, job: Job, busy: Collection[SliceKey]) -> list[RouteTarget]:
        """Slices that a job may have and that have nothing to do, for none of their families; the fewest joules an item
        first. `busy`: slices that are taken already, as `busy` has them."""
        found = [each for each in self.allowed(job) if each.slice not in busy and self._is_idle(each.slice)]
        return sorted(found, key=lambda target: self._joules(job.family, target))

    def allowed(self, job: Job) -> list[RouteTarget]:
        """Live slices that a job may have, of which this worker has credits."""
        return [each for each in self._routing.table.live(job.family) if each.credits > 0 and self._fits(job, each)]

    def elsewhere(self, job: Job) -> bool:
        """Whether other workers alone have credits of the live slices that a job may have."""
        table = self._routing.table
        planned, alive = table.planned.get(job.family), table.alive.get(job.family, ())
        return not self.allowed(job) and planned is not None and any(
            each.slice in alive and self._fits(job, each) for each in planned.targets
        )  # fmt: skip

    def _fits(self, job: Job, target: RouteTarget) -> bool:
        node = self._routing.nodes.get(target.slice.device.partition("/")[0])
        zone_fits = not job.zones or (node is not None and node.zone in job.zones)
        return not target.draining and target.accuracy >= job.min_accuracy and zone_fits

    def busy(self) -> set[SliceKey] | None:
        """Slices with requests in flight; None: no live slice is without."""
        found = {slice_ for slice_, count in self._routing.in_flight().items() if count}
        routes = self._routing.table.routes.values()
        return None if all(each.slice in found for route in routes for each in route.targets) else found

    def _is_idle(self, slice_: SliceKey) -> bool:
        queues = self._routing.queues
        return all(queues[family].is_idle(slice_) for family in self._routing.families_of(slice_))

    def _joules(self, family: str, target: RouteTarget) -> float:
        rate = self._receipts.rate(target.slice, family, target.variant)
        return rate.energy_j(1) if rate is not None else 0.0

    def _waiting(self, taken: RouteTarget, busy: Counter[SliceKey]) -> list[Waiting]:
        """Of each family that the slice serves: its arrivals, and the other slices that they would find idle. `busy`:
        requests in flight, by slice."""
        found = []
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


def _delayed(waiting: Sequence[Waiting], batch_s: float) -> float:
    return sum(expected_delayed(one.rate_per_s, batch_s, one.idle) for one in waiting)
