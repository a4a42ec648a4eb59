"""`least_loaded`: whom it chooses; and what a decision of each router takes with floors and without."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.routers import ROUTERS
from tests.support.steps import Steps
from tests.unit.dispatcher.worlds import OK, key, route, routing, target, ticket

STEPS_MAX = {0.0: 600, 0.95: 4000}  # by floor; measured 161 to 352, and 1064 to 2634, which is 26 for each slice
moves = st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=200)


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=6), moves=moves)
def test_least_loaded_is_the_slice_that_a_search_finds(weights, moves):
    router = routing("least_loaded")
    router.on_table(route([target(n, weight=float(w), credits=3) for n, w in enumerate(weights)], "least_loaded"), 0.0)
    flying, held, number = [], Counter(), 0
    for back, at in moves:
        if back and flying:
            made, pick = flying.pop(at % len(flying))
            held[pick.slice] -= 1
            router.on_done(made, pick, OK, 0.0)
        elif len(flying) < 3 * len(weights):
            number += 1
            pick = router.on_arrival(ticket(number), 0.0)
            cost = {key(n): (held[key(n)] + 1) / w for n, w in enumerate(weights) if held[key(n)] < 3}
            assert cost[pick.slice] == pytest.approx(min(cost.values()))
            held[pick.slice] += 1
            flying.append((ticket(number), pick))


def test_least_loaded_follows_the_shares_of_the_plan_where_nothing_queues():
    router = routing("least_loaded")
    router.on_table(route([target(0, weight=3.0, credits=30), target(1, weight=1.0, credits=30)], "least_loaded"), 0.0)
    assert Counter(router.on_arrival(ticket(n), 0.0).slice for n in range(20)) == {key(0): 15, key(1): 5}


def test_a_slice_without_share_gets_nothing_unless_no_other_is_live():
    name = "least_loaded"
    router = routing(name)
    router.on_table(route([target(0, weight=1.0, credits=1), target(1, weight=0.0)], name), 0.0)
    assert router.on_arrival(ticket(1), 0.0).slice == key(0)
    assert router.on_arrival(ticket(2), 0.0) is None
    router.on_table(route([target(1, weight=0.0)], name), 0.0)
    assert router.on_credit(key(1), 0.0) is not None


@pytest.mark.parametrize("floor", STEPS_MAX)
@pytest.mark.parametrize("name", sorted(n for n, part in ROUTERS.items() if not part.traits.group))
def test_a_decision_among_a_hundred_slices_takes_few_steps(name, floor):
    """A few for each slice at most; microseconds are in `make bench-dispatcher`. Routers of a group look at each of a
    job's GPUs, of which there are few: tests/papers/test_carbondis_algorithm.py."""
    variants = ("digits-xs", "digits-s", "digits-m", "digits-l")
    router = routing(name)
    router.on_table(route([target(n, variants[n % 4], 0.01, 4) for n in range(100)], name), 0.0)
    tickets, flying, steps = [ticket(n, floor=floor) for n in range(200)], [], Steps()
    for made in tickets:
        with steps:
            flying.append((made, router.on_arrival(made, 0.0)))
            if len(flying) > 50:
                router.on_done(*flying.pop(0), OK, 0.0)
    print(f"{name}, floor {floor}: {steps.count / len(tickets):.0f} steps")
    assert steps.count <= STEPS_MAX[floor] * len(tickets)
