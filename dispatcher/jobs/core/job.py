"""A job, its bounds, and how it stands. Pure."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from trefoil.core.errors import InvalidInput, NotFound, one_of

ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ZONES_MAX: Final = 32
DEADLINE_MAX_S: Final = 366 * 86_400.0
RATE_S: Final = 60.0
RATE_MIN_S: Final = 2.0


class JobState(IntEnum):
    """State of a job, as in jobs.proto."""

    UNSPECIFIED = 0
    WAITING = 1
    RUNNING = 2
    DONE = 3
    CANCELLED = 4


ENDED: Final = frozenset((JobState.DONE, JobState.CANCELLED))


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it was submitted; fields as in jobs.proto."""

    id: str
    family: str
    complete_by_s: float
    tenant: str = ""
    priority: int = 0
    min_accuracy: float = 0.0
    zones: tuple[str, ...] = ()
    grams_max: float = 0.0
    endpoint: str = ""
    """Path of OpenAI's API that its items are lines of a batch for; empty: they are KServe v2 requests."""

    @property
    def turn(self) -> tuple[int, float, str]:
        """Sort key: the highest priority first; of equal ones the next deadline."""
        return (-self.priority, self.complete_by_s, self.id)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of jobs: settings `jobs_*`. `bytes_max` are those of one job's items."""

    items_max: int
    bytes_max: int
    tenant_max: int


@dataclass(frozen=True, slots=True)
class World:
    """What a job is checked against. `tenants` None: there is no tenants file. `accuracy`: the best that the plan
    gives the family. `item_s`: time that one item takes on the quickest live slice; 0 = not known. Times are of the
    calendar [UTC s]."""

    now_s: float
    families: Collection[str]
    zones: Collection[str]
    tenants: Collection[str] | None
    accuracy: float
    item_s: float = 0.0


def check_job(job: Job, world: World) -> None:
    """Check a job before its items come.

    Raises:
        NotFound: its family is not served here, or one of its zones is not known.
        InvalidInput: naming any other field.
    """
    if not ID.fullmatch(job.id):
        remedy = "at most 63 letters, digits, '.', '_' and '-', the first a letter or digit"
        raise InvalidInput("is not a name of a job", field="id", value=job.id, remedy=remedy)
    if job.family not in world.families:
        remedy = one_of(sorted(world.families), job.family)
        raise NotFound("is not served", field="family", value=job.family, remedy=remedy)
    left_s = job.complete_by_s - world.now_s
    if left_s <= 0:
        remedy = "give a time ahead, e.g. --complete-by 6h"
        raise InvalidInput(f"passed {-left_s:.0f} s ago", field="complete_by", value=job.complete_by_s, remedy=remedy)
    if left_s > DEADLINE_MAX_S:
        remedy = f"at most {DEADLINE_MAX_S / 86_400:.0f} days ahead"
        raise InvalidInput("is too far ahead", field="complete_by", value=job.complete_by_s, remedy=remedy)
    if not 0.0 <= job.min_accuracy <= 1.0:
        raise InvalidInput("is not an accuracy", field="min_accuracy", value=job.min_accuracy, remedy="send 0..1")
    if job.min_accuracy > world.accuracy:
        remedy = f"at most {world.accuracy:g}, the best variant that is planned"
        raise InvalidInput("no variant reaches it", field="min_accuracy", value=job.min_accuracy, remedy=remedy)
    if job.grams_max < 0:
        raise InvalidInput("is negative", field="grams_max", value=job.grams_max, remedy="grams > 0, or 0 for no bound")
    if len(job.zones) > ZONES_MAX:
        raise InvalidInput("too many zones", field="zones", value=len(job.zones), remedy=f"at most {ZONES_MAX}")
    if unknown := [zone for zone in job.zones if zone not in world.zones]:
        remedy = one_of(sorted(world.zones), unknown[0], also="leave it out for all of this Trefoil's")
        raise NotFound("is the zone of no node here and of no peer", field="zones", value=unknown[0], remedy=remedy)
    if world.tenants is None and job.tenant:
        remedy = "leave it out, or name the tenant in the dispatcher's tenants_file"
        raise NotFound("no tenants file names tenants", field="tenant", value=job.tenant, remedy=remedy)
    if world.tenants is not None and job.tenant not in world.tenants:
        remedy = one_of(sorted(world.tenants), job.tenant)
        raise NotFound("is not a tenant", field="tenant", value=job.tenant, remedy=remedy)


def check_items(job: Job, items: int, world: World) -> None:
    """Check how many items a job has, once all have come.

    Raises:
        InvalidInput: it has none, or not even one fits before its deadline. Whether all do is the plan's to say: it
            knows of devices asleep and of peers.
    """
    if not items:
        raise InvalidInput("has no items", field="items", value=0, remedy="give a file that holds at least one")
    left_s = job.complete_by_s - world.now_s
    if left_s <= world.item_s:
        why = f"leaves {left_s:.3g} s, and one item takes {world.item_s:.3g} s"
        raise InvalidInput(
            why if left_s > 0 else "passed while its items came", field="complete_by", value=job.complete_by_s,
            remedy="give a time further ahead",
        )  # fmt: skip


@dataclass(slots=True)
class Rate:
    """Items a second of the last minute, from how many had ended at a few times."""

    _seen: list[tuple[float, int]] | None = None

    def add(self, now_s: float, ended: int) -> None:
        """Add how many items have ended by now."""
        seen = [one for one in self._seen or [] if now_s - one[0] <= RATE_S]
        self._seen = [*seen, (now_s, ended)]

    def seconds_for(self, items: int) -> float | None:
        """Time that so many items take at this rate [s]; None: not known yet."""
        seen = self._seen or []
        if len(seen) < 2 or seen[-1][0] - seen[0][0] < RATE_MIN_S or seen[-1][1] <= seen[0][1]:
            return None
        return items * (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])
