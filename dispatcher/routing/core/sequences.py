"""Which slice each open sequence of a family lives on, and whose turn it is inside a sequence.

Source: Triton's sequence batcher (core/src/sequence_batch_scheduler.cc): a sequence lives in one instance of one
    server from its START to its END or until it was idle for max_sequence_idle_microseconds.
Data: tickets with sequence_id, sequence_start, sequence_end; where the router put a START; which slices were lost.
Decision: wait, go to the slice of the sequence, go wherever the router says (a START), or be refused.
Formulation: a sequence is a line of tickets, of which the first is under way, and a pin (slice, variant). START
    without a pin goes to the router; all others go to the pin, in order, one at a time. The pin ends with an END that
    was executed, idle_s after the last answer, or with its slice. A ticket without START and pin is refused in Triton's
    words, one of another tenant than its sequence's in ours. A START on an open sequence begins it again where it is,
    as Triton does, unless its slice takes nothing new. Where no more may be open, the client that has most open loses
    its newest idle one to a client that has fewer.
Deviations: Triton counts idle time from the arrival of the last request, this from its answer: Triton forgets first,
    and its refusal is passed on. Nothing is kept over a restart: the slice would not know that its client is back.
"""

from collections import Counter, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Final

from dispatcher.queues.fifo import QueueFull
from trefoil.core.brains import Ticket
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import SliceKey

IDLE_DEFAULT_S: Final = 1.0  # what Triton takes max_sequence_idle_microseconds 0 for


class SequencesFull(QueueFull):
    """Too many open sequences, or too many requests of one."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a sequence lives. `endpoint` tells one Triton from the next one on the same slice."""

    slice: SliceKey
    variant: str
    endpoint: object = None


@dataclass(slots=True)
class _Sequence:
    tenant: str
    client: str  # tenant, or host where tenants are not known
    pin: Pin | None = None
    line: deque[int] = field(default_factory=deque)  # ids of tickets; the first one is under way
    touched_s: float = 0.0
    lost: str = ""  # why the pin was taken away before its END


