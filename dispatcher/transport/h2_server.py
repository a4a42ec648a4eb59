"""gRPC server on HTTP/2: handlers as grpc.aio has them, called in the worker's own event loop.

A call begins when its headers have come. A unary one is handed to its handler as soon as its whole message is there; a
stream's handler reads one message after the other, and its client's window opens as it reads. What a client sends wrong
gets a status, and leaves nothing behind.
"""

import asyncio
import math
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import grpc
import structlog

from dispatcher.transport import h2
from dispatcher.transport.accepting import accept
from dispatcher.transport.core import grpc_framing as framing
from dispatcher.transport.core.grpc_framing import JOIN, FramingError, Message, MessageReader

LOG = structlog.get_logger()
SWEEP_S: Final = 1.0
STREAM_UNSENT_BYTES_MAX: Final = 1 << 20  # of one stream: its handler waits until its client has read them
INFLATE_INLINE_BYTES: Final = 4096  # what is larger is decompressed in a thread
NOTICE_S: Final = 0.2  # between the notice that a connection ends and its end, for a peer that does not answer
_OK: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", framing.ACCEPTED))
_DONE: Final = ((b"grpc-status", b"0"),)
_NUMBERS: Final = {name: number for number, name in enumerate(framing.STATUS_NAMES)}

Handlers = Mapping[bytes, Any]
"""Handlers (`grpc.RpcMethodHandler`) by path."""


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Bounds of a server beside those of each connection. Names are those of the settings."""

    message_bytes_max: int = -1
    connection_unread_bytes_max: int = 1 << 62
    message_s: float = math.inf
    connection_age_max_s: float = 0.0
    connection_age_grace_s: float = 60.0


class Aborted(Exception):
    """Call that its handler has refused."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        super().__init__(code, details)
        self.code, self.details, self.trailers = code, details, trailers


