"""Execution of a rollout, step by step: routes are written, agents are commanded, what must happen is waited for.

Source: CONTRACTS section 4 (rollout step order); the steps themselves: controller/rollout/core/path.py.
Data: what nodes and dispatchers say (`Observation`), read again at each look.
Decision: calls of `RolloutPorts`, in order.
Everything here can be repeated: a plan is rolled out again from what stands after a crash, a lost lease, an emptied
Redis or a newer plan. Nothing is interrupted between the routes and the node plans of one step.
"""

import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from controller.observe.core.observation import Observation
from controller.observe.core.refusals import refused_keys, unmakeable
from controller.rollout.core.path import Devices, Step
from controller.rollout.core.ports import CoreClock, RolloutPorts
from controller.rollout.core.rollout_inputs import early_routes, fleet_snapshot, serving_slices
from controller.settings import RolloutSettings
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceKey, SliceState, SliceStatus, same_variants
from trefoil.core.plan import NodePlan, Plan, PlannedDevice, PlannedSlice, Rollout, RolloutState, Route
from trefoil.core.plan_check import sealed

FINAL_STATES: Final = (RolloutState.DONE, RolloutState.HALTED, RolloutState.ROLLED_BACK, RolloutState.SUPERSEDED)


class Superseded(Exception):
    """Superseded by a newer plan; raised only where a rollout may be left."""


class StepTimeout(Exception):
    """Timeout of something that a step waits for."""


class MoveMeter(Protocol):
    """Meter of what moves have cost."""

    @property
    def unallocated_j(self) -> float:
        """Joules drawn without any serving slice, so far."""


