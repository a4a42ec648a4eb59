"""Tritons as processes of this host. They lead separate sessions and outlive the agent; those of a simulated node
(`owned`) end with its process, as with a driver.

<state>/runtime/<tag>.json identifies the process of a tag by pid, start ticks and boot, so that a reused pid is never
taken for it. It is written before the process becomes a Triton (see launcher.py), so that an agent that is killed in
between leaves no unknown process. After a restart the process has no parent here: its end is seen in /proc, its exit
code is unknown. If these files are lost, a Triton is found by its environment (LAUNCHED_AS), if it runs as a user that
this agent gives to Tritons.
CPU slices get control groups (see cgroup.py), else an affinity; both hold for a Triton's children too. User and
isolation of a Triton: confinement.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.cgroup import Cgroups, member_pids, remove_groups, used_cpu_s
from power_agent.runtimes.child import become, reap_orphans, spawn
from power_agent.runtimes.confinement import Confined, Confinement
from power_agent.runtimes.launcher import UNREADABLE
from power_agent.triton.slice_launch import LAUNCHED_AS, SliceLaunch, clean_shared_memory
from trefoil.core.errors import StartError, Unavailable, system_words
from trefoil.runtime import proc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.files import FileTrouble, disk_error, replace_file, rotate_log
from trefoil.runtime.state_files import of_shape, read_state

log = structlog.get_logger()

MARK: Final = "TREFOIL_RUNTIME_ID"  # in the environment of all that belongs to one Triton
KILL_PATIENCE_S: Final = 5.0
REMOVE_PATIENCE_S: Final = 0.5
POLL_S: Final = 0.02
LOG_MIB: Final = 16  # of a Triton's log, where no setting says another size
SHM_NAME: Final = re.compile(r"trefoil-[\w.-]+-")
SHM_PREFIX: Final = re.compile(f"shm-region-prefix-name=({SHM_NAME.pattern})")


@dataclass(frozen=True, slots=True)
class Record:
    """Record of one tag on disk. `pid` 0: it was about to be started."""

    tag: str
    mark: str
    boot_id: str
    argv: tuple[str, ...]
    runs_on: str  # GPU, cores or quota: with argv what makes a command another one
    log_path: str
    shm_prefix: str
    uid: int = 0  # its own user, whose every process is the slice's; 0: the agent's
    groups: tuple[str, ...] = ()
    pid: int = 0
    start_ticks: int = 0
    started_at_s: float = 0.0
    ended: bool = False
    exit_code: int | None = None
    owner: str = ""

    @property
    def identity(self) -> proc.Identity:
        """Identity of the leader of its session."""
        return proc.Identity(self.pid, self.start_ticks)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders of its control groups."""
        return tuple(map(Path, self.groups))

    def running(self) -> RunningTriton:
        """State of the Triton as the agent sees it."""
        return RunningTriton(
            tag=self.tag,
            id=str(self.pid),
            incarnation=f"{self.pid}-{self.start_ticks}-{self.mark[:8]}",
            alive=not self.ended,
            exit_code=self.exit_code,
            started_at_s=self.started_at_s,
            owner=self.owner,
            argv=self.argv,
            gpu_uuid=self.runs_on.partition(" ")[0].removeprefix("-"),
        )


