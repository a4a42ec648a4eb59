"""Routers of a group of families that have separate low-end GPUs and compete for high-end GPUs.

Source: CARBONDIS section IV, Algorithm 1 (`carbondis`) and section V-A (`dybatch`, `random`); `least_grams` is ours.
Data: live targets of every family by tier ("high", all others are low-end); the carbon ratio. Of a job, that is of a
    family and class: the requests that wait, how many of its answers were late, and what its requests took by exact
    batch size.
Decision: for the request at the head of each job's line the GPU that it goes to now, or that it waits.
Formulation of `carbondis`: jobs in the order of late answers, ties in the order of arrival. EXFT = arrival + SLO,
    ESFT = CT + EL (section IV-C). EL = mean time of earlier requests of that batch size on the low-end, CT = when the
    request could start there. ESFT > EXFT, or ESFT <= EXFT and CIR > CIT: the high-end GPU if it is free, else the
    low-end one; ESFT <= EXFT and CIR <= CIT: the low-end one. Waiting requests are looked at again whenever a request
    ends, comes or changes, and at the time from which its ESFT exceeds its EXFT. Left open by the paper: EL of a batch
    size without history is 0, so that it is tried on the low-end; without a ratio the last branch holds.
    Setting `literal`: CT is the clock when the request comes, and the low-end is final, as the listing is printed.
    Setting `quantile`: EL is that quantile of the last RECENT times instead of the mean of all.
`dybatch`: the high-end GPU whenever it is free, for the job with the least seconds on it so far; without batching.
`random`: the high-end GPU's next use belongs to a job that is drawn, among all, when it gets free; all else is low-end.
`least_grams`: of the GPUs on which the request is in time, the one that needs the fewest joules. In one zone, that is
    the fewest grams. The request waits for a high-end GPU that is busy while it is in time there alone. If it is in
    time nowhere, it goes to the free GPU where it ends first. A request that needs a high-end GPU goes before one that
    takes it for joules alone. The latter takes it only if any other job could still wait for its end and be in time.
Deviations: a low-end GPU holds as many requests as it has credits (the paper's: one). A floor (`min_accuracy`) leaves
    GPUs out; lines of a job are by the accuracies that are live.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from pydantic import Field

from dispatcher.queues.fair import FairQueue
from dispatcher.routers.credits import Account, CreditPick, Credits
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.fleet import SliceKey
from trefoil.core.parts import PartSettings
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.units import MS_PER_S

HIGH: Final = "high"
UNSERVED: Final = -1
RECENT: Final = 64  # times of a batch size among which a quantile is taken
KEPT_MAX: Final = 8192  # batch sizes, and jobs, of which something is remembered
LATER_S: Final = 1e-6  # after a time that is still in time
SEED: Final = 20261121

Job = tuple[str, str]  # family, class
Lane = tuple[str, str, int]  # the same, and the lowest live accuracy that is enough
Known = TypeVar("Known")


class CarbonDisSettings(PartSettings):
    """Settings of router `carbondis`. `cit`: carbon ratio above which saving joules comes first (paper: 0.8 to 1.2)."""

    cit: float = Field(default=1.0, gt=0, lt=10)
    """Carbon ratio above which saving joules comes first."""
    quantile: float = Field(default=0.0, ge=0, lt=1)
    """Of recent times instead of their mean; 0: the mean."""
    literal: bool = False
    """The algorithm as printed, without our corrections."""


@dataclass(slots=True, eq=False)
class Times:
    """Times of one batch size on one tier [ms]."""

    number: int = 0
    sum_ms: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    ordered: list[float] = field(default_factory=list)

    def add(self, took_ms: float, keeps: bool = True) -> None:
        """Add one; the oldest of the recent ones goes, where they are kept."""
        self.number, self.sum_ms = self.number + 1, self.sum_ms + took_ms
        if not keeps:
            return
        if len(self.recent) == RECENT:
            del self.ordered[bisect_left(self.ordered, self.recent[0])]
        self.recent.append(took_ms)
        insort(self.ordered, took_ms)

    def estimate_s(self, quantile: float) -> float:
        """Mean of all, or a quantile of the recent ones."""
        if quantile and self.ordered:
            return self.ordered[min(int(quantile * len(self.ordered)), len(self.ordered) - 1)] / MS_PER_S
        return self.sum_ms / self.number / MS_PER_S


@dataclass(slots=True, eq=False)
class _Place:
    """GPU of a group. `until_s`: when what it has is expected to end."""

    account: Account
    high: bool
    until_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """GPU that a family may use."""

    place: _Place
    target: RouteTarget
    picks: dict[str, CreditPick] = field(default_factory=dict)  # by reason

    @property
    def is_free(self) -> bool:
        """Whether one more request may go there."""
        return self.place.account.in_flight < self.place.account.limit

    def pick(self, why: str) -> CreditPick:
        """Pick of this GPU for a reason."""
        found = self.picks.get(why)
        if found is None:
            target = self.target
            found = CreditPick(target.slice, target.variant, target.stage, why, self.place.account)
            self.picks[why] = found
        return found


@dataclass(slots=True, eq=False)
class _Family:
    route: Route
    options: tuple[Option, ...] = ()
    low: tuple[Option, ...] = ()
    high: tuple[Option, ...] = ()
    levels: tuple[float, ...] = ()  # accuracies of live slices, ascending


Choice = tuple[Option, str]  # and why


class TieredRouter(ABC):
    """Base of routers of a group whose families share high-end GPUs. A pure state machine, called in order."""

    name = ""
    keeps_recent = False  # whether times are kept one by one, for quantiles
    at_once = False  # whether an arrival is decided on though others of its job wait

    def __init__(self, family: str, queue: FairQueue) -> None:
        self._queue = queue
        self._credits = Credits()
        self._families: dict[str, _Family] = {}
        self._places: dict[SliceKey, _Place] = {}
        self._times: dict[tuple[str, bool, int], Times] = {}
        self._late: dict[Job, int] = {}
        self._ratio: float | None = None
        self._now_s = 0.0

    # --- the table --------------------------------------------------------------------------------------------------

    def on_table(self, route: Route, now_s: float) -> None:
        """Route a family by this table from now on; what waits keeps its place."""
        before = self._families.get(route.family, _Family(route)).levels
        self._families[route.family] = served = _Family(route)
        self._limit()
        live = _live(route)
        served.options = tuple(Option(self._places[target.slice], target) for target in live)
        served.low = tuple(one for one in served.options if not one.place.high)
        served.high = tuple(one for one in served.options if one.place.high)
        served.levels = tuple(sorted({target.accuracy for target in live}))
        if before != served.levels:
            self._stand_anew(route.family)
        self.set_params(route.params)

    def set_params(self, params: Mapping[str, float]) -> None:  # noqa: B027 (a default, no duty)
        """Take the settings that a table brings."""

    def _limit(self) -> None:
        routes = [served.route for served in self._families.values()]
        requests, sizes = [r.queue_requests_max for r in routes], [r.queue_bytes_max for r in routes]
        self._queue.limit(sum(requests) if all(requests) else 0, sum(sizes) if all(sizes) else 0)
        limits: dict[SliceKey, int] = {}
        tiers: dict[SliceKey, RouteTarget] = {}
        for target in (target for route in routes for target in _live(route)):
            limits[target.slice] = max(limits.get(target.slice, 0), target.credits)
            tiers[target.slice] = target
        self._credits.limit(limits)
        for slice_, target in tiers.items():
            account = self._credits.account(slice_)
            account.pick = CreditPick(slice_, target.variant, target.stage, self.name, account)
            place = self._places.get(slice_)
            if place is None or place.account is not account:
                self._places[slice_] = _Place(account, target.tier == HIGH)
        self._places = {slice_: place for slice_, place in self._places.items() if slice_ in limits}

    def _stand_anew(self, family: str) -> None:
        moved = []
        for lane in self._queue.lanes():
            while lane[0] == family and (ticket := self._queue.pop(lane)) is not None:
                moved.append(ticket)
        for ticket in moved:
            self._queue.push(self._lane(ticket), ticket)

    def _lane(self, ticket: Ticket) -> Lane:
        levels = self._families[ticket.family].levels
        at = bisect_left(levels, ticket.min_accuracy) if ticket.min_accuracy else 0
        return ticket.family, ticket.slo_class, at if at < len(levels) or not ticket.min_accuracy else UNSERVED

    # --- requests ---------------------------------------------------------------------------------------------------

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Take the carbon ratio; None = not known."""
        self._ratio, self._now_s = ratio, now_s

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        """Assign an arrival to a GPU at once, or None: it waits in the line of its job.

        Raises:
            QueueFull: it would have to wait and there is no room.
        """
        self._now_s, lane = now_s, self._lane(ticket)
        first = not self._queue.depth(lane)
        choice = self._choose(ticket, now_s, True) if first or self.at_once else None
        if choice is not None and (first or choice[0].place.high):
            return self._take(choice, ticket, now_s)
        self._queue.check(ticket)
        self._queue.push(lane, ticket)
        return None

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        """The next ticket that goes anywhere, by the order of jobs, if this GPU has a credit."""
        queue = self._queue
        if not queue.waiting or self._credits.free(slice) is None:
            return None
        self._now_s = now_s
        heads = queue.heads(queue.lanes())
        if len(heads) > 1:
            heads.sort(key=lambda one: self._rank(one[1], now_s))
        for lane, head in heads:
            choice = self._choose(head, now_s, False)
            if choice is not None:
                ticket = queue.pop(lane)
                assert ticket is head, "the head of a line is not the one that it gives"
                return head, self._take(choice, head, now_s)
        return None

    def on_done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> None:
        """The request is over: its credit is free, and what it took is known."""
        self._credits.give_back(pick)
        if outcome.code != "OK":
            return
        place = self._places.get(pick.slice)
        if place is not None:
            times = _remembered(self._times, (ticket.family, place.high, ticket.items), Times)
            times.add(outcome.service_ms, self.keeps_recent)
            self._answered(ticket, place, outcome)
        if 0 < ticket.slo_ms < outcome.latency_ms:
            job = ticket.family, ticket.slo_class
            self._late[job] = _remembered(self._late, job, int) + 1

    def on_cancel(self, ticket: Ticket, now_s: float) -> None:
        """The ticket waits no longer."""
        self._queue.remove(ticket)

    def on_pinned(self, ticket: Ticket, slice: SliceKey, now_s: float) -> Pick | None:
        """A credit of this very slice, for a request that no other slice may serve."""
        for option in self._families[ticket.family].options:
            if option.target.slice == slice and option.is_free:
                return self._take((option, f"{self.name}: bound to it"), ticket, now_s)
        return None

    def next_s(self) -> float | None:
        """No request is held back for a time."""
        return None

    def scores(self, ticket: Ticket) -> dict[SliceKey, tuple[float, str]]:
        """Score of each live slice that may have this ticket: 0 where it would go now."""
        choice = self._choose(ticket, self._now_s, True)
        found = {}
        for option in self._families[ticket.family].options:
            if option.target.accuracy >= ticket.min_accuracy:
                chosen = choice is not None and choice[0] is option
                known = self._times.get((ticket.family, option.place.high, ticket.items))
                took = f"{known.sum_ms / known.number:.1f} ms" if known else "no history"
                why = choice[1] if choice is not None and chosen else f"{option.target.tier or 'no tier'}"
                found[option.target.slice] = (0.0 if chosen else 1.0, f"{why}; {ticket.items} items: {took}")
        return found

    def _take(self, choice: Choice, ticket: Ticket, now_s: float) -> CreditPick:
        option, why = choice
        place = option.place
        self._credits.take(place.account)
        took_s = self._estimate_s(ticket, place.high) or 0.0
        place.until_s = max(now_s, place.until_s if place.account.in_flight > 1 else 0.0) + took_s
        return option.pick(why)

    # --- what a router of this kind decides ---------------------------------------------------------------------------

    @abstractmethod
    def _choose(self, ticket: Ticket, now_s: float, arrives: bool) -> Choice | None:
        """GPU for the head of a job's line now; None: it waits."""

    def _rank(self, head: Ticket, now_s: float) -> float:
        """Rank of the head of a job's line among those that wait; the least is asked first."""
        return 0.0

    def _answered(self, ticket: Ticket, place: _Place, outcome: Outcome) -> None:  # noqa: B027 (a default, no duty)
        """Note an answer."""

    # --- what they decide by ------------------------------------------------------------------------------------------

    def _tiers(self, ticket: Ticket) -> tuple[Sequence[Option], Option | None, Option | None]:
        """Low-end GPUs of a ticket, the idlest of them and of its high-end ones that are free."""
        served, floor = self._families[ticket.family], ticket.min_accuracy
        low: Sequence[Option] = served.low
        high: Sequence[Option] = served.high
        if floor:
            low, high = ([one for one in tier if one.target.accuracy >= floor] for tier in (low, high))
        return low, _idlest(low), _idlest(high)

    def _estimate_s(self, ticket: Ticket, high: bool, quantile: float = 0.0) -> float | None:
        known = self._times.get((ticket.family, high, ticket.items))
        return known.estimate_s(quantile) if known is not None else None


