"""A dispatcher of one's own, in the test's event loop: real gRPC, real Redis, fake or real slices."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton

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
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.plan import Plan
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics


class Plane:
    """What writes plans and statuses: stands in for the controller and the agents, with leases as they have."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._leases: dict[str, Any] = {}

    async def put(self, role: str, key: str, obj: Any) -> None:
        lease = self._leases.get(role)
        if lease is None or not self.state.holds(lease):
            lease = self._leases[role] = await self.state.acquire(role, "test", ttl_s=300.0)
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
        self.rest = RestComponent(self.fronts)
        self._started: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        assert self.part.server is not None
        return f"127.0.0.1:{self.part.server.port}"

    @property
    def rest_address(self) -> str:
        """Of settings that have one."""
        return f"127.0.0.1:{self.rest.port}"

    async def start(self) -> None:
        fronts = (self.fronts.access, self.part, self.rest)
        for part in (self.peer_part, self.loop, self.fronts.peers, self.prober, self.local.lengths, *fronts):
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


def percents(counts: Sequence[int]) -> list[float]:
    total = sum(counts) or 1
    return [count / total for count in counts]
