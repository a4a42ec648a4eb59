"""Calls of gRPC on our own HTTP/2, by our client and by grpc.aio's: bounds, windows, ends of servers, TLS.

Whatever came, a server ends with nothing left: no call, no byte held, no task. What clients are answered is compared
with grpc.aio's server: tests/property/test_grpc_as_grpc_aio.py.
"""

import asyncio
import contextlib
import ssl

import grpc
import ngh2
import pytest

from dispatcher.transport import h2_server
from dispatcher.transport.h2 import ConnectionLimits
from dispatcher.transport.h2_call import ServerBounds
from dispatcher.transport.h2_channel import H2Channel
from tests.support.aio_channel import AioChannel
from tests.support.certificates import Authority
from tests.support.h2_ends import (
    DATA,
    GOOD,
    KEYS,
    OWN,
    PATIENCE_S,
    PREFACE,
    Status,
    frame,
    framed,
    listed,
    path,
    refused,
    serving,
    until,
)
from trefoil.runtime.security.tls import Tls


async def test_a_unary_call_brings_its_metadata_and_its_answer_its_trailers(world, channel):
    sent = (("token", "abc"), ("trace-bin", b"\0\xfe\xff"), ("trace-bin", b""))
    data, trailers = await channel.unary(path("Echo"), (b"one ", b"two"), 10.0, sent)
    assert data == b"one two"
    assert dict(trailers) == {"seen": "yes", "seen-bin": b"\0\xff"}
    assert set(sent) <= set(world.answers.metadata)
    assert 9.0 < world.answers.remaining_s <= 10.1
    assert world.answers.peer.startswith("ipv4:127.0.0.1:")


async def test_an_answer_in_parts_arrives_as_one(channel):
    assert (await channel.unary(path("Parts"), (b"x",), 10.0))[0] == b"<x>"
    large = bytes(1 << 20)
    assert (await channel.unary(path("Parts"), (large,), 10.0))[0] == b"<" + large + b">"


async def test_large_messages_pass_both_ways_and_their_windows_open_again(world, channel):
    large = bytes(range(256)) * (20 << 12)  # 20 MB, more than any window
    for _ in range(2):
        data, _ = await channel.unary(path("Echo"), (large[:7], large[7:]), 20.0)
        assert data == large


async def test_a_stream_of_large_answers_goes_on_as_it_is_read(channel):
    sizes = [len(each) async for each in channel.stream(path("Many"), (b"30 700000",), 20.0)]
    assert len(sizes) == 30


async def test_many_calls_at_once_get_their_own_answers(channel):
    calls = [channel.unary(path("Echo"), (b"%d" % n,), 20.0) for n in range(300)]
    assert [data for data, _ in await asyncio.gather(*calls)] == [b"%d" % n for n in range(300)]


