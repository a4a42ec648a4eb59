"""Jobs through a real dispatcher and a real Redis, before slices that do as they are told."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2 as pb
from typer.testing import CliRunner

from dispatcher.jobs import job_run
from dispatcher.jobs.core import planned_hours
from dispatcher.jobs.core.job import JobState
from dispatcher.request.admission import Caller
from dispatcher.request.idle import NotIdle
from protos.dispatcher.v1 import jobs_pb2
from tests.support.dispatching import VARIANTS, DispatcherSystem, Plane, dispatcher_system, image, request, until
from tests.support.fake_triton import BACKEND, FakeTriton
from tests.support.job_serving import Jobs, digit, item, jobs_of, messages
from tests.support.workers import Dispatcher
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.api.jobs import Jobs as JobsClient
from trefoil.cli.main import app
from trefoil.core.common import Basis, Revision
from trefoil.core.demand import JOB_CLASS
from trefoil.core.energy import ReceiptRate
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.fleet import Hosted
from trefoil.core.jobs.planned import OpenJobs, PlannedHour, PlannedJob, PlannedJobs
from trefoil.runtime.clock import WallClock

pytestmark = pytest.mark.integration
LOGGED = re.compile(r"\d{4}-\d\d-\d\d ")
DONE, CANCELLED = jobs_pb2.JOB_STATE_DONE, jobs_pb2.JOB_STATE_CANCELLED


@pytest.fixture
async def system(state, tmp_path) -> AsyncIterator[DispatcherSystem]:
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), FakeTriton(version=4)) as made:
        yield made


@pytest.fixture
async def jobs(system, state) -> AsyncIterator[Jobs]:
    async with jobs_of(system.running, state) as made:
        yield made


def items(count: int) -> list[bytes]:
    return [item(n % 10) for n in range(count)]


def executed(system: DispatcherSystem) -> Counter:
    """How often each item was executed, by its second pixel row of the test that numbers them so."""
    return Counter(rows for slice_ in system.slices for rows in (r.inputs[0].shape[0] for r in slice_.requests))


async def refused(call) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return f"{caught.value.code().name} {caught.value.details()}"


async def test_each_item_has_its_answer_in_order(system, jobs):
    accepted = await jobs.submit(items(400), id="a")
    assert accepted.state == jobs_pb2.JOB_STATE_WAITING
    assert accepted.items == 400
    last = await jobs.ended("a")
    assert (last.state, last.answered, last.failed, last.late) == (DONE, 400, 0, False)
    results = await jobs.results("a")
    assert [result.item for result in results] == list(range(400))
    assert [digit(result) for result in results] == [n % 10 for n in range(400)]
    answer = pb.ModelInferResponse.FromString(results[7].response)
    assert answer.parameters["trefoil_variant"].string_param in ("digits-xs", "digits-l")
    assert answer.model_version == "1"
    assert list(answer.outputs[0].shape) == [1, 10]
    assert max(executed(system)) == 8, "items are batched up to what the family takes"
    assert [result.item for result in await jobs.results("a", first=390)] == list(range(390, 400))


async def test_items_are_no_demand_and_have_no_latency(system, jobs):
    windows = system.running.loop.subscribe()
    await jobs.submit(items(100), id="a")
    await jobs.ended("a")
    cells = []
    while sum(cell.items for cell in cells) < 100:
        cells += (await asyncio.wait_for(windows.get(), 30)).cells
    assert {cell.key.slo_class for cell in cells if cell.answered} == {JOB_CLASS}
    assert sum(cell.arrived for cell in cells) == 0
    assert all(cell.latency.total == 0 and cell.queue.total == 0 for cell in cells)
    assert sum(cell.service.total for cell in cells) == sum(cell.answered for cell in cells) > 0


async def priced(system: DispatcherSystem) -> None:
    """Rows take 2 J on each slice."""
    await system.carbon(300.0)
    await system.rates(
        *(
            ReceiptRate(key(n), "digits", variant, 0.0, 2.0, 0.0, Basis.MEASURED)
            for n, variant in enumerate(("digits-xs", "digits-l"))
        )
    )


async def test_receipts_are_shared_and_grams_are_a_bound(system, jobs):
    await priced(system)
    await jobs.submit(items(40), id="a")
    last = await jobs.ended("a")
    grams = 40 * 2.0 / 3.6e6 * 300.0 * 1.2
    assert last.joules == pytest.approx(80.0)
    assert last.grams == pytest.approx(grams)
    receipt = pb.ModelInferResponse.FromString((await jobs.results("a"))[3].response).parameters
    assert receipt["trefoil_energy_j_estimate"].double_param == pytest.approx(2.0)
    await jobs.submit(items(40), id="b", grams_max=grams * 0.26)
    last = await jobs.ended("b")
    assert (last.state, last.answered) == (CANCELLED, 10)
    assert last.grams <= grams * 0.26
    assert last.why == f"grams_max = {grams * 0.26:g}: spent, 30 of 40 items were not run"
    results = await jobs.results("b")
    assert len(results) == 40
    assert sum(result.code == "CANCELLED" for result in results) == 30


async def test_items_of_several_rows_keep_a_bound_of_grams(system, jobs):
    await priced(system)
    row_g = 2.0 / 3.6e6 * 300.0 * 1.2
    await jobs.submit([item(1, rows=8) for _ in range(5)], id="a", grams_max=20 * row_g)
    last = await jobs.ended("a")
    assert (last.state, last.answered) == (CANCELLED, 2)
    assert last.grams == pytest.approx(16 * row_g)
    await jobs.submit([item(1, rows=8)], id="b", grams_max=1.5 * row_g)
    last = await jobs.ended("b")
    assert (last.state, last.answered, last.grams) == (CANCELLED, 0, 0.0)


async def test_without_receipts_a_bound_of_grams_waits(system, jobs):
    await jobs.submit(items(10), id="a", grams_max=1.0)
    async with asyncio.timeout(30):
        while "grams_max is set" not in (await jobs.status("a")).why:
            await asyncio.sleep(0.02)
    assert (await jobs.status("a")).answered == 0


async def test_wrong_items_have_their_own_errors(system, jobs):
    given = items(60)
    given[5], given[17] = item(1, rows=9), b"\xff"
    given[30] = item(3, model_name="letters")
    await jobs.submit(given, id="a")
    last = await jobs.ended("a")
    assert (last.state, last.answered, last.failed) == (DONE, 57, 3)
    results = await jobs.results("a")
    assert {r.item: (r.code, r.error.split(":")[0]) for r in results if r.code} == {
        5: ("INVALID_ARGUMENT", "inputs.shape = 9"),
        17: ("INVALID_ARGUMENT", "item = '1 bytes'"),
        30: ("INVALID_ARGUMENT", "model_name = 'letters'"),
    }
    assert all("Remedy: " in r.error for r in results if r.code)
    assert [digit(r) for r in results if not r.code] == [n % 10 for n in range(60) if n not in (5, 17, 30)]


async def test_one_item_that_a_model_refuses_fails_alone(system, jobs):
    for slice_ in system.slices:
        slice_.error = (grpc.StatusCode.INVALID_ARGUMENT, "a nine")
        slice_.refuses = lambda r: 9 in np.frombuffer(r.raw_input_contents[0], np.uint8).reshape(-1, 64)[:, 0]
    await jobs.submit(items(40), id="a")
    last = await jobs.ended("a")
    assert (last.answered, last.failed) == (36, 4)
    assert last.first_error in [f"item {n}: INVALID_ARGUMENT: a nine" for n in (9, 19, 29, 39)]
    assert "INVALID_ARGUMENT: a nine" in " ".join((await trefoil(jobs, "list")).replace("│", " ").split())
    results = await jobs.results("a")
    assert [(r.item, r.code, r.error) for r in results if r.code] == [
        (n, "INVALID_ARGUMENT", "a nine") for n in (9, 19, 29, 39)
    ]


async def test_an_item_that_always_fails_ends_with_its_error(system, jobs, monkeypatch):
    monkeypatch.setattr(job_run, "RETRY_S", 0.01)
    for slice_ in system.slices:
        slice_.error, slice_.refuses = BACKEND, lambda r: r.raw_input_contents[0][0] == 9 and r.inputs[0].shape[0] == 1
    await jobs.submit([item(1), item(9), item(2)], id="a")
    last = await jobs.ended("a")
    assert (last.answered, last.failed) == (2, 1) or last.answered == 3  # in a batch of several it is not refused
    for result in await jobs.results("a"):
        assert not result.code or (result.item, result.code) == (1, "INTERNAL")


async def test_cancelled_it_keeps_what_was_answered(system, jobs):
    for slice_ in system.slices:
        slice_.latency_s = 0.02
    await jobs.submit(items(5000), id="a")
    async with asyncio.timeout(30):
        while not (await jobs.status("a")).answered:
            await asyncio.sleep(0.02)
    await jobs.stub.Cancel(jobs_pb2.CancelRequest(id="a", why="no longer needed"))
    last = await jobs.ended("a")
    assert last.state == CANCELLED
    assert 0 < last.answered < 5000
    assert last.why == "no longer needed"
    results = await jobs.results("a")
    assert [r.item for r in results] == list(range(5000))
    assert sum(not r.code for r in results) == last.answered
    assert await asyncio.gather(jobs.results("a"), jobs.results("a")) == [results, results], "asked for twice at once"
    assert await jobs.results("a", 5000) == []
    says = "INVALID_ARGUMENT first = 5001: the job has 5000 items. Remedy: 0 to 5000, or leave it out"
    assert says in await refused(jobs.stub.GetResults(jobs_pb2.GetResultsRequest(id="a", first=5001)).read())
    assert {r.error for r in results if r.code} == {"its job ended before it was run: no longer needed"}
    again = (await jobs.stub.Cancel(jobs_pb2.CancelRequest(id="a"))).status
    assert again.why == "no longer needed"


@pytest.mark.gate
async def test_another_worker_takes_over_what_a_dead_one_had(system, jobs, state):
    for slice_ in system.slices:
        slice_.latency_s = 0.01
    await jobs.submit(items(1200), id="a")
    async with asyncio.timeout(30):
        while (await jobs.status("a")).answered < 100:
            await asyncio.sleep(0.02)
    await jobs.kill()
    await state.release(jobs.owner._lease)  # else the next one waits until it has run out
    async with jobs_of(system.running, state) as other:
        last = await other.ended("a")
        assert (last.state, last.answered, last.failed) == (DONE, 1200, 0)
        results = await jobs.results("a")
    assert [r.item for r in results] == list(range(1200))
    assert [digit(r) for r in results] == [n % 10 for n in range(1200)]
    assert len(list((jobs.folder.root / "a").glob("journal.*"))) == 2


async def test_an_emptied_redis_costs_no_item(system, jobs, state):
    for slice_ in system.slices:
        slice_.latency_s = 0.01
    await jobs.submit(items(600), id="a")
    async with asyncio.timeout(30):
        while (await jobs.status("a")).answered < 50:
            await asyncio.sleep(0.02)
    epoch = jobs.owner._lease.epoch
    await state._client.delete(state.keys.lease(jobs.owner._role), state.keys.epoch(jobs.owner._role))
    last = await jobs.ended("a")
    assert (last.state, last.answered, last.failed) == (DONE, 600, 0)
    assert [digit(r) for r in await jobs.results("a")] == [n % 10 for n in range(600)]
    await until(lambda: jobs.owner._lease is not None and jobs.owner._lease.epoch > epoch)


async def test_a_full_disk_pauses_a_job_and_says_so(system, jobs, monkeypatch):
    full = {"yes": True}
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if full["yes"] and "answers." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(job_run, "DISK_RETRY_S", 0.05)
    await jobs.submit(items(300), id="a")
    async with asyncio.timeout(30):
        while "No space left" not in (await jobs.status("a")).why:
            await asyncio.sleep(0.02)
    assert (await jobs.status("a")).answered == 0
    full["yes"] = False
    last = await jobs.ended("a")
    assert (last.state, last.answered) == (DONE, 300)
    assert [digit(r) for r in await jobs.results("a")] == [n % 10 for n in range(300)]


async def test_a_lost_slice_costs_no_item(system, jobs):
    for slice_ in system.slices:
        slice_.latency_s = 0.01
    await jobs.submit(items(800), id="a")
    async with asyncio.timeout(30):
        while (await jobs.status("a")).answered < 50:
            await asyncio.sleep(0.02)
    await system.slices[0].stop()
    last = await jobs.ended("a")
    assert (last.state, last.answered, last.failed) == (DONE, 800, 0)


async def test_requests_come_first(system, jobs):
    """While requests wait or fill the slices, no batch is begun."""
    system.slices[0].gate.clear()
    system.slices[1].gate.clear()
    asked = [asyncio.create_task(system.infer(first=n)) for n in range(6)]  # two credits on each slice: two wait
    await until(lambda: system.queue.waiting == 2)
    await jobs.submit(items(2), id="a")
    await until(lambda: "a" in jobs.owner.runs and jobs.owner.runs["a"]._ready)
    await asyncio.sleep(0.2)  # of many looks at idle slices
    assert not jobs.owner.runs["a"].busy
    system.slices[0].gate.set()
    system.slices[1].gate.set()
    await asyncio.gather(*asked)
    assert (await jobs.status("a")).answered == 0


async def test_an_item_takes_no_slice_that_requests_of_another_family_have_or_wait_for(system):
    """Two families on one slice: whatever was idle when the item was chosen counts again when it is sent."""
    both = (Hosted("digits", "digits-xs", 1, 0, 1, 1, 8), Hosted("letters", "digits-xs", 1, 0, 1, 1, 8))
    known, at_first = node(system.statuses(hosted=both)), system.targets(credits=1)[:1]
    await system.publish(known, [route(at_first), dataclasses.replace(route(at_first), family="letters")])
    inference = system.running.fronts.inference
    system.slice.gate.clear()

    async def asked() -> Any:
        async with asyncio.timeout(10):
            return await inference.answer(request(3).SerializeToString(), Caller(idle_slice=key(0)))

    letters = [asyncio.create_task(system.client.infer("letters", [image(n)])) for n in (1, 2)]
    queue = system.local.routing.queues["letters"]
    await until(lambda: (queue.in_flight_on(key(0)), queue.waiting) == (1, 1))
    with pytest.raises(NotIdle):
        await asked()
    letters[1].cancel()
    await until(lambda: (queue.in_flight_on(key(0)), queue.waiting) == (1, 0))
    with pytest.raises(NotIdle):
        await asked()
    system.slice.gate.set()
    await letters[0]
    assert (await asked()).variant == "digits-xs"


async def test_the_deadline_passes_and_the_job_goes_on(system, jobs):
    for slice_ in system.slices:
        slice_.gate.clear()
    await jobs.submit(items(20), complete_in_s=0.3, id="a")
    async with asyncio.timeout(30):
        while not (await jobs.status("a")).late:
            await asyncio.sleep(0.02)
    for slice_ in system.slices:
        slice_.gate.set()
    last = await jobs.ended("a")
    assert (last.state, last.answered, last.late) == (DONE, 20, True)


async def test_refused_at_once(system, jobs):
    submit = jobs.stub.Submit
    assert "INVALID_ARGUMENT complete_by = " in await refused(submit(messages(items(1), -5.0)))
    assert "NOT_FOUND family = 'digit': is not served" in await refused(submit(messages(items(1), family="digit")))
    assert "items = 0: has no items" in await refused(submit(messages([])))
    assert "NOT_FOUND zones = 'FR'" in await refused(submit(messages(items(1), zones=["FR"])))
    assert "NOT_FOUND tenant = 'blue'" in await refused(submit(messages(items(1), tenant="blue")))
    assert "NOT_FOUND id = 'b': is not a job" in await refused(jobs.stub.Get(jobs_pb2.GetRequest(id="b")))
    assert "job: comes first" in await refused(submit(iter([])))
    sent = list(messages(items(3)))
    assert "total = 0: 3 items came" in await refused(submit(iter(sent[:-1])))
    assert "total = 3: 6 items came" in await refused(submit(iter([*sent[:-1], *sent[1:]])))
    assert "job: comes once" in await refused(submit(iter([*sent[:1], *sent])))
    assert jobs.folder.ids() == []
    assert not list(jobs.folder.root.glob(".new-*"))


async def test_an_upload_that_breaks_off_leaves_nothing(system, jobs):
    async def broken():
        for message in list(messages(items(3), id="a"))[:-1]:
            yield message
        await asyncio.sleep(60)

    call = jobs.stub.Submit(broken())
    await until(lambda: list(jobs.folder.root.glob(".new-*/items.bin")))
    call.cancel()
    await until(lambda: not list(jobs.folder.root.glob(".new-*")))
    assert jobs.folder.ids() == []


async def test_submitted_again_it_is_answered_with_how_it_stands(system, jobs):
    sent = list(messages(items(30), id="a"))
    await jobs.stub.Submit(iter(sent))
    await jobs.ended("a")
    again = (await jobs.stub.Submit(iter(sent))).status
    assert (again.state, again.answered) == (DONE, 30)
    assert "id = 'a': is another job's" in await refused(jobs.stub.Submit(messages(items(31), id="a")))
    listed = (await jobs.stub.List(jobs_pb2.ListRequest())).jobs
    assert [one.job.id for one in listed] == ["a"]


async def test_results_go_after_their_time(system, jobs, monkeypatch):
    await jobs.submit(items(10), id="a")
    await jobs.ended("a")
    system.local.settings.__dict__["jobs_keep_s"] = 0.01
    await until(lambda: not jobs.folder.ids())
    assert not (jobs.folder.root / "a").exists()


async def test_a_job_that_cannot_be_read_holds_up_no_other(system, jobs):
    await jobs.submit(items(10), id="a")
    await jobs.ended("a")
    broken = jobs.folder.root / "broken"
    shutil.copytree(jobs.folder.root / "a", broken)
    (broken / "job.json").write_text("{")
    await jobs.submit(items(10), id="c")
    assert (await jobs.ended("c")).state == DONE
    assert (broken / "job.json.bad").exists()


async def test_the_highest_priority_goes_first(system, jobs):
    for slice_ in system.slices:
        slice_.gate.clear()
    await jobs.submit(items(200), complete_in_s=100.0, id="soon")
    await until(lambda: "soon" in jobs.owner.runs and len(jobs.owner.runs["soon"].busy) == 2)
    await jobs.submit(items(200), complete_in_s=900.0, id="first", priority=5)
    await until(lambda: "first" in jobs.owner.runs and jobs.owner.runs["first"]._ready)
    for slice_ in system.slices:
        slice_.gate.set()
        slice_.latency_s = 0.005
    first, soon = await asyncio.gather(jobs.ended("first"), jobs.ended("soon"))
    assert first.ended_at.ToMicroseconds() < soon.ended_at.ToMicroseconds()
    assert JobState(first.state) == JobState.DONE


async def trefoil(jobs: Jobs, *words: str, code: int = 0) -> str:
    """Output of a command of `trefoil jobs`."""
    typed = ["jobs", *words, "--dispatcher", jobs.address]
    done = await asyncio.to_thread(CliRunner().invoke, app, typed)
    assert done.exit_code == code, (done.output, done.exception)
    own = (line for line in done.output.splitlines() if not LOGGED.match(line))  # not the dispatcher's, in this process
    return "\n".join(own)


async def test_by_commands(system, jobs, tmp_path):
    images = np.zeros((30, 8, 8), np.uint8)
    images[:, 0, 0] = np.arange(30) % 10
    file = tmp_path / "items.npz"
    np.savez(file, IMAGE=images)
    told = await trefoil(jobs, "submit", "digits", str(file), "--complete-by", "6h", "--id", "a", "--watch", "--json")
    assert {key: json.loads(told)[key] for key in ("id", "state", "answered", "failed")} == {
        "id": "a", "state": "done", "answered": 30, "failed": 0,
    }  # fmt: skip
    lines = [json.loads(line) for line in (await trefoil(jobs, "results", "a")).splitlines()]
    assert [np.argmax(line["outputs"]["PROBABILITIES"]) for line in lines] == [n % 10 for n in range(30)]
    await trefoil(jobs, "results", "a", "--first", "29", "--out", str(tmp_path / "out" / "r.jsonl"))
    assert json.loads((tmp_path / "out" / "r.jsonl").read_text())["item"] == 29
    for slice_ in system.slices:
        slice_.gate.clear()
    shown = await trefoil(jobs, "submit", "digits", str(file), "--complete-by", "90min", "--id", "b")
    assert "0/30" in shown
    await trefoil(jobs, "cancel", "b", "--why", "no more of it")
    await until(lambda: "b" not in jobs.owner.runs or jobs.owner.runs["b"].closing)
    for slice_ in system.slices:
        slice_.gate.set()
    assert "no more of it" in await trefoil(jobs, "watch", "b", code=1)
    assert [job["id"] for job in json.loads(await trefoil(jobs, "list", "--json"))] == ["b", "a"]
    assert json.loads(await trefoil(jobs, "show", "b", "--json"))["state"] == "cancelled"
    assert "is not a job. Remedy: " in await trefoil(jobs, "show", "ghost", code=2)
    soon = await trefoil(jobs, "submit", "digits", str(file), "--complete-by", "soon", code=2)
    assert "--complete-by = 'soon': not a time. Remedy: write 2026-11-20T12:00Z, or how long it may take" in soon


async def test_any_worker_answers_for_jobs_and_a_killed_owner_is_replaced(shared_redis, state, tmp_path):
    """Two worker processes behind one admin port: whichever is asked knows, and the one that owns is killed."""
    async with (
        FakeTriton(version=1, latency_s=0.01) as first,
        FakeTriton(version=4, latency_s=0.01) as second,
        contextlib.AsyncExitStack() as stack,
    ):
        plane = Plane(state)
        slices = [first, second]
        named = [VARIANTS[one.version] for one in slices]
        await plane.node(node([status(n, one.target, variant=named[n]) for n, one in enumerate(slices)]))
        await plane.plan(plan([route([target(n, name, 0.5) for n, name in enumerate(named)])], 1))
        dispatcher = Dispatcher(tmp_path, shared_redis.url, state.keys.cluster, 2, "d")
        stack.push_async_callback(dispatcher.stop)
        await dispatcher.start()
        async with triton.InferenceServerClient(dispatcher.inference) as client:
            await dispatcher.serving(client)
        client = JobsClient.connect(dispatcher.admin_address)
        images = np.zeros((900, 8, 8), np.uint8)
        images[:, 0, 0] = np.arange(900) % 10
        by_s = WallClock().now_s() + 600
        await asyncio.to_thread(lambda: client.submit("digits", {"IMAGE": images}, complete_by_s=by_s, id="a"))
        async with asyncio.timeout(60):
            while not (before := await asyncio.to_thread(client.get, "a")).answered:
                await asyncio.sleep(0.05)
        place = int(before.owner.rpartition(":")[2]) % 1000
        os.kill(dispatcher.pids()[place], signal.SIGKILL)
        again, now = client, before
        async with asyncio.timeout(90):
            while not now.ended:
                await asyncio.sleep(0.1)
                try:
                    now = await asyncio.to_thread(again.get, "a")
                except Unavailable:  # the connection was with the one that is dead
                    again = JobsClient.connect(dispatcher.admin_address)
        assert (now.state, now.answered, now.failed) == ("done", 900, 0)
        results = await asyncio.to_thread(lambda: list(again.results("a")))
        assert [r.item for r in results] == list(range(900))
        assert [r.answer.outputs["PROBABILITIES"].argmax() for r in results if r.answer] == [n % 10 for n in range(900)]


async def test_tokens_guard_jobs(state, tmp_path):
    guarded = {"token": "control", "read_token": "read", "front_open": True}
    async with (
        dispatcher_system(state, tmp_path, FakeTriton(version=1), **guarded) as system,
        jobs_of(system.running, state) as jobs,
    ):
        by_s, images = WallClock().now_s() + 60, {"IMAGE": np.zeros((3, 8, 8), np.uint8)}

        def submit(token: str) -> str:
            client = JobsClient.connect(jobs.address, token=token)
            try:
                client.submit("digits", images, complete_by_s=by_s, id="a")
            except TrefoilError as error:
                return str(error)
            finally:
                client.close()
            return "accepted"

        assert "UNAUTHENTICATED" in await asyncio.to_thread(submit, "")
        assert "this token may only read" in await asyncio.to_thread(submit, "read")
        assert jobs.folder.ids() == []
        assert await asyncio.to_thread(submit, "control") == "accepted"
        reader = JobsClient.connect(jobs.address, token="read")
        assert [one.id for one in await asyncio.to_thread(reader.all)] == ["a"]
        assert (await asyncio.to_thread(lambda: list(reader.watch("a"))))[-1].answered == 3


async def test_answers_are_booked_to_the_jobs_tenant(state, tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(f'[[tenant]]\nname = "blue"\ntoken_sha256 = "{"0" * 64}"\n')
    async with (
        dispatcher_system(state, tmp_path, FakeTriton(version=1), tenants_file=file) as system,
        jobs_of(system.running, state) as jobs,
    ):
        windows = system.running.loop.subscribe()
        await jobs.submit(items(20), id="a", tenant="blue")
        assert "tenant = 'red': is not a tenant. Remedy: use one of: blue" in await refused(
            jobs.stub.Submit(messages(items(1), tenant="red"))
        )
        assert (await jobs.ended("a")).answered == 20
        cells = []
        while sum(cell.items for cell in cells) < 20:
            cells += (await asyncio.wait_for(windows.get(), 30)).cells
        assert {cell.key.tenant for cell in cells if cell.answered} == {"blue"}
        assert [one.job.id for one in (await jobs.stub.List(jobs_pb2.ListRequest(tenant="blue"))).jobs] == ["a"]
        assert not (await jobs.stub.List(jobs_pb2.ListRequest(tenant="red"))).jobs


async def planned(
    jobs: Jobs, plane: Plane, name: str, hours: list[tuple[float, float]], *variants: str, **more
) -> None:
    """Put a plan of one job's hours, given as (hours from now, items), as the controller does."""
    now_s, folder = WallClock().now_s(), await asyncio.to_thread(jobs.folder.name)
    slots = tuple(PlannedHour(now_s + at_h * 3600, now_s + (at_h + 1) * 3600, count, 1.0, variants=variants)
                  for at_h, count in hours)  # fmt: skip
    job = PlannedJob(**{
        "job_id": f"{folder}/{name}", "items_left": 400, "hours": slots, "in_time": True,
        "reason": "will finish at noon", "at_once_grams": 4.0, "evenly_grams": 3.0, **more,
    })  # fmt: skip
    epoch = await jobs.state.epoch_of("controller")
    plan_ = PlannedJobs(Revision(epoch, 1), now_s, now_s + 86_400, (job,))
    await plane.put("controller", jobs.state.keys.jobs_plan(), plan_)


