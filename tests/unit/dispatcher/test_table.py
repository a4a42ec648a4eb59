"""The table holds what is planned and there; it says what is missing, and keeps the last good plan."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.routing.core import routing_table
from dispatcher.routing.routing_state import Routing
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, StaleRevision
from trefoil.core.fleet import SliceState

N = 6
weights = st.lists(st.floats(0.0, 1.0), min_size=N, max_size=N)
states = st.lists(st.sampled_from(list(SliceState)), min_size=N, max_size=N)


@given(weights=weights, states=states, draining=st.sets(st.integers(0, N - 1)), ejected=st.sets(st.integers(0, N - 1)))
def test_live_targets_are_served_planned_and_sum_to_one(weights, states, draining, ejected):
    targets = [target(i, weight=w, draining=i in draining) for i, w in enumerate(weights)]
    nodes = [node([status(i, state=state) for i, state in enumerate(states)])]
    built = routing_table.build_table(plan([route(targets)]), nodes, {(key(i), ""): "a test" for i in ejected})
    expected = {
        key(i)
        for i, state in enumerate(states)
        if state in (SliceState.READY, SliceState.SWAPPING) and i not in draining and i not in ejected
    }
    live = built.live("digits")
    assert {each.slice for each in live} == expected
    if live:
        assert sum(each.weight for each in live) == pytest.approx(1.0)
        total = sum(weights[i] for i in range(N) if key(i) in expected)
        for each in live:
            planned = next(t for t in targets if t.slice == each.slice).weight
            assert each.weight == pytest.approx(planned / total if total > 0 else 1 / len(live), abs=1e-9)
    missing = len(targets) - len(draining) - len(live)
    assert bool(built.why["digits"]) == (missing > 0 or not live)
    assert built.revision == Revision(1, 1, 0)
    assert built.planned["digits"].targets == tuple(targets)


def test_what_a_dead_class_was_to_serve_is_spread_and_said_so():
    targets = [target(0, "digits-l", 0.5), target(1, "digits-xs", 0.3), target(2, "digits-xs", 0.2)]
    nodes = [node([replace(status(0, state=SliceState.FAILED), why="CUDA error"), status(1), status(2)])]
    built = routing_table.build_table(plan([route(targets)]), nodes)
    assert [each.weight for each in built.live("digits")] == pytest.approx([0.6, 0.4])
    assert built.why["digits"] == (
        "share 0.500 is spread over 2 live slices: node0-gpu0-1g.5gb-0 FAILED (CUDA error), "
        "class digits-l on 1g.5gb has no live slice"
    )
    assert built.summary == f"digits: {built.why['digits']}"


def test_a_slice_that_hosts_another_family_or_has_no_address_is_not_routed_to():
    other = replace(status(0), hosted=(replace(status(0).hosted[0], family="letters"),))
    built = routing_table.build_table(plan([route([target(0), target(1)])]), [node([other, status(1, grpc_target="")])])
    assert built.live("digits") == ()
    assert "does not host digits" in built.why["digits"]
    assert "has no address" in built.why["digits"]


@pytest.mark.parametrize("address", ["nobody", "h:99999999", "triton://nobody", "http://[::1"])
def test_a_slice_whose_address_is_none_is_left_out_alone(address):
    nodes = [node([status(0), status(1, grpc_target=address)])]
    built = routing_table.build_table(plan([route([target(0), target(1)])]), nodes)
    assert [each.slice for each in built.live("digits")] == list(built.endpoints) == [key(0)]
    assert f"its address {address!r} is none" in built.why["digits"]


def test_a_route_without_slices_and_one_that_only_drains_are_told_apart():
    nodes = [node([status(0)])]
    assert routing_table.build_table(plan([route([])]), nodes).why["digits"] == "the plan gives it no slice"
    assert "draining" in routing_table.build_table(plan([route([target(0, draining=True)])]), nodes).why["digits"]


def test_endpoints_know_generations_and_statuses_name_versions():
    starting = status(1, "host:2", SliceState.STARTING, "digits-xs")
    built = routing_table.build_table(plan([route([target(0)])]), [node([status(0, "host:1", generation=7), starting])])
    assert built.endpoints == {key(0): routing_table.Endpoint("host:1", 7)}
    assert built.variants == {("digits", 4): "digits-l", ("digits", 1): "digits-xs"}


def test_an_older_plan_than_one_obeyed_is_refused_and_the_same_one_is_not():
    routing_table.check_plan(plan([route([target(0)])], number=3), Revision(1, 3, 0))
    routing_table.check_plan(plan([route([target(0)])], number=1, epoch=2), Revision(1, 9, 5))
    with pytest.raises(StaleRevision, match="older than"):
        routing_table.check_plan(plan([route([target(0)])], number=9), Revision(2, 0, 0))


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (route([target(0)], router="best"), "router = 'best'"),
        (replace(route([target(0)]), queue="lifo"), "queue = 'lifo'"),
        (route([target(0, weight=-1.0)]), "weight"),
        (route([target(0, weight=float("inf"))]), "weight"),
        (route([target(0, credits=0)]), "credits"),
        (route([replace(target(0), stage=1)]), "stage"),
        (route([target(0), target(0)]), "targeted twice"),
    ],
)
def test_a_plan_that_cannot_be_routed_is_refused_by_field(broken, text):
    with pytest.raises(PlanError, match=text):
        routing_table.check_plan(plan([broken]), Revision())


def test_a_worker_alone_has_all_credits_also_before_its_own_ack_is_seen():
    built = routing_table.build_table(plan([route([target(0)])]), [node([status(0)])], me=("me", 0))
    assert [each.credits for each in built.live("digits")] == [2]


def test_the_families_of_a_slice_are_found_without_a_look_at_all_routes():
    looks = []

    class Planned(dict):
        def items(self):
            looks.append(1)
            return super().items()

    routing = Routing.__new__(Routing)
    routing._families, routing._families_of = {}, {}
    for numbers in ((0, 1), (1, 2)):
        planned = Planned({"a": route([target(numbers[0])]), "b": route([target(n) for n in (*numbers, 1)])})
        routing.table = routing_table.RoutingTable(planned=planned)
        looks.clear()
        found = [routing.families_of(key(n)) for n in (*numbers, 5) * 10]
        assert found == [("a", "b"), ("b",), ()] * 10
        assert len(looks) == 1
