"""Mergeable latency histograms, scheme 1.

Bucket i holds [0.01 * 2^(i/16), 0.01 * 2^((i+1)/16)) ms for 0 <= i < 512, stored sparse. Merging adds counts.
A quantile is the geometric middle of its bucket: the error is at most 2^(1/32) - 1 = 2.2 %.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Final

SCHEME: Final = 1
BUCKETS: Final = 512
FLOOR_MS: Final = 0.01
PER_OCTAVE: Final = 16
_ENDS_MS: Final = tuple(FLOOR_MS * 2 ** (i / PER_OCTAVE) for i in range(1, BUCKETS))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram of latencies, sparse and mergeable; `index` ascends and pairs with `count`."""

    scheme: int = 0
    index: tuple[int, ...] = ()
    count: tuple[int, ...] = ()
    sum_ms: float = 0.0
    max_ms: float = 0.0

    @property
    def total(self) -> int:
        """Number of observations."""
        return sum(self.count)


EMPTY: Final = Histogram()


def bucket(value_ms: float) -> int:
    """Bucket of a latency; values outside the range go to the first or last bucket."""
    return bisect_right(_ENDS_MS, value_ms)


def bucket_middle_ms(index: int) -> float:
    """Geometric middle of a bucket [ms]."""
    return float(FLOOR_MS * 2 ** ((index + 0.5) / PER_OCTAVE))


def build_histogram(values_ms: Iterable[float]) -> Histogram:
    """Histogram of some latencies [ms]."""
    seen_ms = tuple(values_ms)
    counts = Counter(map(bisect_right, repeat(_ENDS_MS), seen_ms))  # every request is counted here: no step of Python
    return from_counts(counts, sum(seen_ms, 0.0), max(seen_ms, default=0.0))


def from_counts(counts: Mapping[int, int], sum_ms: float, max_ms: float) -> Histogram:
    """Histogram of a running count per bucket."""
    ordered = sorted([(i, n) for i, n in counts.items() if n])
    return Histogram(SCHEME, tuple([i for i, _ in ordered]), tuple([n for _, n in ordered]), sum_ms, max_ms)


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Add histograms.

    Raises:
        ValueError: one of them has another scheme; only empty ones may have none.
    """
    given = [h for h in histograms if h.scheme or h.index]
    if len(given) == 1 and given[0].scheme == SCHEME and 0 not in given[0].count:
        return given[0]
    counts: dict[int, int] = {}
    total, largest = 0.0, 0.0
    for histogram in given:
        if histogram.scheme != SCHEME and (histogram.scheme or histogram.index):
            raise ValueError(f"histogram scheme {histogram.scheme} cannot be merged with scheme {SCHEME}")
        for i, n in zip(histogram.index, histogram.count, strict=True):
            counts[i] = counts.get(i, 0) + n
        total += histogram.sum_ms
        largest = max(largest, histogram.max_ms)
    return from_counts(counts, total, largest)


def scaled(histogram: Histogram, factor: float) -> Histogram:
    """Histogram of latencies that are all so many times as long, to the nearest bucket (2.2 %)."""
    shift = round(PER_OCTAVE * math.log2(factor))
    counts: Counter[int] = Counter()
    for i, n in zip(histogram.index, histogram.count, strict=True):
        counts[min(BUCKETS - 1, max(0, i + shift))] += n
    return from_counts(counts, histogram.sum_ms * factor, histogram.max_ms * factor)


def nearest_rank(count: int, q: float) -> int:
    """Rank of a quantile among so many values in order, counted from 1."""
    return math.ceil(q * count)


def quantile_ms(histogram: Histogram, q: float) -> float:
    """Quantile of a histogram [ms], 0 < q <= 1; 0.0 for an empty one; never above `max_ms`."""
    assert 0 < q <= 1
    rank = nearest_rank(histogram.total, q)
    seen = 0
    for i, n in zip(histogram.index, histogram.count, strict=True):
        seen += n
        if seen >= rank:
            return min(bucket_middle_ms(i), histogram.max_ms)
    return 0.0


def within(histogram: Histogram, limit_ms: float) -> int:
    """Number of values of a histogram that are not above a limit, as far as its buckets tell."""
    if histogram.max_ms <= limit_ms:
        return histogram.total
    return sum(n for i, n in zip(histogram.index, histogram.count, strict=True) if bucket_middle_ms(i) <= limit_ms)
