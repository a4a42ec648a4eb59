"""Jobs in trouble: damaged files, slow disks, silent clients, more jobs than run at once, workers without credits."""

import asyncio
import errno
import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from dispatcher.jobs import folder, job_run, owner, service
from dispatcher.jobs.core.job import Bounds
from dispatcher.jobs.core.places import Places
from dispatcher.jobs.folder import Items, JobReader, OwnedJob
from dispatcher.request import pace
from protos.dispatcher.v1 import jobs_pb2
from tests.integration.test_dispatcher_jobs import CANCELLED, DONE, items, refused
from tests.support.dispatching import DispatcherSystem, dispatcher_system, until
from tests.support.fake_triton import FakeTriton
from tests.support.job_serving import Jobs, item, jobs_of, messages
from trefoil.api import jobs as jobs_client
from trefoil.cli.main import app
from trefoil.core.errors import Unavailable
from trefoil.runtime.clock import WallClock

pytestmark = pytest.mark.integration


@pytest.fixture
async def system(state, tmp_path) -> AsyncIterator[DispatcherSystem]:
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), FakeTriton(version=4)) as made:
        yield made


@pytest.fixture
async def jobs(system, state) -> AsyncIterator[Jobs]:
    async with jobs_of(system.running, state) as made:
        yield made


async def test_many_jobs_take_turns(system, jobs, monkeypatch):
    monkeypatch.setattr(owner, "RUNS_MAX", 1)
    for slice_ in system.slices:
        slice_.gate.clear()
    for name in "abc":
        await jobs.submit(items(20), complete_in_s=ord(name), id=name)
    async with asyncio.timeout(30):
        while (await jobs.status("c")).why != "other jobs go first":
            await asyncio.sleep(0.02)
    assert list(jobs.owner.runs) == ["a"]
    assert (await jobs.status("c")).owner == jobs.owner.name
    await jobs.stub.Cancel(jobs_pb2.CancelRequest(id="c", why="x" * 10_000))
    last = await jobs.ended("c")
    assert (last.state, last.why) == (CANCELLED, "x" * 600)
    assert len(await jobs.results("c")) == 20
    await jobs.submit(items(20), id="first", priority=1)
    for slice_ in system.slices:
        slice_.gate.set()
    for name in ("first", "a", "b"):
        last = await jobs.ended(name)
        assert (last.state, last.answered) == (DONE, 20)


async def test_a_job_that_could_not_be_put_aside_goes_on(system, jobs, monkeypatch):
    monkeypatch.setattr(owner, "RUNS_MAX", 1)
    real, settle, settled = job_run.JobRun.start_batches, job_run.JobRun.settle, dict[str, bool]()

    def start_batches(run, busy):
        if run.job.id == "a":
            real(run, busy)

    async def settling(run):
        settled[run.job.id] = await settle(run)
        return settled[run.job.id]

    def write(_owned, _results):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(job_run.JobRun, "start_batches", start_batches)
    monkeypatch.setattr(job_run.JobRun, "settle", settling)
    with monkeypatch.context() as full:
        full.setattr(OwnedJob, "write", write)
        await jobs.submit(items(3000), id="a")
        await until(lambda: "a" in jobs.owner.runs and jobs.owner.runs["a"]._disk.why)
        await jobs.submit(items(1), id="first", priority=1)
        await until(lambda: "first" in jobs.owner.runs and settled == {"a": False})
        await jobs.stub.Cancel(jobs_pb2.CancelRequest(id="first"))
        assert (await jobs.ended("first")).state == CANCELLED
    assert (await jobs.ended("a")).answered == 3000


async def test_after_a_restart_jobs_that_ended_before_hold_up_no_open_one(system, jobs, monkeypatch):
    monkeypatch.setattr(owner, "RUNS_MAX", 1)
    for number in range(3):
        await jobs.submit(items(1), id=f"a{number}")
        await jobs.ended(f"a{number}")
    await jobs.disown()
    await jobs.submit(items(20), complete_in_s=900.0, id="open")
    real, begun = owner.JobsOwner._take_over, list[str]()

    async def take_over(owner_, name):
        begun.append(name)
        await real(owner_, name)

    monkeypatch.setattr(owner.JobsOwner, "_take_over", take_over)
    await jobs.own()
    assert (await jobs.ended("open")).answered == 20
    assert set(begun) == {"open"}
    assert jobs.owner._ended_at_s.keys() >= {"a0", "a1", "a2"}, "their results go in time"


