"""Recorded conversations, spoilt in any way, fed into both ends of our HTTP/2: nothing escapes, and nothing is left.

`H2_FUZZ=100000 pytest tests/property/test_h2_fuzz.py` is the long run.
"""

import asyncio
import gzip
import os
import random
import socket
import struct
from dataclasses import dataclass, field

import grpc
import ngh2
import psutil
import pytest

from dispatcher.transport import h2_call, h2_server
from dispatcher.transport.h2 import ConnectionLimits, Held
from dispatcher.transport.h2_call import ServerBounds
from dispatcher.transport.h2_channel import _Call, _ClientConnection
from dispatcher.transport.h2_server import H2Server, Routes, ServerConnection

COUNT = int(os.environ.get("H2_FUZZ", 500))
CLIENT_COUNT = max(1, COUNT // 3)
GROWTH_BYTES_MAX = 30 << 20
PREFACE_BYTES = 24
TURNS_MAX = 400
BASE = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc")]  # fmt: skip


def framed(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


class Wire:
    """Transport that keeps nothing."""

    def __init__(self, connection) -> None:
        self.connection = connection
        self.closing = False

    def write(self, data) -> None:
        assert not self.closing

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name, default=None):
        return ("127.0.0.1", 1) if name == "peername" else default


# Handlers and recorded conversations


async def echo(request, context):
    context.invocation_metadata()
    context.set_trailing_metadata((("seen-bin", b"\0"),))
    return request


async def slow(request, context):
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return request * 3


async def refuse(request, context):
    await context.abort(grpc.StatusCode.NOT_FOUND, "nothing")


async def stuck(request, context):
    await asyncio.Event().wait()


async def each(requests, context):
    async for request in requests:
        yield request


async def many(request, context):
    for _ in range(5):
        yield bytes(30_000)


def handlers():
    unary, routes = grpc.unary_unary_rpc_method_handler, Routes()
    routes.add_registered_method_handlers("s", {
        "Echo": unary(echo), "Slow": unary(slow), "Refuse": unary(refuse), "Stuck": unary(stuck),
        "Each": grpc.stream_stream_rpc_method_handler(each), "Many": grpc.unary_stream_rpc_method_handler(many),
    })  # fmt: skip
    return routes.handlers


@dataclass
class Recorded:
    """What each end of one conversation sent, in pieces as they were written."""

    client: list[bytes] = field(default_factory=list)
    server: list[bytes] = field(default_factory=list)


class Talk:
    """Two ends of ngh2 that record what they say."""

    def __init__(self) -> None:
        self.said = Recorded()
        self.client = ngh2.Connection(ngh2.Role.CLIENT)
        self.server = ngh2.Connection(ngh2.Role.SERVER)
        self.client.initiate_connection()
        self.server.initiate_connection({4: 1 << 20})
        self.exchange()

    def exchange(self) -> None:
        while True:
            to_server, to_client = self.client.data_to_send(), self.server.data_to_send()
            if not to_server and not to_client:
                break
            if to_server:
                self.said.client.append(to_server)
                self.server.receive_data(to_server)
            if to_client:
                self.said.server.append(to_client)
                self.client.receive_data(to_client)
        self.client.events()
        self.server.events()

    def ask(self, method: str, data: bytes = b"", end: bool = True, exchange: bool = True, **more: bytes) -> int:
        extra = [(key.replace("_", "-").encode(), value) for key, value in more.items()]
        stream_id = self.client.send_request([(b":path", f"/s/{method}".encode()), *BASE, *extra])
        self.client.send_data(stream_id, data, end_stream=end)
        if exchange:
            self.exchange()
        return stream_id

    def answer(self, stream_id: int, data: bytes, status: bytes = b"0", *more: tuple[bytes, bytes]) -> None:
        headers = [(b":status", b"200"), (b"content-type", b"application/grpc"), *more]
        self.server.send_response(stream_id, headers)
        self.server.send_data(stream_id, data)
        self.server.send_trailers(stream_id, [(b"grpc-status", status), (b"x-bin", b"AAA")])
        self.exchange()


def unary() -> Recorded:
    talk = Talk()
    for n in range(3):
        talk.answer(talk.ask("Echo", framed(b"x" * 40 * n), grpc_timeout=b"1S", token_bin=b"AAEC"), framed(b"y" * 90))
    talk.answer(talk.ask("Refuse", framed(b"")), b"", b"5")
    return talk.said


def stream() -> Recorded:
    talk = Talk()
    stream_id = talk.ask("Each", framed(b"first"), end=False)
    for n in range(3):
        talk.client.send_data(stream_id, framed(bytes(n * 500)) + framed(b"")[:n])
        talk.exchange()
        talk.client.send_data(stream_id, framed(b"")[n:] if n else b"")
        talk.exchange()
    talk.client.end_stream(stream_id)
    talk.exchange()
    talk.answer(stream_id, framed(b"one") * 5)
    talk.answer(talk.ask("Many", framed(b"go")), framed(bytes(20_000)) * 3)
    return talk.said


def compressed() -> Recorded:
    talk = Talk()
    packed = framed(gzip.compress(bytes(9000)), 1)
    answer = (packed, b"0", (b"grpc-encoding", b"gzip"))
    talk.answer(talk.ask("Echo", packed, grpc_encoding=b"gzip"), *answer)
    talk.answer(talk.ask("Each", packed * 3, grpc_encoding=b"gzip"), packed * 2, b"0", (b"grpc-encoding", b"gzip"))
    return talk.said


def cancelled() -> Recorded:
    talk = Talk()
    for method in ("Stuck", "Each", "Many"):
        stream_id = talk.ask(method, framed(b"x"), end=method != "Each")
        talk.client.reset_stream(stream_id)
        talk.exchange()
        stream_id = talk.ask(method, framed(b"x"))
        talk.server.reset_stream(stream_id, 7)
        talk.exchange()
    talk.ask("Stuck", framed(b"x"), grpc_timeout=b"1m")
    return talk.said


def several() -> Recorded:
    talk = Talk()
    methods = ("Echo", "Slow", "Each", "Many", "Nothing", "Echo")
    streams = [talk.ask(each, framed(b"x" * 300), exchange=False) for each in methods]
    talk.client.ping(b"12345678")
    talk.exchange()
    for stream_id in reversed(streams):
        talk.answer(stream_id, framed(b"y" * 100))
    talk.ask("Slow", framed(bytes(40_000)), end=False)
    talk.client.update_settings({4: 1000})
    talk.exchange()
    talk.server.send_goaway(0)
    talk.exchange()
    return talk.said


RECORDED = [unary(), stream(), compressed(), cancelled(), several()]


# Spoiling


def frames_of(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        found.append(data[at:end])
        at = end
    return found


def spoil_frames(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    frames = list(frames)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(frames))
        what = rng.randrange(7)
        if what == 0:
            frames.insert(rng.randrange(len(frames) + 1), frames[at])
        elif what == 1 and len(frames) > 1:
            del frames[at]
        elif what == 2:
            frames.insert(rng.randrange(len(frames)), frames.pop(at))
        elif what == 3:  # another kind, other flags, another stream
            head = bytearray(frames[at])
            head[rng.choice((3, 4, 8))] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, rng.randrange(256)))
            frames[at] = bytes(head)
        elif what == 4:  # bytes of its payload, with a length that is right
            payload = spoil_bytes(rng, frames[at][9:])
            frames[at] = len(payload).to_bytes(3, "big") + frames[at][3:9] + payload
        elif what == 5:
            frames[at:at] = frames[max(0, at - 3) : at] * rng.choice((1, 30))
        else:  # as its neighbour's continuation
            frames[at] = frames[at][:4] + bytes((rng.randrange(256),)) + frames[at][5:]
    return frames


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(made) + 1)
        span = rng.choice((1, 1, 4, 30))
        what = rng.randrange(4)
        if what == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del made[at : at + span]
        elif what == 2:
            made[at:at] = made[at : at + span]
        else:
            made[at : at + span] = rng.randbytes(min(span, len(made) - at))
    return bytes(made)


