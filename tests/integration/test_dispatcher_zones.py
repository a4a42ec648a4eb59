"""Jobs over two zones: two dispatchers, each with its slices and its cluster in Redis, and a link that breaks.

The plans are put into Redis as the controller of the home zone writes them.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from typer.testing import CliRunner

from dispatcher.jobs import zones
from protos.dispatcher.v1 import jobs_pb2, jobs_pb2_grpc
from tests.support.dispatching import DispatcherSystem, dispatcher_system, until
from tests.support.fake_triton import FakeTriton
from tests.support.job_serving import Jobs, digit, item, jobs_of, messages
from tests.support.link import Link
from tests.unit.dispatcher.worlds import key, node, route
from trefoil.api.jobs import Jobs as JobsClient
from trefoil.cli.main import app
from trefoil.core.common import Basis, Revision
from trefoil.core.energy import ReceiptRate
from trefoil.core.errors import InvalidInput
from trefoil.core.jobs.planned import OpenJobs, PlannedHour, PlannedJob, PlannedJobs
from trefoil.runtime import rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration
DONE, CANCELLED = jobs_pb2.JOB_STATE_DONE, jobs_pb2.JOB_STATE_CANCELLED
TOKEN = "token-of-home"
TENANTS = f"""
[[tenant]]
name = "home"
roles = ["jobs"]
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
[[tenant]]
name = "other"
roles = ["jobs"]
token_sha256 = "{hashlib.sha256(b"other").hexdigest()}"
"""


class Zone:
    """One zone."""

    def __init__(self, system: DispatcherSystem, jobs: Jobs) -> None:
        self.system, self.jobs = system, jobs

    @property
    def ran(self) -> Counter[int]:
        """How often an item was run here, by its number in two bytes."""
        found: Counter[int] = Counter()
        for slice_ in self.system.slices:
            for request in slice_.requests:
                data = request.raw_input_contents[0]
                found.update(data[at + 1] + 256 * data[at + 2] for at in range(0, len(data), 64))
        return found


class TwoZones:
    """`home` has the jobs, `far` is its peer; `link`: between them."""

    def __init__(self, home: Zone, far: Zone, link: Link) -> None:
        self.home, self.far, self.link = home, far, link
        self._number = 0

    async def plan(self, name: str, far_items: int, left: int, home_later: int = 0) -> None:
        """Plan a job's items: in the far zone now, and at home in three hours."""
        now_s, folder = WallClock().now_s(), await asyncio.to_thread(self.home.jobs.folder.name)
        hours = (
            PlannedHour(now_s - 60, now_s + 3600, float(far_items), 1.0, 50.0, "FAR"),
            PlannedHour(now_s + 3 * 3600, now_s + 4 * 3600, float(home_later), 1.0, 90.0),
        )
        job = PlannedJob(f"{folder}/{name}", left, hours, True, reason="will finish")
        state, self._number = self.home.jobs.state, self._number + 1
        made = PlannedJobs(Revision(await state.epoch_of("controller"), self._number), now_s, now_s + 86_400, (job,))
        await self.home.system.plane.put("controller", state.keys.jobs_plan(), made)


async def receipts(zone: Zone, items: int) -> dict[str, float]:
    """Joules of receipts by tenant, once so many items are booked in a zone."""
    windows, found, answered = zone.system.running.loop.subscribe(), Counter[str](), 0
    while answered < items:
        for cell in (await windows.get()).cells:
            answered += cell.items
            found[cell.key.tenant] += cell.receipt_j
    return {tenant: joules for tenant, joules in found.items() if joules}


@contextlib.asynccontextmanager
async def zone(state: State, folder, name: str, latency_s: float = 0.0, **settings: Any) -> AsyncIterator[Zone]:
    """A zone with one slice, whose item costs 2 J."""
    async with (
        dispatcher_system(state, folder, FakeTriton(1, latency_s), serve=False, **settings) as system,
        jobs_of(system.running, state, guarded="tenants_file" in settings) as jobs,
    ):
        await system.publish(dataclasses.replace(node(system.statuses()), zone=name), [route(system.targets())])
        await system.carbon(300.0)
        await system.rates(ReceiptRate(key(0), "digits", "digits-xs", 0.0, 2.0, 0.0, Basis.MEASURED))
        yield Zone(system, jobs)


