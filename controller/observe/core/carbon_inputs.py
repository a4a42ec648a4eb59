"""Carbon reading and carbon forecast to plan by; whatever is refused is named, with the reason.

Source: the feed's ladder (`trefoil.core.carbon.Rung`); what is done with it ours.
Data: the reading in force, the last one on a rung that may be planned by, the forecast in force; the settings
`carbon.rungs_refused`, `carbon.static_g_per_kwh`.
Decision: `PlannableReading`, the reading to plan by and why not the one in force; a forecast, or one without bands that
says why.
Formulation: a reading on a refused rung starts no decision. Other decisions then use the last reading of an allowed
rung, however old: its own value, rung and times, with the reason. Without such a reading the configured value stands
in, because serving needs a plan. A forecast is refused when it is of another series, issued in the future, or old. It
is old when more than a share of what it looked ahead is over. This rule is the same in a replay that runs fast. What is
left of a forecast is cut to what a budget looks ahead, because every decision records its view.
Deviations: none.
"""

import math
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.carbon import CarbonForecast, CarbonReading, Quality, Rung, Series, rung_name

FORECAST_AGE_SHARE_MAX: Final = 0.25  # of what a forecast looked ahead; an older one is refused
EARLY_S: Final = 5.0  # by how much the clocks of two machines may differ


@dataclass(frozen=True, slots=True)
class PlannableReading:
    """Reading to plan by. `rung`: the name of the refused rung in force, "" = none is; `why` in words."""

    reading: CarbonReading
    rung: str = ""
    why: str = ""


def static_reading(series: Series, static_g_per_kwh: float, now_s: float) -> CarbonReading:
    """Static reading of the setting, which stands in until the first one."""
    return CarbonReading(
        series=series,
        starts_at_s=now_s,
        ends_at_s=now_s,
        intensity_g_per_kwh=static_g_per_kwh,
        quality=Quality.STATIC,
        provider="setting",
        observed_at_s=now_s,
        rung=int(Rung.STATIC),
        fallback_reason=f"no reading of {series.zone} yet: carbon.static_g_per_kwh",
    )


def carried_when_stale(reading: CarbonReading, now_s: float, stale_intervals: float) -> CarbonReading:
    """The reading, marked carried if it was not renewed for so many of its intervals."""
    interval_s = reading.ends_at_s - reading.starts_at_s
    age_s = now_s - reading.observed_at_s
    if age_s <= stale_intervals * interval_s:
        return reading
    rung, why = max(reading.rung, int(Rung.CARRIED)), f"the reading is {age_s:.0f} s old"
    return replace(reading, rung=rung, quality=Quality.CARRIED, fallback_reason=why)


def without_sign(reading: CarbonReading) -> CarbonReading:
    """Reading to plan by: a negative marginal intensity is 0, for no plan may be made to waste energy."""
    return replace(reading, intensity_g_per_kwh=0.0) if reading.intensity_g_per_kwh < 0 else reading


def plannable_reading(
    in_force: CarbonReading,
    last: CarbonReading | None,
    refused: Set[str],
    static_g_per_kwh: float,
    now_s: float,
) -> PlannableReading:
    """Reading to plan by: the one in force, or the last one whose rung is allowed."""
    in_force = without_sign(in_force)
    rung = rung_name(in_force.rung)
    if rung not in refused:
        return PlannableReading(in_force)
    because = f" ({in_force.fallback_reason})" if in_force.fallback_reason else ""
    why = f"rung {rung} in force{because} is refused by carbon.rungs_refused"
    if last is None:
        reading = static_reading(in_force.series, static_g_per_kwh, now_s)
        why = f"{why}; no reading of an allowed rung exists, carbon.static_g_per_kwh stands in"
    else:
        reading = without_sign(last)
        age_s = max(0.0, now_s - last.ends_at_s)
        since = f", which ended {age_s:.0f} s ago" if age_s > 0 else ""
        why = f"{why}; planned by the last reading on rung {rung_name(last.rung)}{since}"
    return PlannableReading(replace(reading, fallback_reason=why), rung, why)


def forecast_refusal(forecast: CarbonForecast, series: Series, now_s: float, age_share_max: float = math.inf) -> str:
    """Reason why a forecast is not planned by; "" = it is."""
    if forecast.series != series:
        return f"the forecast is of {_words(forecast.series)}, not of {_words(series)}"
    if not forecast.bands:
        return forecast.fallback_reason or "the forecast is empty"
    if forecast.issued_at_s > now_s + EARLY_S:
        return f"the forecast was issued {forecast.issued_at_s - now_s:.0f} s in the future"
    age_s, looked_s = now_s - forecast.issued_at_s, forecast.bands[-1].ends_at_s - forecast.issued_at_s
    if age_s > age_share_max * looked_s:
        return (
            f"the forecast is {age_s:.0f} s old, more than {age_share_max:.0%} of the {looked_s:.0f} s that it looked "
            f"ahead"
        )
    return ""


def clipped_forecast(forecast: CarbonForecast, now_s: float, ahead_s: float) -> CarbonForecast:
    """Forecast clipped to the bands that reach into the next `ahead_s`."""
    ends_s = now_s + ahead_s
    return replace(forecast, bands=tuple(b for b in forecast.bands if b.ends_at_s > now_s and b.starts_at_s < ends_s))


def without_bands(forecast: CarbonForecast, series: Series, why: str) -> CarbonForecast:
    """Forecast that is refused: what was issued and when, nothing to plan by, and why."""
    return CarbonForecast(series, forecast.model, forecast.issued_at_s, fallback_reason=why)


def _words(series: Series) -> str:
    return f"{series.zone or '?'}, {series.method.name.lower()}, {series.factors.name.lower()}"
