"""Channel to an engine that speaks OpenAI's API: KServe's calls, as Triton's vLLM backend has them, made into its.

Where the engine makes embeddings, they are the calls of a family of embeddings.

An answer is passed on as it comes, each event as one response. Errors are `grpc.aio.AioRpcError`, as of an `H2Channel`.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from dispatcher.transport.calls import ConnectionDied, Leaving, Metadata, NotTaken, Parts, Trailers, call_error
from dispatcher.transport.core import kserve_wire
from dispatcher.transport.core.grpc_framing import JOIN
from trefoil.engine_api import EMBED, MESSAGES, AnswerPart, EngineClient, EngineError, EngineTarget, Kind
from trefoil.runtime.given.llm_backends import (
    ANSWER,
    DIMENSIONS,
    EMBEDDING,
    OPENAI,
    PROMPT,
    REASON,
    SAMPLING,
    TOKENS_IN,
    TOKENS_OUT,
    TOOL_CALLS,
    complete_embeddings,
    complete_vllm,
)
from trefoil.runtime.security.key_file import KeyFile

T = TypeVar("T")

ESTIMATED: Final = "trefoil_tokens_estimated"
"""Parameter of the last response where the engine counts no tokens: one was counted for each event."""
COUNTED: Final = "trefoil_tokens_counted"
"""Parameter of the last response where the engine counts fewer tokens than it sent events with text: its count."""
PROMPT_KEY: Final = "prompt"
DIMS_MAX: Final = 8  # of a shape that is looked at
REQUEST_BYTES_MAX: Final = 10 * 2**20
"""Of a request: twice the body that the REST port takes, whose prompt may stand in it twice."""
VALUES_MAX: Final = 2**16
"""Brackets and commas in SAMPLING, texts left out: each value is an object on the worker's loop."""
_TEXTS: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
CUT_S: Final = 1.0  # in which answers under way notice that their channel was closed
CODES: Final[Mapping[Kind, tuple[str, type[grpc.aio.AioRpcError]]]] = {
    "unreachable": ("UNAVAILABLE", NotTaken),
    "busy": ("RESOURCE_EXHAUSTED", grpc.aio.AioRpcError),
    "refused": ("INVALID_ARGUMENT", grpc.aio.AioRpcError),
    "cut": ("ABORTED", grpc.aio.AioRpcError),  # which casts no doubt on the engine: a probe would cut the next stream
    "lost": ("UNAVAILABLE", ConnectionDied),
    "silent": ("UNAVAILABLE", grpc.aio.AioRpcError),
    "fault": ("UNAVAILABLE", grpc.aio.AioRpcError),
}


