"""Whatever others hold of a fleet, every policy's plan is one that its agents take, and what is left is used."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controller.observe.core.plannable import usable_type
from controller.planners.policy_parts import planner_of
from power_agent.slices.core.reconcile import SeenDevice, refuse_plan
from tests.support.planning import applied, fleet, objective, view
from trefoil.core.brains import PlanView
from trefoil.core.device_types import A100_40GB, placements
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import DeviceState, FleetState, SliceKey
from trefoil.core.plan import Plan
from trefoil.core.plan_check import check
from trefoil.core.policies import chosen, policy

CUT = ("exact", "static_mix", "base", "co2opt", "infadapter")  # policies that cut GPUs
WHOLE = ("wattwiser", "alpaserve", "muserve")
QUICK = {"frontier_solves": 3, "kernel_requests": 1000}
CALM = settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@st.composite
def held(draw: st.DrawFn, device: str) -> dict[str, object]:
    """What an agent reports of a device that others hold a part of."""
    layout = draw(st.sampled_from(placements(A100_40GB)))
    mine = draw(st.sets(st.integers(0, len(layout) - 1), max_size=2))
    changes: dict[str, object] = {"foreign": tuple(SliceKey(device, *layout[at]) for at in sorted(mine))}
    if draw(st.integers(0, 5)) == 0:
        changes["lacks"] = tuple(sorted(draw(st.sets(st.sampled_from(["7g.40gb", "4g.20gb", "1g.5gb"]), min_size=1))))
    if draw(st.integers(0, 7)) == 0:
        changes["closed"] = "held by others"
    return changes


def told(seen: FleetState, changes: list[dict[str, object]]) -> FleetState:
    """The fleet with what others hold of each device; their places hold nothing of ours."""
    node = seen.nodes[0]
    devices = []
    for device, change in zip(node.devices, changes, strict=True):
        found = replace(device, **change)
        clear = tuple(s for s in found.slices if not any(s.key.overlaps(other) for other in found.foreign))
        devices.append(replace(found, slices=clear))
    return FleetState((replace(node, devices=tuple(devices)),), seen.stale)


def agents_take(one: PlanView, plan: Plan) -> None:
    """As the agents themselves judge it."""
    for node, planned in zip(one.fleet.nodes, plan.nodes, strict=True):
        seen = tuple(
            SeenDevice(d.device, d.type, d.state, d.mig_current, (), d.foreign, closed=d.closed, lacks=d.lacks)
            for d in node.devices
        )
        refuse_plan(planned, node.node, seen, one.catalog)


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
@given(data=st.data(), gpus=st.integers(2, 4), rate=st.floats(1.0, 60.0))
@CALM
def test_no_agent_refuses_a_plan_and_what_others_leave_comes_back(name, data, gpus, rate):
    row = policy(name)
    row = chosen(row, {}, {"planner": QUICK}) if name in CUT[:2] else row
    planner, seen, current = planner_of("", row), fleet(gpus), None
    for _ in range(2):
        changes = [data.draw(held(d.device)) for d in seen.nodes[0].devices]
        one = view(rate=rate, devices=told(seen, changes), current=current, wanted=[objective(min_accuracy=0.94)])
        try:
            decision = planner.plan(one, np.random.default_rng(1))
        except InvalidInput:  # a fleet that this policy cannot be planned on: `run_planner` makes it a reason
            continue
        if decision.plan is None:
            assert decision.degraded
            continue
        plan = decision.plan
        check(plan, one.fleet, one.catalog, one.demand)
        agents_take(one, plan)
        seen, current = applied(plan, one.fleet), plan
        if name in ("base", "co2opt"):  # they use all that there is
            used = {d.device for d in plan.nodes[0].devices if d.slices}
            free = {d.device for d in one.fleet.nodes[0].devices if d.usable and placements(usable_type(d))}
            assert used == free
    bare = [{"foreign": (), "lacks": (), "closed": "", "state": DeviceState.AWAKE}] * gpus
    if current is not None and name == "base":
        one = view(rate=rate, devices=told(seen, bare), current=current)
        plan = planner.plan(one, np.random.default_rng(1)).plan
        assert {p.key.slice_type for d in plan.nodes[0].devices for p in d.slices} == {"7g.40gb"}
