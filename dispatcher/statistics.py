"""ModelStatistics: cumulative counters of this worker, and of all workers of the dispatcher.

A client's connection is with one worker; the counters that it reads are those of all. What a worker counted is lost
with it, as a Triton's counters are.
"""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.hub import Hub
from dispatcher.load import Totals
from dispatcher.peers import Peers
from dispatcher.wire import PUBLIC_VERSION


async def statistics(hub: Hub, peers: Peers | None, families: Iterable[str]) -> Any:
    """ModelStatisticsResponse of these families over all workers."""
    parts = [local_statistics(hub)]
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


def local_statistics(hub: Hub) -> Any:
    """ModelStatisticsResponse of this worker alone, of all families that it answered for."""
    totals = hub.book.totals
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
