"""The study of jobs: every rule does equal work in time, and perfect knowledge is a bound from below."""

import dataclasses

import numpy as np
import pytest

from benchmarks.jobs import RULES, distance_pct, missed, perfect, play
from benchmarks.jobs_world import LEADS, World, cleanest_third

HOURS = 48


@pytest.fixture(scope="module")
def day():
    """Two days of a duck curve, of load and of jobs, all of it known before."""
    hours = np.arange(HOURS)
    carbon = 300 + 150 * np.cos(2 * np.pi * (hours - 1) / 24)
    load, arriving = 4 + 2 * np.sin(2 * np.pi * hours / 24), np.full(HOURS, 2.0)
    return World("made-up", carbon, load, arriving, ahead(carbon), ahead(load))


def ahead(values):
    """Forecasts without error."""
    return np.array(
        [[np.resize(values[hour + 1 :] if hour + 1 < HOURS else values, LEADS)] * 3 for hour in range(HOURS)]
    )


@pytest.fixture(scope="module")
def played(day):
    return {name: play([day], make(), 12) for name, make in RULES.items()}


def test_every_rule_does_all_of_the_work_in_time(played, day):
    for one in played.values():
        assert one.hours == pytest.approx(day.arriving[: HOURS - 12].sum(), rel=1e-4)
        assert one.late_h == 0.0


def test_no_rule_beats_perfect_knowledge_and_the_plan_comes_near(played, day):
    bound = perfect(day, 12)
    assert all(one.grams >= bound * (1 - 1e-6) for one in played.values())
    assert played["planned"].grams <= bound * 1.02
    assert played["planned"].grams == min(one.grams for one in played.values())


def test_lateness_and_distance_are_reported_where_they_are(day):
    full = dataclasses.replace(day, arriving=day.arriving * 20)
    assert play([full], RULES["at_once"](), 4).late_h > 0
    assert perfect(full, 4) is None
    row = {
        "zone": "a", "share": 0.1, "deadline_h": 4, "perfect_g": 100.0,
        "rules": {"planned": {"grams": 110.0, "late_h": 2.0}, "at_once": {"late_h": 0.0}},
    }  # fmt: skip
    assert distance_pct(row) == pytest.approx(10.0)
    assert missed([row]) == ["10.0 % above perfect in the mean", "a: late at 10%, 4 h"]


def test_two_zones_use_the_cleaner_one(day):
    other = dataclasses.replace(day, zone="clean", carbon=day.carbon / 3, carbon_ahead=day.carbon_ahead / 3)
    alone = [play([one], RULES["planned"](), 12).grams for one in (day, other)]
    both = play([day, other], RULES["planned"](), 12)
    assert both.grams < 0.75 * sum(alone)
    assert both.moved_h > 0
    assert both.late_h == 0


def test_the_cleanest_third_of_a_day_is_eight_hours():
    assert cleanest_third(np.array([1.0] * 8 + [4.0] * 16)) == pytest.approx(100 * (1 - 1 / 3))
