"""Rollouts live: their ports on asyncio, and the runner of one rollout at a time, beside the loop."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from controller.loop.core_ports import LiveCorePorts, Signals
from controller.observe.reader import ObservationReader
from controller.role.disk_store import DiskStore
from controller.role.leadership import Leadership
from controller.rollout.agent_clients import AgentClients
from controller.rollout.core.executor import RolloutExecutor
from controller.rollout.core.interim_routes import with_catalog_facts
from controller.rollout.core.rollout_inputs import best_path
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.plan import NodePlan, Plan, Rollout
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put, Write
from trefoil.runtime.keys import Keys
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.telemetry import Metrics


class LiveRolloutPorts(LiveCorePorts):
    """`RolloutPorts` on asyncio."""

    find_path = staticmethod(best_path)

    def __init__(
        self,
        disk: DiskStore,
        metrics: Metrics,
        signals: Signals,
        poll_s: float,
        keys: Keys,
        plan_keys: PlanKeys,
        leadership: Leadership,
        agents: AgentClients,
        reader: ObservationReader,
        clock: Clock,
    ) -> None:
        super().__init__(disk, metrics, signals)
        self._poll_s, self._keys, self._plan_keys, self._leadership = poll_s, keys, plan_keys, leadership
        self._agents, self._reader, self._clock = agents, reader, clock

    @property
    def unreached(self) -> Mapping[str, str]:
        """By node, why its agent was not reached when it was called last."""
        return self._agents.unreached

    def save(self, values: Mapping[str, object]) -> None:
        super().save({name: self._with_facts(one) if isinstance(one, Plan) else one for name, one in values.items()})

    async def query_agents(self, nodes: Mapping[str, NodeStatus]) -> None:
        self._reader.note_nodes((await self._agents.fresh(nodes)).values())

    async def refresh_statuses(self) -> None:
        await self._reader.refresh_nodes()

    async def wait(self, until_s: float) -> None:
        await self._clock.sleep(self._poll_s)

    async def publish(
        self, *, plan: Plan | None = None, rollout: Rollout | None = None, node: NodePlan | None = None,
        drained: frozenset[SliceKey] = frozenset(),
    ) -> None:  # fmt: skip
        writes: list[Write] = []
        if plan is not None:
            writes.append(self._put_plan(plan))
        if rollout is not None:
            writes.append(Put(self._keys.rollout(), rollout))
        if node is not None:
            writes.append(self._put_node(node))
        await self._leadership.write(writes)

    async def command(self, status: NodeStatus, plan: NodePlan) -> bool:
        try:
            return await self._agents.apply(status, plan)
        except errors.Fenced as error:
            obeyed = max(status.highest_epoch_seen, plan.revision.epoch)
            if not self._leadership.can_exceed(obeyed):  # a false value: the role would go round forever
                raise errors.Unavailable(f"{status.node} refuses its plan: {error}") from error
            await self._leadership.cede_to(obeyed)
            raise errors.Fenced(str(error)) from error

    def ended(self) -> None:
        self.wake()

    async def republish(self, plan: Plan, nodes: tuple[NodePlan, ...], rollout: Rollout) -> None:
        """Write again what stands; nothing is commanded. Raises Fenced, StateUnavailable."""
        puts = [self._put_node(node) for node in nodes]
        await self._leadership.write([self._put_plan(plan), Put(self._keys.rollout(), rollout), *puts])
        self.save_later("published", self._with_facts(plan))  # the same routes under another number

    def _put_plan(self, plan: Plan) -> Write:
        return Put(self._keys.plan(), self._plan_keys.sign_routes(self._with_facts(plan)))

    def _put_node(self, plan: NodePlan) -> Write:
        return Put(self._keys.plan_node(plan.node), self._plan_keys.sign(plan))

    def _with_facts(self, plan: Plan) -> Plan:
        """The plan as dispatchers need it: its targets with what the catalogue says of them."""
        return replace(plan, routes=with_catalog_facts(plan.routes, self._reader.observation.catalog))


class RolloutRunner:
    """Runner of rollouts on asyncio: at most one task at a time."""

    def __init__(self, rollouts: RolloutExecutor, ports: LiveRolloutPorts) -> None:
        self.rollouts, self._ports = rollouts, ports
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    @property
    def rollout(self) -> Rollout:
        """State of the newest rollout."""
        return self.rollouts.rollout

    @property
    def unreached(self) -> Mapping[str, str]:
        """By node, why its agent was not reached when it was called last."""
        return self._ports.unreached

    def check(self) -> None:
        """Raise the exception that a rollout task has ended by: a bug in one ends the process."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def settle(self) -> None:
        """Stop the rollout under way at its next safe point, and wait for it."""
        if self._task is not None:
            self.rollouts.supersede()
            await self._task
            self._task = None

    async def begin(self, plan: Plan, why: str, view: Callable[[], PlanView]) -> None:
        """Start the rollout of a numbered plan, in place of the one under way."""
        await self.settle()
        self._log.info("roll out", revision=str(plan.revision), why=why)
        self._task = asyncio.create_task(self.rollouts.begin(plan, view), name="rollout")

    async def republish(self, revision: Revision) -> None:
        """Rewrite plan, rollout and node plans in Redis under a new revision; nothing is commanded.

        Raises:
            errors.Fenced, errors.StateUnavailable: it is not written.
        """
        stands = self.rollouts.republished(revision)
        if stands is not None:
            await self._ports.republish(*stands, self.rollout)
