"""Rollout runner: carries out the effects of `core/executor.py` live, one rollout at a time, beside the loop."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog

from controller.loop.core.effects import (
    CommandNode,
    CoreTime,
    FindPath,
    Publish,
    QueryAgents,
    RefreshStatuses,
    Save,
    Wait,
)
from controller.loop.disk_store import DiskStore
from controller.loop.effect_runner import Signals, perform_common, run_effects
from controller.loop.leadership import Leadership
from controller.observe.reader import ObservationReader
from controller.rollout.agent_clients import AgentClients
from controller.rollout.core.executor import RolloutExecutor, find_path
from controller.rollout.core.interim_routes import with_catalog_facts
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.plan import NodePlan, Plan, Rollout
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put, Write
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state import Keys
from trefoil.runtime.telemetry import Metrics


class RolloutRunner:
    """Runner of rollouts on asyncio: at most one task at a time."""

    def __init__(
        self,
        rollouts: RolloutExecutor,
        poll_s: float,
        keys: Keys,
        plan_keys: PlanKeys,
        leadership: Leadership,
        agents: AgentClients,
        reader: ObservationReader,
        disk: DiskStore,
        metrics: Metrics,
        signals: Signals,
        time: CoreTime,
        clock: Clock,
    ) -> None:
        self.rollouts, self._poll_s, self._keys, self._plan_keys = rollouts, poll_s, keys, plan_keys
        self._leadership, self._agents, self._reader, self._disk = leadership, agents, reader, disk
        self._metrics, self._signals, self._time, self._clock = metrics, signals, time, clock
        self._task: asyncio.Task[None] | None = None
        self._log = structlog.get_logger()

    @property
    def rollout(self) -> Rollout:
        """State of the newest rollout."""
        return self.rollouts.rollout

    @property
    def unreached(self) -> Mapping[str, str]:
        """By node, why its agent was not reached when it was called last."""
        return self._agents.unreached

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
        steps = self.rollouts.begin(plan, view)
        self._task = asyncio.create_task(run_effects(steps, self._carry_out, self._time, self._clock), name="rollout")

    async def republish(self, revision: Revision) -> None:
        """Rewrite plan, rollout and node plans in Redis under a new revision; nothing is commanded.

        Raises:
            errors.Fenced, errors.StateUnavailable: it is not written.
        """
        stands = self.rollouts.republished(revision)
        if stands is None:
            return
        plan, nodes = self._with_catalog_facts(stands[0]), stands[1]
        puts = [self._put_node(node) for node in nodes]
        await self._leadership.write([self._put_plan(plan), Put(self._keys.rollout(), self.rollout), *puts])
        self._disk.save_later("published", plan)  # the same routes under another number
        self._signals.announce()

    async def _carry_out(self, effect: Any) -> Any:
        match effect:
            case RefreshStatuses():
                await self._reader.refresh_nodes()
            case Wait():
                await self._clock.sleep(self._poll_s)
            case Publish():
                await self._leadership.write(self._writes(effect))
            case CommandNode():
                return await self._command(effect)
            case QueryAgents(nodes):
                self._reader.note_nodes((await self._agents.fresh(nodes)).values())
            case FindPath():
                return find_path(effect)
            case Save({"published": plan}):
                self._disk.save("published", self._with_catalog_facts(plan))
            case _:
                perform_common(effect, self._disk, self._metrics, self._signals)
        return None

    def _writes(self, wanted: Publish) -> list[Write]:
        writes: list[Write] = []
        if wanted.plan is not None:
            writes.append(self._put_plan(self._with_catalog_facts(wanted.plan)))
        if wanted.rollout is not None:
            writes.append(Put(self._keys.rollout(), wanted.rollout))
        if wanted.node is not None:
            writes.append(self._put_node(wanted.node))
        return writes

    def _put_plan(self, plan: Plan) -> Write:
        return Put(self._keys.plan(), self._plan_keys.sign_routes(plan))

    def _put_node(self, plan: NodePlan) -> Write:
        return Put(self._keys.plan_node(plan.node), self._plan_keys.sign(plan))

    def _with_catalog_facts(self, plan: Plan) -> Plan:
        """The plan as dispatchers need it: its targets with what the catalogue says of them."""
        return replace(plan, routes=with_catalog_facts(plan.routes, self._reader.observation.catalog))

    async def _command(self, wanted: CommandNode) -> bool:
        try:
            return await self._agents.apply(wanted.status, wanted.plan)
        except errors.Fenced as error:
            obeyed = max(wanted.status.highest_epoch_seen, wanted.plan.revision.epoch)
            if not self._leadership.can_exceed(obeyed):  # a false value: the role would go round for ever
                raise errors.Unavailable(f"{wanted.status.node} refuses its plan: {error}") from error
            await self._leadership.cede_to(obeyed)
            raise errors.Fenced(str(error)) from error
