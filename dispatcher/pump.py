"""Joins a pure Router to the coroutines that wait for it. One per family; belongs to one event loop.

Nothing here awaits: between two calls the router, the tickets in flight and the waiting futures always agree.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dispatcher.explain import Standing
from dispatcher.floors import Reach
from dispatcher.routers import make
from dispatcher.trials import Mirror
from trefoil.core.brains import Outcome, Pick, Router, Ticket
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route
from trefoil.runtime.clock import Clock


class Moved(Unavailable):
    """The family is served by other workers now: whoever waited here is to be forwarded."""


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
        self.reach = Reach()
        self._live_until_s = float("-inf")
        self._router: Router | None = None
        self._waiting: dict[int, tuple[Ticket, asyncio.Future[Pick]]] = {}
        self._pinned: dict[SliceKey, dict[int, tuple[Ticket, asyncio.Future[Pick], str]]] = {}  # wait for one slice
        # A router that was replaced still learns how its picks ended; None = no router gave it.
        self._flying: dict[int, Router | None] = {}

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

    @property
    def live(self) -> frozenset[SliceKey]:
        """The slices that get new requests."""
        return self._live

    def apply(self, route: Route, why: str, elsewhere: bool = False) -> None:
        """Route by this from now on. Another router takes over whoever waits, in order of arrival. `elsewhere`: other
        workers have live slices, or slices are not probed yet, so that it is worth waiting."""
        now_s = self._clock.monotonic_s()
        if elsewhere or (self._route.targets and not route.targets):
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
        self._lower_hopes(float("inf"))
        self._pull([*(target.slice for target in route.targets), *(s for s in self._pinned if s not in self._live)])

    def standing(
        self, ticket: Ticket, planned: Route, missing: Mapping[SliceKey, str], mirror: Mirror | None
    ) -> Standing:
        """How things stand for a ticket that is only asked about."""
        told = getattr(self._router, "scores", None)
        scores = told(ticket) if told is not None else None
        return Standing(planned, self._route, missing, self.in_flight, self.waiting, self.reach, scores, mirror)

    def submit(self, ticket: Ticket) -> "Pick | asyncio.Future[Pick]":
        """A pick at once, or a future of one; whoever is cancelled while awaiting it calls `abandon`.

        Raises:
            QueueFull: it would have to wait and there is no room.
            Unavailable: no slice is live, and none was within no_slice_wait_s.
            Infeasible: nothing that is live or planned is as accurate as it asks.
        """
        now_s = self._clock.monotonic_s()
        if self._router is None or (not self._route.targets and self._gave_up(now_s)):
            raise self._no_slice()
        if ticket.min_accuracy:
            self.reach.check(self.family, ticket.min_accuracy)
        pick = self._router.on_arrival(ticket, now_s)
        if pick is not None:
            self._launch(ticket, pick)
            return pick
        future: asyncio.Future[Pick] = asyncio.get_running_loop().create_future()
        self._waiting[ticket.id] = (ticket, future)
        return future

    def submit_to(self, ticket: Ticket, slice_: SliceKey, variant: str) -> "Pick | asyncio.Future[Pick]":
        """Like `submit`, for a request that only this slice may serve, also while it drains."""
        pick = self._pick_on(ticket, slice_, variant)
        if pick is not None:
            return pick
        future: asyncio.Future[Pick] = asyncio.get_running_loop().create_future()
        self._pinned.setdefault(slice_, {})[ticket.id] = (ticket, future, variant)
        return future

    def done(self, ticket: Ticket, pick: Pick, outcome: Outcome) -> None:
        """A picked request is over; its credit goes to whoever waits."""
        self._land(ticket, pick, outcome)
        if self._waiting or self._pinned:
            self._pull((pick.slice,))

    def abandon(self, ticket: Ticket, future: "asyncio.Future[Pick]") -> None:
        """The client went away (or its time ran out) while it waited."""
        if self._waiting.pop(ticket.id, None) is not None:
            assert self._router is not None
            self._router.on_cancel(ticket, self._clock.monotonic_s())
        elif any(waiting.pop(ticket.id, None) is not None for waiting in self._pinned.values()):
            self._pinned = {slice_: waiting for slice_, waiting in self._pinned.items() if waiting}
        elif future.done() and not future.cancelled() and future.exception() is None:
            self.done(ticket, future.result(), GIVEN_UP)  # picked and cancelled in the same turn of the loop

    def expire(self) -> None:
        """Fail whoever waits for a family whose last slice went too long ago, or for an accuracy that does not come."""
        self._lower_hopes(self._no_slice_wait_s)
        if self._waiting and not self._route.targets and self._gave_up(self._clock.monotonic_s()):
            self.fail_waiting(self._no_slice())

    def _lower_hopes(self, patience_s: float) -> None:
        """Fail those whose floor nothing planned reaches, and those who have waited so long for what is not live."""
        now_s, reach = self._clock.monotonic_s(), self.reach
        for ticket, future in tuple(self._waiting.values()):
            floor = ticket.min_accuracy
            if floor > reach.live and (floor > reach.planned or now_s - ticket.arrived_s > patience_s):
                assert self._router is not None
                self._router.on_cancel(ticket, now_s)
                self._refuse(ticket, future, reach.refusal(self.family, floor))

    def fail_waiting(self, error: TrefoilError) -> None:
        """Nobody waits any longer."""
        assert self._router is not None or not self._waiting
        for ticket, future in tuple(self._waiting.values()):
            self._router.on_cancel(ticket, self._clock.monotonic_s())  # type: ignore[union-attr]
            self._refuse(ticket, future, error)
        pinned, self._pinned = self._pinned, {}
        for _, future, _ in (each for waiting in pinned.values() for each in waiting.values()):
            if not future.done():
                future.set_exception(error)

    def displace(self, sequences: bool) -> None:
        """Whoever waits for any slice is to try other workers; those of sequences, too, or they wait on: their requests
        have an order here."""
        error = Moved(f"{self.family} is served by other workers", remedy="try again")
        for ticket, future in tuple(self._waiting.values()):
            if sequences or not ticket.sequence_id:
                assert self._router is not None
                self._router.on_cancel(ticket, self._clock.monotonic_s())
                self._refuse(ticket, future, error)

    def _gave_up(self, now_s: float) -> bool:
        return now_s - self._live_until_s > self._no_slice_wait_s

    def _no_slice(self) -> Unavailable:
        return Unavailable(
            f"no slice serves {self.family} now: {self._why}", remedy="try again, or see `trefoil status`"
        )

    def _launch(self, ticket: Ticket, pick: Pick) -> None:
        self._flying[ticket.id] = self._router
        self.in_flight[pick.slice] = self.in_flight.get(pick.slice, 0) + 1

    def _land(self, ticket: Ticket, pick: Pick, outcome: Outcome) -> None:
        router = self._flying.pop(ticket.id)
        if router is not None:
            router.on_done(ticket, pick, outcome, self._clock.monotonic_s())
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
        for slice_ in hungry if self._pinned else ():
            self._pull_pinned(slice_)
        while hungry:
            fed = []
            for slice_ in hungry:
                pulled = self._router.on_credit(slice_, now_s)
                if pulled is not None:
                    self._hand_over(*pulled)
                    fed.append(slice_)
            hungry = fed

    def _pull_pinned(self, slice_: SliceKey) -> None:
        """Who can go nowhere else is first."""
        waiting = self._pinned.get(slice_, {})
        for id_, (ticket, future, variant) in list(waiting.items()):
            if future.done():  # cancelled, and its coroutine has not run yet: abandon() will find nothing to do
                del waiting[id_]
            elif (pick := self._pick_on(ticket, slice_, variant)) is not None:
                del waiting[id_]
                future.set_result(pick)
            else:
                return
        self._pinned.pop(slice_, None)

    def _pick_on(self, ticket: Ticket, slice_: SliceKey, variant: str) -> Pick | None:
        """A credit of one slice, from its router. Where the router has none to give (the slice drains, or gets no
        share), sequences that are open bound what is sent there."""
        pick = None
        if self._router is not None and slice_ in self._live:
            pick = self._router.on_pinned(ticket, slice_, self._clock.monotonic_s())
            if pick is None and self.in_flight.get(slice_):
                return None
        if pick is not None:
            self._launch(ticket, pick)
            return pick
        pick = Pick(slice_, variant, 0, f"its sequence lives on {slice_.name}")
        self._launch(ticket, pick)
        self._flying[ticket.id] = None
        return pick

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
