"""Two workers in one process: what one has no credits for, the other answers, as if the client had asked it itself."""

import asyncio
import contextlib
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from dispatcher.request import peer_links
from dispatcher.routing.core import membership
from dispatcher.routing.core.membership import RESTART_STEP
from dispatcher.settings import DispatcherSettings
from protos.dispatcher.v1 import dispatcher_pb2
from tests.support import fake_triton as fake
from tests.support.certificates import Authority
from tests.support.dispatching import Plane, Running, image, until
from tests.support.fake_triton import FakeTriton
from tests.support.special_models import SpecialTriton, special_node, special_plan
from tests.support.special_world import raw
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.errors import SettingError, StaleRevision
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.state import ACK_TTL_S

pytestmark = pytest.mark.integration
AWAY = TableAck("d9", 0, peer_target="unix:/of/another/host", counts=("d1:0",))
HERE = peer_links.__file__.rpartition("/dispatcher/")[0] + "/tests/support"


@contextlib.asynccontextmanager
async def worker(state, folder, number, name="d1", **more):
    chosen = {"drain_s": 0.2, "window_s": 0.1, "ack_s": 0.5, "workers": 2, **more}
    settings = DispatcherSettings(
        state_dir=folder / name, inference_address="127.0.0.1:0", metrics_address="", worker=number, **chosen
    )
    running = Running(settings, state, name)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


class Pair:
    """Two workers and one slice with one credit. `server` has it, `other` has to ask."""

    def __init__(self, plane, slice_, workers):
        self.plane, self.slice, self.workers = plane, slice_, workers

    @property
    def server(self):
        return next(each for each in self.workers if each.local.routing.table.live("digits"))

    @property
    def other(self):
        return next(each for each in self.workers if not each.local.routing.table.live("digits"))

    async def serve(self, credits=1, number=1):
        await self.plane.node(node([status(0, self.slice.target)]))
        await self.plane.plan(plan([route([target(0, credits=credits)])], number=number))

    def linked(self):
        alive = [w for w in self.workers if w.local.routing.table.live("digits")]
        return len(alive) == 1 and all(
            worker.local.routing.agreed and len(worker.fronts.peers._links) == len(self.workers) - 1
            and all(link.up for link in worker.fronts.peers._links.values())
            for worker in self.workers
        )  # fmt: skip


@contextlib.asynccontextmanager
async def pair(state, folder, names=("d1", "d1"), tls=None, **more):
    async with (
        FakeTriton(version=4, tls=tls) as slice_,
        worker(state, folder, 0, names[0], **more) as first,
        worker(state, folder, 1, names[1], **more) as second,
    ):
        made = Pair(Plane(state), slice_, [first, second])
        await made.serve()
        await until(made.linked)
        yield made


@pytest.fixture
async def two(state, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_links, "ASK_TIMEOUT_S", 30.0)  # a table names a missing answer and continues
    async with pair(state, tmp_path) as made, triton.InferenceServerClient(made.other.address) as client:
        made.client = client
        yield made


@contextlib.asynccontextmanager
async def renewed(state, *acks):
    """Workers of another host, whose acknowledgements are renewed."""

    async def renew():
        clock = WallClock()
        while True:
            for ack in acks:
                told = replace(ack, observed_at_s=clock.now_s())
                await state.put_unfenced(state.keys.ack(ack.dispatcher, ack.worker), told)
            await clock.sleep(0.3)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def booked(state):
    """(arrived, answered, failed by code) over the windows of all workers."""
    arrived, answered, failed = 0, 0, Counter()
    for key in await state.names(state.keys.load_prefix()):
        for _, window in await state.stream(key, LoadWindow):
            for cell in window.cells:
                arrived += cell.arrived
                answered += cell.answered
                failed.update(cell.failed_by_code)
    return arrived, answered, failed


async def until_booked(state, expected):
    async with asyncio.timeout(60):
        while await booked(state) != expected:
            await asyncio.sleep(0.02)


