"""Whether items of a job may start now, by the controller's plan. Pure.

Source: ours. Data: the plan, the items of the job that have not started, the time, its measured pace.
Decision: items that may start now; infinite where the plan does not hold the job back. Items that go to a peer's zone.
Formulation: the plan was made with n items left and has m of them in slots that have begun: n - m have to stay for
    later slots. It is an absolute number, so that a plan made with an old count, or followed for several slots, asks
    for no item twice. Items that stay must have room in later slots before the deadline. This does not apply if the
    deadline is beyond the plan and at least LATER_S from now. The time that is left must exceed LEAST_S, and MARGIN
    times what they take at the measured pace. If not, nothing is held back: a plan saves grams, and never costs a
    deadline. While the pace is not known PROBE of the items may start at once: what they do not measure is done within
    LEAST_S.
    Items start on slices of the variants that the plan has for them alone, while time lasts.
    Hours of a peer's zone count as later ones until they end, so that their items stay for that zone. Hours of a zone
    that cannot be used now do not count, so their items may start here.
Deviations: none.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

from trefoil.core.common import Revision
from trefoil.core.jobs.planned import PlannedHour, PlannedJob, PlannedJobs, RequestOffer
from trefoil.core.units import format_minute

MARGIN: Final = 1.5  # other jobs and requests take slices, too
LEAST_S: Final = 300.0
PROBE: Final = 0.02
LATER_S: Final = 6 * 3600.0
AGE_MAX_S: Final = 900.0  # by which the calendars of two hosts may also differ
STALE_S: Final = 300.0  # of sight without a newer plan: the controller writes one a minute
GRACE_S: Final = 120.0  # after a slot's end, in which a peer may end what was planned for it
CRUMB: Final = 1e-3  # items: less is the solver's tolerance


class PlanSight:
    """Sight of the plan in Redis by one worker: which plan may be followed, if any."""

    def __init__(self) -> None:
        self._plan: PlannedJobs | None = None
        self._since_s = 0.0
        self._jobs: dict[str, PlannedJob] = {}
        self.why = "no plan of jobs"
        """Why no plan is followed; empty: one is."""

    def look(self, plan: PlannedJobs | None, epoch: int, now_s: float) -> None:
        """Look at what stands in Redis. `epoch`: the highest that controllers led under; `now_s`: monotonic time."""
        held = self._plan
        if plan is None or (held is not None and plan.revision == held.revision and epoch >= held.revision.epoch):
            pass  # the last one stays until it is stale, also while the next controller has made none yet
        elif plan.revision.epoch != epoch:
            self._drop(f"the plan of jobs is of epoch {plan.revision.epoch}, controllers lead under {epoch}")
            return
        elif (
            held is None
            or held.revision.epoch != epoch
            or plan.revision > held.revision
            or now_s - self._since_s >= STALE_S  # no newer one came: the one that was seen last was false
        ):
            self._plan, self._since_s, self.why = plan, now_s, ""
            self._jobs = {one.job_id: one for one in plan.jobs}
        elif plan.revision < held.revision:
            self._drop(f"the plan of jobs, {plan.revision}, is older than {held.revision}", forget=False)
        if self._plan is not None and now_s - self._since_s >= STALE_S:
            self._drop(f"no newer plan of jobs for {STALE_S:.0f} s", forget=False)

    def _drop(self, why: str, *, forget: bool = True) -> None:
        self._jobs, self.why = {}, why
        if forget:
            self._plan = None

    def of(self, job: str, now_s: float) -> PlannedJob | None:
        """Hours of a job at a time of the calendar [UTC s]; None: it is not planned."""
        return self._jobs.get(job) if self._fits(now_s) else None

    def requests(self, now_s: float) -> tuple[RequestOffer, ...]:
        """What other zones offer for requests at a time of the calendar [UTC s]."""
        return self._plan.requests if self._plan is not None and not self.why and self._fits(now_s) else ()

    def _fits(self, now_s: float) -> bool:
        plan = self._plan
        return plan is not None and abs(now_s - plan.made_at_s) <= AGE_MAX_S and now_s < plan.until_s

    @property
    def revision(self) -> Revision:
        """Revision of the plan that was seen last."""
        return self._plan.revision if self._plan is not None else Revision()

    @property
    def until_s(self) -> float:
        """End of the plan's last slot [UTC s]."""
        return self._plan.until_s if self._plan is not None else 0.0