class ServerCall:
    """One call: what handlers ask of grpc.aio's `ServicerContext`, and the state of its stream."""

    __slots__ = (
        "_connection", "_deadline_s", "_encoding", "_handler", "_headers", "_held_bytes", "_messages", "_reader",
        "_room", "_started", "_timer", "_trailers", "_unread_bytes", "_waiter", "ended", "expired", "left",
        "since_s", "stream_id", "task",
    )  # fmt: skip

    def __init__(self, connection: "ServerConnection", stream_id: int, headers: h2.Headers, handler: Any) -> None:
        self.stream_id = stream_id
        self.since_s = connection.loop.time()  # when a message began that is not whole yet
        self.task: asyncio.Task[None] | None = None
        self.ended = False  # by its client: nothing more comes
        self.left = False  # its client has gone
        self.expired = False
        self._connection = connection
        self._headers = headers
        self._handler = handler
        self._reader: MessageReader | None = None
        self._messages: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._encoding = ""
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._trailers: Any = ()
        self._started = False  # whether response headers have gone
        self._held_bytes = 0
        self._unread_bytes = 0

    # What handlers ask

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        """Metadata that the client sent."""
        return framing.decode_metadata(self._headers)

    def time_remaining(self) -> float | None:
        """Time until the deadline [s]; None: there is none."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._connection.loop.time())

    def peer(self) -> str:
        """Address of the client, as gRPC writes it."""
        return self._connection.peer

    def set_trailing_metadata(self, trailers: Any) -> None:
        """Metadata to send after the answer."""
        self._trailers = trailers

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call with a status; always raises."""
        raise Aborted(code, details, trailing_metadata)

    async def read(self) -> Any:
        """The next message of the client, or `grpc.aio.EOF`."""
        while not self._messages:
            if self.ended:
                return grpc.aio.EOF
            self._waiter = self._connection.loop.create_future()
            self._take(self._unread_bytes)
            await self._waiter
        message = self._messages.popleft()
        self._take(min(self._unread_bytes, framing.PREFIX.size + len(message.data)))
        try:
            data = await self._whole(message)
        except FramingError as error:  # the client's fault: no handler sees it
            self._connection._refuse_early(self, error)
            raise asyncio.CancelledError(error.details) from error
        deserialize = self._handler.request_deserializer
        return deserialize(data) if deserialize is not None else data

    async def write(self, answer: Any) -> None:
        """Send one message of a stream of answers, as soon as the client has read enough of those before it.

        Raises:
            grpc.aio.InternalError: the client has gone.
        """
        serialize = self._handler.response_serializer
        data = serialize(answer) if serialize is not None else answer
        connection = self._connection
        while not self.left and connection.unsent_of(self.stream_id) > STREAM_UNSENT_BYTES_MAX:
            self._room = connection.loop.create_future()
            connection.awaiting_room.append(self)
            await self._room
        if self.left or connection.closed:
            raise grpc.aio.InternalError("the client has gone")
        connection.send_message(self, (data,), not self._started)
        self._started = True

    async def requests(self) -> AsyncIterator[Any]:
        """All messages of the client."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    # What the connection tells

    def begin(self, told: Mapping[bytes, bytes]) -> None:
        """The headers are there.

        Raises:
            FramingError: what they ask for cannot be.
        """
        self._encoding = told.get(b"grpc-encoding", b"").decode("latin-1")
        if self._encoding and self._encoding not in framing.ENCODINGS:
            raise FramingError("UNIMPLEMENTED", framing.unknown_encoding(self._encoding))
        timeout = told.get(b"grpc-timeout")
        if timeout is not None:
            timeout_s = framing.parse_timeout(timeout)
            loop = self._connection.loop
            self._deadline_s = loop.time() + timeout_s
            self._timer = loop.call_later(timeout_s, self._expire)
        if self._handler.request_streaming:
            self._start(None)

    def feed(self, data: bytes, last: bool) -> None:
        """Data has come, the `last` perhaps.

        Raises:
            FramingError: it is not what gRPC says.
        """
        connection, count, reader = self._connection, len(data), self._reader
        self._held_bytes += count
        connection.held.bytes += count
        if reader is None:
            bytes_max = connection.server.bounds.message_bytes_max
            if last and not self._handler.request_streaming:
                sole = framing.sole_message(data, bytes_max)
                if sole is not None:
                    self.ended = True
                    connection.taken(self.stream_id, count)
                    self._start(Message(sole))
                    return
            reader = self._reader = MessageReader(bytes_max)
        self._unread_bytes += count
        began = not reader.unfinished
        found = reader.feed(data)
        if began or found:
            self.since_s = connection.loop.time()
        self._messages.extend(found)
        if not self._handler.request_streaming:
            if len(self._messages) > 1:
                raise FramingError("INTERNAL", "a unary call with more than one message")
            self._take(self._unread_bytes)
        elif found:
            self._wake()
        elif self._waiter is not None:
            self._take(self._unread_bytes)
        if last:
            self.half_close()

    def half_close(self) -> None:
        """The client has said all.

        Raises:
            FramingError: it has not: half a message is here, or none where one is needed.
        """
        self.ended = True
        if self._reader is not None and self._reader.unfinished:
            raise FramingError("INTERNAL", "the stream ended within a message")
        if self._handler.request_streaming:
            self._wake()
        elif not self._messages:
            raise FramingError("INTERNAL", "a unary call without a message")
        else:
            self._start(self._messages.popleft())

    @property
    def unfinished_message(self) -> bool:
        """Whether its client has begun a message, or owes one, that is not whole yet."""
        if self.ended:
            return False
        return not self._handler.request_streaming or (self._reader is not None and self._reader.unfinished)

    def leave(self) -> None:
        """The client has gone, or its connection."""
        self.left = self.ended = True
        self.on_sent()
        if self.task is not None:
            self.task.cancel()
        self.forget()

    def on_sent(self) -> None:
        """The client has read something."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    def forget(self) -> None:
        """Let go of what is held, and of what nobody will read: else its connection's window stays that much closed."""
        self._connection.held.bytes -= self._held_bytes
        self._held_bytes = 0
        self._connection.taken(self.stream_id, self._unread_bytes)
        self._unread_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Its own way

    def _start(self, message: Message | None) -> None:
        self.task = self._connection.loop.create_task(self._run(message))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None

    def _take(self, count: int) -> None:
        """So much has been read, or is waited for: the client may send as much again. A unary call holds its message
        until it ends."""
        self._unread_bytes -= count
        self._connection.taken(self.stream_id, count)
        if self._handler.request_streaming:
            self._held_bytes -= count
            self._connection.held.bytes -= count

    async def _whole(self, message: Message) -> bytes:
        if not message.compressed:
            return message.data
        bytes_max = self._connection.server.bounds.message_bytes_max
        if len(message.data) <= INFLATE_INLINE_BYTES:
            return framing.inflate(message.data, self._encoding, bytes_max)
        return await asyncio.to_thread(framing.inflate, message.data, self._encoding, bytes_max)

    def _expire(self) -> None:
        self.expired = True
        if self.task is not None:
            self.task.cancel()
        else:
            self._connection.refuse(self, "DEADLINE_EXCEEDED", "Deadline Exceeded")

    async def _run(self, message: Message | None) -> None:
        connection, handler = self._connection, self._handler
        try:
            if message is not None:
                data = message.data if not message.compressed else await self._whole(message)
                deserialize = handler.request_deserializer
                request = deserialize(data) if deserialize is not None else data
            else:
                request = self.requests()
            if handler.response_streaming:
                await self._answer_all((handler.stream_stream or handler.unary_stream)(request, self))
                connection.finish(self, self._trailers, self._started)
                return
            answer = await handler.unary_unary(request, self)
            serialize = handler.response_serializer
            if serialize is not JOIN:  # else it is in parts, and stays so
                answer = (serialize(answer) if serialize is not None else answer,)
            connection.answer(self, answer, self._trailers)
        except Aborted as aborted:
            connection.refuse(self, aborted.code.name, aborted.details, aborted.trailers, self._started)
        except FramingError as error:
            connection.refuse(self, error.code, error.details, (), self._started)
        except asyncio.CancelledError:
            if self.expired:
                connection.refuse(self, "DEADLINE_EXCEEDED", "Deadline Exceeded", (), self._started)
            elif not self.left:
                connection.refuse(self, "UNAVAILABLE", "the server is stopping", (), self._started)
        except Exception as error:
            LOG.exception("call failed", path=self._path())
            connection.refuse(self, "UNKNOWN", f"Unexpected {type(error)}: {error}", (), self._started)

    async def _answer_all(self, answers: Any) -> None:
        if not hasattr(answers, "__aiter__"):
            await answers
            return
        async for answer in answers:
            await self.write(answer)

    def _path(self) -> str:
        return dict(self._headers).get(b":path", b"").decode("latin-1")


