"""gRPC server on HTTP/2: handlers as grpc.aio has them, called in the worker's own event loop.

A call begins when its headers have come. A unary one is handed to its handler as soon as its whole message is there. A
stream's handler reads one message after the other, and its client's window opens as it reads. What a client sends wrong
gets a status, and leaves nothing behind.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import structlog

from dispatcher.transport import h2
from dispatcher.transport.accepting import accept, peer_of
from dispatcher.transport.core import grpc_framing as framing
from dispatcher.transport.core.grpc_framing import FramingError
from dispatcher.transport.h2_call import ServerBounds, ServerCall

LOG = structlog.get_logger()
SWEEP_S: Final = 1.0
LAST_WORDS_S: Final = 10.0  # for a client to read what it is sent on a connection that has ended
PAUSE_S: Final = 0.2  # without a word of a client that sends a stream: then it hears its refusal
DRAIN_S: Final = 0.8  # at most, for a client that sends on and on: a status comes within a second
NOTICE_S: Final = 0.2  # between the notice that a connection ends and its end, for a peer that does not answer
_OK: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", framing.ACCEPTED))
_DONE: Final = ((b"grpc-status", b"0"),)
_NUMBERS: Final = {name: number for number, name in enumerate(framing.STATUS_NAMES)}

Handlers = Mapping[bytes, Any]
"""Handlers (`grpc.RpcMethodHandler`) by path."""


class ServerConnection(h2.H2Connection):
    """One client."""

    ROLE = h2.SERVER
    EVENTS: ClassVar[Mapping[type, str]] = {
        h2.RequestReceived: "on_request",
        h2.DataReceived: "on_data",
        h2.TrailersReceived: "on_trailers",
        h2.StreamClosed: "on_closed",
        h2.SettingsReceived: "on_settings",
        h2.PingAcknowledged: "on_pong",
    }

    def __init__(self, server: "H2Server") -> None:
        super().__init__(server.limits, server.held)
        self.server = server
        self.bounds = server.bounds
        self.calls: dict[int, ServerCall] = {}
        self.peer = ""
        self.greeted = False
        self.since_s = self.alive_s = self.loop.time()
        self.leaving = False
        self.cutting = False

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

    def on_request(self, event: Any) -> None:
        """A call begins."""
        told = dict(event.headers)
        handler = self.server.handlers.get(told.get(b":path", b""))
        if told.get(b":method") != b"POST" or not told.get(b"content-type", b"").startswith(b"application/grpc"):
            status = b"415" if told.get(b":method") == b"POST" else b"405"
            self._send(event.stream_id, ((b":status", status),), end_stream=True)
            return
        call = self.calls[event.stream_id] = ServerCall(self, event.stream_id, event.headers, handler)
        call.ended = event.end_stream
        if handler is None:
            self.refuse(call, "UNIMPLEMENTED", "Method not found!")
            return
        if self.unsent_bytes > self.bounds.connection_unread_bytes_max:
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
        stream_id, data, held = event.stream_id, event.data, self.held
        call = self.calls.get(stream_id)
        if (
            call is not None
            and call.body is not None
            and held.bytes <= held.bytes_max
            and not event.end_stream
            and call.body.more(data)
        ):
            call.held_bytes += len(data)
            held.bytes += len(data)
            self.acknowledge(stream_id, len(data))
            return
        if call is None:  # it has ended, and its client continues
            self.taken(stream_id, len(data))
            if not event.end_stream:
                self._stop_client(stream_id)
            return
        if call.refusal is not None:
            self.taken(stream_id, len(data))
            call.heard_s, call.ended = self.loop.time(), event.end_stream
            if call.ended:
                self._end_refused(call)
            return
        try:
            if not data:
                if event.end_stream:
                    call.half_close()
                return
            if held.bytes > held.bytes_max:
                self.taken(stream_id, len(data))
                raise FramingError("RESOURCE_EXHAUSTED", held.full)
            call.feed(data, event.end_stream)
        except FramingError as error:
            call.ended = event.end_stream
            self.refuse_early(call, error)

    def on_trailers(self, event: Any) -> None:
        """A client's trailers: all that they say is that it has said all."""
        call = self.calls.get(event.stream_id)
        if call is not None and call.refusal is not None:
            call.ended = True
            self._end_refused(call)
        elif call is not None and not call.ended:
            try:
                call.half_close()
            except FramingError as error:
                self.refuse_early(call, error)

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

    def on_unsent(self) -> None:
        """Where all connections together hold too much, the one that reads least goes."""
        if self.held.unsent_full:
            self.server.relieve()

    # How calls end

    def send_message(self, call: ServerCall, data: bytes, first: bool) -> None:
        """Send one message of a stream of answers."""
        try:
            if first:
                self._h2.send_response(call.stream_id, _OK)
            self.send_parts(call.stream_id, framing.framed((data,)))
        except h2.Http2Error:
            return  # its stream has ended: its client has gone
        self.schedule()

    def answer(self, call: ServerCall, parts: tuple[bytes, ...], trailers: Any) -> None:
        """End a unary call with its answer, its parts one after the other."""
        stream_id = call.stream_id
        if self.calls.pop(stream_id, None) is None:
            return
        h2_ = self._h2
        try:
            h2_.send_response(stream_id, _OK)
            self.send_parts(stream_id, framing.framed(parts))
            h2_.send_trailers(stream_id, (*_DONE, *framing.encode_metadata(trailers)) if trailers else _DONE)
        except h2.Http2Error:
            pass  # its stream has ended: its client has gone
        else:
            self.schedule()
        call.forget()

    def finish(self, call: ServerCall, trailers: Any) -> None:
        """End a stream of answers well."""
        if self.calls.pop(call.stream_id, None) is None:
            return
        if not call.started:
            self._send(call.stream_id, _OK)
        self._send_last(call.stream_id, (*_DONE, *framing.encode_metadata(trailers or ())))
        if call.may_send:
            self._stop_client(call.stream_id)
        call.forget()

    def refuse(self, call: ServerCall, code: str, details: str, trailers: Any = ()) -> None:
        """End a call with a status. A client that sends a stream hears it once it has sent all, or pauses: grpc.aio
        says INTERNAL instead of a status that comes while it sends (grpc/grpc issue 36066)."""
        if call.refusal is not None or call.stream_id not in self.calls:
            return
        last = [(b"grpc-status", b"%d" % _NUMBERS[code])]
        if details:
            last.append((b"grpc-message", framing.encode_details(details)))
        last += framing.encode_metadata(trailers or ())
        call.refusal = last
        call.forget()
        call.heard_s = now_s = self.loop.time()
        if call.may_send and not self.cutting:
            self._await_pause(call, now_s + DRAIN_S)
        else:
            self._end_refused(call)

    def _await_pause(self, call: ServerCall, until_s: float) -> None:
        at_s = min(call.heard_s + PAUSE_S, until_s)
        if self.loop.time() < at_s:
            self.loop.call_at(at_s, self._await_pause, call, until_s)
        else:
            self._end_refused(call)

    def _end_refused(self, call: ServerCall) -> None:
        if self.calls.pop(call.stream_id, None) is None or call.refusal is None:
            return  # its client has gone, or has heard it
        if call.started:
            self._send_last(call.stream_id, call.refusal)
        else:
            self._send(call.stream_id, (*_OK, *call.refusal), end_stream=True)
        if not call.ended:
            self._stop_client(call.stream_id)

    def _stop_client(self, stream_id: int) -> None:
        """Ask the client of a call that has ended to send no more, by a reset without an error (RFC 9113, 8.1). It
        would overtake what is not written yet: then it is sent when the client sends more."""
        self.flush()
        if not self._paused and not self.unsent_of(stream_id):
            self.reset(stream_id, h2.NO_ERROR)

    def refuse_early(self, call: ServerCall, error: FramingError) -> None:
        """Refuse what a client is still sending; a handler that reads it is cancelled."""
        task = call.task
        self.refuse(call, error.code, error.details)
        call.left = True
        if task is not None:
            task.cancel()

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
        self.cutting = True
        for call in list(self.calls.values()):
            if call.refusal is not None:
                self._end_refused(call)
            elif call.task is not None:
                call.task.cancel()
            else:
                self.refuse(call, "UNAVAILABLE", "the server is stopping")