@pytest.mark.parametrize(("messages", "message_bytes"), [(1, 100_000), (3, 30_000), (20, 1 << 20)])
async def test_a_stream_that_is_refused_while_it_is_sent_hears_why_once_it_has_been(world, messages, message_bytes):
    async with grpc.aio.insecure_channel(world.address) as client:
        method, heard = client.stream_stream(path("Shut")), set()
        for _ in range(max(2, 100 // messages)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(iter([bytes(message_bytes)] * messages)).read()
            heard.add(refused.value.code())
    assert heard == {Status.NOT_FOUND}, "grpc.aio says INTERNAL where it is answered while it sends"


@pytest.mark.parametrize("method", ["Shut", "Nothing"])
async def test_a_stream_that_is_refused_and_pauses_hears_why_and_is_reset_without_an_error(world, monkeypatch, method):
    monkeypatch.setattr(h2_server, "PAUSE_S", 0.05)
    client = await world.raw()
    stream_id = client.request(method, GOOD[:6], end=False)
    reset = await client.until(ngh2.StreamReset, stream_id)
    (answer,) = client.of(ngh2.ResponseReceived, stream_id)
    assert (answer.end_stream, reset.error_code) == (True, 0)
    assert client.seen.index(answer) < client.seen.index(reset)
    assert (await client.status(stream_id))[0] in ("NOT_FOUND", "UNIMPLEMENTED")
    await world.is_idle()


async def test_a_stream_that_is_refused_and_never_pauses_hears_why_all_the_same(world, monkeypatch):
    monkeypatch.setattr(h2_server, "DRAIN_S", 0.3)
    client = await world.raw()
    stream_id, loop = client.request("Shut", GOOD, end=False), asyncio.get_running_loop()
    began_s = loop.time()
    while not client.of(ngh2.StreamClosed, stream_id):
        client.h2.send_data(stream_id, bytes(1000))
        client.push()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.read(), 0.02)
    assert 0.3 <= loop.time() - began_s < 5.0
    assert (await client.status(stream_id))[0] == "NOT_FOUND"
    await world.is_idle()


async def test_a_stream_that_is_refused_as_the_server_stops_hears_why_at_once(world):
    client = await world.raw()
    stream_id = client.request("Shut", GOOD, end=False)
    await until(lambda: [call for call in world.calls() if call.refusal is not None])
    await world.server.stop(0.0)
    assert (await client.status(stream_id))[0] == "NOT_FOUND"


async def test_a_handler_that_fails_says_so(channel):
    async with refused(Status.UNKNOWN, "ValueError.*bug"):
        await channel.unary(path("Fail"), (b"",), 10.0)


async def test_a_call_that_outlives_its_deadline_ends_at_both_ends(world, channel):
    async with refused(Status.DEADLINE_EXCEEDED):
        await channel.unary(path("Slow"), (b"",), 0.1)
    await until(lambda: world.answers.cancelled == ["slow"])
    async with refused(Status.DEADLINE_EXCEEDED):
        await listed(channel.stream(path("Deaf"), (b"",), 0.1))
    await until(lambda: world.answers.cancelled == ["slow", "deaf"])


async def test_a_deadline_that_has_passed_calls_nobody_for_long(channel):
    async with refused(Status.DEADLINE_EXCEEDED):
        await channel.unary(path("Slow"), (b"",), 0.0)


async def test_cancelling_a_call_reaches_its_handler(world, channel):
    task = asyncio.create_task(channel.unary(path("Slow"), (b"",)))
    await until(lambda: world.answers.began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: world.answers.cancelled == ["slow"])


async def test_leaving_a_stream_reaches_its_handler(world, channel):
    answers = channel.stream(path("Endless"), (b"",), 60.0)
    async with contextlib.aclosing(answers):
        assert await anext(answers) == bytes(100_000)
    await until(lambda: world.answers.cancelled == ["endless"])


async def test_closing_a_channel_reaches_the_handlers_of_its_calls(world, channel):
    tasks = [asyncio.create_task(channel.unary(path("Slow"), (b"",))) for _ in range(3)]
    await until(lambda: len(world.answers.began) == 3)
    await channel.close()
    await until(lambda: world.answers.cancelled == ["slow"] * 3)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


@pytest.mark.parametrize("kind", [AioChannel, H2Channel])
async def test_a_message_beyond_the_bound_is_exhausted_and_one_at_the_bound_passes(kind):
    async with serving(ServerBounds(message_bytes_max=100_000)) as world:
        channel = await world.channel(kind)
        assert len((await channel.unary(path("Echo"), (bytes(100_000),), 10.0))[0]) == 100_000
        async with refused(Status.RESOURCE_EXHAUSTED, r"Received message larger than max \(100001 vs. 100000\)"):
            await channel.unary(path("Echo"), (bytes(100_001),), 10.0)
        async with refused(Status.RESOURCE_EXHAUSTED, "larger than max"):
            await channel.unary(path("Echo"), (bytes(30_000_000),), 10.0)
        assert (await channel.unary(path("Echo"), (b"x",), 10.0))[0] == b"x"


async def test_refused_bytes_open_their_connections_window_again(channel):
    for _ in range(12):
        async with refused(Status.UNIMPLEMENTED):
            await channel.unary(path("Nothing"), (bytes(2 << 20),), 10.0)
    assert await listed(channel.stream(path("Curt"), (bytes(900_000),), 10.0)) == [b"enough"]


@pytest.mark.parametrize("kind", [AioChannel, H2Channel])
async def test_messages_that_no_handler_read_open_their_connections_window_again(kind):
    limits = ConnectionLimits(stream_window_bytes=1 << 17, connection_window_bytes=1 << 18)
    async with serving(limits=limits) as world:
        channel = await world.channel(kind)
        for _ in range(10):
            assert await listed(channel.stream(path("Curt"), (bytes(100_000),), 10.0)) == [b"enough"]
        assert len((await channel.unary(path("Echo"), (bytes(1 << 20),), 10.0))[0]) == 1 << 20


@pytest.mark.parametrize("cut", [3, 9, 50_000, 100_013])
async def test_data_in_whose_midst_a_call_ends_opens_its_connections_window_again(cut):
    limits = ConnectionLimits(stream_window_bytes=1 << 17, connection_window_bytes=1 << 18)
    async with serving(limits=limits) as world:
        client = await world.raw()
        await client.until(ngh2.SettingsReceived)
        for _ in range(20):
            stream_id = client.request("Curt", end=False)
            data = frame(DATA, 0, stream_id, framed(bytes(100_000)))
            client.writer.write(data[:cut])
            await client.until(ngh2.TrailersReceived, stream_id)
            client.writer.write(data[cut:])
            await client.until(ngh2.StreamReset, stream_id)
        assert await client.status(client.request(data=framed(bytes(100_000)))) == ("OK", "")
        await world.is_idle()


# grpc.aio's other ways


async def test_a_client_that_says_all_first_gets_all_back(world):
    call = (await world.aio()).stream_stream(path("Each"))(iter([bytes(size) for size in range(0, 40_000, 400)]))
    assert [len(each) async for each in call] == list(range(0, 40_000, 400))


async def test_what_a_request_becomes_when_decompressed_is_bounded():
    async with serving(ServerBounds(message_bytes_max=50_000)) as world:
        channel = await world.aio(compression=grpc.Compression.Gzip)
        for size in (51_000, 20_000_000):
            async with refused(Status.RESOURCE_EXHAUSTED, "decompressed message larger than max"):
                await channel.unary_unary(path("Echo"))(bytes(size), timeout=10.0)
            async with refused(Status.RESOURCE_EXHAUSTED, "decompressed message larger than max"):
                await listed(channel.stream_stream(path("Each"))(iter([bytes(size)])))
        assert await channel.unary_unary(path("Echo"))(bytes(50_000), timeout=10.0) == bytes(50_000)


async def test_a_cancelled_stream_of_grpc_reaches_its_handler(world):
    call = (await world.aio()).stream_stream(path("Each"))()
    await call.write(b"x")
    assert await call.read() == b"x"
    call.cancel()
    await until(lambda: world.answers.cancelled == ["each"])


# Ends


async def stop_while_it_answers(world, channel) -> None:
    """The server waits for the call that it has."""
    call = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 30.0))
    await until(lambda: world.answers.began)
    stop = asyncio.create_task(world.server.stop(20.0))
    await asyncio.sleep(0.4)
    assert not stop.done()
    world.answers.go_on.set()
    assert (await call)[0] == b"x"
    await asyncio.wait_for(stop, 5.0)


