"""What every queue keeps, whatever its order: one suite, run over the whole table and over a user's own queue.

To hold yours to it: `TREFOIL_CONTRACT_OWN=queue=module:Class pytest tests/contract/test_queue_contract.py`.
"""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dispatcher.queues import QUEUES
from dispatcher.queues.fair import FairQueue
from dispatcher.queues.fifo import QueueFull
from dispatcher.routers import ROUTERS
from tests.support.own_parts import own
from tests.unit.dispatcher.worlds import OK, route, target, ticket
from trefoil.core.brains import Ticket
from trefoil.core.errors import SettingError
from trefoil.core.parts import Kind, load_part

NAMES = [*sorted(QUEUES), *own("queue")]
PARTS = {name: load_part(Kind.QUEUE, name, QUEUES) for name in NAMES}
LANES = st.sampled_from([0, "b", ("c", "1g.5gb", 1)])  # any hashable value
TICKETS = st.builds(
    lambda size, priority, late, slo_ms: (size, priority, late, slo_ms),
    st.integers(0, 1500), st.sampled_from([0, 0, 1, 4, 8, 99]), st.booleans(), st.sampled_from([0.0, 50.0, 500.0]),
)  # fmt: skip


def queue_of(name: str):
    return load_part(Kind.QUEUE, name, QUEUES).make("digits")


class QueueMachine(RuleBasedStateMachine):
    """A queue and who waits in it, by lane."""

    queue_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue_of(self.queue_name)
        self.lines: dict = {}
        self.limits = (8, 4000)
        self.queue.limit(*self.limits)
        self.next_id = 0
        self.gone: list[Ticket] = []

    @property
    def everybody(self):
        return [each for line in self.lines.values() for each in line.values()]

    @rule(lane=LANES, drawn=TICKETS)
    def come(self, lane, drawn):
        size, priority, late, slo_ms = drawn
        self.next_id += 1
        at = self.next_id - (3.5 if late else 0.0)
        made = replace(ticket(self.next_id, at, size, priority), slo_ms=slo_ms)
        full = len(self.everybody) >= self.limits[0] or sum(t.bytes for t in self.everybody) + size > self.limits[1]
        if full:
            with pytest.raises(QueueFull, match="digits"):
                self.queue.check(made)
            return
        self.queue.check(made)
        self.queue.push(lane, made)
        self.lines.setdefault(lane, {})[made.id] = made

    @rule(lane=LANES)
    def come_back(self, lane):
        """Who was admitted once is never refused again, also beyond the bound."""
        if self.gone:
            made = self.gone.pop()
            self.queue.push(lane, made)
            self.lines.setdefault(lane, {})[made.id] = made

    @rule(lane=LANES)
    def take(self, lane):
        first = self.queue.first(lane)
        found = self.queue.pop(lane)
        assert first is found
        line = self.lines.get(lane, {})
        assert (found is None) == (not line)
        if found is not None:
            assert line.pop(found.id) == found
            self.gone.append(found)

    @rule(lanes=st.lists(LANES, max_size=3, unique=True))
    def take_first(self, lanes):
        """Of several lanes the one whose turn is first: the same that `tickets` names first among them."""
        among = {id_ for lane in lanes for id_ in self.lines.get(lane, {})}
        first = next((each for each in self.queue.tickets() if each.id in among), None)
        found = self.queue.pop_first(lanes)
        assert found == first
        if found is not None:
            for lane in lanes:
                self.lines.get(lane, {}).pop(found.id, None)

    @rule(data=st.data())
    def leave(self, data):
        if self.everybody:
            made = data.draw(st.sampled_from(sorted(self.everybody, key=lambda each: each.id)))
            assert self.queue.remove(made)
            assert not self.queue.remove(made)
            for line in self.lines.values():
                line.pop(made.id, None)

    @rule(requests_max=st.integers(1, 8), bytes_max=st.integers(1, 4000))
    def bound(self, requests_max, bytes_max):
        self.limits = (requests_max, bytes_max)
        self.queue.limit(requests_max, bytes_max)

    @invariant()
    def books_agree(self):
        assert self.queue.waiting == len(self.everybody)
        assert self.queue.bytes == sum(each.bytes for each in self.everybody)
        assert set(self.queue.lanes()) == {lane for lane, line in self.lines.items() if line}
        assert all(self.queue.depth(lane) == len(line) for lane, line in self.lines.items())
        assert sorted(t.id for t in self.queue.tickets()) == sorted(t.id for t in self.everybody)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    machine = type("Machine", (QueueMachine,), {"queue_name": name})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    machine.TestCase("runTest").runTest()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(drawn=st.lists(TICKETS, min_size=1, max_size=30))
def test_a_lane_is_served_in_the_order_that_tickets_tells(name, drawn):
    queue = queue_of(name)
    for n, (size, priority, _, slo_ms) in enumerate(drawn):
        queue.push(0, replace(ticket(n, bytes_=size, priority=priority), slo_ms=slo_ms))
    told = queue.tickets()
    assert [queue.pop(0) for _ in drawn] == told
    assert queue.pop(0) is None


@pytest.mark.parametrize("name", NAMES)
def test_without_a_bound_of_the_route_there_is_one_of_its_own(name):
    queue = queue_of(name)
    queue.limit(0, 0)
    for n in range(5000):
        try:
            queue.check(ticket(n, bytes_=0))
        except QueueFull:
            return
        queue.push(0, ticket(n, bytes_=0))
    pytest.fail("it takes any number")


@pytest.mark.parametrize("name", [name for name in NAMES if PARTS[name].traits.order == "arrival"])
def test_a_queue_by_arrival_serves_equals_in_order_of_arrival(name):
    queue = queue_of(name)
    for id_, at in ((1, 1.0), (2, 2.0), (4, 4.0), (3, 3.0)):
        queue.push(0, ticket(id_, at))
    assert [queue.pop(0).id for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_router_works_with_it(name, router):
    made = ROUTERS[router].make("digits", FairQueue("digits", partial(queue_of, name)))
    made.on_table(route([target(0, credits=1)], router), 0.0)
    busy, pick = ticket(0), made.on_arrival(ticket(0), 0.0)
    assert [made.on_arrival(ticket(n), 0.0) for n in range(1, 6)] == [None] * 5
    made.on_cancel(ticket(3), 0.0)
    served = []
    for _ in range(4):
        made.on_done(busy, pick, OK, 0.0)
        busy, pick = made.on_credit(pick.slice, 0.0)
        served.append(busy.id)
    assert sorted(served) == [1, 2, 4, 5]


@pytest.mark.parametrize("name", ["shortest", "no.such.module:Class", "dispatcher.queues.fifo:Missing"])
def test_an_unknown_queue_is_refused_by_name(name):
    with pytest.raises(SettingError, match=name.split(":")[0].split(".")[-1]):
        queue_of(name)


def test_a_class_that_is_no_queue_is_refused_with_what_it_lacks():
    with pytest.raises(SettingError, match="has no method limit, check, push"):
        load_part(Kind.QUEUE, "tests.support.own_router:LongestIdle", QUEUES)
