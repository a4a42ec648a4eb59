"""Plans of jobs: where items go, what is promised, and what is said where something is short."""

import dataclasses

import numpy as np
import pytest

from controller.jobs.core.planning import plan_jobs
from tests.support.jobs import COST, HOUR, hour, hours_of, job
from trefoil.core.jobs.planned import DevicePool, Shortage


def prospect(plan, name="a"):
    return next(one for one in plan.prospects if one.job_id == name)


def test_items_run_in_the_cleanest_hours_before_the_deadline():
    plan = plan_jobs([job(hours=1.5, by=4)], [hour(n, c) for n, c in enumerate((300, 200, 400, 100, 10))], 0.0)
    assert hours_of(plan) == {("here", 3, "awake"): 1.0, ("here", 1, "awake"): 0.5}
    assert prospect(plan).reason == "will finish at 1970-01-01 04:00Z"
    assert prospect(plan).short_of == Shortage.NONE
    assert not plan.now


def test_idle_devices_come_before_devices_that_must_be_woken():
    """A woken device takes 10 J + 0.1 s x 30 W = 13 J an item: 280 g/kWh there cost more than 350 on one awake."""
    slots = [hour(0, 280, awake=0.5, asleep=2), hour(1, 350, awake=1.0)]
    plan = plan_jobs([job(hours=1.5, by=2)], slots, 0.0)
    assert hours_of(plan) == {("here", 0, "awake"): 0.5, ("here", 1, "awake"): 1.0}
    plan = plan_jobs([job(hours=1.5, by=2)], [hour(0, 260, awake=0.5, asleep=2), slots[1]], 0.0)
    assert hours_of(plan) == {("here", 0, "awake"): 0.5, ("here", 0, "asleep"): 1.0}
    assert plan.grams == pytest.approx((18_000 * 10 + 36_000 * 13) / 3.6e6 * 260)


def test_one_device_for_two_hours_is_woken_rather_than_two_for_one():
    for wake_j, woken, expected in ((0.0, 0.0, {0: 2.0}), (2e5, 0.0, {0: 1.0, 1: 1.0}), (2e5, 2.0, {0: 2.0})):
        slots = [hour(n, c, awake=0, asleep=2, wake_j=wake_j, woken=woken) for n, c in enumerate((200, 205))]
        plan = plan_jobs([job(hours=2, by=2)], slots, 0.0)
        assert {at: hours for (_, at, _), hours in hours_of(plan).items()} == expected


def test_a_wake_up_counts_in_the_grams_of_the_jobs_that_it_serves():
    plan = plan_jobs([job(by=1)], [hour(0, 360, awake=0, asleep=1, wake_j=1e5)], 0.0)
    assert plan.prospects[0].grams == plan.grams == pytest.approx((36_000 * 13 + 1e5) / 1e4)


def test_devices_are_woken_whole_in_the_slot_that_has_begun():
    """0.2 hours do not pay for a whole device's 30 W where the next hour is 5 % more expensive; 0.9 hours do."""
    slots = [hour(0, 200, awake=0, asleep=1), hour(1, 210, awake=0, asleep=1)]
    assert hours_of(plan_jobs([job(hours=0.2, by=2)], slots, 0.0)) == {("here", 1, "asleep"): 0.2}
    plan = plan_jobs([job(hours=0.9, by=2)], slots, 0.0)
    assert hours_of(plan) == {("here", 0, "asleep"): 0.9}


def test_of_equal_hours_the_first_is_taken():
    plan = plan_jobs([job(hours=1, by=9)], [hour(n, 200) for n in range(9)], 0.0)
    assert hours_of(plan) == {("here", 0, "awake"): 1.0}
    assert plan.now[0].rate_per_s == pytest.approx(10.0)
    assert (plan.now[0].family, plan.now[0].zone) == ("digits", "here")


