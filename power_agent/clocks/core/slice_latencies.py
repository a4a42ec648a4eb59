"""Latencies of the slices of a node, from load windows as they come: what governors see of their stages. Pure.

An answer counts for a device where its window began after the device's clock was last changed, by the time at which the
window came less its length: stamps of other machines' clocks are not read. Of those the newest count, as many windows
as hold `ENOUGH` answers, at most those of `SPAN_S`: where many ask, a change is seen at once, and where few do, at all.

Data: load windows, objectives, the profile. Decision: none.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from trefoil.core.brains import GovernedStage
from trefoil.core.catalog import Catalog
from trefoil.core.demand import LoadWindow
from trefoil.core.fleet import Hosted, SliceKey
from trefoil.core.latency import Histogram, merge, quantile_ms, within
from trefoil.core.plan import PlannedDevice

SPAN_S: Final = 10.0
ATTAINED_S: Final = 60.0  # over which it is judged whether an SLO is kept
DEFAULT_QUANTILE: Final = 0.95
ENOUGH: Final = 40  # answers: a p95 is then of the two slowest

Answers = Mapping[tuple[SliceKey, str], Histogram]
"""Latencies by slice and family."""


class SliceLatencies:
    """Latencies by slice and family. `slo_ms` and `slo_quantile` by family; `heard_s`: when a window came last.
    Times are monotonic."""

    def __init__(self, catalog: Catalog) -> None:
        self.slo_ms: Mapping[str, float] = {}
        self.slo_quantile: Mapping[str, float] = {}
        self.heard_s = -math.inf
        self._windows: deque[tuple[float, float, Answers]] = deque()  # when each began and came
        self._kept: deque[tuple[float, Mapping[tuple[SliceKey, str], tuple[int, int]]]] = deque()  # in the SLO, of all
        self.learn(catalog)

    def learn(self, catalog: Catalog) -> None:
        """Go by another catalogue from now on."""
        highest: dict[tuple[str, str, str, str, int], tuple[int, float]] = {}  # clock, and s there of all batches
        for row in catalog.rows:
            key = (row.device_type, row.slice_type, row.family, row.variant, row.stage)
            highest[key] = max(highest.get(key, (0, 0.0)), (row.clock_mhz, row.clock_sensitivity))
        self._weights = {key: s for key, (_, s) in highest.items()}

    def add_window(self, window: LoadWindow, now_s: float) -> None:
        """Add a window that came now."""
        found: dict[tuple[SliceKey, str], list[Histogram]] = {}
        for cell in window.cells:
            if cell.key.slice is not None:  # of an earlier stage: the latency of the whole
                known = [each for each in (cell.latency, cell.passed) if each.index]
                found.setdefault((cell.key.slice, cell.key.family), []).extend(known)
        answers = {key: merge(parts) for key, parts in found.items() if parts}
        self.add(answers, now_s - (window.ends_at_s - window.starts_at_s), now_s)

    def add(self, answers: Answers, began_s: float, now_s: float) -> None:
        """Add what was answered between two times."""
        self.heard_s = now_s
        if answers:
            self._windows.append((began_s, now_s, answers))
            known = {key: one for key, one in answers.items() if self.slo_ms.get(key[1])}
            self._kept.append((now_s, {k: (within(one, self.slo_ms[k[1]]), one.total) for k, one in known.items()}))
        while self._kept and self._kept[0][0] < now_s - ATTAINED_S:
            self._kept.popleft()
        while self._windows and self._windows[0][1] < now_s - SPAN_S:
            self._windows.popleft()

    def stages(self, planned: PlannedDevice, device_type: str, since_s: float) -> tuple[GovernedStage, ...]:
        """Stages of a device, slice by slice, each with what was answered since then."""
        since = [answers for began_s, _, answers in reversed(self._windows) if began_s >= since_s]
        return tuple(
            self._stage(device_type, part.key, hosted, since)
            for part in sorted(planned.slices, key=lambda part: part.key)
            for hosted in part.hosted
        )

    def _stage(self, device_type: str, key: SliceKey, hosted: Hosted, newest: Sequence[Answers]) -> GovernedStage:
        family, known, samples = hosted.family, list[Histogram](), 0
        for answers in newest:
            if (one := answers.get((key, family))) is not None:
                known.append(one)
                samples += one.total
                if samples >= ENOUGH:
                    break
        found = merge(known)
        mean_ms = found.sum_ms / found.total if found.total else 0.0
        own = (device_type, key.slice_type, family, hosted.variant)
        whole = self._weights.get((*own, 0), 1.0)
        weight = self._weights.get((*own, hosted.stage + 1), whole) if hosted.stages > 1 else whole
        quantile = self.slo_quantile.get(family, DEFAULT_QUANTILE)
        counts = [counted[key, family] for _, counted in self._kept if (key, family) in counted]
        good, total = sum(n for n, _ in counts), sum(n for _, n in counts)
        return GovernedStage(
            family,
            hosted.stage,
            self.slo_ms.get(family, 0.0),
            mean_ms,
            weight,
            self.heard_s,
            quantile_ms(found, 0.95),
            found.total,
            quantile,
            quantile_ms(found, quantile),
            good / total if total else 1.0,
            total,
        )
