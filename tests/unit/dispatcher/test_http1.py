"""How the REST front reads a connection: upgrade offers, framing, trailers, refusals and their order."""

import asyncio
import socket

import pytest
import uvicorn
import uvloop

from dispatcher.fronts.rest.http1 import (
    FIELD_BYTES,
    HEAD_BYTES_MAX,
    PIPELINED_MAX,
    READ_BYTES,
    BoundedReads,
    Http1Connection,
)
from tests.support.http_streams import FIRST, INNER, OFFERS, front_reads, h11_reads

LINE = b"POST /v2 HTTP/1.1\r\n"
HEAD = LINE + b"Host: x\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"


def fields(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in lines)


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_upgrade_offer_changes_nothing_of_what_is_read(offer, whole, version):
    bodies = {
        b"Content-Length: %d" % len(INNER): INNER,
        b"Transfer-Encoding: chunked": b"%x\r\n%s\r\n0\r\n\r\n" % (len(INNER), INNER),
        b"Content-Length: 0": b"",
    }
    for framing, body in bodies.items():
        if version == b"1.0" and b"chunked" in framing:
            continue
        ends = version == b"1.0" or b"close" in offer[0]
        stream = HEAD.replace(b"1.1", version) + fields(*offer, framing) + b"\r\n" + body + (b"" if ends else NEXT)
        reading = await front_reads([stream] if whole else [stream[i : i + 1] for i in range(len(stream))])
        last = [] if ends else [(b"GET", b"/next", b"")]
        assert reading.requests == [(b"POST", b"/v2", INNER if body else b""), *last]
        assert reading.closed == ends


async def test_several_offers_on_one_connection_are_each_ignored():
    offer = HEAD + fields(*OFFERS[0], b"Content-Length: %d" % len(INNER)) + b"\r\n" + INNER
    reading = await front_reads([offer * 3 + NEXT])
    assert reading.requests == [(b"POST", b"/v2", INNER)] * 3 + [(b"GET", b"/next", b"")]


