"""Canary and mirror in a plan: a slice of their own, their share and nothing more, and refusals that name the param."""

import dataclasses

import numpy as np
import pytest

from controller.core.objectives import accept
from controller.core.shares import known
from controller.core.shares import shares as shares_of
from controller.core.terms import terms
from controller.planners.exact import ExactPlanner
from controller.planners.table import PLANNERS
from tests.support.planning import applied, digits, fleet, objective, view
from trefoil.core.errors import InvalidInput
from trefoil.core.objective import ObjectiveMode
from trefoil.core.plan_check import check

CANARY = {"canary_version": 3.0, "canary_share": 0.05}


def shares(plan):
    found: dict[str, float] = {}
    for each in plan.routes[0].targets:
        found[each.variant] = found.get(each.variant, 0.0) + each.weight
    return found


def planned(params, gpus=2, rate=40.0, mode=ObjectiveMode.INSTANT, **changes):
    one = view(rate=rate, wanted=[objective(mode=mode, slo_ms=75.0, params=params, **changes)], devices=fleet(gpus))
    plan = ExactPlanner().plan(one, np.random.default_rng(0)).plan
    check(plan, one.fleet, one.catalog, one.demand)
    return one, plan


@pytest.mark.parametrize("gpus", [2, 12])  # solved at once, and through the grid that trials leave out
@pytest.mark.parametrize("mode", [ObjectiveMode.INSTANT, ObjectiveMode.BUDGET])
def test_a_canary_gets_its_share_and_nothing_more(gpus, mode):
    _, without = planned({}, gpus, mode=mode, min_accuracy=0.95)
    _, plan = planned(CANARY, gpus, mode=mode, min_accuracy=0.95)
    assert shares(plan)["m"] == pytest.approx(0.05, abs=1e-6)
    assert shares(without).get("m", 0.0) != pytest.approx(0.05, abs=1e-3)
    assert plan.routes[0].params == CANARY
    assert plan.degraded == ""


def test_a_mirror_gets_a_slice_and_no_traffic():
    one, plan = planned({"mirror_version": 4.0, "mirror_share": 0.2}, min_accuracy=0.95)
    assert shares(plan)["l"] == 0.0
    again = dataclasses.replace(one, fleet=applied(plan, one.fleet), current=plan)
    assert shares(ExactPlanner().plan(again, np.random.default_rng(1)).plan)["l"] == 0.0, "and keeps it"


def test_both_at_once_and_a_canary_that_is_dominated_in_everything():
    slow = digits(accuracy={"xs": 0.886, "s": 0.938, "m": 0.8, "l": 0.993})
    params = {**CANARY, "mirror_version": 1.0, "mirror_share": 1.0}
    one = view(rate=20.0, wanted=[objective(slo_ms=75.0, params=params)], catalog=slow)
    plan = ExactPlanner().plan(one, np.random.default_rng(0)).plan
    assert shares(plan)["m"] == pytest.approx(0.05, abs=1e-6)
    assert shares(plan)["xs"] == 0.0


def test_a_fleet_that_cannot_serve_all_lets_trials_give_way():
    one = view(rate=4000.0, wanted=[objective(slo_ms=75.0, params=CANARY)], devices=fleet(1))
    plan = ExactPlanner().plan(one, np.random.default_rng(0)).plan
    assert "short_of_capacity" in plan.degraded
    assert shares(plan).get("m", 0.0) <= 0.05 + 1e-6


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"canary_version": 9.0, "canary_share": 0.1}, "no such version"),
        ({"canary_version": 1.0}, "canary_share"),
        ({"mirror_share": 0.1}, "mirror_version"),
        ({"canary_version": 1.0, "canary_share": 1.0}, "0.05 for 5 %"),
        ({"mirror_version": 1.0, "mirror_share": 1.5}, "mirror_share"),
        ({"canary_version": 4.0, "canary_share": 0.1}, "what is not on trial reaches an accuracy of 0.96 only"),
    ],
)
def test_a_trial_that_cannot_be_meant_is_refused(params, says):
    wanted = objective(params=params)
    with pytest.raises(InvalidInput, match=says):
        accept(wanted, {}, digits(), PLANNERS["exact"].constants)


@pytest.mark.parametrize("planner", ["base", "co2opt", "clover", "oracle"])
def test_planners_that_know_no_trials_refuse_them_by_name(planner):
    with pytest.raises(InvalidInput, match="canary_version"):
        accept(objective(params=CANARY), {}, digits(), PLANNERS[planner].constants)


def test_a_rollout_gives_a_mirror_no_share_however_much_must_be_carried():
    one, plan = planned({"mirror_version": 4.0, "mirror_share": 0.2}, min_accuracy=0.95)
    ready = {p.key: p for n in plan.nodes for d in n.devices for p in d.slices}
    crowded = dataclasses.replace(one, demand=(dataclasses.replace(one.demand[0], rate_per_s=10**6),))
    (found,) = shares_of(plan, ready, terms(crowded), plan.routes)
    weights = {t.variant: t.weight for t in found.targets}
    assert weights["l"] == 0.0
    assert sum(t.weight for t in found.targets) == pytest.approx(1.0)


def test_what_is_published_tells_how_accurate_each_target_is():
    one, plan = planned({})
    (route,) = known(plan.routes, one.catalog)
    told = {t.variant: (t.accuracy, t.version) for t in route.targets}
    assert told
    assert all(told[name] == (one.catalog.family("digits").variant(name).accuracy, told[name][1]) for name in told)
    stranger = dataclasses.replace(plan.routes[0], family="nobody")
    assert known((stranger,), one.catalog) == (stranger,)