async def test_a_forwarded_request_is_answered_as_any_other(two, state):
    result = await two.client.infer("digits", [image(7)], request_id="mine", parameters={"trefoil_class": "gold"})
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("mine", "digits", "1")
    assert result.as_numpy("PROBABILITIES").argmax() == 7
    assert response.parameters["trefoil_variant"].string_param == "digits-l"
    assert not two.slice.requests[0].parameters, "knobs are taken off on the way"
    assert two.other.local.routing.in_flight() == Counter()
    await until_booked(state, (1, 1, Counter()))
    (stats,) = (await two.client.get_inference_statistics("digits")).model_stats
    assert stats.inference_stats.success.count == stats.inference_count == 1, "counted there, and told here"
    assert await two.client.is_server_ready()
    assert await two.client.is_model_ready("digits")
    assert (await two.client.get_model_metadata("digits")).name == "digits"


async def test_a_status_comes_back_with_its_trailers_and_is_booked_once(two, state):
    two.slice.error, two.slice.error_trailers = fake.BACKEND, (("why", "it went wrong"),)
    channel = grpc.aio.insecure_channel(two.other.address)
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString)
    request = pb.ModelInferRequest(model_name="digits")
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
    request.raw_input_contents.append(bytes(64))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await infer(request)
    assert (caught.value.code(), caught.value.details()) == fake.BACKEND
    trailers = dict(caught.value.trailing_metadata())
    assert trailers["why"] == "it went wrong"
    assert not [key for key in trailers if key.startswith("trefoil-")]
    await until_booked(state, (1, 0, Counter({"INTERNAL": 1})))
    await channel.close()


async def test_a_deadline_is_forwarded_and_a_cancelled_request_leaves_no_trace(two, state):
    await two.client.infer("digits", [image(1)], client_timeout=60.0)
    assert 30.0 < two.slice.deadlines_s[-1] < 60.1
    two.slice.gate.clear()
    first = asyncio.create_task(two.client.infer("digits", [image(1)]))
    await until(lambda: len(two.slice.requests) == 2)
    second = asyncio.create_task(two.client.infer("digits", [image(2)]))
    await until(lambda: two.server.local.routing.queues["digits"].waiting == 1)
    second.cancel()
    await asyncio.wait([second])
    await until(lambda: two.server.local.routing.queues["digits"].waiting == 0)
    two.slice.gate.set()
    assert (await first).as_numpy("PROBABILITIES").argmax() == 1
    assert len(two.slice.requests) == 2, "it never went to the slice"
    await until_booked(state, (3, 2, Counter({"CANCELLED": 1})))


async def test_who_waits_follows_the_credits_when_they_move(two):
    """The worker with the credit leaves: what waits with it continues to the one that takes over."""
    two.slice.gate.clear()
    server, other = two.server, two.other
    calls = [asyncio.create_task(two.client.infer("digits", [image(n)])) for n in range(6)]
    await until(lambda: server.local.routing.queues["digits"].waiting == 5)
    server.local.drain("a test")
    await until(lambda: other.local.routing.table.live("digits"))
    two.slice.gate.set()
    assert [(await call).as_numpy("PROBABILITIES").argmax() for call in calls] == list(range(6))
    assert server.local.routing.table.elsewhere == {"digits": (other.local.id,)}
    assert not server.local.routing.queues["digits"].waiting


async def test_a_worker_that_dies_is_replaced_before_redis_knows(two, state):
    server, other = two.server, two.other
    key = state.keys.ack(*server.local.id)
    clock = WallClock()
    started_s = clock.monotonic_s()
    await server.peer_part._server.stop(0)
    await until(lambda: other.local.routing.table.live("digits"))
    assert clock.monotonic_s() - started_s < ACK_TTL_S
    assert await state.get(key, TableAck) is not None
    assert (await two.client.infer("digits", [image(3)])).as_numpy("PROBABILITIES").argmax() == 3


@pytest.mark.parametrize(("host", "name"), [("localhost", ""), ("127.0.0.2", "localhost")])
async def test_replicas_reach_each_other_over_tls_with_the_clusters_token(host, name, state, tmp_path):
    ours = Authority(tmp_path)
    more = {"peer_address": f"{host}:0", "peer_name": name, "token": "secret"}
    more |= ours.service("localhost").settings(ours)
    node = ours.server("tritons.node0")
    tls = Tls(node.certificate, node.key, ours.certificate, calls=False)
    async with pair(state, tmp_path, ("d1", "d2"), tls=tls, **more) as two:
        assert two.server.local.peer_target.startswith(f"{host}:")
        data = pb.ModelInferRequest(model_name="digits")
        data.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
        data.raw_input_contents.append(bytes([5]) + bytes(63))
        caller = peer_links.Caller(tenant="t")
        answer = await two.other.fronts.inference.answer(data.SerializeToString(), caller)
        assert (answer.variant, answer.slice) == ("digits-l", target(0).slice)
        link = two.other.fronts.peers._links[two.server.local.id]
        with pytest.raises(grpc.aio.AioRpcError, match="no valid token"):
            await link.channel.unary(f"/{peer_links.SERVICE}/Table", (b"",))


