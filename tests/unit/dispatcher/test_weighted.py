"""Shares first: they bind whatever the speed, the load or the number of classes."""

import heapq
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.queues.fifo import FifoQueue, QueueFull
from dispatcher.routers.weighted import Weighted
from tests.unit.dispatcher.worlds import OK, key, route, target, ticket


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=9), count=st.integers(1, 400))
def test_every_class_is_always_within_one_request_of_its_share(weights, count):
    router = Weighted("digits", FifoQueue("digits"))
    total = sum(weights)
    router.on_table(route([target(i, f"v{i}", w / total, credits=10**6) for i, w in enumerate(weights)]), 0.0)
    served: Counter = Counter()
    for n in range(1, count + 1):
        pick = router.on_arrival(ticket(n), 0.0)
        served[pick.variant] += 1
        for i, w in enumerate(weights):
            assert abs(served[f"v{i}"] - n * w / total) < 1 + 1e-6


@pytest.mark.parametrize("load", [0.2, 0.6, 0.95])
def test_served_shares_are_planned_shares_at_any_load(load):
    """Two pools of very different speed under Poisson arrivals; a family-wide FIFO would drift towards the fast one."""
    planned = {"digits-l": 0.35, "digits-xs": 0.65}
    service_s = {"digits-l": 0.118, "digits-xs": 0.020}
    slices = {"digits-l": range(0, 4), "digits-xs": range(4, 6)}
    capacity = min(len(slices[v]) / service_s[v] / planned[v] for v in planned)
    served, _ = _simulate(planned, service_s, slices, load * capacity, seconds=400.0)
    total = sum(served.values())
    for variant, share in planned.items():
        assert abs(served[variant] / total - share) <= 0.01


def _simulate(planned, service_s, slices, rate_per_s, seconds):
    """A request-level shell: pops events in time order; returns counts by variant and the order per class."""
    rng = np.random.default_rng(7)
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(
        route([target(n, v, w / len(slices[v])) for v, w in planned.items() for n in slices[v]], requests_max=10**6),
        0.0,
    )
    events = [
        (t, 0, n, None) for n, t in enumerate(np.cumsum(rng.exponential(1 / rate_per_s, int(seconds * rate_per_s))))
    ]
    served: Counter = Counter()
    order: dict[str, list[int]] = {v: [] for v in planned}
    busy: dict = {}

    def start(made, pick, now):
        served[pick.variant] += 1
        order[pick.variant].append(made.id)
        free_at = max(now, busy.get(pick.slice, 0.0)) + service_s[pick.variant] * rng.gamma(100, 1 / 100)
        busy[pick.slice] = free_at
        heapq.heappush(events, (free_at, 1, made.id, (made, pick)))

    heapq.heapify(events)
    while events:
        now, kind, id_, what = heapq.heappop(events)
        if kind == 0:
            made = ticket(id_, arrived_s=now)
            pick = router.on_arrival(made, now)
            if pick is not None:
                start(made, pick, now)
        else:
            router.on_done(*what, OK, now)
            pulled = router.on_credit(what[1].slice, now)
            if pulled is not None:
                start(*pulled, now)
    return served, order


def test_inside_a_class_first_in_first_out_also_under_overload():
    planned = {"digits-l": 0.5, "digits-xs": 0.5}
    _, order = _simulate(planned, {"digits-l": 0.1, "digits-xs": 0.01}, {"digits-l": [0], "digits-xs": [1]}, 30.0, 20.0)
    for ids in order.values():
        assert ids == sorted(ids)


def test_small_shares_are_served_although_the_table_changes_all_the_time():
    router = Weighted("digits", FifoQueue("digits"))
    served: Counter = Counter()
    for n in range(2000):
        if n % 5 == 0:
            router.on_table(route([target(0, "digits-l", 0.97, 10**6), target(1, "digits-xs", 0.03, 10**6)]), 0.0)
        served[router.on_arrival(ticket(n), 0.0).variant] += 1
    assert abs(served["digits-xs"] - 60) <= 1


def test_shares_follow_a_new_table_at_once():
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(0, "digits-l", 0.9, 10**6), target(1, "digits-xs", 0.1, 10**6)]), 0.0)
    for n in range(105):
        router.on_arrival(ticket(n), 0.0)
    router.on_table(route([target(0, "digits-l", 0.2, 10**6), target(1, "digits-xs", 0.8, 10**6)]), 0.0)
    after = Counter(router.on_arrival(ticket(1000 + n), 0.0).variant for n in range(100))
    assert abs(after["digits-l"] - 20) <= 2


def test_who_waited_for_a_class_that_died_gets_another_in_order_of_arrival():
    router = Weighted("digits", FifoQueue("digits"))
    a, b = target(0, "digits-l", 0.5, 1), target(1, "digits-xs", 0.5, 1)
    router.on_table(route([a, b]), 0.0)
    flying = deque()
    for n in range(8):
        pick = router.on_arrival(ticket(n), 0.0)
        if pick is not None:
            flying.append((ticket(n), pick))
    assert {pick.slice for _, pick in flying} == {key(0), key(1)}
    router.on_table(route([b]), 0.0)
    assert router.on_credit(key(0), 0.0) is None
    on_b = next(each for each in flying if each[1].slice == key(1))
    router.on_done(*on_b, OK, 0.0)
    order = []
    while (pulled := router.on_credit(key(1), 0.0)) is not None:
        order.append(pulled[0].id)
        router.on_done(*pulled, OK, 0.0)
    assert order == [2, 3, 4, 5, 6, 7]


