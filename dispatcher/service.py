"""The inference port: KServe v2 with Triton's extensions, health and reflection.

Clients see one ordinary Triton that serves families; variants and slices are ours. What is not offered answers
UNIMPLEMENTED with the reason, never silence.
"""

import hmac
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from dispatcher.contracts import Contracts, unknown_model
from dispatcher.hub import Hub
from dispatcher.inference import Inference
from dispatcher.load import Totals
from dispatcher.transport import SERVICE
from dispatcher.wire import PUBLIC_VERSION
from trefoil.core.errors import NotFound, TrefoilError
from trefoil.runtime import rpc

EXTENSIONS: Final = (
    "classification", "schedule_policy", "model_configuration", "binary_tensor_data", "parameters", "statistics",
    "trefoil_variant",
)  # fmt: skip
"""`statistics` makes perf_analyzer read ours. Shared memory, trace, logging and model loading are not offered."""

NO_SHARED_MEMORY: Final = "Client shared memory is disabled. Tensors travel in the request: its slice is chosen later"
NO_LOADING: Final = "the controller decides what is loaded where. Remedy: trefoil objective set, or trefoil pin"
UNIMPLEMENTED: Final = {
    "ModelStreamInfer": "streams are not routed yet. Remedy: send unary ModelInfer",
    "RepositoryModelLoad": f"models cannot be loaded by clients: {NO_LOADING}",
    "RepositoryModelUnload": f"models cannot be unloaded by clients: {NO_LOADING}",
    "SystemSharedMemoryRegister": NO_SHARED_MEMORY,
    "SystemSharedMemoryUnregister": NO_SHARED_MEMORY,
    "CudaSharedMemoryRegister": NO_SHARED_MEMORY,
    "CudaSharedMemoryUnregister": NO_SHARED_MEMORY,
    "TraceSetting": "traces are a setting of each slice, not of this endpoint",
    "LogSettings": "log settings are those of the dispatcher's settings file",
}

Handler = Callable[[Any, Any], Awaitable[Any]]


class KserveService:
    """Answers everything but ModelInfer."""

    def __init__(self, hub: Hub, contracts: Contracts) -> None:
        self._hub = hub
        self._contracts = contracts
        self._version = version("trefoil")

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """True while the process is up."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """True while every family has a live slice and the process is not stopping."""
        return pb.ServerReadyResponse(ready=not self._hub.not_ready())

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """True while some slice serves the family, whichever variant."""
        live = bool(self._hub.table.live(request.name)) and not self._hub.draining
        return pb.ModelReadyResponse(ready=live and request.version in ("", PUBLIC_VERSION))

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Who we are and what we can do."""
        return pb.ServerMetadataResponse(name="trefoil", version=self._version, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """The family's contract."""
        _check_version(request)
        return (await self._contracts.of(request.name)).metadata

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """The family's contract."""
        _check_version(request)
        return (await self._contracts.of(request.name)).config

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        """Cumulative counters under the public version, whose counts are equal and grow with every answer."""
        families = sorted(self._hub.table.routes)
        if request.name:
            if request.name not in families:
                raise unknown_model(request.name)
            _check_version(request)
            families = [request.name]
        totals = self._hub.book.totals
        return pb.ModelStatisticsResponse(model_stats=[_statistics(f, totals.get(f, Totals())) for f in families])

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """The families, each READY or with the reason why not."""
        answer = pb.RepositoryIndexResponse()
        for family in sorted(self._hub.table.routes):
            live = bool(self._hub.table.live(family))
            if live or not request.ready:
                state, reason = ("READY", "") if live else ("UNAVAILABLE", self._hub.table.why[family])
                answer.models.add(name=family, version=PUBLIC_VERSION, state=state, reason=reason)
        return answer

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """No region is registered."""
        return pb.SystemSharedMemoryStatusResponse()

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """No region is registered."""
        return pb.CudaSharedMemoryStatusResponse()


def handlers(service: KserveService, inference: Inference, token: str | None) -> Any:
    """The generic handler of all 20 methods. `token`: what callers of this port must present, None = nothing."""
    table: dict[str, Any] = {"ModelInfer": grpc.unary_unary_rpc_method_handler(_guarded(inference.infer, token))}
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        if method.name in UNIMPLEMENTED:
            make = (
                grpc.stream_stream_rpc_method_handler
                if method.client_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            table[method.name] = make(_refusal(UNIMPLEMENTED[method.name]))
        elif method.name != "ModelInfer":
            table[method.name] = grpc.unary_unary_rpc_method_handler(
                _guarded(_mapped(getattr(service, method.name)), token),
                request_deserializer=getattr(pb, method.input_type.name).FromString,
                response_serializer=getattr(pb, method.output_type.name).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(SERVICE, table)


def make_server(hub: Hub, contracts: Contracts) -> rpc.RpcServer:
    """The bound inference server; raises like `rpc.make_server`."""
    settings = hub.settings
    token = settings.token.get_secret_value() if settings.token else None
    generic = handlers(KserveService(hub, contracts), Inference(hub, contracts), token)
    return rpc.make_server(
        settings,
        [(lambda _, server: server.add_generic_rpc_handlers((generic,)), None, SERVICE)],
        address=settings.inference_address,
        intercept=False,  # two interceptors cost as much as the router
        message_bytes_max=settings.message_bytes_max,
    )


def _check_version(request: Any) -> None:
    if request.version not in ("", PUBLIC_VERSION):
        raise NotFound(
            f"Request for unknown model: '{request.name}' version {request.version} is not found",
            remedy=f"leave the version out, or ask for {PUBLIC_VERSION}",
        )


def _statistics(family: str, totals: Totals) -> Any:
    """Our wait is in `queue`, all that a slice took in `compute_infer`: Triton's own split is not known here."""
    answer = pb.ModelStatistics(
        name=family,
        version=PUBLIC_VERSION,
        last_inference=int(totals.last_at_s * 1e3),
        inference_count=totals.items,
        execution_count=totals.answered,
    )
    stats = answer.inference_stats
    durations = {
        "success": totals.answered_ns, "queue": totals.queue_ns, "compute_input": 0,
        "compute_infer": totals.service_ns, "compute_output": 0,
    }  # fmt: skip
    for name, ns in durations.items():
        getattr(stats, name).count = totals.answered
        getattr(stats, name).ns = ns
    stats.fail.count, stats.fail.ns = totals.failed, totals.failed_ns
    return answer


def _mapped(behaviour: Handler) -> Handler:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except TrefoilError as error:
            await context.abort(rpc.status_of(error), str(error))

    return handle


def _refusal(why: str) -> Handler:
    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)

    return refuse


def _guarded(behaviour: Handler, token: str | None) -> Handler:
    if token is None:
        return behaviour
    expected = f"Bearer {token}".encode()

    async def check(request: Any, context: Any) -> Any:
        given = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
        if not hmac.compare_digest(given.encode(), expected):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "no valid token. Remedy: send 'authorization: Bearer <token>'"
            )
        return await behaviour(request, context)

    return check
