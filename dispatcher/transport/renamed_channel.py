"""Channel to a Triton that already runs, where a family's model has another name: requests bear that name, answers that
of the family, and the version that stands for the variant.

Protobuf: of a field that occurs twice the last one counts, so names are appended; only streams are parsed, whose empty
final response bears no name.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.transport.calls import Leaving, Metadata, Parts, Trailers
from dispatcher.transport.core import kserve_wire
from dispatcher.transport.h2_channel import H2Channel
from trefoil.engine_api import TritonTarget

MODEL_METHODS: Final = ("ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig")
"""Methods whose requests have the model's name in field 1, its version in field 2."""


class RenamedChannel:
    """Channel to one model of a Triton that already runs. Belongs to one event loop."""

    def __init__(self, channel: H2Channel, target: TritonTarget) -> None:
        self._channel = channel
        self._asked = kserve_wire.model_suffix(target.model, "")
        self._answered = kserve_wire.model_suffix(target.family, str(target.version))

    async def unary(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> tuple[bytes, Trailers]:  # fmt: skip
        """Answer and trailers; raises AioRpcError."""
        method = path.rpartition("/")[2]
        parts = (*parts, self._asked) if method in MODEL_METHODS else parts
        data, trailers = await self._channel.unary(path, parts, timeout_s, metadata, leaving)
        return (data + self._answered if method == "ModelInfer" else data), trailers

    async def stream(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Answers to the one request of a stream; raises AioRpcError."""
        stream = self._channel.stream(path, (*parts, self._asked), timeout_s, metadata, leaving)
        async with aclosing(stream) as answers:
            async for data in answers:
                yield data + kserve_wire.stream_answer(self._answered) if _is_named(data) else data

    async def close(self, grace_s: float | None = None) -> None:
        """Close it; calls under way may finish within the grace."""
        await self._channel.close(grace_s)


def _is_named(data: bytes) -> bool:
    """Whether a ModelStreamInferResponse is a model's own; bytes that are not a message are left to the reader."""
    try:
        return bool(pb.ModelStreamInferResponse.FromString(data).infer_response.model_version)
    except DecodeError:
        return False
