"""Queue of one family, or of a group of families behind one router: waiting, picks and refusals.

Data: routes of the families, tickets, ends of picked requests, the time of every call.
Decision: a pick at once or later, or a refusal; for a slice with a free credit, the next ticket.
Formulation: the router decides which ticket goes to which slice; this module has the rules of every router. A new
    router takes over waiting requests, in order of arrival, and the previous router still learns how its picks end.
    Each round offers a slice one ticket, so that new slices share the waiting ones. Tickets of sequences may be bound
    to one slice and come first there. A request that waits too long for a slice, or for an accuracy, is refused. At the
    time that the router names, every slice is offered again.
The shell (dispatcher/routing/async_queue.py live, trefoil/simulator/engines/request_engine.py simulated) calls in
order, with its time, and carries the returned effects out in their order. `waiters` say whether a waiting client has
gone, before the shell reports it: such a ticket gives its pick back at once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

from dispatcher.queues import QUEUES
from dispatcher.queues.fair import FairQueue
from dispatcher.queues.fifo import QueueFull
from dispatcher.routers import ROUTERS
from dispatcher.routing.core.accuracy_floors import AccuracyReach
from dispatcher.routing.core.pinned import Pinned, PinnedLine
from trefoil.core.brains import Outcome, Pick, Router, Ticket
from trefoil.core.demand import JOB_CLASS
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.core.parts import Kind, find
from trefoil.core.plan import Route

NO_PLAN: Final = "the plan gives it no slice"
GIVEN_UP: Final = Outcome("CANCELLED", 0.0, 0.0, 0, False)


class ServedElsewhere(Unavailable):
    """Family served by other workers now: waiting requests are to be forwarded."""


class Waiter(Protocol):
    """Client that waits for a slice: `done()` is true once it has gone."""

    def done(self) -> bool:
        """Whether the client has gone."""
        ...


NO_WAITERS: Final[Mapping[int, Waiter]] = {}


class Refusal(NamedTuple):
    """Effect: a ticket that waited gets no slice."""

    ticket: Ticket
    error: TrefoilError


class Idle(NamedTuple):
    """Effect: a slice that gets no more has finished; drains wait for it."""

    slice: SliceKey


Assignment = tuple[Ticket, Pick]  # who waited has a slice
Effect = Assignment | Refusal | Idle
OnDone = Callable[[Ticket, Pick, Outcome, float], None]


@dataclass(slots=True, eq=False)
class _Place:
    """A slice. Found by the identity of its key: hashing one takes longer than all else here."""

    key: SliceKey
    live: bool = False
    in_flight: int = 0


_InFlight = tuple[OnDone | None, _Place, Ticket]  # who learns of its end; None: no router gave it its credit


@dataclass(slots=True)
class _Family:
    """How one of the families stands."""

    route: Route
    open: bool = False  # whether its route has targets
    why: str = NO_PLAN
    reach: AccuracyReach = AccuracyReach()
    live_until_s: float = float("-inf")


def no_pick(*_: object) -> None:
    """Router callback before there is a router: no request moves."""


@dataclass(slots=True)
class DetachedFamily:
    """Family on its way to another queue, with its tickets."""

    served: _Family
    waiting: list[Ticket] = field(default_factory=list)
    pinned: dict[SliceKey, list[Pinned]] = field(default_factory=dict)
    in_flight: dict[int, _InFlight] = field(default_factory=dict)


class FamilyQueue:
    """Admission, waiting and dispatch around a router: tickets in, picks out. Several families only where their
    router's part says that it takes a group."""

    def __init__(self, no_slice_wait_s: float, waiters: Mapping[int, Waiter] = NO_WAITERS) -> None:
        self._no_slice_wait_s = no_slice_wait_s
        self._waiters = waiters
        self._router: Router | None = None
        self._on_arrival: Callable[[Ticket, float], Pick | None] = no_pick  # the router's, as these are:
        self._on_credit: Callable[[SliceKey, float], tuple[Ticket, Pick] | None] = no_pick
        self._on_done: OnDone | None = None
        self._line: FairQueue | None = None
        self._part_names = ("", "")  # the names of router and queue
        self._carbon_ratio: float | None = None
        self._offered_s: float | None = None
        self._families: dict[str, _Family] = {}
        self.waiting: dict[int, Ticket] = {}  # those that have no slice yet, whichever may come, by number
        self._unrouted: list[Ticket] = []  # came with their family, and no router has them yet
        self._pinned: dict[SliceKey, PinnedLine] = {}
        self._pinned_served: set[SliceKey] = set()  # last, so that it is the router's turn
        self._flying: dict[int, _InFlight] = {}
        self._live: frozenset[SliceKey] = frozenset()
        self._places: dict[SliceKey, _Place] = {}

    # --- how things stand -------------------------------------------------------------------------------------------

    @property
    def router(self) -> Router | None:
        """Router in force; None before the first table."""
        return self._router

    @property
    def families(self) -> tuple[str, ...]:
        """Families that this queue serves."""
        return tuple(self._families)

    @property
    def in_flight_count(self) -> int:
        """Number of requests on all slices together."""
        return len(self._flying)

    @property
    def in_flight(self) -> dict[SliceKey, int]:
        """Requests on each slice that has any."""
        return {place.key: place.in_flight for place in self._places.values() if place.in_flight}

    def in_flight_by_family(self) -> Counter[tuple[SliceKey, str]]:
        """Requests of each family on each slice that has any."""
        return Counter((place.key, ticket.family) for _, place, ticket in self._flying.values())

    @property
    def live(self) -> frozenset[SliceKey]:
        """Slices that get new requests."""
        return self._live

    def in_flight_on(self, slice_: SliceKey) -> int:
        """Number of requests on one slice."""
        place = self._places.get(slice_)
        return place.in_flight if place is not None else 0

    def route(self, family: str) -> Route:
        """Route of a family as it was last applied."""
        served = self._families.get(family)
        return served.route if served is not None else Route(family=family)

    def reach(self, family: str) -> AccuracyReach:
        """Accuracies that a family can give."""
        served = self._families.get(family)
        return served.reach if served is not None else AccuracyReach()

    def next_s(self) -> float | None:
        """When the router wants its slices offered again though nothing happens; None: no_pick waits, it does not want
        it, or it was asked for that time already."""
        if self._router is None or not self.waiting:
            return None
        due_s = self._router.next_s()
        return None if due_s == self._offered_s else due_s

    # --- tables -----------------------------------------------------------------------------------------------------

    def set_reach(self, family: str, reach: AccuracyReach) -> None:
        """Set the accuracies that a family can give from now on."""
        self._served_family(family).reach = reach

    def table(self, route: Route, why: str, now_s: float, elsewhere: bool = False) -> Sequence[Effect]:
        """Route a family by this from now on. Another router takes over the waiting requests, in order of arrival.
        `elsewhere`: other workers have live slices, or slices are not probed yet, so that it is worth waiting.

        Raises:
            SettingError: its router or its queue is not known.
        """
        served = self._served_family(route.family)
        if elsewhere or (served.open and not route.targets):
            served.live_until_s = now_s
        replaced = self._router is None or (route.router, route.queue) != self._part_names
        if replaced:
            assert self._router is None or len(self._families) == 1, "a group has one router"
            self._make(route, now_s)
        assert self._router is not None
        served.route, served.open, served.why = route, bool(route.targets), why
        self._update_places()
        self._router.on_table(route, now_s)
        effects: list[Effect] = []
        arriving = self.waiting.values() if replaced else self._unrouted
        self._unrouted = []
        self._route_again(arriving, now_s, effects)
        self._refuse_unreachable_floors(float("inf"), now_s, effects)
        bound = [slice_ for slice_ in self._pinned if slice_ not in self._live]
        self._offer([*(target.slice for target in route.targets), *bound], now_s, effects)
        return effects

    def carbon(self, ratio: float | None, now_s: float) -> Sequence[Effect]:
        """Tell the router the carbon intensity over its mean; None = not known. Whom it held back for it may go."""
        self._carbon_ratio = ratio
        if self._router is None:
            return ()
        self._router.on_carbon(ratio, now_s)
        return self._offer_all(now_s)

    def tick(self, now_s: float) -> Sequence[Effect]:
        """Offer the slices again: the time of `next_s` has come."""
        if self._router is None:
            return ()
        self._offered_s = self._router.next_s()
        return self._offer_all(now_s)

    # --- requests ---------------------------------------------------------------------------------------------------

    def unavailable(self, family: str, now_s: float) -> bool:
        """Whether `submit` has no slice for a family, and none to wait for."""
        served = self._families.get(family)
        return served is None or (not served.open and self._gave_up(served, now_s))

    def submit(self, ticket: Ticket, now_s: float) -> Pick | None:
        """Submit a ticket: a pick at once, or None: it waits.

        Raises:
            QueueFull: it would have to wait and there is no room.
            Unavailable: no slice is live, and none was within no_slice_wait_s.
            Infeasible: nothing that is live or planned is as accurate as it asks.
        """
        served = self._families.get(ticket.family)
        if served is None or (not served.open and self.unavailable(ticket.family, now_s)):
            raise self._no_slice(ticket.family)
        if ticket.min_accuracy:
            served.reach.check(ticket.family, ticket.min_accuracy)
        pick = self._on_arrival(ticket, now_s)
        if pick is None:
            self.waiting[ticket.id] = ticket
            return None
        place = self._place(pick.slice)
        place.in_flight += 1
        self._flying[ticket.id] = (self._on_done, place, ticket)
        return pick

    def push_out(self, now_s: float) -> Sequence[Effect]:
        """Refuse whom the last `submit` pushed out of a full queue; most often there is none."""
        effects: list[Effect] = []
        line = self._line
        if line is not None and line.displaced:
            displaced, line.displaced = line.displaced, []
            for ticket in displaced:
                remedy = "send less at once, or raise the route's queue bounds"
                error = QueueFull(f"queue {line.name} is full, and its client has most of what waits", remedy=remedy)
                self._refuse(ticket, error, now_s, effects)
        return effects

    def submit_pinned(self, ticket: Ticket, slice_: SliceKey, variant: str, now_s: float) -> Pick | None:
        """Like `submit`, for a request that only this slice may serve, also while it drains."""
        pick = self._pick_on(ticket, slice_, variant, now_s)
        if pick is None:
            self._pinned.setdefault(slice_, PinnedLine()).add(Pinned(ticket, variant))
        return pick

    def is_idle(self, slice_: SliceKey) -> bool:
        """Whether a slice has no request of these families, and none waits."""
        return not (self.waiting or self._pinned or self.in_flight_on(slice_)) and slice_ in self._live

    def only_jobs(self, slice_: SliceKey) -> bool:
        """Whether nothing waits, and a live slice has no other requests than those of jobs."""
        others = (place.key == slice_ and ticket.slo_class != JOB_CLASS for _, place, ticket in self._flying.values())
        return not (self.waiting or self._pinned) and slice_ in self._live and not any(others)

    def submit_idle(self, ticket: Ticket, slice_: SliceKey, now_s: float) -> Pick | None:
        """Like `submit_pinned`, for a request of a job: a credit of a slice as `only_jobs` has it. None: it gets none,
        and does not wait."""
        if self._router is None or not self.only_jobs(slice_):
            return None
        pick = self._router.on_pinned(ticket, slice_, now_s)
        if pick is not None:
            self._launch(ticket, pick, self._on_done)
        return pick

    def done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> Sequence[Effect]:
        """End a picked request; its credit goes to a waiting one."""
        on_done, place, _ = self._flying.pop(ticket.id)
        if on_done is not None:
            on_done(ticket, pick, outcome, now_s)
        left = place.in_flight = place.in_flight - 1
        if self.waiting or self._pinned:
            effects: list[Effect] = [] if left or place.live else [Idle(place.key)]
            self._offer((pick.slice,), now_s, effects)
            return effects
        return () if left or place.live else (Idle(place.key),)

    def leave(self, ticket: Ticket, now_s: float) -> bool:
        """Withdraw a ticket whose client went away (or whose time ran out); False: it did not wait here any longer."""
        if self.waiting.pop(ticket.id, None) is not None:
            self._cancel(ticket, now_s)
            return True
        if any(waiting.remove(ticket.id) for waiting in self._pinned.values()):
            self._pinned = {slice_: waiting for slice_, waiting in self._pinned.items() if waiting}
            return True
        return False

    def expire(self, now_s: float) -> Sequence[Effect]:
        """Refuse requests that wait for a family whose last slice went too long ago, or for an accuracy that does not
        come."""
        effects: list[Effect] = []
        if self.waiting:
            self._refuse_unreachable_floors(self._no_slice_wait_s, now_s, effects)
            lost = [
                family for family, served in self._families.items() if not served.open and self._gave_up(served, now_s)
            ]
            for family in lost:
                if any(ticket.family == family for ticket in self.waiting.values()):
                    effects += self.fail(self._no_slice(family), now_s, family)
        return effects

    def fail(self, error: TrefoilError, now_s: float, family: str = "") -> Sequence[Effect]:
        """Refuse all waiting tickets of a family ("" = of any) with an error."""
        effects: list[Effect] = []
        for ticket in tuple(self.waiting.values()):
            if family in ("", ticket.family):
                self._refuse(ticket, error, now_s, effects)
        for pinned in self._remove_pinned(family).values():
            effects += [Refusal(each.ticket, error) for each in pinned]
        return effects

    def redirect_waiting(self, sequences: bool, now_s: float, family: str = "") -> Sequence[Effect]:
        """Redirect queued requests of this family ("" = any) to other workers; those of sequences, too, or
        they wait on: their requests have an order here."""
        effects: list[Effect] = []
        for ticket in tuple(self.waiting.values()):
            if family in ("", ticket.family) and (sequences or not ticket.sequence_id):
                error = ServedElsewhere(f"{ticket.family} is served by other workers", remedy="try again")
                self._refuse(ticket, error, now_s, effects)
        return effects

    # --- from one queue to another ----------------------------------------------------------------------------------

    def detach(self, family: str, now_s: float) -> DetachedFamily:
        """Take a family out, with all that it has: its route names another router, which has a separate queue."""
        leaving = DetachedFamily(self._families.pop(family))
        leaving.waiting = [ticket for ticket in self.waiting.values() if ticket.family == family]
        for ticket in leaving.waiting:
            del self.waiting[ticket.id]
            self._cancel(ticket, now_s)
        leaving.pinned = self._remove_pinned(family)
        leaving.in_flight = {id_: one for id_, one in self._flying.items() if one[2].family == family}
        for id_, (_, place, _) in leaving.in_flight.items():
            del self._flying[id_]
            place.in_flight -= 1
        if self._router is not None:
            self._router.on_table(Route(family, *self._part_names), now_s)
        self._update_places()
        return leaving

    def attach(self, leaving: DetachedFamily) -> None:
        """Take a family in; the table that must follow gives it slices."""
        self._families[leaving.served.route.family] = leaving.served
        self.waiting |= {ticket.id: ticket for ticket in leaving.waiting}
        self._unrouted += leaving.waiting
        for slice_, pinned in leaving.pinned.items():
            line = self._pinned.setdefault(slice_, PinnedLine())
            for each in pinned:
                line.add(each)
        for id_, (on_done, there, ticket) in leaving.in_flight.items():
            place = self._place(there.key)
            place.in_flight += 1
            self._flying[id_] = (on_done, place, ticket)

    # ------------------------------------------------------------------------------------------------------------------

    def _served_family(self, family: str) -> _Family:
        served = self._families.get(family)
        if served is None:
            served = self._families[family] = _Family(Route(family=family))
        return served

    def _make(self, route: Route, now_s: float) -> None:
        router = find(Kind.ROUTER, route.router, ROUTERS)
        queue = find(Kind.QUEUE, route.queue, QUEUES)
        name = route.router if router.traits.group else route.family
        self._line = FairQueue(name, partial(queue.make, name))
        self._router = made = router.make(name, self._line)
        self._on_arrival, self._on_credit, self._on_done = made.on_arrival, made.on_credit, made.on_done
        self._part_names, self._offered_s = (route.router, route.queue), None
        made.on_carbon(self._carbon_ratio, now_s)

    def _update_places(self) -> None:
        """Places of the slices of all routes, and of those that still have requests."""
        keys = [target.slice for served in self._families.values() for target in served.route.targets]
        self._live = live = frozenset(keys)
        self._places = {key: place for key, place in self._places.items() if key in live or place.in_flight}
        for place in self._places.values():
            place.live = place.key in live
        for key in keys:
            self._place(key).live = True

    def _place(self, key: SliceKey) -> _Place:
        """Place of a slice."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(key)
        return place

    def _launch(self, ticket: Ticket, pick: Pick, on_done: OnDone | None) -> None:
        place = self._place(pick.slice)
        place.in_flight += 1
        self._flying[ticket.id] = (on_done, place, ticket)

    def _assign(self, assignment: Assignment, now_s: float, effects: list[Effect]) -> None:
        ticket, pick = assignment
        del self.waiting[ticket.id]
        place = self._place(pick.slice)
        waiter = self._waiters.get(ticket.id)
        if waiter is None or not waiter.done():
            place.in_flight += 1
            self._flying[ticket.id] = (self._on_done, place, ticket)
            effects.append(assignment)
            return
        assert self._on_done is not None
        self._on_done(ticket, pick, GIVEN_UP, now_s)
        if not place.in_flight and not place.live:
            effects.append(Idle(place.key))

    def _offer_all(self, now_s: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        if self.waiting:
            routes = [served.route for served in self._families.values()]
            slices = dict.fromkeys(target.slice for route in routes for target in route.targets)
            self._offer(slices, now_s, effects)
        return effects

    def _offer(self, slices: Iterable[SliceKey], now_s: float, effects: list[Effect]) -> None:
        """One ticket a slice and round, so that new slices share what waits."""
        on_credit = self._on_credit
        hungry = list(slices)
        while hungry:
            fed = []
            for slice_ in hungry:
                if self._pinned and self._offer_pinned(slice_, now_s, effects):
                    fed.append(slice_)
                    continue
                pulled = on_credit(slice_, now_s)
                if pulled is not None:
                    self._pinned_served.discard(slice_)
                    self._assign(pulled, now_s, effects)
                    fed.append(slice_)
                elif self._pinned and self._offer_pinned(slice_, now_s, effects, out_of_turn=True):
                    fed.append(slice_)
            hungry = fed

    def _offer_pinned(
        self, slice_: SliceKey, now_s: float, effects: list[Effect], *, out_of_turn: bool = False
    ) -> bool:
        """Give a slice to a ticket that can go nowhere else, by turns with those that can; False: not now."""
        line = self._pinned.get(slice_)
        if line is None or (self.waiting and slice_ in self._pinned_served and not out_of_turn):
            return False
        picked = False
        while not picked and (first := line.first()) is not None:
            ticket = first.ticket
            if (waiter := self._waiters.get(ticket.id)) is not None and waiter.done():
                line.remove(ticket.id)
            elif (pick := self._pick_on(ticket, slice_, first.variant, now_s)) is not None:
                line.serve()
                effects.append((ticket, pick))
                picked = True
            else:
                return False
        if not line:
            del self._pinned[slice_]
        if picked:
            self._pinned_served.add(slice_)
        return picked

    def _pick_on(self, ticket: Ticket, slice_: SliceKey, variant: str, now_s: float) -> Pick | None:
        """A credit of one slice, from its router. Where the router has none to give (the slice drains, or gets no
        share), sequences that are open bound what is sent there."""
        if self._router is not None and slice_ in self._live:
            given = self._router.on_pinned(ticket, slice_, now_s)
            if given is not None:
                self._launch(ticket, given, self._on_done)
                return given
            if self._places[slice_].in_flight:
                return None
        pick = Pick(slice_, variant, 0, f"its sequence lives on {slice_.name}")
        self._launch(ticket, pick, None)
        return pick

    def _route_again(self, tickets: Iterable[Ticket], now_s: float, effects: list[Effect]) -> None:
        assert self._router is not None
        for ticket in sorted(tickets, key=lambda each: (each.arrived_s, each.id)):
            try:
                pick = self._router.on_arrival(ticket, now_s)
            except TrefoilError as error:  # the new route's queue is smaller than what waits
                del self.waiting[ticket.id]
                effects.append(Refusal(ticket, error))
            else:
                if pick is not None:
                    self._assign((ticket, pick), now_s, effects)
        effects += self.push_out(now_s)

    def _refuse_unreachable_floors(self, patience_s: float, now_s: float, effects: list[Effect]) -> None:
        """Refuse those whose floor nothing planned reaches, and those who have waited so long for what is not live."""
        for ticket in tuple(self.waiting.values()):
            floor, reach = ticket.min_accuracy, self._families[ticket.family].reach
            if floor > reach.live and (floor > reach.planned or now_s - ticket.arrived_s > patience_s):
                self._refuse(ticket, reach.refusal(ticket.family, floor), now_s, effects)

    def _refuse(self, ticket: Ticket, error: TrefoilError, now_s: float, effects: list[Effect]) -> None:
        self._cancel(ticket, now_s)
        del self.waiting[ticket.id]
        effects.append(Refusal(ticket, error))

    def _cancel(self, ticket: Ticket, now_s: float) -> None:
        assert self._router is not None
        self._router.on_cancel(ticket, now_s)

    def _remove_pinned(self, family: str) -> dict[SliceKey, list[Pinned]]:
        taken = {
            slice_: [each for each in line.all() if family in ("", each.ticket.family)]
            for slice_, line in self._pinned.items()
        }
        for slice_, mine in taken.items():
            for each in mine:
                self._pinned[slice_].remove(each.ticket.id)
        self._pinned = {slice_: line for slice_, line in self._pinned.items() if line}
        return {slice_: mine for slice_, mine in taken.items() if mine}

    def _gave_up(self, served: _Family, now_s: float) -> bool:
        return now_s - served.live_until_s > self._no_slice_wait_s

    def _no_slice(self, family: str) -> Unavailable:
        served = self._families.get(family)
        why = served.why if served is not None else NO_PLAN
        return Unavailable(f"no slice serves {family} now: {why}", remedy="try again, or see `trefoil status`")
