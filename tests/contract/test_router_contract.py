"""What every router keeps, whatever its policy: one suite, run over the whole table and over a user's own router.

To hold yours to it: `TREFOIL_CONTRACT_OWN=router=module:Class pytest tests/contract/test_router_contract.py`.
"""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dispatcher.queues.fifo import AGING_S, LEVELS, QueueFull, order_key
from dispatcher.routers import ROUTERS
from dispatcher.routing.core.accuracy_floors import best_accuracy
from tests.support.own_parts import own
from tests.unit.dispatcher.worlds import OK, key, route, routing, target, ticket
from trefoil.core.brains import Outcome
from trefoil.core.errors import SettingError
from trefoil.core.parts import Kind, load_part

NAMES = [*sorted(ROUTERS), *own("router")]
PARTS = {name: load_part(Kind.ROUTER, name, ROUTERS) for name in NAMES}
SLICES = 6
VARIANTS = ("digits-xs", "digits-m", "digits-l")
FLOORS = st.sampled_from([0.0, 0.0, 0.0, 0.9, 0.97, 0.999])  # the last is more than any variant has
PRIORITIES = st.sampled_from([0, 0, 0, 1, 4, 8, 99])
NOTHING = Outcome("", 0.0, 0.0, 0, False)
targets = st.lists(
    st.tuples(
        st.integers(0, SLICES - 1),
        st.sampled_from(VARIANTS),
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 3.0]),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=SLICES,
    unique_by=lambda each: each[0],
)