def test_a_refused_request_charges_no_class():
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(0, "digits-l", 0.5, 1), target(1, "digits-xs", 0.5, 1)], requests_max=2), 0.0)
    picks = [router.on_arrival(ticket(n), 0.0) for n in range(4)]
    for n in range(50):
        with pytest.raises(QueueFull, match="holds 2 requests, limit 2"):
            router.on_arrival(ticket(10 + n), 0.0)
    for n, pick in enumerate(picks[:2]):
        router.on_done(ticket(n), pick, OK, 0.0)
    assert router.on_credit(key(0), 0.0) is not None
    assert router.on_credit(key(1), 0.0) is not None


def test_only_classes_without_weight_are_live_so_they_share_equally():
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(0, "digits-l", 0.0, 99), target(1, "digits-xs", 0.0, 99)]), 0.0)
    assert Counter(router.on_arrival(ticket(n), 0.0).variant for n in range(10)) == {"digits-l": 5, "digits-xs": 5}


def test_inside_a_class_the_idle_slices_take_turns():
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(n, "digits-l", 0.25) for n in range(4)]), 0.0)
    seen = []
    for n in range(8):
        pick = router.on_arrival(ticket(n), 0.0)
        seen.append(pick.slice)
        router.on_done(ticket(n), pick, OK, 0.0)
    assert sorted(seen[:4]) == sorted(seen[4:]) == sorted(key(n) for n in range(4))


def test_the_reason_names_class_and_share():
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(0, "digits-l", 0.25), target(1, "digits-xs", 0.75)]), 0.0)
    assert router.on_arrival(ticket(0), 0.0).why == "weighted: digits-xs on 1g.5gb, share 0.750"


def served(router, count, start=0):
    """Who gets the next requests, all at once."""
    return Counter(router.on_arrival(ticket(start + n), 0.0).slice for n in range(count))


def test_slices_of_one_type_on_two_device_types_keep_their_own_shares():
    """The first two lie on a fast GPU and get 0.4 each, the others on a slow one."""
    weights = (0.4, 0.4, 0.1, 0.1)
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(n, "digits-l", w, 10**6) for n, w in enumerate(weights)]), 0.0)
    assert served(router, 100) == {key(0): 40, key(1): 40, key(2): 10, key(3): 10}


def test_the_fast_slices_do_not_take_what_waits_for_the_slow_ones():
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(0, "digits-l", 0.5, 1), target(1, "digits-l", 0.25, 1)]), 0.0)
    picks = [router.on_arrival(ticket(n), 0.0) for n in range(9)]
    fast = next(p for p in picks if p is not None and p.slice == key(0))
    pulled = []
    while fast is not None:
        router.on_done(ticket(0), fast, OK, 0.0)
        got = router.on_credit(key(0), 0.0)
        fast = got[1] if got else None
        pulled += [got[0].id] if got else []
    assert len(pulled) == 5  # of nine, six are its: the first went there at once
    assert pulled == sorted(pulled)


def test_rounded_weights_are_one_class_and_a_slice_without_weight_helps():
    router = Weighted("digits", FifoQueue("digits"))
    weights = (0.333333333, 0.333333334, 0.3333, 0.0)
    router.on_table(route([target(n, "digits-l", w, 1) for n, w in enumerate(weights)]), 0.0)
    assert served(router, 4) == {key(n): 1 for n in range(4)}


@pytest.mark.parametrize("every", [1, 5])
def test_small_shares_of_one_kind_are_served_although_their_weights_change_all_the_time(every):
    """Classes are known again by their slices: a weight that moves is not a new class that has waited for nothing."""
    router = Weighted("digits", FifoQueue("digits"))
    got: Counter = Counter()
    for n in range(2000):
        if n % every == 0:
            light = 0.03 + 0.001 * (n // every % 2)
            router.on_table(route([target(0, "digits-l", 1 - light, 10**6), target(1, "digits-l", light, 10**6)]), 0.0)
        got[router.on_arrival(ticket(n), 0.0).slice] += 1
    assert abs(got[key(1)] - 61) <= 2


def test_who_waits_for_a_class_stays_in_its_line_when_weights_change_order():
    router = Weighted("digits", FifoQueue("digits"))
    router.on_table(route([target(0, "digits-l", 0.6, 1), target(1, "digits-l", 0.4, 1)]), 0.0)
    picks = [router.on_arrival(ticket(n), 0.0) for n in range(10)]
    router.on_table(route([target(0, "digits-l", 0.3, 1), target(1, "digits-l", 0.7, 1)]), 0.0)
    on_first = next(p for p in picks if p is not None and p.slice == key(0))
    pulled = []
    pick = on_first
    while pick is not None:
        router.on_done(ticket(0), pick, OK, 0.0)
        got = router.on_credit(key(0), 0.0)
        pick = got[1] if got else None
        pulled += [got[0].id] if got else []
    assert len(pulled) == 5  # six of ten by the table under which they came


def test_a_class_that_splits_and_joins_again_loses_nobody():
    router = Weighted("digits", FifoQueue("digits"))
    tables = [(0.25,) * 4, (0.4, 0.4, 0.1, 0.1), (0.25,) * 4, (0.1, 0.2, 0.3, 0.4)]
    waiting = set()
    held = deque()
    for n in range(200):
        if n % 10 == 0:
            router.on_table(route([target(i, "digits-l", w, 1) for i, w in enumerate(tables[n // 10 % 4])]), 0.0)
        pick = router.on_arrival(ticket(n), 0.0)
        held.append((ticket(n), pick)) if pick else waiting.add(n)
    while held or waiting:
        assert held, "somebody waits and nothing is in flight"
        router.on_done(*held.popleft(), OK, 0.0)
        for i in range(4):
            while (got := router.on_credit(key(i), 0.0)) is not None:
                waiting.remove(got[0].id)
                held.append(got)
