"""Names of variants that answers are booked to: a plan's own, then nodes', then those of node plans, which may lie."""

from dataclasses import replace

import pytest

from dispatcher.service.local_worker import LocalWorker
from dispatcher.settings import DispatcherSettings
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.common import Revision
from trefoil.core.fleet import Hosted
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.security.plan_keys import PlanKeys, routes_key

SECRET = "0123456789abcdef" * 4
KNOWN, COMING = ("digits", 4), ("digits", 5)


@pytest.fixture
async def routing():
    made = LocalWorker(DispatcherSettings(), "d", ManualClock(1000.0)).routing
    made.set_nodes([node([status(0)])])
    made.set_plan(plan([route([target(0)])]))
    return made


def node_plan(variant: str, *versions: int, name: str = "node0") -> NodePlan:
    hosted = tuple(Hosted("digits", variant, version) for version in versions)
    return NodePlan(Revision(1, 2), name, (PlannedDevice("node0/gpu0", slices=(PlannedSlice(key(0), hosted),)),))


async def test_a_node_plan_names_what_is_to_come_and_renames_nothing(routing):
    routing.learn_variants([node_plan("other", 4, 5), node_plan("another", 4, 6, name="ghost")], PlanKeys("c").verify)
    assert routing.variants == {KNOWN: "digits-l", COMING: "other"}


async def test_a_status_renames_nothing_that_the_plan_names(routing):
    lie = replace(status(0), hosted=(Hosted("digits", "other", 4), Hosted("digits", "digits-5", 5)))
    routing.set_nodes([node([lie])])
    assert routing.variants == {KNOWN: "digits-l", COMING: "digits-5"}


async def test_where_a_key_can_tell_only_signed_node_plans_name_variants(routing):
    keys, routes = PlanKeys("c", [SECRET]), PlanKeys("c", [routes_key(SECRET)])
    routing.learn_variants([node_plan("other", 5)], keys.verify)
    assert COMING not in routing.variants
    routing.learn_variants([keys.sign(node_plan("digits-5", 5)), node_plan("other", 5)], keys.verify)
    assert routing.variants[COMING] == "digits-5"
    routing.learn_variants([node_plan("digits-6", 6)], routes.verify)
    assert routing.variants["digits", 6] == "digits-6"
