"""Requests one by one, through the queue and router that serve them live: one event loop for families and their stages.

Data: arrivals of each family (`Flow`); routes (targets with credits, queue bounds); per slice its service (`lines.py`).
Result: per window what was answered, refused, still waiting, and how long every slice computed.
Model: a request that is sent to a slice is there after gap/2, is computed as `lines.py` has it, and is back after
    another gap/2: its credit is free then. So one credit leaves the slice idle for a gap per request; a second one
    hides that. In flight it stays on its slice whatever the table says next; all else is decided by
    dispatcher/routing/core/family_queue.py, as it is live. Where families share slices (`shares`), they slow each other
    and batches form; else each has slices of its own. A family that is split has a queue and lines for each stage,
    called as its model: what one answers the next one is asked.
Draws: a stream of random numbers for every family on every slice, and for the items of every family.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, repeat
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.random import Generator

from dispatcher.queues import QUEUES
from dispatcher.queues.fifo import QueueFull
from dispatcher.routing.core.family_queue import Effect, FamilyQueue, Idle, Refusal
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.demand import NO_STREAMS, StreamCounts
from trefoil.core.device_types import slice_cores
from trefoil.core.fleet import SliceKey, family_of, split_model, stage_model
from trefoil.core.parts import Kind, find
from trefoil.core.plan import Route
from trefoil.core.queueing import ServiceTime
from trefoil.core.units import MS_PER_S
from trefoil.simulator.books.intervals import Counts, Interval, histogram_of
from trefoil.simulator.engines.answer_lengths import AnswerLengths, ReplayedLengths
from trefoil.simulator.engines.engine import Flow, Services, SliceService, dispatchable
from trefoil.simulator.engines.lines import Batch, FamilyLines, Line, OwnLine, Place, SharedLine
from trefoil.simulator.scenario.arrivals import ReplayedArrivals

NO_SLICE_WAIT_S: Final = 20.0  # as dispatcher.settings.no_slice_wait_s


@dataclass(frozen=True, slots=True)
class FamilyWindow:
    """Counts and latencies of a family, or of a stage of one, in [starts_s, ends_s).

    `latency_ms` holds those answered in it, in order of their answers, client overhead included. `busy_s` is the time
    that a slice computed inside the window, also for requests that are answered after it, as if alone. `joules` is what
    that cost. `queued` waits at its end. `latency_s_by` has the latencies by slice, without the overhead. `passed_s_by`
    has those of what was answered after an earlier stage was done there.
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
    passed_s_by: Mapping[SliceKey, list[float]]
    services: Mapping[SliceKey, SliceService]
    streams: StreamCounts = NO_STREAMS
    ttft_s_by: Mapping[SliceKey, list[float]] = field(default_factory=dict)
    tpot_s_by: Mapping[SliceKey, list[float]] = field(default_factory=dict)
    tokens: int = 0

    @property
    def answered_by(self) -> dict[SliceKey, int]:
        """How many each slice answered."""
        return {key: len(found) for key, found in self.latency_s_by.items()}


IS_BACK, BATCH_IS_BACK, ENDS, WAKES = range(4)  # what happens to a line's request, a batch, a place, a line


