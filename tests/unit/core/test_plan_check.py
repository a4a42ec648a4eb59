"""Every rule of Plan.check refuses with a message that names field and value; legal plans pass."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import CATALOG, LARGE, SMALL, fleet, key, plan_of, planned
from trefoil.core.common import Revision
from trefoil.core.demand import Demand
from trefoil.core.device_types import A100_40GB, placements
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState, Hosted
from trefoil.core.objective import Objective
from trefoil.core.plan import Expected, Plan, PlannedSlice, RouteTarget, decision_order
from trefoil.core.plan_check import check, sealed


def with_targets(plan: Plan, *targets: RouteTarget) -> Plan:
    return dataclasses.replace(plan, routes=(dataclasses.replace(plan.routes[0], targets=targets),))


def with_device(plan: Plan, **changes) -> Plan:
    device = dataclasses.replace(plan.nodes[0].devices[0], **changes)
    return dataclasses.replace(plan, nodes=(dataclasses.replace(plan.nodes[0], devices=(device,)),))


@given(st.sampled_from(placements(A100_40GB)))
def test_every_maximal_placement_of_an_a100_is_legal(placement):
    check(plan_of(*(planned(kind, start, SMALL) for kind, start, _ in placement)), fleet(), CATALOG)


GOOD = plan_of(planned("3g.20gb", 0), planned("3g.20gb", 4, SMALL))
FIRST, SECOND = GOOD.routes[0].targets
BROKEN = {
    "or no number": with_targets(GOOD, dataclasses.replace(FIRST, weight=math.nan), SECOND),
    "credits = 4294967295: more than 4096": with_targets(GOOD, dataclasses.replace(FIRST, credits=2**32 - 1), SECOND),
    r"targets = .*: planned twice": with_targets(GOOD, FIRST, FIRST),
    r"nodes = 'node0': planned twice": dataclasses.replace(GOOD, nodes=GOOD.nodes * 2),
    r"routes = 'toy': planned twice": dataclasses.replace(GOOD, routes=GOOD.routes * 2),
    r"devices = 'node0/gpu0': planned twice": dataclasses.replace(
        GOOD, nodes=(dataclasses.replace(GOOD.nodes[0], devices=GOOD.nodes[0].devices * 2),)
    ),
    r"\('.*', 'toy-l'\): routes to what is not planned": dataclasses.replace(
        GOOD, routes=(dataclasses.replace(GOOD.routes[0], family="ghost"),)
    ),
    "hosted.stages = 4294967295: more than 64": plan_of(
        dataclasses.replace(planned("3g.20gb"), hosted=(Hosted("toy", "toy-l", 2, 0, 2**32 - 1, 1, 8),))
    ),
    "a slice of another device": with_device(GOOD, slices=(planned("3g.20gb", device="node0/gpu1"),)),
    "more than 1000 slices": with_device(GOOD, slices=(planned("1g.5gb"),) * 1001),
    "overlap": plan_of(planned("4g.20gb", 0), planned("2g.10gb", 2)),
    "starts at one of": plan_of(planned("3g.20gb", 2)),
    "no slice type": plan_of(
        PlannedSlice(dataclasses.replace(key("1g.5gb"), slice_type="5g.30gb"), planned("1g.5gb").hosted, 1)
    ),
    "is version 2": plan_of(PlannedSlice(key("7g.40gb"), (Hosted("toy", "toy-l", 7),), 2)),
    "no variant": plan_of(PlannedSlice(key("7g.40gb"), (Hosted("toy", "toy-xl", 7),), 2)),
    "planned ASLEEP": with_device(GOOD, target=DeviceState.ASLEEP),
    "not a supported clock": with_device(GOOD, clock_max_mhz=1000),
    "no node reports": plan_of(planned("7g.40gb", device="node0/gpu9")),
    "not planned": with_targets(GOOD, RouteTarget(key("1g.5gb"), "toy-l", 0, 1.0, 2)),
    "without credits": with_targets(GOOD, dataclasses.replace(GOOD.routes[0].targets[0], weight=1.0, credits=0)),
    "sum to 0.5": with_targets(GOOD, GOOD.routes[0].targets[0]),
    "negative weight": with_targets(
        GOOD,
        dataclasses.replace(GOOD.routes[0].targets[0], weight=-0.5),
        dataclasses.replace(GOOD.routes[0].targets[1], weight=1.5),
    ),
}


def test_a_good_plan_passes():
    check(GOOD, fleet(), CATALOG)


@pytest.mark.parametrize("words", sorted(BROKEN))
def test_a_broken_plan_is_refused_in_words_that_name_the_rule(words):
    with pytest.raises(PlanError, match=f"{words}.* Remedy: "):
        check(BROKEN[words], fleet(), CATALOG)


def test_memory_of_cohosted_variants_must_fit_with_the_context():
    hosted = (Hosted("toy", LARGE.name, LARGE.version), Hosted("toy", SMALL.name, SMALL.version))
    both = PlannedSlice(key("1g.5gb"), hosted * 2, 2)
    with pytest.raises(PlanError, match=r"8600 MiB, a 1g\.5gb has 4864"):
        check(with_targets(plan_of(both)), fleet(), CATALOG)


def test_a_slice_that_hosts_nothing_is_refused():
    plan = plan_of(planned("7g.40gb"))
    empty = dataclasses.replace(plan.nodes[0].devices[0].slices[0], hosted=())
    with pytest.raises(PlanError, match="hosts nothing"):
        check(with_device(plan, slices=(empty,)), fleet(), CATALOG)


def test_a_lost_device_takes_no_slice():
    state = fleet()
    lost = dataclasses.replace(state.nodes[0].devices[0], state=DeviceState.LOST)
    state = dataclasses.replace(state, nodes=(dataclasses.replace(state.nodes[0], devices=(lost,)),))
    with pytest.raises(PlanError, match="LOST"):
        check(GOOD, state, CATALOG)


def test_capacity_below_demand_needs_a_named_rung():
    short = dataclasses.replace(GOOD, expected={"toy": Expected(capacity_per_s=10.0)})
    wanted = (Demand("toy", "", 20.0, 25.0),)
    with pytest.raises(PlanError, match=r"capacity 10\.0/s is below the demand 20\.0/s"):
        check(short, fleet(), CATALOG, wanted)
    check(dataclasses.replace(short, degraded="capacity: best effort"), fleet(), CATALOG, wanted)


def test_an_older_objective_than_the_stored_one_is_refused():
    old = dataclasses.replace(GOOD, objectives=(Objective("toy", number=3),))
    with pytest.raises(PlanError, match="old objective"):
        check(old, fleet(), CATALOG, stored=(Objective("toy", number=4),))
    check(old, fleet(), CATALOG, stored=(Objective("toy", number=3),))


def test_digest_ignores_revision_order_and_reason_but_not_content():
    a, b = planned("3g.20gb", 0), planned("3g.20gb", 4, SMALL)
    one, other = plan_of(a, b, number=1), plan_of(b, a, number=9)
    assert one.content_digest == dataclasses.replace(other, why="another reason").content_digest
    assert one.content_digest != plan_of(a, planned("3g.20gb", 4, LARGE)).content_digest
    node = sealed(one.nodes[0], Revision(2, 5, 1))
    assert node.digest == other.nodes[0].content_digest
    assert node.revision == Revision(2, 5, 1)


@pytest.mark.parametrize(
    ("name", "order"),
    [("3.10", (3, 10)), ("1.²", (1, 0)), pytest.param("1." + 5000 * "1", (1, 0), id="long"), ("", (0,))],
)
def test_a_decision_s_id_that_is_none_has_an_order(name, order):
    assert decision_order(name) == order