class ServerConnection(h2.Connection):
    """One client."""

    ROLE = h2.SERVER
    EVENTS: ClassVar[Mapping[type, str]] = {
        h2.RequestReceived: "on_request",
        h2.DataReceived: "on_data",
        h2.TrailersReceived: "on_trailers",
        h2.StreamClosed: "on_closed",
        h2.SettingsReceived: "on_settings",
        h2.PingAcknowledged: "on_pong",
        h2.GoAwayReceived: "on_goaway",
    }

    def __init__(self, server: "H2Server") -> None:
        super().__init__(server.limits, server.held)
        self.server = server
        self.calls: dict[int, ServerCall] = {}
        self.awaiting_room: list[ServerCall] = []
        self.peer = ""
        self.greeted = False
        self.since_s = self.loop.time()
        self.leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self.server.connections.add(self)
        tls = transport.get_extra_info("ssl_object")
        self.peer = peer_of(transport.get_extra_info("peername"))
        super().connection_made(transport)
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self.lost("its client does not offer HTTP/2 (ALPN h2)")

    def on_settings(self, _: Any) -> None:
        """The client speaks HTTP/2."""
        self.greeted = True

    def on_goaway(self, _: Any) -> None:
        """The client ends its connection once all has been answered."""
        self._ending = True

    def on_request(self, event: Any) -> None:
        """A call begins."""
        told = dict(event.headers)
        handler = self.server.handlers.get(told.get(b":path", b""))
        if told.get(b":method") != b"POST" or not told.get(b"content-type", b"").startswith(b"application/grpc"):
            status = b"415" if told.get(b":method") == b"POST" else b"405"
            self._send(event.stream_id, ((b":status", status),), end_stream=True)
            return
        call = self.calls[event.stream_id] = ServerCall(self, event.stream_id, event.headers, handler)
        if handler is None:
            self.refuse(call, "UNIMPLEMENTED", "Method not found!")
            return
        if self.unsent_bytes > self.server.bounds.connection_unread_bytes_max:
            self.refuse(call, "RESOURCE_EXHAUSTED", f"{self.unsent_bytes} bytes of answers wait here to be read")
            return
        try:
            call.begin(told)
            if event.end_stream:
                call.half_close()
        except FramingError as error:
            self.refuse(call, error.code, error.details)

    def on_data(self, event: Any) -> None:
        """A part of a call has come."""
        stream_id, data = event.stream_id, event.data
        call = self.calls.get(stream_id)
        if call is None:  # it was refused, and its client goes on
            self.taken(stream_id, len(data))
            if not event.end_stream:
                self.flush()  # a reset would overtake its status
                if not self._paused:
                    self.reset(stream_id, h2.NO_ERROR)
            return
        try:
            if not data:
                if event.end_stream:
                    call.half_close()
                return
            if self.held.full:
                self.taken(stream_id, len(data))
                raise FramingError("RESOURCE_EXHAUSTED", self.server.full())
            call.feed(data, event.end_stream)
        except FramingError as error:
            self._refuse_early(call, error)

    def on_trailers(self, event: Any) -> None:
        """A client's trailers: all that they say is that it has said all."""
        call = self.calls.get(event.stream_id)
        if call is not None and not call.ended:
            try:
                call.half_close()
            except FramingError as error:
                self._refuse_early(call, error)

    def on_closed(self, event: Any) -> None:
        """A stream has ended both ways."""
        call = self.calls.pop(event.stream_id, None)
        if call is not None:
            call.leave()

    def on_lost(self, why: str) -> None:
        """All its calls have lost their client."""
        self.server.connections.discard(self)
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.leave()
        self.server.on_connection_lost(self, why)

    def on_sent(self) -> None:
        """Streams that wait for their client to read may go on."""
        if self.awaiting_room:
            waiting, self.awaiting_room = self.awaiting_room, []
            for call in waiting:
                call.on_sent()

    def flush(self) -> None:
        """Write; where all connections together hold too much, the one that reads least goes."""
        super().flush()
        if self.held.unsent_full:
            self.server.relieve()

    # How calls end

    def send_message(self, call: ServerCall, parts: tuple[bytes, ...], first: bool) -> None:
        """Send one message, its parts one after the other."""
        size = sum(map(len, parts))
        try:
            if first:
                self._h2.send_response(call.stream_id, _OK)
            if size < 16384:
                self._h2.send_data(call.stream_id, b"".join((framing.prefix(size), *parts)))
            else:
                self._h2.send_data(call.stream_id, framing.prefix(size))
                for part in parts:
                    self._h2.send_data(call.stream_id, part)
        except h2.Http2Error:
            return  # its stream has ended: its client has gone
        self.schedule()

    def answer(self, call: ServerCall, parts: tuple[bytes, ...], trailers: Any) -> None:
        """End a unary call with its answer."""
        if self.calls.pop(call.stream_id, None) is None:
            return
        self.send_message(call, parts, True)
        self._send_trailers(call.stream_id, trailers)
        call.forget()

    def finish(self, call: ServerCall, trailers: Any, started: bool) -> None:
        """End a stream of answers well."""
        if self.calls.pop(call.stream_id, None) is None:
            return
        if not started:
            self._send(call.stream_id, _OK)
        self._send_trailers(call.stream_id, trailers)
        call.forget()

    def refuse(self, call: ServerCall, code: str, details: str, trailers: Any = (), started: bool = False) -> None:
        """End a call with a status."""
        if self.calls.pop(call.stream_id, None) is None:
            return
        last = [(b"grpc-status", b"%d" % _NUMBERS[code])]
        if details:
            last.append((b"grpc-message", framing.encode_details(details)))
        last += framing.encode_metadata(trailers or ())
        if started:
            self._send_last(call.stream_id, last)
        else:
            self._send(call.stream_id, (*_OK, *last), end_stream=True)
        call.forget()

    def _refuse_early(self, call: ServerCall, error: FramingError) -> None:
        """Refuse what a client is still sending; a handler that reads it is told by cancelling it."""
        task = call.task
        self.refuse(call, error.code, error.details)
        call.left = True
        if task is not None:
            task.cancel()

    def _send_trailers(self, stream_id: int, trailers: Any) -> None:
        self._send_last(stream_id, (*_DONE, *framing.encode_metadata(trailers)) if trailers else _DONE)

    def _send_last(self, stream_id: int, trailers: h2.Headers) -> None:
        try:
            self._h2.send_trailers(stream_id, trailers)
        except h2.Http2Error:
            return  # its client has gone
        self.schedule()

    def _send(self, stream_id: int, headers: h2.Headers, end_stream: bool = False) -> None:
        try:
            self._h2.send_response(stream_id, headers, end_stream=end_stream)
        except h2.Http2Error:
            return  # its client has gone
        self.schedule()

    def leave(self) -> None:
        """Tell the client that this connection ends: first a notice, with which no call is lost."""
        if not self.leaving:
            self.leaving = True
            self.say_goodbye(last=False)
            timer = self.loop.call_later(NOTICE_S, self.say_goodbye, True)

            def heard() -> None:
                timer.cancel()
                self.say_goodbye(last=True)

            self.ping(heard)

    def cut(self) -> None:
        """End every call."""
        for call in list(self.calls.values()):
            if call.task is not None:
                call.task.cancel()
            else:
                self.refuse(call, "UNAVAILABLE", "the server is stopping")


