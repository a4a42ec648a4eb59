"""Carries a plan out, step by step: writes what is wanted, commands the agents, waits for what must have happened.

Everything here can be repeated: a plan is rolled out again from what stands after a crash, a lost lease, an emptied
Redis or a newer plan. Nothing is interrupted between the routes and the node plans of one step.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import structlog

from controller.agents import Agents
from controller.authority import Authority
from controller.disk import Disk
from controller.observe import Observer
from controller.rollout import Devices, Standing, Step, Way
from controller.settings import RolloutSettings
from controller.terms import standing
from trefoil.core import errors
from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.fleet import SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, Plan, PlannedSlice, Rollout, RolloutState, Route
from trefoil.core.plan_check import node_digest, sealed
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put, Write
from trefoil.runtime.state import Keys

Early = Callable[[Standing, Plan], tuple[Route, ...] | None]
FINAL = (RolloutState.DONE, RolloutState.HALTED, RolloutState.ROLLED_BACK, RolloutState.SUPERSEDED)


class Superseded(Exception):
    """A newer plan is waiting; raised only where a rollout may be left."""


class Actor:
    """One rollout at a time."""

    def __init__(
        self,
        settings: RolloutSettings,
        keys: Keys,
        authority: Authority,
        agents: Agents,
        observer: Observer,
        disk: Disk,
        clock: Clock,
    ) -> None:
        self._settings, self._keys, self._authority, self._agents = settings, keys, authority, agents
        self._observer, self._disk, self._clock = observer, disk, clock
        self._stop = asyncio.Event()
        self._confirmed: set[str] = set()
        self._log = structlog.get_logger()
        self.published: Plan | None = disk.load("published", Plan)
        self.commanded: dict[str, NodePlan] = {n.node: n for n in disk.load_all("commanded", NodePlan)}
        self.rollout = Rollout()
        self.on_change: Callable[[], None] = lambda: None
        self.spent_j: Callable[[], float] = lambda: 0.0
        self.complete: Callable[[tuple[Route, ...]], tuple[Route, ...]] = lambda routes: routes

    @property
    def rolling(self) -> bool:
        """Whether a rollout is under way."""
        return self.rollout.state != RolloutState.UNSPECIFIED and self.rollout.state not in FINAL

    def supersede(self) -> None:
        """Ask the rollout under way to end where that is safe."""
        self._stop.set()

    async def roll(
        self,
        target: Plan,
        find_way: Callable[[Standing, Plan], Way],
        early: Early,
    ) -> Rollout:
        """Roll a numbered, complete plan out; returns its last state.

        While slices start, `early` may route to those that are READY already, if the load needs them.

        Raises:
            errors.Fenced: the role was lost, or an agent obeys a newer epoch: roll out again under a new one.
        """
        self._stop.clear()
        spent_before_j = self.spent_j()
        self.rollout = Rollout(target.revision, RolloutState.APPLYING, since_s=self._clock.now_s())
        try:
            await self._renew_statuses()
            way = find_way(self._stands(), target)
            self.rollout = replace(
                self.rollout,
                steps=len(way.steps),
                moving=way.moving,
                capacity_floor_per_s=dict(way.floor_per_s or {}),
                why=way.why,
            )
            if way.halted:
                return await self._finish(RolloutState.HALTED, way.why)
            for step in way.steps:
                await self._step(target, step, early)
            if way.waits:
                return await self._finish(RolloutState.HALTED, way.waits)
            return await self._finish(RolloutState.DONE, way.why, self.spent_j() - spent_before_j)
        except Superseded:
            return await self._finish(RolloutState.SUPERSEDED, "a newer plan takes over")
        except (errors.Unavailable, errors.InvalidInput, _Stuck) as error:
            return await self._finish(RolloutState.HALTED, str(error))

    async def republish(self, revision: Revision) -> None:
        """Write again what readers of Redis need, under a new revision; nothing is commanded."""
        if self.published is None:
            return
        self.published = replace(self.published, revision=revision)
        nodes = [Put(self._keys.plan_node(n.node), n) for n in self.commanded.values()]
        await self._authority.write(
            [Put(self._keys.plan(), self.published), Put(self._keys.rollout(), self.rollout), *nodes]
        )
        self._disk.save("published", self.published)
        self.on_change()

    # --- one step -----------------------------------------------------------------------------------------------------

    async def _step(self, target: Plan, step: Step, early: Early) -> None:
        self._leave_if_superseded()
        state = RolloutState.WAITING_ACK if step.drained else RolloutState.APPLYING
        revision = await self._publish(target, step.routes, state, step.name)
        if step.drained:
            await self._until_left(revision, step.drained)
        await self._command(step.devices, revision)
        if step.ready:
            await self._say(RolloutState.WAITING_READY)
            timeout_s = self._settings.ready_timeout_s
            await self._until(
                timeout_s, lambda: self._not_ready(step.ready), "READY", beside=self._joiner(target, early)
            )

    def _joiner(self, target: Plan, early: Early) -> Callable[[], Awaitable[None]]:
        """What to do while waiting: let slices that are READY help, when the load needs them."""

        async def join() -> None:
            routes = early(self._stands(), target)
            if routes is not None:
                await self._publish(target, routes, RolloutState.WAITING_READY, "early")

        return join

    def _stands(self) -> Standing:
        routes = self.published.routes if self.published else ()
        return standing(self._observer.fleet(), self.commanded, routes)

    async def _publish(self, target: Plan, routes: tuple[Route, ...], state: RolloutState, name: str) -> Revision:
        """Routes under the next step of the target's revision."""
        first = self.published is None or self.published.revision < target.revision
        step = 0 if first or self.published is None else self.published.revision.step + 1
        routes = self.complete(routes)
        plan = replace(target, revision=replace(target.revision, step=step), nodes=(), routes=routes)
        self.rollout = replace(self.rollout, target=plan.revision, state=state, step=step)
        await self._write([Put(self._keys.plan(), plan), Put(self._keys.rollout(), self.rollout)])
        self.published = plan
        self._disk.save("published", plan)
        self._log.info("rollout step", name=name, revision=str(plan.revision), of=self.rollout.steps, state=state.name)
        self.on_change()
        return plan.revision

    async def _command(self, devices: Devices, revision: Revision) -> None:
        """Apply first, then note it: a note without the command would never be commanded again."""
        fleet = self._observer.fleet()
        for node in fleet.nodes:
            if node.node in fleet.stale:
                continue
            mine = tuple(devices[d.device] for d in node.devices if d.device in devices)
            plan = sealed(NodePlan(node=node.node, devices=mine), revision)
            before = self.commanded.get(node.node)
            if node.node in self._confirmed and before is not None and node_digest(before) == plan.digest:
                continue
            try:
                changed = await self._agents.apply(node, plan)
            except errors.Fenced as error:
                await self._authority.overtake(max(node.highest_epoch_seen, revision.epoch))
                raise errors.Fenced(str(error)) from error
            self._confirmed.add(node.node)
            self.commanded[node.node] = plan
            self._disk.save_all("commanded", self.commanded.values())
            await self._write([Put(self._keys.plan_node(node.node), plan)])
            self._log.info("node plan", node=node.node, revision=str(revision), changed=changed)

    async def _until_left(self, revision: Revision, drained: frozenset[SliceKey]) -> None:
        """Every live worker routes by this table; then nothing is in flight on what leaves."""
        await self._until(self._settings.ack_timeout_s, lambda: self._not_acked(revision), "", give_up=False)
        await self._say(RolloutState.WAITING_DRAIN)
        await self._until(self._settings.drain_timeout_s, lambda: self._in_flight(drained), "", give_up=False)

    def _not_acked(self, revision: Revision) -> str:
        late = [a for a in self._live_acks() if a.table < revision]
        return f"{late[0].dispatcher}:{late[0].worker} routes by {late[0].table}" if late else self._observer.blind

    def _in_flight(self, drained: frozenset[SliceKey]) -> str:
        for ack in self._live_acks():
            for load in ack.slices:
                if load.slice in drained and (load.in_flight or load.open_sequences):
                    sequences = f" and {load.open_sequences} open sequences" if load.open_sequences else ""
                    return f"{load.in_flight} requests in flight{sequences} on {load.slice.name}"
        return ""

    def _live_acks(self) -> tuple[TableAck, ...]:
        return self._observer.acks()

    def _not_ready(self, wanted: Mapping[SliceKey, PlannedSlice]) -> str:
        found = {s.key: s for n in self._observer.fleet().nodes for d in n.devices for s in d.slices}
        for key, part in sorted(wanted.items()):
            status = found.get(key)
            if status is None or not _serves(status, part):
                state = "absent" if status is None else status.state.name
                return f"slice {key.name} is {state}{f' ({status.why})' if status and status.why else ''}"
        return ""

    # --- waiting and writing ------------------------------------------------------------------------------------------

    async def _until(
        self,
        timeout_s: float,
        missing: Callable[[], str],
        what: str,
        give_up: bool = True,
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Poll until nothing is missing. After the timeout halt, or go on all the same and say so."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        why = ""
        while True:
            try:
                await self._observer.refresh_nodes()
                why = missing()
                if not why:
                    return
            except errors.StateUnavailable as error:
                # Nobody can be seen to be ready or idle now; time without sight does not count.
                deadline_s = self._clock.monotonic_s() + timeout_s
                why = str(error)
            self._leave_if_superseded()
            if beside is not None:
                await beside()
            if self._clock.monotonic_s() >= deadline_s:
                if give_up:
                    raise _Stuck(f"not {what} after {timeout_s:g} s: {why}")
                self._log.warning("going on without", waited_s=timeout_s, why=why)
                return
            await self._clock.sleep(self._settings.poll_s)

    async def _write(self, writes: list[Write]) -> None:
        """Keep trying while Redis is down: a step that is begun is finished."""
        while True:
            try:
                await self._authority.write(writes)
                return
            except errors.StateUnavailable as error:
                self._log.warning("rollout waits for Redis", error=str(error))
            self._leave_if_superseded()
            await self._clock.sleep(self._settings.poll_s)

    async def _say(self, state: RolloutState) -> None:
        self.rollout = replace(self.rollout, state=state)
        await self._write([Put(self._keys.rollout(), self.rollout)])
        self.on_change()

    async def _finish(self, state: RolloutState, why: str, spent_j: float = 0.0) -> Rollout:
        self.rollout = replace(self.rollout, state=state, why=why, spent_j=spent_j)
        try:
            await self._authority.write([Put(self._keys.rollout(), self.rollout)])
        except (errors.StateUnavailable, errors.Fenced) as error:
            self._log.warning("end of the rollout not written", error=str(error))
        log = self._log.warning if state == RolloutState.HALTED else self._log.info
        log("rollout ended", target=str(self.rollout.target), state=state.name, why=why)
        self.on_change()
        return self.rollout

    def _leave_if_superseded(self) -> None:
        if self._stop.is_set():
            raise Superseded

    async def _renew_statuses(self) -> None:
        """What agents were commanded a moment ago may not stand in Redis yet: ask them."""
        fleet = self._observer.fleet()
        nodes = {n.node: n for n in fleet.nodes if n.node in self.commanded and n.node not in fleet.stale}
        self._observer.inputs.nodes |= await self._agents.fresh(nodes)


class _Stuck(Exception):
    """Something that a step waits for does not happen."""


def _serves(status: SliceStatus, part: PlannedSlice) -> bool:
    now = sorted((h.family, h.variant, h.stage) for h in status.hosted)
    return status.state == SliceState.READY and now == sorted((h.family, h.variant, h.stage) for h in part.hosted)
