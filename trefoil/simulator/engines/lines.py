"""Families of a request engine and their lines: requests of one family on one slice, and how the slice computes them.

`OwnLine`: the slice serves no other family, and each request is computed by itself: its end is known when it is sent.
`SharedLine`: batches form on an instance. Batches that compute on the slice (its `Place`) at once are slowed by
    trefoil/core/interference.py. What is left of each batch is computed again when one begins or ends there.
Draws: each line has a stream of random numbers. So the same request on the same slice takes the same time under two
policies until their histories part. A line that is given another service time draws again.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import Final

import numpy as np
from numpy.random import Generator

from dispatcher.routing.core.family_queue import FamilyQueue
from trefoil.core.brains import Pick, Ticket
from trefoil.core.demand import NO_STREAMS, StreamCounts
from trefoil.core.fleet import SliceKey
from trefoil.core.interference import stretch
from trefoil.core.latency import build_histogram
from trefoil.core.plan import Route
from trefoil.core.queueing import ServiceTime, draw_s
from trefoil.core.units import MS_PER_S
from trefoil.simulator.engines.answer_lengths import AnswerLengths, ReplayedLengths
from trefoil.simulator.engines.engine import Flow, OperatingPoint, SliceService

DRAWS: Final = 512  # service times of an own line drawn at once
BATCH_DRAWS: Final = 128  # of one size of batch on a shared line, and items
DONE_S: Final = 1e-12  # what is left of a batch that has ended

Request = tuple[Ticket, Pick]


@dataclass(slots=True, eq=False)
class FamilyLines:
    """State of one family, or of one stage, which passes unfinished requests to `following`. `items_alike`:
    of every request, 0 where they are drawn. `cost_s`: mean service time of its slices, where the queue reads it.
    """

    name: str
    flow: Flow
    queue: FamilyQueue
    rng: Generator  # of the items of a request
    lengths: AnswerLengths | None = None
    is_stage: bool = False
    route: Route = Route()
    following: "FamilyLines | None" = None
    reads_lengths: bool = False
    lines: dict[SliceKey, "OwnLine | SharedLine"] = field(default_factory=dict)
    items_drawn: list[float] = field(default_factory=list)
    arrived: int = 0
    rejected: int = 0
    latency_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0  # of answers of a trace that is replayed
    replayed: ReplayedLengths | None = field(init=False)
    items_alike: int = field(init=False)
    slo_ms: float = field(init=False)
    cost_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.items_alike = 0 if self.flow.items_sd else math.ceil(self.flow.items)
        self.slo_ms = self.flow.slo_ms
        self.replayed = self.lengths if isinstance(self.lengths, ReplayedLengths) else None

    def ticket(self, id_: int, at: float) -> Ticket:
        """Ticket of a request; by position, which is faster than by name."""
        items = self.items_alike or int(self.items())
        if self.replayed is not None:
            self.replayed.keep(id_)
        if not self.reads_lengths:
            return Ticket(id_, self.name, "", "", items, 0, at, None, 0.0, 0, "", False, False, None, self.slo_ms)
        score = self.lengths.come(id_) if self.lengths is not None else None
        rest = (False, False, score, self.slo_ms, ("", ""), 1.0, self.cost_s)
        return Ticket(id_, self.name, "", "", items, 0, at, None, 0.0, 0, "", *rest)

    def stream_counts(self) -> StreamCounts:
        """Streams that ended in the window; one that was refused misses its first token."""
        terms = self.flow.streams
        if terms is None or not (self.ttft_s or self.rejected):
            return NO_STREAMS
        ttft_ms, tpot_ms = ([MS_PER_S * value for value in times] for times in (self.ttft_s, self.tpot_s))
        slo = terms.slo
        return StreamCounts(
            build_histogram(ttft_ms),
            build_histogram(tpot_ms),
            ttft_asked=len(ttft_ms) + self.rejected if slo.ttft_ms else 0,
            ttft_within=sum(value <= slo.ttft_ms for value in ttft_ms),
            tpot_asked=len(tpot_ms) if slo.tpot_ms else 0,
            tpot_within=sum(value <= slo.tpot_ms for value in tpot_ms),
        )

    def go_by_lengths(self, reads: bool) -> None:
        """Tickets carry lengths and costs from now on, or they do not."""
        self.reads_lengths = reads
        if reads and self.lines:
            times_ms = [line.service.service.mean_ms for line in self.lines.values()]
            self.cost_s = sum(times_ms) / len(times_ms) / MS_PER_S

    def items(self) -> float:
        """Items of the next request, drawn."""
        flow = self.flow
        if not self.items_drawn:
            drawn = np.rint(self.rng.normal(flow.items, flow.items_sd, BATCH_DRAWS))
            self.items_drawn = np.clip(drawn, 1, max(1.0, flow.items_max)).tolist()
        return self.items_drawn.pop()


@dataclass(slots=True, eq=False)
class Line:
    """What both kinds have. `way_s` is half a gap; `passed_s`: latencies of what was answered after this stage."""

    family: FamilyLines
    service: SliceService
    rng: Generator
    way_s: float = field(init=False)
    busy_s: float = field(init=False, default=0.0)
    latency_s: list[float] = field(init=False, default_factory=list)
    passed_s: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.way_s = self.service.gap_ms / 2 / MS_PER_S


@dataclass(slots=True, eq=False)
class OwnLine(Line):
    """Line on a separate slice: when it can compute next. `instances_s`: the same of several instances, a heap."""

    free_s: float = field(init=False, default=-math.inf)  # time may begin below zero
    times_s: list[float] = field(init=False, default_factory=list)  # drawn ahead, the next one last
    instances_s: list[float] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.way_s = self.service.gap_ms / 2 / MS_PER_S
        if self.service.instances > 1:
            self.instances_s = [self.free_s] * self.service.instances

    def set_service(self, service: SliceService) -> None:
        """Set the service from now on; what is in flight has its time already."""
        if service.service != self.service.service:
            self.times_s.clear()
        self.service, self.way_s = service, service.gap_ms / 2 / MS_PER_S

    def draw_more(self) -> float:
        """Next service time [s], drawn with a block of those after it."""
        self.times_s.extend(draw_s(self.service.service, DRAWS, self.rng)[::-1].tolist())
        return self.times_s.pop()

    def begin(self, at_s: float, service_s: float) -> float:
        """Compute a request that is there at a time on the instance that is free first; when it begins."""
        assert self.instances_s is not None
        start_s = max(at_s, self.instances_s[0])
        heapreplace(self.instances_s, start_s + service_s)
        return start_s

    def book(self, late_s: float) -> tuple[float, float]:
        """Seconds and joules of the window that ends; `late_s` of what was sent is computed after it."""
        busy_s, self.busy_s = max(0.0, self.busy_s - late_s), late_s
        return busy_s, busy_s * MS_PER_S / self.service.service.mean_ms * self.service.energy_j


@dataclass(slots=True, eq=False)
class SharedLine(Line):
    """Line on a slice that others share. `wakes_s`: when it is looked at, though nothing happens."""

    place: "Place"
    waiting: deque[tuple[float, float, Request]] = field(init=False, default_factory=deque)  # there from, items
    running: int = field(init=False, default=0)
    wakes_s: float = field(init=False, default=math.inf)
    joules: float = field(init=False, default=0.0)
    drawn: dict[float, tuple[OperatingPoint, list[float]]] = field(init=False, default_factory=dict)
    ttft_s: list[float] = field(init=False, default_factory=list)
    tpot_s: list[float] = field(init=False, default_factory=list)

    @property
    def places(self) -> int:
        """How many batches, or streams, compute at once."""
        return self.service.instances if self.family.flow.streams is None else int(self.service.points[-1].items)

    def begin_stream(self, batch: "Batch", now_s: float) -> None:
        """A stream begins between two steps: its first token comes after the rest of the one under way, those of its
        prompt and its own. The rest is not computed: it delays no later token here."""
        terms, number, ((ticket, _),) = self.family.flow.streams, self.running, batch.requests
        assert terms is not None
        step_s = operating_point(self.service.points, number).mean_ms / terms.steps / MS_PER_S
        if self.family.replayed is not None:
            batch.prompt_steps = self.family.replayed.prompt_steps(ticket.id)
        first_s = step_s * (batch.prompt_steps + 1)
        batch.step_ends_s, batch.rest_s = now_s + first_s, step_s * self.rng.random() if number > 1 else 0.0

    def end_stream(self, batch: "Batch", now_s: float) -> None:
        """Book the times of a stream's tokens: their number is its time alone over that of a step, less the last one,
        which finds the end."""
        terms, ((ticket, _),) = self.family.flow.streams, batch.requests
        assert terms is not None
        step_s = self.service.points[0].mean_ms / terms.steps / MS_PER_S
        tokens = max(1, round(batch.alone_s / step_s - batch.prompt_steps) - 1)
        if self.family.replayed is not None:
            self.family.replayed.leave(ticket.id)
            self.family.tokens += tokens
        first_s = min(batch.step_ends_s, now_s)
        self.ttft_s.append(first_s + batch.rest_s + self.way_s - ticket.arrived_s)
        self.family.ttft_s.append(self.ttft_s[-1])
        if tokens > 1:
            self.tpot_s.append((now_s - first_s) / tokens)  # the span of tokens - 1 steps, and of the one at the end
            self.family.tpot_s.append(self.tpot_s[-1])

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
            times_s.extend(draw_s(ServiceTime(point.mean_ms, point.cv), BATCH_DRAWS, self.rng).tolist())
        return point, times_s.pop()

    def gather(self, now_s: float, delay_s: float | None) -> tuple[list[Request], float, float]:
        """Take a batch from a line that has requests: it, its items and 0; or nothing and when to look again [s].

        A batch is all requests that are there and fit the largest profiled batch. If some are missing, it waits for
        them until the first has waited `delay_s` (Triton's dynamic batcher). None: every request is a batch.
        """
        waiting = self.waiting
        if waiting[0][0] > now_s:
            return [], 0.0, waiting[0][0]
        items, taken = waiting[0][1], 1
        if delay_s is not None:
            items_max, full = self.service.points[-1].items, False
            while taken < len(waiting) and waiting[taken][0] <= now_s:
                if full := items + waiting[taken][1] > items_max:
                    break
                items += waiting[taken][1]
                taken += 1
            due_s = waiting[0][0] + delay_s
            if due_s > now_s and not full and items < items_max:
                return [], 0.0, min(due_s, waiting[taken][0]) if taken < len(waiting) else due_s
        return [waiting.popleft()[2] for _ in range(taken)], items, 0.0

    def book(self, _late_s: float) -> tuple[float, float]:
        """Seconds that batches of the window that ends would have computed alone, and their joules."""
        booked = self.busy_s, self.joules
        self.busy_s = self.joules = 0.0
        return booked


@dataclass(slots=True, eq=False)
class Batch:
    """Batch that computes: what is left of its time alone, and how much longer it takes now."""

    line: SharedLine
    requests: list[Request]
    point: OperatingPoint
    alone_s: float
    left_s: float
    stretch: float = 1.0
    prompt_steps: float = 0.0  # of a stream: before the step of its first token
    step_ends_s: float = 0.0  # end of that step, if the stream began at once
    rest_s: float = 0.0  # of the step that was under way
    watts: float = field(init=False)  # per second of its time alone

    def __post_init__(self) -> None:
        self.watts = self.point.active_w


@dataclass(slots=True, eq=False)
class Place:
    """Slice that several lines share: what computes on it. `turn` tells the event of its next end from older ones."""

    at_s: float = -math.inf
    turn: int = 0
    batches: list[Batch] = field(default_factory=list)

    def advance(self, now_s: float) -> None:
        """Book what was done since the last time."""
        past_s, self.at_s = now_s - self.at_s, now_s
        for one in self.batches:
            done_s = min(one.left_s, past_s / one.stretch)
            one.left_s -= done_s
            one.line.busy_s += done_s
            one.line.joules += done_s * one.watts

    def pace(self, interference: float | None) -> float:
        """Set how much longer what computes takes from now on; time until the next of it ends [s], inf for none."""
        batches = self.batches
        self.turn += 1
        if batches and batches[0].line.family.flow.streams is not None:
            return self._pace_streams()
        if len(batches) == 1:
            batches[0].stretch = 1.0
            return batches[0].left_s
        if interference is None:
            for one in batches:
                one.stretch = 1.0
            return min((one.left_s for one in batches), default=math.inf)
        active, next_s = sum(one.point.activity for one in batches), math.inf
        for one in batches:
            one.stretch = stretch(one.point.activity, active - one.point.activity, interference)
            next_s = min(next_s, one.left_s * one.stretch)
        return next_s

    def _pace_streams(self) -> float:
        """The same of streams: a step takes as long as the profile says of so many, and draws that power."""
        points, number = self.batches[0].line.service.points, len(self.batches)
        point = operating_point(points, number)
        slower = point.mean_ms / points[0].mean_ms
        for one in self.batches:
            one.stretch, one.watts = slower, point.active_w * slower / number
        return slower * min(one.left_s for one in self.batches)

    def take_ended(self) -> list[Batch]:
        """Batches of which nothing is left."""
        ended, left = self.batches, list[Batch]()
        if len(ended) > 1:
            over = min(one.left_s for one in ended) + DONE_S
            left = [one for one in ended if one.left_s > over]
            ended = [one for one in ended if one.left_s <= over]
        self.batches = left
        return ended


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
