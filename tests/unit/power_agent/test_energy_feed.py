"""WatchEnergy: the ring first, then live; several watchers, none of which can hold another or the agent's memory."""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import grpc
import pytest

from power_agent.energy.core.meter import MeterState
from power_agent.energy.energy_log import CHUNK, WATCHERS_MAX, EnergyFeed, EnergyLog
from power_agent.service import FULL_NAME, PowerAgentServicer
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.core.energy import EnergySample
from trefoil.core.errors import Unavailable
from trefoil.runtime import rpc
from trefoil.runtime.config import ServiceSettings

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"


class Agent:
    """What is left of the agent: its energy log, and one reading after the other of two devices."""

    def __init__(self, folder, ring=1000):
        self.energy_log = EnergyLog(folder, ring)
        self.energy_log.open()
        self.feed = EnergyFeed(self.energy_log)
        self.seq = 0

    def read(self, count=1):
        for _ in range(count):
            self.seq += 1
            samples = [EnergySample("node0", device, self.seq, counter_j=1.0) for device in (GPU0, GPU1)]
            self.energy_log.append(samples, {device: MeterState(device, self.seq) for device in (GPU0, GPU1)})
            self.feed.notify(samples)


@pytest.fixture
def agent(tmp_path):
    return Agent(tmp_path)


async def take(samples, count):
    async with asyncio.timeout(60):
        return [(s.device[-1], s.seq) for s in [await anext(samples) for _ in range(count)]]


async def test_what_the_ring_holds_comes_first_then_what_is_new(agent):
    agent.read(2)
    async with aclosing(agent.feed.watch({})) as samples:
        assert await take(samples, 4) == [("0", 1), ("1", 1), ("0", 2), ("1", 2)]
        waiting = asyncio.create_task(take(samples, 2))
        await asyncio.sleep(0)
        assert not waiting.done()
        agent.read()
        assert await waiting == [("0", 3), ("1", 3)]


async def test_each_device_is_continued_where_its_watcher_was(agent):
    agent.read(3)
    async with aclosing(agent.feed.watch({GPU0: 2})) as samples:
        assert await take(samples, 4) == [("1", 1), ("1", 2), ("0", 3), ("1", 3)]


async def test_several_watch_and_each_gets_everything(agent):
    feeds = [agent.feed.watch({}) for _ in range(3)]
    waiting = [asyncio.create_task(take(feed, 10)) for feed in feeds]
    for _ in range(5):
        await asyncio.sleep(0)
        agent.read()
    found = await asyncio.gather(*waiting)
    assert all(one == found[0] for one in found)
    assert len(set(found[0])) == 10
    assert agent.feed.watchers == 3
    for feed in feeds:
        await feed.aclose()
    assert agent.feed.watchers == 0


async def test_a_slow_watcher_loses_the_oldest_and_holds_nobody(tmp_path):
    agent = Agent(tmp_path, ring=100)
    async with aclosing(agent.feed.watch({})) as slow, aclosing(agent.feed.watch({})) as fast:
        agent.read()
        assert await take(slow, 1) == [("0", 1)]
        seen = []
        for _ in range(1000):
            agent.read()
            seen += await take(fast, 2)
        assert len(seen) == 2000, "the fast one missed nothing"
        rest = await take(slow, 1 + 2 * 50)
        assert [seq for _, seq in rest][:CHUNK:10] == sorted(seq for _, seq in rest)[:CHUNK:10]
        assert rest[0] == ("1", 1)
        assert rest[1][1] > 800, "what the ring had let go is a gap in seq"
    assert len(agent.energy_log.ring) <= 2 * 100


async def test_too_many_watchers_are_refused_until_one_goes(agent):
    agent.read()
    feeds = [agent.feed.watch({}) for _ in range(WATCHERS_MAX)]
    for feed in feeds:
        await anext(feed)
    with pytest.raises(Unavailable, match="Remedy"):
        await anext(agent.feed.watch({}))
    await feeds[0].aclose()
    async with aclosing(agent.feed.watch({})) as samples:
        assert await take(samples, 1) == [("0", 1)]
    for feed in feeds:
        await feed.aclose()


async def test_over_grpc_with_a_client_that_goes_away(agent):
    agent.read(3)
    node = SimpleNamespace(devices={GPU0: None, GPU1: None})
    servicer = PowerAgentServicer(node, None, None, agent.feed, None, None)
    entry = (power_agent_pb2_grpc.add_PowerAgentServicer_to_server, servicer, FULL_NAME)
    server = rpc.make_server(ServiceSettings(admin_address="127.0.0.1:0"), [entry])
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = power_agent_pb2_grpc.PowerAgentStub(channel)
        request = power_agent_pb2.WatchEnergyRequest(after_seq={GPU0: 2, GPU1: 3})
        watch = stub.WatchEnergy(request, timeout=10)
        first = (await watch.read()).sample
        assert (first.device, first.seq, first.counter_j) == (GPU0, 3, 1.0)
        agent.read()
        assert {(await watch.read()).sample.device for _ in range(2)} == {GPU0, GPU1}
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match=r"after_seq = 'node0/gpu7'.*Remedy: one of node0/gpu0") as no:
            await stub.WatchEnergy(power_agent_pb2.WatchEnergyRequest(after_seq={"node0/gpu7": 1}), timeout=10).read()
        assert no.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        async with asyncio.timeout(60):
            while agent.feed.watchers:
                await asyncio.sleep(0.01)
    await server.stop(0)