def test_only_the_slot_that_has_begun_counts_on_what_is_not_sure():
    slots = [hour(0, 300, sure=0.5), hour(1, 100, sure=0.5), hour(2, 100, sure=0.5)]
    plan = plan_jobs([job(hours=2, by=3)], slots, 0.0)
    assert hours_of(plan) == {("here", 0, "awake"): 1.0, ("here", 1, "awake"): 0.5, ("here", 2, "awake"): 0.5}


def test_what_cannot_be_in_time_is_said_and_planned_late():
    plan = plan_jobs([job(hours=3, by=2)], [hour(n, 100 + n) for n in range(5)], 0.0)
    told = prospect(plan)
    assert (told.items_in_time, told.items_late, told.items_unplaced) == pytest.approx((72_000, 36_000, 0))
    assert told.reason == (
        "36,000 of 108,000 items cannot be done by 1970-01-01 02:00Z; they finish at 1970-01-01 03:00Z"
    )
    assert hours_of(plan) == {("here", 0, "awake"): 1.0, ("here", 1, "awake"): 1.0, ("here", 2, "awake"): 1.0}


def test_of_a_slot_that_ends_after_the_deadline_only_the_part_before_it_counts():
    assert hours_of(plan_jobs([job(hours=1, by=1.5)], [hour(0, 300), hour(1, 100)], 0.0)) == {("here", 0, "awake"): 1.0}
    plan = plan_jobs([job(hours=1.2, by=1.5)], [hour(0, 300), hour(1, 100)], 0.0)
    assert hours_of(plan) == {("here", 0, "awake"): 1.0, ("here", 1, "awake"): 0.2}
    assert prospect(plan).items_late == pytest.approx(0.1 * HOUR / COST.device_s, abs=0.1)


def test_of_two_jobs_the_one_with_the_higher_priority_is_in_time():
    slots = [hour(n, 100) for n in range(4)]
    for first, second in (("a", "b"), ("b", "a")):
        plan = plan_jobs([job(first, 2, 2, priority=1), job(second, 2, 2)], slots, 0.0)
        assert prospect(plan, first).items_late == 0
        assert prospect(plan, second).items_late == pytest.approx(72_000)


def test_a_job_past_its_deadline_runs_at_once():
    plan = plan_jobs([job(hours=1, by=-1)], [hour(n, 500 - n) for n in range(4)], 0.0)
    assert hours_of(plan) == {("here", 0, "awake"): 1.0}
    assert prospect(plan).items_late == pytest.approx(36_000)


@pytest.mark.parametrize("seed", [261, 393, 709])
def test_an_overload_of_several_priorities_has_a_plan_whatever_the_solver_s_tolerance(seed):
    """Worlds whose least lateness of one priority left no point for the next, as the solver counts."""
    rng = np.random.default_rng(seed)
    hours, slots = int(rng.integers(2, 8)), []
    for n in range(hours):
        slots.append(hour(n + 1, float(rng.uniform(50, 600)), *(int(rng.integers(0, 4)) for _ in range(2))))
    for n, slot in enumerate(slots):
        of = [(rng.uniform(0.3, 1), 0.3 * rng.uniform(0.5, 1), pool) for pool in slot.pools]
        pools = tuple(
            dataclasses.replace(p, free_s=p.free_s * float(free), sure_s=p.sure_s * float(sure)) for free, sure, p in of
        )
        slots[n] = dataclasses.replace(slot, pools=pools)
    jobs = [
        job(str(n), float(rng.uniform(0.5, 30)), float(rng.uniform(1, hours + 1)), priority=int(rng.integers(0, 3)))
        for n in range(int(rng.integers(2, 9)))
    ]
    plan = plan_jobs(jobs, slots, float(rng.uniform(1, 1.9)) * HOUR)
    assert any(one.items_late or one.items_unplaced for one in plan.prospects)


def test_an_overload_of_others_does_not_make_a_small_job_late():
    """The next hour is far cleaner; the overload is of another family, so it takes nothing of this job's device."""
    other = dataclasses.replace(COST, family="yolo")
    slots = [dataclasses.replace(one, pools=(*one.pools, DevicePool("other", HOUR, HOUR, (other,))))
             for one in (hour(n, 500 if not n else 10) for n in range(48))]  # fmt: skip
    plan = plan_jobs([job("a", 0.1, 1), job("b", 27_000, 1, family="yolo")], slots, 0.0)
    assert (prospect(plan, "a").items_late, prospect(plan, "b").short_of) == (0, Shortage.CAPACITY)


