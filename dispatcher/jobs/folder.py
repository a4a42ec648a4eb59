"""Files of jobs: one folder for each, below the jobs folder. All methods block, so `on_disk` calls them.

<jobs>/<id>/job.json          the job and how many items it has. The folder is moved into place when all is on disk.
            items.bin, .idx   its items one after the other with length and checksum; where each begins (64 bits).
                              Both are removed at its end.
            cancel.json       request to end it, with the reason.
            parcels.json      its parcels in other zones (core/parcels.py).
            batch.json        of a batch of OpenAI's API: its request, and why it was refused.
            owner.json        its owner, and why it waits; readers may miss it. It exists from the start, so that it can
                              be written on a full disk.
            journal.<epoch>, answers.<epoch>    results (core/journal.py).
<jobs>/.new-*                 jobs whose items still come.
<jobs>/folder.json            name of the folder, by which its owner takes its lease.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import struct
import uuid
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from dispatcher.jobs.core.job import Bounds, Job, JobState
from dispatcher.jobs.core.journal import Ledger, Result, accepted, encode, ended_entry, replay, results_entry
from dispatcher.jobs.core.parcels import Parcel, kept, restored
from dispatcher.jobs.entries import ITEMS, Entries, Incoming, locked, sync_folder
from dispatcher.settings import DispatcherSettings
from trefoil.core.errors import InvalidInput, NotFound, one_of
from trefoil.core.outside.plausible import EPOCH_MAX, numbers_fault
from trefoil.core.outside.ranges import complaint
from trefoil.runtime.files import LineFile, NotPlain, open_regular, read_plain, replace_file
from trefoil.runtime.rpc import MESSAGE_BYTES_MAX
from trefoil.runtime.state_files import BYTES_MAX, STRANGE, of_shape, read_state

HEAD: Final = struct.Struct("<II")  # of an item: its bytes, their CRC-32
INDEX_BYTES: Final = 8
READ_BYTES: Final = 4 * 2**20  # of items at once
JOB, CANCEL, OWNER, FOLDER = "job.json", "cancel.json", "owner.json", "folder.json"
BATCH: Final = "batch.json"
PARCELS: Final = "parcels.json"
INDEX, JOURNAL, ANSWERS = "items.idx", "journal.", "answers."
NAMED_MAX: Final = 5  # in errors
OWNER_BYTES: Final = 4096
LINE_BYTES_MAX: Final = 1024  # of an item in the journal: most have 150, errors 400
ITEMS_MAX: Final = 10**9  # of any job, whatever `jobs_items_max` was when it came
WHY_CHARS_MAX: Final = 600
KEPT_FACTOR: Final = 10
"""Jobs of a tenant whose results are kept, as a multiple of those that have not ended."""
EPOCH: Final = re.compile(rf"{JOURNAL}([0-9]{{1,{len(str(EPOCH_MAX))}}})")
T = TypeVar("T")
Entry = TypeVar("Entry", bound=Incoming)


_THREADS: Final = ThreadPoolExecutor(4, "jobs")  # requests use the loop's own: a disk that hangs holds up no request


async def on_disk(work: Callable[..., T], *arguments: Any) -> T:
    """Result of what reads or writes files of jobs, in a thread for these."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


async def to_its_end(work: Callable[..., T], *arguments: Any) -> T:
    """As `on_disk`; a caller that is cancelled waits, too, since it closes or removes the files next."""
    writing = asyncio.ensure_future(on_disk(work, *arguments))
    try:
        return await asyncio.shield(writing)
    finally:
        await asyncio.wait((writing,))


@contextlib.asynccontextmanager
async def arriving(make: Callable[..., Entry], *arguments: Any) -> AsyncIterator[Entry]:
    """An entry on its way to disk, which is removed if it breaks off. What works on it goes `to_its_end`."""
    entry = await on_disk(make, *arguments)
    try:
        yield entry
    except BaseException:
        await asyncio.shield(on_disk(entry.discard))
        raise


@dataclass(frozen=True, slots=True)
class Stored:
    """A job as it is in its folder."""

    job: Job
    items: int
    submitted_at_s: float
    digest: str


