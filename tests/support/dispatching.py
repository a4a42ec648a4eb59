"""A dispatcher in the test's event loop: real gRPC, real Redis, fake or real slices.

`dispatcher_system` builds one with its slices, their plan and a client; `dispatching` starts a dispatcher alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from dispatcher.fronts.admin import AllWorkers
from dispatcher.fronts.grpc.server import Fronts, InferenceComponent
from dispatcher.fronts.rest.server import RestComponent
from dispatcher.request.contracts import Contracts
from dispatcher.request.prober import Prober
from dispatcher.service.local_worker import LocalWorker
from dispatcher.service.metrics import DispatcherMetrics
from dispatcher.service.state_sync import StateSync
from dispatcher.settings import DispatcherSettings
from dispatcher.workers.peer_server import PeerServer
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import VERSIONS, node, plan, route, status, target
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Revision
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.fleet import NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import Plan, Route, RouteTarget
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

SERIES = Series("z", Method.AVERAGE, Factors.LIFECYCLE)
VARIANTS = {version: name for name, version in VERSIONS.items()}


class Plane:
    """What writes plans and statuses: stands in for the controller and the agents, with leases as they have."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._leases: dict[str, Any] = {}

    async def put(self, role: str, key: str, obj: Any) -> None:
        lease = self._leases.get(role)
        if lease is None or not self.state.holds(lease):
            lease = self._leases[role] = await self.state.acquire(role, "test", ttl_s=3600.0)
            assert lease is not None
        await self.state.put(lease, key, obj)

    async def plan(self, plan: Plan) -> None:
        await self.put("controller", self.state.keys.plan(), plan)

    async def node(self, node: NodeStatus, fresh: bool = True) -> None:
        if fresh:
            node = dataclasses.replace(node, observed_at_s=WallClock().now_s())
        await self.put(f"agent:{node.node}", self.state.keys.node(node.node), node)


class Running:
    """A dispatcher whose parts run until the context ends."""

    def __init__(self, settings: DispatcherSettings, state: State, name: str = "d1") -> None:
        self.settings = settings
        self.local = LocalWorker(settings, name, WallClock())
        self.contracts = Contracts(self.local)
        self.metrics = Metrics("dispatcher")
        self.loop = StateSync(self.local, state, DispatcherMetrics(self.local, self.metrics))
        self.prober = Prober(self.local, self.contracts)
        self.fronts = Fronts.build(self.local, self.contracts, self.metrics)
        self.siblings = AllWorkers(self.local, self.fronts.peers, self.metrics)
        self.peer_part = PeerServer(self.local, self.fronts.inference, self.siblings.answers(), self.loop)
        self.part = InferenceComponent(self.fronts)
        self.routes: dict[str, Any] = {}
        self.rest = RestComponent(self.fronts, routes=self.routes)
        self._started: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.part.port}"

    @property
    def rest_address(self) -> str:
        """Of settings that have one."""
        return f"127.0.0.1:{self.rest.port}"

    async def start(self) -> None:
        fronts = (self.fronts.access, self.part, self.rest)
        zones = self.fronts.inference.zones
        for part in (self.peer_part, self.loop, self.fronts.peers, zones, self.prober, self.local.lengths, *fronts):
            await part.init()
            self._started.append(part)
            self._tasks.append(asyncio.create_task(part.run()))

    async def stop(self) -> None:
        for part, task in reversed(list(zip(self._started, self._tasks, strict=True))):
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
            await part.shutdown()


@contextlib.asynccontextmanager
async def dispatching(state: State, folder: Path, **settings: Any) -> AsyncIterator[Running]:
    chosen = {"drain_s": 0.0, "stop_grace_s": 0.2, "window_s": 0.1, "ack_s": 0.5, **settings}
    running = Running(
        DispatcherSettings(state_dir=folder, inference_address="127.0.0.1:0", metrics_address="", **chosen), state
    )
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


class Slice(Protocol):
    """A slice of the digits that a context starts and stops: `FakeTriton`, or one in a process."""

    version: int

    @property
    def target(self) -> str: ...
    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *_: object) -> None: ...


