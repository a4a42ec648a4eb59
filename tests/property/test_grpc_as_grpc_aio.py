"""gRPC of the dispatcher against grpc.aio: its server and its channel do as those of grpc.aio do, with the same peers.

Both servers have the same handlers, so that what differs is of the transport. Calls are drawn by number from a seed:
GRPC_CALLS says how many, GRPC_SEED which.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from dispatcher.transport.accepting import listen
from dispatcher.transport.h2 import ConnectionLimits, Held
from dispatcher.transport.h2_channel import H2Channel
from dispatcher.transport.h2_server import H2Server, Routes, ServerBounds
from tests.support.aio_channel import AioChannel

COUNT = int(os.environ.get("GRPC_CALLS", 400))
SEED = int(os.environ.get("GRPC_SEED", 1))
SERVICE = "any.Service"
MESSAGE_BYTES_MAX = 2 * 2**20
NEVER_S = 30
TEXTS = (
    "", "went wrong", "100% of it, %25 and %", "née ☃ 🙂", "two\nlines\tand\ttabs\r\n", 'a "quote" and \\',
    "\x7f\x01\x00 controls", "x" * 700, "ü" * 700,
)  # fmt: skip
COMPRESSIONS = (grpc.Compression.Gzip, grpc.Compression.Deflate)


# What both servers do


class Handlers:
    """They answer what they heard, and act as the JSON says that a message begins with."""

    async def tell(self, data: bytes, context: Any) -> bytes:
        act = act_of(data)
        heard = by_name(each for each in context.invocation_metadata() if each[0] != "user-agent")
        await self._do(act, context)
        left_s = context.time_remaining()
        what = (heard, hashlib.sha256(data).hexdigest(), left_s is None or round(left_s, -3))
        return repr(what).encode() + bytes(act.get("bytes", 0))

    async def count(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        act = act_of(data)
        for number in range(act["count"]):
            yield b"%d" % number + bytes(act["bytes"])
        await self._do(act, context)

    async def talk(self, _: Any, context: Any) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            act = act_of(data)
            for number in range(act.get("count", 1)):
                await context.write(b"%d of %d bytes" % (number, len(data)) + bytes(act.get("bytes", 0)))
            await self._do(act, context)

    async def read(self, number: int, context: Any) -> int:
        return number

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

    def by_name(self) -> dict[str, Any]:
        return {
            "Tell": grpc.unary_unary_rpc_method_handler(self.tell),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Talk": grpc.stream_stream_rpc_method_handler(self.talk),
            "Read": grpc.unary_unary_rpc_method_handler(
                self.read, request_deserializer=int, response_serializer=lambda number: b"%d" % number
            ),
        }


def act_of(data: bytes) -> dict[str, Any]:
    act: dict[str, Any] = json.loads(data.partition(b"\n")[0] or b"{}")
    return act


@contextlib.asynccontextmanager
async def each_server() -> AsyncIterator[dict[str, str]]:
    """Our server and grpc.aio's, with the same handlers: their addresses."""
    routes = Routes()
    routes.add_registered_method_handlers(SERVICE, Handlers().by_name())
    bounds = ServerBounds(message_bytes_max=MESSAGE_BYTES_MAX)
    ours = H2Server(routes.handlers, bounds, ConnectionLimits(), Held(), listen("127.0.0.1:0", ""))
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.max_send_message_length", -1)]
    theirs = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])
    theirs.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, Handlers().by_name()),))
    port = theirs.add_insecure_port("127.0.0.1:0")
    try:
        await asyncio.gather(ours.start(), theirs.start())
        yield {"ours": f"127.0.0.1:{ours.port}", "grpc.aio": f"127.0.0.1:{port}"}
    finally:
        await asyncio.gather(ours.stop(0.0), theirs.stop(0))


# What is asked


