"""Bodies of REST requests and answers: bounded in time, and counted in the bytes that a worker holds."""

import asyncio
import gzip
import socket
import ssl
import zlib
from contextlib import nullcontext

import grpc
import pytest
import uvicorn

from dispatcher.fronts.grpc.server import MESSAGE_S
from dispatcher.fronts.rest import calls, compression, http1
from dispatcher.fronts.rest.calls import (
    PART_BYTES,
    STALLED_S,
    HttpError,
    HttpRequest,
    Room,
    Unread,
    body_of,
    discard,
    read_body,
    read_text,
    refusal,
)
from dispatcher.request.admission import StatusError
from dispatcher.request.core.tenants import Tenant
from dispatcher.request.pace import SILENT_S
from dispatcher.transport.h2 import Held
from tests.support.certificates import Authority
from tests.support.virtual.loop import virtual_loop

MOST = 64 * 2**20


class Sending:
    """Client that sends parts of a body, and the end only if `ends`."""

    def __init__(self, *parts: bytes, ends: bool = True, pause_s: float = 0.0) -> None:
        self.left, self._ends, self._pause_s = list(parts), ends, pause_s

    async def __call__(self):
        await asyncio.sleep(self._pause_s)
        if not self.left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self.left.pop(0), "more_body": bool(self.left) or not self._ends}


class Anyone:
    """Access control that admits all."""

    def admit(self, tenant: Tenant, count: int) -> None:
        """Admit."""


def asking(client: Sending, held: Held, **headers: str) -> HttpRequest:
    return HttpRequest("POST", "/", headers, client, None, room=Room(held))


def full(error: StatusError) -> bool:
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "try again later" in error.details


@pytest.mark.parametrize("pause_s", [0.0, MESSAGE_S / 3])
def test_a_body_that_does_not_end_is_refused_after_a_minute(pause_s):
    with virtual_loop() as loop:
        client, since_s = Sending(*[b"x"] * 1000, ends=False, pause_s=pause_s), loop.time()
        with pytest.raises(HttpError, match="60 s") as refused:
            loop.run_until_complete(asyncio.wait_for(read_body(asking(client, Held()), MOST), 3600))
        assert loop.time() - since_s == pytest.approx(MESSAGE_S)
        assert (refused.value.status, refused.value.headers) == (408, ((b"connection", b"close"),))


@pytest.mark.parametrize(
    ("parts", "pause_s", "ends_s"),
    [
        ([b"x"] * 100_000, 1.0, SILENT_S),  # drips
        ([b"x" * 40_960] * 7, 1.0, SILENT_S + 7),  # is silent after that
        ([b"x" * 4096] * 600, 1.5, 3 * SILENT_S),  # is slower in the mean: 60 s + t / 1.5 = t
    ],
)
def test_a_body_by_parts_that_comes_too_slowly_is_refused(parts, pause_s, ends_s):
    async def read(body):
        async for _ in body:
            pass

    for reading in (read, discard):
        with virtual_loop() as loop:
            client, since_s = Sending(*parts, ends=False, pause_s=pause_s), loop.time()
            refused = nullcontext() if reading is discard else pytest.raises(HttpError, match="4096 bytes/s")
            with refused as caught:
                loop.run_until_complete(asyncio.wait_for(reading(body_of(asking(client, Held()))), 3600))
            assert loop.time() - since_s == pytest.approx(ends_s, rel=0.02)
            assert caught is None or caught.value.status == 408


async def test_a_body_is_counted_until_its_request_ends():
    held = Held(1000)
    ask = asking(Sending(b"ab", b"", b"c", b"d" * 997), held)
    assert await read_body(ask, MOST) == b"abc" + b"d" * 997
    assert held.bytes == 1000
    ask.room.free()
    assert held.bytes == 0


async def test_a_body_without_room_is_refused_and_read_to_its_end():
    held = Held(1000)
    held.bytes = 900  # of gRPC
    client = Sending(*[b"x" * 60] * 9)
    with pytest.raises(StatusError) as refused:
        await read_body(asking(client, held), MOST)
    assert full(refused.value)
    assert not client.left
    assert held.bytes == 900, "what is refused is not held"


async def test_a_body_that_is_too_large_is_not_held():
    held = Held()
    with pytest.raises(HttpError, match="at most"):
        await read_body(asking(Sending(b"x" * 60, b"x" * 60), held), 100)
    assert held.bytes == 0


async def test_a_decompressed_body_is_counted_part_by_part():
    held, bomb = Held(10 * 2**20), gzip.compress(bytes(50 * 2**20))
    ask = asking(Sending(bomb), held, **{"content-encoding": "gzip"})
    with pytest.raises(StatusError) as refused:
        await read_text(ask, Anyone(), Tenant("t"), MOST)
    assert full(refused.value)
    assert held.bytes <= held.bytes_max + compression.PART_BYTES + len(bomb)
    ask.room.free()
    assert held.bytes == 0


