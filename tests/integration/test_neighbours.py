"""Slices of one GPU do not feel each other: one is rebuilt again and again while the other serves."""

import statistics
import time

import pytest

from tests.support.agent_cluster import AgentCluster, Load, key, node_plan, planned, until
from trefoil.core.common import Revision

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REBUILDS = 50
STEADY = key("4g.20gb", 0)


async def test_a_slice_serves_without_a_failure_while_its_neighbour_is_rebuilt_fifty_times():
    async with AgentCluster(drain_timeout_s=12) as cluster:
        # A dispatcher that routes by a table of the future, and has nothing in flight: drains end at once.
        numbers = iter(range(1, 2 * REBUILDS + 10))
        await cluster.acknowledge(Revision(9))
        await cluster.apply(node_plan(next(numbers), planned("4g.20gb", 0, 4)))
        await cluster.ready(STEADY)
        before = (await cluster.slices())[STEADY]
        load = Load(before.grpc_target, clients=2)
        took_s = []
        for rebuild in range(REBUILDS):
            await cluster.acknowledge(Revision(9))
            kind = ("3g.20gb", "2g.10gb")[rebuild % 2]  # each rebuild replaces what the one before made
            began_s = time.monotonic()
            await cluster.apply(node_plan(next(numbers), planned("4g.20gb", 0, 4), planned(kind, 4, 1)))
            await cluster.ready(STEADY, key(kind, 4))
            took_s.append(time.monotonic() - began_s)
        answered = load.answered
        await until(lambda: load.answered > answered, 60)
        await load.stop()
        after = (await cluster.slices())[STEADY]
        print(
            f"{REBUILDS} rebuilds, median {statistics.median(took_s):.2f} s; neighbour: {load.answered} answered, "
            f"{len(load.failed)} failed"
        )
        assert load.failed == []
        assert load.answered > 5 * sum(took_s)
        assert (after.generation, after.mig_uuid, after.since_s) == (before.generation, before.mig_uuid, before.since_s)
