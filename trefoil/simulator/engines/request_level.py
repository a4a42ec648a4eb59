"""Requests of one family, or of a group of them, one by one, through the queue and router that serve them live.

Data: arrival times; routes (targets with credits, queue bounds); per slice its service time, gap and accuracy.
Result: per window what was answered, refused, still waiting, and how long every slice computed.
Model: a request that is sent to a slice is on its way for gap/2, computes when the slice has finished the one before it
    (one at a time; of several instances, when the first of them is free), and is back after another gap/2: its credit
    is free then. So one credit leaves the slice idle for a gap per request; a second one hides that. In flight it stays
    on its slice whatever the table says next; all else is decided by dispatcher/routing/core/family_queue.py, as it is
    live.
Draws: every slice has a stream of its own, seeded by its key. So the same request on the same slice takes the same time
    under two policies until their histories part. A slice that is given another service time starts a new stream.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import repeat
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.random import Generator

from dispatcher.queues import QUEUES
from dispatcher.queues.fifo import QueueFull
from dispatcher.routing.core.family_queue import Effect, FamilyQueue, Idle, Refusal
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import SliceKey
from trefoil.core.parts import Kind, find
from trefoil.core.plan import Route
from trefoil.core.queueing import draw_s
from trefoil.core.units import MS_PER_S
from trefoil.simulator.books.intervals import Counts
from trefoil.simulator.engines.answer_lengths import AnswerLengths
from trefoil.simulator.engines.engine import Services, SliceService

NO_SLICE_WAIT_S: Final = 20.0  # as dispatcher.settings.no_slice_wait_s
DRAWS: Final = 512  # service times drawn at once
Confusion = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class FamilyWindow:
    """Counts and latencies of a family in [starts_s, ends_s).

    `latency_ms` holds those answered in it, in order of their answers, client overhead included. `busy_s` is the time
    that a slice computed inside the window, also for requests that are answered after it, `joules` what that cost.
    `queued` waits at its end. `latency_s_by` has the latencies by slice, without the overhead; `passed_s_by` those of
    what was answered after an earlier stage was done there.
    """

    starts_s: float
    ends_s: float
    arrived: int
    answered: int
    rejected: int
    latency_ms: Counts
    busy_s: Mapping[SliceKey, float]
    joules: Mapping[SliceKey, float]
    latency_s_by: Mapping[SliceKey, list[float]]
    queued: int
    passed_s_by: Mapping[SliceKey, list[float]] = field(default_factory=dict)

    @property
    def answered_by(self) -> dict[SliceKey, int]:
        """How many each slice answered."""
        return {key: len(found) for key, found in self.latency_s_by.items()}


@dataclass(slots=True, eq=False)
class SliceServer:
    """Server of one slice: when it can compute next, and what it did in this window. `way_s` is half a gap."""

    key: SliceKey
    rng: Generator
    service: SliceService
    way_s: float
    free_s: float = float("-inf")  # time may begin below zero
    busy_s: float = 0.0
    latency_s: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # drawn ahead, the next one last: pop() or draw_more()
    instances_s: list[float] | None = None  # of several instances: when each can compute next, a heap

    def __post_init__(self) -> None:
        if self.service.instances > 1:
            self.instances_s = [self.free_s] * self.service.instances

    def begin(self, at_s: float, service_s: float) -> float:
        """Compute a request that is there at a time on the instance that is free first; when it begins."""
        assert self.instances_s is not None
        start_s = max(at_s, self.instances_s[0])
        heapreplace(self.instances_s, start_s + service_s)
        return start_s

    def draw_more(self) -> float:
        """Next service time [s], drawn with a block of those after it."""
        self.times_s.extend(draw_s(self.service.service, DRAWS, self.rng)[::-1].tolist())
        return self.times_s.pop()

    def set_service(self, service: SliceService) -> None:
        """Set the service from now on; what is in flight has its time already."""
        if service.service != self.service.service:
            self.times_s.clear()
        self.service = service
        self.way_s = service.gap_ms / 2 / MS_PER_S


def stream_of(*words: int) -> Generator:
    """Stream of random numbers of its own, by the seed of the run and the words that name it."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def idle_server(key: SliceKey, service: SliceService, root: int) -> SliceServer:
    """Server of an idle slice; `root` is the seed of the whole run."""
    rng = stream_of(root, crc32(key.device.encode()), crc32(key.slice_type.encode()), key.start, key.size)
    return SliceServer(key, rng, service, service.gap_ms / 2 / MS_PER_S)


# back, id, slice, ticket, pick, start and length of the computation
_InFlight = tuple[float, int, SliceServer, Ticket, Pick, float, float]


