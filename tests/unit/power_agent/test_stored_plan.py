"""Which plan an agent takes from Redis at its start, and what it says of one that it refuses."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from power_agent.agent import AgentComponent
from power_agent.durability.journal import Journal
from power_agent.settings import PowerAgentSettings
from power_agent.slices.node_state import Node
from power_agent.slices.reconciler import ApplyResult
from tests.support.agent_cluster import node_plan, planned
from tests.support.stores import START_S, state_on
from tests.support.virtual.redis import Server
from trefoil.core.fleet import Step
from trefoil.core.plan import NodePlan
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.telemetry import Metrics

KEY, OTHER = "k" * 32, "o" * 32
PLAN = node_plan(7, planned("3g.20gb", 4, 1), epoch=1)


class Start:
    """An agent at its start, beside a Redis into which a controller has written."""

    def __init__(self, folder: Path, keys: tuple[str, ...] = (), **settings: Any) -> None:
        self.clock = ManualClock(START_S)
        self.server = Server(self.clock)
        self.state = state_on(self.server, "default", self.clock)
        self.journal = Journal(folder, "boot", "load")
        self.journal.open()
        nothing: Any = None
        made = PowerAgentSettings(state_dir=folder, **settings)
        self.node = Node(made, self.clock, self.journal, nothing, Metrics("power_agent"))
        self.applied: list[NodePlan] = []
        parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(AgentComponent))
        parts |= {"node": self.node, "state": self.state, "reconciler": self}
        self.steps: tuple[Step, ...] = ()  # that the reconciler foresees
        self.agent = AgentComponent(**parts | {"plan_keys": PlanKeys("default", keys)})

    def preview(self, plan: NodePlan) -> ApplyResult:
        """In place of the reconciler."""
        return ApplyResult(True, self.steps)

    async def apply(self, plan: NodePlan) -> None:
        """In place of the reconciler."""
        self.applied.append(plan)

    async def taken(self, plan: NodePlan) -> str:
        """Take what a controller, or who writes as one, has left; returns what the log says."""
        lease = await self.state.acquire("controller", "test")
        assert lease is not None
        await self.state.put(lease, self.state.keys.plan_node("node0"), plan)
        with structlog.testing.capture_logs() as logs:
            await self.agent._newer_plan()
        return "\n".join(f"{line['event']}: {line['why']}" for line in logs)


async def test_a_signed_plan_is_taken_without_its_signature(tmp_path: Path) -> None:
    start = Start(tmp_path, (KEY,), redis_url="redis://10.0.0.1:6379/0")
    assert await start.taken(PlanKeys("default", [KEY]).sign(PLAN)) == ""
    assert (start.applied, start.node.missing) == ([PLAN], ())


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (PLAN, "not signed, and only what is signed is taken here. Remedy: set plan_key_file for the controller too"),
        (PlanKeys("default", [OTHER]).sign(PLAN), "signed with a key that is not"),
        (replace(PlanKeys("default", [KEY]).sign(PLAN), devices=()), "is not what the controller signed"),
    ],
)
@pytest.mark.parametrize("insecure", [False, True])
async def test_a_forged_plan_is_refused_and_that_shows(
    tmp_path: Path, plan: NodePlan, why: str, insecure: bool
) -> None:
    start = Start(tmp_path, (KEY,), insecure=insecure)
    assert why in await start.taken(plan)
    assert start.applied == []
    [missing] = start.node.missing
    assert missing.startswith("plan: plan of node0 in Redis")
    assert why in missing


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"redis_url": "redis://127.0.0.1:8179/0"}, True),
        ({"redis_url": "redis://:secret@[::1]:8179/0"}, True),
        ({"redis_url": "rediss://localhost"}, True),
        ({"redis_url": "unix:///run/redis.sock"}, True),
        ({"redis_url": "redis://"}, True),
        ({"redis_url": "redis://10.0.0.1:6379/0"}, False),
        ({"redis_url": "redis://redis:6379/0"}, False),
        ({"redis_url": "redis://redis:6379/0", "insecure": True}, True),
    ],
)
async def test_without_a_key_a_redis_of_other_machines_is_not_believed(
    tmp_path: Path, settings: dict[str, Any], taken: bool
) -> None:
    start = Start(tmp_path, **settings)
    said = await start.taken(PLAN)
    assert start.applied == ([PLAN] if taken else [])
    assert taken or "plan_key_file: other machines write to this Redis, and plans in it are not signed. Remedy" in said


async def test_a_plan_of_an_epoch_that_nobody_leads_under_is_left(tmp_path: Path) -> None:
    start = Start(tmp_path)
    said = await start.taken(node_plan(7, epoch=10**11))
    assert "epoch = 100000000000: no controller leads under it; the leader's epoch is 1." in said
    assert start.applied == []
    assert start.journal.state.highest_epoch == 0


@pytest.mark.parametrize(("verb", "taken"), [("drain", False), ("stop", False), ("destroy_gi", False), ("start", True)])
async def test_without_a_journal_no_plan_from_redis_ends_what_serves(tmp_path: Path, verb: str, taken: bool) -> None:
    start = Start(tmp_path)
    start.steps = (Step(PLAN.devices[0].slices[0].key, verb),)
    said = await start.taken(PLAN)
    assert ("it would end node0-gpu0-3g.20gb-4" in said) is not taken
    assert start.applied == ([PLAN] if taken else [])


async def test_with_a_journal_the_newer_plan_from_redis_is_taken_whatever_it_ends(tmp_path: Path) -> None:
    Start(tmp_path).journal.close()
    start = Start(tmp_path)
    start.steps = (Step(PLAN.devices[0].slices[0].key, "drain"),)
    assert await start.taken(PLAN) == ""
    assert start.applied == [PLAN]
