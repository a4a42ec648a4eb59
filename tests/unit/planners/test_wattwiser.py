"""WATTWISER beside its paper: rates, allocations and what is refused, lost and silent nodes, what changes nothing."""

import dataclasses
import math
import time

import pytest

from controller.loop.core.decision import reconfigures
from controller.planners.gpu_allocation import AllocationSettings, with_device
from controller.planners.planning_input import read_view
from controller.planners.policy_parts import planner_of, presets_of
from controller.planners.wattwiser import (
    UniformSettings,
    WattWiserPlanner,
    WattWiserSettings,
    packed_uniform,
    sharing_aware,
    uniform,
)
from tests.support.sharing import MAX_RPS, carried_per_s, catalog, decide, serving, settled, shared, weights_of
from trefoil.core.brains import PlanView
from trefoil.core.demand import LoadForecast
from trefoil.core.device_types import A100_40GB, slice_type
from trefoil.core.errors import InvalidInput, SettingError
from trefoil.core.fleet import FleetState
from trefoil.core.plan_check import check
from trefoil.core.policies import policy
from trefoil.runtime import codec

CATALOG = catalog([f"f{i}" for i in range(10)])
ALL = (WattWiserPlanner, sharing_aware, packed_uniform, uniform)
WHOLE_MIB = slice_type(A100_40GB, "7g.40gb").memory_mib
GPUS = {f"gpu{i}": f"node0/gpu{i}" for i in range(4)}


def allocated(**mine):
    return {"devices": {family: tuple(f"node0/{name}" for name in names.split()) for family, names in mine.items()}}


def batches(one: PlanView, *points: tuple[int, float]) -> PlanView:
    """The view, its families forming batches, their best variant profiled on whole GPUs in (batch, latency in ms)."""
    best = [r for r in one.catalog.rows if (r.slice_type, r.variant) == ("7g.40gb", "l")]
    rows = tuple(
        dataclasses.replace(
            row, batch=n, latency_ms_p50=ms, latency_ms_p95=ms, latency_ms_p99=ms, throughput_per_s=1000 * n / ms
        )
        for row in best
        for n, ms in points
    )
    families = tuple(dataclasses.replace(family, batching=True) for family in one.catalog.families)
    return dataclasses.replace(one, catalog=dataclasses.replace(one.catalog, families=families, rows=rows))


@pytest.mark.parametrize("make", ALL)
def test_what_is_planned_is_legal_and_has_credits_for_two_batches(make):
    one = batches(shared([0.5, 0.5], 4), (1, 10.0), (4, 20.0))
    decision = decide(make(UniformSettings() if make is uniform else AllocationSettings()), one)
    check(decision.plan, one.fleet, one.catalog, one.demand)
    assert decision.next_tick_at_s == one.now_s + 1
    assert {t.credits for route in decision.plan.routes for t in route.targets} == {8}
    fixed = decide(make((UniformSettings if make is uniform else AllocationSettings)(credits=3)), one).plan
    assert {t.credits for route in fixed.routes for t in route.targets} == {3}


@pytest.mark.parametrize(
    ("settings", "params", "capacity"),
    [
        ({}, {}, 0.0),
        ({"model_max_rps": 70.0}, {}, 70.0),
        ({"model_max_rps": 70.0}, {"model_max_rps": 50.0}, 50.0),
    ],
)
def test_model_max_rps_is_what_a_gpu_carries_or_what_is_given(settings, params, capacity):
    one = shared([0.1], 2)
    joins = batches(one, (1, 10.0), (4, 20.0), (8, 40.0))
    for each in (one, joins):
        each = dataclasses.replace(each, objectives=(dataclasses.replace(each.objectives[0], params=params),))
        plan = decide(WattWiserPlanner(WattWiserSettings(**settings, gpus_shared=0)), each).plan
        assert plan.expected["f0"].capacity_per_s == pytest.approx(capacity or carried_per_s(each.catalog))


