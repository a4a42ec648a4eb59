"""Our HTTP/2 server with clients that send what no gRPC sends, do not read, or take their time."""

import asyncio
import contextlib
import gzip
import itertools
import math
import re
import struct

import ngh2
import pytest

from dispatcher.transport import h2, h2_call
from dispatcher.transport.h2 import READ_BYTES, READ_BYTES_MIN, ConnectionLimits, Held
from dispatcher.transport.h2_call import ServerBounds
from tests.support.h2_ends import (
    CONTINUATION,
    DATA,
    GOOD,
    HEADERS,
    PATIENCE_S,
    PING,
    PREFACE,
    RST,
    SETTINGS,
    Status,
    World,
    frame,
    framed,
    path,
    refused,
    serving,
    until,
)

INTERNAL, EXHAUSTED = "INTERNAL", "RESOURCE_EXHAUSTED"
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
    "bytes of no type": ({"method": "Typed", "data": framed(b"\xff")}, "INVALID_ARGUMENT", "1 bytes are not a"),
    "a stream of no type": ({"method": "TypedStream", "data": framed(b"\n\5x")}, "INVALID_ARGUMENT", "Remedy: send"),
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
    "headers that are not HPACK": PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 5, 1, b"\xff" * 50),
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


async def test_what_one_turn_reads_falls_with_the_time_it_takes(monkeypatch):
    """A read of 256 KiB may hold 50,000 messages: others would wait for them all."""
    async with serving(ServerBounds(message_bytes_max=1 << 26)) as world:
        client = await world.raw()
        await client.until(ngh2.SettingsReceived)
        (connection,) = world.server.connections
        empty = client.request("Deaf", framed(b"") * 50_000)
        await until(lambda: len(connection.get_buffer(-1)) == READ_BYTES_MIN)
        client.h2.reset_stream(empty, 8)
        client.push()
        monkeypatch.setattr(h2, "READ_S", math.inf)
        sizes = set()
        for _ in range(200):
            stream_id = client.request("Large", framed(b"1".rjust(1 << 18, b"0")))
            await client.status(stream_id)
            sizes.add(len(connection.get_buffer(-1)))
            if READ_BYTES in sizes:
                break
        assert READ_BYTES in sizes, "what comes in few messages is read in large pieces"
        await world.is_idle()


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
        with contextlib.suppress(ngh2.StreamProtocolError):  # the server's reset may have come with its answer
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
