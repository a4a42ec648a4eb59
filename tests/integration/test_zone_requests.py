"""Requests that another zone answers: two dispatchers, each with a slice and a cluster in Redis; their link breaks.

The offers are put into Redis as the controller of the home zone writes them.
"""

import asyncio
import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from dispatcher.request import zone_requests
from dispatcher.request.admission import Caller
from dispatcher.request.core import zone_choice
from tests.integration.test_dispatcher_peers import pair
from tests.integration.test_dispatcher_zones import Zone, zone
from tests.support.certificates import Authority
from tests.support.dispatching import request, until
from tests.support.link import Link
from tests.unit.dispatcher.worlds import node, route
from trefoil.core.common import Revision
from trefoil.core.jobs.planned import PlannedJobs, RequestOffer
from trefoil.core.objective import BudgetRung, TenantRung, TenantRungs
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration
TOKEN = "token-of-home"
TENANTS = f"""
[[tenant]]
name = "home"
roles = ["jobs", "infer"]
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
"""
OFFER = RequestOffer("digits", "FAR", 0.01, 50.0, 1.1, 5000.0, 5.0, 0.5)


async def arrived(windows: "asyncio.Queue[Any]", count: int) -> Counter[str]:
    """Arrivals by tenant, once so many are in windows."""
    found: Counter[str] = Counter()
    async with asyncio.timeout(30):
        while found.total() < count:
            for cell in (await windows.get()).cells:
                found[cell.key.tenant] += cell.arrived
    return +found


class Zones:
    """`home`, whose requests may go to `far` over a `link`."""

    def __init__(self, home: Zone, far: Zone, link: Link) -> None:
        self.home, self.far, self.link = home, far, link
        self.zones = home.system.running.fronts.inference.zones
        self._number = 0

    async def within(self, slo_ms: float) -> None:
        """The family's objective at home."""
        home = self.home.system
        await home.publish(dataclasses.replace(node(home.statuses()), zone="HOME"), [route(home.targets())], 0, slo_ms)

    async def offer(self, *offers: RequestOffer) -> None:
        """Put a plan with these offers into Redis, and wait until the far zone is measured."""
        now_s, state, self._number = WallClock().now_s(), self.home.jobs.state, self._number + 1
        revision = Revision(await state.epoch_of("controller"), self._number)
        made = PlannedJobs(revision, now_s, now_s + 86_400, requests=offers)
        await self.home.system.plane.put("controller", state.keys.jobs_plan(), made)
        await until(lambda: tuple(self.zones.offers.get("digits", ())) == offers)
        if offers:
            await self.reached()

    async def reached(self) -> None:
        await until(lambda: self.zones._sights["FAR"].round_trip_ms < 500)

    async def ask(self, first: int, **parameters: Any) -> tuple[str, dict[str, Any]]:
        """Zone of a right answer ("": home), and its parameters."""
        answer = await self.home.system.infer(first, parameters={"trefoil_receipt": True, **parameters})
        assert answer.as_numpy("PROBABILITIES")[0].argmax() == first
        told = answer.get_response().parameters
        return told["trefoil_zone"].string_param if "trefoil_zone" in told else "", told

    async def until_far(self) -> None:
        """Ask until the zone answers again."""
        async with asyncio.timeout(30):
            while (await self.ask(2))[0] != "FAR":
                await asyncio.sleep(0.02)

    async def settled(self, count: int) -> None:
        """Ask one at a time until the zone's latency is known."""
        for number in range(count):
            await self.ask(number % 10)

    def answered(self, zone: Zone) -> int:
        return zone.system.local.accounting.load.totals["digits"].answered


@pytest.fixture
async def two(shared_redis, state, tmp_path, monkeypatch) -> AsyncIterator[Zones]:
    monkeypatch.setattr(zone_requests, "LOOK_S", 0.02)
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    states = [State.connect(shared_redis.url, f"{state.keys.cluster}-{n}", timeout_s=30.0) for n in ("far", "home")]
    async with (
        zone(states[0], tmp_path / "far", "FAR", tenants_file=tenants) as far,
        Link(far.system.address) as link,
    ):
        peer = {"zone": "FAR", "address": far.jobs.address, "token": TOKEN, "inference_address": link.address}
        async with zone(states[1], tmp_path / "home", "HOME", other_zones=(peer,)) as home:
            yield Zones(home, far, link)
    for each in states:
        await each.close()


