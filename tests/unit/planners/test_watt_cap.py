"""The fleet's watt cap: what exact plans within it, what it refuses, and what is refused of others."""

import re
from dataclasses import replace

import numpy as np
import pytest

from controller.loop.core.decision import FAILED, NEW, ControlState, judge
from controller.observe.core.triggers import HoldTimers, Trigger, evaluate_triggers, plan_basis
from controller.planners.exact import ExactPlanner
from controller.planners.fleet_power import check_power, planned_w
from controller.planners.policy_parts import planner_of
from controller.thresholds import Thresholds
from tests.support.planning import applied, fleet, objective, view
from trefoil.core.demand import LoadForecast
from trefoil.core.device_types import A100_40GB
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState
from trefoil.core.objective import ObjectiveMode
from trefoil.core.policies import POLICIES

LAMBDA = objective(mode=ObjectiveMode.LAMBDA, lambda_weight=0.1, min_accuracy=0.0, hard_min_accuracy=0.0)
START = Trigger("start", "a test")


def decided(one, policy="exact"):
    return planner_of("", POLICIES[policy]).plan(one, np.random.default_rng(1))


def power_of(one):
    plan = decided(one).plan
    assert plan is not None
    return planned_w(one, plan)


@pytest.mark.parametrize(("gpus", "rate"), [(2, 40.0), (10, 240.0), (60, 1500.0)])
def test_exact_plans_within_the_cap_and_gives_up_no_more_accuracy_than_it_must(gpus, rate):
    """A small program, one that is answered from a grid, and a large one between relaxation and restriction."""
    free = view(rate=rate, devices=fleet(gpus), wanted=[LAMBDA])
    least_w = power_of(replace(free, objectives=(replace(LAMBDA, lambda_weight=1.0),)))
    full_w = power_of(free)
    assert full_w > least_w * 1.02
    accuracies = []
    for part in (0.2, 0.8):
        capped = replace(free, max_watts=least_w + part * (full_w - least_w))
        plan = decided(capped).plan
        assert plan is not None
        assert planned_w(capped, plan) <= capped.max_watts * (1 + 1e-6)
        assert f"W of the {capped.max_watts:g} W that the fleet may take" in plan.why
        accuracies.append(plan.expected["digits"].accuracy)
    assert accuracies == sorted(accuracies)
    assert accuracies[0] < accuracies[-1] <= decided(free).plan.expected["digits"].accuracy + 1e-6


def test_a_budget_owes_what_the_cap_keeps_it_from_serving_now():
    wanted = objective(min_accuracy=0.99, hard_min_accuracy=0.9)
    free = view(rate=60.0, devices=fleet(3), wanted=[wanted])
    capped = replace(free, max_watts=power_of(free) - 40.0)
    decision = decided(capped)
    assert decision.plan is not None
    assert 0.9 <= decision.plan.expected["digits"].accuracy < 0.989
    assert planned_w(capped, decision.plan) <= capped.max_watts * (1 + 1e-6)


def test_where_nothing_fits_the_refusal_says_what_the_least_plan_needs_and_so_much_is_enough():
    wanted = objective(mode=ObjectiveMode.INSTANT, min_accuracy=0.99)
    one = view(rate=60.0, devices=fleet(3), wanted=[wanted], horizon_s=0.0)
    decision = decided(replace(one, max_watts=150.0))
    assert decision.plan is None
    found = re.fullmatch(r"watt_cap: the fleet may take 150 W, the least plan needs (\d+) W", decision.degraded)
    assert found is not None
    enough = replace(one, max_watts=float(found[1]))
    plan = decided(enough).plan
    assert plan is not None
    assert planned_w(enough, plan) <= enough.max_watts
    verdict = judge(replace(one, max_watts=150.0, current=plan), START, decision, ControlState())
    assert verdict.plan is None
    assert "the last good plan stays, because watt_cap" in verdict.why


