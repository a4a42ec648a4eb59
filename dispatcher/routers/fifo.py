"""Router `fifo`: one queue for the whole family, any free credit pulls.

Source: CLOVER section 4.1 (one FIFO of requests; an instance that finishes pulls the next one).
Data: live targets k of the route with credits c_k; weights are not read.
Decision: the slice that serves a request.
Formulation: on arrival, if nobody waits and some slice has a credit: the one with the fewest requests in flight, then
    the longest not chosen. Otherwise wait; a slice with a free credit takes the request that waits longest.
Deviations: CLOVER's instances hold one request at a time; here c_k, of which one executes and the rest hide the way
    there. The variant mix is what the pool yields: it follows speed and load, so a plan's accuracy does not bind.
"""

from dispatcher.queues.fifo import FifoQueue
from dispatcher.routers.credits import Credits, Pool, Seat
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route


class Fifo:
    """A `Router`: pure state machine, called in order. Of a ticket, only the queue reads anything."""

    def __init__(self, family: str, queue: FifoQueue[None] | None = None) -> None:
        self._queue: FifoQueue[None] = queue if queue is not None else FifoQueue(family)
        self._credits = Credits()
        self._pool = Pool(())

    def on_table(self, route: Route, now_s: float) -> None:
        """Route by this table from now on; what waits keeps its place."""
        live = [target for target in route.targets if not target.draining and target.credits > 0]
        self._queue.limit(route.queue_requests_max, route.queue_bytes_max)
        self._credits.limit({target.slice: target.credits for target in live})
        accounts = [self._credits.account(target.slice) for target in live]
        for target, account in zip(live, accounts, strict=True):
            why = f"fifo: {target.slice.name} had a credit"
            account.pick = Seat(target.slice, target.variant, target.stage, why, account)
        self._pool = Pool(accounts)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Carbon does not matter here."""

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        """A slice at once, or None: the ticket waits.

        Raises:
            QueueFull: it would have to wait and there is no room.
        """
        queue = self._queue
        pick = self._credits.take_idlest(self._pool) if not queue.waiting else None
        if pick is not None:
            return pick
        queue.check(ticket)
        queue.push(None, ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        """The next ticket for a slice that may have a credit."""
        if not self._queue.waiting:
            return None
        account = self._credits.free(slice)
        if account is None or (ticket := self._queue.pop(None)) is None:
            return None
        return ticket, self._credits.take(account)

    def on_done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> None:
        """The request is over, one way or another: its credit is free."""
        self._credits.give_back(pick)

    def on_cancel(self, ticket: Ticket, now_s: float) -> None:
        """The ticket waits no longer."""
        self._queue.remove(ticket)
