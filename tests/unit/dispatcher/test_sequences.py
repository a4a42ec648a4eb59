"""Where sequences live and whose turn it is, by the brain alone; then joined to a family queue."""

import asyncio
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dispatcher.queues.fifo import QueueFull
from dispatcher.routing.async_queue import AsyncFamilyQueue
from dispatcher.routing.core.sequences import Pin, Sequences, SequencesFull
from dispatcher.routing.sequence_queue import AsyncSequenceQueue
from tests.unit.dispatcher.worlds import OK, key, route, target, ticket
from trefoil.core.brains import Outcome, Pick
from trefoil.core.errors import InvalidInput
from trefoil.runtime.clock import ManualClock

START_FLAG = "inference request for sequence 7 to model 'digits' must specify the START flag on the first request"
HERE, THERE = Pin(key(0), "digits-xs"), Pin(key(1), "digits-l")
FAILED = Outcome("INTERNAL", 1.0, 1.0, 0, True)


def part(id_: int, start: bool = False, end: bool = False, sequence: str = "7"):
    return replace(ticket(id_), sequence_id=sequence, sequence_start=start, sequence_end=end)


def opened(**more) -> Sequences:
    """Sequence 7 lives on slice 0 and nothing of it is under way."""
    sequences = Sequences("digits", **{"idle_s": 2.0, "open_max": 3, "line_max": 4, **more})
    first = part(1, start=True)
    assert sequences.enter(first, 0.0)
    assert sequences.next_pin(first, {key(0), key(1)}) is None
    sequences.placed(first, HERE)
    assert sequences.leave(first, 0.0, executed=True) is None
    return sequences


LIVE = frozenset({key(0), key(1)})


def test_what_follows_a_start_goes_where_it_went_until_the_end():
    sequences = opened()
    for id_ in (2, 3, 4):
        made = part(id_, end=id_ == 4)
        assert sequences.enter(made, 1.0)
        assert sequences.next_pin(made, LIVE) == HERE
        assert sequences.open_on() == {key(0): 1}
        sequences.leave(made, 1.0, executed=True)
    assert not sequences.open_on()
    with pytest.raises(InvalidInput, match=START_FLAG):
        sequences.enter(part(5), 1.0)


def test_a_client_that_opens_all_there_may_be_loses_its_newest_idle_ones_to_others():
    sequences = opened(open_max=4)
    flood = [replace(part(id_, start=True, sequence=f"f{id_}"), flow=("flood", "a")) for id_ in (2, 3, 4)]
    for made in flood:
        assert sequences.enter(made, 1.0)
    sequences.leave(flood[0], 1.0, executed=True)  # not placed yet: forgotten
    for id_ in (5, 6):
        late = replace(part(id_, start=True, sequence=f"f{id_}"), flow=("flood", "a"))
        if id_ == 6:
            with pytest.raises(SequencesFull):
                sequences.enter(late, 1.0)
            continue
        assert sequences.enter(late, 1.0)
        sequences.next_pin(late, LIVE)
        sequences.placed(late, THERE)
        sequences.leave(late, 1.0, executed=True)
    light = replace(part(7, start=True, sequence="l"), flow=("light", "b"))
    assert sequences.enter(light, 1.0)
    assert len(sequences) == 4
    with pytest.raises(InvalidInput, match="START"):
        sequences.enter(replace(part(8, sequence="f5"), flow=("flood", "a")), 1.0)
    with pytest.raises(SequencesFull):  # none of the flood's is idle
        sequences.enter(replace(part(9, start=True, sequence="m"), flow=("light", "b")), 1.0)


def test_a_sequence_is_its_tenants():
    sequences = Sequences("digits", 2.0, 3, 4)
    mine = replace(part(1, start=True), tenant="a")
    assert sequences.enter(mine, 0.0)
    for start in (False, True):
        with pytest.raises(InvalidInput, match=r"sequence_id = '7': is another tenant's.*Remedy"):
            sequences.enter(replace(part(2, start=start), tenant="b"), 0.0)


def test_one_at_a_time_in_order_of_arrival():
    sequences = opened()
    line = [part(id_) for id_ in (2, 3, 4)]
    assert [sequences.enter(made, 1.0) for made in line] == [True, False, False]
    assert sequences.leave(line[1], 1.0, executed=False) is None, "it left while it waited"
    assert sequences.leave(line[0], 1.0, executed=True) == 4


def test_a_start_on_an_open_sequence_begins_it_anew_where_it_is_unless_that_slice_leaves():
    sequences = opened()
    again = part(2, start=True)
    sequences.enter(again, 1.0)
    assert sequences.next_pin(again, LIVE) == HERE
    sequences.leave(again, 1.0, executed=True)
    moved = part(3, start=True)
    sequences.enter(moved, 1.0)
    assert sequences.next_pin(moved, {key(1)}) is None
    sequences.placed(moved, THERE)
    assert sequences.open_on() == {key(1): 1}


