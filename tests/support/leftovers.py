"""What a system may have left on this machine: processes, listening ports, locks, shared memory, sockets."""

import socket
from contextlib import closing
from pathlib import Path

from tests.support import ports
from trefoil.cli.run.scenario import Ports
from trefoil.runtime import proc


def listening(offset: int, devices: int = 2) -> list[int]:
    """Ports of a system that somebody listens on."""
    return ports.listening(ports.of_system(offset, devices))


def processes(folder: Path) -> list[str]:
    """Command lines of live processes that name a folder, wherever it stands in them."""
    found = []
    for stat in proc.living():
        line = proc.read_start_strings(stat.pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
        if str(folder) in line:
            found.append(line)
    return found


def shared_memory(offset: int, devices: int = 2) -> list[str]:
    """Regions of Tritons that listened on these ports."""
    base = Ports().shifted(offset).triton_base
    return [
        region.name
        for port in range(base, base + 16 * devices)
        for region in Path("/dev/shm").glob(f"trefoil-*-{port}-*")
    ]


def locks_and_sockets(folder: Path) -> list[str]:
    """Lock files, pid files and sockets under a folder."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name == "lock" or path.is_socket() or path.parent.name == "run"
    ]


def all_of(folder: Path, offset: int) -> dict[str, list[str]]:
    """Everything that is left, by kind; empty lists are what a test wants."""
    return {
        "processes": processes(folder),
        "ports": [str(port) for port in listening(offset)],
        "shared memory": shared_memory(offset),
        "locks and sockets": locks_and_sockets(folder),
    }


def none() -> dict[str, list[str]]:
    """What `all_of` gives when nothing is left."""
    return {"processes": [], "ports": [], "shared memory": [], "locks and sockets": []}


def connectable(port: int) -> bool:
    """Whether somebody accepts connections on a port."""
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
