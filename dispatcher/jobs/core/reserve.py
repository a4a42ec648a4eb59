"""Decides whether a batch of a job may start on an idle slice, so that the p95 of interactive requests stays.

Source: Poisson arrivals see time averages (PASTA); token buckets with deficits; the bound on the tail is ours.
Data: for each queue that the slice serves, the arrivals [1/s], the number of its other idle slices and its latencies of
    the last minutes. Also the duration of the batch [s] and the interactive requests that have arrived.
Decision: whether the batch may start now.
Formulation: while a batch runs for s seconds, N ~ Poisson(rate x s) requests arrive. The k other idle slices take the
    first k, so E[(N - k)+] requests are delayed by the batch. The batch is charged this number, and starts only if the
    account of each queue covers it. An account earns a share f of each interactive request, up to CREDIT_MAX. A charge
    above CREDIT_MAX leaves a debt. So batches delay at most a share f of all requests, each by at most s. With T(x) the
    share of latencies above x, at most T(x) + f (T(x - s) - T(x)) are above x then. f is the largest share for which
    this is 5 % at P95_GROWTH x p95, times SAFETY, because a delayed request delays those behind it. f stays between
    SHARE_MIN and SHARE_MAX.
Deviations: requests that end during the batch free slices, too. They are not counted, which overestimates the delay.
    Without arrivals there is no charge. With fewer than SEEN_MIN latencies the share is SHARE_MIN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trefoil.core.latency import FLOOR_MS, PER_OCTAVE, Histogram

QUANTILE: Final = 0.95
P95_GROWTH: Final = 1.02
SAFETY: Final = 0.4
SHARE_MIN: Final = 0.0025
SHARE_MAX: Final = 0.05
SEEN_MIN: Final = 300
CREDIT_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Load of one queue of a slice. `idle`: number of its other slices without a request."""

    queue: str
    rate_per_s: float
    idle: int


def expected_delayed(rate_per_s: float, batch_s: float, idle: int) -> float:
    """Requests expected to find no idle slice while a batch runs: E[(N - idle)+] of N ~ Poisson(rate x time)."""
    mean = rate_per_s * batch_s
    if mean <= 0.0:
        return 0.0
    probability = math.exp(-mean)
    missing = 0.0  # sum of (idle - n) P(N = n) for n < idle: E[(idle - N)+]
    for n in range(idle):
        missing += (idle - n) * probability
        probability *= mean / (n + 1)
    return max(0.0, mean - idle + missing)


def allowed_share(latency: Histogram, batch_ms: float) -> float:
    """Share of the requests that batches of a duration may delay, by recent latencies."""
    if latency.total < SEEN_MIN or batch_ms <= 0.0:
        return SHARE_MIN
    limit_ms = P95_GROWTH * _p95_ms(latency)
    beyond = _beyond(latency, limit_ms)
    harmed = _beyond(latency, limit_ms - batch_ms) - beyond
    share = SAFETY * (1.0 - QUANTILE - beyond) / harmed if harmed > 0.0 else SHARE_MAX
    return min(SHARE_MAX, max(SHARE_MIN, share))


def _beyond(latency: Histogram, limit_ms: float) -> float:
    """Share of latencies above a limit; inside a bucket they are uniform in their logarithm."""
    at = PER_OCTAVE * math.log2(max(limit_ms, FLOOR_MS) / FLOOR_MS)
    pairs = zip(latency.index, latency.count, strict=True)
    return sum(n * min(1.0, max(0.0, i + 1 - at)) for i, n in pairs) / latency.total


def _p95_ms(latency: Histogram) -> float:
    """95th percentile [ms], interpolated inside its bucket as in `_beyond`."""
    left = (1.0 - QUANTILE) * latency.total
    for i, n in zip(reversed(latency.index), reversed(latency.count), strict=True):
        if n >= left:
            return float(FLOOR_MS * 2 ** ((i + 1 - left / n) / PER_OCTAVE))
        left -= n
    return 0.0


class Reserve:
    """Accounts of the interactive requests that jobs may delay, one for each queue."""

    def __init__(self) -> None:
        self._accounts: dict[str, float] = {}

    def on_arrivals(self, queue: str, count: float, share: float = SHARE_MIN) -> None:
        """Book interactive requests that have arrived, and the share of them that may be delayed."""
        self._accounts[queue] = min(CREDIT_MAX, self._accounts.get(queue, 0.0) + share * count)

    def try_start(self, waiting: Sequence[Waiting], batch_s: float) -> bool:
        """Whether a batch may start; if so, charge it."""
        charges = [expected_delayed(one.rate_per_s, batch_s, one.idle) for one in waiting]
        for one, charge in zip(waiting, charges, strict=True):
            # Where no requests come nothing is delayed, and a debt could never be paid back.
            if charge and self._accounts.get(one.queue, 0.0) < min(charge, CREDIT_MAX):
                return False
        for one, charge in zip(waiting, charges, strict=True):  # nothing is booked of one that is refused
            self._accounts[one.queue] = self._accounts.get(one.queue, 0.0) - charge
        return True
