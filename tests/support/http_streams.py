"""Byte streams of HTTP/1.1 clients, right and wrong, drawn from a seed, and two readings of each: by the REST front,
and by h11, a parser by other authors.

A reading is the requests that were whole (method, target, body), and whether the server closed the connection. The
front may be stricter than h11: fewer requests, then closed. It must never read another request than h11 does.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import h11
import uvicorn

from dispatcher.fronts.rest.http1 import Http1Connection

TURNS: Final = 12
"""Of the event loop, for what has been read: a request is answered in one or two."""
ABSOLUTE: Final = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
SPACES: Final = re.compile(rb"\A[A-Z]+ +")


@dataclass
class Reading:
    """Requests of a stream as (method, target, body), and whether the connection was closed by the server."""

    requests: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    headers: list[list[tuple[bytes, bytes]]] = field(default_factory=list)
    closed: bool = False
    sent: bytes = b""

    def problem(self, other: "Reading") -> str:
        """Why this reading is not as strict as another; empty if it is."""
        if self.requests == other.requests and (self.closed or not other.closed):
            return ""
        if self.closed and self.requests == other.requests[: len(self.requests)]:
            return ""
        return f"{self.requests} closed={self.closed}, where h11 reads {other.requests} closed={other.closed}"


class Wire(asyncio.Transport):
    """Transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        if not self.closed:
            self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def front_reads(
    pieces: Sequence[bytes], protocol: type[Any] = Http1Connection, answers: Sequence[bytes] = ()
) -> Reading:
    """Reading by the REST front of what comes in these pieces. `answers`: parts of each answer, without a length."""
    reading = Reading()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            body, more = body + event["body"], event["more_body"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        reading.requests.append((scope["method"].encode(), scope["raw_path"] + query, body))
        reading.headers.append(scope["headers"])
        await send({"type": "http.response.start", "status": 200 if answers else 204, "headers": []})
        for part in answers:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http=protocol, ws="none")
    config.load()
    wire = Wire()
    connection = protocol(config, uvicorn.Server(config).server_state, {})
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.closed:
            connection.data_received(piece)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    reading.closed, reading.sent = wire.closed, wire.sent
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return reading


def h11_reads(stream: bytes) -> Reading:
    """Reading by h11, one connection object for each request. Two leniencies of RFC 9112 are granted that h11 has not:
    empty lines before a request (2.2), and more than one space behind its method (3)."""
    reading = Reading()
    rest = stream
    while rest := SPACES.sub(lambda found: found[0].rstrip() + b" ", rest.lstrip(b"\r\n")):
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
        connection.receive_data(rest)
        request, body = None, b""
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    return reading
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += event.data
        except h11.RemoteProtocolError:
            reading.closed = True
            return reading
        assert request is not None
        reading.requests.append((request.method, path_of(request.target), body))
        if connection.their_state is h11.MUST_CLOSE:
            reading.closed = True
            return reading
        rest = connection.trailing_data[0]
    return reading


def path_of(target: bytes) -> bytes:
    """Path and query of a target in absolute form (RFC 9112 3.2.2); another target is its own."""
    path = ABSOLUTE.sub(b"", target)
    path = path if path.startswith(b"/") or path == target else b"/" + path
    return path.removesuffix(b"?")