class CarbonDis(TieredRouter):
    """Router `carbondis`: Algorithm 1."""

    name = "carbondis"

    def __init__(self, family: str, queue: FairQueue) -> None:
        super().__init__(family, queue)
        self.set_params({})

    def set_params(self, params: Mapping[str, float]) -> None:
        """Take the settings that a table brings."""
        known = CarbonDisSettings.model_validate(
            {k: v for k, v in params.items() if k in CarbonDisSettings.model_fields}
        )
        self._cit, self._quantile, self.at_once = known.cit, known.quantile, known.literal
        self.keeps_recent = known.quantile > 0

    def _rank(self, head: Ticket, now_s: float) -> float:
        return -self._late.get((head.family, head.slo_class), 0)

    def _choose(self, ticket: Ticket, now_s: float, arrives: bool) -> Choice | None:
        low, free, high = self._tiers(ticket)
        if not low:
            return (high, "carbondis: no low-end GPU") if high is not None else None
        if self.at_once and not arrives:
            return (free, "carbondis: decided when it came") if free is not None else None
        start_s = now_s if self.at_once else _begins_s(low, free, now_s)
        late = start_s + self._low_s(ticket) > _due_s(ticket)
        if late or (self._ratio is not None and self._ratio > self._cit):
            if high is not None:
                return high, "carbondis: ESFT > EXFT" if late else "carbondis: CIR > CIT"
            return (free, "carbondis: the high-end GPU is busy") if free is not None else None
        return (free, "carbondis: ESFT <= EXFT, CIR <= CIT or not known") if free is not None else None

    def next_s(self) -> float | None:
        """When the first of those who wait would be late on its low-end GPU."""
        heads = (self._queue.first(lane) for lane in self._queue.lanes() if not self.at_once)
        due = [_due_s(head) - self._low_s(head) + LATER_S for head in heads if head is not None]
        return min((at for at in due if self._now_s < at < float("inf")), default=None)

    def _low_s(self, ticket: Ticket) -> float:
        return self._estimate_s(ticket, False, self._quantile) or 0.0


