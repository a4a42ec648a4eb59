"""How many requests may be tried again: a share of those that arrive, so that trying again never multiplies an outage.

Source: gRFC A6 (retry throttling), Finagle's RetryBudget, Envoy's budget_percent: a token bucket fed by requests.
Data: requests that arrived, retries that were wanted.
Decision: whether this one may be tried again.
Formulation: tokens <- min(burst, tokens + ratio) with each request; a retry takes one token, or it is refused.
Deviations: only requests that were certainly not executed come here, so a retry costs no energy twice. The budget
    bounds what dead slices cost in connections and time.
"""

from typing import Final

BURST: Final = 50  # retries that may come at once


class RetryBudget:
    """Token bucket of retries of one worker, over all families."""

    __slots__ = ("_burst", "_ratio", "tokens")

    def __init__(self, ratio: float, burst: float = BURST) -> None:
        self._ratio = ratio
        self._burst = burst if ratio else 0.0
        self.tokens = self._burst

    def on_request(self) -> None:
        """Add the tokens of one more request."""
        tokens = self.tokens + self._ratio
        self.tokens = tokens if tokens < self._burst else self._burst

    def try_spend(self) -> bool:
        """Spend one retry; False: the budget is used up."""
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True
