"""The REST port: uvicorn in the process's own event loop, without its signal handlers."""

import asyncio
import math
import socket
from collections.abc import Mapping

import uvicorn

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.openai.app import NO_ROUTES, Route
from dispatcher.fronts.rest.app import RestApp
from dispatcher.fronts.rest.calls import CUT_S
from dispatcher.fronts.rest.http1 import BoundedReads, Http1Connection
from dispatcher.service.graceful_shutdown import GracefulShutdown
from dispatcher.transport.accepting import BACKLOG, accept, listen
from trefoil.runtime import rpc
from trefoil.runtime.connections import guard_connections
from trefoil.runtime.security.tls import Tls

KEEP_ALIVE_S = 75


class RestComponent:
    """HTTP server, a part of the service. An empty address means none."""

    def __init__(
        self, fronts: Fronts, drain: GracefulShutdown | None = None, routes: Mapping[str, Route] = NO_ROUTES
    ) -> None:
        self._local = fronts.local
        self._drain = drain or GracefulShutdown(fronts.local)
        self._stopping = False
        self._app = RestApp(fronts, routes)
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
            PortInUse: another process listens there.
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
        """Serve HTTP until it is stopped."""
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

        def protocol() -> BoundedReads:
            return BoundedReads(Http1Connection(server.config, server.server_state, server.lifespan.state))

        async def begin(accepted: socket.socket) -> None:
            tls = self._tls.server_context() if self._tls is not None else None
            await loop.connect_accepted_socket(protocol, accepted, ssl=tls)

        shared = self._local.settings.rest_socket >= 0
        await accept(self._socket, begin, lambda: len(server.server_state.connections), shared)

    def _busy(self) -> set[int]:
        """Ports of the clients whose whole request is there and not yet answered."""
        assert self._server is not None
        connections = self._server.server_state.connections
        answering = (each for each in connections if isinstance(each, Http1Connection) and each.answering)
        return {each.client[1] for each in answering if each.client is not None}

    async def shutdown(self) -> None:
        """Accept no more; requests under way have stop_grace_s to end."""
        if self._server is not None:
            self._local.draining = True
            await self._drain.stop_within(self._stop, self._local.settings.stop_grace_s)
            if cut := set(self._server.server_state.tasks):  # streams have an event to say why they end
                await asyncio.wait(cut, timeout=2 * CUT_S)
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
            self._app, log_config=None, access_log=False, lifespan="off", http=Http1Connection, ws="none",
            interface="asgi3", proxy_headers=False, server_header=False, backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        return config
