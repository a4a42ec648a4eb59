"""State directory of a running system: its paths, its lock, and the launch file by which a second command finds it.

<state_dir>/lock                 held while a supervisor lives
<state_dir>/run/launch.json      0600: who supervises, where everything listens (holds the Redis password)
<state_dir>/run/token            0600: what the services' admin ports ask for, also of processes of this machine
<state_dir>/run/redis_url        0600: address and password of Redis
<state_dir>/run/read_token       0600: what the page asks for; it opens what changes nothing
<state_dir>/run/plan.key         0600: what the controller signs plans by; stays from launch to launch
<state_dir>/run/routes.key       0600: derived from it, for the dispatcher
<state_dir>/run/<service>.json   pid and start of each process; how it ended, as long as it does not stay up
<state_dir>/config/<service>.toml, redis/, logs/, agent/, node/, dispatcher/, controller/
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from trefoil.cli.run.processes import ChildProcess, first_log_errors
from trefoil.core.errors import InvalidInput, NotFound, StartError, TrefoilError, system_error
from trefoil.runtime import codec
from trefoil.runtime.files import NotPlain, read_plain, replace_file, rotate_log
from trefoil.runtime.proc import Identity, open_lock
from trefoil.runtime.socket_paths import socket_folder
from trefoil.runtime.state_files import BAD, refuse_newer

SERVICES: Final = ("carbon_feed", "controller", "power_agent", "dispatcher")
FILE_BYTES_MAX: Final = 2**20  # of a launch, or a process


class AlreadyRunning(StartError):
    """Another supervisor holds this state directory."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch file of a running system: who supervises it, and where everything listens."""

    launch_id: str
    cluster: str
    state_dir: str
    supervisor: Identity
    redis_url: str = field(repr=False)
    addresses: Mapping[str, str]  # by service: admin gRPC; "inference": KServe v2, "rest": the same over HTTP, if any
    metrics: Mapping[str, str]
    node_socket: str
    family: str
    node: str
    zone: str
    triton_ports: tuple[int, int]  # first, and one after the last
    started_at_s: float
    ready_at_s: float = 0.0  # 0: still starting
    more_families: tuple[str, ...] = ()
    token_file: str = ""  # of all admin ports
    page: str = ""  # host:port of the live page; "": none


@dataclass(frozen=True, slots=True)
class Failing:
    """Failing service: one that ended and has not stayed up since."""

    ends: int  # in a row
    how: str  # its last end: "exit code 2", "signal 9"
    last_error: str  # line of its log
    again_at_s: float  # when it is, or was, started again


@dataclass(frozen=True, slots=True)
class _Process:
    """File of a service: its process, and why it does not stay up."""

    pid: int = 0
    start_ticks: int = 0
    started_at_s: float = 0.0
    failing: Failing | None = None


