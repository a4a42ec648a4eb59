"""Which items of a job may start by the controller's plan, and which plans hold nothing back."""

import math
from dataclasses import replace

import pytest

from dispatcher.jobs.core.planned_hours import AGE_MAX_S, LEAST_S, STALE_S, PlanSight, may_start, planned_variants
from trefoil.core.common import Revision
from trefoil.core.jobs.planned import PlannedHour, PlannedJob, PlannedJobs

HOUR = 3600.0
NOW_S = 1000 * HOUR
PACE = 10.0


def hours(*items: float, first: int = 0) -> tuple[PlannedHour, ...]:
    starts = [NOW_S + (first + number) * HOUR for number in range(len(items))]
    return tuple(PlannedHour(start, start + HOUR, count) for start, count in zip(starts, items, strict=True) if count)


JOB = PlannedJob("f/a", 1000, hours(100, 0, 900), in_time=True)
BY_S = NOW_S + 3 * HOUR


def room(job=JOB, waiting=1000, by_s=BY_S, now_s=NOW_S + 10, until_s=NOW_S + 24 * HOUR, items=1000, pace=PACE):
    return may_start(job, until_s, items, waiting, by_s, now_s, pace)[0]


def test_this_hours_items_may_start_and_the_rest_stays():
    assert room() == 100
    assert room(waiting=950) == 50
    assert room(waiting=900) == 0
    assert room(waiting=880) == 0, "more have started than were planned: no more until their hour"
    assert room(waiting=900, now_s=NOW_S + HOUR + 10) == 0, "the hour between has none"
    assert room(waiting=900, now_s=NOW_S + 2 * HOUR) == 900, "all of them are due"
    assert room(waiting=900, now_s=NOW_S + 2 * HOUR, pace=0.3) == math.inf, "50 minutes, and ten more as a margin"
    assert may_start(JOB, NOW_S + 24 * HOUR, 1000, 900, BY_S, NOW_S, PACE)[1].startswith("waits for cleaner hours: the")


def test_items_start_on_the_variants_of_slots_that_have_begun():
    small, large = (replace(one, variants=(name,)) for one, name in zip(hours(100, 900), "sl", strict=True))
    there = replace(large, zone="FAR", starts_at_s=NOW_S)
    job = replace(JOB, hours=(small, there, large))
    assert planned_variants(job, NOW_S + 10) == {"s"}
    assert planned_variants(job, NOW_S + HOUR) == {"s", "l"}, "what the first slot left over goes on"
    assert planned_variants(job, NOW_S - 10) == planned_variants(JOB, NOW_S) == planned_variants(None, NOW_S) == set()


def test_an_old_count_asks_for_nothing_twice():
    """The plan was made with 1000 items left; 60 had started by then."""
    assert room(waiting=940) == 40


def test_what_does_not_fit_into_later_hours_runs_at_once():
    assert room(by_s=NOW_S + 2 * HOUR) == math.inf, "its hour begins at the deadline"
    assert room(by_s=NOW_S + 2.5 * HOUR) == math.inf, "half of its hour lies beyond"
    assert room(replace(JOB, hours=hours(100, 0, 800))) == math.inf, "100 items have no hour"
    assert room(replace(JOB, in_time=False)) == room(replace(JOB, at_once=True)) == math.inf
    assert room(None) == math.inf


@pytest.mark.parametrize(
    "absurd",
    [
        replace(JOB, hours=hours(100, 0, -900)),
        replace(JOB, hours=()),
        replace(JOB, items_left=10**9),
        replace(JOB, hours=(PlannedHour(NOW_S + HOUR, NOW_S + HOUR, 900.0),)),
        replace(JOB, hours=(PlannedHour(NOW_S + 2 * HOUR, NOW_S + HOUR, 900.0),)),
    ],
)
def test_an_absurd_plan_holds_nothing_back(absurd):
    assert room(absurd) == math.inf


def test_the_measured_pace_comes_before_the_plan():
    assert room(pace=900 / HOUR, now_s=NOW_S + 10) == 100, "900 items take an hour, and three are left"
    assert room(pace=400 / HOUR) == math.inf, "1.5 times 2.25 hours are more than three"


