"""Files of jobs: one folder for each, below the jobs folder. All methods block: `on_disk` calls them.

<jobs>/<id>/job.json          the job and how many items it has; the folder is moved into place when all is on disk
            items.bin, .idx   its items one after the other with length and checksum; where each begins (64 bits)
            cancel.json       that it is to end, and why
            owner.json        who owns it now, and why it waits: what readers may miss
            journal.<epoch>, answers.<epoch>    results (core/journal.py)
<jobs>/.new-*                 jobs whose items still come
<jobs>/folder.json            name of the folder, by which its owner takes its lease
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from dispatcher.jobs.core.job import ENDED, Bounds, Job, JobState
from dispatcher.jobs.core.journal import Ledger, Place, Result, accepted, encode, replay, results_entry
from dispatcher.settings import DispatcherSettings
from trefoil.core.errors import InvalidInput, NotFound, one_of
from trefoil.runtime.files import LineFile, replace_file
from trefoil.runtime.state_files import STRANGE, read_state

HEAD: Final = struct.Struct("<II")  # of an item: its bytes, their CRC-32
INDEX_BYTES: Final = 8
NEW: Final = ".new-"
GONE: Final = ".gone-"
JOB, CANCEL, OWNER, FOLDER, LOCK = "job.json", "cancel.json", "owner.json", "folder.json", ".lock"
ITEMS, INDEX, JOURNAL, ANSWERS = "items.bin", "items.idx", "journal.", "answers."
NAMED_MAX: Final = 5  # in errors
OWNER_BYTES: Final = 4096
WHY_CHARS_MAX: Final = 600
T = TypeVar("T")


_THREADS: Final = ThreadPoolExecutor(4, "jobs")  # requests use the loop's own: a disk that hangs holds up no request


async def on_disk(work: Callable[..., T], *arguments: Any) -> T:
    """Result of what reads or writes files of jobs, in a thread for these."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


@dataclass(frozen=True, slots=True)
class Stored:
    """A job as it lies in its folder."""

    job: Job
    items: int
    submitted_at_s: float
    digest: str