@contextlib.asynccontextmanager
async def two_zones(url: str, cluster: str, folder, far_latency_s: float = 0.0) -> AsyncIterator[TwoZones]:
    tenants = folder / "tenants.toml"
    tenants.write_text(TENANTS)
    states = [State.connect(url, f"{cluster}-{name}", timeout_s=30.0) for name in ("far", "home")]
    try:
        async with (
            zone(states[0], folder / "far", "FAR", far_latency_s, tenants_file=tenants) as far,
            Link(far.jobs.address) as link,
        ):
            peer = {"zone": "FAR", "address": link.address, "token": TOKEN}
            async with zone(states[1], folder / "home", "HOME", other_zones=(peer,)) as home:
                yield TwoZones(home, far, link)
    finally:
        for state in states:
            await state.close()


@pytest.fixture
async def two(shared_redis, state, tmp_path, monkeypatch) -> AsyncIterator[TwoZones]:
    monkeypatch.setattr(zones, "LOOK_S", 0.02)
    async with two_zones(shared_redis.url, state.keys.cluster, tmp_path) as made:
        yield made


def numbered(count: int) -> list[bytes]:
    """Items whose pixels say their digit and their number."""
    found = []
    for number in range(count):
        data = bytearray(item(number % 10))
        at = data.rindex(bytes([number % 10]) + bytes(63))
        data[at + 1 : at + 3] = number.to_bytes(2, "little")
        found.append(bytes(data))
    return found