def test_what_runs_stays_where_it_is_the_best_that_keeps_the_cap():
    one = view(rate=40.0, devices=fleet(2), wanted=[LAMBDA])
    capped = replace(one, max_watts=power_of(one) - 5.0)
    plan = decided(capped).plan
    again = replace(capped, fleet=applied(plan, capped.fleet), current=plan)
    stayed = decided(again).plan
    assert stayed.nodes == plan.nodes
    assert planned_w(again, stayed) <= again.max_watts * (1 + 1e-6)


@pytest.mark.parametrize("policy", ["base", "co2opt", "static_mix", "exact", "oracle"])
def test_watts_are_those_that_planners_expect_and_a_plan_of_any_policy_above_the_cap_is_refused(policy):
    one = view(rate=30.0, devices=fleet(2))
    decision = decided(one, policy)
    watts = planned_w(one, decision.plan)
    assert watts == pytest.approx(decision.plan.expected["digits"].joules_per_request * 30.0, rel=0.02)
    assert judge(replace(one, max_watts=watts + 1), START, decision, ControlState()).outcome == NEW
    refused = judge(replace(one, max_watts=watts - 1), START, decision, ControlState())
    assert refused.outcome == FAILED
    assert f"fleet.max_watts = {watts - 1!r}: the plan takes {watts:.0f} W" in refused.why
    assert "the last good plan stays" in refused.why


def test_every_gpu_counts_and_energy_counts_at_the_mean():
    one = view(rate=30.0, devices=fleet(2))
    plan = decided(one, "base").plan
    watts = planned_w(one, plan)
    more = fleet(4)
    lost = tuple(replace(d, state=DeviceState.LOST) if d.device == "node0/gpu3" else d for d in more.nodes[0].devices)
    idle = replace(one, fleet=replace(more, nodes=(replace(more.nodes[0], devices=lost),)))
    assert planned_w(idle, plan) == pytest.approx(watts + A100_40GB.idle_w + A100_40GB.sleep_w)
    calm = LoadForecast("digits", "test", mean_per_s=15.0)
    half = replace(one, demand=(replace(one.demand[0], forecast=calm),))
    assert planned_w(half, plan) == pytest.approx((watts + 2 * A100_40GB.idle_w) / 2)
    flood = replace(one, demand=(replace(one.demand[0], rate_per_s=1e6, rate_p90_per_s=1e6),))
    assert planned_w(flood, plan) < 2 * A100_40GB.max_w  # no slice takes more than when it is always busy
    with pytest.raises(PlanError, match=r"fleet\.max_watts = 100\.0: the plan takes \d+ W.*--max-watts"):
        check_power(replace(one, max_watts=100.0), plan)


def test_exact_counts_gpus_that_it_cannot_use():
    one = view(rate=40.0, devices=fleet(2), wanted=[LAMBDA])
    third = replace(one, fleet=fleet(3))
    lost = replace(third.fleet.nodes[0].devices[2], state=DeviceState.LOST)
    devices = (*third.fleet.nodes[0].devices[:2], lost)
    third = replace(third, fleet=replace(third.fleet, nodes=(replace(third.fleet.nodes[0], devices=devices),)))
    cap_w = power_of(one) + A100_40GB.sleep_w / 2
    capped = replace(third, max_watts=cap_w)
    plan = decided(capped).plan
    assert planned_w(capped, plan) <= cap_w * (1 + 1e-6)
    assert plan.expected["digits"].accuracy < decided(one).plan.expected["digits"].accuracy


def test_a_new_cap_asks_for_a_new_plan():
    one = view(rate=30.0)
    plan = ExactPlanner().plan(one, np.random.default_rng(1)).plan
    basis = plan_basis(one, plan, next_tick_at_s=float("inf"))
    now = replace(one, current=plan, fleet=applied(plan, one.fleet))
    assert evaluate_triggers(now, basis, HoldTimers(), Thresholds(), ())[0] is None
    found, _ = evaluate_triggers(replace(now, max_watts=900.0), basis, HoldTimers(), Thresholds(), ())
    assert found == Trigger("objective", "the fleet may take 900 W, planned for without a cap")
