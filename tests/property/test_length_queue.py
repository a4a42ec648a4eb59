"""Queue `ssjf` on one server: nobody begins later than its bound, whatever arrives; classes before arrivals."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.queues.fifo import FifoQueue
from dispatcher.queues.ssjf import AGING, CLASSES, MIDDLE, SsjfQueue, length_class
from tests.unit.dispatcher.worlds import ticket

COST_S = 0.5
AGING_S = AGING * COST_S

JOBS = st.lists(
    st.tuples(
        st.floats(0.0, 30.0, allow_nan=False),  # gap
        st.floats(0.01, 40.0, allow_nan=False),  # service
        st.one_of(st.none(), st.floats(-1.0, 5.0)),  # score
        st.sampled_from((0.001, 0.01, COST_S, 10.0)),  # what requests like it take
    ),
    min_size=1,
    max_size=40,
)


def jobs_of(drawn):
    """Tickets with their service times, in order of arrival."""
    at_s, found = 0.0, []
    for id_, (gap_s, service_s, score, cost_s) in enumerate(drawn):
        at_s += gap_s
        found.append((replace(ticket(id_, at_s), length_score=score, cost_s=cost_s), service_s))
    return found


def begins(queue, jobs) -> dict[int, float]:
    """When each begins on one server that is never idle while somebody waits."""
    return {id_: began_s for id_, (began_s, _) in served(queue, jobs).items()}


def served(queue, jobs) -> dict[int, tuple[float, float]]:
    """When each begins, and the largest mean service time that the queue knew of while it waited."""
    service_s, coming = {t.id: s for t, s in jobs}, [t for t, _ in jobs]
    now_s, began, longest_s = 0.0, {}, {}
    while coming or queue.waiting:
        if not queue.waiting:
            now_s = max(now_s, coming[0].arrived_s)
        while coming and coming[0].arrived_s <= now_s:
            queue.push(0, coming.pop(0))
            for each in queue.tickets():
                longest_s[each.id] = max(longest_s.get(each.id, 0.0), getattr(queue, "mean_s", 0.0))
        first = queue.pop(0)
        began[first.id] = now_s, longest_s[first.id]
        now_s += service_s[first.id]
    return began


def left_s(jobs, at_s: float) -> float:
    """Work left at a time of all that came until then: the same in every order."""
    busy_until_s = 0.0
    for each, service_s in jobs:
        if each.arrived_s <= at_s:
            busy_until_s = max(busy_until_s, each.arrived_s) + service_s
    return max(0.0, busy_until_s - at_s)


@pytest.mark.hypothesis
@settings(max_examples=200, deadline=None)
@given(drawn=JOBS)
def test_nobody_begins_after_its_bound_whatever_arrives(drawn):
    jobs = jobs_of(drawn)
    began = served(SsjfQueue("all"), jobs)
    for each, _ in jobs:
        class_, (began_s, mean_s) = length_class(each.length_score), began[each.id]
        aged_s = each.arrived_s + AGING * mean_s * (MIDDLE if class_ is None else class_)
        bound_s = aged_s + left_s([job for job in jobs if job[0] is not each], aged_s)
        assert began_s <= bound_s + 1e-6


@pytest.mark.hypothesis
@settings(max_examples=100, deadline=None)
@given(drawn=JOBS)
def test_nobody_is_overtaken_by_who_arrives_after_the_aging_of_all_classes(drawn):
    jobs = jobs_of(drawn)
    began = served(SsjfQueue("all"), jobs)
    for one, _ in jobs:
        for other, _ in jobs:
            if other.arrived_s > one.arrived_s + AGING * began[one.id][1] * (CLASSES - 1):
                assert began[one.id] < began[other.id]


@pytest.mark.hypothesis
@settings(max_examples=60, deadline=None)
@given(drawn=JOBS)
def test_without_predictions_it_is_first_come_first_served(drawn):
    jobs = jobs_of([(gap_s, service_s, None, cost_s) for gap_s, service_s, _, cost_s in drawn])
    assert begins(SsjfQueue("all"), jobs) == begins(FifoQueue("all"), jobs)


def test_a_shorter_class_goes_first_and_of_one_class_who_came_first_and_the_unpredicted_in_the_middle():
    queue = SsjfQueue("all")
    for id_, score in enumerate((3.4, 0.2, None, 2.6, 9.0, -3.0)):
        queue.push(0, replace(ticket(id_, float(id_)), length_score=score, cost_s=COST_S))
    assert [queue.pop(0).id for _ in range(6)] == [1, 5, 2, 0, 3, 4]


def test_who_has_waited_long_enough_goes_before_a_shorter_one():
    queue = SsjfQueue("all")
    queue.push(0, replace(ticket(0, 0.0), length_score=4.0, cost_s=COST_S))
    queue.push(0, replace(ticket(1, 4 * AGING_S - 0.1), length_score=0.0, cost_s=COST_S))
    queue.push(0, replace(ticket(2, 4 * AGING_S + 0.1), length_score=0.0, cost_s=COST_S))
    assert [queue.pop(0).id for _ in range(3)] == [1, 0, 2]


def test_aging_is_as_long_as_requests_take():
    """Of requests a hundred times as long, a hundred times as much waiting is worth a class."""
    for cost_s in (0.05, 5.0):
        queue = SsjfQueue("all")
        queue.push(0, replace(ticket(0, 0.0), length_score=1.0, cost_s=cost_s))
        queue.push(0, replace(ticket(1, AGING * cost_s * 0.99), length_score=0.0, cost_s=cost_s))
        queue.push(0, replace(ticket(2, AGING * cost_s * 1.01), length_score=0.0, cost_s=cost_s))
        assert [queue.pop(0).id for _ in range(3)] == [1, 0, 2]


def test_nobody_waits_for_the_aging_of_a_dearer_request_of_its_class():
    """One that takes ten seconds stands first in its class; a hundred short ones come, one a second."""
    dear, cheap = (replace(ticket(n, float(n)), length_score=4.0, cost_s=c) for n, c in enumerate((10.0, 0.01)))
    short = [replace(ticket(n, float(n)), length_score=0.0, cost_s=0.01) for n in range(2, 200)]
    first = replace(ticket(-1, 0.0), cost_s=0.01), 5.0  # while it is served the others come
    began = begins(SsjfQueue("all"), [first, *((each, 1.0) for each in (dear, cheap, *short))])
    assert began[1] < 100.0