@dataclass(frozen=True)
class Ask:
    """One call. `how`: "unary"; "stream", where the next message waits for so many `answers` to the one before; "one",
    a stream for one message, which alone may be refused while it is sent (grpc.aio's client takes that for an error of
    its own, or not, by chance)."""

    kind: str
    path: str
    messages: tuple[bytes, ...]
    how: str = "unary"
    answers: tuple[int, ...] = ()
    timeout_s: float | None = None
    metadata: tuple[tuple[str, Any], ...] = ()
    compression: Any = None

    def __str__(self) -> str:
        sizes = [len(each) for each in self.messages]
        more = f"timeout {self.timeout_s}, metadata {shown(self.metadata)}, compression {self.compression}"
        return f"{self.kind!r}: {self.how} {self.path} with messages of {sizes} bytes, {more}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:300]}...{text[-60:]} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def message(draw: random.Random, size: int = 0, **act: Any) -> bytes:
    """What begins with this act; some of its bytes are drawn."""
    return json.dumps(act).encode() + b"\n" + draw.randbytes(min(size, 4096)) + bytes(max(0, size - 4096))


def tell(kind: str, data: bytes, **more: Any) -> Ask:
    return Ask(kind, f"/{SERVICE}/Tell", (data,), **more)


def right(draw: random.Random) -> Ask:
    return tell("right", message(draw, int(2 ** draw.uniform(0, 17))))


def large(draw: random.Random) -> Ask:
    size, answer = draw.choice(((3 * 2**19, 0), (2**20 + 1, 0), (300_000, 5 * 2**20), (0, 2**20), (16384, 16384)))
    return tell("large", message(draw, size, bytes=answer))


def too_large(draw: random.Random) -> Ask:
    """By their size as they come, or once they are decompressed."""
    size = MESSAGE_BYTES_MAX + draw.choice((-1000, 10**5, 3 * 10**6))
    return tell("too large", message(draw, size), compression=draw.choice((None, *COMPRESSIONS)))


def erring(draw: random.Random) -> dict[str, Any]:
    """An act that answers with a status, or with trailers alone."""
    names = ("x-note", "x-note", "x-bytes-bin", "x-bytes-bin", "grpc-status-details-bin", "retry-after", "x_1.a")
    found = []
    for name in draw.sample(names, draw.randint(0, 3)):
        texts = ("", "a note", "a,b", "%20", "~" * 500)
        found.append((name, draw.randbytes(draw.randrange(40)).hex() if name.endswith("-bin") else draw.choice(texts)))
    if draw.random() < 0.25:
        return {"tell": found}
    codes = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    return {"code": draw.choice(codes), "details": draw.choice(TEXTS), "tell": found}


def refused(draw: random.Random) -> Ask:
    return tell("refused", message(draw, **erring(draw)))


def deadline(draw: random.Random) -> Ask:
    """One that certainly passes."""
    return tell("deadline", message(draw, sleep_s=30), timeout_s=draw.choice((0, 1e-9, 1e-4, 0.02, 0.05)))


def parsed(draw: random.Random) -> Ask:
    return Ask("parsed", f"/{SERVICE}/Read", (draw.choice((b"17", b"-4", b"", b"x", b"\xff", b"1.5")),))


def unknown(draw: random.Random) -> Ask:
    path = draw.choice((f"/{SERVICE}/Nothing", "/no.Service/Nothing", "/", "//", f"/{SERVICE}", f"/{SERVICE}/Tell/"))
    return Ask("unknown method", path, (b"some bytes",), draw.choice(("unary", "one")))


def other_shape(draw: random.Random) -> Ask:
    """A stream called as if it were unary, and the other way round."""
    if draw.random() < 0.4:
        return Ask("stream called as unary", f"/{SERVICE}/Talk", (message(draw),))
    return Ask("unary called as stream", f"/{SERVICE}/Tell", (message(draw),), "stream")


def counted(draw: random.Random) -> Ask:
    act = {**erring(draw), "count": draw.randrange(5), "bytes": draw.choice((0, 1, 70_000))}
    return Ask("counted", f"/{SERVICE}/Count", (message(draw, **act),), "one")


def talk(draw: random.Random) -> Ask:
    """An error ends it: one message after the other, so that it is certain what was answered before."""
    acts: list[dict[str, Any]] = [{"count": draw.choice((0, 1, 2, 5))} for _ in range(draw.choice((0, 1, 2, 5, 12)))]
    size = draw.choice((0, 100, 2**20))
    if draw.random() < 0.4:
        acts.append({**erring(draw), "count": 1, "bytes": draw.choice((0, 300_000))})
    one_by_one = any("code" in act for act in acts) or draw.random() < 0.5
    answers = tuple(act["count"] for act in acts) if one_by_one else ()
    return Ask("talk", f"/{SERVICE}/Talk", tuple(message(draw, size, **act) for act in acts), "stream", answers)


