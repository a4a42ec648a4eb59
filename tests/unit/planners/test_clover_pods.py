"""Several applications on one fleet: pods that keep their devices, and rounds side by side."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from controller.planners.clover import CloverPlanner
from controller.planners.clover.planner import goal_of
from controller.planners.clover.pods import pods_of
from controller.planners.clover.settings import CloverSettings
from controller.planners.planning_input import read_view
from tests.support.exploring import explore, served
from tests.support.planning import applied, digits, fleet, objective, view
from trefoil.core.brains import Candidate, Measurement
from trefoil.core.catalog import Catalog, Family
from trefoil.core.demand import Demand, Measured
from trefoil.core.fleet import DeviceState
from trefoil.core.objective import ObjectiveMode

FAMILIES = ("digits", "words")
SLO_MS = 75.0


def rng(seed=0):
    return np.random.default_rng(seed)


def two(gpus=6, families=FAMILIES, **params):
    """Every family has the rows of digits; the demand is ten requests per GPU of a fair share and second."""
    one = digits()
    catalog = Catalog(
        tuple(Family(f, "top1", one.families[0].variants, one.families[0].classes) for f in families),
        tuple(replace(row, family=f) for f in families for row in one.rows),
    )
    wanted = tuple(
        objective(
            family=f,
            mode=ObjectiveMode.LAMBDA,
            lambda_weight=weight,
            slo_ms=SLO_MS,
            min_accuracy=0.0,
            params={"pod_devices": params[f]} if f in params else {},
        )
        for f, weight in zip(families, (0.1, 0.9, 0.5), strict=False)
    )
    rate = 10.0 * gpus / len(families)
    demand = [Demand(f, "", rate, 1.1 * rate) for f in families]
    return view(devices=fleet(gpus, 2), wanted=wanted, catalog=catalog, demand=demand)


def hosts(plan):
    """The families on every device that hosts anything."""
    return {d.device: {s.hosted[0].family for s in d.slices} for n in plan.nodes for d in n.devices if d.slices}


def pods(plan):
    """The devices of every family; no device has two."""
    found = hosts(plan)
    assert all(len(families) == 1 for families in found.values())
    return {f: sorted(d for d, families in found.items() if families == {f}) for f in FAMILIES}


def value(one, plan, family):
    world = read_view(one, 1.0)
    pod = next(p for p in pods_of(world, True) if p.family == family)
    return goal_of(world, pod, {}, CloverSettings()).value(served(one, plan, family))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_families_explore_side_by_side_and_each_ends_at_its_best(seed):
    one = two()
    found = explore(CloverPlanner(), one, rng(seed))
    plan = found.decision.plan
    assert {f: len(devices) for f, devices in pods(plan).items()} == {"digits": 3, "words": 3}
    assert all(pods(c.plan) == pods(plan) for c in found.candidates)
    assert [r.family for r in plan.routes] == ["digits", "words"]
    for family in FAMILIES:
        assert served(one, plan, family).p95_ms <= SLO_MS
        tried = [c.plan for c in found.candidates if served(one, c.plan, family).p95_ms <= SLO_MS]
        assert value(one, plan, family) == pytest.approx(max(value(one, p, family) for p in tried))
        assert f"{family}: " in found.decision.why
    assert served(one, plan, "words").accuracy < served(one, plan, "digits").accuracy  # its lambda is 0.9
    measured = [int(n) for n in re.findall(r"(\d+) measured", found.decision.why)]
    assert len(measured) == len(FAMILIES)
    assert len(found.candidates) == max(measured)  # one candidate of each is measured at a time


def test_a_family_that_cannot_bear_its_candidate_leaves_the_others_unmeasured():
    """One measurement is broken off for the words; the digits' graph of that moment is measured with the next."""
    one, planner, draws = two(), CloverPlanner(), rng(3)
    failed, told_of = Counter(), Counter()
    while isinstance(step := planner.ask(one, draws), Candidate):
        outs = {f: served(one, step.plan, f) for f in FAMILIES}
        late = [f for f in FAMILIES if outs[f].p95_ms > SLO_MS]
        told = tuple(
            Measured(f, np.inf, np.inf, 0.0, 0.0, None, 0.0, 0.0)
            if late
            else Measured(f, o.p95_ms, o.p99_ms, 1.0, o.accuracy, None, o.rate_per_s, 10.0, o.joules)
            for f, o in outs.items()
            if not late or f == late[0]
        )
        pending = {f: s.pending and s.pending.key for f, (_, s) in planner._searches.items()}
        planner.tell(step, Measurement(told, 10.0, 1.0, 0))
        for f in FAMILIES:
            outcome = planner.memory()["known"].get(f, {}).get(f"{planner._searches[f][0]}|{pending[f]}")
            if pending[f] and late and f != late[0]:
                assert outcome is None
                assert planner._searches[f][1].pending.key == pending[f]
                told_of[f] += 1
            elif pending[f]:
                failed[f] += outcome[2] is None
        assert sum(failed.values()) + sum(told_of.values()) < 500, "the exploration does not end"
    assert sum(failed.values()) > 0
    assert sum(told_of.values()) > 0
    for f in FAMILIES:
        assert served(one, step.plan, f).p95_ms <= SLO_MS


