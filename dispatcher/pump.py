"""Joins a pure Router to the coroutines that wait for it. One per family; belongs to one event loop.

Nothing here awaits: between two calls the router, the tickets in flight and the waiting futures always agree.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from dispatcher.routers import make
from trefoil.core.brains import Outcome, Pick, Router, Ticket
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route
from trefoil.runtime.clock import Clock

GIVEN_UP: Final = Outcome("CANCELLED", 0.0, 0.0, 0, False)


class Pump:
    """Tickets in, picks out. `on_idle` is told when a slice that gets no more has finished: drains wait for it."""

    def __init__(
        self, family: str, clock: Clock, no_slice_wait_s: float, on_idle: Callable[[], None] = lambda: None
    ) -> None:
        self.family = family
        self.in_flight: dict[SliceKey, int] = {}
        self._clock = clock
        self._no_slice_wait_s = no_slice_wait_s
        self._on_idle = on_idle
        self._live: frozenset[SliceKey] = frozenset()
        self._route = Route(family=family)
        self._why = "the plan gives it no slice"
        self._live_until_s = float("-inf")
        self._router: Router | None = None
        self._waiting: dict[int, tuple[Ticket, asyncio.Future[Pick]]] = {}
        self._flying: dict[int, Router] = {}  # a router that was replaced still learns how its picks ended

    @property
    def waiting(self) -> int:
        """Requests that have no slice yet."""
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Their payloads."""
        return sum(ticket.bytes for ticket, _ in self._waiting.values())

    @property
    def flying(self) -> int:
        """Requests on a slice."""
        return len(self._flying)

    def apply(self, route: Route, why: str) -> None:
        """Route by this from now on. Another router takes over whoever waits, in order of arrival."""
        now_s = self._clock.monotonic_s()
        if self._route.targets and not route.targets:
            self._live_until_s = now_s
        replaced = self._router is None or (route.router, route.queue) != (self._route.router, self._route.queue)
        self._route, self._why = route, why
        self._live = frozenset(target.slice for target in route.targets)
        if replaced:
            self._router = make(self.family, route.router, route.queue)
        assert self._router is not None
        self._router.on_table(route, now_s)
        if replaced:
            self._arrive_again(now_s)
        self._pull([target.slice for target in route.targets])

    def submit(self, ticket: Ticket) -> "Pick | asyncio.Future[Pick]":
        """A pick at once, or a future of one; whoever is cancelled while awaiting it calls `abandon`.

        Raises:
            QueueFull: it would have to wait and there is no room.
            Unavailable: no slice is live, and none was within no_slice_wait_s.
        """
        now_s = self._clock.monotonic_s()
        if self._router is None or (not self._route.targets and self._gave_up(now_s)):
            raise self._no_slice()
        pick = self._router.on_arrival(ticket, now_s)
        if pick is not None:
            self._launch(ticket, pick)
            return pick
        future: asyncio.Future[Pick] = asyncio.get_running_loop().create_future()
        self._waiting[ticket.id] = (ticket, future)
        return future

    def done(self, ticket: Ticket, pick: Pick, outcome: Outcome) -> None:
        """A picked request is over; its credit goes to whoever waits."""
        self._land(ticket, pick, outcome)
        if self._waiting:
            self._pull((pick.slice,))

    def abandon(self, ticket: Ticket, future: "asyncio.Future[Pick]") -> None:
        """The client went away (or its time ran out) while it waited."""
        if self._waiting.pop(ticket.id, None) is not None:
            assert self._router is not None
            self._router.on_cancel(ticket, self._clock.monotonic_s())
        elif future.done() and not future.cancelled() and future.exception() is None:
            self.done(ticket, future.result(), GIVEN_UP)  # picked and cancelled in the same turn of the loop

    def expire(self) -> None:
        """Fail whoever waits for a family whose last slice went too long ago."""
        if self._waiting and not self._route.targets and self._gave_up(self._clock.monotonic_s()):
            self.fail_waiting(self._no_slice())

    def fail_waiting(self, error: TrefoilError) -> None:
        """Nobody waits any longer."""
        assert self._router is not None or not self._waiting
        for ticket, future in tuple(self._waiting.values()):
            self._router.on_cancel(ticket, self._clock.monotonic_s())  # type: ignore[union-attr]
            self._refuse(ticket, future, error)

    def _gave_up(self, now_s: float) -> bool:
        return now_s - self._live_until_s > self._no_slice_wait_s

    def _no_slice(self) -> Unavailable:
        return Unavailable(
            f"no slice serves {self.family} now: {self._why}", remedy="try again, or see `trefoil status`"
        )

    def _launch(self, ticket: Ticket, pick: Pick) -> None:
        assert self._router is not None
        self._flying[ticket.id] = self._router
        self.in_flight[pick.slice] = self.in_flight.get(pick.slice, 0) + 1

    def _land(self, ticket: Ticket, pick: Pick, outcome: Outcome) -> None:
        self._flying.pop(ticket.id).on_done(ticket, pick, outcome, self._clock.monotonic_s())
        left = self.in_flight[pick.slice] - 1
        if left:
            self.in_flight[pick.slice] = left
        else:
            del self.in_flight[pick.slice]
            if pick.slice not in self._live:
                self._on_idle()

    def _pull(self, slices: Iterable[SliceKey]) -> None:
        """One ticket a slice and round, so that new slices share what waits."""
        assert self._router is not None
        now_s = self._clock.monotonic_s()
        hungry = list(slices)
        while hungry:
            fed = []
            for slice_ in hungry:
                pulled = self._router.on_credit(slice_, now_s)
                if pulled is not None:
                    self._hand_over(*pulled)
                    fed.append(slice_)
            hungry = fed

    def _hand_over(self, ticket: Ticket, pick: Pick) -> None:
        _, future = self._waiting.pop(ticket.id)
        self._launch(ticket, pick)
        if future.done():  # cancelled, and its coroutine has not run yet: abandon() will find nothing to do
            self._land(ticket, pick, GIVEN_UP)
        else:
            future.set_result(pick)

    def _arrive_again(self, now_s: float) -> None:
        assert self._router is not None
        for ticket, future in sorted(self._waiting.values(), key=lambda each: (each[0].arrived_s, each[0].id)):
            try:
                pick = self._router.on_arrival(ticket, now_s)
            except TrefoilError as error:  # the new route's queue is smaller than what waits
                self._refuse(ticket, future, error)
            else:
                if pick is not None:
                    self._hand_over(ticket, pick)

    def _refuse(self, ticket: Ticket, future: "asyncio.Future[Pick]", error: TrefoilError) -> None:
        del self._waiting[ticket.id]
        if not future.done():
            future.set_exception(error)
