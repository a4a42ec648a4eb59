"""Rollouts of families that are split: routed where all stages serve, and never a stage as if it were the whole."""

from dataclasses import replace

import pytest

from controller.planners.muserve.planner import AlpaServeSettings, muserve
from controller.planners.policy_parts import apply_policy_parts
from controller.rollout.core.interim_routes import capacity_of, interim_routes, serving_routes, with_draining_targets
from controller.rollout.core.path import plan_path
from controller.rollout.core.rollout_inputs import fleet_snapshot, rollout_inputs
from dispatcher.routing.core.routing_table import check_plan
from tests.support.sharing import decide, shared
from tests.unit.planners.test_muserve_stages import GROUPED, split
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.fleet import FleetState
from trefoil.core.plan import Plan, PlannedSlice
from trefoil.core.policies import policy

FEELS = {"f0": (0.0, 0.9)}


def views(current: Plan | None = None) -> PlanView:
    return split(shared([0.3], 2, current), FEELS)


def planned(settings: AlpaServeSettings, one: PlanView) -> Plan:
    plan = decide(muserve(settings), one).plan
    return apply_policy_parts(plan, one.catalog, policy("muserve_no_sched"))


def parts(plan: Plan) -> dict[object, PlannedSlice]:
    return {part.key: part for node in plan.nodes for device in node.devices for part in device.slices}


STAGED, WHOLE = planned(GROUPED, views()), planned(AlpaServeSettings(), views())


def path(current: Plan | None, target: Plan, fleet: FleetState | None = None):
    one = views(current)
    one = one if fleet is None else replace(one, fleet=fleet)
    commanded = {node.node: node for node in current.nodes} if current else {}
    snapshot = fleet_snapshot(one.fleet, commanded, current.routes if current else ())
    return plan_path(snapshot, target, rollout_inputs(one))


def test_a_family_has_the_capacity_of_its_slowest_stage_and_none_without_one():
    inputs, ready = rollout_inputs(views()), list(parts(STAGED).values())
    alone = [inputs.capacity(f"f0@{n}of2", "node0/gpu0", "7g.40gb", "l", 1) for n in (1, 2)]
    assert capacity_of("f0", ready, inputs) == min(alone) > inputs.capacity("f0", "node0/gpu0", "7g.40gb", "l", 1)
    assert capacity_of("f0", ready[:1], inputs) == 0.0


def test_it_is_not_routed_before_all_of_its_stages_serve_and_is_at_the_end():
    steps = path(None, STAGED).steps
    assert [step.name for step in steps] == ["start", "settle"]
    for step in steps:
        check_plan(replace(STAGED, routes=step.routes), Revision())
    assert steps[-1].routes == STAGED.routes
    ready = parts(STAGED)
    first = {key: part for key, part in ready.items() if part.hosted[0].stage == 0}
    (route,) = interim_routes(STAGED, first, rollout_inputs(views()), ())
    assert route.targets == ()
    (route,) = serving_routes(STAGED.routes, first)
    assert route.targets == ()
    (route,) = interim_routes(STAGED, ready, rollout_inputs(views()), ())
    assert [(t.stage, t.weight) for t in route.targets] == [(0, 1.0), (1, 1.0)]


def test_a_stage_is_not_taken_for_the_whole_though_it_is_the_same_variant_of_the_same_family():
    on_gpu0 = {key: part for key, part in parts(WHOLE).items() if key.device == "node0/gpu0"}
    on_gpu1 = {key: part for key, part in parts(STAGED).items() if key.device == "node0/gpu1"}
    mixed = {**on_gpu0, **on_gpu1}
    for target in (WHOLE, STAGED):
        (route,) = interim_routes(target, mixed, rollout_inputs(views()), ())
        assert [(t.slice.device, t.stage, t.weight) for t in route.targets] == [("node0/gpu0", 0, pytest.approx(1.0))]
        drained = with_draining_targets(route, on_gpu1)
        assert drained == route  # a draining stage beside the whole would make it one of two


def test_the_other_way_is_loaded_beside_the_one_that_serves_until_all_of_it_is_there():
    for now, target in ((WHOLE, STAGED), (STAGED, WHOLE)):
        found = path(now, target)
        assert (found.halted, found.why) == (False, "what comes is loaded beside what goes")
        assert [step.name for step in found.steps] == ["start", "shift", "settle"]
        start, shift, _ = found.steps
        served = {t.stage for t in now.routes[0].targets}
        assert {t.stage for t in start.routes[0].targets} == served, "the old way, meanwhile"
        assert {len(part.hosted) for part in start.ready.values()} == {2}
        check_plan(replace(target, routes=shift.routes), Revision())
        assert {t.stage for t in shift.routes[0].targets if not t.draining} == {
            t.stage for t in target.routes[0].targets
        }
        assert {h.model for part in shift.ready.values() for h in part.hosted} == {
            h.model for part in parts(target).values() for h in part.hosted
        }


def test_what_does_not_fit_beside_what_serves_is_not_begun():
    whole, staged = (replace(plan) for plan in (WHOLE, STAGED))
    one = views(whole)
    snapshot = fleet_snapshot(one.fleet, {node.node: node for node in whole.nodes}, whole.routes)
    found = plan_path(snapshot, staged, replace(rollout_inputs(one), swappable=lambda _old, _new: False))
    assert found.halted
    assert "no order of steps keeps the capacity" in found.why


def test_after_the_loss_of_a_stage_the_whole_comes_in_its_place():
    one = views(STAGED)
    (node,) = one.fleet.nodes
    left = replace(one.fleet, nodes=(replace(node, devices=node.devices[:1]),))
    lost = replace(one, fleet=left, trigger="loss")
    target = planned(GROUPED, lost)
    found = path(STAGED, target, left)
    assert not found.halted
    for step in found.steps:
        check_plan(replace(target, routes=step.routes), Revision())
    assert found.steps[-1].routes == target.routes
    assert [h.model for part in parts(target).values() for h in part.hosted] == ["f0"]
