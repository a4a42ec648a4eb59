"""Silence, streaks, panic and slow start; predictions and the retry budget: each rule alone, with the test's clock."""

import heapq
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.request.core.retry_budget import RetryBudget
from dispatcher.slice_health.core.ejection import FLAP_MAX_S, FLAP_S, PROBE_FIRST_S, Ejections, Failure
from dispatcher.slice_health.core.outliers import (
    FailureStreaks,
    SilenceDetector,
    SliceEvidence,
    SlowStart,
    panicking_family,
)
from dispatcher.slice_health.core.service_times import HALF_LIFE_S, ServiceTimes
from tests.unit.dispatcher.worlds import key, node, status
from trefoil.core.demand import FIRST_CALL_S

A, B = key(0), key(1)
AT_A, AT_B = (A, "l"), (B, "l")  # of the model `l`


def listen(silence, seconds, in_flight, answer_counts, start_s, step_s=0.1):
    """Tick for so long; the slices that were to be asked at the last tick, and the time then."""
    asked, at_s = [], start_s
    for _ in range(round(seconds / step_s)):
        at_s += step_s
        asked = silence.tick(in_flight, answer_counts, at_s)
    return asked, at_s


def test_a_slice_that_works_and_answers_is_never_asked():
    silence, answer_counts = SilenceDetector(0.5), {A: 0}
    for tick in range(50):
        answer_counts[A] += 1
        assert silence.tick({A: 3}, answer_counts, tick * 0.1) == []


def test_a_slice_that_answers_nothing_is_asked_and_again_after_each_answer():
    silence = SilenceDetector(0.5)
    asked, at_s = listen(silence, 0.5, {A: 1, B: 1}, {A: 7}, 0.0)
    assert asked == []
    asked, at_s = listen(silence, 0.2, {A: 1}, {A: 7}, at_s)
    assert asked == [A]
    silence.on_alive(A)
    asked, at_s = listen(silence, 0.4, {A: 1}, {A: 7}, at_s)
    assert asked == []
    asked, at_s = listen(silence, 0.3, {A: 1}, {A: 7}, at_s)
    assert asked == [A]
    assert silence.quiet_s(A) > 1.0
    assert silence.tick({A: 1}, {A: 8}, at_s + 0.1) == []
    assert silence.quiet_s(A) == 0.0


def test_an_idle_slice_is_not_silent_and_silence_begins_with_the_first_request():
    silence = SilenceDetector(0.5)
    _, at_s = listen(silence, 5.0, {}, {}, 0.0)
    asked, _ = listen(silence, 0.5, {A: 1}, {}, at_s)
    assert asked == []


def test_who_was_stopped_itself_accuses_nobody():
    silence = SilenceDetector(0.5)
    silence.tick({A: 1}, {}, 0.0)
    silence.tick({A: 1}, {}, 0.1)
    assert silence.tick({A: 1}, {}, 60.0) == [], "a minute passed in one tick: it was this process that stood still"


def test_only_bad_ends_in_a_row_make_an_outlier():
    strikes = FailureStreaks(3)
    assert [strikes.count_failure(A, False), strikes.count_failure(A, False)] == [0, 0]
    strikes.reset(A)
    assert [strikes.count_failure(A, False) for _ in range(3)] == [0, 0, 3]
    assert strikes.count_failure(B, fragile=True) == 1, "one is enough on a ramp"


@given(st.integers(1, 9), st.data())
def test_at_most_half_of_a_family_is_ever_out_as_outliers(count, data):
    slices = [key(n) for n in range(count)]
    out: set = set()
    for _ in range(30):
        one = data.draw(st.sampled_from(slices))
        if one in out:
            out.discard(one)  # readmitted
        elif not panicking_family(one, {"digits": slices}, out):
            out.add(one)
        assert 2 * len(out) <= count


def test_a_slice_of_two_families_stays_if_either_would_lose_too_many():
    serving = {"digits": [key(n) for n in range(6)], "words": [key(0), key(6)]}
    assert panicking_family(key(1), serving, set()) == ""
    assert panicking_family(key(0), serving, {key(6)}) == "words"
    assert panicking_family(key(9), serving, set()) == "", "nobody misses it"


def test_what_comes_back_gets_twice_as_many_after_each_run_of_good_answers():
    ramps = SlowStart()
    ramps.start(A, 6)
    assert ramps.limits() == {A: 1}
    assert ramps.count_success(A)
    assert ramps.limits() == {A: 2}
    assert not ramps.count_success(A)
    assert ramps.count_success(A)
    assert ramps.limits() == {A: 4}
    assert [ramps.count_success(A) for _ in range(4)] == [False, False, False, True]
    assert ramps.limits() == {}
    assert not ramps.count_success(A)
    ramps.start(B, 1)
    assert B not in ramps, "one credit is all that it has"