@pytest.mark.gate
async def test_a_job_waits_for_its_hour_and_runs_once_its_plan_is_lost(system, jobs, state, monkeypatch):
    """Open jobs are told at once; 2 % of the items show the pace; the rest waits, and nothing waits for a lost plan."""
    monkeypatch.setattr(planned_hours, "STALE_S", 6.0)
    await planned(jobs, system.plane, "a", [(0, 0.0), (3, 400.0)])
    await jobs.submit(items(400), complete_in_s=5 * 3600, id="a")
    async with asyncio.timeout(30):
        while not (told := (await jobs.status("a"))).why.startswith("waits for cleaner hours: the next begins at "):
            await asyncio.sleep(0.05)
    assert told.prospect == "will finish at noon"
    assert (told.at_once_grams, len(told.hours), told.in_danger) == (4.0, 2, False)
    assert told.answered <= 8, "2 % of 400"
    shown = await trefoil(jobs, "show", "a")
    assert "saves 2 g (50%) against run at once, 1 g (33%) against run evenly" in shown
    folder = await asyncio.to_thread(jobs.folder.name)
    open_jobs = await state.get(state.keys.jobs_open(folder), OpenJobs)
    assert [(one.job_id, one.family, one.bounded) for one in open_jobs.jobs] == [("a", "digits", False)]
    last = await jobs.ended("a")  # nobody renews the plan
    assert (last.state, last.answered, last.late) == (DONE, 400, False)


async def test_items_run_on_the_variants_of_their_plan(system, jobs):
    await planned(jobs, system.plane, "a", [(0, 400.0)], "digits-xs")
    await jobs.submit(items(400), complete_in_s=5 * 3600, id="a")
    assert (await jobs.ended("a")).answered == 400
    assert [bool(each.requests) for each in system.slices] == [True, False], "digits-l is idle all the time"


async def test_a_plan_that_cannot_be_in_time_holds_nothing_back_and_says_so(system, jobs):
    short = {"in_time": False, "reason": "400 of 400 items cannot be done by noon"}
    await planned(jobs, system.plane, "a", [(3, 400.0)], **short)
    await jobs.submit(items(400), complete_in_s=5 * 3600, id="a")
    assert (await jobs.ended("a")).answered == 400
