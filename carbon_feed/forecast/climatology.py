"""The mean day of the last week.

Source: the usual baseline of the field ("7-day hour mean"). A profile by hour of the week over four weeks is worse on
the traces we hold. Day ahead, its MAPE is 11.3 against 9.6 % in California, and 9.2 against 8.1 % in New South Wales
(both 2022).
Data: values v of equal steps, the last one newest; P steps a day.
Formulation: f(h) = mean of the known values of the same hour over 7 days, h = 1..H steps.
Deviations: hours of the day are those of UTC; in the week after a change of clocks the mean blurs by up to an hour.
"""

from dataclasses import dataclass

from carbon_feed.forecast.daily_rows import (
    Values,
    fill_unknown_hours,
    last_days,
    repeat_day,
    same_hour_mean,
)


@dataclass(frozen=True, slots=True)
class Climatology:
    """Climatology of the last seven days; stateless."""

    name: str = "climatology"

    def curve(self, values: Values, per_day: int, steps: int) -> Values:
        """Intensities [g/kWh] of the next `steps` steps; NaN when no value of the week is known."""
        return repeat_day(fill_unknown_hours(same_hour_mean(last_days(values, per_day))), steps)
