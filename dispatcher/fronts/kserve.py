"""KServe v2 calls besides inference, answered for every front.

Clients see one ordinary Triton that serves families; variants and slices are ours. What is not offered answers
UNIMPLEMENTED with the reason, never silence.
ModelStatistics are cumulative counters, over all workers of the dispatcher; what a worker counted is lost with it, as a
Triton's counters are.
"""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request.contracts import Contracts, unknown_model
from dispatcher.request.peer_links import Peers
from dispatcher.service.accounting import Totals
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.core.kserve_wire import PUBLIC_VERSION
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
    """KServe v2 methods beside ModelInfer and its stream."""

    def __init__(self, local: LocalWorker, contracts: Contracts, peers: Peers | None = None) -> None:
        self._local = local
        self._routing = local.routing
        self._contracts = contracts
        self._peers = peers
        self._version = version("trefoil")

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """Liveness: true while the process is up."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """True while every family has a live slice and the process is not stopping."""
        return pb.ServerReadyResponse(ready=not self._local.not_ready())

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """True while some slice serves the family, whichever variant."""
        live = self._routing.table.served(request.name) and not self._local.draining
        return pb.ModelReadyResponse(ready=live and request.version in ("", PUBLIC_VERSION))

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Name, version and extensions of this server."""
        return pb.ServerMetadataResponse(name="trefoil", version=self._version, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Metadata of a family: names, datatypes and shapes."""
        _check_version(request)
        return (await self._contracts.fetch(request.name)).metadata

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """Configuration of a family, without what is a slice's own."""
        _check_version(request)
        return (await self._contracts.fetch(request.name)).config

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        """Cumulative counters under the public version, whose counts are equal and grow with every answer."""
        families = sorted(self._routing.table.chains)
        if request.name:
            if request.name not in families:
                raise unknown_model(request.name)
            _check_version(request)
            families = [request.name]
        return await model_statistics(self._local, self._peers, families)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """Index of the families, each READY or with the reason why not."""
        answer = pb.RepositoryIndexResponse()
        for family in sorted(self._routing.table.chains):
            live = self._routing.table.served(family)
            if live or not request.ready:
                state, reason = ("READY", "") if live else ("UNAVAILABLE", self._routing.table.why_not(family))
                answer.models.add(name=family, version=PUBLIC_VERSION, state=state, reason=reason)
        return answer

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """Status of system shared memory: no region is registered."""
        return pb.SystemSharedMemoryStatusResponse()

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """Status of CUDA shared memory: no region is registered."""
        return pb.CudaSharedMemoryStatusResponse()


def _check_version(request: Any) -> None:
    if request.version not in ("", PUBLIC_VERSION):
        raise NotFound(
            f"Request for unknown model: '{request.name}' version {request.version} is not found",
            remedy=f"leave the version out, or ask for {PUBLIC_VERSION}",
        )


async def model_statistics(local: LocalWorker, peers: Peers | None, families: Iterable[str]) -> Any:
    """ModelStatisticsResponse of these families over all workers."""
    parts = [local_model_statistics(local)]
    for told in (await peers.ask("Statistics", b"")).values() if peers is not None else ():
        if isinstance(told, bytes):
            try:
                parts.append(pb.ModelStatisticsResponse.FromString(told))
            except DecodeError:
                continue  # of another version of this program
    wanted = {family: _statistics(family, Totals()) for family in families}
    for stats in (each for part in parts for each in part.model_stats if each.name in wanted):
        add_statistics(wanted[stats.name], stats)
    return pb.ModelStatisticsResponse(model_stats=wanted.values())


def local_model_statistics(local: LocalWorker) -> Any:
    """ModelStatisticsResponse of this worker alone, of all families that it answered for."""
    totals = local.accounting.load.totals
    return pb.ModelStatisticsResponse(model_stats=[_statistics(family, totals[family]) for family in sorted(totals)])


def add_statistics(into: Any, other: Any) -> None:
    """Add one worker's counters of a family to those of others."""
    into.last_inference = max(into.last_inference, other.last_inference)
    into.inference_count += other.inference_count
    into.execution_count += other.execution_count
    for part in other.inference_stats.DESCRIPTOR.fields:
        if not other.inference_stats.HasField(part.name):
            continue
        summed, added = getattr(into.inference_stats, part.name), getattr(other.inference_stats, part.name)
        summed.count += added.count
        summed.ns += added.ns


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
