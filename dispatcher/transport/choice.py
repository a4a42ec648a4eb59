"""Which transport a worker has: the one that its settings name, or grpc.aio where libnghttp2 cannot be loaded."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from dispatcher.transport import accepting
from dispatcher.transport.grpc_aio import GrpcChannel, GrpcServer
from dispatcher.transport.seam import Channel, Keepalive, Server


@dataclass(frozen=True, slots=True)
class Transport:
    """Transport of a worker. `instead`: why it is not the one that was asked for, "" if it is."""

    name: str
    instead: str = ""

    @classmethod
    def choose(cls, wanted: str) -> "Transport":
        """The transport of a setting (`seam.TRANSPORTS`)."""
        if wanted == "h2":
            try:
                importlib.import_module("dispatcher.transport.h2")
            except ImportError as error:
                why = f"libnghttp2 cannot be loaded ({error}): grpc.aio serves, at several times its CPU"
                structlog.get_logger().warning("transport h2 is away", why=why, remedy="install the wheel ngh2")
                return cls("grpc", why)
        return cls(wanted)

    def channel(self, target: str, *, ca: bytes | None = None, keepalive: Keepalive | None = None) -> Channel:
        """Channel to a server, inside an event loop."""
        if self.name == "grpc":
            return GrpcChannel(target, ca=ca, keepalive=keepalive)
        from dispatcher.transport.h2_channel import H2Channel  # it needs ngh2

        return H2Channel(target, ca=ca, keepalive=keepalive)

    def peer_server(
        self, service: str, handlers: Mapping[str, Any], address: str, tls: tuple[Path, Path] | None = None
    ) -> Server:
        """Server for other workers at host:port or unix:path; `tls` are the PEM files of chain and key.

        Raises:
            StartError, PortInUse: it cannot listen there.
        """
        if self.name == "grpc":
            pair = (tls[1].read_bytes(), tls[0].read_bytes()) if tls is not None else None
            return GrpcServer(service, handlers, address, pair)
        from dispatcher.transport.h2 import Held, Limits
        from dispatcher.transport.h2_call import ServerBounds
        from dispatcher.transport.h2_server import H2Server, Routes, server_tls

        routes = Routes()
        routes.add_registered_method_handlers(service, handlers)
        return H2Server(
            routes.handlers,
            ServerBounds(),
            Limits(stream_window_bytes=1 << 24, connection_window_bytes=1 << 26),
            Held(),
            accepting.listen(address, "peer_address"),
            server_tls(*tls) if tls is not None else None,
        )