def test_batches_are_counted_on_where_they_form_and_nowhere_else():
    joins = batches(shared([0.1], 2), (1, 10.0), (4, 20.0), (8, 40.0))
    alone = dataclasses.replace(joins.catalog.families[0], batching=False)
    joined = carried_per_s(joins.catalog)
    assert joined > 1.3 * carried_per_s(dataclasses.replace(joins.catalog, families=(alone,)))
    assert joined < 8 / 0.040, "below what a GPU computes that always has full batches"


def test_requests_of_several_items_take_as_much_of_a_gpu():
    one = shared([0.1], 2)
    many = dataclasses.replace(
        one,
        demand=(dataclasses.replace(one.demand[0], items_mean=2.0),),
        objectives=(dataclasses.replace(one.objectives[0], slo_ms=130.0),),
    )
    capacity = decide(WattWiserPlanner(), many).plan.expected["f0"].capacity_per_s
    assert capacity == pytest.approx(carried_per_s(many.catalog, 2.0, 130.0))
    assert capacity == pytest.approx(MAX_RPS / 2, rel=0.15), "but for the transport, twice the time in twice the SLO"


def test_a_request_that_is_too_slow_alone_is_served_and_said():
    decision = decide(WattWiserPlanner(), batches(shared([0.1], 2), (1, 64.0)))
    assert decision.plan is not None
    assert "slo_missed: f0 takes 66.0 ms alone, of 65 ms" in decision.degraded


def test_more_than_all_allocated_gpus_carry_is_said_and_split_by_what_each_may_carry():
    decision = decide(WattWiserPlanner(), shared([2.0, 0.5]))
    assert f"short_of_capacity: {1.5 * MAX_RPS:.1f}/s of f0, {2 * MAX_RPS:.1f}/s asked" in decision.degraded
    assert weights_of(decision.plan, "f0") == pytest.approx({"gpu0": 2 / 3, "gpu1": 1 / 3}, abs=1e-6)


def test_the_same_load_gives_the_same_plan_and_another_one_other_shares_alone():
    planner = planner_of("", policy("wattwiser"))
    plan = settled(planner, [1.2, 0.5])
    same = decide(planner, shared([1.2, 0.5], current=plan))
    assert same.plan.content_digest == plan.content_digest
    other = decide(planner, shared([1.3, 0.5], current=plan)).plan
    assert other.content_digest != plan.content_digest
    assert not reconfigures(plan, other)


def test_a_gpu_of_weight_0_stays_awake_and_is_no_target():
    plan = settled(WattWiserPlanner(), [1.2, 0.5])
    after = decide(WattWiserPlanner(), shared([0.95, 0.5], current=plan)).plan
    assert serving(after, "f0") == ["gpu0", "gpu1"]
    assert weights_of(after, "f0") == {"gpu0": 1.0}


def test_growth_that_is_expected_wakes_a_gpu_before_it_is_needed():
    def seen(current):
        one = shared([0.9, 0.5], current=current)
        mean, high = 0.9 * MAX_RPS, 1.15 * MAX_RPS
        forecast = LoadForecast("f0", horizon_s=10.0, mean_per_s=mean, p90_per_s=high, max_per_s=mean)
        return dataclasses.replace(one, demand=(dataclasses.replace(one.demand[0], forecast=forecast), one.demand[1]))

    for lookahead_s, gpus in ((0.0, 1), (3.0, 1), (6.0, 2)):
        planner = WattWiserPlanner(WattWiserSettings(wake_lookahead_s=lookahead_s))
        assert len(serving(decide(planner, seen(None)).plan, "f0")) == gpus


# --- allocations ----------------------------------------------------------------------------------------------------


def test_families_take_devices_in_turn_and_share_one_with_the_next():
    plan = decide(sharing_aware(AllocationSettings()), shared([1.2, 0.9, 1.2], 6)).plan
    assert [serving(plan, f"f{i}") for i in range(3)] == [["gpu0", "gpu1"], ["gpu1", "gpu2"], ["gpu2", "gpu3"]]
    assert [d.target.name for d in plan.nodes[0].devices] == ["AWAKE"] * 4 + ["ASLEEP"] * 2


