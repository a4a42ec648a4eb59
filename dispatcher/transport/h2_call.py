"""One call of a gRPC client: what handlers ask of grpc.aio's `ServicerContext`, and the state of its stream."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError

from dispatcher.transport import h2
from dispatcher.transport.core import grpc_framing as framing
from dispatcher.transport.core.grpc_framing import JOIN, FramingError, Message, MessageReader
from dispatcher.transport.core.trace_context import NO_TRACE, Trace, trace_of

LOG = structlog.get_logger()
STREAM_UNSENT_BYTES_MAX: Final = 1 << 20  # of one stream: its handler waits until its client has read them
MESSAGE_BYTES: Final = 100  # what a message of a stream costs beside its bytes: empty ones cost five on the wire
INFLATE_INLINE_BYTES: Final = 4096  # what is larger is decompressed in a thread


class Client(Protocol):
    """What a call asks of its connection."""

    loop: asyncio.AbstractEventLoop
    held: h2.Held
    bounds: "ServerBounds"
    peer: str
    closed: bool

    def acknowledge(self, stream_id: int, count: int) -> None:
        """So many bytes of a stream have been taken where they came."""
        ...

    def taken(self, stream_id: int, count: int) -> None:
        """The same, later."""
        ...

    def unsent_of(self, stream_id: int) -> int:
        """Bytes of a stream that its client has not read."""
        ...

    def next_write(self) -> asyncio.Future[None]:
        """Done when something has been written."""
        ...

    def send_message(self, call: "ServerCall", data: bytes, first: bool) -> None:
        """Send one message of a stream of answers."""
        ...

    def answer(self, call: "ServerCall", parts: tuple[bytes, ...], trailers: Any) -> None:
        """End a unary call with its answer."""
        ...

    def finish(self, call: "ServerCall", trailers: Any) -> None:
        """End a stream of answers well."""
        ...

    def refuse(self, call: "ServerCall", code: str, details: str, trailers: Any = ()) -> None:
        """End a call with a status."""
        ...

    def refuse_early(self, call: "ServerCall", error: FramingError) -> None:
        """End a call whose client is still sending."""
        ...


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
        super().__init__(details)
        self.code, self.details, self.trailers = code, details, trailers


class ServerCall:
    """One call: what handlers ask of grpc.aio's `ServicerContext`, and the state of its stream."""

    # What few calls change stands here: a call in full would be twenty-two fields to fill.
    task: asyncio.Task[None] | None = None
    ended = False  # by its client: nothing more comes
    left = False  # its client has gone
    refusal: h2.Headers | None = None  # what it ends with; all else that its client sends is discarded
    heard_s = 0.0  # when its client last sent something, once it is refused
    started = False  # whether response headers have gone
    trace: Trace = NO_TRACE
    expired = False
    body: MessageReader | None = None  # of a unary call whose message did not come in one piece
    held_bytes = 0
    _reader: MessageReader | None = None
    _waiter: asyncio.Future[None] | None = None
    _room: asyncio.Future[None] | None = None
    _encoding = ""
    _deadline_s: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _trailers: Any = ()
    _unread_bytes = 0

    def __init__(self, connection: Client, stream_id: int, headers: h2.Headers, handler: Any) -> None:
        self.stream_id = stream_id
        self.since_s = connection.loop.time()  # when a message began that is not whole yet
        self._connection = connection
        self._headers = headers
        self._handler = handler
        self._messages: deque[Message] = deque()

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
            self.since_s = self._connection.loop.time()
            self._take(self._unread_bytes)
            await self._waiter
        message = self._messages.popleft()
        self._hold(-MESSAGE_BYTES)
        self._take(min(self._unread_bytes, framing.PREFIX.size + len(message)))
        try:
            return await self._deserialized(message)
        except FramingError as error:  # the client's fault: no handler sees it
            self._connection.refuse_early(self, error)
            raise asyncio.CancelledError(error.details) from error

    async def write(self, answer: Any) -> None:
        """Send one message of a stream of answers, as soon as the client has read enough of those before it.

        Raises:
            grpc.aio.InternalError: the client has gone.
        """
        serialize = self._handler.response_serializer
        data = serialize(answer) if serialize is not None else answer
        connection = self._connection
        while not self.left and connection.unsent_of(self.stream_id) > STREAM_UNSENT_BYTES_MAX:
            self._room = connection.next_write()
            await self._room
        if self.left or connection.closed:
            raise grpc.aio.InternalError("the client has gone")
        connection.send_message(self, data, not self.started)
        self.started = True

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
        encoding = told.get(b"grpc-encoding")
        if encoding:
            self._encoding = encoding.decode("latin-1")
            if self._encoding not in framing.ENCODINGS:
                raise FramingError("UNIMPLEMENTED", framing.unknown_encoding(self._encoding))
        if b"traceparent" in told:
            self.trace = trace_of(self.invocation_metadata())
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
        self.held_bytes += count
        connection.held.bytes += count
        if reader is None:
            bytes_max = connection.bounds.message_bytes_max
            streaming = self._handler.request_streaming
            if last and not streaming:
                sole = framing.sole_message(data, bytes_max)
                if sole is not None:
                    self.ended = True
                    connection.acknowledge(self.stream_id, count)
                    self._start(sole)
                    return
            reader = self._reader = MessageReader(bytes_max)
            if not streaming:
                self.body = reader
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
            self._hold(MESSAGE_BYTES * len(found))
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
        """Whether its client has begun a message, or owes one, that is not whole yet, and may send it."""
        if self.ended or self.refusal is not None:
            return False
        if not self._handler.request_streaming:
            return True
        return self._waiter is not None and self._reader is not None and self._reader.unfinished

    @property
    def may_send(self) -> bool:
        """Whether its client may be sending a stream."""
        return not self.ended and (self._handler is None or self._handler.request_streaming)

    def leave(self) -> None:
        """The client has gone, or its connection."""
        self.left = self.ended = True
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self.task is not None:
            self.task.cancel()
        self.forget()

    def forget(self) -> None:
        """Let go of what is held, and of what will not be read: else its connection's window stays that much closed."""
        self._connection.held.bytes -= self.held_bytes
        self.held_bytes = 0
        if self._unread_bytes:
            self._connection.taken(self.stream_id, self._unread_bytes)
            self._unread_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Its own way

    def _start(self, message: Message | None) -> None:
        # Not by the loop: it would format a name that is not used.
        self.task = asyncio.Task(self._run(message), loop=self._connection.loop, name="call")

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
            self._hold(-count)

    def _hold(self, count: int) -> None:
        self.held_bytes += count
        self._connection.held.bytes += count

    async def _deserialized(self, message: Message) -> Any:
        data = message if isinstance(message, bytes) else await self._inflated(message)
        deserialize = self._handler.request_deserializer
        try:
            return deserialize(data) if deserialize is not None else data
        except DecodeError as error:
            why = f"these {len(data)} bytes are not a message of {self._path()} ({error})"
            raise FramingError("INVALID_ARGUMENT", f"{why}. Remedy: send the type that it takes") from error

    async def _inflated(self, message: framing.Compressed) -> bytes:
        bytes_max = self._connection.bounds.message_bytes_max
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
            request = self.requests() if message is None else await self._deserialized(message)
            if handler.response_streaming:
                await self._answer_all((handler.stream_stream or handler.unary_stream)(request, self))
                connection.finish(self, self._trailers)
                return
            answer = await handler.unary_unary(request, self)
            serialize = handler.response_serializer
            if serialize is not JOIN:  # else it is in parts, and stays so
                answer = (serialize(answer) if serialize is not None else answer,)
            connection.answer(self, answer, self._trailers)
        except Aborted as aborted:
            connection.refuse(self, aborted.code.name, aborted.details, aborted.trailers)
        except FramingError as error:
            connection.refuse(self, error.code, error.details)
        except asyncio.CancelledError:
            if self.expired:
                connection.refuse(self, "DEADLINE_EXCEEDED", "Deadline Exceeded")
            elif not self.left:
                connection.refuse(self, "UNAVAILABLE", "the server is stopping")
        except Exception as error:
            LOG.exception("call failed", path=self._path())
            connection.refuse(self, "UNKNOWN", f"Unexpected {type(error)}: {error}")

    async def _answer_all(self, answers: Any) -> None:
        if not hasattr(answers, "__aiter__"):
            await answers
            return
        async with aclosing(answers):  # what it holds is let go of now, not when it is collected
            async for answer in answers:
                await self.write(answer)

    def _path(self) -> str:
        return dict(self._headers).get(b":path", b"").decode("latin-1")
