"""Ends of HTTP/2 connections for tests: a server with handlers of its own, and what ngh2 itself sends and reads."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import ngh2
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest

from dispatcher.transport import accepting
from dispatcher.transport.core import grpc_framing as framing
from dispatcher.transport.core.grpc_framing import JOIN
from dispatcher.transport.h2 import ConnectionLimits, Held
from dispatcher.transport.h2_call import ServerBounds
from dispatcher.transport.h2_channel import H2Channel
from dispatcher.transport.h2_server import H2Server, Routes
from trefoil.runtime.security.tls import Tls

KEYS = Path(__file__).parent
OWN = Tls(KEYS / "localhost.crt", KEYS / "localhost.key", KEYS / "localhost.crt")
SERVICE = "test.Service"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
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
            "Typed": unary(self.echo, request_deserializer=HealthCheckRequest.FromString),
            "TypedStream": stream(self.each, request_deserializer=HealthCheckRequest.FromString),
            "Each": stream(self.each), "Deaf": stream(self.deaf), "Endless": stream(self.endless),
            "Curt": stream(self.curt), "ReadWrite": stream(self.read_write), "RefuseStream": stream(self.refuse_stream),
            "Shut": stream(self.refuse),
            "Many": grpc.unary_stream_rpc_method_handler(self.many),
        }  # fmt: skip
        routes.add_registered_method_handlers(SERVICE, handlers)
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


@contextlib.asynccontextmanager
async def refused(code: Status, match: str = ""):
    with pytest.raises(grpc.aio.AioRpcError, match=match or None) as error:
        yield error
    assert error.value.code() is code, error.value.details()


async def listed(answers) -> list[bytes]:
    return [each async for each in answers]


# What no client sends
GOOD = framed(b"good")
