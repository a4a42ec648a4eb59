"""Clients of power agents: idempotent commands with deadlines and bounded retries."""

from collections.abc import Mapping

import grpc
import structlog
from pydantic import SecretStr

from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.core import errors
from trefoil.core.fleet import NodeStatus
from trefoil.core.outside.addresses import is_host_port
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import Clock
from trefoil.runtime.security.tls import NAMES_ANOTHER, Loaded, Tls

FIRST_PAUSE_S = 0.2


class AgentClients:
    """Clients of power agents: one channel each, made when first needed; of an agent that moves the old one is closed.

    Over TLS an agent's certificate names its node, for where agents are is read from Redis, which others may write.
    """

    def __init__(
        self,
        clock: Clock,
        timeout_s: float,
        tries: int,
        token: SecretStr | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        name_form: str = "{node}",
    ) -> None:
        """`insecure`: the token may leave this machine in clear text. `name_form`: name in an agent's certificate."""
        self._name_form = name_form
        self._clock, self._timeout_s, self._tries, self._token = clock, timeout_s, tries, token
        self._tls = tls if tls is not None and tls.mutual else None
        self._insecure = insecure
        self._channels: dict[str, tuple[grpc.aio.Channel, tuple[str, Loaded | None]]] = {}  # by node
        self._log = structlog.get_logger()
        self.unreached: dict[str, str] = {}
        """By node, why its agent was not reached when it was called last; without those that were."""

    async def apply(self, status: NodeStatus, plan: NodePlan) -> bool:
        """Apply a node plan through its agent (`PowerAgent.Apply`); returns whether it changes anything.

        Raises:
            errors.Unavailable: the agent did not answer in any of the tries.
            errors.Untrusted: its certificate does not name the node, or one of the two is not accepted.
            errors.StaleRevision: the agent obeys a newer epoch or revision.
            errors.InvalidInput: the agent refuses the plan.
        """
        request = power_agent_pb2.ApplyRequest(plan=codec.to_proto(plan))
        stub = None
        for attempt in range(1, self._tries + 1):
            try:
                stub = await self._stub(status)
                response = await rpc.call(stub.Apply, request, self._timeout_s)
            except errors.Untrusted as error:
                raise self._note(status, _named(status, error, self._name(status))) from error
            except errors.Unavailable as error:
                if attempt == self._tries or stub is None:  # no retry mends a wrong address
                    raise self._note(status, _unreached(status, f" ({attempt} tries): {error}")) from error
                self._log.warning("agent does not answer", node=status.node, attempt=attempt, error=str(error))
                await self._clock.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            else:
                self.unreached.pop(status.node, None)
                if not response.accepted:
                    raise errors.InvalidInput(f"the agent of {status.node} does not accept the plan", field="plan")
                return bool(response.changed)
        raise AssertionError("tries >= 1")

    async def node(self, status: NodeStatus) -> NodeStatus | None:
        """Status of a node straight from its agent (`PowerAgent.GetNode`); None when it does not answer."""
        try:
            stub = await self._stub(status)
            response = await rpc.call(stub.GetNode, power_agent_pb2.GetNodeRequest(), self._timeout_s)
        except errors.Unavailable as error:
            if isinstance(error, errors.Untrusted):
                told: errors.Unavailable = _named(status, error, self._name(status))
            else:
                told = _unreached(status, f": {error}")
            self._note(status, told)
            self._log.warning("agent does not answer", node=status.node, error=str(told))
            return None
        self.unreached.pop(status.node, None)
        node: NodeStatus = codec.from_proto(response.node)
        return node

    async def fresh(self, nodes: Mapping[str, NodeStatus]) -> dict[str, NodeStatus]:
        """Statuses of nodes straight from those agents that answer."""
        answers = {name: await self.node(status) for name, status in sorted(nodes.items())}
        return {name: status for name, status in answers.items() if status is not None}

    def _note(self, status: NodeStatus, error: errors.Unavailable) -> errors.Unavailable:
        self.unreached[status.node] = str(error)
        return error

    async def close(self) -> None:
        """Close the channels to all agents."""
        for channel, _ in self._channels.values():
            await channel.close()

    def _name(self, status: NodeStatus) -> str:
        return self._name_form.replace("{node}", status.node)

    async def _stub(self, status: NodeStatus) -> power_agent_pb2_grpc.PowerAgentStub:
        if not status.agent_target:
            raise errors.Unavailable(
                f"node {status.node} published no agent_target", remedy="set the agent's admin_address"
            )
        if not is_host_port(status.agent_target) and not status.agent_target.startswith("unix:"):
            raise errors.Unavailable("not host:port")  # Redis holds whatever was written into it
        wanted = status.agent_target, self._tls.now if self._tls is not None else None
        before, made_for = self._channels.get(status.node, (None, None))
        if made_for != wanted:  # the agent has moved, or certificates have been renewed
            try:
                name, insecure = self._name(status), self._insecure
                channel = rpc.channel(wanted[0], tls=self._tls, name=name, token=self._token, insecure=insecure)
            except errors.SettingError as error:
                raise errors.Untrusted(error.message, remedy=error.remedy) from error
            self._channels[status.node] = channel, wanted
            if before is not None:
                await before.close(self._timeout_s)
        # Looked up again: another call may have replaced it while the old one was closed.
        return power_agent_pb2_grpc.PowerAgentStub(self._channels[status.node][0])


def _unreached(status: NodeStatus, why: str) -> errors.Unavailable:
    """The error of an agent that does not answer where its status says that it is."""
    return errors.Unavailable(
        f"the agent of {status.node} does not answer there{why}", field="advertise_host", value=status.agent_target,
        remedy="start the power agent, or set its advertise_host to an address that reaches it from the controller; "
        "what runs goes on",
    )  # fmt: skip


def _named(status: NodeStatus, error: errors.Untrusted, name: str) -> errors.Untrusted:
    """The error, with the node, its address and the `name` that its certificate must have."""
    remedy = error.remedy
    if NAMES_ANOTHER in error.message:
        remedy = (
            f"give the agent of {status.node} a certificate with subjectAltName=DNS:{name}, or find out who wrote "
            "that agent_target into Redis"
        )
    return errors.Untrusted(
        f"the agent of {status.node} at {status.agent_target} gets neither plan nor token: {error.message}",
        remedy=remedy,
    )