class Sequences:
    """Of one family. Times are the caller's monotonic clock.

    A ticket comes by `enter`, and asks `next_pin` when it is its turn. A START is `placed` once it has a slice. A
    ticket goes by `leave`, which returns the id of the next one.
    """

    def __init__(self, family: str, idle_s: float, open_max: int, line_max: int) -> None:
        self._family = family
        self._idle_s = idle_s
        self._open_max = open_max
        self._line_max = line_max
        self._open: dict[str, _Sequence] = {}
        self._open_by: Counter[str] = Counter()  # of each client

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, ticket: Ticket, now_s: float) -> bool:
        """True: it is this ticket's turn. False: it waits for those of its sequence that came before.

        Raises:
            InvalidInput: it is not a START, and no such sequence is open; or the sequence is another tenant's.
            SequencesFull: one sequence, or one request of the sequence, too many.
        """
        sequence = self._open.get(ticket.sequence_id)
        if sequence is None:
            if not ticket.sequence_start:
                raise missing_start(ticket)
            if len(self._open) >= self._open_max:
                self.expire(now_s)
            client = ticket.flow[0]
            if len(self._open) >= self._open_max and not self._push_out(client):
                raise SequencesFull(
                    f"{self._family} has {len(self._open)} open sequences, limit {self._open_max}",
                    remedy="end sequences that are done, or raise the dispatcher's sequences_max",
                )
            sequence = self._open[ticket.sequence_id] = _Sequence(ticket.tenant, client)
            self._open_by[client] += 1
        elif sequence.tenant != ticket.tenant:
            remedy = "take other numbers, or names of your own"
            raise InvalidInput("is another tenant's", field="sequence_id", value=ticket.sequence_id, remedy=remedy)
        if len(sequence.line) >= self._line_max:
            raise SequencesFull(
                f"{len(sequence.line)} requests of sequence {ticket.sequence_id} wait for each other, limit"
                f" {self._line_max}",
                remedy="wait for answers before sending more, or raise the dispatcher's sequence_requests_max",
            )
        sequence.line.append(ticket.id)
        sequence.touched_s = now_s
        return len(sequence.line) == 1

    def next_pin(self, ticket: Ticket, live: Container[SliceKey]) -> Pin | None:
        """Where the first of a line goes; None = a START, for the router. `live` are the slices that take new ones.

        Raises:
            InvalidInput: the sequence is not open any more. The ticket has still to `leave`.
        """
        sequence = self._open[ticket.sequence_id]
        assert sequence.line[0] == ticket.id, "not its turn"
        if ticket.sequence_start:
            if sequence.pin is not None and sequence.pin.slice not in live:
                sequence.pin = None
            sequence.lost = ""
        elif sequence.pin is None:
            raise missing_start(ticket, sequence.lost)
        return sequence.pin

    def placed(self, ticket: Ticket, pin: Pin) -> None:
        """A START was given a slice."""
        sequence = self._open[ticket.sequence_id]
        assert ticket.sequence_start, "only a START is placed"
        sequence.pin, sequence.lost = pin, ""

    def check(self, ticket: Ticket, slice_: SliceKey) -> None:
        """Whether the sequence of the ticket that is under way still lives where it got a credit.

        Raises:
            InvalidInput: its slice was lost meanwhile.
        """
        sequence = self._open[ticket.sequence_id]
        if sequence.pin is None or sequence.pin.slice != slice_:
            raise missing_start(ticket, sequence.lost)

    def leave(self, ticket: Ticket, now_s: float, executed: bool) -> int | None:
        """A ticket is over, or has left its line; the id of the one whose turn it is now."""
        sequence = self._open[ticket.sequence_id]
        first = sequence.line[0] == ticket.id
        sequence.line.remove(ticket.id)
        sequence.touched_s = now_s
        if first and executed and ticket.sequence_end:
            sequence.pin, sequence.lost = None, ""
        if not sequence.line and sequence.pin is None and not sequence.lost:
            self._forget(ticket.sequence_id)
        return sequence.line[0] if first and sequence.line else None

    def lose(self, lost: Callable[[Pin], str]) -> None:
        """Forget where sequences live whose slice is lost. `lost` tells why, "" = it is not."""
        for sequence in self._open.values():
            if sequence.pin is None or not (why := lost(sequence.pin)):
                continue
            sequence.pin, sequence.lost = None, why  # kept for idle_s, to say why

    def expire(self, now_s: float) -> bool:
        """Forget sequences that were idle for too long; whether there were any."""
        idle = [id_ for id_, each in self._open.items() if not each.line and now_s - each.touched_s > self._idle_s]
        for sequence_id in idle:
            self._forget(sequence_id)
        return bool(idle)

    def _push_out(self, client: str) -> bool:
        """Forget the newest idle sequence of the client that has most; False: this client would have as many."""
        most, count = self._open_by.most_common(1)[0]
        if count <= self._open_by[client] + 1:
            return False
        mine = (id_ for id_ in reversed(self._open) if self._open[id_].client == most and not self._open[id_].line)
        newest = next(mine, None)
        if newest is not None:
            self._forget(newest)
        return newest is not None

    def _forget(self, sequence_id: str) -> None:
        client = self._open.pop(sequence_id).client
        self._open_by[client] -= 1
        if not self._open_by[client]:
            del self._open_by[client]

    def open_on(self) -> Counter[SliceKey]:
        """How many sequences live on each slice."""
        return Counter(each.pin.slice for each in self._open.values() if each.pin is not None)


def missing_start(ticket: Ticket, why: str = "") -> InvalidInput:
    """In Triton's words, with what happened to the sequence where it is known."""
    return InvalidInput(
        f"inference request for sequence {ticket.sequence_id} to model '{ticket.family}' must specify the START flag on"
        " the first request of the sequence",
        remedy=f"start it again: {why}" if why else "start it: no such sequence is open, it has ended, or was idle",
    )
