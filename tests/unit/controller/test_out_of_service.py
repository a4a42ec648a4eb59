"""Devices that are cordoned, of a type that nobody plans, or not cut: left out, said, and left alone."""

from dataclasses import replace

import numpy as np
import pytest

from controller.observe.core.plannable import (
    check_obeyed,
    differing_models,
    loadable_catalog,
    unplannable_reason,
)
from controller.observe.core.triggers import HoldTimers, evaluate_triggers, plan_basis
from controller.planners.exact.planner import ExactPlanner
from controller.rollout.core.rollout_inputs import best_path, fleet_snapshot, rollout_refusal
from controller.thresholds import CAUSES, Thresholds
from tests.support.planners import layout, plan_of
from tests.support.planning import applied, fleet
from tests.support.planning import view as planning_view
from tests.unit.controller.views import DIGITS_OBJECTIVE, SHIPPED, digits_view, view
from trefoil.core.brains import BudgetState
from trefoil.core.demand import Demand
from trefoil.core.device_types import A100_40GB, H100_80GB, T4, device_type
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState, DeviceStatus, DeviceType, FleetState
from trefoil.core.objective import ObjectiveMode

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"


def changed(found: FleetState, device: str, **changes) -> FleetState:
    (node,) = found.nodes
    devices = tuple(replace(d, **changes) if d.device == device else d for d in node.devices)
    return FleetState((replace(node, devices=devices),))


def with_device(found: FleetState, *more: DeviceStatus) -> FleetState:
    (node,) = found.nodes
    return FleetState((replace(node, devices=(*node.devices, *more)),))


def test_a_device_out_of_service_is_left_before_its_slices_go_and_capacity_stays():
    before = plan_of({GPU0: layout((("7g.40gb", 0),), "digits-l", GPU0), GPU1: ()})
    after = plan_of({GPU0: (), GPU1: layout((("7g.40gb", 0),), "digits-l", GPU1)})
    found = changed(applied(before, fleet(2)), GPU0, cordon="a fan is broken")
    seen = digits_view(found, 20.0, before)
    stands = fleet_snapshot(found, {n.node: n for n in before.nodes}, before.routes)
    assert GPU0 not in stands.fixed, "its slices may and must leave"
    way = best_path(seen, stands, after)
    assert [step.name for step in way.steps] == ["start", "shift", "settle"]
    start, shift, _ = way.steps
    assert {p.key.device for d in start.devices.values() for p in d.slices} == {GPU0, GPU1}
    assert {key.device for key in shift.drained} == {GPU0}
    assert shift.devices[GPU0].slices == ()


@pytest.mark.parametrize("changes", [{"cordon": "a fan is broken"}, {"mig_current": False}])
def test_a_rebuild_borrows_no_device_that_takes_nothing_in(changes):
    before = plan_of({GPU0: layout((("7g.40gb", 0),), "digits-l", GPU0), GPU1: ()})
    after = plan_of({GPU0: layout((("4g.20gb", 0), ("3g.20gb", 4)), "digits-l", GPU0), GPU1: ()})
    found = applied(before, fleet(2))
    assert rollout_refusal(digits_view(found, 20.0, before), after) == ""  # gpu1 helps for a moment
    assert rollout_refusal(digits_view(changed(found, GPU1, **changes), 20.0, before), after)


def test_a_cordon_and_its_end_fire_like_a_loss_and_name_the_reason():
    plan = plan_of({GPU0: (), GPU1: ()})
    whole = replace(view(), fleet=fleet(2), current=plan)
    cordoned = replace(whole, fleet=changed(fleet(2), GPU0, cordon="a fan is broken"))
    limits = Thresholds()
    fired, _ = evaluate_triggers(cordoned, plan_basis(whole, plan, float("inf")), HoldTimers(), limits, CAUSES)
    assert (fired.cause, fired.why) == ("loss", f"{GPU0}: out of service (a fan is broken)")
    fired, _ = evaluate_triggers(whole, plan_basis(cordoned, plan, float("inf")), HoldTimers(), limits, CAUSES)
    assert (fired.cause, GPU0 in fired.why) == ("loss", True)