class H2Server:
    """Server of handlers on a socket that listens, which may be `shared` with other processes. Belongs to one event
    loop. `held` counts the bytes that wait on all of its connections; `tls` is asked for each new one."""

    def __init__(
        self,
        handlers: Handlers,
        bounds: ServerBounds,
        limits: h2.ConnectionLimits,
        held: h2.Held,
        listening: socket.socket,
        tls: Callable[[], ssl.SSLContext] | None = None,
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
            tls = self._tls() if self._tls is not None else None
            await loop.connect_accepted_socket(lambda: ServerConnection(self), accepted, ssl=tls)

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
                        connection.refuse_early(call, FramingError("DEADLINE_EXCEEDED", late))
                if 0 < bounds.connection_age_max_s < age_s:
                    connection.leave()
                    if age_s > bounds.connection_age_max_s + bounds.connection_age_grace_s:
                        connection.cut()
                if not connection.dying:
                    connection.alive_s = now_s
                elif now_s - connection.alive_s > LAST_WORDS_S:
                    connection.lost("its client does not read the end")


class Routes:
    """Collects handlers by path from what generated code registers (`add_XServicer_to_server`)."""

    def __init__(self) -> None:
        self.handlers: dict[bytes, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the handlers of a service by the names of their methods. Generated code calls it too."""
        self.handlers |= {f"/{service}/{name}".encode(): handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """Called by generated code beside the other: the same handlers once more."""