class RequestEngine:
    """Engine of requests one by one. Time goes forward only: `serve`, `set_routes` between two.

    `router` and `queue` instead of the plan's. `keeps_latencies`: intervals hold the latency of each answer, for exact
    quantiles. `shares`: the families may live on the same slices; `grouped`: one router has all of them. Without
    `interference` they do not slow each other.
    """

    def __init__(
        self,
        flows: Mapping[str, Flow],
        rng: Generator,
        overhead_ms: float = 0.0,
        now_s: float = 0.0,
        router: str = "",
        queue: str = "",
        keeps_latencies: bool = False,
        shares: bool = False,
        grouped: bool = False,
        interference: float | None = None,
    ) -> None:
        """Start idle.

        Raises:
            SettingError: router or queue is not known.
        """
        self.families, self.plays_stages = tuple(flows), shares and not grouped
        self._flows, self._overhead_ms, self._keeps_latencies = flows, overhead_ms, keeps_latencies
        self._router, self._queue = router, queue
        self._shares, self._grouped, self._interference = shares, grouped, interference
        self._root = int(rng.integers(2**63))
        self._now_s = self._window_s = float(now_s)
        self._families: dict[str, FamilyLines] = {}
        self._queues: list[FamilyQueue] = []
        self._entries: dict[str, FamilyLines] = {}  # by family: itself, or its first stage
        self._under_way: dict[int, tuple[float, list[Line]]] = {}  # of what is split: its items, and where it was
        self._places: dict[SliceKey, Place] = {}
        self._events: list[Any] = []  # time, number, what, to which line or place, and more
        self._numbers = count(1)
        self.set_routes(now_s, {family: Route(family, router or "fifo", queue or "fifo") for family in flows}, {})

    def set_routes(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Set routes and services, by family or, where it is split, by stage. What computes ends as it began; who waits
        is dealt again by the router's rule.

        Raises:
            SettingError: router or queue is not known.
        """
        self._run((), float(now_s))
        self._install(routes)
        families = {family_of(name) for name in routes}
        gone = [name for name in self._families if family_of(name) in families and name not in routes]
        left = {name: replace(self._families[name].route, targets=()) for name in gone}
        for name, wanted in {**left, **routes}.items():
            family, given = self._families[name], services.get(name, {})
            family.route = route = wanted if name in left else dispatchable(wanted, given, self._router, self._queue)
            for key in dict.fromkeys([*family.lines, *(target.slice for target in route.targets)]):
                service = given.get(key)
                if service is None:
                    continue  # it serves no more; what is in flight there ends as it began
                if key not in family.lines:
                    family.lines[key] = self._line(family, key, service)
                family.lines[key].set_service(service)
            family.go_by_lengths(find(Kind.QUEUE, route.queue, QUEUES).traits.lengths)
            self._carry_out(family.queue.table(route, "", self._now_s))

    def _install(self, names: Iterable[str]) -> None:
        """Make what is not there yet of these families and stages, and let each stage know the one after it."""
        shared = next((one.queue for one in self._families.values()), None) if self._grouped else None
        for name in names:
            family, stage, stages = split_model(name)
            if name not in self._families:
                flow, queue = self._flows[family], shared or FamilyQueue(NO_SLICE_WAIT_S)
                lengths = self._lengths(name, flow)
                self._families[name] = FamilyLines(name, flow, queue, self._stream(name, "items"), lengths, stages > 1)
                shared = queue if self._grouped else None
            if stage == 0:
                self._entries[family] = self._families[name]
        for name, one in self._families.items():
            family, stage, stages = split_model(name)
            one.following = self._families.get(stage_model(family, stage + 1, stages)) if stage + 1 < stages else None
        self._queues = list({id(one.queue): one.queue for one in self._families.values()}.values())

    def _lengths(self, name: str, flow: Flow) -> AnswerLengths | None:
        if isinstance(flow.source, ReplayedArrivals):
            return ReplayedLengths(flow.confusion or (), self._stream(name), flow.source)
        return None if flow.confusion is None else AnswerLengths(flow.confusion, self._stream(name))

    def _line(self, family: FamilyLines, key: SliceKey, service: SliceService) -> OwnLine | SharedLine:
        if not self._shares and family.flow.streams is None:
            return OwnLine(family, service, self._stream(key.device, key.slice_type, key.start, key.size))
        place = self._places.setdefault(key, Place())
        return SharedLine(family, service, self._stream(family.name, key.device, key.name), place)

    def _stream(self, *names: str | int) -> Generator:
        """Stream of random numbers, by the seed of the run and the words that name it."""
        words = [name if isinstance(name, int) else crc32(name.encode()) for name in names]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self._root, *words))))

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Set the carbon ratio, intensity over its mean, from now on; None = not known."""
        self._run((), float(now_s))
        for queue in self._queues:
            self._carry_out(queue.carbon(ratio, self._now_s))

    # --- windows ----------------------------------------------------------------------------------------------------

    def serve(self, until_s: float) -> dict[str, Interval]:
        """Intervals of everything up to a time."""
        windows = self.windows({family: flow.source.until(until_s) for family, flow in self._flows.items()}, until_s)
        by_family: dict[str, dict[str, FamilyWindow]] = {}
        for name, window in windows.items():
            by_family.setdefault(family_of(name), {})[name] = window
        return {family: self._interval(family, each) for family, each in by_family.items()}

    def windows(self, arrivals_s: Mapping[str, Counts], until_s: float) -> dict[str, FamilyWindow]:
        """Windows of all that happens before `until_s`, given arrivals by family (ascending) since the last call."""
        assert until_s >= self._now_s, "time does not go back"
        for at in arrivals_s.values():
            if at.size:
                assert self._now_s <= at[0], "an arrival before the window"
                assert at[-1] < until_s, "an arrival after the window"
        if len(arrivals_s) == 1:
            ((name, times),) = arrivals_s.items()
            self._run(zip(times.tolist(), repeat(self._entries[name]), strict=False), float(until_s))
        else:
            entries = [self._entries[name] for name, at in arrivals_s.items() for _ in range(at.size)]
            whole = np.concatenate([*arrivals_s.values(), np.empty(0)])
            order = np.argsort(whole, kind="stable")
            arrivals = zip(whole[order].tolist(), [entries[at] for at in order.tolist()], strict=True)
            self._run(arrivals, float(until_s))
        for place in self._places.values():
            place.advance(self._now_s)
        late_s = {id(event[3].line): 0.0 for event in self._events if event[2] == BATCH_IS_BACK}
        for _, _, _, line, _, _, start_s, service_s in sorted(one for one in self._events if one[2] == IS_BACK):
            beyond_s = min(service_s, max(0.0, start_s + service_s - until_s))
            late_s[id(line)] = late_s.get(id(line), 0.0) + beyond_s
        windows = {name: self._close_window(one, late_s) for name, one in self._families.items()}
        lines = {key for one in self._families.values() for key in one.lines}
        self._places = {key: place for key, place in self._places.items() if key in lines}
        self._window_s = self._now_s
        return windows

    def _close_window(self, family: FamilyLines, late_s: Mapping[int, float]) -> FamilyWindow:
        """Window of a family that ends now. `late_s`: of what is in flight, what is computed after it, by line."""
        booked = {key: line.book(late_s.get(id(line), 0.0)) for key, line in family.lines.items()}
        window = FamilyWindow(
            starts_s=self._window_s,
            ends_s=self._now_s,
            arrived=family.arrived,
            answered=len(family.latency_s),
            rejected=family.rejected,
            latency_ms=np.array(family.latency_s) * MS_PER_S + self._overhead_ms,
            busy_s={key: busy_s for key, (busy_s, _) in booked.items()},
            joules={key: joules for key, (_, joules) in booked.items()},
            latency_s_by={key: line.latency_s for key, line in family.lines.items()},
            queued=sum(ticket.family == family.name for ticket in family.queue.waiting.values()),
            passed_s_by={key: line.passed_s for key, line in family.lines.items() if line.passed_s},
            services={key: line.service for key, line in family.lines.items()},
            streams=family.stream_counts(),
            ttft_s_by={k: one.ttft_s for k, one in family.lines.items() if isinstance(one, SharedLine) and one.ttft_s},
            tpot_s_by={k: one.tpot_s for k, one in family.lines.items() if isinstance(one, SharedLine) and one.tpot_s},
            tokens=family.tokens,
        )
        in_route = {target.slice for target in family.route.targets}
        for key, line in tuple(family.lines.items()):
            line.latency_s, line.passed_s = [], []
            if isinstance(line, SharedLine):
                line.ttft_s, line.tpot_s = [], []
            holds = isinstance(line, SharedLine) and (line.waiting or line.running)
            if key not in in_route and not holds and id(line) not in late_s:
                del family.lines[key]
        family.arrived, family.rejected, family.latency_s, family.ttft_s, family.tpot_s = 0, 0, [], [], []
        family.tokens = 0
        return window

    def _interval(self, family: str, windows: Mapping[str, FamilyWindow]) -> Interval:
        """Interval of a family by its window or, where it is split, those of its stages: the last one's are answers."""
        every = tuple(windows.values())
        latency_ms = every[0].latency_ms if len(every) == 1 else np.concatenate([one.latency_ms for one in every])
        interval = Interval(
            every[0].starts_s,
            every[0].ends_s,
            sum([one.arrived for one in every]),
            sum([one.answered for one in every]),
            sum([one.rejected for one in every]),
            float(np.count_nonzero(latency_ms <= self._flows[family].slo_ms)),
            latency=histogram_of(latency_ms),
            sum_ms=float(latency_ms.sum()),
            max_ms=float(latency_ms.max(initial=0.0)),
            queued=sum([one.queued for one in every]),
            latencies_ms=[latency_ms] if self._keeps_latencies else [],
            latency_s_by=every[0].latency_s_by if len(every) == 1 else _latencies_by(every),
            streams=every[-1].streams,
            ttft_s_by=every[-1].ttft_s_by,
            tpot_s_by=every[-1].tpot_s_by,
            tokens=every[-1].tokens,
        )
        for window in every:
            _add_work(interval, window)
        return interval

    # --- events -----------------------------------------------------------------------------------------------------

    def _run(self, arrivals: Iterable[tuple[float, FamilyLines]], until_s: float) -> None:
        events, happen, numbers = self._events, self._happen, self._numbers
        waiting = [queue.waiting for queue in self._queues]
        for at, family in arrivals:
            if any(waiting):
                self._advance(at)
            else:
                while events and events[0][0] <= at:
                    happen()
            self._now_s = at
            family.arrived += 1
            beyond = family.replayed is not None and not family.replayed.arrive()
            if beyond or (not family.route.targets and family.queue.unavailable(family.name, at)):
                family.rejected += 1
            else:
                self._submit(family, family.ticket(next(numbers), at))
        self._advance(math.nextafter(until_s, -math.inf))
        self._now_s = until_s
        for queue in self._queues:
            self._carry_out(queue.expire(until_s))

    def _advance(self, to_s: float) -> None:
        """All that happens up to then: also routers are called, when they want to be."""
        events = self._events
        while True:
            due_s, due = math.inf, None
            for queue in self._queues:
                if queue.waiting and (wanted_s := queue.next_s()) is not None and wanted_s < due_s:
                    due_s, due = wanted_s, queue
            if events and events[0][0] <= min(due_s, to_s):
                self._happen()
            elif due is not None and due_s <= to_s:
                self._now_s = max(self._now_s, due_s)
                self._carry_out(due.tick(self._now_s))
            else:
                return

    def _happen(self) -> None:
        event = heappop(self._events)
        self._now_s, what, who = event[0], event[2], event[3]
        if what == IS_BACK:
            self._answer(who, event[4], event[5], event[7])
        elif what == BATCH_IS_BACK:
            for ticket, pick in who.requests:
                self._answer(who.line, ticket, pick, who.alone_s)
        elif what == ENDS:
            if event[4] == who.turn:
                self._end(who)
        elif who.wakes_s <= self._now_s:
            who.wakes_s = math.inf
            self._start(who)

    def _submit(self, family: FamilyLines, ticket: Ticket) -> None:
        try:
            pick = family.queue.submit(ticket, self._now_s)
        except QueueFull:
            self._refuse(family, ticket)
            return
        if pick is not None:
            self._send(family, ticket, pick)

    def _refuse(self, family: FamilyLines, ticket: Ticket) -> None:
        family.rejected += 1
        self._under_way.pop(ticket.id, None)
        if family.replayed is not None:
            family.replayed.leave(ticket.id)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Refusal):
                self._refuse(self._families[effect.ticket.family], effect.ticket)
            elif not isinstance(effect, Idle):
                self._send(self._families[effect[0].family], *effect)

    def _send(self, family: FamilyLines, ticket: Ticket, pick: Pick) -> None:
        line = family.lines[pick.slice]
        start_s = self._now_s + line.way_s
        if isinstance(line, SharedLine):
            self._wait_on(line, ticket, pick, start_s)
            return
        own_s = family.lengths.service_s(ticket.id, line.service.service) if family.lengths is not None else None
        service_s = own_s or (line.times_s.pop() if line.times_s else line.draw_more())
        start_s = max(start_s, line.free_s) if line.instances_s is None else line.begin(start_s, service_s)
        line.free_s = ends_s = start_s + service_s
        line.busy_s += service_s
        back_s = ends_s + line.way_s
        heappush(self._events, (back_s, ticket.id, IS_BACK, line, ticket, pick, start_s, service_s))

    def _answer(self, line: Line, ticket: Ticket, pick: Pick, service_s: float) -> None:
        """An answer is back: its credit goes to a waiting request."""
        family, latency_s = line.family, self._now_s - ticket.arrived_s
        if family.following is None:
            line.latency_s.append(latency_s)
            family.latency_s.append(latency_s)
            if family.is_stage:
                self._answered(ticket, latency_s)
        outcome = Outcome("OK", latency_s * MS_PER_S, service_s * MS_PER_S, 0, True)
        effects = family.queue.done(ticket, pick, outcome, self._now_s)
        if effects:
            self._carry_out(effects)
        if family.following is not None:
            self._pass_on(line, family.following, ticket)

    # --- stages -----------------------------------------------------------------------------------------------------

    def _pass_on(self, line: Line, family: FamilyLines, ticket: Ticket) -> None:
        """What a stage answered is asked of the next one."""
        self._under_way[ticket.id][1].append(line)
        if not family.route.targets and family.queue.unavailable(family.name, self._now_s):
            self._refuse(family, ticket)
            return
        self._submit(family, replace(ticket, family=family.name))  # it came when it came to the first

    def _answered(self, ticket: Ticket, latency_s: float) -> None:
        """The last stage is done: each earlier one learns of the latency of the whole."""
        for line in self._under_way.pop(ticket.id, (0.0, ()))[1]:
            line.passed_s.append(latency_s)

    # --- shared slices ----------------------------------------------------------------------------------------------

    def _wait_on(self, line: SharedLine, ticket: Ticket, pick: Pick, there_s: float) -> None:
        flow = line.family.flow
        items = float(ticket.items) if flow.items_sd else flow.items
        if line.family.is_stage:
            items, _ = self._under_way.setdefault(ticket.id, (items, []))
        line.waiting.append((there_s, items, (ticket, pick)))
        if line.running < line.places:
            if line.way_s:
                self._wake(line, there_s)
            else:
                self._start(line)

    def _wake(self, line: SharedLine, at_s: float) -> None:
        if at_s < line.wakes_s:
            line.wakes_s = at_s
            heappush(self._events, (at_s, next(self._numbers), WAKES, line))

    def _start(self, line: SharedLine) -> None:
        """Start as many batches as instances are free and requests are there."""
        now_s, lengths, delay_s = self._now_s, line.family.lengths, line.family.flow.batch_delay_s
        while line.waiting and line.running < line.places:
            requests, items, again_s = line.gather(now_s, delay_s)
            if not requests:
                self._wake(line, again_s)
                return
            point, alone_s = line.draw(items)
            if lengths is not None:
                law = ServiceTime(point.mean_ms, point.cv)
                alone_s = max((lengths.service_s(ticket.id, law) or alone_s for ticket, _ in requests), default=alone_s)
            line.place.advance(now_s)
            line.place.batches.append(batch := Batch(line, requests, point, alone_s, alone_s))
            line.running += 1
            if line.family.flow.streams is not None:
                line.begin_stream(batch, now_s)
            self._pace(line.place)

    def _pace(self, place: Place) -> None:
        """Compute again how long what computes takes, and when the next of it ends."""
        next_s = place.pace(self._interference)
        if place.batches:
            heappush(self._events, (self._now_s + next_s, next(self._numbers), ENDS, place, place.turn))

    def _end(self, place: Place) -> None:
        now_s = self._now_s
        place.advance(now_s)
        ended = place.take_ended()
        for one in ended:
            one.line.running -= 1
            if one.line.family.flow.streams is not None:
                one.line.end_stream(one, now_s)
            heappush(self._events, (now_s + one.line.way_s, next(self._numbers), BATCH_IS_BACK, one))
        turn = place.turn
        for one in ended:
            self._start(one.line)
        if place.turn == turn:
            self._pace(place)


def _add_work(interval: Interval, window: FamilyWindow) -> None:
    """Add what each slice computed and answered."""
    answered_by = window.answered_by
    for key, service in window.services.items():
        joules = window.joules[key]
        if joules > 0:
            interval.joules[key] = interval.joules.get(key, 0.0) + joules
        if slice_cores(key.slice_type):
            interval.computed_s[key, service.variant] = window.busy_s[key]
        count = answered_by.get(key, 0)
        if count:
            interval.by_variant[service.variant] = interval.by_variant.get(service.variant, 0.0) + count
            interval.by_device[key.device] = interval.by_device.get(key.device, 0.0) + count
            interval.accuracy_sum += count * service.accuracy


def _latencies_by(windows: Iterable[FamilyWindow]) -> dict[SliceKey, list[float]]:
    """Latencies by slice, of the whole also where an earlier stage was done."""
    found: dict[SliceKey, list[float]] = {}
    for one in windows:
        for key, seen in (*one.latency_s_by.items(), *one.passed_s_by.items()):
            found[key] = found.get(key, []) + seen
    return found