async def test_what_one_job_breaks_on_ends_that_job_alone(system, jobs, monkeypatch):
    await jobs.disown()
    await jobs.submit(items(100), id="damaged")
    stood = await jobs.status("damaged")
    assert (stood.owner, stood.why) == ("", "no dispatcher has it now: one takes it within seconds")
    (jobs.folder.root / "damaged" / "items.idx").write_bytes(b"\xff" * 801)
    (jobs.folder.root / "damaged" / "journal.1.bak").write_bytes(b"")
    await jobs.own()
    last = await jobs.ended("damaged")
    assert (last.state, last.failed) == (DONE, 100)
    real = job_run.JobRun._split

    async def split(run, *arguments):
        if run.job.id == "bug":
            raise RuntimeError("a bug")
        await real(run, *arguments)

    monkeypatch.setattr(job_run.JobRun, "_split", split)
    with capture_logs() as logs:
        await jobs.submit(items(20), id="bug")
        await jobs.submit(items(20), id="b")
        last = await jobs.ended("bug")
    assert {one["job"] for one in logs if one["event"] == "job failed"} == {"bug"}
    assert last.state == CANCELLED
    assert last.why == "the dispatcher cannot run it, see its log: RuntimeError('a bug')"
    assert (await jobs.ended("b")).answered == 20


@pytest.mark.parametrize("part", ["make_room", "start_batches"])
async def test_a_turn_that_one_job_breaks_on_ends_that_job_alone(system, jobs, monkeypatch, part):
    real = getattr(job_run.JobRun, part)

    def turn(run, *arguments):
        if run.job.id == "bug":
            raise RuntimeError("a bug")
        real(run, *arguments)

    monkeypatch.setattr(job_run.JobRun, part, turn)
    with capture_logs() as logs:
        await jobs.submit(items(20), id="bug")
        await jobs.submit(items(20), id="b")
        last = await jobs.ended("bug")
    assert [one["job"] for one in logs if one["log_level"] == "error"] == ["bug"], "it is logged once"
    assert (last.state, last.why) == (CANCELLED, "the dispatcher cannot run it, see its log: RuntimeError('a bug')")
    assert (await jobs.ended("b")).answered == 20


async def test_files_that_cannot_be_used_when_a_job_begins_or_stops_hold_up_no_other(system, jobs, monkeypatch):
    for slice_ in system.slices:
        slice_.gate.clear()
    await jobs.submit(items(20), complete_in_s=100.0, id="a")
    await until(lambda: "a" in jobs.owner.runs and jobs.owner.runs["a"].busy)
    task, real = jobs.owner._tasks["a"], OwnedJob.close

    def close(owned):
        real(owned)
        if owned.path.name == "a":
            raise OSError(errno.ESTALE, "stale")

    async def settle(run):
        raise ValueError("a bug")

    monkeypatch.setattr(OwnedJob, "close", close)
    with monkeypatch.context() as broken:
        broken.setattr(job_run.JobRun, "settle", settle)
        await jobs.disown()
    assert (task.done(), jobs.owner.runs, jobs.owner.owns) == (True, {}, False)
    for slice_ in system.slices:
        slice_.gate.set()
    await jobs.own()
    assert (await jobs.ended("a")).answered == 20


async def test_a_job_that_cannot_begin_keeps_no_file_open(system, jobs, monkeypatch):
    real, closed = OwnedJob.close, []

    def size(files):
        raise OSError(errno.ESTALE, "stale")

    def close(owned):
        real(owned)
        closed.append(owned.path.name)

    monkeypatch.setattr(OwnedJob, "close", close)
    with monkeypatch.context() as broken:
        broken.setattr(Items, "size", property(size))
        await jobs.submit(items(20), id="a")
        await until(lambda: closed == ["a"])
    assert (await jobs.ended("a")).answered == 20


async def test_a_client_that_leaves_while_its_job_is_kept_leaves_it_whole(system, jobs, monkeypatch):
    real, began, goes_on = folder.replace_file, threading.Event(), threading.Event()

    def replace_file(path, *arguments):
        if path.name == "owner.json":
            began.set()
            goes_on.wait(20)
        real(path, *arguments)

    monkeypatch.setattr(folder, "replace_file", replace_file)
    call = jobs.stub.Submit(messages(items(20), id="a"))
    waiting = asyncio.ensure_future(call)
    await until(began.is_set)
    call.cancel()
    await asyncio.wait((waiting,))
    await asyncio.sleep(0.3)  # in which what had come was removed under the hands of who kept it
    goes_on.set()
    await until(lambda: jobs.folder.find("a"))
    assert (await jobs.ended("a")).answered == 20