@pytest.mark.gate
async def test_requests_go_where_they_emit_less_and_both_zones_account_for_them_once(two):
    counting = [
        asyncio.create_task(arrived(of.system.running.loop.subscribe(), count))
        for of, count in ((two.home, 82), (two.far, 81))
    ]
    assert (await two.ask(4))[0] == ""
    await two.within(60_000.0)
    await two.offer(OFFER)
    names = [(await two.ask(number % 10))[0] for number in range(30)]
    assert names == ["FAR"] * 30
    _, told = await two.ask(7)
    assert told["trefoil_variant"].string_param == "digits-xs"
    assert told["trefoil_energy_j_estimate"].double_param == pytest.approx(2.0)
    grams = told["trefoil_carbon_mg_estimate"].double_param / 1e3
    moved_j, moved_g = (told[f"trefoil_moved_{unit}"].double_param for unit in "jg")
    assert moved_g == pytest.approx(moved_j * grams / 2.0), "at the carbon of the zone's own receipt"
    assert moved_j > 0
    both = await asyncio.gather(*(two.ask(number % 10) for number in range(50)))
    assert Counter(name for name, _ in both) == {"FAR": 50}
    assert (two.answered(two.home), two.answered(two.far)) == (1, 81)
    counts = two.home.system.local.accounting.zone_total
    assert counts == {("digits", "FAR", "answered"): 81}
    assert await asyncio.gather(*counting) == [{"": 82}, {"home": 81}], "here there is capacity for all of them"
    # A request of another zone's dispatcher goes no further, and offers that are withdrawn are not followed.
    assert (await two.ask(5, trefoil_forwarded=True))[0] == ""
    assert (await two.ask(5, trefoil_slo_ms=1.0))[0] == "", "it could not be in time there"
    await two.offer()
    assert (await two.ask(6))[0] == ""


async def test_a_lost_zone_fails_no_request_and_is_asked_again_once_it_answers(two, monkeypatch):
    await two.within(60_000.0)
    await two.offer(OFFER)
    await two.settled(25)
    two.far.system.slice.latency_s = 0.05
    going = [asyncio.create_task(two.ask(number % 10)) for number in range(40)]
    await until(lambda: two.zones._there["digits", "FAR"].in_flight > 5)
    await two.link.cut()
    names = Counter(name for name, _ in await asyncio.gather(*going))
    assert names[""] > 0, "what was under way is served at home"
    counts = two.home.system.local.accounting.zone_total
    assert counts["digits", "FAR", "repeated"] == names[""], "each of these was under way, and is counted"
    assert (await two.ask(1))[0] == ""
    two.far.system.slice.latency_s = 0.0
    await two.link.heal()
    monkeypatch.setattr(zone_choice, "SEEN_S", 0.5)
    await two.until_far()


async def test_a_zone_that_has_never_answered_is_named_once(two):
    await two.link.cut()
    with capture_logs() as logged:
        for _ in range(3):
            await two.zones._probe("FAR")
    (one,) = (entry for entry in logged if entry["event"] == "a zone does not answer")
    assert (one["zone"], one["why"].split()[0]) == ("FAR", "UNAVAILABLE")


async def test_a_slow_or_refusing_zone_is_left_alone(two, monkeypatch):
    await two.within(60_000.0)
    await two.offer(OFFER)
    two.far.system.slice.latency_s = 3.0
    assert (await two.ask(1, trefoil_slo_ms=500.0))[0] == ""
    two.far.system.slice.latency_s = 0.0
    assert (await two.ask(1))[0] == "FAR", "one client's short objective says nothing of the family's"
    await two.within(1000.0)
    two.far.system.slice.latency_s = 3.0
    assert (await two.ask(1))[0] == "", "not in time there: served here"
    assert (await two.ask(1))[0] == "", "nor asked again at once"
    assert two.home.system.local.accounting.zone_total["digits", "FAR", "repeated"] == 2, "it may have executed them"
    two.far.system.slice.latency_s = 0.0
    monkeypatch.setattr(zone_choice, "SEEN_S", 0.5)
    await two.until_far()
    (two.far.system.running.settings.tenants_file).write_text(TENANTS.replace(', "infer"', ""))
    two.far.system.running.fronts.access.refresh()
    assert (await two.ask(2))[0] == ""
    assert two.zones._there["digits", "FAR"].held_until_s > two.zones._clock.monotonic_s(), (
        "it is not asked for a minute"
    )
    assert (await two.ask(3))[0] == ""
    assert two.home.system.local.accounting.zone_total["digits", "FAR", "returned"] == 1, "refused, so executed once"


