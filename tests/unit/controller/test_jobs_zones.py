"""Jobs planned over zones: what peers offer is checked, planned with, and left out once it cannot be."""

import asyncio
import dataclasses
import math

import pytest

from controller.jobs import zone_offers
from controller.jobs.core.offers import check_offers, left_over, slots_ahead, zones_of
from controller.jobs.core.planning import plan_jobs
from controller.jobs.core.requests import HEADROOM, request_offers
from controller.jobs.planning_loop import PERIOD_S, JobsPlanning
from controller.jobs.zone_offers import ZoneOffers, offers_message, offers_of
from controller.settings import ControllerSettings
from dispatcher.jobs.core.planned_hours import STALE_S
from dispatcher.jobs.planned_hours import Left
from dispatcher.settings import DispatcherSettings
from tests.support.jobs import HOUR, hour, hours_of, job
from tests.unit.controller.test_jobs_live import BEGIN_S, CLEAN, Leader, World
from trefoil.core.carbon import CarbonBand
from trefoil.core.errors import InvalidInput, SettingError, Unavailable, UnknownCall
from trefoil.core.jobs.planned import DevicePool, ItemCost, Offers, Slot

SLOTS = tuple(dataclasses.replace(hour(n, 100), zone="DE") for n in range(3))
GOOD = Offers("DE", 10.0, SLOTS)


def with_pool(**changes):
    pool = dataclasses.replace(SLOTS[0].pools[0], **changes)
    return dataclasses.replace(GOOD, slots=(dataclasses.replace(SLOTS[0], pools=(pool,)),))


def with_cost(**changes):
    return with_pool(costs=(dataclasses.replace(SLOTS[0].pools[0].costs[0], **changes),))


def with_slot(**changes):
    return dataclasses.replace(GOOD, slots=(dataclasses.replace(SLOTS[0], **changes),))


def test_a_good_offer_passes():
    check_offers(GOOD, "DE", 15.0)


@pytest.mark.parametrize(
    ("offers", "says"),
    [
        (dataclasses.replace(GOOD, zone="FR"), "offers.zone = 'FR': other_zones.zone says 'DE'"),
        (dataclasses.replace(GOOD, made_at_s=500.0), "its clock is 485 s ahead of this one"),
        (dataclasses.replace(GOOD, made_at_s=-500.0), "its clock is 515 s behind this one. Remedy: set one of the two"),
        (with_pool(free_s=-1.0), "offers.slots.pools.free_s = -1"),
        (with_pool(free_s=math.nan), "offers.slots.pools.free_s = nan"),
        (with_pool(sure_s=math.inf), "offers.slots.pools.sure_s = inf"),
        (with_pool(free_s=1e12), "offers.slots.pools.free_s = 1000000000000"),
        (with_pool(name=""), "offers.slots.pools.name = 0"),
        (with_cost(active_j=0.0), "offers.slots.pools.items.active_j = 0"),
        (with_cost(device_s=-1.0), "offers.slots.pools.items.device_s = -1"),
        (with_cost(accuracy=1.5), "offers.slots.pools.items.accuracy = 1.5"),
        (with_cost(request_s=5e-324), "offers.slots.pools.items.request_s = 5e-324"),
        (with_cost(request_j=-1.0), "offers.slots.pools.items.request_j = -1"),
        (with_slot(pue=0.1), "offers.slots.pue = 0.1"),
        (with_slot(carbon=dataclasses.replace(SLOTS[0].carbon, p50_g_per_kwh=-5.0)), "p50_g_per_kwh = -5"),
        (with_slot(carbon=dataclasses.replace(SLOTS[0].carbon, ends_at_s=0.0)), "offers.slots.ends_at = 0"),
        (with_slot(carbon=dataclasses.replace(SLOTS[0].carbon, starts_at_s=-9e5)), "offers.slots.starts_at = -9"),
        (with_slot(carbon=dataclasses.replace(SLOTS[0].carbon, starts_at_s=math.nan)), "offers.slots.starts_at = nan"),
        (with_slot(carbon=dataclasses.replace(SLOTS[0].carbon, p50_g_per_kwh=math.nan)), "p50_g_per_kwh = nan"),
        (with_slot(pue=math.nan), "offers.slots.pue = nan"),
        (with_cost(device_s=math.nan), "offers.slots.pools.items.device_s = nan"),
        (with_cost(active_j=math.inf), "offers.slots.pools.items.active_j = inf"),
        (with_slot(pools=SLOTS[0].pools * 2), "offers.slots.pools.name: two of one name"),
        (dataclasses.replace(GOOD, slots=SLOTS + SLOTS), "offers.slots.starts_at = 0"),
        (dataclasses.replace(GOOD, slots=SLOTS * 40), "offers.slots = 120: is not in 0..49"),
    ],
)
def test_offers_that_cannot_be_are_refused_whole(offers, says):
    with pytest.raises(InvalidInput, match=says.replace("(", r"\(")) as refused:
        check_offers(offers, "DE", 15.0)
    assert "Remedy: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_old_offer_keeps_what_is_left_of_its_hours():
    first, second = slots_ahead(SLOTS, 1.5 * HOUR)
    assert (first.carbon.starts_at_s, first.pools[0].free_s) == (HOUR, 0.5 * HOUR)
    assert second == SLOTS[2]
    assert slots_ahead(SLOTS[1:], 0.5 * HOUR)[0].carbon.starts_at_s == 0.5 * HOUR, "the first has begun"
    assert slots_ahead(SLOTS, 3 * HOUR) == [], "hours in the past are none"


