"""The queue of a family with sequences: a START goes to the router, whatever follows to the slice of its sequence.

It stands before the family's AsyncFamilyQueue with the same three calls, so that code that serves a request need not
know of it. Nothing here awaits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from dispatcher.routing.async_queue import GIVEN_UP, AsyncFamilyQueue
from dispatcher.routing.core.sequences import Pin, Sequences
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import Clock

Future = asyncio.Future[Pick]


class AsyncSequenceQueue:
    """Queue of one family with sequences. `endpoint_of` tells which Triton stands on a slice, `on_ended` that one has
    fewer sequences."""

    def __init__(
        self,
        queue: AsyncFamilyQueue,
        sequences: Sequences,
        clock: Clock,
        endpoint_of: Callable[[SliceKey], object],
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._sequences = sequences
        self._clock = clock
        self._endpoint_of = endpoint_of
        self._on_left = on_ended
        self._line: dict[int, tuple[Ticket, Future]] = {}  # wait for their turn
        self._submitted: dict[int, Future] = {}  # have their turn, wait for a slice or a credit

    def in_flight_on(self, slice_: SliceKey) -> int:
        """Number of requests on one slice."""
        return self._queue.in_flight_on(slice_)

    def switch_queue(self, queue: AsyncFamilyQueue) -> None:
        """Switch to another queue of the family, which has taken over the waiting requests."""
        self._queue = queue

    @property
    def open_on(self) -> Counter[SliceKey]:
        """Number of open sequences on each slice."""
        return self._sequences.open_on()

    def submit(self, ticket: Ticket) -> "Pick | Future":
        """Like `AsyncFamilyQueue.submit`; a request also waits for those of its sequence that came before.

        Raises:
            InvalidInput: its sequence is not open.
            SequencesFull, QueueFull, Unavailable: it would have to wait and cannot.
        """
        if not self._sequences.enter(ticket, self._clock.monotonic_s()):
            future: Future = asyncio.get_running_loop().create_future()
            self._line[ticket.id] = (ticket, future)
            return future
        try:
            picked = self._submit(ticket)
        except TrefoilError:
            self._leave(ticket)
            raise
        if isinstance(picked, Pick):
            return picked
        future = asyncio.get_running_loop().create_future()
        self._forward_result(ticket, picked, future)
        return future

    def done(self, ticket: Ticket, pick: Pick, outcome: Outcome) -> None:
        """Like `AsyncFamilyQueue.done`; the next request of the sequence has its turn."""
        self._queue.done(ticket, pick, outcome)
        executed = outcome.executed and outcome.code != "UNAVAILABLE"  # an END that Triton's queue refused ends nothing
        self._leave(ticket, executed)
        if executed and ticket.sequence_end and pick.slice not in self._queue.live:
            self._on_left()

    def abandon(self, ticket: Ticket, future: "Future") -> None:
        """Withdraw a ticket, like `AsyncFamilyQueue.abandon`."""
        if self._line.pop(ticket.id, None) is not None:
            self._leave(ticket)
        elif (submitted := self._submitted.pop(ticket.id, None)) is not None:
            self._queue.abandon(ticket, submitted)
            self._leave(ticket)
        elif future.done() and not future.cancelled() and future.exception() is None:
            self.done(ticket, future.result(), GIVEN_UP)  # picked and cancelled in the same turn of the loop

    def expire(self) -> None:
        """Forget sequences that were idle for too long."""
        if self._sequences.expire(self._clock.monotonic_s()):
            self._on_left()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for any slice, of sequences or not."""
        return self._queue.waiting

    def lose(self, lost: Callable[[Pin], str]) -> None:
        """Forget where sequences live whose slice is lost; `lost` tells why, "" = it is not."""
        self._sequences.lose(lost)

    def _submit(self, ticket: Ticket) -> "Pick | Future":
        """A slice for the ticket whose turn it is."""
        pin = self._sequences.next_pin(ticket, self._queue.live)
        picked = (
            self._queue.submit(ticket) if pin is None else self._queue.submit_pinned(ticket, pin.slice, pin.variant)
        )
        if isinstance(picked, Pick):
            self._placed(ticket, picked)
        return picked

    def _placed(self, ticket: Ticket, pick: Pick) -> None:
        if ticket.sequence_start:
            self._sequences.placed(ticket, Pin(pick.slice, pick.variant, self._endpoint_of(pick.slice)))

    def _forward_result(self, ticket: Ticket, submitted: "Future", future: "Future") -> None:
        """Pass the queue's answer on to the task that waits for `future`."""
        self._submitted[ticket.id] = submitted
        submitted.add_done_callback(lambda _: self._on_result(ticket, submitted, future))

    def _on_result(self, ticket: Ticket, submitted: "Future", future: "Future") -> None:
        if self._submitted.pop(ticket.id, None) is None or submitted.cancelled():
            return  # it was abandoned
        error = submitted.exception()
        if error is None:
            pick = submitted.result()
            self._placed(ticket, pick)
            try:
                self._sequences.check(ticket, pick.slice)
            except TrefoilError as lost:
                self._queue.done(ticket, pick, GIVEN_UP)
                error = lost
            else:
                if future.done():  # cancelled, and its coroutine has not run yet: abandon() will find nothing to do
                    self.done(ticket, pick, GIVEN_UP)
                else:
                    future.set_result(pick)
                return
        self._leave(ticket)
        if not future.done():
            future.set_exception(error)

    def _leave(self, ticket: Ticket, executed: bool = False) -> None:
        next_ = self._sequences.leave(ticket, self._clock.monotonic_s(), executed)
        while next_ is not None:
            ticket, future = self._line.pop(next_)
            next_ = None
            try:
                picked = self._submit(ticket)
            except TrefoilError as error:
                next_ = self._sequences.leave(ticket, self._clock.monotonic_s(), executed=False)
                if not future.done():
                    future.set_exception(error)
                continue
            if not isinstance(picked, Pick):
                self._forward_result(ticket, picked, future)
            elif future.done():
                self._queue.done(ticket, picked, GIVEN_UP)
                next_ = self._sequences.leave(ticket, self._clock.monotonic_s(), executed=False)
            else:
                future.set_result(picked)