async def test_what_one_client_asks_for_keeps_no_other_requests_home(two):
    await two.within(60_000.0)
    await two.offer(OFFER)
    await two.settled(40)
    sight, there = two.zones._sights["FAR"], two.zones._there["digits", "FAR"]
    assert (await two.ask(1, trefoil_slo_ms=1e15))[0] == "FAR", "gRPC would take so long a time for one that is over"
    two.far.system.slice.latency_s = 1.0
    await two.home.system.infer(1, timeout=800_000)
    assert two.home.system.local.accounting.zone_total["digits", "FAR", "repeated"] == 1, "half of its deadline is over"
    two.far.system.slice.latency_s = 0.0
    two.far.system.slice.error = grpc.StatusCode.INTERNAL, "cannot do that"
    assert (await two.ask(2))[0] == ""
    two.far.system.slice.error = None
    with pytest.raises(InferenceServerException, match="accurately"):
        await two.ask(3, trefoil_min_accuracy=1.0)
    assert math.isfinite(sight.round_trip_ms)
    assert there.held_until_s == -math.inf
    assert (await two.ask(4))[0] == "FAR"
    assert two.home.system.local.accounting.zone_total["digits", "FAR", "repeated"] == 2


async def test_a_budget_that_the_home_zone_has_there_lowers_no_floor_and_is_not_told(two):
    await two.within(60_000.0)
    await two.offer(OFFER)
    free_at_s, far = WallClock().now_s() + 7200.0, two.far.system
    for rung, where in ((BudgetRung.JOBS_WAIT, "FAR"), (BudgetRung.LOWER_ACCURACY, "")):
        told = TenantRungs((TenantRung("home", "", rung, "500 g", 0.4, free_at_s),), 1, WallClock().now_s())
        await far.plane.put("controller", far.plane.state.keys.tenant_rungs(), PlanKeys("").sign_rungs(told))
        budgets, now = far.local.budgets, WallClock().now_s
        await until(lambda: (found := budgets.find("home", "digits", now())) and found.rung is rung)  # noqa: B023
        name, told = await two.ask(1)
        assert name == where
        assert "trefoil_budget_rung" not in told


async def test_a_client_that_leaves_is_left_in_both_zones(two):
    await two.within(60_000.0)
    await two.offer(OFFER)
    two.far.system.slice.latency_s = 2.0
    asking = asyncio.create_task(two.ask(1))
    await until(lambda: two.far.system.slice.requests)
    asking.cancel()
    counts, there = two.home.system.local.accounting.zone_total, two.zones._there["digits", "FAR"]
    await until(lambda: counts == {("digits", "FAR", "left"): 1})
    totals = two.far.system.local.accounting.load.totals
    await until(lambda: (found := totals.get("digits")) and found.failed == 1)
    assert (there.in_flight, len(there.answers)) == (0, 0)


async def test_an_impossible_receipt_of_a_zone_reaches_no_client(two):
    await two.within(60_000.0)
    await two.offer(OFFER)
    receipts = two.far.system.local.accounting.receipts
    receipts._rates = {name: dataclasses.replace(rate, item_j=1e11) for name, rate in receipts._rates.items()}
    name, told = await two.ask(1)
    assert (name, told["trefoil_energy_j_estimate"].double_param) == ("", 2.0)
    assert two.zones._there["digits", "FAR"].held_until_s > 0


async def test_a_zone_that_hangs_holds_a_request_no_longer_than_half_of_its_objective(two):
    await two.within(60_000.0)
    await two.offer(OFFER)
    await two.settled(21)
    clock, counts = WallClock(), two.home.system.local.accounting.zone_total
    two.far.system.slice.gate.clear()
    began_s = clock.monotonic_s()
    assert (await two.ask(1, trefoil_slo_ms=6000.0))[0] == ""
    assert 3.0 <= clock.monotonic_s() - began_s < 6.0, "it is waited for, and then answered here in time"
    assert counts["digits", "FAR", "repeated"] == 1
    await until(lambda: not two.far.system.queue.waiting)
    two.far.system.slice.gate.set()


