"""Which slices not to send to, since what came back from them says that they are dead; and when to try them again.

Source: DESIGN section 5, CONTRACTS section 3 (TableAck.ejected); Triton's texts: server 2.51 (scheduler_utils.cc,
    dynamic_batch_scheduler.cc, server.cc, python_be.cc).
Data: status code and text of a failed call; answers of probes; each slice's status as its agent publishes it.
Decision: eject, probe, readmit.
Formulation: a failed call is one of four kinds (`classify`).
    UNREACHABLE  nobody took the request (connect refused, exiting, model not loaded): eject, another slice may have it.
    BROKEN       the connection died under the request: eject; it may have been executed, so nobody else gets it.
    DEAD_STUB    Triton lives, its python stub does not, and its readiness stays true: eject; only an inference that
                 works shows that it is healed.
    OWN          the model's, the client's or an overloaded queue's own error: the slice is well.
    Four more come from how a slice behaves, not from one status (outliers.py): HUNG answers neither its requests nor a
    question; STUCK answers questions only; LATE let several deadlines pass in a row; SICK failed several requests in a
    row.
    An ejected slice is probed after 0.1 s, then at twice the interval up to 2 s, and at once when its agent publishes
    it anew (generation, since or revision changed). A probe that works readmits it. An outlier that comes out again
    within FLAP_S waits twice as long for its first probe, up to FLAP_MAX_S.
Deviations: no rule against ejecting more than half by the first three: these are not outliers but proofs of death, and
    requests wait in the queue for the slice instead of failing on it. `outliers.panicking_family` bounds outliers.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from trefoil.core.common import Revision
from trefoil.core.fleet import NodeStatus, SliceKey, SliceStatus

PROBE_FIRST_S: Final = 0.1
PROBE_MAX_S: Final = 2.0
FLAP_S: Final = 30.0
FLAP_MAX_S: Final = 5.0

_OVERLOAD: Final = re.compile(r"exceeds maximum queue size|request timeout expired", re.IGNORECASE)
_NOT_TAKEN: Final = re.compile(
    r"failed to connect|connection refused|server not ready|server exiting|shutting down|no available versions"
    r"|is not at ready state|is not ready|name resolution|unavailable for model|no such file or directory",
    re.IGNORECASE,
)
_UNKNOWN_MODEL: Final = re.compile(r"unknown model", re.IGNORECASE)
_DEAD_STUB: Final = re.compile(r"stub process .*not healthy|failed to obtain the health mutex", re.IGNORECASE)


class Failure(Enum):
    """Kind of a failed call: what it says of its slice."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    DEAD_STUB = "dead stub"
    HUNG = "hung"
    STUCK = "stuck"
    LATE = "late"
    SICK = "sick"
    OWN = "own"


OUTLIERS: Final = frozenset({Failure.HUNG, Failure.STUCK, Failure.LATE, Failure.SICK})
PROVEN_BY_INFERENCE: Final = frozenset({Failure.STUCK, Failure.LATE, Failure.SICK, Failure.DEAD_STUB})
"""A server that says that it is ready is not enough: it said so all the time."""


def classify(code: str, details: str) -> Failure:
    """Classify the status that came back from a slice."""
    if code == "INTERNAL" and _DEAD_STUB.search(details):
        return Failure.DEAD_STUB
    if code == "NOT_FOUND" and _UNKNOWN_MODEL.search(details):
        return Failure.UNREACHABLE
    if code == "UNAVAILABLE":
        if _OVERLOAD.search(details):
            return Failure.OWN
        return Failure.UNREACHABLE if _NOT_TAKEN.search(details) else Failure.BROKEN
    return Failure.OWN


def is_overload(details: str) -> bool:
    """Whether a text is Triton's for a request that its own queue refused."""
    return bool(_OVERLOAD.search(details))


@dataclass(frozen=True, slots=True)
class Published:
    """Published state of a slice that changes when its agent has started or healed it."""

    generation: int = 0
    since_s: float = 0.0
    revision: Revision = Revision()

    @classmethod
    def from_status(cls, status: SliceStatus) -> "Published":
        """Extract it from a slice's status."""
        return cls(status.generation, status.since_s, status.revision)