@dataclass(slots=True)
class _WindowCounts:
    """Counts of the window that is open."""

    arrived: int = 0
    rejected: int = 0
    latency_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Family:
    """State of one family. `slice_of`: by the identity of a target's key, hashing it takes longer."""

    name: str
    slo_ms: float
    lengths: AnswerLengths | None = None
    reads_lengths: bool = False
    route: Route = Route()
    slices: dict[SliceKey, SliceServer] = field(default_factory=dict)
    slice_of: dict[int, SliceServer] = field(default_factory=dict)
    counts: _WindowCounts = field(default_factory=_WindowCounts)

    def install(self, route: Route, services: Services, root: int) -> None:
        """Set the route by which requests are served from now on."""
        self.route = route
        self.reads_lengths = find(Kind.QUEUE, route.queue, QUEUES).traits.lengths
        for target in route.targets:
            key, service = target.slice, services[target.slice]
            one = self.slices.get(key)
            if one is None:
                one = self.slices[key] = idle_server(key, service, root)
            one.set_service(service)
        self.index_slices()

    def index_slices(self) -> None:
        """Index the slices of the route by identity."""
        self.slice_of = {id(target.slice): self.slices[target.slice] for target in self.route.targets}

    def ticket(self, id_: int, at: float) -> Ticket:
        """Ticket of one item that asks for nothing of its own; by position, which is faster than by name."""
        score = self.lengths.come(id_) if self.lengths is not None and self.reads_lengths else None
        return Ticket(id_, self.name, "", "", 1, 0, at, None, 0.0, 0, "", False, False, score, self.slo_ms)


