"""Ports for what a test starts: no two processes of this machine get the same, and the kernel lends them to nobody.

A port that was found by binding to 0 and given back is one of those that the kernel also gives to outgoing connections:
under load one of them may take it before the service binds it. And several test runs look for ports at once.
"""

import fcntl
import os
import tempfile
from pathlib import Path

from trefoil.core.errors import PortInUse
from trefoil.runtime import rpc

# Below what the kernel lends (from 32768 on, on some machines from 16000) and below whole systems (benchmarks.offsets).
SINGLE, BLOCKS = range(10_000, 12_000), range(12_000, 16_000)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that nobody else gets before 2,000 more have been asked for."""
    return [_take("single", SINGLE, 1) for _ in range(count)]


def free_block(count: int) -> int:
    """The first of as many adjacent ports."""
    return _take("blocks", BLOCKS, count)


def _take(name: str, ports: range, count: int) -> int:
    """The next in turn, for all processes of this user together."""
    path = Path(tempfile.gettempdir()) / f"trefoil-test-ports-{name}-{os.getuid()}"
    with path.open("a+") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        turn.seek(0)
        at = int(turn.read() or ports.start)
        for _ in range(len(ports)):
            first = at if at + count <= ports.stop else ports.start
            taken = next((port for port in range(first, first + count) if not _free(port)), None)
            at = first + count if taken is None else taken + 1
            if taken is None:
                turn.truncate(0)
                turn.write(str(at))
                return first
    raise AssertionError(f"no {count} free ports between {ports.start} and {ports.stop}")


def _free(port: int) -> bool:
    try:
        rpc.check_port(f"127.0.0.1:{port}")
    except PortInUse:
        return False
    return True