async def test_a_graceful_stop_lets_calls_finish(channel, world):
    await stop_while_it_answers(world, channel)
    async with refused(Status.UNAVAILABLE):
        await channel.unary(path("Echo"), (b"x",), 5.0)


async def test_a_stop_waits_for_calls_also_after_all_connections_have_once_gone(world):
    first = await world.h2()
    await first.unary(path("Echo"), (b"x",), 10.0)
    await first.close()
    await until(lambda: not world.server.connections)
    await stop_while_it_answers(world, await world.h2())


async def test_a_second_stop_with_a_shorter_grace_cuts_what_the_first_waits_for(channel, world):
    call = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 30.0))
    await until(lambda: world.answers.began)
    first = asyncio.create_task(world.server.stop(30.0))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(world.server.stop(0.05), 5.0)
    async with refused(Status.UNAVAILABLE, "the server is stopping"):
        await call
    await asyncio.wait_for(first, 5.0)
    assert world.answers.cancelled == ["slow"]


async def test_a_stop_without_grace_ends_streams_half_messages_and_silent_connections(world):
    client = await world.raw()
    for method, data, end in (("Endless", GOOD, True), ("Each", GOOD[:7], False), ("Echo", GOOD[:7], False)):
        client.request(method, data, end)
    await world.socket()
    _, writer = await world.socket()
    writer.write(PREFACE + bytes(range(1, 250)))
    await until(lambda: len(world.calls()) == 3)
    await asyncio.wait_for(world.server.stop(0.0), 5.0)
    assert not world.server.connections
    await world.is_idle()


