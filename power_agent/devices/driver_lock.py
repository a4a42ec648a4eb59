"""Lock of the driver: one agent governs all GPUs of a machine, also where agents run in containers.

The journal's lock keeps two agents off one state directory; this one keeps them off one driver, whatever directories
they were given. It is on two files, and gone with its process:
- what stands for the driver (`driver_load_id`). Namespaces of the network have separate inodes for it, so that it
  shuts out only agents that share the host's;
- the NVML library that this process has loaded. NVIDIA's container toolkit mounts the host's file into each container,
  so that it is one file for all of them.
"""

import fcntl
import os
from pathlib import Path
from typing import Final

import structlog

from trefoil.core.errors import StartError

LIBRARY: Final = "libnvidia-ml.so"


class DriverLock:
    """Lock of one driver: `take` it after each load, keep it as long as the GPUs are ours, `release` it."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker
        self._held: dict[tuple[int, int], int] = {}  # device and inode -> open file
        self._log = structlog.get_logger()

    def take(self, library: Path | None) -> None:
        """Take the lock; what is held already stays held. A file that is not there, or cannot be locked, is passed by.

        library: the NVML library in use (`loaded_library`); None: a simulated driver has none.

        Raises:
            StartError: another agent works with this driver.
        """
        before, self._held = self._held, {}
        try:
            for path in (self._marker, *((library,) if library else ())):
                self._take(path, before)
        finally:
            for file in before.values():  # of a load that is over
                os.close(file)

    def _take(self, path: Path, before: dict[tuple[int, int], int]) -> None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._log.info("no driver to own", path=str(path), why=error.strerror)
            return
        status = os.fstat(file)
        known = (status.st_dev, status.st_ino)
        if known in before:
            os.close(file)
            self._held[known] = before.pop(known)
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise StartError(
                f"another power agent governs these GPUs: it holds {path}",
                field="driver_marker",
                value=str(self._marker),
                remedy="stop it; one agent governs all GPUs of a node",
            ) from error
        except OSError as error:
            os.close(file)
            self._log.warning("driver not locked", path=str(path), why=error.strerror)
            return
        self._held[known] = file

    def release(self) -> None:
        """Release the lock."""
        for file in self._held.values():
            os.close(file)
        self._held.clear()


def loaded_library(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """NVML library that this process has loaded; None where it has none, as with a simulated driver."""
    for line in maps.read_text().splitlines():
        path = Path(line.partition("/")[2])
        if path.name.startswith(LIBRARY):
            return Path("/") / path
    return None
