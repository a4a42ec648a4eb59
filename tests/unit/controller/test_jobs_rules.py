"""Rules of jobs, each on a case that is computed by hand; and that none is late where there is room."""

import pytest
from hypothesis import given

from controller.jobs.core.open_jobs import unplanned_grams
from controller.jobs.core.rules import RULES, CarbonScaler, WaitAwhile
from tests.property.test_jobs_are_cheapest import most_in_time_late, worlds
from tests.support.jobs import COST, hour, hours_of, job
from trefoil.core.jobs.planned import Shortage

CARBON = [400, 100, 300, 200, 500, 500, 500, 500]
SLOTS = [hour(n, carbon) for n, carbon in enumerate(CARBON)]  # one device each, 10 J an item of 0.1 s: 100 W
DEVICE_HOUR_KWH = 0.1


@pytest.mark.parametrize(
    ("rule", "hours"),
    [
        ("at_once", {0: 1.0}),
        ("evenly", dict.fromkeys(range(8), 0.125)),
        ("wait_awhile", {1: 0.5, 3: 0.5}),  # its length is a quarter of 8 h: half a device in the two best hours
        ("carbon_scaler", {1: 1.0}),  # up to four times that rate
        ("planned", {1: 1.0}),
    ],
)
def test_a_device_hour_within_eight(rule, hours):
    plan = RULES[rule]()([job("a", 1.0, by=8.0)], SLOTS, 0.0)
    assert hours_of(plan) == {("here", n, "awake"): pytest.approx(part) for n, part in hours.items()}
    assert plan.grams == pytest.approx(DEVICE_HOUR_KWH * sum(CARBON[n] * part for n, part in hours.items()))
    (prospect,) = plan.prospects
    assert prospect.short_of == Shortage.NONE
    assert prospect.finishes_at_s == (max(hours) + 1) * 3600.0


def test_a_job_keeps_the_rate_that_it_began_with():
    rule = WaitAwhile()
    rule([job("a", 1.0, by=8.0)], SLOTS, 0.0)
    later = rule([job("a", 0.5, by=8.0)], SLOTS[2:], 2 * 3600.0)
    assert hours_of(later) == {("here", 3, "awake"): 0.5}
    anew = WaitAwhile()([job("a", 0.5, by=8.0)], SLOTS[2:], 2 * 3600.0)
    assert hours_of(anew) == {("here", 3, "awake"): 0.333333, ("here", 2, "awake"): 0.166667}


def test_rules_take_what_earlier_deadlines_left_and_devices_asleep_last():
    both = [job("late", 1.0, by=8.0), job("soon", 1.0, by=4.0)]
    plan = CarbonScaler()(both, SLOTS, 0.0)
    assert hours_of(plan, "soon") == {("here", 1, "awake"): 1.0}
    assert hours_of(plan, "late") == {("here", 3, "awake"): 1.0}
    slots = [hour(0, 300, awake=0.5, asleep=1.0), hour(1, 300)]
    assert hours_of(RULES["at_once"]()([job("a", 1.0, by=2.0)], slots, 0.0)) == {
        ("here", 0, "awake"): 0.5, ("here", 0, "asleep"): 0.5,
    }  # fmt: skip


def test_what_has_no_room_before_its_deadline_is_late_and_said():
    for make in RULES.values():
        plan = make()([job("a", 3.0, by=2.0)], SLOTS, 0.0)
        (prospect,) = plan.prospects
        assert prospect.short_of == Shortage.CAPACITY
        assert prospect.items_late == pytest.approx(3600.0 / COST.device_s)


def test_grams_at_once_and_evenly_are_those_of_the_rules():
    assert unplanned_grams([job("a", 1.0, by=8.0)], SLOTS, 0.0) == {"a": (pytest.approx(40.0), pytest.approx(37.5))}
    (found,) = unplanned_grams([job("a", 9.0, by=8.0)], SLOTS, 0.0).values()
    assert found == (pytest.approx(350.0), pytest.approx(350.0)), "the ninth costs as the last hour does"


@given(worlds())
def test_no_rule_is_late_where_there_is_room(world):
    slots, jobs = world
    room = most_in_time_late(slots, jobs) <= 0
    for name, make in RULES.items():
        plan = make()(jobs, slots, 0.0)
        assert all(one.short_of == Shortage.NONE for one in plan.prospects) == room, name
