"""Confinement of Tritons that run as processes: a separate user for each, that sees what its Triton needs.

Models are foreign code. Where the agent is root, the Triton of a slice runs as a user and group that no other process
has: `triton_uid_base` + its gRPC port, or the same in one of the UID_RANGES - 1 ranges above, where another Trefoil of
this machine has it. So it cannot signal, trace or read the agent, other services or the Triton of another slice.
/tmp, /dev/shm and the agent's state directory are empty for it except for what it needs. So is every folder that others
may not enter (such as /root), so that an installation below one still works.
Linux: mount_namespaces(7), credentials(7), capabilities(7); what is done of it stands in launcher.py.
"""

import contextlib
import errno
import fcntl
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from power_agent.runtimes import launcher
from power_agent.runtimes.child import become, spawn
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.errors import SettingError, StartError, system_error
from trefoil.runtime import proc

OWN: Final = tuple(launcher.PUBLIC)  # folders of which each Triton has its own
HOME: Final = "/tmp"
UID_RANGE: Final = 65_536  # users of one range: one for each port
UID_RANGES: Final = 16
USERS_LOCK: Final = Path("/run/trefoil-users.lock")
ENTER: Final = 0o001  # what others may do with a folder that they may pass through
NOT_ISOLATED: Final = "not isolated, models run as the agent's own user: {why}. Remedy: {remedy}"


@dataclass(frozen=True, slots=True)
class Confined:
    """What one Triton is confined to. uid 0: to nothing."""

    uid: int = 0
    shown: Sequence[str] = ()  # what it needs of hidden folders
    hidden: Sequence[str] = ()
    reads: Sequence[str] = ()  # files that it must be able to read

    @property
    def env(self) -> dict[str, str]:
        """What it gets another value of than the agent."""
        return {"HOME": HOME, "TMPDIR": HOME} if self.uid else {}

    def spec(self, **rest: Any) -> dict[str, Any]:
        """Input of launcher.py; `rest`: the command, and what is not of confinement."""
        hides = hidden_folders(map(Path, self.shown), map(Path, self.hidden)) if self.uid else {}
        return {"cores": None, "groups": (), "parent": 0, **rest, "uid": self.uid, "hides": hides, "reads": self.reads}


@dataclass(frozen=True, slots=True)
class Confinement:
    """Confinement of all Tritons of one agent."""

    uid_base: int = 0  # 0: they run as the agent's own user
    state_dir: Path | None = None  # of the agent, hidden from them
    missing: str = ""  # why they are not isolated, and what isolates them; empty: they are

    def uids_for(self, argv: Sequence[str]) -> Sequence[int]:
        """Users that a Triton of this command may run as; none where this agent gives it none."""
        ports = [word.partition("=")[2] for word in argv if word.startswith("--grpc-port=")]
        if not self.uid_base or len(ports) != 1 or not ports[0].isdecimal():
            return ()
        first = self.uid_base + int(ports[0])
        return range(first, first + UID_RANGE * UID_RANGES, UID_RANGE)

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Hold the machine's lock on users, from the choice of one until a process has it. If the machine's lock cannot
        be written, as in a container or under a systemd unit, hold this agent's.

        Raises:
            StartError: the lock cannot be had.
        """
        if not self.uid_base:
            yield
            return
        own = self.state_dir / USERS_LOCK.name if self.state_dir is not None else None
        try:
            lock = _opened(USERS_LOCK, own)
        except OSError as error:
            remedy = f"let the agent write in {USERS_LOCK.parent} or its state_dir, or set triton_user = same"
            so = "it locks the users of Tritons"
            raise system_error(StartError, error, "be opened", Path(error.filename), remedy=remedy, so=so) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def of(self, launch: SliceLaunch) -> Confined:
        """Confine one Triton; makes its slice's repository readable for it. Call it holding `choosing`.

        Raises:
            StartError: other processes run as each user that it could have.
        """
        if not self.uid_base:
            return Confined()
        uid = free_user(self.uid_base, int(launch.grpc_target.rpartition(":")[2]), proc.users())
        make_readable(launch.repository)
        hidden = (*OWN, *([str(self.state_dir.resolve())] if self.state_dir else ()))
        files = [path for path in launch.repository.rglob("*") if path.is_file()]
        return Confined(uid, tuple(map(str, needed_paths(launch))), hidden, tuple(map(str, files)))


def refuse_taken_users(uid_base: int, ports: Iterable[int]) -> None:
    """Check that Tritons on these ports can have separate users, where this process may give them any.

    Raises:
        StartError: other processes run as each user that one of them could have.
    """
    if os.geteuid() == 0:
        taken = proc.users()
        for port in ports:
            free_user(uid_base, port, taken)


def free_user(uid_base: int, port: int, taken: Mapping[int, proc.Identity]) -> int:
    """User for the Triton on a port: of the first range in which no process runs as it.

    Raises:
        StartError: other processes run as each user that it could have.
    """
    first = uid_base + port
    for uid in range(first, first + UID_RANGE * UID_RANGES, UID_RANGE):
        if uid not in taken:
            return uid
    raise StartError(
        f"process {taken[first].pid} runs as user {first}, others as the same in {UID_RANGES - 1} ranges above",
        field="triton_uid_base",
        value=uid_base,
        remedy=f"stop what runs there, or set another range of {UID_RANGE:,} users",
    )


def _opened(path: Path, instead: Path | None) -> int:
    """Descriptor of a lock file, made where it is missing; of another one where this one cannot be written."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if instead is None or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT):
            raise
        return _opened(instead, None)