FIRST: Final = (
    b"POST /v2 HTTP/1.0", b"POST /v2 HTTP/0.9", b"POST /v2 HTTP/2.0", b"POST /v2 HTTP/1.2", b"POST /v2",
    b"POST  /v2 HTTP/1.1",
    b"POST /v2 HTTP/1.1 ", b"POST\t/v2 HTTP/1.1", b"POST /v2 x HTTP/1.1", b"post /v2 HTTP/1.1",
    b"CONNECT x:80 HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"GET http://x/v2?q HTTP/1.1", b"GET http://x HTTP/1.1",
    b"GET http://x?q HTTP/1.1", b"GET //x/v2 HTTP/1.1",
    b"GET /v2#f HTTP/1.1", b"GET ?q HTTP/1.1", b"GET v2 HTTP/1.1", b"GET /\xe9 HTTP/1.1",
    b"GET /a%00b HTTP/1.1", b"HEAD /v2 HTTP/1.1",
    b"\r\nPOST /v2 HTTP/1.1", b" POST /v2 HTTP/1.1", b"PRI * HTTP/2.0", b"POST /v2 HTTP/1.1\r",
    b"BREW /v2 HTTP/1.1", b"POST /v2 HTTP/01.1",
    b"DELETE /v2?a=b HTTP/1.1", b"GET /v2\x00 HTTP/1.1", b"GET ftp://x/v2 HTTP/1.1", b"POST /v2 http/1.1",
    b"POST /v2 HTTP/1.1\x0b",
)  # fmt: skip
LENGTHS: Final = (
    b"%d", b"+%d", b"-%d", b"0x%x", b"%d ", b"\t%d", b"%d, %d", b"%d,", b"0%d", b"%d.0", b"%de0", b"1%d", b"",
    b" ", b"%d\x0b", b"%d 1", b"\"%d\"",
    b"99999999999999999999%d", b"18446744073709551616", b"\xd9\xa5", b"%d;a", b"%d\x00", b"_%d", b"%d_0",
)  # fmt: skip
CODINGS: Final = (
    b"chunked", b"Chunked", b"chunked ", b"\tchunked", b"xchunked", b"chunkedx", b"chunked, identity",
    b"identity", b"identity, chunked",
    b"gzip, chunked", b"chunked, chunked", b"chunked,", b",chunked", b"\"chunked\"", b"chunked;q=1",
    b"\x0bchunked", b"chunked\x00", b"",
    b"\r\n chunked", b"chunk\r\n ed", b"gzip", b"chunked\xa0", b"cow", b"chunked\tx",
)  # fmt: skip
OFFERS: Final = (
    (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
    (b"Connection: upgrade", b"Upgrade: websocket"),
    (b"Connection: keep-alive", b"Connection: UPGRADE", b"Upgrade: h2c"), (b"Upgrade: h2c",),
    (b"Connection: upgrade",),
    (b"Connection: close, upgrade", b"Upgrade: TLS/1.0, h2c"),
    (b"Connection: upgrade", b"Upgrade: h2c", b"Upgrade: websocket"),
    (b"Connection:upgrade,", b"Upgrade:"), (b"HTTP2-Settings: AAMAAABk",),
    (b"Connection: a, upgrade, b", b"Upgrade: x/1"),
)  # fmt: skip
HONOURED_OFFERS: Final = tuple(offer for offer in OFFERS if not any(b"close" in line for line in offer))
"""Those after which the connection stays open."""
OTHERS: Final = (
    b"X: a", b"X:", b"X : a", b" X: a", b"X: a\r\n b", b"X: \x01", b"X: \x00", b"X: \xff", b"X", b": a",
    b"X\x00: a", b"X(: a", b"X: a\rY: b", b"X: a\nY: b",
    b"Host: x", b"Host:", b"Connection: close", b"Connection: keep-alive", b"Expect: 100-continue",
    b"Expect: 200-ok", b"Trailer: X", b"TE: trailers",
    b"X:" + b"a" * 900, b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Content_Length: 5",
    b"X: Content-Length: 5", b"\tContent-Length: 5",
    b"Content-Length : 5", b"Content-Length: 5\x0b", b"Transfer-Encoding : chunked", b"X: a\r", b"\rX: a",
    b"Content-Length\t: 5", b"Proxy-Connection: close",
)  # fmt: skip
TRAILERS: Final = (
    b"", b"X: a\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Authorization: Bearer x\r\n", b"X\r\n", b" X: a\r\n", b"X: a\n", b"Host: y\r\n",
    b"X: a\r\n b\r\n", b"Upgrade: h2c\r\nConnection: upgrade\r\n",
)  # fmt: skip
ENDS: Final = (b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r", b" \r\n", b"")
INNER: Final = b"POST /smuggled HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
BODIES: Final = (b"", b"{}", b"hello", b"%s", b"0\r\n\r\n%s", b"a" * 300, b"\r\n", b"\0\xff")


def draw_stream(random: Random, inner: bytes = INNER) -> bytes:
    """Stream of one to three requests; about half of them are right. `inner`: request that some have as their body."""
    return b"".join(_draw_request(random, inner) for _ in range(random.choice((1, 1, 2, 2, 3))))


def _draw_request(random: Random, inner: bytes) -> bytes:
    """One request with its body; something is wrong or rare in about half of them."""
    body = random.choice(BODIES).replace(b"%s", inner)
    wrong = random.random() < 0.5

    def rare(chance: float = 0.25) -> bool:
        return wrong and random.random() < chance

    first = random.choice(FIRST) if rare() else random.choice((b"POST /v2 HTTP/1.1", b"GET /v2?a=1 HTTP/1.1"))
    headers = [b"Host: x"] if not rare(0.1) else []
    framing, content = _draw_framing(random, body, rare)
    headers += framing
    if random.random() < 0.3:
        headers += random.choice(OFFERS)
    headers += [random.choice(OTHERS) for _ in range(random.choice((0, 1, 1, 2)))] if rare(0.5) else [b"Accept: */*"]
    if rare(0.5):
        random.shuffle(headers)
    ends = [random.choice(ENDS) if rare(0.05) else b"\r\n" for _ in range(len(headers) + 2)]
    lines = zip([first, *headers, b""], ends, strict=True)
    request = b"".join(line + end for line, end in lines) + content
    if rare(0.1):
        at = random.randrange(len(request))
        byte = random.choice((b"", b"\r", b"\n", b"\0", b" ", b"\t", b":", b",", bytes([random.randrange(256)])))
        request = request[:at] + byte + request[at + random.choice((0, 1)) :]
    return request[: random.randrange(len(request))] if rare(0.05) else request


def _draw_framing(random: Random, body: bytes, rare: Any) -> tuple[list[bytes], bytes]:
    """Headers that frame a body, and the framed body."""
    if random.random() < 0.5:
        form = random.choice(LENGTHS) if rare(0.5) else b"%d"
        length = form % ((len(body),) * form.count(b"%"))
        headers = [b"Content-Length: " + length] * (2 if rare(0.1) else 1)
        headers += [b"Transfer-Encoding: " + random.choice(CODINGS)] if rare(0.1) else []
        return headers, body
    headers = [b"Transfer-Encoding: " + (random.choice(CODINGS) if rare(0.5) else b"chunked")] * (2 if rare(0.1) else 1)
    headers += [b"Content-Length: %d" % len(body)] if rare(0.2) else []
    cut = random.randrange(len(body) + 1)
    chunks = b"".join(_draw_chunk(random, part, rare) for part in (body[:cut], body[cut:]) if part)
    last = random.choice((b"0", b"00", b"0;a=b", b"0 ", b"-0", b"")) if rare(0.2) else b"0"
    return headers, chunks + last + b"\r\n" + (random.choice(TRAILERS) if random.random() < 0.3 else b"") + b"\r\n"


def _draw_chunk(random: Random, part: bytes, rare: Any) -> bytes:
    forms = (b"%x;a", b'%x;a="b;c"', b"%x ;a", b"0x%x", b"+%x", b"-%x", b"%x ", b" %x", b"%x\t", b"0000000000000%x",
             b"ffffffffffffffff%x",
             b"%x;\n", b"%x;a\rb", b"g%x", b"%x;a=\0", b"1%x")  # fmt: skip
    size = (random.choice(forms) if rare(0.3) else b"%x") % len(part)
    return (
        size + (random.choice(ENDS) if rare(0.1) else b"\r\n") + part + (random.choice(ENDS) if rare(0.1) else b"\r\n")
    )


def cut(random: Random, stream: bytes) -> list[bytes]:
    """A stream in the pieces that it comes in: whole, by bytes, or cut a few times."""
    how = random.random()
    if how < 0.5:
        return [stream]
    if how < 0.6 and len(stream) < 400:
        return [stream[i : i + 1] for i in range(len(stream))]
    places = sorted(random.randrange(len(stream) + 1) for _ in range(random.choice((1, 2, 4))))
    pairs = zip([0, *places], [*places, len(stream)], strict=True)
    return [stream[begin:end] for begin, end in pairs if end > begin]
