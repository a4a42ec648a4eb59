"""What a job may be, and when a batch of it may take an idle slice."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from dispatcher.jobs.core.job import DEADLINE_MAX_S, Job, Rate, World, check_items, check_job
from dispatcher.jobs.core.places import Places
from dispatcher.jobs.core.reserve import (
    P95_GROWTH,
    SHARE_MAX,
    SHARE_MIN,
    Reserve,
    Waiting,
    allowed_share,
    expected_delayed,
)
from dispatcher.jobs.core.turns import JobTurns
from trefoil.core.errors import InvalidInput, NotFound, Unavailable
from trefoil.core.latency import build_histogram

WORLD = World(1000.0, {"digits", "words"}, {"DE", "GB"}, {"blue", "red"}, 0.97)
JOB = Job("a", "digits", 4600.0, "blue", zones=("DE",))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"id": "../a"}, InvalidInput, "id = '../a': is not a name of a job. Remedy: at most 63 letters"),
        ({"family": "digit"}, NotFound, "family = 'digit': is not served. Remedy: did you mean digits"),
        ({"complete_by_s": 995.0}, InvalidInput, "complete_by = 995.0: passed 5 s ago. Remedy: give a time ahead"),
        ({"complete_by_s": 1e12}, InvalidInput, "complete_by = .*: is too far ahead. Remedy: at most 366 days"),
        ({"min_accuracy": 1.5}, InvalidInput, "min_accuracy = 1.5: is not an accuracy. Remedy: send 0..1"),
        ({"min_accuracy": 0.98}, InvalidInput, "min_accuracy = 0.98: no variant reaches it. Remedy: at most 0.97"),
        ({"grams_max": -1.0}, InvalidInput, "grams_max = -1.0: is negative"),
        (
            {"zones": ("FR",)},
            NotFound,
            "zones = 'FR': is the zone of no node here and of no peer. Remedy: .*DE, GB, or leave it out",
        ),
        ({"zones": tuple(map(str, range(33)))}, InvalidInput, "zones = 33: too many zones. Remedy: at most 32"),
        ({"tenant": ""}, NotFound, "tenant = '': is not a tenant. Remedy: use one of: blue, red"),
    ],
)
def test_what_a_job_cannot_be(change, error, says):
    check_job(JOB, WORLD)
    with pytest.raises(error, match=says):
        check_job(replace(JOB, **change), WORLD)


def test_a_tenant_needs_a_tenants_file():
    without = replace(WORLD, tenants=None)
    check_job(replace(JOB, tenant=""), without)
    with pytest.raises(NotFound, match=r"tenant = 'blue': no tenants file names tenants. Remedy: leave it out"):
        check_job(JOB, without)


def test_no_items_and_no_time_for_one():
    check_items(JOB, 1, WORLD)  # nothing is known of its slices
    known = replace(WORLD, item_s=0.5)
    check_items(JOB, 10**9, known)  # devices may wake, and peers may help
    says = r"complete_by = 4600.0: leaves 0.4 s, and one item takes 0.5 s. Remedy: give a time further ahead"
    with pytest.raises(InvalidInput, match=says):
        check_items(JOB, 1, replace(known, now_s=4599.6))
    with pytest.raises(InvalidInput, match="items = 0: has no items"):
        check_items(JOB, 0, known)
    with pytest.raises(InvalidInput, match=r"complete_by = 4600.0: passed while its items came. Remedy: give a time"):
        check_items(JOB, 1, replace(known, now_s=4600.0))


def test_turns():
    jobs = [Job("late", "f", 9.0), Job("soon", "f", 5.0), Job("first", "f", 20.0, priority=2)]
    turns = JobTurns(lambda _: 1.0).order(dict.fromkeys(jobs, 0.0), (), 4.0)
    assert [job.id for job in turns] == ["first", "soon", "late"]
    assert DEADLINE_MAX_S > 86_400


def slice_s_of(jobs, calendar_s, seconds, weights=None, turns=None, waiting=()):
    """Seconds that each job has the only slice of its family, given by turn each second."""
    turns = turns or JobTurns(lambda tenant: (weights or {}).get(tenant, 1.0))
    had = dict.fromkeys(jobs, 0.0)
    for _ in range(seconds):
        order = turns.order(had, waiting, calendar_s)
        for family in {job.family for job in jobs}:
            had[next(job for job in order if job.family == family and job not in waiting)] += 1
    turns.order(had, waiting, calendar_s)
    return {job.id: round(each) for job, each in had.items() if each}


HOPELESS = Job("hopeless", "f", 5.0, "red")
SOON, LATER = Job("soon", "f", 9.0, "blue"), Job("later", "f", 90.0, "blue")


def test_while_a_job_is_overdue_its_tenant_has_its_share():
    jobs = [HOPELESS, SOON, LATER]
    assert slice_s_of(jobs, 4.0, 90) == {"hopeless": 90}, "in time: the earliest deadline first"
    assert slice_s_of(jobs, 6.0, 90) == {"hopeless": 45, "soon": 45}
    assert slice_s_of(jobs, 6.0, 90, {"blue": 2.0}) == {"hopeless": 30, "soon": 60}
    assert slice_s_of([replace(HOPELESS, priority=1), SOON], 6.0, 9) == {"hopeless": 9}, "priority stands above"


def test_those_without_an_overdue_job_keep_the_order_of_deadlines():
    green = Job("green", "f", 50.0, "green")
    assert slice_s_of([HOPELESS, SOON, green], 6.0, 90) == {"hopeless": 30, "soon": 60}
    other = replace(HOPELESS, family="g")
    assert slice_s_of([other, SOON, green], 6.0, 90) == {"hopeless": 90, "soon": 90}, "of another family"
    assert slice_s_of([HOPELESS, SOON, green], 6.0, 90, waiting=[HOPELESS]) == {"soon": 90}, "it cannot run"


def test_no_tenant_saves_up_what_it_could_not_use():
    turns = JobTurns(lambda _: 1.0)
    assert slice_s_of([HOPELESS], 6.0, 1000, turns=turns) == {"hopeless": 1000}
    assert slice_s_of([HOPELESS, SOON], 6.0, 1000, turns=turns, waiting=[SOON]) == {"hopeless": 1000}
    both = slice_s_of([HOPELESS, SOON], 6.0, 100, turns=turns)
    assert both["soon"] <= 51


def test_the_rate_of_the_last_minute():
    rate = Rate()
    assert rate.seconds_for(10) is None
    rate.add(0.0, 0)
    rate.add(1.0, 100)
    assert rate.seconds_for(10) is None  # too short
    rate.add(10.0, 500)
    assert rate.seconds_for(100) == pytest.approx(2.0)
    rate.add(200.0, 500)
    assert rate.seconds_for(100) is None  # nothing of late


def test_expected_delayed_is_that_of_poisson():
    drawn = np.random.default_rng(3).poisson(0.8, 400_000)
    for idle in (0, 1, 2, 5):
        sampled = np.maximum(0, drawn - idle).mean()
        assert expected_delayed(40.0, 0.02, idle) == pytest.approx(sampled, abs=4e-3)
    assert expected_delayed(0.0, 1.0, 0) == 0.0 == pytest.approx(expected_delayed(1e-9, 1.0, 3))
    assert expected_delayed(1e6, 1.0, 10) == pytest.approx(1e6 - 10)


def test_no_more_requests_are_delayed_than_the_share():
    """Batches back to back on the only slice: those that wait are counted, request by request."""
    rng = np.random.default_rng(7)
    rate_per_s, batch_s, span_s = 50.0, 0.01, 2500.0
    arrivals = np.sort(rng.uniform(0.0, span_s, rng.poisson(rate_per_s * span_s)))
    reserve, now_s, at, delayed, batches = Reserve(), 0.0, 0, 0, 0
    while now_s < span_s:
        before = at
        while at < len(arrivals) and arrivals[at] <= now_s:
            at += 1
        reserve.on_arrivals("digits", at - before)
        if reserve.try_start([Waiting("digits", rate_per_s, 0)], batch_s):
            delayed += int(np.searchsorted(arrivals, now_s + batch_s) - at)
            batches += 1
        now_s += batch_s
    assert batches > 300
    assert delayed / len(arrivals) == pytest.approx(SHARE_MIN, rel=0.25)


def test_more_idle_slices_let_more_batches_through():
    started = {}
    for idle in (0, 1, 2):
        reserve = Reserve()
        reserve.on_arrivals("digits", 100)
        started[idle] = sum(reserve.try_start([Waiting("digits", 30.0, idle)], 0.005) for _ in range(1000))
    assert started[0] == 1
    assert started[1] == 23
    assert started[2] > 400


def test_without_requests_nothing_is_charged():
    reserve = Reserve()
    assert all(reserve.try_start([Waiting("digits", 0.0, 0)], 10.0) for _ in range(100))


def test_a_debt_holds_nothing_up_once_no_requests_come():
    reserve, slow = Reserve(), [Waiting("digits", 5.0, 0)]
    reserve.on_arrivals("digits", 400)
    assert reserve.try_start(slow, 1.0)  # leaves a debt
    assert not reserve.try_start([Waiting("digits", 0.1, 0)], 1.0)
    night = [Waiting("digits", 0.0, 0)]
    assert all(reserve.try_start(night, 1.0) for _ in range(100))
    assert not reserve.try_start(slow, 1.0), "the debt stays"


def test_every_queue_of_a_slice_is_asked():
    reserve = Reserve()
    both = [Waiting("digits", 0.0, 0), Waiting("words", 50.0, 0)]
    assert not reserve.try_start(both, 0.01)
    reserve.on_arrivals("words", 300)
    assert reserve.try_start(both, 0.01)
    assert not reserve.try_start(both, 0.01)  # one of them has no more to give
    assert reserve.try_start(both[:1], 0.01)


def test_a_batch_that_delays_more_than_one_request_waits_for_its_turn():
    reserve, slow = Reserve(), [Waiting("digits", 5.0, 0)]
    reserve.on_arrivals("digits", 300)
    assert not reserve.try_start(slow, 1.0)
    reserve.on_arrivals("digits", 200)
    assert reserve.try_start(slow, 1.0)
    reserve.on_arrivals("digits", 1600)  # of the 5 that it delays, 1 was paid for
    assert not reserve.try_start(slow, 1.0)
    reserve.on_arrivals("digits", 400)
    assert reserve.try_start(slow, 1.0)


@pytest.mark.parametrize("drawn", ["exponential", "constant", "lognormal"])
@pytest.mark.parametrize("batch_ms", [2.0, 20.0, 200.0])
def test_the_share_keeps_p95(drawn, batch_ms):
    """That share of the latencies is delayed by a whole batch: p95 grows by less than it may."""
    rng = np.random.default_rng(11)
    latency_ms = {
        "exponential": rng.exponential(20.0, 50_000),
        "constant": 20.0 + np.where(rng.random(50_000) < 0.3, rng.uniform(0.0, 20.0, 50_000), 0.0),
        "lognormal": rng.lognormal(3.0, 0.5, 50_000),
    }[drawn]
    share = allowed_share(build_histogram(latency_ms), batch_ms)
    delayed = latency_ms + np.where(rng.random(50_000) < share, batch_ms, 0.0)
    assert SHARE_MIN <= share <= SHARE_MAX
    assert np.quantile(delayed, 0.95) <= P95_GROWTH * np.quantile(latency_ms, 0.95)
    assert allowed_share(build_histogram(latency_ms[:100]), batch_ms) == SHARE_MIN  # too few to tell


def test_short_batches_may_be_more():
    latency = build_histogram(np.random.default_rng(2).exponential(20.0, 20_000))
    shares = [allowed_share(latency, batch_ms) for batch_ms in (1.0, 20.0, 60.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == SHARE_MAX


def test_one_client_has_at_most_half_of_the_places_and_an_operator_all():
    places, held = Places(4, "files are uploaded"), ExitStack()
    with held:
        for _ in range(2):
            held.enter_context(places.one("t"))
        with pytest.raises(Unavailable, match=r"2 files are uploaded here for t, at most half\. Remedy: let one"):
            held.enter_context(places.one("t"))
        for client in ("u", ""):
            held.enter_context(places.one(client))
        with pytest.raises(Unavailable, match=r"4 files are uploaded here\. Remedy: try again"):
            held.enter_context(places.one(""))
    with places.one(""), places.one(""), places.one(""), places.one("t"):
        assert places._taken == {"": 3, "t": 1}
    assert not places._taken