async def test_questions_are_answered_by_all_workers(two):
    two.slice.gate.clear()
    call = asyncio.create_task(two.client.infer("digits", [image(1)]))
    await until(lambda: two.slice.requests)
    table = await two.other.siblings.GetTable(None, None)
    assert [(t.credits, t.slice.start) for t in table.routes[0].targets] == [(1, 0)]
    assert [load.in_flight for load in table.slices] == [1]
    assert [(w.worker, w.in_flight) for w in sorted(table.workers, key=lambda w: w.worker)] == [
        (w.local.id[1], int(w is two.server)) for w in two.workers
    ]
    two.slice.gate.set()
    await call
    windows = two.other.siblings.windows(two.other.loop.subscribe())
    async with asyncio.timeout(60), contextlib.aclosing(windows):
        seen = set()
        async for window in windows:
            seen.add(window.worker)
            if seen == {0, 1}:
                break
    explained = await two.other.siblings.ExplainRequest(dispatcher_pb2.ExplainRequestRequest(family="digits"), None)
    assert explained.why.startswith(f"forwarded to worker {membership.worker_name(two.server.local.id)}: ")
    assert [target.eligible for target in explained.targets] == [True]
    metrics = two.other.metrics
    await until(lambda: 'requests_forwarded_total{family="digits",simulated="true"} 1.0' in metrics.text())
    text = (await two.other.siblings.metrics()).decode()
    assert 'trefoil_workers{worker="0",simulated="true"} 2.0' in text
    for number in range(2):
        assert f'trefoil_table_revision_number{{worker="{number}",simulated="true"}} 1.0' in text


async def test_drain_refuses_an_older_epoch_and_asks_for_a_reason(two):
    request = dispatcher_pb2.DrainRequest
    with pytest.raises(StaleRevision, match="epoch 0 is older than that of the table, 1"):
        await two.other.siblings.Drain(request(why="disks"), None)
    with pytest.raises(Exception, match="say why"):
        await two.other.siblings.Drain(request(epoch=1), None)
    answer = await two.other.siblings.Drain(request(epoch=1, why="new disks"), None)
    assert [worker.why for worker in answer.workers] == ["the dispatcher is drained: new disks"] * 2
    assert not await two.client.is_server_ready()
    assert (await two.client.infer("digits", [image(3)])).as_numpy("PROBABILITIES").argmax() == 3
    await two.other.siblings.Drain(request(epoch=1, release=True), None)
    await until(two.linked)
    assert await two.client.is_server_ready()


async def test_a_new_life_takes_the_place_of_the_one_before(state, tmp_path):
    before = TableAck("d1", 1, observed_at_s=WallClock().now_s(), peer_target="unix:/nowhere")
    await state.put_unfenced(state.keys.ack("d1", 1), before)
    async with worker(state, tmp_path, 1 + RESTART_STEP) as running:
        assert await state.get(state.keys.ack("d1", 1), TableAck) is None, "nobody waits for the dead"
        assert running.local.routing.membership.sharers == (("d1", 1 + RESTART_STEP),)
        assert membership.worker_place(running.local.id) == ("d1", 1)
        path = Path(running.local.peer_target.removeprefix("unix:"))
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        left = path.with_name("killed-0.sock")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(left))  # a worker that was killed: the file stays, nobody listens
        async with worker(state, tmp_path, 2):
            assert path.exists()
            assert not left.exists()


async def test_a_worker_that_is_started_again_serves_what_redis_tells_of_at_once(state, tmp_path):
    """Its siblings have kept the table on disk; that is for when Redis is away."""
    async with FakeTriton(version=4) as slice_:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0, credits=6)])]))
        for life in range(2):
            async with worker(
                state, tmp_path, life * RESTART_STEP, node_stale_s=300.0
            ) as running:  # its agent writes no more
                assert [t.credits for t in running.local.routing.table.live("digits")] == [6]


