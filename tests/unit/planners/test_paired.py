"""CARBONDIS's fleets: who gets which GPU, what is refused, what is lost."""

import re
from dataclasses import replace

import pytest

from controller.planners.paired import PairedPlanner, PairedSettings, highperf, lowenergy
from tests.support.planning import with_low_end
from tests.support.sharing import decide, shared
from trefoil.core.device_types import T4
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import DeviceState
from trefoil.core.plan_check import check


def two_tiers(jobs=2, high=2, low=2):
    return with_low_end(shared([0.2] * jobs, gpus=high), low)


def hosts(plan):
    return {
        device.device.split("/")[1]: sorted(h.family for part in device.slices for h in part.hosted)
        for node in plan.nodes
        for device in node.devices
    }


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (PairedPlanner, {"gpu0": ["f0", "f1"], "gpu1": [], "t4-0": ["f0"], "t4-1": ["f1"]}),
        (highperf, {"gpu0": ["f0"], "gpu1": ["f1"], "t4-0": [], "t4-1": []}),
        (lowenergy, {"gpu0": [], "gpu1": [], "t4-0": ["f0"], "t4-1": ["f1"]}),
    ],
)
def test_each_fleet_is_the_paper_s_and_all_others_sleep(make, expected):
    one = two_tiers()
    plan = decide(make(PairedSettings()), one).plan
    check(plan, one.fleet, one.catalog, one.demand)
    assert hosts(plan) == expected
    asleep = {d.device.split("/")[1] for n in plan.nodes for d in n.devices if d.target == DeviceState.ASLEEP}
    assert asleep == {name for name, families in expected.items() if not families}
    assert {t.credits for route in plan.routes for t in route.targets} == {1}
    tiers = {(t.slice.device.split("/")[1][:2], t.tier) for route in plan.routes for t in route.targets}
    assert tiers <= {("gp", "high"), ("t4", "low")}


@pytest.mark.parametrize(("make", "tier"), [(highperf, "gpu"), (lowenergy, "t4-")])
def test_all_gpus_of_a_tier_are_dealt_to_the_jobs_in_turn(make, tier):
    plan = decide(make(PairedSettings()), two_tiers(2, 3, 3)).plan
    found = {name: families for name, families in hosts(plan).items() if families}
    assert found == {f"{tier}0": ["f0"], f"{tier}1": ["f1"], f"{tier}2": ["f0"]}


def test_a_route_names_the_joules_of_a_request_on_each_tier():
    one = two_tiers()
    (params, _) = (route.params for route in decide(PairedPlanner(), one).plan.routes)
    for tier in ("low", "high"):
        kind = T4.name if tier == "low" else "A100-SXM4-40GB"
        shape = "whole" if tier == "low" else "7g.40gb"
        row = one.catalog.lookup(kind, shape, "f0", "l", 1410)
        assert params[f"{tier}_j"] + params[f"{tier}_item_j"] == pytest.approx(row.energy_active_j_per_batch)


def test_two_gpus_may_be_shared():
    plan = decide(PairedPlanner(PairedSettings(high_shared=2)), two_tiers()).plan
    assert hosts(plan)["gpu0"] == hosts(plan)["gpu1"] == ["f0", "f1"]


def test_who_loses_its_low_end_gpu_is_served_by_the_high_end_one_and_nobody_else_moves():
    one = two_tiers()
    (node,) = one.fleet.nodes
    lost = tuple(replace(d, state=DeviceState.LOST) if d.device.endswith("t4-0") else d for d in node.devices)
    plan = decide(PairedPlanner(), replace(one, fleet=replace(one.fleet, nodes=(replace(node, devices=lost),)))).plan
    assert hosts(plan) == {"gpu0": ["f0", "f1"], "gpu1": [], "t4-0": [], "t4-1": ["f1"]}


@pytest.mark.parametrize(
    ("make", "high", "low", "says"),
    [
        (PairedPlanner, 1, 1, r"low-end GPUs = 1: 2 jobs need 2 low-end GPUs.*Remedy: add GPUs"),
        (PairedPlanner, 0, 2, r"high-end GPUs = 0: 2 jobs need 1 high-end GPUs"),
        (highperf, 1, 2, r"high-end GPUs = 1: 2 jobs need 2 high-end GPUs"),
    ],
)
def test_too_few_gpus_of_a_tier_are_no_plan(make, high, low, says):
    one = two_tiers(2, max(1, high), low)
    if not high:
        (node,) = one.fleet.nodes
        rest = tuple(d for d in node.devices if "gpu" not in d.device)
        one = replace(one, fleet=replace(one.fleet, nodes=(replace(node, devices=rest),)))
    found = decide(make(PairedSettings()), one)
    assert found.plan is None
    assert found.degraded.startswith("no_plan")
    assert re.search(says, found.degraded), found.degraded


def test_a_gpu_without_a_profile_is_named():
    one = two_tiers()
    rows = tuple(r for r in one.catalog.rows if not (r.device_type == T4.name and r.family == "f1"))
    found = decide(PairedPlanner(), replace(one, catalog=replace(one.catalog, rows=rows)))
    assert found.plan is None
    assert "no profile of l on whole of Tesla T4" in found.degraded
    assert "f1" in found.degraded


def test_a_batch_size_beyond_the_profile_is_refused():
    one = two_tiers()
    demand = tuple(replace(d, items_mean=9.0) if d.family == "f1" else d for d in one.demand)
    found = decide(PairedPlanner(), replace(one, demand=demand))
    assert found.plan is None
    assert "batch size of f1 = 9.0" in found.degraded
    assert "Remedy: profile larger batches" in found.degraded


def test_families_that_do_not_fit_the_shared_gpu_are_refused():
    one = with_low_end(shared([0.2] * 4, gpus=1, memory_mib=12_000), 4)
    found = decide(PairedPlanner(), one)
    assert found.plan is None
    assert "MiB are missing" in found.degraded


def test_a_job_without_an_sla_is_refused():
    one = two_tiers()
    families = tuple(replace(f, classes={}) for f in one.catalog.families)
    wanted = tuple(replace(o, slo_ms=0.0) for o in one.objectives)
    with pytest.raises(InvalidInput, match=r"objective f0: slo.*set slo\.latency_ms"):
        decide(
            PairedPlanner(),
            replace(one, objectives=wanted, catalog=replace(one.catalog, families=families)),
        )
