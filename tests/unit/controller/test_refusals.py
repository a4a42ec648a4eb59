"""What agents refuse: what planners do with it, how long it is remembered, and when a rollout is tried again."""

from dataclasses import replace

import numpy as np
import pytest

from controller.observe.core.plannable import check_obeyed, places_refused, refused_slices
from controller.observe.core.refusals import Refusals, refused_keys, unmakeable
from controller.observe.core.triggers import HoldTimers, evaluate_triggers, plan_basis
from controller.planners.policy_parts import planner_of
from controller.thresholds import Thresholds
from tests.support.planning import applied, fleet, view
from trefoil.core.device_types import A100_40GB, configurations, device_type, limited_type, placements, profile_type
from trefoil.core.errors import PlanError
from trefoil.core.fleet import FleetState, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.policies import policy

GPU = "node0/gpu0"
ONE = SliceKey(GPU, "1g.5gb", 0, 1)
RETRY_S = 100.0


def with_devices(seen: FleetState, **changes: object) -> FleetState:
    """The fleet with these fields of its first device changed."""
    node = seen.nodes[0]
    first = replace(node.devices[0], **changes)
    return FleetState((replace(node, devices=(first, *node.devices[1:])), *seen.nodes[1:]))


def test_a_type_of_which_places_are_taken_has_the_placements_that_are_left_and_a_name():
    left = limited_type(A100_40GB, (ONE, SliceKey(GPU, "3g.20gb", 4, 4)))
    assert left.name == "A100-SXM4-40GB:less:0,4,5,6,7"
    assert device_type(left.name) == left
    assert profile_type(left.name) == A100_40GB.name
    assert set(placements(left)) == {
        (("1g.5gb", 1, 1), ("1g.5gb", 2, 1), ("1g.5gb", 3, 1)),
        (("1g.5gb", 1, 1), ("2g.10gb", 2, 2)),
    }
    assert limited_type(A100_40GB, ()) is A100_40GB
    assert not placements(limited_type(A100_40GB, (SliceKey(GPU, "7g.40gb", 0, 2**32 - 1),)))
    without = limited_type(A100_40GB, (), ("7g.40gb", "no such type"))
    assert len(configurations(without)) == len(configurations(A100_40GB)) - 1


def test_a_place_that_others_take_fires_like_a_loss_and_so_does_its_end():
    one = view()
    plan = planner_of("", policy("exact")).plan(one, np.random.default_rng(1)).plan
    before = replace(one, current=plan, fleet=applied(plan, one.fleet))
    taken = replace(before, fleet=with_devices(before.fleet, foreign=(ONE,)))
    for then, now, words in ((before, taken, "taken or not offered"), (taken, before, "planned on again")):
        basis = plan_basis(then, plan, 1e12)
        found, _ = evaluate_triggers(now, basis, HoldTimers(), Thresholds(), ())
        assert found is not None
        assert found.cause == "loss"
        assert words in found.why
        assert ONE.name in found.why
        assert evaluate_triggers(then, basis, HoldTimers(), Thresholds(), ())[0] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"foreign": (SliceKey(GPU, "1g.5gb", 6, 1),)}, "taken by"),
        ({"lacks": ("7g.40gb",)}, "does not offer"),
        ({"closed": "held by others"}, "held by others"),
    ],
)
def test_a_plan_that_an_agent_would_refuse_is_refused_where_it_is_judged(changes, words):
    one = view()
    plan = planner_of("", policy("base")).plan(one, np.random.default_rng(1)).plan
    check_obeyed(one, plan)
    told = replace(one, fleet=with_devices(one.fleet, **changes))
    with pytest.raises(PlanError, match=words):
        check_obeyed(told, plan)
    assert [key.device for key in refused_slices(told.fleet, plan)] == [GPU]
    stale = replace(told.fleet, stale=("node0",))
    assert not refused_slices(stale, plan), "nothing is known of a silent node, and nothing moves there"


