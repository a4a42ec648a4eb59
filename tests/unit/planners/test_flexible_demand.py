"""Devices that jobs need in this hour stay awake, or are woken, and never cost requests anything."""

from dataclasses import replace

import numpy as np
import pytest

from controller.planners.exact.planner import ExactPlanner
from controller.planners.planner_settings import ExactSettings
from tests.support.planning import digits, fleet, objective, view
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.jobs.planned import FlexibleDemand
from trefoil.runtime import codec

RATES = {"digits": 100.0, "letters": 5.0}


def decided(one):
    return ExactPlanner().plan(one, np.random.default_rng(1))


def awake(decision) -> int:
    return sum(bool(device.slices) for node in decision.plan.nodes for device in node.devices)


def needing(devices: int, **changes):
    flexible = (FlexibleDemand("digits", "test", 50.0, devices=devices),)
    return replace(view(rate=5.0, devices=fleet(4)), flexible=flexible, **changes)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_devices_for_jobs_are_awake(devices):
    alone = decided(view(rate=5.0, devices=fleet(4)))
    assert awake(alone) == 1
    found = decided(needing(devices))
    assert awake(found) == devices
    assert found.why.endswith(f"at least {devices} GPUs awake for requests and jobs of this hour")
    assert found.plan.objectives == alone.plan.objectives, "the objective stays the operator's"


@pytest.mark.parametrize("clocks", ["highest", "planned"])
@pytest.mark.parametrize("devices", [2, 4])
def test_gpus_that_wake_for_jobs_are_full_of_slices_and_requests_keep_their_accuracy(devices, clocks):
    planner = ExactPlanner(ExactSettings(clocks=clocks))
    one = needing(devices)
    alone, found = (planner.plan(v, np.random.default_rng(1)).plan for v in (replace(one, flexible=()), one))
    cut = [sum(s.key.size for s in d.slices) for node in found.nodes for d in node.devices if d.slices]
    assert len(cut) == devices
    assert min(cut) >= 6, "of eight memory slices"
    assert found.expected["digits"].capacity_per_s >= devices * alone.expected["digits"].capacity_per_s
    assert found.expected["digits"].accuracy >= alone.expected["digits"].accuracy - 1e-4


def test_gpus_awake_for_spread_alone_are_filled_too():
    one = replace(needing(2), objectives=(objective(spread_min=2),))
    alone, found = (decided(v).plan for v in (replace(one, flexible=()), one))
    cut = [sum(s.key.size for s in d.slices) for node in found.nodes for d in node.devices if d.slices]
    assert min(cut) >= 6, "of eight memory slices"
    assert found.expected["digits"].capacity_per_s > 2 * alone.expected["digits"].capacity_per_s


@pytest.mark.parametrize("margin", [0.005, -0.02])
def test_a_margin_of_accuracy_counts_once(margin):
    one = replace(needing(3), objectives=(objective(params={"accuracy_margin": margin}),))
    alone, found = (decided(v).plan for v in (replace(one, flexible=()), one))
    assert found.expected["digits"].accuracy == pytest.approx(alone.expected["digits"].accuracy, abs=1e-3)


def test_a_plan_with_room_for_jobs_is_told_and_tried_at_the_load_that_is():
    views = []
    planner = ExactPlanner(refuses=lambda view, _plan: views.append(view) or "")
    one = needing(4)
    alone, found = (planner.plan(v, np.random.default_rng(1)).plan for v in (replace(one, flexible=()), one))
    assert {(o.mode, o.min_accuracy) for view in views for o in view.objectives} == {
        (o.mode, o.min_accuracy) for o in one.objectives
    }
    assert {d.rate_per_s for view in views for d in view.demand} == {5.0}
    assert "digits: 5.0/s" in found.why
    watts = [found.expected["digits"].joules_per_request * 5, alone.expected["digits"].joules_per_request * 5]
    assert watts[0] - watts[1] == pytest.approx(3 * 20, rel=0.1), "three GPUs idle instead of asleep"


def test_jobs_that_ask_for_more_accuracy_have_slices_for_it():
    flexible = (FlexibleDemand("digits", "test", 50.0, accuracy_floor=0.99, devices=3),)
    found = decided(replace(needing(3), flexible=flexible)).plan
    slices = [s for node in found.nodes for device in node.devices for s in device.slices]
    assert sum(s.key.size for s in slices if s.hosted[0].variant == "l") >= 2 * 6, "of eight in each of two GPUs"


def test_what_requests_need_anyway_is_no_more_for_jobs():
    found, alone = decided(needing(1)), decided(view(rate=5.0, devices=fleet(4)))
    assert [node.devices for node in found.plan.nodes] == [node.devices for node in alone.plan.nodes]


def test_jobs_cost_requests_no_rung():
    """Two devices awake are more than the cap allows: then jobs have none of their own."""
    capped = needing(4, max_watts=200.0)
    alone = decided(replace(capped, flexible=()))
    assert alone.plan is not None
    assert not alone.degraded
    found = decided(capped)
    reason = "; requests and jobs of this hour need 4 GPUs awake, which cannot be: watt_cap: the fleet may take 200 W, "
    assert found.why.startswith(f"{alone.why}{reason}")
    assert found.plan == replace(alone.plan, why=found.why)
    assert replace(found, plan=alone.plan, why=alone.why) == alone


def test_more_devices_than_there_are_is_all_of_them():
    assert awake(decided(needing(100))) == 4


def of_two(gpus: int, devices: int, **own: int):
    """Whole GPUs: digits need five of them for requests, letters one; families in `own` have jobs."""
    families = tuple(replace(digits().families[0], name=name) for name in RATES)
    rows = [replace(one, family=name) for name in RATES for one in digits().rows if one.slice_type == "7g.40gb"]
    flexible = tuple(FlexibleDemand(name, "test", 10.0, 0.0, devices, need) for name, need in own.items())
    return replace(
        view(
            catalog=Catalog(families, tuple(rows)), devices=fleet(gpus),
            wanted=[objective(family=name) for name in RATES],
            demand=[Demand(name, "", rate, 1.2 * rate, 1.0, 1.0) for name, rate in RATES.items()],
        ),
        flexible=flexible,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "devices", "own", "awake_of"),
    [
        (20, 6, {"letters": 1}, {"digits": 5, "letters": 1}),
        (20, 6, {"digits": 5, "letters": 1}, {"digits": 5, "letters": 1}),
        (10, 8, {"digits": 5, "letters": 3}, {"digits": 5, "letters": 3}),
        (10, 8, {"digits": 7, "letters": 1}, {"digits": 7, "letters": 1}),
        (10, 10, {"digits": 7, "letters": 4}, {"digits": 7, "letters": 3}),
    ],
)
def test_devices_for_jobs_of_two_families_are_those_of_the_fleet(gpus, devices, own, awake_of):
    found = decided(of_two(gpus, devices, **own))
    assert awake(found) == devices
    planned = [device for node in found.plan.nodes for device in node.devices]
    assert {name: sum(name in device.families for device in planned) for name in RATES} == awake_of
    assert found.why.endswith(f"at least {devices} GPUs awake for requests and jobs of this hour")


def test_a_view_without_jobs_is_written_as_ever_and_one_with_them_is_read_back():
    assert "flexible" not in codec.to_json(view())
    one = needing(2)
    assert codec.from_json(type(one), codec.to_json(one)) == one