class JobsFolder:
    """The jobs folder. Every dispatcher worker that reads and writes it has one."""

    def __init__(self, root: Path, bounds: Bounds) -> None:
        self.root, self.bounds = root, bounds
        self._stored: dict[str, Stored] = {}

    @classmethod
    def of(cls, settings: DispatcherSettings) -> Self:
        """The folder that the settings name, with its bounds."""
        bounds = Bounds(settings.jobs_items_max, settings.jobs_bytes_max, settings.jobs_tenant_max)
        return cls(settings.jobs_dir or settings.state_dir / "jobs", bounds)

    def name(self) -> str:
        """Name of the folder, given when it was made: workers with the same one share it."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / FOLDER
        with self._locked():
            found = read_state(path, lambda tree: str(tree["name"]))
            if found is None:
                found = uuid.uuid4().hex[:12]
                replace_file(path, json.dumps({"name": found}))
        return found

    def ids(self) -> list[str]:
        """Names of all jobs whose items are whole."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if not entry.name.startswith(".") and
                          entry.is_dir())  # fmt: skip
        except FileNotFoundError:
            return []

    def stored(self, name: str) -> Stored:
        """A job.

        Raises:
            NotFound: there is none of this name.
        """
        found = self._stored.get(name)
        path = self.root / name / JOB
        if found is None or not path.exists():
            self._stored.pop(name, None)
            found = read_state(path, _stored) if name and not name.startswith(".") and "/" not in name else None
            if found is None:
                remedy = one_of(self.ids()[-NAMED_MAX:], name, none="submit one")
                raise NotFound("is no job", field="id", value=name, remedy=remedy)
            self._stored[name] = found
        return found

    def check_room(self, job: Job) -> None:
        """Check that a tenant may have one job more.

        Raises:
            InvalidInput: it has as many as it may.
        """
        open_jobs = [name for name in self.ids() if self._counts(name, job.tenant)]
        if len(open_jobs) >= self.bounds.tenant_max:
            raise InvalidInput(
                f"has {len(open_jobs)} jobs that have not ended, at most {self.bounds.tenant_max}", field="tenant",
                value=job.tenant, remedy="wait for one, cancel one, or raise the dispatcher's jobs_tenant_max",
            )  # fmt: skip

    def _counts(self, name: str, tenant: str) -> bool:
        with contextlib.suppress(NotFound):
            return self.stored(name).job.tenant == tenant and JobReader(self, name).state not in ENDED
        return False

    def cancel(self, name: str, why: str) -> None:
        """Note that a job is to end. Raises NotFound."""
        self.stored(name)
        if not (self.root / name / CANCEL).exists():
            replace_file(self.root / name / CANCEL, json.dumps({"why": why}))

    def cancelled(self, name: str) -> str | None:
        """Why a job is to end; None: it is not."""
        return read_state(self.root / name / CANCEL, lambda tree: str(tree["why"]))

    def remove(self, name: str) -> None:
        """Remove a job with its results."""
        gone = self.root / f"{GONE}{name}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.root / name, gone)
        self._stored.pop(name, None)
        self.sweep()

    def sweep(self, older_than_s: float = 0.0) -> None:
        """Remove what is left of removed jobs, and of uploads that ended before a time [UTC s]."""
        for entry in list(os.scandir(self.root)):
            stale = entry.name.startswith(NEW) and entry.stat().st_mtime < older_than_s
            if stale or entry.name.startswith(GONE):
                shutil.rmtree(entry.path, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else gives a place to a job meanwhile."""
        descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def place(self, upload: "Upload", stored: Stored) -> None:
        """Give an upload its place.

        Raises:
            InvalidInput: its name is another job's, or its tenant has as many as it may.
        """
        name = stored.job.id
        with self._locked():
            if (self.root / name).exists():
                if self.stored(name).digest == stored.digest:
                    upload.discard()  # submitted once more: the first one counts
                    return
                raise InvalidInput("is another job's", field="id", value=name, remedy="choose another, or leave it out")
            self.check_room(stored.job)
            os.rename(upload.path, self.root / name)
        _sync(self.root)


class Upload:
    """Items of a job on their way to disk. Nothing of it is a job before `commit`."""

    def __init__(self, folder: JobsFolder, job: Job) -> None:
        """Raises OSError: the disk refuses."""
        self._folder, self._job = folder, job
        self.path = folder.root / f"{NEW}{uuid.uuid4().hex}"
        self.path.mkdir(parents=True, mode=0o700)
        self._items = open(self.path / ITEMS, "wb")  # noqa: SIM115 (closed by commit or discard)
        self._index = array("Q")
        self._at = 0
        text = json.dumps({**asdict(job), "complete_by_s": round(job.complete_by_s, 3)}, sort_keys=True)
        self._digest = hashlib.sha256(text.encode())

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
            remedy = f"at most {bounds.bytes_max} bytes: submit several jobs, or raise the dispatcher's jobs_bytes_max"
            raise InvalidInput("are too large", field="items", value=f"{self._at} bytes", remedy=remedy)
        data = b"".join(parts)
        self._digest.update(data)
        self._items.write(data)

    @property
    def count(self) -> int:
        """How many items have come."""
        return len(self._index)

    def commit(self, now_s: float) -> None:
        """Make the job one. Raises InvalidInput, as `JobsFolder.place`; OSError."""
        self._items.flush()
        os.fsync(self._items.fileno())
        self._items.close()
        replace_file(self.path / INDEX, self._index.tobytes())
        stored = Stored(self._job, len(self._index), now_s, self._digest.hexdigest())
        replace_file(self.path / JOB, json.dumps(asdict(stored)))
        self._folder.place(self, stored)

    def discard(self) -> None:
        """Remove what has come."""
        self._items.close()
        shutil.rmtree(self.path, ignore_errors=True)


class Items:
    """Items of a job on disk."""

    def __init__(self, folder: Path) -> None:
        self._data = os.open(folder / ITEMS, os.O_RDONLY | os.O_CLOEXEC)
        self._index = os.open(folder / INDEX, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, first: int, count: int) -> list[bytes | None]:
        """Items from a number on; None: its bytes on disk are not those that came.

        Raises:
            OSError: the disk refuses.
        """
        begins = array("Q")
        begins.frombytes(os.pread(self._index, INDEX_BYTES * (count + 1), INDEX_BYTES * first))
        if not begins:
            return [None] * count
        more = begins[count] if len(begins) > count else os.fstat(self._data).st_size
        data = os.pread(self._data, more - begins[0], begins[0])
        return [_checked(data, begin - begins[0]) for begin in begins[:count]]

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
    """How a job stands by its files, whoever owns it. `kept`: also where its results lie."""

    def __init__(self, folder: JobsFolder, name: str, kept: bool = False) -> None:
        """Raises NotFound."""
        self.stored = folder.stored(name)
        self.path = folder.root / name
        self._kept = kept
        self._epochs: dict[int, int] = {}  # of each journal that counts: how much of it is read
        self.ledger = Ledger(self.stored.items, kept)
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since."""
        epochs = self.epochs()
        if list(self._epochs) != list(epochs):
            self.ledger = Ledger(self.stored.items, self._kept)
            self._epochs = dict.fromkeys(epochs, 0)
        for epoch, limit in epochs.items():
            read = self._epochs[epoch]
            with open(self.path / f"{JOURNAL}{epoch}", "rb") as file:
                file.seek(read)
                data = file.read() if limit is None else file.read(max(0, limit - read))
            self._epochs[epoch] = read + replay(self.ledger, epoch, data)

    def epochs(self) -> dict[int, int | None]:
        """Journals that count in their order, and how many bytes of each; None: all, of its owner's."""
        names = [entry.name for entry in os.scandir(self.path) if entry.name.startswith(JOURNAL)]
        for epoch in sorted((int(name.removeprefix(JOURNAL)) for name in names), reverse=True):
            with open(self.path / f"{JOURNAL}{epoch}", "rb") as file:
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

    @property
    def sizes(self) -> dict[int, int]:
        """How much of each journal is read."""
        return dict(self._epochs)

    def owner(self) -> dict[str, Any]:
        """What its owner said last, as `OwnedJob.say` has it; empty: nothing yet."""
        try:
            found = json.loads((self.path / OWNER).read_bytes())
        except (OSError, ValueError):  # none has taken it; or it is being written
            return {}
        return found if isinstance(found, dict) else {}

    def results(self, first: int, bytes_max: int) -> tuple[list[tuple[int, bytes]], int]:
        """Results from an item on, of up to so many bytes and one more, and the item to go on from.

        Raises:
            OSError: the disk refuses.
        """
        found, total, item, files = list[tuple[int, bytes]](), 0, first, dict[int, int]()
        try:
            while item < self.stored.items and total < bytes_max:
                place = self.ledger.place(item)
                if place is not None:
                    data = self._bytes(place, files)
                    found.append((item, data))
                    total += len(data)
                item += 1
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        return found, item

    def _bytes(self, place: Place, files: dict[int, int]) -> bytes:
        if place.epoch not in files:
            files[place.epoch] = os.open(self.path / f"{ANSWERS}{place.epoch}", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(files[place.epoch], place.size, place.at)


class OwnedJob(JobReader):
    """A job of this process, under an epoch: the one that writes results."""

    def __init__(self, folder: JobsFolder, name: str, epoch: int, owner: str) -> None:
        """Take the job over from whoever owned it.

        Raises:
            NotFound: there is none.
            OSError: the disk refuses.
        """
        super().__init__(folder, name)
        self.epoch, self._said, self._answers = epoch, "", -1
        self._journal = LineFile(self.path / f"{JOURNAL}{epoch}", 0o600)
        self._owner = -1
        if not self.ledger.ended:
            self._owner = os.open(self.path / OWNER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.say(owner, "", 0.0)
            before = {str(each): size for each, size in self.sizes.items()}
            self._journal.append(encode({"owner": owner, "accepts": before}))
            self._sync_journal()
            _sync(self.path)
            self.refresh()
        self.items = Items(self.path)

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
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._answers = os.open(self.path / f"{ANSWERS}{self.epoch}", flags, 0o600)
        at = os.fstat(self._answers).st_size
        data = b"".join([each.data for each in results])
        done = 0
        while done < len(data):
            done += os.write(self._answers, data[done:])
        os.fsync(self._answers)
        self._journal.append(encode(results_entry(results, at)))
        self._sync_journal()
        self.refresh()

    def end(self, state: JobState, at_s: float, why: str) -> None:
        """End the job. Raises OSError."""
        self._journal.append(encode({"ended": state.name, "at_s": at_s, "why": why}))
        self._sync_journal()
        self.refresh()

    def say(self, owner: str, why: str, expected_at_s: float) -> None:
        """Tell readers who owns the job, why it waits and when it may be done. In place: a full disk lets this be said,
        too. Raises OSError."""
        text = json.dumps({"owner": owner, "why": why[:WHY_CHARS_MAX], "expected_at_s": expected_at_s})
        if text != self._said:
            os.pwrite(self._owner, text.encode().ljust(OWNER_BYTES), 0)
            self._said = text

    def close(self) -> None:
        """Close all files."""
        self._journal.close()
        self.items.close()
        for descriptor in (self._answers, self._owner):
            if descriptor >= 0:
                os.close(descriptor)
        self._answers = self._owner = -1

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
        with contextlib.suppress(OSError, ValueError):
            found += [int(path.name.removeprefix(JOURNAL)) for path in (folder.root / name).glob(f"{JOURNAL}*")]
    return max(found)


def _stored(tree: Any) -> Stored:
    try:
        job = Job(**{**tree["job"], "zones": tuple(tree["job"]["zones"])})
        return Stored(job, int(tree["items"]), float(tree["submitted_at_s"]), str(tree["digest"]))
    except STRANGE as error:
        raise TypeError(f"no job: {error}") from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
