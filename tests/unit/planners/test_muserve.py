"""AlpaServe's and mu-Serve's planners of whole GPUs: who meets whom, what is kept, what is refused."""

import dataclasses

import pytest

from controller.planners.muserve.planner import AlpaServePlanner, AlpaServeSettings, muserve
from tests.support.planning import with_low_end
from tests.support.sharing import decide, serving, shared
from trefoil.core.brains import PlanView
from trefoil.core.fleet import FleetState
from trefoil.core.plan_check import check
from trefoil.core.policies import policy

ALONE = AlpaServeSettings(replicas_max=1)


def feeling(one: PlanView, *sensitivities: float) -> PlanView:
    """The view, its families feeling the clock so much."""
    s = {f"f{n}": value for n, value in enumerate(sensitivities)}
    rows = tuple(dataclasses.replace(row, clock_sensitivity=s[row.family]) for row in one.catalog.rows)
    return dataclasses.replace(one, catalog=dataclasses.replace(one.catalog, rows=rows))


def homes(plan, families: int) -> list[set[str]]:
    return [set(serving(plan, f"f{n}")) for n in range(families)]


def test_muserve_lets_families_meet_that_feel_the_clock_alike():
    one = feeling(shared([0.2, 0.2, 0.2, 0.2], 2), 1.0, 0.1, 0.9, 0.2)
    decision = decide(muserve(ALONE), one)
    check(decision.plan, one.fleet, one.catalog, one.demand)
    f0, f1, f2, f3 = homes(decision.plan, 4)
    assert f0 == f2 != f1 == f3


def test_a_family_that_one_gpu_does_not_carry_has_several_by_both():
    one = feeling(shared([1.5, 0.1], 4), 1.0, 0.1)
    for planner in (AlpaServePlanner(), muserve(AlpaServeSettings())):
        decision = decide(planner, one)
        check(decision.plan, one.fleet, one.catalog, one.demand)
        assert len(homes(decision.plan, 2)[0]) >= 2


def test_ticks_keep_a_placement_and_a_call_for_capacity_does_not():
    few = decide(muserve(AlpaServeSettings()), feeling(shared([0.2, 0.2], 4), 1.0, 0.1)).plan
    loaded = feeling(shared([1.8, 0.2], 4, few), 1.0, 0.1)
    kept = decide(muserve(ALONE), dataclasses.replace(loaded, trigger="tick")).plan
    assert homes(kept, 2) == homes(few, 2)
    single = decide(muserve(ALONE), feeling(shared([0.2, 0.2], 4), 1.0, 0.1)).plan
    more = decide(
        muserve(AlpaServeSettings()),
        dataclasses.replace(feeling(shared([1.8, 0.2], 4, single), 1.0, 0.1), trigger="scale"),
    ).plan
    assert len(homes(more, 2)[0]) > len(homes(single, 2)[0]) == 1


@pytest.mark.parametrize("trigger", ["tick", "load"])
def test_a_placement_is_kept_until_its_gpus_carry_less_than_is_asked(trigger):
    few = decide(AlpaServePlanner(), shared([0.3, 0.3], 4)).plan
    for load, more in ((0.35, False), (1.8, True)):
        again = decide(AlpaServePlanner(), shared([load, 0.3], 4, few, trigger=trigger)).plan
        assert (len(homes(again, 2)[0]) > len(homes(few, 2)[0])) == more
    least = decide(AlpaServePlanner(ALONE), shared([1.8, 0.3], 4)).plan
    same = decide(AlpaServePlanner(ALONE), shared([3.0, 0.3], 4, least, trigger=trigger)).plan
    assert homes(same, 2) == homes(least, 2), "another placement would carry no more"


def test_what_cannot_be_placed_is_no_plan():
    for one, words in (
        (shared([0.2], 2, memory_mib=50_000), "fit no 2 GPUs"),
        (shared([0.2, 0.2, 0.2], 2, memory_mib=30_000), "fit no 2 GPUs"),
        (with_low_end(feeling(shared([0.2], 1), 1.0)), "GPUs of one type"),
    ):
        decision = decide(muserve(AlpaServeSettings()), one)
        assert decision.plan is None
        assert decision.degraded.startswith("no_plan: ")
        assert words in decision.why
        assert "Remedy: " in decision.why


def test_a_silent_node_stays_as_it_is_and_nothing_is_placed_there():
    began = decide(muserve(ALONE), feeling(shared([0.2, 0.2], 4), 1.0, 0.1)).plan
    one = feeling(shared([0.2, 0.2], 4, began), 1.0, 0.1)
    devices = one.fleet.nodes[0].devices
    nodes = tuple(
        dataclasses.replace(one.fleet.nodes[0], node=n, devices=d)
        for n, d in (("node0", devices[:2]), ("node1", devices[2:]))
    )
    silent = dataclasses.replace(one, fleet=FleetState(nodes, frozenset({"node0"})), trigger="loss")
    found = homes(decide(muserve(ALONE), silent).plan, 2)
    assert all(home & {"gpu2", "gpu3"} for home in found)


def test_the_rows_differ_in_what_the_paper_says():
    wanted = {
        "alpaserve": ("alpaserve", "fifo", "fixed", True),
        "alpaserve_sched": ("alpaserve", "ssjf", "fixed", True),
        "alpaserve_scaling": ("alpaserve", "ssjf", "miad", True),
        "alpaserve_scaling_no_sched": ("alpaserve", "fifo", "miad", True),
        "muserve": ("muserve", "ssjf", "miad", True),
        "muserve_no_sched": ("muserve", "fifo", "miad", True),
    }
    rows = {name: policy(name) for name in wanted}
    found = {name: (row.planner, row.queue, row.governor, "scale" in row.triggers) for name, row in rows.items()}
    assert found == wanted


@pytest.mark.parametrize("name", ["alpaserve", "muserve"])
def test_nobody_to_serve_is_no_plan(name):
    one = dataclasses.replace(shared([0.2], 1), objectives=())
    assert decide(AlpaServePlanner(AlpaServeSettings(), name, name == "muserve"), one).plan is None
