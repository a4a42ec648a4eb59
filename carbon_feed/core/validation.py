"""Validation of provider answers: what is wrong is one cause of a closed list, to be counted and looked up.

Values: finite, 0..1,500 g/kWh (marginal ones from -1,500 on), not an answer of only zeros. Also not more than ten times
(or less than a tenth of) the last accepted value, until the next interval confirms the value.
Intervals: they begin before they end, last INTERVAL_MAX_S at most and hold now.
Zone, method and factors are those that were asked for.
Forecasts: in time order, from now to the horizon, without holes but for rows that had no value, a tenth at most.
Recordings and settings are taken at their word where only live data can be in doubt (zeros, jumps, long intervals).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from carbon_feed.core.observation import Observation
from carbon_feed.core.trace_playback import INTENSITY_MAX_G_PER_KWH
from trefoil.core.carbon import CarbonForecast, CarbonReading, Factors, Method, Quality, Rung, Series
from trefoil.core.outside.plausible import EPOCHS_AHEAD_MAX

CLOCK_SLACK_S: Final = 1.0  # a provider's interval may begin this much after our now, or have ended this much before
JUMP_RATIO: Final = 10.0
JUMP_FLOOR_G: Final = 10.0  # below it a ratio tells nothing: 1 -> 20 g/kWh is a breeze that lulled
AHEAD_MAX_S: Final = 60.0  # by which what another feed wrote may lie ahead: every service logs an error from 2 s on
ISSUED_MAX_S: Final = 70 * 86_400.0  # for so long issued forecasts are kept, and a week
REACH_MAX_S: Final = 16 * 86_400.0  # of a forecast: 14 days, and a day that its values may be late
INTERVAL_MAX_S: Final = 3 * 3600.0  # providers use five minutes to an hour; one value a day is too coarse
HORIZON_MIN_RATIO: Final = 0.9  # NESO's 48 h are 96 or 97 points, and a forecast may be one step old


class Cause(StrEnum):
    """Cause of a refusal. The first group never reached a value; the second did, and it is not believed."""

    UNAVAILABLE = "unavailable"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    TLS = "tls"
    SERVER_ERROR = "server_error"
    BAD_REQUEST = "bad_request"
    UNAUTHORISED = "unauthorised"
    FORBIDDEN = "forbidden"
    NO_DATA = "no_data"
    GONE = "gone"
    RATE_LIMITED = "rate_limited"
    REDIRECTED = "redirected"
    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    EMPTY = "empty"
    WRONG_SHAPE = "wrong_shape"
    SECRET = "secret"
    QUOTA = "quota"
    NULL = "null"
    NOT_A_NUMBER = "not_a_number"
    NEGATIVE = "negative"
    TOO_HIGH = "too_high"
    ALL_ZERO = "all_zero"
    JUMP = "jump"
    WRONG_ZONE = "wrong_zone"
    WRONG_SERIES = "wrong_series"
    WRONG_UNIT = "wrong_unit"
    BAD_INTERVAL = "bad_interval"
    FUTURE = "future"
    ENDED = "ended"
    TRUNCATED = "truncated"


CONTENT: Final = frozenset(
    (Cause.NO_DATA, Cause.TOO_LARGE, Cause.NOT_JSON, Cause.EMPTY, Cause.WRONG_SHAPE, Cause.NULL, Cause.WRONG_UNIT)
)
"""Causes that say something of one answer and nothing of the next one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal: why there is no value, in a word and in a sentence. `retry_after_s` = the wait that was asked for."""

    cause: Cause
    message: str
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.cause}: {self.message}"


@dataclass(frozen=True, slots=True)
class JumpReference:
    """Values that a jump is measured from: the last accepted one, and one that was refused for its jump."""

    last_g_per_kwh: float | None = None
    suspect: Observation | None = None


def check_observation(
    point: Observation,
    series: Series,
    now_s: float,
    reference: JumpReference | None = None,
    late_max_s: float = CLOCK_SLACK_S,
) -> Refusal | None:
    """Check whether an observation can be accepted as what holds now; returns why not, None = it can.

    `late_max_s`: how long after its end an interval still holds, for zones that publish late.
    """
    refusal = check_content(point, series)
    if refusal is not None:
        return refusal
    if point.starts_at_s > now_s + CLOCK_SLACK_S:
        return Refusal(Cause.FUTURE, f"an interval that starts in {point.starts_at_s - now_s:.0f} s")
    if reference is not None and not is_trusted(point) and is_jump(point, reference):
        return Refusal(
            Cause.JUMP,
            f"{point.intensity_g_per_kwh:.0f} g/kWh after {reference.last_g_per_kwh:.0f}, "
            f"more than {JUMP_RATIO:.0f} times; accepted when the next interval confirms it",
        )
    if point.ends_at_s < now_s - max(late_max_s, CLOCK_SLACK_S):
        return Refusal(Cause.ENDED, f"its newest interval ended {now_s - point.ends_at_s:.0f} s ago")
    return None


def check_content(point: Observation, series: Series) -> Refusal | None:
    """Check identity, value and length, whenever the interval is; returns why not, None = it may be believed."""
    return check_identity(point, series) or check_value(point, series.method) or check_interval(point)


def check_identity(point: Observation, series: Series) -> Refusal | None:
    """Check that zone, method and factors are those that were asked for."""
    if point.zone_asked and point.zone_echoed and point.zone_echoed != point.zone_asked:
        return Refusal(Cause.WRONG_ZONE, f"asked for {point.zone_asked!r}, answered for {point.zone_echoed!r}")
    if point.method not in (Method.UNSPECIFIED, series.method):
        return Refusal(Cause.WRONG_SERIES, f"{point.method.name.lower()} where {series.method.name.lower()} is read")
    if point.factors not in (Factors.UNSPECIFIED, series.factors):
        return Refusal(Cause.WRONG_SERIES, f"{point.factors.name.lower()} where {series.factors.name.lower()} is read")
    return None


def check_value(point: Observation, method: Method) -> Refusal | None:
    """Check the value alone, and the answer that it came in. A marginal one may be negative: more load, less fuel."""
    value, low = point.intensity_g_per_kwh, -INTENSITY_MAX_G_PER_KWH if method is Method.MARGINAL else 0.0
    if not math.isfinite(value):
        return Refusal(Cause.NOT_A_NUMBER, f"said {value} g/kWh")
    if value < low:
        return Refusal(Cause.NEGATIVE, f"said {value:g} g/kWh, outside {low:.0f}..{INTENSITY_MAX_G_PER_KWH:.0f}")
    if value > INTENSITY_MAX_G_PER_KWH:
        return Refusal(Cause.TOO_HIGH, f"said {value:g} g/kWh, outside {low:.0f}..{INTENSITY_MAX_G_PER_KWH:.0f}")
    if value == 0 and not is_trusted(point) and not any(point.beside_g_per_kwh):
        points = max(1, len(point.beside_g_per_kwh))
        return Refusal(Cause.ALL_ZERO, f"said 0 g/kWh at each of {points} points, the mark of an outage")
    return None


def stored_fault(stored: CarbonReading, now_s: float) -> str:
    """Fault of a reading that another feed has written, as Redis has it; "" where it can be one."""
    ahead_s = max(stored.starts_at_s, stored.observed_at_s, stored.fetched_at_s) - now_s
    if ahead_s > AHEAD_MAX_S:
        return f"it is of {ahead_s:.0f} s from now"
    long = check_interval(stored) if stored.rung <= Rung.SECONDARY else None
    return long.message if long is not None else ""


def forecast_fault(forecast: CarbonForecast, now_s: float) -> str:
    """Fault of a forecast that another feed or an earlier process has written; "" where it can be one."""
    ahead_s = forecast.issued_at_s - now_s
    if not -ISSUED_MAX_S <= ahead_s <= AHEAD_MAX_S:
        return f"it was issued {ahead_s:.0f} s from now"
    edges = [edge for band in forecast.bands for edge in (band.starts_at_s, band.ends_at_s)]
    reach_s = max((abs(edge - forecast.issued_at_s) for edge in edges), default=0.0)
    return "" if reach_s <= REACH_MAX_S else f"a band {reach_s:.0f} s from its issue"


def order_fault(stored: CarbonReading, epoch: int, as_of: int) -> str:
    """Fault in the order of a stored reading, "" if there is none. Given: the highest epoch of its role, and the last
    revision known here."""
    if stored.epoch > epoch:
        return f"epoch {stored.epoch}, and the role was taken under {epoch}"
    return f"revision {stored.as_of} after {as_of}" if stored.as_of > as_of + EPOCHS_AHEAD_MAX else ""


def check_interval(point: Observation | CarbonReading) -> Refusal | None:
    """Check that the interval ends after it starts and is no longer than INTERVAL_MAX_S."""
    long_s = point.ends_at_s - point.starts_at_s
    if not long_s > 0:
        return Refusal(Cause.BAD_INTERVAL, "an interval that ends before it starts")
    if long_s > INTERVAL_MAX_S and not is_trusted(point):
        return Refusal(
            Cause.BAD_INTERVAL, f"one value for {long_s / 3600:.1f} h, longer than {INTERVAL_MAX_S / 3600:.0f} h"
        )
    return None


def is_trusted(point: Observation | CarbonReading) -> bool:
    """Whether it is a recording or a setting, which no outage of a provider can spoil."""
    return point.simulated or point.quality is Quality.STATIC


def is_jump(point: Observation, reference: JumpReference) -> bool:
    """Whether a value is too far from the last one and was not said before for an earlier interval."""
    if reference.last_g_per_kwh is None or not differ_widely(point.intensity_g_per_kwh, reference.last_g_per_kwh):
        return False
    suspect = reference.suspect
    if suspect is None or suspect.provider != point.provider or suspect.starts_at_s >= point.starts_at_s:
        return True
    return differ_widely(point.intensity_g_per_kwh, suspect.intensity_g_per_kwh)


def differ_widely(one_g_per_kwh: float, other_g_per_kwh: float) -> bool:
    """Whether two values differ by more than JUMP_RATIO."""
    low, high = sorted((max(one_g_per_kwh, JUMP_FLOOR_G), max(other_g_per_kwh, JUMP_FLOOR_G)))
    return high > JUMP_RATIO * low


def _hole(points: Sequence[Observation]) -> Refusal | None:
    """Refusal of points out of order, or with holes that rows without a value do not explain or that are too large."""
    missing_s, left_out = 0.0, points[0].left_out
    for before, after in itertools.pairwise(points):
        hole_s, step_s = after.starts_at_s - before.ends_at_s, before.ends_at_s - before.starts_at_s
        if abs(hole_s) <= CLOCK_SLACK_S:
            continue
        missing_s += hole_s
        left_out -= round(hole_s / step_s)
        if hole_s < 0 or left_out < 0:
            return Refusal(Cause.BAD_INTERVAL, "a forecast with a hole, or out of order")
    reach_s = points[-1].ends_at_s - points[0].starts_at_s
    if missing_s > (1 - HORIZON_MIN_RATIO) * reach_s:
        hours = f"{missing_s / 3600:.1f} of {reach_s / 3600:.1f} h"
        return Refusal(Cause.NULL, f"{points[0].left_out} rows of the forecast have no value: {hours}")
    return None


def check_forecast(points: Sequence[Observation], series: Series, now_s: float, horizon_s: float) -> Refusal | None:
    """Check whether a provider's forecast can be accepted whole; returns why not, None = it can."""
    if not points:
        return Refusal(Cause.EMPTY, "a forecast without points")
    for point in points:
        refusal = check_content(point, series)
        if refusal is not None:
            return refusal
    hole = _hole(points)
    if hole is not None:
        return hole
    first, last = points[0], points[-1]
    if first.starts_at_s > now_s + (first.ends_at_s - first.starts_at_s) + CLOCK_SLACK_S:
        return Refusal(Cause.FUTURE, f"a forecast that begins in {first.starts_at_s - now_s:.0f} s")
    reach_s = last.ends_at_s - now_s
    if reach_s < HORIZON_MIN_RATIO * horizon_s:
        return Refusal(
            Cause.TRUNCATED, f"{len(points)} points reach {reach_s / 3600:.1f} h of {horizon_s / 3600:.0f} h"
        )
    return None
