"""Half yesterday, half the mean day of the week, and the error of that at the newest value, fading.

Source: own; closed form, no training. Figures on real grids: docs/carbon.md, Forecasts.
Data: values v of equal steps, the last known one a steps old (0 = it has just ended); P steps a day.
Formulation: b(t) = 0.5 persistence(t) + 0.5 climatology(t). e = v(newest known) - b(there), from days before it.
f(h) = b(h) + e * exp(-(h + a) / tau), tau = 12 h; a negative value becomes 0.
Deviations: none.
"""

import math
from dataclasses import dataclass

import numpy as np

from carbon_feed.forecast.daily_rows import (
    DAYS,
    Values,
    fill_unknown_hours,
    last_days,
    repeat_day,
    same_hour_mean,
    same_hour_newest,
)


@dataclass(frozen=True, slots=True)
class Blend:
    """Blend of persistence and climatology. Both constants are flat optima: docs/carbon.md."""

    name: str = "blend"
    yesterday_share: float = 0.5
    fade_h: float = 12.0

    def curve(self, values: Values, per_day: int, steps: int) -> Values:
        """Intensities [g/kWh] of the next `steps` steps; NaN when no value of the week is known."""
        base = repeat_day(self._base(last_days(values, per_day)), steps)
        newest = self._newest(values, per_day)
        if newest is None:
            return base
        age, value = newest
        before = values[: len(values) - 1 - age]
        there = self._base(last_days(before, per_day))[0]
        if math.isnan(there):
            return base
        ahead_h = (np.arange(1, steps + 1) + age) * (24.0 / per_day)
        curve: Values = np.maximum(base + (value - there) * np.exp(-ahead_h / self.fade_h), 0.0)
        return curve

    def _base(self, rows: Values) -> Values:
        newest, mean = same_hour_newest(rows), same_hour_mean(rows)
        return fill_unknown_hours(self.yesterday_share * newest + (1 - self.yesterday_share) * mean)

    @staticmethod
    def _newest(values: Values, per_day: int) -> tuple[int, float] | None:
        """Age in steps and value of the newest known value of the last week."""
        known = np.flatnonzero(~np.isnan(values[-DAYS * per_day :]))
        if not len(known):
            return None
        age = min(len(values), DAYS * per_day) - 1 - int(known[-1])
        return age, float(values[len(values) - 1 - age])
