"""Open jobs as dispatchers wrote them: checked one by one, and with what the plan is compared with.

Source: ours. Data: records from Redis, the families that slots can serve, the time. Result: jobs to plan, and why
others are not planned; a job that is not planned runs whenever slices are idle.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from controller.jobs.core.program import Option, lots_of
from trefoil.core.jobs.planned import OpenJob, OpenJobs, PendingJob, Slot
from trefoil.core.outside.ranges import YEAR_S

JOBS_MAX: Final = 200  # the earliest deadlines: a program of so many jobs is solved within seconds
ITEMS_MAX: Final = 10**9
NAME_CHARS_MAX: Final = 63
ZONES_MAX: Final = 32


def pending_jobs(
    found: Iterable[OpenJobs], families: Collection[str], zone: str, now_s: float
) -> tuple[list[PendingJob], list[tuple[str, str]]]:
    """Jobs to plan, at most JOBS_MAX, and of each record that cannot be (folder, why)."""
    jobs: dict[str, PendingJob] = {}
    wrong = []
    for told in found:
        for one in told.jobs:
            name = f"{told.folder}/{one.job_id}"
            why = "its id stands twice" if name in jobs else _fault(one, now_s)
            if why:
                wrong.append((told.folder, f"job {one.job_id[:NAME_CHARS_MAX]!r}: {why}"))
            elif one.family in families and (not one.zones or zone in one.zones):
                jobs[name] = PendingJob(
                    name, one.family, one.items_left, one.complete_by_s, one.priority, one.min_accuracy, (zone,),
                    grams_left=one.grams_left if one.bounded else math.inf,
                )  # fmt: skip
    return sorted(jobs.values(), key=lambda job: (job.complete_by_s, job.job_id))[:JOBS_MAX], wrong


def _fault(one: OpenJob, now_s: float) -> str:
    """What cannot be of a record; empty: nothing."""
    if not 0 < len(one.job_id) <= NAME_CHARS_MAX or "/" in one.job_id:
        return f"an id of {len(one.job_id)} characters, or with '/'"
    if not 0 < one.items_left <= ITEMS_MAX:
        return f"items_left = {one.items_left}: not in 1..{ITEMS_MAX}"
    if not abs(one.complete_by_s - now_s) <= 2 * YEAR_S:
        return f"complete_by = {one.complete_by_s:g}: years from now"
    if not 0.0 <= one.min_accuracy <= 1.0:
        return f"min_accuracy = {one.min_accuracy:g}: not in 0..1"
    if not 0.0 <= one.grams_left < math.inf:
        return f"grams_left = {one.grams_left:g}: not >= 0"
    return f"{len(one.zones)} zones" if len(one.zones) > ZONES_MAX else ""


def unplanned_grams(jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> dict[str, tuple[float, float]]:
    """Grams of each job if its items ran at once, and evenly until its deadline; the earliest deadline goes first.

    Items take the cheapest pool of a slot first. What has no room before the deadline costs as the last slot does.
    """
    by_rule = []
    for evenly in (False, True):
        free_s = {
            (slot.zone, pool.name, at_s): pool.free_s if at_s <= now_s else pool.sure_s
            for slot, at_s in ((slot, slot.carbon.starts_at_s) for slot in slots)
            for pool in slot.pools
        }
        by_rule.append({job.job_id: _played(job, slots, now_s, free_s, evenly) for job in jobs})
    at_once, even = by_rule
    return {job.job_id: (at_once[job.job_id], even[job.job_id]) for job in jobs}


def _played(
    job: PendingJob, slots: Sequence[Slot], now_s: float, free_s: dict[tuple[str, str, float], float], evenly: bool
) -> float:
    by_slot: dict[float, list[Option]] = defaultdict(list)
    for lot in lots_of([job], slots, now_s):
        for option in lot.options:
            by_slot[option.slot.carbon.starts_at_s].append(option)
    left, grams, last_g = float(job.items_left), 0.0, 0.0
    for starts_s, options in sorted(by_slot.items()):
        until_s = max(job.complete_by_s, options[0].slot.carbon.ends_at_s)
        length_s = options[0].slot.carbon.ends_at_s - max(starts_s, now_s)
        wanted = left * min(1.0, length_s / (until_s - max(starts_s, now_s))) if evenly else left
        for option in sorted(options, key=lambda one: one.whole_g):
            items = min(wanted, free_s[option.place] / option.cost.device_s)
            free_s[option.place] -= items * option.cost.device_s
            left, wanted, grams = left - items, wanted - items, grams + items * option.whole_g
            last_g = option.whole_g
    return grams + left * last_g