def test_an_operators_allocation_goes_before_the_default_of_that_family():
    plan = decide(WattWiserPlanner(), shared([0.5, 1.4], 4, **allocated(f0="gpu2 gpu3"))).plan
    assert serving(plan, "f0") == ["gpu3"], "of its own before that which it shares"
    assert serving(plan, "f1") == ["gpu1", "gpu2"]


def test_what_is_allocated_no_longer_is_served_no_longer():
    plan = settled(WattWiserPlanner(), [1.2, 0.5])
    after = decide(WattWiserPlanner(), shared([0.5, 0.5], current=plan, **allocated(f0="gpu1"))).plan
    assert serving(after, "f0") == ["gpu1"]


@pytest.mark.parametrize(
    ("loads", "changes", "words"),
    [
        ((0.1, 0.1), {"gpus": 2}, ("gpus_per_family = 2", "f1 would need device 3 of 2", "add devices")),
        ((0.1,), allocated(f0="gpu7"), ("devices of f0 = 'node0/gpu7'", "no node reports", "node0/gpu0, node0/gpu1")),
        (
            (0.1, 0.1),
            {"memory_mib": 25_000},
            ("families on node0/gpu1", "['f0', 'f1']", f"{50_400 - WHOLE_MIB} MiB are missing"),
        ),
        (
            (0.1,) * 10,
            {"memory_mib": 5000, **allocated(**{f"f{i}": "gpu0" for i in range(10)})},
            (f"need 50400 MiB of {WHOLE_MIB}: {50_400 - WHOLE_MIB} MiB are missing", "allocate fewer"),
        ),
    ],
)
def test_what_cannot_be_allocated_is_refused_by_field_value_and_remedy(loads, changes, words):
    decision = decide(WattWiserPlanner(), shared(loads, **changes))
    assert decision.plan is None
    assert decision.degraded.startswith("no_plan: ")
    assert [word for word in words if word not in decision.degraded] == []


def test_a_rate_that_cannot_be_is_refused():
    one = shared([0.1], 2)
    one = dataclasses.replace(one, objectives=(dataclasses.replace(one.objectives[0], params={"model_max_rps": -1.0}),))
    assert "model_max_rps" in decide(WattWiserPlanner(), one).degraded


def test_numbers_that_are_no_allocation_are_refused():
    assert "at least one GPU each" in decide(WattWiserPlanner(WattWiserSettings(gpus_shared=3)), shared([0.1])).degraded
    for settings in ({"gpus_per_family": 0}, {"gpus_shared": -1}):
        with pytest.raises(SettingError, match="gpus_"):
            WattWiserSettings.made_of(settings)


def test_ten_families_on_one_gpu_are_served_where_they_fit():
    one = shared((0.05,) * 10, **allocated(**{f"f{i}": "gpu0" for i in range(10)}))
    decision = decide(WattWiserPlanner(), one)
    check(decision.plan, one.fleet, one.catalog, one.demand)
    (part,) = decision.plan.nodes[0].devices[0].slices
    assert len(part.hosted) == 10


def test_a_family_without_a_profile_or_an_objective_is_no_plan():
    one = shared([0.1, 0.1])
    rows = tuple(r for r in one.catalog.rows if r.slice_type != "7g.40gb")
    bare = dataclasses.replace(one, catalog=dataclasses.replace(one.catalog, rows=rows))
    assert "no profile of l on 7g.40gb" in decide(WattWiserPlanner(), bare).degraded
    assert "no objective" in decide(WattWiserPlanner(), dataclasses.replace(one, objectives=())).degraded


# --- devices come and go --------------------------------------------------------------------------------------------


def cordoned(one: PlanView, name: str) -> PlanView:
    (node,) = one.fleet.nodes
    devices = tuple(
        dataclasses.replace(d, cordon="test", slices=()) if d.device == GPUS[name] else d for d in node.devices
    )
    return dataclasses.replace(one, fleet=FleetState((dataclasses.replace(node, devices=devices),)))


def test_a_gpu_out_of_service_is_replaced_and_nobody_else_moves():
    plan = settled(WattWiserPlanner(), [0.5, 1.2])
    after = decide(WattWiserPlanner(), cordoned(shared([0.5, 1.2], current=plan), "gpu0")).plan
    assert (serving(after, "f0"), serving(after, "f1")) == (["gpu1"], ["gpu1", "gpu2"])


