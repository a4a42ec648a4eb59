"""How far an energy counter has moved between two readings, and a counter made of power readings where there is none.

NVML's counter starts anew when the driver or the GPU is reset, and on some machines wobbles by a fraction of a joule.
What cannot be is never booked: no negative step, and no step that the device cannot have drawn.
"""

import math
from dataclasses import dataclass
from typing import Final

NOISE_J: Final = 1.0  # a smaller decrease is no reset
REACH_FACTOR: Final = 3.0  # board limits are averages; a step beyond this times the limit is no measurement
REACH_SLACK_S: Final = 1.0  # counters advance in lumps of up to 100 ms, power sensors average over 1 s
SENSOR_DOUBT: Final = 0.05  # NVML documents power readings as accurate to 5 %
HOLE_S: Final = 1.0  # farther apart, two power readings say little about the time between


@dataclass(frozen=True, slots=True)
class Move:
    """joules None: what was spent is unknown. mark_j: where the next move starts. reset: the counter began anew."""

    joules: float | None
    mark_j: float
    reset: bool


def reach_j(power_max_w: float, length_s: float) -> float:
    """The most that a device can have drawn [J]; unbounded when its power is not known."""
    return REACH_FACTOR * power_max_w * (length_s + REACH_SLACK_S) if power_max_w > 0 else math.inf


def move(before_j: float | None, now_j: float, same_origin: bool, most_j: float) -> Move:
    """From one reading to the next. `same_origin` False: the driver was loaded again in between, under our eyes.

    A reset shows what was spent since; a wobble waits until the counter has passed its mark again, so that no joule
    counts twice. A driver whose marker changed although its counter went on is believed to have gone on.
    """
    if same_origin and before_j is None:
        return Move(None, now_j, False)
    grown_j = now_j - before_j if before_j is not None else -math.inf
    if same_origin and 0 <= grown_j <= most_j:
        return Move(grown_j, now_j, False)
    if same_origin and before_j is not None and -NOISE_J <= grown_j < 0:
        return Move(0.0, before_j, False)
    if now_j <= most_j and not (same_origin and grown_j >= 0):
        return Move(now_j, now_j, True)
    if 0 <= grown_j <= most_j:
        return Move(grown_j, now_j, False)
    return Move(None, now_j, True)


class PowerIntegral:
    """Joules from power readings by trapezoids, for devices without a counter; starts at 0 with this object.

    The true power between two readings is unknown. Where it is monotonic, a trapezoid errs by at most half the
    rectangle between them; the sum of these rectangles, of everything across holes, and the sensor's own error are the
    stated doubt.
    """

    def __init__(self) -> None:
        self.joules = 0.0
        self._at_s = self._power_w = math.nan
        self._doubtful_j = self._since_j = 0.0

    def take(self, at_s: float, power_w: float) -> None:
        """One reading; monotonic time. What is no power is as if it had not been read."""
        if not (math.isfinite(power_w) and power_w >= 0):
            return
        length_s = at_s - self._at_s
        if length_s <= 0:
            return
        if not math.isnan(length_s):
            step_j = (self._power_w + power_w) / 2 * length_s
            spread_j = abs(power_w - self._power_w) / 2 * length_s
            self.joules += step_j
            self._since_j += step_j
            self._doubtful_j += step_j if length_s > HOLE_S else spread_j
        self._at_s, self._power_w = at_s, power_w

    def take_doubt(self) -> float:
        """Relative error of what was added since the last call."""
        doubt = SENSOR_DOUBT + (self._doubtful_j / self._since_j if self._since_j > 0 else 0.0)
        self._doubtful_j = self._since_j = 0.0
        return min(1.0, doubt)
