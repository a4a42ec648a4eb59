"""Floors that can be kept, those that are waited for, and those that are refused."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.routing.core import credit_shares, routing_table
from dispatcher.routing.core.accuracy_floors import AccuracyReach, best_accuracy
from tests.unit.dispatcher.worlds import ACCURACIES, OK, key, node, plan, route, routing, status, target, ticket
from trefoil.core.errors import Infeasible
from trefoil.core.fleet import SliceState

XS, M, L = "digits-xs", "digits-m", "digits-l"


@settings(max_examples=20, deadline=None)
@given(every=st.integers(3, 9), seed=st.integers(0, 99))
def test_floors_within_the_share_of_accurate_classes_leave_all_shares_as_planned(every, seed):
    """A third at most asks for the best variant, which serves forty percent: the others make up for it."""
    router = routing("weighted")
    planned = {XS: 0.35, M: 0.25, L: 0.40}
    router.on_table(route([target(n, v, w, 1000) for n, (v, w) in enumerate(planned.items())]), 0.0)
    rng, served = np.random.default_rng(seed), Counter()
    for n in range(3000):
        made = ticket(n, floor=0.99 if rng.random() < 1 / every else 0.0)
        pick = router.on_arrival(made, 0.0)
        assert ACCURACIES[pick.variant] >= made.min_accuracy
        served[pick.variant] += 1
        router.on_done(made, pick, OK, 0.0)
    for variant, share in planned.items():
        assert served[variant] / 3000 == pytest.approx(share, abs=0.01)


def test_a_burst_of_floors_is_forgotten_soon():
    router = routing("weighted")
    router.on_table(route([target(0, XS, 0.9, 10**6), target(1, L, 0.1, 10**6)]), 0.0)
    for n in range(2000):
        assert router.on_arrival(ticket(n, floor=0.99), 0.0).variant == L
    after = [router.on_arrival(ticket(10**4 + n), 0.0).variant for n in range(1000)]
    first = after.index(L)
    assert first <= 250, "sixteen requests ahead at a tenth of the traffic, and the turns that were dealt before"
    assert Counter(after[first:])[L] / (1000 - first) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("name", ["fifo", "least_loaded", "weighted"])
def test_a_floor_waits_for_its_slice_while_others_are_served(name):
    router = routing(name)
    router.on_table(route([target(0, XS, 0.5, 1), target(1, L, 0.5, 1)], name), 0.0)
    exact = router.on_arrival(ticket(1, floor=0.99), 0.0)
    assert exact.variant == L
    assert router.on_arrival(ticket(2, floor=0.99), 0.0) is None
    if name != "weighted":  # its classes have separate lines, and the next turn may be that of the other
        assert router.on_arrival(ticket(3), 0.0).variant == XS, "nobody who waits could have had that slice"
    assert router.on_credit(key(0), 0.0) is None, "not for this one"
    router.on_done(ticket(1), exact, OK, 0.0)
    pulled, pick = router.on_credit(key(1), 0.0)
    assert (pulled.id, pick.variant) == (2, L)


@pytest.mark.parametrize("name", ["fifo", "least_loaded", "weighted"])
def test_a_floor_that_is_not_there_waits_for_the_table_that_brings_it(name):
    router = routing(name)
    router.on_table(route([target(0, XS)], name), 0.0)
    assert router.on_arrival(ticket(1, floor=0.95), 0.0) is None
    router.on_table(route([target(0, XS, 0.5), target(1, M, 0.5)], name), 0.0)
    assert router.on_credit(key(0), 0.0) is None
    assert router.on_credit(key(1), 0.0)[0].id == 1


def test_what_is_in_reach_is_served_or_waited_for_and_all_else_refused_with_the_best_that_is_live():
    AccuracyReach(live=0.96, planned=0.993).check("digits", 0.96)
    AccuracyReach(live=0.96, planned=0.993).check("digits", 0.98)
    with pytest.raises(Infeasible, match=r"0\.999.*the best that is live is 0\.96.*at most 0\.96"):
        AccuracyReach(live=0.96, planned=0.993).check("digits", 0.999)
    with pytest.raises(Infeasible, match="no live slice tells how accurate it is"):
        AccuracyReach().check("digits", 0.5)
    assert best_accuracy([target(0, L, 0.0), target(1, M, 1.0)]) == 0.96, "what gets no requests keeps no floor"
    assert best_accuracy([target(0, L, 0.0), target(1, M, 0.0)]) == 0.993


def test_a_slice_that_swaps_promises_the_lower_of_its_two_variants():
    swapping = status(0, state=SliceState.SWAPPING, variant=XS)
    wanted = plan([route([target(0, L, 0.5), target(1, XS, 0.5)])])
    built = routing_table.build_table(wanted, [node([swapping, status(1, variant=XS)])])
    assert built.live("digits")[0].accuracy == ACCURACIES[XS]
    assert built.reach["digits"] == AccuracyReach(live=ACCURACIES[XS], planned=ACCURACIES[L])
    unknown = plan([route([target(0, L)])])
    assert routing_table.build_table(unknown, [node([swapping])]).live("digits")[0].accuracy == 0.0, (
        "nobody told of the old one"
    )


def test_a_slice_without_a_share_does_not_bring_a_family_down_to_one_worker():
    workers = [("d", 0), ("d", 1)]
    serving_ = [target(n, XS, 0.5, 2) for n in range(2)]
    dealt = credit_shares.credit_classes([*serving_, target(2, L, 0.0, 1)])
    assert len(credit_shares.serving_workers("digits", workers, dealt)) == 2
    among = credit_shares.serving_workers("digits", workers, dealt)
    held = [credit_shares.entitled_credits(dealt, among, worker).get(key(2), frozenset()) for worker in among]
    assert sorted(len(each) for each in held) == [0, 1], "one of the two holds its credit"
    alone = credit_shares.credit_classes([target(0, XS, 0.0, 1)])
    assert len(credit_shares.serving_workers("digits", workers, alone)) == 1
