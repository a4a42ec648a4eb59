"""The REST port: uvicorn in the process's own event loop, without its signal handlers, and bounded where it has no
bound of its own: bytes and time until a request's body begins.
"""

import asyncio
import math
import socket
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.rest.app import RestApp
from dispatcher.service.graceful_shutdown import GracefulShutdown
from dispatcher.transport.accepting import BACKLOG, accept, listen
from trefoil.runtime import rpc
from trefoil.runtime.connections import guard_connections
from trefoil.runtime.security.tls import Tls

KEEP_ALIVE_S = 75


class RestPart:
    """HTTP server, a part of the service. An empty address means none."""

    def __init__(self, fronts: Fronts, drain: GracefulShutdown | None = None) -> None:
        self._local = fronts.local
        self._drain = drain or GracefulShutdown(fronts.local)
        self._stopping = False
        self._app = RestApp(fronts)
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None
        self._tls: Tls | None = None

    @property
    def port(self) -> int:
        """Port that the server listens on, also if the address asked for port 0."""
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    async def init(self) -> None:
        """Bind and accept.

        Raises:
            SettingError: a listener that others reach without TLS and tokens, or certificates that cannot be used.
            PortInUse: somebody else listens there.
        """
        address = self._local.settings.rest_address
        if not address:
            return
        settings = self._local.settings
        rpc.check_listener(settings.front(), address, authenticated=settings.authenticates)
        self._tls = settings.front_tls("http/1.1")
        config = self._config()
        self._socket = listen(address, "rest_address", settings.rest_socket)
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[])  # connections are accepted here, for as long as there is room

    async def run(self) -> None:
        """Serve HTTP until told to stop."""
        if self._server is not None:
            async with asyncio.TaskGroup() as group:
                beside = (guard_connections(self.port, self._busy), self._accept())
                tasks = [group.create_task(each) for each in beside]
                await self._server.main_loop()
                for task in tasks:
                    task.cancel()

    async def _accept(self) -> None:
        """Accept connections here, for as long as there is room, where uvloop's own server would cut them off."""
        server = self._server
        assert server is not None
        assert self._socket is not None
        loop = asyncio.get_running_loop()

        def protocol() -> BoundedProtocol:
            return BoundedProtocol(server.config, server.server_state, server.lifespan.state)

        async def begin(accepted: socket.socket) -> None:
            tls = self._tls.server_context() if self._tls is not None else None
            await loop.connect_accepted_socket(protocol, accepted, ssl=tls)

        shared = self._local.settings.rest_socket >= 0
        await accept(self._socket, begin, lambda: len(server.server_state.connections), shared)

    def _busy(self) -> set[int]:
        """Ports of the clients whose whole request is there and not yet answered."""
        assert self._server is not None
        connections = self._server.server_state.connections
        answering = (each for each in connections if isinstance(each, BoundedProtocol) and each.answering)
        return {each.client[1] for each in answering if each.client is not None}

    async def shutdown(self) -> None:
        """Accept no more; requests under way have stop_grace_s to end."""
        if self._server is not None:
            self._local.draining = True
            await self._drain.stop_within(self._stop, self._local.settings.stop_grace_s)
        await self._app.close()

    async def _stop(self, grace_s: float) -> None:
        server, listener = self._server, self._socket
        assert server is not None
        assert listener is not None
        if grace_s <= 0:
            server.force_exit = True
            for task in server.server_state.tasks:
                task.cancel()
        if not self._stopping:
            self._stopping = True
            server.config.timeout_graceful_shutdown = math.ceil(grace_s)
            await server.shutdown(sockets=[listener])

    def _config(self) -> uvicorn.Config:
        config = uvicorn.Config(
            self._app, log_config=None, access_log=False, lifespan="off", http=BoundedProtocol, ws="none",
            interface="asgi3", proxy_headers=False, server_header=False, backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        return config


HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_S: Final = 30.0
"""From a connection, or a request's first byte, to the end of its headers."""


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 connection with bounded headers: who sends no whole head, or an endless one, is cut off."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_bytes = 0
        self._steps = 0
        self._in_body = False
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        """Whether a whole request has come and its answer has not gone yet."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

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