def test_the_planner_uses_what_it_can_and_says_what_it_leaves_out():
    strange = (
        DeviceStatus("node0/cpu", device_type("cpu:64"), DeviceState.ASLEEP),
        DeviceStatus("node0/gpu2", T4, DeviceState.AWAKE),
        DeviceStatus("node0/gpu3", DeviceType("GeForce 256"), DeviceState.AWAKE),
        DeviceStatus("node0/gpu4", A100_40GB, DeviceState.AWAKE, mig_current=False),
    )
    found = changed(with_device(fleet(2), *strange), GPU0, cordon="a fan is broken")
    decision = ExactPlanner().plan(planning_view(rate=20.0, devices=found), np.random.default_rng(0))
    (node,) = decision.plan.nodes
    planned = {d.device: d for d in node.devices}
    assert set(planned) == {GPU0, GPU1}, "what it cannot plan stays as it is"
    assert (planned[GPU0].target, planned[GPU0].slices) == (DeviceState.ASLEEP, ())
    assert planned[GPU1].slices
    for word in ("1 lost or out of service", "GeForce 256", "CPUs are not planned", T4.name, "MIG mode is off"):
        assert word in decision.why


def test_what_runs_on_a_device_that_no_planner_knows_stays_through_a_rollout():
    before = plan_of({GPU0: (), GPU1: ()})
    found = with_device(fleet(2), DeviceStatus("node0/gpu3", DeviceType("GeForce 256"), DeviceState.AWAKE))
    after = plan_of({GPU0: layout((("7g.40gb", 0),), "digits-l", GPU0), GPU1: ()})
    way = best_path(digits_view(found, 20.0, before), fleet_snapshot(found, {}, ()), after)
    assert all(step.devices["node0/gpu3"].target == DeviceState.AWAKE for step in way.steps)


@pytest.mark.parametrize(
    ("kind", "mig_on", "why"),
    [(A100_40GB, True, ""), (A100_40GB, False, "MIG"), (device_type("cpu:8"), False, ""), (H100_80GB, True, None)],
)
def test_what_can_be_planned_follows_from_the_profile_and_the_mode(kind, mig_on, why):
    found = unplannable_reason(DeviceStatus("n/x", kind, DeviceState.AWAKE, mig_current=mig_on), SHIPPED.profiled_types)
    if why is None:
        assert bool(found) == (kind.name not in SHIPPED.profiled_types)
    else:
        assert (why in found) if why else not found


def test_a_variant_that_a_node_cannot_load_and_its_end_fire_like_a_loss_and_name_the_file():
    plan = plan_of({GPU0: (), GPU1: ()})
    whole = replace(view(), fleet=fleet(2), current=plan)
    why = "/models/digits/2/model.onnx is missing or cannot be read"
    (node,) = whole.fleet.nodes
    lacking = replace(whole, fleet=FleetState((replace(node, missing=("rapl: no", f"model digits/2: {why}")),)))
    for before, after, said in (
        (whole, lacking, f"digits/2 cannot be loaded: node0: {why}"),
        (lacking, whole, "digits/2: can be loaded again"),
    ):
        fired, _ = evaluate_triggers(after, plan_basis(before, plan, float("inf")), HoldTimers(), Thresholds(), CAUSES)
        assert (fired.cause, fired.why) == ("loss", said)
        again, _ = evaluate_triggers(after, plan_basis(after, plan, float("inf")), HoldTimers(), Thresholds(), CAUSES)
        assert again is None