def test_a_family_none_of_whose_gpus_can_be_used_is_no_plan():
    one = cordoned(shared([0.5], 3, **allocated(f0="gpu0")), "gpu0")
    decision = decide(WattWiserPlanner(), one)
    assert "none of its devices can be used now" in decision.degraded
    assert decision.next_tick_at_s == math.inf


def test_nothing_moves_on_a_silent_node():
    plan = settled(WattWiserPlanner(), [1.2, 0.5])
    one = shared([0.1, 0.5], current=plan)
    silent = dataclasses.replace(one, fleet=dataclasses.replace(one.fleet, stale=frozenset({"node0"})))
    decision = decide(WattWiserPlanner(), silent)
    assert serving(decision.plan, "f0") == ["gpu0", "gpu1"]
    assert weights_of(decision.plan, "f0") == {"gpu0": 1.0}
    unknown = dataclasses.replace(silent, current=None)
    assert serving(decide(WattWiserPlanner(), unknown).plan, "f0") == ["gpu0", "gpu1"], "what stands there serves"


# --- records --------------------------------------------------------------------------------------------------------


def test_a_family_is_loaded_onto_one_more_device_and_unloaded_from_one():
    one = read_view(shared([0.1, 0.1], gpus=4), 1.0)
    more = with_device(one, AllocationSettings(), "f0", "node0/gpu2", True)
    assert more.gpus["f0"] == ("node0/gpu0", "node0/gpu1", "node0/gpu2")
    assert more.sharing_factor == {"node0/gpu0": 1, "node0/gpu1": 2, "node0/gpu2": 2}
    less = with_device(one, AllocationSettings(), "f1", "node0/gpu1", False)
    assert (less.gpus["f1"], less.sharing_factor["node0/gpu1"]) == (("node0/gpu2",), 1)
    alone = read_view(shared([0.1], **allocated(f0="gpu1")), 1.0)
    for device, load, words in (
        ("node0/gpu7", True, ("devices of f0", "node0/gpu7", "no node reports")),
        ("node0/gpu1", False, ("the last copy of f0", "load it onto another device first")),
        ("node0/gpu0", False, ("f0 is not loaded there", "unload it from one of node0/gpu1")),
    ):
        with pytest.raises(InvalidInput) as error:
            with_device(alone, AllocationSettings(), "f0", device, load)
        assert all(word in str(error.value) for word in words), error.value


def test_objectives_bear_devices_and_those_of_older_records_are_still_read():
    one = shared([0.1], **allocated(f0="gpu1 gpu2"))
    text = codec.to_json(one)
    assert codec.from_json(PlanView, text) == one
    older = text.replace('"devices":["node0/gpu1","node0/gpu2"],', "")
    assert older != text
    assert codec.from_json(PlanView, older).objectives[0].devices == ()


@pytest.mark.parametrize("name", ["wattwiser", "sharing_aware", "packed_uniform", "uniform"])
def test_every_policy_of_the_paper_has_a_row_and_one_of_them_a_preset(name):
    row = policy(name)
    assert (row.planner, row.router) == (name, "weighted")
    assert decide(planner_of("", row), shared([0.1], 2)).plan.policy == name
    assert ("literal" in presets_of(row)) == (name == "wattwiser")
    assert "artifact" not in presets_of(row)


def test_ten_families_on_sixteen_gpus_take_a_millisecond(capsys):
    """Reading the view, the plan and the parts of its row, in processor time; the bound is for a busy machine."""
    planner, took = planner_of("", policy("wattwiser")), []
    plan = settled(planner, [1.1] * 10, 16)
    for number in range(100):
        one = shared([1.1 + 0.001 * number] * 10, 16, plan)
        one = dataclasses.replace(one, catalog=CATALOG)
        started = time.process_time()
        assert decide(planner, one).plan is not None
        took.append(1e3 * (time.process_time() - started))
    with capsys.disabled():
        print(f" ten families on sixteen GPUs: median {sorted(took)[50]:.2f} ms", end=";")
    assert sorted(took)[50] < 5.0