REFUSED = {
    "two framings": (CHUNKED + b"Content-Length: 2\r\n\r\n0\r\n\r\n", 400, b"Content-Length"),
    "two framings, length first": (HEAD + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n", 400, b"not HTTP"),
    "two equal lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400, b"Duplicate"),
    "a length with a sign": (HEAD + b"Content-Length: +2\r\n\r\n{}", 400, b"Content-Length"),
    "a length in hex": (HEAD + b"Content-Length: 0x2\r\n\r\n{}", 400, b"Content-Length"),
    "a length beyond 64 bits": (HEAD + b"Content-Length: 18446744073709551618\r\n\r\n{}", 400, b"overflow"),
    "another coding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, b"'gzip, chunked'"),
    "chunked twice": (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400, b"Transfer-Encoding"),
    "chunked, then another": (HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400, b"Transfer"),
    "nearly chunked": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501, b"'xchunked'"),
    "chunked behind a fold": (HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400, b"not HTTP/1.1"),
    "chunked before HTTP/1.1": (CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n", 501, b"HTTP/1.0"),
    "a chunk size beyond 64 bits": (CHUNKED + b"\r\n10000000000000002\r\n{}\r\n0\r\n\r\n", 400, b"overflow"),
    "a chunk longer than its size": (CHUNKED + b"\r\n1\r\n{}\r\n0\r\n\r\n", 400, b"chunk"),
    "a length as a trailer": (CHUNKED + b"\r\n0\r\nContent-Length: 2\r\n\r\n", 400, b"Content-Length"),
    "a space before the colon": (HEAD + b"Content-Length : 2\r\n\r\n{}", 400, b"not HTTP/1.1"),
    "a folded header": (HEAD + b"X: a\r\n b\r\n\r\n", 400, b"not HTTP/1.1"),
    "a bare LF": (HEAD + b"X: a\nContent-Length: 2\r\n\r\n{}", 400, b"CR"),
    "a bare CR": (HEAD + b"X: a\rContent-Length: 2\r\n\r\n{}", 400, b"LF"),
    "a NUL": (HEAD + b"X: \0\r\n\r\n", 400, b"not HTTP/1.1"),
    "no Host": (LINE + b"\r\n", 400, b"Host stands 0 times"),
    "two Hosts": (HEAD + b"Host: y\r\n\r\n", 400, b"Host stands 2 times"),
    "CONNECT": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 400, b"'x:80' is not a path"),
    "the whole server": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"'*' is not a path"),
    "a fragment": (b"GET /v2#f HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"'/v2#f' is not a path"),
    "HTTP/0.9": (b"GET /v2\r\n\r\n", 505, b"HTTP/0.9 is not served"),
    "HTTP/2 in words": (HEAD.replace(b"1.1", b"2.0") + b"\r\n", 505, b"HTTP/2.0 is not served"),
    "HTTP/2 with prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400, b"not HTTP/1.1"),
    "a long line": (HEAD + b"X: " + b"a" * HEAD_BYTES_MAX + b"\r\n\r\n", 431, b"headers"),
    "many lines": (HEAD + b"X: a\r\n" * (HEAD_BYTES_MAX // 2) + b"\r\n", 431, b"headers"),
    "a long target": (b"GET /" + b"a" * HEAD_BYTES_MAX + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, b"headers"),
    "an expectation": (HEAD + b"Expect: 200-ok\r\n\r\n", 417, b"'200-ok' is not met"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, b"not HTTP/1.1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("offer", [(), OFFERS[0]])
async def test_what_is_not_to_be_honoured_is_refused_once_and_nothing_behind_it_is_read(case, offer):
    stream, status, words = REFUSED[case]
    if offer and b"Host: x\r\n" in stream:
        stream = stream.replace(b"Host: x\r\n", b"Host: x\r\n" + fields(*offer))
    reading = await front_reads([stream + NEXT])
    assert (reading.requests, reading.closed) == ([], True)
    assert reading.sent.startswith(b"HTTP/1.1 %d " % status)
    assert words in reading.sent
    assert reading.sent.count(b"HTTP/1.1 ") - reading.sent.count(b"not HTTP/1.1") <= 2  # its line, and a remedy
    assert b"connection: close\r\n" in reading.sent


HONOURED = {
    "a URL": (b"GET http://y/v2?q HTTP/1.1\r\nHost: x\r\n\r\n", (b"GET", b"/v2?q", b"")),
    "a URL without a path": (b"GET https://y HTTP/1.1\r\nHost: x\r\n\r\n", (b"GET", b"/", b"")),
    "a URL with a question alone": (b"GET http://y?q HTTP/1.1\r\nHost: x\r\n\r\n", (b"GET", b"/?q", b"")),
    "two slashes": (b"GET //y/v2 HTTP/1.1\r\nHost: x\r\n\r\n", (b"GET", b"//y/v2", b"")),
    "a body of GET": (b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", (b"GET", b"/v2", b"{}")),
    "an empty line before": (b"\r\n" + HEAD + b"\r\n", (b"POST", b"/v2", b"")),
    "extensions of chunks": (CHUNKED + b'\r\n2;a="b";c\r\n{}\r\n0;d\r\n\r\n', (b"POST", b"/v2", b"{}")),
    "a coding in capitals": (CHUNKED.replace(b"chunked", b"CHUNKED") + b"\r\n0\r\n\r\n", (b"POST", b"/v2", b"")),
}  # fmt: skip


@pytest.mark.parametrize("case", HONOURED)
async def test_what_rfc_9112_lets_a_client_send_is_served_and_the_next_request_too(case):
    stream, request = HONOURED[case]
    reading = await front_reads([stream, NEXT])
    assert reading.requests == [request, (b"GET", b"/next", b"")]
    assert not reading.closed


async def test_trailers_are_no_headers():
    sent = CHUNKED + b"\r\n2\r\n{}\r\n0\r\nAuthorization: Bearer x\r\nHost: y\r\n\r\n"
    reading = await front_reads([sent, NEXT])
    assert [name for name, _ in reading.headers[0]] == [b"host", b"transfer-encoding"]
    assert [request[1] for request in reading.requests] == [b"/v2", b"/next"]


@pytest.mark.parametrize("broken", [b"\0", CHUNKED + b"\r\nx", CHUNKED + b"\r\n1\r\n{}"])
async def test_a_refusal_follows_the_answers_to_what_came_before(broken):
    reading = await front_reads([NEXT * 2 + broken + NEXT])
    assert reading.requests == [(b"GET", b"/next", b"")] * 2
    answers = [int(part[:3]) for part in reading.sent.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]
    assert (answers, reading.closed) == ([204, 204, 400], True)


async def test_a_request_behind_the_last_of_a_connection_is_not_read():
    for closing in (HEAD + b"Connection: close\r\n\r\n", HEAD.replace(b"1.1", b"1.0") + b"\r\n"):
        reading = await front_reads([closing + NEXT + b"\0"])
        assert (reading.requests, reading.closed) == ([(b"POST", b"/v2", b"")], True)


async def test_only_a_client_of_http_1_1_is_asked_for_its_body():
    sent = HEAD + b"Expect: 100-Continue\r\nContent-Length: 2\r\n\r\n"
    assert b"HTTP/1.1 100 " in (await front_reads([sent, b"{}"])).sent
    assert b"HTTP/1.1 100 " not in (await front_reads([sent.replace(b"HTTP/1.1", b"HTTP/1.0"), b"{}"])).sent


@pytest.mark.parametrize(("version", "body"), [(b"1.1", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"), (b"1.0", b"abcde")])
async def test_only_a_client_of_http_1_1_is_answered_in_chunks(version, body):
    reading = await front_reads([HEAD.replace(b"1.1", version) + b"\r\n"], answers=[b"abc", b"de"])
    head, _, rest = reading.sent.partition(b"\r\n\r\n")
    assert (rest, b"chunked" in head) == (body, version == b"1.1")
    assert reading.closed == (version == b"1.0")


@pytest.mark.parametrize(
    "begin", [HEAD + b"X: ", CHUNKED + b"\r\n0\r\nX: ", CHUNKED + b"\r\n1;x="], ids=["head", "trailer", "extension"]
)
async def test_nothing_beside_a_body_is_endless(begin):
    piece = b"a" * 4096
    reading = await front_reads([begin, *[piece] * (HEAD_BYTES_MAX // len(piece) + 1)])
    assert (reading.requests, reading.closed) == ([], True)
    assert f"more than {HEAD_BYTES_MAX} bytes".encode() in reading.sent
    body = await front_reads([HEAD + b"Content-Length: %d\r\n\r\n" % (40 * len(piece)), *[piece] * 40])
    assert body.requests == [(b"POST", b"/v2", piece * 40)]


async def test_unanswered_requests_of_one_read_are_bounded():
    reading = await front_reads([NEXT * 10 * PIPELINED_MAX, *[b""] * PIPELINED_MAX])
    assert reading.requests == [(b"GET", b"/next", b"")] * PIPELINED_MAX
    assert (reading.sent.count(b"HTTP/1.1 204 "), reading.sent.count(b"HTTP/1.1 429 "), reading.closed) == (64, 1, True)
    assert b"64 requests before this one are unanswered. Remedy: wait" in reading.sent
    reading = await front_reads([*[NEXT] * 2 * PIPELINED_MAX])  # one after the other
    assert (len(reading.requests), reading.closed) == (2 * PIPELINED_MAX, False)


@pytest.mark.parametrize("begin", [HEAD, CHUNKED + b"\r\n0\r\n"], ids=["head", "trailers"])
async def test_empty_header_fields_count(begin):
    most = HEAD_BYTES_MAX // (FIELD_BYTES + 1)
    assert (await front_reads([begin + b"a:\r\n" * (most - 4) + b"\r\n"])).requests
    reading = await front_reads([begin + b"a:\r\n" * (most + 1) + b"\r\n" + NEXT])
    assert (reading.requests, reading.closed) == ([], True)
    assert reading.sent.startswith(b"HTTP/1.1 431 ")


async def test_h11_reads_behind_an_offer_and_refuses_what_it_must():
    """What the comparison in tests/property stands on."""
    offer = HEAD + fields(*OFFERS[0], b"Content-Length: %d" % len(INNER)) + b"\r\n" + INNER + NEXT
    assert h11_reads(offer).requests == [(b"POST", b"/v2", INNER), (b"GET", b"/next", b"")]
    assert h11_reads(LINE + b"\r\n").closed
    assert sum(h11_reads(first + b"\r\nHost: x\r\n\r\n").closed for first in FIRST) > len(FIRST) / 3


def test_one_read_of_the_loop_is_bounded():
    body, sizes, found = b"1\r\nx\r\n" * 25_000, list[int](), bytearray()

    class Connection(Http1Connection):
        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))
            super().data_received(data)

    async def app(_, receive, send) -> None:
        while (event := await receive())["type"] == "http.request":
            found.extend(event["body"])
            if not event["more_body"]:
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})

    async def serve() -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http=Connection, ws="none")
        config.load()
        client, server = socket.socketpair()
        client.setblocking(False)
        sent = client.send(CHUNKED + b"\r\n" + body)
        assert sent > 2 * READ_BYTES, "there is enough to read at once"
        state = uvicorn.Server(config).server_state
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: BoundedReads(Connection(config, state, {})), server)
        await loop.sock_sendall(client, (CHUNKED + b"\r\n" + body)[sent:] + b"0\r\n\r\n")
        assert (await loop.sock_recv(client, 99)).startswith(b"HTTP/1.1 204")
        client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    assert found == b"x" * 25_000
    assert max(sizes) <= READ_BYTES
