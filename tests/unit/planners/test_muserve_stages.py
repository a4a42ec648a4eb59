"""AlpaServe's and mu-Serve's planners where families are split: whose stages lie where, and what cannot be."""

import dataclasses
from collections.abc import Mapping

import pytest

from controller.planners.exact.planner import ExactPlanner
from controller.planners.muserve.planner import AlpaServePlanner, AlpaServeSettings, muserve
from controller.planners.planning_input import read_view
from controller.planners.policy_parts import apply_policy_parts
from controller.rollout.core.rollout_inputs import rollout_refusal
from dispatcher.routing.core.routing_table import check_plan
from tests.support.sharing import MAX_RPS, decide, shared
from trefoil.core.brains import PlanView
from trefoil.core.catalog import Catalog, memory_mib
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError
from trefoil.core.fleet import Hosted
from trefoil.core.plan import Plan
from trefoil.core.plan_check import check, check_node
from trefoil.core.policies import policy

GROUPED = AlpaServeSettings(group_size=2)
Memory = Mapping[str, tuple[int, int]]


def split(
    one: PlanView, feels: Mapping[str, tuple[float, ...]], memory: Memory | None = None, whole: bool = True
) -> PlanView:
    """The view, these families split in stages of equal time, each of which feels the clock so much. `memory` [MiB]: of
    a whole and of each of its stages.
    """
    known, families = memory or {}, []
    rows = list(one.catalog.rows if whole else (row for row in one.catalog.rows if row.family not in feels))
    for row in one.catalog.rows:
        part = len(feels.get(row.family, ()))
        for stage, s in enumerate(feels.get(row.family, ()), 1):
            own = dataclasses.replace(
                row,
                stage=stage,
                clock_sensitivity=s,
                memory_mib=known.get(row.family, (0, row.memory_mib))[1],
                latency_ms_p50=row.latency_ms_p50 / part,
                latency_ms_p95=row.latency_ms_p95 / part,
                latency_ms_p99=row.latency_ms_p99 / part,
                energy_active_j_per_batch=row.energy_active_j_per_batch / part,
                throughput_per_s=row.throughput_per_s * part,
            )
            rows.append(own)
    for family in one.catalog.families:
        variants = family.variants
        if family.name in known:
            variants = tuple(dataclasses.replace(v, memory_mib=known[family.name][0]) for v in variants)
        families.append(dataclasses.replace(family, variants=variants))
    return dataclasses.replace(one, catalog=Catalog(tuple(families), tuple(rows)))


def hosts(plan: Plan) -> dict[str, list[str]]:
    """Models of each GPU that hosts any."""
    return {
        device.device.rpartition("/")[2]: sorted(hosted.model for part in device.slices for hosted in part.hosted)
        for node in plan.nodes
        for device in node.devices
        if device.slices
    }


def legal(one: PlanView, plan: Plan) -> Plan:
    """What controller, agent and dispatcher ask of a plan."""
    plan = apply_policy_parts(plan, one.catalog, policy("muserve_no_sched"))
    check(plan, one.fleet, one.catalog, one.demand)
    check_plan(plan, Revision())
    assert rollout_refusal(one, plan) == ""
    return plan


def models(plan: Plan) -> set[str]:
    """All that is hosted."""
    return {model for each in hosts(plan).values() for model in each}


def test_stages_that_feel_the_clock_alike_meet_on_a_gpu_and_no_other_is_there():
    one = split(shared([0.3, 0.3], 2), {"f0": (0.0, 0.9), "f1": (0.8, 0.1)})
    alpaserve, sorted_ = (decide(planner(GROUPED), one).plan for planner in (AlpaServePlanner, muserve))
    legal(one, alpaserve)
    legal(one, sorted_)
    assert hosts(alpaserve) == {"gpu0": ["f0@1of2", "f1@1of2"], "gpu1": ["f0@2of2", "f1@2of2"]}
    assert sorted(hosts(sorted_).values()) == [["f0@1of2", "f1@2of2"], ["f0@2of2", "f1@1of2"]]
    for route in sorted_.routes:
        assert [(t.stage, t.weight) for t in sorted(route.targets, key=lambda t: t.stage)] == [(0, 1.0), (1, 1.0)]
    assert "of stage 1" in sorted_.why
    expected = sorted_.expected["f0"]
    assert MAX_RPS < expected.capacity_per_s < 1.5 * MAX_RPS, "a stage takes half the time, beside one of another"
    assert expected.accuracy == pytest.approx(0.993)


def test_alpaserve_serves_whole_what_a_pipeline_serves_no_better():
    for planner in (AlpaServePlanner(), muserve(AlpaServeSettings())):
        one = split(shared([0.3], 2), {"f0": (0.0, 0.9)})
        assert models(legal(one, decide(planner, one).plan)) == {"f0"}


def test_a_model_too_large_for_one_gpu_lies_on_two_whatever_the_groups():
    large = {"f0": (60_000, 30_000)}
    for whole in (True, False):
        one = split(shared([0.3], 2), {"f0": (0.0, 0.9)}, large, whole)
        for planner in (AlpaServePlanner(), muserve(AlpaServeSettings())):
            plan = legal(one, decide(planner, one).plan)
            assert hosts(plan) == {"gpu0": ["f0@1of2"], "gpu1": ["f0@2of2"]}
    (node,) = plan.nodes
    (part,) = node.devices[0].slices
    part = dataclasses.replace(part, hosted=(dataclasses.replace(part.hosted[0], stage=0, stages=1),))
    node = dataclasses.replace(node, devices=(dataclasses.replace(node.devices[0], slices=(part,)),))
    with pytest.raises(PlanError, match="needs 60400 MiB"):
        check_node(node, one.fleet, one.catalog)


