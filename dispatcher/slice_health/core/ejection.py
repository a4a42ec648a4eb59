"""Which slices not to send to, and when to try them again.

Source: DESIGN section 9.1, CONTRACTS section 3 (TableAck.ejected), ADR 28.
Data: what the channel to a slice saw of its connection; results of probes; each slice's status as its agent publishes
    it.
Decision: eject, probe, readmit.
Formulation: a place is a slice and a model on it, or "" for all of the slice. Two kinds of proof eject one:
    the channel's own: UNREACHABLE (no connection, or the stream was refused: the request was not taken), BROKEN (the
        connection died under a request, which may have been executed).
    a probe that failed (suspicion.py), of the server (HUNG: it does not say that it lives) or of one model
        (UNREACHABLE: not ready; DEAD_STUB, STUCK, LATE, SICK: an inference failed).
    What a model answers, whatever its status and text, is an answer. It raises a suspicion at most.
    An ejected place is probed after 0.1 s, then at twice the interval up to 2 s. It is probed at once when the agent
    publishes the slice again (generation, since or revision changed). A probe that works readmits it. An outlier that
    comes out again within FLAP_S waits twice as long for its first probe, up to FLAP_MAX_S.
Deviations: no rule against ejecting more than half by UNREACHABLE, BROKEN or DEAD_STUB: these are not outliers but
    proofs of death, and requests wait in the queue instead of failing. `outliers.panicking_family` bounds outliers.
"""

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

Place = tuple[SliceKey, str]
"""A slice and a model on it; "" = all of the slice."""


class Failure(Enum):
    """Why a place is out."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    DEAD_STUB = "dead stub"
    HUNG = "hung"
    STUCK = "stuck"
    LATE = "late"
    SICK = "sick"


OUTLIERS: Final = frozenset({Failure.HUNG, Failure.STUCK, Failure.LATE, Failure.SICK})
PROVEN_BY_INFERENCE: Final = frozenset({Failure.STUCK, Failure.LATE, Failure.SICK, Failure.DEAD_STUB})
"""A server that says that a model is ready is not enough: it said so all the time."""


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
    """Ejected place: why, since when, and when it is probed next."""

    failure: Failure
    why: str
    since_s: float
    published: Published
    probe_at_s: float
    interval_s: float = PROBE_FIRST_S


class Ejections:
    """Ejected places of this worker. Times are the caller's monotonic clock."""

    def __init__(self) -> None:
        self._ejected: dict[Place, Ejected] = {}
        self._published: dict[SliceKey, Published] = {}
        self._flaps: dict[Place, tuple[int, float]] = {}  # how often it was an outlier of late, and when last

    def __contains__(self, slice_: SliceKey) -> bool:
        return any(place[0] == slice_ for place in self._ejected)

    def out(self, slice_: SliceKey, model: str = "") -> bool:
        """Whether a slice is out, whole or for this model."""
        return (slice_, "") in self._ejected or (slice_, model) in self._ejected

    def reasons(self) -> Mapping[Place, str]:
        """Reason of each ejected place: what `build_table` takes."""
        return {place: f"ejected: {each.why}" for place, each in self._ejected.items()}

    def eject(self, place: Place, failure: Failure, why: str, now_s: float) -> bool:
        """Take a place out. False if it is out already; an outlier that is then proven dead is a dead one."""
        known = self._ejected.get(place)
        if known is not None:
            if known.failure in OUTLIERS and failure not in OUTLIERS:
                self._ejected[place] = replace(known, failure=failure, why=why)
            return False
        fresh = not self.out(*place)
        published = self._published.get(place[0], Published())
        first_s = self._flapping_s(place, now_s) if failure in OUTLIERS else PROBE_FIRST_S
        self._ejected[place] = Ejected(failure, why, now_s, published, now_s + first_s)
        return fresh

    def get(self, slice_: SliceKey, model: str = "") -> Ejected | None:
        """Ejection of a slice, whole or for this model, or None."""
        return self._ejected.get((slice_, "")) or self._ejected.get((slice_, model))

    def outliers(self, model: str | None = None) -> frozenset[SliceKey]:
        """Slices that are out for how they behave, not for a proof of death: for a model, or for any."""
        return frozenset(
            slice_
            for (slice_, of), each in self._ejected.items()
            if each.failure in OUTLIERS and (model is None or of in ("", model))
        )

    def on_nodes(self, nodes: Iterable[NodeStatus], now_s: float) -> None:
        """Statuses were read: forget slices that are gone, and probe those that their agent has published again."""
        self._published = {s.key: Published.from_status(s) for node in nodes for d in node.devices for s in d.slices}
        self._flaps = {place: flaps for place, flaps in self._flaps.items() if place[0] in self._published}
        for place, each in list(self._ejected.items()):
            published = self._published.get(place[0])
            if published is None:
                del self._ejected[place]
            elif published != each.published:
                self._ejected[place] = replace(each, published=published, probe_at_s=now_s, interval_s=PROBE_FIRST_S)

    def due(self, now_s: float) -> dict[Place, Failure]:
        """Places to probe now, with their failures; each is due again after its interval, whatever the probe says."""
        due = {place: each.failure for place, each in self._ejected.items() if each.probe_at_s <= now_s}
        for place in due:
            each = self._ejected[place]
            interval_s = min(PROBE_MAX_S, 2 * each.interval_s)
            self._ejected[place] = replace(each, probe_at_s=now_s + each.interval_s, interval_s=interval_s)
        return due

    def readmit(self, place: Place) -> bool:
        """Readmit a place whose probe worked. False if it was not out."""
        return self._ejected.pop(place, None) is not None

    def _flapping_s(self, place: Place, now_s: float) -> float:
        times, last_s = self._flaps.get(place, (0, now_s))
        times = times + 1 if now_s - last_s <= FLAP_S else 1
        self._flaps[place] = times, now_s
        return float(min(FLAP_MAX_S, PROBE_FIRST_S * 2 ** (times - 1)))

    def next_probe_at_s(self) -> float | None:
        """Time of the next probe; None: nothing is out."""
        return min((each.probe_at_s for each in self._ejected.values()), default=None)