def test_a_lost_slice_is_told_to_those_who_wait_and_to_those_who_come():
    sequences = opened()
    waiting = part(2)
    sequences.enter(waiting, 1.0)
    sequences.lose(lambda pin: "it burns" if pin == HERE else "")
    with pytest.raises(InvalidInput, match=r"START flag.*it burns"):
        sequences.check(waiting, key(0))
    with pytest.raises(InvalidInput, match=r"START flag.*it burns"):
        sequences.next_pin(waiting, LIVE)
    sequences.leave(waiting, 1.0, executed=False)
    sequences = opened()
    sequences.lose(lambda _: "it burns")
    for id_ in (3, 4):
        late = part(id_)
        assert sequences.enter(late, 1.0)
        with pytest.raises(InvalidInput, match="it burns"):
            sequences.next_pin(late, LIVE)
        sequences.leave(late, 1.0, executed=False)
    assert sequences.expire(4.0)
    assert len(sequences) == 0


def test_an_end_that_was_not_executed_ends_nothing():
    sequences = opened()
    end = part(2, end=True)
    sequences.enter(end, 1.0)
    sequences.next_pin(end, LIVE)
    sequences.leave(end, 1.0, executed=False)
    assert sequences.open_on() == {key(0): 1}


def test_idle_time_counts_from_the_last_answer_and_not_while_something_is_under_way():
    sequences = opened()
    long = part(2)
    sequences.enter(long, 1.0)
    assert not sequences.expire(100.0)
    sequences.leave(long, 100.0, executed=True)
    assert not sequences.expire(102.0)
    assert sequences.expire(102.1)
    assert len(sequences) == 0


def test_both_bounds_are_named():
    sequences = opened(line_max=1)
    sequences.enter(part(2), 1.0)
    with pytest.raises(SequencesFull, match=r"1 requests of sequence 7 .* limit 1.*sequence_requests_max"):
        sequences.enter(part(3), 1.0)
    for n in (8, 9):
        sequences.enter(part(n, start=True, sequence=str(n)), 1.0)
    with pytest.raises(SequencesFull, match=r"3 open sequences, limit 3.*sequences_max"):
        sequences.enter(part(10, start=True, sequence="10"), 1.0)
    assert issubclass(SequencesFull, QueueFull), "a client gets RESOURCE_EXHAUSTED"


# Joined to a family queue


class World:
    def __init__(self, *targets, **limits) -> None:
        self.clock = ManualClock()
        self.pump = AsyncFamilyQueue("digits", self.clock, no_slice_wait_s=5.0)
        self.pump.apply_route(route(targets, "fifo"), "")
        self.endpoints = {key(n): "first" for n in range(3)}
        self.left = 0
        book = Sequences("digits", **{"idle_s": 2.0, "open_max": 100, "line_max": 50, **limits})
        self.gate = AsyncSequenceQueue(self.pump, book, self.clock, self.endpoints.get, self.note)

    def note(self) -> None:
        self.left += 1


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_pinned_request_takes_a_credit_of_its_slice_and_waits_for_one():
    world = World(target(0, credits=1))
    start = world.gate.submit(part(1, start=True))
    assert isinstance(start, Pick)
    world.gate.done(part(1, start=True), start, OK)
    other = world.pump.submit(ticket(2))
    second = world.gate.submit(part(3))
    third = world.pump.submit(ticket(4))
    assert not second.done()
    world.pump.done(ticket(2), other, OK)
    await settle()
    assert second.done(), "who can go nowhere else is first"
    assert not third.done()
    world.gate.done(part(3), second.result(), OK)
    assert third.done()


async def test_a_slice_that_drains_keeps_serving_its_sequence_without_asking_the_router():
    world = World(target(0, credits=1))
    start = world.gate.submit(part(1, start=True))
    waiting = world.gate.submit(part(2))
    world.pump.apply_route(route([target(1, credits=1)], "fifo"), "")
    world.gate.done(part(1, start=True), start, OK)
    await settle()
    assert waiting.result().slice == key(0)
    end = world.gate.submit(part(3, end=True))
    world.gate.done(part(2), waiting.result(), OK)
    await settle()
    assert world.left == 0
    world.gate.done(part(3, end=True), end.result(), OK)
    assert world.left == 1, "its agent waits for this"
    assert not world.gate.open_on
    assert not world.pump.in_flight


async def test_who_waits_for_a_credit_of_a_lost_slice_hears_of_it():
    world = World(target(0, credits=1))
    start = world.gate.submit(part(1, start=True))
    world.gate.done(part(1, start=True), start, OK)
    other = world.pump.submit(ticket(2))
    waiting = world.gate.submit(part(3))
    world.gate.lose(lambda _: "it burns")
    world.pump.apply_route(route([], "fifo"), "it burns")
    await settle()
    with pytest.raises(InvalidInput, match=r"START flag.*it burns"):
        waiting.result()
    world.pump.done(ticket(2), other, OK)
    assert not world.pump.in_flight
    assert not world.gate.open_on


