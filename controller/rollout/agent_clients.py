"""Clients of power agents: idempotent commands with deadlines and bounded retries."""

from collections.abc import Mapping

import grpc
import structlog

from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.core import errors
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import Clock

FIRST_PAUSE_S = 0.2


class AgentClients:
    """Clients of power agents: one channel each, made when first needed; an agent that moves gets a new one."""

    def __init__(self, clock: Clock, timeout_s: float, tries: int, token: str | None = None) -> None:
        self._clock, self._timeout_s, self._tries, self._token = clock, timeout_s, tries, token
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._log = structlog.get_logger()

    async def apply(self, status: NodeStatus, plan: NodePlan) -> bool:
        """Apply a node plan through its agent (`PowerAgent.Apply`); returns whether it changes anything.

        Raises:
            errors.Unavailable: the agent did not answer in any of the tries.
            errors.StaleRevision: the agent obeys a newer epoch or revision.
            errors.InvalidInput: the agent refuses the plan.
        """
        request = power_agent_pb2.ApplyRequest(plan=codec.to_proto(plan))
        for attempt in range(1, self._tries + 1):
            try:
                response = await rpc.call(self._stub(status).Apply, request, self._timeout_s)
            except errors.Unavailable as error:
                if attempt == self._tries:
                    raise errors.Unavailable(
                        f"the agent of {status.node} at {status.agent_target or 'no address'} does not answer "
                        f"({attempt} tries): {error}",
                        remedy="start the power agent; what runs goes on",
                    ) from error
                self._log.warning("agent does not answer", node=status.node, attempt=attempt, error=str(error))
                await self._clock.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            else:
                if not response.accepted:
                    raise errors.InvalidInput(f"the agent of {status.node} does not accept the plan", field="plan")
                return bool(response.changed)
        raise AssertionError("tries >= 1")

    async def node(self, status: NodeStatus) -> NodeStatus | None:
        """Status of a node straight from its agent (`PowerAgent.GetNode`); None when it does not answer."""
        try:
            response = await rpc.call(self._stub(status).GetNode, power_agent_pb2.GetNodeRequest(), self._timeout_s)
        except errors.Unavailable as error:
            self._log.warning("agent does not answer", node=status.node, error=str(error))
            return None
        node: NodeStatus = codec.from_proto(response.node)
        return node

    async def fresh(self, nodes: Mapping[str, NodeStatus]) -> dict[str, NodeStatus]:
        """Statuses of nodes straight from those agents that answer."""
        answers = {name: await self.node(status) for name, status in sorted(nodes.items())}
        return {name: status for name, status in answers.items() if status is not None}

    async def close(self) -> None:
        """Close the channels to all agents."""
        for channel in self._channels.values():
            await channel.close()

    def _stub(self, status: NodeStatus) -> power_agent_pb2_grpc.PowerAgentStub:
        if not status.agent_target:
            raise errors.Unavailable(
                f"node {status.node} published no agent_target", remedy="set the agent's admin_address"
            )
        if status.agent_target not in self._channels:
            self._channels[status.agent_target] = rpc.channel(status.agent_target, token=self._token)
        return power_agent_pb2_grpc.PowerAgentStub(self._channels[status.agent_target])
