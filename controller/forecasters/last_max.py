"""Forecaster last_max: demand is the largest rate seen of late, plus what one reconfiguration takes.

Source: the reactive baseline of InfAdapter and of DESIGN section 4 (availability: demand = forecast quantile plus what
one wake-up and load takes); smoothing and the slope test are ours.
Data: arrivals n_i in bins of b seconds.
Result: rate = max over the last `lookback_s` of the moving mean over `smooth_s`. It rises at once and falls patiently.
         A step shows sooner: the mean over the last 1 s or 2 s less two standard errors counts if that is more.
  p90  = Poisson 90 % quantile of the arrivals in `smooth_s` at that rate, as a rate,
         + min(slope x lead_s, growth_ratio_max x rate).
  slope = least squares over `slope_s`, 0 unless it is `slope_sigmas` standard errors of a Poisson stream above 0.
The growth is limited because a step of the load looks like a steep slope for `slope_s`.
Deviations: none. With less than `smooth_s` of data the mean is over what there is, and `fallback_reason` says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

from pydantic import Field

from trefoil.core.demand import LoadForecast
from trefoil.core.parts import PartSettings

Z_90: Final = 1.2815515655446004
STEP_S: Final = (1.0, 2.0)
STEP_SIGMAS: Final = 2.0
EXACT_BELOW: Final = 200.0  # expected arrivals up to which the quantile is summed exactly


class LastMaxSettings(PartSettings):
    """What can be set of it. Both are at least one bin of load, `slope_s` three."""

    REMOVED: ClassVar = dict.fromkeys(
        ("growth_ratio_max", "lookback_s", "slope_sigmas"), "remove it: the program fixes its value"
    )

    smooth_s: float = Field(default=4.0, gt=0)
    """Width of the moving mean of arrivals."""
    slope_s: float = Field(default=5.0, gt=0)
    """Time over which growth is fitted."""


@dataclass(frozen=True, slots=True)
class LastMax:
    """Forecaster of the largest recent rate. Stateless: everything is in the bins."""

    smooth_s: float = 4.0
    lookback_s: float = 6.0
    slope_s: float = 5.0
    slope_sigmas: float = 2.0
    growth_ratio_max: float = 0.5

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        """Forecast from bins of `bin_s` seconds, the newest last."""
        assert bin_s > 0
        width = max(1, round(self.smooth_s / bin_s))
        short = "" if len(arrivals) >= width else f"only {len(arrivals) * bin_s:g} s of data"
        if not arrivals:
            return LoadForecast(family, "last_max", now_s, lead_s, fallback_reason="no data")
        mean, rate, slope, span_s = self._statistics(tuple(arrivals), bin_s)
        growth = min(slope * lead_s, self.growth_ratio_max * rate)
        p90 = poisson_quantile(rate * span_s) / span_s + growth
        return LoadForecast(family, "last_max", now_s, lead_s, mean, max(p90, rate), rate, short)

    @lru_cache(maxsize=4096)  # noqa: B019 (frozen and hashable: equal forecasters share it, and days repeat each other)
    def _statistics(self, arrivals: tuple[float, ...], bin_s: float) -> tuple[float, float, float, float]:
        """The mean of now, the largest one of late [1/s], the slope [1/s^2], and what a mean is over [s]."""
        width = min(max(1, round(self.smooth_s / bin_s)), len(arrivals))
        ends = range(len(arrivals), max(width, len(arrivals) - max(1, round(self.lookback_s / bin_s))) - 1, -1)
        means = [sum(arrivals[end - width : end]) / (width * bin_s) for end in ends]
        rate = max(means[0], *(self._level(arrivals[:end], bin_s, mean) for end, mean in zip(ends, means, strict=True)))
        return means[0], rate, self._slope(arrivals, bin_s, means[0]), width * bin_s

    def _level(self, arrivals: Sequence[float], bin_s: float, mean: float) -> float:
        """The mean over `smooth_s`, or what the last seconds alone say with confidence: a step shows at once."""
        for seconds in STEP_S:
            count = max(1, round(seconds / bin_s))
            if count <= len(arrivals):
                recent = sum(arrivals[-count:]) / (count * bin_s)
                mean = max(mean, recent - STEP_SIGMAS * math.sqrt(recent / (count * bin_s)))
        return mean

    def _slope(self, arrivals: Sequence[float], bin_s: float, rate: float) -> float:
        """Growth of the rate [1/s^2], 0.0 when it may be chance."""
        count = max(3, round(self.slope_s / bin_s))
        if len(arrivals) < count:
            return 0.0
        recent = arrivals[-count:]
        middle = (count - 1) / 2
        spread = sum(((i - middle) * bin_s) ** 2 for i in range(count))
        slope = sum((i - middle) * bin_s * (n / bin_s) for i, n in enumerate(recent)) / spread
        error = math.sqrt(max(rate, 1.0) / bin_s / spread)
        return slope if slope > self.slope_sigmas * error else 0.0


@lru_cache(maxsize=4096)  # counts of a few seconds repeat each other
def poisson_quantile(mean: float, z: float = Z_90) -> float:
    """The smallest n with P(N <= n) >= 90 % for Poisson N; by the normal law, continuity-corrected, for large means."""
    if mean <= 0:
        return 0.0
    if mean > EXACT_BELOW:
        return mean + z * math.sqrt(mean) - 0.5
    term = math.exp(-mean)
    total, n = term, 0
    while total < 0.9:
        n += 1
        term *= mean / n
        total += term
    return float(n)
