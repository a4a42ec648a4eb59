"""Server of the live page: uvicorn in the process's own event loop, with bounds of its own."""

import asyncio
import ssl
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controller.page.app import LOOPBACK_NAMES, make_app
from controller.page.frames import Frames, OwnReads
from controller.settings import ControllerSettings
from trefoil.core.errors import listen_error
from trefoil.runtime import rpc
from trefoil.runtime.clock import Clock
from trefoil.runtime.security.scopes import Tokens
from trefoil.runtime.security.tls import Tls

CONNECTIONS_MAX: Final = 96
"""More are closed at once: descriptors are for the cluster."""
SILENT_S: Final = 10
"""After it a connection goes that asks nothing, or has not asked to the end."""
ASKED_BYTES_MAX: Final = 65_536
"""After as many bytes from its client a connection goes: a browser asks a few times a connection, and sends no body."""
STOP_S: Final = 1.0
STALLED_S: Final = 15.0
"""After it a connection goes whose viewer takes no more bytes."""


class PageConnection(HttpToolsProtocol):
    """HTTP connection that neither silence nor a viewer who does not read holds open."""

    _stalled: asyncio.TimerHandle | None = None
    _asked_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection while there is room, for as long as it asks something."""
        if len(self.connections) >= CONNECTIONS_MAX:
            transport.abort()
            return
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(SILENT_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Read the client's bytes, up to a bound. An incomplete request does not keep a connection open."""
        self._asked_bytes += len(data)
        if self._asked_bytes > ASKED_BYTES_MAX:
            self.transport.abort()
            return
        silence = self.timeout_keep_alive_task
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if silence is not None and not answering:
            self.timeout_keep_alive_task = self.loop.call_at(silence.when(), self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        """Note that the viewer takes no more bytes."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that it does again."""
        self._take_back()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._take_back()
        if self.transport is not None:
            super().connection_lost(exc)

    def _take_back(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class PageComponent:
    """The page, a part of the controller. `servicer`: its gRPC service, which refuses while another one leads."""

    def __init__(self, settings: ControllerSettings, servicer: Any, clock: Clock) -> None:
        self._settings, self._address = settings, settings.page_address
        self._frames = Frames(OwnReads(servicer), clock)
        self._server: uvicorn.Server | None = None
        self._listener: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Port that the page is on, also if the address asked for port 0."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def init(self) -> None:
        """Bind and accept.

        Raises:
            SettingError: a listener that others reach without TLS and token, or a certificate that cannot be used.
            PortInUse: the address is taken.
        """
        rpc.check_listener(self._settings, self._address)
        rpc.check_port(self._address)
        names = LOOPBACK_NAMES if rpc.is_loopback(self._address) else ()
        app = make_app(self._frames, Tokens.from_settings(self._settings), self._settings.cluster, names)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", http=PageConnection, ws="none", interface="asgi3",
            proxy_headers=False, server_header=False, timeout_keep_alive=SILENT_S,
        )  # fmt: skip
        config.load()
        server = self._server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[])  # which installs no handler of signals
        host, port = rpc.split_address(self._address)
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: PageConnection(config, server.server_state, {}), host, port, ssl=_context(self._settings)
            )
        except OSError as error:
            raise listen_error(error, self._address, "page_address") from error

    async def run(self) -> None:
        """Draw for viewers, and answer them, until cancelled."""
        assert self._server is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._frames.run(), name="frames of the page")
            group.create_task(self._server.main_loop(), name="the page")

    async def shutdown(self) -> None:
        """Close the port and all connections at once: a viewer comes back by itself."""
        assert self._server is not None
        assert self._listener is not None
        self._listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        if tasks := set(self._server.server_state.tasks):  # of streams, which end as their viewers have gone
            await asyncio.wait(tasks, timeout=STOP_S)


def _context(settings: ControllerSettings) -> ssl.SSLContext | None:
    """TLS of the page: the admin port's certificate, renewed ones too. Browsers are asked for a token, not for a
    certificate."""
    if settings.tls_certificate is None:
        return None
    tls = Tls(settings.tls_certificate, settings.tls_key, None, alpn=("http/1.1",))
    context = tls.server_context()

    def renewed(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = tls.server_context()

    context.sni_callback = renewed
    return context