def may_start(
    planned: PlannedJob | None,
    until_s: float,
    items: int,
    waiting: int,
    complete_by_s: float,
    now_s: float,
    per_s: float,
    usable: Collection[str] = (),
    away: int = 0,
) -> tuple[float, str]:
    """Items that may start now, and why no more; infinite: on any slices, the job is not held back.

    `until_s`: end of the plan. `waiting`: those of the job's items that have not started. `per_s`: measured pace
    [items/s], 0 = not known. `usable`: peers' zones that items may go to; `away`: items that went there by this plan.
    Times are of the calendar [UTC s].
    """
    if planned is None or planned.at_once or not planned.in_time or not _plausible(planned.hours):
        return math.inf, ""
    begun = sum(one.items for one in planned.hours if not one.zone and one.starts_at_s <= now_s)
    stay = math.floor(planned.items_left - begun - away + CRUMB)
    if not per_s:
        stay = min(stay, items - math.ceil(PROBE * items))
    if waiting <= 0:
        return math.inf, ""
    later = [
        one
        for one in planned.hours
        if (one.zone in usable and one.ends_at_s > now_s if one.zone else one.starts_at_s > now_s)
    ]
    room = sum(one.items * _share_before(one, complete_by_s) for one in later)
    beyond = complete_by_s > until_s and complete_by_s - now_s >= LATER_S
    held = min(max(stay, 0), waiting)
    if not beyond and room + CRUMB * (1 + len(later)) + 1e-6 * held < held:
        return math.inf, ""
    needed_s = MARGIN * (held or waiting) / per_s if per_s else 0.0
    if now_s + max(LEAST_S, needed_s) >= complete_by_s:
        return math.inf, ""
    return max(0.0, float(waiting - max(stay, 0))), f"waits for cleaner hours: {_next_hour(later, now_s)}"


def planned_variants(planned: PlannedJob | None, now_s: float) -> frozenset[str]:
    """Variants that answer the items of slots that have begun; none: any. Others take more grams than planned."""
    hours = planned.hours if planned is not None else ()
    return frozenset(name for one in hours if not one.zone and one.starts_at_s <= now_s for name in one.variants)


def to_send(planned: PlannedJob | None, zone: str, now_s: float) -> tuple[int, float]:
    """Items that the plan gives a peer's zone in the slot that has begun there, and its end [UTC s]."""
    for one in planned.hours if planned is not None and _plausible(planned.hours) else ():
        if one.zone == zone and one.starts_at_s <= now_s < one.ends_at_s:
            return math.floor(one.items + CRUMB), one.ends_at_s
    return 0, 0.0


def away_until(items: int, slot_ends_s: float, complete_by_s: float, per_s: float) -> float:
    """Until when a peer may have items [UTC s]: there is time then to run them here before the job's deadline."""
    here_s = max(LEAST_S, MARGIN * items / per_s if per_s else 0.0)
    return min(slot_ends_s + GRACE_S, complete_by_s - here_s)


def _next_hour(later: Sequence[PlannedHour], now_s: float) -> str:
    """Words for the next planned slot."""
    if not later:
        return "they lie beyond the plan"
    if later[0].zone and later[0].starts_at_s <= now_s:
        return f"those of now are for zone {later[0].zone}"
    return f"the next begins at {format_minute(later[0].starts_at_s)}"


def _plausible(hours: Sequence[PlannedHour]) -> bool:
    return all(one.items >= 0.0 and one.ends_at_s > one.starts_at_s for one in hours)


def _share_before(one: PlannedHour, at_s: float) -> float:
    """Share of a slot before a time: items run evenly over it."""
    return min(1.0, max(0.0, (at_s - one.starts_at_s) / (one.ends_at_s - one.starts_at_s)))