async def test_a_link_that_takes_no_request_leaves_each_executed_once(two, monkeypatch):
    await two.within(60_000.0)
    await two.offer(OFFER)
    await two.settled(21)
    executed = len(two.far.system.slice.requests)
    channel = two.zones._channels["FAR"]
    monkeypatch.setattr(two.zones, "_probe", lambda _: asyncio.sleep(0))
    await two.link.cut()
    await until(lambda: channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)
    two.zones._sights["FAR"].round_trip_ms = 1.0  # as if no probe had seen it yet
    assert (await two.ask(1))[0] == ""
    assert two.home.system.local.accounting.zone_total["digits", "FAR", "returned"] == 1
    assert len(two.far.system.slice.requests) == executed


async def test_a_request_that_goes_on_to_another_worker_goes_to_no_zone_again(
    shared_redis, state, tmp_path, monkeypatch
):
    monkeypatch.setattr(zone_requests, "LOOK_S", 0.02)
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    far_state = State.connect(shared_redis.url, f"{state.keys.cluster}-far", timeout_s=30.0)
    async with zone(far_state, tmp_path / "far", "FAR", tenants_file=tenants) as far:
        peer = {"zone": "FAR", "address": far.jobs.address, "token": TOKEN, "inference_address": far.system.address}
        async with pair(state, tmp_path / "home", other_zones=(peer,)) as two:
            server, other = two.server, two.other
            for worker in two.workers:
                zones = worker.fronts.inference.zones
                zones.follow([dataclasses.replace(OFFER, min_accuracy=0.0)])
                await until(lambda: zones._sights["FAR"].round_trip_ms < 500)  # noqa: B023
            far.system.slice.gate.clear()
            data = request(3)
            data.parameters["trefoil_slo_ms"].double_param = 2000.0
            asking = asyncio.create_task(server.fronts.inference.answer(data.SerializeToString(), Caller("t")))
            await until(lambda: far.system.slice.requests)
            server.local.drain("a test")
            await until(lambda: other.local.routing.table.live("digits"))
            for worker in two.workers:
                worker.fronts.inference.zones.follow([dataclasses.replace(OFFER, min_accuracy=0.0)])
            assert (await asking).variant == "digits-l"
            counts = [worker.local.accounting.zone_total for worker in (server, other)]
            assert counts == [{("digits", "FAR", "repeated"): 1}, {}]
            assert (len(far.system.slice.requests), len(two.slice.requests)) == (1, 1)
            far.system.slice.gate.set()
    await far_state.close()


@pytest.mark.parametrize("shown", [True, False])
async def test_requests_go_by_tls_whose_authority_is_the_other_zones(shared_redis, state, tmp_path, monkeypatch, shown):
    """The far zone asks for a client certificate of its own authority; without one nothing is sent."""
    monkeypatch.setattr(zone_requests, "LOOK_S", 0.02)
    theirs, tenants = Authority(tmp_path / "theirs"), tmp_path / "tenants.toml"
    served, held = theirs.server(), theirs.client("home")
    tenants.write_text(TENANTS)
    front = {"front_tls_certificate": served.certificate, "front_tls_key": served.key}
    front |= {"front_client_ca": theirs.certificate}
    pair_ = {"tls_certificate": held.certificate, "tls_key": held.key} if shown else {}
    states = [State.connect(shared_redis.url, f"{state.keys.cluster}-{n}", timeout_s=30.0) for n in ("far", "home")]
    async with zone(states[0], tmp_path / "far", "FAR", tenants_file=tenants, **front) as far:
        peer = {"zone": "FAR", "address": far.jobs.address, "token": TOKEN, "inference_address": far.system.address}
        peer |= {"tls_ca": theirs.certificate, **pair_}
        async with zone(states[1], tmp_path / "home", "HOME", other_zones=(peer,)) as home, Link("127.0.0.1:1") as link:
            zones = Zones(home, far, link)
            await zones.within(60_000.0)
            sight = zones.zones._sights["FAR"]
            if shown:
                await zones.offer(OFFER)
                assert (await zones.ask(1))[0] == "FAR"
            else:
                zones.zones.follow([OFFER])
                await until(lambda: sight.trouble == "UNAVAILABLE")
                assert (await zones.ask(1))[0] == ""
            assert len(far.system.slice.requests) == shown
    for each in states:
        await each.close()
