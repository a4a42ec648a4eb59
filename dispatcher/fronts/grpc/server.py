"""The gRPC front: all methods of KServe v2 behind access control, on one port, with TLS and client certificates if set.

What access control refuses reaches no queue and is not booked as having arrived: demand is what could be answered.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer as AsyncReflection
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.access_control import AccessControl
from dispatcher.fronts.grpc.health import ServerHealth
from dispatcher.fronts.grpc.streams import Streams
from dispatcher.fronts.kserve import UNIMPLEMENTED, KserveService
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.contracts import Contracts
from dispatcher.request.core.tenants import ADMIN
from dispatcher.request.inference import Inference
from dispatcher.request.peer_links import Peers
from dispatcher.routing.slices import SERVICE
from dispatcher.service.graceful_shutdown import GracefulShutdown
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.accepting import listen
from dispatcher.transport.core.grpc_framing import JOIN
from dispatcher.transport.h2 import ConnectionLimits, Held
from dispatcher.transport.h2_call import ServerBounds
from dispatcher.transport.h2_server import H2Server, Routes
from trefoil.core.errors import TrefoilError
from trefoil.runtime import rpc
from trefoil.runtime.connections import guard_connections
from trefoil.runtime.telemetry import Metrics

Handler = Callable[[Any, Any], Awaitable[Any]]
MESSAGE_S: Final = 60.0  # of a message from its first byte to its last, and of a new connection to its first
CHANGES: Final = ("RepositoryModelLoad", "RepositoryModelUnload")
"""What needs the admin role."""


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
    held: Held

    @classmethod
    def build(cls, local: LocalWorker, contracts: Contracts, metrics: Metrics | None = None) -> "Fronts":
        """Raises `SettingError` for a tenants file that cannot be used."""
        access = AccessControl(local.settings, local.clock, metrics)
        peers = Peers(local)
        inference = Inference(local, contracts, peers, access.flow)
        if local.settings.otel_endpoint:
            from dispatcher.request.traced_inference import TracedInference  # it needs the extra `otel`

            inference = TracedInference(local, contracts, peers, access.flow)
        streams = Streams(local, contracts, inference)
        kserve, held = KserveService(local, contracts, peers), Held(local.settings.held_bytes_max)
        return cls(local, contracts, kserve, inference, access, peers, streams, held)


class InferenceComponent:
    """The inference port on libnghttp2, with health and reflection as grpc.aio's servers have them. At the end it lets
    what is in flight finish. A part of the service."""

    def __init__(self, fronts: Fronts, drain: GracefulShutdown | None = None) -> None:
        self._fronts = fronts
        self._local = fronts.local
        self._health = ServerHealth(lambda: not fronts.local.not_ready())
        self._drain = drain or GracefulShutdown(fronts.local)
        self._server: H2Server | None = None
        self._guarding: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port that the server listens on, also if the address asked for port 0."""
        assert self._server is not None
        return self._server.port

    async def init(self) -> None:
        """Listen and serve; raises like `rpc.make_server`."""
        settings, fronts = self._local.settings, self._fronts
        address = settings.inference_address
        rpc.check_listener(settings.front(), address, authenticated=settings.authenticates)
        tls = settings.front_tls()
        routes = Routes()
        routes.add_registered_method_handlers(SERVICE, handlers(fronts))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, routes)
        named = (SERVICE, rpc.HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(AsyncReflection(named), routes)
        self._server = H2Server(
            routes.handlers,
            ServerBounds(
                settings.message_bytes_max, settings.connection_unread_bytes_max, MESSAGE_S,
                settings.connection_age_max_s,
            ),
            ConnectionLimits(),
            fronts.held,
            listen(address, "inference_address", settings.inference_socket),
            tls.server_context if tls is not None else None,
            shared=settings.inference_socket >= 0,
        )  # fmt: skip
        await self._server.start()
        self._guarding = asyncio.create_task(guard_connections(self.port, self._server.busy_ports))

    async def run(self) -> None:
        """Report changes of readiness."""
        await self._health.follow(self._local.clock)

    async def shutdown(self) -> None:
        """No new requests from now on; those under way, queued ones included, have stop_grace_s to end."""
        self._local.draining = True
        await self._health.publish()
        self._fronts.streams.close()
        await self._drain.stop_within(self._stop, self._local.settings.stop_grace_s)
        await self._local.routing.connections.close()

    async def _stop(self, grace_s: float) -> None:
        assert self._server is not None
        if self._guarding is not None:
            self._guarding.cancel()
        await self._server.stop(grace_s)


def handlers(fronts: Fronts) -> dict[str, Any]:
    """Handlers of all 20 methods, by name."""
    access = fronts.access
    table: dict[str, Any] = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(_infer(fronts.inference, access), response_serializer=JOIN),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(_stream(fronts.streams, access)),
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
    return table


def _infer(inference: Inference, access: AccessControl) -> Handler:
    if access.open:
        return inference.infer

    async def infer(data: bytes, context: Any) -> tuple[bytes, ...]:
        tenant = access.authenticate_call(context.invocation_metadata())
        access.admit(tenant, len(data))
        return await inference.infer(data, context, tenant)

    return infer


def _stream(streams: Streams, access: AccessControl) -> Handler:
    async def stream(_: Any, context: Any) -> None:
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else streams.local.clock.monotonic_s() + remaining_s
        tenant = access.authenticate_call(context.invocation_metadata())
        flow = access.flow(tenant, context.peer(), context.invocation_metadata)
        caller = Caller(tenant.name, deadline_s, trace=context.trace, flow=flow, weight=tenant.weight)
        await streams.serve(caller, context, partial(access.admit, tenant))

    return stream


def _guarded(behaviour: Handler, access: AccessControl, changes: bool = False) -> Handler:
    if access.open:
        return behaviour

    async def check(request: Any, context: Any) -> Any:
        tenant = access.authenticate_call(context.invocation_metadata())
        if changes:
            access.require_role(tenant, ADMIN)
        return await behaviour(request, context)

    return check


def _mapped(behaviour: Handler) -> Handler:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except TrefoilError as error:
            raise StatusError(rpc.status_of(error), str(error)) from error

    return handle


def _refusal(why: str) -> Handler:
    async def refuse(*_: Any) -> None:
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, why)

    return refuse
