"""Write-ahead journal: what an agent must not forget, so that its successor adopts, finishes or rolls back.

One line per entry under `<state>/journal.jsonl` (`journal_state` says which entries there are), appended by one system
call, so that a SIGKILL leaves whole lines. The driver and the processes show what exists. The journal says which of it
is ours, of which generation, what it ought to serve, and what has to be put back.

What has to reach the disk before the act, and why:
- plan, cordon, release, lease epoch, generation: fsync. They must survive the loss of power; a generation, because
  joules are booked by it and a number must never come twice.
- override, before a clock is locked or a power limit set: written, not synced. It must survive SIGKILL. The setting
  itself does not survive what loses written pages, nor do the GPU instances and processes of slice, begin, end and
  forget.

What a successor makes of what it finds:
- unfinished create_gi, create_ci: an instance that is there, ours by its `slice` entry, is adopted, with or without
  its compute instance. The next reconciler of the plan completes or destroys it. One that is not there is forgotten.
- unfinished destroy_ci, destroy_gi, stop, drain: what still exists is adopted unchanged, and the plan decides again.
- unfinished start, load, warm_up: a process that lives is adopted and asked what it serves; one that is dead is
  started again if it is still planned.
- a process of an entry whose slice is gone is ended. What has no entry is adopted where it proves whose it is
  (`slices/core/proof.py`), and is otherwise left unchanged.
- overrides are put back before anything else, cordons hold.
Every unfinished step is then closed (`close_unfinished`): it is either finished by the plan or of no meaning any more.

When the disk is full, read-only or failing, nothing new is begun: `begin_step`, `accept_plan`, `set_cordon`,
`release_cordon` and `begin_override` raise, and whatever has happened meanwhile is written as a whole as soon as there
is room (`catch_up`). An agent that starts on such a disk adopts what runs, publishes and meters. The file is compacted
into a new one, atomically, at each start, every few thousand lines and after trouble.

A journal that cannot be read, or that another node or cluster wrote, is set aside as journal.jsonl.bad, and the agent
begins without one. One of a later version is refused by name and left untouched. One that is deleted or moved away
under a running agent is written again (`keep_place`).
"""

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any, Final

import structlog

from power_agent.durability.journal_state import (
    Cordon,
    JournalState,
    Override,
    SliceRecord,
    encode,
    replay,
)
from trefoil.core.errors import DiskUnavailable, InvalidInput, StartError
from trefoil.core.fleet import SliceKey, Step
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec
from trefoil.runtime.files import FileTrouble, in_place, replace_file
from trefoil.runtime.proc import open_lock
from trefoil.runtime.state_files import read_bytes, refuse_newer, set_aside
from trefoil.runtime.telemetry import Metrics

LINES_MAX: Final = 5000
LOCK: Final = "lock"


class JournalError(DiskUnavailable):
    """Journal cannot be written, so nothing may be begun."""


