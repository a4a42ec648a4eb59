"""Processes of this host by identity: a pid and when it started. A pid alone may belong to another process by now.
Files by which processes lock each other out (`open_lock`).

A signal goes through a pidfd that was opened before the start time was compared. So it can never reach a process that
got the number afterwards.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from trefoil.runtime.files import open_regular
from trefoil.runtime.state_files import set_aside

PROC: Final = Path("/proc")
ENDED: Final = frozenset("ZXx")
# Positions in /proc/<pid>/stat after the name. A program's words and variables are between two addresses.
FLAGS_AT: Final = 6
CODE_AT: Final = 23
SPANS_AT: Final = {"cmdline": (45, 46), "environ": (47, 48)}
NO_MEMORY: Final = 0x00200000 | 0x00000004  # a thread of the kernel; one that is exiting
LISTENS: Final = "0A"  # state of a socket in /proc/net/tcp
EXEC_TRIES: Final = 1000
EXEC_POLL_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a process. `start_ticks`: clock ticks between boot and start; they survive an exec."""

    pid: int
    start_ticks: int

    @classmethod
    def of_pid(cls, pid: int) -> "Identity":
        """Identity of the process with this number now; one that never ran if the number is free."""
        stat = read_stat(pid)
        return cls(pid, -1) if stat is None else stat.identity

    def exists(self) -> bool:
        """True if it runs, or has ended and was not waited for."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks

    def alive(self) -> bool:
        """True if it runs."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in ENDED

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal to exactly this process; False when it is gone."""
        with self._opened() as fd:
            if fd is None:
                return False
            try:
                signal.pidfd_send_signal(fd, signum)
            except ProcessLookupError:
                return False
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until it ends; False if it did not within that time."""
        with self._opened() as fd:
            if fd is None:
                return True
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout_s) * 1e3))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        try:
            fd = os.pidfd_open(self.pid) if self.exists() else -1  # what is not a pid at all is an error of the call
        except ProcessLookupError:
            fd = -1
        if fd < 0:
            yield None
            return
        try:
            yield fd if self.alive() else None
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Stat:
    """Part of /proc/<pid>/stat that identifies a process."""

    pid: int
    state: str
    session: int
    start_ticks: int

    @property
    def identity(self) -> Identity:
        """Identity of the process, for signals."""
        return Identity(self.pid, self.start_ticks)


def read_stat(pid: int) -> Stat | None:
    """Read what identifies a process; None when there is no such process."""
    fields = _fields(pid)
    return None if fields is None else Stat(pid, fields[0].decode(), int(fields[3]), int(fields[19]))


def _fields(pid: int) -> list[bytes] | None:
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()  # state ppid pgrp session ... starttime is the 20th


def owned_processes(identity: Identity, mark: str, also: Sequence[int] = ()) -> tuple[Identity, ...]:
    """Processes alive that belong to one that leads a session and carries `mark` in its environment.

    They are of its session (while its number surely is its own), or inherited the mark, wherever they went. Or they are
    of `also` (the pids of its cgroups).
    """
    ours = identity.exists()
    return tuple(
        stat.identity
        for stat in living()
        if stat.start_ticks >= identity.start_ticks
        and ((ours and stat.session == identity.pid) or stat.pid in also or marked(stat.pid, mark))
    )


def of_user(uid: int) -> tuple[Identity, ...]:
    """Processes that run as this user, whatever they made of themselves; empty for 0, which is shared."""
    return tuple(stat.identity for stat in living() if uid and real_uid(stat.pid) == uid)


def users() -> dict[int, Identity]:
    """Real users of all processes of this host, each with one process that it runs."""
    return {real_uid(stat.pid): stat.identity for stat in living()}


def listener(port: int) -> int:
    """Process that listens on a TCP port of this host; 0 where none does, or it is another user's."""
    sockets = {inode for table in ("tcp", "tcp6") for inode in _listening(PROC / "net" / table, port)}
    return next((stat.pid for stat in living() if sockets and sockets & _open_files(stat.pid)), 0)


def _listening(table: Path, port: int) -> Iterator[str]:
    """Sockets of a table that listen on a port, as links of descriptors name them."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:  # no IPv6
        return
    for row in rows:
        if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port:
            yield f"socket:[{row[9]}]"


def _open_files(pid: int) -> set[str]:
    found = set()
    try:
        for name in os.listdir(PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(PROC / str(pid) / "fd" / name))
    except OSError:  # gone, or another user's
        return set()
    return found


def output_of(pid: int) -> str:
    """File that its standard output goes to; "" if unknown."""
    try:
        return os.readlink(PROC / str(pid) / "fd" / "1").removesuffix(" (deleted)")
    except OSError:
        return ""


def real_uid(pid: int) -> int:
    """Real user of a process; -1 where it is gone. (The owner of /proc/<pid> is root's where it may not be traced.)"""
    try:
        status = (PROC / str(pid) / "status").read_text()
    except OSError:
        return -1
    return int(status.partition("\nUid:")[2].split(maxsplit=1)[0])


def living() -> Iterator[Stat]:
    """Processes of this host that run."""
    for name in os.listdir(PROC):
        stat = read_stat(int(name)) if name.isdigit() else None
        if stat is not None and stat.state not in ENDED:
            yield stat


def marked(pid: int, mark: str) -> bool:
    """True if it has `mark` ("NAME=value") in its environment."""
    return mark.encode() in read_start_strings(pid, "environ").split(b"\0")


def read_start_strings(pid: int, what: Literal["cmdline", "environ"]) -> bytes:
    """Words or variables that a process was started with; none where it is gone or of another user.

    In the middle of an exec the kernel shows neither: the new memory is there and not yet filled. Popen returns before
    it is. So what is empty is read again, for a second or so, unless it is empty for good. While the kernel copies the
    variables, they begin and end at one address, as where there are none. The kernel says only after that where the
    code begins (`load_elf_binary` in Linux's fs/binfmt_elf.c).
    """
    for _ in range(EXEC_TRIES):
        try:
            content = (PROC / str(pid) / what).read_bytes()
        except OSError:
            return b""
        fields = None if content else _fields(pid)
        if fields is None or fields[0].decode() in ENDED or int(fields[FLAGS_AT]) & NO_MEMORY:
            return content
        start, end = (int(fields[at]) for at in SPANS_AT[what])
        if start == end != 0 and int(fields[CODE_AT]) != 0:  # it was given none
            return b""
        Identity(pid, int(fields[19])).wait(EXEC_POLL_S)
    return b""


def open_lock(path: Path) -> int:
    """Descriptor of a lock file, made where it is missing. One that cannot be written locks as well. Anything but a
    regular file is set aside, as a state file is: opening a FIFO would block.

    Raises:
        OSError: the disk refuses.
    """
    if os.path.lexists(path) and not path.is_file():
        set_aside(path, "is not a regular file")
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        if not path.exists():
            raise
        return open_regular(path)