async def test_a_job_whose_items_are_gone_says_so_and_can_be_cancelled(system, jobs):
    await jobs.disown()
    for name, missing in (("a", "items.bin"), ("b", "items.idx")):
        await jobs.submit(items(20), id=name)
        (jobs.folder.root / name / missing).unlink()
    await jobs.own()
    last = await jobs.ended("b")
    assert (last.state, last.why) == (CANCELLED, "its items are not on disk any more")
    async with asyncio.timeout(30):
        while "No such file" not in (await jobs.status("a")).why:
            await asyncio.sleep(0.02)
    await jobs.stub.Cancel(jobs_pb2.CancelRequest(id="a", why="it is not needed"))
    last = await jobs.ended("a")
    assert (last.state, last.why) == (CANCELLED, "it is not needed")


async def test_what_all_jobs_break_on_ends_neither_them_nor_the_service(system, jobs, monkeypatch):
    def stuck(*_):
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(owner, "stuck", stuck)
        await jobs.submit(items(20), id="a")
        async with asyncio.timeout(30):
            while (await jobs.status("a")).why != "ZeroDivisionError('a bug'), see the log":
                await asyncio.sleep(0.02)
    assert (await jobs.ended("a")).answered == 20


async def test_many_jobs_that_wait_hold_up_no_request(system, jobs, monkeypatch):
    monkeypatch.setattr(owner, "RUNS_MAX", 1)
    jobs.folder.bounds = Bounds(100, 10**6, 50)
    turns, seen, real = 0, list[int](), owner.stuck

    def stuck(*arguments):
        seen.append(turns)
        return real(*arguments)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for slice_ in system.slices:
        slice_.gate.clear()
    for number in range(20):
        await jobs.submit(items(1), id=f"a{number}")
    await until(lambda: len(jobs.owner._waiting) == 19)
    monkeypatch.setattr(owner, "stuck", stuck)
    counting = asyncio.create_task(count())
    await until(lambda: len(seen) >= 60)
    counting.cancel()
    assert max(Counter(seen).values()) <= job_run.AT_ONCE, "the event loop had no turn between jobs"
    for slice_ in system.slices:
        slice_.gate.set()


async def test_a_job_whose_folder_goes_ends_alone(system, jobs):
    for slice_ in system.slices:
        slice_.latency_s = 0.01
    await jobs.submit(items(3000), id="a")
    await jobs.submit(items(20), complete_in_s=900.0, id="b")
    await until(lambda: "a" in jobs.owner.runs and jobs.owner.runs["a"].busy)
    run = jobs.owner.runs["a"]
    await asyncio.to_thread(jobs.folder.remove, "a")
    run.blocked()
    await until(lambda: "a" not in jobs.owner.runs)
    assert (await jobs.ended("b")).state == DONE