class DyBatch(TieredRouter):
    """Router `dybatch`: a fair share of the high-end GPU's time."""

    name = "dybatch"

    def __init__(self, family: str, queue: FairQueue) -> None:
        super().__init__(family, queue)
        self._used_ms: dict[Job, float] = {}

    def _rank(self, head: Ticket, now_s: float) -> float:
        return self._used_ms.get((head.family, head.slo_class), 0.0)

    def _answered(self, ticket: Ticket, place: _Place, outcome: Outcome) -> None:
        if place.high:
            job = ticket.family, ticket.slo_class
            self._used_ms[job] = _remembered(self._used_ms, job, float) + outcome.service_ms

    def _choose(self, ticket: Ticket, now_s: float, arrives: bool) -> Choice | None:
        _, free, high = self._tiers(ticket)
        if high is not None:
            return high, "dybatch: the high-end GPU is free"
        return (free, "dybatch: the high-end GPU is busy") if free is not None else None


class Random(TieredRouter):
    """Router `random`: jobs by lot."""

    name = "random"

    def __init__(self, family: str, queue: FairQueue) -> None:
        super().__init__(family, queue)
        self._rng = np.random.default_rng(SEED)
        self._jobs: dict[Job, bool] = {}
        self._drawn: Job | None = None

    def _choose(self, ticket: Ticket, now_s: float, arrives: bool) -> Choice | None:
        low, free, high = self._tiers(ticket)
        job = ticket.family, ticket.slo_class
        _remembered(self._jobs, job, lambda: True)
        if self._drawn not in self._jobs:
            self._drawn = list(self._jobs)[int(self._rng.integers(len(self._jobs)))]
        if high is not None and (not low or job == self._drawn):
            return high, "random: drawn"
        return (free, "random: not drawn") if free is not None else None

    def _answered(self, ticket: Ticket, place: _Place, outcome: Outcome) -> None:
        if place.high:
            self._drawn = None


