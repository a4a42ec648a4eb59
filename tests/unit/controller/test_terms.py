"""What a rollout reads out of a view, on the profile that ships."""

from dataclasses import replace

import pytest

from controller.explore.core.exploration_state import deployment_refusal, deployment_refusal_by_family
from controller.rollout.core.interim_routes import with_catalog_facts
from controller.rollout.core.rollout_inputs import (
    best_path,
    early_routes,
    fleet_snapshot,
    rollout_inputs,
    rollout_refusal,
)
from tests.support.planners import layout, plan_of
from tests.unit.controller.views import SHIPPED, digits_view
from trefoil.core.demand import Demand
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import DeviceState, DeviceStatus, FleetState, NodeStatus, SliceState, SliceStatus
from trefoil.core.plan import PlannedSlice, Route, RouteTarget

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"
LARGE = layout((("7g.40gb", 0),), "digits-l", GPU0)
HALVES = layout((("4g.20gb", 0), ("3g.20gb", 4)), "digits-l", GPU0)


def fleet(*parts: PlannedSlice, starting=(), lost=(), stale=False) -> FleetState:
    def slices(name):
        mine = [p for p in (*parts, *starting) if p.key.device == name]
        return tuple(
            SliceStatus(p.key, 1, "", SliceState.STARTING if p in starting else SliceState.READY, "", p.hosted)
            for p in mine
        )

    devices = tuple(
        DeviceStatus(
            name,
            A100_40GB,
            DeviceState.LOST if name in lost else DeviceState.AWAKE if slices(name) else DeviceState.ASLEEP,
            slices(name),
            mig_current=True,
        )
        for name in (GPU0, GPU1)
    )
    return FleetState((NodeStatus(node="node0", devices=devices),), ("node0",) if stale else ())


def plan(*parts: PlannedSlice):
    return plan_of({name: tuple(p for p in parts if p.key.device == name) for name in (GPU0, GPU1)})


def test_capacity_is_pooled_and_relaxed_terms_count_saturation():
    rules, relaxed = rollout_inputs(digits_view(fleet())), rollout_inputs(digits_view(fleet()), relaxed=True)
    one = rules.capacity("digits", GPU0, "1g.5gb", "digits-s", 1)
    assert rules.capacity("digits", GPU0, "1g.5gb", "digits-s", 7) > 7 * one
    assert relaxed.capacity("digits", GPU0, "1g.5gb", "digits-s", 1) > one
    assert rules.capacity("digits", GPU0, "1g.5gb", "unknown", 1) == 0


def test_faster_variants_give_as_little_accuracy_as_asked_and_respect_the_hard_floor():
    (part,) = LARGE
    inputs = rollout_inputs(digits_view(fleet()))
    light = [inputs.faster(part, steps) for steps in (1, 2, 9)]
    assert [one.hosted[0].variant for one in light] == ["digits-m", "digits-s", "digits-s"]  # digits-xs is below 0.9
    assert {one.key for one in light} == {part.key}


def test_small_variants_swap_in_place():
    (part,) = LARGE
    assert rollout_inputs(digits_view(fleet())).swappable(
        part, replace(part, hosted=layout((("7g.40gb", 0),), "digits-s", GPU0)[0].hosted)
    )


def test_slices_with_sequences_never_swap_in_place():
    (part,) = LARGE
    small = replace(part, hosted=layout((("7g.40gb", 0),), "digits-s", GPU0)[0].hosted)
    sequences = replace(SHIPPED, families=tuple(replace(family, sequence=True) for family in SHIPPED.families))
    assert not rollout_inputs(replace(digits_view(fleet()), catalog=sequences)).swappable(part, small)


def test_a_rollout_is_impossible_only_where_nothing_can_carry_the_load_meanwhile():
    wanted = plan(*HALVES)
    assert rollout_refusal(digits_view(fleet(*LARGE), current=plan(*LARGE)), wanted) == ""  # gpu1 helps
    assert "0.0/s" in rollout_refusal(digits_view(fleet(*LARGE, lost=(GPU1,)), current=plan(*LARGE)), wanted)
    assert rollout_refusal(digits_view(fleet(*LARGE, lost=(GPU1,)), rate=0.0, current=plan(*LARGE)), wanted) == ""