async def test_the_event_loop_does_not_wait_for_the_disk_while_a_job_runs(system, jobs, monkeypatch):
    real, waits = os.stat, []

    def stat(path, *arguments, **options):
        if threading.current_thread() is threading.main_thread() and str(path).startswith(str(jobs.folder.root)):
            waits.append(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    await jobs.submit(items(200), id="a")
    assert (await jobs.ended("a")).answered == 200
    assert waits == []


@pytest.mark.parametrize(("ahead_s", "complete_in_s", "late"), [(3600.0, 3600.5, True), (-3600.0, -3000.0, False)])
async def test_once_the_clock_was_stepped_times_of_jobs_are_of_the_calendar(
    system, jobs, monkeypatch, ahead_s, complete_in_s, late
):
    monkeypatch.setattr(WallClock, "calendar_ahead_s", lambda _clock: ahead_s)
    for slice_ in system.slices:
        slice_.gate.clear()
    stood = await jobs.submit(items(20), complete_in_s=complete_in_s, id="a")
    calendar_s = WallClock().now_s() + ahead_s
    assert stood.submitted_at.ToMicroseconds() / 1e6 == pytest.approx(calendar_s, abs=60.0)
    async with asyncio.timeout(30):
        while (await jobs.status("a")).late is not late:
            await asyncio.sleep(0.02)
    for slice_ in system.slices:
        slice_.gate.set()
    last = await jobs.ended("a")
    assert (last.state, last.late) == (DONE, late)
    assert last.ended_at.ToMicroseconds() / 1e6 == pytest.approx(calendar_s, abs=60.0)
    system.local.settings.__dict__["jobs_keep_s"] = 100.0
    await asyncio.sleep(1.5)
    assert jobs.folder.ids() == ["a"]
    system.local.settings.__dict__["jobs_keep_s"] = 0.01
    await until(lambda: not jobs.folder.ids())


@pytest.mark.parametrize("stop", ["cancel", "disown"])
async def test_a_slow_disk_costs_no_answer_of_a_job_that_stops(system, jobs, monkeypatch, stop):
    real, allowed = os.fsync, threading.Event()

    def fsync(descriptor: int) -> None:
        if "answers." in os.readlink(f"/proc/self/fd/{descriptor}"):
            allowed.wait(20)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(owner, "SETTLE_S", 5.0)
    await jobs.submit(items(3000), id="a")
    await until(lambda: "a" in jobs.owner.runs and len(jobs.owner.runs["a"]._results) >= 500)
    run = jobs.owner.runs["a"]
    if stop == "cancel":
        await jobs.stub.Cancel(jobs_pb2.CancelRequest(id="a"))
        stopped = asyncio.create_task(jobs.ended("a"))
    else:
        stopped = asyncio.create_task(jobs.disown())
    await until(lambda: run.closing and not run.busy)
    answered = len(run._results)
    allowed.set()
    await stopped
    assert JobReader(jobs.folder, "a").ledger.answered == answered >= 500


async def test_memory_is_bounded_by_bytes(system, jobs, monkeypatch):
    monkeypatch.setattr(job_run, "HELD_BYTES", 5000)
    monkeypatch.setattr(job_run, "CHUNK", 4)
    for slice_ in system.slices:
        slice_.gate.clear()
    await jobs.submit(items(200), id="a")
    await until(lambda: "a" in jobs.owner.runs and jobs.owner.runs["a"]._held_bytes >= 5000)
    run = jobs.owner.runs["a"]
    assert run._held_bytes <= 5000 + 4 * len(item(1))
    for slice_ in system.slices:
        slice_.gate.set()
    assert (await jobs.ended("a")).answered == 200
    assert run._held_bytes == run._unwritten_bytes == 0


async def test_submitted_again_with_a_deadline_from_now_it_is_the_same_job(system, jobs):
    for slice_ in system.slices:
        slice_.gate.clear()
    jobs.folder.bounds = Bounds(100, 10**6, 1)
    await jobs.submit(items(10), complete_in_s=100.0, id="a")
    by = (await jobs.status("a")).job.complete_by
    assert (await jobs.submit(items(10), complete_in_s=200.0, id="a")).job.complete_by == by
    assert (await jobs.submit(items(10), complete_in_s=-5.0, id="a")).job.complete_by == by
    assert "has 1 jobs that have not ended" in await refused(jobs.stub.Submit(messages(items(10), id="b")))


async def test_silent_clients_leave_their_places(system, jobs, monkeypatch):
    await jobs.submit(items(3), id="read")
    for module in (service, pace):
        monkeypatch.setattr(module, "SILENT_S", 0.2)

    async def silent():
        for message in list(messages(items(3), id="a"))[:-1]:
            yield message
        await asyncio.sleep(60)

    async def read() -> str:
        """Why no result can be read; empty: one can."""
        try:
            await jobs.stub.GetResults(jobs_pb2.GetResultsRequest(id="read")).read()
        except grpc.aio.AioRpcError as error:
            return str(error.details())
        return ""

    says = "UNAVAILABLE its parts did not come at 4096 bytes/s, nothing was kept. Remedy: submit it again, faster"
    assert says in await refused(jobs.stub.Submit(silent()))
    assert not list(jobs.folder.root.glob(".new-*"))
    message = jobs_pb2.GetResultsResponse(results=[jobs_pb2.ItemResult(response=bytes(2**20))])
    monkeypatch.setattr(service.JobsAdmin, "_results", lambda *_: (message, 0))
    jobs.admin._readers = Places(1, "clients read results")
    stream = jobs.stub.GetResults(jobs_pb2.GetResultsRequest(id="read"))
    await stream.read()
    async with asyncio.timeout(30):
        while why := await read():
            assert why == "1 clients read results here. Remedy: try again"
            await asyncio.sleep(0.02)

    async def rest() -> None:
        while await stream.read() is not grpc.aio.EOF:
            pass

    assert "UNAVAILABLE nothing was read for 0.2 s. Remedy: ask again" in await refused(rest())


async def test_a_watched_job_is_told_of_again_and_a_silent_dispatcher_is_given_up(system, jobs, monkeypatch):
    monkeypatch.setattr(service, "SAID_S", 0.0)
    monkeypatch.setattr(service, "WATCH_S", 0.01)
    for slice_ in system.slices:
        slice_.gate.clear()
    await jobs.submit(items(3), id="a")
    await until(lambda: "a" in jobs.owner.runs)
    stream = jobs.stub.Watch(jobs_pb2.WatchRequest(id="a"))
    seen = [(await stream.read()).status for _ in range(20)]
    assert any(one == next_ for one, next_ in pairwise(seen))
    stream.cancel()
    jobs.admin._watchers = Places(1, "clients watch jobs")
    stream, other = (jobs.stub.Watch(jobs_pb2.WatchRequest(id="a")) for _ in range(2))
    await stream.read()
    assert "UNAVAILABLE 1 clients watch jobs here. Remedy: try again" in await refused(other.read())
    stream.cancel()
    jobs.admin._watchers = Places(9, "clients watch jobs")
    monkeypatch.setattr(service, "SAID_S", 60.0)
    monkeypatch.setattr(jobs_client, "SILENT_S", 0.3)
    client = jobs_client.Jobs.connect(jobs.address)
    with pytest.raises(Unavailable, match=r"sent nothing for 0.3 s. Remedy: watch it again"):
        await asyncio.to_thread(list, client.watch("a"))
    client.close()
    for slice_ in system.slices:
        slice_.gate.set()


async def test_jobs_go_to_a_worker_that_has_credits(system, jobs, monkeypatch):
    monkeypatch.setattr(owner, "OWNED_S", 0.0)
    for slice_ in system.slices:
        slice_.gate.clear()
    await jobs.submit(items(20), id="a")
    await until(lambda: "a" in jobs.owner.runs)
    routing = system.local.routing
    table = routing.table
    none = {family: replace(route, targets=()) for family, route in table.routes.items()}
    job = jobs.folder.stored("a").job
    assert not jobs.owner.idle.elsewhere(job)
    routing.table = replace(table, routes=none)
    assert jobs.owner.idle.elsewhere(job)
    assert not jobs.owner.idle.elsewhere(replace(job, zones=("nowhere",)))
    routing.table = table
    monkeypatch.setattr(jobs.owner.idle, "elsewhere", lambda _: True)
    await until(lambda: not jobs.owner.owns)
    assert (await jobs.status("a")).owner == ""
    for slice_ in system.slices:
        slice_.gate.set()
    monkeypatch.undo()
    assert (await jobs.ended("a")).answered == 20


REFUSED = {
    "--complete-by 0s": "complete_by = .*: passed 0 s ago. Remedy: give a time ahead",
    "--complete-by 2020-02-29T01:00+05:30": "complete_by = 1582918200.0: passed [0-9]+ s ago",
    "--complete-by 2020-02-29T01:00": "complete_by = 1582938000.0: passed [0-9]+ s ago",
    "--complete-by nan": "--complete-by = 'nan': not a time. Remedy: write 2026-11-20T12:00Z",
    "--complete-by 6H": "--complete-by = '6H': not a time",
    "--complete-by 3660d": "complete_by = .*: is too far ahead. Remedy: at most 366 days ahead",
    "--complete-by 9999-12-31T23:59Z": "complete_by = .*: is too far ahead",
    "--complete-by 999999999999d": "--complete-by = .*: not a time. Remedy: write 20",
    "--complete-by 1h --grams-max nan": "grams_max = nan: is not a number. Remedy: send a finite one",
    "--complete-by 1h --grams-max 1e300": "grams_max = 1e.300: must be 0 or between 1e-12 and 1e.15",
    "--complete-by 1h --grams-max -1": "grams_max = -1.0: is negative",
    "--complete-by 1h --min-accuracy 90": "min_accuracy = 90.0: is not an accuracy. Remedy: send 0..1",
    "--complete-by 1h --min-accuracy nan": "min_accuracy = nan: is not a number",
    "--complete-by 1h --priority 4294967296": "priority = 4294967296: cannot be. Remedy: 0 to 4294967295",
    "--complete-by 1h --id ../a": "id = '../a': is not a name of a job. Remedy: at most 63 letters",
    "--complete-by 1h --tenant ghost": "tenant = 'ghost': no tenants file names tenants. Remedy: leave it out",
    "--complete-by 1h --zone MOON": "zones = 'MOON': is the zone of no node here and of no peer. Remedy: ",
}


async def test_what_a_submission_cannot_ask_for_is_one_line_and_keeps_nothing(system, jobs, tmp_path):
    np.savez(tmp_path / "items.npz", IMAGE=np.zeros((3, 8, 8), np.uint8))
    for options, says in REFUSED.items():
        typed = ["jobs", "submit", "digits", str(tmp_path / "items.npz"), *options.split()]
        done = await asyncio.to_thread(CliRunner().invoke, app, [*typed, "--dispatcher", jobs.address])
        assert done.exit_code == 2, (options, done.output, done.exception)
        (line,) = (line for line in done.output.splitlines() if line.startswith("trefoil: "))
        assert re.search(says, line), (options, line)
    assert not list(jobs.folder.root.glob(".new-*"))
    assert jobs.folder.ids() == []


async def test_a_tenant_that_is_renamed_leaves_its_job_to_its_old_name(state, tmp_path):
    def tenants(name: str) -> str:
        rows = ((name, "jobs", "of-blue"), ("boss", "admin", "of-boss"))
        return "".join(
            f'[[tenant]]\nname = "{name}"\nroles = ["{role}"]\n'
            f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
            for name, role, token in rows
        )

    file = tmp_path / "tenants.toml"
    file.write_text(tenants("blue"))
    async with (
        dispatcher_system(state, tmp_path, FakeTriton(version=1), tenants_file=file) as system,
        jobs_of(system.running, state, guarded=True) as jobs,
    ):
        windows = system.running.loop.subscribe()
        blue, boss = ((("authorization", f"Bearer {token}"),) for token in ("of-blue", "of-boss"))
        system.slice.gate.clear()
        await jobs.stub.Submit(messages(items(20), id="a"), metadata=blue)
        await until(lambda: "a" in jobs.owner.runs)
        file.write_text(tenants("green"))
        system.running.fronts.access.refresh()
        system.slice.gate.set()
        says = "NOT_FOUND id = 'a': is not a job of tenant green. Remedy: name one of its own"
        assert says in await refused(jobs.stub.Get(jobs_pb2.GetRequest(id="a"), metadata=blue))
        watched = jobs.stub.Watch(jobs_pb2.WatchRequest(id="a"), metadata=boss)
        last = [told.status async for told in watched][-1]
        assert (last.job.tenant, last.answered, last.failed) == ("blue", 20, 0)
        booked = Counter[str]()
        async with asyncio.timeout(30):
            while booked.total() < 20:
                for cell in (await windows.get()).cells:
                    booked[cell.key.tenant] += cell.items
        assert +booked == {"blue": 20}


async def test_an_overdue_job_leaves_the_only_slice_to_another_tenant_half_of_the_time(state, tmp_path):
    tenants = tmp_path / "tenants.toml"
    row = '[[tenant]]\nname = "{}"\ntoken_sha256 = "{}"\n'
    tenants.write_text("".join(row.format(name, digit * 64) for name, digit in (("red", "0"), ("blue", "1"))))
    async with (
        dispatcher_system(state, tmp_path, FakeTriton(version=1), tenants_file=tenants) as system,
        jobs_of(system.running, state) as jobs,
    ):
        system.slices[0].latency_s = 0.02
        whole = [item(number % 10, rows=8) for number in range(600)]  # each a batch by itself
        await jobs.submit(whole, complete_in_s=1.0, id="overdue", tenant="red")
        await jobs.submit(whole, complete_in_s=600.0, id="in-time", tenant="blue")
        await until(lambda: len(jobs.owner.runs) == 2)
        async with asyncio.timeout(60):
            while not (await jobs.status("overdue")).late:
                await asyncio.sleep(0.05)
        before = [(await jobs.status(name)).answered for name in ("overdue", "in-time")]
        answered = [0, 0]
        async with asyncio.timeout(60):
            while sum(answered) < 60:
                await asyncio.sleep(0.1)
                after = [(await jobs.status(name)).answered for name in ("overdue", "in-time")]
                answered = [now - then for now, then in zip(after, before, strict=True)]
        assert min(answered) >= 0.35 * sum(answered), answered
