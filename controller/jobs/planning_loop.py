"""Plans jobs live, beside the control loop: open jobs from Redis in, their planned hours to Redis out.

It solves in a thread, once a minute and whenever a job comes or ends. What it cannot plan runs whenever slices are
idle; where no plan can be made the last one stays, until dispatchers find it too old.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import structlog

from controller.jobs.core.open_jobs import pending_jobs, unplanned_grams
from controller.jobs.core.planning import plan_jobs
from controller.jobs.core.slots import devices_needed, load_ahead, slots_of
from controller.observe.core.observation import LatestInputs
from controller.planners.exact.milp import CpuLimitHit, NothingFound
from controller.role.leadership import Leadership
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.errors import TrefoilError
from trefoil.core.jobs.planned import FlexibleDemand, OpenJobs, PlannedJobs, Shortage, Slot, planned_jobs
from trefoil.core.units import HOUR_S
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

LOG = structlog.get_logger()
LOOK_S: Final = 1.0
PERIOD_S: Final = 60.0
STALE_S: Final = 300.0  # without a plan, after which nothing is kept awake for jobs
SLOT_S: Final = HOUR_S
HORIZON_MIN_S, HORIZON_MAX_S = 6 * HOUR_S, 48 * HOUR_S
OPEN_TTL_S: Final = 60.0  # of the records: dispatcher/jobs/planned_hours.py


class JobsPlanning:
    """Planner of jobs while this controller leads. `view`: of this moment, in its own time."""

    def __init__(
        self,
        state: State,
        leadership: Leadership,
        view: Callable[[], PlanView],
        inputs: LatestInputs,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._state, self._leadership, self._view = state, leadership, view
        self._inputs, self._metrics, self._clock = inputs, metrics, clock
        self._planned: frozenset[str] = frozenset()  # names of the open jobs that were looked at last
        self._planned_s, self._made_s, self._slot = -math.inf, -math.inf, -1
        self._epoch, self._revision = 0, Revision()

    async def run(self) -> None:
        """Plan for ever."""
        why = ""
        while True:
            try:
                await self.step()
                why = ""
            except TrefoilError as error:
                if str(error) != why:
                    why = str(error)
                    LOG.warning("jobs are not planned", why=why)
            except Exception:  # jobs run without a plan; the control loop, which nothing replaces, goes on
                LOG.exception("planning jobs failed")
            await self._clock.sleep(LOOK_S)

    async def step(self) -> None:
        """Plan if jobs have come or ended, or the last plan is PERIOD_S old.

        Raises:
            StateUnavailable, Fenced: nothing was written.
            InvalidInput: the view has numbers that cannot be planned with.
        """
        epoch = self._leadership.epoch
        if not epoch or self._clock.monotonic_s() - self._made_s > STALE_S:
            self._inputs.flexible = ()
        if not epoch:
            return
        found = await self._open_jobs()
        names = frozenset(f"{told.folder}/{one.job_id}" for told in found for one in told.jobs)
        now_s, slot = self._clock.monotonic_s(), math.floor(self._clock.now_s() / SLOT_S)
        same = (names, epoch, slot) == (self._planned, self._epoch, self._slot)
        if same and (not names or now_s - self._planned_s < PERIOD_S):
            return
        if not names and self._revision.epoch != epoch:
            return  # this leader has planned none: there is nothing to take back
        self._planned, self._epoch, self._slot, self._planned_s = (
            names,
            epoch,
            slot,
            now_s,
        )  # a failure is tried again in PERIOD_S
        ahead_s, view = self._clock.calendar_ahead_s(), self._view()
        try:
            plan, flexible, wrong = await asyncio.to_thread(_plan, view, found, ahead_s, self._next_revision(epoch))
        except (CpuLimitHit, NothingFound) as error:
            LOG.warning("no plan of jobs: the last one stays", why=str(error))
            return
        for folder, why in wrong:
            if self._inputs.set_aside.note(self._state.keys.jobs_open(folder), "value", why, self._clock.now_s()):
                LOG.warning("an open job is not planned", folder=folder, why=why)
        await self._leadership.write([Put(self._state.keys.jobs_plan(), plan)])
        self._revision, self._made_s, self._inputs.flexible = plan.revision, now_s, flexible
        in_time = sum(one.in_time for one in plan.jobs)
        for state, count in (("in_time", in_time), ("in_danger", len(plan.jobs) - in_time)):
            self._metrics.set("trefoil_jobs_planned", count, state=state)

    def _next_revision(self, epoch: int) -> Revision:
        return Revision(epoch, self._revision.number + 1 if self._revision.epoch == epoch else 1)

    async def _open_jobs(self) -> list[OpenJobs]:
        """Open jobs of all folders whose writer still owns them."""
        prefix, found = self._state.keys.jobs_open_prefix(), []
        for key, told in (await self._state.scan(prefix, OpenJobs, OPEN_TTL_S)).items():
            epoch = await self._state.epoch_of(f"jobs:{told.folder}")
            if told.epoch == epoch:
                found.append(told)
            else:
                why = f"epoch {told.epoch}, its jobs are owned under {epoch}"
                self._inputs.set_aside.note(key, "value", why, self._clock.now_s())
        return sorted(found, key=lambda told: told.folder)


def _plan(
    view: PlanView, found: Sequence[OpenJobs], ahead_s: float, revision: Revision
) -> tuple[PlannedJobs, tuple[FlexibleDemand, ...], list[tuple[str, str]]]:
    """Plan open jobs in calendar time; `ahead_s`: what the view's time lacks to be that.

    Jobs are held back only for what slices that run have time for. Where that is not enough in time, devices asleep are
    planned with, too: those jobs run at once, and the planner of slices wakes what they need in this slot.
    """
    now_s = view.now_s + ahead_s
    latest_s = max((one.complete_by_s for told in found for one in told.jobs), default=now_s)
    until_s = view.now_s + min(HORIZON_MAX_S, max(HORIZON_MIN_S, latest_s - now_s + SLOT_S))
    every = [_in_calendar(slot, ahead_s) for slot in slots_of(view, SLOT_S, until_s, load_ahead(view, until_s))]
    slots = [replace(slot, pools=tuple(pool for pool in slot.pools if not pool.idle_w)) for slot in every]
    families = {cost.family for slot in slots for pool in slot.pools for cost in pool.costs}
    jobs, wrong = pending_jobs(found, families, view.carbon.series.zone, now_s)
    plan = waking = plan_jobs(jobs, slots, now_s)
    if any(one.short_of == Shortage.CAPACITY for one in plan.prospects):
        waking = plan_jobs(jobs, every, now_s)
    carbon = {slot.carbon.starts_at_s: slot.carbon.p50_g_per_kwh for slot in slots}
    items = {job.job_id: job.items_left for job in jobs}
    devices = devices_needed(every, waking.portions, now_s)
    flexible = tuple(replace(one, devices=devices) for one in waking.now)
    return planned_jobs(plan, revision, items, carbon, unplanned_grams(jobs, slots, now_s)), flexible, wrong


def _in_calendar(slot: Slot, ahead_s: float) -> Slot:
    carbon = slot.carbon
    return replace(
        slot, carbon=replace(carbon, starts_at_s=carbon.starts_at_s + ahead_s, ends_at_s=carbon.ends_at_s + ahead_s)
    )