async def test_a_client_that_leaves_gives_way_wherever_it_stands():
    world = World(target(0, credits=1))
    start = world.gate.submit(part(1, start=True))
    in_line = world.gate.submit(part(2))
    behind = world.gate.submit(part(3))
    in_line.cancel()
    world.gate.abandon(part(2), in_line)
    world.gate.done(part(1, start=True), start, OK)
    other = behind.result()
    last = world.gate.submit(part(4))
    world.gate.done(part(3), other, OK)
    last.cancel()  # picked, and cancelled in the same turn of the loop
    world.gate.abandon(part(4), last)
    await settle()
    assert not world.pump.in_flight


async def test_a_start_without_room_in_the_queue_leaves_no_trace():
    world = World(target(0, credits=1))
    world.pump.apply_route(route([target(0, credits=1)], "fifo", requests_max=1), "")
    world.pump.submit(ticket(1))
    world.pump.submit(ticket(2))
    with pytest.raises(QueueFull):
        world.gate.submit(part(3, start=True))
    with pytest.raises(InvalidInput, match="START flag"):
        world.gate.submit(part(4))


# Whatever happens


class Machine(RuleBasedStateMachine):
    """Clients of a few sequences, three slices that come and go, and books of what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World(*(target(n, credits=2) for n in range(3)))
        self.live = {0, 1, 2}
        self.ids = 0
        self.waiting: dict = {}
        self.flying: dict = {}
        self.arrived: defaultdict = defaultdict(list)
        self.homes: dict = {}

    def teardown(self):
        self.apply_route({0, 1, 2})
        while self.flying or self.waiting:
            assert self.flying, "somebody waits and nothing is under way"
            self.finish(next(iter(self.flying)))
        assert not self.world.pump.in_flight
        self.world.clock.move(10.0)
        self.world.gate.expire()
        assert not self.world.gate.open_on
        self.loop.close()

    async def _settle(self):
        await settle()

    def look(self):
        self.loop.run_until_complete(self._settle())
        for id_, (made, future) in list(self.waiting.items()):
            if not future.done():
                continue
            del self.waiting[id_]
            if future.exception() is None:
                self.fly(made, future.result())
            else:
                self.arrived[made.sequence_id].remove(id_)

    def fly(self, made, pick):
        line = self.arrived[made.sequence_id]
        assert line[0] == made.id, "not its turn"
        assert not any(each.sequence_id == made.sequence_id for each, _ in self.flying.values())
        if made.sequence_start:
            self.homes[made.sequence_id] = pick.slice
        assert self.homes[made.sequence_id] == pick.slice, "in mid-sequence on another slice"
        self.flying[made.id] = (made, pick)

    @rule(sequence=st.sampled_from("abc"), start=st.booleans(), end=st.booleans())
    def arrive(self, sequence, start, end):
        self.ids += 1
        made = part(self.ids, start, end, sequence)

        async def submit():
            return self.world.gate.submit(made)

        try:
            picked = self.loop.run_until_complete(submit())
        except InvalidInput:
            assert not start
            return
        self.arrived[sequence].append(made.id)
        if isinstance(picked, Pick):
            self.fly(made, picked)
        else:
            self.waiting[made.id] = (made, picked)
        self.look()

    def finish(self, id_, outcome=OK):
        made, pick = self.flying.pop(id_)
        self.arrived[made.sequence_id].remove(id_)

        async def done():
            self.world.gate.done(made, pick, outcome)

        self.loop.run_until_complete(done())
        self.look()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=st.sampled_from([OK, FAILED]))
    def done(self, data, outcome):
        self.finish(data.draw(st.sampled_from(sorted(self.flying))), outcome)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.waiting)))
        made, future = self.waiting.pop(id_)

        async def abandon():
            future.cancel()
            self.world.gate.abandon(made, future)

        self.loop.run_until_complete(abandon())
        self.arrived[made.sequence_id].remove(id_)
        self.look()

    def apply_route(self, live):
        self.live = set(live)

        async def table():
            self.world.pump.apply_route(route([target(n, credits=2) for n in sorted(self.live)], "fifo"), "")

        self.loop.run_until_complete(table())
        self.look()

    @rule(live=st.sets(st.integers(0, 2), min_size=1))
    def table(self, live):
        self.apply_route(live)

    @rule(lost=st.integers(0, 2))
    def lose(self, lost):
        self.world.gate.lose(lambda pin: "it burns" if pin.slice == key(lost) else "")
        self.look()

    @invariant()
    def nobody_waits_for_nothing(self):
        for sequence, line in self.arrived.items():
            if line and line[0] not in self.flying:
                assert line[0] in self.waiting
                used = self.world.pump.in_flight.get(self.homes.get(sequence), 0)
                free = [n for n in self.live if self.world.pump.in_flight.get(key(n), 0) < 2]
                assert used or not free


@pytest.mark.hypothesis
def test_order_homes_and_credits_hold_whatever_happens():
    case = Machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    case("runTest").runTest()