def test_a_family_whose_every_variant_cannot_be_loaded_stays_whole():
    (node,) = fleet(1).nodes
    (family,) = SHIPPED.restrict({"digits"}).families
    for refused in (1, len(family.variants)):
        missing = tuple(f"model digits/{v.version}: gone" for v in family.variants[:refused])
        left = loadable_catalog(SHIPPED, FleetState((replace(node, missing=missing),)))
        kept = family.variants[1:] if refused == 1 else family.variants
        assert left.family("digits").variants == kept
        assert {row.variant for row in left.rows if row.family == "digits"} == {v.name for v in kept}
        assert left.family("albert") == SHIPPED.family("albert")
    assert loadable_catalog(SHIPPED, fleet(1)) is SHIPPED


DIGITS = tuple(f"digits/{version}" for version in (1, 2, 3, 4))


def has(found: FleetState, *nodes: dict[str, str], missing: tuple[str, ...] = ()) -> FleetState:
    """Nodes like that of a fleet, each with digests of its own."""
    (node,) = found.nodes
    models = [tuple(f"{name}: {digest}" for name, digest in sorted(each.items())) for each in nodes]
    return FleetState(
        tuple(replace(node, node=f"node{i}", models=each, missing=missing) for i, each in enumerate(models))
    )


def test_a_node_with_other_files_than_those_that_are_planned_with_is_named():
    same = dict.fromkeys(DIGITS, "aa")
    for stated, nodes, named in (
        ({}, [same, same, {}], {}),
        (same, [same, {**same, "digits/2": "aa+beside", "other/9": "cc", "digits/9": "dd"}], {}),
        (same, [{**same, "digits/2": "bb"}], {"node0": "digest bb, and the controller's family.toml states aa"}),
        ({}, [same, {**same, "digits/2": "bb"}], {"node1": "digest bb, and node0 has aa"}),
        (
            {},
            [{**same, "digits/2": "aa+one"}, {**same, "digits/2": "aa+two"}],
            {"node1": "aa+two, and node0 has aa+one"},
        ),
        ({}, [same, {name: "aa" for name in DIGITS if name != "digits/2"}], {"node1": "has no such version"}),
    ):
        found = differing_models(has(fleet(1), *nodes), SHIPPED, stated)
        assert found.keys() == named.keys(), nodes
        for node, why in named.items():
            (entry,) = found[node]
            assert entry.startswith("model digits/2: ")
            assert entry.endswith(why)


def test_what_a_node_says_itself_is_not_said_again_and_a_stale_node_is_no_measure():
    same, other = dict.fromkeys(DIGITS, "aa"), dict.fromkeys(DIGITS, "bb")
    said = tuple(f"model {name}: is gone" for name in DIGITS)
    assert differing_models(has(fleet(1), other, missing=said), SHIPPED, same) == {}
    gone = replace(has(fleet(1), other, same), stale=("node0",))
    assert differing_models(gone, SHIPPED, {}) == {}
    assert differing_models(replace(gone, stale=()), SHIPPED, {}).keys() == {"node1"}


def test_a_plan_that_gives_a_node_what_it_cannot_load_is_refused_by_name_and_what_is_there_may_stay():
    planned = plan_of({GPU0: layout((("7g.40gb", 0),), "digits-l", GPU0), GPU1: ()})
    (hosted,) = planned.nodes[0].devices[0].slices[0].hosted
    entry = f"model digits/{hosted.version}: its files have digest bb, and the controller's family.toml states aa"
    (node,) = fleet(2).nodes
    seen = replace(view(), fleet=FleetState((replace(node, missing=(entry,)),)), current=None)
    with pytest.raises(PlanError, match=f"node0.*cannot load digits/{hosted.version}: its files have digest bb"):
        check_obeyed(seen, planned)
    check_obeyed(replace(seen, current=planned), planned)
    check_obeyed(replace(seen, fleet=fleet(2)), planned)


