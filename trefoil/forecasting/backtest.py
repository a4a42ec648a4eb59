"""Backtest of forecasters of load: every forecast that would have been made on a trace, against what then came.

Formulation: from the eleventh minute on, every `every_s`, with the past of that moment alone. Scored is the rate that
    capacity is planned for (`p90_per_s`), against the largest second y of the minute after.
Result: mean |f - y| / mean y. Share of forecasts below y, and by how much of y in the mean. Mean of what is above y,
    / mean y: capacity that is paid for and stands idle in the busiest second.
Deviations: all forecasters are given bins of a second; live, `last_max` sees half seconds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.forecasters.lstm import HORIZON_S, INPUT_S
from trefoil.core.brains import Forecaster, history_s_of
from trefoil.core.errors import TraceError
from trefoil.forecasting.training import Floats

RECENT_S = 60  # what a forecaster sees that asks for no history


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one forecaster on one trace. `instead`: forecasts that another one had to make."""

    forecasts: int
    error_ratio: float
    under_share: float
    under_ratio: float
    over_ratio: float
    instead: int
    took_ms_median: float
    took_ms_max: float


def backtest(forecaster: Forecaster, counts: Floats, every_s: int) -> Score:
    """Backtest a forecaster on arrivals per second.

    Raises:
        TraceError: a trace shorter than what is looked at, or without a request in it.
    """
    if counts.size < INPUT_S + HORIZON_S:
        raise TraceError(f"{counts.size} s are too few to forecast from", remedy=f"at least {INPUT_S + HORIZON_S} s")
    past: Sequence[float] = counts.tolist()
    sees = int(history_s_of(forecaster)) or RECENT_S
    found, came, took_ms, instead = [], [], [], 0
    forecaster.forecast("family", tuple(past[:INPUT_S]), 1.0, float(INPUT_S), HORIZON_S)  # opens what it needs, once
    for now in range(INPUT_S, counts.size - HORIZON_S + 1, every_s):
        seen = tuple(past[max(0, now - sees) : now])
        began_s = time.perf_counter()
        forecast = forecaster.forecast("family", seen, 1.0, float(now), HORIZON_S)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        instead += bool(forecast.fallback_reason)
        found.append(forecast.p90_per_s)
        came.append(max(past[now : now + HORIZON_S]))
    f, y = np.array(found), np.array(came)
    under, mean = f < y, max(float(y.mean()), 1e-9)
    return Score(
        forecasts=f.size,
        error_ratio=float(np.abs(f - y).mean()) / mean,
        under_share=float(under.mean()),
        under_ratio=float(((y - f)[under] / y[under]).mean()) if under.any() else 0.0,
        over_ratio=float(np.clip(f - y, 0.0, None).mean()) / mean,
        instead=instead,
        took_ms_median=float(np.median(took_ms)),
        took_ms_max=max(took_ms),
    )
