"""Process beside a worker that reads and writes large JSON bodies: `json` and NumPy keep the interpreter's lock for as
long as they work, in whatever thread, and nobody else would be answered meanwhile.

It starts at the first large body, takes one after the other, and ends with its worker: its standard input ends then.
"""

import asyncio
import pickle
import struct
import sys
from collections.abc import Callable
from typing import IO, Any, Final

from dispatcher.fronts.rest import codec
from trefoil.core.errors import TrefoilError, Unavailable

_LENGTH: Final = struct.Struct("<Q")
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"decode": codec.decode, "encode": codec.encode}


class CodecProcess:
    """Codec of large bodies, in a process of its own. Belongs to one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    async def decode(self, body: bytes, header_length: int, model: str, version: str) -> tuple[bytes, codec.OutputForm]:
        """Do what `codec.decode` does; raises what it does, and Unavailable."""
        return await self._call("decode", body, header_length, model, version)  # type: ignore[no-any-return]

    async def encode(self, data: bytes, form: codec.OutputForm) -> tuple[bytes, int | None]:
        """Do what `codec.encode` does; raises what it does, and Unavailable."""
        return await self._call("encode", data, form)  # type: ignore[no-any-return]

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
                process.stdin.writelines((_LENGTH.pack(len(request)), request))
                await process.stdin.drain()
                (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
                answer = await process.stdout.readexactly(length)
            except (OSError, asyncio.IncompleteReadError) as error:
                await self._end()
                raise Unavailable(
                    f"the process for large JSON bodies is gone ({error!r})", remedy="try again"
                ) from error
            except asyncio.CancelledError:
                await self._end()
                raise
            return pickle.loads(answer)  # type: ignore[no-any-return]

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
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
        name, args = pickle.loads(requests.read(*_LENGTH.unpack(head)))
        try:
            answer = True, _FUNCTIONS[name](*args)
        except TrefoilError as error:  # raised again by who asked; a bug ends this process with its traceback
            answer = False, error
        data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