def test_no_way_goes_below_a_floor_of_every_instant_while_what_runs_carries_the_load():
    cuts = {"now": (("7g.40gb", 0),), "then": (("4g.20gb", 0), ("3g.20gb", 4))}
    plans = {name: plan_of({gpu: layout(cut, "digits-l", gpu) for gpu in (GPU0, GPU1)}) for name, cut in cuts.items()}
    instant = replace(DIGITS_OBJECTIVE, mode=ObjectiveMode.INSTANT, min_accuracy=0.99)
    standing = applied(plans["now"], fleet(2))
    budget = digits_view(standing, 45.0, plans["now"])
    (found,) = {best_path(budget, fleet_snapshot(standing, {}, plans["now"].routes), plans["then"]).why}
    assert "faster variants" in found
    assert not rollout_refusal(budget, plans["then"]), "a mean may be made up for"
    held = replace(budget, objectives=(instant,))
    assert "on the way" in rollout_refusal(held, plans["then"])
    assert not rollout_refusal(replace(held, objectives=(replace(instant, min_accuracy=0.9),)), plans["then"])
    overloaded = replace(held, demand=(Demand("digits", "", 500.0, 600.0),))
    assert "on the way" not in rollout_refusal(overloaded, plans["then"]), "what runs does not carry the load"


def test_no_way_misses_the_slo_while_what_runs_carries_the_load_and_keeps_its_floor():
    now, then = (
        plan_of({gpu: layout(cut, "digits-l", gpu) for gpu in (GPU0, GPU1)})
        for cut in ((("7g.40gb", 0),), (("4g.20gb", 0), ("3g.20gb", 4)))
    )
    standing, reasons = applied(now, fleet(2)), set()
    for rate in range(5, 120):
        one = digits_view(standing, float(rate), now)
        one = replace(one, objectives=(replace(DIGITS_OBJECTIVE, hard_min_accuracy=0.99),))  # no variant is faster
        path = best_path(one, fleet_snapshot(standing, {}, now.routes), then)
        if path.misses_slo and not path.halted:
            reasons.add("what runs carries the load without" in rollout_refusal(one, then))
    assert True in reasons


def test_a_family_below_its_floor_may_go_up_on_a_way_that_pays_back_within_the_window():
    now = plan_of({gpu: layout((("7g.40gb", 0),), "digits-m", gpu) for gpu in (GPU0, GPU1)})
    then = plan_of({gpu: layout((("4g.20gb", 0), ("3g.20gb", 4)), "digits-l", gpu) for gpu in (GPU0, GPU1)})
    standing, tried = applied(now, fleet(2)), 0
    for rate in range(20, 140, 5):
        owed = [BudgetState("digits", 86_400.0, elapsed_s, 10**6, 0.9e6) for elapsed_s in (86_370.0, 80_000.0)]
        views = [
            replace(
                digits_view(standing, float(rate), now),
                budgets=(one,),
                objectives=(replace(DIGITS_OBJECTIVE, min_accuracy=0.99),),
            )
            for one in owed
        ]
        late, early = (rollout_refusal(one, then) for one in views)
        tried += "on the way" in late and not early
    assert tried


def test_a_family_below_its_floor_is_not_held_there_by_a_floor_that_it_misses_anyway():
    """The mean of its window cannot be reached any more, and no way is less accurate than what runs."""
    now, then = (
        plan_of({GPU0: layout(cut, "digits-m", GPU0), GPU1: layout(cut, variant, GPU1)})
        for cut, variant in (((("7g.40gb", 0),), "digits-m"), ((("4g.20gb", 0), ("3g.20gb", 4)), "digits-l"))
    )
    lost = BudgetState("digits", 300.0, 299.0, 10**6, 0.9e6)
    one = digits_view(applied(now, fleet(2)), 5.0, now)
    one = replace(one, budgets=(lost,), objectives=(replace(DIGITS_OBJECTIVE, min_accuracy=0.99),))
    path = best_path(one, fleet_snapshot(one.fleet, {}, now.routes), then)
    assert not path.halted
    assert rollout_refusal(one, then) == ""
    lower = plan_of({gpu: layout((("4g.20gb", 0), ("3g.20gb", 4)), "digits-s", gpu) for gpu in (GPU0, GPU1)})
    assert "on the way" in rollout_refusal(one, lower)
