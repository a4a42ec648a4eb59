"""Requests of one family, one by one, through the router that serves them live.

Data: arrival times; a route (targets with credits, queue bounds); per slice its service time, gap and accuracy.
Result: per window what was answered, refused, still waiting, and how long every slice computed.
Model: a request that is sent to a slice is on its way for gap/2, computes when the slice has finished the one before it
    (one at a time, gamma law of core/queueing), and is back after another gap/2: its credit is free then. So one
    credit leaves the slice idle for a gap per request; a second one hides that. A request that is in flight stays on
    its slice whatever the table says next; who waits is dealt again by the router's own rule (dispatcher/pump.py).
Draws: every slice has a stream of its own, seeded by its key and one draw from the generator that is given. So the
    same request on the same slice takes the same time under two policies until their histories part.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from dispatcher.queues import QUEUES
from dispatcher.queues.fifo import FifoQueue, QueueFull
from dispatcher.routers import resolve
from trefoil.core.brains import Outcome, Pick, Router, Ticket
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route
from trefoil.core.queueing import ServiceTime, draw_s
from trefoil.core.units import MS_PER_S

FloatArray = npt.NDArray[np.float64]

NO_SLICE_WAIT_S: Final = 20.0  # as dispatcher.settings.no_slice_wait_s
DRAWS: Final = 512  # service times drawn at once


@dataclass(frozen=True, slots=True)
class SliceService:
    """What a slice does to a request. `gap_ms`: it is taken but does not compute. `energy_j`: active, per request."""

    service: ServiceTime
    accuracy: float
    energy_j: float
    variant: str
    family: str
    gap_ms: float


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in [starts_s, ends_s).

    `latency_ms` holds those answered in it, in order of their answers, client overhead included. `busy_s` is the time
    that a slice computed inside the window, also for requests that are answered after it. `queued` waits at its end.
    """

    starts_s: float
    ends_s: float
    arrived: int
    answered: int
    rejected: int
    latency_ms: FloatArray
    busy_s: Mapping[SliceKey, float]
    answered_by: Mapping[SliceKey, int]
    queued: int


@dataclass(slots=True, eq=False)
class _Slice:
    """One slice: when it can compute next, and what it did in this window."""

    key: SliceKey
    rng: Generator
    service: SliceService
    draws: Iterator[float]
    way_s: float
    free_s: float = 0.0
    busy_s: float = 0.0
    answered: int = 0


@dataclass(slots=True)
class _Books:
    """What the window that is open has seen."""

    arrived: int = 0
    rejected: int = 0
    latency_s: list[float] = field(default_factory=list)


