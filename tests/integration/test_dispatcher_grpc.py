"""gRPC of the dispatcher against grpc.aio: its server and its channel do as those of grpc.aio do, with the same peers.

Requests are drawn by number from a seed: GRPC_REQUESTS says how many, GRPC_SEED which.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection as grpc_reflection
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.grpc.health import ServerHealth
from dispatcher.fronts.grpc.server import handlers
from dispatcher.transport.accepting import listen
from dispatcher.transport.core.trace_context import NO_TRACE
from dispatcher.transport.h2 import ConnectionLimits, Held
from dispatcher.transport.h2_channel import H2Channel
from dispatcher.transport.h2_server import H2Server, Routes, ServerBounds
from tests.support.aio_channel import AioChannel
from tests.support.dispatching import Plane, Running, dispatching, until
from tests.support.ports import free_ports
from tests.support.wire_fields import repeated_messages
from tests.unit.dispatcher.worlds import node, plan, status, target
from trefoil.core.fleet import Hosted
from trefoil.core.plan import Route
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration
COUNT = int(os.environ.get("GRPC_REQUESTS", 300))
SEED = int(os.environ.get("GRPC_SEED", 1))
SERVICE = "inference.GRPCInferenceService"
FAMILIES = ("digits", "moody", "repeat", "late", "turns")
"""One slice each: well; erring; decoupled; too slow for its deadlines; with sequences."""
TOKEN = "open sesame"
KNOWS = ("authorization", f"Bearer {TOKEN}")
MESSAGE_BYTES_MAX = 8 * 2**20
NEVER_S = 30
BOUNDS = {
    "message_bytes_max": MESSAGE_BYTES_MAX, "head_bytes_max": 2**20, "ack_s": 5.0, "window_s": 5.0, "idle_probe_s": 0.0,
    "hang_quiet_s": 600.0, "late_strikes": 10**6, "fault_strikes": 10**6,
}  # fmt: skip
ASKED_OF_SLICES = ("ServerReady", "ModelReady", "ModelMetadata", "ModelConfig")
NOT_OFFERED = (
    "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
    "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "TraceSetting", "LogSettings",
)  # fmt: skip
TEXTS = (
    "", "went wrong", "100% of it, %25 and %", "née ☃ 🙂", "two\nlines\tand\ttabs\r\n", 'a "quote" and \\',
    "\x7f\x01\x00 controls", "x" * 700, "ü" * 700, "Exceeds maximum queue size", "Request timeout expired",
)  # fmt: skip


# The slices


class Mimic:
    """All slices: each answers with what it heard, or as the request's own parameter `act` (JSON) tells it."""

    async def __aenter__(self) -> "Mimic":
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(self, name),
                request_deserializer=getattr(pb, f"{name}Request").FromString,
                response_serializer=getattr(pb, f"{name}Response").SerializeToString,
            )
            for name in ASKED_OF_SLICES
        }
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self.infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self.stream)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        (port,) = free_ports(1)
        self.target = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return pb.ModelReadyResponse(ready=True)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        answer = pb.ModelMetadataResponse(name=request.name, versions=["4"], platform="python")
        answer.inputs.add(name="IMAGE", datatype="UINT8", shape=[-1, 64])
        answer.outputs.add(name="HEARD", datatype="UINT8", shape=[-1])
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        config = model_config_pb2.ModelConfig(name=request.name, backend="python", max_batch_size=8)
        config.input.add(name="IMAGE", data_type=model_config_pb2.TYPE_UINT8, dims=[64])
        config.output.add(name="HEARD", data_type=model_config_pb2.TYPE_UINT8, dims=[-1])
        config.model_transaction_policy.decoupled = request.name == "repeat"
        if request.name == "turns":
            config.sequence_batching.max_sequence_idle_microseconds = 600 * 10**6
        return pb.ModelConfigResponse(config=config)

    async def infer(self, data: bytes, context: Any) -> bytes:
        request, act = heard(data)
        await self._do(act, context)
        if "junk" in act:
            return bytes.fromhex(act["junk"])
        return told(request, act.get("bytes", 0)).SerializeToString()

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            request, act = heard(data)
            for number in range(act.get("count", 1)):
                answer = told(request, act.get("bytes", 0))
                answer.parameters["number"].int64_param = number
                yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
            await self._do(act, context)
            if "junk" in act:
                yield bytes.fromhex(act["junk"])
            last = pb.ModelInferResponse(id=request.id)
            if "error" in act:
                last.model_name = request.model_name
            last.parameters["triton_final_response"].bool_param = True
            answer = pb.ModelStreamInferResponse(error_message=act.get("error", ""), infer_response=last)
            yield answer.SerializeToString()

    @staticmethod
    async def _do(act: dict[str, Any], context: Any) -> None:
        await asyncio.sleep(act.get("sleep_s", 0))
        trailers = [
            (name, bytes.fromhex(text) if name.endswith("-bin") else text) for name, text in act.get("tell", [])
        ]
        if "code" in act:
            await context.abort(grpc.StatusCode[act["code"]], act["details"], tuple(trailers))
        elif trailers:
            context.set_trailing_metadata(tuple(trailers))


