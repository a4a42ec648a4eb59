"""A real dispatcher in front of slices that die, err, go away and come back."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
from tritonclient.utils import InferenceServerException

from dispatcher.slice_health.core import ejection
from tests.integration.test_dispatcher import code, variant
from tests.integration.test_dispatcher_reliability import Process
from tests.support import fake_triton as fake
from tests.support.dispatching import (
    DispatcherSystem,
    dispatcher_system,
    request,
    stop_idle,
    until,
)
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import key, node, plan, route, target
from trefoil.core.demand import TableAck
from trefoil.core.fleet import SliceState

pytestmark = pytest.mark.integration


@pytest.fixture
async def system(state, tmp_path) -> AsyncIterator[DispatcherSystem]:
    """Slices of digits-xs and digits-l, which a test's `serve` publishes."""
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), FakeTriton(version=4), serve=False) as made:
        yield made


async def test_a_killed_slice_fails_only_what_was_in_flight_and_comes_back(system):
    stop = asyncio.Event()
    codes: Counter = Counter()
    variants: Counter = Counter()

    async def load():
        while not stop.is_set():
            try:
                variants[variant(await system.infer())] += 1
                codes["OK"] += 1
            except InferenceServerException as error:
                codes[code(error)] += 1

    system.slices[0].latency_s = 0.01
    async with Process(version=4, latency_ms=10.0) as killed:
        system.slices[1] = killed
        await system.serve()
        users = [asyncio.create_task(load()) for _ in range(8)]
        await until(lambda: codes["OK"] > 50)
        in_flight = 2
        killed.send(signal.SIGKILL)
        await until(lambda: len(system.live) == 1)
        before = codes["OK"]
        await until(lambda: codes["OK"] > before + 50)
    async with Process(version=4, latency_ms=10.0, port=killed.port):
        await until(lambda: len(system.live) == 2)
        answered = variants["digits-l"]
        await until(lambda: variants["digits-l"] > answered + 10)
        stop.set()
        await asyncio.gather(*users)
    assert sum(n for name, n in codes.items() if name != "OK") <= in_flight
    assert set(codes) <= {"OK", "UNAVAILABLE"}


async def test_a_request_that_nobody_took_goes_to_another_slice_once(system):
    await system.serve()
    await stop_idle(system.running, key(1), system.slices[1])
    results = await asyncio.gather(*(system.infer() for _ in range(8)))
    assert {variant(result) for result in results} == {"digits-xs"}
    assert system.local.routing.table.why["digits"].startswith("share 0.500 is spread over 1 live slices")


@pytest.mark.parametrize("error", [fake.EXITING, fake.UNLOADED])
async def test_what_a_slice_that_is_going_away_answers_is_its_clients_and_a_probe_ejects_it(system, error):
    await system.serve()
    system.slices[1].error, system.slices[1].ready = error, False
    outcomes = await asyncio.gather(*(system.infer() for _ in range(6)), return_exceptions=True)
    failed = [each for each in outcomes if isinstance(each, InferenceServerException)]
    assert {code(each) for each in failed} == {"UNAVAILABLE"}
    assert len(failed) == len(system.slices[1].requests), "an answer is an answer: nothing is sent twice"
    await until(lambda: len(system.live) == 1)
    results = await asyncio.gather(*(system.infer() for _ in range(6)))
    assert {variant(result) for result in results} == {"digits-xs"}
    system.slices[1].error, system.slices[1].ready = None, True
    await until(lambda: len(system.live) == 2)


