"""Hour-of-week profile of a zone: substitute for a reading while providers do not answer for hours.

Source: ours; other feeds embed an hourly profile per region, here it is learnt from the zone's own history.
Data: the running mean m[k] of each of the 168 hours of the week (UTC); the last accepted value c at time t0.
Formulation: c(t) = m[k(t)] + (c - m[k(t0)]) exp(-(t - t0) / tau), tau = 12 h: what was unusual then fades.
"""

import math
from typing import Final

from trefoil.core.units import HOUR_S

HOURS: Final = 168
EPOCH_HOUR: Final = 72  # 1970-01-01 was a Thursday; hour 0 is Monday 00:00 UTC
FADE_S: Final = 12 * HOUR_S
WEEKS: Final = 8  # the weight of a new value is at least 1/8: the profile follows the season
FILLED_MIN: Final = 120  # hours of the week with a value: five days, so that a weekend alone is not enough


class HourOfWeekProfile:
    """Mean intensity by hour of the week. Bounded: 168 means and counts, however much it observes."""

    def __init__(self) -> None:
        self._means = [0.0] * HOURS
        self._counts = [0] * HOURS
        self._last: tuple[float, float] | None = None

    @property
    def ready(self) -> bool:
        """Whether enough of a week is known to stand in."""
        return sum(count > 0 for count in self._counts) >= FILLED_MIN

    @property
    def newest_s(self) -> float:
        """UTC seconds of the newest value observed."""
        assert self._last is not None, "nothing was told"
        return self._last[0]

    def observe(self, at_s: float, intensity_g_per_kwh: float) -> None:
        """Observe an accepted value; several of one hour are averaged into it."""
        assert math.isfinite(intensity_g_per_kwh)
        hour = hour_of_week(at_s)
        if self._last is None or at_s // HOUR_S != self._last[0] // HOUR_S:
            self._counts[hour] = min(WEEKS, self._counts[hour] + 1)
        weight = 1.0 / max(1, self._counts[hour])
        self._means[hour] += weight * (intensity_g_per_kwh - self._means[hour])
        if self._last is None or at_s >= self._last[0]:
            self._last = (at_s, intensity_g_per_kwh)

    def at(self, now_s: float) -> float:
        """Estimate for the hour that holds now [g/kWh]; the same all through that hour."""
        assert self.ready
        assert self._last is not None
        last_at_s, last = self._last
        start_s = now_s // HOUR_S * HOUR_S
        unusual = last - self._mean(last_at_s)
        return max(0.0, self._mean(start_s) + unusual * math.exp(-max(0.0, start_s - last_at_s) / FADE_S))

    def _mean(self, at_s: float) -> float:
        """An hour that was never seen takes the mean of that hour on the days that were."""
        hour = hour_of_week(at_s)
        if self._counts[hour]:
            return self._means[hour]
        seen = [self._means[k] for k in range(hour % 24, HOURS, 24) if self._counts[k]]
        every = [mean for mean, count in zip(self._means, self._counts, strict=True) if count]
        return sum(seen) / len(seen) if seen else sum(every) / len(every)


def hour_of_week(at_s: float) -> int:
    """Hour of the week in UTC; 0 = Monday 00:00 to 01:00."""
    return (int(at_s // HOUR_S) + EPOCH_HOUR) % HOURS
