"""Intervals: what came to a family, what was answered how fast, what computed; and the load that is reported of it.

Latencies are counts in the buckets of core/latency from the start, so that a long run needs no more memory than a short
one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trefoil.core.demand import NO_STREAMS, LoadCell, LoadKey, LoadWindow, StreamCounts, merged
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import BUCKETS, FLOOR_MS, PER_OCTAVE, Histogram, build_histogram, from_counts
from trefoil.core.units import MS_PER_S

Counts = npt.NDArray[np.float64]
JOBS: Final = ""
"""Name of jobs among the families that compute on a device."""


class Answers(NamedTuple):
    """Distribution of the answers to one request in the mean: by bucket, within the SLO, their mean and the latest."""

    buckets: Counts
    within_slo: float
    mean_ms: float
    max_ms: float


@dataclass(slots=True)
class Interval:
    """Counts of a family in [starts_s, ends_s). Fluid counts may be fractions.

    `joules` are active, by the profile's linear law; `by_variant` and `by_device` count answers, `accuracy_sum` adds
    theirs.
    """

    starts_s: float
    ends_s: float
    arrived: float = 0.0
    answered: float = 0.0
    rejected: float = 0.0
    within_slo: float = 0.0
    accuracy_sum: float = 0.0
    latency: Counts = field(default_factory=lambda: np.zeros(BUCKETS))
    sum_ms: float = 0.0
    max_ms: float = 0.0
    joules: dict[SliceKey, float] = field(default_factory=dict)
    by_variant: dict[str, float] = field(default_factory=dict)
    queued: float = 0.0
    latencies_ms: list[Counts] = field(default_factory=list)  # of every answer, where they are kept
    by_device: dict[str, float] = field(default_factory=dict)
    computed_s: dict[tuple[SliceKey, str], float] = field(default_factory=dict)
    """Of slices of CPUs and variants: how long requests computed. Of this interval alone, as `joules`."""
    latency_s_by: Mapping[SliceKey, list[float]] = field(default_factory=dict)
    """Latencies of requests one by one, by slice; `spread_by`: distributions of so many answers of a flow. As above."""
    streams: StreamCounts = NO_STREAMS
    ttft_s_by: Mapping[SliceKey, list[float]] = field(default_factory=dict)
    tpot_s_by: Mapping[SliceKey, list[float]] = field(default_factory=dict)
    """Of streams by slice: times to the first token, mean times from token to token. Of this interval alone."""
    tokens: int = 0
    """Of the answers of a trace that is replayed with its tokens; else 0."""
    spread_by: dict[SliceKey, list[tuple[Answers, float]]] = field(default_factory=dict)

    def add(self, other: "Interval") -> None:
        """Add the interval that follows. `joules` stay those of the first: they are booked by interval."""
        self.ends_s, self.queued = other.ends_s, other.queued
        self.arrived += other.arrived
        self.answered += other.answered
        self.rejected += other.rejected
        self.within_slo += other.within_slo
        self.accuracy_sum += other.accuracy_sum
        self.latency += other.latency
        self.sum_ms += other.sum_ms
        self.max_ms = max(self.max_ms, other.max_ms)
        self.latencies_ms += other.latencies_ms
        self.streams = merged((self.streams, other.streams))
        self.tokens += other.tokens
        for mine, theirs in ((self.by_variant, other.by_variant), (self.by_device, other.by_device)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0.0) + count

    def slice_histograms(self, *, of_tokens: bool = False) -> dict[SliceKey, Histogram]:
        """Latency histograms by slice, in whole answers; or those of times from token to token."""
        found = _histograms(self.tpot_s_by if of_tokens else self.latency_s_by)
        if of_tokens:
            return found
        return found | {key: _whole(parts) for key, parts in self.spread_by.items()}

    def first_tokens(self) -> dict[SliceKey, Histogram]:
        """Histograms by slice of the times to the first token."""
        return _histograms(self.ttft_s_by)

    def quantile_ms(self, q: float) -> float:
        """Quantile of the latencies [ms]: exact where they are kept, else of the histogram; 0.0 for none."""
        if self.latencies_ms:
            return float(np.quantile(np.concatenate(self.latencies_ms), q, method="inverted_cdf"))
        return quantile_ms(self.latency, q, self.max_ms)

    @property
    def histogram(self) -> Histogram:
        """Latency histogram in whole counts, as core/latency has it."""
        whole = np.rint(self.latency).astype(np.int64)
        (index,) = whole.nonzero()
        return Histogram(1, tuple(index.tolist()), tuple(whole[index].tolist()), self.sum_ms, self.max_ms)


def _histograms(seconds_by: Mapping[SliceKey, list[float]]) -> dict[SliceKey, Histogram]:
    return {key: build_histogram([s * MS_PER_S for s in seen]) for key, seen in seconds_by.items() if seen}


def _whole(parts: Sequence[tuple[Answers, float]]) -> Histogram:
    """Histogram of parts of answers: rounded as they add up, so that what is less than one anywhere is not lost."""
    ends = np.rint(np.cumsum(sum(spread.buckets * count for spread, count in parts)))
    counts = Counter({i: int(n) for i, n in enumerate(np.diff(ends, prepend=0.0)) if n})
    mean_ms = sum(spread.mean_ms * count for spread, count in parts) / sum(count for _, count in parts)
    return from_counts(counts, mean_ms * counts.total(), max(spread.max_ms for spread, _ in parts))


def joined(parts: Sequence[Interval], now_s: float) -> Interval:
    """Intervals joined to one; what happened while there was none is nothing."""
    if len(parts) == 1:
        return parts[0]
    whole = Interval(now_s, now_s) if not parts else Interval(parts[0].starts_s, now_s)
    for part in parts:
        whole.add(part)
    return whole


def load_cells(found: Mapping[str, Interval], items: Mapping[str, float]) -> tuple[LoadCell, ...]:
    """Load cells as a dispatcher would report them of these intervals, in whole requests."""
    cells: list[LoadCell] = []
    for family, one in sorted(found.items()):
        failed = {"RESOURCE_EXHAUSTED": round(one.rejected)} if one.rejected else {}
        within, latency = round(one.within_slo), one.histogram
        cells.append(
            LoadCell(
                LoadKey(family), round(one.arrived), failed_by_code=failed, within_slo=within, latency=latency,
                streams=one.streams,
            )
        )  # fmt: skip
        for variant, count in sorted(one.by_variant.items()):
            whole = round(count)
            cells.append(LoadCell(LoadKey(family, variant), answered=whole, items=round(whole * items[family])))
    return tuple(cells)


def quantile_ms(counts: Counts, q: float, max_ms: float = math.inf) -> float:
    """Quantile of counts in latency buckets [ms], spread evenly over the logarithm in each; 0.0 for none."""
    total = float(counts.sum())
    if total <= 0:
        return 0.0
    reached = np.cumsum(counts)
    bucket = min(int(np.searchsorted(reached, q * total - 1e-9)), BUCKETS - 1)
    within = 1.0 - (reached[bucket] - q * total) / counts[bucket] if counts[bucket] > 0 else 0.5
    return min(float(FLOOR_MS * 2 ** ((bucket + within) / PER_OCTAVE)), max_ms)


def histogram_of(latency_ms: npt.NDArray[np.float64]) -> Counts:
    """Histogram of latencies [ms] by bucket."""
    if not latency_ms.size:
        return np.zeros(BUCKETS)
    index = (np.log2(np.maximum(latency_ms, FLOOR_MS) / FLOOR_MS) * PER_OCTAVE).astype(np.int64)
    return np.bincount(np.minimum(index, BUCKETS - 1), minlength=BUCKETS).astype(np.float64)


def load_window(
    reported: Mapping[str, Sequence[Interval]], items: Mapping[str, float], seq: int, now_s: float
) -> LoadWindow:
    """Load window of each family's intervals since the last one."""
    found = {family: joined(parts, now_s) for family, parts in reported.items()}
    starts_s = min((one.starts_s for one in found.values()), default=now_s)
    return LoadWindow("simulated", 0, seq, starts_s, now_s, cells=load_cells(found, items))
