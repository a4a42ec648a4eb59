"""Your own queue, as docs/howto/own-policy.md shows one: `--queue tests.support.own_queue:Urgent`."""

from collections.abc import Hashable, Sequence

from dispatcher.queues.fifo import BYTES_MAX, REQUESTS_MAX, QueueFull
from trefoil.core.brains import Ticket
from trefoil.core.parts import Traits


def turn(ticket: Ticket) -> tuple[float, float, int]:
    """Whose answer is due first: the deadline, or the objective after the arrival; who has neither is last."""
    due_s = ticket.arrived_s + ticket.slo_ms / 1e3 if ticket.slo_ms else float("inf")
    return (ticket.deadline_s if ticket.deadline_s is not None else due_s), ticket.arrived_s, ticket.id


class Urgent:
    """Earliest deadline first."""

    traits = Traits(order="deadline")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting = self.bytes = 0
        self._limits = (REQUESTS_MAX, BYTES_MAX)
        self._lines: dict[Hashable, list[Ticket]] = {}

    def limit(self, requests_max: int, bytes_max: int) -> None:
        self._limits = (requests_max or REQUESTS_MAX, bytes_max or BYTES_MAX)

    def check(self, ticket: Ticket) -> None:
        if self.waiting >= self._limits[0] or self.bytes + ticket.bytes > self._limits[1]:
            raise QueueFull(f"queue {self.name} is full: limits {self._limits}", remedy="send less")

    def push(self, lane: Hashable, ticket: Ticket) -> None:
        self._lines.setdefault(lane, []).append(ticket)
        self._lines[lane].sort(key=turn)
        self.waiting += 1
        self.bytes += ticket.bytes

    def pop(self, lane: Hashable) -> Ticket | None:
        line = self._lines.get(lane)
        return self._taken(lane, line[0]) if line else None

    def pop_first(self, lanes: Sequence[Hashable]) -> Ticket | None:
        first = [(turn(self._lines[lane][0]), lane) for lane in lanes if self._lines.get(lane)]
        return self.pop(min(first, key=lambda each: each[0])[1]) if first else None

    def first(self, lane: Hashable) -> Ticket | None:
        line = self._lines.get(lane)
        return line[0] if line else None

    def remove(self, ticket: Ticket) -> bool:
        for lane, line in self._lines.items():
            for each in line:
                if each.id == ticket.id:
                    self._taken(lane, each)
                    return True
        return False

    def depth(self, lane: Hashable) -> int:
        return len(self._lines.get(lane, ()))

    def lanes(self) -> tuple[Hashable, ...]:
        return tuple(lane for lane, line in self._lines.items() if line)

    def tickets(self) -> list[Ticket]:
        return sorted((each for line in self._lines.values() for each in line), key=turn)

    def _taken(self, lane: Hashable, ticket: Ticket) -> Ticket:
        self._lines[lane].remove(ticket)
        self.waiting -= 1
        self.bytes -= ticket.bytes
        return ticket
