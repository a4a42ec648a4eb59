"""Plans jobs live, beside the control loop: open jobs from Redis in, their planned hours to Redis out.

It solves in a thread, once a minute and whenever a job comes or ends. What it cannot plan runs whenever slices are
idle; where no plan can be made the last one stays, until dispatchers find it too old. Jobs that name zones of peers are
planned with what these offer; to peers it offers what its own plan leaves over. The plan also tells what peers offer
for requests of families that allow them.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from controller.jobs.core.hours import SLOT_S, plan_hours, zone_slots
from controller.jobs.core.offers import left_over, slots_ahead
from controller.jobs.core.requests import request_offers
from controller.jobs.zone_offers import ZoneOffers
from controller.observe.core.observation import LatestInputs
from controller.planners.exact.milp import CpuLimitHit, NothingFound
from controller.role.leadership import Leadership
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.errors import TrefoilError
from trefoil.core.jobs.planned import FlexibleDemand, Offers, OpenJobs, PlannedJobs, Portion, Slot
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Put
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

LOG = structlog.get_logger()
LOOK_S: Final = 1.0
PERIOD_S: Final = 60.0
STALE_S: Final = 300.0  # without a plan, after which nothing is kept awake for jobs
OPEN_TTL_S: Final = 60.0  # of the records: dispatcher/jobs/planned_hours.py
Looked = tuple[frozenset[str], bool, int]
"""What a plan is of: names of the open jobs, whether families allow other zones, and the leader's epoch."""


class JobsPlanning:
    """Planner of jobs while this controller leads. `view`: of this moment, in its own time."""

    def __init__(
        self,
        state: State,
        leadership: Leadership,
        view: Callable[[], PlanView],
        inputs: LatestInputs,
        plan_keys: PlanKeys,
        metrics: Metrics,
        clock: Clock,
        peers: ZoneOffers | None = None,
    ) -> None:
        self._state, self._leadership, self._view = state, leadership, view
        self._inputs, self._plan_keys, self._metrics, self._clock = inputs, plan_keys, metrics, clock
        self._others = peers or ZoneOffers((), None, clock)
        self._portions: tuple[Portion, ...] = ()  # of the plan that stands
        self._slots: tuple[float, Sequence[Slot]] = -math.inf, ()  # of this zone, and when they were computed
        self._looked: Looked = frozenset(), False, 0
        self._written = self._looked  # what the plan that was written last is of
        self._planned_s, self._made_s, self._slot = -math.inf, -math.inf, -1
        self._revision = Revision()

    async def run(self) -> None:
        """Plan forever."""
        why = ""
        while True:
            try:
                await self.step()
                why = ""
            except TrefoilError as error:
                if str(error) != why:
                    why = str(error)
                    LOG.warning("jobs are not planned", why=why)
            except Exception:  # jobs run without a plan; the control loop, which nothing replaces, continues
                LOG.exception("planning jobs failed")
            await self._clock.sleep(LOOK_S)

    async def step(self) -> None:
        """Plan if jobs have come or ended, or the last plan is PERIOD_S old. A leader without jobs writes one plan, an
        empty one: State repairs the key only where this leader has written it.

        Raises:
            StateUnavailable, Fenced: nothing was written.
        """
        epoch = self._leadership.epoch
        if not epoch or self._clock.monotonic_s() - self._made_s > STALE_S:
            self._inputs.flexible = ()
        if not epoch:
            return
        found = await self._open_jobs()
        names = frozenset(f"{told.folder}/{one.job_id}" for told in found for one in told.jobs)
        now_s, slot = self._clock.monotonic_s(), math.floor(self._clock.now_s() / SLOT_S)
        families, first = self._others.families, epoch != self._looked[2]
        looked, idle = (names, bool(families), epoch), not (names or families)
        same = looked == self._looked and (idle or slot == self._slot)
        if same and ((idle and looked == self._written) or now_s - self._planned_s < PERIOD_S):
            return
        self._looked, self._slot, self._planned_s = looked, slot, now_s  # a failure is tried again in PERIOD_S
        if idle:
            if not first:  # Redis may have lost open jobs, which workers write again within PERIOD_S
                made_s = self._clock.now_s() + self._clock.calendar_ahead_s()
                await self._write(PlannedJobs(self._next_revision(epoch), made_s, made_s), (), ())
            return
        named = {zone for told in found for one in told.jobs for zone in one.zones}
        offered = await self._offered(named | families.keys())
        of_jobs = {zone: of for zone, of in offered.items() if zone in named}
        slots, calendar_s = await self._zone_slots(0.0)
        try:
            plan, flexible, wrong, portions = await asyncio.to_thread(
                plan_hours, slots, found, calendar_s, self._next_revision(epoch), offered=of_jobs
            )
        except (CpuLimitHit, NothingFound) as error:
            LOG.warning("no plan of jobs: the last one stays", why=str(error))
            return
        for folder, why in wrong:
            if self._inputs.set_aside.note(self._state.keys.jobs_open(folder), "value", why, self._clock.now_s()):
                LOG.warning("an open job is not planned", folder=folder, why=why)
        plan = replace(plan, requests=request_offers(slots[0], offered, families, calendar_s))
        await self._write(plan, flexible, portions)

    async def _write(
        self, plan: PlannedJobs, flexible: tuple[FlexibleDemand, ...], portions: tuple[Portion, ...]
    ) -> None:
        """Write the plan of the jobs that were looked at last; raises like `step`."""
        await self._leadership.write([Put(self._state.keys.jobs_plan(), self._plan_keys.sign_jobs(plan))])
        self._written = self._looked
        self._revision, self._made_s, self._inputs.flexible = plan.revision, self._planned_s, flexible
        self._portions = portions
        in_time = sum(one.in_time for one in plan.jobs)
        for state, count in (("in_time", in_time), ("in_danger", len(plan.jobs) - in_time)):
            self._metrics.set("trefoil_jobs_planned", count, state=state)
        for rule, of in (("planned", "grams"), ("at_once", "at_once_grams"), ("evenly", "evenly_grams")):
            self._metrics.set("trefoil_jobs_planned_grams", sum(getattr(job, of) for job in plan.jobs), rule=rule)

    async def _offered(self, zones: set[str]) -> Mapping[str, Sequence[Slot]]:
        """Slots of peers that jobs name; what a peer cannot offer is named in `status`."""
        found, wrong = await self._others.ask(zones, self._clock.now_s() + self._clock.calendar_ahead_s())
        for zone, why in wrong.items():
            if self._inputs.set_aside.note(f"peer {zone}", "value", why, self._clock.now_s()):
                LOG.warning("a peer's offer is not planned with", zone=zone, why=why)
        return found

    async def offers(self) -> Offers:
        """What this zone has left over for jobs of others."""
        slots, calendar_s = await self._zone_slots(PERIOD_S)
        portions = self._portions if self._clock.monotonic_s() - self._made_s <= STALE_S else ()
        return Offers(slots[0].zone, calendar_s, left_over(slots_ahead(slots, calendar_s), portions))

    async def _zone_slots(self, age_max_s: float) -> tuple[Sequence[Slot], float]:
        """Slots of this zone, computed again if they are older, and the time of the calendar."""
        at_s, view, ahead_s = self._clock.monotonic_s(), self._view(), self._clock.calendar_ahead_s()
        if at_s - self._slots[0] >= age_max_s:
            self._slots = at_s, await asyncio.to_thread(zone_slots, view, ahead_s)
        return self._slots[1], view.now_s + ahead_s

    async def close(self) -> None:
        """Close the connections to peers."""
        await self._others.close()

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