class RouterMachine(RuleBasedStateMachine):
    """A shell as the contract describes it, with its own books of where every ticket is."""

    router_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.router = routing(self.router_name)
        self.live: dict = {}
        self.accuracy: dict = {}
        self.best = 0.0
        self.served: set = set()
        self.variant: dict = {}
        self.waiting: dict = {}
        self.flying: dict = {}
        self.finished: Counter = Counter()
        self.next_id = 0
        self.limit = (50, 5000)
        self.table([])

    @rule(drawn=targets)
    def table(self, drawn=()):
        made = [target(n, variant, weight, credits, draining) for n, variant, weight, credits, draining in drawn]
        self.live = {each.slice: each.credits for each in made if not each.draining}
        self.variant = {each.slice: each.variant for each in made}
        self.accuracy = {each.slice: each.accuracy for each in made}
        weighed = {each.slice for each in made if each.weight > 0 and not each.draining}
        self.served = weighed or set(self.live)
        self.best = best_accuracy([each for each in made if not each.draining])
        self.router.on_table(route(made, self.router_name, *self.limit), 0.0)
        self.pump(self.live)

    @rule(late=st.booleans(), size=st.integers(1, 2000), floor=FLOORS, priority=PRIORITIES)
    def arrive(self, late, size, floor, priority):
        self.next_id += 1
        arrived_s = self.next_id - (2.5 if late else 0.0)
        made = ticket(self.next_id, arrived_s=arrived_s, bytes_=size, floor=floor, priority=priority)
        try:
            pick = self.router.on_arrival(made, 0.0)
        except QueueFull as error:
            depth, held = len(self.waiting), sum(each.bytes for each in self.waiting.values())
            assert depth == self.limit[0] or held + size > self.limit[1], "refused although there was room"
            text = str(error)
            assert "digits" in text
            assert str(self.limit[0]) in text or str(self.limit[1]) in text
            return
        if pick is None:
            self.waiting[made.id] = made
            assert len(self.waiting) <= self.limit[0]
            assert sum(each.bytes for each in self.waiting.values()) <= self.limit[1]
        else:
            self.fly(made, pick)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data):
        """A request of a sequence: this very slice or none, and the same books as for all others."""
        self.next_id += 1
        slice_ = data.draw(st.sampled_from(sorted(self.live)))
        made = ticket(self.next_id)
        pick = self.router.on_pinned(made, slice_, 0.0)
        if pick is not None:
            assert pick.slice == slice_
            self.fly(made, pick)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def done(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.flying)))
        made, pick = self.flying.pop(id_)
        self.router.on_done(made, pick, OK, 0.0)
        self.finished[id_] += 1
        self.pump([pick.slice])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        made = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.router.on_cancel(made, 0.0)

    def pump(self, slices):
        given = True
        while given:
            given = False
            for slice_ in slices:
                pulled = self.router.on_credit(slice_, 0.0)
                if pulled is not None:
                    given = True
                    made, pick = pulled
                    of_group = PARTS[self.router_name].traits.group
                    assert of_group or pick.slice == slice_, "the credit of one slice was spent on another"
                    assert self.waiting.pop(made.id) == made, "a ticket that did not wait was dispatched"
                    self.fly(made, pick)

    def fly(self, made, pick):
        assert made.id not in self.flying, "dispatched twice"
        assert not self.finished[made.id], "dispatched again after its end"
        assert pick.slice in self.live, "picked a slice that is draining or not in the table"
        assert pick.variant == self.variant[pick.slice]
        assert made.min_accuracy <= self.accuracy[pick.slice], "a floor was not kept"
        assert pick.why
        self.flying[made.id] = (made, pick)
        in_flight = sum(1 for _, each in self.flying.values() if each.slice == pick.slice)
        assert in_flight <= self.live[pick.slice], "more in flight than credits"

    @invariant()
    def nobody_waits_beside_a_free_slice_of_his_own(self):
        """Work conserving: with the whole family idle, nobody waits but for an accuracy that is not there."""
        if self.live and not self.flying:
            assert not [each for each in self.waiting.values() if each.min_accuracy <= self.best]

    @invariant()
    def no_slice_stands_idle_while_somebody_waits_who_may_go_there(self):
        """Of those whose part says so. A target without weight gets nothing: its planner says so."""
        if PARTS[self.router_name].traits.work_conserving:
            flying = Counter(pick.slice for _, pick in self.flying.values())
            free = [s for s, credits in self.live.items() if flying[s] < credits and s in self.served]
            waiting = self.waiting.values()
            assert not [s for s in free for each in waiting if each.min_accuracy <= self.accuracy[s]]

    @rule(ratio=st.none() | st.floats(0.1, 3.0))
    def carbon(self, ratio):
        """Whatever it makes of it, its books hold; who waited may go now."""
        self.router.on_carbon(ratio, 0.0)
        self.pump(self.live)

    @invariant()
    def it_says_when_it_wants_to_be_called(self):
        assert self.router.next_s() is None or self.router.next_s() >= 0.0

    def teardown(self):
        """Nothing is lost: once slices are there, everything that waits is served, each ticket once."""
        out_of_reach = {id_ for id_, each in self.waiting.items() if each.min_accuracy > 0.993}
        expected = (set(self.waiting) | set(self.flying)) - out_of_reach
        self.table([(n, VARIANTS[n % 3], 1.0, 2, False) for n in range(SLICES)])
        served = set()
        while self.flying:
            id_, (made, pick) = self.flying.popitem()
            served.add(id_)
            self.router.on_done(made, pick, OK, 0.0)
            self.pump([pick.slice])
        assert served == expected
        assert set(self.waiting) == out_of_reach


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    machine = type("Machine", (RouterMachine,), {"router_name": name})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    case("runTest").runTest()


@pytest.mark.parametrize("name", NAMES)
def test_one_class_is_first_in_first_out_whatever_the_table_does(name):
    """One class only, so every router owes strict order of arrival, also over tables and out-of-order pushes."""
    router = routing(name)
    router.on_table(route([target(0, credits=1)], name), 0.0)
    first = router.on_arrival(ticket(1), 0.0)
    assert first is not None
    for id_ in (2, 3, 5):
        assert router.on_arrival(ticket(id_), 0.0) is None
    router.on_table(route([target(1, credits=1)], name), 0.0)
    assert router.on_arrival(ticket(6, arrived_s=3.5), 0.0) is None  # came back: keeps the place of its arrival
    order = []
    for _ in range(4):
        pulled = router.on_credit(key(1), 0.0)
        assert pulled is not None
        assert router.on_credit(key(1), 0.0) is None
        order.append(pulled[0].id)
        router.on_done(*pulled, OK, 0.0)
    assert order == [2, 3, 6, 5]


