"""Pipelines of models over GPUs whose clocks may change, request by request: what guides AlpaServe's greedy selection.

Source: AlpaServe (OSDI 23) section 4.2: a simulator of its controller, first come first served, no batches.
Model: a request goes to the replica of its model whose first GPU has the least work ahead, and through its stages in
    order. A GPU does one stage at a time, by arrival there. If requests come with a turn (mu-Serve's scheduler), the
    earliest turn goes first. From GPU to GPU a request takes `transfer_s`. A stage takes its time at the highest clock,
    stretched by the law of trefoil/core/power.py with its s. A stage that runs while the clock changes continues at the
    new one. A GPU draws `active_w(clock)` above idle while it computes.
Deviations: generated tokens do not go round the pipeline one by one: a stage does all its part of a request at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from trefoil.core.power import stretch


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a model on a GPU: time at the highest clock, and the part of it that follows the clock."""

    gpu: int
    time_s: float
    s: float = 1.0


Replica = tuple[Stage, ...]


class Arrival(NamedTuple):
    """A request that comes: how many times its stages' time it takes, its turn (None: when it is at each GPU)."""

    at_s: float
    model: str
    size: float = 1.0
    turn_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered request."""

    model: str
    arrived_s: float
    answered_s: float
    stages: Replica

    @property
    def latency_s(self) -> float:
        """From arrival to answer."""
        return self.answered_s - self.arrived_s


@dataclass(slots=True)
class _Request:
    model: str
    arrived_s: float
    stages: Replica
    size: float = 1.0
    turn_s: float | None = None
    at: int = 0


@dataclass(slots=True)
class _Gpu:
    clock_mhz: int
    waiting: list[tuple[float, int, _Request]] = field(default_factory=list)  # a heap, by turn
    running: _Request | None = None
    left_s: float = 0.0  # of it, at the highest clock
    at_s: float = 0.0
    turn: int = 0  # tells the event of its next end from older ones
    ahead_s: float = 0.0  # work that waits or runs, at the highest clock
    busy_s: float = 0.0
    joules: float = 0.0


class Pipelines:
    """Replicas of models on GPUs, all at the highest clock by default. Time goes forward only."""

    def __init__(
        self,
        replicas: Mapping[str, Sequence[Replica]],
        gpus: int,
        top_mhz: int,
        transfer_s: float = 0.0,
        active_w: Callable[[int], float] = lambda _mhz: 0.0,
    ) -> None:
        self._replicas, self._top_mhz, self._transfer_s, self._active_w = replicas, top_mhz, transfer_s, active_w
        self.gpus = [_Gpu(top_mhz) for _ in range(gpus)]
        self.now_s = 0.0
        self.unserved: dict[str, int] = {}
        self._events: list[tuple[float, int, int, int, _Request | None]] = []  # at, number, GPU, turn, who enters it
        self._numbers = count()
        self._answers: list[Answer] = []

    def serve(self, arrivals: Iterable[Arrival | tuple[float, str]], until_s: float) -> list[Answer]:
        """Answers of a span, given its arrivals in order; requests of a model without a replica are `unserved`."""
        for each in arrivals:
            at_s, model, size, turn_s = Arrival(*each)
            self._happen(at_s)
            places = self._replicas.get(model, ())
            if not places:
                self.unserved[model] = self.unserved.get(model, 0) + 1
                continue
            stages = min(places, key=lambda stages: self.gpus[stages[0].gpu].ahead_s)
            self._enter(_Request(model, at_s, stages, size, turn_s))
        self._happen(until_s)
        for gpu in self.gpus:
            self._advance(gpu)
        answers, self._answers = self._answers, []
        return answers

    def set_clock(self, gpu: int, clock_mhz: int) -> None:
        """Set a clock from now on."""
        one = self.gpus[gpu]
        if one.clock_mhz != clock_mhz:
            self._advance(one)
            one.clock_mhz = clock_mhz
            self._pace(gpu)

    def _stretch(self, gpu: _Gpu) -> float:
        assert gpu.running is not None
        return stretch(self._top_mhz, gpu.clock_mhz, gpu.running.stages[gpu.running.at].s)

    def _happen(self, until_s: float) -> None:
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, gpu, turn, entering = heappop(events)
            if entering is not None:
                self._enter(entering)
            elif turn == self.gpus[gpu].turn:
                self._end(gpu)
        self.now_s = until_s

    def _enter(self, request: _Request) -> None:
        stage = request.stages[request.at]
        gpu = self.gpus[stage.gpu]
        turn_s = self.now_s if request.turn_s is None else request.turn_s
        heappush(gpu.waiting, (turn_s, next(self._numbers), request))
        gpu.ahead_s += stage.time_s * request.size
        if gpu.running is None:
            self._start(stage.gpu)

    def _start(self, gpu: int) -> None:
        one = self.gpus[gpu]
        self._advance(one)
        one.running = heappop(one.waiting)[2] if one.waiting else None
        if one.running is not None:
            one.left_s = one.running.stages[one.running.at].time_s * one.running.size
            self._pace(gpu)

    def _pace(self, gpu: int) -> None:
        """Reckon again when what runs ends."""
        one = self.gpus[gpu]
        one.turn += 1
        if one.running is not None:
            ends_s = self.now_s + one.left_s * self._stretch(one)
            heappush(self._events, (ends_s, next(self._numbers), gpu, one.turn, None))

    def _advance(self, gpu: _Gpu) -> None:
        """Book what was done since the last time."""
        past_s, gpu.at_s = self.now_s - gpu.at_s, self.now_s
        if gpu.running is not None:
            gpu.left_s -= past_s / self._stretch(gpu)
            gpu.busy_s += past_s
            gpu.joules += past_s * self._active_w(gpu.clock_mhz)

    def _end(self, gpu: int) -> None:
        one = self.gpus[gpu]
        request = one.running
        assert request is not None
        one.ahead_s -= request.stages[request.at].time_s * request.size
        self._advance(one)
        one.running = None
        request.at += 1
        if request.at == len(request.stages):
            self._answers.append(Answer(request.model, request.arrived_s, self.now_s, request.stages))
        elif request.stages[request.at].gpu == gpu or not self._transfer_s:
            self._enter(request)
        else:
            number, to = next(self._numbers), request.stages[request.at].gpu
            heappush(self._events, (self.now_s + self._transfer_s, number, to, 0, request))
        if one.running is None:
            self._start(gpu)
