"""Ctrl-C and SIGTERM as a cancellation that teardown survives.

The first signal cancels the main task, wherever it stands; whoever holds something releases it under
`uncancellable`. Later signals do not cancel again: they only set `hurry`, which turns patience into SIGKILL.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")
INTERRUPTED: Final = 128 + signal.SIGINT
INSIST_S: Final = 2.0
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """What has been received so far."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def hurry(self) -> bool:
        """A second signal: somebody is out of patience."""
        return len(self.received) > 1

    @property
    def exit_code(self) -> int:
        """As a shell would report it."""
        return 128 + self.received[0]


def run(main: Callable[[Interrupts], Coroutine[Any, Any, int]]) -> int:
    """Run to the end or to a signal; returns the exit code. Nothing that `main` holds may outlive it."""
    interrupts = Interrupts()
    try:
        return asyncio.run(_guarded(main, interrupts))
    except asyncio.CancelledError:
        if not interrupts.received:
            raise
        return interrupts.exit_code


async def _guarded(main: Callable[[Interrupts], Coroutine[Any, Any, int]], interrupts: Interrupts) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main(interrupts))

    def insist() -> None:
        # A library may swallow a cancellation. Work under `uncancellable` does not mind being asked again.
        if not task.done():
            task.cancel()
            loop.call_later(INSIST_S, insist)

    def on_signal(number: int) -> None:
        interrupts.received.append(number)
        if len(interrupts.received) == 1:
            insist()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def uncancellable(work: Awaitable[T]) -> T:
    """Finish this whatever happens; a cancellation that came meanwhile is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result