async def refused(call: Any) -> str:
    """How a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return f"{caught.value.code().name} {caught.value.details()}"


async def check_results(two: TwoZones, name: str, count: int) -> Counter[str]:
    """Each item has one right answer; returns how many by zone."""
    results = await two.home.jobs.results(name)
    assert [result.item for result in results] == list(range(count)), "each once, in order"
    assert [digit(result) for result in results] == [number % 10 for number in range(count)]
    return Counter(result.zone for result in results)


@pytest.mark.gate
async def test_items_go_where_the_plan_says_and_come_back_with_that_zones_receipts(two):
    booking = [asyncio.create_task(receipts(of, count)) for of, count in ((two.far, 500), (two.home, 100))]
    await two.plan("a", far_items=500, left=600, home_later=100)
    named = await two.home.jobs.submit(numbered(600), 5 * 3600, id="a", zones=["HOME", "FAR", "HOME", "FAR"])
    assert list(named.job.zones) == ["HOME", "FAR"]
    async with asyncio.timeout(30):
        while (told := await two.home.jobs.status("a")).answered < 500 or [z.away for z in told.zones] != [0]:
            await asyncio.sleep(0.05)
    (share,) = told.zones
    assert (share.zone, share.answered) == ("FAR", 500)
    results = [one for one in await two.home.jobs.results("a") if one.zone]
    receipt = pb.ModelInferResponse.FromString(results[0].response).parameters
    assert receipt["trefoil_energy_j_estimate"].double_param == pytest.approx(2.0)
    moved_j = sum(one.moved_j for one in results)
    sent = sum(len(one.response) for one in results) + 500 * len(numbered(1)[0])
    assert moved_j == pytest.approx(sent / 1e6 * 216.0, rel=0.1), "what the bytes cost by the setting"
    assert share.joules == pytest.approx(1000.0 + moved_j)
    assert share.grams == pytest.approx((1000.0 + moved_j) / 3.6e6 * 300.0 * 1.2)
    assert sum(two.home.ran.values()) <= 12, "2 % show the pace; the rest waits for its hour"
    open_jobs = await two.home.jobs.state.get(
        two.home.jobs.state.keys.jobs_open(two.home.jobs.owner.hours.folder), OpenJobs
    )
    assert open_jobs.jobs[0].transfer_j > 0
    await until(lambda: not two.far.jobs.folder.ids(), 30)  # removed there once they are on disk here
    await two.plan("a", far_items=0, left=600 - told.answered)
    await two.home.jobs.ended("a")
    assert (await check_results(two, "a", 600))["FAR"] == 500
    client = JobsClient.connect(two.home.jobs.address)
    shown = await asyncio.to_thread(
        CliRunner().invoke, app, ["jobs", "show", "a", "--dispatcher", two.home.jobs.address]
    )
    assert f"zone FAR: 500 answered ({share.joules:.4g} J, {share.grams:.3g} g), 0 there now" in shown.stdout
    (last,) = await asyncio.to_thread(lambda: list(client.results("a", first=599)))
    assert (last.zone, last.moved_j > 0, last.answer.joules) == ("FAR", True, pytest.approx(2.0))
    there, here = await asyncio.gather(*booking)
    assert there == {"home": pytest.approx(share.joules - moved_j)}, "the peer books what the job says of that zone"
    assert here == {"": pytest.approx((await two.home.jobs.status("a")).joules - share.joules)}


async def test_a_cut_link_in_the_middle_loses_nothing_and_repeats_nothing(two, monkeypatch):
    monkeypatch.setattr(zones, "LOST_S", 0.5)
    monkeypatch.setattr(zones, "PARCEL_ITEMS", 150)
    two.far.system.slice.latency_s = 0.02
    await two.plan("a", far_items=600, left=600)
    await two.home.jobs.submit(numbered(600), 5 * 3600, id="a", zones=["HOME", "FAR"])
    await until(lambda: sum(two.far.ran.values()) > 100, 30)
    await two.link.cut()
    async with asyncio.timeout(30):
        while "zone FAR: " not in (await two.home.jobs.status("a")).why:
            await asyncio.sleep(0.02)
        while not any(parcel.back for run in two.home.jobs.owner.runs.values() for parcel in run.states.parcels):
            await asyncio.sleep(0.02)
    await two.link.heal()
    last = await two.home.jobs.ended("a")
    assert (last.state, last.answered, last.failed) == (DONE, 600, 0)
    by_zone = await check_results(two, "a", 600)
    assert by_zone["FAR"] > 0
    assert by_zone[""] > 0
    await until(lambda: not two.far.jobs.folder.ids(), 30)


async def test_a_home_that_is_killed_goes_on_with_the_same_parts(two, monkeypatch):
    monkeypatch.setattr(zones, "PARCEL_ITEMS", 200)
    two.far.system.slice.latency_s = 0.02
    await two.plan("a", far_items=400, left=400)
    await two.home.jobs.submit(numbered(400), 5 * 3600, id="a", zones=["FAR"])
    await until(lambda: sum(two.far.ran.values()) > 50, 30)
    await two.home.jobs.kill()
    await two.home.jobs.own()
    last = await two.home.jobs.ended("a")
    assert (last.state, last.answered, last.failed) == (DONE, 400, 0)
    assert await check_results(two, "a", 400) == {"FAR": 400}
    assert set(two.far.ran.values()) == {1}, "no item was run twice: a parcel is the same job there"
    assert not two.home.ran


async def test_a_peer_that_is_killed_goes_on_and_one_that_forgets_is_not_waited_for(two):
    two.far.system.slice.latency_s = 0.02
    await two.plan("a", far_items=300, left=300)
    await two.home.jobs.submit(numbered(300), 5 * 3600, id="a", zones=["HOME", "FAR"])
    await until(lambda: sum(two.far.ran.values()) > 50, 30)
    await two.far.jobs.kill()
    await two.far.jobs.own()
    assert (await two.home.jobs.ended("a")).answered == 300
    assert (await check_results(two, "a", 300))["FAR"] == 300
    two.home.system.slice.latency_s = 0.2  # the plan is read within two seconds
    await two.plan("b", far_items=300, left=300)
    await two.home.jobs.submit(numbered(300), 5 * 3600, id="b", zones=["HOME", "FAR"])
    await until(lambda: [name for name in two.far.jobs.folder.ids() if name.startswith("b-")], 30)
    for name in two.far.jobs.folder.ids():
        two.far.jobs.folder.remove(name)
    two.home.system.slice.latency_s = 0.0
    assert (await two.home.jobs.ended("b")).answered == 300
    await check_results(two, "b", 300)


async def test_what_a_peer_refuses_runs_at_home_and_says_why(two, monkeypatch):
    async def nothing(*_: Any) -> Any:
        raise InvalidInput("more than can be answered", field="items", value=300, remedy="fewer items")

    monkeypatch.setattr(two.far.jobs.admin, "check", nothing)
    two.home.system.slice.latency_s = 0.05
    await two.plan("a", far_items=300, left=300)
    await two.home.jobs.submit(numbered(300), 5 * 3600, id="a", zones=["HOME", "FAR"])
    async with asyncio.timeout(30):
        while "zone FAR: items = 300: more than can be answered" not in (await two.home.jobs.status("a")).why:
            await asyncio.sleep(0.02)
    two.home.system.slice.latency_s = 0.0
    assert (await two.home.jobs.ended("a")).answered == 300
    assert await check_results(two, "a", 300) == {"": 300}
    refusing = await refused(two.home.jobs.stub.Submit(messages(numbered(1), zones=["HOME", "NL"])))
    assert "NOT_FOUND zones = 'NL': is the zone of no node here and of no peer" in refusing


class Liar(jobs_pb2_grpc.JobsServicer):
    """A peer that tells what a test says."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.result: dict[str, Any] = {}

    async def Submit(self, request_iterator: Any, context: Any) -> Any:
        parcels = [parcel async for parcel in request_iterator]
        self.told = jobs_pb2.JobStatus(job=parcels[0].job, items=parcels[-1].total, state=DONE, answered=1)
        if "id" in self.status:
            self.told.job.id = self.status["id"]
        return jobs_pb2.SubmitResponse(status=self.told)

    async def GetResults(self, request: Any, context: Any) -> Any:
        await context.write(jobs_pb2.GetResultsResponse(results=[jobs_pb2.ItemResult(**self.result)]))


