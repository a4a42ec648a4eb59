"""The fluid engine of families that share slices: batches and contention in the mean, joules as request by request.

Data: mean arrivals of the step, each family's targets by weight, the operating points of each slice by batch.
Formulation: on a slice a family of rate r [requests/s] of i items is served in batches of b items. What gathers while
    a batch computes is the next one, b = max(i, r i t(b) s), up to the largest profiled; unbatched b = i.
    It computes for the part u = min(1, r i t(b) s / b) of the time. s = 1 + sum over the neighbours of u x (their
    stretch of it - 1), by trefoil/core/interference.py: both sides are iterated together. Joules are E(b) of as many
    batches. A request waits for what is left of the batch under way, which is there for the part u, and takes its own.
    Flow above what the largest batch serves queues up to the route's bound and is refused beyond.
Deviations from request by request: a step is in equilibrium (no memory but the backlog). Equal slices are not pooled,
    so that without batches waits are too long. Batches of a gathering delay are not longer than without it.
    tests/simulation compares joules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trefoil.core.fleet import SliceKey
from trefoil.core.interference import stretch
from trefoil.core.plan import Route
from trefoil.core.units import MS_PER_S
from trefoil.simulator.books.intervals import Interval
from trefoil.simulator.engines.engine import Flow, OperatingPoint, Services, SliceService, dispatchable
from trefoil.simulator.engines.fluid import LATE, NO_SLICE_WAIT_S, QUEUE_MAX, add_answers, answers_at
from trefoil.simulator.engines.lines import operating_point

ROUNDS: Final = 30
HALF: Final = 0.5  # of the way to the next value: batches and stretches do not chase each other
EVEN: Final = np.full(LATE.size, 1 / LATE.size)


@dataclass(slots=True, eq=False)
class Lane:
    """Lane of one family on one slice: its share of the family's flow, and how it computes in a step."""

    family: str
    key: SliceKey
    share: float
    service: SliceService
    items: float
    items_max: float
    batched: bool
    point: OperatingPoint = field(init=False)
    batch: float = field(init=False)
    stretch: float = 1.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        self._batch_of(self.items)

    def _batch_of(self, items: float) -> None:
        self.batch, self.point = items, operating_point(self.service.points, items)

    @property
    def batch_s(self) -> float:
        """Time of a batch beside its neighbours [s]."""
        return self.point.mean_ms * self.stretch / MS_PER_S

    @property
    def limit_per_s(self) -> float:
        """Most requests a second with the largest batches and the neighbours of now."""
        most = max(self.items_max, self.items) if self.batched else self.items
        return most / (operating_point(self.service.points, most).mean_ms * self.stretch) * MS_PER_S / self.items

    def settle(self, per_s: float) -> None:
        """Come nearer to the batch that gathers at a rate."""
        if self.batched:
            gathers = max(self.items, min(per_s * self.items * self.batch_s, self.items_max))
            self._batch_of(self.batch + HALF * (gathers - self.batch))
        self.busy = min(1.0, per_s * self.items * self.batch_s / self.batch)

    @property
    def request_j(self) -> float:
        """Active joules of a request."""
        return self.point.active_w * self.point.mean_ms / MS_PER_S * self.items / self.batch


