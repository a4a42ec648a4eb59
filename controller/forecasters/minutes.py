"""Maxima of minutes, and the forecasts that are made of them."""

from collections.abc import Sequence
from typing import Final

from controller.forecasters.last_max import LastMax
from trefoil.core.demand import LoadForecast

MINUTE_S: Final = 60.0
_LAST_MAX: Final = LastMax()


def minute_maxima(arrivals: Sequence[float], bin_s: float) -> tuple[float, ...]:
    """Largest rate [1/s] of a bin in each whole minute, oldest first; of each bin where those are longer."""
    width = max(1, round(MINUTE_S / bin_s))
    return tuple(
        max(arrivals[end - width : end]) / bin_s
        for end in range(len(arrivals) % width + width, len(arrivals) + 1, width)
    )


def next_maximum(
    model: str, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float, maximum_per_s: float
) -> LoadForecast:
    """Forecast of the largest second to come, which is planned for as it is; the mean is that of the last minute."""
    last = arrivals[-max(1, round(MINUTE_S / bin_s)) :]
    maximum_per_s = max(0.0, maximum_per_s)
    mean_per_s = min(sum(last) / (len(last) * bin_s), maximum_per_s)
    return LoadForecast(family, model, now_s, lead_s, mean_per_s, maximum_per_s, maximum_per_s)


def last_max_instead(
    why: str, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
) -> LoadForecast:
    """Forecast of `last_max`, where another one cannot be made, with the reason."""
    recent = tuple(arrivals[-max(1, round(MINUTE_S / bin_s)) :])
    found = _LAST_MAX.forecast(family, recent, bin_s, now_s, lead_s)
    reason = f"{why}; {found.fallback_reason}" if found.fallback_reason else why
    return LoadForecast(family, found.model, now_s, lead_s, found.mean_per_s, found.p90_per_s, found.max_per_s, reason)
