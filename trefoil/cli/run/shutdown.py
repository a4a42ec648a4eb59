"""Shutdown by Ctrl-C, SIGTERM or SIGHUP: a cancellation that teardown survives.

The first signal cancels the main task, wherever it stands; holders release what they hold under
`uncancellable`. Later signals do not cancel again: they only set `kill_now`, at which teardown kills and does not wait.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
CANCEL_AGAIN_S: Final = 2.0
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ShutdownSignals:
    """Shutdown signals received so far."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def kill_now(self) -> bool:
        """Whether a second signal came: what does not stop by itself is to be killed."""
        return len(self.received) > 1

    @property
    def exit_code(self) -> int:
        """Exit code as a shell would report it: 128 + the first signal."""
        return 128 + self.received[0]


def run_until_signal(main: Callable[[ShutdownSignals], Coroutine[Any, Any, int]]) -> int:
    """Run a coroutine to its end or to a signal; returns the exit code. Nothing that `main` holds may outlive it."""
    signals = ShutdownSignals()
    try:
        return asyncio.run(_guarded(main, signals))
    except asyncio.CancelledError:
        if not signals.received:
            raise
        return signals.exit_code


async def _guarded(main: Callable[[ShutdownSignals], Coroutine[Any, Any, int]], signals: ShutdownSignals) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main(signals))

    def cancel_again() -> None:
        # A library may swallow a cancellation. Work under `uncancellable` does not mind being asked again.
        if not task.done():
            task.cancel()
            loop.call_later(CANCEL_AGAIN_S, cancel_again)

    def on_signal(number: int) -> None:
        signals.received.append(number)
        if len(signals.received) == 1:
            cancel_again()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def uncancellable(work: Awaitable[T]) -> T:
    """Await this to its end whatever happens; a cancellation that came meanwhile is raised afterwards."""
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
