"""Carries the effects of a core out on an asyncio loop: one at a time, each outcome sent back with the time of then."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from controller.core.effects import Instant, Steps
from trefoil.core import errors
from trefoil.runtime.clock import Clock

T = TypeVar("T")


async def perform(steps: Steps[T], carry_out: Callable[[Any], Awaitable[Any]], at: Instant, clock: Clock) -> T:
    """Play a core's step to its end. `carry_out` answers an effect, or raises an `errors.TrefoilError` for the core."""
    answer: Any = None
    error: errors.TrefoilError | None = None
    while True:
        at.now_s, at.monotonic_s = clock.now_s(), clock.monotonic_s()
        try:
            effect = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        answer, error = None, None
        try:
            answer = await carry_out(effect)
        except errors.TrefoilError as raised:
            error = raised


class Signals:
    """What the parts of a controller tell each other: look again now, and watchers: something has changed."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self.changed = asyncio.Condition()
        self._telling: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Tick now instead of at the next period."""
        self._wake.set()

    async def woken(self, timeout_s: float) -> None:
        """Wait until woken, or until the period is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # the period is over: tick
        self._wake.clear()

    def announce(self) -> None:
        """Tell watchers that plan, rollout or mode has changed."""
        task = asyncio.get_running_loop().create_task(self._notify())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
