"""Plans of jobs against a greedy that is exact where deadlines are all that differs, and what holds of any plan."""

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.jobs.core.planning import plan_jobs
from tests.support.jobs import COST, HOUR, hour, hours_of, job
from trefoil.core.jobs.planned import Shortage

CARBONS = st.lists(st.integers(50, 600), min_size=1, max_size=12)
# Tenths of an hour, and the hour of the deadline.
WORK = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=6)


@st.composite
def worlds(draw, zones=("here",)):
    """Slots of zones from hour 1 on, some with devices that can be woken, and jobs. At hour 0 no slot has begun."""
    carbons = draw(CARBONS)
    slots = [
        hour(n + 1, c + 100 * z, awake=draw(st.integers(0, 3)), asleep=draw(st.integers(0, 3)), zone=zone)
        for z, zone in enumerate(zones)
        for n, c in enumerate(carbons)
    ]
    jobs = [job(str(n), tenths / 10, min(by, len(carbons)) + 1) for n, (tenths, by) in enumerate(draw(WORK))]
    return slots, jobs


def cheapest(slots, jobs):
    """Grams of the exact greedy: each job, the earliest deadline first, takes the cheapest hours left before it. None
    where a job does not fit. Windows are nested, so that exchanging hours between jobs saves nothing."""
    left = [
        [slot.carbon.p50_g_per_kwh * (COST.active_j + pool.idle_w * COST.device_s), slot.carbon.ends_at_s, pool.free_s]
        for slot in slots
        for pool in slot.pools
    ]
    total = 0.0
    for one in sorted(jobs, key=lambda j: j.complete_by_s):
        wanted_s = one.items_left * COST.device_s
        for place in sorted(left):
            if place[1] <= one.complete_by_s:
                taken_s = min(wanted_s, place[2])
                wanted_s, place[2] = wanted_s - taken_s, place[2] - taken_s
                total += taken_s / COST.device_s * place[0] / 3.6e6
        if wanted_s > 1e-6:
            return None
    return total


def most_in_time_late(slots, jobs):
    """Items that no plan can have in time, if any: the largest lack of device time before a deadline."""
    lacks = [0.0]
    for by_s in {one.complete_by_s for one in jobs}:
        free_s = sum(pool.free_s for slot in slots for pool in slot.pools if slot.carbon.ends_at_s <= by_s)
        lacks.append(sum(o.items_left for o in jobs if o.complete_by_s <= by_s) - free_s / COST.device_s)
    return max(lacks)


@given(worlds())
def test_a_plan_takes_the_grams_of_the_exact_greedy(world):
    slots, jobs = world
    plan, expected = plan_jobs(jobs, slots, 0.0), cheapest(slots, jobs)
    if expected is None:
        assert any(one.short_of == Shortage.CAPACITY for one in plan.prospects)
    else:
        assert all(one.short_of == Shortage.NONE for one in plan.prospects)
        assert plan.grams == pytest.approx(expected, rel=0.007, abs=1e-6)  # an hour's wait is worth 0.05 %
        assert plan.grams >= expected * (1 - 1e-6) - 1e-6


@given(worlds(zones=("here", "there")), st.sampled_from([(), ("here",), ("there", "here")]))
def test_no_item_is_lost_and_no_device_is_in_two_places(world, zones):
    slots, jobs = world
    jobs = [
        job(one.job_id, one.items_left * COST.device_s / HOUR, one.complete_by_s / HOUR, zones=zones) for one in jobs
    ]
    plan = plan_jobs(jobs, slots, HOUR)
    planned = defaultdict(float)
    for one in plan.portions:
        planned[one.job_id] += one.items
        assert not zones or one.zone in zones
    for wanted, told in zip(jobs, plan.prospects, strict=True):
        assert told.items_in_time + told.items_late + told.items_unplaced == pytest.approx(wanted.items_left)
        assert planned[wanted.job_id] == pytest.approx(told.items_in_time + told.items_late, abs=0.1)
        assert (told.short_of == Shortage.NONE) == (told.items_late + told.items_unplaced == 0)
    free = {(s.zone, round(s.carbon.starts_at_s / HOUR), p.name): p.free_s / HOUR for s in slots for p in s.pools}
    for place, hours in hours_of(plan).items():
        assert hours <= free[place] + 1e-5
    assert plan.grams == pytest.approx(sum(one.grams for one in plan.prospects))


@given(worlds())
def test_as_much_as_can_be_is_in_time(world):
    slots, jobs = world
    plan = plan_jobs(jobs, slots, HOUR)
    late = sum(one.items_late + one.items_unplaced for one in plan.prospects)
    assert late >= most_in_time_late(slots, jobs) - 1.0
    assert (late == 0) == (most_in_time_late(slots, jobs) <= 0)
    if all(one.complete_by_s == jobs[0].complete_by_s for one in jobs):
        assert late == pytest.approx(most_in_time_late(slots, jobs), abs=1.0)


@given(worlds())
def test_a_plan_that_was_followed_for_an_hour_stays(world):
    """What was planned later is planned again, at the same grams: nothing flaps while forecasts hold."""
    slots, jobs = world
    first = plan_jobs(jobs, slots, 0.0)
    done = defaultdict(float)
    for one in first.portions:
        if one.starts_at_s == HOUR:
            done[one.job_id] += one.items
    left = [job(o.job_id, (o.items_left - math.floor(done[o.job_id])) * COST.device_s / HOUR, o.complete_by_s / HOUR)
            for o in jobs]  # fmt: skip
    second = plan_jobs(left, slots[1:], HOUR)
    rest_g = sum(one.grams for one in first.portions if one.starts_at_s > HOUR)
    assert second.grams == pytest.approx(rest_g, rel=0.007, abs=0.1)
