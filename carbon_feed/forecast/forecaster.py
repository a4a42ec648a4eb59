"""Forecaster: a model with bands, one object for the live feed and for the backtest.

It gets one value per step, in order, and knows only these values.
"""

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from carbon_feed.forecast.bands import LeadErrors, Quantiles
from carbon_feed.forecast.daily_rows import DAYS, Values
from carbon_feed.forecast.incremental import Incremental
from trefoil.core import errors
from trefoil.core.units import DAY_S

HORIZON_S: Final = 96 * 3600.0
STEP_S: Final = 3600.0
STEP_MIN_S: Final = 900.0  # 96 h of a finer step would hold more errors than they tell; resample the forecast instead
WINDOW_DAYS: Final = 60  # of errors that bands are learnt from: two months follow the season and still hold a tenth


class Model(Protocol):
    """Model of a forecast in closed form. A new one is a file and a line of MODELS."""

    @property
    def name(self) -> str:
        """Name as in settings, tables and CarbonForecast.model."""
        ...

    def curve(self, values: Values, per_day: int, steps: int) -> Values:
        """Intensities [g/kWh] of the next `steps` steps; NaN when nothing can be said."""
        ...


@dataclass(frozen=True, slots=True)
class QuantileForecast:
    """Quantiles 10, 50 and 90 % of each step to come, as [3, H] in g/kWh. Without bands the outer two are NaN."""

    values: Values
    own: int
    """Leads whose band rests on separate errors; later ones borrow the last of these."""


class Forecaster:
    """Forecaster: a model, the values it observed, and the errors it made."""

    def __init__(
        self, model: Model, step_s: float = STEP_S, horizon_s: float = HORIZON_S, window_days: int = WINDOW_DAYS
    ) -> None:
        self.per_day, self.steps = grid(step_s, horizon_s)
        self._model = model
        self._values = np.full(DAYS * self.per_day * 4, np.nan)
        self._count = 0
        self._index = -1
        self._known = 0
        self._errors = LeadErrors(window_days * self.per_day, self.steps)
        self._quantiles: Quantiles | None = None

    def observe(self, value_g_per_kwh: float) -> None:
        """Observe the value of the next step (NaN = unknown), which settles the errors of its forecasts."""
        if self._count == len(self._values):  # keep the newest quarter and make room for the rest
            keep = DAYS * self.per_day + 1
            self._values[:keep] = self._values[-keep:]
            self._values[keep:] = np.nan
            self._count = keep
        self._values[self._count] = value_g_per_kwh
        self._count += 1
        self._index += 1
        self._errors.actual(self._index, value_g_per_kwh)
        self._known += not math.isnan(value_g_per_kwh)
        self._errors.forecast(self._index, self._curve())
        if self._index % self.per_day == 0:
            self._errors.refresh()  # now, not at a query: a query must not change the answer
            self._quantiles = None

    def revise(self, newest: Values) -> bool:
        """Revise the newest values, at most a week's; returns whether any was another.

        Errors stay as they were first known: a forecast is judged once. A value must not become known or unknown.
        """
        held = self._values[self._count - len(newest) : self._count]
        assert len(held) == len(newest) <= DAYS * self.per_day
        assert np.array_equal(np.isnan(held), np.isnan(newest))
        if np.array_equal(held, newest, equal_nan=True):
            return False
        held[:] = newest
        self._errors.forecast(self._index, self._curve())
        return True

    def newest(self, count: int) -> Values:
        """Newest values observed, at most a week's."""
        held: Values = self._values[max(0, self._count - min(count, DAYS * self.per_day)) : self._count]
        return held

    def _curve(self) -> Values:
        """NaN before a day is known: errors of guesses from a few hours would widen the bands for weeks."""
        if self._known < self.per_day:
            return np.full(self.steps, np.nan)
        return self._model.curve(self._values[: self._count], self.per_day, self.steps)

    def prepare_incrementally(self) -> Incremental[None]:
        """Compute with breaks what `quantile_forecast` needs."""
        if self._quantiles is None:
            self._quantiles = yield from self._errors.quantiles_incrementally()

    def quantile_forecast(self) -> QuantileForecast:
        """Forecast of the steps after the last value observed."""
        assert self._index >= 0, "nothing was observed yet"
        if self._quantiles is None:
            self._quantiles = self._errors.quantiles()
        point = self._errors.last(self._index)
        found = self._quantiles
        if not found.known:
            return QuantileForecast(np.stack([np.full(self.steps, np.nan), point, np.full(self.steps, np.nan)]), 0)
        return QuantileForecast(np.clip(point[None, :] + found.values, 0.0, None), found.own)


def grid(step_s: float, horizon_s: float) -> tuple[int, int]:
    """Grid of a forecast: steps a day and steps in the horizon.

    Raises:
        errors.SettingError: a step that does not divide the day, or is too fine; a horizon of no step.
    """
    per_day = round(DAY_S / step_s) if step_s > 0 else 0
    if step_s < STEP_MIN_S or abs(per_day * step_s - DAY_S) > 1e-6:
        raise errors.SettingError(
            "not a step that divides the day", field="step_s", value=step_s, remedy="use 900, 1800 or 3600"
        )
    steps = round(horizon_s / step_s)
    if not 1 <= steps <= 14 * per_day:
        raise errors.SettingError(
            "not 1 step to 14 days", field="horizon_s", value=horizon_s, remedy="use 345600, which is 96 h"
        )
    return per_day, steps
