"""Planners of CPU slices: where slices lie, what is refused, and how rows of a CPU are read."""

from dataclasses import replace

import numpy as np
import pytest

from controller.planners.columns import class_column
from controller.planners.infadapter.cpu_slices import lay_out
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import Device, HostedSlice, read_view
from controller.planners.policy_parts import planner_of
from controller.planners.profile_rows import CatalogKey
from controller.rollout.core.rollout_inputs import rollout_refusal
from tests.support.cpus import PUBLISHED, cpu_fleet, cpu_view
from tests.support.planning import applied, fleet
from tests.support.planning import view as gpu_view
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import RANGED_CORES_MAX, device_type
from trefoil.core.errors import PlanError
from trefoil.core.fleet import FleetState, SliceKey, SliceState
from trefoil.core.plan_check import check
from trefoil.core.policies import Policy
from trefoil.core.queueing import rate_max

CPU48 = device_type("cpu:48")


def planned(view, name="infadapter", **settings):
    return planner_of("", Policy("t", name, settings={"planner": settings})).plan(view, np.random.default_rng(1))


def rows(keep=None, change=None):
    kept = (row for row in PUBLISHED.rows if keep is None or keep(row))
    return Catalog(PUBLISHED.families, tuple(change(row) if change else row for row in kept))


def as_slow_as(milliseconds):
    """Rows with a latency by the cores of the row."""

    def change(row):
        ms = milliseconds(float(row.slice_type.partition(":")[2]))
        return replace(row, latency_ms_p50=ms, latency_ms_p95=ms, latency_ms_p99=ms)

    return change


def as_quotas(row):
    return replace(row, slice_type=f"quota:{row.slice_type.removeprefix('cpu:')}.0")


