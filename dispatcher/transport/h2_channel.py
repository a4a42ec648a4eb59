"""gRPC client on HTTP/2: one connection to one server, renewed when it breaks, with the states of gRPC's channels.

Errors are `grpc.aio.AioRpcError` with gRPC's codes and texts. `NotTaken` and `ConnectionDied` are this end's findings;
all other errors are answers of the server.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar, Final

import grpc

from dispatcher.transport import h2
from dispatcher.transport.calls import (
    ConnectionDied,
    Keepalive,
    Leaving,
    Metadata,
    NotTaken,
    Parts,
    Trailers,
    call_error,
)
from dispatcher.transport.core import grpc_framing as framing
from dispatcher.transport.core.grpc_framing import FramingError, MessageReader
from dispatcher.transport.core.long_headers import LongHeaders
from trefoil.runtime.security.tls import Tls

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 0.5
CONNECT_S: Final = 1.0
"""The patience of one attempt, until the server has said hello: the kernel of a stopped one takes connections."""
AT_ONCE: Final = 16
"""Answers of a stream that come together: then others are served."""
LIMITS: Final = h2.ConnectionLimits(
    header_bytes_max=128 * 1024,  # a slice's error says names and ids again: ours to shorten
    stream_window_bytes=1 << 24,
    connection_window_bytes=1 << 26,
)
State = grpc.ChannelConnectivity


class _Call:
    """One call: its answers so far, and its end."""

    connection: "_ClientConnection | None" = None
    stream_id = 0
    reader: MessageReader | None = None
    encoding = ""
    trailers: Trailers = ()
    end: BaseException | None = None
    ended = False
    waiter: asyncio.Future[None] | None = None
    timer: asyncio.TimerHandle | None = None
    leaving: Leaving | None = None
    unread_bytes = 0

    def __init__(self, headers: h2.Headers, parts: Parts, streaming: bool) -> None:
        self.headers = headers
        self.parts = parts
        self.streaming = streaming
        self.messages: deque[framing.Message] = deque()

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def finish(self, error: BaseException | None) -> None:
        """It has ended; what it still has to read can be read."""
        if self.ended:
            return
        self.ended = True
        self.end = error
        if self.timer is not None:
            self.timer.cancel()
        self.wake()
        if self.leaving is not None:
            self.leaving.ended(_code(error))

    def decoded(self, message: framing.Message) -> bytes:
        """Bytes of a message; raises AioRpcError for one that is none."""
        if isinstance(message, bytes):
            return message
        try:
            return framing.inflate(message.data, self.encoding, -1)
        except FramingError as error:
            raise call_error(error.code, error.details) from error


class _ClientConnection(h2.H2Connection):
    """One connection to the server. `gone` is set once it takes no more calls."""

    ROLE = h2.CLIENT
    EVENTS: ClassVar[Mapping[type, str]] = {
        h2.ResponseReceived: "on_response",
        h2.DataReceived: "on_data",
        h2.TrailersReceived: "on_trailers",
        h2.StreamClosed: "on_closed",
        h2.SettingsReceived: "on_settings",
        h2.PingAcknowledged: "on_pong",
        h2.GoAwayReceived: "on_goaway",
    }

    def __init__(self) -> None:
        super().__init__(LIMITS, h2.Held())
        self.calls: dict[int, _Call] = {}
        self._long_headers = LongHeaders()
        self._usual_head: Any = None  # headers and trailers that an answer had and that are looked at no more
        self._usual_end: Any = None
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.gone: asyncio.Future[None] = self.loop.create_future()
        self.idle: asyncio.Future[None] = self.loop.create_future()  # gone, and nothing is under way

    def on_settings(self, _: Any) -> None:
        """The server speaks HTTP/2."""
        if not self.ready.done():
            self.ready.set_result(None)

    def receive(self, data: memoryview) -> None:
        """Pass what has come to libnghttp2, long error texts shortened."""
        for part in self._long_headers.passed(data):
            self._h2.receive_data(part)

    def begin(self, call: _Call) -> None:
        """Send a call."""
        if self.closed:
            why = "failed to connect: the connection has just been lost"
            call.finish(call_error("UNAVAILABLE", why, kind=NotTaken))
            return
        call.connection = self
        try:
            call.stream_id = stream_id = self._h2.send_request(call.headers)
            self.send_parts(stream_id, framing.framed(call.parts), end_stream=True)
        except h2.Http2Error as error:
            why = f"failed to connect: the connection takes no more calls ({error})"
            call.finish(call_error("UNAVAILABLE", why, kind=NotTaken))
            self.leave()
            return
        call.parts = ()
        self.calls[stream_id] = call
        self.schedule()

    def drop(self, call: _Call) -> None:
        """Cancel a call on its server."""
        self.take(call, call.unread_bytes)
        if self.calls.pop(call.stream_id, None) is not None:
            self.reset(call.stream_id)
            self.end_if_idle()

    def on_response(self, event: Any) -> None:
        """Headers of an answer, or, where nothing follows, its end."""
        call, headers = self.calls.get(event.stream_id), event.headers
        if call is None or (headers == self._usual_head and not event.end_stream):
            return
        told = dict(headers)
        if event.end_stream:
            self._finish(call, headers)
        elif told.get(b":status") != b"200":
            self._fail(call, *framing.status_of_http(told.get(b":status", b"")))
        elif not told.get(b"content-type", b"").startswith(b"application/grpc"):
            self._fail(call, "UNKNOWN", "the answer is none of gRPC")
        else:
            encoding = told.get(b"grpc-encoding")
            if encoding:
                call.encoding = encoding.decode("latin-1")
            else:
                self._usual_head = headers

    def on_data(self, event: Any) -> None:
        """A part of an answer."""
        stream_id, data = event.stream_id, event.data
        call = self.calls.get(stream_id)
        if call is None:
            self.taken(stream_id, len(data))
            return
        reader = call.reader
        if reader is None:
            if not call.streaming and (sole := framing.sole_message(data, -1)) is not None and not call.messages:
                call.messages.append(sole)
                self.acknowledge(stream_id, len(data))
                if event.end_stream:
                    self._finish(call, ())
                return
            reader = call.reader = MessageReader(-1)
        call.unread_bytes += len(data)
        try:
            found = reader.feed(data)
        except FramingError as error:
            self._fail(call, error.code, error.details)
            return
        if call.leaving is None:
            call.messages.extend(found)
        if call.leaving is not None or not call.streaming or (not found and call.waiter is not None):
            self.take(call, call.unread_bytes)
        elif found:
            call.wake()
        if event.end_stream:  # the answer ends without trailers
            self._finish(call, ())

    def take(self, call: _Call, count: int) -> None:
        """So many bytes of a call have been read, or are waited for."""
        call.unread_bytes -= count
        self.taken(call.stream_id, count)

    def on_trailers(self, event: Any) -> None:
        """The end of an answer."""
        call = self.calls.get(event.stream_id)
        if call is not None:
            self._finish(call, event.headers)

    def on_closed(self, event: Any) -> None:
        """A stream ended both ways; a call that has no end by then was reset."""
        call = self.calls.get(event.stream_id)
        if call is not None:
            self._reset(call, event.error_code)

    def on_goaway(self, event: Any) -> None:
        """The server takes no more calls here."""
        self.leave()
        for stream_id, call in list(self.calls.items()):
            if stream_id > event.last_stream_id:
                self._reset(call, h2.REFUSED_STREAM)
        self.end_if_idle()

    def on_lost(self, why: str) -> None:
        """Everything under way has failed."""
        self.leave()
        self.on_pong(None)  # no caller need wait for it
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(why))
            self.ready.exception()  # raised at the next call; no call need come
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.finish(call_error("UNAVAILABLE", why, kind=ConnectionDied))
        self.end_if_idle()

    def leave(self) -> None:
        """Take no more calls."""
        if not self.gone.done():
            self.gone.set_result(None)

    def cut(self) -> None:
        """End at once: calls under way are cancelled."""
        calls, self.calls = self.calls, {}
        for call in calls.values():
            self.reset(call.stream_id)
            call.finish(asyncio.CancelledError("its connection was closed"))
        self.flush()
        self.lost("closed")

    def _finish(self, call: _Call, headers: h2.Headers) -> None:
        if not self.calls.pop(call.stream_id, None):
            return
        usual = headers == self._usual_end
        code, details = ("OK", "") if usual else framing.status_of_trailers(dict(headers))
        if code == "OK" and call.reader is not None and call.reader.unfinished:
            code, details = "INTERNAL", "the answer ended within a message"
        elif code == "OK" and not call.streaming and len(call.messages) != 1:
            code, details = "INTERNAL", f"{len(call.messages)} messages answer a unary call"
        if not self.closed and self._h2.queued_body_size(call.stream_id):
            self.reset(call.stream_id)  # answered before it was heard
        if not usual:
            call.trailers = framing.decode_metadata(headers)
            if code == "OK" and not call.trailers:
                self._usual_end = headers
        call.finish(None if code == "OK" else call_error(code, details, call.trailers))
        self.end_if_idle()

    def _fail(self, call: _Call, code: str, details: str) -> None:
        call.finish(call_error(code, details))
        self.drop(call)

    def _reset(self, call: _Call, error_code: int) -> None:
        kind = NotTaken if error_code == h2.REFUSED_STREAM else grpc.aio.AioRpcError
        call.finish(call_error(*framing.status_of_reset(error_code), kind=kind))
        self.drop(call)

    def end_if_idle(self) -> None:
        """Close a connection that takes no more calls and has none."""
        if self.gone.done() and not self.calls:
            if not self.idle.done():
                self.idle.set_result(None)
            self.flush()
            self.end()


class H2Channel:
    """Channel to one server: `host:port`, or `unix:path`. It connects at once, and again whenever it has to.

    `name`: whom the server's certificate must name, instead of the target's host. `connect_s`: the patience of one
    attempt; None: CONNECT_S. Belongs to one event loop.
    """

    def __init__(
        self, target: str, *, tls: Tls | None = None, name: str = "", keepalive: Keepalive | None = None,
        connect_s: float | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self._tls, self._name = tls, name
        self._keepalive, self._connect_s = keepalive, CONNECT_S if connect_s is None else connect_s
        self._state = State.IDLE
        self._changed: asyncio.Future[None] | None = None
        self._why = "not connected yet"
        self._connection: _ClientConnection | None = None
        self._old: set[_ClientConnection] = set()
        self._waiting: list[_Call] = []
        self._closed = False
        authority = (target if not target.startswith("unix:") else "localhost").encode()
        scheme = b"http" if self._tls is None else b"https"
        self._head = (
            (b":method", b"POST"), (b":scheme", scheme), (b":authority", authority), (b"te", b"trailers"),
            (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", framing.ACCEPTED),
        )  # fmt: skip
        self._paths: dict[str, tuple[tuple[bytes, bytes], ...]] = {}
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._keep_connected(), name=f"connect to {target}")

    # States

    def get_state(self, try_to_connect: bool = False) -> Any:
        """State of the connection. It always tries to connect."""
        return self._state

    async def wait_for_state_change(self, last: Any) -> None:
        """Wait until the state is not this one."""
        while self._state is last:
            if self._changed is None or self._changed.done():
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)

    # Calls

    async def unary(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> tuple[bytes, Trailers]:  # fmt: skip
        """Answer and trailing metadata of a unary call. Cancelling it cancels it on the server, at once or as `leaving`
        says.

        Raises:
            grpc.aio.AioRpcError: the status that it ended with.
        """
        call = self._begin(path, parts, timeout_s, metadata, streaming=False)
        try:
            if not call.ended:
                call.waiter = self._loop.create_future()
                await call.waiter
        except asyncio.CancelledError:
            self._leave(call, leaving)
            raise
        if call.end is not None:
            raise call.end
        return call.decoded(call.messages[0]), call.trailers

    async def stream(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Answers to one message, as they come; raises like `unary`. Closing it does as cancelling it."""
        call = self._begin(path, parts, timeout_s, metadata, streaming=True)
        left, passed = leaving, 0
        try:
            while True:
                while not call.messages:
                    if call.ended:
                        left = None  # it was read to its end
                        if call.end is not None:
                            raise call.end
                        return
                    call.waiter = self._loop.create_future()
                    if call.connection is not None:
                        call.connection.take(call, call.unread_bytes)
                    await call.waiter
                message = call.messages.popleft()
                if call.connection is not None:
                    call.connection.take(call, min(call.unread_bytes, framing.PREFIX.size + len(message)))
                yield call.decoded(message)
                passed += 1
                if passed % AT_ONCE == 0:
                    await asyncio.sleep(0)
        except grpc.aio.AioRpcError:
            left = None
            raise
        finally:
            self._leave(call, left)

    def _begin(
        self,
        path: str,
        parts: Parts,
        timeout_s: float | None,
        metadata: Metadata,
        streaming: bool,
    ) -> _Call:
        headers = self._paths.get(path)
        if headers is None:
            headers = self._paths[path] = (*self._head[:2], (b":path", path.encode()), *self._head[2:])
        if timeout_s is not None:
            headers = (*headers, (b"grpc-timeout", framing.encode_timeout(timeout_s)))
        if metadata:
            headers = (*headers, *framing.encode_metadata(metadata))
        call = _Call(headers, parts, streaming)
        if timeout_s is not None:
            call.timer = self._loop.call_later(max(0.0, timeout_s), self._expire, call)
        connection = self._connection
        if connection is not None and not connection.gone.done():
            connection.begin(call)
        elif self._closed:
            call.finish(call_error("CANCELLED", "Channel is closed."))
        elif self._state is State.TRANSIENT_FAILURE:
            call.finish(self._refused())
        else:
            self._waiting.append(call)
        return call

    def _expire(self, call: _Call) -> None:
        call.finish(call_error("DEADLINE_EXCEEDED", "Deadline Exceeded"))
        self._drop(call)

    def _give_up(self, call: _Call) -> None:
        call.finish(asyncio.CancelledError("its caller has left"))
        self._drop(call)

    def _leave(self, call: _Call, leaving: Leaving | None) -> None:
        """The caller waits no longer; `leaving`: what becomes of a call that it has not read to its end."""
        if leaving is None or call.ended or call.connection is None:
            self._drop(call)
            if leaving is not None:
                leaving.ended(_code(call.end) if call.ended else "")
            return
        call.leaving = leaving
        call.messages.clear()
        call.connection.take(call, call.unread_bytes)
        if call.timer is not None:
            call.timer.cancel()
        call.timer = self._loop.call_later(leaving.grace_s, self._give_up, call)

    def _drop(self, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if call.connection is not None:
            call.connection.drop(call)
        elif call in self._waiting:
            self._waiting.remove(call)

    # The connection

    async def _keep_connected(self) -> None:
        loop, backoff_s = asyncio.get_running_loop(), BACKOFF_FIRST_S
        while True:
            self._set(State.CONNECTING)
            try:
                async with asyncio.timeout(self._connect_s):
                    connection = await self._connect()
            except (OSError, TimeoutError, ValueError, OverflowError) as error:  # no host's name, no port
                said = f"no answer within {self._connect_s:g} s" if isinstance(error, TimeoutError) else str(error)
                self._why = f"{self.target}: {said or type(error).__name__}"
                self._set(State.TRANSIENT_FAILURE)
                self._answer_waiting(None)
                await asyncio.sleep(backoff_s)
                backoff_s = min(BACKOFF_MAX_S, 2 * backoff_s)
                continue
            backoff_s, born_s = BACKOFF_FIRST_S, loop.time()
            self._connection = connection
            self._set(State.READY)
            self._answer_waiting(connection)
            await self._until_gone(connection)
            self._connection = None
            self._old.add(connection)
            self._old = {each for each in self._old if not each.closed}
            self._set(State.IDLE)
            if loop.time() - born_s < BACKOFF_FIRST_S:  # a server that takes connections and drops them
                await asyncio.sleep(BACKOFF_FIRST_S)

    async def _connect(self) -> _ClientConnection:
        loop = asyncio.get_running_loop()
        if self.target.startswith("unix:"):
            path = self.target.removeprefix("unix:")
            _, connection = await loop.create_unix_connection(_ClientConnection, path)
        else:
            host, _, port = self.target.rpartition(":")
            host = host.strip("[]")
            if self._tls is None:
                _, connection = await loop.create_connection(_ClientConnection, host, int(port))
            else:
                context, named = self._tls.client_context(), self._name or host
                _, connection = await loop.create_connection(
                    _ClientConnection, host, int(port), ssl=context, server_hostname=named
                )
        try:
            await connection.ready
        except BaseException:
            connection.lost("no hello")
            raise
        return connection

    async def _until_gone(self, connection: _ClientConnection) -> None:
        keepalive = self._keepalive
        every_s = keepalive.every_s if keepalive is not None else None
        while not (await asyncio.wait((connection.gone,), timeout=every_s))[0]:
            assert keepalive is not None
            answered = asyncio.Event()
            connection.ping(answered.set)
            try:
                async with asyncio.timeout(keepalive.timeout_s):
                    await answered.wait()
            except TimeoutError:
                connection.lost("ping timeout")

    def _answer_waiting(self, connection: _ClientConnection | None) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if call.ended:
                continue
            if connection is not None:
                connection.begin(call)
            else:
                call.finish(self._refused())

    def _refused(self) -> grpc.aio.AioRpcError:
        why = f"failed to connect to all addresses; last error: {self._why}"
        return call_error("UNAVAILABLE", why, kind=NotTaken)

    def _set(self, state: Any) -> None:
        if self._state is state:
            return
        self._state = state
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def close(self, grace_s: float | None = None) -> None:
        """Take no more calls; those under way may finish within the grace, and are then cancelled."""
        self._closed = True
        self._connecting.cancel()
        await asyncio.wait((self._connecting,))
        for call in self._waiting:
            call.finish(asyncio.CancelledError("its channel was closed"))
        self._waiting = []
        connections = [each for each in (self._connection, *self._old) if each is not None and not each.closed]
        self._connection = None
        self._set(State.SHUTDOWN)
        for connection in connections:
            connection.leave()
            connection.end_if_idle()
        if grace_s and connections:
            await asyncio.wait([connection.idle for connection in connections], timeout=grace_s)
        for connection in connections:
            connection.cut()


def open_channel(
    target: str, tls: Tls | None, *, name: str = "", keepalive: Keepalive | None = None, connect_s: float | None = None
) -> H2Channel:
    """Channel to a slice or another worker. It uses the worker's TLS where both sides show certificates, and clear text
    over a Unix socket. `name`, `keepalive`, `connect_s`: as `H2Channel` has them."""
    mutual = tls if tls is not None and tls.mutual and not target.startswith("unix:") else None
    return H2Channel(target, tls=mutual, name=name, keepalive=keepalive, connect_s=connect_s)


def _code(end: Any) -> str:
    """Name of the status that the server ended a call with; "": it was cut. `end`: as of `finish`."""
    if end is None:
        return "OK"
    return str(end.code().name) if type(end) is grpc.aio.AioRpcError else ""