async def test_a_worker_of_another_host_that_is_not_reached_keeps_its_share(state, tmp_path):
    """A Unix socket that is not there says nothing of the worker behind it."""
    async with FakeTriton(version=4) as slice_, worker(state, tmp_path, 0) as running:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0, credits=4)])]))
        await until(lambda: running.local.routing.table.live("digits"))
        async with renewed(state, AWAY):
            await until(lambda: [t.credits for t in running.local.routing.table.live("digits")] == [2])
        await until(lambda: [t.credits for t in running.local.routing.table.live("digits")] == [4])


async def test_an_acknowledgement_of_no_worker_takes_no_share_of_who_serves_or_starts(state, tmp_path):
    """It stands forever, and names an address at which something listens."""
    async with FakeTriton(version=4) as slice_:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0, credits=1)])]))
        stray = TableAck("0", 0, peer_target=slice_.target, observed_at_s=1e10)
        await state.put_unfenced(state.keys.ack("0", 0), stray, ttl_s=1000.0)
        async with worker(state, tmp_path, 0, node_stale_s=300.0) as running:
            credits = lambda: [t.credits for t in running.local.routing.table.live("digits")]  # noqa: E731 (again)
            await until(lambda: credits() == [1])
            await state.put_unfenced(state.keys.ack("1", 0), replace(stray, dispatcher="1"), ttl_s=1000.0)
            for _ in range(30):
                await WallClock().sleep(0.1)
                assert credits() == [1]


async def test_slices_of_a_silent_agent_are_probed_by_who_has_none_of_their_credits_too(state, tmp_path):
    """The controller takes a node for lost once no worker reaches it."""
    silent = {"node_stale_s": 0.1, "stale_probe_s": 0.1}
    async with (
        FakeTriton(version=4) as one,
        FakeTriton(version=4) as other,
        worker(state, tmp_path, 0, **silent) as running,
        renewed(state, AWAY),
    ):
        plane = Plane(state)
        await plane.node(node([status(0, one.target), status(1, other.target)]), fresh=False)
        await plane.plan(plan([route([target(0, credits=1, weight=0.5), target(1, credits=1, weight=0.5)])]))
        table = lambda: running.local.routing.table  # noqa: E731 (read again each time)
        await until(lambda: len(table().alive.get("digits", ())) == 2 and len(table().live("digits")) == 1)
        one.ready = other.ready = False
        await until(lambda: len(running.local.health.ejections.reasons()) == 2)
        assert len(running.local.routing.membership.sharers) == 2


async def test_a_certificate_that_is_not_there_is_named(state, tmp_path):
    own = {"tls_certificate": f"{HERE}/localhost.crt", "tls_key": f"{HERE}/localhost.key"}
    for more, said in (({"tls_ca": "/nowhere.pem"}, "tls_ca = '/nowhere.pem'"), ({}, "tls_ca: missing")):
        with pytest.raises(SettingError, match=said):
            async with worker(state, tmp_path, 0, peer_address="127.0.0.1:0", **own, **more):
                pass


async def test_a_client_without_any_worker_to_turn_to_waits_for_one(two):
    """The other's link is gone, its acknowledgement is not: requests wait, and are answered when it is back."""
    link = two.other.fronts.peers._links[two.server.local.id]
    link.up = False
    call = asyncio.create_task(two.client.infer("digits", [image(8)]))
    await until(lambda: two.other.local.routing.queues["digits"].waiting == 1)
    link.up = True
    two.other.local.routing.redirect_waiting()
    assert (await call).as_numpy("PROBABILITIES").argmax() == 8
    assert not isinstance(call.exception(), InferenceServerException)
    assert replace(two.other.local.routing.plan) == two.server.local.routing.plan


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    """A real Triton with decoupled models and models with sequences."""
    one = SpecialTriton(tmp_path_factory.mktemp("special"), 0, 3, ("accumulator", "repeat", "scores"))
    asyncio.run(one.ready())
    yield one
    one.close()


