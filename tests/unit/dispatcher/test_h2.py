"""gRPC on our own HTTP/2: our server with both clients and with what no client sends, our client with bad servers.

Whatever came, a server ends with nothing left: no call, no byte held, no task.
"""

import asyncio
import contextlib
import gzip
import itertools
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import ngh2
import pytest

from dispatcher.transport import accepting, h2_call, h2_channel, h2_server
from dispatcher.transport.calls import Keepalive
from dispatcher.transport.core import grpc_framing as framing
from dispatcher.transport.core.grpc_framing import JOIN
from dispatcher.transport.h2 import ConnectionLimits, Held
from dispatcher.transport.h2_call import ServerBounds
from dispatcher.transport.h2_channel import H2Channel
from dispatcher.transport.h2_server import H2Server, Routes
from tests.support.aio_channel import AioChannel
from tests.support.certificates import Authority
from trefoil.runtime.security.tls import Tls

KEYS = Path(__file__).parents[2] / "support"
OWN = Tls(KEYS / "localhost.crt", KEYS / "localhost.key", KEYS / "localhost.crt")
SERVICE = "test.Service"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
PATIENCE_S = 20.0
State = grpc.ChannelConnectivity
Status = grpc.StatusCode


def path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def framed(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">I", stream_id) + payload


async def until(true: Callable[[], object]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.002)