@pytest.mark.parametrize("size", [0, 1, compression.PART_BYTES, compression.PART_BYTES + 1, 9 * 2**20])
@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
async def test_a_decompressed_body_is_whole_and_counted_in_place_of_the_one_that_came(size, compress):
    held, plain = Held(), bytes(range(256)) * (size // 256) + bytes(size % 256)
    encoding = "gzip" if compress is gzip.compress else "deflate"
    ask = asking(Sending(compress(plain)), held, **{"content-encoding": encoding})
    assert await read_text(ask, Anyone(), Tenant("t"), size + 100) == plain
    assert held.bytes == size


async def test_a_decompressed_body_is_expanded_to_one_byte_more_than_its_limit():
    body = gzip.compress(bytes(9 * 2**20))
    assert len(await compression.decompress(body, "gzip", 5 * 2**20, Room(Held()).take)) == 5 * 2**20 + 1


class Client:
    """Client's end of a connection, which reads once `reading` is set."""

    def __init__(self) -> None:
        self.reading, self.aborted, self.got = asyncio.Event(), False, b""

    async def send(self, event) -> None:
        await self.reading.wait()
        self.got += event["body"]

    def get_extra_info(self, name: str) -> str:
        return name

    def abort(self) -> None:
        self.aborted = True
        self.reading.set()


def test_of_too_many_unread_answers_the_one_that_nobody_reads_goes():
    async def play(loop) -> None:
        held, body = Held(20 * PART_BYTES), bytes(6 * PART_BYTES)
        unread, clients = Unread(held), [Client() for _ in range(4)]
        slow, stalled, last, small = clients
        tasks = [asyncio.create_task(unread.send(each.send, each, body)) for each in (stalled, slow)]
        await asyncio.sleep(STALLED_S - 0.1)
        assert held.bytes == 12 * PART_BYTES
        slow.reading.set()
        await tasks[1]
        assert (slow.got, held.bytes) == (body, 6 * PART_BYTES)
        await asyncio.sleep(0.2)
        small.reading.set()
        await unread.send(small.send, small, b"found")
        assert (small.got, stalled.aborted) == (b"found", False), "there is room"
        tasks.append(asyncio.create_task(unread.send(last.send, last, body)))
        await asyncio.sleep(0.1)
        assert [each.aborted for each in clients] == [False, True, False, False]
        last.reading.set()
        await asyncio.gather(*tasks)
        assert (held.bytes, last.got) == (0, body)
        silent = Client()
        await unread.send(silent.send, silent, body)
        assert silent.aborted, "it has read nothing for READS_S"
        assert held.bytes == 0

    with virtual_loop() as loop:
        loop.run_until_complete(play(loop))


def contexts(folder) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = Authority(folder)
    pair = authority.server()
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(pair.certificate, pair.key)
    return theirs, ssl.create_default_context(cafile=str(authority.certificate))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_reads_nothing_loses_its_connection_and_a_slow_one_does_not(
    reads, secure, monkeypatch, tmp_path
):
    monkeypatch.setattr(calls, "READS_S", 1.0)
    unread, size, held_bytes = Unread(Held()), 16 * 2**20, set()

    async def app(scope, receive, send):
        async def counted(message):
            held_bytes.add(unread._held.bytes)
            await send(message)

        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await unread.send(counted, scope["extensions"]["client"]["transport"], bytes(size))

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http=http1.Http1Connection)
    config.load()
    state = uvicorn.Server(config).server_state
    loop = asyncio.get_running_loop()
    bound = socket.create_server(("127.0.0.1", 0))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)  # the system's own buffers hold megabytes
    theirs, ours = contexts(tmp_path) if secure else (None, None)
    listener = await loop.create_server(lambda: http1.Http1Connection(config, state, {}), sock=bound, ssl=theirs)
    async with listener:
        reader, writer = await asyncio.open_connection(*bound.getsockname(), limit=2**16, ssl=ours)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head, got = await reader.readuntil(b"\r\n\r\n"), 0
        assert head.startswith(b"HTTP/1.1 200")
        while reads and got < size and (part := await reader.read(2**18)):
            got += len(part)
            await asyncio.sleep(0.02)
        while not reads and state.connections:
            await asyncio.sleep(0.02)
        assert got == (size if reads else 0)
        writer.close()
    assert held_bytes == {size}
    assert unread._held.bytes == 0


@pytest.mark.parametrize(("pause_ms", "after"), [("1500", b"2"), ("-1", b""), ("soon", b""), ("9" * 5000, b"")])
def test_a_pause_that_a_slice_names_is_passed_on_where_it_is_one(pause_ms, after):
    """In gRPC one below 0, or one that is no number, says: do not try again."""
    error = StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("grpc-retry-pushback-ms", pause_ms),))
    assert dict(refusal(error).headers) == ({b"retry-after": after} if after else {})


@pytest.mark.parametrize(
    "error", [HttpError(404, "no such model"), StatusError(grpc.StatusCode.NOT_FOUND, "no such model")]
)
def test_a_refusal_reads_as_its_text(error):
    """So it stands in the errors of a batch's lines."""
    assert str(error) == "no such model"
