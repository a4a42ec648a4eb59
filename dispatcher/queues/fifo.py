"""Queue: first in, first out inside a lane, all lanes of a family under one bound in requests and bytes.

A lane is whatever the router binds its order to (a class for `weighted`, the whole family for `fifo`). Order is that of
arrival. A ticket comes back if its slice died before it was executed, or if its class lost its last slice. It then
takes the place that its arrival gives it. A ticket that was admitted once is never refused again. Of a ticket, id,
arrived_s, bytes and priority are read, nothing else: a trefoil_class waits in the same line as the others.

Priority is Triton's: 1 comes first, 0 (and what is out of range) is the default level. A level is worth AGING_S of
waiting: a ticket's turn is arrived_s + AGING_S * (level - default level), and the earliest turn goes first. So those of
one level stay in order of arrival. No request is overtaken by one that arrives more than AGING_S * (LEVELS - 1) after
it, so no request starves.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from trefoil.core.brains import Ticket
from trefoil.core.errors import TrefoilError

REQUESTS_MAX: Final = 1024  # where the route names no bound: a second of a busy ten-GPU family
BYTES_MAX: Final = 256 * 2**20  # 400 images of 224 x 224 x 3 FP32
LEVELS: Final = 8  # of priority, 1 the most urgent
LEVEL_DEFAULT: Final = 4
AGING_S: Final = 1.0  # longer than a family's SLO: between two levels order is strict until a request waits that long

Lane = TypeVar("Lane", bound=Hashable)


class QueueFull(TrefoilError):
    """Queue at its bound; the message names queue, depth and limit. Goes out as RESOURCE_EXHAUSTED."""


def level(priority: int) -> int:
    """Priority level of Triton's `priority`."""
    return priority if 1 <= priority <= LEVELS else LEVEL_DEFAULT


def order_key(ticket: Ticket) -> tuple[float, int]:
    """Sort key of a ticket: the order in which tickets of one lane are served."""
    priority = ticket.priority
    late_s = AGING_S * (level(priority) - LEVEL_DEFAULT) if priority else 0.0
    return ticket.arrived_s + late_s, ticket.id


@dataclass(slots=True, eq=False)
class Line:
    """Those of one lane and level. `newest_s`: when the last of them arrived, or one that stood behind it and left."""

    level: Hashable = LEVEL_DEFAULT
    tickets: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    newest_s: float = float("-inf")


class FifoQueue(Generic[Lane]):
    """Tickets by lane. `name` is what a refused client reads, `waiting` how many there are."""

    def __init__(self, name: str, requests_max: int = REQUESTS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.name = name
        self.bytes = 0
        self.waiting = 0
        self._limits = (requests_max, bytes_max)
        self._lines: dict[Lane, list[Line]] = {}  # of each lane, one for every level that was seen; mostly one

    def __len__(self) -> int:
        return self.waiting

    def limit(self, requests_max: int, bytes_max: int) -> None:
        """Take the bounds of a route (0 = the default). Tickets already inside stay, also beyond a lower bound."""
        self._limits = (requests_max or REQUESTS_MAX, bytes_max or BYTES_MAX)
        waiting = {lane: [line for line in lines if line.tickets] for lane, lines in self._lines.items()}
        self._lines = {lane: lines for lane, lines in waiting.items() if lines}

    def check(self, ticket: Ticket) -> None:
        """Check that there is room for a ticket.

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
        lines = self._lines.get(lane)
        if lines is None:
            lines = self._lines[lane] = [Line()]
        line = self._line(lines, ticket)
        tickets, id_, arrived_s = line.tickets, ticket.id, ticket.arrived_s
        assert id_ not in tickets, f"ticket {id_} waits already"
        tickets[id_] = ticket
        self.waiting += 1
        self.bytes += ticket.bytes
        if arrived_s > line.newest_s:
            line.newest_s = arrived_s
        elif len(tickets) > 1:
            line.tickets = OrderedDict((each.id, each) for each in sorted(tickets.values(), key=order_key))

    def pop(self, lane: Lane) -> Ticket | None:
        """Pop the ticket of a lane whose turn it is."""
        lines = self._lines.get(lane)
        if lines is None:
            return None
        tickets = lines[0].tickets if len(lines) == 1 else self._first(lines)
        if not tickets:
            return None
        ticket = tickets.popitem(last=False)[1]
        self.waiting -= 1
        self.bytes -= ticket.bytes
        return ticket

    def pop_first(self, lanes: Sequence[Lane]) -> Ticket | None:
        """Pop, of the tickets of several lanes, the one whose turn is first."""
        best: Lane | None = None
        earliest: tuple[float, int] | None = None
        for lane in lanes:
            tickets = self._first(self._lines.get(lane, ()))
            if tickets:
                due = self.turn(next(iter(tickets.values())))
                if earliest is None or due < earliest:
                    best, earliest = lane, due
        return self.pop(best) if earliest is not None else None  # type: ignore[arg-type]

    def first(self, lane: Lane) -> Ticket | None:
        """Ticket of a lane whose turn it is; it stays."""
        lines = self._lines.get(lane)
        if lines is None:
            return None
        tickets = lines[0].tickets if len(lines) == 1 else self._first(lines)
        return next(iter(tickets.values())) if tickets else None

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out of wherever it waits; False if it does not."""
        for lines in self._lines.values():
            for line in lines:
                if line.tickets.pop(ticket.id, None) is not None:
                    self.waiting -= 1
                    self.bytes -= ticket.bytes
                    return True
        return False

    def depth(self, lane: Lane) -> int:
        """Number of tickets that wait in a lane."""
        lines = self._lines.get(lane, ())
        return len(lines[0].tickets) if len(lines) == 1 else sum(len(line.tickets) for line in lines)

    def lanes(self) -> tuple[Lane, ...]:
        """Lanes with waiting requests."""
        found = self._lines.items()
        return tuple([lane for lane, lines in found if lines[0].tickets or any(line.tickets for line in lines)])

    def tickets(self) -> list[Ticket]:
        """All waiting tickets, by turn."""
        return sorted(
            (t for lines in self._lines.values() for line in lines for t in line.tickets.values()), key=self.turn
        )

    def turn(self, ticket: Ticket) -> tuple[float, int]:
        """Sort key of a ticket in its lane: of one level it is that of arrivals."""
        return order_key(ticket)

    def _line(self, lines: list[Line], ticket: Ticket) -> Line:
        """Line of a ticket in its lane."""
        line, priority = lines[0], ticket.priority
        return line_of_level(lines, level(priority)) if priority or line.level != LEVEL_DEFAULT else line

    def _first(self, lines: Sequence[Line]) -> OrderedDict[int, Ticket] | None:
        """The tickets of the level whose turn is first."""
        waiting = [line.tickets for line in lines if line.tickets]
        return min(waiting, key=lambda tickets: self.turn(next(iter(tickets.values()))), default=None)

    def _full(self, what: str) -> QueueFull:
        return QueueFull(f"queue {self.name} is full: it {what}", remedy="send less, or raise the route's queue bounds")


def line_of_level(lines: list[Line], wanted: Hashable) -> Line:
    """Line of a level in a lane, new where it has none."""
    for line in lines:
        if line.level == wanted:
            return line
    lines.append(Line(wanted))
    return lines[-1]
