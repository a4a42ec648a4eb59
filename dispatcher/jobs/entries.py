"""Entries of the jobs folder and the files folder: each is a folder that comes and goes as a whole. All calls block."""

import contextlib
import errno
import fcntl
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from dispatcher.jobs.core.job import ID
from trefoil.runtime.files import in_place
from trefoil.runtime.proc import open_lock
from trefoil.runtime.state_files import read_state

ITEMS, LOCK = "items.bin", ".lock"
NEW: Final = ".new-"
GONE: Final = ".gone-"
KNOWN_MAX: Final = 10_000  # records in memory, 1 KB each
T = TypeVar("T")


class Entries(Generic[T]):
    """Entries of a folder. Each has a record, a file of JSON that never changes."""

    def __init__(self, root: Path, record: str, parse: Callable[[str, Any], T]) -> None:
        """`parse` makes a record of an entry's name and JSON; raises InvalidInput."""
        self.root, self._record, self._parse = root, record, parse
        self._known: dict[str, T] = {}

    def ids(self) -> list[str]:
        """Names of all entries that are whole."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if not entry.name.startswith(".") and
                          entry.is_dir())  # fmt: skip
        except FileNotFoundError:
            return []

    def find(self, name: str) -> T | None:
        """Record of an entry; None: there is none of this name. Raises OSError."""
        found, path = self._known.get(name), self.root / name / self._record
        if found is None or not path.exists():
            self._known.pop(name, None)
            found = read_state(path, partial(self._parse, name)) if ID.fullmatch(name) else None
            if found is not None:
                if len(self._known) >= KNOWN_MAX:  # removed ones, too
                    self._known.clear()
                self._known[name] = found
        return found

    def remove(self, name: str) -> None:
        """Remove an entry, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.root / name, self.root / f"{GONE}{name}-{uuid.uuid4().hex[:8]}")
        sweep(self.root)


class Incoming:
    """An entry on its way to disk, with its bytes in ITEMS. It is none before it has its place."""

    def __init__(self, root: Path, prefix: str = NEW) -> None:
        """Raises OSError: the disk refuses."""
        self._root, self.path = root, root / f"{prefix}{uuid.uuid4().hex}"
        self.path.mkdir(parents=True, mode=0o700)
        self._file = open(self.path / ITEMS, "wb")  # noqa: SIM115 (closed by _close or discard)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()  # its time shows that the upload continues: see `sweep`

    def _close(self) -> None:
        """Bring its bytes to disk. Raises OSError: the disk refuses, or it was removed meanwhile."""
        os.fsync(self._file.fileno())
        if not in_place(self.path / ITEMS, self._file.fileno()):
            raise FileNotFoundError(errno.ENOENT, "removed while it was written", str(self.path / ITEMS))
        self._file.close()

    def _place(self, name: str) -> None:
        """Give it its place in the folder, which is locked. Raises OSError."""
        os.rename(self.path, self._root / name)
        with contextlib.suppress(OSError):  # it is in place: "nothing was kept" would be untrue
            sync_folder(self._root)

    def discard(self) -> None:
        """Remove what has come."""
        self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock a folder, so that no other process adds an entry meanwhile."""
    descriptor = open_lock(root / LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sweep(root: Path, older_than_s: float = 0.0) -> None:
    """Remove what is left of removed entries, and of uploads that ended before a time [UTC s]."""
    for entry in list(os.scandir(root)):
        stale = entry.name.startswith(NEW) and _written_s(Path(entry)) < older_than_s
        if stale or entry.name.startswith(GONE):
            shutil.rmtree(entry.path, ignore_errors=True)


def _written_s(upload: Path) -> float:
    """When an upload was written last [UTC s]."""
    found = [math.inf]
    for path in (upload, upload / ITEMS):
        with contextlib.suppress(FileNotFoundError):  # it may have its place by now
            found.append(path.stat().st_mtime)
    return max(found[1:] or found)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
