"""NEWEST: who came last goes first; few may wait."""

from collections.abc import Sequence
from typing import Any, ClassVar

from dispatcher.queues.fifo import FifoQueue, QueueFull
from trefoil.core.brains import Ticket
from trefoil.core.parts import Traits

WAITING_MAX = 4


class Newest(FifoQueue[Any]):
    traits: ClassVar[Traits] = Traits(order="newest")

    def check(self, ticket: Ticket) -> None:
        super().check(ticket)
        if self.waiting >= WAITING_MAX:
            raise QueueFull(f"the newest of {self.name} let no more than {WAITING_MAX} wait")

    def pop(self, lane: Any) -> Ticket | None:
        last = self._last(lane)
        if last is not None:
            self.remove(last)
        return last

    def pop_first(self, lanes: Sequence[Any]) -> Ticket | None:
        found = [(ticket.arrived_s, ticket.id, lane) for lane in lanes if (ticket := self._last(lane)) is not None]
        return self.pop(max(found)[2]) if found else None

    def first(self, lane: Any) -> Ticket | None:
        return self._last(lane)

    def _last(self, lane: Any) -> Ticket | None:
        waiting = [ticket for line in self._lines.get(lane, ()) for ticket in line.tickets.values()]
        return max(waiting, key=lambda ticket: (ticket.arrived_s, ticket.id), default=None)
