"""Forecaster ewma: the largest second to come is the weighted mean of those of the last minutes, newer ones heavier.

Source: InfAdapter's artifact, which forecasts so while its LSTM lacks history (pandas' `ewm(span=10).mean()`).
Data: arrivals per second of the last `span` minutes.
Formulation: m_0 the newest maximum of a minute; sum (1 - a)^i m_i / sum (1 - a)^i, a = 2 / (span + 1).
Deviations: minutes are counted back from now. Before the first minute is over, `last_max` answers and says so.
"""

from collections.abc import Sequence

from pydantic import Field

from controller.forecasters.minutes import MINUTE_S, last_max_instead, minute_maxima, next_maximum
from trefoil.core.demand import LoadForecast
from trefoil.core.parts import PartSettings


class EwmaSettings(PartSettings):
    """What can be set of it."""

    span: int = Field(default=10, ge=1, le=1440)
    """Minutes that are looked at, and how slowly their weights fall."""


class Ewma:
    """Forecaster of the weighted mean of maxima of minutes. Stateless."""

    def __init__(self, settings: EwmaSettings) -> None:
        self._span = settings.span
        self.history_s = settings.span * MINUTE_S

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        """Forecast from bins of `bin_s` seconds, the newest last."""
        maxima = minute_maxima(arrivals, bin_s)[-self._span :]
        if not maxima:
            why = f"ewma needs a minute of history, there are {len(arrivals) * bin_s:g} s"
            return last_max_instead(why, family, arrivals, bin_s, now_s, lead_s)
        weights = [(1 - 2 / (self._span + 1)) ** i for i in reversed(range(len(maxima)))]
        mean = sum(w * m for w, m in zip(weights, maxima, strict=True)) / sum(weights)
        return next_maximum("ewma", family, arrivals, bin_s, now_s, lead_s, mean)
