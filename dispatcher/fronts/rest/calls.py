"""One HTTP request of the REST port: its body, its client, its reply or its stream of events."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import structlog

from dispatcher.fronts.access_control import AccessControl
from dispatcher.fronts.grpc.server import MESSAGE_S
from dispatcher.fronts.grpc.streams import ClientLeft
from dispatcher.fronts.rest import codec, compression
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.core.tenants import Tenant
from dispatcher.request.pace import BYTES_PER_S_MIN, paced
from dispatcher.transport.core.trace_context import trace_of
from dispatcher.transport.h2 import Held
from trefoil.core.errors import TrefoilError
from trefoil.runtime.rpc import status_of

LOG: Final = structlog.get_logger()

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PART_BYTES: Final = 2**16
"""Of a large answer: as much as uvicorn lets wait for a client."""
READS_S: Final = 300.0
"""Within which a client of a large answer reads some of it; the system tells so by the megabyte."""
STALLED_S: Final = 5.0
"""After which it may lose its connection, where there is no room."""
DISCARDED_BYTES_MAX: Final = 16 * 2**20
UNREAD_S: Final = 60.0
"""How long an event waits for a client that does not read."""
CUT_S: Final = 1.0
"""How long the last event of a response that is cut off waits for such a client."""
STOPPING: Final = StatusError(grpc.StatusCode.UNAVAILABLE, "the dispatcher is stopping. Remedy: send the request again")
PROMPT_BYTES_MAX: Final = 4 * 2**20
"""Body of a request for text."""
_PAUSE_MS: Final = re.compile("[0-9]{1,12}")
"""A pause before the next attempt; a slice may send anything else, which asks for none."""
EVENTS: Final = b"text/event-stream; charset=utf-8"
STATUS: Final = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
}
"""Triton's own where it has one; all others are 400, as its are."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """HTTP response; `headers` beyond the content's type and length."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"


class Room:
    """Share of one request in the bytes that a worker holds: its body, also once it is decompressed."""

    def __init__(self, held: Held) -> None:
        self._held, self._bytes = held, 0

    def take(self, count: int) -> None:
        """Count more bytes, or, below 0, fewer. Raises StatusError RESOURCE_EXHAUSTED: there is no room for more."""
        if count > 0 and (full := self._held.full):
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, full)
        self._held.bytes += count
        self._bytes += count

    def free(self) -> None:
        """Give all back."""
        self.take(-self._bytes)


