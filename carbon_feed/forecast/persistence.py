"""Tomorrow is like today: the newest known value of the same hour of the day.

Source: the usual baseline of the field ("same hour yesterday"); the last value held flat is worse past six hours.
Data: values v of equal steps, the last one newest; P steps a day.
Formulation: f(h) = v(newest day, hour of h), h = 1..H steps; a missing hour takes the newest of the week.
Deviations: none.
"""

from dataclasses import dataclass

from carbon_feed.forecast.daily_rows import (
    Values,
    fill_unknown_hours,
    last_days,
    repeat_day,
    same_hour_newest,
)


@dataclass(frozen=True, slots=True)
class Persistence:
    """Persistence of the same hour of the day; stateless."""

    name: str = "persistence"

    def curve(self, values: Values, per_day: int, steps: int) -> Values:
        """Intensities [g/kWh] of the next `steps` steps; NaN when no value of the week is known."""
        return repeat_day(fill_unknown_hours(same_hour_newest(last_days(values, per_day))), steps)
