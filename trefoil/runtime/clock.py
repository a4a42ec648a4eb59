"""Clocks, the only place that reads time. Shells take a `Clock`; brains take `now_s` as a number.

`now_s` is for humans and for values that cross machines; durations and leases are counted on `monotonic_s`. Services
run on a `SteadyClock`, whose `now_s` no step of the wall clock moves. So no difference of two such times contains a
step. Carbon is calendar time: its readers shift it by `calendar_ahead_s`. Stamps of other processes, whose clock may be
another: trefoil/runtime/sightings.py.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Final, Protocol

STEP_MIN_S: Final = 0.5  # below it the wall clock was not stepped: two readings of it are never taken at once


class Clock(Protocol):
    """Clock: a source of time."""

    def now_s(self) -> float:
        """Time in UTC seconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Time in seconds that never jump; comparable only inside one process."""
        ...

    def calendar_ahead_s(self) -> float:
        """Seconds by which the calendar is ahead of `now_s`: steps of the wall clock that `now_s` did not follow."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep that many seconds of this clock."""
        ...


class WallClock:
    """Clock of real time."""

    now_s = staticmethod(time.time)
    monotonic_s = staticmethod(time.monotonic)

    def calendar_ahead_s(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def block(self, seconds: float) -> None:
        """Sleep in a plain thread (never on an event loop)."""
        time.sleep(seconds)


class SteadyClock:
    """Clock of a service: `now_s` is the wall clock at the start plus the time since, also if the wall clock is
    stepped.

    A restart takes the calendar of then. Make one for a process: two made at different times may differ by a step.
    """

    def __init__(self, wall: Clock) -> None:
        self._wall = wall
        self.monotonic_s: Callable[[], float] = wall.monotonic_s  # asked several times a request
        self._anchor_s = wall.now_s() - wall.monotonic_s()
        self._ahead_s = 0.0

    def now_s(self) -> float:
        return self._anchor_s + self.monotonic_s()

    def calendar_ahead_s(self) -> float:
        ahead_s = self._wall.now_s() - self.now_s()
        if abs(ahead_s - self._ahead_s) >= STEP_MIN_S:  # else what is moved by it would never be the same twice
            self._ahead_s = ahead_s if abs(ahead_s) >= STEP_MIN_S else 0.0
        return self._ahead_s

    async def sleep(self, seconds: float) -> None:
        await self._wall.sleep(seconds)


class ManualClock:
    """Clock that moves only on command: `await clock.advance(s)` also runs sleeping tasks, in order."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._elapsed_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def monotonic_s(self) -> float:
        return self._elapsed_s

    def calendar_ahead_s(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed_s + seconds, next(self._order), woken))
        await woken

    def move(self, seconds: float) -> None:
        """Advance without an event loop; sleepers that are due wake when their loop runs next."""
        assert seconds >= 0, "time does not go back; use jump() for the wall clock"
        self._elapsed_s += seconds
        self._now_s += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed_s:
            woken = heapq.heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)

    def jump(self, seconds: float) -> None:
        """Step the wall clock alone, as an operator or NTP does: monotonic time and sleepers do not notice."""
        self._now_s += seconds

    async def advance(self, seconds: float) -> None:
        """Advance, stopping at each sleeper's time on the way, so that loops tick as often as in real time."""
        target_s = self._elapsed_s + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= target_s:
            self.move(max(0.0, self._sleepers[0][0] - self._elapsed_s))
            await self._settle()
        self.move(max(0.0, target_s - self._elapsed_s))
        await self._settle()

    async def _settle(self) -> None:
        # A woken task may need several turns of the loop before it sleeps again.
        for _ in range(20):
            await asyncio.sleep(0)
