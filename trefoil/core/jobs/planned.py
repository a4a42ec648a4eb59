"""Jobs as their planner sees them: what is left to run, slots that could run it, and the plan of what runs when.

A slot is a zone and an interval; its pools are devices that have time left. Zones tell each other their slots: an
offer of another zone is a slot like one's own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from trefoil.core.carbon import CarbonBand
from trefoil.core.common import Revision


class Shortage(IntEnum):
    """What keeps items of a job from running in time."""

    NONE = 0
    CAPACITY = 1
    """Devices have no time left before the deadline."""
    GRAMS = 2
    """The job's grams are spent by then."""
    ACCURACY = 3
    """No pool has a variant of the family at the job's floor."""
    ZONE = 4
    """No slot is of a zone that the job allows."""


@dataclass(frozen=True, slots=True)
class PendingJob:
    """Job that is not finished: items of one family, all of which can run from `arrives_at_s` on.

    A job that is only expected arrives later than now. It holds its place in the plan, so that jobs that have arrived
    do not count on hours that others will need. It has no portions or prospect in the plan.

    `zones`: where it may run, its home first; empty: wherever a slot is. `transfer_j`: joules that move one item from
    home to another zone, and its result back. `grams_left`: of the most grams that it may cause.
    """

    job_id: str = ""
    family: str = ""
    items_left: int = 0
    complete_by_s: float = 0.0
    priority: int = 0
    """Of two jobs that cannot both be in time the one with the higher priority is."""
    accuracy_floor: float = 0.0
    zones: tuple[str, ...] = ()
    transfer_j: float = 0.0
    grams_left: float = math.inf
    arrives_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ItemCost:
    """Cost of an item of a family on a device of a pool: its time there and its active joules, both of one item.
    `request_s`, `request_j`: of a request of one item, alone in its batch; 0 = not known."""

    family: str = ""
    device_s: float = 0.0
    active_j: float = 0.0
    accuracy: float = 1.0
    request_s: float = 0.0
    request_j: float = 0.0
    variant: str = ""


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Devices of one kind in a slot that could run items.

    Of devices that are awake for requests, only `items`' active joules are added: `idle_w` and `wake_j` are 0. A device
    that is woken for jobs adds `idle_w` while it is awake and `wake_j` when it wakes. One pool has one name in all
    slots of a zone.
    """

    name: str = ""
    free_s: float = 0.0
    """Device seconds that requests leave over: expected."""
    sure_s: float = 0.0
    """Device seconds that requests leave over with the probability that the plan asks for; at most `free_s`."""
    costs: tuple[ItemCost, ...] = ()
    idle_w: float = 0.0
    wake_j: float = 0.0
    woken: float = 0.0
    """Devices of this pool that are awake for jobs now; read of a zone's first slot only."""
    total_s: float = 0.0
    """Device seconds that requests and jobs may take together; 0: as `free_s`."""
    part: float = 1.0
    """Part of a whole device that each of these is."""
    stands: bool = False
    """Whether these are slices that stand now, which jobs alone keep awake."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Interval of a zone: its carbon as forecast (of the one that has begun: as read), and pools with time left."""

    zone: str = ""
    carbon: CarbonBand = CarbonBand()
    pools: tuple[DevicePool, ...] = ()
    pue: float = 1.0


@dataclass(frozen=True, slots=True)
class Offers:
    """What a zone offers to others: slots with the time that its requests and its jobs leave over."""

    zone: str = ""
    made_at_s: float = 0.0
    slots: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True)
class Portion:
    """Portion of a job that runs in one slot, on one pool."""

    job_id: str = ""
    zone: str = ""
    pool: str = ""
    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    items: float = 0.0
    grams: float = 0.0
    """Expected, with its share of idle and wake-up joules."""
    device_s: float = 0.0
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Prospect:
    """Prospect of a job under a plan: `items_in_time + items_late + items_unplaced` are its items.

    `finishes_at_s`: end of its last portion [UTC s]; 0: some items have no place within the plan's hours.
    """

    job_id: str = ""
    finishes_at_s: float = 0.0
    items_in_time: float = 0.0
    items_late: float = 0.0
    items_unplaced: float = 0.0
    grams: float = 0.0
    short_of: Shortage = Shortage.NONE
    reason: str = ""
    """One line for its owner: `will finish at ...`, or what is short and by how much."""


@dataclass(frozen=True, slots=True)
class FlexibleDemand:
    """Demand of a family in the slot that has begun, without a latency objective: rate at which its jobs run."""

    family: str = ""
    zone: str = ""
    rate_per_s: float = 0.0
    accuracy_floor: float = 0.0
    """Highest of the jobs that run."""
    devices: int = 0
    """Whole devices that have to be awake in the slot, for requests and for jobs of all families."""
    own_devices: int = 0
    """The same for requests and jobs of this family alone."""


