"""Requests of families that share slices, one by one: one event loop, in which batches form and slow each other.

Data: as request_level.py; of each family on each slice also its operating points by batch and its instances, of each
    family the items of a request and how Triton batches it (`Flow`).
Result: windows by family, as request_level.py. `busy_s` is the time that batches would have taken alone.
Model: a request that is sent to a slice is there after gap/2 and waits in its family's line. A free instance takes the
    first of the line and, where the family is batched, all that are there and fit its largest batch; if some are
    missing, it waits for them until the first has waited `batch_delay_s` (Triton's dynamic batcher). A batch's time
    alone is drawn at its items, between profiled batches as trefoil/core/queueing.py and the model on a simulated slice
    do it. Whatever computes on a slice at once is slowed by trefoil/core/interference.py; what is left of each batch is
    reckoned anew when one begins or ends there. Its joules are those of the time alone. All of it is back after gap/2.
    A family that is split has a line for each stage, called as its model: what one answers the next one is asked.
Draws: a stream for every family on every slice, and one for the items of every family.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.random import Generator

from dispatcher.queues import QUEUES
from dispatcher.queues.fifo import QueueFull
from dispatcher.routing.core.family_queue import Effect, FamilyQueue, Idle, Refusal
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.fleet import SliceKey, family_of, split_model, stage_model
from trefoil.core.interference import INTERFERENCE, stretch
from trefoil.core.parts import Kind, find
from trefoil.core.plan import Route
from trefoil.core.queueing import ServiceTime, draw_s
from trefoil.core.units import MS_PER_S
from trefoil.simulator.books.intervals import Counts
from trefoil.simulator.engines.answer_lengths import AnswerLengths
from trefoil.simulator.engines.engine import Flow, OperatingPoint, Services, SliceService
from trefoil.simulator.engines.request_level import NO_SLICE_WAIT_S, FamilyWindow, check_services, stream_of

DRAWS: Final = 128  # service times of a batch size, and items, drawn at once
DONE_S: Final = 1e-12  # what is left of a batch that has ended


def operating_point(points: tuple[OperatingPoint, ...], items: float) -> OperatingPoint:
    """Operating point of a batch: between two profiled ones, the smallest, or in proportion beyond the largest."""
    at = bisect_left(points, items, key=lambda point: point.items)
    if at == 0:
        return points[0]
    if at == len(points):
        last = points[-1]
        return last._replace(items=items, mean_ms=last.mean_ms * items / last.items)
    low, high = points[at - 1], points[at]
    part = (items - low.items) / (high.items - low.items)
    return OperatingPoint(*(a + part * (b - a) for a, b in zip(low, high, strict=True)))


_Request = tuple[Ticket, Pick]  # its ticket, and where it goes


@dataclass(slots=True, eq=False)
class _Batch:
    """Batch that computes: what is left of its time alone, and how much longer it takes now."""

    line: "_Line"
    requests: list[_Request]
    point: OperatingPoint
    alone_s: float
    left_s: float
    stretch: float = 1.0


@dataclass(slots=True, eq=False)
class _Place:
    """Slice: what computes on it. `turn` tells the event of its next end from older ones."""

    at_s: float = -math.inf
    turn: int = 0
    batches: list[_Batch] = field(default_factory=list)

    def advance(self, now_s: float) -> None:
        """Book what was done since the last time."""
        past_s, self.at_s = now_s - self.at_s, now_s
        for one in self.batches:
            done_s = min(one.left_s, past_s / one.stretch)
            one.left_s -= done_s
            one.line.busy_s += done_s
            one.line.joules += done_s * one.point.active_w


@dataclass(slots=True, eq=False)
class _Line:
    """Requests of one family on one slice. `wakes_s`: when it wants to be looked at, though nothing happens."""

    service: SliceService
    place: _Place
    family: "_Family"
    rng: Generator
    way_s: float = 0.0
    waiting: deque[tuple[float, float, _Request]] = field(default_factory=deque)  # there from, items, request
    running: int = 0
    wakes_s: float = math.inf
    busy_s: float = 0.0
    joules: float = 0.0
    latency_s: list[float] = field(default_factory=list)
    passed_s: list[float] = field(default_factory=list)  # latencies of what was answered after this stage
    drawn: dict[float, tuple[OperatingPoint, list[float]]] = field(default_factory=dict)

    def set_service(self, service: SliceService) -> None:
        """Set the service of batches that begin from now on."""
        if service.points != self.service.points:
            self.drawn.clear()
        self.service, self.way_s = service, service.gap_ms / 2 / MS_PER_S

    def draw(self, items: float) -> tuple[OperatingPoint, float]:
        """Operating point of a batch, and its time alone [s]."""
        known = self.drawn.get(items)
        if known is None:
            known = self.drawn[items] = operating_point(self.service.points, items), []
        point, times_s = known
        if not times_s:
            times_s.extend(draw_s(ServiceTime(point.mean_ms, point.cv), DRAWS, self.rng).tolist())
        return point, times_s.pop()

    @property
    def items_max(self) -> float:
        """Largest batch that is profiled."""
        return self.service.points[-1].items


@dataclass(slots=True, eq=False)
class _Family:
    """State of one family, or of a stage of one, which passes on to `following` what is no answer yet. `line_of`: by
    the identity of a target's key, hashing it takes longer.
    """

    name: str
    flow: Flow
    queue: FamilyQueue
    rng: Generator
    route: Route = Route()
    lengths: AnswerLengths | None = None
    following: "_Family | None" = None
    is_stage: bool = False
    reads_lengths: bool = False
    lines: dict[SliceKey, _Line] = field(default_factory=dict)
    line_of: dict[int, _Line] = field(default_factory=dict)
    items_drawn: list[float] = field(default_factory=list)
    arrived: int = 0
    rejected: int = 0
    latency_s: list[float] = field(default_factory=list)

    def index_lines(self) -> None:
        """Index the lines of the route by identity."""
        self.line_of = {id(target.slice): self.lines[target.slice] for target in self.route.targets}

    def ticket(self, id_: int, at: float) -> Ticket:
        """Ticket of a request; by position, which is faster than by name."""
        items = int(self.items()) if self.flow.items_sd else math.ceil(self.flow.items)
        score = self.lengths.come(id_) if self.lengths is not None and self.reads_lengths else None
        return Ticket(id_, self.name, "", "", items, 0, at, None, 0.0, 0, "", False, False, score, self.flow.slo_ms)

    def items(self) -> float:
        """Items of the next request, drawn."""
        flow = self.flow
        if not self.items_drawn:
            drawn = np.rint(self.rng.normal(flow.items, flow.items_sd, DRAWS))
            self.items_drawn = np.clip(drawn, 1, max(1.0, flow.items_max)).tolist()
        return self.items_drawn.pop()


WAKES, ENDS, IS_BACK = range(3)


class SharedLevel:
    """Kernel of families that share slices. Time goes forward only: `serve` windows, `set_routes` between two."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        services: Mapping[str, Services],
        rng: Generator,
        flows: Mapping[str, Flow],
        overhead_ms: float = 0.0,
        *,
        start_s: float = 0.0,
        no_slice_wait_s: float = NO_SLICE_WAIT_S,
        grouped: bool = False,
        interference: float | None = INTERFERENCE,
    ) -> None:
        """Start idle at `start_s`. `grouped`: one router has all families; without `interference` nobody slows anybody.

        Raises:
            SettingError: router or queue is not known.
            InvalidInput: a target of a route has no service.
        """
        self._overhead_ms, self._interference, self._grouped = overhead_ms, interference, grouped
        self._root = int(rng.integers(2**63))
        self._now_s = self._window_s = start_s
        self._flows, self._no_slice_wait_s = flows, no_slice_wait_s
        self._families: dict[str, _Family] = {}
        self._queues: list[FamilyQueue] = []
        self._entries: dict[str, _Family] = {}  # by family: itself, or its first stage
        self._under_way: dict[int, tuple[float, list[_Line]]] = {}  # of what is split: its items, and where it was
        self._places: dict[SliceKey, _Place] = {}
        self._events: list[tuple[float, int, int, Any, int]] = []
        self._numbers = count(1)
        self.set_routes(start_s, routes, services)

    def _install(self, names: Iterable[str]) -> None:
        """Make what is not there yet of these families and stages, and let each stage know the one after it."""
        shared = next((one.queue for one in self._families.values()), None) if self._grouped else None
        for name in names:
            family, stage, stages = split_model(name)
            if name not in self._families:
                flow, queue = self._flows[family], shared or FamilyQueue(self._no_slice_wait_s)
                told = flow.confusion
                lengths = None if told is None else AnswerLengths(told, self._stream(name))
                made = _Family(name, flow, queue, self._stream(name, "items"), lengths=lengths, is_stage=stages > 1)
                self._families[name] = made
                shared = queue if self._grouped else None
            if stage == 0:
                self._entries[family] = self._families[name]
        for name, one in self._families.items():
            family, stage, stages = split_model(name)
            one.following = self._families.get(stage_model(family, stage + 1, stages)) if stage + 1 < stages else None
        self._queues = list({id(one.queue): one.queue for one in self._families.values()}.values())

    def _stream(self, *names: str) -> Generator:
        return stream_of(self._root, *(crc32(name.encode()) for name in names))

    def set_routes(self, now_s: float, routes: Mapping[str, Route], services: Mapping[str, Services]) -> None:
        """Set routes and services, by family or, where it is split, by stage. Batches under way end as they began; who
        waits is dealt again by the router's rule.

        Raises:
            SettingError: router or queue is not known.
            InvalidInput: a target of a route has no service.
        """
        now_s = float(now_s)
        check_services(routes, services)
        self._run((), now_s)
        self._install(routes)
        families = {family_of(name) for name in routes}
        gone = [name for name in self._families if family_of(name) in families and name not in routes]
        left = {name: replace(self._families[name].route, targets=()) for name in gone}
        for name, route in {**left, **routes}.items():
            family = self._families[name]
            family.route = route
            for key in dict.fromkeys([*family.lines, *(target.slice for target in route.targets)]):
                service = services.get(name, {}).get(key)
                if service is None:
                    continue  # it serves no more; what is in flight there ends as it began
                if key not in family.lines:
                    place = self._places.setdefault(key, _Place())
                    family.lines[key] = _Line(service, place, family, self._stream(name, key.device, key.name))
                family.lines[key].set_service(service)
            family.index_lines()
            family.reads_lengths = find(Kind.QUEUE, route.queue, QUEUES).traits.lengths
            self._carry_out(family.queue.table(route, "", self._now_s))

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Set the carbon ratio, intensity over its mean, from now on; None = not known."""
        self._run((), float(now_s))
        for queue in self._queues:
            self._carry_out(queue.carbon(ratio, self._now_s))

    def serve(self, arrivals_s: Mapping[str, Counts], until_s: float) -> dict[str, FamilyWindow]:
        """Windows of all that happens before `until_s`, given arrivals by family (ascending) since the last call."""
        assert until_s >= self._now_s, "time does not go back"
        names = [self._entries[name] for name, at in arrivals_s.items() for _ in range(at.size)]
        whole = np.concatenate([*arrivals_s.values(), np.empty(0)])
        order = np.argsort(whole, kind="stable")
        self._run(zip(whole[order].tolist(), [names[at] for at in order.tolist()], strict=True), float(until_s))
        for place in self._places.values():
            place.advance(self._now_s)
        windows = {name: self._close_window(one) for name, one in self._families.items()}
        self._places = {
            key: place
            for key, place in self._places.items()
            if any(key in one.lines for one in self._families.values())
        }
        self._window_s = self._now_s
        return windows

    # --- events -----------------------------------------------------------------------------------------------------

    def _run(self, arrivals: Iterable[tuple[float, _Family]], until_s: float) -> None:
        events, happen = self._events, self._happen
        for at, family in arrivals:
            for queue in self._queues:
                if queue.waiting:
                    self._advance(at)
                    break
            else:
                while events and events[0][0] <= at:
                    happen()
            self._now_s = at
            self._arrive(family, at)
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
                wanted_s = queue.next_s()
                if wanted_s is not None and wanted_s < due_s:
                    due_s, due = wanted_s, queue
            if events and events[0][0] <= min(due_s, to_s):
                self._happen()
            elif due is not None and due_s <= to_s:
                self._now_s = max(self._now_s, due_s)
                self._carry_out(due.tick(self._now_s))
            else:
                return

    def _happen(self) -> None:
        self._now_s, _, what, who, turn = heappop(self._events)
        if what == ENDS:
            if turn == who.turn:
                self._end(who)
        elif what == IS_BACK:
            self._answer(who)
        elif who.wakes_s <= self._now_s:
            who.wakes_s = math.inf
            self._start(who)

    def _wake(self, line: _Line, at_s: float) -> None:
        if at_s < line.wakes_s:
            line.wakes_s = at_s
            heappush(self._events, (at_s, next(self._numbers), WAKES, line, 0))

    def _arrive(self, family: _Family, at: float) -> None:
        family.arrived += 1
        if not family.line_of and family.queue.unavailable(family.name, at):
            family.rejected += 1
            return
        self._submit(family, family.ticket(next(self._numbers), at))

    def _submit(self, family: _Family, ticket: Ticket) -> None:
        try:
            pick = family.queue.submit(ticket, self._now_s)
        except QueueFull:
            self._refuse(family, ticket)
            return
        if pick is not None:
            self._send(family, ticket, pick)

    def _refuse(self, family: _Family, ticket: Ticket) -> None:
        family.rejected += 1
        self._under_way.pop(ticket.id, None)

    def _pass_on(self, line: _Line, family: _Family, ticket: Ticket) -> None:
        """What a stage answered is asked of the next one."""
        self._under_way[ticket.id][1].append(line)
        if not family.line_of and family.queue.unavailable(family.name, self._now_s):
            self._refuse(family, ticket)
            return
        self._submit(family, replace(ticket, family=family.name))  # it came when it came to the first

    def _answered(self, ticket: Ticket, latency_s: float) -> None:
        """The last stage is done: each earlier one learns of the latency of the whole."""
        for line in self._under_way.pop(ticket.id, (0.0, ()))[1]:
            line.passed_s.append(latency_s)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Refusal):
                self._refuse(self._families[effect.ticket.family], effect.ticket)
            elif not isinstance(effect, Idle):
                self._send(self._families[effect[0].family], *effect)

    def _send(self, family: _Family, ticket: Ticket, pick: Pick) -> None:
        line = family.line_of.get(id(pick.slice)) or family.lines[pick.slice]
        there_s = self._now_s + line.way_s
        items = family.flow.items
        if family.flow.items_sd:
            items = float(ticket.items)
        if family.is_stage:
            items, _ = self._under_way.setdefault(ticket.id, (items, []))
        line.waiting.append((there_s, items, (ticket, pick)))
        if line.running < line.service.instances:
            if line.way_s:
                self._wake(line, there_s)
            else:
                self._start(line)

    def _start(self, line: _Line) -> None:
        """Start as many batches as instances are free and requests are there."""
        now_s, waiting, delay_s = self._now_s, line.waiting, line.family.flow.batch_delay_s
        while waiting and line.running < line.service.instances:
            if waiting[0][0] > now_s:
                self._wake(line, waiting[0][0])
                return
            items, taken = waiting[0][1], 1
            if delay_s is not None:
                items_max, full = line.items_max, False
                while taken < len(waiting) and waiting[taken][0] <= now_s:
                    if full := items + waiting[taken][1] > items_max:
                        break
                    items += waiting[taken][1]
                    taken += 1
                due_s = waiting[0][0] + delay_s
                if due_s > now_s and not full and items < items_max:
                    self._wake(line, min(due_s, waiting[taken][0]) if taken < len(waiting) else due_s)
                    return
            requests = [waiting.popleft()[2] for _ in range(taken)]
            point, alone_s = line.draw(items)
            if (lengths := line.family.lengths) is not None:
                law = ServiceTime(point.mean_ms, point.cv)
                alone_s = max((lengths.service_s(ticket.id, law) or alone_s for ticket, _ in requests), default=alone_s)
            line.place.advance(now_s)
            line.place.batches.append(_Batch(line, requests, point, alone_s, alone_s))
            line.running += 1
            self._pace(line.place)

    def _pace(self, place: _Place) -> None:
        """Reckon anew how long what computes takes, and when the next of it ends."""
        batches, next_s = place.batches, math.inf
        if len(batches) == 1:
            batches[0].stretch, next_s = 1.0, batches[0].left_s
        elif self._interference is None:
            next_s = min((one.left_s for one in batches), default=next_s)
            for one in batches:
                one.stretch = 1.0
        else:
            active = sum(one.point.activity for one in batches)
            for one in batches:
                one.stretch = stretch(one.point.activity, active - one.point.activity, self._interference)
                next_s = min(next_s, one.left_s * one.stretch)
        place.turn += 1
        if batches:
            heappush(self._events, (self._now_s + next_s, next(self._numbers), ENDS, place, place.turn))

    def _end(self, place: _Place) -> None:
        now_s = self._now_s
        place.advance(now_s)
        ended, left = place.batches, list[_Batch]()
        if len(ended) > 1:
            over = min(one.left_s for one in ended) + DONE_S
            left = [one for one in ended if one.left_s > over]
            ended = [one for one in ended if one.left_s <= over]
        place.batches = left
        for one in ended:
            one.line.running -= 1
            heappush(self._events, (now_s + one.line.way_s, next(self._numbers), IS_BACK, one, 0))
        turn = place.turn
        for one in ended:
            self._start(one.line)
        if place.turn == turn:
            self._pace(place)

    def _answer(self, batch: _Batch) -> None:
        """All answers of a batch are back: each credit goes to whoever waits."""
        line, now_s = batch.line, self._now_s
        family = line.family
        if family.following is None:
            line.latency_s += [now_s - ticket.arrived_s for ticket, _ in batch.requests]
        service_ms = batch.alone_s * MS_PER_S
        for ticket, pick in batch.requests:
            latency_s = now_s - ticket.arrived_s
            if family.following is None:
                family.latency_s.append(latency_s)
            if family.is_stage and family.following is None:
                self._answered(ticket, latency_s)
            outcome = Outcome("OK", latency_s * MS_PER_S, service_ms, 0, True)
            effects = family.queue.done(ticket, pick, outcome, now_s)
            if effects:
                self._carry_out(effects)
            if family.following is not None:
                self._pass_on(line, family.following, ticket)

    def _close_window(self, family: _Family) -> FamilyWindow:
        queued = sum(ticket.family == family.name for ticket in family.queue.waiting.values())
        window = FamilyWindow(
            starts_s=self._window_s,
            ends_s=self._now_s,
            arrived=family.arrived,
            answered=len(family.latency_s),
            rejected=family.rejected,
            latency_ms=np.array(family.latency_s) * MS_PER_S + self._overhead_ms,
            busy_s={key: one.busy_s for key, one in family.lines.items()},
            joules={key: one.joules for key, one in family.lines.items()},
            latency_s_by={key: one.latency_s for key, one in family.lines.items()},
            queued=queued,
            passed_s_by={key: one.passed_s for key, one in family.lines.items() if one.passed_s},
        )
        in_route = {target.slice for target in family.route.targets}
        on_their_way = {id(one.line) for _, _, what, one, _ in self._events if what == IS_BACK}
        for key, one in tuple(family.lines.items()):
            one.busy_s, one.joules, one.latency_s, one.passed_s = 0.0, 0.0, [], []
            if key not in in_route and not one.waiting and not one.running and id(one) not in on_their_way:
                del family.lines[key]
        family.arrived, family.rejected, family.latency_s = 0, 0, []
        return window

    # --- saved and read again ---------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What is found by identity is found by the new one."""
        self.__dict__.update(state)
        for one in self._families.values():
            one.index_lines()