class ProcessRuntime:
    """Runtime of host processes. Thread-safe; calls for one tag wait for each other, `list` for none."""

    name = "process"

    def __init__(
        self,
        folder: Path,
        cgroups: Cgroups,
        clock: WallClock,
        boot_id: str,
        confinement: Confinement | None = None,
        *,
        owned: bool = False,
        owner: str = "",
        log_mib: int = LOG_MIB,
    ) -> None:
        """`owned`: what it starts ends with the thread that called `start`. `owner`: "<cluster>/<node>", whose Tritons
        are found again although their files are lost; empty: none. `log_mib`: size of a rotated log."""
        self._owner = owner
        self._log_bytes_max = log_mib * 2**20
        self._log_trouble = FileTrouble("log of a Triton", "it grows on")
        self._confinement = confinement or Confinement()
        self._parent = os.getpid() if owned else 0
        self._folder = folder
        self._cgroups = cgroups
        self._clock = clock
        self._boot_id = boot_id
        self._lock = threading.Lock()  # of the tables
        self._locks: dict[str, threading.Lock] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._loaded: dict[str, Record] | None = None

    @property
    def _records(self) -> dict[str, Record]:
        """Read at the first use, when this agent surely is the only one of its node. Call with `_lock` held."""
        if self._loaded is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            files = {path: _read_record(path) for path in sorted(self._folder.glob("*.json"))}
            read = [self._as_it_runs(record) for path, record in files.items() if record and path.stem == record.tag]
            claims = Counter(record.pid for record in read)
            self._loaded = {
                record.tag: record
                if claims[record.pid] == 1 or proc.marked(record.pid, f"{MARK}={record.mark}")
                else replace(record, pid=0)
                for record in read
            }
            if self._owner:
                self._find_lost(self._loaded)
            self._cgroups.remove_unknown({group for record in self._loaded.values() for group in record.folders})
        return self._loaded

    def _alive(self, record: Record) -> bool:
        return not record.ended and record.boot_id == self._boot_id and bool(record.pid) and record.identity.alive()

    def _as_it_runs(self, record: Record) -> Record:
        """The record with the user, control groups and log that the kernel names, not those of its file: all that they
        hold is killed with the Triton, and the log is cut. Of a Triton that is gone, those that this agent can have
        given it. Its shared memory, which is removed, is that of its command."""
        regions = SHM_PREFIX.search(" ".join(record.argv))
        named = record.shm_prefix if SHM_NAME.fullmatch(record.shm_prefix) else ""
        record = replace(record, shm_prefix=regions[1] if regions is not None else named)
        if self._alive(record):
            record = replace(record, log_path=proc.output_of(record.pid) or record.log_path)
            uid, groups = proc.real_uid(record.pid), self._cgroups.of_process(record.pid)
            return replace(record, uid=uid if uid > 0 and uid != os.geteuid() else 0, groups=tuple(map(str, groups)))
        uid = record.uid if record.uid in self._confinement.uids_for(record.argv) else 0
        own = {str(parent / record.tag) for parent in self._cgroups.parents.values()}
        return replace(record, uid=uid, groups=tuple(group for group in record.groups if group in own))

    def _find_lost(self, known: dict[str, Record]) -> None:
        """Add the Tritons of this agent's node that run and have no file; the first start of a tag is the tag's."""
        pids = {record.pid for record in known.values() if self._alive(record)}
        lost = (self._lost_record(stat) for stat in proc.living() if stat.pid == stat.session and stat.pid not in pids)
        for record in sorted((one for one in lost if one is not None), key=lambda one: one.start_ticks):
            live = known.get(record.tag)
            if live is not None and self._alive(live):
                record = replace(record, tag=f"{record.tag}+{record.pid}")  # another that claims to be it
            log.warning("a Triton without its file", tag=record.tag, pid=record.pid)
            known[record.tag] = record
            with contextlib.suppress(OSError):  # it is found again in any case
                replace_file(self._path(record.tag), json.dumps(asdict(record), indent=1), sync=False)

    def _lost_record(self, stat: proc.Stat) -> Record | None:
        """Record of a process by its environment and command; None where it is not of this agent's node."""
        environment = proc.read_start_strings(stat.pid, "environ").decode(errors="replace").split("\0")
        told = dict(pair.partition("=")[::2] for pair in environment)
        owner, _, tag = told.get(LAUNCHED_AS, "").rpartition("/")
        if owner != self._owner or not tag or not told.get(MARK):
            return None
        argv = proc.read_start_strings(stat.pid, "cmdline").decode(errors="replace").rstrip("\0").split("\0")
        uid = proc.real_uid(stat.pid)
        if uid != os.geteuid() and uid not in self._confinement.uids_for(argv):
            log.warning("not a Triton of this node: another user", pid=stat.pid, tag=tag, uid=uid)
            return None
        regions = SHM_PREFIX.search(" ".join(argv))
        return Record(
            tag, told[MARK], self._boot_id, tuple(argv), f"{told.get('CUDA_VISIBLE_DEVICES') or '-'} - -",
            proc.output_of(stat.pid), regions[1] if regions else "", uid=0 if uid == os.geteuid() else uid,
            groups=tuple(map(str, self._cgroups.of_process(stat.pid))), pid=stat.pid, start_ticks=stat.start_ticks,
            started_at_s=self._clock.now_s(), owner=owner,
        )  # fmt: skip

    def _find(self, tag: str) -> Record | None:
        with self._lock:
            return self._records.get(tag)

    @property
    def missing_resources(self) -> dict[str, str]:
        """Resources that CPU slices cannot have on this host: name -> why and remedy. Cores are pinned in any case."""
        why = self._cgroups.missing.get("cpu")
        return {"cpu_quota": why} if why else {}

    def missing(self, *, gpus: bool) -> Mapping[str, str]:
        """See Runtime."""
        why = self._confinement.missing
        return {"isolate": why} if why else {}

    # --- the protocol -------------------------------------------------------------------------------------------------

    def start(
        self,
        tag: str,
        launch: SliceLaunch,
        log_path: Path,
        confinement: Confinement | None = None,
        writes: Sequence[Path] = (),
    ) -> RunningTriton:
        """See Runtime. Another command under a live tag is refused: it may be serving. `confinement`: if not the usual.
        `writes`: files that its user gets.

        Raises:
            StartError: the program or its control group cannot be had, or the tag runs something else.
        """
        runs_on = f"{launch.gpu_uuid or '-'} {launch.cpu_cores or '-'} {launch.cpu_quota or '-'}"
        with self._locked(tag):
            old = self._find(tag)
            if old is not None and not self._refresh(old).ended:
                if (old.argv, old.runs_on) != (tuple(launch.argv), runs_on):
                    raise StartError("alive with another command", field="tag", value=tag, remedy="stop it first")
                return old.running()
            confinement = confinement or self._confinement
            with confinement.choosing():
                confined = confinement.of(launch)
                for path in writes if confined.uid else ():
                    os.chown(path, confined.uid, confined.uid)
                named = (str(log_path), launch.shm_prefix, confined.uid)
                record = Record(tag, uuid.uuid4().hex, self._boot_id, tuple(launch.argv), runs_on, *named)
                record = replace(record, owner=launch.env.get(LAUNCHED_AS, "").rpartition("/")[0])
                clean_shared_memory(launch.shm_prefix)
                self._save(record)
                try:
                    return self._launch(record, launch, log_path, confined).running()
                except (OSError, StartError) as error:
                    self._forget(tag)
                    if isinstance(error, StartError):
                        raise
                    message = f"{tag}: cannot start {launch.argv[0]}: {system_words(error)}"
                    raise StartError(message, remedy="check the program and the folder of its log") from error

    def list(self) -> Sequence[RunningTriton]:
        """See Runtime. What a dead leader left behind is ended on the way."""
        with self._lock:
            records = list(self._records.values())
        found = []
        for record in records:
            if not record.ended:
                with self._locked(record.tag, wait=False) as mine:  # else it is being stopped just now
                    if mine:
                        record = self._refresh(self._find(record.tag) or record)
                self._rotate_log(Path(record.log_path))
            found.append(record.running())
        return tuple(found)

    def stop(self, tag: str, kill_after_s: float) -> None:
        """See Runtime; no-op when unknown.

        Raises:
            Unavailable: the kernel does not end it (a process that waits for a device cannot be killed).
        """
        with self._locked(tag):
            record = self._find(tag)
            if record is None or self._refresh(record).ended:
                return
            if record.identity.send(signal.SIGTERM) and not record.identity.wait(kill_after_s):
                log.warning("did not end in time: killed", tag=tag, pid=record.pid, kill_after_s=kill_after_s)
            if left := self._kill(record, KILL_PATIENCE_S):
                pids = ", ".join(str(identity.pid) for identity in left)
                raise Unavailable(
                    f"{tag}: processes {pids} did not end within {KILL_PATIENCE_S:g} s of SIGKILL",
                    remedy="they wait for a device: see its driver's log, reset the GPU",
                )
            self._end(record)

    def forget(self, tag: str) -> None:
        """See Runtime; a live one is refused.

        Raises:
            StartError: it is alive.
        """
        with self._locked(tag):
            record = self._find(tag)
            if record is not None and not self._refresh(record).ended:
                raise StartError("alive", field="tag", value=tag, remedy="stop it first")
            self._forget(tag)

    def used_cpu_s(self, tag: str) -> float | None:
        """CPU seconds that a Triton and all it started have used since its start; None where nothing counts them."""
        record = self._find(tag)
        return used_cpu_s(record.folders) if record is not None and not record.ended else None

    def kill_all(self) -> None:
        """Kill every Triton; `list` ends what they leave behind."""
        with self._lock:
            records = tuple(self._records.values())
        for record in records:
            if record.pid and not record.ended:
                record.identity.send(signal.SIGKILL)

    def reap(self) -> bool:
        """Reap orphans of Tritons, where they come to this process; tell whether a Triton has ended: `list` sees to it.

        Far cheaper than `list`.
        """
        with self._lock:
            return reap_orphans({child.pid for child in self._children.values()})

    # --- starting -----------------------------------------------------------------------------------------------------

    def _launch(self, record: Record, launch: SliceLaunch, log_path: Path, confined: Confined) -> Record:
        groups = self._cgroups.create(record.tag, launch.cpu_cores, launch.cpu_quota)
        record = self._save(replace(record, groups=tuple(map(str, groups))))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as written:
            child = spawn({**launch.env, **confined.env, MARK: record.mark}, written)
        stat = proc.read_stat(child.pid)
        assert stat is not None, "a child that was not waited for has a stat"
        record = self._save(
            replace(record, pid=child.pid, start_ticks=stat.start_ticks, started_at_s=self._clock.now_s())
        )
        with self._lock:
            self._children[record.tag] = child
        limits = {"cores": launch.cpu_cores, "groups": record.groups, "parent": self._parent}
        spec = confined.spec(argv=launch.argv, cwd=str(launch.cwd), **limits)
        if why := become(child, spec):
            self._kill(record, KILL_PATIENCE_S)
            raise StartError(f"{record.tag}: {why}", remedy=remedy_of(why, launch, log_path))
        return record

    # --- ending -------------------------------------------------------------------------------------------------------

    def _refresh(self, record: Record) -> Record:
        """The record as it is now; ends what a leader that is gone left behind. Call with the tag's lock held."""
        if record.ended or (record.boot_id == self._boot_id and record.pid and record.identity.alive()):
            return record
        if record.boot_id == self._boot_id and record.pid and self._kill(record, POLL_S * 5):
            return record  # not all of it yet
        return self._end(record)

    def _kill(self, record: Record, patience_s: float) -> tuple[proc.Identity, ...]:
        """SIGKILL all that belongs to it; returns what is left after `patience_s`."""
        deadline_s = self._clock.monotonic_s() + patience_s
        mark = f"{MARK}={record.mark}"
        while left := self._belonging(record, mark):
            for identity in left:
                identity.send(signal.SIGKILL)
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                return left
            left[0].wait(min(POLL_S, left_s))
        return ()

    @staticmethod
    def _belonging(record: Record, mark: str) -> tuple[proc.Identity, ...]:
        groups = tuple(member_pids(record.folders))
        return tuple({*proc.owned_processes(record.identity, mark, groups), *proc.of_user(record.uid)})

    def _end(self, record: Record) -> Record:
        """Note that all of it is gone, and clear away what it left."""
        with self._lock:
            child = self._children.get(record.tag)
        exit_code = child.wait() if child is not None else None
        with self._lock:
            self._children.pop(record.tag, None)  # not before: `reap` would take its exit code
        clean_shared_memory(record.shm_prefix)
        deadline_s = self._clock.monotonic_s() + REMOVE_PATIENCE_S
        while not remove_groups(record.folders) and self._clock.monotonic_s() < deadline_s:
            self._clock.block(POLL_S)  # a process is gone a moment before its group is empty
        ended = replace(record, ended=True, exit_code=exit_code)
        try:
            return self._save(ended)
        except OSError as error:  # a look after a restart sees that it is gone
            log.warning("end of a process not noted on disk", tag=record.tag, why=str(error))
        with self._lock:
            self._records[record.tag] = ended
        return ended

    # --- files --------------------------------------------------------------------------------------------------------

    def _save(self, record: Record) -> Record:
        replace_file(self._path(record.tag), json.dumps(asdict(record), indent=1), sync=False)
        with self._lock:
            self._records[record.tag] = record
        return record

    def _rotate_log(self, path: Path) -> None:
        try:
            rotate_log(path, self._log_bytes_max)
        except OSError as error:
            self._log_trouble.begin(path, error)
        else:
            self._log_trouble.end()

    def _forget(self, tag: str) -> None:
        record = self._find(tag)
        if record is None:
            return
        if not record.ended:
            self._end(record)
        self._path(tag).unlink(missing_ok=True)
        with self._lock:
            del self._records[tag]

    def _path(self, tag: str) -> Path:
        assert "/" not in tag, tag
        return self._folder / f"{tag}.json"

    @contextlib.contextmanager
    def _locked(self, tag: str, *, wait: bool = True) -> Iterator[bool]:
        """The lock of one tag; yields whether it is held, which it always is unless `wait` is False."""
        with self._lock:
            lock = self._locks.setdefault(tag, threading.Lock())
        held = lock.acquire(blocking=wait)
        try:
            yield held
        finally:
            if held:
                lock.release()


def _read_record(path: Path) -> Record | None:
    try:
        return read_state(path, partial(of_shape, Record))
    except OSError as error:
        raise disk_error(path, error, "read", "which Triton it stands for is not known") from error


def remedy_of(why: str, launch: SliceLaunch, log_path: Path) -> str:
    """What helps where a Triton did not start."""
    if UNREADABLE in why:
        return f"chmod -R o+rX {launch.source}; or set triton_user = same, and models run as the agent's user"
    return f"check {launch.argv[0]}, {launch.cwd} and {log_path}"