def test_a_pace_that_is_not_known_is_measured_first():
    assert room(replace(JOB, hours=hours(0, 0, 1000)), pace=0.0) == 20, "2 % of the items"
    assert room(replace(JOB, hours=hours(0, 0, 1000)), pace=0.0, waiting=980) == 0
    near = replace(JOB, hours=(PlannedHour(NOW_S + 20, NOW_S + 40, 1000.0),))
    assert room(near, by_s=NOW_S + LEAST_S, pace=0.0) == math.inf


def test_items_beyond_the_plans_end_may_wait_only_while_the_deadline_is_far():
    part = replace(JOB, hours=hours(100, 0, 200))
    assert room(part, by_s=NOW_S + 40 * HOUR) == 100
    assert room(part, by_s=NOW_S + 5 * HOUR, until_s=NOW_S + 4 * HOUR) == math.inf


# --- Which plan is followed ------------------------------------------------------------------------------------------


def plan(epoch=3, number=1, **changes) -> PlannedJobs:
    return replace(PlannedJobs(Revision(epoch, number), NOW_S, NOW_S + 24 * HOUR, (JOB,)), **changes)


def seen(*looks) -> PlanSight:
    """Sight after looks of (plan, the controllers' epoch, monotonic time)."""
    sight = PlanSight()
    for look in looks:
        sight.look(*look)
    return sight


def test_the_leaders_plan_is_followed():
    assert seen((plan(), 3, 0.0)).of("f/a", NOW_S + 10) == JOB
    assert seen((plan(), 3, 0.0)).of("f/b", NOW_S + 10) is None
    assert seen().of("f/a", NOW_S) is None


def test_a_plan_that_is_lost_goes_stale():
    held = (plan(), 3, 0.0)
    assert seen(held, (None, 0, STALE_S - 1)).of("f/a", NOW_S) == JOB
    lost = seen(held, (None, 0, STALE_S))
    assert lost.of("f/a", NOW_S) is None
    assert lost.why == "no newer plan of jobs for 300 s"
    same = seen(held, (plan(), 3, STALE_S))
    assert same.of("f/a", NOW_S) is None, "nobody renews it"
    same.look(plan(number=2), 3, STALE_S + 1)
    assert same.of("f/a", NOW_S) == JOB


@pytest.mark.parametrize("epoch", [0, 2, 4])
def test_a_plan_of_another_epoch_than_the_controllers_is_not_followed(epoch):
    sight = seen((plan(), epoch, 0.0))
    assert sight.of("f/a", NOW_S) is None
    assert "epoch 3" in sight.why


def test_the_last_plan_is_followed_until_the_next_leader_has_made_one():
    sight = seen((plan(), 3, 0.0), (plan(), 4, 10.0))
    assert sight.of("f/a", NOW_S) == JOB
    sight.look(plan(), 2, 20.0)
    assert sight.of("f/a", NOW_S) is None, "Redis knows of no leader that could have made it"


def test_an_older_plan_of_the_same_leader_is_not_followed_and_the_next_is():
    sight = seen((plan(number=5), 3, 0.0), (plan(number=4), 3, 1.0))
    assert sight.of("f/a", NOW_S) is None
    sight.look(plan(number=6), 3, 2.0)
    assert sight.of("f/a", NOW_S) == JOB
    sight.look(plan(epoch=4, number=1), 4, 3.0)
    assert sight.of("f/a", NOW_S) == JOB, "a new leader begins to count again"


def test_a_false_plan_keeps_true_ones_out_until_it_is_stale():
    false, true = (plan(number=2**60), 3, 0.0), [(plan(number=number), 3, 60.0 * number) for number in range(1, 6)]
    sight = seen(false, *true[:4])
    assert sight.of("f/a", NOW_S) is None
    assert "is older than" in sight.why
    sight.look(*true[4])
    assert sight.of("f/a", NOW_S) == JOB
    assert sight.revision == Revision(3, 5)


def test_a_plan_of_another_time_is_not_followed():
    sight = seen((plan(), 3, 0.0))
    assert sight.of("f/a", NOW_S + AGE_MAX_S + 1) is None
    assert sight.of("f/a", NOW_S - AGE_MAX_S - 1) is None
    assert seen((plan(until_s=NOW_S + 60), 3, 0.0)).of("f/a", NOW_S + 61) is None
