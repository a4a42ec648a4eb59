"""The same arrivals at one slice, live by a client in an open loop and simulated: latencies to compare."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.engines import request_engine
from tests.unit.dispatcher.worlds import route
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import device_type
from trefoil.core.interference import INTERFERENCE
from trefoil.core.plan import PlannedSlice, Route, RouteTarget
from trefoil.runtime import rpc
from trefoil.runtime.repository import load_family
from trefoil.simulator.books.intervals import Counts
from trefoil.simulator.engines.engine import Flow
from trefoil.simulator.engines.hardware import true_service

DEVICE = "A100-SXM4-40GB"
TRANSPORT_MS = 1.5  # to Triton and back, and its Python stub, on an idle machine


async def open_loop_ms(target: str, at_s: Mapping[str, Counts]) -> dict[str, Counts]:
    """Latency of each request [ms], from the time at which it ought to be sent; any failure raises."""
    channel = rpc.channel(target)
    stub, begin_s = service_pb2_grpc.GRPCInferenceServiceStub(channel), time.monotonic() + 0.2

    async def one(family: str, due_s: float) -> float:
        await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))
        request = service_pb2.ModelInferRequest(model_name=family)
        request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
        request.raw_input_contents.append(bytes(64))
        await stub.ModelInfer(request, timeout=30)
        return (time.monotonic() - begin_s - due_s) * 1e3

    try:
        tasks = {family: [asyncio.create_task(one(family, at)) for at in at.tolist()] for family, at in at_s.items()}
        return {family: np.array(await asyncio.gather(*each)) for family, each in tasks.items()}
    finally:
        await channel.close()


def simulated_ms(
    repository: Path, part: PlannedSlice, at_s: Mapping[str, Counts], interference: float | None = INTERFERENCE
) -> dict[str, Counts]:
    """Latencies of the same arrivals at a simulated slice, of five draws of the service times."""
    read = [load_family(repository / hosted.family) for hosted in part.hosted]
    catalog = Catalog(tuple(family for family, _ in read), tuple(row for _, rows in read for row in rows))
    kind, shape = device_type(DEVICE), part.key.slice_type
    services = {h.family: {part.key: true_service(catalog, kind, shape, h, 1.0, 0.0)} for h in part.hosted}
    routes = {h.family: _route(part, h.family, h.variant) for h in part.hosted}
    flows = {family: Flow(None, 1e3) for family in at_s}  # type: ignore[arg-type]
    found: dict[str, list[Counts]] = {family: [] for family in at_s}
    for seed in range(5):
        rng = np.random.default_rng(seed)
        level = request_engine(routes, services, rng, flows, TRANSPORT_MS, shares=True, interference=interference)
        for family, window in level.windows(at_s, max(at[-1] for at in at_s.values()) + 60.0).items():
            found[family].append(window.latency_ms)
    return {family: np.concatenate(each) for family, each in found.items()}


def _route(part: PlannedSlice, family: str, variant: str) -> Route:
    return replace(route([RouteTarget(part.key, variant, 0, 1.0, 10**6)], "fifo", 10**6), family=family)