def find_confinement(user: str, uid_base: int, state_dir: Path) -> Confinement:
    """Find out how Tritons can be confined here.

    Raises:
        SettingError: `user` is `own`, and that cannot be had.
    """
    why, remedy = "", ""
    if user == "same":
        why, remedy = "triton_user is same", "set triton_user = auto"
    elif os.geteuid() != 0:
        why, remedy = f"the agent is user {os.geteuid()}", "start it as root, as its systemd unit does"
    else:
        child = spawn({}, subprocess.DEVNULL)
        why = become(child, Confined(uid_base, (), OWN).spec(argv=(), cwd="/"))
        if child.wait() != 0:
            remedy = "allow the agent mount namespaces and CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID"
    if why and user == "own":
        raise SettingError(why, field="triton_user", value=user, remedy=f"{remedy}; or set triton_user = auto")
    if not why:
        return Confinement(uid_base, state_dir)
    structlog.get_logger().warning("Tritons are not isolated", why=why, remedy=remedy)
    return Confinement(missing=NOT_ISOLATED.format(why=why, remedy=remedy))


def needed_paths(launch: SliceLaunch) -> tuple[Path, ...]:
    """Paths that a Triton needs: its program and the Python of its models, with what they were installed with. Also the
    slice's repository, the shared one that its links lead to (itself maybe one of links), and files on its command."""
    program, search = Path(launch.argv[0]), launch.env.get("PATH", "").split(os.pathsep)[0]
    python = Path(search) / "python3"
    named = [*map(_prefix, (program, program.resolve(), python, python.resolve()))]
    named += [Path(folder) for folder in launch.env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    named += [launch.cwd, launch.repository, launch.source, *launch.files]
    named += [entry for entry in launch.source.glob("*") if entry.is_symlink()]
    named += [path.resolve().parent for path in launch.repository.rglob("*") if path.is_symlink()]
    named += [Path(value) for word in launch.argv[1:] if (value := word.partition("=")[2]).startswith("/")]
    found = dict.fromkeys(path for name in named for path in (name.resolve(), _in_place(name)) if path.exists())
    return tuple(found)


def hidden_folders(shown: Iterable[Path], hidden: Iterable[Path]) -> Mapping[str, Sequence[str]]:
    """Folders to be hidden, outermost only, with what stays visible of each."""
    closed = set(hidden)
    below: dict[Path, list[Path]] = {}
    for path in sorted(set(shown)):  # a folder before what is in it
        outer = next((folder for folder in reversed(path.parents) if folder in closed or not _may_enter(folder)), None)
        if outer is not None and not any(path.is_relative_to(other) for other in below.setdefault(outer, [])):
            below[outer].append(path)
    for folder in sorted(closed):
        if folder.is_dir() and not any(folder.is_relative_to(other) for other in below):
            below[folder] = []
    return {str(folder): tuple(map(str, paths)) for folder, paths in below.items()}


def make_readable(repository: Path) -> None:
    """Make a slice's repository readable for another user: it holds links and a configuration."""
    for folder, _, files in os.walk(repository):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o644)


def _prefix(program: Path) -> Path:
    return program.parent.parent if program.parent.name == "bin" else program.parent


def _in_place(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _may_enter(folder: Path) -> bool:
    return bool(folder.stat().st_mode & ENTER)
