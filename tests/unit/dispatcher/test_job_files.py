"""Files of jobs: whole or not there at all, each item with one result, whatever dies between two writes."""

import asyncio
import contextlib
import errno
import os
import stat
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dispatcher.jobs import service
from dispatcher.jobs.core.job import Bounds, Job, JobState
from dispatcher.jobs.core.journal import ERROR_CHARS_MAX, Result, encode, results_entry
from dispatcher.jobs.entries import sweep
from dispatcher.jobs.folder import Items, JobReader, JobsFolder, OwnedJob, Upload, highest_epoch, on_disk
from dispatcher.jobs.owner import JobsOwner
from protos.dispatcher.v1 import jobs_pb2
from tests.support.failing_disk import CALLS, FailingDisk
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.runtime.clock import ManualClock

JOB = Job("a", "digits", 1000.0)
ITEMS = [bytes([n]) * (n + 1) for n in range(10)]
METHODS = [method.name for method in jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].methods]


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    """What a kill leaves does not depend on syncs."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Killed(BaseException):
    """The process is gone: nothing catches it."""


class KilledAt:
    """Kills at the n-th call of `os` that writes; a write of several bytes has left half of them by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        for name in (*CALLS, "rename"):
            monkeypatch.setattr(os, name, self._replaced(name, getattr(os, name)))

    def _replaced(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*arguments, **more)
            self.left -= 1
            if self.left < 0:
                if name == "write" and self.left == -1:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Killed
            return real(*arguments, **more)

        return call


def folder_of(path: Path, **bounds: int) -> JobsFolder:
    return JobsFolder(path / "jobs", Bounds(**{"items_max": 100, "bytes_max": 10_000, "tenant_max": 3, **bounds}))


def submit(folder: JobsFolder, job: Job = JOB, items: list[bytes] = ITEMS) -> None:
    upload = Upload(folder, job)
    upload.add(items)
    upload.commit(5.0)


def result(number: int, epoch: int) -> Result:
    error = f"INTERNAL: broken{'!' * 300}" if number == 7 else ""
    return Result(number, b"%d of %d" % (number, epoch), number == 7, 1.0, 0.5, error=error)


def work(folder: JobsFolder, epoch: int, per_write: int = 3) -> None:
    """Own the job and give each item that has none a result."""
    owned = OwnedJob(folder, "a", epoch, f"w{epoch}")
    left = [number for number in range(len(ITEMS)) if not owned.ledger.done[number]]
    for at in range(0, len(left), per_write):
        owned.write([result(number, epoch) for number in left[at : at + per_write]])
    owned.end(JobState.DONE, 9.0, "")
    owned.close()


def results_of(folder: JobsFolder) -> list[tuple[int, bytes]]:
    reader = JobReader(folder, "a", kept=True)
    assert reader.ledger.damaged <= 1  # the line that a kill has torn
    assert (reader.ledger.answered, reader.ledger.failed, reader.ledger.left) == (9, 1, 0)
    assert reader.ledger.first_error.startswith("item 7: INTERNAL: broken!")
    assert len(reader.ledger.first_error) == ERROR_CHARS_MAX
    assert reader.ledger.joules == pytest.approx(10.0)
    assert reader.ledger.grams == pytest.approx(5.0)
    assert reader.state == JobState.DONE
    first, middle = reader.results(0, 1)
    rest, end = reader.results(middle, 10_000)
    assert end == len(ITEMS)
    return first + rest


