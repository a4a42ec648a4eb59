"""Processes on simulated slices: each in a session of its own, gone with the node, and nothing of it left behind.

They start as those of the runtime `process` do (runtimes/child.py), as the user that the agent names. The node is a
child subreaper, so that the python stubs of a killed Triton come to it and are ended and reaped too. A stop asks the
leader first (SIGTERM) and later kills the whole session. What a killed Triton leaves in /dev/shm is found by the prefix
that its command line gives it, and removed.
"""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from power_agent.devices.errors import NodeRefused
from power_agent.runtimes.child import become, spawn
from power_agent.runtimes.confinement import Confined
from trefoil.runtime import proc

PR_SET_CHILD_SUBREAPER: Final = 36
REGION_PREFIX_OPTION: Final = re.compile(r"shm-region-prefix-name=([\w.-]+)")  # of Triton's python backend
CHILDREN_MAX: Final = 512

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make this process a child subreaper: orphans below it become its children instead of init's."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(slots=True)
class Child:
    """A process that the node started, and the session that it leads."""

    tag: str
    popen: subprocess.Popen[bytes]
    mig_uuid: str
    argv: tuple[str, ...]
    log_path: str
    started_at_s: float
    uid: int = 0  # its own user; 0: the node's
    exit_code: int | None = None  # of the leader; the session may outlive it for a moment
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the whole session is gone

    @property
    def pid(self) -> int:
        """Pid of the leader of its session."""
        return self.popen.pid

    @property
    def alive(self) -> bool:
        """Whether any process of the session is left: when it turns False, ports and memory are free."""
        return not self.ended.is_set()

    @property
    def shared_memory_prefix(self) -> str:
        """Prefix of its shared memory; empty when its command line does not say."""
        return shared_memory_prefix(self.argv)

    def status(self) -> dict[str, Any]:
        """Status of the process, as JSON values."""
        return {
            "tag": self.tag,
            "pid": self.pid,
            "mig_uuid": self.mig_uuid,
            "alive": self.alive,
            "exit_code": None if self.alive else self.exit_code,
            "started_at_s": self.started_at_s,
            "argv": list(self.argv),
            "log_path": self.log_path,
        }


class ProcessTable:
    """Table of all children by tag. `poll` must be called regularly: it notices exits and finishes sessions off."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}

    def __iter__(self) -> Iterator[Child]:
        return iter(tuple(self._children.values()))

    def get(self, tag: str) -> Child:
        """Child by its tag; NodeRefused when there is none."""
        if tag not in self._children:
            known = ", ".join(self._children) or "none"
            raise NodeRefused(f"no process with tag {tag!r}", remedy=f"one of: {known}")
        return self._children[tag]

    def find_alive(self, tag: str) -> Child | None:
        """Live child by its tag; None when there is none."""
        child = self._children.get(tag)
        return child if child is not None and child.alive else None

    def start(
        self,
        tag: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: str,
        cwd: str,
        mig_uuid: str,
        now_s: float,
        confined: Confined,
    ) -> Child:
        """Start a process in a session of its own; NodeRefused when it cannot be started."""
        if len(self._children) >= CHILDREN_MAX:
            raise NodeRefused(f"{CHILDREN_MAX} processes are listed", remedy="forget those that have exited")
        try:
            Path(log_path).parent.mkdir(parents=True, exist_ok=True)
            with open(log_path, "ab") as log:
                popen = spawn({**env, **confined.env}, log)
            spec = confined.spec(argv=tuple(argv), cwd=cwd or os.getcwd(), parent=os.getpid())
            if why := become(popen, spec):
                popen.kill()
                popen.wait()
                raise OSError(why)
        except OSError as error:
            raise NodeRefused(
                f"{tag}: could not start {argv[0]} ({error})", remedy="check path and log folder"
            ) from error
        child = Child(tag, popen, mig_uuid, tuple(argv), log_path, now_s, confined.uid)
        self._children[tag] = child
        return child

    def forget(self, tag: str) -> None:
        """Forget a child that has ended; a live one is refused."""
        if self.get(tag).alive:
            raise NodeRefused(f"{tag} is alive", remedy="stop it first")
        del self._children[tag]

    def poll(self) -> list[Child]:
        """Reap whatever has exited, kill what a dead leader left; returns the children whose session ended just now."""
        self._reap()
        ended = []
        for child in self._children.values():
            if child.exit_code is None or child.ended.is_set():
                continue
            if not kill_all_of(child):
                child.ended.set()
                ended.append(child)
        return ended

    def _reap(self) -> None:
        leaders = {child.pid: child for child in self._children.values() if child.exit_code is None}
        while True:
            try:
                # Look without reaping: a leader must be reaped by its Popen, which keeps the exit code.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            if found.si_pid in leaders:
                leaders[found.si_pid].exit_code = leaders[found.si_pid].popen.wait()
            else:
                os.waitpid(found.si_pid, 0)


def shared_memory_prefix(argv: Sequence[str]) -> str:
    """Prefix of the shared memory of a Triton, by its command line; empty when it does not say."""
    found = REGION_PREFIX_OPTION.search(" ".join(argv))
    return found.group(1) if found else ""


def kill_all_of(child: Child) -> bool:
    """SIGKILL whatever still belongs to a child; False when all of it is gone, and reaped."""
    stats = (proc.read_stat(int(name)) for name in os.listdir(proc.PROC) if name.isdigit())
    session = [stat.identity for stat in stats if stat is not None and stat.session == child.pid]
    left = {*session, *proc.of_user(child.uid)}
    for identity in left:
        identity.send(signal.SIGKILL)
    return bool(left)