def test_only_what_own_jobs_leave_over_is_offered():
    slots = [hour(n, 100 + n, asleep=1) for n in range(3)]
    plan = plan_jobs([job(hours=1.25, by=3)], slots, 0.0)
    offered = left_over(slots, plan.portions)
    assert [pool.name for slot in offered for pool in slot.pools] == ["awake"] * 3
    assert [round(slot.pools[0].free_s / HOUR, 6) for slot in offered] == [0.0, 0.75, 1.0]


@pytest.mark.parametrize(
    ("allowed", "bounded", "zones"),
    [
        ((), False, ("GB",)),
        (("GB",), False, ("GB",)),
        (("GB", "DE"), False, ("GB", "DE")),
        (("DE", "GB", "DE", "GB"), False, ("GB", "DE")),
        (("DE",), False, ("", "DE")),
        (("GB", "DE"), True, ("GB",)),
        (("DE",), True, ()),
        (("FR",), False, ()),
    ],
)
def test_zones_of_a_job(allowed, bounded, zones):
    assert zones_of(allowed, "GB", {"DE": ()}, bounded) == zones


def test_a_job_that_may_not_run_at_home_pays_for_its_moves():
    """Of two peers' hours the cleaner one is taken; moving costs the same in both."""
    there = [dataclasses.replace(hour(n, 300 - n), zone="DE") for n in range(2)]
    plan = plan_jobs([job(by=2, zones=("", "DE"), transfer_j=5.0)], [hour(0, 1), *there], 0.0)
    assert hours_of(plan) == {("DE", 1, "awake"): 1.0}
    assert plan.grams == pytest.approx(36_000 * 15.0 * 299 / 3.6e6)


class FakeZones(ZoneOffers):
    """Peers that offer what a test says."""

    def __init__(self, clock, offered) -> None:
        super().__init__((), None, clock)
        self.offered, self.asked = offered, []

    async def ask(self, zones, now_s):
        self.asked.append(sorted(zones))
        return {zone: slots_ahead(slots, now_s) for zone, slots in self.offered.items() if zone in zones}, {}


async def world_with(carbon: float, per_s: float = 30.0) -> World:
    """A world whose peer DE has one carbon intensity, and time for so many items a second."""
    world = await World().begin()
    cost = ItemCost("digits", device_s=0.01, active_j=1.0, accuracy=0.95)
    slots = tuple(
        dataclasses.replace(
            hour(n, carbon, awake=per_s * 0.01, cost=cost),
            zone="DE",
            carbon=dataclasses.replace(
                hour(n, carbon).carbon, starts_at_s=BEGIN_S + n * HOUR, ends_at_s=BEGIN_S + (n + 1) * HOUR
            ),
        )
        for n in range(48)
    )
    world.peers = FakeZones(world.clock, {"DE": slots})
    lease = world.planning._leadership.lease
    world.planning = JobsPlanning(
        world.state,
        Leader(world.state, lease),
        world.view,
        world.inputs,
        world.keys,
        world.metrics,
        world.clock,
        world.peers,
    )
    return world


