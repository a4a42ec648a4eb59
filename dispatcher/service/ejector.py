"""Health of the slices as this worker sees it: what their requests show, what is ejected, and what comes back."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import structlog

from dispatcher.routing.core import routing_table as tables
from dispatcher.routing.routing_state import Routing
from dispatcher.slice_health.core.ejection import OUTLIERS, Ejections, Failure, Place
from dispatcher.slice_health.core.outliers import SliceEvidence, panicking_family
from dispatcher.transport.calls import ConnectionDied, NotTaken
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import Clock

LOG = structlog.get_logger()
DEATHS: Final = frozenset({Failure.UNREACHABLE, Failure.BROKEN, Failure.DEAD_STUB})  # no sequence there survives


def proof_of(error: Exception) -> Failure | None:
    """What the end of a call proves of its slice: what the channel itself saw. None: the server answered."""
    if isinstance(error, NotTaken | Unavailable):  # Unavailable: there is no address to connect to
        return Failure.UNREACHABLE
    return Failure.BROKEN if isinstance(error, ConnectionDied) else None


class SliceHealth:
    """Ejects and readmits slices, whole or for one model; the routing table follows at once. Belongs to one event
    loop."""

    def __init__(self, ejections: Ejections, evidence: SliceEvidence, routing: Routing, clock: Clock) -> None:
        self.ejections = ejections
        self.evidence = evidence
        self.ejected_total: Counter[tuple[SliceKey, str]] = Counter()
        self.kept_total: Counter[tuple[SliceKey, str]] = Counter()  # outliers that stay: too many are out already
        self._routing = routing
        self._clock = clock

    def eject(self, slice_: SliceKey, failure: Failure, why: str, model: str = "") -> None:
        """Eject a slice, or one model on it: send nothing there until a probe works. Outliers stay where half of a
        family is out as outliers already."""
        out = self.ejections.out(slice_, model)
        if failure in OUTLIERS and not out and (family := self._panicking_family((slice_, model))):
            self.kept_total[slice_, failure.value] += 1
            if self.kept_total[slice_, failure.value] == 1:
                LOG.warning("outlier kept: half of a family is out", slice=slice_.name, family=family, why=why)
            return
        fresh = self.ejections.eject((slice_, model), failure, why, self._clock.monotonic_s())
        if failure in DEATHS:  # also of an outlier: it was out, and its sequences went on there
            self._routing.lose_sequences(lambda pin: why if pin.slice == slice_ else "", model)
        if fresh:
            self.ejected_total[slice_, failure.value] += 1
            for place in self._places(slice_, model):
                self.evidence.on_ejected(place, dead=failure not in OUTLIERS)
            LOG.warning("slice ejected", slice=slice_.name, model=model, cause=failure.value, why=why)
            self._routing.rebuild()
            self._routing.changed.set()

    def readmit(self, slice_: SliceKey, model: str = "") -> None:
        """Readmit what a probe found well; it begins with a slow start."""
        if not model:
            self._routing.unprobed.discard(slice_)
        if self.ejections.readmit((slice_, model)):
            LOG.info("slice readmitted", slice=slice_.name, model=model)
            for place in self._places(slice_, model):
                planned = self._routing.table.planned[place[1]].targets
                credits = max((target.credits for target in planned if target.slice == slice_), default=0)
                self.evidence.slow_start.start(place, credits)
            self._routing.rebuild()
            self._routing.changed.set()

    def trust(self, slices: Iterable[SliceKey]) -> None:
        """Readmit slices without a probe, and without a slow start: nothing was ever seen to be wrong with them."""
        if [slice_ for slice_ in slices if self.ejections.readmit((slice_, ""))]:
            self._routing.rebuild()

    def _places(self, slice_: SliceKey, model: str) -> list[Place]:
        return [(slice_, each) for each in self._routing.families_of(slice_) if model in ("", each)]

    def _panicking_family(self, place: Place) -> str:
        """The family that keeps an outlier. Slices that their agents do not offer, or that are proven dead, do not
        count: they are not out as outliers."""
        nodes, table = self._routing.nodes.values(), self._routing.table
        offered = {s.key for n in nodes for d in n.devices for s in d.slices if s.state in tables.SERVING}
        for family, planned in table.planned.items():
            if place[1] not in ("", family):
                continue
            out = self.ejections.outliers(family) & offered
            live = [target.slice for target in table.live(family)]
            serving = live + [target.slice for target in planned.targets if target.slice in out]
            if panicking_family(place[0], {family: serving}, out):
                return family
        return ""
