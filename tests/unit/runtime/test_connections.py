"""Idle connections go when descriptors are short, longest silent first; others stay."""

import asyncio
import os
import resource
import socket
from contextlib import suppress

import grpc
import pytest

from trefoil.runtime import connections, rpc
from trefoil.runtime.config import ServiceSettings

DESCRIPTORS = "/proc/self/fd"
pytestmark = pytest.mark.skipif(not os.path.isdir(DESCRIPTORS), reason="Linux only")


@pytest.fixture
def short(monkeypatch):
    """Make descriptors short: all go that may. Or continue until no more than `share` of the limit are open."""

    def choose(share=0.0):
        monkeypatch.setattr(connections, "HIGH_RATIO", 0.0)
        monkeypatch.setattr(connections, "LOW_RATIO", share)

    return choose


def opened():
    return len(os.listdir(DESCRIPTORS))


class Clients:
    """Clients of one port, in the order in which they last sent something."""

    def __init__(self, number):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=number)
        self.port = self.listener.getsockname()[1]
        self.ends, self.accepted = [], []
        for _ in range(number):
            self.ends.append(socket.create_connection(("127.0.0.1", self.port)))
            self.accepted.append(self.listener.accept()[0])

    async def speak(self, which, pause_s=0.02):
        for index in which:
            self.ends[index].send(b"x")
            await asyncio.sleep(pause_s)

    def alive(self):
        found = set()
        for index, end in enumerate(self.ends):
            end.setblocking(False)
            try:
                if end.recv(1):
                    found.add(index)
            except BlockingIOError:
                found.add(index)
        return found

    def close(self):
        for each in (*self.ends, *self.accepted, self.listener):
            each.close()


@pytest.fixture
def clients():
    made = Clients(20)
    yield made
    made.close()


def busy(clients, *indices):
    return {clients.ends[index].getsockname()[1] for index in indices}


async def test_nothing_is_closed_as_long_as_descriptors_are_there(clients):
    await clients.speak(range(20), 0.0)
    await asyncio.sleep(connections.QUIET_S + 0.05)
    assert connections.relieve(clients.port, set) == 0
    assert clients.alive() == set(range(20))


async def test_the_longest_silent_go_until_half_of_the_limit_is_free_and_the_busy_stay(clients, short):
    order = [*range(10, 20), *range(10)]
    await clients.speak(order)
    await asyncio.sleep(connections.QUIET_S + 0.05)
    short((opened() - 8) / resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    closed = connections.relieve(clients.port, lambda: busy(clients, 10, 11))
    assert 5 <= closed <= 9  # the process has others, which come and go
    assert clients.alive() == set(range(20)) - set(order[2 : 2 + closed])


async def test_who_has_asked_before_may_be_silent_for_longer(clients, short, monkeypatch):
    clients.ends[7].send(bytes(connections.ASKED_BYTES))
    await clients.speak(range(20), 0.0)
    await asyncio.sleep(connections.QUIET_S + 0.05)
    short()
    assert connections.relieve(clients.port, set) == 19
    assert clients.alive() == {7}
    monkeypatch.setattr(connections, "QUIET_ASKED_S", connections.QUIET_S)
    assert connections.relieve(clients.port, set)
    assert clients.alive() == set()


async def test_without_a_single_descriptor_left_idle_ones_still_go(clients):
    await clients.speak(range(20), 0.0)
    await asyncio.sleep(connections.QUIET_S + 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + 30, hard))
    taken = []
    try:
        with suppress(OSError):  # too many open files
            while True:
                taken.append(os.dup(0))
        assert taken
        assert connections.relieve(clients.port, set) == 20
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert clients.alive() == set()


async def test_a_server_knows_which_of_its_connections_have_a_call(short):
    server = rpc.make_server(ServiceSettings(admin_address="127.0.0.1:0"), [])
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(data, context):
        asked.set()
        await answer.wait()
        return data

    handlers = {"Slow": grpc.unary_unary_rpc_method_handler(slow)}
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    await server.start()
    idle = socket.create_connection(("127.0.0.1", server.port))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = asyncio.ensure_future(channel.unary_unary("/a.B/Slow")(b"late"))
        await asyncio.wait_for(asked.wait(), 30)
        (port,) = server.calls.ports()
        assert port != server.port
        short()
        idle.settimeout(30)
        received = await asyncio.to_thread(lambda: b"".join(iter(lambda: idle.recv(4096), b"")))
        assert len(received) < 4096, "it got the server's settings at most, and its end"
        answer.set()
        assert await call == b"late"
    assert not server.calls.ports()
    idle.close()
    await server.stop(0)
