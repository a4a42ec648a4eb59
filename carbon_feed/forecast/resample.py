"""Resampling of a forecast to other steps: finer ones repeat their step, coarser ones are its means.

A mean of 10 % lines is the 10 % line of a mean whose steps err together. Errors of neighbouring hours nearly do. Where
they do not, the band is too wide, never too narrow.
"""

import dataclasses
import math

import numpy as np

from carbon_feed.core.history import Integral, Values
from trefoil.core.carbon import CarbonBand, CarbonForecast


def resample(forecast: CarbonForecast, step_s: float) -> CarbonForecast:
    """Resample a forecast to whole steps from its first band on; a step at the end or with a gap is left out."""
    assert step_s > 0
    if not forecast.bands:
        return forecast
    starts: Values = np.array([b.starts_at_s for b in forecast.bands], dtype=np.float64)
    ends: Values = np.array([b.ends_at_s for b in forecast.bands], dtype=np.float64)
    count = math.floor((ends[-1] - starts[0]) / step_s + 1e-9)
    begins: Values = starts[0] + step_s * np.arange(count, dtype=np.float64)
    lines = [
        Integral(starts, ends, np.array([getattr(b, name) for b in forecast.bands], dtype=np.float64)).means(
            begins, begins + step_s, covered_min=1 - 1e-9
        )
        for name in ("p10_g_per_kwh", "p50_g_per_kwh", "p90_g_per_kwh")
    ]
    made = (
        CarbonBand(float(at), float(at + step_s), float(low), float(middle), float(high))
        for at, low, middle, high in zip(begins, *lines, strict=True)
        if not math.isnan(middle)
    )
    return dataclasses.replace(forecast, bands=tuple(made))
