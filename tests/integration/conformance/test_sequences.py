"""Sequences through unmodified clients: in order, on one slice, from START to END."""

import asyncio
import itertools
import shutil
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from dispatcher.slice_health.core.ejection import Failure
from tests.support.dispatching import DispatcherSystem, dispatching, until
from tests.support.special_models import IDLE_S, SpecialTriton
from tests.support.special_world import START_FLAG, in_sequence, item, number, raw, serving
from tests.support.triton_process import MODELS, TritonProcess, heldout, hosted
from tests.unit.dispatcher.worlds import key, node, route, status, target

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def add(client, id_: int, value: int, start: bool = False, end: bool = False):
    result = await client.infer(
        "accumulator", [number(triton, "VALUE", value)], **in_sequence(id_, start, end), client_timeout=20
    )
    return item(result, "SUM"), item(result, "SLICE")


@pytest.mark.gate
async def test_a_sequence_stays_on_its_slice_from_start_to_end(world):
    ids = range(101, 113)
    async with triton.InferenceServerClient(world.address) as client:

        async def one(id_: int) -> int:
            sums, slices = [], set()
            for step in range(1, 8):
                sum_, slice_ = await add(client, id_, id_ * step, start=step == 1, end=step == 7)
                sums.append(sum_)
                slices.add(slice_)
            assert sums == [id_ * step * (step + 1) // 2 for step in range(1, 8)]
            assert len(slices) == 1
            return slices.pop()

        homes = await asyncio.gather(*(one(id_) for id_ in ids))
        assert set(homes) == {0, 1}, "sequences are spread as other requests are"
        assert world.open_on(0) + world.open_on(1) == 0
        with pytest.raises(InferenceServerException, match=START_FLAG) as caught:
            await add(client, 101, 1)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_requests_of_one_sequence_run_one_at_a_time_in_the_order_of_their_stream(world):
    asked = [raw("accumulator", str(i), in_sequence(7, i == 0, i == 29), VALUE=i) for i in range(30)]
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        told = [answer async for answer in stub.ModelStreamInfer(iter(asked), timeout=30)]
    assert [int.from_bytes(t.infer_response.raw_output_contents[0], "little") for t in told] == [
        i * (i + 1) // 2 for i in range(30)
    ]


async def test_a_decoupled_sequence_has_all_answers_of_each_request_in_order(world):
    asked = [raw("running", str(i), in_sequence(8, i == 0, i == 9), VALUE=1) for i in range(10)]
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        told = [answer async for answer in stub.ModelStreamInfer(iter(asked), timeout=30)]
    got = [(t.infer_response.id, int.from_bytes(t.infer_response.raw_output_contents[0], "little")) for t in told]
    assert got == [(str(i), i + 1) for i in range(10) for _ in range(2)]


async def test_a_draining_slice_keeps_its_sequences_and_gets_no_new_ones(world):
    async with triton.InferenceServerClient(world.address) as client:
        home = {}
        for id_ in range(201, 205):
            _, home[id_] = await add(client, id_, 1, start=True)
        leaving = [id_ for id_ in home if home[id_] == 1]
        assert leaving
        assert world.open_on(1) == len(leaving)
        await world.serve_special(draining=(1,))
        for id_ in home:
            assert await add(client, id_, 2) == (3, home[id_])
        for id_ in range(301, 305):
            assert (await add(client, id_, 1, start=True, end=True))[1] == 0
        assert world.open_on(1) == len(leaving), "an agent that drains it waits for them"
        for id_ in home:
            assert await add(client, id_, 3, end=True) == (6, home[id_])
        assert world.open_on(1) == 0


async def test_plans_that_change_all_the_time_move_no_sequence_and_lose_no_request(world):
    """Slices drain and come back under sequences, decoupled ones on streams among them."""
    stop, done = asyncio.Event(), 0

    async def unary(client, first: int) -> None:
        nonlocal done
        for id_ in itertools.count(first):
            if stop.is_set():
                return
            told = [await add(client, id_, step, start=step == 1, end=step == 6) for step in range(1, 7)]
            assert [sum_ for sum_, _ in told] == [1, 3, 6, 10, 15, 21]
            assert len({slice_ for _, slice_ in told}) == 1
            done += 1

    async def streamed(stub, first: int) -> None:
        nonlocal done
        for id_ in itertools.count(first):
            if stop.is_set():
                return
            asked = [raw("running", str(i), in_sequence(id_, i == 0, i == 4), VALUE=1) for i in range(5)]
            told = [answer async for answer in stub.ModelStreamInfer(iter(asked), timeout=30)]
            sums = [int.from_bytes(t.infer_response.raw_output_contents[0], "little") for t in told]
            assert sums == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
            done += 1

    async def change() -> None:
        for draining in ((0,), (), (1,), (), (0,), (1,), (0,), ()):
            await world.serve_special(draining=draining)
            before = done
            await until(lambda before=before: done >= before + 6)
        stop.set()

    async with (
        triton.InferenceServerClient(world.address) as client,
        grpc.aio.insecure_channel(world.address) as channel,
        asyncio.TaskGroup() as group,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for n in range(3):
            group.create_task(unary(client, 10_000 * (n + 1)))
            group.create_task(streamed(stub, 100_000 * (n + 1)))
        group.create_task(change())
    assert world.open_on(0) + world.open_on(1) == 0
    assert not {code for totals in world.local.accounting.load.totals.values() for code in totals.by_code}


async def test_a_sequence_that_was_idle_for_too_long_is_forgotten(state, tmp_path):
    forgetful = SpecialTriton(tmp_path, 0, 3, ("accumulator",), idle_s=4)
    try:
        await forgetful.ready()
        async with serving(state, tmp_path, [forgetful]) as world:
            await add(world.client, 401, 1, start=True)
            assert world.local.routing.open_sequences() == {key(0): 1}
            await until(lambda: not world.local.routing.open_sequences())
            with pytest.raises(InferenceServerException, match=START_FLAG):
                await add(world.client, 401, 1)
    finally:
        forgetful.close()


async def test_what_triton_forgot_first_is_refused_by_triton_and_ejects_nobody(world):
    """Another client ends the sequence behind our back: Triton's own words come through."""
    async with triton.InferenceServerClient(world.address) as client:
        _, home = await add(client, 402, 1, start=True)
        async with triton.InferenceServerClient(world.slices[home].target) as direct:
            await add(direct, 402, 1, end=True)
        with pytest.raises(InferenceServerException, match=START_FLAG):
            await add(client, 402, 1)
    assert not world.local.health.ejections.reasons()


async def test_a_slice_that_was_slow_before_it_died_says_so_to_its_sequences(world):
    """A dead stub takes a second to say so: by then a busy machine may have taken it for stuck."""
    async with triton.InferenceServerClient(world.address) as client:
        home = {id_: (await add(client, id_, 1, start=True))[1] for id_ in (601, 602)}
        orphan = next(id_ for id_ in home if home[id_] == 1)
        world.local.health.eject(key(1), Failure.STUCK, "answered nothing")
        assert world.open_on(1) == 1, "it may go on"
        world.local.health.eject(key(1), Failure.DEAD_STUB, "Stub process is not healthy")
        assert world.open_on(1) == 0
        with pytest.raises(InferenceServerException, match=f"{START_FLAG}.*not healthy"):
            await add(client, orphan, 1, end=True)


@pytest.fixture
def family(tmp_path) -> Path:
    """The shipped family digits, as one whose requests come in sequences."""
    source = tmp_path / "models"
    (source / "digits").mkdir(parents=True)
    (source / "_shared").symlink_to(MODELS / "_shared")
    for name in ("digits/1", "digits/2"):
        shutil.copytree(MODELS / name, source / name)  # a version's files are below its repository
    contract = (MODELS / "digits" / "config.pbtxt").read_text()
    idle = f"max_sequence_idle_microseconds: {IDLE_S * 10**6}"  # of the second by default, a machine may lose one
    (source / "digits" / "config.pbtxt").write_text(f"{contract}\nsequence_batching {{ {idle} oldest {{ }} }}\n")
    return source


async def test_a_family_with_sequences_starts_as_the_power_agent_starts_it_and_heals_by_an_inference(
    state, tmp_path, family
):
    """What agent and dispatcher probe with is a separate sequence; a dead stub continues saying that it is ready."""
    slices = [TritonProcess(_folder(tmp_path, version), version, source=family) for version in (1, 2)]
    images, _ = heldout()
    try:
        for version, one in enumerate(slices, 1):
            await one.ready([hosted(version)], 60)
        async with dispatching(state, tmp_path) as running, triton.InferenceServerClient(running.address) as client:
            names = ("digits-xs", "digits-s")
            statuses = [status(n, slices[n].launch.grpc_target, variant=names[n]) for n in (0, 1)]
            targets = [target(n, names[n], 0.5) for n in (0, 1)]
            await DispatcherSystem(running, state).publish(node(statuses), [route(targets)])
            await until(lambda: running.contracts.known("digits"))

            async def ask(id_: int, start: bool = False, end: bool = False) -> str:
                tensor = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
                tensor.set_data_from_numpy(images[:1])
                result = await client.infer("digits", [tensor], **in_sequence(id_, start, end), client_timeout=20)
                assert result.as_numpy("PROBABILITIES").shape == (1, 10)
                return result.get_response().parameters["trefoil_variant"].string_param

            home = {id_: await ask(id_, start=True) for id_ in range(1, 5)}
            assert set(home.values()) == set(names)
            for _ in range(3):
                assert {id_: await ask(id_) for id_ in home} == home
            slices[0].kill_stubs()
            orphan = next(id_ for id_ in home if home[id_] == names[0])
            with pytest.raises(InferenceServerException, match="not healthy"):
                await ask(orphan)
            ejections = running.local.health.ejections
            await until(lambda: (out := ejections.get(key(0), "digits")) and out.failure is Failure.DEAD_STUB)
            with pytest.raises(InferenceServerException, match=f"{START_FLAG}.*not healthy"):
                await ask(orphan)
            await asyncio.sleep(1.5)
            assert key(0) in running.local.health.ejections, "it was probed, and its refusal of the probe readmitted it"
            healer = slices[0].client()
            await healer.heal(hosted(1))
            await healer.close()
            await until(lambda: key(0) not in running.local.health.ejections)
    finally:
        for one in slices:
            one.close()


def _folder(parent: Path, version: int) -> Path:
    folder = parent / f"v{version}"
    folder.mkdir()
    return folder


async def test_a_slice_that_dies_takes_its_sequences_along_and_says_so(state, tmp_path, tritons):
    mortal = SpecialTriton(tmp_path, 2, 7, ("accumulator",))
    try:
        await mortal.ready()
        async with (
            serving(state, tmp_path, [tritons[0], mortal]) as world,
            triton.InferenceServerClient(world.address) as client,
        ):
            home = {}
            for id_ in range(501, 507):
                _, home[id_] = await add(client, id_, 1, start=True)
            orphans = [id_ for id_ in home if home[id_] == 2]
            assert orphans
            channel = world.local.routing.connections.connection(key(2)).channel
            mortal.process.kill()
            await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
            for id_ in orphans:
                with pytest.raises(InferenceServerException, match=START_FLAG) as caught:
                    await add(client, id_, 1)
                assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
            assert world.open_on(2) == 0
            for id_ in home:
                if id_ in orphans:
                    assert await add(client, id_, 5, start=True, end=True) == (5, 0)
                else:
                    assert await add(client, id_, 5, end=True) == (6, 0)
    finally:
        mortal.close()
