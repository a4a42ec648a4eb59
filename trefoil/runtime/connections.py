"""Closes clients' connections that have nothing under way when a process runs short of file descriptors.

Who opens connections and leaves them costs descriptors only, and these have a limit: without them nobody new is
accepted, Redis and slices cannot be reached again, and files cannot be opened. So, from HIGH_RATIO of the limit on, the
connections that were silent for longest go until LOW_RATIO is reached. A connection with a call under way stays.
"""

import asyncio
import os
import resource
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Final

import structlog

TICK_S: Final = 0.05
HIGH_RATIO: Final = 0.75
LOW_RATIO: Final = 0.5
QUIET_S: Final = 0.1
"""Silence from which on a connection may go: who has just connected has not asked yet."""
DESCRIPTORS: Final = "/proc/self/fd"
_LAST_DATA_RECV: Final = 52  # where tcp_info has the time since the last data came [ms]
_TCP_INFO_BYTES: Final = 64


def connections_max() -> int:
    """Most connections that one server may take: what lies beyond is left to everything else that needs descriptors."""
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
    """Whether descriptors are short: the lowest free one lies beyond HIGH_RATIO of the limit."""
    try:
        lowest_free = socket.socket(socket.AF_UNIX)
    except OSError:  # none is left
        return True
    with lowest_free:
        return lowest_free.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] * HIGH_RATIO


class ConnectionGuard:
    """Guard of the connections that come in at one port; belongs to one event loop.

    It holds one descriptor, to have one when nobody else has.
    """

    def __init__(self) -> None:
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def relieve(self, port: int, busy: Callable[[], Collection[int]]) -> int:
        """Close idle connections of a port if descriptors are short, longest silent first; how many went.

        `busy`: ports of clients that have something under way.
        """
        if not descriptors_short():
            return 0
        os.close(self._spare)
        try:
            return _close_idle(port, busy(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._spare)


async def guard_connections(port: int, busy: Callable[[], Collection[int]]) -> None:
    """Guard the connections of a port, until cancelled."""
    if not os.path.isdir(DESCRIPTORS):  # no Linux: its limits are the kernel's alone
        return
    guard = ConnectionGuard()
    try:
        while True:
            guard.relieve(port, busy)
            await asyncio.sleep(TICK_S)
    finally:
        guard.close()


def _close_idle(port: int, busy: Collection[int], limit: int) -> int:
    numbers = [int(name) for name in os.listdir(DESCRIPTORS)]
    idle = sorted(_silences(numbers, port, busy), reverse=True)
    closed = 0
    for _, number, inode in idle[: max(0, len(numbers) - int(limit * LOW_RATIO))]:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:  # gone by itself
            if os.fstat(connection.fileno()).st_ino == inode:
                connection.shutdown(socket.SHUT_RDWR)  # its owner hears that it has ended
                closed += 1
    if closed:
        structlog.get_logger().warning(
            "short of file descriptors: idle connections closed", closed=closed, port=port, open=len(numbers),
            limit=limit, remedy="raise the limit of open files (ulimit -n), or let clients close what they do not use",
        )  # fmt: skip
    return closed


def _silences(numbers: Collection[int], port: int, busy: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Of each idle connection: since when nothing came [ms], its number, and its inode."""
    for number in numbers:
        with suppress(OSError):  # gone meanwhile, or no connection
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.getsockname()[1] != port:
                    continue
                if copy.getpeername()[1] in busy:  # one that listens has no peer
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                (silent_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECV)
                if silent_ms >= QUIET_S * 1e3:
                    yield silent_ms, number, status.st_ino
