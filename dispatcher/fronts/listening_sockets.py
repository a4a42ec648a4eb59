"""Makes a killed process close its listening sockets before its connections.

The kernel lets go of a dead process's files from the highest number down. A client whose connection is reset connects
again at once; while the dead worker's listening socket still stands, the kernel may deal that connection to it, and
reset it too, after which gRPC clients wait out their backoff. A second number for the listening socket, above all
others, makes it the first to go, and the new connection one of another worker's.
"""

import fcntl
import os
import resource
import socket
import stat
from contextlib import suppress
from typing import Final

ROOM: Final = 64  # numbers below the limit that are ours


class ListeningSockets:
    """Second numbers of the sockets of this process that listen on a port. Close it before the server stops: the
    sockets listen as long as either number is open."""

    def __init__(self, port: int) -> None:
        highest, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._numbers: list[int] = []
        for number in [int(name) for name in os.listdir("/proc/self/fd")] if os.path.isdir("/proc/self/fd") else []:
            if _listens(number, port):
                with suppress(OSError):  # no number is free there: then it is as it was
                    self._numbers.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(0, highest - ROOM)))

    def close(self) -> None:
        """Close the second numbers: the sockets are their server's alone."""
        for number in self._numbers:
            os.close(number)
        self._numbers = []


def _listens(number: int, port: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as copy:
            listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(listening) and copy.family != socket.AF_UNIX and copy.getsockname()[1] == port
    except OSError:  # gone meanwhile
        return False