class LeastGrams(TieredRouter):
    """Router `least_grams`: the fewest joules inside the SLO. Ours.

    Joules of a request of n items on a tier are params `low_j` + n `low_item_j`, and so for `high`.
    """

    name = "least_grams"

    def __init__(self, family: str, queue: FairQueue) -> None:
        super().__init__(family, queue)
        self._per_item: dict[tuple[str, bool], tuple[float, int]] = {}
        self._mean_ms: dict[str, tuple[float, int, float]] = {}  # on the high-end; and the SLO

    def _answered(self, ticket: Ticket, place: _Place, outcome: Outcome) -> None:
        of = ticket.family, place.high
        sum_ms, items = self._per_item.get(of, (0.0, 0))
        self._per_item[of] = sum_ms + outcome.service_ms, items + ticket.items
        if place.high:
            sum_ms, number, _ = self._mean_ms.get(ticket.family, (0.0, 0, 0.0))
            self._mean_ms[ticket.family] = sum_ms + outcome.service_ms, number + 1, ticket.slo_ms

    def _rank(self, head: Ticket, now_s: float) -> float:
        low, free, _ = self._tiers(head)
        return 0.0 if _begins_s(low, free, now_s) + self._took_s(head, False) > _due_s(head) else 1.0

    def _choose(self, ticket: Ticket, now_s: float, arrives: bool) -> Choice | None:
        low, free, high = self._tiers(ticket)
        due_s, took_s = _due_s(ticket), self._took_s(ticket, True)
        low_s = _begins_s(low, free, now_s) + self._took_s(ticket, False)
        high_s = _begins_s(self._families[ticket.family].high, high, now_s) + took_s
        if low_s > due_s and high_s <= due_s and high is None:
            return None
        if low_s > due_s and high_s < low_s and high is not None:
            return high, "least_grams: late on the low-end GPU"
        cheaper = self._joules(ticket, True) < self._joules(ticket, False)
        if high is not None and high_s <= due_s and cheaper and self._others_can_wait(ticket, took_s):
            return high, "least_grams: fewer joules on the high-end GPU"
        return (free, "least_grams: fewest joules in time") if free is not None else None

    def _others_can_wait(self, ticket: Ticket, busy_s: float) -> bool:
        return all(
            busy_s * MS_PER_S + sum_ms / number <= slo_ms or not slo_ms
            for family, (sum_ms, number, slo_ms) in self._mean_ms.items()
            if family != ticket.family
        )

    def _took_s(self, ticket: Ticket, high: bool) -> float:
        known = self._estimate_s(ticket, high)
        if known is not None:
            return known
        sum_ms, items = self._per_item.get((ticket.family, high), (0.0, 1))
        return sum_ms / items * ticket.items / MS_PER_S

    def _joules(self, ticket: Ticket, high: bool) -> float:
        params, tier = self._families[ticket.family].route.params, "high" if high else "low"
        return params.get(f"{tier}_j", 0.0) + ticket.items * params.get(f"{tier}_item_j", 0.0)


def _live(route: Route) -> list[RouteTarget]:
    return [target for target in route.targets if not target.draining and target.credits > 0]


def _begins_s(options: Sequence[Option], free: Option | None, now_s: float) -> float:
    """When a request could begin on one of them, of which one may be free."""
    if free is not None:
        return now_s
    return max(now_s, min((one.place.until_s for one in options), default=float("inf")))


def _due_s(ticket: Ticket) -> float:
    return ticket.arrived_s + (ticket.slo_ms / MS_PER_S if ticket.slo_ms else float("inf"))


def _idlest(options: Sequence[Option]) -> Option | None:
    if len(options) == 1:
        return options[0] if options[0].is_free else None
    free = [option for option in options if option.is_free]
    return min(free, key=lambda one: (one.place.account.in_flight, one.place.account.changed_at), default=None)


def _remembered(known: MutableMapping[Any, Known], key: Hashable, make: Any) -> Known:
    """What is known of a key; of the first of too many nothing is remembered."""
    found = known.get(key)
    if found is None:
        if len(known) >= KEPT_MAX:
            del known[next(iter(known))]
        found = known[key] = make()
    return found
