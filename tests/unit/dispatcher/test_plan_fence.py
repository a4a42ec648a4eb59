"""What a dispatcher obeys, whatever plan stands in Redis: its leader's, and nothing that fences its leader."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.service.core.plan_fence import BEATEN_S, Leader, PlanFence
from dispatcher.service.state_sync import TableFile
from dispatcher.settings import DispatcherSettings
from tests.support.dispatching import Running
from tests.support.stores import START_S, state_on
from tests.support.virtual.redis import Server
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.core.common import Lease, Revision
from trefoil.core.demand import TableAck
from trefoil.core.errors import Fenced, StaleRevision
from trefoil.core.plan import Plan
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.fenced import Put
from trefoil.runtime.security.plan_keys import PlanKeys, routes_key
from trefoil.runtime.state import LEASE_TTL_S, State

KEY = "k" * 32
HEALED_S = 8.0


class World:
    """A dispatcher on a Redis in this process, and a controller that leads there and puts its plan right."""

    def __init__(self, folder: Path, *, signed: bool) -> None:
        self.clock = ManualClock(START_S)
        self.server, self.folder = Server(self.clock), folder
        self.leader = state_on(self.server, "default", self.clock)
        self.keys = PlanKeys("default", [KEY] if signed else [])
        self.key_file = folder / "routes.key" if signed else None
        if self.key_file is not None:
            self.key_file.write_text(routes_key(KEY))
            self.key_file.chmod(0o600)
        self.lease: Lease | None = None
        self.start()

    def start(self, **chosen: Any) -> None:
        """The dispatcher, for the first time or again on its disk."""
        made = DispatcherSettings(state_dir=self.folder, plan_key_file=self.key_file, **chosen)
        self.state: State = state_on(self.server, "default", self.clock)
        self.running = Running(made, self.state)
        self.sync = self.running.loop
        self.sync._clock = self.clock
        self.sync._load_saved_table()

    @property
    def obeyed(self) -> Revision:
        return self.running.local.routing.table.revision

    @property
    def refused(self) -> str:
        return self.sync._refused[1]

    async def lead(self, floor: int = 0) -> int:
        """A controller takes the role, which nobody holds; returns its epoch."""
        self.lease = await self.leader.acquire("controller", "c", floor_epoch=floor)
        assert self.lease is not None
        return self.lease.epoch

    async def publish(self, plan: Plan) -> None:
        assert self.lease is not None
        signed = self.keys.sign_routes(plan)
        await self.leader.write(self.lease, [Put(self.leader.keys.plan(), signed)])

    def write_over(self, plan: Plan | None) -> None:
        """One value, by somebody else."""
        self.server.spoil(self.leader.keys.plan(), codec.encode(plan) if plan is not None else None)

    async def passes(self, seconds: float, *, led: bool = True) -> None:
        """Time, in which the leader renews and the dispatcher looks."""
        for _ in range(round(seconds * 2)):
            await self.clock.advance(0.5)
            if led:
                assert self.lease is not None
                if not await self.leader.renew(self.lease):
                    await self.lead()
            await self.sync._refresh()


def serving(number: int = 1, epoch: int = 1) -> Plan:
    return plan([route([target(0)])], number=number, epoch=epoch)


def empty(number: int, epoch: int) -> Plan:
    return replace(serving(number, epoch), routes=())


@pytest.fixture(params=[True, False], ids=["signed", "unsigned"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    world = World(tmp_path, signed=request.param)
    await world.leader.put(await world.leader.acquire("agent:node0", "a"), world.leader.keys.node("node0"),
                           node([status(0)], observed_at_s=START_S))  # fmt: skip
    await world.lead()
    await world.publish(serving(5))
    await world.passes(1.0)
    assert world.obeyed == Revision(1, 5)
    return world


@pytest.mark.parametrize(
    "stray",
    [empty(1, 2), empty(0, 10**12), empty(1, 1_000_000), empty(6, 1), empty(2**62, 1), empty(2**32, 10**9)],
    ids=lambda plan: str(plan.revision),
)
async def test_one_plan_that_is_not_the_leaders_is_put_right_and_fences_nobody(world: World, stray: Plan) -> None:
    world.write_over(stray)
    await world.passes(HEALED_S)
    assert world.obeyed == Revision(1, 5)
    assert world.running.local.routing.table.routes
    await world.publish(serving(6))
    await world.passes(1.0)
    assert world.obeyed == Revision(1, 6)
    assert not world.refused


async def test_while_it_stands_there_it_is_refused_by_name_in_ack_status_and_metric(world: World) -> None:
    world.write_over(empty(1, 2))
    await world.sync._refresh()
    world.sync._update_rungs()
    assert world.obeyed == Revision(1, 5)
    why = "not signed" if world.sync.plan_keys else "no controller leads under its epoch, controllers lead under 1"
    assert why in world.refused
    assert why in world.running.local.status_line
    assert not world.running.local.not_ready(), "it serves, and says so to load balancers"
    assert 'trefoil_plan_refused{simulated="false"} 1.0' in world.running.metrics.text()
    await world.passes(4.0)
    assert 'trefoil_plan_refused{simulated="false"} 0.0' in world.running.metrics.text()


@pytest.mark.parametrize("column", ["router", "queue"])
@pytest.mark.parametrize("name", ["nonsense", "nowhere_at_all:X", "sys:exit"])
async def test_the_leaders_plan_with_an_unknown_part_is_refused_in_the_acknowledgement(
    world: World, column: str, name: str
) -> None:
    unknown = serving(6)
    await world.publish(replace(unknown, routes=tuple(replace(one, **{column: name}) for one in unknown.routes)))
    await world.passes(1.0)
    ack = world.sync._acknowledgement()
    assert (ack.table, ack.refused_plan) == (Revision(1, 5), Revision(1, 6)), "a rollout of 1.6 is not DONE by that"
    assert "routes[digits]" in ack.refused
    assert name in ack.refused
    await world.publish(serving(7))
    await world.passes(1.0)
    ack = world.sync._acknowledgement()
    assert (ack.table, ack.refused) == (Revision(1, 7), "")


@pytest.mark.parametrize(
    "fence", [Revision(4, 3), Revision(2, 1), Revision(3_000_000, 1), Revision(10**12, 9)], ids=str
)
async def test_a_fence_on_its_disk_alone_is_beaten_by_whoever_leads(world: World, fence: Revision) -> None:
    """States of controller, agent and Redis are lost: the next controller begins at epoch 1. An unsigned file may be
    anybody's: it is not waited for."""
    old = replace(serving(fence.number, fence.epoch), why="of another life")
    TableFile(world.folder / "dispatcher").save(world.keys.sign_routes(old), ())
    world.server.flush()
    world.leader = state_on(world.server, "default", world.clock)
    world.start()
    assert world.obeyed == fence
    assert await world.lead() == 1
    await world.publish(serving(2))
    await world.passes(1.0)
    if world.keys:
        assert world.obeyed == fence
        assert f"older than {fence}, which was obeyed" in world.refused
        await world.passes(HEALED_S)
    assert world.obeyed == Revision(1, 2)


