"""Runs one rollout at a time as a task beside the loop, and says when a halted one is to be tried again."""

import asyncio
from collections.abc import Callable

import structlog

from controller.act import Actor
from controller.terms import best_way, early
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.plan import Plan, RolloutState
from trefoil.runtime.clock import Clock
from trefoil.runtime.telemetry import Metrics


class Rolling:
    """`view` is asked when a rollout begins, `wake` called when it has ended."""

    def __init__(
        self,
        actor: Actor,
        retry_s: float,
        metrics: Metrics,
        clock: Clock,
        view: Callable[[], PlanView],
        wake: Callable[[], None],
    ) -> None:
        self._actor, self._retry_s, self._metrics, self._clock = actor, retry_s, metrics, clock
        self._view, self._wake = view, wake
        self._task: asyncio.Task[None] | None = None
        self._retry_at_s: float | None = None
        self._log = structlog.get_logger()

    def check(self) -> None:
        """A bug in a rollout ends the process."""
        if self._task is not None and self._task.done():
            self._task.result()

    @property
    def retry_due(self) -> bool:
        """A halted rollout shall be tried again: the load may have fallen, an agent may be back."""
        return self._retry_at_s is not None and self._clock.monotonic_s() >= self._retry_at_s

    @property
    def state(self) -> tuple[RolloutState, str]:
        """Where the newest rollout stands, and why."""
        if self._task is not None and not self._task.done():
            return RolloutState.APPLYING, ""
        return self._actor.rollout.state, self._actor.rollout.why

    async def settle(self) -> None:
        """End the rollout under way where that is safe."""
        if self._task is not None:
            self._actor.supersede()
            await self._task
            self._task = None

    async def begin(self, plan: Plan, why: str) -> None:
        """Roll a numbered plan out, in place of what is under way."""
        await self.settle()
        self._retry_at_s = None
        self._log.info("roll out", revision=str(plan.revision), why=why)
        self._task = asyncio.create_task(self._run(plan), name="rollout")

    async def _run(self, plan: Plan) -> None:
        started_s = self._clock.monotonic_s()
        view = self._view()
        try:
            ended = await self._actor.roll(
                plan,
                lambda stands, target: best_way(view, stands, target),
                lambda stands, target: early(view, stands, target),
            )
        except errors.Fenced as error:
            self._log.warning("rollout ended: the role was lost", error=str(error))
            return
        if ended.state == RolloutState.HALTED:
            self._retry_at_s = self._clock.monotonic_s() + self._retry_s
        if ended.state == RolloutState.DONE:
            self._metrics.observe("trefoil_rollout_duration_seconds", self._clock.monotonic_s() - started_s)
        self._wake()
