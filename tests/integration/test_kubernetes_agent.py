"""The power agent with its Tritons in pods, on a fake API server that runs real Tritons.

They outlive the agent, and one that the cluster ends is started again with the cluster's reason.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from power_agent.triton.installation import find_triton, prepare_triton, with_backend
from tests.support.agent_cluster import AgentCluster, Load, key, node_plan, planned, until
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.triton_process import ENVIRONMENT
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceState

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BOOT_S = 180.0
LEFT, RIGHT = key("4g.20gb", 0), key("3g.20gb", 4)


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> FakeKubernetes:
    install = with_backend(find_triton(None, ENVIRONMENT), "python", simulated=False)
    prepare_triton(install)
    image = {
        "/opt/tritonserver/bin/tritonserver": str(install.binary),
        "/opt/tritonserver/backends": str(install.backends),
        "/opt/tritonserver/caches": str(install.caches),
        "PATH": f"{install.environment / 'bin'}:{os.environ['PATH']}",
        **({} if install.libpython_loads else {"LD_LIBRARY_PATH": install.libpython_folder}),
    }
    return FakeKubernetes(tmp_path_factory.mktemp("cluster"), programs=image)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kubernetes: FakeKubernetes) -> AsyncIterator[AgentCluster]:
    one = AgentCluster(
        runtime="kubernetes", kubernetes_image="triton:1", kubernetes_backends='["python"]',
        kubernetes_pod="trefoil-gpu-x", kubernetes_url=kubernetes.url, kubernetes_account=kubernetes.account,
        ready_timeout_s=90.0,
    )  # fmt: skip
    try:
        async with one:
            yield one
    finally:
        kubernetes.close()


async def test_pods_serve_through_the_death_of_the_agent_and_the_next_one_adopts_them(cluster, kubernetes):
    wanted = node_plan(1, planned("4g.20gb", 0, 4), planned("3g.20gb", 4, 2))
    await cluster.acknowledge(Revision(9))
    await cluster.apply(wanted)
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    await cluster.settled(wanted)
    before = {name: kubernetes.pid(name) for name in kubernetes.pods()}
    load = Load((await cluster.slices())[LEFT].grpc_target)
    cluster.kill_agent()
    answered = load.answered
    await until(lambda: load.answered > answered + 10, 60)
    await cluster.start_agent()
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    assert not [text for text in (await cluster.node()).missing if text.startswith("unproven: ")]
    assert {name: kubernetes.pid(name) for name in kubernetes.pods()} == before
    await load.stop()
    assert (load.failed, load.versions) == ([], {"4"})


async def test_an_evicted_pod_is_started_again_and_its_slice_says_why(cluster, kubernetes):
    evicted = next(name for name in kubernetes.pods() if "4g-20gb" in name)
    kubernetes.evict(evicted)
    seen = []

    async def noticed() -> bool:
        part = (await cluster.slices())[LEFT]
        seen.append(part.why)
        return part.state != SliceState.READY

    await until(noticed, 60)
    assert "(Evicted: The node was low on resource: memory.)" in seen[-1]
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)


async def test_an_agent_that_lost_its_journal_proves_whose_the_pods_are(cluster, kubernetes):
    before = kubernetes.pods()
    cluster.kill_agent()
    for path in Path(cluster.folder / "agent").glob("journal*"):
        path.unlink()
    await cluster.start_agent()
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    assert kubernetes.pods() == before


async def test_a_plan_without_slices_leaves_no_pod(cluster, kubernetes):
    wanted = node_plan(2)
    await cluster.apply(wanted)
    await cluster.settled(wanted, BOOT_S)
    assert kubernetes.pods() == []
    log = cluster.folder / "agent" / "logs" / f"{LEFT.name}.log"
    assert "Started GRPCInferenceService" in log.read_text()
    assert not list((cluster.folder / "agent" / "pods").iterdir())