def suspected(health, now_s=0.0):
    """What is to be probed now, as (failure, why)."""
    due = health.suspicions.due(now_s)
    for place in due:
        health.suspicions.close(place)
    return [(each.failure, each.why) for each in due.values()]


def test_clients_that_give_no_time_make_no_slice_late():
    health = SliceEvidence(0.5, late_strikes=3, fault_strikes=2)
    answer(health, 0.1)
    for _ in range(500):
        health.times.record_drop(A, "l", 1, 1.0)  # takes the prediction down, not what is usual
    assert health.times.predicted_s(A, "l", 1, 0.0) < 0.001
    for _ in range(9):
        health.on_deadline(AT_A, "l", 1, 0.05, 30.0)
    assert suspected(health) == []


def answer(health, service_s, now_s=0.0, times=2):
    """Answers in a row; the first of all is left out of the service times."""
    for _ in range(times):
        health.on_answer(AT_A, "l", 1, service_s, now_s)


def late(health, times, waited_s=0.3, now_s=0.0, place=AT_A):
    for _ in range(times):
        health.on_deadline(place, "l", 1, waited_s, now_s)
    return suspected(health, now_s)


def test_health_tells_late_from_impatient_and_sick_from_wrong():
    health = SliceEvidence(0.5, late_strikes=3, fault_strikes=2)
    assert late(health, 9, 9.9, place=AT_B) == [], "nothing is known to be usual"
    answer(health, 0.1)
    assert late(health, 9, 0.05) == [], "no slice could meet that deadline"
    assert late(health, 2) == []
    answer(health, 0.1)
    assert late(health, 2) == []
    (failure, why), *_ = late(health, 1)
    assert failure is Failure.LATE
    assert why == "3 deadlines in a row passed there, the last after 300 ms, 100 ms are usual"
    for _ in range(9):
        health.on_status(AT_A, "INVALID_ARGUMENT", "a wrong shape")
    assert suspected(health, 1.0) == []
    health.on_status(AT_A, "INTERNAL", "it went wrong")
    assert suspected(health, 2.0) == [(None, "it answered INTERNAL")]
    health.on_status(AT_A, "INTERNAL", "it went wrong")
    assert suspected(health, 3.0) == [(Failure.SICK, "2 requests in a row ended INTERNAL")]
    health.on_stall(10.0)
    assert late(health, 9, now_s=10.5) == [], "it was this process that was late"
    assert late(health, 3, now_s=20.0, place=(key(9), "l")), "usual is what others take"
    health.on_ejected(AT_A, dead=False)
    health.on_status(AT_A, "INTERNAL", "it went wrong")
    assert suspected(health, 30.0) == [(None, "it answered INTERNAL")], "a clean record"
    assert health.times.predicted_s(A, "l", 1, 0.0) >= 0.1
    health.on_ejected(AT_A, dead=True)
    assert health.times.predicted_s(A, "l", 1, 0.0) == 0.0, "whatever comes back there is another server"


def test_what_one_model_does_is_nothing_that_another_did():
    health = SliceEvidence(0.5, late_strikes=3, fault_strikes=2)
    other = (A, "words")
    for _ in range(9):
        health.on_status(AT_A, "UNAVAILABLE", "not now")
        health.on_answer(other, "w", 1, 0.1, 0.0)
    assert list(health.suspicions.due(0.0)) == [AT_A]
    silence, counts = health.silence, health.answer_counts
    for tick in range(9):
        counts[other] += 1
        asked = silence.tick({AT_A: 1, other: 1}, counts, tick * 0.1)
    assert asked == [AT_A], "one that is silent among others that answer is found"


def test_an_outlier_that_comes_out_again_waits_longer_for_its_probe():
    ejections, at_s, waits = Ejections(), 0.0, []
    ejections.on_nodes([node([status(0)])], 0.0)
    for _ in range(9):
        ejections.eject(AT_A, Failure.HUNG, "silent", at_s)
        assert ejections.outliers() == {A}
        waits.append(ejections.next_probe_at_s() - at_s)
        at_s = ejections.next_probe_at_s()
        ejections.readmit(AT_A)
    assert waits[:3] == pytest.approx([PROBE_FIRST_S, 2 * PROBE_FIRST_S, 4 * PROBE_FIRST_S])
    assert waits[-1] == pytest.approx(FLAP_MAX_S)
    at_s += FLAP_S + 1
    ejections.eject(AT_A, Failure.LATE, "late", at_s)
    assert ejections.next_probe_at_s() - at_s == pytest.approx(PROBE_FIRST_S)
    ejections.readmit(AT_A)
    ejections.eject(AT_A, Failure.BROKEN, "gone", at_s)
    assert ejections.next_probe_at_s() - at_s == pytest.approx(PROBE_FIRST_S), "a death is probed as ever"
    assert ejections.outliers() == frozenset()