def test_items_are_stored_as_they_came(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    items = Items(folder.root / "a")
    assert items.read(0, 10) == ITEMS
    assert items.read(4, 3) == ITEMS[4:7]
    assert items.read(9, 1) == ITEMS[9:]
    assert folder.ids() == ["a"]
    assert folder.stored("a").items == 10
    items.close()


def test_an_item_whose_bytes_have_changed_is_none(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    path = folder.root / "a" / "items.bin"
    data = bytearray(path.read_bytes())
    data[8] ^= 1  # the first byte of the first item
    path.write_bytes(bytes(data))
    items = Items(folder.root / "a")
    assert items.read(0, 3) == [None, *ITEMS[1:3]]
    path.write_bytes(bytes(data[:-4]))  # cut off
    assert items.read(8, 2) == [ITEMS[8], None]
    items.close()


@pytest.mark.parametrize("at", range(40))
def test_killed_at_any_write_an_upload_is_whole_or_nothing(tmp_path, monkeypatch, at):
    folder = folder_of(tmp_path)
    with monkeypatch.context() as patched:
        KilledAt(patched, at)
        try:
            submit(folder)
        except Killed:
            killed = True
        else:
            killed = False
    assert killed or at >= 8
    found = folder.ids()
    assert found in ([], ["a"])
    submit(folder)  # a client that was told nothing submits it again
    assert folder.ids() == ["a"]
    items = Items(folder.root / "a")
    assert items.read(0, 10) == ITEMS
    items.close()
    sweep(folder.root, 1e12)
    assert {path.name for path in folder.root.iterdir()} == {"a", ".lock"}


@pytest.mark.parametrize("per_write", [1, 4])
@pytest.mark.parametrize("at", range(60))
def test_killed_at_any_write_each_item_has_one_result(tmp_path, monkeypatch, at, per_write):
    folder = folder_of(tmp_path)
    submit(folder)
    with monkeypatch.context() as patched:
        KilledAt(patched, at)
        try:
            work(folder, 1, per_write)
        except Killed:
            pass
        else:
            assert at > 12
    before = JobReader(folder, "a", kept=True)
    known = [(n, data) for n, data in before.results(0, 10_000)[0]]
    work(folder, highest_epoch(folder) + 1)
    found = results_of(folder)
    assert [number for number, _ in found] == list(range(10))
    assert all(one in found for one in known), "what was delivered once is delivered again"
    assert all(data.startswith(b"%d of " % number) for number, data in found)


def test_what_an_overtaken_owner_writes_does_not_count(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    first = OwnedJob(folder, "a", 1, "w1")
    first.write([result(0, 1), result(1, 1)])
    second = OwnedJob(folder, "a", 2, "w2")
    first.write([result(2, 1), result(3, 1)])  # it has not heard of it
    first.end(JobState.CANCELLED, 8.0, "too late")
    assert [second.ledger.done[n] for n in range(4)] == [1, 1, 0, 0]
    first.close()
    second.close()
    work(folder, 3)
    found = results_of(folder)
    assert [data for _, data in found[:3]] == [b"0 of 1", b"1 of 1", b"2 of 3"]


def test_a_job_that_another_owner_has_is_not_noted_as_ended(tmp_path):
    """It would be removed at once, for its end is at 0."""
    folder = folder_of(tmp_path)
    submit(folder)
    first, second = (OwnedJob(folder, "a", epoch, "w") for epoch in (1, 2))
    overtaken = JobsOwner.__new__(JobsOwner)
    overtaken._clock, overtaken._ended_at_s = ManualClock(50.0), {}
    for owned in (first, second):
        owned.end(JobState.DONE, 8.0, "")
        overtaken._note_end("a", owned)
        assert overtaken._ended_at_s == ({} if owned is first else {"a": 8.0})
        owned.close()


async def test_the_results_of_many_jobs_that_ended_are_kept_without_holding_up_requests(tmp_path):
    names = [f"a{number}" for number in range(20_000)]
    (tmp_path / "jobs").mkdir()

    async def held(*_):
        return True

    async def nothing(*_):
        pass

    owner = JobsOwner.__new__(JobsOwner)
    owner.__dict__ |= {
        "_folder": SimpleNamespace(ids=lambda: names, root=tmp_path / "jobs"), "_role": "jobs:f", "runs": {},
        "hours": SimpleNamespace(read=nothing), "_hold_lease": held, "_tell": nothing, "_show": lambda: None,
        "_clock": ManualClock(50.0), "_ended_at_s": dict.fromkeys(names, 40.0), "_waiting": {},
        "_local": SimpleNamespace(settings=SimpleNamespace(jobs_keep_s=100.0)),
    }  # fmt: skip
    began_s = time.thread_time()
    await owner._look()
    assert time.thread_time() - began_s < 0.5
    assert len(owner._ended_at_s) == 20_000


async def test_parcels_are_left_once_when_their_job_has_ended_on_disk(tmp_path):
    ends, left = iter([OSError(errno.ENOSPC, "full"), None]), list[str]()

    class Run:
        states = SimpleNamespace(parcels=["p"])
        owned = SimpleNamespace(ledger=SimpleNamespace(answered=1, failed=0))

        async def end(self, *_):
            if (error := next(ends)) is not None:
                raise error

    async def stop(name):
        pass

    owner = JobsOwner.__new__(JobsOwner)
    owner.__dict__ |= {
        "runs": {"a": Run()}, "zones": SimpleNamespace(leave=left.extend), "_note_end": lambda *_: None, "_stop": stop,
        "_clock": ManualClock(50.0),
    }  # fmt: skip
    with pytest.raises(OSError, match="full"):
        await owner._end("a", JobState.DONE, "")
    await owner._end("a", JobState.DONE, "")
    assert left == ["p"]


def test_a_reader_follows_owners(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    reader = JobReader(folder, "a")
    assert (reader.state, reader.ledger.left) == (JobState.WAITING, 10)
    first = OwnedJob(folder, "a", 1, "w1")
    first.write([result(0, 1)])
    reader.refresh()
    assert (reader.state, reader.ledger.answered) == (JobState.RUNNING, 1)
    second = OwnedJob(folder, "a", 2, "w2")
    first.write([result(1, 1)])
    second.write([result(1, 2), result(7, 2)])
    reader.refresh()
    assert (reader.ledger.answered, reader.ledger.failed) == (2, 1)
    assert reader.owner()[0] == "w2"
    second.say("w2", "it waits", 7.0)
    assert reader.owner() == ("w2", "it waits", 7.0)
    for why in ("\U0001f50b" * 600, "\udcff", "it waits"):
        second.say("w2", why, 7.0)
        assert reader.owner() == ("w2", "?" if why == "\udcff" else why, 7.0)
    first.close()
    second.close()


def test_results_are_written_once(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    owned = OwnedJob(folder, "a", 1, "w1")
    owned.write([result(0, 1)])
    owned.write([result(0, 1), result(1, 1)])
    assert owned.ledger.answered == 2
    assert owned.ledger.joules == pytest.approx(2.0)
    line = encode(results_entry([result(1, 1)], 0))  # a line that claims an item again
    with (folder.root / "a" / "journal.1").open("ab") as file:
        file.write(line + b"\n")
    reader = JobReader(folder, "a", kept=True)
    assert reader.ledger.answered == 2
    assert reader.ledger.damaged == 1
    owned.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", range(6))
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, code, at):
    folder = folder_of(tmp_path)
    submit(folder)
    owned = OwnedJob(folder, "a", 1, "w1")
    owned.write([result(0, 1)])
    disk = FailingDisk(monkeypatch, code)
    disk.fail(at)
    results = [result(1, 1), result(2, 1)]
    with contextlib.suppress(OSError):
        owned.write(results)
    disk.mend()
    owned.write([*results, result(7, 1)])
    owned.close()
    assert owned.ledger.answered == 3
    assert owned.ledger.failed == 1
    work(folder, 2)
    assert len(results_of(folder)) == 10


def test_an_upload_that_the_disk_refuses_leaves_nothing(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    submit(folder, Job("b", "digits", 1000.0))
    disk = FailingDisk(monkeypatch)
    upload = Upload(folder, JOB)
    upload.add(ITEMS)
    disk.fail()
    with pytest.raises(OSError, match="No space left"):
        upload.commit(5.0)
    disk.mend()
    upload.discard()
    assert folder.ids() == ["b"]


def test_submitted_twice_it_is_one_job(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    submit(folder)
    submit(folder, replace(JOB, complete_by_s=2000.0))  # "in 6 h" is another time by now
    assert folder.ids() == ["a"]
    assert folder.stored("a").job.complete_by_s == 1000.0
    with pytest.raises(InvalidInput, match=r"id = 'a': is another job's. Remedy: choose another"):
        submit(folder, items=ITEMS[:3])


def test_bounds(tmp_path):
    folder = folder_of(tmp_path)
    with pytest.raises(InvalidInput, match=r"items = 101: has too many. Remedy: at most 100: .* jobs_items_max"):
        Upload(folder, JOB).add([b""] * 101)
    with pytest.raises(InvalidInput, match=r"items = '10009 bytes': are too large. .* jobs_bytes_max"):
        Upload(folder, JOB).add([b"x" * 10_001])
    for name in ("x", "y", "z"):
        submit(folder, Job(name, "digits", 1000.0))
    submit(folder, Job("other", "digits", 1000.0, tenant="t"))
    with pytest.raises(InvalidInput, match=r"tenant = '': has 3 jobs that have not ended, at most 3.*jobs_tenant_max"):
        submit(folder)
    owned = OwnedJob(folder, "x", 1, "w")
    owned.end(JobState.CANCELLED, 6.0, "why not")
    owned.close()
    submit(folder)  # one of them has ended


def test_unknown_jobs_and_strange_names(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    for name in ("b", "", "../a", ".lock", "a/b", "a\0", "a" * 300):
        with pytest.raises(NotFound, match=r"id = .*: is not a job. Remedy: .*a"):
            folder.stored(name)
    folder.cancel("a", "first")
    folder.cancel("a", "second")
    assert folder.cancelled("a") == "first"
    folder.remove("a")
    assert folder.ids() == []
    assert folder_of(tmp_path).name() == folder.name()
    with pytest.raises(NotFound):
        folder.stored("a")


def test_a_damaged_index_costs_its_items_and_no_more(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    path = folder.root / "a" / "items.idx"
    whole = path.read_bytes()
    for place, begin in ((0, 2**63), (1, 2**64 - 1), (9, 2**40), (3, 0)):
        damaged = array("Q", whole)
        damaged[place] = begin
        path.write_bytes(damaged.tobytes())
        items = Items(folder.root / "a")
        assert items.read(0, 10) == [None] * 10
        items.close()
    for cut in (0, 5, len(whole) - 3):
        path.write_bytes(whole[:cut])
        items = Items(folder.root / "a")
        assert items.read(0, 10) == [None] * 10
        items.close()


def test_items_are_read_by_their_bytes(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder, items=[b"x" * 900] * 10)
    items = Items(folder.root / "a")
    assert [len(items.read(0, 10, bytes_max)) for bytes_max in (0, 1000, 2000, 10**6)] == [1, 1, 2, 10]
    items.close()


def test_files_of_other_names_are_no_journals(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    work(folder, 3)
    for name in ("journal.1.bak", "journal.", "journal.²", "journal.99999999999999999999", "journal.-1"):
        (folder.root / "a" / name).write_bytes(b"{}\n")
    assert highest_epoch(folder) == 3
    assert len(results_of(folder)) == 10


def test_a_disk_that_refuses_a_take_over_costs_no_descriptor(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    submit(folder)
    before = len(os.listdir("/proc/self/fd"))
    for at in range(4):
        disk = FailingDisk(monkeypatch)
        disk.fail(at)
        with pytest.raises(OSError, match="No space left"):
            OwnedJob(folder, "a", 1, "w1")
        disk.mend()
    assert len(os.listdir("/proc/self/fd")) == before
    folder.say("a", "w1", "the disk is full", 0.0)
    assert JobReader(folder, "a").owner()[1] == "the disk is full"


def test_a_job_without_its_items_can_be_ended_and_a_take_over_again_writes_nothing(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    (folder.root / "a" / "items.bin").unlink()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        owned = OwnedJob(folder, "a", 1, "w1")
        with pytest.raises(FileNotFoundError):
            owned.items.read(0, 1)
        owned.close()
    assert (folder.root / "a" / "journal.1").read_bytes().count(b"\n") == 1
    owned = OwnedJob(folder, "a", 1, "w1")
    owned.end(JobState.CANCELLED, 9.0, "it is not needed")
    owned.close()
    assert JobReader(folder, "a").state == JobState.CANCELLED
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_upload_that_gets_its_place_meanwhile_is_no_error_of_a_sweep(tmp_path, monkeypatch):
    folder, real, asked = folder_of(tmp_path), Path.stat, list[Path]()
    upload = Upload(folder, JOB)
    upload.add(ITEMS)

    def stat(path: Path, **more: Any) -> Any:
        found = real(path, **more)
        if path == upload.path:
            asked.append(path)
            if len(asked) == 1:
                upload.commit(5.0)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        sweep(folder.root, 1e12)
    assert folder.stored("a").items == 10


def test_a_message_of_items_is_read_item_by_item():
    for given in ([], [b""], [b"", b"x" * 200, b"\x0a" * 3], ITEMS):
        message = jobs_pb2.SubmitRequest(items=jobs_pb2.Items(requests=given)).SerializeToString()
        assert list(service.requests_of(message)) == given
        for wrong in (message[:-1], message + b"\x18\x03", b"\x12\x02\x12\x00", b"\x12\x02\x0a\x01", b"\x12"):
            with pytest.raises(InvalidInput, match="items: is not a message of items"):
                list(service.requests_of(wrong))


def test_a_message_of_very_many_items_is_read_no_further_than_a_job_may_have(tmp_path):
    message = jobs_pb2.SubmitRequest(items=jobs_pb2.Items(requests=[b""] * 100_000)).SerializeToString()
    upload, requests = Upload(folder_of(tmp_path), JOB), service.requests_of(message)
    with pytest.raises(InvalidInput, match="items = 101: has too many"):
        upload.add(requests)
    assert sum(1 for _ in requests) == 100_000 - 101
    upload.discard()


def test_no_message_of_a_submission_is_parsed_before_it_is_seen(monkeypatch):
    servers = list[Any]()
    service.add_jobs(
        SimpleNamespace(**dict.fromkeys(METHODS)), SimpleNamespace(add_generic_rpc_handlers=servers.extend)
    )
    details = [SimpleNamespace(method=f"/{service.NAME}/{name}") for name in METHODS]
    parsers = {name: servers[0].service(one).request_deserializer for name, one in zip(METHODS, details, strict=True)}
    assert [name for name, parser in parsers.items() if parser is None] == ["Submit"]
    monkeypatch.setattr(service.jobs_pb2, "SubmitRequest", None)
    with pytest.raises(InvalidInput, match="a message of 70000 bytes without items, at most 65536"):
        service._part(b"\x0a" + bytes(69_999))


def test_what_an_upload_writes_keeps_it(tmp_path):
    folder = folder_of(tmp_path)
    upload = Upload(folder, JOB)
    upload.add(ITEMS[:1])
    os.utime(upload.path, (1.0, 1.0))  # it began long ago
    sweep(folder.root, 1000.0)
    upload.add(ITEMS[1:])
    upload.commit(5.0)
    assert folder.stored("a").items == 10
    left = Upload(folder, JOB)
    for path in (left.path / "items.bin", left.path):
        os.utime(path, (1.0, 1.0))
    sweep(folder.root, 1000.0)
    with pytest.raises(FileNotFoundError):
        left.commit(5.0)
    assert not left.path.exists()


def test_a_sync_that_fails_after_the_job_is_in_place_refuses_nothing(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(folder.root):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    submit(folder)
    assert folder.ids() == ["a"]


def test_at_its_end_a_job_keeps_its_results_alone(tmp_path):
    folder = folder_of(tmp_path)
    submit(folder)
    overtaken = OwnedJob(folder, "a", 1, "w1")
    owner = OwnedJob(folder, "a", 2, "w2")
    overtaken.end(JobState.CANCELLED, 8.0, "too late")
    assert (folder.root / "a" / "items.idx").exists()
    owner.end(JobState.CANCELLED, 9.0, "x" * 10_000)
    assert len(owner.ledger.why) == 600
    assert not list((folder.root / "a").glob("items.*"))
    submit(folder)  # once more: it is the same job
    for owned in (overtaken, owner, OwnedJob(folder, "a", 3, "w3")):
        owned.close()
    for number in range(29):
        submit(folder, Job(f"{number}", "digits", 1000.0))
        (folder.root / f"{number}" / "items.idx").unlink()  # as at its end
    with pytest.raises(InvalidInput, match=r"tenant = '': has 30 jobs with results, at most 30. .* jobs_keep_s"):
        submit(folder, Job("more", "digits", 1000.0))


STRANGE = {
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a socket": lambda path: (path.unlink(), os.mknod(path, stat.S_IFSOCK | 0o600)),
    "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "a sparse file of 1 TiB": lambda path: os.truncate(path, 2**40),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "other types": lambda path: path.write_text('{"owner": 7, "why": [], "expected_at_s": "x", "job": {}}'),
    "far beyond": lambda path: path.write_text('{"owner": "w", "why": "", "expected_at_s": 1e300, "items": 1e300}'),
    "an end that is none": lambda path: path.write_bytes(
        encode({"accepts": {}}) + b"\n" + encode({"ended": "GONE", "at_s": 1e300, "why": ""}) + b"\n"
    ),
    "results that are nowhere": lambda path: path.write_bytes(
        encode({"accepts": {}}) + b"\n"
        + encode({"results": [[0, 1]], "sizes": [-1], "at": -7, "failed": 0, "joules": 0, "grams": 0}) + b"\n"
    ),
    "another's": lambda path: path.write_text(path.read_text().replace('"id": "a"', '"id": "b"')),
    "a deadline beyond all": lambda path: path.write_text(path.read_text().replace("1000.0", "1e300")),
}  # fmt: skip


@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("name", ["job.json", "owner.json", "journal.2", "answers.2", "items.bin", "items.idx"])
async def test_whatever_stands_at_a_files_name_nothing_hangs_and_the_job_is_left_out_or_shown(tmp_path, name, how):
    folder = folder_of(tmp_path)
    submit(folder)
    owned = OwnedJob(folder, "a", 2, "w2")
    owned.write([result(0, 2)])
    owned.close()
    try:
        STRANGE[how](folder.root / "a" / name)
    except UnicodeDecodeError:
        return  # a file that holds no text
    again = folder_of(tmp_path)

    def read() -> None:
        with contextlib.suppress(OSError, NotFound):
            reader = JobReader(again, "a", kept=True)
            assert reader.ledger.left <= len(ITEMS)
            assert reader.state in (JobState.WAITING, JobState.RUNNING)
            owner, _, expected_at_s = reader.owner()
            assert owner in ("w2", "w", "7", "")
            assert expected_at_s == 0.0
            reader.results(0, 10_000)
            next_ = OwnedJob(again, "a", 3, "w3")
            assert next_.items is not None
            next_.items.read(0, 10)
            next_.write([result(5, 3)])
            next_.close()

    await asyncio.wait_for(on_disk(read), 20.0)