@dataclass(frozen=True, slots=True)
class Ejected:
    """Ejected slice: why, since when, and when it is probed next."""

    failure: Failure
    why: str
    since_s: float
    published: Published
    probe_at_s: float
    interval_s: float = PROBE_FIRST_S


class Ejections:
    """Ejected slices of this worker. Times are the caller's monotonic clock."""

    def __init__(self) -> None:
        self._ejected: dict[SliceKey, Ejected] = {}
        self._published: dict[SliceKey, Published] = {}
        self._flaps: dict[SliceKey, tuple[int, float]] = {}  # how often it was an outlier of late, and when last

    def __contains__(self, slice_: SliceKey) -> bool:
        return slice_ in self._ejected

    def reasons(self) -> Mapping[SliceKey, str]:
        """Reason of each ejected slice: what `build_table` takes."""
        return {key: f"ejected: {each.why}" for key, each in self._ejected.items()}

    def eject(self, slice_: SliceKey, failure: Failure, why: str, now_s: float) -> bool:
        """Take a slice out. False if it is out already (a dead stub stays one whatever else is then seen)."""
        assert failure is not Failure.OWN
        known = self._ejected.get(slice_)
        if known is not None and (known.failure is Failure.DEAD_STUB or failure is not Failure.DEAD_STUB):
            return False
        published = self._published.get(slice_, Published())
        first_s = self._flapping_s(slice_, now_s) if failure in OUTLIERS else PROBE_FIRST_S
        self._ejected[slice_] = Ejected(failure, why, now_s, published, now_s + first_s)
        return known is None

    def get(self, slice_: SliceKey) -> Ejected | None:
        """Ejection of a slice, or None."""
        return self._ejected.get(slice_)

    def outliers(self) -> frozenset[SliceKey]:
        """Slices that are out for how they behave, not for a proof of death."""
        return frozenset(key for key, each in self._ejected.items() if each.failure in OUTLIERS)

    def on_nodes(self, nodes: Iterable[NodeStatus], now_s: float) -> None:
        """Statuses were read: forget slices that are gone, and probe those that their agent has published anew."""
        self._published = {s.key: Published.from_status(s) for node in nodes for d in node.devices for s in d.slices}
        self._flaps = {slice_: flaps for slice_, flaps in self._flaps.items() if slice_ in self._published}
        for slice_, each in list(self._ejected.items()):
            published = self._published.get(slice_)
            if published is None:
                del self._ejected[slice_]
            elif published != each.published:
                self._ejected[slice_] = replace(each, published=published, probe_at_s=now_s, interval_s=PROBE_FIRST_S)

    def due(self, now_s: float) -> dict[SliceKey, Failure]:
        """Slices to probe now, with their failures; each is due again after its interval, whatever the probe says."""
        due = {key: each.failure for key, each in self._ejected.items() if each.probe_at_s <= now_s}
        for slice_ in due:
            each = self._ejected[slice_]
            interval_s = min(PROBE_MAX_S, 2 * each.interval_s)
            self._ejected[slice_] = replace(each, probe_at_s=now_s + each.interval_s, interval_s=interval_s)
        return due

    def readmit(self, slice_: SliceKey) -> bool:
        """Readmit a slice whose probe worked. False if it was not out."""
        return self._ejected.pop(slice_, None) is not None

    def _flapping_s(self, slice_: SliceKey, now_s: float) -> float:
        times, last_s = self._flaps.get(slice_, (0, now_s))
        times = times + 1 if now_s - last_s <= FLAP_S else 1
        self._flaps[slice_] = times, now_s
        return float(min(FLAP_MAX_S, PROBE_FIRST_S * 2 ** (times - 1)))

    def next_probe_at_s(self) -> float | None:
        """Time of the next probe; None: nothing is out."""
        return min((each.probe_at_s for each in self._ejected.values()), default=None)
