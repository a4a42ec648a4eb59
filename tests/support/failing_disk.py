"""A disk that fails at chosen calls, for what is written by trefoil.runtime.files; and a small real one."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO)
CALLS = ("open", "write", "fsync", "replace")


class FailingDisk:
    """Calls of `os` that write, counted; those from `fails_from` on fail, `fails_count` of them.

    A failing write of more than one byte leaves half of it, as a disk does that fills.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
        self.code, self.calls, self.fails_from, self.fails_count = code, 0, 10**9, 10**9
        self._real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            monkeypatch.setattr(os, name, self._replaced(name))

    def fail(self, fails_from: int = 0, fails_count: int = 10**9) -> None:
        """Fail from the n-th call on, counted from now."""
        self.calls, self.fails_from, self.fails_count = 0, fails_from, fails_count

    def mend(self) -> None:
        """Fail no more."""
        self.fails_from = 10**9

    def _replaced(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **more: Any) -> Any:
            reads = name == "open" and not (arguments[1] & (os.O_WRONLY | os.O_RDWR))
            if reads or (name == "write" and arguments[0] <= 2):
                return real(*arguments, **more)
            at, self.calls = self.calls, self.calls + 1
            if self.fails_from <= at < self.fails_from + self.fails_count:
                if name == "write" and len(arguments[1]) > 1 and at == self.fails_from:
                    return real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise OSError(self.code, os.strerror(self.code))
            return real(*arguments, **more)

        return call


@contextmanager
def small_disk(path: Path, size: str = "64k") -> Iterator[Path]:
    """A real disk of that size; skips where nothing may be mounted."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> Path:
    """Fill a disk to the last byte; returns the file to delete."""
    ballast = path / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return ballast
