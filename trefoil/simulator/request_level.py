"""Requests of one family, one by one, through the router that serves them live.

Data: arrival times; a route (targets with credits, queue bounds); per slice its service time, gap and accuracy.
Result: per window what was answered, refused, still waiting, and how long every slice computed.
Model: simulator/latency says what a slice does to a request that it is sent. A request that is in flight stays on its
    slice whatever the table says next; who waits is dealt again by the router's own rule (dispatcher/pump.py).
Speed: for routers that read nothing of a ticket (`BULK`) a ticket is three numbers, and one loop calls the same router
    for a whole block of arrivals. Any other router gets real tickets and outcomes. Both give the same numbers.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, repeat
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from dispatcher.queues import QUEUES
from dispatcher.queues.fifo import FifoQueue, QueueFull
from dispatcher.routers import resolve
from trefoil.core.brains import Outcome, Pick, Router, Ticket
from trefoil.core.errors import InvalidInput, PlanError
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route
from trefoil.core.units import MS_PER_S
from trefoil.simulator.latency import Server, SliceService, server

__all__ = ["RequestLevel", "SliceService", "Window"]

FloatArray = npt.NDArray[np.float64]

NO_SLICE_WAIT_S: Final = 20.0  # as dispatcher.settings.no_slice_wait_s
BULK: Final = ("fifo", "weighted")  # of a ticket, only their queue reads anything, and no more than `Light` holds
OK: Final = Outcome("OK", 0.0, 0.0, 0, True)


class _Fields(NamedTuple):
    arrived_s: float
    id: int
    bytes: int


class Light(_Fields):
    """What is left of a ticket where nobody reads more. Simulated clients ask for nothing of their own."""

    __slots__ = ()
    min_accuracy: ClassVar[float] = 0.0
    priority: ClassVar[int] = 0


_light: Final = partial(tuple.__new__, Light)

Done = Callable[[Any, Pick, Outcome, float], None]


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


# back, id, slice, arrival, ticket, pick, start and length of the computation, where its router learns of the end
_Return = tuple[float, int, Server, float, Any, Pick, float, float, Done]


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
        bulk: bool = True,
    ) -> None:
        """Start idle at `start_s`. Without `bulk` every router gets full tickets.

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
        self._queue: FifoQueue[Any] = FifoQueue(family)
        self._bulk, self._bulk_allowed = False, bulk
        self._slices: dict[SliceKey, Server] = {}
        self._slice_of: dict[int, Server] = {}  # by the identity of a target's key: hashing it takes longer
        self._waiting: dict[int, Any] = {}  # not kept in bulk: the queue knows
        self._returns: list[_Return] = []
        self._arrived = 0
        self._books = _Books()
        self.retable(start_s, route, services)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Saved and read again: what is found by identity is found by the new one."""
        self.__dict__.update(state)
        self._slice_of = {id(target.slice): self._slices[target.slice] for target in self._route.targets}

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
        now_s = float(now_s)
        self._run([], now_s)
        if self._route.targets and not route.targets:
            self._live_until_s = now_s
        replaced = self._router is None or (route.router, route.queue) != (self._route.router, self._route.queue)
        if self._bulk:
            self._waiting = {each.id: each for each in self._queue.tickets()}
        if replaced:
            self._queue = _queue(self.family, route)
            self._router = resolve(route.router)(self.family, self._queue)
        self._route = route
        self._install(services)
        assert self._router is not None
        self._router.on_table(route, now_s)
        if replaced:
            self._arrive_again()
        self._pull([target.slice for target in route.targets])
        self._bulk = self._bulk_allowed and route.router in BULK and bool(route.targets)
        if self._bulk:
            self._waiting = {}

    def serve(self, arrivals_s: FloatArray, until_s: float) -> Window:
        """All that happens before `until_s`, given the arrivals (ascending) since the last call."""
        assert until_s >= self._now_s, "time does not go back"
        if arrivals_s.size:
            assert self._now_s <= arrivals_s[0], "an arrival before the window"
            assert arrivals_s[-1] < until_s, "an arrival after the window"
        until_s = float(until_s)  # of numpy's scalars, arithmetic is slow
        self._run(arrivals_s.tolist(), until_s)
        return self._close(until_s)

    def _run(self, arrivals_s: list[float], until_s: float) -> None:
        if self._bulk:
            self._run_bulk(arrivals_s, until_s)
        else:
            self._run_tickets(arrivals_s, until_s)
        self._now_s = until_s

    def _install(self, services: Mapping[SliceKey, SliceService]) -> None:
        self._slice_of = {}
        for target in self._route.targets:
            key, service = target.slice, services[target.slice]
            one = self._slices.get(key)
            if one is None:
                one = self._slices[key] = server(key, service, self._root)
            one.serve_as(service)
            self._slice_of[id(key)] = one

    def _run_bulk(self, arrivals_s: list[float], until_s: float) -> None:
        """As `_run_tickets`, call for call."""
        router, queue, returns, slice_of = self._router, self._queue, self._returns, self._slice_of
        assert router is not None
        on_arrival: Callable[[Any, float], Pick | None] = router.on_arrival
        on_credit, current_on_done = router.on_credit, router.on_done
        pop, push, answered, infinity = heapq.heappop, heapq.heappush, self._books.latency_s.append, math.inf

        def launch(ticket: Any, pick: Pick, now_s: float) -> None:
            one = slice_of[id(pick.slice)]
            start_s = now_s + one.way_s
            if one.free_s > start_s:
                start_s = one.free_s
            service_s = one.times_s.pop() if one.times_s else one.more()
            one.free_s = free_s = start_s + service_s
            one.busy_s += service_s
            back_s = free_s + one.way_s
            push(
                returns,
                (back_s, ticket.id, one, ticket.arrived_s, ticket, pick, start_s, service_s, current_on_done),
            )

        last = Light(math.nextafter(until_s, -infinity), -1, 0)  # not an arrival: lets what is back before it land
        for ticket in chain(map(_light, zip(arrivals_s, count(self._arrived + 1), repeat(0))), (last,)):
            at = ticket[0]
            while returns and returns[0][0] <= at:
                back_s, _, one, arrived_s, done, pick, _, _, on_done = pop(returns)
                one.answered += 1
                answered(back_s - arrived_s)
                on_done(done, pick, OK, back_s)
                while queue.waiting and (pulled := on_credit(pick.slice, back_s)) is not None:
                    launch(*pulled, back_s)
            if ticket is last:
                break
            try:
                seat = on_arrival(ticket, at)
            except QueueFull:
                self._books.rejected += 1
            else:
                if seat is not None:
                    launch(ticket, seat, at)
        self._arrived += len(arrivals_s)
        self._books.arrived += len(arrivals_s)

    def _run_tickets(self, arrivals_s: list[float], until_s: float) -> None:
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

    def _launch(self, ticket: Any, pick: Pick) -> None:
        assert self._router is not None
        one = self._slices[pick.slice]
        start_s = max(self._now_s + one.way_s, one.free_s)
        service_s = one.times_s.pop() if one.times_s else one.more()
        one.free_s = start_s + service_s
        one.busy_s += service_s
        back_s = one.free_s + one.way_s
        heapq.heappush(
            self._returns,
            (back_s, ticket.id, one, ticket.arrived_s, ticket, pick, start_s, service_s, self._router.on_done),
        )

    def _land(self) -> None:
        """The earliest answer is back: its credit goes to whoever waits."""
        back_s, _, one, arrived_s, ticket, pick, _, service_s, on_done = heapq.heappop(self._returns)
        self._now_s = back_s
        self._expire()
        one.answered += 1
        latency_s = back_s - arrived_s
        self._books.latency_s.append(latency_s)
        on_done(ticket, pick, Outcome("OK", latency_s * MS_PER_S, service_s * MS_PER_S, 0, True), back_s)
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
        for waiting in tuple(self._waiting.values()):
            ticket = _ticket(self.family, waiting.id, waiting.arrived_s)
            self._waiting[ticket.id] = ticket
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
        for _, _, one, _, _, _, start_s, service_s, _ in sorted(self._returns, key=lambda each: each[:2]):
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
            queued=self._queue.waiting if self._bulk else len(self._waiting),
        )
        busy_later = {one[2].key for one in self._returns}
        for key, one in tuple(self._slices.items()):
            one.busy_s, one.answered = beyond.get(key, 0.0), 0
            if key not in in_route and key not in busy_later:
                del self._slices[key]
        self._books = _Books()
        self._window_s = until_s
        return window


def _queue(family: str, route: Route) -> FifoQueue[Any]:
    if route.queue not in QUEUES:
        raise PlanError("no such queue", field="queue", value=route.queue, remedy=f"one of {', '.join(sorted(QUEUES))}")
    return QUEUES[route.queue](family)


def _ticket(family: str, id_: int, at: float) -> Ticket:
    return Ticket(
        id=id_, family=family, slo_class="", tenant="", items=1, bytes=0, arrived_s=at, deadline_s=None,
        min_accuracy=0.0, priority=0, sequence_id="", sequence_start=False, sequence_end=False, length_score=None,
    )  # fmt: skip