def spoilt(rng: random.Random, whole: bytes, head: int) -> list[bytes]:
    """The stream, spoilt, in pieces."""
    if rng.random() < 0.6:
        whole = whole[:head] + b"".join(spoil_frames(rng, frames_of(whole[head:])))
    if rng.random() < 0.5:
        whole = spoil_bytes(rng, whole)
    if rng.random() < 0.3:
        whole = whole[: rng.randrange(len(whole) + 1)]
    cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.choice((0, 1, 3, 10))))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a < b]


def feed(connection, piece: bytes) -> None:
    while piece:
        buffer = connection.get_buffer(-1)
        count = min(len(piece), len(buffer))
        buffer[:count] = piece[:count]
        if connection.transport.is_closing():
            return
        connection.buffer_updated(count)
        piece = piece[count:]


class Escapes:
    """What asyncio would have logged."""

    def __init__(self) -> None:
        self.found: list = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.found.append(context))


async def settle(done, turns: int = TURNS_MAX) -> None:
    for _ in range(turns):
        if done():
            return
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    for _ in range(turns):
        await asyncio.sleep(0)


class Memory:
    """Growth of this process from the first tenth of the cases on."""

    def __init__(self, count: int) -> None:
        self._process, self._first, self._at = psutil.Process(), 0, max(1, count // 10)

    def see(self, case: int) -> None:
        if case == self._at:
            self._first = self._process.memory_info().rss

    def growth_bytes(self) -> int:
        return self._process.memory_info().rss - self._first


# Both ends


async def play_to_server(server: H2Server, seed: int) -> None:
    rng = random.Random(seed)
    recorded = rng.choice(RECORDED)
    connection = ServerConnection(server)
    connection.connection_made(Wire(connection))
    for piece in spoilt(rng, b"".join(recorded.client), PREFACE_BYTES):
        if connection.closed or connection.transport.is_closing():
            break
        feed(connection, piece)
        for _ in range(rng.choice((0, 1, 3))):
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    way = rng.randrange(4)
    if way == 0:
        connection.leave()
    elif way == 1:
        connection.cut()
    elif way == 2:
        connection.leave()
        connection.cut()
        connection.flush()
        connection.end()
    await asyncio.sleep(0)
    connection.transport.abort()
    await asyncio.sleep(0)
    assert connection.closed
    assert not connection.calls


async def play_to_client(seed: int) -> None:
    rng = random.Random(seed)
    recorded = rng.choice(RECORDED)
    connection = _ClientConnection()
    connection.connection_made(Wire(connection))
    calls = []
    for n in range(8):
        path = (b":path", rng.choice((b"/s/Echo", b"/s/Each")))
        call = _Call((*BASE[:2], path, *BASE[2:]), (b"x" * rng.choice((1, 20_000)),), n % 2 == 1)
        calls.append(call)
        connection.begin(call)
    for piece in spoilt(rng, b"".join(recorded.server), 0):
        if connection.closed or connection.transport.is_closing():
            break
        feed(connection, piece)
        for _ in range(rng.choice((0, 1, 3))):
            await asyncio.sleep(0)
        for call in calls:
            if call.streaming and call.messages and rng.random() < 0.5:
                message = call.messages.popleft()
                connection.take(call, min(call.unread_bytes, 5 + len(message)))
    for call in rng.sample(calls, 3):
        connection.drop(call)
        call.finish(asyncio.CancelledError())
    if rng.random() < 0.5:
        connection.cut()
    connection.transport.abort()
    await asyncio.sleep(0)
    assert connection.closed
    assert not connection.calls
    assert all(call.ended for call in calls)
    for call in calls:
        while call.messages:
            try:
                call.decoded(call.messages.popleft())
            except grpc.aio.AioRpcError:
                pass


@pytest.mark.timeout(max(300, COUNT // 100))
async def test_a_server_survives_any_spoilt_conversation(monkeypatch):
    monkeypatch.setattr(h2_server, "NOTICE_S", 0.001)
    monkeypatch.setattr(h2_call, "INFLATE_INLINE_BYTES", 1 << 30)
    escapes, held, memory = Escapes(), Held(), Memory(COUNT)
    limits = ConnectionLimits(stream_window_bytes=1 << 16, connection_window_bytes=1 << 17)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = H2Server(handlers(), ServerBounds(message_bytes_max=50_000), limits, held, listening)
        own = asyncio.all_tasks()

        def left() -> tuple:
            return held.bytes, held.unsent_bytes, len(server.connections), asyncio.all_tasks() - own

        for seed in range(COUNT):
            try:
                await play_to_server(server, seed)
                await settle(lambda: left() == (0, 0, 0, set()))
                assert left() == (0, 0, 0, set())
                assert not escapes.found
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r} {escapes.found}") from error
            memory.see(seed)
        assert memory.growth_bytes() < GROWTH_BYTES_MAX


@pytest.mark.timeout(max(300, COUNT // 100))
async def test_a_client_survives_any_spoilt_conversation():
    escapes, memory, own = Escapes(), Memory(CLIENT_COUNT), asyncio.all_tasks()
    for seed in range(CLIENT_COUNT):
        try:
            await play_to_client(seed)
            assert asyncio.all_tasks() == own
            assert not escapes.found
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r} {escapes.found}") from error
        memory.see(seed)
    assert memory.growth_bytes() < GROWTH_BYTES_MAX


async def test_conversations_that_are_not_spoilt_are_answered():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held = Held()
        server = H2Server(handlers(), ServerBounds(), ConnectionLimits(), held, listening)
        for recorded in RECORDED:
            connection = ServerConnection(server)
            connection.connection_made(Wire(connection))
            feed(connection, b"".join(recorded.client))
            await asyncio.sleep(0.05)
            assert not connection.closed
            assert len(connection.calls) <= (0 if recorded in RECORDED[:3] else 4)
            connection.lost("over")
            await asyncio.sleep(0)
        assert held.bytes == 0
