"""HOLDING: every request waits for a while before it may go: a router with a timer."""

from collections.abc import Sequence

from dispatcher.routers.credits import Account, CreditPick
from dispatcher.routers.single_queue import ANYWHERE, SingleQueueRouter
from trefoil.core.brains import Pick, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import RouteTarget

HOLD_S = 0.05


class Holding(SingleQueueRouter):
    name = "holding"
    _measure = "requests in flight"

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        self._queue.check(ticket)
        self._queue.push(ANYWHERE, ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        due_s = self.next_s()
        return super().on_credit(slice, now_s) if due_s is not None and due_s <= now_s + 1e-9 else None

    def next_s(self) -> float | None:
        oldest_s = min((ticket.arrived_s for ticket in self._queue.tickets()), default=None)
        return None if oldest_s is None else oldest_s + HOLD_S

    def _deal(self, live: Sequence[RouteTarget]) -> None:
        pass

    def _idlest(self) -> CreditPick | None:
        free = [account for account in self._accounts if account.in_flight < account.limit]
        return self._credits.take(min(free, key=self._score)) if free else None

    def _score(self, account: Account) -> float:
        return account.in_flight
