"""Router `weighted`: shares bind between classes, first in first out inside a class.

Source: InfAdapter section 4 (weighted round robin by the quota of each variant); DESIGN section 4, "The dispatcher".
Data: live targets of the route; credits c_s of each slice s. A class k = (variant, slice type, weight of one slice) has
    share w_k = sum of its targets' weights, made to sum to 1. Device types, zones and clocks need not be named: where
    slices of theirs get equal shares, one line for all is the better pool; where not, the weights tell.
Decision: the class of a request, at its arrival; the slice of that class that serves it, when one has a credit.
Formulation: lag_k = w_k * (arrivals so far) - (requests given to k). At each arrival lag_k += w_k. Among the classes
    with lag_k > 0 the one whose lag would reach 1 first, argmin (1 - lag_k) / w_k, gets the request. Its lag_k -= 1.
    This is the earliest deadline first schedule of proportionate fairness (Baruah et al. 1996; WF2Q): |lag_k| < 1
    always, so that every class is within one request of its share, for any number of classes. The next class does not
    depend on what the slices do, so turns are dealt ahead. The m-th turn of a class from now is released at turn
    floor((m - lag_k) / w_k) and due at (m + 1 - lag_k) / w_k. Two heaps give the order (`schedule_turns`), at a cost
    that hardly grows with the number of classes. Inside a class the longest waiting request goes to the slice with the
    fewest in flight.
    A request with a floor (`min_accuracy`) takes the next turn of a class that is accurate enough before its time. It
    is charged to that class, so that the requests without a floor make up for it. So shares still bind over all
    requests, as long as floors ask for no more than the share of such classes. What they ask for beyond it is
    forgotten, but for DEBT requests: a burst of them must not keep a class from all other requests for long after.
Deviations: classes, not slices, are the unit of the round robin. A slice alone meets a tight objective at a far lower
    utilisation than one of a pool. A plan's accuracy needs shares per variant, not per slice. The plain "smooth" round
    robin (largest lag first) lets a class fall behind by more than one request with three classes or more.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from dispatcher.queues.fifo import order_key
from dispatcher.routers.credits import CreditPick, Credits, Pool
from trefoil.core.brains import Outcome, Pick, Queue, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget

Kind = tuple[str, str]  # (variant, slice type)
Key = tuple[str, str, int]  # the same, and which of the classes that differ by the weight of a slice
NOWHERE: Final[Key] = ("", "", 0)  # the lane of those who arrived while no slice was live
SAME: Final = 1e-3  # relative: slices of one class, whose weights were rounded
AHEAD: Final = 64  # turns that are dealt at once: a few tens of microseconds
DEBT: Final = 16.0  # requests that a class may be ahead or behind; only floors bring any class beyond one


@dataclass(slots=True, eq=False)
class _Class:
    key: Key
    share: float
    accuracy: float = 0.0
    lag: float = 0.0  # before the first of the turns that are dealt
    targets: list[RouteTarget] = field(default_factory=list)
    pool: Pool = field(default_factory=lambda: Pool(()))


class Weighted:
    """Router `weighted`: a pure state machine, called in order. Of a ticket, it reads `min_accuracy`; its queue reads
    more."""

    def __init__(self, family: str, queue: Queue) -> None:
        self._queue = queue
        self._credits = Credits()
        self._classes: dict[Key, _Class] = {}
        self._schedule: list[_Class] = []
        self._next_turn = 0

    def on_table(self, route: Route, now_s: float) -> None:
        """Route by this table from now on. Who waits for a class that is gone gets another one, in order of arrival."""
        live = [target for target in route.targets if not target.draining and target.credits > 0]
        self._queue.limit(route.queue_requests_max, route.queue_bytes_max)
        self._settle()
        self._classes = _carry_lags(self._classes, _classes(live, self._classes))
        served = [target for each in self._classes.values() for target in each.targets]
        self._credits.limit({target.slice: target.credits for target in served})
        for each in self._classes.values():
            self._seat(each)
        if self._classes:
            self._reassign(key for key in self._queue.lanes() if key not in self._classes)

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Carbon is in the weights already."""

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        """Assign an arrival to a slice at once, or None: the ticket waits for its class.

        Raises:
            QueueFull: it would have to wait and there is no room; no class is charged for it.
        """
        queue = self._queue
        due = self._schedule[self._next_turn] if self._next_turn < len(self._schedule) else self._due()
        if ticket.min_accuracy:
            due = self._due_above(ticket.min_accuracy)
        if due is not None and (not queue.waiting or not queue.depth(due.key)):
            pick = self._credits.take_idlest(due.pool)
            if pick is not None:
                self._next_turn += 1
                return pick
        queue.check(ticket)
        if due is None:
            queue.push(NOWHERE, ticket)
        else:
            self._next_turn += 1
            queue.push(due.key, ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        """The next ticket of the slice's class, if the slice has a credit."""
        if not self._queue.waiting:
            return None
        account = self._credits.free(slice)
        if account is None or account.lane is None or (ticket := self._queue.pop(account.lane)) is None:
            return None
        return ticket, self._credits.take(account)

    def on_done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> None:
        """The request is over, one way or another: its credit is free."""
        self._credits.give_back(pick)

    def on_cancel(self, ticket: Ticket, now_s: float) -> None:
        """The ticket waits no longer. Its class stays charged: it was served its turn, and the turn was given up."""
        self._queue.remove(ticket)

    def on_pinned(self, ticket: Ticket, slice: SliceKey, now_s: float) -> Pick | None:
        """A credit of this very slice, for a request that no other slice may serve; its shares are not charged for
        it."""
        account = self._credits.free(slice)
        return None if account is None else self._credits.take(account)

    def next_s(self) -> float | None:
        """No request is held back: picks happen when a request comes or ends."""
        return None

    def scores(self, ticket: Ticket) -> dict[SliceKey, tuple[float, str]]:
        """Score of each live slice that may have this ticket, in requests until the turn of its class comes."""
        found: dict[SliceKey, tuple[float, str]] = {}
        self._due()
        for each in self._classes.values():
            if each.accuracy < ticket.min_accuracy:
                continue
            ahead = (at for at in range(self._next_turn, len(self._schedule)) if self._schedule[at] is each)
            first = next(ahead, None)
            wait = float(AHEAD) if first is None else first - self._next_turn
            waiting = self._queue.depth(each.key)
            accounts = [self._credits.account(target.slice) for target in each.targets]
            order = sorted(
                accounts, key=lambda one: (one.in_flight >= one.limit, one.in_flight, one.changed_at, one.order)
            )
            for at, account in enumerate(order):
                why = (
                    f"class {each.key[0]} on {each.key[1]}, share {each.share:.3f}, is due in {wait:.0f} requests; "
                    f"{waiting} wait for it; {account.in_flight} of {account.limit} credits taken"
                )
                found[account.slice] = (wait + at / (len(order) + 1), why)
        return found

    def _due(self) -> _Class | None:
        """The class that the next request belongs to; it is charged by a step of `_turn`."""
        if self._next_turn >= len(self._schedule):
            if not self._classes:
                return None
            self._settle()
            classes = list(self._classes.values())
            order = schedule_turns([each.share for each in classes], [each.lag for each in classes], AHEAD)
            self._schedule = [classes[k] for k in order]
        return self._schedule[self._next_turn]

    def _due_above(self, floor: float) -> _Class | None:
        """The class of at least this accuracy whose turn is next; its turn is brought forward to now."""
        if self._next_turn >= AHEAD:  # turns that were brought forward make the list longer
            self._settle()
        due = self._due()
        if due is None or due.accuracy >= floor:
            return due
        for at in range(self._next_turn, len(self._schedule)):
            if self._schedule[at].accuracy >= floor:
                self._schedule.insert(self._next_turn, self._schedule.pop(at))
                return self._schedule[self._next_turn]
        good = [each for each in self._classes.values() if each.accuracy >= floor]
        if not good:
            return None
        taken = self._schedule[: self._next_turn]

        def until(each: _Class) -> float:
            return (1.0 - each.lag - each.share * len(taken) + taken.count(each)) / each.share

        self._schedule.insert(self._next_turn, min(good, key=until))
        return self._schedule[self._next_turn]

    def _settle(self) -> None:
        """Book the turns that were taken, and forget those that were only dealt."""
        taken = Counter(each.key for each in self._schedule[: self._next_turn])
        if self._schedule:
            for key, each in self._classes.items():
                each.lag += each.share * self._next_turn - taken[key]
            furthest = max(abs(each.lag) for each in self._classes.values())
            if furthest > DEBT:
                for each in self._classes.values():
                    each.lag *= DEBT / furthest
        self._schedule, self._next_turn = [], 0

    def _seat(self, each: _Class) -> None:
        why = f"weighted: {each.key[0]} on {each.key[1]}, share {each.share:.3f}"
        accounts = [self._credits.account(target.slice) for target in each.targets]
        for target, account in zip(each.targets, accounts, strict=True):
            account.pick = CreditPick(target.slice, target.variant, target.stage, why, account)
            account.lane = each.key
        each.pool = Pool(accounts)

    def _reassign(self, orphaned: Iterable[Key]) -> None:
        homeless: list[Ticket] = []
        for lane in tuple(orphaned):
            while (ticket := self._queue.pop(lane)) is not None:
                homeless.append(ticket)
        for ticket in sorted(homeless, key=order_key):
            due = self._due_above(ticket.min_accuracy)
            if due is not None:
                self._next_turn += 1
            self._queue.push(NOWHERE if due is None else due.key, ticket)


def group_equal_targets(targets: Iterable[RouteTarget]) -> dict[Kind, list[list[RouteTarget]]]:
    """Group targets that share one line: of one variant, slice type and weight. Those without weight help the
    lightest."""
    kinds: dict[Kind, list[RouteTarget]] = {}
    for target in targets:
        kinds.setdefault((target.variant, target.slice.slice_type), []).append(target)
    return {kind: _by_weight(same) for kind, same in kinds.items()}


def _by_weight(targets: list[RouteTarget]) -> list[list[RouteTarget]]:
    bounds: list[float] = []  # the highest weight of each class
    for weight in sorted({target.weight for target in targets if target.weight > 0}):
        if not bounds or weight > bounds[-1]:
            bounds.append(weight * (1 + SAME))
    if len(bounds) <= 1:
        return [targets]
    groups: list[list[RouteTarget]] = [[] for _ in bounds]
    for target in targets:
        groups[bisect_left(bounds, target.weight)].append(target)
    return groups


def _classes(live: Iterable[RouteTarget], old: dict[Key, _Class]) -> dict[Key, _Class]:
    targets = list(live)
    total = sum(target.weight for target in targets)
    classes: dict[Key, _Class] = {}
    for kind, groups in group_equal_targets(targets).items():
        before = [each for key, each in old.items() if key[:2] == kind]
        for number, group in zip(_numbers(groups, before), groups, strict=True):
            # Only classes of no weight are live: any answer is better than none, so they share equally.
            share = sum(target.weight / total if total > 0 else 1.0 / len(targets) for target in group)
            if share > 0:
                # What it promises is the least that one of its slices keeps: one that swaps may still host another.
                accuracy = min(target.accuracy for target in group)
                classes[*kind, number] = _Class((*kind, number), share, accuracy, targets=group)
    return classes


def _numbers(groups: list[list[RouteTarget]], before: list[_Class]) -> list[int]:
    """What tells classes of one kind apart from table to table: whose slices they have, for weights change."""
    if len(groups) == 1 and len(before) <= 1:
        return [before[0].key[2] if before else 0]
    held = [{target.slice for target in each.targets} for each in before]
    pairs = sorted(
        (-sum(target.slice in slices for target in group), n, at)
        for at, group in enumerate(groups)
        for n, slices in enumerate(held)
    )
    found: dict[int, int] = {}
    for _, n, at in pairs:
        if at not in found and before[n].key[2] not in found.values():
            found[at] = before[n].key[2]
    free = (n for n in count() if n not in {each.key[2] for each in before})
    return [found[at] if at in found else next(free) for at in range(len(groups))]


def _carry_lags(old: dict[Key, _Class], new: dict[Key, _Class]) -> dict[Key, _Class]:
    """Tables may change every second: starting from zero each time would starve small shares.

    What vanished classes were owed is spread by share, so that lags still sum to zero.
    """
    owed = sum(each.lag for key, each in old.items() if key not in new)
    for key, each in new.items():
        each.lag = (old[key].lag if key in old else 0.0) + owed * each.share
    return new


EPSILON: Final = 1e-9  # sums of binary fractions: a lag of 1e-16 is none
GRID: Final = 2.0**24  # deadlines that agree to so small a part of a turn are equal: the class named first goes first


def schedule_turns(shares: Sequence[float], lags: Sequence[float], count: int) -> list[int]:
    """Deal the next `count` turns: classes, by position. Shares are positive and sum to 1, lags sum to 0."""
    classes = len(shares)
    if classes == 1:
        return [0] * count
    periods = [1.0 / share for share in shares]
    next_ = [0] * classes  # how many turns of each class are dealt
    # Both heaps hold whole numbers, time * classes + class: they compare faster than tuples.
    released = [int((EPSILON - lags[k]) * periods[k]) * classes + k for k in range(classes)]
    heapq.heapify(released)
    due: list[int] = []
    order = []
    for at in range(count):
        while released and (released[0] < (at + 1) * classes or not due):
            k = heapq.heappop(released) % classes
            heapq.heappush(due, int((next_[k] + 1 - lags[k]) * periods[k] * GRID + 0.5) * classes + k)
        k = due[0] % classes
        order.append(k)
        number = next_[k] = next_[k] + 1
        release = int((number - lags[k] + EPSILON) * periods[k])
        if release <= at + 1:
            heapq.heapreplace(due, int((number + 1 - lags[k]) * periods[k] * GRID + 0.5) * classes + k)
        else:
            heapq.heappop(due)
            heapq.heappush(released, release * classes + k)
    return order