async def test_a_connection_that_broke_while_its_client_does_not_read_does_not_keep_a_server_from_stopping(world):
    client = await world.raw(auto_window_update=False, receive_bytes=4096)
    client.h2.set_local_window_size(1 << 30)
    client.h2.update_settings({4: 1 << 30})
    client.push()
    client.request("Large", framed(b"20000000"))
    await until(lambda: world.server.held.unsent_bytes > 1_000_000)
    client.writer.write(frame(DATA, 0, 0, b"x"))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(world.server.stop(0.1), 5.0)
    assert not world.server.connections


async def test_a_connection_that_is_replaced_fails_no_call(world):
    answered, channel = 0, await world.h2()
    for _ in range(30):
        for connection in list(world.server.connections):
            connection.leave()
        calls = [channel.unary(path("Echo"), (b"x",), 10.0) for _ in range(5)]
        answered += len(await asyncio.gather(*calls))
        await asyncio.sleep(0.005)
    assert answered == 150


async def test_a_stream_outlives_the_connections_last_word(channel, world):
    answers = channel.stream(path("Many"), (b"20 200000",), 20.0)
    assert (await anext(answers)).startswith(b"0 ")
    for connection in list(world.server.connections):
        connection.leave()
    await asyncio.sleep(0.3)
    assert len(await listed(answers)) == 19


async def test_a_connection_has_an_age_at_which_it_is_replaced(swift, channel_kinds):
    async with serving(ServerBounds(connection_age_max_s=0.1, connection_age_grace_s=0.5)) as world:
        channel = await world.channel(channel_kinds)
        peers = set()
        cut = asyncio.create_task(channel.unary(path("Slow"), (b"x",), 20.0))
        async with asyncio.timeout(PATIENCE_S):
            while len(peers) < 4:
                await channel.unary(path("Echo"), (b"x",), 10.0)
                peers.add(world.answers.peer)
                await asyncio.sleep(0.01)
        async with refused(Status.UNAVAILABLE, "the server is stopping"):
            await cut


# TLS


async def test_tls_serves_both_clients_and_no_one_without_http2():
    async with serving(tls=OWN.server_context) as world:
        pem = (KEYS / "localhost.crt").read_bytes()
        for kind in (AioChannel, H2Channel):
            channel = kind(f"127.0.0.1:{world.server.port}", tls=OWN, name="localhost")
            assert len((await channel.unary(path("Echo"), (bytes(3 << 20),), 10.0))[0]) == 3 << 20
            assert len(await listed(channel.stream(path("Many"), (b"5 600000",), 10.0))) == 5
            await channel.close()
        context = ssl.create_default_context(cadata=pem.decode())
        reader, writer = await asyncio.open_connection("localhost", world.server.port, ssl=context)
        writer.write(PREFACE)
        with contextlib.suppress(ConnectionError):
            assert PREFACE not in await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        _, plain = await world.socket()
        plain.write(PREFACE)
        await until(lambda: not world.server.connections)


async def test_a_certificate_that_nobody_trusts_fails_to_connect(tmp_path):
    async with serving(tls=OWN.server_context) as world:
        channel = H2Channel(f"localhost:{world.server.port}", tls=Tls(None, None, Authority(tmp_path).certificate))
        async with refused(Status.UNAVAILABLE, "failed to connect.*certificate"):
            await channel.unary(path("Echo"), (b"x",), 10.0)
        await channel.close()


async def test_mutual_tls_refuses_who_has_no_certificate_or_anothers(tmp_path):
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "other")
    own = ours.server()
    tls = Tls(own.certificate, own.key, ours.certificate, signed=False)
    async with serving(tls=tls.server_context) as world:
        address = f"localhost:{world.server.port}"
        for pair, works in ((ours.client("alpha"), True), (theirs.client("alpha"), False), (None, False)):
            credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes(), *(pair.read() if pair else ()))
            async with grpc.aio.secure_channel(address, credentials) as channel:
                call = channel.unary_unary(path("Echo"))(b"x", timeout=5.0)
                if works:
                    assert await call == b"x"
                else:
                    async with refused(Status.UNAVAILABLE):
                        await call
