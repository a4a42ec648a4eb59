"""Bounds in requests and bytes over all lanes, order of arrival inside each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.queues.fifo import BYTES_MAX, REQUESTS_MAX, FifoQueue, QueueFull
from tests.unit.dispatcher.worlds import ticket

steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("ab"), st.integers(1, 400), st.floats(0, 50)),
        st.tuples(st.just("pop"), st.sampled_from("ab")),
        st.tuples(st.just("remove"), st.integers(0, 40)),
    ),
    max_size=60,
)


@given(steps=steps)
def test_against_a_plain_list(steps):
    queue: FifoQueue[str] = FifoQueue("q", 8, 1000)
    model: list = []
    for id_, step in enumerate(steps):
        if step[0] == "push":
            made = ticket(id_, arrived_s=step[3], bytes_=step[2])
            held = sum(each.bytes for _, each in model)
            if len(model) >= 8 or held + made.bytes > 1000:
                with pytest.raises(QueueFull):
                    queue.check(made)
            else:
                queue.check(made)
                queue.push(step[1], made)
                model.append((step[1], made))
        elif step[0] == "pop":
            mine = sorted((each for lane, each in model if lane == step[1]), key=lambda t: (t.arrived_s, t.id))
            assert queue.pop(step[1]) == (mine[0] if mine else None)
            if mine:
                model.remove((step[1], mine[0]))
        else:
            found = next(((lane, each) for lane, each in model if each.id == step[1]), None)
            assert queue.remove(found[1] if found else ticket(step[1])) is (found is not None)
            if found:
                model.remove(found)
        assert len(queue) == len(model)
        assert queue.bytes == sum(each.bytes for _, each in model)
        assert set(queue.lanes()) == {lane for lane, _ in model}
        for lane in "ab":
            assert queue.depth(lane) == sum(1 for each, _ in model if each == lane)


def test_the_message_names_queue_depth_and_limit():
    queue: FifoQueue[None] = FifoQueue("digits", 2, 100)
    queue.push(None, ticket(1, bytes_=60))
    with pytest.raises(QueueFull, match="queue digits is full: it holds 60 bytes, 50 more exceed the limit of 100"):
        queue.check(ticket(2, bytes_=50))
    queue.push(None, ticket(3, bytes_=1))
    with pytest.raises(QueueFull, match="queue digits is full: it holds 2 requests, limit 2"):
        queue.check(ticket(4, bytes_=1))


def test_a_route_without_bounds_gets_the_default_ones():
    queue: FifoQueue[None] = FifoQueue("digits", 1, 1)
    queue.limit(0, 0)
    queue.check(ticket(1, bytes_=BYTES_MAX))
    for id_ in range(REQUESTS_MAX):
        queue.push(None, ticket(id_))
    with pytest.raises(QueueFull):
        queue.check(ticket(REQUESTS_MAX))


def test_a_ticket_waits_once():
    queue: FifoQueue[None] = FifoQueue("digits")
    queue.push(None, ticket(1))
    with pytest.raises(AssertionError, match="waits already"):
        queue.push(None, ticket(1))
