"""Who waits: first in, first out inside a lane, all lanes of a family under one bound in requests and bytes.

A lane is whatever the router binds its order to (a class for `weighted`, the whole family for `fifo`). Order is that of
arrival: a ticket that comes back (its slice died before it was executed, its class lost its last slice) takes the place
that its arrival gives it. A ticket that was admitted once is never refused again.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from trefoil.core.brains import Ticket
from trefoil.core.errors import TrefoilError

REQUESTS_MAX: Final = 1024  # where the route names no bound: a second of a busy ten-GPU family
BYTES_MAX: Final = 256 * 2**20  # 400 images of 224 x 224 x 3 FP32

Lane = TypeVar("Lane", bound=Hashable)


class QueueFull(TrefoilError):
    """A queue at its bound; the message names queue, depth and limit. Goes out as RESOURCE_EXHAUSTED."""


class FifoQueue(Generic[Lane]):
    """Tickets by lane. `name` is what a refused client reads."""

    def __init__(self, name: str, requests_max: int = REQUESTS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.name = name
        self.bytes = 0
        self._limits = (requests_max, bytes_max)
        self._lanes: dict[Lane, OrderedDict[int, Ticket]] = {}
        self._lane_of: dict[int, Lane] = {}

    def __len__(self) -> int:
        return len(self._lane_of)

    def limit(self, requests_max: int, bytes_max: int) -> None:
        """Take the bounds of a route (0 = the default). Tickets already inside stay, also beyond a lower bound."""
        self._limits = (requests_max or REQUESTS_MAX, bytes_max or BYTES_MAX)

    def check(self, ticket: Ticket) -> None:
        """Whether there is room.

        Raises:
            QueueFull: one more request, or its bytes, would exceed the bound.
        """
        requests_max, bytes_max = self._limits
        if len(self) >= requests_max:
            raise self._full(f"holds {len(self)} requests, limit {requests_max}")
        if self.bytes + ticket.bytes > bytes_max:
            raise self._full(f"holds {self.bytes} bytes, {ticket.bytes} more exceed the limit of {bytes_max}")

    def push(self, lane: Lane, ticket: Ticket) -> None:
        """Let a ticket wait in a lane, in the order of arrival. Ask `check` first where it is new."""
        assert ticket.id not in self._lane_of, f"ticket {ticket.id} waits already"
        tickets = self._lanes.setdefault(lane, OrderedDict())
        late = bool(tickets) and _order(ticket) < _order(next(reversed(tickets.values())))
        tickets[ticket.id] = ticket
        self._lane_of[ticket.id] = lane
        self.bytes += ticket.bytes
        if late:
            self._lanes[lane] = OrderedDict((each.id, each) for each in sorted(tickets.values(), key=_order))

    def pop(self, lane: Lane) -> Ticket | None:
        """The ticket that waits longest in a lane."""
        tickets = self._lanes.get(lane)
        if not tickets:
            return None
        return self._forget(next(iter(tickets.values())))

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out of wherever it waits; False if it does not."""
        if ticket.id not in self._lane_of:
            return False
        self._forget(ticket)
        return True

    def depth(self, lane: Lane) -> int:
        """How many wait in a lane."""
        return len(self._lanes.get(lane, ()))

    def lanes(self) -> tuple[Lane, ...]:
        """The lanes in which somebody waits."""
        return tuple(self._lanes)

    def _forget(self, ticket: Ticket) -> Ticket:
        lane = self._lane_of.pop(ticket.id)
        tickets = self._lanes[lane]
        del tickets[ticket.id]
        if not tickets:
            del self._lanes[lane]
        self.bytes -= ticket.bytes
        return ticket

    def _full(self, what: str) -> QueueFull:
        return QueueFull(f"queue {self.name} is full: it {what}", remedy="send less, or raise the route's queue bounds")


def _order(ticket: Ticket) -> tuple[float, int]:
    return ticket.arrived_s, ticket.id