class H2Server:
    """Server of handlers on a socket that listens, which may be `shared` with other processes. Belongs to one event
    loop. `held` counts the bytes that wait on all of its connections."""

    def __init__(
        self,
        handlers: Handlers,
        bounds: ServerBounds,
        limits: h2.Limits,
        held: h2.Held,
        listening: socket.socket,
        tls: ssl.SSLContext | None = None,
        shared: bool = False,
    ) -> None:
        self.handlers = handlers
        self.bounds = bounds
        self.limits = limits
        self.held = held
        self.connections: set[ServerConnection] = set()
        name = listening.getsockname()
        self.port = int(name[1]) if isinstance(name, tuple) else 0
        self._listening = listening
        self._tls = tls
        self._shared = shared
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Accept connections, and look after them."""
        loop = asyncio.get_running_loop()

        async def begin(accepted: socket.socket) -> None:
            await loop.connect_accepted_socket(lambda: ServerConnection(self), accepted, ssl=self._tls)

        accepting_ = accept(self._listening, begin, lambda: len(self.connections), self._shared)
        self._tasks = [asyncio.create_task(each, name="connections") for each in (accepting_, self._sweep())]

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let calls in flight finish within the grace, and end the rest. Called again, before it has
        ended: the shorter grace counts."""
        for task in self._tasks:
            task.cancel()
        self._listening.close()
        for connection in list(self.connections):
            connection.leave()
        if self.connections:
            self._ended.clear()  # there may have been none before
            try:
                async with asyncio.timeout(grace_s):
                    await self._ended.wait()
            except TimeoutError:
                await self._cut()

    async def _cut(self) -> None:
        connections = list(self.connections)
        tasks = [call.task for each in connections for call in each.calls.values() if call.task is not None]
        for connection in connections:
            connection.cut()
        if tasks:
            await asyncio.wait(tasks)
        for connection in connections:
            connection.flush()
            connection.end()
        if self.connections:
            await asyncio.sleep(0.05)
        for connection in list(self.connections):
            connection.lost("the server is stopping")

    def on_connection_lost(self, connection: ServerConnection, why: str) -> None:
        """One connection less."""
        LOG.debug("connection ended", peer=connection.peer, why=why)
        if not self.connections:
            self._ended.set()

    def busy_ports(self) -> set[int]:
        """Ports of the clients that have calls under way."""
        found = (each.peer.rpartition(":")[2] for each in self.connections if each.calls)
        return {int(port) for port in found if port.isdigit()}

    def full(self) -> str:
        """Reason to refuse what there is no room for."""
        return f"{self.held.bytes} bytes of messages are held here, at most {self.held.bytes_max}: try again later"

    def relieve(self) -> None:
        """Close the connection whose client has left most unread."""
        worst = max(self.connections, key=lambda each: each.unsent_bytes, default=None)
        if worst is not None and worst.unsent_bytes:
            LOG.warning("connection closed: its client does not read", peer=worst.peer, bytes=worst.unsent_bytes)
            worst.lost("its client does not read")

    async def _sweep(self) -> None:
        """End what takes too long: hellos, messages, connections."""
        loop, bounds = asyncio.get_running_loop(), self.bounds
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = loop.time()
            late = f"the whole message did not come within {bounds.message_s:g} s"
            for connection in list(self.connections):
                age_s = now_s - connection.since_s
                if not connection.greeted and age_s > bounds.message_s:
                    connection.lost("its client says nothing")
                    continue
                for call in [each for each in connection.calls.values() if each.unfinished_message]:
                    if now_s - call.since_s > bounds.message_s:
                        connection._refuse_early(call, FramingError("DEADLINE_EXCEEDED", late))
                if 0 < bounds.connection_age_max_s < age_s:
                    connection.leave()
                    if age_s > bounds.connection_age_max_s + bounds.connection_age_grace_s:
                        connection.cut()


def peer_of(address: Any) -> str:
    """Address of a client as gRPC writes it."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return "unix:"


def server_tls(certificate: Any, key: Any, client_ca: Any = None) -> ssl.SSLContext:
    """TLS of a server (PEM files); `client_ca`: clients must present a certificate that it signed.

    Raises:
        OSError, ssl.SSLError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Routes:
    """Collects handlers by path from what generated code registers (`add_XServicer_to_server`)."""

    def __init__(self) -> None:
        self.handlers: dict[bytes, Any] = {}

    def add(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the handlers of a service by the names of their methods."""
        self.add_registered_method_handlers(service, handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Called by generated code."""
        self.handlers |= {f"/{service}/{name}".encode(): handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """Called by generated code beside the other: the same handlers once more."""
