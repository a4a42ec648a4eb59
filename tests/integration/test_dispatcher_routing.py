"""Floors, priorities, SLOs and explanations through a dispatcher that runs."""

import asyncio
from collections import Counter

import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from dispatcher.fronts.admin import DispatcherAdmin
from protos.dispatcher.v1 import dispatcher_pb2
from tests.support.dispatching import Plane, dispatching, image, until
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import ACCURACIES, node, plan, route, status, target
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.core.fleet import SliceState

pytestmark = pytest.mark.integration

XS, L = "digits-xs", "digits-l"


class World:
    """A small and a large variant, each on a slice, and a client."""

    def __init__(self, running, plane, small, large, client):
        self.running, self.plane, self.small, self.large, self.client = running, plane, small, large, client
        self.number = 0

    async def planned(self, targets, states=(SliceState.READY, SliceState.READY)):
        slices = (self.small, self.large)
        statuses = [status(n, slices[n].target, states[n], (XS, L)[n]) for n in range(2)]
        self.number += 1
        await self.plane.node(node(statuses))
        await self.plane.plan(plan([route(targets)], self.number))
        local = self.running.local

        def seen():
            return [s.state for device in local.routing.nodes["node0"].devices for s in device.slices]

        await until(
            lambda: local.routing.table.revision.number == self.number and seen() == [each.state for each in statuses]
        )

    async def ask(self, first=3, **parameters):
        return await self.client.infer("digits", [image(first)], parameters=parameters or None)


@pytest.fixture
async def world(state, tmp_path, request):
    """Its parameter: how long requests wait for what is planned and not live."""
    wait_s = getattr(request, "param", 60.0)
    async with (
        FakeTriton(1) as small,
        FakeTriton(4) as large,
        dispatching(state, tmp_path, no_slice_wait_s=wait_s) as running,
        triton.InferenceServerClient(running.address) as client,
    ):
        yield World(running, Plane(state), small, large, client)


def variant(answer):
    return answer.get_response().parameters["trefoil_variant"].string_param


async def test_a_floor_is_kept_and_shares_hold_all_the_same(world):
    await world.planned([target(0, XS, 0.5), target(1, L, 0.5)])
    served = Counter()
    for n in range(40):
        answer = await world.ask(trefoil_min_accuracy="0.95") if n % 4 == 0 else await world.ask()
        served[variant(answer)] += 1
        if n % 4 == 0:
            assert variant(answer) == L
    assert served == {XS: 20, L: 20}


async def test_a_floor_beyond_what_is_live_is_refused_with_what_is(world):
    await world.planned([target(0, XS, 1.0)])
    with pytest.raises(InferenceServerException, match=r"best that is live is 0\.886") as refused:
        await world.ask(trefoil_min_accuracy="0.9")
    assert refused.value.status() == "StatusCode.FAILED_PRECONDITION"
    assert (await world.ask(trefoil_min_accuracy="0.886")) is not None


async def test_a_floor_waits_for_what_is_planned(world):
    targets = [target(0, XS, 0.5), target(1, L, 0.5)]
    await world.planned(targets, (SliceState.READY, SliceState.STARTING))
    waiting = asyncio.create_task(world.ask(trefoil_min_accuracy="0.95"))
    pump = world.running.local.routing.queues["digits"]
    await until(lambda: pump.waiting == 1)
    assert variant(await world.ask()) == XS, "it stands in nobody's way"
    await world.planned(targets)
    assert variant(await waiting) == L


@pytest.mark.parametrize("world", [0.5], indirect=True)
async def test_a_floor_that_does_not_come_gives_up_in_time(world):
    targets = [target(0, XS, 0.5), target(1, L, 0.5)]
    await world.planned(targets)
    await world.planned(targets, (SliceState.READY, SliceState.FAILED))
    await until(lambda: world.running.local.routing.table.reach["digits"].live == ACCURACIES[XS])
    with pytest.raises(InferenceServerException, match=r"best that is live is 0\.886"):
        await world.ask(trefoil_min_accuracy="0.95")
    assert world.running.local.routing.queues["digits"].waiting == 0


async def test_a_request_that_waits_for_a_plan_that_changes_is_told(world):
    await world.planned([target(0, XS, 0.5), target(1, L, 0.5)], (SliceState.READY, SliceState.STARTING))
    waiting = asyncio.create_task(world.ask(trefoil_min_accuracy="0.95"))
    await until(lambda: world.running.local.routing.queues["digits"].waiting == 1)
    await world.planned([target(0, XS, 1.0)], (SliceState.READY, SliceState.STARTING))
    with pytest.raises(InferenceServerException, match="nothing serves digits that accurately"):
        await waiting


async def test_the_urgent_goes_first_and_the_slo_of_a_request_is_its_own(world):
    await world.planned([target(0, XS, 1.0, credits=1)])
    world.small.gate.clear()
    first = asyncio.create_task(world.ask())
    await until(lambda: len(world.small.requests) == 1)
    order = []

    async def ask(name, priority, slo_ms):
        await world.client.infer(
            "digits", [image()], priority=priority, parameters={"trefoil_slo_ms": slo_ms}, request_id=name
        )
        order.append(name)

    pump = world.running.local.routing.queues["digits"]
    tasks = []
    for n, (name, priority) in enumerate((("late", 8), ("usual", 0), ("usual too", 0), ("urgent", 1)), 1):
        tasks.append(asyncio.create_task(ask(name, priority, "60000" if name == "late" else "0.001")))
        await until(lambda n=n: pump.waiting == n)
    world.small.gate.set()
    await asyncio.gather(first, *tasks)
    assert order == ["urgent", "usual", "usual too", "late"]
    window = world.running.local.accounting.load.close_window(0.0, world.running.local.routing.table.revision)
    within = sum(cell.within_slo for cell in window.cells)
    assert within <= 2, "the first by the family's SLO, one by its own; three asked for a microsecond"


async def test_explain_tells_where_a_request_would_go_and_why_others_cannot_have_it(world):
    await world.planned([target(0, XS, 1.0), target(1, L, 0.0)])
    admin = DispatcherAdmin(world.running.local, world.running.loop)

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
    world.small.gate.clear()
    tasks = [asyncio.create_task(world.ask()) for _ in range(3)]
    await until(lambda: world.running.local.routing.queues["digits"].waiting == 1)
    told = await explain()
    assert (told.waiting, told.targets[0].in_flight) == (1, 2)
    assert told.why.startswith("waits (1 wait already)")
    world.small.gate.set()
    await asyncio.gather(*tasks)
    with pytest.raises(InvalidInput, match="says nothing about where a request goes"):
        await explain(temperature="0.5")
    with pytest.raises(InvalidInput, match="whole number"):
        await explain(priority="high")
    with pytest.raises(InvalidInput, match="trefoil_min_acuracy"):
        await explain(trefoil_min_acuracy="0.5")
    with pytest.raises(NotFound):
        await admin.ExplainRequest(dispatcher_pb2.ExplainRequestRequest(family="faces"), None)


@pytest.mark.parametrize("router", ["least_loaded", "tests.support.own_router:LongestIdle"])
async def test_a_router_of_the_operators_choice_serves_instead_of_the_plans(state, tmp_path, router):
    async with (
        FakeTriton(4) as slice_,
        dispatching(state, tmp_path, router=router) as running,
        triton.InferenceServerClient(running.address) as client,
    ):
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0)])]))
        await until(lambda: running.local.routing.table.live("digits"))
        assert running.local.routing.table.routes["digits"].router == router
        assert variant(await client.infer("digits", [image(6)])) == L