class Answers:
    """Handlers of the test's server, and what happened to them."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.cancelled: list[str] = []
        self.metadata: tuple = ()
        self.remaining_s: float | None = None
        self.peer = ""
        self.go_on = asyncio.Event()
        self.written = 0
        self.heard: list[bytes] = []

    def routes(self) -> Routes:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        routes = Routes()
        handlers = {
            "Echo": unary(self.echo), "Parts": unary(self.parts, response_serializer=JOIN), "Slow": unary(self.slow),
            "Refuse": unary(self.refuse), "Fail": unary(self.fail), "Large": unary(self.large),
            "Each": stream(self.each), "Deaf": stream(self.deaf), "Endless": stream(self.endless),
            "Curt": stream(self.curt), "ReadWrite": stream(self.read_write), "RefuseStream": stream(self.refuse_stream),
            "Shut": stream(self.refuse),
            "Many": grpc.unary_stream_rpc_method_handler(self.many),
        }  # fmt: skip
        routes.add(SERVICE, handlers)
        return routes

    @contextlib.contextmanager
    def noting(self, name: str):
        self.began.append(name)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(name)
            raise

    async def echo(self, request, context):
        self.metadata, self.remaining_s = context.invocation_metadata(), context.time_remaining()
        self.peer = context.peer()
        context.set_trailing_metadata((("seen", "yes"), ("seen-bin", b"\0\xff")))
        return request

    async def parts(self, request, context):
        return (b"<", request, b">")

    async def slow(self, request, context):
        with self.noting("slow"):
            await self.go_on.wait()
        return request

    async def refuse(self, request, context):
        await context.abort(Status.NOT_FOUND, "no such thing: naïve % ✓", (("why", "because"), ("why-bin", b"\1")))

    async def fail(self, request, context):
        raise ValueError("bug \udcff")

    async def large(self, request, context):
        return bytes(int(request))

    async def each(self, requests, context):
        with self.noting("each"):
            async for request in requests:
                yield request

    async def deaf(self, requests, context):
        with self.noting("deaf"):
            await self.go_on.wait()
            async for request in requests:
                self.heard.append(request)
        yield b"heard"

    async def endless(self, requests, context):
        with self.noting("endless"):
            while True:
                yield bytes(100_000)
                self.written += 100_000

    async def curt(self, requests, context):
        yield b"enough"

    async def read_write(self, requests, context):
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(request)

    async def refuse_stream(self, requests, context):
        yield b"first"
        await context.abort(Status.FAILED_PRECONDITION, "second thoughts")

    async def many(self, request, context):
        count, size = map(int, request.split())
        for n in range(count):
            yield b"%d " % n + bytes(size)


class Raw:
    """One end of a connection as ngh2 has it, for what no gRPC sends. `seen` are all events."""

    def __init__(self, reader, writer, role, **options) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = ngh2.Connection(role, ngh2.Configuration(**options))
        self.seen: list = []
        self.closed = False
        self._read_events = 0

    def greet(self, settings=None) -> "Raw":
        self.h2.initiate_connection(settings)
        self.push()
        return self

    def push(self, raw: bytes = b"") -> None:
        self.writer.write(self.h2.data_to_send() + raw)
        self.seen += self.h2.events()

    async def read(self) -> None:
        try:
            data = await self.reader.read(1 << 18)
        except ConnectionError:
            data = b""
        self.closed = self.closed or not data
        if data:
            self.h2.receive_data(data)
            self.seen += self.h2.events()
            self.push()

    async def until(self, kind, stream_id=None, count=1):
        async with asyncio.timeout(PATIENCE_S):
            while len(found := self.of(kind, stream_id)) < count:
                assert not self.closed, f"closed before {kind.__name__}, after {self.seen}"
                await self.read()
        return found[count - 1]

    def of(self, kind, stream_id=None) -> list:
        return [e for e in self.seen if isinstance(e, kind) and (stream_id is None or e.stream_id == stream_id)]

    async def until_closed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ngh2.NGH2Error):
                while not self.closed:
                    await self.read()
            with contextlib.suppress(ConnectionError):  # cut off, rather than closed
                while await self.reader.read(1 << 18):
                    pass

    def request(self, method="Echo", data=None, end=True, **more) -> int:
        """Begin a call with these bytes as its body; headers of other names are added, `_` for `-`."""
        headers = {
            ":method": "POST", ":scheme": "http", ":path": path(method), ":authority": "x", "te": "trailers",
            "content-type": "application/grpc",
        }  # fmt: skip
        headers |= {key.replace("_", "-").replace("--", ":"): value for key, value in more.items()}
        coded = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        stream_id = self.h2.send_request(coded, end_stream=end and data is None)
        if data is not None:
            self.h2.send_data(stream_id, data, end_stream=end)
        self.push()
        return stream_id

    async def status(self, stream_id: int) -> tuple[str, str]:
        """Status of a call: of gRPC, or of HTTP where it is none."""
        await self.until(ngh2.StreamClosed, stream_id)
        last = [*self.of(ngh2.ResponseReceived, stream_id), *self.of(ngh2.TrailersReceived, stream_id)]
        told = {key: value for each in last for key, value in each.headers}
        if b"grpc-status" not in told:
            return told.get(b":status", b"none").decode(), ""
        return framing.status_of_trailers(told)

    def body(self, stream_id: int) -> bytes:
        return b"".join(each.data for each in self.of(ngh2.DataReceived, stream_id))


class World:
    """A server, and whoever talks to it."""

    def __init__(self, server: H2Server, answers: Answers, stack: contextlib.AsyncExitStack) -> None:
        self.server, self.answers, self._stack = server, answers, stack
        self.address = f"127.0.0.1:{server.port}"

    async def h2(self, **options) -> H2Channel:
        made = H2Channel(self.address, **options)
        self._stack.push_async_callback(made.close)
        return made

    async def aio(self, **options) -> grpc.aio.Channel:
        made = grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)], **options)
        self._stack.push_async_callback(made.close)
        return made

    async def channel(self, kind):
        made = kind(self.address)
        self._stack.push_async_callback(made.close)
        return made

    async def socket(self, receive_bytes: int = 0, limit: int = 1 << 16):
        plain = socket.socket()
        if receive_bytes:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", self.server.port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=limit)
        self._stack.callback(writer.transport.abort)
        return reader, writer

    async def raw(self, settings=None, receive_bytes=0, **options) -> Raw:
        return Raw(*await self.socket(receive_bytes), ngh2.Role.CLIENT, **options).greet(settings)

    def calls(self) -> list:
        return [call for connection in self.server.connections for call in connection.calls.values()]

    async def is_idle(self) -> None:
        """Nothing is left of any call."""
        held = self.server.held
        await until(lambda: not self.calls() and held.bytes == held.unsent_bytes == 0 and not running())

    async def serves(self) -> None:
        """Somebody else is served."""
        other = await self.h2()
        assert (await other.unary(path("Echo"), (b"still here",), 10.0))[0] == b"still here"


def running() -> list[asyncio.Task]:
    return [task for task in asyncio.all_tasks() if "ServerCall" in repr(task.get_coro())]


@contextlib.asynccontextmanager
async def serving(bounds=None, limits=None, held=None, tls=None) -> AsyncIterator[World]:
    before = asyncio.all_tasks()
    answers = Answers()
    listening = accepting.listen("127.0.0.1:0", "address")
    server = H2Server(
        answers.routes().handlers,
        bounds or ServerBounds(),
        limits or ConnectionLimits(),
        held or Held(),
        listening,
        tls,
    )
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        world = World(server, answers, stack)
        yield world
        await world.is_idle()
    await server.stop(0.0)
    await until(lambda: not server.connections and asyncio.all_tasks() <= {*before, asyncio.current_task()})
    assert server.held.bytes == server.held.unsent_bytes == 0


@pytest.fixture
async def world():
    async with serving() as made:
        yield made


@pytest.fixture(params=[AioChannel, H2Channel], ids=["grpc.aio", "h2"])
async def channel(request, world):
    return await world.channel(request.param)


@pytest.fixture
def swift(monkeypatch):
    monkeypatch.setattr(h2_server, "SWEEP_S", 0.02)


@contextlib.asynccontextmanager
async def refused(code: Status, match: str = ""):
    with pytest.raises(grpc.aio.AioRpcError, match=match or None) as error:
        yield error
    assert error.value.code() is code, error.value.details()


async def listed(answers) -> list[bytes]:
    return [each async for each in answers]


# Both clients


async def test_a_unary_call_brings_its_metadata_and_its_answer_its_trailers(world, channel):
    sent = (("token", "abc"), ("trace-bin", b"\0\xfe\xff"), ("trace-bin", b""))
    data, trailers = await channel.unary(path("Echo"), (b"one ", b"two"), 10.0, sent)
    assert data == b"one two"
    assert dict(trailers) == {"seen": "yes", "seen-bin": b"\0\xff"}
    assert set(sent) <= set(world.answers.metadata)
    assert 9.0 < world.answers.remaining_s <= 10.1
    assert world.answers.peer.startswith("ipv4:127.0.0.1:")


async def test_a_call_without_a_deadline_has_none(world, channel):
    assert await channel.unary(path("Echo"), (b"",)) == (b"", (("seen", "yes"), ("seen-bin", b"\0\xff")))
    assert world.answers.remaining_s is None


async def test_an_answer_in_parts_arrives_as_one(channel):
    assert (await channel.unary(path("Parts"), (b"x",), 10.0))[0] == b"<x>"
    large = bytes(1 << 20)
    assert (await channel.unary(path("Parts"), (large,), 10.0))[0] == b"<" + large + b">"


async def test_large_messages_pass_both_ways_and_their_windows_open_again(world, channel):
    large = bytes(range(256)) * (20 << 12)  # 20 MB, more than any window
    for _ in range(2):
        data, _ = await channel.unary(path("Echo"), (large[:7], large[7:]), 20.0)
        assert data == large


async def test_answers_of_a_stream_come_in_order(channel):
    found = await listed(channel.stream(path("Many"), (b"300 10",), 10.0))
    assert found == [b"%d " % n + bytes(10) for n in range(300)]
    assert await listed(channel.stream(path("Many"), (b"0 0",), 10.0)) == []


async def test_a_stream_of_large_answers_goes_on_as_it_is_read(channel):
    sizes = [len(each) async for each in channel.stream(path("Many"), (b"30 700000",), 20.0)]
    assert len(sizes) == 30


async def test_many_calls_at_once_get_their_own_answers(channel):
    calls = [channel.unary(path("Echo"), (b"%d" % n,), 20.0) for n in range(300)]
    assert [data for data, _ in await asyncio.gather(*calls)] == [b"%d" % n for n in range(300)]


async def test_a_refusal_brings_its_status_its_details_and_its_trailers(channel):
    async with refused(Status.NOT_FOUND) as error:
        await channel.unary(path("Refuse"), (b"",), 10.0)
    assert error.value.details() == "no such thing: naïve % ✓"
    assert {("why", "because"), ("why-bin", b"\1")} <= set(error.value.trailing_metadata())


async def test_a_stream_that_is_refused_half_way_keeps_what_came_before(channel):
    found = []
    async with refused(Status.FAILED_PRECONDITION, "second thoughts"):
        async for each in channel.stream(path("RefuseStream"), (b"",), 10.0):
            found.append(each)
    assert found == [b"first"]


@pytest.mark.parametrize(("messages", "message_bytes"), [(1, 100_000), (3, 30_000), (20, 1 << 20)])
async def test_a_stream_that_is_refused_while_it_is_sent_hears_why_once_it_has_been(world, messages, message_bytes):
    async with grpc.aio.insecure_channel(world.address) as client:
        method, heard = client.stream_stream(path("Shut")), set()
        for _ in range(max(2, 100 // messages)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(iter([bytes(message_bytes)] * messages)).read()
            heard.add(refused.value.code())
    assert heard == {Status.NOT_FOUND}, "grpc.aio says INTERNAL where it is answered while it sends"


@pytest.mark.parametrize("method", ["Shut", "Nothing"])
async def test_a_stream_that_is_refused_and_pauses_hears_why_and_is_reset_without_an_error(world, monkeypatch, method):
    monkeypatch.setattr(h2_server, "PAUSE_S", 0.05)
    client = await world.raw()
    stream_id = client.request(method, GOOD[:6], end=False)
    reset = await client.until(ngh2.StreamReset, stream_id)
    (answer,) = client.of(ngh2.ResponseReceived, stream_id)
    assert (answer.end_stream, reset.error_code) == (True, 0)
    assert client.seen.index(answer) < client.seen.index(reset)
    assert (await client.status(stream_id))[0] in ("NOT_FOUND", "UNIMPLEMENTED")
    await world.is_idle()


async def test_a_stream_that_is_refused_and_never_pauses_hears_why_all_the_same(world, monkeypatch):
    monkeypatch.setattr(h2_server, "DRAIN_S", 0.3)
    client = await world.raw()
    stream_id, loop = client.request("Shut", GOOD, end=False), asyncio.get_running_loop()
    began_s = loop.time()
    while not client.of(ngh2.StreamClosed, stream_id):
        client.h2.send_data(stream_id, bytes(1000))
        client.push()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.read(), 0.02)
    assert 0.3 <= loop.time() - began_s < 5.0
    assert (await client.status(stream_id))[0] == "NOT_FOUND"
    await world.is_idle()


async def test_a_stream_that_is_refused_as_the_server_stops_hears_why_at_once(world):
    client = await world.raw()
    stream_id = client.request("Shut", GOOD, end=False)
    await until(lambda: [call for call in world.calls() if call.refusal is not None])
    await world.server.stop(0.0)
    assert (await client.status(stream_id))[0] == "NOT_FOUND"


async def test_a_handler_that_fails_says_so(channel):
    async with refused(Status.UNKNOWN, "ValueError.*bug"):
        await channel.unary(path("Fail"), (b"",), 10.0)


async def test_a_method_that_nobody_has_is_unimplemented(channel):
    async with refused(Status.UNIMPLEMENTED, "Method not found!"):
        await channel.unary(path("Nothing"), (bytes(3_000_000),), 10.0)
    async with refused(Status.UNIMPLEMENTED, "Method not found!"):
        await listed(channel.stream("/other/Service", (b"",), 10.0))


async def test_a_call_that_outlives_its_deadline_ends_at_both_ends(world, channel):
    async with refused(Status.DEADLINE_EXCEEDED):
        await channel.unary(path("Slow"), (b"",), 0.1)
    await until(lambda: world.answers.cancelled == ["slow"])
    async with refused(Status.DEADLINE_EXCEEDED):
        await listed(channel.stream(path("Deaf"), (b"",), 0.1))
    await until(lambda: world.answers.cancelled == ["slow", "deaf"])


async def test_a_deadline_that_has_passed_calls_nobody_for_long(channel):
    async with refused(Status.DEADLINE_EXCEEDED):
        await channel.unary(path("Slow"), (b"",), 0.0)


async def test_cancelling_a_call_reaches_its_handler(world, channel):
    task = asyncio.create_task(channel.unary(path("Slow"), (b"",)))
    await until(lambda: world.answers.began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: world.answers.cancelled == ["slow"])


async def test_leaving_a_stream_reaches_its_handler(world, channel):
    answers = channel.stream(path("Endless"), (b"",), 60.0)
    async with contextlib.aclosing(answers):
        assert await anext(answers) == bytes(100_000)
    await until(lambda: world.answers.cancelled == ["endless"])


async def test_closing_a_channel_reaches_the_handlers_of_its_calls(world, channel):
    tasks = [asyncio.create_task(channel.unary(path("Slow"), (b"",))) for _ in range(3)]
    await until(lambda: len(world.answers.began) == 3)
    await channel.close()
    await until(lambda: world.answers.cancelled == ["slow"] * 3)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


@pytest.mark.parametrize("kind", [AioChannel, H2Channel])
async def test_a_message_beyond_the_bound_is_exhausted_and_one_at_the_bound_passes(kind):
    async with serving(ServerBounds(message_bytes_max=100_000)) as world:
        channel = await world.channel(kind)
        assert len((await channel.unary(path("Echo"), (bytes(100_000),), 10.0))[0]) == 100_000
        async with refused(Status.RESOURCE_EXHAUSTED, r"Received message larger than max \(100001 vs. 100000\)"):
            await channel.unary(path("Echo"), (bytes(100_001),), 10.0)
        async with refused(Status.RESOURCE_EXHAUSTED, "larger than max"):
            await channel.unary(path("Echo"), (bytes(30_000_000),), 10.0)
        assert (await channel.unary(path("Echo"), (b"x",), 10.0))[0] == b"x"


async def test_refused_bytes_open_their_connections_window_again(channel):
    for _ in range(12):
        async with refused(Status.UNIMPLEMENTED):
            await channel.unary(path("Nothing"), (bytes(2 << 20),), 10.0)
    assert await listed(channel.stream(path("Curt"), (bytes(900_000),), 10.0)) == [b"enough"]


@pytest.mark.parametrize("kind", [AioChannel, H2Channel])
async def test_messages_that_no_handler_read_open_their_connections_window_again(kind):
    limits = ConnectionLimits(stream_window_bytes=1 << 17, connection_window_bytes=1 << 18)
    async with serving(limits=limits) as world:
        channel = await world.channel(kind)
        for _ in range(10):
            assert await listed(channel.stream(path("Curt"), (bytes(100_000),), 10.0)) == [b"enough"]
        assert len((await channel.unary(path("Echo"), (bytes(1 << 20),), 10.0))[0]) == 1 << 20


@pytest.mark.parametrize("cut", [3, 9, 50_000, 100_013])
async def test_data_in_whose_midst_a_call_ends_opens_its_connections_window_again(cut):
    limits = ConnectionLimits(stream_window_bytes=1 << 17, connection_window_bytes=1 << 18)
    async with serving(limits=limits) as world:
        client = await world.raw()
        await client.until(ngh2.SettingsReceived)
        for _ in range(20):
            stream_id = client.request("Curt", end=False)
            data = frame(DATA, 0, stream_id, framed(bytes(100_000)))
            client.writer.write(data[:cut])
            await client.until(ngh2.TrailersReceived, stream_id)
            client.writer.write(data[cut:])
            await client.until(ngh2.StreamReset, stream_id)
        assert await client.status(client.request(data=framed(bytes(100_000)))) == ("OK", "")
        await world.is_idle()


# grpc.aio's other ways


@pytest.mark.parametrize("method", ["Each", "ReadWrite"])
async def test_messages_go_both_ways_in_turn(world, method):
    call = (await world.aio()).stream_stream(path(method))()
    for n in range(20):
        await call.write(b"%d" % n)
        assert await call.read() == b"%d" % n
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Status.OK


async def test_a_client_that_says_all_first_gets_all_back(world):
    call = (await world.aio()).stream_stream(path("Each"))(iter([bytes(size) for size in range(0, 40_000, 400)]))
    assert [len(each) async for each in call] == list(range(0, 40_000, 400))


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_are_read(world, algorithm):
    channel = await world.aio(compression=algorithm)
    for size in (100, 3_000, 3_000_000):
        data = bytes(range(100)) * (size // 100)
        assert await channel.unary_unary(path("Echo"))(data, timeout=10.0) == data
        assert [each async for each in channel.stream_stream(path("Each"))(iter([data, b"", data]))] == [
            data,
            b"",
            data,
        ]


async def test_what_a_request_becomes_when_decompressed_is_bounded():
    async with serving(ServerBounds(message_bytes_max=50_000)) as world:
        channel = await world.aio(compression=grpc.Compression.Gzip)
        for size in (51_000, 20_000_000):
            async with refused(Status.RESOURCE_EXHAUSTED, "decompressed message larger than max"):
                await channel.unary_unary(path("Echo"))(bytes(size), timeout=10.0)
            async with refused(Status.RESOURCE_EXHAUSTED, "decompressed message larger than max"):
                await listed(channel.stream_stream(path("Each"))(iter([bytes(size)])))
        assert await channel.unary_unary(path("Echo"))(bytes(50_000), timeout=10.0) == bytes(50_000)


async def test_a_cancelled_stream_of_grpc_reaches_its_handler(world):
    call = (await world.aio()).stream_stream(path("Each"))()
    await call.write(b"x")
    assert await call.read() == b"x"
    call.cancel()
    await until(lambda: world.answers.cancelled == ["each"])


# What no client sends

INTERNAL, EXHAUSTED = "INTERNAL", "RESOURCE_EXHAUSTED"
GOOD = framed(b"good")
BOMB = gzip.compress(bytes(10_000_000))
WRONG = {
    "two messages in a unary call": ({"data": GOOD * 2}, INTERNAL, "more than one message"),
    "no message in a unary call": ({"data": b""}, INTERNAL, "without a message"),
    "headers alone": ({}, INTERNAL, "without a message"),
    "half a prefix": ({"data": GOOD[:3]}, INTERNAL, "ended within a message"),
    "a length that lies": ({"data": struct.pack(">BI", 0, 100) + b"x" * 99}, INTERNAL, "ended within a message"),
    "a length of 4 GB": ({"data": struct.pack(">BI", 0, 2**32 - 1) + b"x", "end": False}, EXHAUSTED, "429496729"),
    "a first byte that is none": ({"data": framed(b"x", 7)}, INTERNAL, "first byte of a message is 7"),
    "compressed without an encoding": ({"data": framed(b"x", 1)}, INTERNAL, "names no encoding"),
    "compressed as identity": ({"data": framed(b"x", 1), "grpc_encoding": "identity"}, INTERNAL, "names no encoding"),
    "broken gzip": ({"data": framed(b"x", 1), "grpc_encoding": "gzip"}, INTERNAL, "cannot be decompressed"),
    "half of gzip": ({"data": framed(BOMB[:60], 1), "grpc_encoding": "gzip"}, INTERNAL, "cannot|larger"),
    "a bomb": ({"data": framed(BOMB, 1), "grpc_encoding": "gzip"}, EXHAUSTED, "decompressed message larger"),
    "an unknown encoding": ({"data": GOOD, "grpc_encoding": "snappy"}, "UNIMPLEMENTED", "compression 'snappy'"),
    "a timeout that is none": ({"data": GOOD, "grpc_timeout": "soon"}, INTERNAL, "grpc-timeout is 'soon'"),
    "a timeout without a unit": ({"data": GOOD, "grpc_timeout": "100"}, INTERNAL, "grpc-timeout is '100'"),
    "an unknown method": ({"data": GOOD, "method": "Nothing"}, "UNIMPLEMENTED", "Method not found!"),
    "an unknown method that goes on": ({"data": GOOD, "method": "Nothing", "end": False}, "UNIMPLEMENTED", ""),
    "a GET": ({"__method": "GET"}, "405", ""),
    "a PUT with a body": ({"__method": "PUT", "data": GOOD}, "405", ""),
    "JSON": ({"content_type": "application/json", "data": b"{}"}, "415", ""),
    "a stream of a length that lies": ({"method": "Each", "data": GOOD + GOOD[:7]}, INTERNAL, "ended within a message"),
    "a stream with a first byte that is none": ({"method": "Each", "data": framed(b"", 2)}, INTERNAL, "first byte"),
    "a stream compressed without an encoding": ({"method": "Each", "data": framed(b"", 1)}, INTERNAL, "names no"),
    "a stream with a message too large": ({"method": "Each", "data": framed(bytes(99_999))}, EXHAUSTED, "larger"),
    "a stream of an unknown encoding": ({"method": "Each", "grpc_encoding": "br"}, "UNIMPLEMENTED", "'br'"),
    "a stream with a timeout that is none": ({"method": "Each", "grpc_timeout": "1y"}, INTERNAL, "grpc-timeout is"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_call_gets_a_status_and_the_connection_goes_on(name):
    request, code, details = WRONG[name]
    async with serving(ServerBounds(message_bytes_max=50_000)) as world:
        client = await world.raw()
        for _ in range(3):
            stream_id = client.request(**request)
            if not request.get("end", True):
                await client.until(ngh2.ResponseReceived, stream_id)
                with contextlib.suppress(ngh2.StreamProtocolError):  # it was told to stop
                    client.h2.send_data(stream_id, b"more", end_stream=True)
                client.push()
            found = await client.status(stream_id)
            assert found[0] == code
            assert re.search(details, found[1])
        assert await client.status(client.request(data=GOOD)) == ("OK", "")
        await world.is_idle()


async def test_a_call_that_is_refused_is_told_to_stop_sending(world):
    client = await world.raw()
    stream_id = client.request("Nothing", GOOD, end=False)
    assert (await client.until(ngh2.StreamReset, stream_id)).error_code == 0
    assert await client.status(stream_id) == ("UNIMPLEMENTED", "Method not found!")


async def test_the_server_keeps_a_deadline_that_its_client_forgets(world):
    client = await world.raw()
    for method, data in (("Slow", GOOD), ("Slow", GOOD[:6]), ("Deaf", GOOD)):
        stream_id = client.request(method, data, end=data is GOOD, grpc_timeout="50m")
        await client.until(ngh2.ResponseReceived, stream_id)
        if data is not GOOD:
            client.h2.send_data(stream_id, b"x", end_stream=True)
            client.push()
        assert await client.status(stream_id) == ("DEADLINE_EXCEEDED", "Deadline Exceeded")
    assert world.answers.cancelled == ["slow", "deaf"]


async def test_trailers_of_a_client_end_its_requests(world):
    client = await world.raw()
    stream_id = client.request("Each", GOOD, end=False)
    await client.until(ngh2.DataReceived, stream_id)
    client.h2.send_trailers(stream_id, [(b"x", b"y")])
    client.push()
    assert await client.status(stream_id) == ("OK", "")
    assert client.body(stream_id) == GOOD


async def test_a_reset_in_the_same_turn_as_its_call_leaves_nothing(world):
    client = await world.raw()
    await client.until(ngh2.SettingsReceived)
    for method in ("Slow", "Each", "Echo", "Nothing"):
        for data in (GOOD, GOOD[:6], b""):
            headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path(method).encode()),
                       (b":authority", b"x"), (b"content-type", b"application/grpc")]  # fmt: skip
            stream_id = client.h2.send_request(headers)
            client.h2.send_data(stream_id, data)
            sent = client.h2.data_to_send()
            client.writer.write(sent + frame(RST, 0, stream_id, struct.pack(">I", 8)))
    await client.writer.drain()
    await world.serves()
    await world.is_idle()


GARBAGE = {
    "HTTP/1.1": b"POST /test.Service/Echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    "an upgrade offer": b"POST /test.Service/Echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: 24\r\n\r\n" + PREFACE,
    "zeros": bytes(1000),
    "noise": bytes(range(256)) * 40,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "a preface and noise": PREFACE + bytes(range(1, 250)),
    "data before settings": PREFACE + frame(DATA, 0, 1, b"x"),
    "data on no stream": PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 0, b"x"),
    "a frame too large": PREFACE + frame(SETTINGS, 0, 0) + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "a window beyond its bound": PREFACE + frame(SETTINGS, 0, 0) + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 2,
    "headers that are no HPACK": PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 5, 1, b"\xff" * 50),
    "an even stream": PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 5, 2, b"\x82"),
    "a continuation of nothing": PREFACE + frame(SETTINGS, 0, 0) + frame(CONTINUATION, 4, 1, b"\x82"),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_bytes_that_are_no_http2_close_their_connection_and_no_other(world, name):
    other = await world.h2()
    waiting = asyncio.create_task(other.unary(path("Slow"), (b"x",), 20.0))
    await until(lambda: world.answers.began)
    reader, writer = await world.socket()
    writer.write(GARBAGE[name])
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
    await until(lambda: len(world.server.connections) == 1)
    world.answers.go_on.set()
    assert (await waiting)[0] == b"x"


async def test_a_client_that_leaves_at_once_leaves_nothing(world):
    for sent in (b"", PREFACE[:10], PREFACE, PREFACE + frame(SETTINGS, 0, 0)):
        _, writer = await world.socket()
        writer.write(sent)
        await writer.drain()
        writer.transport.abort()
    await world.serves()
    await until(lambda: len(world.server.connections) <= 1)


async def flood(world: World, pieces) -> None:
    """Send all this without reading anything, until the server has closed the connection."""
    _, writer = await world.socket(receive_bytes=4096, limit=1024)
    writer.transport.pause_reading()
    writer.transport.set_write_buffer_limits(1 << 18)
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    await until(lambda: world.server.connections)
    (connection,) = world.server.connections
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            for piece in pieces:
                if connection.closed:
                    break
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
    await until(lambda: connection.closed)


async def test_pings_whose_answers_nobody_reads_end_their_connection(world):
    await flood(world, itertools.repeat(frame(PING, 0, 0, bytes(8)) * 5000))
    await world.serves()


async def test_settings_whose_acknowledgements_nobody_reads_end_their_connection(world):
    await flood(world, itertools.repeat(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 70_000)) * 5000))
    await world.serves()


async def test_endless_headers_end_their_connection():
    async with serving(limits=ConnectionLimits(header_bytes_max=8192)) as world:
        client = await world.raw(max_send_header_block_length=10_000_000)
        assert await client.status(client.request(data=GOOD, x="y" * 7000)) == ("OK", "")
        stream_id = client.request(data=GOOD, **{f"x_{n}": "y" * 100 for n in range(100)})
        await client.until_closed()
        assert not client.of(ngh2.DataReceived, stream_id)
        await world.serves()
        await world.is_idle()


async def test_a_flood_of_continuations_ends_its_connection(world):
    literal = b"\x00\x01a\x01b"
    start = frame(HEADERS, 0, 1, b"\x83\x86" + literal)
    await flood(world, itertools.chain([start], itertools.repeat(frame(CONTINUATION, 0, 1, literal * 100), 100_000)))
    await world.serves()
    await world.is_idle()


async def test_a_flood_of_resets_ends_its_connection():
    async with serving(limits=ConnectionLimits(resets_burst=50, resets_per_s=1)) as world:
        client = await world.raw()
        await client.until(ngh2.SettingsReceived)
        with contextlib.suppress(ngh2.NGH2Error, ConnectionError):
            for _ in range(200):
                stream_id = client.request("Slow", GOOD)
                client.h2.reset_stream(stream_id, 8)
                client.push()
                await asyncio.sleep(0)
        await client.until_closed()
        assert len(world.answers.began) < 100
        await world.serves()
        await until(lambda: len(world.server.connections) == 1)


async def test_a_client_opens_no_more_streams_than_its_bound():
    async with serving(limits=ConnectionLimits(streams_max=5)) as world:
        client = await world.raw()
        await client.until(ngh2.SettingsReceived)
        for _ in range(20):
            client.request("Slow", GOOD)
        await until(lambda: len(world.answers.began) == 5)
        assert len(world.calls()) == 5
        world.answers.go_on.set()
        await client.until(ngh2.StreamClosed, count=20)


# Who does not read


async def test_a_handler_that_does_not_read_keeps_its_clients_window_closed():
    limits = ConnectionLimits(stream_window_bytes=100_000, connection_window_bytes=1 << 20)
    async with serving(limits=limits) as world:
        client = await world.raw()
        await client.until(ngh2.SettingsReceived)
        stream_id = client.request("Deaf", framed(bytes(50_000)) * 40, end=True)
        await until(lambda: world.server.held.bytes > 90_000)
        await world.serves()
        assert world.server.held.bytes <= 100_000 + 10 * h2_call.MESSAGE_BYTES
        world.answers.go_on.set()
        assert await client.status(stream_id) == ("OK", "")
        assert [len(each) for each in world.answers.heard] == [50_000] * 40


async def test_messages_larger_than_the_window_reach_a_handler_that_reads():
    limits = ConnectionLimits(stream_window_bytes=70_000, connection_window_bytes=70_000)
    async with serving(limits=limits) as world:
        call = (await world.aio()).stream_stream(path("Each"))(iter([bytes(1_000_000)] * 3))
        assert [len(each) async for each in call] == [1_000_000] * 3


async def test_calls_that_there_is_no_room_for_are_refused_until_there_is():
    async with serving(held=Held(200_000)) as world:
        client = await world.h2()
        first = [asyncio.create_task(client.unary(path("Slow"), (bytes(size),), 20.0)) for size in (180_000, 21_000)]
        await until(lambda: len(world.answers.began) == 2)
        async with refused(Status.RESOURCE_EXHAUSTED, "held here, at most 200000"):
            await client.unary(path("Echo"), (bytes(1000),), 10.0)
        world.answers.go_on.set()
        assert [len(data) for data, _ in await asyncio.gather(*first)] == [180_000, 21_000]
        await world.is_idle()
        assert len((await client.unary(path("Echo"), (bytes(1000),), 10.0))[0]) == 1000


async def test_refusing_what_there_is_no_room_for_opens_the_window_again():
    limits = ConnectionLimits(stream_window_bytes=1 << 16, connection_window_bytes=1 << 17)
    async with serving(limits=limits, held=Held(100_000)) as world:
        busy, client = await world.h2(), await world.h2()
        first = [asyncio.create_task(busy.unary(path("Slow"), (bytes(size),), 20.0)) for size in (60_000, 45_000)]
        await until(lambda: len(world.answers.began) == 2)
        for _ in range(10):
            async with refused(Status.RESOURCE_EXHAUSTED, "held here"):
                await client.unary(path("Echo"), (bytes(30_000),), 10.0)
        world.answers.go_on.set()
        await asyncio.gather(*first)
        await world.is_idle()
        assert len((await client.unary(path("Echo"), (bytes(90_000),), 10.0))[0]) == 90_000


async def test_a_stream_whose_client_does_not_read_waits(world):
    client = await world.raw(auto_window_update=False)
    stream_id = client.request("Endless", GOOD)
    await client.until(ngh2.DataReceived, stream_id)
    await until(lambda: world.answers.written >= h2_call.STREAM_UNSENT_BYTES_MAX)
    await world.serves()
    assert world.answers.written <= h2_call.STREAM_UNSENT_BYTES_MAX + 300_000
    held = world.server.held
    assert held.unsent_bytes <= held.bytes <= h2_call.STREAM_UNSENT_BYTES_MAX + 300_000
    client.h2.reset_stream(stream_id)
    client.push()
    await until(lambda: world.answers.cancelled == ["endless"])


async def test_a_stream_that_is_read_goes_on_beside_one_that_is_not(world):
    client = await world.raw({4: 1 << 22}, auto_window_update=False)
    client.h2.set_local_window_size(1 << 30)
    stuck, read = client.request("Many", framed(b"40 1000000")), client.request("Many", framed(b"8 1000000"))
    others = []
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            before = len(client.seen)
            await client.read()
            for event in client.seen[before:]:
                if isinstance(event, ngh2.DataReceived) and event.stream_id == read:
                    client.h2.acknowledge_received_data(len(event.data), read)
            others.append(client.request("Large", framed(b"100000"))) if len(others) < 20 else None
            client.push()
            if client.of(ngh2.StreamClosed, read):
                break
    assert len(client.body(read)) > 8_000_000
    client.h2.reset_stream(stuck)
    client.push()


async def test_a_client_that_leaves_its_answers_unread_gets_no_more_calls():
    async with serving(ServerBounds(connection_unread_bytes_max=500_000)) as world:
        client = await world.raw(auto_window_update=False)
        first = client.request("Large", framed(b"2000000"))
        await client.until(ngh2.DataReceived, first)
        await until(lambda: world.server.held.unsent_bytes > 500_000)
        code, details = await client.status(client.request("Echo", GOOD))
        assert (code, "bytes of answers wait here to be read" in details) == ("RESOURCE_EXHAUSTED", True)
        await world.serves()
        client.h2.acknowledge_received_data(len(client.body(first)), first)
        client.h2.set_local_window_size(1 << 24)
        client.h2.set_local_window_size(1 << 24, stream_id=first)
        client.push()
        assert await client.status(first) == ("OK", "")
        assert await client.status(client.request("Echo", GOOD)) == ("OK", "")


async def test_an_answer_that_its_client_gives_up_unread_is_counted_no_more(world):
    client = await world.raw(auto_window_update=False)
    given_up = client.request("Large", framed(b"2000000"))
    await client.until(ngh2.DataReceived, given_up)
    await until(lambda: world.server.held.unsent_bytes > 500_000)
    client.h2.reset_stream(given_up)
    client.push()
    await until(lambda: not world.server.held.unsent_bytes)


async def test_the_client_that_reads_least_is_cut_off_where_answers_take_half_of_the_room():
    async with serving(held=Held(4_000_000)) as world:
        small, worst = [await world.raw(auto_window_update=False) for _ in range(2)]
        small.request("Large", framed(b"300000"))
        await small.until(ngh2.DataReceived)
        for _ in range(3):
            worst.request("Large", framed(b"1500000"))
        await worst.until_closed()
        await world.serves()
        assert len(world.server.connections) == 2
        assert 0 < world.server.held.unsent_bytes < 400_000
        small.writer.transport.abort()


# Time


@pytest.mark.parametrize("method", ["Echo", "Each"])
async def test_a_message_that_dribbles_exceeds_its_time(swift, method):
    async with serving(ServerBounds(message_s=0.2)) as world:
        client = await world.raw()
        stream_id = client.request(method, framed(bytes(100))[:20], end=False)
        for _ in range(100):
            if client.of(ngh2.ResponseReceived, stream_id):
                break
            client.h2.send_data(stream_id, b"x")
            client.push()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.read(), 0.02)
        client.h2.end_stream(stream_id)
        client.push()
        code, details = await client.status(stream_id)
        assert (code, "did not come within 0.2 s" in details) == ("DEADLINE_EXCEEDED", True)


async def test_a_unary_call_that_sends_nothing_exceeds_its_time_and_a_stream_may_be_silent(swift):
    async with serving(ServerBounds(message_s=0.1)) as world:
        client = await world.raw()
        silent, stream = client.request("Echo", b"", end=False), client.request("Each", GOOD, end=False)
        await client.until(ngh2.ResponseReceived, silent)
        await client.until(ngh2.DataReceived, stream)
        await asyncio.sleep(0.3)
        client.h2.send_data(stream, GOOD, end_stream=True)
        client.push()
        assert await client.status(stream) == ("OK", "")
        assert client.body(stream) == GOOD * 2


async def test_a_handler_may_take_longer_than_a_message(swift):
    async with serving(ServerBounds(message_s=0.1)) as world:
        client = await world.h2()
        call = asyncio.create_task(client.unary(path("Slow"), (b"x",), 20.0))
        await asyncio.sleep(0.4)
        world.answers.go_on.set()
        assert (await call)[0] == b"x"


async def test_a_connection_that_says_nothing_is_closed(swift):
    async with serving(ServerBounds(message_s=0.1)) as world:
        reader, writer = await world.socket()
        writer.write(PREFACE[:9])
        greeted = await world.raw()
        await greeted.until(ngh2.SettingsReceived)
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
        await asyncio.sleep(0.2)
        assert len(world.server.connections) == 1
        assert await greeted.status(greeted.request(data=GOOD)) == ("OK", "")


# Ends


async def stop_while_it_answers(world, channel) -> None:
    """The server waits for the call that it has."""
    call = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 30.0))
    await until(lambda: world.answers.began)
    stop = asyncio.create_task(world.server.stop(20.0))
    await asyncio.sleep(0.4)
    assert not stop.done()
    world.answers.go_on.set()
    assert (await call)[0] == b"x"
    await asyncio.wait_for(stop, 5.0)


async def test_a_graceful_stop_lets_calls_finish(channel, world):
    await stop_while_it_answers(world, channel)
    async with refused(Status.UNAVAILABLE):
        await channel.unary(path("Echo"), (b"x",), 5.0)


async def test_a_stop_waits_for_calls_also_after_all_connections_have_once_gone(world):
    first = await world.h2()
    await first.unary(path("Echo"), (b"x",), 10.0)
    await first.close()
    await until(lambda: not world.server.connections)
    await stop_while_it_answers(world, await world.h2())


async def test_a_second_stop_with_a_shorter_grace_cuts_what_the_first_waits_for(channel, world):
    call = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 30.0))
    await until(lambda: world.answers.began)
    first = asyncio.create_task(world.server.stop(30.0))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(world.server.stop(0.05), 5.0)
    async with refused(Status.UNAVAILABLE, "the server is stopping"):
        await call
    await asyncio.wait_for(first, 5.0)
    assert world.answers.cancelled == ["slow"]


async def test_a_stop_without_grace_ends_streams_half_messages_and_silent_connections(world):
    client = await world.raw()
    for method, data, end in (("Endless", GOOD, True), ("Each", GOOD[:7], False), ("Echo", GOOD[:7], False)):
        client.request(method, data, end)
    await world.socket()
    _, writer = await world.socket()
    writer.write(PREFACE + bytes(range(1, 250)))
    await until(lambda: len(world.calls()) == 3)
    await asyncio.wait_for(world.server.stop(0.0), 5.0)
    assert not world.server.connections
    await world.is_idle()


async def test_a_connection_that_broke_while_its_client_does_not_read_does_not_keep_a_server_from_stopping(world):
    client = await world.raw(auto_window_update=False, receive_bytes=4096)
    client.h2.set_local_window_size(1 << 30)
    client.h2.update_settings({4: 1 << 30})
    client.push()
    client.request("Large", framed(b"20000000"))
    await until(lambda: world.server.held.unsent_bytes > 1_000_000)
    client.writer.write(frame(DATA, 0, 0, b"x"))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(world.server.stop(0.1), 5.0)
    assert not world.server.connections


async def test_a_connection_that_is_replaced_fails_no_call(world):
    answered, channel = 0, await world.h2()
    for _ in range(30):
        for connection in list(world.server.connections):
            connection.leave()
        calls = [channel.unary(path("Echo"), (b"x",), 10.0) for _ in range(5)]
        answered += len(await asyncio.gather(*calls))
        await asyncio.sleep(0.005)
    assert answered == 150


async def test_a_stream_outlives_the_connections_last_word(channel, world):
    answers = channel.stream(path("Many"), (b"20 200000",), 20.0)
    assert (await anext(answers)).startswith(b"0 ")
    for connection in list(world.server.connections):
        connection.leave()
    await asyncio.sleep(0.3)
    assert len(await listed(answers)) == 19


async def test_a_connection_has_an_age_at_which_it_is_replaced(swift, channel_kinds):
    async with serving(ServerBounds(connection_age_max_s=0.1, connection_age_grace_s=0.5)) as world:
        channel = await world.channel(channel_kinds)
        peers = set()
        cut = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 20.0))
        async with asyncio.timeout(PATIENCE_S):
            while len(peers) < 4:
                await channel.unary(path("Echo"), (b"x",), 10.0)
                peers.add(world.answers.peer)
                await asyncio.sleep(0.01)
        async with refused(Status.UNAVAILABLE, "the server is stopping"):
            await cut


@pytest.fixture(params=[AioChannel, H2Channel], ids=["grpc.aio", "h2"])
def channel_kinds(request):
    return request.param


# TLS


async def test_tls_serves_both_clients_and_no_one_without_http2():
    async with serving(tls=OWN.server_context) as world:
        pem = (KEYS / "localhost.crt").read_bytes()
        for kind in (AioChannel, H2Channel):
            channel = kind(f"127.0.0.1:{world.server.port}", tls=OWN, name="localhost")
            assert len((await channel.unary(path("Echo"), (bytes(3 << 20),), 10.0))[0]) == 3 << 20
            assert len(await listed(channel.stream(path("Many"), (b"5 600000",), 10.0))) == 5
            await channel.close()
        context = ssl.create_default_context(cadata=pem.decode())
        reader, writer = await asyncio.open_connection("localhost", world.server.port, ssl=context)
        writer.write(PREFACE)
        with contextlib.suppress(ConnectionError):
            assert PREFACE not in await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        _, plain = await world.socket()
        plain.write(PREFACE)
        await until(lambda: not world.server.connections)


async def test_a_certificate_that_nobody_trusts_fails_to_connect(tmp_path):
    async with serving(tls=OWN.server_context) as world:
        channel = H2Channel(f"localhost:{world.server.port}", tls=Tls(None, None, Authority(tmp_path).certificate))
        async with refused(Status.UNAVAILABLE, "failed to connect.*certificate"):
            await channel.unary(path("Echo"), (b"x",), 10.0)
        await channel.close()


async def test_mutual_tls_refuses_who_has_no_certificate_or_anothers(tmp_path):
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "other")
    own = ours.server()
    tls = Tls(own.certificate, own.key, ours.certificate, signed=False)
    async with serving(tls=tls.server_context) as world:
        address = f"localhost:{world.server.port}"
        for pair, works in ((ours.client("alpha"), True), (theirs.client("alpha"), False), (None, False)):
            credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes(), *(pair.read() if pair else ()))
            async with grpc.aio.secure_channel(address, credentials) as channel:
                call = channel.unary_unary(path("Echo"))(b"x", timeout=5.0)
                if works:
                    assert await call == b"x"
                else:
                    async with refused(Status.UNAVAILABLE):
                        await call


# Our client and bad servers


class Scene:
    """A server that plays a script for each connection, and a channel to it."""

    def __init__(self, script: Callable[[Raw], Awaitable[None]], port: int = 0) -> None:
        self._script, self.port, self.connections = script, port, 0
        self._tasks: set[asyncio.Task] = set()
        self._writers: list = []

    async def __aenter__(self) -> "Scene":
        self._server = await asyncio.start_server(self._play, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.channel = H2Channel(f"127.0.0.1:{self.port}")
        return self

    async def _play(self, reader, writer) -> None:
        self.connections += 1
        self._tasks.add(asyncio.current_task())
        self._writers.append(writer)
        with contextlib.suppress(AssertionError, ConnectionError, ngh2.NGH2Error, asyncio.CancelledError):
            await self._script(Raw(reader, writer, ngh2.Role.SERVER))

    async def __aexit__(self, *_) -> None:
        await self.channel.close()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    async def call(self, timeout_s: float | None = 5.0) -> bytes:
        return (await self.channel.unary(path("Echo"), (b"x",), timeout_s))[0]


OK_HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]


def answering(answer: Callable[[Raw, int], None]):
    """Script that does this with each request."""

    async def script(server: Raw) -> None:
        server.greet()
        for n in itertools.count(1):
            request = await server.until(ngh2.RequestReceived, count=n)
            answer(server.h2, request.stream_id)
            server.push()

    return script


def respond(headers=OK_HEADERS, data=None, trailers=None, reset=None, end=False):
    def answer(server: ngh2.Connection, stream_id: int) -> None:
        server.send_response(stream_id, headers, end_stream=end)
        if data is not None:
            server.send_data(stream_id, data, end_stream=trailers is None and reset is None)
        if trailers is not None:
            server.send_trailers(stream_id, trailers)
        if reset is not None:
            server.reset_stream(stream_id, reset)

    return answer


FINE = [(b"grpc-status", b"0")]
BAD_ANSWERS = {
    "HTTP 502": (respond([(b":status", b"502")], b"<html>"), "UNAVAILABLE", "HTTP status 502"),
    "HTTP 502 without a body": (respond([(b":status", b"502")], end=True), "UNAVAILABLE", "HTTP status 502"),
    "HTTP 404": (respond([(b":status", b"404")], b"no"), "UNIMPLEMENTED", "HTTP status 404"),
    "HTML": (respond([(b":status", b"200"), (b"content-type", b"text/html")], b"<p>"), "UNKNOWN", "none of gRPC"),
    "no grpc-status": (respond(data=GOOD), "UNKNOWN", "without a grpc-status"),
    "trailers without a grpc-status": (respond(data=GOOD, trailers=[(b"x", b"y")]), "UNKNOWN", "without a grpc-status"),
    "a grpc-status that is none": (respond(data=GOOD, trailers=[(b"grpc-status", b"x")]), "UNKNOWN", "is no status"),
    "half a message": (respond(data=GOOD[:7], trailers=FINE), "INTERNAL", "ended within a message"),
    "half a prefix": (respond(data=GOOD[:2], trailers=FINE), "INTERNAL", "ended within a message"),
    "two messages": (respond(data=GOOD * 2, trailers=FINE), "INTERNAL", "2 messages answer a unary call"),
    "no message": (respond(trailers=FINE), "INTERNAL", "0 messages answer a unary call"),
    "no message and no body": (respond([*OK_HEADERS, *FINE], end=True), "INTERNAL", "0 messages"),
    "a first byte that is none": (respond(data=b"\x09" + GOOD), "INTERNAL", "first byte of a message is 9"),
    "compressed without an encoding": (respond(data=framed(b"x", 1), trailers=FINE), "INTERNAL", "names no encoding"),
    "an unknown encoding": (
        respond([*OK_HEADERS, (b"grpc-encoding", b"br")], framed(b"x", 1), FINE), "UNIMPLEMENTED", "compression 'br'",
    ),
    "a reset": (respond(reset=2), "INTERNAL", "HTTP/2 error code 2"),
    "a cancelling reset": (lambda server, stream_id: server.reset_stream(stream_id, 8), "CANCELLED", "error code 8"),
    "a refused stream": (lambda server, stream_id: server.reset_stream(stream_id, 7), "UNAVAILABLE", "shutting down"),
    "a server that stops": (
        lambda server, _: server.send_goaway(0, last_stream_id=0), "UNAVAILABLE", "shutting down",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_bad_answer_has_a_status_for_unary_calls(name):
    answer, code, details = BAD_ANSWERS[name]
    async with Scene(answering(answer)) as scene:
        for _ in range(3):
            async with refused(Status[code], details):
                await scene.call()


@pytest.mark.parametrize("name", [name for name in BAD_ANSWERS if not name.startswith(("two", "no message"))])
async def test_a_bad_answer_has_a_status_for_streams(name):
    answer, code, details = BAD_ANSWERS[name]
    async with Scene(answering(answer)) as scene, refused(Status[code], details):
        await listed(scene.channel.stream(path("Many"), (b"x",), 5.0))


async def test_a_reset_in_the_middle_of_a_body_ends_its_call():
    async def script(server: Raw) -> None:
        server.greet()
        request = await server.until(ngh2.RequestReceived)
        server.h2.send_response(request.stream_id, OK_HEADERS)
        server.h2.send_data(request.stream_id, framed(bytes(1000))[:500])
        server.push()
        server.h2.reset_stream(request.stream_id, 2)
        server.push()
        await server.until(ngh2.RequestReceived, count=2)

    async with Scene(script) as scene, refused(Status.INTERNAL, "error code 2"):
        await scene.call()


@pytest.mark.parametrize("cut", [3, 9, 50_000, 100_013])
async def test_an_answer_in_whose_midst_its_call_is_cancelled_opens_the_window_again(cut, monkeypatch):
    limits = ConnectionLimits(stream_window_bytes=1 << 17, connection_window_bytes=1 << 18)
    monkeypatch.setattr(h2_channel, "LIMITS", limits)
    cancelled = asyncio.Event()

    async def script(server: Raw) -> None:
        server.greet()
        for count in range(1, 21):
            request = await server.until(ngh2.RequestReceived, count=count)
            server.h2.send_response(request.stream_id, OK_HEADERS)
            server.push()
            data = frame(DATA, 0, request.stream_id, framed(bytes(100_000)))
            server.writer.write(data[:cut])
            await cancelled.wait()
            cancelled.clear()
            server.writer.write(data[cut:])
            await server.until(ngh2.StreamReset, request.stream_id)
        request = await server.until(ngh2.RequestReceived, count=21)
        respond(data=GOOD, trailers=FINE)(server.h2, request.stream_id)
        server.push()

    async with Scene(script) as scene:
        await until(lambda: scene.channel.get_state() is grpc.ChannelConnectivity.READY)
        client = scene.channel._connection
        for _ in range(20):
            call = asyncio.create_task(scene.call())
            await until(lambda: client._head or client._left)
            call.cancel()
            await asyncio.wait([call])
            cancelled.set()
            await until(lambda: not client._head and not client._left)
        assert await scene.call() == b"good"


async def test_a_connection_that_breaks_fails_its_calls_and_is_made_again():
    async def script(server: Raw) -> None:
        server.greet()
        request = await server.until(ngh2.RequestReceived)
        if scene.connections > 1:
            respond(data=GOOD, trailers=FINE)(server.h2, request.stream_id)
            server.push()
            await server.until_closed()
        server.writer.transport.abort()

    async with Scene(script) as scene:
        async with refused(Status.UNAVAILABLE, "Socket closed"):
            await scene.call()
        assert await scene.call() == b"good"
        assert scene.connections == 2


async def test_bytes_that_are_no_http2_fail_to_connect():
    async def script(server: Raw) -> None:
        server.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await server.reader.read()

    async with Scene(script) as scene, refused(Status.UNAVAILABLE, "failed to connect"):
        await scene.call()


async def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(h2_channel, "CONNECT_S", 0.1)

    async def script(server: Raw) -> None:
        await server.reader.read()

    async with Scene(script) as scene:
        async with refused(Status.UNAVAILABLE, "failed to connect.*no answer within 0.1 s"):
            await scene.call()
        async with refused(Status.UNAVAILABLE, "failed to connect"):
            await scene.call(None)


async def test_a_server_that_greets_and_leaves_fails_calls_at_once_and_leaves_none_waiting():
    async def script(server: Raw) -> None:
        server.greet()
        server.writer.close()

    async with Scene(script) as scene:
        for _ in range(20):
            async with refused(Status.UNAVAILABLE):
                await scene.call(3.0)


async def test_a_call_for_a_connection_that_was_just_lost_is_refused():
    async with Scene(answering(respond(data=GOOD, trailers=FINE))) as scene:
        await scene.call()
        connection = scene.channel._connection
        connection.lost("gone")
        call = h2_channel._Call((), (b"x",), False)
        connection.begin(call)
        assert call.ended
        assert "failed to connect" in call.end.details()
        assert await scene.call() == b"good"


async def test_who_is_refused_at_first_is_served_once_somebody_listens():
    async with Scene(answering(respond(data=GOOD, trailers=FINE))) as scene:
        port = scene.port
    channel = H2Channel(f"127.0.0.1:{port}")
    async with refused(Status.UNAVAILABLE, "failed to connect to all addresses"):
        await channel.unary(path("Echo"), (b"x",), 5.0)
    assert channel.get_state() is State.TRANSIENT_FAILURE
    async with Scene(answering(respond(data=GOOD, trailers=FINE)), port) as scene:
        await until(lambda: channel.get_state() is State.READY)
        assert (await channel.unary(path("Echo"), (b"x",), 5.0))[0] == b"good"
        await channel.close()
        assert channel.get_state() is State.SHUTDOWN
        async with refused(Status.CANCELLED, "Channel is closed"):
            await channel.unary(path("Echo"), (b"x",), 5.0)


async def test_states_are_told_as_they_change():
    async with Scene(answering(respond(data=GOOD, trailers=FINE))) as scene:
        seen = []
        while scene.channel.get_state() is not State.READY:
            seen.append(scene.channel.get_state())
            await asyncio.wait_for(scene.channel.wait_for_state_change(seen[-1]), 5.0)
        assert set(seen) <= {State.IDLE, State.CONNECTING}


async def test_a_server_that_no_longer_answers_pings_is_left(monkeypatch):
    async def script(server: Raw) -> None:
        server.greet()
        await server.until(ngh2.SettingsReceived)
        await asyncio.sleep(PATIENCE_S)

    async with Scene(script) as scene:
        await scene.channel.close()
        scene.channel = H2Channel(scene.channel.target, keepalive=Keepalive(0.1, 0.1))
        async with refused(Status.UNAVAILABLE, "ping timeout"):
            await scene.call()


async def test_a_connection_that_breaks_during_a_ping_is_made_again_at_once():
    async def script(server: Raw) -> None:
        if scene.connections > 2:
            await answering(respond(data=GOOD, trailers=FINE))(server)
        server.greet()
        await server.until(ngh2.PingReceived)
        server.writer.transport.abort()

    async with Scene(script) as scene:
        await scene.channel.close()
        scene.channel = H2Channel(scene.channel.target, keepalive=Keepalive(0.2, 60.0))
        await until(lambda: scene.connections == 3)
        assert await scene.call() == b"good"


async def test_closing_with_a_grace_lets_calls_finish_and_cuts_the_others():
    async with serving() as world:
        channel = H2Channel(world.address)
        call = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 20.0))
        await until(lambda: world.answers.began)
        closing = asyncio.create_task(channel.close(20.0))
        await asyncio.sleep(0.05)
        world.answers.go_on.set()
        assert (await call)[0] == b"x"
        await asyncio.wait_for(closing, 2.0)
        world.answers.go_on.clear()
        channel = H2Channel(world.address)
        calls = [asyncio.create_task(channel.unary(path("Slow"), (b"x",), 20.0))]
        calls += [asyncio.create_task(listed(channel.stream(path("Deaf"), (b"x",), 20.0)))]
        await until(lambda: len(world.answers.began) == 3)
        await asyncio.wait_for(channel.close(0.05), 2.0)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def test_closing_before_it_is_connected_ends_calls_that_wait():
    async def script(server: Raw) -> None:
        await server.reader.read()

    async with Scene(script) as scene:
        call = asyncio.create_task(scene.call(None))
        await until(lambda: scene.connections)
        await scene.channel.close()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_what_a_stream_has_received_can_be_read_after_its_connection_has_ended():
    async def script(server: Raw) -> None:
        server.greet()
        request = await server.until(ngh2.RequestReceived)
        respond(data=GOOD * 20, trailers=FINE)(server.h2, request.stream_id)
        server.push()
        server.h2.send_goaway(0)
        server.push()
        await server.until_closed()

    async with Scene(script) as scene:
        found = []
        async for each in scene.channel.stream(path("Many"), (b"x",), 5.0):
            found.append(each)
            await asyncio.sleep(0)
        assert found == [b"good"] * 20


async def test_a_server_that_streams_faster_than_we_read_is_held_by_its_window():
    async with serving() as world:
        channel = H2Channel(world.address)
        answers = channel.stream(path("Endless"), (b"x",), 20.0)
        await anext(answers)
        await world.serves()
        await asyncio.sleep(0.2)
        bound = h2_channel.LIMITS.stream_window_bytes + h2_call.STREAM_UNSENT_BYTES_MAX
        assert world.answers.written <= bound + 300_000
        await answers.aclose()
        await channel.close()