class EngineChannel:
    """Channel to one engine, for one model. Belongs to one event loop."""

    def __init__(self, target: EngineTarget, key: KeyFile | None = None) -> None:
        self._target, self._config = target, _config("", target)
        self._client = EngineClient(key=key)
        self._under_way = set[asyncio.Future[None]]()
        self._waits = set[asyncio.Timeout]()
        self._closed = False

    async def unary(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> tuple[bytes, Trailers]:  # fmt: skip
        """Answer of what is asked about a server and its model; raises AioRpcError."""
        method, data = path.rpartition("/")[2], JOIN(parts)
        if method == "ModelMetadata":
            return _metadata(pb.ModelMetadataRequest.FromString(data).name, self._target).SerializeToString(), ()
        if method == "ModelConfig":
            config = _config(pb.ModelConfigRequest.FromString(data).name, self._target)
            return pb.ModelConfigResponse(config=config).SerializeToString(), ()
        if method == "ModelInfer":
            async with self._answering(leaving):
                return await self._until(self._embed(data), _ends_s(timeout_s)), ()
        self._refuse_closed()
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.alive(self._target)
        except EngineError as error:
            raise _status(error) from error
        except TimeoutError as error:
            raise call_error("DEADLINE_EXCEEDED", f"{self._target.base} said nothing within {timeout_s} s") from error
        ready = pb.ModelReadyResponse(ready=True) if method == "ModelReady" else pb.ServerLiveResponse(live=True)
        return ready.SerializeToString(), ()

    async def stream(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Answers to one request, the last one final; raises AioRpcError. Closing it cancels it at the engine at once,
        whatever the grace of `leaving`."""
        async with self._answering(leaving):
            (request, given), ends_s = _read(JOIN(parts), self._config), _ends_s(timeout_s)
            async with aclosing(self._client.stream(self._target, _asked(given))) as pieces:
                answer = _Answer(request, given)
                while (piece := await self._until(anext(pieces, None), ends_s)) is not None:
                    if data := answer.passed(piece):
                        yield data
                yield answer.last()

    @asynccontextmanager
    async def _answering(self, leaving: Leaving | None) -> AsyncIterator[None]:
        """One request under way: what it raises becomes AioRpcError; `leaving` hears of one that was left."""
        self._refuse_closed()
        done = asyncio.get_running_loop().create_future()
        self._under_way.add(done)
        left = leaving
        try:
            yield
            left = None
        except EngineError as error:
            left = None
            raise _status(error) from error
        except TimeoutError as error:
            left = None
            if self._closed:
                raise asyncio.CancelledError("its channel was closed") from error
            raise call_error("DEADLINE_EXCEEDED", "Deadline Exceeded") from error
        except grpc.aio.AioRpcError:
            left = None
            raise
        finally:
            self._under_way.discard(done)
            done.set_result(None)
            if left is not None:
                left.ended("")

    async def _embed(self, data: bytes) -> bytes:
        if self._target.task != EMBED:
            raise call_error("UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction policy")
        request, given = _read(data, self._config)
        sizes, texts = given.get(DIMENSIONS, []), given.get(PROMPT, [])
        if not texts or len(set(sizes)) > 1:
            differ = f"{len(texts)} texts, {DIMENSIONS} {sorted(set(sizes))[:DIMS_MAX]}"
            why = f"{differ}. Remedy: send at least one text, and one size for all"
            raise call_error("INVALID_ARGUMENT", why)
        found = await self._client.embed(self._target, texts, sizes[0] if sizes else None)
        answer, shape = pb.ModelInferResponse(id=request.id, model_name=request.model_name), found.numbers.shape
        answer.outputs.add(name=EMBEDDING, datatype="FP32", shape=shape)
        answer.raw_output_contents.append(found.numbers.astype("<f4").tobytes())
        if found.tokens_in is not None:  # of all texts together
            answer.outputs.add(name=TOKENS_IN, datatype="UINT32", shape=(shape[0], 1))
            count = min(found.tokens_in, 2**32 - 1).to_bytes(4, "little")
            answer.raw_output_contents.append(count.ljust(4 * shape[0], b"\0"))
        return bytes(answer.SerializeToString())

    async def close(self, grace_s: float | None = None) -> None:
        """Close it; answers under way may finish within the grace, and are then cancelled."""
        if grace_s and self._under_way:
            await asyncio.wait(self._under_way, timeout=grace_s)
        self._closed = True
        for wait in self._waits:
            wait.reschedule(0.0)
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=CUT_S)  # one that waits for its client ends when that continues
        await self._client.close()

    async def _until(self, awaited: Awaitable[T], ends_s: float | None) -> T:
        async with asyncio.timeout_at(0.0 if self._closed else ends_s) as wait:
            self._waits.add(wait)
            try:
                return await awaited
            finally:
                self._waits.discard(wait)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise call_error("CANCELLED", "Channel is closed.")


class _Answer:
    """One answer as responses of Triton's vLLM backend."""

    def __init__(self, request: Any, given: Mapping[str, list[Any]]) -> None:
        self._id, self._model = request.id, request.model_name
        self._streams = bool(_first(given, "stream"))
        echo = not self._streams and not _first(given, "exclude_input_in_output")
        self._held = str(_first(given, PROMPT) or "") if echo else ""
        self._reason, self._counted = "", 0
        self._calls, self._first_parts = list[Mapping[str, Any]](), dict[int, Mapping[str, Any]]()
        self._tokens: int | None = None
        self._prompt_tokens: int | None = None

    def passed(self, piece: AnswerPart) -> bytes:
        """Response that a piece is passed on as; empty where it is kept for the last one."""
        self._reason = piece.finish_reason or self._reason
        self._tokens = self._tokens if piece.tokens_out is None else piece.tokens_out
        self._prompt_tokens = self._prompt_tokens if piece.tokens_in is None else piece.tokens_in
        if not piece.text and not piece.calls:
            return b""
        self._calls += [_unrepeated(call, self._first_parts.setdefault(call["index"], call)) for call in piece.calls]
        if not self._streams:
            self._held += piece.text
            self._counted += 1
            return b""
        return self._response(piece.text, self._take(1), final=False)

    def last(self) -> bytes:
        """The last response, with the reason, and the tokens that were not counted with a piece."""
        uncounted = 0 if self._streams else self._counted
        self._counted = self._counted if self._streams else 0
        return self._response(self._held, self._take(uncounted), final=True)

    def _take(self, otherwise: int) -> int:
        """Tokens since the last response: by the engine's count so far, else so many."""
        count = otherwise if self._tokens is None else max(0, self._tokens - self._counted)
        self._counted += count
        return count

    def _response(self, text: str, tokens: int, *, final: bool) -> bytes:
        response = pb.ModelInferResponse(id=self._id, model_name=self._model)
        _add_text(response, ANSWER, text)
        _add_count(response, TOKENS_OUT, tokens)
        if self._prompt_tokens is not None:
            _add_count(response, TOKENS_IN, self._prompt_tokens)
        _add_text(response, REASON, self._reason if final else str(None))  # as vLLM's backend has it
        if self._calls:
            _add_text(response, TOOL_CALLS, json.dumps(self._calls, ensure_ascii=False))
            self._calls = []
        data = b""
        if final:
            data = kserve_wire.FINAL
            if self._tokens is None:
                data += kserve_wire.bool_parameter(ESTIMATED, True)
            elif self._tokens < self._counted:
                data += kserve_wire.int64_parameter(COUNTED, self._tokens)
        return kserve_wire.stream_answer(response.SerializeToString() + data)


def _unrepeated(call: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a call without what its first part had: llama.cpp's server repeats id and name with each piece."""
    if call is first:
        return call
    named = first["function"]
    new = {name: text for name, text in call["function"].items() if name == "arguments" or text != named.get(name)}
    return {name: value for name, value in call.items() if value != first.get(name)} | {
        "index": call["index"], "function": {"arguments": "", **new},
    }  # fmt: skip


def _add_text(response: Any, name: str, text: str) -> None:
    response.outputs.add(name=name, datatype="BYTES", shape=[1])
    data = text.encode("utf-8", "replace")
    response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)


def _add_count(response: Any, name: str, count: int) -> None:
    response.outputs.add(name=name, datatype="UINT32", shape=[1])
    response.raw_output_contents.append(min(count, 2**32 - 1).to_bytes(4, "little"))


def _read(data: bytes, config: Any) -> tuple[Any, dict[str, list[Any]]]:
    """A ModelInferRequest, and the elements of its inputs by name.

    Raises:
        grpc.aio.AioRpcError: it is none, or its inputs are not those of the contract.
    """
    if len(data) > REQUEST_BYTES_MAX:
        why = f"the request has {len(data)} bytes. Remedy: send at most {REQUEST_BYTES_MAX}"
        raise call_error("INVALID_ARGUMENT", why)
    try:
        request = pb.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise call_error("INVALID_ARGUMENT", f"no ModelInferRequest: {error}") from error
    kinds, found = {tensor.name: _kind(tensor) for tensor in config.input}, dict[str, list[Any]]()
    for at, tensor in enumerate(request.inputs):
        raw = request.raw_input_contents[at] if at < len(request.raw_input_contents) else None
        try:
            if tensor.datatype != kinds.get(tensor.name):
                raise ValueError(f"this family has {', '.join(f'{name} ({kind})' for name, kind in kinds.items())}")
            count, most = math.prod(tensor.shape[:DIMS_MAX]), config.max_batch_size
            if len(tensor.shape) > DIMS_MAX or not (0 if most else 1) <= count <= max(1, most):
                shape = list(tensor.shape[:DIMS_MAX])
                raise ValueError(f"elements of the shape {shape}: {f'at most {most} are' if most else 'one is'} taken")
            elements = _elements(tensor, raw, count)
        except ValueError as error:
            why = f"input {tensor.name} ({tensor.datatype}): {error}. Remedy: send it as ModelMetadata has it"
            raise call_error("INVALID_ARGUMENT", why) from error
        found[tensor.name] = elements
    return request, found


def _elements(tensor: Any, raw: bytes | None, count: int) -> list[Any]:
    """Elements of an input: texts, flags or INT32; of `count` that are wanted, so that more bytes cost nothing.

    Raises:
        ValueError: its bytes are not so many elements.
    """
    if raw is None:
        kept = {"BOOL": tensor.contents.bool_contents, "INT32": tensor.contents.int_contents}
        given = kept.get(tensor.datatype, tensor.contents.bytes_contents)
        if len(given) != count:
            raise ValueError(f"{len(given)} elements for the shape {list(tensor.shape)}")
        return [one.decode("utf-8", "replace") if isinstance(one, bytes) else one for one in given]
    if tensor.datatype in ("BOOL", "INT32"):
        kind = np.dtype("?" if tensor.datatype == "BOOL" else "<i4")
        if len(raw) != kind.itemsize * count:
            raise ValueError(f"{len(raw)} bytes for the shape {list(tensor.shape)}")
        return list(np.frombuffer(raw, kind).tolist())
    return _texts(raw, count)


def _texts(raw: bytes, count: int) -> list[str]:
    found, at = list[str](), 0
    for _ in range(count):
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "little")
        if at > len(raw) or begin > len(raw):
            raise ValueError(f"{len(raw)} bytes end within a text")
        found.append(raw[begin:at].decode("utf-8", "replace"))
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes follow {count} texts")
    return found


def _asked(given: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Parameters for the engine: what SAMPLING names, and the prompt where that has no messages.

    Raises:
        grpc.aio.AioRpcError: it is not a JSON object, asks for several choices, or there is no prompt.
    """
    text = _first(given, SAMPLING)
    try:
        if text and _values(text) > VALUES_MAX and _values(_TEXTS.sub("", text)) > VALUES_MAX:
            raise ValueError(f"it has more than {VALUES_MAX} values")
        found = json.loads(text) if text else {}
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        why = f'{SAMPLING} is not a JSON object: {error}. Remedy: send e.g. {{"max_tokens": 50}}'
        raise call_error("INVALID_ARGUMENT", why) from error
    if found.get("n", 1) != 1:
        raise call_error("INVALID_ARGUMENT", f"n = {found['n']!r}: an engine gives one choice. Remedy: send n = 1")
    if MESSAGES not in found and PROMPT not in given:
        raise call_error("INVALID_ARGUMENT", f"{PROMPT} is missing. Remedy: send one text")
    return found if MESSAGES in found else {**found, PROMPT_KEY: _first(given, PROMPT)}


def _values(text: str) -> int:
    return sum(map(text.count, "[{,"))


def _first(given: Mapping[str, list[Any]], name: str) -> Any:
    """Element of an input that has one; None where it is not given."""
    return given[name][0] if name in given else None


def _ends_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


def _config(model: str, target: EngineTarget) -> Any:
    config = model_config_pb2.ModelConfig(name=model, backend=OPENAI)
    if target.task == EMBED:
        complete_embeddings(config)
    else:
        complete_vllm(config)
        config.output.add(name=TOOL_CALLS, data_type=model_config_pb2.TYPE_STRING, dims=[-1])
    return config


def _metadata(model: str, target: EngineTarget) -> Any:
    config = _config(model, target)
    found, batch = pb.ModelMetadataResponse(name=model, platform=OPENAI), [-1] * bool(config.max_batch_size)
    for tensors, entries in ((config.input, found.inputs), (config.output, found.outputs)):
        for tensor in tensors:
            entries.add(name=tensor.name, datatype=_kind(tensor), shape=[*batch, *tensor.dims])
    return found


def _kind(tensor: Any) -> str:
    name = str(model_config_pb2.DataType.Name(tensor.data_type))
    return name.removeprefix("TYPE_").replace("STRING", "BYTES")


def _status(error: EngineError) -> grpc.aio.AioRpcError:
    code, kind = CODES[error.kind]
    return call_error(code, str(error), kind=kind)
