"""Joins a family queue to the coroutines that wait for it. One per family, or per group; belongs to one event loop.

What is decided is in core/family_queue; here are the futures of those that wait, the clock, and the timer that the
router asks for. Nothing here awaits: between two calls the router, the tickets in flight and the waiting futures always
agree.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dispatcher.routing.core.accuracy_floors import AccuracyReach
from dispatcher.routing.core.explain import FamilySnapshot
from dispatcher.routing.core.family_queue import (
    GIVEN_UP,
    Effect,
    FamilyQueue,
    Idle,
    Refusal,
    ServedElsewhere,
)
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route
from trefoil.runtime.clock import Clock

__all__ = ["GIVEN_UP", "ServedElsewhere", "AsyncFamilyQueue"]

Future = asyncio.Future[Pick]


class AsyncFamilyQueue:
    """Futures and timer around a `FamilyQueue`: tickets in, picks out. `on_idle` is called when a slice that gets no
    more has finished: drains wait for it."""

    def __init__(
        self, family: str, clock: Clock, no_slice_wait_s: float, on_idle: Callable[[], None] = lambda: None
    ) -> None:
        self.family = family
        self._clock = clock
        self._on_idle = on_idle
        self._futures: dict[int, Future] = {}
        self._queue = FamilyQueue(no_slice_wait_s, self._futures)
        self._moved_to: dict[
            str, AsyncFamilyQueue
        ] = {}  # families that another one serves now; who is on a slice comes back here
        self._next_s: Callable[[], float | None] = lambda: None  # the router's
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that have no slice yet."""
        return len(self._queue.waiting)

    def waiting_of(self, family: str) -> tuple[int, int]:
        """Requests of one family that have no slice yet, and their payloads."""
        sizes = [ticket.bytes for ticket in self._queue.waiting.values() if ticket.family == family]
        return len(sizes), sum(sizes)

    @property
    def in_flight_count(self) -> int:
        """Number of requests on all slices together."""
        return self._queue.in_flight_count

    @property
    def in_flight(self) -> dict[SliceKey, int]:
        """Requests on each slice that has any."""
        return self._queue.in_flight

    def in_flight_by_family(self) -> Counter[tuple[SliceKey, str]]:
        """Requests of each family on each slice that has any."""
        return self._queue.in_flight_by_family()

    def in_flight_on(self, slice_: SliceKey) -> int:
        """Number of requests on one slice."""
        return self._queue.in_flight_on(slice_)

    @property
    def live(self) -> frozenset[SliceKey]:
        """Slices that get new requests."""
        return self._queue.live

    def set_reach(self, family: str, reach: AccuracyReach) -> None:
        """Set the accuracies that a family can give from now on."""
        self._queue.set_reach(family, reach)

    def apply_route(self, route: Route, why: str, elsewhere: bool = False) -> None:
        """Route a family by this from now on. Another router takes over the waiting requests, in order of arrival.
        `elsewhere`: other workers have live slices, or slices are not probed yet, so that it is worth waiting."""
        effects = self._queue.table(route, why, self._clock.monotonic_s(), elsewhere)
        assert self._queue.router is not None
        self._next_s = self._queue.router.next_s
        self._apply_effects(effects)

    def on_carbon(self, ratio: float | None) -> None:
        """Tell the router the carbon intensity over its mean; None = not known."""
        self._apply_effects(self._queue.carbon(ratio, self._clock.monotonic_s()))

    def take_over(self, family: str, other: "AsyncFamilyQueue") -> None:
        """Serve a family that another queue has served until now; `apply_route` must follow."""
        leaving = other._queue.detach(family, self._clock.monotonic_s())
        self._queue.attach(leaving)
        bound = (each.ticket for pinned in leaving.pinned.values() for each in pinned)
        ids = [ticket.id for ticket in (*leaving.waiting, *bound)]
        self._futures.update({id_: other._futures.pop(id_) for id_ in ids})
        self._moved_to.pop(family, None)
        other._moved_to[family] = self
        other._set_timer()

    def snapshot(self, ticket: Ticket, planned: Route, missing: Mapping[SliceKey, str]) -> FamilySnapshot:
        """Snapshot of a family for a ticket that is only asked about (ExplainRequest)."""
        queue, family = self._queue, ticket.family
        told = getattr(queue.router, "scores", None)
        scores = told(ticket) if told is not None else None
        route, reach = queue.route(family), queue.reach(family)
        return FamilySnapshot(planned, route, missing, self.in_flight, self.waiting_of(family)[0], reach, scores)

    def submit(self, ticket: Ticket) -> "Pick | Future":
        """Submit a ticket: a pick at once, or a future of one; a caller that is cancelled meanwhile calls `abandon`.

        Raises:
            QueueFull: it would have to wait and there is no room.
            Unavailable: no slice is live, and none was within no_slice_wait_s.
            Infeasible: nothing that is live or planned is as accurate as it asks.
        """
        if ticket.family in self._moved_to:
            return self._moved_to[ticket.family].submit(ticket)
        pick = self._queue.submit(ticket, self._clock.monotonic_s())
        if pick is None:
            future = self._wait(ticket)
            if displaced := self._queue.push_out(self._clock.monotonic_s()):
                self._apply_effects(displaced)
            return future
        if self._futures and (self._next_s() is not None or self._timer is not None):
            self._set_timer()
        return pick

    def submit_pinned(self, ticket: Ticket, slice_: SliceKey, variant: str) -> "Pick | Future":
        """Like `submit`, for a request that only this slice may serve, also while it drains."""
        if ticket.family in self._moved_to:
            return self._moved_to[ticket.family].submit_pinned(ticket, slice_, variant)
        return self._queue.submit_pinned(ticket, slice_, variant, self._clock.monotonic_s()) or self._wait(ticket)

    def is_idle(self, slice_: SliceKey) -> bool:
        """Whether a slice has no request of these families, and none waits."""
        return self._queue.is_idle(slice_)

    def only_jobs(self, slice_: SliceKey) -> bool:
        """Whether no request of these families waits or is on a slice, those of jobs left out."""
        return self._queue.only_jobs(slice_)

    def submit_idle(self, ticket: Ticket, slice_: SliceKey) -> Pick | None:
        """A credit of a slice while it is idle and no request waits, for a request of a job; None: it does not wait."""
        if ticket.family in self._moved_to:
            return self._moved_to[ticket.family].submit_idle(ticket, slice_)
        return self._queue.submit_idle(ticket, slice_, self._clock.monotonic_s())

    def done(self, ticket: Ticket, pick: Pick, outcome: Outcome) -> None:
        """End a picked request; its credit goes to a waiting one."""
        if ticket.family in self._moved_to:
            self._moved_to[ticket.family].done(ticket, pick, outcome)
            return
        effects = self._queue.done(ticket, pick, outcome, self._clock.monotonic_s())
        if effects or self._futures:
            self._apply_effects(effects)

    def abandon(self, ticket: Ticket, future: "Future") -> None:
        """Withdraw a ticket whose client went away (or whose time ran out) while it waited."""
        if ticket.family in self._moved_to:
            self._moved_to[ticket.family].abandon(ticket, future)
            return
        self._futures.pop(ticket.id, None)  # also of one that was cancelled, and gave its pick back unseen
        if self._queue.leave(ticket, self._clock.monotonic_s()):
            self._set_timer()
        elif future.done() and not future.cancelled() and future.exception() is None:
            self.done(ticket, future.result(), GIVEN_UP)  # picked and cancelled in the same turn of the loop

    def expire(self) -> None:
        """Fail requests that waited too long for a slice of their family, or for an accuracy."""
        self._apply_effects(self._queue.expire(self._clock.monotonic_s()))

    def redirect_waiting(self, sequences: bool, family: str = "") -> None:
        """Redirect queued requests of this family ("" = all) to other workers; those of sequences, too, or
        they wait on: their requests have an order here."""
        self._apply_effects(self._queue.redirect_waiting(sequences, self._clock.monotonic_s(), family))

    def _wait(self, ticket: Ticket) -> "Future":
        future = self._futures[ticket.id] = asyncio.get_running_loop().create_future()
        if self._next_s() is not None:
            self._set_timer()
        return future

    def _apply_effects(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Idle):
                self._on_idle()
            elif isinstance(effect, Refusal):
                future = self._futures.pop(effect.ticket.id)
                if not future.done():
                    future.set_exception(effect.error)
            else:
                self._futures.pop(effect[0].id).set_result(effect[1])
        if self._timer is not None or self._next_s() is not None:
            self._set_timer()

    def _set_timer(self) -> None:
        """Keep the timer at the time that the router asks for."""
        due_s = self._queue.next_s()
        if due_s == self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_s = None, due_s
        if due_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(loop.time() + max(0.0, due_s - self._clock.monotonic_s()), self._on_timer)

    def _on_timer(self) -> None:
        due_s, self._timer, self._due_s = self._due_s, None, None
        now_s = self._clock.monotonic_s()
        if due_s is not None and now_s < due_s:
            self._set_timer()  # event loops round: it may ring a little early
        else:
            self._apply_effects(self._queue.tick(now_s))
