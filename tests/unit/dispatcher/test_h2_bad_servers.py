"""Our HTTP/2 client with servers that answer what no gRPC answers, leave, or say nothing."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable

import grpc
import ngh2
import pytest

from dispatcher.transport import h2_call, h2_channel
from dispatcher.transport.calls import Keepalive, NotTaken
from dispatcher.transport.h2 import ConnectionLimits
from dispatcher.transport.h2_channel import H2Channel
from tests.support.h2_ends import (
    DATA,
    GOOD,
    PATIENCE_S,
    Raw,
    State,
    Status,
    frame,
    framed,
    listed,
    path,
    refused,
    serving,
    until,
)


class Scene:
    """A server that plays a script for each connection, and a channel to it."""

    def __init__(self, script: Callable[[Raw], Awaitable[None]], port: int = 0) -> None:
        self._script, self.port, self.connections = script, port, 0
        self._tasks: set[asyncio.Task] = set()
        self._writers: list = []

    async def __aenter__(self) -> "Scene":
        self._server = await asyncio.start_server(self._play, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.channel = H2Channel(f"127.0.0.1:{self.port}")
        return self

    async def _play(self, reader, writer) -> None:
        self.connections += 1
        self._tasks.add(asyncio.current_task())
        self._writers.append(writer)
        with contextlib.suppress(AssertionError, ConnectionError, ngh2.NGH2Error, asyncio.CancelledError):
            await self._script(Raw(reader, writer, ngh2.Role.SERVER))

    async def __aexit__(self, *_) -> None:
        await self.channel.close()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    async def call(self, timeout_s: float | None = 5.0) -> bytes:
        return (await self.channel.unary(path("Echo"), (b"x",), timeout_s))[0]


OK_HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]


def answering(answer: Callable[[Raw, int], None]):
    """Script that does this with each request."""

    async def script(server: Raw) -> None:
        server.greet()
        for n in itertools.count(1):
            request = await server.until(ngh2.RequestReceived, count=n)
            answer(server.h2, request.stream_id)
            server.push()

    return script


def respond(headers=OK_HEADERS, data=None, trailers=None, reset=None, end=False):
    def answer(server: ngh2.Connection, stream_id: int) -> None:
        server.send_response(stream_id, headers, end_stream=end)
        if data is not None:
            server.send_data(stream_id, data, end_stream=trailers is None and reset is None)
        if trailers is not None:
            server.send_trailers(stream_id, trailers)
        if reset is not None:
            server.reset_stream(stream_id, reset)

    return answer


FINE = [(b"grpc-status", b"0")]
BAD_ANSWERS = {
    "HTTP 502": (respond([(b":status", b"502")], b"<html>"), "UNAVAILABLE", "HTTP status 502"),
    "HTTP 502 without a body": (respond([(b":status", b"502")], end=True), "UNAVAILABLE", "HTTP status 502"),
    "HTTP 404": (respond([(b":status", b"404")], b"no"), "UNIMPLEMENTED", "HTTP status 404"),
    "HTML": (respond([(b":status", b"200"), (b"content-type", b"text/html")], b"<p>"), "UNKNOWN", "none of gRPC"),
    "no grpc-status": (respond(data=GOOD), "UNKNOWN", "without a grpc-status"),
    "trailers without a grpc-status": (respond(data=GOOD, trailers=[(b"x", b"y")]), "UNKNOWN", "without a grpc-status"),
    "a grpc-status that is none": (respond(data=GOOD, trailers=[(b"grpc-status", b"x")]), "UNKNOWN", "is not a status"),
    "half a message": (respond(data=GOOD[:7], trailers=FINE), "INTERNAL", "ended within a message"),
    "half a prefix": (respond(data=GOOD[:2], trailers=FINE), "INTERNAL", "ended within a message"),
    "two messages": (respond(data=GOOD * 2, trailers=FINE), "INTERNAL", "2 messages answer a unary call"),
    "no message": (respond(trailers=FINE), "INTERNAL", "0 messages answer a unary call"),
    "no message and no body": (respond([*OK_HEADERS, *FINE], end=True), "INTERNAL", "0 messages"),
    "a first byte that is none": (respond(data=b"\x09" + GOOD), "INTERNAL", "first byte of a message is 9"),
    "compressed without an encoding": (respond(data=framed(b"x", 1), trailers=FINE), "INTERNAL", "names no encoding"),
    "an unknown encoding": (
        respond([*OK_HEADERS, (b"grpc-encoding", b"br")], framed(b"x", 1), FINE), "UNIMPLEMENTED", "compression 'br'",
    ),
    "a reset": (respond(reset=2), "INTERNAL", "HTTP/2 error code 2"),
    "a cancelling reset": (lambda server, stream_id: server.reset_stream(stream_id, 8), "CANCELLED", "error code 8"),
    "a refused stream": (lambda server, stream_id: server.reset_stream(stream_id, 7), "UNAVAILABLE", "shutting down"),
    "a server that stops": (
        lambda server, _: server.send_goaway(0, last_stream_id=0), "UNAVAILABLE", "shutting down",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_bad_answer_has_a_status_for_unary_calls(name):
    answer, code, details = BAD_ANSWERS[name]
    async with Scene(answering(answer)) as scene:
        for _ in range(3):
            async with refused(Status[code], details):
                await scene.call()


@pytest.mark.parametrize("name", [name for name in BAD_ANSWERS if not name.startswith(("two", "no message"))])
async def test_a_bad_answer_has_a_status_for_streams(name):
    answer, code, details = BAD_ANSWERS[name]
    async with Scene(answering(answer)) as scene, refused(Status[code], details):
        await listed(scene.channel.stream(path("Many"), (b"x",), 5.0))


async def test_answers_that_come_together_keep_nothing_else_waiting():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with Scene(answering(respond(data=GOOD * 1000, trailers=FINE))) as scene:
        stream = scene.channel.stream(path("Many"), (b"x",), 5.0)
        assert await anext(stream) == b"good"
        await asyncio.sleep(0.2)  # all have come
        beside = asyncio.create_task(other())
        assert len(await listed(stream)) == 999
        beside.cancel()
    assert turns >= 999 // h2_channel.AT_ONCE


async def test_a_reset_in_the_middle_of_a_body_ends_its_call():
    async def script(server: Raw) -> None:
        server.greet()
        request = await server.until(ngh2.RequestReceived)
        server.h2.send_response(request.stream_id, OK_HEADERS)
        server.h2.send_data(request.stream_id, framed(bytes(1000))[:500])
        server.push()
        server.h2.reset_stream(request.stream_id, 2)
        server.push()
        await server.until(ngh2.RequestReceived, count=2)

    async with Scene(script) as scene, refused(Status.INTERNAL, "error code 2"):
        await scene.call()


@pytest.mark.parametrize("cut", [3, 9, 50_000, 100_013])
async def test_an_answer_in_whose_midst_its_call_is_cancelled_opens_the_window_again(cut, monkeypatch):
    limits = ConnectionLimits(stream_window_bytes=1 << 17, connection_window_bytes=1 << 18)
    monkeypatch.setattr(h2_channel, "LIMITS", limits)
    cancelled = asyncio.Event()

    async def script(server: Raw) -> None:
        server.greet()
        for count in range(1, 21):
            request = await server.until(ngh2.RequestReceived, count=count)
            server.h2.send_response(request.stream_id, OK_HEADERS)
            server.push()
            data = frame(DATA, 0, request.stream_id, framed(bytes(100_000)))
            server.writer.write(data[:cut])
            await cancelled.wait()
            cancelled.clear()
            server.writer.write(data[cut:])
            await server.until(ngh2.StreamReset, request.stream_id)
        request = await server.until(ngh2.RequestReceived, count=21)
        respond(data=GOOD, trailers=FINE)(server.h2, request.stream_id)
        server.push()

    async with Scene(script) as scene:
        await until(lambda: scene.channel.get_state() is grpc.ChannelConnectivity.READY)
        client = scene.channel._connection
        for _ in range(20):
            call = asyncio.create_task(scene.call())
            await until(lambda: client._head or client._left)
            call.cancel()
            await asyncio.wait([call])
            cancelled.set()
            await until(lambda: not client._head and not client._left)
        assert await scene.call() == b"good"


async def test_a_connection_that_breaks_fails_its_calls_and_is_made_again():
    async def script(server: Raw) -> None:
        server.greet()
        request = await server.until(ngh2.RequestReceived)
        if scene.connections > 1:
            respond(data=GOOD, trailers=FINE)(server.h2, request.stream_id)
            server.push()
            await server.until_closed()
        server.writer.transport.abort()

    async with Scene(script) as scene:
        async with refused(Status.UNAVAILABLE, "Socket closed"):
            await scene.call()
        assert await scene.call() == b"good"
        assert scene.connections == 2


async def test_bytes_that_are_no_http2_fail_to_connect():
    async def script(server: Raw) -> None:
        server.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await server.reader.read()

    async with Scene(script) as scene, refused(Status.UNAVAILABLE, "failed to connect"):
        await scene.call()


ADDRESSES = (
    "nobody", "127.0.0.1:99999999", "127.0.0.1:-1", "a\x00b:80", "unix:a\x00b", "a..b:1", f"{'x' * 64}:1"
)  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
async def test_calls_to_what_is_no_address_fail_as_not_taken(address):
    channel = H2Channel(address)
    with pytest.raises(NotTaken, match="failed to connect"):
        await channel.unary(path("Echo"), (b"x",), 5.0)
    await channel.close()


async def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(h2_channel, "CONNECT_S", 0.1)

    async def script(server: Raw) -> None:
        await server.reader.read()

    async with Scene(script) as scene:
        async with refused(Status.UNAVAILABLE, "failed to connect.*no answer within 0.1 s"):
            await scene.call()
        async with refused(Status.UNAVAILABLE, "failed to connect"):
            await scene.call(None)


async def test_a_server_that_greets_and_leaves_fails_calls_at_once_and_leaves_none_waiting():
    async def script(server: Raw) -> None:
        server.greet()
        server.writer.close()

    async with Scene(script) as scene:
        for _ in range(20):
            async with refused(Status.UNAVAILABLE):
                await scene.call(3.0)


async def test_a_call_for_a_connection_that_was_just_lost_is_refused():
    async with Scene(answering(respond(data=GOOD, trailers=FINE))) as scene:
        await scene.call()
        connection = scene.channel._connection
        connection.lost("gone")
        call = h2_channel._Call((), (b"x",), False)
        connection.begin(call)
        assert call.ended
        assert "failed to connect" in call.end.details()
        assert await scene.call() == b"good"


async def test_who_is_refused_at_first_is_served_once_somebody_listens():
    async with Scene(answering(respond(data=GOOD, trailers=FINE))) as scene:
        port = scene.port
    channel = H2Channel(f"127.0.0.1:{port}")
    async with refused(Status.UNAVAILABLE, "failed to connect to all addresses"):
        await channel.unary(path("Echo"), (b"x",), 5.0)
    assert channel.get_state() is State.TRANSIENT_FAILURE
    async with Scene(answering(respond(data=GOOD, trailers=FINE)), port) as scene:
        await until(lambda: channel.get_state() is State.READY)
        assert (await channel.unary(path("Echo"), (b"x",), 5.0))[0] == b"good"
        await channel.close()
        assert channel.get_state() is State.SHUTDOWN
        async with refused(Status.CANCELLED, "Channel is closed"):
            await channel.unary(path("Echo"), (b"x",), 5.0)


async def test_states_are_told_as_they_change():
    async with Scene(answering(respond(data=GOOD, trailers=FINE))) as scene:
        seen = []
        while scene.channel.get_state() is not State.READY:
            seen.append(scene.channel.get_state())
            await asyncio.wait_for(scene.channel.wait_for_state_change(seen[-1]), 5.0)
        assert set(seen) <= {State.IDLE, State.CONNECTING}


async def test_a_server_that_no_longer_answers_pings_is_left(monkeypatch):
    async def script(server: Raw) -> None:
        server.greet()
        await server.until(ngh2.SettingsReceived)
        await asyncio.sleep(PATIENCE_S)

    async with Scene(script) as scene:
        await scene.channel.close()
        scene.channel = H2Channel(scene.channel.target, keepalive=Keepalive(0.1, 0.1))
        async with refused(Status.UNAVAILABLE, "ping timeout"):
            await scene.call()


async def test_a_connection_that_breaks_during_a_ping_is_made_again_at_once():
    async def script(server: Raw) -> None:
        if scene.connections > 2:
            await answering(respond(data=GOOD, trailers=FINE))(server)
        server.greet()
        await server.until(ngh2.PingReceived)
        server.writer.transport.abort()

    async with Scene(script) as scene:
        await scene.channel.close()
        scene.channel = H2Channel(scene.channel.target, keepalive=Keepalive(0.2, 60.0))
        await until(lambda: scene.connections == 3)
        assert await scene.call() == b"good"


async def test_closing_with_a_grace_lets_calls_finish_and_cuts_the_others():
    async with serving() as world:
        channel = H2Channel(world.address)
        call = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 20.0))
        await until(lambda: world.answers.began)
        closing = asyncio.create_task(channel.close(20.0))
        await asyncio.sleep(0.05)
        world.answers.go_on.set()
        assert (await call)[0] == b"x"
        await asyncio.wait_for(closing, 2.0)
        world.answers.go_on.clear()
        channel = H2Channel(world.address)
        calls = [asyncio.create_task(channel.unary(path("Slow"), (b"x",), 20.0))]
        calls += [asyncio.create_task(listed(channel.stream(path("Deaf"), (b"x",), 20.0)))]
        await until(lambda: len(world.answers.began) == 3)
        await asyncio.wait_for(channel.close(0.05), 2.0)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def test_closing_before_it_is_connected_ends_calls_that_wait():
    async def script(server: Raw) -> None:
        await server.reader.read()

    async with Scene(script) as scene:
        call = asyncio.create_task(scene.call(None))
        await until(lambda: scene.connections)
        await scene.channel.close()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_what_a_stream_has_received_can_be_read_after_its_connection_has_ended():
    async def script(server: Raw) -> None:
        server.greet()
        request = await server.until(ngh2.RequestReceived)
        respond(data=GOOD * 20, trailers=FINE)(server.h2, request.stream_id)
        server.push()
        server.h2.send_goaway(0)
        server.push()
        await server.until_closed()

    async with Scene(script) as scene:
        found = []
        async for each in scene.channel.stream(path("Many"), (b"x",), 5.0):
            found.append(each)
            await asyncio.sleep(0)
        assert found == [b"good"] * 20


async def test_a_server_that_streams_faster_than_we_read_is_held_by_its_window():
    async with serving() as world:
        channel = H2Channel(world.address)
        answers = channel.stream(path("Endless"), (b"x",), 20.0)
        await anext(answers)
        await world.serves()
        await asyncio.sleep(0.2)
        bound = h2_channel.LIMITS.stream_window_bytes + h2_call.STREAM_UNSENT_BYTES_MAX
        assert world.answers.written <= bound + 300_000
        await answers.aclose()
        await channel.close()
