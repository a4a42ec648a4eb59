"""What KServe v2 asks beside inference, answered for every front.

Clients see one ordinary Triton that serves families; variants and slices are ours. What is not offered answers
UNIMPLEMENTED with the reason, never silence.
"""

from importlib.metadata import version
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from dispatcher.contracts import Contracts, unknown_model
from dispatcher.hub import Hub
from dispatcher.peers import Peers
from dispatcher.statistics import statistics
from dispatcher.wire import PUBLIC_VERSION
from trefoil.core.errors import NotFound

EXTENSIONS: Final = (
    "classification", "sequence", "schedule_policy", "model_configuration", "binary_tensor_data", "parameters",
    "statistics", "trefoil_variant",
)  # fmt: skip
"""`statistics` makes perf_analyzer read ours. Shared memory, trace, logging and model loading are not offered."""

NO_SHARED_MEMORY: Final = "Client shared memory is disabled. Tensors travel in the request: its slice is chosen later"
NO_LOADING: Final = "the controller decides what is loaded where. Remedy: trefoil objective set, or trefoil pin"
UNIMPLEMENTED: Final = {
    "RepositoryModelLoad": f"models cannot be loaded by clients: {NO_LOADING}",
    "RepositoryModelUnload": f"models cannot be unloaded by clients: {NO_LOADING}",
    "SystemSharedMemoryRegister": NO_SHARED_MEMORY,
    "SystemSharedMemoryUnregister": NO_SHARED_MEMORY,
    "CudaSharedMemoryRegister": NO_SHARED_MEMORY,
    "CudaSharedMemoryUnregister": NO_SHARED_MEMORY,
    "TraceSetting": "traces are a setting of each slice, not of this endpoint",
    "LogSettings": "log settings are those of the dispatcher's settings file",
}


class KserveService:
    """Answers everything but ModelInfer."""

    def __init__(self, hub: Hub, contracts: Contracts, peers: Peers | None = None) -> None:
        self._hub = hub
        self._contracts = contracts
        self._peers = peers
        self._version = version("trefoil")

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """True while the process is up."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """True while every family has a live slice and the process is not stopping."""
        return pb.ServerReadyResponse(ready=not self._hub.not_ready())

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """True while some slice serves the family, whichever variant."""
        live = self._hub.table.served(request.name) and not self._hub.draining
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
        return await statistics(self._hub, self._peers, families)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """The families, each READY or with the reason why not."""
        answer = pb.RepositoryIndexResponse()
        for family in sorted(self._hub.table.routes):
            live = self._hub.table.served(family)
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


def _check_version(request: Any) -> None:
    if request.version not in ("", PUBLIC_VERSION):
        raise NotFound(
            f"Request for unknown model: '{request.name}' version {request.version} is not found",
            remedy=f"leave the version out, or ask for {PUBLIC_VERSION}",
        )
