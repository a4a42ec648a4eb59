"""Rules by which jobs are planned: `planned` is ours (`planning.py`), the others are simple ones to compare it with.

Source: below, each with its deviations. Data: jobs, slots, the time now. Result: a plan of jobs.
Formulation: all rules see the same slots, forecasts and free device seconds. The simple ones plan job by job, the
    earliest deadline first, in what jobs before left. They know nothing of jobs to come, and do not respect
    `grams_left`. In one hour a job takes the pool with the fewest grams first.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from controller.jobs.core.planning import plan_jobs, plan_of
from controller.jobs.core.program import Option, lots_of
from trefoil.core.jobs.planned import JobsPlan, PendingJob, Portion, Slot
from trefoil.core.units import HOUR_S

LENGTH: Final = 0.25
"""Length of a job that runs at its own rate, as a share of its window: the published rules know lengths, we do not."""
SCALE: Final = 4.0

Rule = Callable[[Sequence[PendingJob], Sequence[Slot], float], JobsPlan]


class _Rooms:
    """Device seconds of slots that are left while a rule hands them out, and the portions of each job."""

    def __init__(self, jobs: Iterable[PendingJob], slots: Sequence[Slot], now_s: float) -> None:
        self.jobs = sorted(jobs, key=lambda job: (job.complete_by_s, job.job_id))
        self._slots, self._now_s = slots, now_s
        self._lots = lots_of(self.jobs, slots)
        self._left_s = {
            (slot.zone, pool.name, at_s): pool.free_s if at_s <= now_s else pool.sure_s
            for slot, at_s in ((slot, slot.carbon.starts_at_s) for slot in slots)
            for pool in slot.pools
        }
        self._options = {job.job_id: lot.options for lot in self._lots for job in lot.jobs}
        self._portions: dict[str, list[Portion]] = defaultdict(list)

    def options(self, job: PendingJob) -> list[Option]:
        """Options of a job in the order of time, of equal times the one with the fewest grams first."""
        found = self._options.get(job.job_id, ())
        return sorted(found, key=lambda one: (one.slot.carbon.starts_at_s, one.whole_g))

    def length_s(self, option: Option) -> float:
        """Seconds of an option's slot that are still to come."""
        return option.slot.carbon.ends_at_s - max(option.slot.carbon.starts_at_s, self._now_s)

    def take(self, job: PendingJob, option: Option, items: float) -> float:
        """Take at most so many items of a job there; how many there was room for."""
        taken = min(items, self._left_s[option.place] / option.cost.device_s)
        if taken <= 0:
            return 0.0
        device_s, carbon = taken * option.cost.device_s, option.slot.carbon
        self._left_s[option.place] -= device_s
        self._portions[job.job_id].append(
            Portion(
                job.job_id, option.slot.zone, option.pool.name, carbon.starts_at_s, carbon.ends_at_s, taken,
                taken * option.whole_g, device_s, option.cost.variant,
            )
        )  # fmt: skip
        return taken

    def plan(self) -> JobsPlan:
        """Plan of the portions that were taken."""
        return plan_of(self.jobs, self._lots, self._portions, self._slots, self._now_s)


