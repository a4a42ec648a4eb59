"""A Triton that does as it is told: latency, errors and deaths on command. Answers tell which slice gave them.

In a test's own event loop: `async with FakeTriton(version=4) as slice_: ...`. As a process that can be killed:
`python -m tests.support.fake_triton --version 4 --latency-ms 5` prints its port.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.support.ports import free_ports
from trefoil.runtime.security.tls import Tls

SERVICE = "inference.GRPCInferenceService"
QUEUE_FULL = (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
DEAD_STUB = (grpc.StatusCode.INTERNAL, "Stub process 'digits_0_0' is not healthy.")
EXITING = (grpc.StatusCode.UNAVAILABLE, "Server exiting")
UNLOADED = (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'digits' has no available versions")
BACKEND = (grpc.StatusCode.INTERNAL, "in ensemble 'digits': a tensor went wrong")


class FakeTriton:
    """One model, one instance: requests execute one after another."""

    def __init__(
        self, version: int = 1, latency_s: float = 0.0, family: str = "digits", tls: Tls | None = None
    ) -> None:
        self.version = version
        self.tls = tls
        self.family = family
        self.latency_s = latency_s
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.error_delay_s = 0.0
        self.error_trailers: tuple[tuple[str, str], ...] = ()
        self.refuses: Callable[[Any], bool] = lambda _: True  # which requests end with the error
        self.ready = True
        self.requests: list[Any] = []
        self.deadlines_s: list[float | None] = []
        self.metadata: list[dict[str, Any]] = []
        self.executed = 0
        self.cancelled = 0
        self.port = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._one_at_a_time = asyncio.Lock()
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeTriton":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._methods()),))
        # One that stays its own while it is stopped: the kernel would lend one of its choice to somebody else.
        address = f"127.0.0.1:{port or self.port or free_ports(1)[0]}"
        if self.tls is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.tls.server_credentials())
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def _methods(self) -> dict[str, Any]:
        named = ("ServerLive", "ServerReady", "ModelReady", "ModelMetadata", "ModelConfig", "ModelInfer")
        return {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(self, name),
                request_deserializer=getattr(pb, f"{name}Request").FromString,
                response_serializer=getattr(pb, f"{name}Response").SerializeToString,
            )
            for name in named
        }

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return pb.ModelReadyResponse(ready=self.ready and request.name == self.family)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        answer = pb.ModelMetadataResponse(name=self.family, versions=[str(self.version)], platform="python")
        answer.inputs.add(name="IMAGE", datatype="UINT8", shape=[-1, 8, 8])
        answer.outputs.add(name="PROBABILITIES", datatype="FP32", shape=[-1, 10])
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        config = model_config_pb2.ModelConfig(name=self.family, backend="python", max_batch_size=8)
        config.version_policy.specific.versions.append(self.version)
        config.input.add(name="IMAGE", data_type=model_config_pb2.TYPE_UINT8, dims=[8, 8])
        config.output.add(name="PROBABILITIES", data_type=model_config_pb2.TYPE_FP32, dims=[10])
        config.default_model_filename = "model-of-one-variant.py"
        config.parameters["intra_op_thread_count"].string_value = "secret"
        return pb.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata() or ()))
        try:
            async with self._one_at_a_time:
                await self.gate.wait()
                if self.error is not None and self.refuses(request):
                    await asyncio.sleep(self.error_delay_s)
                    await context.abort(*self.error, self.error_trailers)
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.executed += 1
        return self._answer(request)

    def _answer(self, request: Any) -> Any:
        """One-hot at (first pixel of each image) mod 10: a value that a test can predict."""
        items = request.inputs[0].shape[0]
        first = np.frombuffer(request.raw_input_contents[0], np.uint8).reshape(items, -1)[:, 0] % 10
        answer = pb.ModelInferResponse(model_name=self.family, model_version=str(self.version), id=request.id)
        answer.outputs.add(name="PROBABILITIES", datatype="FP32", shape=[items, 10])
        answer.raw_output_contents.append(np.eye(10, dtype=np.float32)[first].tobytes())
        return answer


class FakeTritonProcess:
    """One in a process, which can be stopped and killed."""

    def __init__(self, version: int = 1, latency_ms: float = 2.0, port: int = 0) -> None:
        self.port, self.version = port, version
        self._flags = {"--version": version, "--latency-ms": latency_ms, "--port": port}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeTritonProcess":
        flags = [str(each) for pair in self._flags.items() for each in pair]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __spec__.name, *flags, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.port = int(await asyncio.wait_for(self._process.stdout.readline(), 60))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


async def _serve(version: int, latency_ms: float, port: int) -> None:
    fake = FakeTriton(version, latency_ms / 1e3)
    await fake.start(port)
    print(fake.port, flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(_serve(arguments.version, arguments.latency_ms, arguments.port)))