class JobsFolder(Entries[Stored]):
    """The jobs folder. Every dispatcher worker that reads and writes it has one."""

    def __init__(self, root: Path, bounds: Bounds) -> None:
        super().__init__(root, JOB, _stored)
        self.bounds = bounds

    @classmethod
    def of(cls, settings: DispatcherSettings) -> Self:
        """The folder that the settings name, with its bounds."""
        bounds = Bounds(settings.jobs_items_max, settings.jobs_bytes_max, settings.jobs_tenant_max)
        return cls(settings.jobs_dir or settings.state_dir / "jobs", bounds)

    def name(self) -> str:
        """Name of the folder, given when it was made: workers with the same one share it."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / FOLDER
        with locked(self.root):
            found = read_state(path, lambda tree: str(tree["name"]))
            if found is None:
                found = uuid.uuid4().hex[:12]
                replace_file(path, json.dumps({"name": found}))
        return found

    def stored(self, name: str) -> Stored:
        """A job.

        Raises:
            NotFound: there is none of this name.
        """
        found = self.find(name)
        if found is None:
            remedy = one_of(self.ids()[-NAMED_MAX:], name, none="submit one")
            raise NotFound("is not a job", field="id", value=name, remedy=remedy)
        return found

    def check_room(self, job: Job) -> None:
        """Check that a tenant may have one job more.

        Raises:
            InvalidInput: it has as many as it may.
        """
        stored = ((name, self.find(name)) for name in self.ids())
        jobs = [name for name, one in stored if one is not None and one.job.tenant == job.tenant]
        open_jobs = sum(map(self.has_items, jobs))
        most = self.bounds.tenant_max
        if open_jobs >= most:
            raise InvalidInput(
                f"has {open_jobs} jobs that have not ended, at most {most}", field="tenant", value=job.tenant,
                remedy="wait for one, cancel one, or raise the dispatcher's jobs_tenant_max",
            )  # fmt: skip
        if len(jobs) >= KEPT_FACTOR * most:
            raise InvalidInput(
                f"has {len(jobs)} jobs with results, at most {KEPT_FACTOR * most}", field="tenant", value=job.tenant,
                remedy="wait until results are old, or change the dispatcher's jobs_keep_s or jobs_tenant_max",
            )  # fmt: skip

    def has_items(self, name: str) -> bool:
        """Whether a job still has its items: they go at its end."""
        return (self.root / name / INDEX).exists()

    def say(self, name: str, owner: str, why: str, expected_at_s: float) -> None:
        """Tell readers who owns a job, why it waits and when it may be done. In place: a full disk lets this be said,
        too. Raises OSError."""
        said = {"owner": owner, "why": why[:WHY_CHARS_MAX], "expected_at_s": expected_at_s}
        text = json.dumps(said, ensure_ascii=False).encode(errors="replace")
        descriptor = open_regular(self.root / name / OWNER, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, text.ljust(OWNER_BYTES), 0)
        finally:
            os.close(descriptor)

    def cancel(self, name: str, why: str) -> None:
        """Note that a job is to end. Raises NotFound."""
        self.stored(name)
        if not (self.root / name / CANCEL).exists():
            replace_file(self.root / name / CANCEL, json.dumps({"why": why[:WHY_CHARS_MAX]}))

    def batch(self, name: str, tenant: str) -> tuple[dict[str, Any], float | None]:
        """Record of a tenant's batch of OpenAI's API, and since when it is to end [UTC s].

        Raises:
            NotFound: it has no such batch.
        """
        found = self.find(name)
        mine = found is not None and found.job.tenant == tenant
        record = read_state(self.root / name / BATCH, dict) if mine else None
        if record is None:
            raise NotFound("is not a batch of yours", field="batch_id", value=name, remedy="GET /v1/batches names them")
        with contextlib.suppress(FileNotFoundError):
            return record, (self.root / name / CANCEL).stat().st_mtime
        return record, None

    def cancelled(self, name: str) -> str | None:
        """Why a job is to end; None: it is not."""
        return read_state(self.root / name / CANCEL, lambda tree: str(tree["why"]))

    def is_new(self, stored: Stored) -> bool:
        """Whether a job has yet to be kept; False: it was submitted before.

        Raises:
            InvalidInput: its name is another job's, or its tenant has as many as it may.
        """
        name = stored.job.id
        if (self.root / name).exists():
            if self.stored(name).digest != stored.digest:
                raise InvalidInput("is another job's", field="id", value=name, remedy="choose another, or leave it out")
            return False
        self.check_room(stored.job)
        return True


class Upload(Incoming):
    """Items of a job on their way to disk. Nothing of it is a job before `commit`."""

    def __init__(self, folder: JobsFolder, job: Job) -> None:
        """Raises OSError: the disk refuses."""
        super().__init__(folder.root)
        self._folder, self._job = folder, job
        self._index = array("Q")
        self._at = 0
        # Not the deadline: "in 6 h" is another time when the same job is submitted again.
        self._digest = hashlib.sha256(json.dumps({**asdict(job), "complete_by_s": 0}, sort_keys=True).encode())

    def add(self, requests: Iterable[bytes]) -> None:
        """Add items.

        Raises:
            InvalidInput: more, or more bytes, than a job may have.
            OSError: the disk refuses.
        """
        bounds, parts = self._folder.bounds, list[bytes]()
        for data in requests:
            self._index.append(self._at)
            parts += (HEAD.pack(len(data), zlib.crc32(data)), data)
            self._at += HEAD.size + len(data)
            if len(self._index) > bounds.items_max:
                remedy = f"at most {bounds.items_max}: submit several jobs, or raise the dispatcher's jobs_items_max"
                raise InvalidInput("has too many", field="items", value=len(self._index), remedy=remedy)
            if self._at > bounds.bytes_max:
                most = f"at most {bounds.bytes_max} bytes"
                remedy = f"{most}: submit several jobs, or raise the dispatcher's jobs_bytes_max"
                raise InvalidInput("are too large", field="items", value=f"{self._at} bytes", remedy=remedy)
        data = b"".join(parts)
        self._digest.update(data)
        self._write(data)

    @property
    def count(self) -> int:
        """How many items have come."""
        return len(self._index)

    def commit(self, now_s: float, batch: Mapping[str, Any] | None = None, refused: str = "") -> None:
        """Make the job one. `batch`: the record of a batch of OpenAI's API; one that is refused ends at once.

        Raises:
            InvalidInput: as `JobsFolder.is_new`.
            OSError: the disk refuses.
        """
        self._close()
        if batch is not None:
            replace_file(self.path / BATCH, json.dumps(batch))
        if refused:
            lines = (encode({"accepts": {}}), encode(ended_entry(JobState.CANCELLED.name, now_s, refused)))
            replace_file(self.path / f"{JOURNAL}0", b"".join(line + b"\n" for line in lines))
        else:
            replace_file(self.path / INDEX, self._index.tobytes())
        replace_file(self.path / OWNER, b" " * OWNER_BYTES)
        stored = Stored(self._job, len(self._index), now_s, self._digest.hexdigest())
        replace_file(self.path / JOB, json.dumps(asdict(stored)))
        with locked(self._root):
            if self._folder.is_new(stored):
                self._place(self._job.id)
            else:
                self.discard()


class Items:
    """Items of a job on disk."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._data = open_regular(folder / ITEMS)
        try:
            self._index = open_regular(folder / INDEX)
        except OSError:
            os.close(self._data)
            raise

    def read(self, first: int, count: int, bytes_max: int = READ_BYTES) -> list[bytes | None]:
        """Up to `count` items from a number on, of up to so many bytes, but at least one; None: its bytes on disk are
        not those that came.

        Raises:
            OSError: the disk refuses.
        """
        size = self.size
        index = os.pread(self._index, INDEX_BYTES * (count + 1), INDEX_BYTES * first)
        ends = array("Q")
        ends.frombytes(index[: len(index) // INDEX_BYTES * INDEX_BYTES])
        if len(ends) == count:
            ends.append(size)  # of the last item
        if len(ends) <= count or ends[-1] > size or any(end <= begin for begin, end in pairwise(ends)):
            return [None] * count
        while len(ends) > 2 and ends[-1] - ends[0] > bytes_max:
            ends.pop()
        if ends[-1] - ends[0] > max(bytes_max, HEAD.size + MESSAGE_BYTES_MAX):
            return [None]
        data = os.pread(self._data, ends[-1] - ends[0], ends[0])
        return [_checked(data, begin - ends[0]) for begin in ends[:-1]]

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return os.fstat(self._data).st_size

    def close(self) -> None:
        """Close the files."""
        os.close(self._data)
        os.close(self._index)


def _checked(data: bytes, at: int) -> bytes | None:
    if at + HEAD.size > len(data):
        return None
    size, crc = HEAD.unpack_from(data, at)
    found = data[at + HEAD.size : at + HEAD.size + size]
    return found if len(found) == size and zlib.crc32(found) == crc else None


class JobReader:
    """State of a job by its files, for any worker. `kept`: also where its results are."""

    def __init__(self, folder: JobsFolder, name: str, kept: bool = False) -> None:
        """Raises NotFound."""
        self.stored = folder.stored(name)
        self.path = folder.root / name
        self._kept = kept
        self._epochs: dict[int, int] = {}  # of each journal that counts: how much of it is read
        self.ledger = Ledger(self.stored.items, kept)
        self._journal_max = BYTES_MAX + self.stored.items * LINE_BYTES_MAX
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since."""
        epochs = self.epochs()
        if list(self._epochs) != list(epochs):
            self.ledger = Ledger(self.stored.items, self._kept)
            self._epochs = dict.fromkeys(epochs, 0)
        for epoch, limit in epochs.items():
            read = self._epochs[epoch]
            with open(open_regular(self.path / f"{JOURNAL}{epoch}", bytes_max=self._journal_max), "rb") as file:
                file.seek(read)
                data = file.read() if limit is None else file.read(max(0, limit - read))
            self._epochs[epoch] = read + replay(self.ledger, epoch, data)

    def epochs(self) -> dict[int, int | None]:
        """Journals that count in their order, and how many bytes of each; None: all, of its owner's."""
        for epoch in sorted(_epochs(self.path), reverse=True):
            with open(open_regular(self.path / f"{JOURNAL}{epoch}", bytes_max=self._journal_max), "rb") as file:
                before = accepted(file.readline())
            if before is not None:
                return {**dict(sorted(before.items())), epoch: None}
        return {}

    @property
    def state(self) -> JobState:
        """State of the job by its journal."""
        if self.ledger.ended:
            return JobState[self.ledger.ended]
        return JobState.RUNNING if self.ledger.answered or self.ledger.failed else JobState.WAITING

    def owner(self) -> tuple[str, str, float]:
        """What its owner said last, as `OwnedJob.say` has it; empty: nothing yet."""
        try:
            told = json.loads(read_plain(self.path / OWNER, 2 * OWNER_BYTES))
            expected_at_s = float(told["expected_at_s"])
            return str(told["owner"]), str(told["why"]), 0.0 if complaint("_at_s", expected_at_s) else expected_at_s
        except (OSError, NotPlain, RecursionError, *STRANGE):  # none has taken it; or it is being written
            return "", "", 0.0

    def parcels(self) -> list[Parcel]:
        """Parcels of it that peers' zones have. Raises OSError."""
        return read_state(self.path / PARCELS, lambda tree: restored(tree["parcels"], self.stored.items)) or []

    def results(self, first: int, bytes_max: int, items_max: int = 1000) -> tuple[list[tuple[int, bytes]], int]:
        """Results of up to so many items from one on, of up to so many bytes and one more, and the item to continue
        from.

        Raises:
            OSError: the disk refuses.
        """
        found, total, item, files = list[tuple[int, bytes]](), 0, first, dict[int, int]()
        try:
            while item < min(self.stored.items, first + items_max) and total < bytes_max:
                if self.ledger.done[item]:
                    epoch, at, size = self.ledger.place(item)
                    if epoch not in files:
                        files[epoch] = open_regular(self.path / f"{ANSWERS}{epoch}")
                    found.append((item, os.pread(files[epoch], size, at)))
                    total += len(found[-1][1])
                item += 1
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        return found, item


class OwnedJob(JobReader):
    """A job of this process, under an epoch: the one that writes results."""

    def __init__(self, folder: JobsFolder, name: str, epoch: int, owner: str) -> None:
        """Take the job over from its owner before.

        Raises:
            NotFound: there is none.
            OSError: the disk refuses.
        """
        super().__init__(folder, name)
        self.away = self.parcels()
        """Parcels as they were when it was taken over."""
        self.epoch, self._folder, self._said, self._answers = epoch, folder, ("", "", 0.0), -1
        self._journal = LineFile(self.path / f"{JOURNAL}{epoch}", 0o600)
        if self.ledger.ended:
            self._remove_items()
            return
        try:
            self.say(owner, "", 0.0)
            if epoch not in self._epochs:
                before = {str(each): size for each, size in self._epochs.items()}
                self._journal.append(encode({"owner": owner, "accepts": before}))
                self._sync_journal()
                sync_folder(self.path)
                self.refresh()
        except BaseException:
            self.close()
            raise

    @cached_property
    def items(self) -> Items:
        """Its items; a job that is only to be ended needs none. Raises OSError."""
        return Items(self.path)

    def write(self, results: Sequence[Result]) -> None:
        """Write results: on disk when this returns.

        Raises:
            OSError: the disk refuses; what does not count yet may be written again.
        """
        self.refresh()  # a line whose sync failed is there
        results = [each for each in results if not self.ledger.done[each.item]]
        if not results:
            return
        if self._answers < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._answers = open_regular(self.path / f"{ANSWERS}{self.epoch}", flags)
        at = os.fstat(self._answers).st_size
        data = b"".join([each.data for each in results])
        done = 0
        while done < len(data):
            done += os.write(self._answers, data[done:])
        os.fsync(self._answers)
        self._journal.append(encode(results_entry(results, at)))
        self._sync_journal()
        self.refresh()

    def write_parcels(self, parcels: Sequence[Parcel]) -> None:
        """Write which parcels peers' zones have. Raises OSError."""
        replace_file(self.path / PARCELS, json.dumps({"parcels": kept(parcels)}))

    def end(self, state: JobState, at_s: float, why: str) -> None:
        """End the job. Raises OSError."""
        self._journal.append(encode(ended_entry(state.name, at_s, why[:WHY_CHARS_MAX])))
        self._sync_journal()
        self.refresh()
        if self.ledger.ended:  # else another owner has taken it over
            self._remove_items()

    def _remove_items(self) -> None:
        for name in (INDEX, ITEMS, PARCELS):  # without an index a job has ended: `JobsFolder.check_room`
            (self.path / name).unlink(missing_ok=True)

    def say(self, *said: Any) -> None:
        """Tell readers how the job stands, as `JobsFolder.say`, if that is new."""
        if said != self._said:
            self._folder.say(self.path.name, *said)
            self._said = said

    def close(self) -> None:
        """Close all files."""
        self._journal.close()
        if (items := self.__dict__.pop("items", None)) is not None:
            items.close()
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def _sync_journal(self) -> None:
        descriptor = os.open(self._journal.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def highest_epoch(folder: JobsFolder) -> int:
    """Highest epoch under which a job of the folder was ever owned: the next owner's is above it."""
    found = [0]
    for name in folder.ids():
        with contextlib.suppress(OSError):
            found += _epochs(folder.root / name)
    return max(found)


def _epochs(path: Path) -> list[int]:
    """Epochs of the journals in a job's folder; files of other names are none."""
    return [int(name[1]) for entry in os.scandir(path) if (name := EPOCH.fullmatch(entry.name))]


def _stored(name: str, tree: Any) -> Stored:
    """The job of that name that a tree is. Raises InvalidInput."""
    found: Stored = of_shape(Stored, tree)
    why = numbers_fault(found) or numbers_fault(found.job)
    if why or found.job.id != name or not 0 <= found.items <= ITEMS_MAX:
        raise InvalidInput(why or f"job {found.job.id!r} of {found.items} items", field="job", value=name)
    return found