async def test_a_table_on_disk_without_routes_is_beaten_at_the_first_look(tmp_path: Path) -> None:
    """Without a key anybody's file is read; to wait for what routes nothing would fail every request meanwhile."""
    world = World(tmp_path, signed=False)
    TableFile(tmp_path / "dispatcher").save(empty(3, 3), ())
    world.start()
    assert world.obeyed == Revision(3, 3)
    await world.lead()
    await world.publish(serving(2))
    await world.sync._refresh()
    assert world.obeyed == Revision(1, 2)


async def test_an_older_plan_of_this_leader_and_one_of_the_leader_before_are_not_obeyed_again(world: World) -> None:
    for number, epoch in ((6, 1), (7, 1)):
        await world.publish(serving(number, epoch))
    await world.passes(1.0)
    for _ in range(20):  # somebody writes it again and again; the leader's own value comes between
        world.write_over(world.keys.sign_routes(serving(6)))
        await world.passes(0.5)
        assert world.obeyed == Revision(1, 7)


async def test_nothing_is_obeyed_of_an_emptied_redis_until_somebody_leads(world: World) -> None:
    world.server.flush()
    world.write_over(world.keys.sign_routes(serving(9, 3)))
    await world.passes(HEALED_S, led=False)
    assert world.obeyed == Revision(1, 5)
    assert "Redis names no epoch of controllers" in world.refused
    await world.lead(floor=1)
    await world.publish(serving(6, 2))
    await world.passes(1.0)
    assert world.obeyed == Revision(2, 6)


