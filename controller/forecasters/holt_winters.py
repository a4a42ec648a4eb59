"""Forecaster holt_winters: level, damped trend and, where one is set, a season of the maxima of minutes.

Source: Holt 1957, Winters 1960; statsmodels' ExponentialSmoothing estimates it (the extra `statistics`).
Data: arrivals per second of the last hour, or of two seasons; needs ten whole minutes, with a season two of it.
Formulation: additive, estimated again each minute of the clock (least squares, about 50 ms of a core). The forecast is
    the step after the last whole minute, or the largest second of the running minute if that is more.
Deviations: none. Without enough history, or where no estimate is found, `last_max` answers and says so.
"""

import importlib.util
import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from pydantic import Field

from controller.forecasters.minutes import MINUTE_S, last_max_instead, minute_maxima, next_maximum
from trefoil.core.demand import LoadForecast
from trefoil.core.errors import SettingError
from trefoil.core.parts import PartSettings

MINUTES_MIN: Final = 10
TREND_S: Final = 3600.0


class HoltWintersSettings(PartSettings):
    """What can be set of it."""

    season: int = Field(default=0, ge=0, le=720)
    """Minutes after which load repeats, seen twice; 0: no season."""


class HoltWinters:
    """Forecaster by exponential smoothing. Stateless: estimates are kept by the maxima that they were made of."""

    def __init__(self, settings: HoltWintersSettings) -> None:
        if importlib.util.find_spec("statsmodels") is None:
            raise SettingError(
                "statsmodels is not installed", field="forecaster", value="holt_winters",
                remedy="pip install 'trefoil[statistics]', or take another one",
            )  # fmt: skip
        smoothed_next(tuple(float(i % 3) for i in range(MINUTES_MIN)), 0)  # to import it takes a second: now, not later
        self._season = settings.season
        self.history_s = max(TREND_S, 2 * settings.season * MINUTE_S + MINUTE_S)

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        """Forecast from bins of `bin_s` seconds, the newest last."""
        running = min(len(arrivals), round(now_s % MINUTE_S / bin_s)) if bin_s < MINUTE_S else 0
        whole = minute_maxima(arrivals[: len(arrivals) - running], bin_s)
        wanted = max(MINUTES_MIN, 2 * self._season)
        if len(whole) < wanted:
            why = f"holt_winters needs {wanted} minutes of history, there are {len(whole)}"
            return last_max_instead(why, family, arrivals, bin_s, now_s, lead_s)
        found = smoothed_next(whole, self._season)
        if not math.isfinite(found):
            return last_max_instead("holt_winters found no estimate", family, arrivals, bin_s, now_s, lead_s)
        so_far = max(arrivals[len(arrivals) - running :], default=0.0) / bin_s
        return next_maximum("holt_winters", family, arrivals, bin_s, now_s, lead_s, max(found, so_far))


@lru_cache(maxsize=256)
def smoothed_next(maxima: tuple[float, ...], season: int) -> float:
    """Next value of a series; NaN where no estimate is found."""
    from statsmodels.tsa.holtwinters import ExponentialSmoothing  # an extra

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of estimates at a bound, and of constant series
        model = ExponentialSmoothing(
            list(maxima), trend="add", damped_trend=True, seasonal="add" if season else None,
            seasonal_periods=season or None, initialization_method="heuristic",
        )  # fmt: skip
        return float(model.fit().forecast(1)[0])
