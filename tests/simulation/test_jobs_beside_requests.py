"""Batches of jobs beside requests, in virtual time on the real queue: the p95 of requests stays."""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dispatcher.jobs.core.reserve import SHARE_MIN, Reserve, Waiting, allowed_share
from dispatcher.routing.core.family_queue import FamilyQueue
from tests.unit.dispatcher.worlds import OK, key, route, target, ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import build_histogram

SERVICE_S = 0.02
REQUESTS = 30_000
JOB = 10**7  # tickets from here on are batches


@dataclass
class Slices:
    """Slices that serve one request after the other; each holds two."""

    count: int
    load: float
    batch_s: float
    jobs: bool
    batches: int = 0
    events: list[Any] = field(default_factory=list)
    latencies_s: dict[int, float] = field(default_factory=dict)

    def run(self) -> "Slices":
        rng = np.random.default_rng(3)
        self.rate_per_s = self.load * self.count / SERVICE_S
        self.arrivals_s = np.cumsum(rng.exponential(1 / self.rate_per_s, REQUESTS))
        self.service_s = rng.exponential(SERVICE_S, REQUESTS)
        self.queue = FamilyQueue(1e9)
        self.keys = [key(n) for n in range(self.count)]
        targets = [target(n, weight=1 / self.count, credits=2) for n in range(self.count)]
        self.queue.table(route(targets, router="least_loaded"), "", 0.0)
        self.free_s, self.reserve = dict.fromkeys(self.keys, 0.0), Reserve()
        recent_ms, share = deque[float](maxlen=3000), SHARE_MIN
        self.events = [(at_s, n, None, None) for n, at_s in enumerate(self.arrivals_s)]
        while len(self.latencies_s) < REQUESTS:
            now_s, n, ended, pick = heapq.heappop(self.events)
            if ended is None:
                if n % 200 == 0 and recent_ms:
                    share = allowed_share(build_histogram(recent_ms), 1e3 * self.batch_s)
                self.reserve.on_arrivals("digits", 1, share)
                asked = ticket(n)
                if (given := self.queue.submit(asked, now_s)) is not None:
                    self._send(asked, given, now_s, self.service_s[n])
            else:
                if n < JOB:
                    self.latencies_s[n] = now_s - self.arrivals_s[n]
                    recent_ms.append(1e3 * self.latencies_s[n])
                for waited, given in self.queue.done(ended, pick, OK, now_s):
                    self._send(waited, given, now_s, self.service_s[waited.id])
            if self.jobs:
                self._fill(now_s)
        return self

    def _send(self, asked: Any, pick: Any, now_s: float, service_s: float) -> None:
        self.free_s[pick.slice] = ends_s = max(now_s, self.free_s[pick.slice]) + service_s
        heapq.heappush(self.events, (ends_s, asked.id, asked, pick))

    def _fill(self, now_s: float) -> None:
        for slice_ in self.keys:
            if self.queue.is_idle(slice_):
                waiting = [Waiting("digits", self.rate_per_s, self._idle_beside(slice_))]
                if self.reserve.try_start(waiting, self.batch_s):
                    self.batches += 1
                    asked = ticket(JOB + self.batches)
                    pick = self.queue.submit_idle(asked, slice_, now_s)
                    assert pick is not None
                    self._send(asked, pick, now_s, self.batch_s)

    def _idle_beside(self, taken: SliceKey) -> int:
        return sum(self.queue.in_flight_on(each) == 0 for each in self.keys if each != taken)

    @property
    def p95_s(self) -> float:
        return float(np.quantile(list(self.latencies_s.values()), 0.95))

    @property
    def used_by_jobs(self) -> float:
        return self.batches * self.batch_s / (self.count * self.arrivals_s[-1])


@pytest.mark.parametrize(
    ("count", "load", "batch_s", "least_used"),
    [
        (3, 0.6, 0.01, 0.04),
        pytest.param(1, 0.6, 0.01, 0.03, marks=pytest.mark.long),
        pytest.param(8, 0.6, 0.01, 0.04, marks=pytest.mark.long),
        pytest.param(3, 0.1, 0.01, 0.2, marks=pytest.mark.long),
        pytest.param(3, 0.6, 0.04, 0.001, marks=pytest.mark.long),
    ],
)
def test_p95_stays_and_jobs_fill_what_is_idle(count, load, batch_s, least_used):
    alone = Slices(count, load, batch_s, jobs=False).run()
    beside = Slices(count, load, batch_s, jobs=True).run()
    assert beside.p95_s <= 1.02 * alone.p95_s
    assert beside.used_by_jobs >= least_used