async def test_hours_of_a_cleaner_zone_are_planned_for_jobs_that_name_it():
    world = await world_with(carbon=5.0)
    world.submit("both", 100_000, by_h=4, zones=("test", "DE"))
    world.submit("home", 100_000, by_h=4)
    await world.play(1 / 60, step_s=60.0)
    jobs = {one.job_id: one for one in (await world.plan()).jobs}
    assert {one.zone for one in jobs["f0/both"].hours} == {"DE"}
    assert {one.p50_g_per_kwh for one in jobs["f0/both"].hours} == {5.0}
    assert {one.zone for one in jobs["f0/home"].hours} == {""}
    assert world.peers.asked == [["DE", "test"]]
    assert {one.zone for one in world.inputs.flexible} == {"test"}, "a peer's demand is not this fleet's"
    room, why = world.hours.may_start(world.jobs["both"], 100_000, 100_000, {"DE"})
    assert (room, why) == (0.0, "waits for cleaner hours: those of now are for zone DE")
    assert world.hours.may_start(world.jobs["both"], 100_000, 100_000)[0] == math.inf, "that zone takes none now"
    count, until_s = world.hours.to_send(world.jobs["both"], "DE", 10**9)
    assert count == pytest.approx(100_000, abs=1)
    assert until_s <= world.jobs["both"].complete_by_s - 300.0
    world.hours.note_sent(world.jobs["both"], "DE", 60_000)
    assert world.hours.to_send(world.jobs["both"], "DE", 10**9)[0] == count - 60_000
    assert world.hours.may_start(world.jobs["both"], 100_000, 40_000, {"DE"})[0] == 0.0, "they are still for DE"


async def test_joules_of_moving_keep_items_at_home():
    world = await world_with(carbon=290.0)
    world.submit("day", 100_000, by_h=4, zones=("test", "DE"))
    for transfer_j, zones in ((0.0, {"DE"}), (1000.0, {""})):
        world.clock.move(61.0)
        world.hours._written_s = -math.inf
        await world.hours.write(world.owner, [Left(world.jobs["day"], 100_000, 0.0, 0, transfer_j)])
        await world.planning.step()
        assert {one.zone for one in (await world.plan()).jobs[0].hours} == zones


async def test_items_that_a_peer_has_are_not_planned_here():
    world = await world_with(carbon=5.0)
    world.submit("day", 1000, by_h=4, zones=("test", "DE"))
    await world.hours.write(world.owner, [Left(world.jobs["day"], 1000, 0.0, 400)])
    await world.planning.step()
    assert (await world.plan()).jobs[0].items_left == 600
    await world.hours.write(world.owner, [Left(world.jobs["day"], 1000, 0.0, 1000)])
    await world.planning.step()
    assert (await world.plan()).jobs == ()


