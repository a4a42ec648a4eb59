"""HTTP/1.1 connection of the REST port: reads a request as RFC 9112 defines it, or refuses it and closes.

llhttp (httptools) parses strictly; uvicorn runs the application. Added here, because neither has it:
- An upgrade offer (`Upgrade: h2c`) is ignored, as RFC 9110 7.8 allows. llhttp stops at an offer and leaves the body
  unread, so that the body would be parsed as the next request. The head is therefore parsed again without the offer.
- Heads that llhttp accepts and RFC 9112 forbids, or that this server does not implement, are refused.
- Trailers are dropped (RFC 9110 6.5.1): they are not headers.
- An answer to HTTP/1.0 has no chunks (RFC 9112 6.1): one without a length ends with its connection.
- A refusal follows the answers to the requests before it.
- Heads, trailers and chunk extensions are bounded in bytes, heads in time, unanswered requests in number.
"""

import asyncio
import json
import re
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES_MAX: Final = 64 * 1024
FIELD_BYTES: Final = 32
"""What a header field counts beside its name and value, as in HTTP/2 (RFC 9113 6.5.2): empty ones cost time, too."""
TOO_LONG: Final = f"headers, trailers or chunk extensions have more than {HEAD_BYTES_MAX} bytes. Remedy: send fewer"
PIPELINED_MAX: Final = 64
"""Unanswered requests of one connection: a single read may hold ten thousand."""
PIPELINED: Final = f"{PIPELINED_MAX} requests before this one are unanswered. Remedy: wait, or use more connections"
READ_BYTES: Final = 64 * 1024
"""Of one read: chunks of a byte take 10 ms, and uvloop's own 250 KiB would take four times as long."""
HEAD_S: Final = 30.0
"""From a connection, or a request's first byte, to the end of its headers."""
OFFER: Final = frozenset((b"upgrade", b"http2-settings"))
"""Header fields of an upgrade offer, and the options of `Connection` that name them."""
TARGET: Final = re.compile(rb"(?:(?=/)|https?://[^/?#]+)([/?][^#]*)?", re.IGNORECASE)
"""Request target: a path, or a URL, whose host is of no account here (RFC 9112 3.2.2)."""

_read_buffer: Final = memoryview(bytearray(READ_BYTES))
"""What a read fills is used up before the next one begins, on whichever connection."""


class Refused(Exception):
    """Request head that is refused: HTTP status, reason."""


