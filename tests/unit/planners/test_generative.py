"""A slice of a generative family decodes several streams together: so many requests may be on it at once."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from controller.planners.columns import class_column
from controller.planners.exact import ExactPlanner
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from controller.rollout.core.rollout_inputs import rollout_inputs
from tests.support.planning import digits, objective, view
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB, slice_type
from trefoil.core.objective import NO_TOKEN_SLO, TokenSlo
from trefoil.core.plan_check import check


@pytest.mark.parametrize(("generative", "credits"), [(True, {4}), (False, {1, 2})])
def test_credits_are_as_many_as_a_slice_decodes_together(generative, credits):
    catalog = digits()
    family = replace(catalog.families[0], generative=generative, tokens_mean=10.0 if generative else 0.0)
    larger = [
        replace(r, batch=4, latency_ms_p50=2 * r.latency_ms_p50, latency_ms_p95=2 * r.latency_ms_p95,
                latency_ms_p99=2 * r.latency_ms_p99, energy_active_j_per_batch=2 * r.energy_active_j_per_batch)
        for r in catalog.rows
    ]  # fmt: skip
    one = view(catalog=Catalog((family,), (*catalog.rows, *larger)))
    plan = ExactPlanner().plan(one, np.random.default_rng(0)).plan
    assert plan is not None
    assert {target.credits for route in plan.routes for target in route.targets} <= credits
    assert {p.credits for node in plan.nodes for d in node.devices for p in d.slices} <= credits


def streaming(slo, **more):
    """A view of a family whose step takes 1/11 of the digits' times, and 10 % longer for each further stream."""
    catalog = digits()
    family = replace(catalog.families[0], generative=True, tokens_mean=10.0)
    rows = tuple(
        replace(r, batch=n, energy_active_j_per_batch=(1 + 0.1 * (n - 1)) * r.energy_active_j_per_batch,
                latency_ms_p50=(1 + 0.1 * (n - 1)) * r.latency_ms_p50,
                latency_ms_p95=(1 + 0.1 * (n - 1)) * r.latency_ms_p95,
                latency_ms_p99=(1 + 0.1 * (n - 1)) * r.latency_ms_p99)
        for r in catalog.rows
        for n in (1, 2, 8)
    )  # fmt: skip
    return view(catalog=Catalog((family,), rows), wanted=[objective(slo_ms=500.0, **asdict(slo))], **more)


def planned(one):
    decision = ExactPlanner().plan(one, np.random.default_rng(0))
    assert decision.plan is not None
    check(decision.plan, one.fleet, one.catalog, one.demand)
    return decision.plan


def column(one, shape, **settings):
    inputs = read_view(one, 1.0).in_ranges
    shape_of = slice_type(A100_40GB, shape).name
    return class_column(one.catalog, inputs.tasks[0], A100_40GB, shape_of, "l", 1, ExactSettings(**settings))


def test_streams_that_run_together_carry_more_than_answers_one_by_one():
    """Eight streams take 1.7 times as long as one: 4.7 times the rate at most."""
    alone = column(streaming(NO_TOKEN_SLO), "1g.5gb")
    together = column(streaming(TokenSlo(tpot_ms=400.0, tpot_quantile=0.95)), "1g.5gb")
    assert 3.0 < together.capacity_per_s(1) / alone.saturation_per_s < 4.8
    assert alone.batch == 0.0
    assert 1.0 < together.batch <= 8.0
    assert together.unqueued_ms_p95 <= 500.0


def test_the_tighter_the_objective_of_tokens_the_faster_the_slices():
    smallest = []
    for tpot_ms in (400.0, 4.0, 2.5):
        one = streaming(TokenSlo(ttft_ms=500.0, ttft_quantile=0.95, tpot_ms=tpot_ms, tpot_quantile=0.95), rate=30.0)
        plan = planned(one)
        assert not plan.degraded
        used = {(t.slice.slice_type, t.variant) for route in plan.routes for t in route.targets}
        steps_ms = [
            r.latency_ms_p50 / 11 for r in one.catalog.rows if (r.slice_type, r.variant) in used and r.batch == 1
        ]
        assert max(steps_ms) <= tpot_ms
        smallest.append(min(slice_type(A100_40GB, shape).compute_slices for shape, _ in used))
    assert smallest == sorted(smallest)
    assert smallest[0] < smallest[-1]


@pytest.mark.parametrize("setting", ["overhead_ms", "transport_gap_ms"])
def test_what_a_request_meets_on_its_way_is_taken_off_its_first_token_alone(setting):
    """A slice that gives its first token within 12 ms keeps 20 ms for clients that are 8 ms away."""

    def rate(way_ms, **slo):
        quantiles = {f"{name.partition('_')[0]}_quantile": 0.95 for name in slo}
        ways = {"overhead_ms": 0.0, "transport_gap_ms": 0.0, setting: way_ms}
        found = column(streaming(TokenSlo(**slo, **quantiles)), "1g.5gb", **ways)
        return found.capacity_per_s(1) if found.tiers else 0.0

    near, far = rate(0.0, ttft_ms=12.0), rate(8.0, ttft_ms=20.0)
    assert 0.0 < near == pytest.approx(far)
    assert rate(8.0, ttft_ms=12.0) < 0.9 * near
    assert rate(8.0, ttft_ms=8.0) == rate(9.0, ttft_ms=8.0) == 0.0, (
        "nothing is left: that is not an objective of 0, none"
    )
    assert 0.0 < rate(8.0, tpot_ms=12.0) == pytest.approx(rate(0.0, tpot_ms=12.0))


def test_an_objective_of_tokens_that_no_slice_keeps_is_said_and_the_nearest_is_planned():
    plan = planned(streaming(TokenSlo(tpot_ms=0.5, tpot_quantile=0.95), rate=5.0))
    assert "slo_out_of_reach: digits asks for TPOT 0.5 ms" in plan.degraded
    assert plan.routes[0].targets


def test_a_rollout_counts_streams_that_run_together():
    one = streaming(TokenSlo(tpot_ms=400.0, tpot_quantile=0.95), rate=30.0)
    plan = planned(one)
    places = [(d.device, p) for node in plan.nodes for d in node.devices for p in d.slices]
    counted, bare = (
        rollout_inputs(replace(one, objectives=(replace(one.objectives[0], tpot_ms=limit_ms),)))
        for limit_ms in (400.0, 0.0)
    )
    asked = [(p.hosted[0].model, device, p.key.slice_type, p.hosted[0].variant, 1) for device, p in places]
    assert sum(counted.capacity(*each) for each in asked) >= 30.0
    assert all(counted.capacity(*each) > 1.5 * bare.capacity(*each) for each in asked)
    assert all(counted.sustained(*each) > 2 * bare.sustained(*each) for each in asked)
