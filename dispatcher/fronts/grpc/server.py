"""The gRPC front: all methods of KServe v2 behind access control, on one port, with TLS and client certificates if set.

What access control refuses reaches no queue and is not booked as having arrived: demand is what could be answered.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.access_control import AccessControl
from dispatcher.fronts.contracts import Contracts
from dispatcher.fronts.grpc.streams import Streams
from dispatcher.fronts.kserve import UNIMPLEMENTED, KserveService
from dispatcher.fronts.listening_sockets import ListeningSockets
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.core.tenants import ADMIN
from dispatcher.request.inference import Inference
from dispatcher.request.transport import SERVICE
from dispatcher.service.graceful_shutdown import GracefulShutdown
from dispatcher.service.local_worker import LocalWorker
from dispatcher.settings import DispatcherSettings
from dispatcher.workers.peer_links import Peers
from trefoil.core.errors import TrefoilError, brief
from trefoil.runtime import rpc
from trefoil.runtime.connections import CallsUnderWay
from trefoil.runtime.service import ServerPart
from trefoil.runtime.telemetry import Metrics

Handler = Callable[[Any, Any], Awaitable[Any]]
HEALTH_TICK_S: Final = 0.1
CHANGES: Final = ("RepositoryModelLoad", "RepositoryModelUnload")
"""What needs the admin role."""


PENDING: Final = tuple((f"grpc.server.max_pending_requests{what}", 65_536) for what in ("", "_hard_limit"))
"""Calls that nobody has looked at yet. From a thousand on gRPC would cancel some at random, without a word; how much
may wait is for our queues to say, with a reason."""


@dataclass(frozen=True, slots=True)
class Fronts:
    """What every front of a worker answers with."""

    local: LocalWorker
    contracts: Contracts
    kserve: KserveService
    inference: Inference
    access: AccessControl
    peers: Peers
    streams: Streams
    calls: CallsUnderWay = field(default_factory=CallsUnderWay)

    @classmethod
    def build(cls, local: LocalWorker, contracts: Contracts, metrics: Metrics | None = None) -> "Fronts":
        """Raises `SettingError` for a tenants file that cannot be used."""
        access = AccessControl(local.settings, local.clock, metrics)
        peers = Peers(local)
        inference = Inference(local, contracts, peers)
        streams = Streams(local, contracts, inference)
        return cls(local, contracts, KserveService(local, contracts, peers), inference, access, peers, streams)


def make_server(fronts: Fronts) -> rpc.RpcServer:
    """The bound inference server; raises like `rpc.make_server`."""
    settings = fronts.local.settings
    generic = handlers(fronts)
    return rpc.make_server(
        settings.front(),
        [(lambda _, server: server.add_generic_rpc_handlers((generic,)), None, SERVICE)],
        address=settings.inference_address,
        intercept=False,  # two interceptors cost as much as the router
        message_bytes_max=settings.message_bytes_max,
        reuse_port=settings.workers > 1,
        options=[*PENDING, *_ages(settings)],
        client_ca=settings.front_client_ca,
        authenticated=settings.authenticates,
        calls=fronts.calls,
    )


def _ages(settings: DispatcherSettings) -> list[tuple[str, int]]:
    """A client's connection stays with the worker that the kernel gave it to, until it is asked to come back."""
    if not settings.connection_age_max_s:
        return []
    return [
        ("grpc.max_connection_age_ms", int(settings.connection_age_max_s * 1e3)),
        ("grpc.max_connection_age_grace_ms", int(settings.connection_age_grace_s * 1e3)),
    ]


class InferencePart(ServerPart):
    """Serves clients, and at the end lets what is in flight finish."""

    def __init__(self, fronts: Fronts, drain: GracefulShutdown | None = None) -> None:
        super().__init__(lambda: make_server(fronts))
        self._local = fronts.local
        self._streams = fronts.streams
        self._drain = drain or GracefulShutdown(fronts.local)
        self._listening: ListeningSockets | None = None

    async def init(self) -> None:
        """Listen."""
        await super().init()
        assert self.server is not None
        if self._local.settings.workers > 1:
            self._listening = ListeningSockets(self.server.port)

    async def run(self) -> None:
        """Health follows readiness."""
        assert self.server is not None
        ready = None
        while True:
            if ready is not (ready := not self._local.not_ready()):
                for name in ("", *self.server.names):
                    await self.server.serving(name, ready)
            await self._local.clock.sleep(HEALTH_TICK_S)

    async def shutdown(self) -> None:
        """No new requests from now on; those under way, queued ones included, have stop_grace_s to end."""
        assert self.server is not None
        self._local.draining = True
        self._streams.close()
        if self._listening is not None:
            self._listening.close()
        await self._drain.stop_within(self.server.stop, self._local.settings.stop_grace_s)
        await self._local.routing.transport.close()


def handlers(fronts: Fronts) -> Any:
    """The generic handler of all 20 methods."""
    access = fronts.access
    table: dict[str, Any] = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(_counted(_infer(fronts.inference, access), fronts.calls)),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
            _counted(_stream(fronts.streams, access), fronts.calls)
        ),
    }
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        if method.name in UNIMPLEMENTED:
            refuse = _guarded(_refusal(UNIMPLEMENTED[method.name]), access, method.name in CHANGES)
            table[method.name] = grpc.unary_unary_rpc_method_handler(refuse)
        elif method.name not in table:
            table[method.name] = grpc.unary_unary_rpc_method_handler(
                _guarded(_mapped(getattr(fronts.kserve, method.name)), access),
                request_deserializer=getattr(pb, method.input_type.name).FromString,
                response_serializer=getattr(pb, method.output_type.name).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(SERVICE, table)


def _counted(behaviour: Handler, calls: CallsUnderWay) -> Handler:
    """Count what may take its time: its connection is not idle, however silent it is."""

    async def counted(request: Any, context: Any) -> Any:
        peer = context.peer()
        calls.begin(peer)
        try:
            return await behaviour(request, context)
        finally:
            calls.end(peer)

    return counted


def _infer(inference: Inference, access: AccessControl) -> Handler:
    if access.open:
        return inference.infer

    async def infer(data: bytes, context: Any) -> bytes:
        try:
            tenant = access.authenticate_call(context.invocation_metadata())
            access.admit(tenant, len(data))
        except StatusError as refused:
            await context.abort(refused.code, refused.details, refused.trailers)
        return await inference.infer(data, context, tenant.name)

    return infer


def _stream(streams: Streams, access: AccessControl) -> Handler:
    async def stream(_: Any, context: Any) -> None:
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else streams.local.clock.monotonic_s() + remaining_s
        if access.open:
            return await streams.serve(Caller(deadline_s=deadline_s), context)
        try:
            tenant = access.authenticate_call(context.invocation_metadata())
        except StatusError as refused:
            await context.abort(refused.code, refused.details, refused.trailers)
        return await streams.serve(Caller(tenant.name, deadline_s), context, partial(access.admit, tenant))

    return stream


def _guarded(behaviour: Handler, access: AccessControl, changes: bool = False) -> Handler:
    if access.open:
        return behaviour

    async def check(request: Any, context: Any) -> Any:
        try:
            tenant = access.authenticate_call(context.invocation_metadata())
            if changes:
                access.require_role(tenant, ADMIN)
        except StatusError as refused:
            await context.abort(refused.code, refused.details, refused.trailers)
        return await behaviour(request, context)

    return check


def _mapped(behaviour: Handler) -> Handler:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except TrefoilError as error:
            await context.abort(rpc.status_of(error), brief(str(error)))

    return handle


def _refusal(why: str) -> Handler:
    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)

    return refuse
