"""Closes clients' connections that have nothing under way when a process runs short of file descriptors.

A client that opens connections and leaves them costs descriptors, and these have a limit: without them no new client is
accepted, Redis and slices cannot be reached again, and files cannot be opened. So, from HIGH_RATIO of the limit on, the
connections that were silent for longest go until LOW_RATIO is reached. A connection with a call under way stays, and so
does for a while one that has asked before.
"""

import asyncio
import os
import resource
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

TICK_S: Final = 0.1
SAY_S: Final = 10.0  # between two lines of the log about it
HIGH_RATIO: Final = 0.75
LOW_RATIO: Final = 0.5
QUIET_S: Final = 0.1
"""Silence from which on a connection may go that has never asked: who has just connected is about to."""
QUIET_ASKED_S: Final = 5.0
"""Silence from which on one may go that has asked before: its client may be about to ask again."""
ASKED_BYTES: Final = 300
"""More than a gRPC client sends before it asks, and less than it has sent when it has."""
_LAST_DATA_RECV, _BYTES_RECEIVED, _TCP_INFO_BYTES = 52, 128, 136  # in the kernel's tcp_info


def connections_max() -> int:
    """Most connections that one server may take: what is beyond is left to everything else that needs descriptors."""
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * HIGH_RATIO)


class CallsUnderWay:
    """Calls under way by the port that their client has; belongs to one event loop."""

    def __init__(self) -> None:
        self._by_peer: Counter[str] = Counter()

    def begin(self, peer: str) -> None:
        """Count a call of a peer, as gRPC names it: `ipv4:127.0.0.1:45678`."""
        self._by_peer[peer] += 1

    def end(self, peer: str) -> None:
        """Count its end."""
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    def ports(self) -> set[int]:
        """Ports of the clients that have calls under way."""
        found = (peer.rpartition(":")[2] for peer in self._by_peer)
        return {int(port) for port in found if port.isdigit()}


def descriptors_short() -> bool:
    """Whether descriptors are short: the lowest free one is beyond HIGH_RATIO of the limit."""
    try:
        lowest_free = socket.socket(socket.AF_UNIX)
    except OSError:  # none is left
        return True
    with lowest_free:
        return lowest_free.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] * HIGH_RATIO


async def guard_connections(port: int, busy: Callable[[], Collection[int]]) -> None:
    """Guard the connections that come in at a port, until cancelled. `busy`: ports of clients that have something under
    way."""
    loop = asyncio.get_running_loop()
    closed, said_s = 0, -SAY_S
    while True:
        closed += relieve(port, busy)
        if closed and loop.time() - said_s >= SAY_S:
            said_s = loop.time()
            import structlog

            structlog.get_logger().warning(
                "short of file descriptors: idle connections closed", closed=closed, port=port,
                limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                remedy="raise the limit of open files (ulimit -n), or let clients close what they do not use",
            )  # fmt: skip
            closed = 0
        await asyncio.sleep(TICK_S)


def relieve(port: int, busy: Callable[[], Collection[int]]) -> int:
    """Close idle connections of a port if descriptors are short, longest silent first; how many went.

    It needs no descriptor: there may be none.
    """
    if not descriptors_short():
        return 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    open_now, idle = _idle(limit, port, busy())
    closed = 0
    for _, number, inode in sorted(idle, reverse=True)[: max(0, open_now - int(limit * LOW_RATIO))]:
        with suppress(OSError), _borrowed(number) as connection:  # gone by itself
            if os.fstat(number).st_ino == inode:
                connection.shutdown(socket.SHUT_RDWR)  # its owner hears that it has ended
                closed += 1
    return closed


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Socket of a descriptor that stays its owner's; raises OSError for one that is none."""
    connection = socket.socket(fileno=number)
    try:
        yield connection
    finally:
        connection.detach()


def _idle(limit: int, port: int, busy: Collection[int]) -> tuple[int, list[tuple[int, int, int]]]:
    """How many descriptors are open; and of each idle connection since when nothing came [ms], its number, and its
    inode."""
    open_now, found = 0, []
    for number in range(limit):
        with suppress(OSError):  # not open, or gone meanwhile, or a socket that listens: it has no peer
            status = os.fstat(number)
            open_now += 1
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with _borrowed(number) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
                    continue
                if connection.getpeername()[1] in busy:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                (silent_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECV)
                (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
                if silent_ms >= 1e3 * (QUIET_S if received < ASKED_BYTES else QUIET_ASKED_S):
                    found.append((silent_ms, number, status.st_ino))
    return open_now, found
