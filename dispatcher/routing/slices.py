"""Moves bytes to slices and back: one long-lived channel per slice and generation, raw bytes, no decision."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from dispatcher.routing.core.routing_table import Endpoint
from dispatcher.transport.calls import ConnectionDied, Leaving, Metadata, NotTaken, Parts, Trailers
from dispatcher.transport.engine_channel import EngineChannel
from dispatcher.transport.h2_channel import H2Channel, open_channel
from dispatcher.transport.renamed_channel import RenamedChannel
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import TRITON_NAME, SliceKey, triton_name
from trefoil.core.outside.addresses import TRITON_SCHEME
from trefoil.engine_api import EngineTarget, TritonTarget
from trefoil.runtime.security.key_file import KeyFile
from trefoil.runtime.security.tls import Tls

SERVICE: Final = "inference.GRPCInferenceService"
CLOSE_GRACE_S: Final = 600.0  # calls in flight on a connection that is replaced end by themselves, or by their deadline
_INFER: Final = f"/{SERVICE}/ModelInfer"
_STREAM: Final = f"/{SERVICE}/ModelStreamInfer"
Channel = H2Channel | EngineChannel | RenamedChannel


class Connection:
    """Channel to one slice with its methods."""

    def __init__(self, endpoint: Endpoint, channel: Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.cut_reason = ""
        """Why its calls were cut off: they then end as cancelled, though no client left."""
        self.gone = False
        """Cut off because its host is gone: no answer of it can come any more."""

    def infer(
        self, parts: Parts, timeout_s: float | None, metadata: Metadata = (), leaving: Leaving | None = None
    ) -> Awaitable[tuple[bytes, Trailers]]:
        """Answer to a ModelInferRequest, in parts, and the trailers; raises AioRpcError."""
        return self.channel.unary(_INFER, parts, timeout_s, metadata, leaving)

    def stream(
        self, parts: Parts, timeout_s: float | None, metadata: Metadata = (), leaving: Leaving | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Answers to the one request of a stream; raises AioRpcError."""
        return self.channel.stream(_STREAM, parts, timeout_s, metadata, leaving)

    async def ask(self, method: str, request: Any, answer: Any, timeout_s: float) -> Any:
        """Call any other unary method, with messages; raises AioRpcError."""
        data, _ = await self.channel.unary(f"/{SERVICE}/{method}", (request.SerializeToString(),), timeout_s)
        return answer.FromString(data)

    async def alive(self, timeout_s: float) -> None:
        """Ask whether the server lives. Any answer shows that it does; raises AioRpcError where there is none."""
        try:
            await self.ask("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse, timeout_s)
        except grpc.aio.AioRpcError as error:
            if isinstance(error, NotTaken | ConnectionDied) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise

    async def ready(self, model: str, timeout_s: float) -> bool:
        """Ask whether the server takes requests for a model, whatever its other models do; raises AioRpcError."""
        answer = await self.ask("ModelReady", pb.ModelReadyRequest(name=model), pb.ModelReadyResponse, timeout_s)
        return bool(answer.ready)


class SliceConnections:
    """Connections of one worker to its slices. Belongs to one event loop."""

    def __init__(self, tls: Tls | None, engine_keys: Mapping[str, KeyFile], name_form: str = TRITON_NAME) -> None:
        """`engine_keys`: API keys of adopted engines by base URL; `name_form`: name in a Triton's certificate."""
        self._tls, self._engine_keys, self._name_form = tls, engine_keys, name_form
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
                self._connections[slice_] = Connection(endpoint, self._channel(slice_, endpoint.target))

    def connection(self, slice_: SliceKey) -> Connection:
        """Connection to a slice.

        Raises:
            Unavailable: it has none.
        """
        connection = self._connections.get(slice_)
        if connection is None:
            raise Unavailable(f"failed to connect to slice {slice_.name}: its address is gone", remedy="try again")
        return connection

    def cut(self, slice_: SliceKey, why: str, *, gone: bool = False) -> None:
        """Cut off all calls on a slice that will not answer them, and connect again; `gone`: its host is silent too."""
        connection = self._connections.pop(slice_, None)
        if connection is None:
            return
        connection.cut_reason, connection.gone = why, gone
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

    def _channel(self, slice_: SliceKey, target: str) -> Channel:
        if target.startswith(TRITON_SCHEME):
            triton = TritonTarget.parse(target)
            return RenamedChannel(open_channel(triton.address, None), triton)
        if "://" in target:
            engine = EngineTarget.parse(target)
            return EngineChannel(engine, self._engine_keys.get(engine.base))
        return open_channel(target, self._tls, name=triton_name(slice_.device.partition("/")[0], self._name_form))

    def _retire(self, connection: Connection, grace_s: float = CLOSE_GRACE_S) -> None:
        task = asyncio.create_task(connection.channel.close(grace_s))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
