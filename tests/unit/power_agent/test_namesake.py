"""Two agents of one node name: the second says so and does not start; what a dead one has left keeps nobody waiting."""

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from power_agent.publisher import Publisher
from tests.support.stores import START_S, state_on
from tests.support.virtual.redis import Server
from trefoil.core.common import Lease
from trefoil.core.errors import StartError
from trefoil.core.fleet import NodeStatus
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

GONE = 2**22 + 1  # above all pids


class Hosts:
    """Machines around one Redis, with an agent each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock, self._patch = ManualClock(START_S), patch
        self.server = Server(self.clock)

    def agent(self, host: str, pid: int = os.getpid()) -> Publisher:
        journal = SimpleNamespace(state=SimpleNamespace(lease_epoch=0), raise_lease_epoch=lambda _: None)
        node: Any = SimpleNamespace(
            settings=SimpleNamespace(node="node0", lease_ttl_s=3.0, sample_period_s=1.0),
            clock=self.clock, journal=journal, metrics=Metrics("power_agent"), epoch=0, devices={},
            changes=SimpleNamespace(notify=lambda: None), note_published=lambda _: None,
            status=lambda: NodeStatus(node="node0", observed_at_s=self.clock.now_s()),
        )  # fmt: skip
        log: Any = SimpleNamespace(ring=[])
        with self._patch.context() as patch:
            patch.setattr("power_agent.publisher.socket.gethostname", lambda: host)
            patch.setattr("power_agent.publisher.os.getpid", lambda: pid)
            return Publisher(node, state_on(self.server, "default", self.clock), log)

    async def starts(self, agent: Publisher, beside: Publisher | None = None) -> float:
        """How long its start is held up [s]; raises as the start does."""
        began_s = self.clock.monotonic_s()
        start = asyncio.ensure_future(agent.refuse_namesake())
        await self.clock.advance(0.0)
        while not start.done():
            if beside is not None:
                await beside.step()
            await self.clock.advance(0.25)
        await start
        return self.clock.monotonic_s() - began_s


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


async def test_beside_an_agent_that_lives_another_does_not_start(hosts: Hosts) -> None:
    first = hosts.agent("a", 11)
    await first.step()
    with pytest.raises(
        StartError, match=r"^node = 'node0': another power agent, a:11, publishes under this name\. Rem"
    ):
        await hosts.starts(hosts.agent("b", 11), beside=first)


@pytest.mark.parametrize(
    ("host", "pid", "held_up_s"),
    [("a", GONE, 0.0), ("a", os.getpid(), 0.0), ("another container", 1, 3.25)],
)
async def test_after_one_that_is_dead_the_next_starts(hosts: Hosts, host: str, pid: int, held_up_s: float) -> None:
    await hosts.agent(host, pid).step()  # and is never heard of again
    after = hosts.agent("a")
    assert await hosts.starts(after) <= held_up_s
    await hosts.clock.advance(3.0)
    await after.step()
    assert await after._state.get(after._state.keys.node("node0"), NodeStatus) is not None


async def test_without_redis_it_starts_and_says_later_who_has_its_name(hosts: Hosts) -> None:
    first, second = hosts.agent("a", 11), hosts.agent("b", 12)
    hosts.server.fall()
    assert await hosts.starts(second) == 0.0
    hosts.server.rise()
    with structlog.testing.capture_logs() as logs:
        for _ in range(6):
            await first.step()
            await second.step()
            await hosts.clock.advance(1.0)
    errors = [line["why"] for line in logs if line["log_level"] == "error"]
    assert len(errors) == 1
    assert "node = 'node0': another power agent, a:11, publishes under this name." in errors[0]


@pytest.mark.parametrize("pid", ["²", "9" * 5000, "1" * 300, "-1", ""])
async def test_a_lease_whose_holder_is_no_process_ends_no_agent(hosts: Hosts, pid: str) -> None:
    agent = hosts.agent("a")
    lease = Lease("agent:node0", f"a:{pid}", 5, START_S + 3.0)
    hosts.server.set(agent._state.keys.lease("agent:node0"), codec.encode(lease), 3000)
    assert await hosts.starts(agent) <= 3.25
    await agent.step()
