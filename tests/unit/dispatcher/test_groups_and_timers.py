"""What a router may ask of its shells: a group of families, a call at a time, news of carbon. Live, and simulated."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from dispatcher.queues import QUEUES
from dispatcher.routers import ROUTERS
from dispatcher.routing.async_queue import AsyncFamilyQueue
from dispatcher.routing.core import routing_table as tables
from dispatcher.routing.core.family_queue import FamilyQueue
from dispatcher.routing.request_parameters import RequestParameters
from dispatcher.service.local_worker import LocalWorker
from dispatcher.settings import DispatcherSettings
from tests.support import own_group
from tests.support.engines import request_engine
from tests.unit.dispatcher.worlds import OK, key, node, plan, status, target, ticket
from trefoil.core.carbon import CarbonRatio, CarbonReading, Series, current_ratio
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, SettingError, Unavailable
from trefoil.core.fleet import Hosted
from trefoil.core.parts import Kind, load_own_parts
from trefoil.core.plan import Route
from trefoil.core.queueing import ServiceTime
from trefoil.runtime import config
from trefoil.runtime.clock import ManualClock, WallClock
from trefoil.simulator.engines.engine import SliceService

TOGETHER = "tests.support.own_group:Together"
PATIENT = "tests.support.own_group:Patient"
URGENT = "tests.support.own_queue:Urgent"
load_own_parts({"router": [TOGETHER, PATIENT], "queue": [URGENT]}, {Kind.ROUTER: ROUTERS, Kind.QUEUE: QUEUES})


def of(family, targets, router=TOGETHER, **more):
    return Route(family, router, "fifo", tuple(targets), **more)


def asks(family, id_, **more):
    return replace(ticket(id_), family=family, **more)


def shared(n=0, credits=1):
    """One slice that hosts both families."""
    return [target(n, credits=credits)]


# --- a group ----------------------------------------------------------------------------------------------------------


def group():
    queue = FamilyQueue(5.0)
    for family in ("cats", "dogs"):
        queue.table(of(family, shared()), "", 0.0)
    return queue


def test_a_slice_of_two_families_is_offered_once_and_the_router_says_whose_ticket_goes():
    queue = group()
    first = queue.submit(asks("cats", 1), 1.0)
    assert queue.submit(asks("dogs", 2), 2.0) is None
    assert queue.submit(asks("cats", 3), 3.0) is None
    queue.router.offered.clear()
    ((who, pick),) = queue.done(asks("cats", 1), first, OK, 4.0)
    assert (who.id, pick.slice) == (2, key(0))
    assert queue.router.offered == [key(0), key(0)], "given once; then it has no credit"
    assert queue.in_flight == {key(0): 1}
    ((who, _),) = queue.done(asks("dogs", 2), pick, OK, 5.0)
    assert who.id == 3


def test_each_family_of_a_group_is_refused_for_its_own_reasons():
    queue = group()
    queue.submit(asks("cats", 1), 0.0)
    assert queue.submit(asks("dogs", 2), 0.0) is None
    assert queue.submit(asks("cats", 3), 0.0) is None
    queue.table(of("dogs", []), "it burns", 1.0)
    assert not queue.expire(5.9)
    (gone,) = queue.expire(6.1)
    assert gone.ticket.id == 2
    assert "no slice serves dogs now: it burns" in str(gone.error)
    with pytest.raises(Unavailable, match="dogs"):
        queue.submit(asks("dogs", 4), 6.2)
    assert [each.ticket.id for each in queue.redirect_waiting(True, 7.0, "cats")] == [3]
    assert queue.live == {key(0)}


async def test_a_family_that_joins_a_group_brings_along_who_waits_and_who_is_on_a_slice():
    clock = ManualClock()
    alone, whole = AsyncFamilyQueue("cats", clock, 5.0), AsyncFamilyQueue(TOGETHER, clock, 5.0)
    whole.apply_route(of("dogs", shared()), "")
    alone.apply_route(of("cats", shared(), "fifo"), "")
    flying, waiting = alone.submit(asks("cats", 1)), alone.submit(asks("cats", 2))
    bound = alone.submit_pinned(asks("cats", 3), key(0), "digits-l")
    left = alone.submit(asks("cats", 4))
    whole.take_over("cats", alone)
    whole.apply_route(of("cats", shared(credits=2)), "")
    assert alone.in_flight == {}
    assert (alone.waiting, alone.in_flight_count) == (0, 0)
    assert waiting.done(), "the router that it came to knows nothing in flight"
    left.cancel()
    alone.abandon(asks("cats", 4), left)  # whoever still knows the queue of before
    alone.done(asks("cats", 1), flying, OK)
    assert (whole.waiting, whole.in_flight) == (0, {key(0): 2})
    alone.done(asks("cats", 2), waiting.result(), OK)
    alone.done(asks("cats", 3), bound.result(), OK)
    assert (whole.in_flight, whole.in_flight_count) == ({}, 0)
    alone.take_over("cats", whole)  # and back
    alone.apply_route(of("cats", shared(), "fifo"), "")
    assert whole.submit(asks("cats", 5)).slice == key(0)
    assert alone.in_flight == {key(0): 1}


def local_worker(workers=1, **more):
    made = LocalWorker(DispatcherSettings(workers=workers, **more), "d", WallClock())
    both = replace(status(0), hosted=tuple(Hosted(f, "digits-l", 4, 0, 1, 1, 8) for f in ("cats", "dogs")))
    made.routing.set_nodes([node([both])])
    return made


async def test_a_worker_has_one_router_for_the_group_and_moves_families_between_routers():
    made, own_group.Together.made = local_worker(), 0
    made.routing.set_plan(plan([of("cats", shared()), of("dogs", shared())]))
    assert own_group.Together.made == 1
    assert made.routing.queues["cats"] is made.routing.queues["dogs"]
    first, second = (
        made.routing.queues["cats"].submit(asks("cats", 1)),
        made.routing.queues["dogs"].submit(asks("dogs", 2)),
    )
    assert made.routing.in_flight() == {key(0): 1}
    assert made.routing.queues["dogs"].waiting_of("dogs") == (1, 64)
    before = made.routing.queues["dogs"]
    made.routing.set_plan(plan([of("cats", shared()), of("dogs", shared(), "fifo")], number=2))
    assert made.routing.queues["cats"] is not made.routing.queues["dogs"]
    assert second.done(), "its own router has a credit for it"
    before.done(asks("dogs", 2), second.result(), OK)
    before.done(asks("cats", 1), first, OK)
    assert not made.routing.in_flight()
    made.routing.set_plan(plan([of("cats", shared())], number=3))
    assert made.routing.queues["dogs"].live == frozenset()
    await made.routing.connections.close()


def test_a_group_has_one_worker_and_another_one_once_that_is_dead():
    """All families of a group, whatever their slices; what another worker gets of them it forwards."""
    workers = [("d", number) for number in range(4)]
    made = plan([of("cats", shared()), of("dogs", [target(3)]), of("birds", [target(4)], "weighted")])
    hosts = tuple(Hosted(family, "digits-l", 4, 0, 1, 1, 8) for family in ("cats", "dogs", "birds"))
    nodes = [node([replace(status(n), hosted=hosts) for n in (0, 3, 4)])]

    def owners(of_workers):
        tables_ = {me: tables.build_table(made, nodes, {}, of_workers, me) for me in of_workers}
        served = {family: [me for me, one in tables_.items() if one.live(family)] for family in ("cats", "dogs")}
        assert served["cats"] == served["dogs"]
        (owner,) = served["cats"]
        assert all(one.elsewhere["cats"] == (owner,) for me, one in tables_.items() if me != owner)
        return owner

    first = owners(workers)
    assert owners([each for each in workers if each != first]) != first


@pytest.mark.parametrize("setting", ["router=fastest", "queue=shortest", "queue=dispatcher.queues.fifo:turn"])
def test_an_unknown_router_or_queue_is_refused_at_start(setting):
    with pytest.raises(SettingError, match=setting.split("=")[1].split(":")[0]):
        config.parser_main(DispatcherSettings, "dispatcher", ["--set", setting])


def test_an_operator_chooses_router_and_queue_for_every_family():
    made = tables.override_parts(
        plan([of("cats", []), of("dogs", [], "weighted")]), "fifo", "tests.support.own_queue:Urgent"
    )
    assert [(each.router, each.queue) for each in made.routes] == [("fifo", "tests.support.own_queue:Urgent")] * 2
    tables.check_plan(made, Revision())
    with pytest.raises(PlanError, match="shortest"):
        tables.check_plan(tables.override_parts(made, "", "shortest"), Revision())


# --- a time -----------------------------------------------------------------------------------------------------------


def test_at_the_time_that_the_router_asks_for_every_slice_is_offered_again():
    queue = FamilyQueue(5.0)
    queue.table(of("cats", [target(0, credits=1), target(1, credits=1)], PATIENT), "", 0.0)
    assert queue.next_s() is None
    for id_ in (1, 2, 3):
        assert queue.submit(asks("cats", id_, arrived_s=0.2 * id_), 0.2 * id_) is None
    assert queue.next_s() == 1.0
    assert queue.tick(1.0)
    assert queue.in_flight == {key(0): 1, key(1): 1}
    assert queue.next_s() is None, "asked for that time already: what is left needs a credit"


async def test_the_pump_calls_the_router_at_that_time_though_nothing_else_happens():
    clock = WallClock()
    pump = AsyncFamilyQueue("cats", clock, 5.0)
    pump.apply_route(of("cats", shared(), PATIENT), "")
    now_s = clock.monotonic_s()
    at = float(int(now_s)) - 0.95 + (now_s % 1.0)  # due in 50 ms
    waiting = pump.submit(asks("cats", 1, arrived_s=at))
    due_s = int(at) + 1
    async with asyncio.timeout(5.0):
        pick = await waiting
    assert clock.monotonic_s() >= due_s
    pump.done(asks("cats", 1), pick, OK)
    gone = pump.submit(asks("cats", 2, arrived_s=clock.monotonic_s() + 100.0))
    assert pump._timer is not None
    pump.abandon(asks("cats", 2), gone)
    assert pump._timer is None


def test_the_simulator_calls_it_at_that_very_time():
    service = SliceService(ServiceTime(100.0, 0.0), 0.9, 1.0, "digits-l", "cats", 0.0)
    table = {"cats": of("cats", [target(0, credits=4)], PATIENT)}
    made = request_engine(table, {"cats": {key(0): service}}, np.random.default_rng(1))
    first = made.windows({"cats": np.array([0.25, 0.5])}, 0.9)["cats"]
    assert (first.answered, first.queued) == (0, 2)
    second = made.windows({"cats": np.array([1.05, 2.5])}, 2.8)["cats"]
    assert second.latency_ms == pytest.approx([850.0, 700.0, 1050.0])
    assert second.queued == 1
    made.on_carbon(2.0, 2.8)
    assert made.windows({"cats": np.empty(0)}, 9.0)["cats"].queued == 1
    made.on_carbon(None, 9.0)
    assert made.windows({"cats": np.empty(0)}, 9.5)["cats"].latency_ms == pytest.approx([6600.0])


def test_a_simulated_group_is_served_as_one():
    service = {
        f: {key(0): SliceService(ServiceTime(100.0, 0.0), 0.9, 1.0, "digits-l", f, 0.0)} for f in ("cats", "dogs")
    }
    routes, rng = {f: of(f, shared()) for f in service}, np.random.default_rng(1)
    made = request_engine(routes, service, rng, grouped=True, router=routes["cats"].router)
    found = made.windows({"cats": np.array([0.0, 0.03]), "dogs": np.array([0.01])}, 1.0)
    assert found["cats"].latency_ms == pytest.approx([100.0, 270.0])
    assert found["dogs"].latency_ms == pytest.approx([190.0])
    assert found["dogs"].answered_by == {key(0): 1}
    assert found["cats"].busy_s[key(0)] == pytest.approx(0.2)
    made.set_routes(1.0, {"dogs": of("dogs", [])}, {"dogs": {}})
    found = made.windows({"cats": np.array([1.5]), "dogs": np.array([1.6])}, 30.0)
    assert (found["cats"].answered, found["dogs"].rejected) == (1, 1)


# --- carbon -----------------------------------------------------------------------------------------------------------


async def test_every_router_is_told_of_carbon_when_it_is_made_and_when_the_ratio_changes():
    made, now_s = local_worker(), WallClock().now_s()
    made.routing.set_plan(plan([of("cats", shared())]))
    router = made.routing.queues["cats"]._queue.router
    series = Series(zone="grid")
    reading = CarbonReading(series, now_s - 60.0, now_s + 60.0, 100.0)
    for cir in (0.8, 0.8, 1.2):
        made.routing.set_carbon_ratio(CarbonRatio(series, 100.0, cir, observed_at_s=now_s), reading)
    made.routing.set_carbon_ratio(None, None)
    assert router.ratios == [None, 0.8, 1.2, None]
    made.routing.set_carbon_ratio(CarbonRatio(series, 100.0, 0.7, observed_at_s=now_s), reading)
    queue = FamilyQueue(5.0)
    queue.carbon(0.7, 0.0)
    queue.table(of("cats", shared()), "", 0.0)
    assert queue.router.ratios == [0.7]
    await made.routing.connections.close()


def test_a_ratio_that_is_old_or_of_another_series_or_without_its_reading_is_not_known():
    grid, other = Series(zone="grid"), Series(zone="other")
    ratio, reading = CarbonRatio(grid, 100.0, 0.8, observed_at_s=1000.0), CarbonReading(grid, 1000.0, 1300.0, 80.0)
    assert current_ratio(ratio, reading, 1600.0) == 0.8
    assert current_ratio(ratio, reading, 1600.1) is None
    assert current_ratio(ratio, replace(reading, series=other), 1100.0) is None
    assert current_ratio(ratio, None, 1100.0) is None
    assert current_ratio(None, reading, 1100.0) is None


async def test_whom_a_router_held_back_for_carbon_may_go_when_it_changes():
    pump = AsyncFamilyQueue("cats", ManualClock(10.0), 5.0)
    pump.apply_route(of("cats", shared(), PATIENT), "")
    pump.on_carbon(1.5)
    waiting = pump.submit(asks("cats", 1, arrived_s=-5.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    pump.on_carbon(0.9)
    assert waiting.done()


# --- objectives of classes --------------------------------------------------------------------------------------------


async def test_a_ticket_has_its_own_objective_or_its_classs_or_its_familys():
    made = local_worker()
    made.routing.set_plan(plan([of("cats", shared(), class_slo_ms={"batch": 900.0})], slo_ms=200.0))
    assert made.routing.slo_ms("cats", RequestParameters(slo_class="batch", slo_ms=50.0)) == 50.0
    assert made.routing.slo_ms("cats", RequestParameters(slo_class="batch")) == 900.0
    assert made.routing.slo_ms("cats", RequestParameters(slo_class="other")) == 200.0
    assert made.routing.slo_ms("cats", RequestParameters()) == 200.0
    assert made.routing.slo_ms("dogs", RequestParameters()) == 0.0
    await made.routing.connections.close()


# --- statuses, one a second and node ----------------------------------------------------------------------------------


async def test_a_status_that_says_what_the_one_before_said_builds_no_table(monkeypatch):
    routing, built = LocalWorker(DispatcherSettings(), "d", ManualClock(1000.0)).routing, []
    build = tables.build_table
    monkeypatch.setattr(tables, "build_table", lambda *given: built.append(given) or build(*given))
    routing.set_nodes([node([status(0), status(1)])])
    routing.set_plan(plan([Route("digits", "weighted", "fifo", (target(0, weight=0.5), target(1, weight=0.5)), 10)]))
    routing.set_nodes([replace(node([status(0), status(1)]), observed_at_s=1001.0)])
    before, table = len(built), routing.table
    for second in range(2, 6):
        routing.set_nodes([replace(node([status(0), status(1)]), observed_at_s=1000.0 + second)])
    assert len(built) == before
    assert routing.table is table
    routing.set_nodes([node([status(0)])])
    assert len(built) == before + 1
    assert [t.slice for t in routing.table.routes["digits"].targets] == [key(0)]