class Unread:
    """Large answers that their clients have not read: held as requests are, sent by parts, so that TLS waits too."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._open: dict[asyncio.Transport, tuple[int, float]] = {}  # bytes, and when its client last read some

    async def send(self, send: Send, client: asyncio.Transport, body: bytes) -> None:
        """Send the body of a response and end it. A client that reads nothing for READS_S loses its connection. When
        unread answers exceed half of what may be held, the client that has read nothing for longest (at least
        STALLED_S) also loses its connection."""
        if len(body) <= PART_BYTES:
            await send({"type": "http.response.body", "body": body})
            return
        self._held.bytes += len(body)
        try:
            await self._parts(send, client, memoryview(body))
        except TimeoutError:
            client.abort()
        finally:
            self._held.bytes -= len(body)
            self._open.pop(client, None)

    async def _parts(self, send: Send, client: asyncio.Transport, body: memoryview) -> None:
        loop = asyncio.get_running_loop()
        for at in range(0, len(body) + PART_BYTES, PART_BYTES):  # each waits for the one before; the last is empty
            self._open[client] = len(body), loop.time()
            if at == 0:
                self._relieve(loop.time())
            part, more = body[at : at + PART_BYTES], at < len(body)
            async with asyncio.timeout(READS_S):
                await send({"type": "http.response.body", "body": part, "more_body": more})

    def _relieve(self, now_s: float) -> None:
        if 2 * sum(count for count, _ in self._open.values()) <= self._held.bytes_max:
            return
        client, (count, read_s) = min(self._open.items(), key=lambda each: each[1][1])
        if now_s - read_s >= STALLED_S:
            LOG.warning("client that reads nothing", peer=client.get_extra_info("peername"), bytes=count)
            del self._open[client]
            client.abort()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """HTTP request without its body. `peer`: address of its client, as gRPC writes it; `query`: what follows "?"."""

    method: str
    path: str
    headers: dict[str, str]
    receive: Receive
    send: Send
    peer: str = ""
    query: str = ""
    room: Room = field(default_factory=lambda: Room(Held()))

    def needs(self, method: str) -> None:
        """Check the method; raises HttpError 405 for another one."""
        if self.method != method:
            raise HttpError(405, "Method Not Allowed", ((b"allow", method.encode()),))

    def caller(self, access: AccessControl, tenant: Tenant) -> Caller:
        """Caller of an inference."""
        flow = access.flow(tenant, self.peer, self.headers.items)
        trace = trace_of(self.headers.items())
        return Caller(tenant=tenant.name, trace=trace, flow=flow, weight=tenant.weight)


class HttpError(Exception):
    """HTTP status that is not a gRPC status."""

    def __init__(self, status: int, details: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(details)
        self.status, self.details, self.headers = status, details, headers


class ClientDisconnected(Exception):
    """Client that hung up before its answer."""


async def read_body(ask: HttpRequest, most: float, limit: str = "message_bytes_max") -> bytes:
    """The whole body, counted in the request's room.

    Raises:
        ClientDisconnected: the client left.
        HttpError: it is too large, or its end did not come within MESSAGE_S.
        StatusError: RESOURCE_EXHAUSTED, the worker has no room for it.
    """
    try:
        async with asyncio.timeout(MESSAGE_S):
            return await _whole(ask, most, limit)
    except TimeoutError as error:
        why = f"the whole request did not come within {MESSAGE_S:g} s. Remedy: send it faster, or in parts"
        raise HttpError(408, why, ((b"connection", b"close"),)) from error


async def _whole(ask: HttpRequest, most: float, limit: str) -> bytes:
    declared = ask.headers.get("content-length", "")
    received = 0
    refused: Exception | None = None
    if declared.isdigit() and int(declared.lstrip("0") or "0") > most:  # llhttp: at most 64 bits, after zeros
        refused = too_large("the request is too large", limit, most)
    joined = bytearray()  # not a list of parts: a client may send single bytes
    while True:
        event = await ask.receive()
        if event["type"] == "http.disconnect":
            raise ClientDisconnected
        part, more = event.get("body", b""), event.get("more_body", False)
        received += len(part)
        if refused is None:
            try:
                if received > most:
                    raise too_large("the request is too large", limit, most)
                ask.room.take(len(part))
            except (HttpError, StatusError) as error:
                refused, joined = error, bytearray()
                ask.room.free()
            else:
                if not more and not joined:
                    return bytes(part)
                joined += part
        # The rest is read and dropped, so that the client reads the refusal instead of a reset connection.
        if not more or (refused is not None and received > most + DISCARDED_BYTES_MAX):
            break
    if refused is not None:
        raise refused
    return bytes(joined)


async def body_of(ask: HttpRequest) -> AsyncIterator[bytes]:
    """A body part by part, as it comes.

    Raises:
        ClientDisconnected: the client left.
        HttpError: it is slower than `pace` allows.
    """
    try:
        async for event in paced(ask.receive, lambda event: len(event.get("body", b""))):
            if event["type"] == "http.disconnect":
                raise ClientDisconnected
            yield event.get("body", b"")
            if not event.get("more_body", False):
                return
    except TimeoutError as error:
        why = f"the body did not come at {BYTES_PER_S_MIN} bytes/s. Remedy: send it faster"
        raise HttpError(408, why, ((b"connection", b"close"),)) from error


async def discard(body: AsyncIterator[bytes]) -> None:
    """Drop what follows in a body that is refused, so that its client reads the refusal."""
    left = DISCARDED_BYTES_MAX
    with suppress(HttpError):  # it is too slow
        async for part in body:
            left -= len(part)
            if left < 0:
                return


async def read_text(
    ask: HttpRequest, access: AccessControl, tenant: Tenant, most: float = PROMPT_BYTES_MAX, limit: str = "a prompt"
) -> bytes:
    """Body of a request for text, decompressed; its tenant has paid for it. Raises like `read_body` and `admit`."""
    body = await read_body(ask, most, limit)
    access.admit(tenant, len(body))
    body = await compression.decompress(body, ask.headers.get("content-encoding", ""), most, ask.room.take)
    if len(body) > most:
        raise too_large("the request is too large once decompressed", limit, most)
    return body


class EventStream:
    """Server-sent events of one response, which begins with the first: before it, a status can still be sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def event(self, data: bytes) -> None:
        """Send one event. Waits while the client does not read; raises ClientLeft after UNREAD_S."""
        await self._write(b"data: %b\n\n" % data, more=True)

    async def end(self) -> None:
        """End the response."""
        await self._write(b"", more=False)

    async def cut(self, error: bytes) -> None:
        """End a response that has begun with an error, as far as its client reads."""
        if self.started:
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await self.event(error)
                    await self.end()

    async def _write(self, data: bytes, more: bool) -> None:
        if not self.started:
            self.started = True
            headers = [(b"content-type", EVENTS), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout(UNREAD_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError as error:
            raise ClientLeft from error


async def while_there(receive: Receive, answering: Any) -> Any:
    """The answer; a client that leaves takes its request out of the queue or off its slice.

    Raises:
        ClientDisconnected: it left.
    """
    task = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    except ClientLeft as left:
        raise ClientDisconnected from left
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def combined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by name; lines of one name are one list (RFC 9110 5.3), so that none of them hides another."""
    found: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


def too_large(what: str, setting: str, most: float) -> HttpError:
    """HttpError 413 that names a limit."""
    return HttpError(413, f"{what}. Remedy: send at most {setting} = {most:.0f} bytes")


def error_body(text: str) -> bytes:
    """Error as Triton writes it."""
    return codec.dumps({"error": text})


Refused = HttpError | StatusError | TrefoilError


def refusal(error: Refused) -> HttpReply:
    """An error as HTTP has it. The time to wait of a limit or a budget becomes Retry-After, in whole seconds, rounded
    up."""
    if isinstance(error, HttpError):
        return HttpReply(error.status, error_body(error.details), error.headers)
    refused = error if isinstance(error, StatusError) else StatusError(status_of(error), str(error))
    headers: tuple[tuple[bytes, bytes], ...] = ()
    for name, value in refused.trailers or ():
        if name == "grpc-retry-pushback-ms" and _PAUSE_MS.fullmatch(value):
            headers += ((b"retry-after", str(-(-int(value) // 1000)).encode()),)
        elif name == "retry-after":
            headers += ((b"retry-after", str(value).encode()),)
    if refused.code is grpc.StatusCode.UNAUTHENTICATED:
        headers += ((b"www-authenticate", b"Bearer"),)
    return HttpReply(STATUS.get(refused.code, 400), error_body(refused.details), headers)
