"""Health of the slices as this worker sees it: what their requests show, which are ejected, and which come back."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import structlog

from dispatcher.routing.core import routing_table as tables
from dispatcher.routing.routing_state import Routing
from dispatcher.slice_health.core.ejection import OUTLIERS, Ejections, Failure
from dispatcher.slice_health.core.outliers import SliceEvidence, panicking_family
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import Clock

LOG = structlog.get_logger()
DEATHS: Final = frozenset({Failure.UNREACHABLE, Failure.BROKEN, Failure.DEAD_STUB})  # no sequence on a slice survives


class SliceHealth:
    """Ejects and readmits slices; the routing table follows at once. Belongs to one event loop."""

    def __init__(self, ejections: Ejections, evidence: SliceEvidence, routing: Routing, clock: Clock) -> None:
        self.ejections = ejections
        self.evidence = evidence
        self.ejected_total: Counter[tuple[SliceKey, str]] = Counter()
        self.kept_total: Counter[tuple[SliceKey, str]] = Counter()  # outliers that stay: too many are out already
        self._routing = routing
        self._clock = clock

    def eject(self, slice_: SliceKey, failure: Failure, why: str) -> None:
        """Eject a slice: send nothing there until a probe works. Outliers stay where half of a family is out as
        outliers already."""
        if failure in OUTLIERS and slice_ not in self.ejections and (family := self._panicking_family(slice_)):
            self.kept_total[slice_, failure.value] += 1
            if self.kept_total[slice_, failure.value] == 1:
                LOG.warning("outlier kept: half of a family is out", slice=slice_.name, family=family, why=why)
            return
        fresh = self.ejections.eject(slice_, failure, why, self._clock.monotonic_s())
        if failure in DEATHS:  # also of an outlier: it was out, and its sequences went on there
            self._routing.lose_sequences(lambda pin: why if pin.slice == slice_ else "")
        if fresh:
            self.ejected_total[slice_, failure.value] += 1
            self.evidence.on_ejected(slice_, dead=failure not in OUTLIERS)
            LOG.warning("slice ejected", slice=slice_.name, cause=failure.value, why=why)
            self._routing.rebuild()
            self._routing.changed.set()

    def readmit(self, slice_: SliceKey) -> None:
        """Readmit a slice whose probe worked; it begins with a slow start."""
        self._routing.unprobed.discard(slice_)
        if self.ejections.readmit(slice_):
            LOG.info("slice readmitted", slice=slice_.name)
            planned = (t for route in self._routing.table.planned.values() for t in route.targets if t.slice == slice_)
            self.evidence.slow_start.start(slice_, max((target.credits for target in planned), default=0))
            self._routing.rebuild()
            self._routing.changed.set()

    def trust(self, slices: Iterable[SliceKey]) -> None:
        """Readmit slices without a probe, and without a slow start: nothing was ever seen to be wrong with them."""
        if [slice_ for slice_ in slices if self.ejections.readmit(slice_)]:
            self._routing.rebuild()

    def _panicking_family(self, slice_: SliceKey) -> str:
        """The family that keeps an outlier. Slices that their agents do not offer, or that are proven dead, do not
        count: they are not out as outliers."""
        nodes, table = self._routing.nodes.values(), self._routing.table
        offered = {s.key for n in nodes for d in n.devices for s in d.slices if s.state in tables.SERVING}
        out, serving = self.ejections.outliers() & offered, {}
        for family, planned in table.planned.items():
            live = [target.slice for target in table.live(family)]
            serving[family] = live + [target.slice for target in planned.targets if target.slice in out]
        return panicking_family(slice_, serving, out)
