"""Accepts connections for a worker: on its own socket, or on one that it shares with the other workers.

Who comes while descriptors are short waits in the kernel's queue. A shared socket listens as long as any worker lives,
so a killed worker loses no connection that was not accepted yet.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from trefoil.core.errors import listen_error
from trefoil.runtime import rpc
from trefoil.runtime.connections import TICK_S, connections_max, descriptors_short

BACKLOG: Final = 4096
TURN_S: Final = 1e-4
"""A worker lets others of a shared socket go first, by so much for each connection that it has: so they share them."""
TURN_MAX_S: Final = 0.01


def listen(address: str, field: str, inherited: int = -1) -> socket.socket:
    """Socket that listens at host:port or unix:path; `inherited`: the descriptor of one that does already.

    Raises:
        PortInUse, StartError: it cannot listen there.
    """
    if inherited >= 0:
        bound = socket.socket(fileno=inherited)
        bound.setblocking(False)
        return bound
    where: str | tuple[str, int]
    if address.startswith("unix:"):
        family, where = socket.AF_UNIX, address.removeprefix("unix:")
    else:
        rpc.check_port(address)
        where = rpc.split_address(address)
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise listen_error(error, address, field) from error
    bound.setblocking(False)
    return bound


async def accept(
    listening: socket.socket,
    begin: Callable[[socket.socket], Awaitable[object]],
    open_now: Callable[[], int],
    shared: bool = False,
) -> None:
    """Accept connections until cancelled; `begin` makes a connection of each, `open_now` counts them. What goes wrong
    with one (a client that goes at once, or that TLS does not let in) is that one's own end."""
    loop = asyncio.get_running_loop()
    starting: set[asyncio.Task[None]] = set()

    async def start(accepted: socket.socket) -> None:
        with suppress(OSError):
            await begin(accepted)

    try:
        while True:
            if open_now() + len(starting) >= connections_max() or descriptors_short():
                await asyncio.sleep(TICK_S)
                continue
            if shared and open_now():
                await asyncio.sleep(min(TURN_MAX_S, TURN_S * open_now()))
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError:  # it is gone already, or the last descriptor is
                await asyncio.sleep(TICK_S)
                continue
            task = asyncio.create_task(start(accepted))
            starting.add(task)
            task.add_done_callback(starting.discard)
    finally:
        for task in starting:
            task.cancel()


def peer_of(address: Any) -> str:
    """Address of a client as gRPC writes it."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return "unix:"
