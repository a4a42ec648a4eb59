"""Grid carbon intensity: readings, forecasts, ratios."""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from trefoil.core.common import Provenance


class Method(IntEnum):
    """Accounting method of an intensity."""

    UNSPECIFIED = 0
    AVERAGE = 1
    MARGINAL = 2


class Factors(IntEnum):
    """Emission factors: which emissions count."""

    UNSPECIFIED = 0
    DIRECT = 1
    LIFECYCLE = 2


class Quality(IntEnum):
    """Quality of a reading, best first."""

    UNSPECIFIED = 0
    MEASURED = 1
    ESTIMATED = 2
    FORECAST = 3
    CARRIED = 4
    CLIMATOLOGY = 5
    STATIC = 6


class Rung(IntEnum):
    """Rung of the fallback ladder that a reading rests on, best first; readers may refuse some."""

    NORMAL = 0
    """The zone's provider."""
    SECONDARY = 1
    """A second provider of the same method and factors."""
    CARRIED = 2
    """The last accepted value, within an age limit."""
    PROFILE = 3
    """The zone's own mean of this hour of the week, drawn towards the last value."""
    STATIC = 4
    """A configured value."""
    EXPIRED = 5
    """The last accepted value beyond its age limit: nothing else is known."""


STALE_INTERVALS: Final = 2
"""Intervals after whose end a reading, or a ratio of it, is called stale."""
RUNGS: Final = tuple(rung.name.lower() for rung in Rung)


def rung_name(rung: int) -> str:
    """Name of a rung; its number where a newer feed knows more of them."""
    return RUNGS[rung] if 0 <= rung < len(RUNGS) else str(rung)


@dataclass(frozen=True, slots=True)
class Series:
    """Series of comparable intensities. Joining two different ones raises `SeriesMismatch`."""

    zone: str = ""
    method: Method = Method.UNSPECIFIED
    factors: Factors = Factors.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class CarbonReading:
    """Reading of one intensity [gCO2/kWh] valid in [starts_at_s, ends_at_s); rung 0 = normal."""

    series: Series = Series()
    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    intensity_g_per_kwh: float = 0.0
    quality: Quality = Quality.UNSPECIFIED
    provider: str = ""
    api_version: str = ""
    estimation_method: str = ""
    observed_at_s: float = 0.0
    fetched_at_s: float = 0.0
    rung: int = 0
    fallback_reason: str = ""
    simulated: bool = False
    as_of: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CarbonBand:
    """Forecast quantiles of one interval."""

    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    p10_g_per_kwh: float = 0.0
    p50_g_per_kwh: float = 0.0
    p90_g_per_kwh: float = 0.0


@dataclass(frozen=True, slots=True)
class CarbonForecast:
    """Forecast: bands in time order, as issued at `issued_at_s`."""

    series: Series = Series()
    model: str = ""
    issued_at_s: float = 0.0
    bands: tuple[CarbonBand, ...] = ()
    provenance: Provenance | None = None
    fallback_reason: str = ""


def shift_reading(reading: CarbonReading, seconds: float) -> CarbonReading:
    """Shift the times of a reading, which are calendar time, onto a clock that differs by so much."""
    if not seconds:
        return reading
    return replace(
        reading,
        starts_at_s=reading.starts_at_s + seconds,
        ends_at_s=reading.ends_at_s + seconds,
        observed_at_s=reading.observed_at_s + seconds,
        fetched_at_s=reading.fetched_at_s + seconds,
    )


def shift_forecast(forecast: CarbonForecast, seconds: float) -> CarbonForecast:
    """Shift the times of a forecast as those of a reading."""
    if not seconds:
        return forecast
    bands = tuple(
        replace(band, starts_at_s=band.starts_at_s + seconds, ends_at_s=band.ends_at_s + seconds)
        for band in forecast.bands
    )
    return replace(forecast, issued_at_s=forecast.issued_at_s + seconds, bands=bands)


@dataclass(frozen=True, slots=True)
class CarbonRatio:
    """Carbon intensity ratio (CARBONDIS): current intensity over its trailing mean."""

    series: Series = Series()
    aci_g_per_kwh: float = 0.0
    cir: float = 0.0
    window: str = ""
    samples: int = 0
    observed_at_s: float = 0.0


def current_ratio(found: CarbonRatio | None, reading: CarbonReading | None, now_s: float) -> float | None:
    """Carbon intensity over its mean that holds at a time [UTC s]; None: unknown, or too old to go by (as old as
    receipts call a reading stale)."""
    if found is None or reading is None or found.series != reading.series:
        return None
    interval_s = reading.ends_at_s - reading.starts_at_s
    return found.cir if now_s - found.observed_at_s <= STALE_INTERVALS * interval_s else None


@dataclass(frozen=True, slots=True)
class CarbonScore:
    """Score of one lead time of a model; errors are forecast (p50) minus actual. A mean of no samples is unset.

    `mape_ratio` leaves out actuals below 1 g/kWh, where a percentage says nothing; `coverage_ratio` is the share of
    actuals inside the 10..90 % band.
    """

    horizon_s: float = 0.0
    samples: int = 0
    mae_g_per_kwh: float = 0.0
    bias_g_per_kwh: float = 0.0
    mape_ratio: float = 0.0
    mape_samples: int = 0
    coverage_ratio: float = 0.0
    coverage_samples: int = 0


@dataclass(frozen=True, slots=True)
class CarbonScores:
    """Scores of a model: archived forecasts against what was known of their intervals at `observed_at_s`."""

    series: Series = Series()
    model: str = ""
    scores: tuple[CarbonScore, ...] = ()
    forecasts: int = 0
    issued_from_at_s: float = 0.0
    issued_to_at_s: float = 0.0
    observed_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ZoneHealth:
    """Health of one zone's feed, as the process that answers sees it."""

    series: Series = Series()
    provider: str = ""
    secondary: str = ""
    """Empty = none."""
    leading: bool = False
    """This process asks the provider; else it follows what the holder of the role writes."""
    holder: str = ""
    rung: int = 0
    fallback_reason: str = ""
    age_s: float = 0.0
    """Since the reading was observed."""
    ends_at_s: float = 0.0
    soft_stale: bool = False
    """Served as before, asked for again in the background."""
    hard_stale: bool = False
    """No longer served as what holds: the ladder stands in."""
    asked_today: int = 0
    """Questions to the provider since 00:00 UTC."""
    quota_per_day: int = 0
    """0 = none."""
    breaker: str = ""
    """`closed`, `open` or `half_open`."""
    next_ask_at_s: float = 0.0
    last_error_cause: str = ""
    """Of the last question; empty = it was answered."""
    redis_answers: bool = False
    forecast_model: str = ""
    forecast_issued_at_s: float = 0.0
    history_intervals: int = 0
    history_newest_s: float = 0.0
    simulated: bool = False
