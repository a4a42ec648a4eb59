"""Tells the controller which jobs of a folder have not ended, and follows its plan of their hours, through Redis.

Without a plan jobs run whenever slices are idle. The worker that owns the jobs writes; all workers read.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

import structlog

from dispatcher.jobs.core.job import Job
from dispatcher.jobs.core.planned_hours import PlanSight, away_until, may_start, planned_variants, to_send
from trefoil.core.common import Lease, Revision
from trefoil.core.errors import PlanError, StateUnavailable
from trefoil.core.jobs.planned import OpenJob, OpenJobs, PlannedJob, PlannedJobs, RequestOffer
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import State

LOG = structlog.get_logger()
READ_S: Final = 2.0
WRITE_S: Final = 20.0
OPEN_TTL_S: Final = 60.0
CONTROLLER: Final = "controller"


class Left(NamedTuple):
    """What is left of an open job: items and grams; items that peers' zones have now, and joules that move one."""

    job: Job
    items: int
    grams: float
    away: int = 0
    transfer_j: float = 0.0


class PlannedHours:
    """Planned hours of the jobs of a folder, as one worker sees them."""

    def __init__(self, state: State, clock: Clock, verify: Callable[[PlannedJobs], None]) -> None:
        """`verify` raises PlanError for a plan that the controller did not write."""
        self.folder = ""
        self._state, self._clock, self._sight, self._verify = state, clock, PlanSight(), verify
        self._proven: PlannedJobs | None = None
        self._refused = ""  # why the plan in Redis is not followed
        self._read_s = self._written_s = -math.inf
        self._written: tuple[int, frozenset[tuple[str, int]]] = 0, frozenset()  # epoch, names and items away
        self._sent: Counter[tuple[str, str]] = Counter()  # items by job and zone under the revision
        self._sent_under = Revision()
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
            plan, epoch = None, 0  # the last one ages; other parts report that Redis is unavailable
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

    async def write(self, lease: Lease, jobs: Sequence[Left]) -> None:
        """Write the open jobs where they have changed or it is time. Items that peers have are planned there.

        Raises:
            Fenced, StateUnavailable: nothing was written.
        """
        now_s, names = self._clock.monotonic_s(), (lease.epoch, frozenset((one.job.id, one.away) for one in jobs))
        if names == self._written and (not jobs or now_s - self._written_s < WRITE_S):
            return
        told = tuple(
            OpenJob(
                job.id, job.family, items - away, job.complete_by_s, job.priority, job.min_accuracy, job.zones,
                bounded=job.grams_max > 0, grams_left=max(0.0, grams), transfer_j=transfer_j,
            )
            for job, items, grams, away, transfer_j in jobs
            if items > away
        )  # fmt: skip
        key = self._state.keys.jobs_open(self.folder)
        await self._state.put(lease, key, OpenJobs(self.folder, lease.epoch, told), OPEN_TTL_S)
        self._written, self._written_s = names, now_s

    def of(self, name: str) -> PlannedJob | None:
        """Planned hours of a job; None: it is not planned."""
        return self._sight.of(f"{self.folder}/{name}", self._calendar_s())

    def requests(self) -> tuple[RequestOffer, ...]:
        """What other zones offer for requests now."""
        return self._sight.requests(self._calendar_s())

    def note_pace(self, family: str, per_s: float) -> None:
        """Note how many items of a family's job end in a second while it is not held back."""
        self._pace[family] = per_s

    def may_start(self, job: Job, items: int, waiting: int, usable: Collection[str] = ()) -> tuple[float, str]:
        """Items of a job that may start now, of so many that have not, and why no more. `usable`: peers' zones that
        take some."""
        pace = self._pace.get(job.family, 0.0)
        now_s, until_s = self._calendar_s(), self._sight.until_s
        away = sum(self._sent_by_plan(job.id, zone) for zone in job.zones)
        return may_start(
            self.of(job.id), until_s, items, waiting, job.complete_by_s, now_s, pace, usable, away
        )  # fmt: skip

    def variants(self, job: Job) -> frozenset[str]:
        """Variants that items of a job may start on now while it is held back; none: any."""
        return planned_variants(self.of(job.id), self._calendar_s())

    def to_send(self, job: Job, zone: str, items_max: int) -> tuple[int, float]:
        """Items of a job to give a peer's zone now, at most so many, and until when [UTC s]; each once for a plan."""
        now_s = self._calendar_s()
        planned, ends_s = to_send(self.of(job.id), zone, now_s)
        count = min(items_max, planned - self._sent_by_plan(job.id, zone))
        until_s = away_until(count, ends_s, job.complete_by_s, self._pace.get(job.family, 0.0))
        return (count, until_s) if count > 0 and until_s > now_s else (0, 0.0)

    def note_sent(self, job: Job, zone: str, items: int) -> None:
        """Note items that go to a peer's zone."""
        self._sent_by_plan(job.id, zone)
        self._sent[job.id, zone] += items

    def _sent_by_plan(self, job: str, zone: str) -> int:
        """Items away by the plan that is followed."""
        if self._sent_under != self._sight.revision:
            self._sent_under = self._sight.revision
            self._sent.clear()
        return self._sent[job, zone]

    def _calendar_s(self) -> float:
        return self._clock.now_s() + self._clock.calendar_ahead_s()
