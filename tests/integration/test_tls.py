"""TLS from end to end: agent, real Tritons and dispatchers, with certificates that are renewed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from controller.rollout.agent_clients import AgentClients
from tests.support.agent_cluster import NODE, AgentCluster, key, node_plan, planned, until
from tests.support.certificates import Authority, Pair
from tests.support.dispatching import Plane, dispatching, image
from trefoil.core.common import Revision
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import Plan, Route, RouteTarget
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.tls import Tls

pytestmark = pytest.mark.integration

WHOLE = key("7g.40gb")
CLOCK = WallClock()


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
async def cluster(ours: Authority) -> AsyncIterator[AgentCluster]:
    shown = ours.server(f"tritons.{NODE}")
    pair = ours.service(NODE).settings(ours)
    one = AgentCluster(**pair, triton_tls_certificate=shown.certificate, triton_tls_key=shown.key)
    one.tls = tls_of(ours.service("controller"), ours)
    async with one:
        yield one


def tls_of(pair: Pair, authority: Authority) -> Tls:
    return Tls(pair.certificate, pair.key, authority.certificate)


def plan(version: int) -> Plan:
    target = RouteTarget(WHOLE, f"digits-v{version}", 0, 1.0, 2)
    return Plan(Revision(1, version), "test", "test", routes=(Route("digits", "weighted", "fifo", (target,), 5000),))


async def test_dispatchers_and_agent_reach_real_tritons_over_tls_and_nobody_else_does(cluster, ours, tmp_path):
    await cluster.apply(node_plan(1, planned("7g.40gb", 0, 1)))
    await cluster.ready(WHOLE)
    plane = Plane(cluster.state)
    await plane.plan(plan(1))
    pair = ours.service("dispatcher-front")
    roots = {"ssl": True, "root_certificates": str(ours.certificate)}
    async with (
        dispatching(cluster.state, tmp_path / "dispatcher", **pair.settings(ours)) as running,
        triton.InferenceServerClient(running.address, **roots) as client,
    ):
        async with asyncio.timeout(60):
            while not await client.is_model_ready("digits"):
                await asyncio.sleep(0.05)
        stolen = {"triton-grpc-protocol-agent": "x"}
        answer = await client.infer("digits", [image()], headers=stolen)
        assert answer.as_numpy("PROBABILITIES").shape == (1, 10)
    part = (await cluster.slices())[WHOLE]
    assert part.metrics_url == ""  # Triton has no TLS for them: on loopback alone
    index = pb.RepositoryIndexRequest()
    dispatcher = ours.service("dispatcher").read()
    for pems, said in ((dispatcher, "This protocol is restricted"), ((), "failed to connect")):
        credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes(), *pems)
        named = [("grpc.ssl_target_name_override", f"tritons.{NODE}")]
        async with grpc.aio.secure_channel(part.grpc_target, credentials, options=named) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=said):
                await service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryIndex(index, timeout=10)


async def test_an_agent_that_comes_back_commands_its_tritons_again_and_takes_renewed_certificates(cluster, ours):
    await cluster.apply(node_plan(1, planned("7g.40gb", 0, 1)))
    await cluster.ready(WHOLE)
    before = cluster.triton(WHOLE).pid
    cluster.kill_agent()
    await cluster.start_agent()
    await cluster.apply(node_plan(2, planned("7g.40gb", 0, 3)))
    await until(lambda: hosts(cluster, 3), 60)
    assert cluster.triton(WHOLE).pid == before, "adopted, and loaded what the plan says"

    shown = await served(cluster, ours)
    ours.service(NODE)  # written in the place of the one before
    ours.server(f"tritons.{NODE}")
    assert await served(cluster, ours) != shown
    agents = AgentClients(CLOCK, 10.0, 2, None, cluster.tls)
    found = await agents.node(NodeStatus(NODE, agent_target=cluster.target))
    assert found is not None
    await cluster.apply(node_plan(3, planned("7g.40gb", 0, 1)))  # by the pair that is new, on a Triton with the old
    await until(lambda: hosts(cluster, 1), 60)
    assert cluster.triton(WHOLE).pid == before
    await agents.close()
    secret = next(word for word in cluster.triton(WHOLE).cmdline() if "restricted" in word).rpartition("=")[2]
    assert len(secret) == 32
    assert secret not in (cluster.folder / "power_agent.log").read_text()


async def hosts(cluster: AgentCluster, version: int) -> bool:
    part = (await cluster.slices())[WHOLE]
    return [one.version for one in part.hosted] == [version] and part.state.name == "READY"


async def served(cluster: AgentCluster, ours: Authority) -> str:
    """Certificate that the agent shows to a new connection."""
    command = ["openssl", "s_client", "-connect", cluster.target, "-alpn", "h2"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    said, _ = await process.communicate()
    return said.decode().partition("-----BEGIN CERTIFICATE-----")[2].partition("-----END")[0]