def heard(data: bytes) -> tuple[Any, dict[str, Any]]:
    """The request, without what counts down to its deadline, and what it wants its slice to do."""
    request = pb.ModelInferRequest.FromString(data)
    request.parameters.pop("timeout", None)
    act = request.parameters["act"].string_param if "act" in request.parameters else ""
    return request, json.loads(act or "{}")


def told(request: Any, more_bytes: int) -> Any:
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version="4", id=request.id)
    raw = hashlib.sha256(request.SerializeToString(deterministic=True)).digest() + bytes(more_bytes)
    answer.outputs.add(name="HEARD", datatype="UINT8", shape=[1, len(raw)])
    answer.raw_output_contents.append(raw)
    return answer


UNARY = (f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ServerLive", f"/{SERVICE}/LogSettings", "/grpc.health.v1.Health/Check")


# What is asked


@dataclass(frozen=True)
class Ask:
    """One call. `how`: "unary"; "stream", where the next message waits for so many `answers` to the one before; "one",
    a stream for one message, which alone may be refused while it is sent (grpc.aio's client takes that for an error of
    its own, or not, by chance); "watch", of which so many `answers` are read. `alone`: it changes what others are told.
    """

    kind: str
    path: str
    messages: tuple[bytes, ...]
    how: str = "unary"
    answers: tuple[int, ...] = ()
    timeout_s: float | None = None
    metadata: tuple[tuple[str, Any], ...] = ()
    compression: Any = None
    alone: bool = False

    def __str__(self) -> str:
        sizes = [len(each) for each in self.messages]
        more = f"timeout {self.timeout_s}, metadata {shown(self.metadata)}, compression {self.compression}"
        return f"{self.kind!r}: {self.how} {self.path} with messages of {sizes} bytes, {more}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:300]}...{text[-60:]} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def method(name: str) -> str:
    return f"/{SERVICE}/{name}"


def request(draw: random.Random, family: str = "digits", size: int | None = None, **act: Any) -> Any:
    """A right one; `act` is what its slice shall do."""
    items = draw.randint(1, 8)
    size = 64 * items if size is None else size
    made = pb.ModelInferRequest(model_name=family, id=f"{draw.getrandbits(32):x}" if draw.random() < 0.8 else "")
    made.model_version = draw.choice(("", "", "1"))
    made.inputs.add(name="IMAGE", datatype="UINT8", shape=[items, size // items])
    made.raw_input_contents.append(draw.randbytes(min(size, 4096)) + bytes(max(0, size - 4096)))
    if draw.random() < 0.3:
        made.outputs.add(name="HEARD").parameters["classification"].int64_param = 3
    if act:
        made.parameters["act"].string_param = json.dumps(act)
    return made


def infer(kind: str, message: Any, **more: Any) -> Ask:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return Ask(kind, method("ModelInfer"), (data,), **more)


def right(draw: random.Random) -> Ask:
    size = None if draw.random() < 0.8 else int(2 ** draw.uniform(0, 17))
    return infer("right", request(draw, size=size))


def large(draw: random.Random) -> Ask:
    size, answer = draw.choice(((6 * 2**20, 0), (2**20 + 1, 0), (300_000, 5 * 2**20), (0, 2**20), (16384, 16384)))
    return infer("large", request(draw, size=size, bytes=answer))


def too_large(draw: random.Random) -> Ask:
    """By their size as they come, or once they are decompressed."""
    message = request(draw, size=MESSAGE_BYTES_MAX + draw.choice((-1000, 0, 10**6, 3 * 10**6)))
    return infer("too large", message, compression=draw.choice((None, grpc.Compression.Gzip)))


def bomb(draw: random.Random) -> Ask:
    made = request(draw, size=64)
    made.raw_input_contents[0] = bytes(20 * 2**20)
    return infer("bomb", made, compression=draw.choice((grpc.Compression.Gzip, grpc.Compression.Deflate)))


def no_message(draw: random.Random) -> Ask:
    good = request(draw).SerializeToString()
    cut = good[: draw.randrange(len(good))]
    return infer("no message", draw.choice((b"", b"\xff", b"\x00" * 5, draw.randbytes(40), good + b"\x0b", cut)))


def wrong(draw: random.Random) -> Ask:
    return infer("wrong", spoilt(draw, request(draw)))


def spoilt(draw: random.Random, made: Any) -> Any:
    tensor = made.inputs[0]
    long = "n" * draw.choice((1024, 1025, 100_000))
    what = draw.randrange(13)
    if what == 0:
        made.model_name = draw.choice(("", "nobody", "née", "\0", "n" * 3000, "digits ", "%41"))
    elif what == 1:
        made.model_version = draw.choice(("2", "-1", "1.0", "x" * 2000, "é"))
    elif what == 2:
        made.id = long
    elif what == 3:
        tensor.name = long
    elif what == 4:
        tensor.datatype = draw.choice((long, "", "FP99", "uint8"))
    elif what == 5:
        tensor.shape[:] = draw.choice(([], [0, 0], [-1, 64], [2**62, 8], [1] * 65, [-(2**63)], [2**20, 1]))
    elif what == 6:
        tensor.parameters["shared_memory_region"].string_param = "mine"
    elif what == 7:
        made.outputs.add(name=draw.choice((long, "NOTHING"))).parameters["shared_memory_region"].string_param = "mine"
    elif what == 8:
        for number in range(draw.choice((100, 4097))):
            made.parameters[f"p{number}"].int64_param = number
    elif what == 9:
        made.ClearField("inputs")
    elif what == 10:
        made.ClearField("raw_input_contents")
        tensor.contents.uint_contents.extend(range(64))
    elif what == 11:
        tensor.contents.bytes_contents.append(bytes(draw.choice((10, 2**20 + 1))))
    else:
        made.parameters[long].bool_param = True
    return made


def knobs(draw: random.Random) -> Ask:
    made = request(draw)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(
            (
                "trefoil_class", "trefoil_min_accuracy", "trefoil_slo_ms", "trefoil_receipt", "trefoil_nothing",
                "priority", "sequence_id", "sequence_start", "timeout", "other",
            )
        )  # fmt: skip
        parameter = made.parameters[name]
        kind = draw.randrange(6)
        if kind == 0:
            parameter.string_param = draw.choice(("", "gold", "0.9", "true", "née", "x" * 65, "a\nb", "-1", "nan"))
        elif kind == 1:
            parameter.double_param = draw.choice((0.0, 0.5, 0.9, 0.999, 1.0, 2.0, -1.0, 1e308, float("inf")))
        elif kind == 2:
            parameter.bool_param = draw.random() < 0.5
        elif kind == 3:
            parameter.int64_param = draw.choice((0, 1, 1, -5, 60_000_000, 2**62))
        elif kind == 4:
            parameter.uint64_param = draw.choice((0, 1, 2**64 - 1))
    return infer("knobs", made)


def deadline(draw: random.Random) -> Ask:
    """One that certainly passes."""
    made = request(draw, "late", sleep_s=30)
    return infer("deadline", made, timeout_s=draw.choice((0, 1e-9, 1e-4, 0.02, 0.05)))


def timeout(draw: random.Random) -> Ask:
    made = request(draw)
    made.parameters["timeout"].int64_param = 1
    return infer("timeout", made)


def trailers(draw: random.Random) -> list[tuple[str, str]]:
    """As an act has them."""
    names = ("x-note", "x-note", "x-bytes-bin", "x-bytes-bin", "grpc-status-details-bin", "retry-after", "x_1.a")
    found = []
    for name in draw.sample(names, draw.randint(0, 3)):
        texts = ("", "a note", "a,b", "%20", "~" * 500)
        found.append((name, draw.randbytes(draw.randrange(40)).hex() if name.endswith("-bin") else draw.choice(texts)))
    return found


def erring(draw: random.Random) -> dict[str, Any]:
    """An act that answers with a status, junk, or trailers alone."""
    tell = trailers(draw)
    what = draw.random()
    if what < 0.15:
        return {"junk": draw.choice((b"\xff", b"\x0b", draw.randbytes(30), b"\x12\x03")).hex()}
    if what < 0.35:
        return {"tell": tell}
    codes = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    code, details = draw.choice(codes), draw.choice(TEXTS)
    if code == "UNAVAILABLE" and draw.random() < 0.8:
        details = "Exceeds maximum queue size"  # others eject the slice, which takes its time to come back
    return {"code": code, "details": details, "tell": tell}


def moody(draw: random.Random) -> Ask:
    act = erring(draw)
    return infer("moody", request(draw, "moody", **act), alone=True)


def unreachable(draw: random.Random) -> Ask:
    """What a slice has certainly not taken is tried again."""
    act = {"code": "UNAVAILABLE", "details": draw.choice(("Server exiting", "shutting down", "Socket closed"))}
    return infer("unreachable", request(draw, "moody", **act), alone=True)


def sequence(draw: random.Random) -> Ask:
    return infer("sequence", in_sequence(draw), alone=True)


def in_sequence(draw: random.Random) -> Any:
    made = request(draw, "turns")
    made.parameters["sequence_id"].int64_param = draw.randint(1, 4)
    made.parameters["sequence_start"].bool_param = draw.random() < 0.4
    made.parameters["sequence_end"].bool_param = draw.random() < 0.2
    return made


def kserve(draw: random.Random) -> Ask:
    named = {"name": draw.choice(("digits", "digits", "repeat", "nobody", ""))}
    named["version"] = draw.choice(("", "", "1", "2"))
    name, fields = draw.choice(
        (
            ("ServerLive", {}), ("ServerReady", {}), ("ServerMetadata", {}), ("ModelReady", named),
            ("ModelMetadata", named), ("ModelConfig", named), ("ModelStatistics", named),
            ("RepositoryIndex", {"ready": draw.random() < 0.5}), ("SystemSharedMemoryStatus", {}),
            ("CudaSharedMemoryStatus", {}), *((each, {}) for each in NOT_OFFERED),
        )
    )  # fmt: skip
    data = getattr(pb, f"{name}Request")(**fields).SerializeToString()
    return Ask(f"kserve {name}", method(name), (data,), alone=name == "ModelStatistics")


def kserve_junk(draw: random.Random) -> Ask:
    name = draw.choice(("ServerLive", "ModelReady", "ModelConfig", "RepositoryIndex", "LogSettings"))
    return Ask(f"junk for {name}", method(name), (draw.choice((b"\xff", draw.randbytes(30), b"\x0a\x05a", b"")),))


def unknown(draw: random.Random) -> Ask:
    path = draw.choice((method("Nothing"), "/no.Service/Nothing", "/", "//", f"/{SERVICE}", f"{method('ModelInfer')}/"))
    return Ask("unknown method", path, (b"some bytes",), draw.choice(("unary", "one")))


def other_shape(draw: random.Random) -> Ask:
    """A stream called as if it were unary, and the other way round."""
    if draw.random() < 0.4:
        return Ask("stream called as unary", method("ModelStreamInfer"), (request(draw).SerializeToString(),))
    path = draw.choice(UNARY)
    data = request(draw).SerializeToString() if path == method("ModelInfer") else b""
    return Ask("unary called as stream", path, (data,), "stream")


def health(draw: random.Random) -> Ask:
    name = draw.choice(("", SERVICE, "grpc.health.v1.Health", "nobody", "née"))
    data = health_pb2.HealthCheckRequest(service=name).SerializeToString()
    if draw.random() < 0.3:
        return Ask("watch", "/grpc.health.v1.Health/Watch", (data,), "watch", (1,))
    return Ask("health", "/grpc.health.v1.Health/Check", (draw.choice((data, data, data, b"\xff")),))


def reflection(draw: random.Random) -> Ask:
    asked = reflection_pb2.ServerReflectionRequest
    some = (
        asked(list_services=""), asked(file_containing_symbol="grpc.health.v1.Health"), asked(host="x"),
        asked(file_by_filename="grpc_service.proto"), asked(file_by_filename="nothing.proto"),
        asked(file_containing_symbol=SERVICE), asked(all_extension_numbers_of_type="inference.ModelInferRequest"),
    )  # fmt: skip
    messages = tuple(draw.choice(some).SerializeToString() for _ in range(draw.randint(0, 3)))
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    if draw.random() < 0.1:
        return Ask("reflection of junk", path, (b"\xff",), "one")
    return Ask("reflection", path, messages, "stream")


def in_stream(draw: random.Random) -> bytes:
    """A message of a stream of ordinary families."""
    what = draw.random()
    if what < 0.6:
        return request(draw).SerializeToString()
    if what < 0.8:
        return spoilt(draw, request(draw)).SerializeToString()
    if what < 0.9:
        return no_message(draw).messages[0]
    return in_sequence(draw).SerializeToString()


def stream(draw: random.Random) -> Ask:
    messages = tuple(in_stream(draw) for _ in range(draw.choice((0, 1, 2, 5, 12))))
    metadata = draw.choice(((), (), (("triton_grpc_error", "false"),), (("triton_grpc_error", "TRUE"),)))
    return Ask("stream", method("ModelStreamInfer"), messages, "stream", metadata=metadata, alone=True)


def grpc_error(draw: random.Random) -> Ask:
    """The first error ends it: one message after the other, so that it is certain what was answered before."""
    messages = [in_stream(draw) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.5:
        messages.insert(0, request(draw, "moody", **erring(draw)).SerializeToString())
    answers = (1,) * len(messages)
    metadata = (("triton_grpc_error", "true"),)
    path = method("ModelStreamInfer")
    return Ask("grpc_error", path, tuple(messages), "stream", answers, metadata=metadata, alone=True)


def decoupled(draw: random.Random) -> Ask:
    messages, answers = [], []
    as_status = draw.random() < 0.3
    for number in range(draw.randint(1, 4)):
        count, wants_final, act = draw.choice((0, 1, 2, 5)), draw.random() < 0.5, {}
        if draw.random() < 0.25:
            act = draw.choice(
                ({"error": draw.choice((*TEXTS[1:10], " spaces "))}, {"junk": "ff"}, {"bytes": 300_000}, erring(draw))
            )
        if act.get("code") == "UNAVAILABLE":
            act["details"] = "Exceeds maximum queue size"
        made = request(draw, "repeat", count=count, **act)
        made.id = f"{number}"
        if wants_final:
            made.parameters["triton_enable_empty_final_response"].bool_param = True
        messages.append(made.SerializeToString())
        failed = "code" in act or "junk" in act
        answers.append(count + (failed or wants_final or "error" in act))
    if not as_status and draw.random() < 0.5:
        answers = []
    metadata = (("triton_grpc_error", "true"),) if as_status else ()
    path = method("ModelStreamInfer")
    return Ask("decoupled", path, tuple(messages), "stream", tuple(answers), metadata=metadata, alone=True)


def large_stream(draw: random.Random) -> Ask:
    size = draw.choice((2**20, 6 * 2**20, MESSAGE_BYTES_MAX + 2**20))
    messages = tuple(request(draw, size=each).SerializeToString() for each in (100, size, 100))
    if size > MESSAGE_BYTES_MAX:
        return Ask("too large for a stream", method("ModelStreamInfer"), messages[1:2], "one")
    return Ask("large stream", method("ModelStreamInfer"), messages, "stream", (1, 1, 1))


KINDS: dict[Callable[[random.Random], Ask], int] = {
    right: 90, wrong: 70, knobs: 50, no_message: 20, large: 8, too_large: 5, bomb: 3, deadline: 15, timeout: 5,
    moody: 70, unreachable: 2, sequence: 25, kserve: 60, kserve_junk: 20, unknown: 20, other_shape: 10, health: 25,
    reflection: 15, stream: 40, grpc_error: 25, decoupled: 40, large_stream: 3,
}  # fmt: skip


def drawn(number: int, secret: bool = False) -> Ask:
    """Request number `number` of the seed. `secret`: who asks must know the token, and some do not."""
    draw = random.Random(f"{SEED}-{number}")
    ask = draw.choices(list(KINDS), list(KINDS.values()))[0](draw)
    metadata = [*ask.metadata, *some_metadata(draw)]
    if secret:
        metadata += draw.choice(
            (
                *[[KNOWS]] * 12, [], [("authorization", TOKEN)], [("authorization", "Bearer wrong")],
                [("authorization", "")], [KNOWS, ("authorization", "Bearer wrong")],
                [("authorization", "Bearer wrong"), KNOWS],
            )
        )  # fmt: skip
        if ask.kind == "deadline":  # who is refused may hear of it in time
            metadata = [*ask.metadata, KNOWS]
        if ask.how == "stream" and metadata[-1:] != [KNOWS]:  # refused while it is sent
            ask = replace(ask, how="one", messages=(*ask.messages, b"")[:1], answers=())
    if ask.timeout_s is None and draw.random() < 0.3:
        ask = replace(ask, timeout_s=draw.choice((60, 3600.5, 100_000, 1e8, 1e10)))
    if ask.compression is None and draw.random() < 0.2:
        ask = replace(ask, compression=draw.choice((grpc.Compression.Gzip, grpc.Compression.Deflate)))
    return replace(ask, metadata=tuple(metadata))


def some_metadata(draw: random.Random) -> list[tuple[str, Any]]:
    if draw.random() < 0.6:
        return []
    texts = ("", "a value", "a,b", "%41%", "~" * 600)
    made: list[tuple[str, Any]] = []
    for _ in range(draw.randint(1, 5)):
        if draw.random() < 0.5:
            made.append((draw.choice(("x-bytes-bin", "trace-bin", "a-bin")), draw.randbytes(draw.randrange(300))))
        else:
            made.append((draw.choice(("x-note", "x_1.a", "accept", "x-trace")), draw.choice(texts)))
    return made


# What comes back


@dataclass(frozen=True)
class Outcome:
    answers: tuple[bytes, ...]
    code: str
    details: str
    initial: tuple[tuple[str, Any], ...]
    trailing: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        metadata = f"trailing {shown(self.trailing)} initial {shown(self.initial)}"
        answers = [f"{len(each)} bytes {shown(each)}" for each in self.answers]
        return f"{self.code} {shown(self.details)} {metadata} answers {answers}"


async def outcome(channel: Any, ask: Ask) -> Outcome:
    """How a call ended; a call without an end has an outcome as well."""
    try:
        async with asyncio.timeout(NEVER_S):
            return await ended(channel, ask)
    except TimeoutError:
        return Outcome((), "never", f"no end within {NEVER_S} s", (), ())


async def ended(channel: Any, ask: Ask) -> Outcome:
    more = {"timeout": ask.timeout_s, "metadata": ask.metadata, "compression": ask.compression}
    answers: list[bytes] = []
    if ask.how == "unary":
        call = channel.unary_unary(ask.path)(ask.messages[0], **more)
        with contextlib.suppress(grpc.aio.AioRpcError):
            answers.append(await call)
    elif ask.how in ("one", "watch"):
        call = channel.unary_stream(ask.path)(ask.messages[0], **more)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while len(answers) < sum(ask.answers or [1000]) and (answer := await call.read()) is not grpc.aio.EOF:
                answers.append(answer)
        call.cancel()  # does nothing after its end
    else:
        call = channel.stream_stream(ask.path)(**more)
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await talk(call, ask, answers)
    code, details = await call.code(), await call.details()
    metadata = [tuple(each or ()) for each in (await call.initial_metadata(), await call.trailing_metadata())]
    return Outcome(tuple(answers), code.name, details or "", *metadata)


async def talk(call: Any, ask: Ask, answers: list[bytes]) -> None:
    for message, count in zip(ask.messages, ask.answers or itertools.repeat(0), strict=False):
        await call.write(message)
        for _ in range(count):
            answer = await call.read()
            if answer is grpc.aio.EOF:
                return
            answers.append(answer)
    await call.done_writing()
    while (answer := await call.read()) is not grpc.aio.EOF:
        answers.append(answer)


# What cannot be equal. Not drawn at all: header values with spaces at their ends, which HTTP/2 forbids, ngh2 resets,
# and grpc.aio lets them through; headers beyond 8 KiB, of which grpc.aio refuses some by chance; names that grpc.aio
# takes for its own (grpc-trace-bin, traceparent).


def without_measured_times(_: Ask, seen: Outcome) -> Outcome:
    return replace(seen, details=re.sub(r"\d+\.\d+ ms", "some ms", seen.details))


def without_times_in_statistics(ask: Ask, seen: Outcome) -> Outcome:
    """Also without what was asked of `late`: it is by chance whether it arrived before its deadline."""
    if ask.kind != "kserve ModelStatistics" or not seen.answers:
        return seen
    answer = pb.ModelStatisticsResponse.FromString(seen.answers[0])
    for stats in answer.model_stats:
        stats.last_inference = 0
        if stats.name == "late":
            stats.ClearField("inference_stats")
        for part in ("success", "fail", "queue", "compute_infer"):
            getattr(stats.inference_stats, part).ns = 0
    return replace(seen, answers=(answer.SerializeToString(),))


def by_request_where_they_overtake(ask: Ask, seen: Outcome) -> Outcome:
    """Answers of a decoupled family to one request are in order; those to several come as they may."""
    if ask.kind != "decoupled" or ask.answers:
        return seen
    ids = {each: pb.ModelStreamInferResponse.FromString(each).infer_response.id for each in seen.answers}
    return replace(seen, answers=tuple(sorted(seen.answers, key=ids.__getitem__)))


def without_words_where_time_is_up(ask: Ask, seen: Outcome) -> Outcome:
    """Client, dispatcher and slice find it out at once; whose words come first is by chance."""
    return Outcome((), seen.code, "", (), ()) if ask.kind == "deadline" else seen


def without_sizes_of_what_was_compressed(ask: Ask, seen: Outcome) -> Outcome:
    """Of a message that is too large once decompressed ours tells how much is taken; grpc.aio tells nothing, or, of one
    that is a little too large, its size."""
    if ask.compression is None:
        return seen
    sizes = rf"\((\d+ vs\. )?{MESSAGE_BYTES_MAX}\)"
    words = rf"Decompressed message larger than max|SERVER: Received (decompressed )?message larger than max {sizes}"
    return replace(seen, details=re.sub(f"^({words})$", "too large once decompressed", seen.details))


RULES = (
    without_sizes_of_what_was_compressed,
    without_measured_times,
    without_times_in_statistics,
    by_request_where_they_overtake,
    without_words_where_time_is_up,
)


def comparable(ask: Ask, seen: Outcome) -> Outcome:
    for rule in RULES:
        seen = rule(ask, seen)
    return seen


def repeated_in(ask: Ask, seen: Outcome) -> list[str]:
    """Message fields that an answer has twice: some clients would see the last one only."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    called = service.methods_by_name.get(ask.path.rpartition("/")[2])
    if called is None or not ask.path.startswith(f"/{SERVICE}/"):
        return []
    return [name for answer in seen.answers for name in repeated_messages(answer, called.output_type)]


# Two dispatchers


class OfGrpcAio:
    """Context of grpc.aio with what handlers ask of ours beyond it."""

    trace = NO_TRACE

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


@contextlib.asynccontextmanager
async def grpc_aio_server(running: Running) -> AsyncIterator[str]:
    """Server of grpc.aio with a dispatcher's own handlers: the reference. Its address."""

    def adapted(handler: Any) -> Any:
        kind = "stream_stream" if handler.request_streaming else "unary_unary"
        behaviour = getattr(handler, kind)

        async def called(asked: Any, context: Any) -> Any:
            return await behaviour(asked, OfGrpcAio(context))

        return handler._replace(**{kind: called})

    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
    server = grpc.aio.server(options=[*options, ("grpc.max_send_message_length", -1)])
    methods = {name: adapted(handler) for name, handler in handlers(running.fronts).items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    health_pb2_grpc.add_HealthServicer_to_server(ServerHealth(lambda: not running.local.not_ready()), server)
    names = (SERVICE, "grpc.health.v1.Health", grpc_reflection.SERVICE_NAME)
    grpc_reflection.enable_server_reflection(names, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Both:
    """A dispatcher, and one behind a server of grpc.aio, in front of the same slices, with a client of each."""

    def __init__(self, running: Sequence[Running], channels: Sequence[Any]) -> None:
        self.running = running
        self.channels = channels
        self.seen: Counter[str] = Counter()
        self.differences: list[str] = []
        self.repeated: list[str] = []

    async def serve(self, states: Sequence[State], mimic: Mimic) -> None:
        statuses = [
            replace(status(n, mimic.target), hosted=(Hosted(family, "digits-l", 4, 0, 1, 1, 8),))
            for n, family in enumerate(FAMILIES)
        ]
        routes = [
            Route(family, "weighted", "fifo", (target(n, credits=64),), 0, 0, {}) for n, family in enumerate(FAMILIES)
        ]
        for state in states:
            plane = Plane(state)
            await plane.node(node(statuses))
            await plane.plan(plan(routes))
        for each in self.running:
            await until(lambda each=each: all(each.contracts.known(family) for family in FAMILIES))
        await self.settle()

    async def settle(self) -> None:
        """Until no slice is out, and health says so."""
        data = health_pb2.HealthCheckRequest().SerializeToString()
        for running, channel in zip(self.running, self.channels, strict=True):
            await until(lambda running=running: not running.local.not_ready())
            while (await channel.unary_unary("/grpc.health.v1.Health/Check")(data))[-1] != 1:
                await asyncio.sleep(0.01)

    async def compare(self, numbers: Sequence[int], secret: bool = False) -> None:
        """Ask the same of both, several requests at once where none of them changes what others are told."""
        asks = [(number, drawn(number, secret)) for number in numbers]
        for alone, group in itertools.groupby(asks, lambda each: each[1].alone):
            for some in batches(list(group), 1 if alone else 6):
                pairs = await asyncio.gather(*(self._ask(ask) for _, ask in some))
                for (number, ask), (ours, reference) in zip(some, pairs, strict=True):
                    self.seen[ask.kind] += 1
                    self.repeated += repeated_in(ask, ours) + repeated_in(ask, reference)
                    if comparable(ask, ours) != comparable(ask, reference) or ours.code == "never":
                        told = f"ours: {ours}\n  grpc.aio: {reference}"
                        self.differences.append(f"seed {SEED}, request {number}, {ask}\n  {told}")
            if any(running.local.not_ready() for running in self.running):
                await self.settle()

    def check(self, count: int) -> None:
        assert not self.repeated
        assert not self.differences, f"{len(self.differences)} of {count}:\n" + "\n".join(self.differences[:10])
        assert sum(self.seen.values()) == count

    async def _ask(self, ask: Ask) -> Any:
        return await asyncio.gather(*(outcome(channel, ask) for channel in self.channels))


def batches(some: list[Any], size: int) -> list[list[Any]]:
    return [some[at : at + size] for at in range(0, len(some), size)]


@contextlib.asynccontextmanager
async def both(shared_redis: Any, state: State, folder: Any, **settings: Any) -> AsyncIterator[Both]:
    """Each is alone in its cluster, with equal plans: workers of one cluster would answer for each other."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with contextlib.AsyncExitStack() as stack:
        mimic = await stack.enter_async_context(Mimic())
        second = State.connect(shared_redis.url, f"{state.keys.plan().split(':')[1]}-second", timeout_s=30.0)
        stack.push_async_callback(second.close)
        ours = await stack.enter_async_context(dispatching(state, folder / "ours", **BOUNDS, **settings))
        other = await stack.enter_async_context(dispatching(second, folder / "other", **BOUNDS, **settings))
        addresses = (ours.address, await stack.enter_async_context(grpc_aio_server(other)))
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for address in addresses
        ]
        made = Both((ours, other), channels)
        await made.serve((state, second), mimic)
        yield made


@pytest.mark.gate
async def test_a_client_is_answered_as_by_grpc_aio_whatever_it_asks(shared_redis, state, tmp_path):
    async with both(shared_redis, state, tmp_path) as pair:
        await pair.compare(range(COUNT))
    pair.check(COUNT)


async def test_clients_are_let_in_by_the_token_as_by_grpc_aio(shared_redis, state, tmp_path):
    count = max(1, COUNT // 4)
    async with both(shared_redis, state, tmp_path, token=TOKEN) as pair:
        await pair.compare(range(count), secret=True)
    pair.check(count)


@pytest.mark.parametrize("path", UNARY)
@pytest.mark.parametrize("count", [0, 2])
async def test_a_unary_method_takes_one_message_neither_none_nor_two(state, tmp_path, path, count):
    """grpc.aio never answers the one and takes no notice of the second of the other."""
    async with (
        dispatching(state, tmp_path) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        call = channel.stream_stream(path)(timeout=10)
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            for _ in range(count):
                await call.write(b"")
            await call.done_writing()
        assert await call.code() is grpc.StatusCode.INTERNAL


async def test_what_nobody_reads_of_a_call_that_has_ended_comes_back_to_its_connection():
    """Else the connection's window closes a little with each of them, and in the end for good."""

    async def unread(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.ABORTED, "nothing was read")

    async def waits(_: Any, context: Any) -> None:
        await asyncio.sleep(60)

    async def answers(data: bytes, context: Any) -> bytes:
        return data

    routes = Routes()
    streams = {
        name: grpc.stream_stream_rpc_method_handler(each) for name, each in (("Unread", unread), ("Waits", waits))
    }
    routes.add("any.Service", {**streams, "Answers": grpc.unary_unary_rpc_method_handler(answers)})
    held, limits = (
        Held(bytes_max=200_000),
        ConnectionLimits(connection_window_bytes=1 << 18, stream_window_bytes=1 << 16),
    )
    listening = listen("127.0.0.1:0", "")
    server = H2Server(routes.handlers, ServerBounds(message_bytes_max=100_000), limits, held, listening)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        answer = channel.unary_unary("/any.Service/Answers")
        for _ in range(20):
            for name in ("Unread", "Waits"):
                call = channel.stream_stream(f"/any.Service/{name}")()
                with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                    await call.write(bytes(30_000))
                    await call.write(bytes(30_000))
                await asyncio.sleep(0.01)
                call.cancel()
            for size, over in ((100_001, 0), (90_000, 200_000)):
                held.bytes += over
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await answer(bytes(size), timeout=10)
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                held.bytes -= over
            assert len(await answer(bytes(100_000), timeout=10)) == 100_000
    await until(lambda: held.bytes == 0)
    await server.stop(0.0)


class Handlers:
    """Handlers of both servers: they answer what they heard, and act as the message says."""

    async def tell(self, data: bytes, context: Any) -> bytes:
        act = json.loads(data)
        heard = by_name(each for each in context.invocation_metadata() if each[0] != "user-agent")
        await Mimic._do(act, context)
        left_s = context.time_remaining()
        return repr((heard, left_s is None or round(left_s, -3))).encode()

    async def count(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        act = json.loads(data)
        for number in range(act["count"]):
            yield b"%d" % number + bytes(act["bytes"])
        await Mimic._do(act, context)

    def by_name(self) -> dict[str, Any]:
        return {
            "Tell": grpc.unary_unary_rpc_method_handler(self.tell),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
        }


@contextlib.asynccontextmanager
async def each_server() -> AsyncIterator[dict[str, str]]:
    """Our server and grpc.aio's, with the same handlers: their addresses."""
    routes = Routes()
    routes.add("any.Service", Handlers().by_name())
    ours = H2Server(routes.handlers, ServerBounds(), ConnectionLimits(), Held(), listen("127.0.0.1:0", ""))
    theirs = grpc.aio.server()
    theirs.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("any.Service", Handlers().by_name()),))
    port = theirs.add_insecure_port("127.0.0.1:0")
    try:
        await asyncio.gather(ours.start(), theirs.start())
        yield {"ours": f"127.0.0.1:{ours.port}", "grpc.aio": f"127.0.0.1:{port}"}
    finally:
        await asyncio.gather(ours.stop(0.0), theirs.stop(0))


async def test_each_channel_and_each_server_understand_each_other_as_grpc_aio_does_itself():
    """What dispatchers and slices exchange: our channel and server, each with grpc.aio's as its peer."""
    async with each_server() as servers, contextlib.AsyncExitStack() as stack:
        channels: list[tuple[str, H2Channel | AioChannel]] = []
        for name, address in servers.items():
            ours = H2Channel(address)
            stack.push_async_callback(ours.close)
            theirs = AioChannel(address)
            stack.push_async_callback(theirs.close)
            channels += [(f"ours to {name}", ours), (f"grpc.aio to {name}", theirs)]
        for number in range(min(500, COUNT // 4)):
            draw = random.Random(f"{SEED}-between-{number}")
            act = {**erring(draw), "count": draw.randrange(5), "bytes": draw.choice((0, 1, 70_000))}
            more = (draw.choice((None, 60.0, 5000.5)), tuple(some_metadata(draw)))
            for hear in (unary, streamed):
                outcomes = {name: await hear(channel, json.dumps(act).encode(), *more) for name, channel in channels}
                reference = outcomes["grpc.aio to grpc.aio"]
                other = {name: shown(each) for name, each in outcomes.items() if each != reference}
                asked = f"seed {SEED}, number {number}, {hear.__name__}, {shown(act)}, {shown(more)}"
                assert not other, f"{asked}\nnot {shown(reference)}"


async def unary(channel: H2Channel | AioChannel, data: bytes, timeout_s: float | None, metadata: Any) -> Any:
    try:
        answer, trailers = await channel.unary("/any.Service/Tell", (data[:7], data[7:]), timeout_s, metadata)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details(), by_name(error.trailing_metadata())
    return answer, by_name(trailers)


async def streamed(channel: H2Channel | AioChannel, data: bytes, timeout_s: float | None, metadata: Any) -> Any:
    answers: list[Any] = []
    try:
        answers.extend([each async for each in channel.stream("/any.Service/Count", (data,), timeout_s, metadata)])
    except grpc.aio.AioRpcError as error:
        answers.append((error.code(), error.details(), by_name(error.trailing_metadata())))
    return answers


def by_name(metadata: Any) -> list[tuple[str, Any]]:
    """Only values of one name have an order: grpc.aio brings them together."""
    return sorted(((name, value) for name, value in metadata), key=lambda pair: pair[0])
