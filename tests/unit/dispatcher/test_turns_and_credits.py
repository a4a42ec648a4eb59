"""The two fast structures of the routers against the plain rules that they stand for."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.routers.credits import Account, CreditPick, Credits, Pool
from dispatcher.routers.weighted import EPSILON, schedule_turns
from tests.unit.dispatcher.worlds import key


def plain(shares, lags, count):
    """The formulation as it is written: add, choose, subtract."""
    lags, order = list(lags), []
    for _ in range(count):
        lags = [lag + share for lag, share in zip(lags, shares, strict=True)]
        owed = [k for k, lag in enumerate(lags) if lag > EPSILON]
        deadlines = {k: (1.0 - lags[k]) / shares[k] for k in owed}
        soonest = min(deadlines.values())
        chosen = next(k for k in owed if deadlines[k] <= soonest + 1e-7)
        lags[chosen] -= 1.0
        order.append(chosen)
    return order


weights = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(weights=weights)
@settings(deadline=None)
def test_turns_are_those_of_the_formulation(weights):
    """Whole weights, so that equal deadlines are equal: which of them goes first is then the order of the classes."""
    shares = [weight / sum(weights) for weight in weights]
    assert schedule_turns(shares, [0.0] * len(shares), 200) == plain(shares, [0.0] * len(shares), 200)


@given(weights=weights, sizes=st.lists(st.integers(1, 70), min_size=1, max_size=8))
@settings(deadline=None)
def test_dealt_in_parts_no_class_is_ever_a_request_away_from_its_share(weights, sizes):
    shares = [weight / sum(weights) for weight in weights]
    lags, served, dealt = [0.0] * len(shares), Counter(), 0
    for size in sizes:
        order = schedule_turns(shares, lags, size)
        for k in order:
            served[k] += 1
            dealt += 1
            for each, share in enumerate(shares):
                assert abs(served[each] - dealt * share) < 1 + 1e-6
        counts = Counter(order)
        lags = [lag + share * size - counts[k] for k, (lag, share) in enumerate(zip(lags, shares, strict=True))]


steps = st.lists(st.tuples(st.sampled_from(["idlest", "any", "back"]), st.integers(0, 99)), max_size=300)


@given(limits=st.lists(st.integers(1, 4), min_size=1, max_size=6), steps=steps)
@settings(deadline=None)
def test_the_idlest_slice_is_the_one_that_a_search_finds(limits, steps):
    credits = Credits()
    credits.limit({key(n): limit for n, limit in enumerate(limits)})
    accounts = [credits.account(key(n)) for n in range(len(limits))]
    for n, account in enumerate(accounts):
        account.pick = CreditPick(key(n), "v", 0, "", account)
    pool, held = Pool(accounts), []
    for what, number in steps:
        free = [each for each in accounts if each.in_flight < each.limit]
        expected = min(free, key=lambda each: (each.in_flight, each.changed_at, each.order), default=None)
        if what == "back":
            if held:
                credits.give_back(held.pop(number % len(held)))
        elif what == "idlest":
            pick = credits.take_idlest(pool)
            assert (pick.account if pick is not None else None) is expected
            held += [] if pick is None else [pick]
        elif free:
            held.append(credits.take(free[number % len(free)]))
    assert sum(each.in_flight for each in accounts) == len(held)


def test_a_slice_that_left_the_table_still_owes_and_is_forgotten_when_it_has_paid():
    credits = Credits()
    credits.limit({key(0): 2})
    account = credits.account(key(0))
    account.pick = CreditPick(key(0), "v", 0, "", account)
    first, second = credits.take(account), credits.take(account)
    credits.limit({})
    assert credits.free(key(0)) is None
    credits.give_back(first)
    credits.limit({key(0): 1})
    assert credits.free(key(0)) is None, "one is still in flight"
    credits.give_back(second)
    assert credits.free(key(0)) is credits.account(key(0))
    credits.limit({})
    with pytest.raises(KeyError):
        credits.account(key(0))


def test_a_pick_of_another_router_is_a_bug():
    with pytest.raises(AssertionError, match="another router"):
        Credits().give_back(CreditPick.__mro__[1](key(0), "v", 0, ""))
    with pytest.raises(AssertionError, match="no credit left"):
        Credits().take(Account(key(0)))
