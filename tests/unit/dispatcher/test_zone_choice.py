"""Which requests go to another zone: what they save there, and whether they are in time."""

import dataclasses
import math

import numpy as np
import pytest

from dispatcher.request.core.zone_choice import (
    ANSWERS_MIN,
    HELD_S,
    ROUND_TRIPS_MIN,
    SEEN_MAX,
    SEEN_S,
    FamilyThere,
    Latencies,
    Terms,
    ZoneSight,
    choose,
    saved_g,
)
from trefoil.core.jobs.planned import RequestOffer

OFFER = RequestOffer("digits", "FAR", 0.01, 100.0, 1.2, 100.0, 20.0, 0.5)
ASKED = Terms(items=1, size=1000, limit_ms=100.0)


def sight(*round_trips_ms: float) -> ZoneSight:
    made = ZoneSight()
    for took_ms in round_trips_ms or (10.0,) * ROUND_TRIPS_MIN:
        made.reached(took_ms, 0.0)
    return made


def there(answers: int = ANSWERS_MIN, took_ms: float = 30.0, **state) -> FamilyThere:
    made = FamilyThere(**{"items": 10.0, "filled_s": 0.0} | state)
    for _ in range(answers):
        made.answers.add(took_ms, 0.0)
    return made


def chosen(offers=(OFFER,), asked=ASKED, seen=None, family=None, per_mb=216.0, now_s=1.0, workers=1) -> str:
    sights = seen or {offer.zone: sight() for offer in offers}
    families = {(offer.family, offer.zone): family or there() for offer in offers}
    found = choose(offers, sights, families, asked, per_mb, now_s, workers)
    return found.zone if found else ""


def test_the_zone_that_saves_the_most_is_chosen():
    assert chosen() == "FAR"
    best = dataclasses.replace(OFFER, zone="BEST", saved_g=0.02)
    assert chosen((OFFER, best)) == "BEST"
    assert chosen(()) == ""


def test_what_moving_costs_is_taken_off_for_the_request_and_its_answer():
    moved_g = 0.5 * 216.0 * 100.0 * 1.2 / 3.6e6
    assert saved_g(OFFER, 3, 5e5, 216.0) == pytest.approx(3 * 0.01 - moved_g)
    size = round(0.01 / moved_g * 5e5)
    assert chosen(asked=Terms(1, size - 5000, 100.0)) == "FAR"
    assert chosen(asked=Terms(1, size + 5000, 100.0)) == ""
    assert chosen(asked=Terms(2, size + 5000, 100.0)) == "FAR", "two items save twice as much"
    assert chosen(asked=Terms(1, size - 5000, 100.0), family=there(answer_bytes=10_000)) == "", (
        "its answer is moved, too"
    )
    assert chosen(asked=Terms(1, size + 5000, 100.0), per_mb=0.0) == "FAR"


@pytest.mark.parametrize(
    ("slo_ms", "round_trip_ms", "zone"),
    [(100.0, 80.0, "FAR"), (100.0, 81.0, ""), (0.0, 10.0, ""), (30.0, 10.0, "FAR"), (29.0, 10.0, "")],
)
def test_the_objective_less_the_round_trip_is_at_least_what_an_item_takes_there(slo_ms, round_trip_ms, zone):
    seen = {"FAR": sight(*(5.0,) * 3, *(round_trip_ms,) * 3)}
    assert chosen(asked=Terms(1, 1000, slo_ms), seen=seen, family=there(took_ms=1.0)) == zone


@pytest.mark.parametrize(("floor", "zone"), [(0.5, "FAR"), (0.51, "")])
def test_a_request_whose_floor_is_above_what_is_offered_stays(floor, zone):
    assert chosen(asked=Terms(1, 1000, 100.0, floor)) == zone


def test_a_zone_that_is_not_measured_or_lost_is_not_asked():
    few = sight(*(1.0,) * (ROUND_TRIPS_MIN - 1))
    assert chosen(seen={"FAR": few}) == ""
    few.reached(1.0, 0.0)
    assert chosen(seen={"FAR": few}) == "FAR"
    few.lost("UNAVAILABLE")
    assert chosen(seen={"FAR": few}) == ""
    assert chosen(seen={"OTHER": sight()}) == ""


def test_a_family_whose_answers_are_late_stays_until_they_are_old():
    late = there(answers=18, took_ms=30.0)
    late.answers.add(101.0, 1.0)
    late.answers.add(math.inf, 1.0)
    assert chosen(family=late) == "", "two of 20 are late: p95 is above the objective"
    assert chosen(family=late, now_s=1.0 + SEEN_S) == ""
    assert chosen(family=late, now_s=1.1 + SEEN_S) == "FAR", "and then one at a time"
    late.sent(1)
    assert chosen(family=late, now_s=2.0 + SEEN_S) == ""
    late.ended(math.nan, 2.0 + SEEN_S)
    assert not late.answers, "a client that left says nothing of the zone"
    one_of_many = there(answers=19, took_ms=30.0)
    one_of_many.answers.add(math.inf, 0.0)
    assert chosen(family=one_of_many) == "FAR"


def test_no_more_go_than_the_zone_has_time_for_shared_by_workers():
    family, gone = there(), 0
    for tick in range(1000):  # ten seconds
        if chosen(family=family, now_s=tick / 100, workers=4):
            family.sent(1)
            family.ended(30.0, tick / 100)
            gone += 1
    assert 250 <= gone <= 276
    assert chosen(family=there(items=0.0), asked=Terms(30, 1, 100.0), now_s=0.2) == ""
    assert chosen(family=there(held_until_s=1.0 + HELD_S)) == ""


def latencies(values) -> Latencies:
    made = Latencies()
    for value in values:
        made.add(value, 0.0)
    return made


def test_quantile_is_the_nearest_rank():
    assert latencies(reversed(range(1, 21))).quantile() == 19
    assert latencies([3.0]).quantile() == 3.0
    assert latencies([]).quantile() == math.inf


def test_a_window_has_the_quantile_of_what_it_still_holds():
    rng, window, came = np.random.default_rng(7), Latencies(), []
    for now_s in np.cumsum(rng.exponential(SEEN_S / 200, 2000)):
        took_ms = math.inf if rng.random() < 0.02 else float(rng.integers(1, 50))  # equal ones among them
        window.add(took_ms, float(now_s))
        came.append((now_s, took_ms))
        held = sorted(took for at_s, took in came[-SEEN_MAX:] if now_s - at_s <= SEEN_S)
        assert (len(window), window.quantile()) == (len(held), held[math.ceil(0.95 * len(held)) - 1])
    window.clear()
    assert (len(window), window.quantile()) == (0, math.inf)


@pytest.mark.parametrize(
    ("answers", "took_ms", "limit_ms", "patience_ms"),
    [(20, 10.0, 100.0, 50.0), (20, 40.0, 100.0, 80.0), (20, 90.0, 100.0, 100.0), (19, 10.0, 100.0, 100.0)],
)
def test_a_zone_that_hangs_leaves_time_for_this_one(answers, took_ms, limit_ms, patience_ms):
    assert there(answers, took_ms).patience_ms(limit_ms) == patience_ms
