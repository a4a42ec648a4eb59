"""Ports for what a test or a benchmark starts: no two processes of this machine get the same, and the kernel lends them
to nobody.

A port that was found by binding to 0 and given back is one of those that the kernel also gives to outgoing connections:
under load one of them may take it before the service binds it. And several test runs look for ports at once.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from trefoil.cli.run.scenario import Ports
from trefoil.core.errors import PortInUse
from trefoil.runtime import rpc

# Below what the kernel lends: from 32768 on, on some machines from 16000.
SINGLE, BLOCKS = range(10_000, 12_000), range(12_000, 16_000)
# Whole systems come above: each has the ports from 8001 to 8200 + 16 a device, so that no two neighbours share any.
OFFSETS = range(8000, 23_000, 300)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no other process gets before 2,000 more have been asked for."""
    return [_take("single", SINGLE, 1) for _ in range(count)]


def free_block(count: int) -> int:
    """The first of as many adjacent ports."""
    return _take("blocks", BLOCKS, count)


def free_offset(devices: int = 2) -> int:
    """A port offset for a system: nobody listens there, and no other process gets it before 49 more have been asked
    for."""
    return _take("offsets", OFFSETS, 1, devices)


def listening(ports: Iterable[int]) -> list[int]:
    """Those that somebody listens on."""
    return [port for port in ports if not _free(port)]


def of_system(offset: int, devices: int = 2) -> list[int]:
    """All ports of a system."""
    return list(Ports().shifted(offset).all(devices).values())


def _take(name: str, places: range, count: int, devices: int = 0) -> int:
    """The next in turn, for all processes of this user together."""
    path = Path(tempfile.gettempdir()) / f"trefoil-test-ports-{name}-{os.getuid()}"
    with path.open("a+") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        turn.seek(0)
        at = int(turn.read() or places.start)
        for _ in range(len(places)):
            first = at if at + count <= places.stop else places.start
            taken = listening(of_system(first, devices) if devices else range(first, first + count))
            at = first + count * places.step
            if not taken:
                turn.truncate(0)
                turn.write(str(at))
                return first
    raise AssertionError(f"no {count} free of the {name} ports between {places.start} and {places.stop}")


def _free(port: int) -> bool:
    try:
        rpc.check_port(f"127.0.0.1:{port}")
    except PortInUse:
        return False
    return True
