"""One agent per driver: two that cut the same GPUs would undo each other's work.

The journal's lock keeps two agents off one state directory; this one keeps them off one driver, whatever directories
they were given. It is on the file that stands for the driver, and gone with its process.
"""

import fcntl
from pathlib import Path
from typing import IO

import structlog

from trefoil.core.errors import StartError


def own_driver(marker: Path) -> IO[bytes] | None:
    """Keep what is returned open as long as the GPUs are ours; None where there is no driver, or it cannot be locked.

    Raises:
        StartError: another agent works with this driver.
    """
    try:
        file = marker.open("rb")
    except OSError as error:
        structlog.get_logger().info("no driver to own", marker=str(marker), why=error.strerror)
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StartError(
            "another power agent governs these GPUs",
            field="driver_marker",
            value=str(marker),
            remedy="stop it; one agent governs all GPUs of a node",
        ) from error
    except OSError as error:
        structlog.get_logger().warning("driver not locked", marker=str(marker), why=error.strerror)
        file.close()
        return None
    return file
