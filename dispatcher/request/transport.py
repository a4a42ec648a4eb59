"""Moves bytes to slices and back: one long-lived channel per slice, raw bytes, no decision.

Traps that this file knows (measured): the default receive limit of 4 MB; one retry loop only, ours; channels to the
same address share a connection unless told otherwise; the default reconnect backoff grows to two minutes.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from dispatcher.routing.core.routing_table import Endpoint
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import SliceKey

SERVICE: Final = "inference.GRPCInferenceService"
CLOSE_GRACE_S: Final = 600.0  # calls in flight on a connection that is replaced end by themselves, or by their deadline

OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * 1024),  # a slice's error says names and ids again: ours to shorten
    ("grpc.absolute_max_metadata_size", 128 * 1024),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # the patience of one attempt; the pause between two is the other two
    ("grpc.max_reconnect_backoff_ms", 500),
)


class Connection:
    """Channel to one slice with its methods, made once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.cut_reason = ""
        """Why its calls were cut off: they then end as cancelled, though nobody left."""
        self.channel = grpc.aio.insecure_channel(endpoint.target, options=OPTIONS)
        self.infer = self.channel.unary_unary(f"/{SERVICE}/ModelInfer")
        self.stream = self.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")  # bytes of each message, both ways
        self._typed: dict[str, Any] = {}

    async def ask(self, method: str, request: Any, answer: Any, timeout_s: float) -> Any:
        """Call any other unary method, with messages; raises AioRpcError."""
        if method not in self._typed:
            self._typed[method] = self.channel.unary_unary(
                f"/{SERVICE}/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
        return await self._typed[method](request, timeout=timeout_s)

    async def ready(self, family: str, timeout_s: float) -> bool:
        """Ask whether the server takes requests for the family; raises AioRpcError."""
        server = await self.ask("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, timeout_s)
        if not server.ready:
            return False
        model = await self.ask("ModelReady", pb.ModelReadyRequest(name=family), pb.ModelReadyResponse, timeout_s)
        return bool(model.ready)


class Transport:
    """Connections of one worker to its slices. Belongs to one event loop."""

    def __init__(self) -> None:
        self._connections: dict[SliceKey, Connection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def connect(self, endpoints: Mapping[SliceKey, Endpoint]) -> None:
        """Connect to these endpoints; let go of others, and of those that another generation has replaced."""
        for slice_, connection in list(self._connections.items()):
            if endpoints.get(slice_) != connection.endpoint:
                del self._connections[slice_]
                self._retire(connection)
        for slice_, endpoint in endpoints.items():
            if slice_ not in self._connections:
                connection = Connection(endpoint)
                connection.channel.get_state(try_to_connect=True)  # not at the first request
                self._connections[slice_] = connection

    def connection(self, slice_: SliceKey) -> Connection:
        """Connection to a slice.

        Raises:
            Unavailable: it has none.
        """
        connection = self._connections.get(slice_)
        if connection is None:
            raise Unavailable(f"failed to connect to slice {slice_.name}: its address is gone", remedy="try again")
        return connection

    def cut(self, slice_: SliceKey, why: str) -> None:
        """Cut off all calls on a slice that will not answer them, and connect anew."""
        connection = self._connections.pop(slice_, None)
        if connection is None:
            return
        connection.cut_reason = why
        self._retire(connection, 0.0)
        self.connect({slice_: connection.endpoint, **{key: each.endpoint for key, each in self._connections.items()}})

    async def close(self) -> None:
        """Close all connections, cutting off what is in flight."""
        connections, self._connections = list(self._connections.values()), {}
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for connection in connections:
            await connection.channel.close()

    def _retire(self, connection: Connection, grace_s: float = CLOSE_GRACE_S) -> None:
        task = asyncio.create_task(connection.channel.close(grace_s))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