def too_large_for_a_stream(draw: random.Random) -> Ask:
    return Ask("too large for a stream", f"/{SERVICE}/Talk", (message(draw, MESSAGE_BYTES_MAX + 2**20),), "one")


KINDS: dict[Callable[[random.Random], Ask], int] = {
    right: 90, large: 8, too_large: 8, refused: 120, deadline: 15, parsed: 20, unknown: 20, other_shape: 10,
    counted: 60, talk: 60, too_large_for_a_stream: 2,
}  # fmt: skip


def drawn(number: int) -> Ask:
    """Call number `number` of the seed."""
    draw = random.Random(f"{SEED}-{number}")
    ask = draw.choices(list(KINDS), list(KINDS.values()))[0](draw)
    if ask.timeout_s is None and draw.random() < 0.3:
        ask = replace(ask, timeout_s=draw.choice((60, 3600.5, 100_000, 1e8, 1e10)))
    if ask.compression is None and draw.random() < 0.2:
        ask = replace(ask, compression=draw.choice(COMPRESSIONS))
    return replace(ask, metadata=tuple(some_metadata(draw)))


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
    elif ask.how == "one":
        call = channel.unary_stream(ask.path)(ask.messages[0], **more)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (answer := await call.read()) is not grpc.aio.EOF:
                answers.append(answer)
    else:
        call = channel.stream_stream(ask.path)(**more)
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await converse(call, ask, answers)
    code, details = await call.code(), await call.details()
    metadata = [tuple(each or ()) for each in (await call.initial_metadata(), await call.trailing_metadata())]
    return Outcome(tuple(answers), code.name, details or "", *metadata)


async def converse(call: Any, ask: Ask, answers: list[bytes]) -> None:
    for data, count in zip(ask.messages, ask.answers or itertools.repeat(0), strict=False):
        await call.write(data)
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


def comparable(ask: Ask, seen: Outcome) -> Outcome:
    """Without words where time is up: client and server find it out at once, and whose words come first is by chance.
    Without sizes of what was compressed: of a message that is too large once decompressed ours tells how much is taken;
    grpc.aio tells nothing, or, of one that is a little too large, its size."""
    if ask.kind == "deadline":
        return Outcome((), seen.code, "", (), ())
    if ask.compression is None:
        return seen
    sizes = rf"\((\d+ vs\. )?{MESSAGE_BYTES_MAX}\)"
    words = rf"Decompressed message larger than max|SERVER: Received (decompressed )?message larger than max {sizes}"
    return replace(seen, details=re.sub(f"^({words})$", "too large once decompressed", seen.details))


@pytest.mark.parametrize("first", range(0, COUNT, 200))
async def test_a_client_is_answered_as_by_grpc_aio_whatever_it_asks(first):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    numbers = range(first, min(COUNT, first + 200))
    differences = []
    async with each_server() as servers, contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for address in servers.values()
        ]
        for number in numbers:
            ask = drawn(number)
            ours, theirs = await asyncio.gather(*(outcome(channel, ask) for channel in channels))
            if comparable(ask, ours) != comparable(ask, theirs) or ours.code == "never":
                differences.append(f"seed {SEED}, call {number}, {ask}\n  ours: {ours}\n  grpc.aio: {theirs}")
    assert not differences, f"{len(differences)} of {len(numbers)}:\n" + "\n".join(differences[:10])


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
        answer, trailers = await channel.unary(f"/{SERVICE}/Tell", (data[:7], data[7:]), timeout_s, metadata)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details(), by_name(error.trailing_metadata())
    return answer, by_name(trailers)


async def streamed(channel: H2Channel | AioChannel, data: bytes, timeout_s: float | None, metadata: Any) -> Any:
    answers: list[Any] = []
    try:
        answers.extend([each async for each in channel.stream(f"/{SERVICE}/Count", (data,), timeout_s, metadata)])
    except grpc.aio.AioRpcError as error:
        answers.append((error.code(), error.details(), by_name(error.trailing_metadata())))
    return answers


def by_name(metadata: Any) -> list[tuple[str, Any]]:
    """Only values of one name have an order: grpc.aio brings them together."""
    return sorted(((name, value) for name, value in metadata), key=lambda pair: pair[0])
