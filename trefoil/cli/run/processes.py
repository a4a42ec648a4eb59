"""Child processes: one started process and everything that it may leave behind.

Three mechanisms make sure that no process survives the launcher, however it ends. Each child runs in a separate
session, and is stopped group by group. The kernel stops the child when the launcher dies (parent-death signal). Every
descendant carries `TREFOIL_LAUNCH_ID` in its environment, by which `kill_leftovers` finds what escaped both.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from trefoil.core.errors import system_words
from trefoil.runtime import proc
from trefoil.runtime.clock import Clock
from trefoil.runtime.files import open_regular

LAUNCH_ID: Final = "TREFOIL_LAUNCH_ID"
SETTINGS: Final = '"event": "settings"'
LAST_LINES: Final = 15
LINE_CHARACTERS: Final = 500
PROGRESS: Final = re.compile(r'"level": "(debug|info)"')
LAST_BYTES: Final = 64 * 1024  # of a log that may have grown for months
POLL_S: Final = 0.05
# What a child runs first: the kernel is to SIGTERM it when the launcher dies; then it becomes its command. `preexec_fn`
# would run Python and gRPC's fork handlers in a fork of a process with gRPC's threads: now and then it dies of signal
# 11. A parent that died before the request is never reported. Python ignores SIGPIPE, which a command would inherit.
_DIE_WITH_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Command:
    """Command line of one service, and where it logs."""

    name: str
    argv: Sequence[str]
    log_path: Path
    stop_grace_s: float = 8.0


class ChildProcess:
    """A running child process. Created running; creation holds no await, so a cancellation cannot lose one."""

    def __init__(self, command: Command, launch_id: str, clock: Clock) -> None:
        self.command = command
        self.launch_id = launch_id
        self._clock = clock
        command.log_path.parent.mkdir(parents=True, exist_ok=True)
        with command.log_path.open("ab") as log:
            self._log_from = log.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, LAUNCH_ID: launch_id},
                start_new_session=True,
            )
        self.identity = proc.Identity.of_pid(self._popen.pid)
        self.started_at_s = clock.now_s()

    @property
    def name(self) -> str:
        """Name of the service."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative: the signal that ended it."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit code."""
        while (code := self._popen.poll()) is None:
            await self._clock.sleep(POLL_S)
        return code

    async def stop(self, *, kill_now: Callable[[], bool] = lambda: False) -> bool:
        """SIGTERM, then SIGKILL to its group after the grace or once `kill_now`; True when it ended by itself."""
        by_itself = True
        if self.exit_code is None:
            self._popen.send_signal(signal.SIGTERM)
            deadline_s = self._clock.monotonic_s() + self.command.stop_grace_s
            while self.exit_code is None:
                if kill_now() or self._clock.monotonic_s() >= deadline_s:
                    by_itself = False
                    break
                await self._clock.sleep(POLL_S)
        self.kill()
        return by_itself

    def kill(self) -> None:
        """Kill what is left of its process group, at once, and reap it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def last_lines(self, count: int = LAST_LINES) -> str:
        """Last lines that this start of the process logged, but for that of all its settings."""
        lines = last_log_lines(self.command.log_path, count, self._log_from).splitlines()
        return "\n".join(line for line in lines if SETTINGS not in line) or "(it logged nothing but its settings)"

    def last_error(self) -> str:
        """Last of its last lines that does not report progress; a remark where all do."""
        lines = self.last_lines().splitlines()
        errors = (line for line in reversed(lines) if not PROGRESS.search(line))
        return next(errors, "(it logged no error)").removeprefix("error: ")[:LINE_CHARACTERS]


def last_log_lines(path: Path, count: int = LAST_LINES, from_byte: int = 0) -> str:
    """Last lines of a log file, or a remark that there are none."""
    try:
        with open(open_regular(path), "rb") as log:
            size = sys.maxsize
            while os.fstat(log.fileno()).st_size < size:  # again where it is rotated while it is read
                size = log.seek(0, os.SEEK_END)
                log.seek(max(from_byte if from_byte <= size else 0, size - LAST_BYTES))  # smaller: rotated before
                lines = log.read(LAST_BYTES).decode(errors="replace").strip("\0 \t\r\n").splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as error:  # of a failing disk: no reason to stop looking after the process
        lines = [f"(its log cannot be read: {system_words(error)})"]
    return "\n".join(lines[-count:]) if lines else "(it logged nothing)"


def first_log_errors(path: Path, since_s: float) -> list[str]:
    """First warning and first error with a reason in the last LAST_BYTES of a service's log, since a time [UTC s].
    Empty: none, or the log cannot be read."""
    found: dict[str, str] = {}
    for line in last_log_lines(path, LAST_BYTES).splitlines():
        try:
            entry = json.loads(line)
            level, at_s = entry["level"], datetime.fromisoformat(entry["timestamp"]).timestamp()
            why = entry.get("error") or entry.get("why")
        except (ValueError, KeyError, TypeError, AttributeError):  # a traceback, a line cut short, another program's
            continue
        if why and level in ("warning", "error", "critical") and at_s >= since_s:
            found.setdefault(level, f"{entry.get('event', level)}: {why}"[:LINE_CHARACTERS])
    return list(dict.fromkeys(found.values()))


def descendants(launch_id: str) -> list[proc.Identity]:
    """Live processes that were started, directly or not, under this launch; never ourselves."""
    mark = f"{LAUNCH_ID}={launch_id}"
    return [stat.identity for stat in proc.living() if stat.pid != os.getpid() and proc.marked(stat.pid, mark)]


async def kill_leftovers(launch_id: str, clock: Clock, *, deadline_s: float = 5.0) -> list[int]:
    """Kill what is left of a launch and wait until it is gone; returns the process ids that were found."""
    found: set[proc.Identity] = set()
    give_up_s = clock.monotonic_s() + deadline_s
    while left := descendants(launch_id):
        for identity in left:
            with suppress(PermissionError):
                identity.send(signal.SIGKILL)
        found.update(left)
        if clock.monotonic_s() >= give_up_s:
            break
        await clock.sleep(POLL_S)
    return sorted(identity.pid for identity in found)


async def stop_all(children: Sequence[ChildProcess], *, kill_now: Callable[[], bool] = lambda: False) -> list[str]:
    """Stop several processes at once; returns the names of those that had to be killed."""
    orderly = await asyncio.gather(*(child.stop(kill_now=kill_now) for child in children))
    return [child.name for child, by_itself in zip(children, orderly, strict=True) if not by_itself]