def test_a_refusal_stands_until_the_device_is_reported_otherwise_or_its_time_is_over():
    seen, known = fleet(2), Refusals(RETRY_S)
    assert known.around(seen, 0.0) is seen
    known.note((ONE,), "its place is held", 0.0)
    around = known.around(seen, 1.0)
    assert known.around(seen, 2.0) is around, "the same object: others know what they ask of it"
    assert around.device(GPU).foreign == (ONE,)
    assert places_refused(around, known.reasons) == {ONE.name: "its place is held"}
    known.note((SliceKey("node0/gpu1"),), "no clocks", 2.0)
    around = known.around(seen, 3.0)
    assert around.device(GPU).foreign == (ONE,), "a second refusal is not news of the first device"
    assert (around.device("node0/gpu1").closed, around.device("node0/gpu1").usable) == ("no clocks", False)
    busy = with_devices(seen, power_w=100.0, clock_mhz=900)
    assert known.around(busy, 4.0).device(GPU).foreign == (ONE,), "what it draws is no reason"
    mended = with_devices(seen, mig_pending=True)
    assert known.around(mended, 5.0).device(GPU).foreign == ()
    assert known.around(seen, 6.0).device("node0/gpu1").closed
    assert known.around(seen, 2.0 + RETRY_S) is seen
    assert not known.reasons


def test_a_refusal_of_an_agent_started_again_is_tried_again():
    seen, known = fleet(1), Refusals(RETRY_S)
    known.around(seen, 0.0)
    known.note((ONE,), "no", 0.0)
    again = FleetState(tuple(replace(node, epoch=node.epoch + 1) for node in seen.nodes))
    assert known.around(again, 1.0) is again


@pytest.mark.parametrize(("why", "forgotten"), [("create_ci: no", True), ("its credits cannot be", False)])
def test_a_slice_that_could_not_be_made_and_serves_is_refused_no_more(why, forgotten):
    status, known = SliceStatus(key=ONE, state=SliceState.FAILED, why=why), Refusals(RETRY_S)
    seen = with_devices(fleet(1), slices=(status,))
    known.around(seen, 0.0)
    known.note((ONE,), why, 0.0)
    assert known.around(seen, 1.0).device(GPU).foreign == (ONE,)
    made = with_devices(fleet(1), slices=(replace(status, state=SliceState.READY, why=""),))
    assert (known.around(made, 2.0) is made) == forgotten
    assert (not known.reasons) == forgotten


def test_a_refusal_names_its_slice_else_its_device():
    parts = tuple(PlannedSlice(SliceKey(GPU, "1g.5gb", at, 1)) for at in (0, 1))
    plan = NodePlan(node="node0", devices=(PlannedDevice(GPU, slices=parts), PlannedDevice("node0/gpu1")))
    assert refused_keys(plan, f"device {GPU}.slices = {parts[1].key.name!r}: held") == (parts[1].key,)
    assert refused_keys(plan, f"device {GPU}.clock_mhz = 7: not a clock") == (SliceKey(GPU),)
    assert refused_keys(plan, "digest = 1: another") == ()


def test_only_what_the_driver_does_not_make_counts_and_no_broken_model():
    whys = {0: "create_gi: no room", 1: "load: the model is broken", 2: "create_ci: no"}
    parts = tuple(
        SliceStatus(key=SliceKey(GPU, "1g.5gb", at, 1), state=SliceState.FAILED, why=why) for at, why in whys.items()
    )
    seen = with_devices(fleet(1), slices=parts)
    assert {key.start for key in unmakeable(seen, [part.key for part in parts])} == {0, 2}


@pytest.mark.parametrize("name", ["exact", "base"])
def test_what_a_slice_serves_and_the_repository_has_not_stops_no_plan(name):
    """An agent goes on reporting a family that was taken out of the repository while the controller was away."""
    planner, seen = planner_of("", policy(name)), view(rate=5.0, devices=fleet(2))
    plan = planner.plan(seen, np.random.default_rng(1)).plan
    foreign = {
        device.device: tuple(
            SliceStatus(part.key, state=SliceState.READY, hosted=(replace(part.hosted[0], family="gone", variant="v"),))
            for part in device.slices
        )
        for node in plan.nodes
        for device in node.devices
    }
    nodes = tuple(
        replace(node, devices=tuple(replace(d, slices=foreign[d.device]) for d in node.devices))
        for node in seen.fleet.nodes
    )
    gone = replace(plan.routes[0], family="gone")
    for current in (None, replace(plan, routes=(*plan.routes, gone))):
        one = replace(seen, fleet=FleetState(nodes), current=current)
        found = planner.plan(one, np.random.default_rng(1))
        assert found.plan is not None
        assert found.plan.hosted_families == {"digits"}
