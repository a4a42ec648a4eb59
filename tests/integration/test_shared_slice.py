"""Two families on one slice of a simulated node, by real Tritons: one comes and goes, and its neighbour serves on."""

import itertools
import os

import numpy as np
import pytest
import pytest_asyncio

from tests.support.agent_cluster import AgentCluster, Load, key, node_plan, planned, until
from tests.support.fidelity import open_loop_ms, simulated_ms
from tests.support.triton_process import hosted
from tests.support.twin_family import TWIN, twin, two_families
from trefoil.core.accounting import check_conservation
from trefoil.core.common import Revision
from trefoil.core.demand import SliceLoad
from trefoil.core.fleet import SliceState
from trefoil.core.plan import PlannedSlice

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

WHOLE = key("7g.40gb")
ALONE, SHARED = planned("7g.40gb", 0, 4), PlannedSlice(WHOLE, (hosted(4), twin(hosted(2))), 4)
ROUNDS = int(os.environ.get("ROUNDS", "50"))
numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory):
    async with AgentCluster(model_repository=two_families(tmp_path_factory.mktemp("models"))) as one:
        yield one


async def run(cluster: AgentCluster, part: PlannedSlice):
    wanted = node_plan(next(numbers), part)
    await cluster.acknowledge(Revision(9))  # of a dispatcher that routes by a later table, with nothing in flight
    await cluster.apply(wanted)
    await cluster.settled(wanted)
    found = (await cluster.slices())[WHOLE]
    assert (found.state, set(found.hosted)) == (SliceState.READY, set(part.hosted))
    return found


@pytest.mark.timeout(600)
async def test_a_family_that_comes_and_goes_fails_no_request_of_its_neighbour(cluster):
    target = (await run(cluster, ALONE)).grpc_target
    process, load = cluster.triton(WHOLE), Load(target, clients=2)
    try:
        for _ in range(ROUNDS):
            await run(cluster, SHARED)
            guest, answered = Load(target, clients=1, family=TWIN), load.answered
            await until(lambda g=guest, n=answered: g.answered > 2 and load.answered > n + 2, 60)
            await guest.stop()
            assert (guest.failed, guest.versions) == ([], {"2"})
            await run(cluster, ALONE)
    finally:
        await load.stop()
    print(f"{load.answered} answers while its neighbour came and went {ROUNDS} times")
    assert (load.failed, load.versions) == ([], {"4"})
    assert cluster.triton(WHOLE).pid == process.pid


@pytest.mark.gate
async def test_a_family_leaves_only_when_no_dispatcher_has_a_request_of_it_there(cluster):
    target = (await run(cluster, SHARED)).grpc_target
    guest, load = Load(target, clients=1, family=TWIN), Load(target, clients=1)
    wanted = node_plan(next(numbers), ALONE)
    await cluster.acknowledge(Revision(9), SliceLoad(WHOLE, 1, family=TWIN), SliceLoad(WHOLE, 5, family="digits"))
    try:
        await cluster.apply(wanted)

        async def waits() -> bool:
            return "1 requests in flight" in (await cluster.slices())[WHOLE].why

        await until(waits, 60)
        answered = guest.answered, load.answered
        await until(lambda: guest.answered > answered[0] + 3 and load.answered > answered[1] + 3, 60)
        await guest.stop()
        await cluster.acknowledge(Revision(9), SliceLoad(WHOLE, 0, family=TWIN), SliceLoad(WHOLE, 5, family="digits"))
        await cluster.settled(wanted)
        assert (guest.failed, load.failed) == ([], [])
        assert [h.family for h in (await cluster.slices())[WHOLE].hosted] == ["digits"]
    finally:
        await guest.stop()
        await load.stop()


async def test_the_joules_of_a_shared_slice_are_those_of_its_families(cluster):
    target = (await run(cluster, SHARED)).grpc_target
    loads = [Load(target, clients=1), Load(target, clients=1, family=TWIN)]
    before = len(await cluster.samples())
    await until(lambda: all(load.answered > 40 for load in loads), 120)
    for load in loads:
        await load.stop()
    samples = (await cluster.samples())[before:]
    assert samples
    by_family = dict.fromkeys(("digits", TWIN), 0.0)
    for sample in samples:
        check_conservation(sample)
        for part in sample.slices:
            assert sum(share.active_j for share in part.hosted) == pytest.approx(part.active_j, rel=1e-6)
            for share in part.hosted:
                by_family[share.family] += share.active_j
    assert min(by_family.values()) > 0, by_family


@pytest.mark.timeout(300)
async def test_latency_beside_a_neighbour_is_as_simulated(cluster, tmp_path):
    target = (await run(cluster, SHARED)).grpc_target
    rng, rates = np.random.default_rng(5), {"digits": 9.0, TWIN: 25.0}
    at_s = {family: np.cumsum(rng.exponential(1 / rate, int(40 * rate))) for family, rate in rates.items()}
    live = await open_loop_ms(target, at_s)
    repository = two_families(tmp_path)
    beside = simulated_ms(repository, SHARED, at_s)
    alone = simulated_ms(repository, SHARED, at_s, interference=None)
    found = {}
    for family in at_s:
        p95 = [float(np.quantile(one[family], 0.95)) for one in (live, beside, alone)]
        found[family] = p95[0] / p95[1], p95[0] / p95[2]
        print(f"{family}: p95 live {p95[0]:.1f} ms, simulated {p95[1]:.1f} ms, without contention {p95[2]:.1f} ms")
    assert all(abs(ratio - 1) <= 0.15 for ratio, _ in found.values()), found
    assert all(ratio > 1.15 for _, ratio in found.values()), found
