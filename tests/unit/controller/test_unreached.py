"""An agent that publishes an address which nobody reaches: one line, field, value and remedy, until it is reached."""

import asyncio
import re
from unittest.mock import AsyncMock

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from controller.rollout.agent_clients import AgentClients
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from tests.support.ports import free_ports
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import ServiceSettings


class Agent(power_agent_pb2_grpc.PowerAgentServicer):
    """It obeys."""

    async def Apply(self, request, context):
        return power_agent_pb2.ApplyResponse(accepted=True)

    async def GetNode(self, request, context):
        return power_agent_pb2.GetNodeResponse(node=codec.to_proto(NodeStatus("node0")))


async def test_an_address_that_nobody_reaches_is_named_until_somebody_does(tmp_path):
    (port,) = free_ports(1)
    target = f"127.0.0.1:{port}"
    status, agents = NodeStatus("node0", agent_target=target), AgentClients(WallClock(), 10.0, 1)
    line = (
        f"^advertise_host = '{re.escape(target)}': the agent of node0 does not answer there.* Remedy: start the power"
    )
    assert await agents.node(status) is None
    assert re.match(line, agents.unreached["node0"])
    with pytest.raises(Unavailable, match=line):
        await agents.apply(status, NodePlan())
    entry = (power_agent_pb2_grpc.add_PowerAgentServicer_to_server, Agent(), "trefoil.power_agent.v1.PowerAgent")
    server = rpc.make_server(ServiceSettings(state_dir=tmp_path, admin_address=target), [entry])
    await server.start()
    while await agents.node(status) is None:  # its channel tries again within a second
        await asyncio.sleep(0.05)
    assert agents.unreached == {}
    assert not await agents.apply(status, NodePlan())
    await agents.close()
    await server.stop(0.0)


@pytest.mark.parametrize("token", [None, SecretStr("secret")])
@pytest.mark.parametrize("target", ["node0:²", f"node0:{5000 * '9'}", "ipv4:1.2.3.4:²", "dns:///x:²", "node0:0", "::"])
async def test_what_is_no_address_is_an_agent_that_is_not_reached(target, token):
    status, agents = NodeStatus("node0", agent_target=target), AgentClients(WallClock(), 0.2, 1, token)
    assert await agents.node(status) is None
    assert "not host:port. Remedy: start the power agent" in agents.unreached["node0"]
    with pytest.raises(Unavailable, match="not host:port"):
        await agents.apply(status, NodePlan())
    await agents.close()


async def test_what_is_no_address_is_asked_once():
    agents = AgentClients(WallClock(), 5.0, 3)
    for target in ("node0:0", ""):
        with capture_logs() as logs, pytest.raises(Unavailable, match=r"does not answer there \(1 tries\)"):
            await agents.apply(NodeStatus("node0", agent_target=target), NodePlan())
        assert logs == []


async def test_the_channel_to_where_an_agent_was_is_closed(monkeypatch):
    made, closed = [], []

    class Channel:
        def __init__(self, target: str) -> None:
            self.target = target
            made.append(target)

        def unary_unary(self, *_, **__):
            return AsyncMock(side_effect=Unavailable("gone"))

        unary_stream = unary_unary

        async def close(self, grace_s: float | None = None) -> None:
            closed.append(self.target)

    monkeypatch.setattr(rpc, "channel", lambda target, **_: Channel(target))
    agents = AgentClients(WallClock(), 5.0, 1)
    for n in (1, 1, 2, 3, 1):
        assert await agents.node(NodeStatus("node0", agent_target=f"127.0.0.1:{n}")) is None
    assert await agents.node(NodeStatus("node1", agent_target="127.0.0.1:1")) is None
    targets = [f"127.0.0.1:{n}" for n in (1, 2, 3, 1, 1)]
    assert (made, closed) == (targets, targets[:3])
    await agents.close()
    assert closed == targets