class DispatcherSystem:
    """A dispatcher, the slices that it knows of by Redis, a client of its gRPC front."""

    def __init__(self, running: Running, state: State, slices: Sequence[Any] = ()) -> None:
        self.running, self.plane, self.slices = running, Plane(state), list(slices)
        self.number = 0
        """Of the last plan."""

    @property
    def local(self) -> LocalWorker:
        return self.running.local

    @property
    def slice(self) -> Any:
        """The first slice."""
        return self.slices[0]

    @property
    def address(self) -> str:
        return self.running.address

    @property
    def queue(self) -> Any:
        """Of the digits."""
        return self.local.routing.queues["digits"]

    @property
    def live(self) -> list[SliceKey]:
        """Slices of the digits that get new requests."""
        return [each.slice for each in self.local.routing.table.live("digits")]

    @functools.cached_property
    def client(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(self.address)

    @functools.cached_property
    def stub(self) -> Any:
        """Of the service, for requests of which a test looks at the call."""
        self._channel = grpc.aio.insecure_channel(self.address)
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        """The client's connections."""
        if "client" in self.__dict__:
            await self.client.close()
        if "stub" in self.__dict__:
            await self._channel.close()

    async def infer(self, first: int = 3, items: int = 1, **more: Any) -> Any:
        return await self.client.infer("digits", [image(first, items)], **more)

    # --- what Redis tells the dispatcher ------------------------------------------------------------------------------

    def statuses(self, states: Sequence[SliceState] = (), **changes: Any) -> list[SliceStatus]:
        """As the agent publishes the slices: READY, if `states` (by slice) do not say otherwise."""
        reported = []
        for n, one in enumerate(self.slices):
            state = states[n] if states else SliceState.READY
            known = status(n, one.target, state, VARIANTS[one.version])
            reported.append(dataclasses.replace(known, **changes))
        return reported

    def targets(self, weights: Sequence[float] = (), credits: int = 2) -> list[RouteTarget]:
        """Of all slices, in equal shares if `weights` do not say otherwise."""
        shares = weights or [1 / len(self.slices)] * len(self.slices)
        return [
            target(n, VARIANTS[one.version], share, credits)
            for n, (one, share) in enumerate(zip(self.slices, shares, strict=True))
        ]

    async def serve(
        self,
        weights: Sequence[float] = (),
        states: Sequence[SliceState] = (),
        credits: int = 2,
        *,
        targets: Sequence[RouteTarget] = (),
        number: int = 0,
        slo_ms: float = 200.0,
        fresh: bool = True,
        **route_settings: Any,
    ) -> None:
        """Publish the slices and one route over them; wait until the dispatcher goes by both.

        `number`: of the plan; 0: the next. `fresh`: the node's status is one of now. `route_settings`: as `route` has.
        """
        routes = [route(targets or self.targets(weights, credits), **route_settings)]
        await self.publish(node(self.statuses(states)), routes, number, slo_ms, fresh)

    async def publish(
        self, nodes: NodeStatus, routes: Sequence[Route], number: int = 0, slo_ms: float = 200.0, fresh: bool = True
    ) -> None:
        """As `serve`, of any slices and families."""
        self.number = number or self.number + 1
        states = {each.key: each.state for device in nodes.devices for each in device.slices}
        await self.plane.node(nodes, fresh)
        await self.plane.plan(plan(routes, self.number, slo_ms=slo_ms))
        routing = self.local.routing

        def live(family: str) -> int:
            return sum(len(routing.table.live(model)) for model in routing.table.chains.get(family, ()))

        def taken() -> bool:
            return (
                routing.table.revision == Revision(1, self.number, 0)
                and nodes.node in routing.nodes
                and states == {each.key: each.state for d in routing.nodes[nodes.node].devices for each in d.slices}
                and all(live(each.family) >= _serving(each, states) for each in routes)
            )

        await until(taken)

    async def rates(self, *rates: ReceiptRate, age_s: float = 0.0) -> None:
        """Publish what requests cost; wait until the dispatcher prices by it."""
        published = ReceiptRates(rates, WallClock().now_s() - age_s, SERIES, 1.2, Revision(1, 1))
        await self.plane.put("controller", self.plane.state.keys.receipts(), published)
        receipts = self.local.accounting.receipts
        await until(lambda: all(receipts.rate(r.slice, r.family, r.variant) == r for r in rates))

    async def carbon(self, intensity_g_per_kwh: float = 360.0, age_s: float = 0.0) -> None:
        """Publish a reading of `age_s` seconds ago."""
        at_s = WallClock().now_s() - age_s
        reading = CarbonReading(SERIES, at_s, at_s + 60.0, intensity_g_per_kwh, Quality.MEASURED, observed_at_s=at_s)
        await self.plane.put("feed:z", self.plane.state.keys.carbon_now(SERIES), reading)

    async def http(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one HTTP/1.1 request to the REST front; `_` in a header's name stands for `-`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.running.rest.port)
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        first, *others = head.decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in others)}
        return int(first.split()[1]), fields, rest


def _serving(route: Route, states: dict[SliceKey, SliceState]) -> int:
    """How many slices of a route get new requests."""
    shares = [each.slice for each in route.targets if each.weight > 0 and not each.draining]
    return sum(states.get(key) is SliceState.READY for key in shares)


@contextlib.asynccontextmanager
async def dispatcher_system(
    state: State, folder: Path, *slices: Slice, serve: bool = True, credits: int = 2, **settings: Any
) -> AsyncIterator[DispatcherSystem]:
    """Start the slices and a dispatcher with these settings; `serve`: publish them and a plan in equal shares."""
    async with contextlib.AsyncExitStack() as stack:
        started = [await stack.enter_async_context(one) for one in slices]
        running = await stack.enter_async_context(dispatching(state, folder, **settings))
        system = DispatcherSystem(running, state, started)
        stack.push_async_callback(system.close)
        if serve:
            await system.serve(credits=credits)
        yield system


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value of a condition of this process."""
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


async def stop_idle(running: Running, key: SliceKey, slice_: FakeTriton) -> None:
    """Stop a slice that has nothing to do, and wait until its dispatcher can know.

    A request that is sent before is lost with the connection; one that is sent after certainly reaches nobody.
    """
    channel = running.local.routing.connections.connection(key).channel
    await until(lambda: channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY)
    await slice_.stop()
    await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)


def image(first: int = 0, items: int = 1) -> Any:
    """Images whose first pixel says what a fake slice answers."""
    made = np.zeros((items, 8, 8), np.uint8)
    made[:, 0, 0] = first
    tensor = triton.InferInput("IMAGE", list(made.shape), "UINT8")
    tensor.set_data_from_numpy(made)
    return tensor


def request(first: int = 0, items: int = 1) -> pb.ModelInferRequest:
    """As `image`, for a stub."""
    made = pb.ModelInferRequest(model_name="digits", id="x")
    made.inputs.add(name="IMAGE", datatype="UINT8", shape=[items, 8, 8])
    made.raw_input_contents.append(bytes([first]) + bytes(items * 64 - 1))
    return made


def percents(counts: Sequence[int]) -> list[float]:
    total = sum(counts) or 1
    return [count / total for count in counts]