def test_pods_keep_their_devices_when_one_is_lost_and_when_it_comes_back():
    one = two()
    plan = explore(CloverPlanner(), one, rng(1)).decision.plan
    before = pods(plan)
    gone = before["digits"][0]
    standing = applied(plan, one.fleet)
    nodes = tuple(
        replace(n, devices=tuple(replace(d, state=DeviceState.LOST, slices=()) if d.device == gone else d
                                 for d in n.devices))
        for n in standing.nodes
    )  # fmt: skip
    without = replace(one, fleet=replace(standing, nodes=nodes), current=plan, trigger="loss")
    fewer = explore(CloverPlanner(), without, rng(1))
    assert pods(fewer.decision.plan) == {"digits": before["digits"][1:], "words": before["words"]}
    back = replace(one, fleet=applied(fewer.decision.plan, one.fleet), current=fewer.decision.plan)
    assert pods(explore(CloverPlanner(), back, rng(1)).decision.plan) == before


def test_a_pod_of_a_stated_size_takes_no_more_than_it_needs_from_the_others():
    plan = explore(CloverPlanner(), two(), rng(1)).decision.plan
    before = pods(plan)
    larger = two(words=4)
    after = replace(larger, fleet=applied(plan, larger.fleet), current=plan)
    found = pods(explore(CloverPlanner(), after, rng(1)).decision.plan)
    assert len(found["words"]) == 4
    assert set(before["words"]) < set(found["words"])
    assert set(found["digits"]) < set(before["digits"])


def test_more_families_than_devices_is_said_and_not_served_in_part():
    crowd = two(2, ("digits", "text", "words"))
    for decision in (
        CloverPlanner().ask(crowd, rng()),
        CloverPlanner(CloverSettings(measure_on="profiles")).plan(crowd, rng()),
    ):
        assert decision.plan is None
        assert decision.degraded == "no_plan: no device is left for words"


def test_memory_of_two_rounds_goes_on_elsewhere():
    one = two(4)
    for stop in (1, 4, 9):
        planner, other, draws = CloverPlanner(), CloverPlanner(), rng(stop)
        for _ in range(stop):
            step = planner.ask(one, draws)
            outs = {f: served(one, step.plan, f) for f in FAMILIES}
            told = tuple(
                Measured(f, o.p95_ms, o.p99_ms, 1.0, o.accuracy, None, 20.0, 10.0, o.joules) for f, o in outs.items()
            )
            planner.tell(step, Measurement(told, 10.0, 1.0, 0))
        other.recall(json.loads(json.dumps(planner.memory())))
        steps = [p.ask(one, rng(9)) for p in (planner, other)]
        assert steps[0].plan.content_digest == steps[1].plan.content_digest


def test_a_family_that_is_gone_takes_its_round_with_it():
    one, planner = two(4), CloverPlanner()
    planner.ask(one, rng())
    assert set(planner.memory()["searches"]) == set(FAMILIES)
    alone = replace(one, objectives=one.objectives[:1], demand=one.demand[:1])
    step = planner.ask(alone, rng())
    assert set(planner.memory()["searches"]) == {"digits"}
    assert len(hosts(step.plan)) == 4