def test_more_load_than_one_gpu_carries_makes_the_pipeline_what_attains_more():
    one = split(shared([1.3], 2), {"f0": (0.0, 0.9)})
    plan = legal(one, decide(AlpaServePlanner(AlpaServeSettings(replicas_max=1)), one).plan)
    assert hosts(plan) == {"gpu0": ["f0@1of2"], "gpu1": ["f0@2of2"]}


def test_all_replicas_are_split_alike_and_what_is_together_is_whole():
    one = split(shared([0.5], 3), {"f0": (0.0, 0.9)})  # a group of two and one of a single GPU
    found = hosts(legal(one, decide(AlpaServePlanner(GROUPED), one).plan))
    assert len({model.partition("of")[2] for models in found.values() for model in models}) == 1
    alone = hosts(
        legal(one, decide(muserve(AlpaServeSettings(group_size=2, gpus_per_model_max=1, replicas_max=1)), one).plan)
    )
    assert list(alone.values()) == [["f0"]]  # CT: the stages of a replica have one GPU, and need no hop
    above = decide(muserve(AlpaServeSettings(group_size=2, gpus_per_model_max=99)), one).plan
    assert hosts(legal(one, above)) == hosts(decide(muserve(GROUPED), one).plan)


def test_ticks_keep_stages_where_they_are_and_a_lost_gpu_makes_the_model_whole():
    before = split(shared([0.3], 2), {"f0": (0.0, 0.9)})
    plan = decide(muserve(GROUPED), before).plan
    now = split(shared([0.3], 2, plan), {"f0": (0.0, 0.9)})
    tick = dataclasses.replace(now, trigger="tick")
    assert hosts(legal(tick, decide(muserve(AlpaServeSettings()), tick).plan)) == hosts(plan)
    assert {(r.model, r.stage, r.stages) for d in read_view(now, 1.0).devices for r in d.running} == {
        ("f0@1of2", 0, 2), ("f0@2of2", 1, 2),
    }  # fmt: skip
    node = now.fleet.nodes[0]
    left = dataclasses.replace(now.fleet, nodes=(dataclasses.replace(node, devices=node.devices[1:]),))
    lost = dataclasses.replace(now, fleet=left, trigger="loss")
    assert hosts(decide(muserve(GROUPED), lost).plan) == {"gpu1": ["f0"]}


def test_what_cannot_be_split_so_is_no_plan_and_says_why():
    for one, settings, words in (
        (split(shared([0.3], 2), {"f0": (0.0, 0.9)}, {"f0": (99_000, 60_000)}), {}, "fit no 2 GPUs"),
        (split(shared([0.3], 1), {"f0": (0.0, 0.9)}, {"f0": (60_000, 30_000)}), {}, "fit no 1 GPUs"),
        (split(shared([0.3], 2), {"f0": (0.0, 0.9)}), {"group_size": 3}, "group_size = 3"),
    ):
        decision = decide(muserve(AlpaServeSettings(**settings)), one)
        assert decision.plan is None
        assert decision.degraded.startswith("no_plan: ")
        assert words in decision.why
        assert "Remedy: " in decision.why


def test_a_family_with_a_stage_that_nobody_profiled_is_served_whole():
    one = split(shared([0.3], 2), {"f0": (0.0, 0.9)})
    rows = tuple(row for row in one.catalog.rows if row.stage != 1)
    bare = dataclasses.replace(one, catalog=dataclasses.replace(one.catalog, rows=rows))
    assert models(decide(muserve(GROUPED), bare).plan) == {"f0"}


def test_a_planner_that_knows_no_stages_does_not_take_one_for_the_whole():
    plan = decide(muserve(GROUPED), split(shared([0.3], 2), {"f0": (0.0, 0.9)})).plan
    one = split(shared([0.3], 2, plan), {"f0": (0.0, 0.9)})
    found = decide(ExactPlanner(), one).plan
    check(found, one.fleet, one.catalog, one.demand)
    assert {hosted.model for node in found.nodes for d in node.devices for s in d.slices for hosted in s.hosted} == {
        "f0"
    }


def test_a_stage_is_a_family_of_its_own_to_whom_profiles_are_asked_by_model():
    catalog = split(shared([0.3], 2), {"f0": (0.0, 0.9)}, {"f0": (60_000, 30_000)}).catalog
    assert catalog.by_model is catalog.by_model
    assert (catalog.stages["f0", "l"], catalog.stages.get(("f9", "l"))) == (2, None)
    assert {row.clock_sensitivity for row in catalog.by_model.rows if row.family == "f0@2of2"} == {0.9}
    assert [memory_mib(catalog, Hosted("f0", "l", 4, n, 2)) for n in (0, 1)] == [30_000, 30_000]
    assert memory_mib(catalog, Hosted("f0", "l", 4, 0, 3)) == 60_000  # split in a way that nobody profiled
    assert shared([0.3], 2).catalog.by_model.families == shared([0.3], 2).catalog.families