def test_nothing_is_predicted_of_what_was_never_seen_nor_of_the_first_call():
    times = ServiceTimes()
    assert times.predicted_s(A, "l", 1, 0.0) == 0.0
    times.record_drop(A, "l", 1, 0.0)
    times.record(A, "l", 1, 11.0, 0.0)
    assert times.predicted_s(A, "l", 1, 0.0) == times.usual_s(A, "l", 1) == 0.0, "it loads, or compiles"
    times.record(A, "l", 1, 0.02, 0.0)
    assert times.predicted_s(A, "l", 1, 0.0) == times.usual_s(A, "l", 1) == 0.02
    assert times.predicted_s(A, "xs", 1, 0.0) == times.predicted_s(B, "l", 1, 0.0) == 0.0
    assert times.predicted_s(A, "l", 64, 0.0) == 0.0, "another size takes another time"


@settings(max_examples=25)
@given(st.lists(st.floats(0.001, 0.1), min_size=2, max_size=60))
def test_a_prediction_stays_between_the_times_that_were_seen(seen):
    times = ServiceTimes()
    for each in seen:
        times.record(A, "l", 1, each, 0.0)
    assert min(seen[1:]) - 1e-9 <= times.predicted_s(A, "l", 1, 0.0) <= max(seen[1:]) + 1e-9


@settings(max_examples=25)
@given(st.permutations([0.01] * 8 + [1.0] * 24), st.integers(0, 60))
def test_quick_requests_are_not_dropped_for_slow_ones_among_them(seen, passed):
    times = ServiceTimes()
    for each in [11.0, *seen * 3]:
        times.record(A, "l", 1, each, 0.0)
    assert times.predicted_s(A, "l", 1, 0.0) < 0.05, "within three rounds, whatever came first"
    times = ServiceTimes()
    for each in [11.0, *(1.01 - each for each in seen * 3)]:  # most are quick
        times.record(A, "l", 1, each, 0.0)
    for _ in range(passed):
        times.record_late(A, "l", 1, 5.0, 0.0)
    assert times.predicted_s(A, "l", 1, 0.0) <= 0.02 + 1e-9, "deadlines that pass lengthen it to a bound"


def test_a_slice_that_was_slow_once_is_tried_again():
    times = ServiceTimes()
    for _ in range(2):
        times.record(A, "l", 1, 8.0, 0.0)
    assert times.predicted_s(A, "l", 1, HALF_LIFE_S) == pytest.approx(4.0)
    for _ in range(80):
        times.record_drop(A, "l", 1, 8.0)
    assert times.predicted_s(A, "l", 1, 0.0) == pytest.approx(8.0), "it may still be at it"
    for _ in range(80):
        times.record_drop(A, "l", 1, 8.1)
    assert times.predicted_s(A, "l", 1, 0.0) < 0.2


def test_a_deadline_that_passed_says_that_it_takes_longer():
    health = SliceEvidence(0.5, late_strikes=3, fault_strikes=2)
    health.on_deadline(AT_A, "l", 1, 0.3, 0.0, usual=False)
    assert health.times.predicted_s(A, "l", 1, 0.0) == 0.0, "a stream is as long as its request wants it"
    health.on_deadline(AT_A, "l", 1, 0.3, 0.0)
    assert health.times.predicted_s(A, "l", 1, 0.0) == 0.3
    assert health.times.usual_s(A, "l", 1) == health.times.longest_s(A) == 0.0, "nothing was answered"
    health.on_deadline(AT_A, "l", 1, 0.1, 1.0)
    assert health.times.predicted_s(A, "l", 1, 1.0) == 0.3, "that was known"
    health.on_deadline(AT_A, "l", 1, 0.4, 1.0)
    assert health.times.predicted_s(A, "l", 1, 1.0) == pytest.approx(0.45)
    health.on_answer(AT_A, "l", 1, 0.36, 1.0)
    assert health.times.usual_s(A, "l", 1) == pytest.approx(0.36)