class RolloutExecutor:
    """Executor of rollouts: one at a time, knowing what the one before has published and commanded."""

    def __init__(
        self,
        settings: RolloutSettings,
        observation: Observation,
        spending: MoveMeter,
        clock: CoreClock,
        ports: RolloutPorts,
        published: Plan | None = None,
        commanded: Mapping[str, NodePlan] | None = None,
    ) -> None:
        self._settings, self._observation, self._spending = settings, observation, spending
        self._clock, self.ports = clock, ports
        self.published = published
        self.commanded = dict(commanded or {})
        self.rollout = Rollout()
        self.under_way = False
        self._confirmed: set[str] = set()
        self._superseded = False
        self._retry_at_s: float | None = None

    @property
    def rolling(self) -> bool:
        """Whether a rollout has begun and has not ended."""
        return self.rollout.state != RolloutState.UNSPECIFIED and self.rollout.state not in FINAL_STATES

    @property
    def outcome(self) -> tuple[RolloutState, str]:
        """State of the newest rollout, and its reason."""
        if self.under_way:
            return RolloutState.APPLYING, ""
        return self.rollout.state, self.rollout.why

    @property
    def retry_at_s(self) -> float | None:
        """When a halted rollout is tried again, monotonic: the load may have fallen, an agent may be back."""
        return self._retry_at_s

    def supersede(self) -> None:
        """Ask the rollout under way to end where that is safe."""
        self._superseded = True

    def begin(self, plan: Plan, view: Callable[[], PlanView]) -> Coroutine[object, None, None]:
        """Begin the rollout of a numbered, complete plan; nothing else is under way. `view` is asked at the first step.

        Raises:
            errors.TrefoilError: what neither halts a rollout nor ends the role.
        """
        self._retry_at_s, self.under_way = None, True
        return self._run(plan, view)

    def republished(self, revision: Revision) -> tuple[Plan, tuple[NodePlan, ...]] | None:
        """Plan and node plans that stand, to be rewritten under a new revision; None: nothing was ever published.

        A node plan that its node is ahead of is none that stands: the copy that it was read from was old.
        """
        if self.published is None:
            return None
        self.published = replace(self.published, revision=revision)
        applied = {node.node: node.applied for node in self._observation.fleet(self._clock.now_s()).nodes}
        stand = [plan for name, plan in self.commanded.items() if plan.revision >= applied.get(name, Revision())]
        return self.published, tuple(stand)

    async def _run(self, plan: Plan, view: Callable[[], PlanView]) -> None:
        started_s = self._clock.monotonic_s()
        try:
            ended = await self._roll(plan, view())
        except errors.Fenced as error:
            self.under_way = False
            self.ports.log("rollout ended: the role was lost", warning=True, error=str(error))
            return
        self.under_way = False
        if ended.state == RolloutState.HALTED:
            self._retry_at_s = self._clock.monotonic_s() + self._settings.retry_s
        if ended.state == RolloutState.DONE:
            self.ports.duration("trefoil_rollout_duration_seconds", self._clock.monotonic_s() - started_s)
        self.ports.ended()

    async def _roll(self, target: Plan, view: PlanView) -> Rollout:
        """One rollout; its last state. While slices start, those that are READY already help if the load needs them."""
        self._superseded = False
        spent_before_j = self._spending.unallocated_j
        self.rollout = Rollout(target.revision, RolloutState.APPLYING, since_s=self._clock.now_s())
        try:
            await self._renew_statuses()
            snapshot = fleet_snapshot(self._observation.fleet(self._clock.now_s()), self.commanded, self._routed)
            path = self.ports.find_path(view, snapshot, target)
            self.rollout = replace(
                self.rollout,
                steps=len(path.steps),
                moving=path.moving,
                capacity_floor_per_s=dict(path.floor_per_s or {}),
                why=path.why,
            )
            if path.halted:
                return await self._finish(RolloutState.HALTED, path.why)
            for number, step in enumerate(path.steps, 1):
                self.rollout = replace(self.rollout, step=number)
                await self._step(target, step, view)
            if path.blocked:
                return await self._finish(RolloutState.HALTED, path.blocked)
            await self._until_acknowledged()
            spent_j = self._spending.unallocated_j - spent_before_j
            return await self._finish(RolloutState.DONE, path.why, spent_j)
        except Superseded:
            return await self._finish(RolloutState.SUPERSEDED, "a newer plan takes over")
        except (errors.Unavailable, errors.InvalidInput, StepTimeout) as error:
            return await self._finish(RolloutState.HALTED, str(error))

    # --- one step -----------------------------------------------------------------------------------------------------

    async def _step(self, target: Plan, step: Step, view: PlanView) -> None:
        self._leave_if_superseded()
        state = RolloutState.WAITING_ACK if step.drained else RolloutState.APPLYING
        revision = await self._publish(target, step.routes, state, step.name, step.drained)
        if step.drained:
            await self._until_drained(revision, step.drained)
        await self._command_nodes(step.devices, revision)
        if step.ready:
            await self._set_state(RolloutState.WAITING_READY)
            try:
                await self._wait_until(
                    self._settings.ready_timeout_s,
                    lambda: self._not_ready(step.ready),
                    "READY",
                    beside=lambda: self._admit_early(target, view),
                )
            except StepTimeout:
                for key, why in unmakeable(self._observation.fleet(self._clock.now_s()), step.ready).items():
                    self._refuse((key,), why)
                raise

    async def _admit_early(self, target: Plan, view: PlanView) -> None:
        """Let slices that are READY help, when the load needs them."""
        serving = serving_slices(self._observation.fleet(self._clock.now_s()), self.commanded)
        routes = early_routes(view, serving, self._routed, target)
        if routes is not None:
            await self._publish(target, routes, RolloutState.WAITING_READY, "early")

    @property
    def _routed(self) -> tuple[Route, ...]:
        return self.published.routes if self.published is not None else ()

    async def _publish(
        self,
        target: Plan,
        routes: tuple[Route, ...],
        state: RolloutState,
        name: str,
        drained: frozenset[SliceKey] = frozenset(),
    ) -> Revision:
        """Routes under the next step of the target's revision."""
        first = self.published is None or self.published.revision < target.revision
        step = 0 if first or self.published is None else self.published.revision.step + 1
        plan = replace(target, revision=replace(target.revision, step=step), nodes=(), routes=routes)
        self.rollout = replace(self.rollout, target=plan.revision, state=state)
        self.ports.save({"published": plan})  # first: the next controller must know what dispatchers route by
        await self._write_until_done(lambda: self.ports.publish(plan=plan, rollout=self.rollout, drained=drained))
        self.published = plan
        self.ports.log(
            "rollout step", name=name, revision=str(plan.revision), step=self.rollout.step, state=state.name,
            of=self.rollout.steps,
        )  # fmt: skip
        return plan.revision

    async def _command_nodes(self, devices: Devices, revision: Revision) -> None:
        """Kept on disk first: Redis must not go back to an older one under the next controller, which commands
        again."""
        fleet = self._observation.fleet(self._clock.now_s())
        for node in fleet.nodes:
            if node.node in fleet.stale:
                continue
            mine = tuple([devices[d.device] for d in node.devices if d.device in devices])
            before = self.commanded.get(node.node)
            if node.node in self._confirmed and before is not None and _same(before, mine):
                continue
            plan = sealed(NodePlan(node=node.node, devices=mine), revision)
            self.ports.save({"commanded": list({**self.commanded, node.node: plan}.values())})
            try:
                changed = await self.ports.command(node, plan)
            except errors.InvalidInput as error:
                self._refuse(refused_keys(plan, str(error)), str(error))
                raise
            self._confirmed.add(node.node)
            self.commanded[node.node] = plan
            await self._write_until_done(partial(self.ports.publish, node=plan))
            self.ports.log("node plan", node=node.node, revision=str(revision), changed=changed)

    def _refuse(self, keys: Iterable[SliceKey], why: str) -> None:
        """What an agent refuses is planned around from now on."""
        self._observation.refusals.note(keys, why, self._clock.now_s())

    async def _until_drained(self, revision: Revision, drained: frozenset[SliceKey]) -> None:
        """Every live worker routes by this table; then nothing is in flight on what leaves."""
        await self._wait_until(self._settings.ack_timeout_s, lambda: self._not_acked(revision), "", give_up=False)
        await self._set_state(RolloutState.WAITING_DRAIN)
        await self._wait_until(self._settings.drain_timeout_s, lambda: self._in_flight(drained), "", give_up=False)

    async def _until_acknowledged(self) -> None:
        """Every live worker routes by the last revision: without that nothing is done. One that refuses it halts the
        rollout, with its reason."""
        revision = self.published.revision if self.published is not None else Revision()
        if self._not_acked(revision):
            await self._set_state(RolloutState.WAITING_ACK)
            timeout_s = self._settings.ack_timeout_s
            await self._wait_until(timeout_s, lambda: self._not_acked(revision), "acknowledged")

    def _not_acked(self, revision: Revision) -> str:
        late = [ack for ack in self._observation.inputs.acks if ack.table != revision]
        if not late:
            return self._observation.inputs.blind
        refusing = [ack for ack in late if ack.refused and ack.refused_plan == revision]
        first = (refusing or late)[0]
        why = f"; it refuses {revision}: {first.refused}" if refusing else ""
        return f"worker {first.dispatcher}:{first.worker} routes by {first.table}{why}"

    def _in_flight(self, drained: frozenset[SliceKey]) -> str:
        for ack in self._observation.inputs.acks:
            for load in ack.slices:
                if load.slice in drained and (load.in_flight or load.open_sequences):
                    sequences = f" and {load.open_sequences} open sequences" if load.open_sequences else ""
                    return f"{load.in_flight} requests in flight{sequences} on {load.slice.name}"
        return ""

    def _not_ready(self, wanted: Mapping[SliceKey, PlannedSlice]) -> str:
        fleet = self._observation.fleet(self._clock.now_s())
        found = {s.key: s for n in fleet.nodes for d in n.devices for s in d.slices if s.key in wanted}
        late = [key for key, part in wanted.items() if key not in found or not _serves(found[key], part)]
        if not late:
            return ""
        first = min(late)
        status = found.get(first)
        state = "absent" if status is None else status.state.name
        return f"slice {first.name} is {state}{f' ({status.why})' if status and status.why else ''}"

    # --- waiting and writing ------------------------------------------------------------------------------------------

    async def _wait_until(
        self,
        timeout_s: float,
        missing: Callable[[], str],
        what: str,
        give_up: bool = True,
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Look until nothing is missing. After the timeout halt, or go on all the same and say so."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        why = ""
        while True:
            try:
                await self.ports.refresh_statuses()
                why = missing()
                if not why:
                    return
            except errors.StateUnavailable as error:
                # Slices cannot be seen to be ready or idle now; time without sight does not count.
                deadline_s = self._clock.monotonic_s() + timeout_s
                why = str(error)
            self._leave_if_superseded()
            if beside is not None:
                await beside()
            if self._clock.monotonic_s() >= deadline_s:
                if give_up:
                    raise StepTimeout(f"not {what} after {timeout_s:g} s: {why}")
                self.ports.log("going on without", warning=True, waited_s=timeout_s, why=why)
                return
            await self.ports.wait(deadline_s)

    async def _write_until_done(self, write: Callable[[], Awaitable[None]]) -> None:
        """Keep trying while Redis is down: a step that is begun is finished."""
        while True:
            try:
                await write()
                return
            except errors.StateUnavailable as error:
                self.ports.log("rollout waits for Redis", warning=True, error=str(error))
            self._leave_if_superseded()
            await self.ports.wait(math.inf)

    async def _set_state(self, state: RolloutState) -> None:
        self.rollout = replace(self.rollout, state=state)
        await self._write_until_done(lambda: self.ports.publish(rollout=self.rollout))

    async def _finish(self, state: RolloutState, why: str, spent_j: float = 0.0) -> Rollout:
        self.rollout = replace(self.rollout, state=state, why=why, spent_j=spent_j)
        try:
            await self.ports.publish(rollout=self.rollout)
        except (errors.StateUnavailable, errors.Fenced) as error:
            self.ports.log("end of the rollout not written", warning=True, error=str(error))
        halted = state == RolloutState.HALTED
        self.ports.log("rollout ended", warning=halted, target=str(self.rollout.target), state=state.name, why=why)
        return self.rollout

    def _leave_if_superseded(self) -> None:
        if self._superseded:
            raise Superseded

    async def _renew_statuses(self) -> None:
        """What agents were commanded a moment ago may not have been read yet: ask them."""
        fleet = self._observation.fleet(self._clock.now_s())
        asked = {n.node: n for n in fleet.nodes if n.node in self.commanded and n.node not in fleet.stale}
        await self.ports.query_agents(asked)


def _same(before: NodePlan, devices: tuple[PlannedDevice, ...]) -> bool:
    """Whether a node got an equal command, in any order of its slices."""
    return before.devices == devices or before.content_digest == NodePlan(devices=devices).content_digest


def _serves(status: SliceStatus, part: PlannedSlice) -> bool:
    return status.state == SliceState.READY and same_variants(status.hosted, part.hosted)
