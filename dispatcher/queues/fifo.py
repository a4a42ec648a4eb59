"""Who waits: first in, first out inside a lane, all lanes of a family under one bound in requests and bytes.

A lane is whatever the router binds its order to (a class for `weighted`, the whole family for `fifo`). Order is that of
arrival: a ticket that comes back (its slice died before it was executed, its class lost its last slice) takes the place
that its arrival gives it. A ticket that was admitted once is never refused again. Of a ticket, id, arrived_s and bytes
are read, nothing else.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from trefoil.core.brains import Ticket
from trefoil.core.errors import TrefoilError

REQUESTS_MAX: Final = 1024  # where the route names no bound: a second of a busy ten-GPU family
BYTES_MAX: Final = 256 * 2**20  # 400 images of 224 x 224 x 3 FP32

Lane = TypeVar("Lane", bound=Hashable)


class QueueFull(TrefoilError):
    """A queue at its bound; the message names queue, depth and limit. Goes out as RESOURCE_EXHAUSTED."""


@dataclass(slots=True, eq=False)
class _Line:
    """Those of one lane. `newest_s` is when the last of them arrived, or one that stood behind it and left."""

    tickets: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    newest_s: float = float("-inf")


class FifoQueue(Generic[Lane]):
    """Tickets by lane. `name` is what a refused client reads, `waiting` how many there are."""

    def __init__(self, name: str, requests_max: int = REQUESTS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.name = name
        self.bytes = 0
        self.waiting = 0
        self._limits = (requests_max, bytes_max)
        self._lines: dict[Lane, _Line] = {}

    def __len__(self) -> int:
        return self.waiting

    def limit(self, requests_max: int, bytes_max: int) -> None:
        """Take the bounds of a route (0 = the default). Tickets already inside stay, also beyond a lower bound."""
        self._limits = (requests_max or REQUESTS_MAX, bytes_max or BYTES_MAX)
        self._lines = {lane: line for lane, line in self._lines.items() if line.tickets}

    def check(self, ticket: Ticket) -> None:
        """Whether there is room.

        Raises:
            QueueFull: one more request, or its bytes, would exceed the bound.
        """
        requests_max, bytes_max = self._limits
        if self.waiting >= requests_max:
            raise self._full(f"holds {self.waiting} requests, limit {requests_max}")
        if self.bytes + ticket.bytes > bytes_max:
            raise self._full(f"holds {self.bytes} bytes, {ticket.bytes} more exceed the limit of {bytes_max}")

    def push(self, lane: Lane, ticket: Ticket) -> None:
        """Let a ticket wait in a lane, in the order of arrival. Ask `check` first where it is new."""
        line = self._lines.get(lane)
        if line is None:
            line = self._lines[lane] = _Line()
        tickets, id_, arrived_s = line.tickets, ticket.id, ticket.arrived_s
        assert id_ not in tickets, f"ticket {id_} waits already"
        tickets[id_] = ticket
        self.waiting += 1
        self.bytes += ticket.bytes
        if arrived_s > line.newest_s:
            line.newest_s = arrived_s
        elif len(tickets) > 1:
            line.tickets = OrderedDict((each.id, each) for each in sorted(tickets.values(), key=_order))

    def pop(self, lane: Lane) -> Ticket | None:
        """The ticket that waits longest in a lane."""
        line = self._lines.get(lane)
        if line is None or not line.tickets:
            return None
        ticket = line.tickets.popitem(last=False)[1]
        self.waiting -= 1
        self.bytes -= ticket.bytes
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out of wherever it waits; False if it does not."""
        for line in self._lines.values():
            if line.tickets.pop(ticket.id, None) is not None:
                self.waiting -= 1
                self.bytes -= ticket.bytes
                return True
        return False

    def depth(self, lane: Lane) -> int:
        """How many wait in a lane."""
        line = self._lines.get(lane)
        return len(line.tickets) if line is not None else 0

    def lanes(self) -> tuple[Lane, ...]:
        """The lanes in which somebody waits."""
        return tuple(lane for lane, line in self._lines.items() if line.tickets)

    def tickets(self) -> list[Ticket]:
        """Everybody who waits, in order of arrival."""
        return sorted((each for line in self._lines.values() for each in line.tickets.values()), key=_order)

    def _full(self, what: str) -> QueueFull:
        return QueueFull(f"queue {self.name} is full: it {what}", remedy="send less, or raise the route's queue bounds")


def _order(ticket: Ticket) -> tuple[float, int]:
    return ticket.arrived_s, ticket.id