async def test_a_model_may_answer_whatever_it_likes_to_one_client_and_no_other_is_touched(system):
    """Every status in every text that Triton has for slices in trouble; the model is well for everything else."""
    await system.serve()
    texts = ("failed to connect", "Socket closed", "Server exiting", "Request for unknown model: 'digits' is not found",
             "Stub process 'digits_0_0' is not healthy.", "Exceeds maximum queue size", "")  # fmt: skip
    stop, served = asyncio.Event(), 0

    async def other():
        nonlocal served
        while not stop.is_set():
            assert (await system.infer()).as_numpy("PROBABILITIES") is not None
            served += 1

    others = [asyncio.create_task(other()) for _ in range(2)]
    bad = 0
    for slice_ in (system.slices[0], system.slices[1]):
        slice_.refuses = lambda request: request.raw_input_contents[0][0] == 99
    for status_code in grpc.StatusCode:
        for text in texts if status_code is not grpc.StatusCode.OK else ():
            system.slices[0].error = system.slices[1].error = (status_code, text)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await system.stub.ModelInfer(request(first=99))
            bad += 1
            assert (caught.value.code(), caught.value.details()) == (status_code, text)
    stop.set()
    await asyncio.gather(*others)
    asked = [
        each for s in (system.slices[0], system.slices[1]) for each in s.requests if each.raw_input_contents[0][0] == 99
    ]
    assert len(asked) == bad, "each was executed once"
    assert served > 0
    assert not system.local.health.ejected_total
    assert not system.local.accounting.retries_total.total()


async def test_requests_wait_for_the_only_slice_instead_of_failing_on_it(system):
    await system.plane.node(node([system.statuses()[0]]))
    await system.plane.plan(plan([route([target(0, "digits-xs")])]))
    await until(lambda: len(system.live) == 1)
    await system.infer()
    await stop_idle(system.running, key(0), system.slices[0])
    waiting = [asyncio.create_task(system.infer()) for _ in range(5)]
    await until(lambda: len(system.live) == 0)
    await until(lambda: system.queue.waiting == 5)
    await system.slices[0].start()
    assert len(await asyncio.gather(*waiting)) == 5


async def test_a_dead_stub_is_ejected_reported_and_readmitted_by_an_inference_only(system, state):
    await system.serve()
    system.slices[1].error, system.slices[1].error_delay_s = fake.DEAD_STUB, 0.05
    outcomes = await asyncio.gather(*(system.infer() for _ in range(8)), return_exceptions=True)
    failed = [each for each in outcomes if isinstance(each, InferenceServerException)]
    assert {code(each) for each in failed} == {"INTERNAL"}
    asked = [each for each in system.slices[1].requests if each.id != "trefoil-probe"]
    assert len(failed) == len(asked) >= 1, "it serves until a probe has proved it"
    await until(lambda: len(system.live) == 1)

    async def ejected():
        acks = await state.scan(state.keys.ack_prefix(), TableAck)
        return {load.slice: load.ejected for ack in acks.values() for load in ack.slices}

    async with asyncio.timeout(60):
        while (await ejected()).get(key(1)) is not True:
            await asyncio.sleep(0.02)
    assert (await ejected())[key(0)] is False
    probes = len(system.slices[1].requests)
    await until(lambda: len(system.slices[1].requests) >= probes + 2)
    assert len(system.live) == 1, "readiness stays true while the stub is dead: it proves nothing"
    system.slices[1].error = None
    await until(lambda: len(system.live) == 2)
    assert system.slices[1].requests[-1].id == "trefoil-probe"


async def test_slices_that_have_just_become_ready_fail_nobody(system):
    """Their addresses are known long before they listen."""
    await system.slices[0].stop()
    await system.slices[1].stop()
    await system.serve(states=(SliceState.STARTING, SliceState.STARTING))
    await asyncio.sleep(1.0)  # long enough for a channel that tried to connect to be in its backoff
    await system.slices[0].start()
    await system.slices[1].start()
    await system.plane.node(node(system.statuses()))
    await until(lambda: len(system.live) == 2)
    await asyncio.gather(*(system.infer() for _ in range(20)))
    assert not system.local.health.ejected_total


async def test_what_the_agent_publishes_anew_is_probed_at_once(system, monkeypatch):
    await system.serve()
    system.slices[1].error = fake.DEAD_STUB
    with monkeypatch.context() as patient:
        patient.setattr(ejection, "PROBE_FIRST_S", 600.0)
        await asyncio.gather(*(system.infer() for _ in range(4)), return_exceptions=True)
        await until(lambda: len(system.live) == 1)
    due_s = system.local.health.ejections.next_probe_at_s()
    system.slices[1].error = None
    await system.plane.node(node([system.statuses()[0], system.statuses(since_s=99.0)[1]]))
    await until(lambda: len(system.live) == 2)
    assert system.local.clock.monotonic_s() < due_s
