"""A slice is stopped when no dispatcher can send to it any more and nothing is in flight, by what they say."""

import math
from dataclasses import replace

import pytest

from power_agent.settings import PowerAgentSettings
from power_agent.slices.core.drain import drain_blocker, required_table, routed_by, still_routed
from power_agent.slices.slice_state import Slice
from power_agent.slices.step_executor import StepExecutor
from tests.support.plans import key
from tests.support.stores import START_S, state_on
from tests.support.virtual.redis import Server
from trefoil.core.common import Revision
from trefoil.core.demand import SliceLoad, TableAck
from trefoil.core.fleet import SliceState
from trefoil.core.plan import Plan, Route, RouteTarget
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.security.plan_keys import PlanKeys

KEY, OTHER = key("3g.20gb", 4), key("3g.20gb", 0)
NODE, OLDER, NEWER = Revision(1, 5), Revision(1, 4), Revision(1, 6)


def published(revision: Revision, *, routed: bool, draining: bool = False) -> Plan:
    targets = (RouteTarget(KEY, "toy-l", 0, 1.0, 2, draining),) if routed else ()
    return Plan(revision, routes=(Route("toy", targets=targets),))


def ack(
    table: Revision = NODE, in_flight: int = 0, at_s: float = 100.0, sequences: int = 0, worker: int = 0
) -> TableAck:
    return TableAck("d", worker, table, (SliceLoad(KEY, in_flight, sequences),), at_s)


@pytest.mark.parametrize(
    ("plan", "required", "routed"),
    [
        (None, NODE, False),
        (published(OLDER, routed=False), OLDER, False),
        (published(OLDER, routed=True), NODE, True),
        (published(OLDER, routed=True, draining=True), OLDER, False),
        (published(NEWER, routed=True), NODE, True),
        (published(NEWER, routed=False), NODE, False),
    ],
)
def test_the_table_that_is_needed_is_the_oldest_that_leaves_the_slice(plan, required, routed):
    assert required_table(KEY, NODE, plan) == required
    assert still_routed(KEY, plan) == routed


@pytest.mark.parametrize(
    ("acks", "words"),
    [
        ((), ""),
        ((ack(),), ""),
        ((ack(Revision(2, 1)),), ""),
        ((ack(OLDER),), "worker d:0 routes by table 1.4.0, 1.5.0 is needed"),
        ((ack(), ack(OLDER, worker=1)), "worker d:1 routes by table 1.4.0, 1.5.0 is needed"),
        ((TableAck("d", 0, NODE, (SliceLoad(OTHER, in_flight=9), SliceLoad(KEY)), 100.0),), ""),
        ((ack(NEWER, in_flight=2),), "worker d:0 has 2 requests in flight"),
        ((ack(), ack(sequences=1, worker=1)), "worker d:1 has 1 open sequences"),
    ],
)
def test_what_is_waited_for_is_said(acks, words):
    assert drain_blocker(KEY, NODE, acks) == words


def test_a_family_leaves_a_shared_slice_whatever_its_neighbours_have_there():
    mine, theirs = SliceLoad(KEY, 2, family="toy"), SliceLoad(KEY, 9, 1, family="other")
    plan = Plan(OLDER, routes=(Route("other", targets=(RouteTarget(KEY, "other-l", 0, 1.0, 2),)), Route("toy")))
    assert (still_routed(KEY, plan), still_routed(KEY, plan, "toy")) == (True, False)
    assert (required_table(KEY, NODE, plan), required_table(KEY, NODE, plan, "toy")) == (NODE, OLDER)
    assert drain_blocker(KEY, NODE, (TableAck("d", 0, NODE, (theirs, mine)),), model="toy").endswith(
        "2 requests in flight"
    )
    assert drain_blocker(KEY, NODE, (TableAck("d", 0, NODE, (theirs,)),), model="toy") == ""
    assert drain_blocker(KEY, NODE, (TableAck("d", 0, NODE, (theirs,)),)).endswith("9 requests in flight")
    assert "routes by table" in drain_blocker(KEY, NODE, (TableAck("d", 0, OLDER),), model="toy")


def test_while_it_is_routed_only_what_was_said_after_its_draining_counts():
    assert drain_blocker(KEY, NODE, (), math.inf) == "its DRAINING is not published yet"
    early, late = ack(at_s=100.0), ack(at_s=102.0)
    assert "has not said since" in drain_blocker(KEY, NODE, (early,), 101.0)
    assert drain_blocker(KEY, NODE, (late,), 101.0) == ""
    assert "in flight" in drain_blocker(KEY, NODE, (ack(in_flight=1, at_s=102.0),), 101.0)
    assert drain_blocker(KEY, NODE, (), 101.0) == "", "nobody lives who could send"


def test_a_whole_model_leaves_a_slice_on_which_a_stage_of_it_is_served_from_now_on():
    targets = (RouteTarget(KEY, "toy-l", 0, 1.0, 2), RouteTarget(OTHER, "toy-l", 1, 1.0, 2))
    plan = Plan(OLDER, routes=(Route("toy", targets=targets),))
    assert [still_routed(KEY, plan, model) for model in ("toy", "toy@1of2", "toy@2of2")] == [False, True, False]
    acks = (TableAck("d", 0, NODE, (SliceLoad(KEY, 2, family="toy@1of2"),)),)
    assert drain_blocker(KEY, NODE, acks, model="toy") == ""
    assert drain_blocker(KEY, NODE, acks, model="toy@1of2").endswith("2 requests in flight")


KEYS, FORGER = PlanKeys("default", ["k" * 32]), PlanKeys("default", ["o" * 32])
OF_NOW, BEFORE = published(NEWER, routed=True), published(OLDER, routed=False)


@pytest.mark.parametrize(
    "stray",
    [
        None, KEYS.sign_routes(BEFORE), published(NEWER, routed=False), published(Revision(9, 9), routed=False),
        FORGER.sign_routes(published(NEWER, routed=False)), replace(KEYS.sign_routes(OF_NOW), routes=()),
    ],
    ids=["deleted", "replayed", "unsigned", "newer epoch", "another key", "changed"],
)  # fmt: skip
async def test_a_plan_that_the_controller_did_not_write_last_ends_no_drain(tmp_path, stray):
    clock = ManualClock(START_S)
    server = Server(clock)
    state, nothing = state_on(server, "default", clock), None
    executor = StepExecutor(PowerAgentSettings(state_dir=tmp_path), clock, *[nothing] * 3, state, *[nothing] * 5, KEYS)
    part = Slice(KEY, 1, SliceState.DRAINING, 0.0, print)
    server.spoil(state.keys.plan(), codec.encode(KEYS.sign_routes(OF_NOW)))
    for second in range(6):
        if second == 3:
            server.spoil(state.keys.plan(), codec.encode(stray) if stray is not None else None)
        part.published_s = clock.now_s()  # no worker can have read it yet
        await state.put_unfenced(state.keys.ack("d", 0), replace(ack(NEWER), observed_at_s=clock.now_s()))
        waiting = await executor._drain_blocker(part, NODE, "")
        assert waiting == "worker d:0 has not said since that it knows of the draining"
        await clock.advance(1.0)


def test_an_older_plan_than_workers_route_by_says_nothing_of_their_routes():
    assert routed_by(BEFORE, (ack(NEWER),)) is None
    assert routed_by(OF_NOW, (ack(NEWER), ack(OLDER))) == OF_NOW
    assert routed_by(OF_NOW, ()) == OF_NOW
    assert routed_by(None, (ack(),)) is None