async def test_a_zone_offers_what_its_plan_leaves_over():
    world = await World(per_s=60.0).begin()
    before = await world.planning.offers()
    check_offers(offers_of(offers_message(before)), "test", world.clock.now_s())
    sent, mine = (one.slots[0].pools[0] for one in (offers_of(offers_message(before)), before))
    assert (sent.name, sent.free_s, sent.sure_s, sent.costs) == (mine.name, mine.free_s, mine.sure_s, mine.costs)
    world.submit("day", 400_000, by_h=24)
    await world.play(1 / 60, step_s=60.0)
    after = await world.planning.offers()
    clean = [n for n, slot in enumerate(after.slots) if int((slot.carbon.starts_at_s - BEGIN_S) // HOUR) in CLEAN]
    taken = [sum(pool.free_s for pool in before.slots[n].pools) - sum(p.free_s for p in after.slots[n].pools)
             for n in clean]  # fmt: skip
    assert sum(taken) > 0
    assert after.slots[0].pools == tuple(p for p in after.slots[0].pools if not p.idle_w)


class FakeChannel:
    async def get(self):
        return None

    async def close(self) -> None:
        pass


async def test_offers_go_stale_and_refused_ones_are_dropped_at_once(monkeypatch):
    world = await World().begin()
    peers = ZoneOffers((), None, world.clock)
    peers._channels["DE"] = FakeChannel()
    answers: list[object] = []

    async def call(_method, _request, _timeout_s):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(zone_offers.rpc, "call", call)
    monkeypatch.setattr(zone_offers.controller_pb2_grpc, "ControllerStub", lambda _channel: zone_offers_stub())
    now_s = world.clock.now_s()
    slots = tuple(
        dataclasses.replace(
            one, carbon=dataclasses.replace(one.carbon, starts_at_s=now_s + n * HOUR, ends_at_s=now_s + (n + 1) * HOUR)
        )
        for n, one in enumerate(SLOTS)
    )

    def response(**changes):
        made = Offers("DE", world.clock.now_s(), slots)
        return offers_message(dataclasses.replace(made, **changes))

    async def ask(answer) -> tuple[int, str]:
        answers.append(answer)
        found, wrong = await peers.ask({"DE", "test"}, world.clock.now_s())
        world.clock.move(zone_offers.PERIOD_S)
        return len(found.get("DE", ())), wrong.get("DE", "")

    assert await ask(response()) == (3, "")
    assert await ask(Unavailable("no route")) == (3, "no offer: no route")
    world.clock.move(zone_offers.STALE_S)
    assert (await ask(Unavailable("no route")))[0] == 0
    assert await ask(response()) == (3, "")
    count, why = await ask(response(made_at_s=world.clock.now_s() - 400))
    assert (count, why[:40]) == (0, "offers.made_at = " + why[17:40])
    assert "its clock is 400 s behind" in why
    assert await ask(UnknownCall("unknown to this service")) == (0, "unknown to this service")
    broken = response()
    broken.slots[0].pools[0].free_s = math.nan
    assert "free_s" in (await ask(broken))[1]
    assert await ask(response()) == (3, "")


def zone_offers_stub():
    class Stub:
        GetOffers = None

    return Stub()


@pytest.mark.parametrize(
    ("peers", "says"),
    [
        ([{"zone": "demo", "address": "h:1"}], "other_zones.0.zone = 'demo': is this zone's own name"),
        ([{"zone": "DE", "address": "h:1"}] * 2, "other_zones.1.zone = 'DE': is other_zones.0.zone, too"),
        ([{"zone": "D E", "address": "h:1"}], "other_zones.0.zone"),
        ([{"zone": "DE"}], "other_zones.0.address"),
        ([{"zone": "DE", "address": "de.example"}], "other_zones.0.address"),
    ],
)
def test_peers_that_cannot_be(peers, says):
    with pytest.raises(SettingError, match=says):
        ControllerSettings(other_zones=peers)


def test_a_peers_inference_address_is_host_and_port():
    peer = {"zone": "DE", "address": "de.example:8102", "inference_address": "serve.de.example"}
    with pytest.raises(SettingError, match=r"other_zones\.0\.inference_address = 'serve.de.example'"):
        DispatcherSettings(other_zones=[peer])


def test_a_token_does_not_leave_in_clear_text():
    settings = ControllerSettings(other_zones=[{"zone": "DE", "address": "de.example:8102", "token": "x"}])
    with pytest.raises(SettingError, match="a token would leave this machine in clear text"):
        asyncio.run(made(settings))


async def made(settings):
    return ZoneOffers(settings.other_zones, settings, None)


async def test_offers_for_requests_are_planned_without_jobs_and_read_by_dispatchers():
    world = await world_with(carbon=5.0)
    await world.planning.step()
    assert world.peers.asked == [], "no family allows it"
    world.peers.families = {"DE": frozenset({"digits"})}
    cost = ItemCost("digits", 0.01, 1.0, 1.0, request_s=0.02, request_j=1.0)
    world.peers.offered["DE"] = [
        dataclasses.replace(slot, pools=(dataclasses.replace(slot.pools[0], costs=(cost,)),))
        for slot in world.peers.offered["DE"]
    ]
    await world.planning.step()
    (offer,) = (await world.plan()).requests
    assert (offer.family, offer.zone, offer.rate_per_s) == ("digits", "DE", pytest.approx(HEADROOM * 0.3 / 0.02))
    await world.hours.read()
    assert world.hours.requests() == (offer,)
    world.clock.move(PERIOD_S)
    world.peers.offered = {}
    await world.planning.step()
    assert (await world.plan()).requests == (), "an offer that is gone is not followed for long"
    world.clock.move(STALE_S)
    await world.hours.read()
    assert world.hours.requests() == ()


def request_slot(zone: str, carbon_g: float, *pools: DevicePool) -> Slot:
    return Slot(zone, CarbonBand(0.0, HOUR, carbon_g, carbon_g, carbon_g), pools, 1.2)


def serving(name: str, request_j: float, accuracy: float = 0.9, free_s: float = HOUR, **changes) -> DevicePool:
    cost = ItemCost("digits", 0.01, 1.0, accuracy, 0.05, request_j)
    return DevicePool(name, free_s, free_s, (cost,), **{"total_s": HOUR, **changes})


@pytest.mark.parametrize(
    ("home", "far", "now_s", "saved_j_g"),
    [
        ((400.0, serving("a", 2.0)), (100.0, serving("a", 2.0)), 0.0, 2 * 400.0 - 2 * 100.0),
        ((400.0, serving("a", 2.0, free_s=0.0)), (100.0, serving("a", 4.0)), 0.0, 2 * 400.0 - 4 * 100.0),
        ((400.0, serving("a", 2.0), serving("b", 4.0)), (100.0, serving("a", 3.0)), 0.0, 3 * 400.0 - 3 * 100.0),
        ((100.0, serving("a", 2.0)), (100.0, serving("a", 2.0)), 0.0, None),  # nothing is saved
        ((400.0, serving("a", 2.0)), (100.0, serving("a", 2.0, 0.8)), 0.0, None),  # less accurate there
        ((400.0, serving("a", 2.0, 0.7)), (100.0, serving("a", 2.0, 0.8)), 0.0, 2 * 400.0 - 2 * 100.0),
        ((400.0, serving("a", 2.0)), (100.0, serving("a", 2.0, free_s=0.0)), 0.0, None),  # no time there
        ((400.0, serving("a", 2.0)), (100.0, serving("a", 2.0, idle_w=50.0)), 0.0, None),  # it would have to wake
        ((400.0, serving("a", 2.0)), (100.0, serving("a", 2.0)), HOUR, None),  # that slot has ended
        ((400.0,), (100.0, serving("a", 2.0)), 0.0, None),  # the family is not served here
        ((400.0, serving("a", 2.0)), (100.0, serving("a", 0.0)), 0.0, None),  # joules there are not known
        (
            (
                400.0,
                serving("a", 2.0, 0.81),
                serving("b", 2.0, 0.81),
                serving("c", 2.0, 0.81),
            ),  # their mean is rounded up
            (100.0, serving("a", 2.0, 0.81)),
            0.0,
            2 * 400.0 - 2 * 100.0,
        ),
    ],
)
def test_requests_are_offered_to_a_zone_where_they_emit_less(home, far, now_s, saved_j_g):
    here, there = request_slot("GB", home[0], *home[1:]), request_slot("DE", far[0], *far[1:])
    found = request_offers(here, {"DE": [there], "FR": []}, {"DE": ["digits", "other"], "FR": ["digits"]}, now_s)
    if saved_j_g is None:
        assert found == ()
        return
    (offer,) = found
    assert (offer.family, offer.zone, offer.p50_g_per_kwh, offer.pue) == ("digits", "DE", 100.0, 1.2)
    assert offer.saved_g == pytest.approx(saved_j_g * 1.2 / 3.6e6)
    assert offer.rate_per_s == pytest.approx(HEADROOM * 20.0), "half of the time that it has: 50 ms each"
    assert offer.latency_ms == pytest.approx(50.0)
    assert offer.min_accuracy == pytest.approx(home[1].costs[0].accuracy)