def test_a_stale_node_is_fixed_and_a_lost_device_holds_nothing():
    commanded = {n.node: n for n in plan(*LARGE).nodes}
    stale = fleet_snapshot(fleet(*LARGE, stale=True), commanded, ())
    assert stale.fixed == {GPU0, GPU1}
    assert stale.devices[GPU0].slices == LARGE
    lost = fleet_snapshot(fleet(*LARGE, lost=(GPU0,)), commanded, ())
    assert lost.fixed == {GPU0}
    assert not lost.ready
    assert not lost.devices[GPU0].slices


def test_a_starting_slice_occupies_its_place_but_does_not_serve():
    stands = fleet_snapshot(fleet(starting=LARGE), {}, ())
    assert stands.present == {LARGE[0].key}
    assert not stands.ready


@pytest.mark.parametrize(("rate", "helped"), [(10.0, False), (60.0, True)])
def test_slices_that_are_ready_help_early_only_when_the_load_needs_them(rate, helped):
    second = layout((("3g.20gb", 0),), "digits-l", GPU1)
    third = layout((("3g.20gb", 4),), "digits-l", GPU1)
    wanted = plan(*LARGE, *second, *third)
    looked = digits_view(fleet(*LARGE, *second, starting=third), rate, plan(*LARGE))
    stands = fleet_snapshot(looked.fleet, {}, plan(*LARGE).routes)
    routes = early_routes(looked, stands.ready, stands.routes, wanted)
    assert (routes is not None) == helped
    if routes is not None:
        assert {t.slice for t in routes[0].targets} == {LARGE[0].key, second[0].key}
        assert sum(t.weight for t in routes[0].targets) == pytest.approx(1)
        assert early_routes(looked, stands.ready, routes, wanted) is None


def test_when_the_slo_cannot_be_kept_on_the_way_the_way_says_so():
    tight = digits_view(fleet(*LARGE, *layout((("7g.40gb", 0),), "digits-l", GPU1)), 45.0)
    both = layout((("4g.20gb", 0), ("3g.20gb", 4)), "digits-l", GPU1)
    stands = fleet_snapshot(tight.fleet, {}, plan(*LARGE, *layout((("7g.40gb", 0),), "digits-l", GPU1)).routes)
    found = best_path(tight, stands, plan(*HALVES, *both))
    assert not found.halted


def test_a_candidate_that_cannot_carry_the_load_is_refused_before_it_is_deployed() -> None:
    small = plan(*layout((("1g.5gb", 0),), "digits-l", GPU0))
    runs = digits_view(fleet(*LARGE), rate=30.0, current=plan(*LARGE))
    assert "the load needs 30.0/s" in deployment_refusal(runs, small)
    assert deployment_refusal_by_family(runs, small)[1] == "digits"
    assert deployment_refusal(runs, plan(*HALVES)) == ""
    assert deployment_refusal(replace(runs, demand=(Demand("digits", "", 500.0, 500.0),)), plan(*LARGE)) == "", (
        "it runs already"
    )


def test_without_a_profile_half_of_what_serves_goes_on_serving() -> None:
    unprofiled = replace(SHIPPED, rows=())
    both = (*LARGE, *layout((("7g.40gb", 0),), "digits-l", GPU1))
    halves = (*HALVES, *layout((("4g.20gb", 0), ("3g.20gb", 4)), "digits-s", GPU1))
    found = replace(digits_view(fleet(*both), current=plan(*both)), catalog=unprofiled)
    assert rollout_inputs(found).needs == {"digits": 7.0}
    way = best_path(found, fleet_snapshot(found.fleet, {}, found.current.routes), plan(*halves))
    assert not way.halted
    assert max(len({key.device for key in step.drained}) for step in way.steps) == 1, "one GPU after the other"
    alone = replace(digits_view(fleet(*LARGE), current=plan(*LARGE)), catalog=unprofiled)
    assert deployment_refusal(alone, plan(*layout((("4g.20gb", 0),), "digits-s", GPU1))) == "", (
        "through the sleeping GPU"
    )


def test_what_is_published_tells_how_accurate_each_target_is():
    routed = Route("digits", targets=tuple(RouteTarget(p.key, p.hosted[0].variant, weight=0.5) for p in HALVES))
    (route,) = with_catalog_facts((routed,), SHIPPED)
    large = SHIPPED.family("digits").variant("digits-l")
    assert {(t.accuracy, t.version) for t in route.targets} == {(large.accuracy, large.version)}
    stranger = replace(routed, family="nobody")
    assert with_catalog_facts((stranger,), SHIPPED) == (stranger,)
