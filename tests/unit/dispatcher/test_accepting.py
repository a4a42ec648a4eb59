"""A listening socket that several workers share."""

import asyncio
import os
import socket

import pytest

from dispatcher.transport import accepting
from tests.support.dispatching import until
from trefoil.core.errors import PortInUse


class Worker:
    """Accepts on its own number of a shared socket, and keeps what it got."""

    def __init__(self, shared: socket.socket) -> None:
        self.listening = accepting.listen("", "", os.dup(shared.fileno()))
        self.got: list[socket.socket] = []
        self.task = asyncio.create_task(accepting.accept(self.listening, self._keep, lambda: len(self.got), True))

    async def _keep(self, accepted: socket.socket) -> None:
        self.got.append(accepted)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        for each in (self.listening, *self.got):
            each.close()


@pytest.fixture
async def shared():
    with accepting.listen("127.0.0.1:0", "inference_address") as made:
        yield made


async def connect(shared: socket.socket, count: int) -> list[asyncio.StreamWriter]:
    return [(await asyncio.open_connection(*shared.getsockname()))[1] for _ in range(count)]


async def test_workers_share_connections_and_none_is_lost_with_one_of_them(shared):
    one, other = Worker(shared), Worker(shared)
    clients = await connect(shared, 20)
    await until(lambda: len(one.got) + len(other.got) == 20)
    assert min(len(one.got), len(other.got)) >= 5
    await one.end()
    clients += await connect(shared, 5)
    await until(lambda: len(other.got) == 25 - len(one.got))
    await other.end()
    clients += await connect(shared, 1)  # nobody accepts just now
    last = Worker(shared)
    await until(lambda: last.got)
    await last.end()
    for client in clients:
        client.close()


async def test_a_port_that_is_taken_is_refused_by_name(shared):
    with pytest.raises(PortInUse, match="in use"):
        accepting.listen(f"127.0.0.1:{shared.getsockname()[1]}", "rest_address")


async def test_a_unix_socket_can_be_listened_on(tmp_path):
    with accepting.listen(f"unix:{tmp_path}/s", "peer_address") as made:
        assert made.family is socket.AF_UNIX
