"""When a batch of a job may take an idle slice: as long as almost no interactive request waits for it.

Source: busy probability seen by Poisson arrivals (PASTA); deficits as in token buckets.
Data: of each queue that the slice serves its arrivals [1/s] and its other slices that are idle; how long the batch
    takes [s]; the interactive requests that have come.
Decision: whether the batch may start now.
Formulation: while a batch runs for s seconds, N ~ Poisson(rate x s) requests come. The k other idle slices take the
    first k, so that E[(N - k)+] requests find only the slice with the batch. Each batch is charged this expectation.
    Interactive requests pay for it: DELAYED_SHARE of each that comes, at most CREDIT_MAX in advance. A batch starts
    where the account covers it; one that is charged more than CREDIT_MAX leaves a debt. Hence at most DELAYED_SHARE of
    all interactive requests are delayed by jobs, by the time of one batch at most: p95 moves at most to the quantile
    0.95 + DELAYED_SHARE of before.
Deviations: requests that end while the batch runs free slices, too; leaving them out is on the safe side. Without
    arrivals nothing is charged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DELAYED_SHARE: Final = 0.0025
CREDIT_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits or would wait for a slice in one queue: `idle` counts its other slices without a request."""

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


class Reserve:
    """Accounts of how many interactive requests jobs may delay, one for each queue."""

    def __init__(self, delayed_share: float = DELAYED_SHARE) -> None:
        self._share = delayed_share
        self._accounts: dict[str, float] = {}

    def on_arrivals(self, queue: str, count: float) -> None:
        """Book interactive requests that have come."""
        self._accounts[queue] = min(CREDIT_MAX, self._accounts.get(queue, 0.0) + self._share * count)

    def try_start(self, waiting: Sequence[Waiting], batch_s: float) -> bool:
        """Whether a batch may start; if so, it is charged."""
        charges = [expected_delayed(one.rate_per_s, batch_s, one.idle) for one in waiting]
        for one, charge in zip(waiting, charges, strict=True):
            if self._accounts.get(one.queue, 0.0) < min(charge, CREDIT_MAX):
                return False
        for one, charge in zip(waiting, charges, strict=True):  # nothing is booked of one that is refused
            self._accounts[one.queue] = self._accounts.get(one.queue, 0.0) - charge
        return True