class StatePaths:
    """Paths under one state directory (see above)."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir, self.lock, self.run = state_dir, state_dir / "lock", state_dir / "run"
        self.launch = self.run / "launch.json"
        self.token, self.read_token = self.run / "token", self.run / "read_token"
        self.redis_url = self.run / "redis_url"
        self.plan_key, self.routes_key = self.run / "plan.key", self.run / "routes.key"

    def log(self, service: str) -> Path:
        """Log file of a service."""
        return self.state_dir / "logs" / f"{service}.log"

    def begin_logs(self) -> None:
        """Move the logs of the launch before to `.log.1`: each launch writes its own."""
        for log in (self.state_dir / "logs").glob("*.log"):
            if log.name != "supervisor.log":  # its own: open since before the launch
                log.replace(log.with_suffix(".log.1"))

    def rotate_logs(self, bytes_max: int) -> None:
        """Rotate each log that has grown past a size, the supervisor's too (`rotate_log`).

        Raises:
            OSError: one cannot be rotated; the others were.
        """
        failed: OSError | None = None
        for log in (self.state_dir / "logs").glob("*.log"):
            try:
                rotate_log(log, bytes_max)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def with_first_errors(self, error: TrefoilError, since_s: float) -> TrefoilError:
        """The time-out of a command, with what each service first complained of since a time [UTC s]."""
        logs = [log for log in sorted((self.state_dir / "logs").glob("*.log")) if log.name != "supervisor.log"]
        found = [f"{log.stem} logged: {line}" for log in logs for line in first_log_errors(log, since_s)]
        return error.with_cause("; ".join(found)) if found else error

    def settings(self, service: str) -> Path:
        """Settings file of a service."""
        return self.state_dir / "config" / f"{service}.toml"

    def folder(self, name: str) -> Path:
        """Folder of one service, created."""
        path = self.state_dir / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def node_socket(self) -> Path:
        """Socket of the simulated node, in the temporary folder where this one's path is too long for a socket."""
        inside = self.state_dir / "node"
        folder = socket_folder(inside, "socket", self.state_dir)
        return folder / ("socket" if folder == inside else "node.socket")

    def write_process(self, name: str, child: ChildProcess | None, failing: Failing | None) -> None:
        """Write what is known of a service's process."""
        values: dict[str, Any] = {}
        if child is not None:
            values |= asdict(child.identity) | {"started_at_s": child.started_at_s}
        if failing is not None:
            values["failing"] = asdict(failing)
        write_private(self.run / f"{name}.json", json.dumps(values) + "\n")

    def failing(self) -> dict[str, Failing]:
        """Services that do not stay up, by name, as the supervisor last said."""
        found = {}
        for path in sorted(set(self.run.glob("*.json")) - {self.launch}):
            try:
                failing = _read(_Process, path).failing
            except FileNotFoundError:  # the system is just being stopped
                continue
            except (NotPlain, OSError, InvalidInput) as error:
                failing = Failing(0, "not known", f"{path} cannot be understood: {error}", 0.0)
            if failing is not None:
                found[path.stem] = failing
        return found

    def set_aside(self) -> list[str]:
        """Files that services have set aside; the controller says itself what became of its own."""
        folders = (self.state_dir / name for name in ("carbon_feed", "dispatcher", "agent"))
        return [str(path) for folder in folders for path in sorted(folder.rglob(f"*{BAD}*"))]

    def read_launch(self) -> Launch | None:
        """Read the launch file; None when there is none.

        Raises:
            StartError: it cannot be read.
        """
        try:
            launch: Launch = _read(Launch, self.launch)
            return launch
        except FileNotFoundError:
            return None
        except (NotPlain, OSError, InvalidInput) as error:
            remedy = "end the `trefoil up` of this folder if it runs, then remove that file"
            raise system_error(StartError, error, "be read", self.launch, field="launch file", remedy=remedy) from error

    def write_launch(self, launch: Launch) -> None:
        """Write the launch file: atomically, readable by its owner only."""
        write_private(self.launch, json.dumps(asdict(launch), indent=1))

    def running(self) -> Launch:
        """Launch of the system that runs here.

        Raises:
            NotFound: nothing runs here.
        """
        launch = self.read_launch()
        if launch is None or not launch.supervisor.alive():
            raise NotFound(
                "no system is running there",
                field="state_dir",
                value=str(self.state_dir),
                remedy="start one: trefoil up; or name another: --state-dir, or its address as --help says",
            )
        return launch


def _read(cls: Any, path: Path) -> Any:
    tree = codec.parse_json(read_plain(path, FILE_BYTES_MAX))
    refuse_newer(path, tree)
    return codec.from_plain(cls, tree, path.name)


class StateLock:
    """An exclusive lock on a state directory. The file goes with the lock; the kernel frees it if we are killed."""

    def __init__(self, paths: StatePaths) -> None:
        self._path = paths.lock
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            AlreadyRunning: at once, when another process holds it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while self._fd is None:
            fd = open_lock(self._path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(fd)
                raise AlreadyRunning(
                    "a system is already running there",
                    field="state_dir",
                    value=str(self._path.parent),
                    remedy="stop it with `trefoil down`, or give another --state-dir and --port-offset",
                ) from error
            if self._is_current(fd):  # else its holder unlinked it between our open and our lock: try again
                self._fd = fd
            else:
                os.close(fd)

    @property
    def held(self) -> bool:
        """Whether we hold the lock."""
        return self._fd is not None

    def release(self) -> None:
        """Free the lock and remove its file. Idempotent."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None

    def _is_current(self, fd: int) -> bool:
        try:
            return os.stat(self._path).st_ino == os.fstat(fd).st_ino
        except FileNotFoundError:
            return False


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically; never readable by others, not even for a moment."""
    replace_file(path, text, sync=False, mode=0o600)