@pytest.mark.parametrize("name", ["infadapter", "ms_plus", "vpa_plus", "fixed_size"])
@pytest.mark.parametrize(
    ("catalog", "settings", "words"),
    [
        (rows(lambda r: r.variant != "resnet50" or r.slice_type == "cpu:4"), {},
         ("profile of resnet50", "one size gives no line", "two sizes")),
        (rows(change=as_slow_as(lambda n: 100 * n * n)), {},
         ("profile of resnet18", "its capacity does not grow with cores", "requests/s a core", "again")),
        (Catalog(PUBLISHED.families, ()), {}, ("fleet", "no CPUs to cut", "profile")),
        (PUBLISHED, {"core_step": 0.5}, ("no CPU profile", "quota:", "core_step")),
        (PUBLISHED, {"budget_cores": 1.0, "cores_min": 2.0}, ("budget_cores", "1.0", "at least 2 cores")),
        (PUBLISHED, {"core_step": 0.25}, ("core_step", "0.25", "tenths")),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_no_plan_and_names_field_value_and_remedy(name, catalog, settings, words):
    view = cpu_view(75.0, 20, catalog=catalog)
    decision = planned(view, name, **settings)
    assert decision.plan is None
    assert decision.degraded.startswith("no_plan: ")
    for word in words:
        assert word in decision.degraded
    assert decision.next_tick_at_s > view.now_s


def test_a_budget_below_the_smallest_variant_in_time_is_refused():
    slow = rows(change=as_slow_as(lambda n: 9e3 / n))
    decision = planned(cpu_view(75.0, 20, catalog=slow), budget_cores=8.0)
    assert decision.plan is None
    for word in ("below the smallest size of resnet18", "budget_cores", "8.0", "more cores, or a later SLO"):
        assert word in decision.degraded


def test_a_load_above_all_capacity_has_the_smallest_variant_on_all_cores_and_says_so():
    decision = planned(cpu_view(1000.0, 20))
    (part,) = decision.plan.nodes[0].devices[0].slices
    assert (part.key.slice_type, part.hosted[0].variant) == ("cpu:20", "resnet18")
    assert decision.degraded.startswith("short_of_capacity: 20 cores do not carry 1100.0/s of resnets")


def test_no_quota_is_planned_whose_memory_a_triton_does_not_fit():
    """Else the best sizes are some that cannot be, and for as long as they are the best there is no plan at all."""
    (family,) = PUBLISHED.families
    large = replace(family, variants=tuple(replace(variant, memory_mib=900) for variant in family.variants))
    catalog = Catalog((large,), rows(change=as_quotas).rows)
    decision = planned(cpu_view(0.2, 20, catalog=catalog), core_step=0.1, beta=100.0)
    assert not decision.degraded
    ((device,),) = (node.devices for node in decision.plan.nodes)
    assert [part.key.slice_type for part in device.slices] == ["quota:0.4"], "1,300 MiB of 4,096 a core"


def test_a_node_that_cannot_limit_cores_takes_no_quotas():
    view = cpu_view(20.0, 20, 8, catalog=rows(change=as_quotas))
    first, second = view.fleet.nodes
    lacks = replace(first, missing=("cpu_quota: no cgroup tree is mounted. Remedy: run the agent as root",))
    some = planned(replace(view, fleet=FleetState((lacks, second))), core_step=0.5)
    assert [bool(d.slices) for n in some.plan.nodes for d in n.devices] == [False, True]
    none = planned(replace(view, fleet=FleetState((lacks,))), core_step=0.5)
    assert none.plan is None
    assert "no cgroup tree is mounted" in none.degraded
    assert planned(replace(view, fleet=FleetState((lacks,)), catalog=PUBLISHED)).plan is not None, "ranges need none"


def test_a_slice_of_n_cores_is_planned_with_n_instances_and_more_credits():
    decision = planned(cpu_view(75.0, 20))
    parts = [s for d in decision.plan.nodes[0].devices for s in d.slices]
    assert parts
    for part in parts:
        assert part.hosted[0].instances == part.key.size
        assert part.credits > part.key.size
    weights = [t.weight for t in decision.plan.routes[0].targets]
    assert sum(weights) == pytest.approx(1)


def test_rows_of_a_cpu_hold_for_any_number_of_its_cores_and_sizes_between_are_drawn():
    known = CatalogKey(PUBLISHED)
    (four,), (eight,) = (known.rows(device_type("cpu:6"), f"cpu:{n}", "resnets", "resnet50", 0) for n in (4, 8))
    (six,) = known.rows(device_type("cpu:6"), "cpu:6", "resnets", "resnet50", 0)
    assert six.throughput_per_s / 6 == pytest.approx((four.throughput_per_s / 4 + eight.throughput_per_s / 8) / 2)
    assert (
        min(four.latency_ms_p50, eight.latency_ms_p50)
        <= six.latency_ms_p50
        <= max(four.latency_ms_p50, eight.latency_ms_p50)
    )
    assert not known.rows(device_type("cpu:6"), "quota:4.0", "resnets", "resnet50", 0), (
        "who is throttled waits otherwise"
    )
    quotas = CatalogKey(rows(change=as_quotas))
    (half,), (one,) = (
        quotas.rows(device_type("cpu:2"), f"quota:{n}", "resnets", "resnet50", 0) for n in ("0.5", "1.0")
    )
    assert half.latency_ms_p50 == pytest.approx(2 * one.latency_ms_p50), (
        "a request takes its core seconds over the quota"
    )
    view = cpu_view()
    column = class_column(
        PUBLISHED,
        read_view(view, 1.0, cores_max=48).tasks[0],
        CPU48,
        "cpu:8",
        "resnet50",
        1,
        PlannerSettings(overhead_ms=0.0, transport_gap_ms=0.0),
    )
    assert column.servers == 8
    assert rate_max(eight, 750.0, 0.99, 1.0, 1) > 78
    assert column.capacity_per_s(1) == 78, "what the table has was carried, and no more"


def laid(device, *sizes, step=1.0):
    return [(key.slice_type, key.start) for key in lay_out(device, [("f", name, cores) for name, cores in sizes], step)]


def on(device, *parts):
    return replace(
        device,
        running=tuple(
            HostedSlice(SliceKey(device.name, kind, start, size), "f", name) for kind, start, size, name in parts
        ),
    )


def test_a_slice_keeps_its_place_and_a_new_one_lies_where_nothing_runs():
    device = Device("n/cpu", "n", CPU48, True, ())
    assert laid(device, ("a", 20)) == [("cpu:20", 0)]
    runs = on(device, ("cpu:20", 0, 20, "a"))
    assert laid(runs, ("a", 20)) == [("cpu:20", 0)]
    assert laid(runs, ("a", 18)) == [("cpu:18", 30)], "at the far end, so that the next one has room as well"
    assert laid(runs, ("b", 5), ("a", 20)) == [("cpu:5", 20), ("cpu:20", 0)]
    full = on(replace(device, type=device_type("cpu:20")), ("cpu:20", 0, 20, "a"))
    assert laid(full, ("a", 18)) == [("cpu:18", 0)], "in the place of what goes, where there is no other"
    pieces = on(replace(device, type=device_type("cpu:10")), ("cpu:2", 4, 2, "a"))
    assert laid(pieces, ("a", 2), ("b", 8)) == [("cpu:2", 8), ("cpu:8", 0)], (
        "laid anew, where the free cores are in pieces"
    )
    quotas = on(replace(device, type=device_type("cpu:2")), ("quota:2.0", 0, 20, "a"))
    assert laid(quotas, ("a", 1.5), step=0.5) == [("quota:1.5", 25)], "places of quotas are names beyond the cores"


def test_a_resize_starts_the_new_size_before_the_old_one_goes_and_quotas_never_add_up_to_more_than_the_cores():
    view = cpu_view(40.0, 2, catalog=rows(change=as_quotas))
    before = planned(view, "fixed_size", core_step=0.5, initial_cores=2.0, version=1.0).plan
    after = replace(view, current=before, fleet=applied(before, view.fleet))
    resized = planned(after, "fixed_size", core_step=0.5, initial_cores=1.5, version=1.0).plan
    check(resized, after.fleet, after.catalog)
    assert not rollout_refusal(after, resized)
    (device,) = resized.nodes[0].devices
    (old,) = before.nodes[0].devices[0].slices
    both = replace(device, slices=(old, *device.slices))
    with pytest.raises(PlanError, match="quotas of more than 2 cores"):
        check(
            replace(resized, nodes=(replace(resized.nodes[0], devices=(both,)),), routes=()), after.fleet, after.catalog
        )


def test_a_planner_of_gpus_leaves_cpus_out_and_says_so():
    inputs = read_view(replace(cpu_view(), fleet=cpu_fleet(8)), 1.0)
    assert inputs.devices == ()
    assert inputs.unplannable == (("node0/cpu", "CPUs are not planned by this policy"),)


@pytest.mark.parametrize("name", ["exact", "static_mix"])
def test_exact_cuts_small_cpus_in_ranges_and_leaves_large_ones_out(name):
    view = cpu_view(30.0, 8, 8, 16)
    found = planned(view, name)
    assert not found.degraded
    check(found.plan, view.fleet, view.catalog)
    (route,) = found.plan.routes
    parts = {part.key: part for n in found.plan.nodes for d in n.devices for part in d.slices}
    assert {target.slice for target in route.targets} == parts.keys()
    assert {key.device for key in parts} <= {"node0/cpu", "node1/cpu"}
    assert all(part.hosted[0].instances == key.size < part.credits for key, part in parts.items())
    assert found.plan.expected["resnets"].capacity_per_s >= 30.0
    inputs = read_view(view, 1.0, cores_max=RANGED_CORES_MAX)
    assert inputs.unplannable == (("node2/cpu", "CPUs of more than 12 cores are not planned by this policy"),)


def test_quotas_give_way_to_ranges_of_cores_but_not_on_a_silent_node():
    view = cpu_view(20.0, 4, 4, catalog=rows(change=as_quotas))
    before = planned(view, "infadapter", core_step=0.5).plan
    fleet = applied(before, view.fleet)
    seen = replace(view, current=before, fleet=replace(fleet, stale=frozenset({"node1"})))
    cut = {d.name: bool(d.running) for d in read_view(seen, 1.0, cores_max=12).devices}
    assert any(cut.values())
    inputs = read_view(seen, 1.0, cores_max=12).in_ranges
    assert all(not device.running for device in inputs.devices)
    silent = [("node1/cpu", "it is cut by quotas, and its node is silent")] if cut["node1/cpu"] else []
    assert list(inputs.unplannable) == silent


def test_the_artifact_waits_before_it_scales_down_and_never_before_it_scales_up():
    settings = {"skipped_max": 4}
    view = cpu_view(75.0, 48)
    plan = planned(view, **settings).plan
    later = replace(view, current=plan, fleet=applied(plan, view.fleet), now_s=view.now_s + 60.0)
    less, more = (replace(later, demand=(replace(view.demand[0], rate_per_s=rate),)) for rate in (30.0, 90.0))
    waits = planned(less, **settings)
    assert waits.plan is None
    assert not waits.degraded
    assert "scaling down waits for 135 s" in waits.why
    assert planned(more, **settings).plan is not None
    assert planned(replace(less, now_s=view.now_s + 150.0), **settings).plan is not None


@pytest.mark.parametrize("name", ["infadapter", "ms_plus"])
def test_on_gpus_a_size_is_a_slice_type(name):
    """80/s at 65 ms on two A100s: a mix of variants is more accurate than any single one that carries it."""
    view = gpu_view(rate=80.0, devices=fleet(2))
    decision = planned(view, name)
    check(decision.plan, view.fleet, view.catalog, view.demand)
    variants = {h.variant for n in decision.plan.nodes for d in n.devices for s in d.slices for h in s.hosted}
    assert variants == ({"xs", "m"} if name == "infadapter" else {"xs"})
    assert decision.plan.expected["digits"].capacity_per_s >= 80.0
    assert planned(gpu_view(rate=600.0, devices=fleet(2)), name).degraded.startswith("short_of_capacity")


@pytest.mark.parametrize("name", ["infadapter", "ms_plus"])
@pytest.mark.parametrize("one", [cpu_view(), gpu_view(rate=80.0, devices=fleet(2))], ids=["cpus", "gpus"])
def test_models_that_load_in_no_time_have_no_slowest_load_to_weigh(name, one):
    families = tuple(
        replace(f, variants=tuple(replace(v, load_s=0.0) for v in f.variants)) for f in one.catalog.families
    )
    at_once = replace(one, catalog=replace(one.catalog, families=families))
    assert planned(at_once, name, start_s=0.0).plan is not None


@pytest.mark.parametrize("name", ["infadapter", "ms_plus", "vpa_plus"])
def test_what_was_decided_is_rolled_out_before_it_is_decided_anew(name):
    view = cpu_view(75.0, 48)
    plan = planned(view, name).plan
    fleet = applied(plan, view.fleet)
    (node,) = fleet.nodes
    (device,) = node.devices
    coming = replace(device, slices=tuple(replace(s, state=SliceState.STARTING) for s in device.slices))
    later = replace(view, current=plan, fleet=FleetState((replace(node, devices=(coming,)),)))
    waits = planned(replace(later, demand=(replace(view.demand[0], rate_per_s=20.0),)), name)
    assert (waits.plan, waits.degraded) == (None, "")
    assert "waits for node0-cpu-cpu-" in waits.why
    assert planned(replace(later, trigger="loss"), name).plan is not None
    assert planned(replace(later, fleet=fleet), name).plan is not None
