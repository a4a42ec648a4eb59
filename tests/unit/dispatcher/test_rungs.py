"""Each thing that can be away has a separate rung, and none hides another."""

import itertools

import pytest

from dispatcher.service.core.fallback_rungs import CAUSES, Dependencies, active_rungs

WELL = {"planned": True, "controller": "controller-1"}
AWAY = {
    "redis": {"redis_away_s": 12.0},
    "disk": {"from_disk": True},
    "controller": {"controller": ""},
    "agent": {"stale_nodes": {"node0": 7.0}},
    "lengths": {"lengths_instead": "the predictor of lengths does not answer: first come, first served"},
    "plan": {"plan_refused": "plan in Redis = '9.1.0': no controller leads under its epoch"},
    "feed": {"stale_receipts": ("the carbon reading is old and carried on",)},
}


def test_nothing_is_said_when_nothing_is_away():
    assert active_rungs(Dependencies(**WELL)) == {}
    assert active_rungs(Dependencies()) == {}, "nor before there is a plan"


@pytest.mark.parametrize("cause", CAUSES)
def test_every_loss_has_its_rung_and_says_what_serves_instead(cause):
    found = active_rungs(Dependencies(**WELL | AWAY[cause]))
    assert set(found) == {cause}
    assert len(found[cause]) > 40


@pytest.mark.parametrize("pair", list(itertools.combinations(CAUSES, 2)))
def test_two_losses_are_both_told_but_for_whom_redis_alone_could_tell_of(pair):
    found = active_rungs(Dependencies(**WELL | AWAY[pair[0]] | AWAY[pair[1]]))
    expected = set(pair) - ({"controller"} if "redis" in pair else set())
    assert set(found) == expected


def test_ages_and_names_are_told():
    found = active_rungs(Dependencies(**WELL, redis_away_s=3.2, stale_nodes={"b": 9.0, "a": 6.0}))
    assert "for 3 s" in found["redis"]
    assert "a for 6 s, b for 9 s" in found["agent"]
