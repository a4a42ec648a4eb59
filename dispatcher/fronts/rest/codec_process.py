"""Process beside a worker that reads and writes large JSON bodies: `json` and NumPy keep the interpreter's lock for as
long as they work, in whatever thread, and nobody else would be answered meanwhile. It renders chat templates, too.

It starts at the first large body, takes one after the other, and ends with its worker: its standard input ends then.
"""

import asyncio
import pickle
import resource
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from dispatcher.fronts.openai import chat_templates
from dispatcher.fronts.rest import codec
from trefoil.core.errors import InvalidInput, TrefoilError, Unavailable

_LENGTH: Final = struct.Struct("<Q")
_NO_MEMORY: Final = InvalidInput(
    "this JSON needs more memory than rest_json_memory_bytes_max, a setting of the dispatcher, allows",
    remedy="send and ask for the binary data format",
)
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "decode": codec.decode, "encode": codec.encode, "render": chat_templates.render,
}  # fmt: skip


class CodecProcess:
    """Codec of large bodies, in a process of its own. Belongs to one event loop.

    `memory_bytes`: what the process takes beyond what it starts with; a body that needs more is refused. `limit_s`:
    time of one call, beyond which the process is killed; None = no limit.
    """

    def __init__(self, memory_bytes: int, limit_s: float | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    async def decode(self, body: bytes, header_length: int, model: str, version: str) -> tuple[bytes, codec.OutputForm]:
        """Do what `codec.decode` does; raises what it does, and Unavailable."""
        return await self._call("decode", body, header_length, model, version)  # type: ignore[no-any-return]

    async def encode(self, data: bytes, form: codec.OutputForm) -> tuple[bytes, int | None]:
        """Do what `codec.encode` does; raises what it does, and Unavailable."""
        return await self._call("encode", data, form)  # type: ignore[no-any-return]

    async def render(self, template: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
        """Do what `chat_templates.render` does; raises what it does, and Unavailable."""
        return await self._call("render", template, messages, names)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """End the process."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._end()

    async def _call(self, name: str, *args: Any) -> Any:
        task = asyncio.create_task(self._exchange(pickle.dumps((name, args), pickle.HIGHEST_PROTOCOL)))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        ok, value = await asyncio.shield(task)  # a client that leaves must not leave half of an exchange behind
        if not ok:
            raise value
        return value

    async def _exchange(self, request: bytes) -> tuple[bool, Any]:
        async with self._one_at_a_time:
            try:
                process = await self._running()
                assert process.stdin is not None
                assert process.stdout is not None
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
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__, str(self._memory_bytes),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # a signal to the worker's group is the worker's: what is under way goes on
            )  # fmt: skip
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Serve requests until there are no more: the worker has ended."""
    while head := requests.read(_LENGTH.size):
        request = requests.read(*_LENGTH.unpack(head))
        try:
            data = pickle.dumps((True, _answer(request)), pickle.HIGHEST_PROTOCOL)
        except TrefoilError as error:  # raised again by who asked; a bug ends this process with its traceback
            data = pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
        except MemoryError:
            data = pickle.dumps((False, _NO_MEMORY), pickle.HIGHEST_PROTOCOL)
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


def _answer(request: bytes) -> Any:
    name, args = pickle.loads(request)
    return _FUNCTIONS[name](*args)


def _bound(memory_bytes: int) -> None:
    """Take so much memory more at most; and where memory ends first, the kernel ends this process, not its worker."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_bytes, in_use + memory_bytes))
    with suppress(OSError):  # some containers forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _bound(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
