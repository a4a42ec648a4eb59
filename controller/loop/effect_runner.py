"""Runner of effects on an asyncio loop: one at a time, each outcome sent back to the core with the time of then."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

from controller.loop.core.effects import (
    AddMetric,
    CoreTime,
    Log,
    NotifyWatchers,
    Save,
    SaveLater,
    Steps,
    TimeMetric,
    WakeLoop,
)
from controller.loop.disk_store import DiskStore
from trefoil.core import errors
from trefoil.runtime.clock import Clock
from trefoil.runtime.telemetry import Metrics

T = TypeVar("T")


class Signals:
    """Wake-ups of the control loop, and notices to those who watch plan, rollout and mode."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self.changed = asyncio.Condition()
        self._notifications: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Wake the control loop: it ticks now instead of at the next period."""
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
        """Notify watchers that plan, rollout or mode has changed."""
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


async def run_effects(steps: Steps[T], carry_out: Callable[[Any], Awaitable[Any]], time: CoreTime, clock: Clock) -> T:
    """Run a core's step to its end. `carry_out` answers an effect, or raises an `errors.TrefoilError` for the core."""
    answer: Any = None
    error: errors.TrefoilError | None = None
    while True:
        time.now_s, time.monotonic_s = clock.now_s(), clock.monotonic_s()
        try:
            effect = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        answer, error = None, None
        try:
            answer = await carry_out(effect)
        except errors.TrefoilError as raised:
            error = raised


def perform_common(effect: Any, disk: DiskStore, metrics: Metrics, signals: Signals) -> None:
    """Carry out an effect that control and rollouts have in common.

    Raises:
        errors.DiskUnavailable: what must be kept is not.
        AssertionError: an effect that no shell knows.
    """
    match effect:
        case Save(values):
            disk.save_together(values)
        case SaveLater(name, value):
            disk.save_later(name, value)
        case Log(event, fields, level):
            log = structlog.get_logger()
            (log.warning if level == "warning" else log.info)(event, **fields)
        case AddMetric(name, amount, labels, gauge):
            (metrics.set if gauge else metrics.inc)(name, amount, **labels)
        case TimeMetric(name, seconds):
            metrics.observe(name, seconds)
        case NotifyWatchers():
            signals.announce()
        case WakeLoop():
            signals.wake()
        case _:
            raise AssertionError(f"nobody carries out {effect}")
