"""Clients share a queue: whoever floods it waits behind itself, and only its own requests are refused."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.queues import QUEUES
from dispatcher.queues.fair import FairQueue, Turns
from dispatcher.queues.fifo import FifoQueue, QueueFull
from dispatcher.routers import ROUTERS
from dispatcher.routers.tiers import CarbonDis
from dispatcher.routing.async_queue import AsyncFamilyQueue
from dispatcher.routing.core.family_queue import FamilyQueue, Refusal
from dispatcher.routing.core.service_costs import ServiceCosts
from tests.unit.dispatcher.worlds import OK, key, route, target, ticket
from trefoil.core.brains import Pick, Ticket
from trefoil.runtime.clock import WallClock

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def of(tenant: str, connection: str, id_: int, **more) -> Ticket:
    return replace(ticket(id_), flow=(tenant, connection), **more)


def fair(kind: str = "fifo", requests_max: int = 0, bytes_max: int = 0) -> FairQueue:
    queue = FairQueue("digits", partial(QUEUES[kind].make, "digits"))
    queue.limit(requests_max, bytes_max)
    return queue


def served(queue: FairQueue, count: int, lane=0) -> list[Ticket]:
    return [queue.pop(lane) for _ in range(count)]


def test_a_client_that_comes_late_waits_for_one_request_of_a_flood_not_for_all():
    queue = fair()
    for n in range(1, 901):
        queue.push(0, of("flood", "a", n))
    queue.push(0, of("light", "b", 901))
    assert 901 in [each.id for each in served(queue, 2)]


def test_a_client_of_long_requests_that_look_like_short_ones_has_its_share_of_time_and_no_more():
    queue, costs, number = fair(), ServiceCosts(), count(1)
    takes_s, had_s = {"long": 1.0, "short": 0.01}, Counter[str]()
    for client in [*takes_s] * 50:
        queue.push(0, of(client, "a", next(number), cost_s=costs.expected_s("digits", 1, client)))
    while had_s.total() < 600.0:  # the first 50 were taken for short ones
        client = queue.pop(0).flow[0]
        had_s[client] += takes_s[client]
        for whose in ("", client):
            costs.record("digits", 1, takes_s[client], whose)
        queue.push(0, of(client, "a", next(number), cost_s=costs.expected_s("digits", 1, client)))
    assert had_s["short"] > 0.4 * had_s.total(), had_s


def test_a_full_queue_pushes_out_the_newest_of_the_flood_and_takes_the_other():
    queue = fair(requests_max=10)
    for n in range(1, 11):
        queue.check(made := of("flood", "a", n))
        queue.push(0, made)
    with pytest.raises(QueueFull, match="is full: it holds 10 requests, limit 10"):
        queue.check(of("flood", "a", 11))
    with pytest.raises(QueueFull):
        queue.check(of("flood", "another", 12, cost_s=1.0))  # its tenant has most already, and it would have more
    queue.check(light := of("light", "b", 13))
    queue.push(0, light)
    assert [each.id for each in queue.displaced] == [10]
    assert (queue.waiting, len(queue.tickets())) == (10, 10)


def test_a_tenant_with_a_thousand_connections_has_its_one_share():
    queue = fair(requests_max=1000)
    for n in range(1, 1001):
        queue.push(0, of("flood", f"c{n}", n))
    for n in range(1001, 1011):
        queue.check(made := of("light", "b", n))
        queue.push(0, made)
    shares = Counter(each.flow[0] for each in served(queue, 20))
    assert shares["light"] == 10
    assert len(queue.displaced) == 10


@pytest.mark.parametrize("kind", ["fifo", "ssjf"])
def test_weights_of_one_and_three_give_shares_of_one_and_three(kind):
    queue = fair(kind)
    for n in range(1, 801):
        light = n % 2
        queue.push(0, of("one" if light else "three", f"c{n % 5}", n, weight=1.0 if light else 3.0))
    shares = Counter(each.flow[0] for each in served(queue, 400))
    assert shares["three"] / shares["one"] == pytest.approx(3.0, rel=0.02)


def test_shares_are_of_time_not_of_requests():
    """Requests of 64 items that take ten times as long come a tenth as often."""
    queue = fair()
    for n in range(1, 401):
        queue.push(0, of("huge" if n % 2 else "small", "c", n, cost_s=0.1 if n % 2 else 0.01))
    shares = Counter(each.flow[0] for each in served(queue, 220))
    assert shares["small"] / shares["huge"] == pytest.approx(10.0, rel=0.06)


def test_inside_a_flow_the_shortest_goes_first_and_between_flows_fairness_does():
    queue = fair("ssjf")
    for n in range(1, 41):
        queue.push(0, of("a", "c", n, arrived_s=0.0, length_score=float(n % 5)))
    for n in range(41, 45):
        queue.push(0, of("b", "c", n, length_score=4.0))
    order = served(queue, 8)
    assert Counter(each.flow[0] for each in order) == {"a": 4, "b": 4}
    assert all(each.length_score == 0.0 for each in order if each.flow[0] == "a")


def test_a_client_that_waits_for_each_answer_gets_its_turn_and_no_more():
    """Coming back into the line at once, again and again, does not pass those who stay in it."""
    queue = fair()
    for n in range(1, 201):
        queue.push(0, of("a" if n % 2 else "b", "c", n))
    got, next_id = Counter(), 1000
    queue.push(0, of("eager", "c", next_id))
    for _ in range(90):
        ticket_ = queue.pop(0)
        got[ticket_.flow[0]] += 1
        if ticket_.flow[0] == "eager":
            next_id += 1
            queue.push(0, of("eager", "c", next_id))
    assert max(got.values()) - min(got.values()) <= 2


def test_another_lane_is_no_way_past_the_others():
    """A flood with a floor of accuracy, or without one, next to a client in the other lane."""
    for flood, light in ((0, 1), (1, 0)):
        queue = fair()
        for n in range(1, 301):
            queue.push(flood, of("flood", "a", n))
        for n in range(301, 311):
            queue.push(light, of("light", "b", n))
        got = Counter(queue.pop_first((0, 1)).flow[0] for _ in range(21))
        assert got["light"] == 10, (flood, light)


def test_a_class_of_its_own_is_no_way_past_the_others_either():
    queue = fair()
    router = CarbonDis("group", queue)
    router.on_table(route([target(0, credits=1)], "carbondis"), 0.0)
    busy = ticket(0)
    pick = router.on_arrival(busy, 0.0)
    for n in range(1, 101):
        assert router.on_arrival(replace(of("flood", "a", n), slo_class="mine"), 0.0) is None
    assert router.on_arrival(of("light", "b", 101), 0.0) is None
    order = []
    for _ in range(3):
        router.on_done(busy, pick, OK, 0.0)
        busy, pick = router.on_credit(key(0), 0.0)
        order.append(busy.id)
    assert 101 in order


def test_bytes_of_a_flood_make_room_for_others_but_not_for_one_larger_than_it():
    queue = fair(bytes_max=1000)
    for n in range(1, 11):
        queue.push(0, of("flood", "a", n, bytes=100))
    queue.check(light := of("light", "b", 11, bytes=250))
    assert [each.id for each in queue.displaced] == [10, 9, 8]
    queue.push(0, light)
    with pytest.raises(QueueFull, match=r"is full: it holds .* more exceed the limit of 1000"):
        queue.check(of("third", "c", 12, bytes=900))
    assert len(queue.displaced) == 3, "nothing is pushed out for what is refused all the same"


flows = st.tuples(st.sampled_from("ab"), st.sampled_from("xy"))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 2), flows, st.sampled_from([0.001, 0.01, 0.1])),
        st.tuples(st.just("pop"), st.integers(0, 2)),
        st.tuples(st.just("first"), st.lists(st.integers(0, 2), min_size=1, unique=True)),
        st.tuples(st.just("remove"), st.integers(0, 60)),
    ),
    max_size=80,
)  # fmt: skip


@unhurried
@given(steps=steps)
def test_the_books_agree_whatever_comes_and_goes(steps):
    queue, model = fair(requests_max=12), {}
    for id_, step in enumerate(steps):
        if step[0] == "push":
            made = of(*step[2], id_, cost_s=step[3])
            try:
                queue.check(made)
            except QueueFull:
                assert len(model) >= 12
                continue
            for gone in queue.displaced:
                assert gone.flow != made.flow
                del model[gone.id]
            queue.displaced.clear()
            queue.push(step[1], made)
            model[id_] = step[1], made
        elif step[0] == "remove":
            known = model.pop(step[1], None)
            assert queue.remove(known[1] if known else ticket(step[1])) is (known is not None)
        else:
            lanes = [step[1]] if step[0] == "pop" else step[1]
            told = queue.first(step[1]) if step[0] == "pop" else None
            found = queue.pop(step[1]) if step[0] == "pop" else queue.pop_first(lanes)
            assert told is None or told is found
            assert (found is None) == (not any(lane in lanes for lane, _ in model.values()))
            if found is not None:
                assert model.pop(found.id)[0] in lanes
        assert queue.waiting == len(model) == len(queue.tickets())
        assert queue.bytes == sum(each.bytes for _, each in model.values())
        assert set(queue.lanes()) == {lane for lane, _ in model.values()}
        assert all(queue.depth(n) == sum(lane == n for lane, _ in model.values()) for n in range(3))


@unhurried
@given(st.lists(st.one_of(st.integers(1, 30), st.none()), max_size=120), st.booleans())
def test_one_client_alone_is_served_as_by_its_queue_to_the_last_ticket(drawn, ssjf):
    kind = "ssjf" if ssjf else "fifo"
    queue, plain = fair(kind, 20), QUEUES[kind].make("digits")
    plain.limit(20, 0)
    for n, what in enumerate(drawn):
        if what is None:
            assert queue.pop_first((0, 1)) == plain.pop_first((0, 1))
            continue
        made = of("a", "b", n, priority=what % 3, length_score=float(what % 5))
        outcomes = []
        for each in (queue, plain):
            try:
                each.check(made)
                each.push(what % 2, made)
                outcomes.append("in")
            except QueueFull as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
    assert [queue.pop(0) for _ in drawn] == [plain.pop(0) for _ in drawn]


def test_turns_of_flows_that_come_and_go_take_no_more_memory():
    turns, draw = Turns(), Random(1)
    turns.enter("stays")
    for n in range(20_000):
        turns.enter(f"f{n}")
        if draw.random() < 0.5:
            name = turns.next()
            assert name is not None
            turns.charge(name, 0.01)
        turns.leave(f"f{n}")
    assert len(turns._tags) + len(turns._queued) < 400
    assert len(turns._heap) < 400


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_no_router_refuses_other_clients_under_a_flood(router):
    queue = FamilyQueue(5.0)
    queue.table(replace(route([target(0, credits=1)], router), queue_requests_max=20), "", 0.0)
    assert isinstance(queue.submit(of("flood", "a", 0), 0.0), Pick)
    refused = 0
    for n in range(1, 61):
        try:
            queue.submit(of("flood", "a", n), 0.0)
        except QueueFull:
            refused += 1
        if n % 6 == 0:
            assert queue.submit(of("light", "b", 100 + n), 0.0) is None
            for effect in queue.push_out(0.0):
                assert isinstance(effect, Refusal)
                assert effect.ticket.flow[0] == "flood"
                assert isinstance(effect.error, QueueFull)
                refused += 1
    assert len(queue.waiting) == 20
    assert sum(each.flow[0] == "light" for each in queue.waiting.values()) == 10, "half of the queue, and no more"


def test_a_flood_of_open_sequences_leaves_others_their_turns():
    """Of those that wait for one slice alone, and of those that begin a sequence."""
    queue, here = FamilyQueue(5.0), key(0)
    queue.table(route([target(0, credits=1)], "fifo"), "", 0.0)
    running = of("flood", "a", 0)
    pick = queue.submit(running, 0.0)
    for n in range(1, 51):
        assert queue.submit_pinned(of("flood", "a", n), here, "digits-l", 0.0) is None
    assert queue.submit_pinned(of("light", "b", 60), here, "digits-l", 0.0) is None
    assert queue.submit(of("light", "b", 61), 0.0) is None
    served = []
    for _ in range(6):
        [(running, pick)] = queue.done(running, pick, OK, 0.0)
        served.append(running.id)
    assert {60, 61} < set(served), served
    assert queue.leave(of("flood", "a", 50), 0.0)
    refused = [effect.ticket.id for effect in queue.fail(QueueFull("over"), 0.0)]
    assert sorted([*served, *refused]) == [*range(1, 50), 60, 61]


def test_who_is_pushed_out_hears_it_at_once():
    async def play():
        queue = AsyncFamilyQueue("digits", WallClock(), 5.0)
        queue.apply_route(replace(route([target(0, credits=1)], "fifo"), queue_requests_max=2), "")
        queue.submit(of("flood", "a", 0))
        first, second = (queue.submit(of("flood", "a", n)) for n in (1, 2))
        light = queue.submit(of("light", "b", 3))
        await asyncio.sleep(0)
        assert isinstance(second.exception(), QueueFull)
        assert "its client has most of what waits" in str(second.exception())
        assert not first.done()
        assert not light.done()

    asyncio.run(play())


def test_an_own_queue_keeps_its_own_bound_for_each_client():
    class Two(FifoQueue):
        def check(self, ticket: Ticket) -> None:
            super().check(ticket)
            if self.waiting >= 2:
                raise QueueFull("two")

    queue = FairQueue("digits", partial(Two, "digits"))
    for n in range(2):
        queue.push(0, of("a", "c", n))
    queue.check(of("b", "c", 3))
    queue.push(0, of("b", "c", 3))
    with pytest.raises(QueueFull, match="two"):
        queue.check(of("a", "c", 4))
