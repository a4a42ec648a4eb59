"""Backtest: play a past again and score every forecast that would have been made; no origin knows what follows.

The values are in a buffer that starts as NaN and is filled one step at a time. A model that looked ahead would see NaN.
Actuals meet forecasts only in the scoring, after the forecast is fixed.
Scores: lead h = 1..H steps; MAE and bias in g/kWh, MAPE in percent of the actual (actuals below 1 g/kWh are left out).
Coverage = share of actuals inside the 10..90 % band.
"""

import math
from dataclasses import dataclass

import numpy as np

from carbon_feed.core.trace_playback import Trace
from carbon_feed.forecast.daily_rows import DAYS, Values
from carbon_feed.forecast.forecaster import HORIZON_S, STEP_S, WINDOW_DAYS, Forecaster, Model
from carbon_feed.forecast.scores import ScoreSums, pool_scores
from trefoil.core import errors
from trefoil.core.carbon import CarbonScore
from trefoil.core.units import DAY_S


@dataclass(frozen=True, slots=True)
class Backtest:
    """Scores of one model by lead, over origins `first`..`last` (indices of the newest value known)."""

    model: str
    step_s: float
    first: int
    last: int
    scores: tuple[CarbonScore, ...]

    def day(self, number: int) -> CarbonScore:
        """Score of all leads of day 1, 2, ... together."""
        per_day = round(DAY_S / self.step_s)
        return pool_scores(self.scores[(number - 1) * per_day : number * per_day])

    @property
    def days(self) -> int:
        """Days in the horizon; the last one may be a part of a day."""
        return math.ceil(len(self.scores) * self.step_s / DAY_S - 1e-9)


def backtest(
    model: Model, values: Values, *, first: int, step_s: float = STEP_S, horizon_s: float = HORIZON_S
) -> Backtest:
    """Backtest a model: forecast at every step and score those from origin `first` on.

    Raises:
        errors.InvalidInput: no step is left to score.
    """
    total = len(values)
    if not 0 <= first < total - 1:
        raise errors.InvalidInput(
            f"{total} steps leave nothing to score", field="first", value=first, remedy="start earlier, or give more"
        )
    forecaster = Forecaster(model, step_s, horizon_s)
    tally = ScoreSums(forecaster.steps)
    days_back = WINDOW_DAYS + DAYS + -(-forecaster.steps // forecaster.per_day) + 1  # older values change nothing
    begin = max(0, first // forecaster.per_day - days_back) * forecaster.per_day
    for origin in range(begin, total - 1):
        forecaster.observe(float(values[origin]))
        if origin < first:
            continue
        forecast = forecaster.quantile_forecast()
        actual = np.full(forecaster.steps, np.nan)
        after = values[origin + 1 : origin + 1 + forecaster.steps]
        actual[: len(after)] = after
        tally.add(forecast.values, actual)
    return Backtest(model.name, step_s, first, total - 2, tally.scores(step_s))


def trace_means(trace: Trace, step_s: float = STEP_S) -> Values:
    """Means of a whole trace over steps, lead-in included; an incomplete step at the end is left out.

    Raises:
        errors.TraceError: the trace is coarser than the step, or of a step that does not fit into it.
    """
    ratio = step_s / trace.step_s
    if ratio < 1 - 1e-9 or abs(ratio - round(ratio)) > 1e-9:
        raise errors.TraceError(
            f"{trace.source} has steps of {trace.step_s:g} s, which do not make up steps of {step_s:g} s",
            field="step_s",
            value=step_s,
            remedy="choose a step that is a multiple of the trace's",
        )
    width = round(ratio)
    whole = len(trace.values_g_per_kwh) // width * width
    means: Values = np.array(trace.values_g_per_kwh[:whole], dtype=float).reshape(-1, width).mean(axis=1)
    return means