@dataclass(frozen=True, slots=True)
class JobsPlan:
    """Plan of all jobs over the slots that were given.

    `woken`: devices to be awake for jobs in the slots that have begun, by (zone, pool).
    """

    made_at_s: float = 0.0
    until_s: float = 0.0
    portions: tuple[Portion, ...] = ()
    prospects: tuple[Prospect, ...] = ()
    now: tuple[FlexibleDemand, ...] = ()
    woken: Mapping[tuple[str, str], int] = field(default_factory=dict)
    grams: float = 0.0


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Job that has not ended, as its dispatcher writes it. `grams_left`: 0 = no bound. An item counts as one row."""

    job_id: str = ""
    family: str = ""
    items_left: int = 0
    complete_by_s: float = 0.0
    priority: int = 0
    min_accuracy: float = 0.0
    zones: tuple[str, ...] = ()
    bounded: bool = False
    """Whether `grams_left` is a bound."""
    grams_left: float = 0.0
    transfer_j: float = 0.0
    """As of a PendingJob. Items that peers' zones have now are not in `items_left`."""


@dataclass(frozen=True, slots=True)
class OpenJobs:
    """Open jobs of a folder. `epoch`: of the lease of the dispatcher worker that owns them."""

    folder: str = ""
    epoch: int = 0
    jobs: tuple[OpenJob, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedHour:
    """Items of a job that are planned for one slot, and the slot's carbon intensity as forecast. `zone`: a peer's;
    empty: at home. `variants`: that answer them; none: any."""

    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    items: float = 0.0
    grams: float = 0.0
    p50_g_per_kwh: float = 0.0
    zone: str = ""
    variants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """Hours of one job on awake devices, the next first. `job_id`: folder/id. `items_left`: of the moment it was
    planned at. `in_time`, `finishes_at_s`, `reason`, `grams`: with devices that are woken, too, where awake ones have
    no time for all of its items; `at_once`: so it is, and no item is held back.

    `at_once_grams`, `evenly_grams`: grams if the same items ran at once, or evenly until the deadline.
    """

    job_id: str = ""
    items_left: int = 0
    hours: tuple[PlannedHour, ...] = ()
    in_time: bool = False
    finishes_at_s: float = 0.0
    reason: str = ""
    grams: float = 0.0
    at_once_grams: float = 0.0
    evenly_grams: float = 0.0
    complete_by_s: float = 0.0
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class RequestOffer:
    """What a peer's zone offers for requests of a family, per item. `saved_g`: grams that it emits less there than at
    home, without what moves it; carbon and PUE are the zone's. `rate_per_s`: items that its awake devices have time
    for; `latency_ms`: of one there; `min_accuracy`: the mean at home, which each offered variant has."""

    family: str = ""
    zone: str = ""
    saved_g: float = 0.0
    p50_g_per_kwh: float = 0.0
    pue: float = 0.0
    rate_per_s: float = 0.0
    latency_ms: float = 0.0
    min_accuracy: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedJobs:
    """Plan of jobs as the controller writes and signs it. Times are of the calendar [UTC s]. `requests`: offers for
    requests whose families allow other zones."""

    revision: Revision = Revision()
    made_at_s: float = 0.0
    until_s: float = 0.0
    jobs: tuple[PlannedJob, ...] = ()
    signature: str = ""
    requests: tuple[RequestOffer, ...] = ()


def planned_jobs(
    plan: JobsPlan,
    revision: Revision,
    jobs: Mapping[str, PendingJob],
    carbon: Mapping[tuple[str, float], float],
    others: Mapping[str, tuple[float, float]],
    home: str,
    waking: Mapping[str, Prospect],
) -> PlannedJobs:
    """Sum a plan by job, slot and zone. `carbon`: by zone and the slot's start [g/kWh]; `others`: grams at once, evenly
    by job; `home`: zone of this Trefoil; `waking`: prospects of the jobs that need more than awake devices."""
    hours: dict[tuple[str, float, float, str], list[Portion]] = {}
    for one in plan.portions:
        hours.setdefault((one.job_id, one.starts_at_s, one.ends_at_s, one.zone), []).append(one)
    by_job: dict[str, list[PlannedHour]] = {}
    for (job, starts_s, ends_s, zone), parts in sorted(hours.items()):
        items, grams = sum(one.items for one in parts), sum(one.grams for one in parts)
        p50, peer = carbon.get((zone, starts_s), 0.0), "" if zone == home else zone
        variants = tuple(sorted({one.variant for one in parts if one.variant}))
        by_job.setdefault(job, []).append(PlannedHour(starts_s, ends_s, items, grams, p50, peer, variants))
    return PlannedJobs(
        revision,
        plan.made_at_s,
        plan.until_s,
        tuple(
            PlannedJob(
                one.job_id, jobs[one.job_id].items_left, tuple(by_job.get(one.job_id, ())),
                one.short_of == Shortage.NONE, one.finishes_at_s, one.reason, one.grams,
                *others.get(one.job_id, (0.0, 0.0)), jobs[one.job_id].complete_by_s,
                one.job_id in waking,
            )
            for one in (waking.get(awake.job_id, awake) for awake in plan.prospects)
        ),
    )  # fmt: skip
