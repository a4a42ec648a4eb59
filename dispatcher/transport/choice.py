"""Which transport a worker has: the one that its settings name, or grpc.aio where libnghttp2 cannot be loaded."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from dispatcher.transport import accepting
from dispatcher.transport.grpc_aio import GrpcChannel, GrpcServer
from dispatcher.transport.seam import Channel, Keepalive, Server
from trefoil.runtime.security.tls import Tls


@dataclass(frozen=True, slots=True)
class Transport:
    """Transport of a worker. `instead`: why it is not the one that was asked for, "" if it is."""

    name: str
    instead: str = ""
    tls: Tls | None = None

    @classmethod
    def choose(cls, wanted: str, tls: Tls | None = None) -> "Transport":
        """The transport of a setting (`seam.TRANSPORTS`)."""
        if wanted == "h2":
            try:
                importlib.import_module("dispatcher.transport.h2")
            except ImportError as error:
                why = f"libnghttp2 cannot be loaded ({error}): grpc.aio serves, at several times its CPU"
                structlog.get_logger().warning("transport h2 is away", why=why, remedy="install the wheel ngh2")
                return cls("grpc", why, tls)
        return cls(wanted, tls=tls)

    def channel(self, target: str, *, name: str = "", keepalive: Keepalive | None = None) -> Channel:
        """Channel to a server, inside an event loop; over TLS unless it is a socket of this host. `name`: whom the
        server's certificate must name, instead of the target's host."""
        tls = self.tls if self.tls is not None and self.tls.mutual and not target.startswith("unix:") else None
        if self.name == "grpc":
            return GrpcChannel(target, tls=tls, name=name, keepalive=keepalive)
        from dispatcher.transport.h2_channel import H2Channel  # it needs ngh2

        return H2Channel(target, tls=tls, name=name, keepalive=keepalive)

    def peer_server(self, service: str, handlers: Mapping[str, Any], address: str) -> Server:
        """Server for other workers at host:port, over TLS where this worker has it, or unix:path.

        Raises:
            StartError, PortInUse: it cannot listen there.
        """
        tls = self.tls if not address.startswith("unix:") else None
        if self.name == "grpc":
            return GrpcServer(service, handlers, address, tls)
        from dispatcher.transport.h2 import Held, Limits
        from dispatcher.transport.h2_call import ServerBounds
        from dispatcher.transport.h2_server import H2Server, Routes

        routes = Routes()
        routes.add_registered_method_handlers(service, handlers)
        return H2Server(
            routes.handlers,
            ServerBounds(),
            Limits(stream_window_bytes=1 << 24, connection_window_bytes=1 << 26),
            Held(),
            accepting.listen(address, "peer_address"),
            tls.server_context if tls is not None else None,
        )
