"""What routers with one line for the whole family have in common: who waits is taken by any slice that he may go to.

Data: live targets with credits and accuracies; of a ticket, what the queue reads and `min_accuracy`.
Decision: on arrival the slice that `_idlest` chooses; later, for a slice with a free credit, the ticket that it takes.
Formulation: tickets without a floor stand in lane 0, those with one in the lane of the lowest live accuracy that is
    enough (lane i: at least the i-th lowest; UNSERVED: no live slice is). A slice serves lane 0 and those up to its own
    accuracy, earliest turn first. An arrival goes past those who wait only where none of them may go.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from dispatcher.routers.credits import Account, CreditPick, Credits
from trefoil.core.brains import Outcome, Pick, Queue, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget

ANYWHERE: Final = 0
UNSERVED: Final = -1


class SingleQueueRouter(ABC):
    """Base of routers with one queue for the whole family; whom to choose is its subclass's. A pure state machine,
    called in order."""

    name = ""

    def __init__(self, family: str, queue: Queue) -> None:
        self._queue = queue
        self._credits = Credits()
        self._accounts: list[Account] = []
        self._levels: tuple[float, ...] = ()  # accuracies of live slices, ascending

    def on_table(self, route: Route, now_s: float) -> None:
        """Route by this table from now on; what waits keeps its place."""
        live = [target for target in route.targets if not target.draining and target.credits > 0]
        self._queue.limit(route.queue_requests_max, route.queue_bytes_max)
        self._credits.limit({target.slice: target.credits for target in live})
        self._accounts = [self._credits.account(target.slice) for target in live]
        levels = tuple(sorted({target.accuracy for target in live}))
        for target, account in zip(live, self._accounts, strict=True):
            why = f"{self.name}: {target.slice.name} {self._reason(target)}"
            account.pick = CreditPick(target.slice, target.variant, target.stage, why, account)
            account.accuracy = target.accuracy
            account.lanes = (ANYWHERE, *range(1, bisect_left(levels, target.accuracy) + 2))
        if levels != self._levels:
            self._levels = levels
            self._stand_anew()
        self._deal(live)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:  # noqa: B027 (a default, not a duty)
        """Carbon does not matter here."""

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        """Assign an arrival to a slice at once, or None: the ticket waits.

        Raises:
            QueueFull: it would have to wait and there is no room.
        """
        queue = self._queue
        if not ticket.min_accuracy:
            pick = self._idlest() if not queue.waiting else self._past_the_line(0.0)
            if pick is not None:
                return pick
            queue.check(ticket)
            queue.push(ANYWHERE, ticket)
            return None
        pick = self._past_the_line(ticket.min_accuracy)
        if pick is not None:
            return pick
        queue.check(ticket)
        queue.push(self._lane(ticket.min_accuracy), ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        """The next ticket for a slice that may have a credit."""
        queue = self._queue
        if not queue.waiting:
            return None
        account = self._credits.free(slice)
        if account is None:
            return None
        floored = queue.waiting > queue.depth(ANYWHERE)
        ticket = queue.pop_first(account.lanes) if floored else queue.pop(ANYWHERE)
        return None if ticket is None else (ticket, self._credits.take(account))

    def on_done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> None:
        """The request is over, one way or another: its credit is free."""
        self._credits.give_back(pick)

    def on_cancel(self, ticket: Ticket, now_s: float) -> None:
        """The ticket waits no longer."""
        self._queue.remove(ticket)

    def on_pinned(self, ticket: Ticket, slice: SliceKey, now_s: float) -> Pick | None:
        """A credit of this very slice, for a request that no other slice may serve."""
        account = self._credits.free(slice)
        return None if account is None else self._credits.take(account)

    def next_s(self) -> float | None:
        """No request is held back: picks happen when a request comes or ends."""
        return None

    def scores(self, ticket: Ticket) -> dict[SliceKey, tuple[float, str]]:
        """Score of each live slice that may have this ticket; lower goes first."""
        return {
            account.slice: (
                self._score(account) if account.in_flight < account.limit else float("inf"),
                f"{self._measure}; {account.in_flight} of {account.limit} credits taken",
            )
            for account in self._accounts
            if account.accuracy >= ticket.min_accuracy
        }

    # --- what a router of this kind decides ---------------------------------------------------------------------------

    _measure = ""  # what `_score` is, in words

    @abstractmethod
    def _deal(self, live: Sequence[RouteTarget]) -> None:
        """The table is new; `self._accounts` are of `live`, in its order."""

    @abstractmethod
    def _idlest(self) -> CreditPick | None:
        """Take a credit of the slice that is to have a request; None if no slice has one."""

    @abstractmethod
    def _score(self, account: Account) -> float:
        """What `_idlest` compares."""

    def _reason(self, target: RouteTarget) -> str:
        return "had a credit"

    # ------------------------------------------------------------------------------------------------------------------

    def _past_the_line(self, floor: float) -> CreditPick | None:
        """A slice for an arrival that no one who waits could have."""
        queue = self._queue
        accounts = [each for each in self._accounts if each.in_flight < each.limit and each.accuracy >= floor]
        if queue.waiting:
            lanes = frozenset(queue.lanes())
            accounts = [each for each in accounts if lanes.isdisjoint(each.lanes)]
        best = min(accounts, key=lambda each: (self._score(each), each.changed_at, each.order), default=None)
        return self._credits.take(best) if best is not None else None

    def _lane(self, floor: float) -> int:
        at = bisect_left(self._levels, floor)
        return at + 1 if at < len(self._levels) else UNSERVED

    def _stand_anew(self) -> None:
        """Lanes of those with a floor follow the accuracies of the table."""
        queue, floored = self._queue, []
        for lane in queue.lanes():
            while lane != ANYWHERE and (ticket := queue.pop(lane)) is not None:
                floored.append(ticket)
        for ticket in floored:
            queue.push(self._lane(ticket.min_accuracy), ticket)