def answer(joules: float = 1.0, mg: float = 0.1, outputs: int = 1) -> bytes:
    made = pb.ModelInferResponse(model_name="digits")
    made.parameters["trefoil_energy_j_estimate"].double_param = joules
    made.parameters["trefoil_carbon_mg_estimate"].double_param = mg
    for _ in range(outputs):
        made.outputs.add(name="PROBABILITIES", datatype="FP32", shape=[1, 10])
        made.raw_output_contents.append(bytes(40))
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    ("status", "result", "says"),
    [
        ({"id": "mine"}, {}, "job = 'mine, 50 items of digits': asked for a-"),
        ({}, {"item": 50, "response": answer()}, "results.item = 50: the parcel has 50 items"),
        ({}, {"item": 3, "response": answer(joules=float("nan"))}, "receipt.energy_j = nan"),
        ({}, {"item": 3, "response": answer(mg=-1e9)}, "receipt.carbon_g = -1000000"),
        ({}, {"item": 3, "response": b"\xff"}, "Error parsing message"),
        ({}, {"item": 3, "response": answer(outputs=0)}, "results.response = 3: has no outputs"),
    ],
)
async def test_a_peer_that_lies_is_not_believed(shared_redis, state, tmp_path, monkeypatch, status, result, says):
    monkeypatch.setattr(zones, "LOOK_S", 0.02)
    liar, server = Liar(), grpc.aio.server()
    liar.status, liar.result = status, result
    jobs_pb2_grpc.add_JobsServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    home_state = State.connect(shared_redis.url, f"{state.keys.cluster}-liar", timeout_s=30.0)
    try:
        peer = {"zone": "FAR", "address": f"127.0.0.1:{port}"}
        async with zone(home_state, tmp_path, "HOME", 0.1, other_zones=(peer,)) as home:
            two = TwoZones(home, home, None)
            await two.plan("a", far_items=50, left=50)
            await home.jobs.submit(numbered(50), 5 * 3600, id="a", zones=["HOME", "FAR"])
            async with asyncio.timeout(30):
                while f"zone FAR: {says}" not in (told := (await home.jobs.status("a")).why):
                    await asyncio.sleep(0.01)
            assert "\n" not in told
            home.system.slice.latency_s = 0.0
            assert (await home.jobs.ended("a")).answered == 50
            assert await check_results(two, "a", 50) == {"": 50}
    finally:
        await home_state.close()
        await server.stop(0)


async def test_a_zones_token_is_good_for_its_own_jobs_alone(two):
    channels = [rpc.channel(two.far.jobs.address, token=token) for token in (TOKEN, "other", "wrong")]
    home, other, wrong = map(jobs_pb2_grpc.JobsStub, channels)
    status = (await home.Submit(messages(numbered(5), zones=["FAR"], id="mine"))).status
    assert status.job.tenant == "home"
    assert "is not a job of tenant other. Remedy: " in await refused(other.Get(jobs_pb2.GetRequest(id="mine")))
    assert "NOT_FOUND" in await refused(other.Cancel(jobs_pb2.CancelRequest(id="mine")))
    assert "NOT_FOUND" in await refused(other.GetResults(jobs_pb2.GetResultsRequest(id="mine")).read())
    assert "NOT_FOUND" in await refused(other.Watch(jobs_pb2.WatchRequest(id="mine")).read())
    assert not (await other.List(jobs_pb2.ListRequest())).jobs
    assert [one.job.id for one in (await home.List(jobs_pb2.ListRequest(tenant="other"))).jobs] == ["mine"]
    asks_for_others = other.Submit(messages(numbered(5), tenant="home"))
    assert "tenant = 'home': is not the token's" in await refused(asks_for_others)
    assert "UNAUTHENTICATED" in await refused(wrong.Get(jobs_pb2.GetRequest(id="mine")))
    for channel in channels:
        await channel.close()