async def test_a_plan_that_was_signed_for_another_cluster_or_by_another_key_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, signed=True)
    await world.lead()
    for keys, why in (
        (PlanKeys("other", [KEY]), "is not what the controller signed"),
        (PlanKeys("default", ["o" * 32]), "signed with a key that is not"),
    ):
        world.write_over(keys.sign_routes(serving()))
        await world.sync._refresh()
        assert why in world.refused
    assert world.obeyed == Revision()


async def test_a_table_on_disk_that_was_not_signed_is_no_fence_where_plans_are(tmp_path: Path) -> None:
    world = World(tmp_path, signed=True)
    TableFile(tmp_path / "dispatcher").save(empty(2**62, 1), ())
    world.start()
    assert world.obeyed == Revision()
    await world.lead()
    await world.publish(serving())
    await world.passes(0.5)
    assert world.obeyed == Revision(1, 1)


@pytest.mark.parametrize(
    ("chosen", "taken"),
    [
        ({"redis_url": "redis://127.0.0.1:6379/0"}, True),
        ({"redis_url": "redis://redis:6379/0"}, False),
        ({"redis_url": "redis://redis:6379/0", "insecure": True}, True),
    ],
)
async def test_without_a_key_a_redis_of_other_machines_is_not_obeyed(
    tmp_path: Path, chosen: dict[str, Any], taken: bool
) -> None:
    world = World(tmp_path, signed=False)
    world.start(**chosen)
    await world.lead()
    await world.publish(serving())
    await world.sync._refresh()
    assert (world.obeyed == Revision(1, 1)) == taken
    assert taken or world.refused.startswith("plan_key_file: other machines write to this Redis")


async def test_the_acknowledgement_says_what_is_refused_in_the_refusers_words(world: World) -> None:
    broken = replace(serving(6), routes=(route([target(0), target(0)]),))
    await world.publish(broken)
    await world.passes(0.5)
    ack = codec.decode(TableAck, codec.encode(world.sync._acknowledgement()))
    assert (ack.table, ack.refused_plan) == (Revision(1, 5), Revision(1, 6))
    assert "a slice is targeted twice" in ack.refused


EPOCHS = st.integers(0, 3)
REVISIONS = st.builds(Revision, EPOCHS, EPOCHS)
LOOKS = st.tuples(st.floats(0.1, 3.0), REVISIONS, REVISIONS, st.builds(Leader, EPOCHS, EPOCHS), st.booleans())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans(), st.lists(LOOKS, min_size=1, max_size=12))
def test_a_fence_falls_to_the_leader_alone_and_only_after_it_was_seen_to_lead(
    signed: bool, looks: list[tuple[float, Revision, Revision, Leader, bool]]
) -> None:
    """Whatever is seen: an older plan is obeyed only of the epoch that the lease has now, and has had for BEATEN_S
    where something is routed."""
    fence, now_s, led_since_s, led = PlanFence(signed), 0.0, 0.0, 0
    for passed_s, offered, obeyed, leader, routes in looks:
        now_s += passed_s
        if leader.led != led:
            led, led_since_s = leader.led, now_s
        try:
            beats = fence.check(offered, obeyed, leader, now_s, routes=routes)
        except StaleRevision:
            assert offered < obeyed
            continue
        except Fenced:
            assert offered.epoch > leader.epoch
            continue
        assert offered.epoch <= leader.epoch
        assert beats == (offered < obeyed)
        if beats:
            assert offered.epoch == leader.epoch == leader.led
            assert not routes or now_s - led_since_s >= BEATEN_S
            assert not (signed and obeyed.epoch == offered.epoch)


def test_a_fence_is_beaten_later_than_a_leader_puts_its_values_right() -> None:
    from controller.role.leadership import RENEWALS_PER_TTL
    from trefoil.runtime.state import REPAIR_S

    assert BEATEN_S > REPAIR_S + LEASE_TTL_S / RENEWALS_PER_TTL
