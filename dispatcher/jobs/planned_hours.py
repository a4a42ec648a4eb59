"""Tells the controller which jobs of a folder have not ended, and follows its plan of their hours, through Redis.

Without a plan jobs run whenever slices are idle. The worker that owns the jobs writes; all workers read.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from dispatcher.jobs.core.job import Job
from dispatcher.jobs.core.planned_hours import PlanSight, may_start
from trefoil.core.common import Lease
from trefoil.core.errors import PlanError, StateUnavailable
from trefoil.core.jobs.planned import OpenJob, OpenJobs, PlannedJob, PlannedJobs
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import State

LOG = structlog.get_logger()
READ_S: Final = 2.0
WRITE_S: Final = 20.0
OPEN_TTL_S: Final = 60.0
CONTROLLER: Final = "controller"


class PlannedHours:
    """Planned hours of the jobs of a folder, as one worker sees them."""

    def __init__(self, state: State, clock: Clock, verify: Callable[[PlannedJobs], None]) -> None:
        """`verify` raises PlanError for a plan that the controller did not write."""
        self.folder = ""
        self._state, self._clock, self._sight, self._verify = state, clock, PlanSight(), verify
        self._proven: PlannedJobs | None = None
        self._refused = ""  # why the plan in Redis is not followed
        self._read_s = self._written_s = -math.inf
        self._written: tuple[int, frozenset[str]] = 0, frozenset()  # epoch and names
        self._pace: dict[str, float] = {}

    async def read(self) -> None:
        """Look at the plan in Redis. Where that does not answer the last one goes stale."""
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s < READ_S:
            return
        self._read_s, before = now_s, self._sight.why
        try:
            plan = await self._state.get(self._state.keys.jobs_plan(), PlannedJobs)
            epoch = await self._state.epoch_of(CONTROLLER)
            plan = self._believed(plan)
        except StateUnavailable:
            plan, epoch = None, 0  # the last one ages; whoever needs Redis says that it is away
        self._sight.look(plan, epoch, now_s)
        if self._sight.why != before:
            LOG.info("plan of jobs", why=self._sight.why or "followed")

    def _believed(self, plan: PlannedJobs | None) -> PlannedJobs | None:
        """The plan, if the controller wrote it; else None, and the last one stays until it is stale."""
        if plan is None or plan == self._proven:
            return plan
        try:
            self._verify(plan)
        except PlanError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                LOG.warning("a plan of jobs is not followed", why=self._refused)
            return None
        self._proven, self._refused = plan, ""
        return plan

    async def write(self, lease: Lease, jobs: Iterable[tuple[Job, int, float]]) -> None:
        """Write the open jobs, each with its items and grams that are left, where they have changed or it is time.

        Raises:
            Fenced, StateUnavailable: nothing was written.
        """
        now_s, found = self._clock.monotonic_s(), list(jobs)
        names = lease.epoch, frozenset(job.id for job, _, _ in found)
        if names == self._written and (not found or now_s - self._written_s < WRITE_S):
            return
        told = tuple(
            OpenJob(
                job.id, job.family, left, job.complete_by_s, job.priority, job.min_accuracy, job.zones,
                bounded=job.grams_max > 0, grams_left=max(0.0, grams),
            )
            for job, left, grams in found
        )  # fmt: skip
        key = self._state.keys.jobs_open(self.folder)
        await self._state.put(lease, key, OpenJobs(self.folder, lease.epoch, told), OPEN_TTL_S)
        self._written, self._written_s = names, now_s

    def of(self, name: str) -> PlannedJob | None:
        """Planned hours of a job; None: it is not planned."""
        return self._sight.of(f"{self.folder}/{name}", self._calendar_s())

    def note_pace(self, family: str, per_s: float) -> None:
        """Note how many items of a family's job end in a second while it is not held back."""
        self._pace[family] = per_s

    def may_start(self, job: Job, items: int, waiting: int) -> tuple[float, str]:
        """Items of a job that may start now, of so many that have not, and why no more."""
        pace = self._pace.get(job.family, 0.0)
        now_s, until_s = self._calendar_s(), self._sight.until_s
        return may_start(self.of(job.id), until_s, items, waiting, job.complete_by_s, now_s, pace)

    def _calendar_s(self) -> float:
        return self._clock.now_s() + self._clock.calendar_ahead_s()