def talk(sequence):
    """Decoupled requests, with and without errors, and a sequence."""
    final = {"triton_enable_empty_final_response": True}
    return [
        raw("repeat", "three", COUNT=3, DELAY_MS=0),
        raw("repeat", "three and the end", final, COUNT=3, DELAY_MS=0),
        raw("repeat", "none and the end", final, COUNT=0, DELAY_MS=0),
        raw("repeat", "an error", COUNT=-1, DELAY_MS=0),
        raw("accumulator", "start", {"sequence_id": sequence, "sequence_start": True}, VALUE=1),
        raw("accumulator", "middle", {"sequence_id": sequence}, VALUE=10),
        raw("accumulator", "end", {"sequence_id": sequence, "sequence_end": True}, VALUE=100),
        raw("accumulator", "after", {"sequence_id": sequence}, VALUE=1),
        raw("nothing", "unknown", VALUE=1),
    ]


async def converse(address, asked, metadata=()):
    """All answers by id, and how the stream ended."""
    heard = {}
    async with grpc.aio.insecure_channel(address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter(asked), timeout=30, metadata=metadata
        )
        try:
            async for answer in call:
                inner = answer.infer_response
                if inner.outputs:
                    assert inner.parameters["trefoil_variant"].string_param == "v3"
                said = [int.from_bytes(raw, "little") for raw in inner.raw_output_contents[:1]]
                heard.setdefault(inner.id, []).append(answer.error_message or said)
        except grpc.aio.AioRpcError as error:
            return heard, error.code(), error.details()
    return heard, grpc.StatusCode.OK, ""


@pytest.mark.slow
@pytest.mark.parametrize("credits", [1, 4])
async def test_streams_and_sequences_are_the_same_through_either_worker(state, tmp_path, special, credits):
    """With one credit a family is served by one worker alone; with four, its sequences still have one owner."""
    async with worker(state, tmp_path, 0) as first, worker(state, tmp_path, 1) as second:
        plane = Plane(state)
        await plane.node(special_node([special]))
        await plane.plan(special_plan([special], 1, credits))
        for running in (first, second):
            await until(lambda r=running: all(r.contracts.known(name) for name in ("accumulator", "repeat")))
            await until(lambda r=running: any(link.up for link in r.fronts.peers._links.values()))
        if credits == 1:
            await until(lambda: len({bool(r.local.routing.table.live("repeat")) for r in (first, second)}) == 2)
        else:
            assert {r.fronts.peers.owner("accumulator") for r in (first, second)} >= {None}
        for sequence, running in ((41, first), (42, second)):
            heard, code, details = await converse(running.address, talk(sequence))
            assert (code, details) == (grpc.StatusCode.OK, "")
            assert "must specify the START flag" in heard.pop("after")[0]
            assert "unknown model" in heard.pop("unknown")[0]
            assert heard == {
                "three": [[0], [1], [2]], "three and the end": [[0], [1], [2], []], "none and the end": [[]],
                "an error": [[0], "no more than that"], "start": [[1]], "middle": [[11]], "end": [[111]],
            }  # fmt: skip
        as_status = (("triton_grpc_error", "true"),)
        ends = [
            await converse(r.address, [raw("repeat", "e", COUNT=-1, DELAY_MS=0)], as_status) for r in (first, second)
        ]
        assert ends[0][1:] == ends[1][1:] == (grpc.StatusCode.INTERNAL, "no more than that")
        # A sequence whose messages come through both workers: they agree on its owner.
        running_sum = []
        for number, running in enumerate((first, second, first, second)):
            flags = {"sequence_id": 99, "sequence_start": number == 0, "sequence_end": number == 3}
            heard, *_ = await converse(running.address, [raw("accumulator", "m", flags, VALUE=1)])
            running_sum += heard["m"][0]
        assert running_sum == [1, 2, 3, 4]
        for sequence, running in ((51, first), (52, second)):  # no request overtakes another on its way to the owner
            flags = [{"sequence_id": sequence, "sequence_start": i == 0, "sequence_end": i == 39} for i in range(40)]
            burst = [raw("accumulator", str(i), flags[i], VALUE=i) for i in range(40)]
            heard, *_ = await converse(running.address, burst)
            assert [heard[str(i)] for i in range(40)] == [[[i * (i + 1) // 2]] for i in range(40)]
        await until(lambda: not first.local.routing.in_flight() and not second.local.routing.in_flight())