def test_a_slow_first_call_and_what_waits_behind_it_are_no_evidence():
    health = SliceEvidence(0.5, late_strikes=3, fault_strikes=2)
    answer(health, 0.02)
    times, slow = health.times, (B, "l", 1)
    times.record_sent(*slow, 10.0)
    assert times.has_first(B, 13.9)
    assert not times.has_first(A, 13.9)
    for late_s in (10.6, 12.6, 13.6, 13.8):  # sent behind it
        health.on_deadline(AT_B, "l", 1, 0.5, late_s)
    health.on_answer(AT_B, "l", 1, 4.0, 14.0)
    assert not times.has_first(B, 14.0)
    health.on_answer(AT_B, "l", 1, 3.0, 14.1)
    health.on_deadline(AT_B, "l", 1, 0.5, 14.2)
    assert suspected(health) == []
    assert times.predicted_s(*slow, 14.2) == times.usual_s(*slow) == 0.0
    health.on_answer(AT_B, "l", 1, 0.02, 14.3)
    assert times.usual_s(*slow) == 0.02
    for _ in range(3):
        health.on_deadline(AT_B, "l", 1, 0.5, 20.0)
    assert [failure for failure, _ in suspected(health)] == [Failure.LATE], "what comes later is evidence"


def test_each_kind_of_request_has_its_first_call_on_each_slice():
    times = ServiceTimes()
    times.record_sent(A, "l", 1, 0.0)
    times.record(A, "l", 1, 3.0, 3.0)
    times.record_sent(A, "l", 1, 3.0)
    assert not times.has_first(A, 3.5)
    for slice_, variant, items in ((A, "l", 64), (A, "xs", 1), (B, "l", 1)):
        times.record_sent(slice_, variant, items, 4.0)
        assert times.is_first(slice_, variant, items, 0.5, 4.5)
    times.forget(A)
    assert not times.has_first(A, 4.5), "another server answers there"


def test_a_first_call_ends_with_any_good_answer_and_is_like_any_other_after_a_while():
    health = SliceEvidence(0.5, late_strikes=1, fault_strikes=2)
    answer(health, 0.02)
    health.times.record_sent(B, "l", 1, 0.0)
    assert not late(health, 1, now_s=FIRST_CALL_S - 0.1, place=AT_B)
    assert late(health, 1, now_s=FIRST_CALL_S + 0.1, place=AT_B), "it may be stuck"
    health.times.record_sent(A, "stream", 1, 40.0)
    health.on_answer(AT_A, "stream", 1, None, 41.0)  # of which nothing is learned
    assert not health.times.has_first(A, 41.0)


def answered_per_s(deadline_s: float, service_s: float, cv: float, credits: int) -> float:
    """Answers a second of a slice to 2.5 times what it serves, once the queue before it holds as much as its deadline;
    it serves one request after another, also those that nobody waits for any longer."""
    rng, times, end_s = np.random.default_rng(7), ServiceTimes(), 60.0
    arrivals = deque(np.cumsum(rng.exponential(service_s / 2.5, int(4 * end_s / service_s))).tolist())
    queue, underway, free_s, now_s, answered = deque[float](), list[tuple[float, float, float]](), 0.0, 0.0, 0
    while now_s < end_s:
        if underway and underway[0][0] <= arrivals[0]:
            now_s, sent_s, done_s = heapq.heappop(underway)
            if now_s < done_s:
                times.record_late(A, "l", 1, now_s - sent_s, now_s)
            else:
                times.record(A, "l", 1, now_s - sent_s, now_s)
                answered += now_s > end_s / 2
        else:
            now_s = arrivals.popleft()
            queue.append(now_s + deadline_s)
        while queue and len(underway) < credits:
            due_s = queue.popleft()
            if due_s <= now_s:
                continue
            if due_s - now_s <= times.predicted_s(A, "l", 1, now_s):
                times.record_drop(A, "l", 1, now_s)
                continue
            free_s = max(now_s, free_s) + service_s * max(0.3, rng.normal(1.0, cv))
            heapq.heappush(underway, (min(free_s, due_s), now_s, free_s))
    return answered / (end_s / 2)


@pytest.mark.parametrize("deadline_s", [0.5, 5.0])
@pytest.mark.parametrize("cv", [0.05, 0.5])
@pytest.mark.parametrize("credits", [1, 2])
def test_an_overload_that_lasts_is_answered_as_far_as_the_slice_can(deadline_s, cv, credits):
    assert answered_per_s(deadline_s, 0.07, cv, credits) > 0.75 / 0.07


@given(st.lists(st.booleans(), max_size=400), st.sampled_from([0.0, 0.1, 0.2]))
def test_retries_never_exceed_the_burst_and_the_share_of_what_arrived(wanted, ratio):
    budget, arrived, retried = RetryBudget(ratio, 5), 0, 0
    for retry in wanted:
        budget.on_request()
        arrived += 1
        retried += retry and budget.try_spend()
    assert retried <= (5 + ratio * arrived if ratio else 0)


def test_a_budget_that_is_spent_fills_with_requests():
    budget = RetryBudget(0.1, 2)
    assert [budget.try_spend() for _ in range(3)] == [True, True, False]
    for _ in range(11):
        budget.on_request()
    assert [budget.try_spend() for _ in range(2)] == [True, False]
