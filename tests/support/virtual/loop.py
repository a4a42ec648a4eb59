"""An event loop in virtual time: what waits costs nothing, and the same program runs the same way every time.

When nothing is ready to run, the loop's time jumps to its next timer. Threads do not exist: `run_in_executor` (and so
`asyncio.to_thread`) calls at once, and the answer comes on the next turn of the loop, or `spend(seconds)` later if the
call asked for that. A loop that has neither work nor timers is dead: it raises `Stuck` instead of waiting forever.
"""

import asyncio
import contextlib
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

T = TypeVar("T")

SHORTEST_S: Final = 1e-6
SOLVES_S: Final = 0.3
START_S: Final = 1_000.0  # of the monotonic clock: a machine has run for a while before its services start


class Stuck(RuntimeError):
    """Every task waits for something that no timer will ever bring."""


class _Stoppable:
    """What a stopped process was about to do is held until it continues."""

    def _run(self) -> None:
        process: Process | None = self._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and process.stopped:
            process.held.append(self)
        else:
            super()._run()  # type: ignore[misc]


class _Handle(_Stoppable, asyncio.Handle):
    pass


class _Timer(_Stoppable, asyncio.TimerHandle):
    pass


class _Selector:
    """In place of sockets: an idle wait moves the loop's time."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is ready and no timer runs")
        if timeout > 0:
            self._loop.move()
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """Single-threaded and without I/O. `time()` is virtual."""

    _scheduled: list[asyncio.TimerHandle]
    _ready: "deque[asyncio.Handle]"

    def __init__(self) -> None:
        super().__init__()
        self._now_s = START_S
        self._spent_s = 0.0
        self.busy_until_s = 0.0
        """Until when a call of an executor takes its time."""
        self.planner_takes_s: float | None = SOLVES_S
        """How long a call of the planner takes; None: it raises."""
        self._selector = _Selector(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now_s

    def move(self) -> None:
        """On to the next timer."""
        self._now_s = max(self._now_s, self._scheduled[0].when())

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        """A wait too short to change the time that it is added to would be waited for without end."""
        return self.call_at(
            self._now_s + (max(delay, SHORTEST_S) if delay > 0 else delay), callback, *args, context=context
        )

    def spend(self, seconds: float) -> None:
        """Called inside a call of `run_in_executor`: its answer takes that long."""
        self._spent_s += seconds
        self.busy_until_s = self._now_s + self._spent_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        self._spent_s = 0.0
        answer: asyncio.Future[T] = self.create_future()
        try:
            outcome: Any = func(*args)
            give: Callable[[Any], None] = answer.set_result
        except Exception as error:  # noqa: BLE001 (as of a thread: whoever awaits gets it)
            outcome, give = error, answer.set_exception
        deliver = lambda: None if answer.done() else give(outcome)  # noqa: E731
        if self._spent_s > 0:
            self.call_later(self._spent_s, deliver)
        else:
            self.call_soon(deliver)
        return answer

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """There are no signals."""

    def remove_signal_handler(self, sig: int) -> bool:
        return False

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def close(self) -> None:
        """Cancel what is left, let it end, close."""
        left = [task for task in asyncio.all_tasks(self) if not task.done()]
        for task in left:
            task.cancel()
        if left:

            async def all_ended() -> None:
                await asyncio.wait(left)

            with contextlib.suppress(Stuck):
                self.run_until_complete(all_ended())
        super().close()


class VirtualClock:
    """A wall clock on a virtual loop; `skew_s`: how far it was stepped."""

    def __init__(self, loop: VirtualLoop, epoch_s: float = 1_000_000.0, skew_s: float = 0.0) -> None:
        self._loop, self._epoch_s, self.skew_s = loop, epoch_s - START_S, skew_s

    def now_s(self) -> float:
        return self._epoch_s + self._loop.time() + self.skew_s

    def monotonic_s(self) -> float:
        return self._loop.time()

    def calendar_ahead_s(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


PROCESS: "contextvars.ContextVar[Process | None]" = contextvars.ContextVar("process", default=None)


class Process:
    """The tasks of one pretended process: they end together, without a word, as by SIGKILL.

    Tasks that a task of it creates belong to it too. What stands outside (Redis, disks, peers) asks `dead`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.stopped = False
        self.stopped_at_s = 0.0
        self.went_on_at_s = 0.0
        self.held: list[Any] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def start(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine as part of this process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        return context.run(loop.create_task, coro)

    def stop(self, now_s: float) -> None:
        """As by SIGSTOP: what it is about to do waits until `go_on`."""
        self.stopped, self.stopped_at_s = True, now_s

    def go_on(self, loop: VirtualLoop) -> None:
        """After `stopped`: everything that was due meanwhile is due now, in its order."""
        self.stopped, self.went_on_at_s = False, loop.time()
        held, self.held = self.held, []
        loop._ready.extend(held)

    def kill(self) -> None:
        """End it: no task of it runs its next line, but for what a cancelled task does while it unwinds."""
        self.dead, self.stopped = True, False
        for handle in self.held:  # cancelled tasks unwind by them
            handle._loop._ready.append(handle)
        self.held.clear()
        for task in self.tasks:
            if not task.done():
                task.cancel()
        self.tasks.clear()


def process_tasks(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> "asyncio.Task[Any]":
    """A task factory that books each task with the process it belongs to."""
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **kwargs)
    process = PROCESS.get()
    if process is not None:
        if process.dead:
            task.cancel()
        elif len(process.tasks) > 200:
            process.tasks = [known for known in process.tasks if not known.done()]
        process.tasks.append(task)
    return task


@contextlib.contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    """A fresh loop; closed, with everything on it, at the end."""
    loop = VirtualLoop()
    loop.set_task_factory(process_tasks)
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()
