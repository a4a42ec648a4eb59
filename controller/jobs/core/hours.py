"""Hours of open jobs, from a planner's view: the plan that dispatchers follow, and what `exact` keeps awake for it.

Source: ours. Data: a view, open jobs, a rule. Result: planned hours by job, demand of the slot that has begun.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from controller.jobs.core.open_jobs import pending_jobs, unplanned_grams
from controller.jobs.core.planning import plan_jobs
from controller.jobs.core.rules import Rule
from controller.jobs.core.slots import devices_needed, is_awake, load_ahead, slots_of
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.jobs.planned import FlexibleDemand, OpenJobs, PlannedJobs, Portion, Shortage, Slot, planned_jobs
from trefoil.core.units import HOUR_S

SLOT_S: Final = HOUR_S
HORIZON_MIN_S, HORIZON_MAX_S = 6 * HOUR_S, 48 * HOUR_S
NO_OFFERS: Final[Mapping[str, Sequence[Slot]]] = {}


def zone_slots(view: PlanView, ahead_s: float) -> list[Slot]:
    """Slots of this zone from now on, in calendar time; `ahead_s`: what the view's time lacks to be that."""
    until_s = view.now_s + HORIZON_MAX_S
    slots = slots_of(view, SLOT_S, until_s, load_ahead(view, until_s))
    times = ((slot.carbon.starts_at_s + ahead_s, slot.carbon.ends_at_s + ahead_s) for slot in slots)
    return [
        replace(slot, carbon=replace(slot.carbon, starts_at_s=starts_s, ends_at_s=ends_s))
        for slot, (starts_s, ends_s) in zip(slots, times, strict=True)
    ]


def plan_hours(
    every: Sequence[Slot],
    found: Sequence[OpenJobs],
    now_s: float,
    revision: Revision,
    rule: Rule = plan_jobs,
    offered: Mapping[str, Sequence[Slot]] = NO_OFFERS,
) -> tuple[PlannedJobs, tuple[FlexibleDemand, ...], list[tuple[str, str]], tuple[Portion, ...]]:
    """Plan open jobs in calendar time over the slots of this zone; `offered`: slots of peers.
    Also what the planner of slices is to know, of each record that cannot be planned (folder, why), and the portions.

    Jobs are held back only for what slices that run have time for. Where that is not enough in time, devices asleep are
    planned with, too: those jobs run at once, the planner of slices wakes what they need in this slot, and what is said
    of them counts on it.
    """
    home = every[0].zone
    latest_s = max((one.complete_by_s for told in found for one in told.jobs), default=now_s)
    until_s = now_s + max(HORIZON_MIN_S, latest_s - now_s + SLOT_S)
    every = [slot for slot in every if slot.carbon.starts_at_s < until_s]
    slots = [replace(slot, pools=tuple(pool for pool in slot.pools if is_awake(pool))) for slot in every]
    of_peers = [slot for zone in sorted(offered) for slot in offered[zone]]
    families = {cost.family for slot in slots + of_peers for pool in slot.pools for cost in pool.costs}
    jobs, wrong = pending_jobs(found, families, home, now_s, offered)
    plan = waking = rule(jobs, slots + of_peers, now_s)
    short = {one.job_id for one in plan.prospects if one.short_of == Shortage.CAPACITY}
    if short:
        waking = rule(jobs, every + of_peers, now_s)
    carbon = {(slot.zone, slot.carbon.starts_at_s): slot.carbon.p50_g_per_kwh for slot in slots + of_peers}
    by_id = {job.job_id: job for job in jobs}
    devices = devices_needed(every, waking.portions, now_s)
    own = {one.family: [p for p in waking.portions if by_id[p.job_id].family == one.family] for one in waking.now}
    flexible = tuple(
        replace(one, devices=devices, own_devices=devices_needed(every, own[one.family], now_s, one.family))
        for one in waking.now
        if one.zone == home
    )
    others = unplanned_grams(jobs, slots, now_s)
    promised = {one.job_id: one for one in waking.prospects if one.job_id in short}
    written = planned_jobs(plan, revision, by_id, carbon, others, home, promised)
    return written, flexible, wrong, plan.portions
