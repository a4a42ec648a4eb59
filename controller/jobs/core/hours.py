"""Hours of open jobs, from a planner's view: the plan that dispatchers follow, and what `exact` keeps awake for it.

Source: ours. Data: a view, open jobs, a rule. Result: planned hours by job, demand of the slot that has begun.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from controller.jobs.core.open_jobs import pending_jobs, unplanned_grams
from controller.jobs.core.planning import plan_jobs
from controller.jobs.core.rules import Rule
from controller.jobs.core.slots import devices_needed, load_ahead, slots_of
from trefoil.core.brains import PlanView
from trefoil.core.common import Revision
from trefoil.core.jobs.planned import FlexibleDemand, OpenJobs, PlannedJobs, Shortage, Slot, planned_jobs
from trefoil.core.units import HOUR_S

SLOT_S: Final = HOUR_S
HORIZON_MIN_S, HORIZON_MAX_S = 6 * HOUR_S, 48 * HOUR_S


def plan_hours(
    view: PlanView, found: Sequence[OpenJobs], ahead_s: float, revision: Revision, rule: Rule = plan_jobs
) -> tuple[PlannedJobs, tuple[FlexibleDemand, ...], list[tuple[str, str]]]:
    """Plan open jobs in calendar time; `ahead_s`: what the view's time lacks to be that. Also what the planner of
    slices is to know, and of each record that cannot be planned (folder, why).

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
    plan = waking = rule(jobs, slots, now_s)
    if any(one.short_of == Shortage.CAPACITY for one in plan.prospects):
        waking = rule(jobs, every, now_s)
    carbon = {slot.carbon.starts_at_s: slot.carbon.p50_g_per_kwh for slot in slots}
    by_id = {job.job_id: job for job in jobs}
    devices = devices_needed(every, waking.portions, now_s)
    flexible = tuple(replace(one, devices=devices) for one in waking.now)
    return planned_jobs(plan, revision, by_id, carbon, unplanned_grams(jobs, slots, now_s)), flexible, wrong


def _in_calendar(slot: Slot, ahead_s: float) -> Slot:
    carbon = slot.carbon
    return replace(
        slot, carbon=replace(carbon, starts_at_s=carbon.starts_at_s + ahead_s, ends_at_s=carbon.ends_at_s + ahead_s)
    )
