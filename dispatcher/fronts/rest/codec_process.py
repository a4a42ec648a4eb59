"""Process beside a worker that reads and writes large JSON bodies: `json` and NumPy keep the interpreter's lock for as
long as they work, in whatever thread, and no other client would be answered meanwhile. It renders chat templates, too.

It starts at the first large body and ends with its worker: its standard input ends then. It takes one call after the
other: one of each tenant or host in turn, so that many calls of one do not delay the others. Who leaves while its call
waits takes it along.
"""

import asyncio
import math
import pickle
import resource
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from dispatcher.fronts.openai import batch_lines, bodies, chat_templates, vectors
from dispatcher.fronts.rest import codec, generate_codec
from trefoil.core.errors import InvalidInput, TrefoilError, Unavailable

PROCESS_BYTES: Final = 64 * 1024
"""JSON from here on is read and written in a separate process. The event loop takes some 20 ms for the slowest that is
smaller: empty texts, with `Inf`, a large exponent and a surrogate pair."""
_LENGTH: Final = struct.Struct("<Q")
_NO_MEMORY: Final = InvalidInput(
    "this JSON needs more memory than rest_json_memory_bytes_max, a setting of the dispatcher, allows",
    remedy="send a smaller one, or send and ask for the binary data format",
)
FUNCTIONS: Final[tuple[Callable[..., Any], ...]] = (
    codec.decode, codec.encode, chat_templates.render, bodies.read_text, generate_codec.read, generate_codec.write,
    batch_lines.check_file, batch_lines.read_line, vectors.written,
)  # fmt: skip
"""What the process does; it has loaded them before its memory is bounded."""
Ts = TypeVarTuple("Ts")
R = TypeVar("R")


class _Line(asyncio.Lock):
    """Calls of one tenant or host: the first of them stands in line with those of the others."""

    calls = 0


class CodecProcess:
    """Codec of large bodies, in a separate process. Belongs to one event loop.

    `memory_bytes`: what the process takes beyond what it starts with; a body that needs more is refused. `limit_s`:
    time of one call, beyond which the process is killed; None = no limit. `calls_max`: of one line at once. The `line`
    of a call names its tenant or host.
    """

    def __init__(self, memory_bytes: int, limit_s: float | None = None, calls_max: float = math.inf) -> None:
        self._memory_bytes = memory_bytes
        self._limit_s = limit_s
        self._calls_max = calls_max
        self._lines = WeakValueDictionary[str, _Line]()
        self._closed = False
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    async def call(self, line: str, function: Callable[[*Ts], R], *args: *Ts) -> R:
        """Do what one of FUNCTIONS does; raises what it does, and Unavailable."""
        turn = self._lines.setdefault(line, _Line())
        if turn.calls >= self._calls_max:
            raise Unavailable(f"{turn.calls} calls wait to be read or rendered", remedy="send fewer at once, or later")
        turn.calls += 1
        try:
            async with turn:
                await self._one_at_a_time.acquire()
                task = asyncio.create_task(self._exchange(function, args))
                task.add_done_callback(self._ended)
                self._under_way.add(task)
                ok, value = await asyncio.shield(task)  # a client that leaves must not leave half of an exchange behind
        finally:
            turn.calls -= 1
        if not ok:
            raise value
        return value  # type: ignore[no-any-return]

    async def close(self) -> None:
        """End the process, for good."""
        self._closed = True
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._end()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        self._one_at_a_time.release()
        if not task.cancelled():
            task.exception()  # its caller may have left

    async def _exchange(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            request = pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
            async with asyncio.timeout(self._limit_s):
                process.stdin.writelines((_LENGTH.pack(len(request)), request))
                await process.stdin.drain()
                (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
                answer = await process.stdout.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
            await self._end()
            raise Unavailable(
                f"the process for JSON bodies and chat templates is gone ({error!r})", remedy="try again"
            ) from error
        except asyncio.CancelledError:
            await self._end()
            raise
        return pickle.loads(answer)  # type: ignore[no-any-return]

    async def _running(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise Unavailable("this dispatcher stops", remedy="try again")
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__, str(self._memory_bytes),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # a signal to the worker's group is the worker's: what is under way continues
            )  # fmt: skip
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


ProcessOf = Callable[[int], CodecProcess]
"""Process for a body of so many bytes."""


async def here_or_there(process: ProcessOf, size: int, line: str, function: Callable[[*Ts], R], *args: *Ts) -> R:
    """Do what one of FUNCTIONS does: at once with a small body, else in the process; raises like `call`."""
    return function(*args) if size < PROCESS_BYTES else await process(size).call(line, function, *args)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Serve requests until there are no more: the worker has ended."""
    while head := requests.read(_LENGTH.size):
        request = requests.read(*_LENGTH.unpack(head))
        try:
            data = pickle.dumps((True, _answer(request)), pickle.HIGHEST_PROTOCOL)
        except TrefoilError as error:  # raised again by who asked; a bug ends this process with its traceback
            error.value = None  # megabytes perhaps; the error's text shows its beginning
            data = pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
        except MemoryError:
            data = pickle.dumps((False, _NO_MEMORY), pickle.HIGHEST_PROTOCOL)
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


def _answer(request: bytes) -> Any:
    function, args = pickle.loads(request)
    assert function in FUNCTIONS, function
    return function(*args)


def _bound(memory_bytes: int) -> None:
    """Take so much memory more at most; and where memory ends first, the kernel ends this process, not its worker."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_bytes, in_use + memory_bytes))
    with suppress(OSError):  # some containers forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _bound(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
