"""uvicorn's HTTP/1.1, bounded where it has no bound of its own: bytes and time until a request's body begins."""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_S: Final = 30.0
"""From a connection, or a request's first byte, to the end of its headers."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Who sends no whole head, or an endless one, is cut off."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_bytes = 0
        self._steps = 0
        self._in_body = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        steps = self._steps
        super().data_received(data)
        if self._in_body or self._steps != steps:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response(f"the headers have more than {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._got_head()
        self._steps += 1
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._steps += 1
        self._in_body = False
        super().on_message_complete()

    def _await_head(self) -> None:
        self._got_head()
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _got_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
