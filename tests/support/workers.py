"""Real dispatcher processes with several workers each, and load that checks every answer."""

import asyncio
import contextlib
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from tests.support.ports import free_ports
from trefoil.runtime.clock import WallClock
from trefoil.runtime.proc import read_start_strings

CONTENT = 0x30  # a digit: FakeTriton answers with the class that the first pixel names
METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Dispatcher:
    """`python -m dispatcher`, as it is run, with `workers` processes behind one port."""

    def __init__(self, folder: Path, redis_url: str, cluster: str, workers: int, name: str, **more: Any) -> None:
        self.ports = free_ports(3)
        self.folder = folder / name
        self.folder.mkdir()
        self.config = self.folder / "dispatcher.toml"
        values = {
            "cluster": cluster, "redis_url": redis_url, "state_dir": str(self.folder),
            "inference_address": f"127.0.0.1:{self.ports[0]}", "admin_address": f"127.0.0.1:{self.ports[1]}",
            "metrics_address": f"127.0.0.1:{self.ports[2]}", "drain_s": 1.0, **more,
        }  # fmt: skip
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self.config.write_text("\n".join([f"workers = {workers}", *lines, ""]))
        self.rest_address: str = more.get("rest_address", "")
        self.process: asyncio.subprocess.Process | None = None
        self.log = (self.folder / "log").open("wb")

    @property
    def inference(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def admin_address(self) -> str:
        return f"127.0.0.1:{self.ports[1]}"

    async def start(self, *flags: str) -> None:
        argv = [sys.executable, "-m", "dispatcher", "--config", str(self.config), *flags]
        self.process = await asyncio.create_subprocess_exec(*argv, stdout=self.log, stderr=self.log)

    async def listening(self) -> None:
        """Clients are answered. The admin port is first, and alone a worker has all its credits by then."""
        async with grpc.aio.insecure_channel(self.inference) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                await stub.ServerLive(pb.ServerLiveRequest(), timeout=90, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:  # one that asks for a token listens too
                    raise

    async def serving(self, client: triton.InferenceServerClient) -> None:
        """Wait until a slice serves."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(InferenceServerException):
                    if await client.is_server_ready():
                        return
                await asyncio.sleep(0.05)

    async def ended(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Exit code and log of one that ends by itself."""
        assert self.process is not None
        try:
            async with asyncio.timeout(timeout_s):
                code = await self.process.wait()
        except TimeoutError:
            self.process.kill()
            raise
        finally:
            self.log.close()
        return code, (self.folder / "log").read_text()

    async def stop(self, patience_s: float = 30.0) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s):
                code = await self.process.wait()
            if code:
                print((self.folder / "log").read_text()[-8000:])
            return code
        except TimeoutError:
            self.process.kill()
            raise
        finally:
            self.log.close()

    def pids(self) -> dict[int, int]:
        """Process ids of the workers, by place."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = {}
        for child in children:
            words = read_start_strings(int(child), "cmdline").decode().split("\0")
            numbers = [int(word.removeprefix("worker=")) for word in words if word.startswith("worker=")]
            found.update({number % 1000: int(child) for number in numbers})
        return found

    def admin(self) -> Any:
        return dispatcher_pb2_grpc.DispatcherStub(grpc.aio.insecure_channel(self.admin_address))

    async def table(self) -> Any:
        async with grpc.aio.insecure_channel(self.admin_address) as channel:
            stub = dispatcher_pb2_grpc.DispatcherStub(channel)
            return await stub.GetTable(dispatcher_pb2.GetTableRequest(), timeout=20)

    async def until(self, condition: Any, timeout_s: float = 60.0) -> Any:
        """The first table of which the condition holds."""
        last: Any = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        if condition(last := await self.table()):
                            return last
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"still {last}\n{(self.folder / 'log').read_text()[-4000:]}") from None


@contextlib.asynccontextmanager
async def dispatcher(*args: Any, **more: Any) -> AsyncIterator[Dispatcher]:
    """Started, and stopped at the end, whatever happens."""
    one = Dispatcher(*args, **more)
    await one.start()
    try:
        await one.listening()
        yield one
    finally:
        await one.stop()


@dataclass
class Load:
    """Closed-loop clients, each with connections of its own; every answer must be that of its request."""

    address: str
    clients: int = 8
    pause_s: float = 0.0
    answered: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    failed_of: Counter[int] = field(default_factory=Counter)  # of each client
    failed_at_s: list[float] = field(default_factory=list)
    answered_at_s: list[float] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stop: bool = False

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        clock = WallClock()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
        turn = number
        async with grpc.aio.insecure_channel(self.address, options=options) as channel:
            infer = channel.unary_unary(
                METHOD,
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelInferResponse.FromString,
            )
            while not self._stop:
                turn += 1
                first = turn % 10
                try:
                    answer = await infer(ask(first, f"{number}-{turn}"), timeout=20)
                except grpc.aio.AioRpcError as error:
                    self.failed[f"{error.code().name} {error.details()}"] += 1
                    self.failed_of[number] += 1
                    self.failed_at_s.append(clock.monotonic_s())
                    continue
                self.answered += 1
                self.answered_at_s.append(clock.monotonic_s())
                self.wrong += answered(answer) != (first, f"{number}-{turn}")
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)


def ask(first: int, id_: str, **parameters: Any) -> Any:
    """A request whose answer is `first`."""
    request = pb.ModelInferRequest(model_name="digits", id=id_)
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
    request.raw_input_contents.append(bytes([first]) + bytes(63))
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def answered(answer: Any) -> tuple[int, str]:
    """What was answered, and to which request."""
    import numpy as np

    return int(np.frombuffer(answer.raw_output_contents[0], np.float32).argmax()), str(answer.id)
