"""A node that listens and publishes elsewhere: real Tritons take the address, and others find them by it."""

import socket
import urllib.request
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from tests.support.agent_cluster import NODE, AgentCluster, Load, key, node_plan, planned, until
from trefoil.core.fleet import NodeStatus

pytestmark = pytest.mark.integration

ADVERTISED = "127.0.0.2"  # of this host too, yet nobody is there by accident
WHOLE = key("7g.40gb")


@pytest.fixture
async def cluster() -> AsyncIterator[AgentCluster]:
    async with AgentCluster(triton_listen=ADVERTISED, advertise_host=ADVERTISED) as one:
        yield one


async def test_slices_are_served_at_the_advertised_host_and_nowhere_else(cluster: AgentCluster) -> None:
    await cluster.apply(node_plan(1, planned("7g.40gb", 0, 4)))
    await cluster.ready(WHOLE)
    status = await cluster.state.get(cluster.state.keys.node(NODE), NodeStatus)
    assert status is not None
    assert status.agent_target == f"{ADVERTISED}:{cluster.target.rpartition(':')[2]}"
    part = (await cluster.slices())[WHOLE]
    port = int(part.grpc_target.rpartition(":")[2])
    assert part.grpc_target == f"{ADVERTISED}:{port}"
    load = Load(part.grpc_target)
    await until(lambda: load.answered >= 10, 60)
    await load.stop()
    assert load.failed == []
    assert urlsplit(part.metrics_url).hostname == ADVERTISED
    with urllib.request.urlopen(part.metrics_url, timeout=10) as page:
        assert b"nv_inference_request_success" in page.read()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
