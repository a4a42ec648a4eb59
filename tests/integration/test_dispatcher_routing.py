"""Floors, priorities, SLOs and explanations through a dispatcher that runs."""

import asyncio
from collections import Counter

import pytest
from tritonclient.utils import InferenceServerException

from protos.dispatcher.v1 import dispatcher_pb2
from tests.support.dispatching import DispatcherSystem, dispatcher_system, image, until
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import ACCURACIES, target
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.core.fleet import SliceState

pytestmark = pytest.mark.integration

XS, L = "digits-xs", "digits-l"


@pytest.fixture
async def system(state, tmp_path, request):
    """A small and a large variant. Its parameter: how long requests wait for what is planned and not live."""
    slices, wait_s = (FakeTriton(1), FakeTriton(4)), getattr(request, "param", 60.0)
    async with dispatcher_system(state, tmp_path, *slices, serve=False, no_slice_wait_s=wait_s) as made:
        yield made


async def ask(system: DispatcherSystem, first: int = 3, **parameters):
    return await system.infer(first, parameters=parameters or None)


def variant(answer):
    return answer.get_response().parameters["trefoil_variant"].string_param


async def test_a_floor_is_kept_and_shares_hold_all_the_same(system):
    await system.serve((0.5, 0.5))
    served = Counter()
    for n in range(40):
        answer = await ask(system, trefoil_min_accuracy="0.95") if n % 4 == 0 else await ask(system)
        served[variant(answer)] += 1
        if n % 4 == 0:
            assert variant(answer) == L
    assert served == {XS: 20, L: 20}


async def test_a_floor_beyond_what_is_live_is_refused_with_what_is(system):
    await system.serve(targets=[target(0, XS)])
    with pytest.raises(InferenceServerException, match=r"best that is live is 0\.886") as refused:
        await ask(system, trefoil_min_accuracy="0.9")
    assert refused.value.status() == "StatusCode.FAILED_PRECONDITION"
    assert (await ask(system, trefoil_min_accuracy="0.886")) is not None


async def test_a_floor_waits_for_what_is_planned(system):
    await system.serve(states=(SliceState.READY, SliceState.STARTING))
    waiting = asyncio.create_task(ask(system, trefoil_min_accuracy="0.95"))
    pump = system.queue
    await until(lambda: pump.waiting == 1)
    assert variant(await ask(system)) == XS, "it stands in nobody's way"
    await system.serve()
    assert variant(await waiting) == L


@pytest.mark.parametrize("system", [0.5], indirect=True)
async def test_a_floor_that_does_not_come_gives_up_in_time(system):
    await system.serve()
    await system.serve(states=(SliceState.READY, SliceState.FAILED))
    await until(lambda: system.local.routing.table.reach["digits"].live == ACCURACIES[XS])
    with pytest.raises(InferenceServerException, match=r"best that is live is 0\.886"):
        await ask(system, trefoil_min_accuracy="0.95")
    assert system.queue.waiting == 0


async def test_a_request_that_waits_for_a_plan_that_changes_is_told(system):
    await system.serve((0.5, 0.5), (SliceState.READY, SliceState.STARTING))
    waiting = asyncio.create_task(ask(system, trefoil_min_accuracy="0.95"))
    await until(lambda: system.queue.waiting == 1)
    await system.serve(states=(SliceState.READY, SliceState.STARTING), targets=[target(0, XS)])
    with pytest.raises(InferenceServerException, match="nothing serves digits that accurately"):
        await waiting


async def test_the_urgent_goes_first_and_the_slo_of_a_request_is_its_own(system):
    await system.serve(targets=[target(0, XS, credits=1)])
    system.slices[0].gate.clear()
    first = asyncio.create_task(ask(system))
    await until(lambda: len(system.slices[0].requests) == 1)
    order = []

    async def ask_in_turn(name, priority, slo_ms):
        await system.client.infer(
            "digits", [image()], priority=priority, parameters={"trefoil_slo_ms": slo_ms}, request_id=name
        )
        order.append(name)

    pump = system.queue
    tasks = []
    for n, (name, priority) in enumerate((("late", 8), ("usual", 0), ("usual too", 0), ("urgent", 1)), 1):
        tasks.append(asyncio.create_task(ask_in_turn(name, priority, "60000" if name == "late" else "0.001")))
        await until(lambda n=n: pump.waiting == n)
    system.slices[0].gate.set()
    await asyncio.gather(first, *tasks)
    assert order == ["urgent", "usual", "usual too", "late"]
    window = system.local.accounting.load.close_window(0.0, system.local.routing.table.revision)
    within = sum(cell.within_slo for cell in window.cells)
    assert within <= 2, "the first by the family's SLO, one by its own; three asked for a microsecond"


async def test_explain_tells_where_a_request_would_go_and_why_others_cannot_have_it(system):
    await system.serve((1.0, 0.0))
    admin = system.running.siblings

    async def explain(**params):
        request = dispatcher_pb2.ExplainRequestRequest(family="digits", params=params)
        return await admin.ExplainRequest(request, None)

    told = await explain()
    assert [(t.target.variant, t.eligible) for t in told.targets] == [(XS, True), (L, False)]
    assert "at once" in told.why
    assert told.targets[1].why == "has no share of the traffic"
    assert told.router == "weighted"
    told = await explain(trefoil_min_accuracy="0.95", priority="1")
    assert told.why.startswith("refused:")
    assert "0.886 is below 0.95" in told.targets[0].why
    system.slices[0].gate.clear()
    tasks = [asyncio.create_task(ask(system)) for _ in range(3)]
    await until(lambda: system.queue.waiting == 1)
    told = await explain()
    assert (told.waiting, told.targets[0].in_flight) == (1, 2)
    assert told.why.startswith("waits (1 wait already)")
    system.slices[0].gate.set()
    await asyncio.gather(*tasks)
    with pytest.raises(InvalidInput, match="does not affect where a request goes"):
        await explain(temperature="0.5")
    with pytest.raises(InvalidInput, match="whole number"):
        await explain(priority="high")
    with pytest.raises(InvalidInput, match="trefoil_min_acuracy"):
        await explain(trefoil_min_acuracy="0.5")
    with pytest.raises(NotFound):
        await admin.ExplainRequest(dispatcher_pb2.ExplainRequestRequest(family="faces"), None)


@pytest.mark.parametrize("router", ["least_loaded", "tests.support.own_router:LongestIdle"])
async def test_a_router_of_the_operators_choice_serves_instead_of_the_plans(state, tmp_path, router):
    async with dispatcher_system(state, tmp_path, FakeTriton(4), router=router) as system:
        assert system.local.routing.table.routes["digits"].router == router
        assert variant(await system.infer(6)) == L