@pytest.mark.parametrize("name", NAMES)
def test_tickets_that_arrive_at_no_slice_wait_and_are_served_when_one_comes(name):
    router = routing(name)
    router.on_table(route([], name), 0.0)
    assert router.on_arrival(ticket(1), 0.0) is None
    router.on_table(route([target(2)], name), 0.0)
    pulled = router.on_credit(key(2), 0.0)
    assert pulled is not None
    assert pulled[0].id == 1


arrivals = st.lists(st.tuples(st.floats(0.0, 3.0), PRIORITIES), min_size=1, max_size=40)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(arrivals=arrivals)
def test_order_is_that_of_arrival_inside_a_priority_and_nobody_starves(name, arrivals):
    """One slice that is busy: whoever waits is served by turn, so that no one is overtaken by who came long after."""
    router = routing(name)
    router.on_table(route([target(0, credits=1)], name), 0.0)
    busy = ticket(0, arrived_s=0.0)
    pick = router.on_arrival(busy, 0.0)
    arrived_s = list(itertools.accumulate(gap_s for gap_s, _ in arrivals))
    made = [
        ticket(n, arrived_s=at, priority=p) for n, (at, (_, p)) in enumerate(zip(arrived_s, arrivals, strict=True), 1)
    ]
    for each in made:
        assert router.on_arrival(each, each.arrived_s) is None
    served = []
    while True:
        router.on_done(busy, pick, OK, 0.0)
        pulled = router.on_credit(key(0), 0.0)
        if pulled is None:
            break
        busy, pick = pulled
        served.append(busy)
    assert served == sorted(made, key=order_key)
    for at, each in enumerate(served):
        overtook = [other for other in served[:at] if other.arrived_s > each.arrived_s]
        assert all(other.arrived_s - each.arrived_s <= AGING_S * (LEVELS - 1) for other in overtook)
        assert not [other for other in overtook if other.priority == each.priority]


@pytest.mark.parametrize("name", NAMES)
def test_the_least_urgent_request_is_served_however_many_urgent_ones_come(name):
    """Urgent requests take all that the slice can do; by priority alone the first one would wait forever."""
    router = routing(name)
    router.on_table(route([target(0, credits=1)], name, 10**6, 10**9), 0.0)
    busy, step_s = ticket(0, arrived_s=0.0, priority=1), 0.1
    pick = router.on_arrival(busy, 0.0)
    patient = ticket(1, arrived_s=0.0, priority=LEVELS)
    assert router.on_arrival(patient, 0.0) is None
    for step in itertools.count(1):
        now_s = step * step_s
        assert now_s <= AGING_S * (LEVELS - 1) + 2 * step_s, "it starves"
        assert router.on_arrival(ticket(1 + step, arrived_s=now_s, priority=1), now_s) is None
        router.on_done(busy, pick, OK, now_s)
        busy, pick = router.on_credit(key(0), now_s)
        if busy.id == patient.id:
            break
    assert now_s > 1.0, "it is the least urgent all the same"


@pytest.mark.parametrize("name", [name for name in NAMES if PARTS[name].traits.flow])
def test_a_law_of_flow_is_one_that_simulations_know(name):
    assert PARTS[name].traits.flow in ("shares", "pool")


def test_a_router_of_ones_own_is_loaded_by_module_and_class():
    mine = routing("dispatcher.routers.fifo:Fifo")
    mine.on_table(route([target(0)]), 0.0)
    assert mine.on_arrival(ticket(1), 0.0) is not None


@pytest.mark.parametrize("name", ["fastest", "no.such.module:Class", "dispatcher.routers.fifo:Missing"])
def test_an_unknown_router_is_refused_by_name(name):
    with pytest.raises(SettingError, match=name.split(":")[0].split(".")[-1]):
        routing(name)