class Http1Connection(HttpToolsProtocol):
    """HTTP/1.1 connection of a client."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._silent_bytes = 0  # since the last head, byte of a body or end of a message
        self._fields_bytes = 0  # of the last head, and of its trailers
        self._steps = 0
        self._in_body = False
        self._unanswered: list[RequestResponseCycle] = []
        self._refusal = b""
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        """Whether a whole request has come and its answer has not gone yet."""
        return bool(self._unanswered) and not self._unanswered[0].more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        self._unset_keepalive_if_required()
        steps, rest = self._steps, data
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as offer:
                rest = self._head_without_offer() + rest[offer.args[0] :]
                self.parser = _parser(self)
            except httptools.HttpParserError as error:
                why = error.__context__
                self._refuse(
                    *(why.args if isinstance(why, Refused) else (400, f"not HTTP/1.1: {str(why or error)[:200]}"))
                )
                return
        self._silent_bytes = 0 if self._steps != steps else self._silent_bytes + len(data)
        if self._silent_bytes > HEAD_BYTES_MAX:
            self._refuse(431, TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"client": {"transport": self.transport}}
        self._fields_bytes = 0
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields_bytes += len(name) + len(value) + FIELD_BYTES
        if self._fields_bytes > HEAD_BYTES_MAX:
            raise Refused(431, TOO_LONG)
        if not self._in_body:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            return
        self._got_head()
        self._steps += 1
        self._in_body = True
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign]
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._steps += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._steps += 1
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.pop(0)
        super().on_response_complete()
        self._send_refusal()

    def _check_head(self) -> None:
        """Raise Refused for a head that llhttp accepts."""
        if len(self.url) + self._fields_bytes > HEAD_BYTES_MAX:
            raise Refused(431, TOO_LONG)
        if len(self._unanswered) >= PIPELINED_MAX:
            raise Refused(429, PIPELINED)
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refused(505, f"HTTP/{version} is not served. Remedy: send HTTP/1.1")
        target = TARGET.fullmatch(self.url)
        if self.parser.get_method() == b"CONNECT" or target is None:
            raise Refused(400, f"the request target {_shown(self.url)} is not a path. Remedy: begin it with /")
        path = target[1] or b""
        self.url = path if path.startswith(b"/") else b"/" + path
        if (hosts := self._values(b"host")) != hosts[:1] or (not hosts and version == "1.1"):
            raise Refused(400, f"Host stands {len(hosts)} times in the headers. Remedy: send it once")
        codings = self._values(b"transfer-encoding")
        if codings and ([coding.lower() for coding in codings] != [b"chunked"] or version == "1.0"):
            named = _shown(b", ".join(codings))
            raise Refused(
                501, f"Transfer-Encoding {named} in HTTP/{version} is not served. Remedy: send Content-Length"
            )
        if version == "1.0":
            self.expect_100_continue = False  # RFC 9110 10.1.1
        elif (expected := self._values(b"expect")) and [each.lower() for each in expected] != [b"100-continue"]:
            raise Refused(417, f"Expect {_shown(b', '.join(expected))} is not met. Remedy: leave it out")

    def _values(self, wanted: bytes) -> list[bytes]:
        return [value for name, value in self.headers if name == wanted]

    def _head_without_offer(self) -> bytes:
        """Head that was parsed last, without its upgrade offer."""
        options = [option.strip() for value in self._values(b"connection") for option in value.split(b",")]
        kept = b", ".join(option for option in options if option.lower() not in OFFER)
        headers = [(name, value) for name, value in self.headers if name not in OFFER | {b"connection"}]
        headers += [(b"connection", kept)] if kept else []
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"\r\n".join([first, *(b"%s: %s" % header for header in headers), b"", b""])

    def _refuse(self, status: int, why: str) -> None:
        """Read no more; refuse what cannot be read once all requests before it are answered, then close."""
        body = json.dumps({"error": why}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._refusal = STATUS_LINE[status] + head + body
        self._got_head()
        self.flow.pause_reading()
        if self._in_body:
            self._drop_last()
        self._send_refusal()

    def _drop_last(self) -> None:
        """Take back the request whose body cannot be read: its application sees that the client left."""
        last = self.cycle
        last.disconnected = True
        last.message_event.set()
        self.pipeline = type(self.pipeline)(waiting for waiting in self.pipeline if waiting[0] is not last)
        if last in self._unanswered:
            self._unanswered.remove(last)
        if last.response_started:
            self._refusal = b"\0"  # its answer has begun: nothing can follow but the end

    def _send_refusal(self) -> None:
        if self._refusal and not self._unanswered and not self.transport.is_closing():
            self.transport.write(self._refusal.strip(b"\0"))
            self.transport.close()

    def _await_head(self) -> None:
        self._got_head()
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _got_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class BoundedReads(asyncio.BufferedProtocol):
    """Protocol between a transport and a connection: each read is of at most READ_BYTES. uvloop lets no
    `asyncio.Protocol` say so itself.
    """

    def __init__(self, connection: Http1Connection) -> None:
        self._connection = connection
        self.connection_made = connection.connection_made  # type: ignore[assignment]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return _read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what has come."""
        self._connection.data_received(bytes(_read_buffer[:nbytes]))


def _parser(connection: HttpToolsProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(
        lenient_data_after_close=True
    )  # as uvicorn has it: no request is served after a close
    return parser


def _without_chunks(cycle: RequestResponseCycle) -> Any:
    send, endless = cycle.send, False

    async def plain(message: Any) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = b"content-length" not in dict(message["headers"])
            cycle.chunked_encoding = False if endless else None
        elif endless:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    return plain


def _shown(value: bytes) -> str:
    """Value in a message: 200 characters of it."""
    return repr(value[:200].decode("latin-1"))
