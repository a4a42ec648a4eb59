"""Forecaster minute_max: the largest second to come is the largest of the last minute. Any other one has to beat it.

Source: ours, the trivial forecast of what InfAdapter's LSTM forecasts.
Data: arrivals per second of the last minute.
Deviations: none. Before the first minute is over, `last_max` answers and says so.
"""

from collections.abc import Sequence

from controller.forecasters.minutes import MINUTE_S, last_max_instead, minute_maxima, next_maximum
from trefoil.core.demand import LoadForecast
from trefoil.core.parts import PartSettings


class MinuteMaxSettings(PartSettings):
    """Settings of `minute_max`: there are none."""


class MinuteMax:
    """Forecaster of the last minute's maximum. Stateless."""

    history_s = MINUTE_S

    def __init__(self, settings: MinuteMaxSettings) -> None:
        """Take no settings."""

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        """Forecast from bins of `bin_s` seconds, the newest last."""
        maxima = minute_maxima(arrivals, bin_s)
        if not maxima:
            why = f"minute_max needs a minute of history, there are {len(arrivals) * bin_s:g} s"
            return last_max_instead(why, family, arrivals, bin_s, now_s, lead_s)
        return next_maximum("minute_max", family, arrivals, bin_s, now_s, lead_s, maxima[-1])