class Journal:
    """Write-ahead journal of one agent: append-only; one process at a time (flock). Belongs to one event loop."""

    def __init__(
        self,
        directory: Path,
        boot_id: str,
        driver_load_id: str,
        metrics: Metrics | None = None,
        owner: str = "",
    ) -> None:
        """`owner`: "<cluster>/<node>" of this agent; a journal of another one is set aside. Empty: any is taken."""
        self._path = directory / "journal.jsonl"
        self._owner = owner
        self._load = f"{boot_id}/{driver_load_id}"
        self._file: int | None = None
        self._lock: int | None = None
        self._size = 0
        self._lines = 0
        self._lines_max = LINES_MAX
        self._behind = False  # the file lacks something that the state holds
        self._metrics = metrics
        self._trouble = FileTrouble("journal", "nothing new is begun until then, what runs goes on", metrics)
        self.state = JournalState()
        self.fresh = False
        """Nothing could be read at the start: what runs has to prove whose it is."""
        self._log = structlog.get_logger()

    # --- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> JournalState:
        """Open the journal: lock it, read what is there, compact it if there is room.

        Raises:
            StartError: another agent of this node runs on the same state.
            StartError: a newer version has written it.
            JournalError: the state directory cannot be made or read.
        """
        self._take_lock()
        self.state = self._read()
        self.fresh = not self.state.lines
        self.state.owner = self._owner
        self._behind = True
        self.catch_up()
        return self.state

    def _take_lock(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_lock(self._path.parent / LOCK)
        except OSError as error:
            raise self._error(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise StartError(
                f"another power agent works in {self._path.parent}",
                remedy="stop it, or give this one its own state_dir",
            ) from error
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock

    def _read(self) -> JournalState:
        """State of the journal that is there; one that is not this agent's to go by is set aside."""
        try:
            data = read_bytes(self._path, self._metrics) or b""
        except OSError as error:
            raise self._error(error) from error
        with contextlib.suppress(InvalidInput):  # of a first line that is torn
            refuse_newer(self._path, codec.parse_json(data.partition(b"\n")[0].partition(b"\t")[0]))
        found, why = replay(data, self._load), ""
        refuse_newer(self._path, {"version": found.version})
        if self._owner and found.owner not in ("", self._owner):
            why = f"the agent of {found.owner} wrote it, this is {self._owner}"
            found = JournalState(damaged=found.damaged)
        elif found.damaged > 1 or (found.damaged and not found.lines):  # no last line that a crash tore
            why = f"{found.damaged} lines of it cannot be read"
        if why:
            set_aside(self._path, why, self._metrics)
        if found.damaged:
            self._log.warning("journal lines passed over", count=found.damaged, path=str(self._path))
        return found

    def keep_place(self) -> None:
        """Write journal and lock again where they were deleted or moved away under this agent.

        Raises:
            StartError: another agent has begun there meanwhile.
        """
        if self._lock is not None and not in_place(self._path.parent / LOCK, self._lock):
            try:
                self._take_lock()
            except JournalError:
                return  # said by `_trouble`; tried again at the next call
            self._log.error("lock of the state directory was lost: taken again", folder=str(self._path.parent))
        self._check_place()
        self.catch_up()

    def _check_place(self) -> None:
        if self._file is not None and not self._behind and not in_place(self._path, self._file):
            self._log.error("journal was deleted under this agent: written again", file=str(self._path))
            self._behind = True

    def close(self) -> None:
        """Close the file and release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def driver_changed(self, driver_load_id: str) -> None:
        """Drop all GPU slices: the driver was loaded again, and none of its instances exists any more."""
        self._load = f"{self._load.partition('/')[0]}/{driver_load_id}"
        self.state.drop_gpu_slices()
        self._behind = True
        self.catch_up()

    # --- durable before they count ------------------------------------------------------------------------------------

    async def accept_plan(self, plan: NodePlan) -> None:
        """Accept a plan: remember it durably before anything is done for it.

        Raises:
            JournalError: it could not be written; the plan before stays.
        """
        self._write_before({"plan": codec.to_plain(plan)})
        before, self.state.plan = self.state.plan, plan  # before the sync: a compaction meanwhile must not drop it
        self.state.highest_epoch = max(self.state.highest_epoch, plan.revision.epoch)
        try:
            await self.sync()
        except JournalError:
            self.state.plan, self._behind = before, True  # the line that may be there is not to be found again
            raise

    async def lower_fence(self, epoch: int) -> None:
        """Lower the highest epoch, and with it the revision of the plan.

        Raises:
            JournalError: it could not be written; the fence stays.
        """
        self._write_before({"fence": epoch})
        highest, plan = self.state.highest_epoch, self.state.plan
        self.state.apply({"fence": epoch})
        try:
            await self.sync()
        except JournalError:
            self.state.highest_epoch, self.state.plan, self._behind = highest, plan, True
            raise

    async def set_cordon(self, cordon: Cordon) -> None:
        """Cordon a device: remember durably that it is out of service.

        Raises:
            JournalError: it could not be written; the device is in service as before.
        """
        self._write_before({"cordon": codec.to_plain(cordon)})
        before = self.state.cordons.get(cordon.device)
        self.state.cordons[cordon.device] = cordon
        await self._sync_cordon(cordon.device, before)

    async def release_cordon(self, device: str) -> None:
        """Release a cordon; no-op when there is none.

        Raises:
            JournalError: it could not be written; the cordon holds.
        """
        if device in self.state.cordons:
            self._write_before({"release": device})
            await self._sync_cordon(device, self.state.cordons.pop(device, None))

    async def _sync_cordon(self, device: str, before: Cordon | None) -> None:
        try:
            await self.sync()
        except JournalError:
            self._behind = True
            if before is None:
                self.state.cordons.pop(device, None)
            else:
                self.state.cordons[device] = before
            raise

    def raise_lease_epoch(self, epoch: int) -> None:
        """Raise our own lease epoch, the floor of the next one if Redis loses its data. Blocks for one fsync."""
        self.state.lease_epoch = max(self.state.lease_epoch, epoch)
        self._write_after({"lease_epoch": epoch})
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:  # the lease itself is in Redis, and the lock keeps a second agent off: it leads on
            self._trouble.begin(self._path, error)
            self._behind = True

    def next_generation(self) -> int:
        """Next generation: a number that no instance here ever had. `sync` comes before the instance is made."""
        self.state.generation += 1
        self._write_after({"generation": self.state.generation})
        return self.state.generation

    def raise_generation(self, generation: int) -> None:
        """Raise the last generation to one that was seen here, so that its number never comes twice."""
        if generation > self.state.generation:
            self.state.generation = generation
            self._write_after({"generation": generation})

    async def sync(self) -> None:
        """Sync: return when all that was written so far is on the disk.

        Raises:
            JournalError: it cannot be, or some of it could not even be written.
        """
        self.catch_up()
        if self._behind or self._file is None:
            raise JournalError(self._trouble.why)
        file = os.dup(self._file)  # a compaction may close the file meanwhile; then all of it is on disk anyway
        try:
            await asyncio.to_thread(os.fsync, file)
        except OSError as error:
            self._behind = True
            raise self._error(error) from error
        finally:
            os.close(file)

    # --- written before they count ------------------------------------------------------------------------------------

    async def begin_step(self, step: Step) -> None:
        """Begin a step: written before it.

        Raises:
            JournalError: it could not be written: the step must not be made.
        """
        self._write_before({"begin": codec.to_plain(step)})
        self.state.unfinished[step.slice, step.verb] = step

    def begin_override(self, override: Override) -> None:
        """Begin an override: written before a clock is locked or a power limit set.

        Raises:
            JournalError: it could not be written: the setting must not be changed.
        """
        self._write_before({"override": codec.to_plain(override)})
        self.state.overrides[override.device, override.setting] = override

    # --- what has happened --------------------------------------------------------------------------------------------

    def raise_highest_epoch(self, epoch: int) -> None:
        """Raise the highest epoch: a command came under it, and older ones are refused, by successors too."""
        if epoch > self.state.highest_epoch:
            self.state.highest_epoch = epoch
            self._write_after({"highest_epoch": epoch})

    def end_override(self, device: str, setting: str) -> None:
        """End an override: the default is in force again."""
        if self.state.overrides.pop((device, setting), None) is not None:
            self._write_after({"restored": [device, setting]})

    def end_step(self, step: Step) -> None:
        """End a step, whatever its outcome (`state`: done or failed)."""
        self.state.unfinished.pop((step.slice, step.verb), None)
        self._write_after({"end": codec.to_plain(step)})

    def close_unfinished(self) -> list[Step]:
        """Close the steps that a predecessor left unfinished, after all it made was adopted; returns them."""
        steps = list(self.state.unfinished.values())
        for step in steps:
            self.end_step(Step(step.slice, step.verb, "failed", why="the agent ended in the middle of it"))
        return steps

    def remember_device(self, device: str, kind: str, uuid: str) -> None:
        """Remember a GPU that is here, for a successor that finds it lost."""
        if self.state.devices.get(device) != (kind, uuid):
            self.state.devices[device] = (kind, uuid)
            self._write_after({"device": [device, kind, uuid]})

    def remember_slice(self, record: SliceRecord) -> None:
        """Remember that a slice is ours, in this state."""
        if self.state.slices.get(record.key) != record:
            self.state.slices[record.key] = record
            self._write_after({"slice": codec.to_plain(record)})

    def forget_slice(self, key: SliceKey) -> None:
        """Forget a slice that does not exist any more."""
        if self.state.slices.pop(key, None) is not None:
            self._write_after({"forget": codec.to_plain(key)})

    # --- the file -----------------------------------------------------------------------------------------------------

    def _write_before(self, entry: dict[str, Any]) -> None:
        """Write an entry that has to be there before something is done."""
        self._check_place()
        if self._behind:
            self._compact()
        try:
            self._append(entry)
        except OSError as error:
            raise self._error(error) from error

    def _write_after(self, entry: dict[str, Any]) -> None:
        """Write an entry of what has happened; without room the state keeps it until there is."""
        self._check_place()
        if not self._behind:
            try:
                self._append(entry)
            except OSError as error:
                self._trouble.begin(self._path, error)
                self._behind = True
        if self._lines > self._lines_max:
            self._behind = True
            self.catch_up()

    def _append(self, entry: dict[str, Any]) -> None:
        """One line by one call; half a line is taken back.

        Raises:
            OSError: the line is not there.
        """
        assert self._file is not None, "open() comes first"
        line = encode(entry, self._load)
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(28, "no space left for a whole line")
        except OSError:
            self._behind = True  # should the truncation fail too, only a new file is right again
            os.ftruncate(self._file, self._size)
            self._behind = False
            raise
        self._size += len(line)
        self._lines += 1

    def catch_up(self) -> str:
        """Catch up: write the whole state if the file lacks some; says why that cannot be, empty when it is whole."""
        if self._behind or self._trouble.why:
            with contextlib.suppress(JournalError):  # said when it began, and returned
                self._compact()
        return self._trouble.why

    def _compact(self) -> None:
        """Write what still matters to a new file and put it in place at once: old or new, never half of either."""
        entries = self.state.entries()
        data = b"".join(encode(entry, self._load) for entry in entries)
        try:
            replace_file(self._path, data)
            fresh = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._behind = True
            raise self._error(error) from error
        if self._file is not None:
            os.close(self._file)
        self._file, self._size, self._lines, self._behind = fresh, len(data), len(entries), False
        self._lines_max = max(LINES_MAX, 2 * len(entries))
        self._trouble.end()

    def _error(self, error: OSError) -> JournalError:
        return JournalError(str(self._trouble.begin(self._path, error)))
