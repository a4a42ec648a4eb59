"""The order in which devices are listed changes no plan: under other names, each type of device is planned alike."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from controller.planners.policy_parts import planner_of
from tests.support.cpus import cpu_view
from tests.support.planning import with_low_end
from tests.support.sharing import shared
from trefoil.core.brains import PlanView
from trefoil.core.device_types import A100_40GB, T4
from trefoil.core.fleet import FleetState
from trefoil.core.plan import Plan
from trefoil.core.policies import POLICIES

ORDERS = ((A100_40GB, A100_40GB, T4, T4), (T4, T4, A100_40GB, A100_40GB), (T4, A100_40GB, T4, A100_40GB))
ONLY_CPUS = ("vpa_plus", "fixed_size")
ONE_TYPE = ("alpaserve", "muserve")  # these planners refuse a mixed fleet


def relisted(one: PlanView, types) -> PlanView:
    """The view, the devices of its one node being of these types, in this order."""
    (node,) = one.fleet.nodes
    devices = tuple(replace(node.devices[0], device=f"node0/gpu{at}", type=kind) for at, kind in enumerate(types))
    return replace(one, fleet=FleetState((replace(node, devices=devices),)))


def by_type(one: PlanView, plan: Plan | None):
    """What a plan is but for the names of devices: what stands on each type, and how much goes there."""
    if plan is None:
        return None
    kinds = {d.device: d.type.name for node in one.fleet.nodes for d in node.devices}
    devices = Counter(
        (
            kinds[d.device], d.target, d.clock_min_mhz, d.clock_max_mhz,
            tuple(sorted((s.key.slice_type, s.key.start, str(s.hosted), s.credits) for s in d.slices)),
        )
        for node in plan.nodes for d in node.devices
    )  # fmt: skip
    targets = Counter(
        (route.family, kinds[t.slice.device], t.slice.slice_type, t.variant, round(t.weight, 6))
        for route in plan.routes
        for t in route.targets
    )
    return devices, targets


@pytest.mark.parametrize("families", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_devices_listed_in_another_order_are_planned_alike(name, families):
    if name in ONLY_CPUS:
        views = [cpu_view(40.0, *cores) for cores in ((8, 20), (20, 8))]
    else:
        one = with_low_end(shared([0.4] * families))
        views = [relisted(one, types) for types in ORDERS]
    found = [planner_of("", POLICIES[name]).plan(each, np.random.default_rng(3)) for each in views]
    if POLICIES[name].planner not in ONE_TYPE:
        assert found[0].plan is not None, found[0].degraded
    first, *others = [by_type(view, decision.plan) for view, decision in zip(views, found, strict=True)]
    assert all(other == first for other in others)
