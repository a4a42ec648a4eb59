"""Plan of jobs: portions of each by slot, when each will finish, and what is short where it will not be in time.

Source: ours. Data: jobs, slots, the time now. Result: a plan; the same call with a new job added says before it is
accepted when it will finish. Formulation: `program.py` beside it; the jobs of a lot share its hours, the earliest
deadline first.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from controller.jobs.core.program import Division, JobsProgram, Lot, lots_of
from trefoil.core.jobs.planned import FlexibleDemand, JobsPlan, PendingJob, Portion, Prospect, Shortage, Slot
from trefoil.core.units import format_minute

CRUMB: Final = 1e-3  # items: less is the solver's tolerance


def plan_jobs(jobs: Iterable[PendingJob], slots: Sequence[Slot], now_s: float) -> JobsPlan:
    """Plan jobs over slots. The first slot of each zone begins by now; a zone's slots neither overlap nor leave gaps.

    Nothing is dropped: what cannot be in time is planned late, what has no place is counted in its prospect. Numbers
    were checked where they came from (`open_jobs.py`, `offers.py`).

    Raises:
        CpuLimitHit, NothingFound: the solver gave up; the last plan stays.
    """
    wanted = sorted(jobs, key=lambda job: job.job_id)
    assert len({job.job_id for job in wanted}) == len(wanted), [job.job_id for job in wanted]
    lots = lots_of(wanted, slots)
    program = JobsProgram(tuple(lot for lot in lots if lot.options), now_s)
    division = program.in_time() or program.least_late() if program.lots else Division((), (), {})
    return plan_of(wanted, lots, _portions(division), slots, now_s)


def plan_of(
    jobs: Sequence[PendingJob],
    lots: Sequence[Lot],
    shares: Mapping[str, Sequence[Portion]],
    slots: Sequence[Slot],
    now_s: float,
) -> JobsPlan:
    """Plan of jobs that have these portions, by job, in the order of time; with each job's prospect."""
    until_s = max((slot.carbon.ends_at_s for slot in slots), default=now_s)
    without = {job.job_id: lot.short_of for lot in lots if not lot.options for job in lot.jobs}
    prospects = tuple(
        _prospect(job, shares.get(job.job_id, []), without.get(job.job_id, Shortage.NONE), until_s) for job in jobs
    )
    portions = tuple(one for job in jobs for one in shares.get(job.job_id, []))
    begun = {slot.zone: slot.carbon.starts_at_s for slot in slots if slot.carbon.starts_at_s <= now_s}
    now = _demand_now({job.job_id: job for job in jobs}, portions, begun)
    return JobsPlan(now_s, until_s, portions, prospects, now, grams=sum(one.grams for one in portions))


def _portions(found: Division) -> dict[str, list[Portion]]:
    """Portions by job: each lot's items in the order of time, to the earliest deadline first."""
    used_s: dict[tuple[str, str, float], float] = defaultdict(float)
    for lot, amounts in zip(found.lots, found.items, strict=True):
        for option, items in zip(lot.options, amounts, strict=True):
            used_s[option.place] += items * option.cost.device_s
    shares: dict[str, list[Portion]] = defaultdict(list)
    for lot, amounts in zip(found.lots, found.items, strict=True):
        left = {job.job_id: float(job.items_left) for job in lot.jobs}
        in_time = sorted(zip(lot.options, amounts, strict=True), key=lambda one: one[0].slot.carbon.ends_at_s)
        for option, items in in_time:
            added_g = found.added_g.get(option.place, 0.0) / max(used_s[option.place], CRUMB) * option.cost.device_s
            for name in left:
                part = min(items, left[name])
                if part > CRUMB:
                    carbon = option.slot.carbon
                    shares[name].append(
                        Portion(
                            name, option.slot.zone, option.pool.name, carbon.starts_at_s, carbon.ends_at_s,
                            part, part * (option.item_g + added_g), part * option.cost.device_s, option.cost.variant,
                        )
                    )  # fmt: skip
                items, left[name] = items - part, left[name] - part
    return shares


def _prospect(job: PendingJob, portions: Sequence[Portion], without: Shortage, until_s: float) -> Prospect:
    in_time = late = 0.0
    for one in portions:
        length_s = one.ends_at_s - one.starts_at_s
        soon = one.items * min(1.0, max(0.0, (job.complete_by_s - one.starts_at_s) / length_s))
        in_time, late = in_time + soon, late + one.items - soon
    unplaced = max(0.0, job.items_left - in_time - late)
    crumbs = max(CRUMB * (1 + len(portions)), 1e-6 * job.items_left)
    unplaced, late = (0.0 if amount <= crumbs else amount for amount in (unplaced, late))
    spent_g = sum(one.grams for one in portions)
    finishes_at_s = max((one.ends_at_s for one in portions), default=0.0) if not unplaced else 0.0
    short_of = without
    if short_of == Shortage.NONE and (late or (unplaced and job.complete_by_s <= until_s)):
        short_of = Shortage.GRAMS if unplaced and math.isfinite(job.grams_left) else Shortage.CAPACITY
    reason = _reason(job, short_of, finishes_at_s, late, unplaced)
    return Prospect(
        job.job_id, finishes_at_s, job.items_left - late - unplaced, late, unplaced, spent_g, short_of, reason
    )


def _reason(job: PendingJob, short_of: Shortage, finishes_at_s: float, late: float, unplaced: float) -> str:
    """One line for a job's owner."""
    missed = f"{late + unplaced:,.0f} of {job.items_left:,} items"
    match short_of:
        case Shortage.ZONE:
            return f"no zone of {', '.join(filter(None, job.zones))} offers anything: name another zone"
        case Shortage.ACCURACY:
            return f"no variant of {job.family} at {job.accuracy_floor:g} or above has a place: lower the floor"
        case Shortage.GRAMS:
            return f"{missed} cannot run for {job.grams_left:g} g: allow more grams, or a later deadline"
        case Shortage.CAPACITY:
            when = f"they finish at {format_minute(finishes_at_s)}" if finishes_at_s else "they have no place yet"
            return f"{missed} cannot be done by {format_minute(job.complete_by_s)}; {when}"
    if unplaced:
        return f"{unplaced:,.0f} items are planned later: the deadline lies beyond the forecast"
    return f"will finish at {format_minute(finishes_at_s)}" if finishes_at_s else "nothing is left to run"


def _demand_now(
    jobs: Mapping[str, PendingJob], portions: Iterable[Portion], begun: Mapping[str, float]
) -> tuple[FlexibleDemand, ...]:
    """What runs in the slots that have begun, by family and zone."""
    running: dict[tuple[str, str], list[Portion]] = defaultdict(list)
    for one in portions:
        if one.starts_at_s == begun.get(one.zone):
            running[jobs[one.job_id].family, one.zone].append(one)
    return tuple(
        FlexibleDemand(
            family,
            zone,
            sum(one.items for one in of) / (of[0].ends_at_s - of[0].starts_at_s),
            max(jobs[one.job_id].accuracy_floor for one in of),
        )
        for (family, zone), of in sorted(running.items())
    )