def test_an_overload_beside_a_job_due_after_the_last_slot_has_a_plan():
    plan = plan_jobs([job("a", 5, 3), job("b", 1, 40, priority=1)], [hour(n + 1, 300) for n in range(3)], HOUR)
    assert prospect(plan, "a").items_late + prospect(plan, "a").items_unplaced > 0
    assert prospect(plan, "b").items_late == 0


def test_zones_are_weighed_with_what_moving_an_item_costs():
    slots = [hour(0, 300), hour(0, 200, zone="there")]
    assert hours_of(plan_jobs([job(by=1, zones=("here", "there"))], slots, 0.0)) == {("there", 0, "awake"): 1.0}
    assert hours_of(plan_jobs([job(by=1, zones=("here",))], slots, 0.0)) == {("here", 0, "awake"): 1.0}
    moved = [job(by=1, zones=("here", "there"), transfer_j=6.0)]
    assert hours_of(plan_jobs(moved, slots, 0.0)) == {("here", 0, "awake"): 1.0}


def test_grams_are_kept_and_the_rest_is_said():
    slots = [hour(n, 200) for n in range(4)]
    plan = plan_jobs([job(hours=2, by=4, grams_left=30.0), job("b", by=4)], slots, 0.0)
    told = prospect(plan)
    assert told.grams <= 30.0
    assert told.items_unplaced == pytest.approx(72_000 - 30 / 200 * 3.6e6 / 10)
    assert told.short_of == Shortage.GRAMS
    assert "cannot run for 30 g" in told.reason
    assert prospect(plan, "b").short_of == Shortage.NONE


def test_a_job_that_has_no_place_says_why_and_others_run():
    slots = [hour(0, 200, awake=3)]
    jobs = [job("a", accuracy_floor=0.95), job("b", zones=("mars",)), job("c", family="yolo"), job("d", by=1)]
    plan = plan_jobs(jobs, slots, 0.0)
    assert [one.short_of for one in plan.prospects] == [
        Shortage.ACCURACY, Shortage.ZONE, Shortage.ACCURACY, Shortage.NONE,
    ]  # fmt: skip
    assert "0.95" in plan.prospects[0].reason
    assert "mars" in plan.prospects[1].reason
    assert all(one.items_unplaced == 36_000 for one in plan.prospects[:3])
    assert hours_of(plan) == {("here", 0, "awake"): 1.0}


def test_of_the_variants_at_the_floor_the_one_of_fewest_joules_runs():
    cheap = dataclasses.replace(COST, active_j=2.0, accuracy=0.8)
    slot = dataclasses.replace(hour(0, 360), pools=(DevicePool("awake", HOUR, HOUR, (COST, cheap)),))
    assert plan_jobs([job(by=1, accuracy_floor=0.7)], [slot], 0.0).grams == pytest.approx(7.2)
    assert plan_jobs([job(by=1, accuracy_floor=0.85)], [slot], 0.0).grams == pytest.approx(36.0)


def test_work_beyond_the_forecast_waits_only_for_hours_that_are_dearer_than_the_mean():
    slots = [hour(0, 100), hour(1, 300), hour(2, 250)]
    plan = plan_jobs([job(hours=2, by=48)], slots, 0.0)
    assert hours_of(plan) == {("here", 0, "awake"): 1.0}
    assert prospect(plan).items_unplaced == pytest.approx(36_000)
    assert prospect(plan).short_of == Shortage.NONE
    assert "beyond the forecast" in prospect(plan).reason


def test_nothing_to_plan_is_a_plan():
    assert plan_jobs([], [hour(0, 100)], 0.0).portions == ()
    assert plan_jobs([job()], [], 0.0).prospects[0].short_of == Shortage.ZONE
