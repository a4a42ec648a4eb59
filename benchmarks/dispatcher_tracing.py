"""What OpenTelemetry spans cost the dispatcher: CPU time of a small request without them, and with them.

Dispatchers of one worker each, otherwise as in `benchmarks/dispatcher.py`, each before a Triton of its own:
    off               no otel_endpoint
    on                four spans of every request, to a collector in this process that throws them away
    on, sampled       the same of one request in a hundred (OTEL_TRACES_SAMPLER)
Closed loop, IN_FLIGHT at once; `off` also with a traceparent, which goes on to the slice. CPU time of the dispatcher's
process, its exporting thread included, over the requests; rounds in turn, medians.
Run: `.venv/bin/python -m benchmarks.dispatcher_tracing` (a minute; `--requests`, `--rounds`).
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent import futures
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from rich.console import Console

from benchmarks.dispatcher import PATH, SHAPES, message, ready
from benchmarks.dispatcher_peers import Bench, Peer
from trefoil.cli.demo.results import git_commit, machine

IN_FLIGHT: Final = 8
PARENT: Final = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
SAMPLED: Final = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
OURS: Final = "dispatcher"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """A collector that counts spans, and keeps none."""

    spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        """Take one batch."""
        self.spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class TracedBench(Bench):
    """A dispatcher, with its Triton and Redis, and with these variables in its environment."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        super().__init__(folder, {OURS: 1})
        self._variables = variables

    def _spawn(self, name: str, argv: tuple[str, ...], **more: Any) -> "subprocess.Popen[bytes]":
        if name.startswith(OURS):
            more = {"env": {**os.environ, **self._variables}, **more}
        return super()._spawn(name, argv, **more)

    @property
    def dispatcher(self) -> Peer:
        """The one that is measured."""
        return next(peer for peer in self.peers if peer.name == OURS)


async def cpu_us(peer: Peer, data: bytes, requests: int, metadata: tuple[tuple[str, str], ...]) -> float:
    """CPU time of the dispatcher a request [us]."""
    async with grpc.aio.insecure_channel(peer.target) as channel:
        infer: Callable[..., Awaitable[bytes]] = channel.unary_unary(PATH)

        async def ask(count: int) -> None:
            for _ in range(count):
                await infer(data, metadata=metadata)

        before_s = peer.cpu_s()
        await asyncio.gather(*(ask(requests // IN_FLIGHT) for _ in range(IN_FLIGHT)))
        return (peer.cpu_s() - before_s) / (requests // IN_FLIGHT * IN_FLIGHT) * 1e6


async def measure(folder: Path, requests: int, rounds: int, endpoint: str) -> dict[str, list[float]]:
    """CPU times of all rounds."""
    data = message(SHAPES[0])
    on = {"TREFOIL_DISPATCHER_OTEL_ENDPOINT": endpoint}
    kinds = {"off": {}, "on": on, "on, sampled": {**on, **SAMPLED}}
    benches = {name: TracedBench(folder / str(at), kinds[name]) for at, name in enumerate(kinds)}
    found: dict[str, list[float]] = {name: [] for name in ("off", "off, with a traceparent", "on", "on, sampled")}
    async with AsyncExitStack() as stack:
        for bench in benches.values():
            bench.folder.mkdir()
            stack.push_async_callback(bench.close)
            await bench.start()
            await ready(bench)
            await cpu_us(bench.dispatcher, data, requests // 4, ())
        for _ in range(rounds):
            for name, bench in benches.items():
                found[name].append(await cpu_us(bench.dispatcher, data, requests, ()))
            parented = await cpu_us(benches["off"].dispatcher, data, requests, (PARENT,))
            found["off, with a traceparent"].append(parented)
    return found


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=4000, help="of each round and kind")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="trefoil-bench-") as folder:
        found = asyncio.run(measure(Path(folder), arguments.requests, arguments.rounds, endpoint))
    server.stop(0)
    for name, values in found.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        console.print(f"spans {name}: {median(values):.0f} us CPU a request ({spread}, {len(values)} rounds)")
    console.print(f"{collector.spans:,} spans were collected")
    console.print(f"{git_commit()}; {machine()}")


if __name__ == "__main__":
    main()