class RequestLevel:
    """One family behind one router. Time only goes forward: `serve` to the end of a window, `retable` between two."""

    def __init__(
        self,
        family: str,
        route: Route,
        services: Mapping[SliceKey, SliceService],
        rng: Generator,
        overhead_ms: float = 0.0,
        *,
        start_s: float = 0.0,
        no_slice_wait_s: float = NO_SLICE_WAIT_S,
    ) -> None:
        """Start idle at `start_s`.

        Raises:
            PlanError: router or queue is not known.
            InvalidInput: a target of the route has no service.
        """
        self.family = family
        self._overhead_ms = overhead_ms
        self._no_slice_wait_s = no_slice_wait_s
        self._root = int(rng.integers(2**63))
        self._now_s = self._window_s = start_s
        self._live_until_s = -math.inf
        self._route = Route(family)
        self._router: Router | None = None
        self._slices: dict[SliceKey, _Slice] = {}
        self._waiting: dict[int, Ticket] = {}
        self._returns: list[tuple[float, int, _Slice, Ticket, Pick, float, float, Router]] = []
        self._launched = 0
        self._arrived = 0
        self._books = _Books()
        self.retable(start_s, route, services)

    def retable(self, now_s: float, route: Route, services: Mapping[SliceKey, SliceService]) -> None:
        """Route by this from now on. In flight finishes where it is; who waits is dealt again by the router's rule.

        Raises:
            PlanError: router or queue is not known.
            InvalidInput: a target of the route has no service.
        """
        for target in route.targets:
            if target.slice not in services:
                raise InvalidInput(
                    f"no service time for {target.variant} on {target.slice.name}",
                    field=f"services of {self.family}",
                    remedy="give one for every target of the route",
                )
        self._run((), now_s)
        if self._route.targets and not route.targets:
            self._live_until_s = now_s
        replaced = self._router is None or (route.router, route.queue) != (self._route.router, self._route.queue)
        if replaced:
            self._router = _make(self.family, route)
        self._route = route
        self._install(services)
        assert self._router is not None
        self._router.on_table(route, now_s)
        if replaced:
            self._arrive_again()
        self._pull([target.slice for target in route.targets])

    def serve(self, arrivals_s: FloatArray, until_s: float) -> Window:
        """All that happens before `until_s`, given the arrivals (ascending) since the last call."""
        assert until_s >= self._now_s, "time does not go back"
        if arrivals_s.size:
            assert self._now_s <= arrivals_s[0], "an arrival before the window"
            assert arrivals_s[-1] < until_s, "an arrival after the window"
        self._run(arrivals_s.tolist(), until_s)
        return self._close(until_s)

    def _install(self, services: Mapping[SliceKey, SliceService]) -> None:
        for target in self._route.targets:
            service = services[target.slice]
            found = self._slices.get(target.slice)
            if found is None:
                key = target.slice
                words = (self._root, crc32(key.device.encode()), crc32(key.slice_type.encode()), key.start, key.size)
                rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
                found = self._slices[key] = _Slice(key, rng, service, _draws(service, rng), 0.0)
            elif found.service != service:
                found.draws = _draws(service, found.rng)
            found.service = service
            found.way_s = service.gap_ms / 2 / MS_PER_S

    def _run(self, arrivals_s: Iterable[float], until_s: float) -> None:
        returns = self._returns
        for at in arrivals_s:
            while returns and returns[0][0] <= at:
                self._land()
            self._now_s = at
            self._arrive(at)
        while returns and returns[0][0] < until_s:
            self._land()
        self._now_s = until_s
        self._expire()

    def _arrive(self, at: float) -> None:
        self._expire()
        self._arrived += 1
        self._books.arrived += 1
        if not self._route.targets and self._gave_up():
            self._books.rejected += 1
            return
        assert self._router is not None
        ticket = _ticket(self.family, self._arrived, at)
        try:
            pick = self._router.on_arrival(ticket, at)
        except QueueFull:
            self._books.rejected += 1
            return
        if pick is None:
            self._waiting[ticket.id] = ticket
        else:
            self._launch(ticket, pick)

    def _launch(self, ticket: Ticket, pick: Pick) -> None:
        assert self._router is not None
        one = self._slices[pick.slice]
        start_s = max(self._now_s + one.way_s, one.free_s)
        service_s = next(one.draws)
        one.free_s = start_s + service_s
        one.busy_s += service_s
        self._launched += 1
        back_s = one.free_s + one.way_s
        heapq.heappush(self._returns, (back_s, self._launched, one, ticket, pick, start_s, service_s, self._router))

    def _land(self) -> None:
        """The earliest answer is back: its credit goes to whoever waits."""
        back_s, _, one, ticket, pick, _, service_s, router = heapq.heappop(self._returns)
        self._now_s = back_s
        self._expire()
        one.answered += 1
        latency_s = back_s - ticket.arrived_s
        self._books.latency_s.append(latency_s)
        outcome = Outcome("OK", latency_s * MS_PER_S, service_s * MS_PER_S, 0, True)
        router.on_done(ticket, pick, outcome, back_s)
        if self._waiting:
            self._pull((pick.slice,))

    def _pull(self, slices: Iterable[SliceKey]) -> None:
        """One ticket a slice and round, so that new slices share what waits."""
        assert self._router is not None
        hungry = list(slices)
        while hungry:
            fed = []
            for slice_ in hungry:
                pulled = self._router.on_credit(slice_, self._now_s)
                if pulled is not None:
                    del self._waiting[pulled[0].id]
                    self._launch(*pulled)
                    fed.append(slice_)
            hungry = fed

    def _arrive_again(self) -> None:
        """Another router takes over whoever waits, in order of arrival."""
        assert self._router is not None
        for ticket in tuple(self._waiting.values()):
            try:
                pick = self._router.on_arrival(ticket, self._now_s)
            except QueueFull:  # the new route's queue is smaller than what waits
                del self._waiting[ticket.id]
                self._books.rejected += 1
            else:
                if pick is not None:
                    del self._waiting[ticket.id]
                    self._launch(ticket, pick)

    def _gave_up(self) -> bool:
        return self._now_s - self._live_until_s > self._no_slice_wait_s

    def _expire(self) -> None:
        """Fail whoever waits for a family whose last slice went too long ago."""
        if self._waiting and not self._route.targets and self._gave_up():
            assert self._router is not None
            for ticket in self._waiting.values():
                self._router.on_cancel(ticket, self._now_s)
            self._books.rejected += len(self._waiting)
            self._waiting.clear()

    def _close(self, until_s: float) -> Window:
        beyond: dict[SliceKey, float] = {}
        for _, _, one, _, _, start_s, service_s, _ in sorted(self._returns, key=lambda each: each[:2]):
            late_s = min(service_s, max(0.0, start_s + service_s - until_s))
            beyond[one.key] = beyond.get(one.key, 0.0) + late_s
        in_route = {target.slice for target in self._route.targets}
        window = Window(
            starts_s=self._window_s,
            ends_s=until_s,
            arrived=self._books.arrived,
            answered=len(self._books.latency_s),
            rejected=self._books.rejected,
            latency_ms=np.array(self._books.latency_s) * MS_PER_S + self._overhead_ms,
            busy_s={key: max(0.0, one.busy_s - beyond.get(key, 0.0)) for key, one in self._slices.items()},
            answered_by={key: one.answered for key, one in self._slices.items()},
            queued=len(self._waiting),
        )
        busy_later = {one[2].key for one in self._returns}
        for key, one in tuple(self._slices.items()):
            one.busy_s, one.answered = beyond.get(key, 0.0), 0
            if key not in in_route and key not in busy_later:
                del self._slices[key]
        self._books = _Books()
        self._window_s = until_s
        return window


def _make(family: str, route: Route) -> Router:
    queue: FifoQueue[Any] = QUEUES[route.queue](family)
    return resolve(route.router)(family, queue)


def _draws(service: SliceService, rng: Generator) -> Iterator[float]:
    """Service times of one slice [s], for ever."""
    while True:
        yield from draw_s(service.service, DRAWS, rng).tolist()


def _ticket(family: str, id_: int, at: float) -> Ticket:
    return Ticket(
        id=id_, family=family, slo_class="", tenant="", items=1, bytes=0, arrived_s=at, deadline_s=None,
        min_accuracy=0.0, priority=0, sequence_id="", sequence_start=False, sequence_end=False, length_score=None,
    )  # fmt: skip
