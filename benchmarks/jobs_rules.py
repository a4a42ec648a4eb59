"""Rules of `make bench-jobs` that say how much of each job runs in the hour that has begun; all see the same slots.

- `at_once`: all that waits.
- `evenly`: of each job an equal part each hour until its deadline.
- `wait_awhile` (Wiesner et al., Let's Wait Awhile, Middleware 2021, interruptible jobs): a job has a fixed rate, and
  runs in the hours of least forecast carbon that its length takes. Length here: `LENGTH` of its window.
- `carbonscaler` (Hanafy et al., CarbonScaler, SIGMETRICS 2024): a job may run at up to `SCALE` times that rate; steps
  of (hour, rate) are taken by marginal capacity per carbon, the best first, until they do its work. Every item scales
  alike here, which favours the rule. `carbonscaler_j`: the same per gram, with the marginal joules that its public code
  reads from a profile of power.
- `planned`: ours.
Both published rules plan job by job, the earliest deadline first, in the capacity that jobs before it left. They
are told each hour's forecast anew, as ours is, where their authors plan at submission or after errors of 5 %.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from controller.jobs.core.planning import plan_jobs
from trefoil.core.jobs.planned import PendingJob, Slot
from trefoil.core.units import HOUR_S

LENGTH: Final = 0.25
SCALE: Final = 4.0
CRUMB_H: Final = 1e-3  # device hours: what rounding to items may add up to

Amounts = Mapping[tuple[str, str], float]
"""Items to run in this hour, by (job, zone)."""
Rule = Callable[[Sequence[PendingJob], Sequence[Slot], float], Amounts]


def at_once(jobs: Sequence[PendingJob], slots: Sequence[Slot], _now_s: float) -> Amounts:
    """All of every job."""
    return {(job.job_id, slots[0].zone): float(job.items_left) for job in jobs}


def evenly(jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> Amounts:
    """An equal part an hour."""
    return {
        (job.job_id, slots[0].zone): job.items_left / max(1.0, (job.complete_by_s - now_s) / HOUR_S) for job in jobs
    }


def planned(jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> Amounts:
    """The part of our plan that has begun."""
    found: dict[tuple[str, str], float] = {}
    for one in plan_jobs(jobs, slots, now_s).portions:
        if one.starts_at_s <= now_s:
            found[one.job_id, one.zone] = found.get((one.job_id, one.zone), 0.0) + one.items
    return found


class JobByJob:
    """Wait-Awhile's rule (`scale` 1) and CarbonScaler's."""

    def __init__(self, scale: float, joules: bool = False) -> None:
        self._scale, self._joules = scale, joules
        self._rates: dict[str, float] = {}

    def __call__(self, jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> Amounts:
        """Items of this hour."""
        steps = [
            (self._price(slot, number), slot.carbon.starts_at_s, number, slot.carbon.ends_at_s)
            for slot in slots
            for number in range(len(slot.pools))
        ]
        steps.sort()
        left = {
            (slot.carbon.starts_at_s, number): (pool.free_s if slot is slots[0] else pool.sure_s)
            / pool.costs[0].device_s
            for slot in slots
            for number, pool in enumerate(slot.pools)
        }
        found = {}
        for job in sorted(jobs, key=lambda j: j.complete_by_s):
            window_h = (job.complete_by_s - now_s) / HOUR_S
            rate = self._rates.setdefault(job.job_id, job.items_left / max(1.0, window_h * LENGTH))
            wanted, taken, here = float(job.items_left), dict[float, float](), 0.0
            for _, starts_at_s, number, ends_at_s in steps:
                if ends_at_s <= job.complete_by_s and wanted > 0:
                    room = rate * self._scale - taken.get(starts_at_s, 0.0)
                    part = min(wanted, room, left[starts_at_s, number])
                    taken[starts_at_s] = taken.get(starts_at_s, 0.0) + part
                    wanted, left[starts_at_s, number] = wanted - part, left[starts_at_s, number] - part
                    here += part if starts_at_s <= now_s else 0.0
            found[job.job_id, slots[0].zone] = here + wanted  # what has no place before its deadline runs now
        return found

    def _price(self, slot: Slot, number: int) -> float:
        """What a step of one more item costs: carbon, or grams."""
        if not self._joules:
            return slot.carbon.p50_g_per_kwh
        pool = slot.pools[number]
        return slot.carbon.p50_g_per_kwh * (pool.costs[0].active_j + pool.idle_w * pool.costs[0].device_s)


RULES: Final[Mapping[str, Callable[[], Rule]]] = {
    "at_once": lambda: at_once,
    "evenly": lambda: evenly,
    "wait_awhile": lambda: JobByJob(1.0),
    "carbonscaler": lambda: JobByJob(SCALE),
    "carbonscaler_j": lambda: JobByJob(SCALE, joules=True),
    "planned": lambda: planned,
}