def check_services(routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
    """Check that there is a service for every target of the routes.

    Raises:
        InvalidInput: naming the one that has none.
    """
    for family, route in routes.items():
        for target in route.targets:
            if target.slice not in services[family]:
                raise InvalidInput(
                    f"no service time for {target.variant} on {target.slice.name}",
                    field=f"services of {family}",
                    remedy="give one for every target of the route",
                )


class RequestLevel:
    """Kernel of families behind one router. Time goes forward only: `serve` windows, `set_routes` between two."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        services: Mapping[str, Services],
        rng: Generator,
        overhead_ms: float = 0.0,
        *,
        start_s: float = 0.0,
        no_slice_wait_s: float = NO_SLICE_WAIT_S,
        slo_ms: Mapping[str, float] | None = None,
        confusions: Mapping[str, Confusion] | None = None,
    ) -> None:
        """Start idle at `start_s`. `slo_ms` is what tickets say; `confusions`: of generative families.

        Raises:
            SettingError: router or queue is not known.
            InvalidInput: a target of a route has no service.
        """
        self._overhead_ms = overhead_ms
        self._root = int(rng.integers(2**63))
        self._now_s = self._window_s = start_s
        self._queue = FamilyQueue(no_slice_wait_s)
        self._families = {family: _Family(family, (slo_ms or {}).get(family, 0.0)) for family in routes}
        for family, confusion in (confusions or {}).items():
            rng_of_lengths = stream_of(self._root, crc32(family.encode()))
            self._families[family].lengths = AnswerLengths(confusion, rng_of_lengths)
        self._in_flight: list[_InFlight] = []
        self._arrived = 0
        self.set_routes(start_s, routes, services)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Saved and read again: what is found by identity is found by the new one."""
        self.__dict__.update(state)
        for one in self._families.values():
            one.index_slices()

    def set_routes(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Set routes and services. In flight finishes where it is; who waits is dealt again by the router's rule.

        Raises:
            SettingError: router or queue is not known.
            InvalidInput: a target of a route has no service.
        """
        check_services(routes, services)
        self._run((), repeat(""), float(now_s))
        for family, route in routes.items():
            self._families[family].install(route, services[family], self._root)
            self._carry_out(self._queue.table(route, "", self._now_s))

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Set the carbon ratio, intensity over its mean, from now on; None = not known."""
        self._run((), repeat(""), float(now_s))
        self._carry_out(self._queue.carbon(ratio, self._now_s))

    def serve(self, arrivals_s: Mapping[str, Counts], until_s: float) -> dict[str, FamilyWindow]:
        """Windows of all that happens before `until_s`, given arrivals by family (ascending) since the last call."""
        assert until_s >= self._now_s, "time does not go back"
        for at in arrivals_s.values():
            if at.size:
                assert self._now_s <= at[0], "an arrival before the window"
                assert at[-1] < until_s, "an arrival after the window"
        until_s = float(until_s)  # of numpy's scalars, arithmetic is slow
        if len(arrivals_s) == 1:
            ((family, at),) = arrivals_s.items()
            self._run(at.tolist(), repeat(family), until_s)
        else:
            names = [family for family, at in arrivals_s.items() for _ in range(at.size)]
            whole = np.concatenate([*arrivals_s.values(), np.empty(0)])
            order = np.argsort(whole, kind="stable")
            self._run(whole[order].tolist(), [names[at] for at in order.tolist()], until_s)
        windows = {family: self._close_window(one, until_s) for family, one in self._families.items()}
        self._window_s = until_s
        return windows

    def _run(self, arrivals_s: Sequence[float], families: Iterable[str], until_s: float) -> None:
        waiting, in_flight, land = self._queue.waiting, self._in_flight, self._complete_earliest
        for at, family in zip(arrivals_s, families, strict=False):
            if waiting:
                self._advance(at)
            else:
                while in_flight and in_flight[0][0] <= at:
                    land()
            self._arrive(self._families[family], at)
        self._advance(math.nextafter(until_s, -math.inf))
        self._now_s = until_s
        self._carry_out(self._queue.expire(until_s))

    def _advance(self, to_s: float) -> None:
        """All that happens up to then: answers come back, and the router is called when it wants to be."""
        queue = self._queue
        while True:
            in_flight, due_s = self._in_flight, queue.next_s() if queue.waiting else None
            if due_s is None:
                if not in_flight or in_flight[0][0] > to_s:
                    break
                self._complete_earliest()
            elif in_flight and in_flight[0][0] <= min(due_s, to_s):
                self._complete_earliest()
            elif due_s <= to_s:
                self._now_s = max(self._now_s, due_s)
                self._carry_out(queue.tick(self._now_s))
            else:
                break
        self._now_s = max(self._now_s, to_s)

    def _arrive(self, one: _Family, at: float) -> None:
        self._arrived += 1
        one.counts.arrived += 1
        if self._queue.unavailable(one.name, at):
            one.counts.rejected += 1
            return
        ticket = one.ticket(self._arrived, at)
        try:
            pick = self._queue.submit(ticket, at)
        except QueueFull:
            one.counts.rejected += 1
            return
        if pick is not None:
            self._launch(one, ticket, pick, at)

    def _launch(self, family: _Family, ticket: Ticket, pick: Pick, now_s: float) -> None:
        one = family.slice_of.get(id(pick.slice)) or family.slices[pick.slice]
        start_s = now_s + one.way_s
        own_s = family.lengths.service_s(ticket.id, one.service.service) if family.lengths is not None else None
        service_s = own_s or (one.times_s.pop() if one.times_s else one.draw_more())
        start_s = max(start_s, one.free_s) if one.instances_s is None else one.begin(start_s, service_s)
        one.free_s = start_s + service_s
        one.busy_s += service_s
        back_s = one.free_s + one.way_s
        heappush(self._in_flight, (back_s, ticket.id, one, ticket, pick, start_s, service_s))

    def _complete_earliest(self) -> None:
        """The earliest answer is back: its credit goes to whoever waits."""
        back_s, _, one, ticket, pick, _, service_s = heappop(self._in_flight)
        latency_s = back_s - ticket.arrived_s
        one.latency_s.append(latency_s)
        self._families[ticket.family].counts.latency_s.append(latency_s)
        outcome = Outcome("OK", latency_s * MS_PER_S, service_s * MS_PER_S, 0, True)
        effects = self._queue.done(ticket, pick, outcome, back_s)
        if effects:
            self._now_s = back_s
            self._carry_out(effects)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Refusal):
                self._families[effect.ticket.family].counts.rejected += 1
            elif not isinstance(effect, Idle):
                ticket, pick = effect
                self._launch(self._families[ticket.family], ticket, pick, self._now_s)

    def _close_window(self, family: _Family, until_s: float) -> FamilyWindow:
        beyond: dict[SliceKey, float] = {}
        mine = [one for one in self._in_flight if one[2] is family.slices.get(one[2].key)]
        for _, _, one, _, _, start_s, service_s in sorted(mine, key=lambda each: each[:2]):
            late_s = min(service_s, max(0.0, start_s + service_s - until_s))
            beyond[one.key] = beyond.get(one.key, 0.0) + late_s
        counts = family.counts
        waiting = self._queue.waiting.values()
        busy_s, joules, latency_s_by = dict[SliceKey, float](), dict[SliceKey, float](), dict[SliceKey, list[float]]()
        kept = {target.slice for target in family.route.targets}.union([one[2].key for one in mine])
        for key, one in tuple(family.slices.items()):
            late_s = beyond.get(key, 0.0)
            busy_s[key] = max(0.0, one.busy_s - late_s)
            joules[key] = busy_s[key] * MS_PER_S / one.service.service.mean_ms * one.service.energy_j
            latency_s_by[key] = one.latency_s
            one.busy_s, one.latency_s = late_s, []
            if key not in kept:
                del family.slices[key]
        family.counts = _WindowCounts()
        return FamilyWindow(
            starts_s=self._window_s,
            ends_s=until_s,
            arrived=counts.arrived,
            answered=len(counts.latency_s),
            rejected=counts.rejected,
            latency_ms=np.array(counts.latency_s) * MS_PER_S + self._overhead_ms,
            busy_s=busy_s,
            joules=joules,
            latency_s_by=latency_s_by,
            queued=sum(ticket.family == family.name for ticket in waiting),
        )