class SharedFluidEngine:
    """Fluid engine of all families: they meet on slices."""

    def __init__(
        self,
        flows: Mapping[str, Flow],
        overhead_ms: float,
        now_s: float,
        router: str = "",
        interference: float | None = None,
    ) -> None:
        self.families: tuple[str, ...] = tuple(flows)
        self.plays_stages = False
        self._flows, self._overhead_ms, self._now_s = flows, overhead_ms, now_s
        self._router, self._interference = router, interference
        self._lanes: dict[str, list[Lane]] = {family: [] for family in flows}
        self._queue_max = dict.fromkeys(flows, QUEUE_MAX)
        self._queued = dict.fromkeys(flows, 0.0)
        self._unserved_s = dict.fromkeys(flows, 0.0)

    def set_routes(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Set each family's route and what its slices do from now on."""
        for family, flow in self._flows.items():
            wanted = dispatchable(routes[family], services[family], self._router)
            total = sum(t.weight for t in wanted.targets)
            self._lanes[family] = [
                Lane(
                    family, t.slice, t.weight / total if total > 0 else 1 / len(wanted.targets),
                    services[family][t.slice], flow.items, flow.items_max, flow.batch_delay_s is not None,
                )
                for t in wanted.targets
            ]  # fmt: skip
            self._queue_max[family] = float(wanted.queue_requests_max or QUEUE_MAX)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Ignore the carbon ratio: a flow has no router to tell."""

    def serve(self, until_s: float) -> dict[str, Interval]:
        """Serve one step, or the part of one up to an event."""
        found = {family: Interval(self._now_s, until_s) for family in self._flows}
        dt_s = until_s - self._now_s
        if dt_s > 0:
            rates = {f: flow.source.mean_per_s(self._now_s, until_s) for f, flow in self._flows.items()}
            self._settle({family: rate + self._queued[family] / dt_s for family, rate in rates.items()})
            for family, rate in rates.items():
                found[family].arrived = rate * dt_s
                self._serve_family(family, rate, dt_s, found[family])
                found[family].queued = self._queued[family]
        self._now_s = until_s
        return found

    def _settle(self, rates: Mapping[str, float]) -> None:
        """Batches, busy parts and stretches of every slice at these rates."""
        on: dict[SliceKey, list[Lane]] = {}
        for lanes in self._lanes.values():
            for lane in lanes:
                on.setdefault(lane.key, []).append(lane)
        for together in on.values():
            for _ in range(ROUNDS):
                for lane in together:
                    lane.settle(rates[lane.family] * lane.share)
                self._stretch(together)

    def _stretch(self, together: Sequence[Lane]) -> None:
        if self._interference is None:
            return
        for lane in together:
            mine, law = lane.point.activity, self._interference
            others = ((one.busy, one.point.activity) for one in together if one is not lane)
            lane.stretch = 1.0 + sum(busy * (stretch(mine, activity, law) - 1) for busy, activity in others)

    def _serve_family(self, family: str, rate: float, dt_s: float, found: Interval) -> None:
        lanes, work, queued = self._lanes[family], rate * dt_s, self._queued[family]
        self._unserved_s[family] = 0.0 if lanes else self._unserved_s[family] + dt_s
        served = [min((queued + work) * lane.share, lane.limit_per_s * dt_s) for lane in lanes]
        answered = sum(served)
        left = queued + work - answered
        bound = 0.0 if self._unserved_s[family] > NO_SLICE_WAIT_S else self._queue_max[family]
        found.rejected = max(0.0, left - bound)
        self._queued[family] = left - found.rejected
        if answered <= 0:
            return
        late = min(1.0, queued / answered) if left <= 1e-6 * max(1.0, work) else 1.0
        for lane, count in zip(lanes, served, strict=True):
            if count > 0:
                self._answer(lane, count, late, (queued, left), answered / dt_s, found)

    def _answer(
        self, lane: Lane, count: float, late: float, backlog: tuple[float, float], per_s: float, found: Interval
    ) -> None:
        service, slo_ms = lane.service, self._flows[lane.family].slo_ms
        found.joules[lane.key] = found.joules.get(lane.key, 0.0) + count * lane.request_j
        found.by_variant[service.variant] = found.by_variant.get(service.variant, 0.0) + count
        found.by_device[lane.key.device] = found.by_device.get(lane.key.device, 0.0) + count
        found.accuracy_sum += count * service.accuracy
        found.answered += count
        alone_ms = lane.batch_s * MS_PER_S + service.gap_ms + self._overhead_ms
        in_turn_ms = alone_ms + LATE * lane.busy * lane.batch_s * MS_PER_S
        add_answers(found, answers_at(in_turn_ms, EVEN, slo_ms), count * (1 - late), (lane.key,))
        if late > 0:
            queued, left = backlog
            waits_ms = np.maximum(0.0, queued + LATE * (left - queued)) / per_s * MS_PER_S
            add_answers(found, answers_at(np.sort(in_turn_ms + waits_ms), EVEN, slo_ms), count * late, (lane.key,))
