"""Router `weighted`: shares bind between classes, first in first out inside a class.

Source: InfAdapter section 4 (weighted round robin by the quota of each variant); DESIGN section 4, "The dispatcher".
Data: live targets of the route; a class k = (variant, slice type) with share w_k = sum of its targets' weights, made to
    sum to 1; credits c_s of each slice s.
Decision: the class of a request, at its arrival; the slice of that class that serves it, when one has a credit.
Formulation: lag_k = w_k * (arrivals so far) - (requests given to k). At each arrival lag_k += w_k; among the classes
    with lag_k > 0 the one whose lag would reach 1 first, argmin (1 - lag_k) / w_k, gets the request and lag_k -= 1.
    This is the earliest deadline first schedule of proportionate fairness (Baruah et al. 1996; WF2Q): |lag_k| < 1
    always, so that every class is within one request of its share, for any number of classes. Inside a class the
    longest waiting request goes to the slice with the fewest in flight.
Deviations: classes, not slices, are the unit of the round robin. A slice alone meets a tight objective at a far lower
    utilisation than one of a pool, and a plan's accuracy needs shares per variant, not per slice. The plain "smooth"
    round robin (largest lag first) lets a class fall behind by more than one request with three classes or more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dispatcher.queues.fifo import FifoQueue
from dispatcher.routers.credits import Account, Credits, idlest
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget

Key = tuple[str, str]  # (variant, slice type)
NOWHERE: Final[Key] = ("", "")  # the lane of those who arrived while no slice was live
EPSILON: Final = 1e-9  # sums of binary fractions: a lag of 1e-16 is none


@dataclass(slots=True)
class _Class:
    share: float
    lag: float = 0.0
    picks: dict[SliceKey, Pick] = field(default_factory=dict)
    accounts: list[Account] = field(default_factory=list)


class Weighted:
    """A `Router`: pure state machine, called in order."""

    def __init__(self, family: str, queue: FifoQueue[Key] | None = None) -> None:
        self._queue: FifoQueue[Key] = queue if queue is not None else FifoQueue(family)
        self._credits = Credits()
        self._classes: dict[Key, _Class] = {}
        self._class_of: dict[SliceKey, Key] = {}

    def on_table(self, route: Route, now_s: float) -> None:
        """Route by this table from now on. Who waits for a class that is gone gets another one, in order of arrival."""
        live = [target for target in route.targets if not target.draining and target.credits > 0]
        self._queue.limit(route.queue_requests_max, route.queue_bytes_max)
        self._credits.limit({target.slice: target.credits for target in live})
        self._classes = _carry_lags(self._classes, _classes(live))
        for each in self._classes.values():
            each.accounts = [self._credits.account(slice_) for slice_ in each.picks]
        self._class_of = {slice_: key for key, each in self._classes.items() for slice_ in each.picks}
        if self._classes:
            self._reassign(key for key in self._queue.lanes() if key not in self._classes)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Carbon is in the weights already."""

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        """A slice at once, or None: the ticket waits for its class.

        Raises:
            QueueFull: it would have to wait and there is no room; no class is charged for it.
        """
        key = self._due()
        chosen = self._classes.get(key)
        if chosen is not None and not self._queue.depth(key):
            account = idlest(chosen.accounts)
            if account is not None:
                self._charge(key)
                self._credits.take(account)
                return chosen.picks[account.slice]
        self._queue.check(ticket)
        self._charge(key)
        self._queue.push(key, ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        """The next ticket of the slice's class, if the slice has a credit."""
        key = self._class_of.get(slice)
        if key is None or not self._credits.free(slice) or (ticket := self._queue.pop(key)) is None:
            return None
        self._credits.take(self._credits.account(slice))
        return ticket, self._classes[key].picks[slice]

    def on_done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> None:
        """The request is over, one way or another: its credit is free."""
        self._credits.give_back(pick.slice)

    def on_cancel(self, ticket: Ticket, now_s: float) -> None:
        """The ticket waits no longer. Its class stays charged: it was served its turn, and the turn was given up."""
        self._queue.remove(ticket)

    def _due(self) -> Key:
        """The class that the next request belongs to."""
        due, due_at = NOWHERE, float("inf")
        for key, each in self._classes.items():
            lag = each.lag + each.share
            if lag > EPSILON and (1.0 - lag) / each.share < due_at - EPSILON:
                due, due_at = key, (1.0 - lag) / each.share
        return due

    def _charge(self, key: Key) -> None:
        for each in self._classes.values():
            each.lag += each.share
        if key in self._classes:
            self._classes[key].lag -= 1.0

    def _reassign(self, orphaned: Iterable[Key]) -> None:
        homeless: list[Ticket] = []
        for lane in tuple(orphaned):
            while (ticket := self._queue.pop(lane)) is not None:
                homeless.append(ticket)
        for ticket in sorted(homeless, key=lambda each: (each.arrived_s, each.id)):
            key = self._due()
            self._charge(key)
            self._queue.push(key, ticket)


def _classes(live: Iterable[RouteTarget]) -> dict[Key, _Class]:
    targets = list(live)
    total = sum(target.weight for target in targets)
    classes: dict[Key, _Class] = {}
    for target in targets:
        # Only classes of no weight are live: any answer is better than none, so they share equally.
        share = target.weight / total if total > 0 else 1.0 / len(targets)
        each = classes.setdefault((target.variant, target.slice.slice_type), _Class(0.0))
        each.share += share
        each.picks[target.slice] = Pick(target.slice, target.variant, target.stage, "")
    for (variant, slice_type), each in classes.items():
        why = f"weighted: {variant} on {slice_type}, share {each.share:.3f}"
        each.picks = {slice_: Pick(slice_, pick.variant, pick.stage, why) for slice_, pick in each.picks.items()}
    return {key: each for key, each in classes.items() if each.share > 0}


def _carry_lags(old: dict[Key, _Class], new: dict[Key, _Class]) -> dict[Key, _Class]:
    """Tables may change every second: starting from zero each time would starve small shares.

    What vanished classes were owed is spread by share, so that lags still sum to zero.
    """
    owed = sum(each.lag for key, each in old.items() if key not in new)
    for key, each in new.items():
        each.lag = (old[key].lag if key in old else 0.0) + owed * each.share
    return new