def at_once(jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> JobsPlan:
    """Every item as soon as there is room: what a queue without a plan does.

    Source: the common baseline of the field, e.g. "Baseline" of Wiesner et al. 2021.
    """
    rooms = _Rooms(jobs, slots, now_s)
    for job in rooms.jobs:
        _fill(rooms, job, float(job.items_left))
    return rooms.plan()


def _fill(rooms: _Rooms, job: PendingJob, items: float) -> None:
    """Give items the first room that there is."""
    for option in rooms.options(job):
        items -= rooms.take(job, option, items)


def evenly(jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> JobsPlan:
    """Items at a constant rate until the deadline.

    Items that a slot has no room for are spread over the following slots. Items without room before the deadline run as
    soon as there is room.

    Source: ours; knows the deadline, and nothing of carbon.
    """
    rooms = _Rooms(jobs, slots, now_s)
    for job in rooms.jobs:
        left, wanted, begun_s = float(job.items_left), 0.0, -math.inf
        for option in rooms.options(job):
            carbon = option.slot.carbon
            if carbon.starts_at_s >= job.complete_by_s:
                break
            if carbon.starts_at_s != begun_s:
                begun_s, until_s = carbon.starts_at_s, max(job.complete_by_s, carbon.ends_at_s)
                wanted = left * rooms.length_s(option) / (until_s - max(begun_s, now_s))
            taken = rooms.take(job, option, min(left, wanted))
            left, wanted = left - taken, wanted - taken
        _fill(rooms, job, left)
    return rooms.plan()


class JobByJob:
    """Each job in its best hours, at up to `scale` times its own rate; the base of the two published rules.

    A job's rate is what does its items in `LENGTH` of the window that it had when it was first seen. What has no room
    before the deadline runs as soon as it can.
    """

    def __init__(self, scale: float, joules: bool = False) -> None:
        self._scale, self._joules = scale, joules
        self._rates: dict[str, float] = {}

    def __call__(self, jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float) -> JobsPlan:
        """Plan of all jobs."""
        rooms = _Rooms(jobs, slots, now_s)
        known, self._rates = self._rates, {}
        for job in rooms.jobs:
            window_h = (job.complete_by_s - now_s) / HOUR_S
            per_h = known.get(job.job_id, job.items_left / max(1.0, window_h * LENGTH))
            self._rates[job.job_id] = per_h
            left, taken = float(job.items_left), defaultdict[float, float](float)
            for option in sorted(rooms.options(job), key=self._price):
                if option.slot.carbon.ends_at_s <= job.complete_by_s:
                    starts_s = option.slot.carbon.starts_at_s
                    most = self._scale * per_h * rooms.length_s(option) / HOUR_S - taken[starts_s]
                    items = rooms.take(job, option, min(left, most))
                    taken[starts_s], left = taken[starts_s] + items, left - items
            _fill(rooms, job, left)
        return rooms.plan()

    def _price(self, option: Option) -> float:
        """What one more item costs: carbon intensity, or with `joules` what is proportional to its grams."""
        carbon, cost = option.slot.carbon.p50_g_per_kwh, option.cost
        return carbon * (cost.active_j + option.pool.idle_w * cost.device_s) if self._joules else carbon


class WaitAwhile(JobByJob):
    """A job runs at its own rate in the hours of least forecast carbon that its length takes, wherever they lie.

    Source: Wiesner et al., Let's Wait Awhile, Middleware 2021, section 5.2, "Interrupting" (in the authors' code
    `AdHocStrategy(interruptible=True)`). Deviations: hours instead of half hours; hours are chosen again with each
    forecast, there once at submission; capacity is bounded.
    """

    def __init__(self) -> None:
        super().__init__(1.0)


class CarbonScaler(JobByJob):
    """Steps of (hour, scale), the one with the most work per carbon first, until the job is done.

    Source: Hanafy et al., CarbonScaler, POMACS 7(3), 2023, Algorithm 1. Deviations: every item scales alike. Each step
    of an hour thus has the same marginal capacity, which favours the rule. Steps are chosen again with each forecast;
    the paper does so only after errors of 5 %. Capacity is bounded. `joules`: work per gram instead, with the marginal
    joules of the profile. The authors' public code reads these from a profile of power.
    """

    def __init__(self, joules: bool = False) -> None:
        super().__init__(SCALE, joules)


RULES: Final[Mapping[str, Callable[[], Rule]]] = {
    "at_once": lambda: at_once,
    "evenly": lambda: evenly,
    "wait_awhile": WaitAwhile,
    "carbon_scaler": CarbonScaler,
    "planned": lambda: plan_jobs,
}
"""How each rule is made, by its name; a scenario's `jobs_rule`."""
