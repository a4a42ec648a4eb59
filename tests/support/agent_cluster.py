"""One node as it runs in production: Redis, the simulated node and the power agent, each a process; real Tritons."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from power_agent.devices.node_client import NodeClient
from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.simulated_node import NodeRuntime
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from tests.support.ports import free_block, free_ports
from tests.support.redis_server import RedisServer
from tests.support.triton_process import ENVIRONMENT, MODELS, heldout, hosted
from trefoil.core.common import Revision
from trefoil.core.demand import SliceLoad, TableAck
from trefoil.core.device_types import A100_40GB, slice_type
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import DeviceState, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed
from trefoil.runtime import codec, rpc
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.state import State

NODE = "node0"


def key(kind: str, start: int = 0, gpu: int = 0) -> SliceKey:
    """A slice of the node."""
    return SliceKey(f"{NODE}/gpu{gpu}", kind, start, slice_type(A100_40GB, kind).memory_slices)


def planned(kind: str, start: int, version: int, gpu: int = 0) -> PlannedSlice:
    """A slice that serves one variant of the digits."""
    return PlannedSlice(key(kind, start, gpu), (hosted(version),), 2)


def node_plan(number: int, *parts: PlannedSlice, epoch: int = 1, gpus: int = 2) -> NodePlan:
    """A complete plan: devices without slices sleep."""
    devices = []
    for index in range(gpus):
        name = f"{NODE}/gpu{index}"
        own = tuple(part for part in parts if part.key.device == name)
        devices.append(PlannedDevice(name, DeviceState.AWAKE if own else DeviceState.ASLEEP, own))
    return sealed(NodePlan(node=NODE, devices=tuple(devices)), Revision(epoch, number))


class AgentCluster:
    """Start with `await start()`, end with `await close()`; nothing outlives it."""

    def __init__(self, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trefoil-agent-"))  # short: the node's socket lives in it
        self.redis = RedisServer()
        admin, self.metrics_port, *_ = free_ports(2)
        self.target = f"127.0.0.1:{admin}"
        self.port_base = free_block(32)
        self._settings = settings
        self._node: subprocess.Popen[bytes] | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        self.client = NodeClient(self.folder / "node" / "node.sock")
        self.state = State.connect(self.redis.url, "default", timeout_s=30.0)
        self._channel: grpc.aio.Channel | None = None
        self.tls: Tls | None = None  # of whoever calls the agent, where it has TLS
        self.acks: dict[int, TableAck] = {}

    async def start(self) -> None:
        """Node, then agent, until the agent answers. With the setting `node_socket=None` there is no simulated node."""
        if self._settings.get("node_socket", ...) is not None:
            self.start_node()
            await until(lambda: (self.folder / "node" / "node.sock").exists(), 60)
        await self.start_agent()

    def start_node(self) -> None:
        """The simulated node's process."""
        socket = self.folder / "node" / "node.sock"
        arguments = ["--node", NODE, "--socket", str(socket), "--set"]
        arguments.append(f"model_repository={self._settings.get('model_repository', MODELS)}")
        self._node = self._spawn("trefoil.simulated_node", arguments)

    async def start_agent(self) -> None:
        """The agent's process; returns when it serves."""
        settings = {
            "node": NODE,
            "zone": "test",
            "node_socket": self.folder / "node" / "node.sock",
            "redis_url": self.redis.url,
            "state_dir": self.folder / "agent",
            "model_repository": MODELS,
            "triton_environment": ENVIRONMENT,
            "triton_port_base": self.port_base,
            "admin_address": self.target,
            "metrics_address": f"127.0.0.1:{self.metrics_port}",
            **self._settings,
        }
        arguments = [
            part for name, value in settings.items() if value is not None for part in ("--set", f"{name}={value}")
        ]
        self.agent = self._spawn("power_agent", arguments)
        if self._channel is not None:
            await self._channel.close()
        self._channel = rpc.channel(self.target, tls=self.tls, name=NODE)
        self.stub = power_agent_pb2_grpc.PowerAgentStub(self._channel)
        await until(self._serves, 60)

    async def _serves(self) -> bool:
        assert self.agent is not None
        assert self.agent.poll() is None, (self.folder / "power_agent.log").read_text()[-3000:]
        try:
            await self.stub.GetNode(power_agent_pb2.GetNodeRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True

    def _spawn(self, module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdout=log, stderr=log, start_new_session=True
            )

    async def apply(self, plan: NodePlan) -> Any:
        """Send a plan; raises as the agent does."""
        return await rpc.call(self.stub.Apply, power_agent_pb2.ApplyRequest(plan=codec.to_proto(plan)), 20.0)

    async def node(self) -> NodeStatus:
        """What the agent says of its node."""
        answer = await self.stub.GetNode(power_agent_pb2.GetNodeRequest(), timeout=20)
        status: NodeStatus = codec.from_proto(answer.node)
        return status

    async def slices(self) -> dict[SliceKey, SliceStatus]:
        """All slices by key."""
        return {part.key: part for device in (await self.node()).devices for part in device.slices}

    async def ready(self, *keys: SliceKey, timeout_s: float = 60.0) -> float:
        """Wait until exactly these slices exist and are READY; returns the seconds it took."""
        started_s = time.monotonic()

        async def check() -> bool:
            found = await self.slices()
            return set(found) == set(keys) and all(part.state == SliceState.READY for part in found.values())

        await until(check, timeout_s, lambda: (self.folder / "power_agent.log").read_text()[-4000:])
        return time.monotonic() - started_s

    async def settled(self, plan: NodePlan, timeout_s: float = 60.0) -> float:
        """Wait until nothing is left to do for the plan."""
        started_s = time.monotonic()

        async def check() -> bool:
            return (await self.node()).applied == plan.revision

        await until(check, timeout_s, lambda: (self.folder / "power_agent.log").read_text()[-4000:])
        return time.monotonic() - started_s

    async def acknowledge(self, table: Revision, *loads: SliceLoad, worker: int = 0) -> None:
        """Be a dispatcher worker."""
        ack = TableAck("test", worker, table, loads, time.time())
        await self.state.put_unfenced(self.state.keys.ack("test", worker), ack)

    async def samples(self) -> list[EnergySample]:
        """The whole energy stream."""
        found: list[EnergySample] = []
        after = "0"
        while rows := await self.state.stream(self.state.keys.energy(NODE), EnergySample, after, 1000):
            found += [sample for _, sample in rows]
            after = rows[-1][0]
        return found

    def tritons(self) -> list[RunningTriton]:
        """Those that live."""
        return [one for one in NodeRuntime(self.client).list() if one.alive]

    def triton(self, part: SliceKey) -> psutil.Process:
        """The Triton process of a slice."""
        for one in self.tritons():
            if one.tag.startswith(f"{part.name}.g"):
                return psutil.Process(int(one.id))
        raise AssertionError(f"no Triton on {part.name}")

    def kill_agent(self) -> None:
        """As the kernel would."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything."""
        if self._channel is not None:
            await self._channel.close()
        for process in (self.agent, self._node):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self.agent, self._node):
            if process is not None:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        self.client.close()
        await self.state.close()
        self.redis.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Load:
    """A closed loop of clients on one Triton; every answer is checked for its size."""

    def __init__(self, target: str, clients: int = 2, gap_s: float = 0.0, family: str = "digits") -> None:
        self.answered, self._family = 0, family
        self.failed: list[str] = []
        self.versions: set[str] = set()
        self.last_success_s = 0.0
        self._channel = rpc.channel(target)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._gap_s = gap_s
        self._tasks = [asyncio.create_task(self._client(index)) for index in range(clients)]

    async def _client(self, index: int) -> None:
        images, _ = heldout()
        while True:
            request = service_pb2.ModelInferRequest(model_name=self._family)
            image = images[index % len(images)].astype(np.uint8)
            request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
            request.raw_input_contents.append(image.tobytes())
            try:
                reply = await self._stub.ModelInfer(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                self.failed.append(f"{error.code().name} {error.details()}")
                await asyncio.sleep(0.05)
            else:
                assert len(reply.raw_output_contents[0]) == 40
                self.answered += 1
                self.versions.add(reply.model_version)
                self.last_success_s = time.monotonic()
            if self._gap_s:
                await asyncio.sleep(self._gap_s)

    async def stop(self) -> None:
        """End the clients."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()


async def until(check: Callable[[], Any], timeout_s: float, report: Callable[[], str] = str) -> None:
    """Poll a condition, plain or async."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        result = check()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {report()}"
        await asyncio.sleep(0.05)
