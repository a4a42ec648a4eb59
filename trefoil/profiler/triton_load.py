"""Drive one slice's Triton: closed loops for its service time and its ceiling, Poisson arrivals in between.

Service time = latency of one client that sends one batch after another: nothing ever waits. Ceiling = answers per
second when there is always another batch waiting. What is sent is the family's held-out items, else noise of its shape.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.random import Generator
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trefoil.core.errors import InvalidInput, SettingError, Unavailable
from trefoil.core.units import MS_PER_S
from trefoil.runtime import rpc
from trefoil.runtime.clock import Clock
from trefoil.runtime.given.repository_names import opened
from trefoil.runtime.security.tls import Tls

DATATYPES: Final = {
    "UINT8": np.uint8, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
IN_FLIGHT_MAX: Final = 256
ITEMS_BYTES_MAX: Final = 2**32
SPARE_CLIENTS: Final = 2  # of the saturating loop, beside one for each batch that runs: one waits, one is on its way
WARM_UP: Final = 3


@dataclass(slots=True)
class Window:
    """Latencies [ms] and failures of the batches between two moments of the wall clock [UTC s]."""

    starts_at_s: float
    ends_at_s: float
    batch: int
    latency_ms: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def batches_per_s(self) -> float:
        """Batches that were answered per second."""
        return len(self.latency_ms) / max(1e-9, self.ends_at_s - self.starts_at_s)

    @property
    def mean_ms(self) -> float:
        """Mean latency [ms]; asserts that there was an answer."""
        assert self.latency_ms
        return float(np.mean(self.latency_ms))

    def quantile_ms(self, q: float) -> float:
        """Quantile of latency [ms]; asserts that there was an answer."""
        assert self.latency_ms
        return float(np.quantile(self.latency_ms, q))


class TritonSlice:
    """Client of one slice's Triton that measures one model."""

    def __init__(
        self,
        target: str,
        model: str,
        clock: Clock,
        shapes: Mapping[str, Sequence[int]],
        items: Path,
        tls: Tls | None = None,
        name: str = "",
    ) -> None:
        """Over TLS its certificate has to name `name`, or the target's host."""
        self._channel = rpc.channel(target, tls=tls, name=name)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.target, self.model, self._clock = target, model, clock
        self._shapes, self._items = shapes, items

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def ready_versions(self) -> list[int]:
        """Versions of the model that are ready in Triton.

        Raises:
            Unavailable: nothing answers.
        """
        request = service_pb2.RepositoryIndexRequest(ready=True)
        try:
            index = await self._stub.RepositoryIndex(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(
                f"no Triton answers ({error.code().name})", field="triton", value=self.target,
                remedy="name host:port of its gRPC endpoint",
            ) from error  # fmt: skip
        return sorted(int(m.version) for m in index.models if m.name == self.model and m.version.isdigit())

    async def make_request(self, version: int, batch: int) -> Any:
        """Make a request of that many items, checked against what the model says it takes.

        Raises:
            InvalidInput: a shape is open, a type cannot be generated, or the model takes no such batch.
        """
        name, wanted = self.model, str(version)
        try:
            metadata = await self._stub.ModelMetadata(
                service_pb2.ModelMetadataRequest(name=name, version=wanted), timeout=5
            )
            config = await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=name, version=wanted), timeout=5)
        except grpc.aio.AioRpcError as error:
            raise InvalidInput(f"is not served ({error.details()})", field="version", value=version) from error
        max_batch = config.config.max_batch_size
        refuse_batch(name, batch, max_batch)
        request = service_pb2.ModelInferRequest(model_name=name, model_version=wanted)
        for index, tensor in enumerate(metadata.inputs):
            own = item_shape(tensor, self._shapes, batched=max_batch > 0)
            shape = [batch, *own] if max_batch > 0 else own
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
            request.raw_input_contents.append(self._content(tensor, shape, index == 0).tobytes())
        return request

    def _content(self, tensor: Any, shape: list[int], first: bool) -> Any:
        if first and self._items.is_file():
            with opened(self._items, None, ITEMS_BYTES_MAX) as file, np.load(file, allow_pickle=False) as data:
                images = data["images"] if "images" in data else np.zeros(0)
            if list(images.shape[1:]) == shape[1:] and len(images) >= shape[0]:
                return images[: shape[0]].astype(numpy_type(tensor))
        return made_up(tensor, shape)

    async def warm_up(self, request: Any) -> None:
        """Have a few requests answered that are not counted.

        Raises:
            Unavailable: the model fails; says what it said.
        """
        for _ in range(WARM_UP):
            try:
                await self._stub.ModelInfer(request, timeout=120)
            except grpc.aio.AioRpcError as error:
                raise Unavailable(
                    f"does not answer: {error.code().name} {error.details()}", field="model",
                    value=f"{request.model_name}/{request.model_version}", remedy="read its Triton's log",
                ) from error  # fmt: skip

    async def closed_loop(self, request: Any, batch: int, seconds: float, clients: int = 1) -> Window:
        """Run a closed loop: clients that each send as soon as they are answered, for so many seconds."""
        window = Window(self._clock.now_s(), 0.0, batch)
        end_s = self._clock.monotonic_s() + seconds

        async def client() -> None:
            while self._clock.monotonic_s() < end_s:
                await self._infer(request, window)

        await asyncio.gather(*(client() for _ in range(clients)))
        window.ends_at_s = self._clock.now_s()
        return window

    async def open_loop(self, request: Any, batch: int, seconds: float, per_s: float, rng: Generator) -> Window:
        """Run an open loop: Poisson arrivals, latency from the intended time; beyond IN_FLIGHT_MAX a request failed."""
        window = Window(self._clock.now_s(), 0.0, batch)
        start_s = self._clock.monotonic_s()
        tasks: set[asyncio.Task[None]] = set()
        at_s = float(rng.exponential(1.0 / per_s)) if per_s > 0 else seconds
        while at_s < seconds:
            await self._clock.sleep(max(0.0, start_s + at_s - self._clock.monotonic_s()))
            if len(tasks) < IN_FLIGHT_MAX:
                task = asyncio.create_task(self._infer(request, window, start_s + at_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            else:
                window.failed += 1
            at_s += float(rng.exponential(1.0 / per_s))
        await self._clock.sleep(max(0.0, start_s + seconds - self._clock.monotonic_s()))
        window.ends_at_s = self._clock.now_s()
        await asyncio.gather(*tasks)
        return window

    async def _infer(self, request: Any, window: Window, since_s: float | None = None) -> None:
        start_s = self._clock.monotonic_s() if since_s is None else since_s
        try:
            await self._stub.ModelInfer(request, timeout=60)
        except grpc.aio.AioRpcError:
            window.failed += 1
            await self._clock.sleep(0.01)
        else:
            window.latency_ms.append((self._clock.monotonic_s() - start_s) * MS_PER_S)


def item_shape(tensor: Any, shapes: Mapping[str, Sequence[int]], *, batched: bool) -> list[int]:
    """Shape of one item of an input as a model's metadata says it, or as `shapes` does, by name.

    Raises:
        SettingError: both leave it open.
    """
    declared = list(tensor.shape)[1:] if batched else list(tensor.shape)
    return closed_shape(tensor.name, declared, shapes)


def closed_shape(name: str, declared: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Shape of one item of an input: as `shapes` says it, else as it is declared.

    Raises:
        SettingError: both leave it open.
    """
    own = list(shapes.get(name, declared))
    if any(size < 1 for size in own):
        raise SettingError(
            f"its shape {list(declared)} is open", field="--shape", value=name,
            remedy=f"give --shape {name}=<sizes without the batch>",
        )  # fmt: skip
    return own


def refuse_batch(model: str, batch: int, max_batch: int) -> None:
    """Refuse a batch that a model does not take; 0: it takes items one by one.

    Raises:
        SettingError: it is larger.
    """
    if batch > max(1, max_batch):
        raise SettingError(
            f"{model} takes at most {max(1, max_batch)} items",
            field="--batches",
            value=batch,
            remedy="ask for smaller batches",
        )


def numpy_type(tensor: Any) -> Any:
    """Type of an input's elements.

    Raises:
        InvalidInput: of a type whose elements cannot be generated.
    """
    if tensor.datatype not in DATATYPES:
        raise InvalidInput(f"input of type {tensor.datatype} cannot be generated", field="input", value=tensor.name)
    return DATATYPES[tensor.datatype]


def made_up(tensor: Any, shape: Sequence[int]) -> Any:
    """Generated elements of an input: noise, and 0 or 1 where they are whole numbers. Equal each time."""
    kind, rng = numpy_type(tensor), np.random.default_rng(1)
    noise = rng.random(shape) if np.issubdtype(kind, np.floating) else rng.integers(0, 2, shape)
    return noise.astype(kind)
