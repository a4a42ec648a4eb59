"""One Prometheus endpoint for all workers: whichever of them is asked, it asks the others.

Each sample carries the label `worker`, the place of its worker: sums over it are the dispatcher's.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from trefoil.core.errors import StartError
from trefoil.runtime import rpc

REQUEST_BYTES_MAX: Final = 65536
ASK_TIMEOUT_S: Final = 5.0
_SAMPLE: Final = re.compile(rb"^([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")
TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class ExpositionPart:
    """A part of the service; every worker listens on the same port. An empty address means none."""

    def __init__(self, address: str, text: Callable[[], Awaitable[bytes]]) -> None:
        self._address = address
        self._text = text
        self._server: asyncio.Server | None = None

    async def init(self) -> None:
        """Listen; raises StartError."""
        if not self._address:
            return
        host, port = rpc.split_address(self._address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, reuse_port=True, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            remedy = "set another metrics_address"
            raise StartError(
                f"cannot listen ({error})", field="metrics_address", value=self._address, remedy=remedy
            ) from error

    async def run(self) -> None:
        """Nothing but what is asked."""
        await asyncio.Event().wait()

    async def shutdown(self) -> None:
        """No more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await reader.readuntil(b"\r\n\r\n")
                body = await self._text()
                head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                writer.write(head % (TYPE, len(body)) + body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or was no HTTP client
        finally:
            writer.close()


def exposition(texts: Mapping[int, bytes]) -> bytes:
    """Texts of several workers as one: every sample labelled, the samples of a metric together."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for worker, text in sorted(texts.items()):
        label = b'worker="%d"' % worker
        name = b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                _, kind, name, *_ = line.split(b" ", 3)
                if line not in heads.setdefault(name, []) and kind in (b"HELP", b"TYPE"):
                    heads[name].append(line)
            elif (found := _SAMPLE.match(line)) is not None:
                rest = line[found.end() :]
                labelled = b"{" + label + (b"," if rest[:1] != b"}" else b"") + rest if found[2] else b""
                samples.setdefault(name, []).append(found[1] + (labelled or b"{" + label + b"}" + rest))
    return b"".join(line + b"\n" for name in heads for line in (*heads[name], *samples.get(name, ())))
