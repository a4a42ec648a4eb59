"""Open jobs as dispatchers wrote them: checked one by one, and with what the plan is compared with.

Source: ours. Data: records from Redis, the families that slots can serve, the time. Result: jobs to plan, and why
others are not planned; a job that is not planned runs whenever slices are idle.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from controller.jobs.core.offers import ITEM_MAX_J, zones_of
from controller.jobs.core.program import lots_of
from controller.jobs.core.rules import at_once, evenly
from trefoil.core.jobs.planned import OpenJob, OpenJobs, PendingJob, Slot
from trefoil.core.outside.ranges import YEAR_S

JOBS_MAX: Final = 200  # the earliest deadlines: a program of so many jobs is solved within seconds
ITEMS_MAX: Final = 10**9
NAME_CHARS_MAX: Final = 63
ZONES_MAX: Final = 32


def pending_jobs(
    found: Iterable[OpenJobs],
    families: Collection[str],
    zone: str,
    now_s: float,
    offered: Mapping[str, Sequence[Slot]],
) -> tuple[list[PendingJob], list[tuple[str, str]]]:
    """Jobs to plan, at most JOBS_MAX, and of each record that cannot be (folder, why). `offered`: slots of peers, by
    zone."""
    jobs: dict[str, PendingJob] = {}
    wrong = []
    for told in found:
        for one in told.jobs:
            name = f"{told.folder}/{one.job_id}"
            why = "its id occurs twice" if name in jobs else _fault(one, now_s)
            if why:
                wrong.append((told.folder, f"job {one.job_id[:NAME_CHARS_MAX]!r}: {why}"))
            elif one.family in families and (zones := zones_of(one.zones, zone, offered, one.bounded)):
                jobs[name] = PendingJob(
                    name, one.family, one.items_left, one.complete_by_s, one.priority, one.min_accuracy, zones,
                    one.transfer_j if zones[1:] else 0.0, one.grams_left if one.bounded else math.inf,
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
    if not 0.0 <= one.transfer_j <= ITEM_MAX_J:
        return f"transfer_j = {one.transfer_j:g}: not in 0..{ITEM_MAX_J:g}"
    return f"{len(one.zones)} zones" if len(one.zones) > ZONES_MAX else ""


def unplanned_grams(jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> dict[str, tuple[float, float]]:
    """Grams of each job if its items ran at once, and evenly until its deadline. What has no room costs as the last
    slot does."""
    options = {job.job_id: lot.options for lot in lots_of(jobs, slots) for job in lot.jobs}
    last_g = {name: max((one.place[2], one.whole_g) for one in each)[1] for name, each in options.items() if each}
    by_rule = [
        {one.job_id: one.grams + one.items_unplaced * last_g.get(one.job_id, 0.0) for one in plan.prospects}
        for plan in (at_once(jobs, slots, now_s), evenly(jobs, slots, now_s))
    ]
    return {job.job_id: (by_rule[0][job.job_id], by_rule[1][job.job_id]) for job in jobs}
