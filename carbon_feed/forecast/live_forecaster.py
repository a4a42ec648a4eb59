"""Live forecast from what is known now, or the reason why there is none.

Steps begin at full UTC steps, those of a replay where its readings do. The origin is the last step of which most is
known, the step that holds now only when all of it is: some providers publish the current hour.
Values that come late: the model looks so much further ahead, and the bands of the steps already past are dropped. So a
late provider's bands are those of its longer leads. Beyond `LATE_S` the forecast gets shorter and says so.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from carbon_feed.core.history import History
from carbon_feed.forecast.daily_rows import DAYS, Values
from carbon_feed.forecast.forecaster import HORIZON_S, STEP_S, WINDOW_DAYS, Forecaster, Model, QuantileForecast, grid
from carbon_feed.forecast.incremental import Incremental, run_to_end
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading
from trefoil.core.common import Basis, Provenance

VERSION: Final = "1"
SLACK_STEPS: Final = 1e-6
LATE_S: Final = 24 * 3600.0  # EIA-930, the latest of the usual sources, is 1 to 24 h late
STEPS_BETWEEN_BREAKS: Final = 8  # observed between two places where others may have their turn: a millisecond or two


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a forecast; as long as it stays, so does the forecast, but for revisions of single values."""

    begin_s: float
    """The start of the step that holds now."""
    until_s: float
    """The end of the newest step of which most is known."""
    known: int
    """Steps of the last week of which most is known."""
    newest: CarbonReading


@dataclass(frozen=True, slots=True)
class ForecastResult:
    """Result of a forecast; None: `why` says what is missing."""

    forecast: CarbonForecast | None
    why: str


class LiveForecaster:
    """Forecaster of one model on one history. What it learnt stays; each forecast costs the new steps only."""

    def __init__(
        self,
        history: History,
        model: Model,
        step_s: float = STEP_S,
        horizon_s: float = HORIZON_S,
        speedup: float = 1.0,
        as_of_s: float = math.inf,
    ) -> None:
        """`step_s` and `horizon_s` in the source's time, which runs `speedup` times as fast as ours.

        Raises:
            errors.SettingError: a step that does not divide the day, or a horizon of no step.
        """
        self._per_day, self._steps = grid(step_s, horizon_s)
        self._history, self._model = history, model
        self._step_s, self._horizon_s, self._speedup, self._as_of_s = step_s, horizon_s, speedup, as_of_s
        self._wall_s = step_s / speedup
        self._week = DAYS * self._per_day
        self._trained: Forecaster | None = None
        self._trained_until_s = 0.0

    def forecast(self, now_s: float) -> ForecastResult:
        """Forecast from now on, without a break."""
        return run_to_end(self.forecast_incrementally(now_s))

    def origin(self, now_s: float) -> Origin | str:
        """Origin of a forecast issued now, or why there can be none."""
        newest = self._history.newest(self._as_of_s)
        if newest is None:
            return "nothing is known of the past"
        begin_s = self._step_begin(newest, now_s)
        week = self._means(begin_s - (self._week - 1) * self._wall_s, self._week)  # ends with the step that holds now
        if not self._is_complete(begin_s):
            week[-1] = math.nan
        known = np.flatnonzero(~np.isnan(week))
        if len(known) < self._per_day:
            hours = len(known) * self._step_s / 3600
            return f"{hours:g} h of the last {DAYS} days are known, a forecast needs 24 h"
        return Origin(begin_s, begin_s + (int(known[-1]) + 2 - self._week) * self._wall_s, len(known), newest)

    def forecast_incrementally(self, now_s: float) -> Incremental[ForecastResult]:
        """Forecast with breaks: what becomes known during one is of the next forecast."""
        origin = self.origin(now_s)
        if isinstance(origin, str):
            return ForecastResult(None, origin)
        trained = yield from self._learn(origin.until_s)
        yield from trained.prepare_incrementally()
        whole = trained.quantile_forecast()
        skip = max(0, round((origin.begin_s - origin.until_s) / self._wall_s))
        ahead = QuantileForecast(whole.values[:, skip : skip + self._steps], whole.own)
        if not whole.own:
            return ForecastResult(None, "no errors yet to learn a band from: that takes two days of history")
        if not ahead.values.shape[1]:
            return ForecastResult(None, f"the newest value is {skip * self._step_s / 3600:g} h old")
        forecast = CarbonForecast(
            series=self._history.series,
            model=self._model.name,
            issued_at_s=now_s,
            bands=bands_of(ahead, origin.until_s + skip * self._wall_s, self._wall_s),
            provenance=_provenance(origin.newest, self._model),
            fallback_reason=self._reason(skip, whole.own, ahead.values.shape[1]),
        )
        return ForecastResult(
            forecast, f"{self._model.name} from {origin.known / self._per_day:.1f} of the last {DAYS} days"
        )

    def _learn(self, until_s: float) -> Incremental[Forecaster]:
        """The forecaster with all values up to a step's end: only new ones are added, unless the past has changed
        shape."""
        fresh = (until_s - self._trained_until_s) / self._wall_s
        trained, self._trained = self._trained, None  # one that was left half trained is never used again
        if trained is None or not -SLACK_STEPS < fresh < self._week or abs(fresh - round(fresh)) > SLACK_STEPS:
            return (yield from self._relearn(until_s))
        count = round(fresh)
        if count:
            yield from _observe(trained, self._means(until_s - count * self._wall_s, count))
        held = trained.newest(self._week)
        now = self._means(until_s - len(held) * self._wall_s, len(held))
        if not np.array_equal(np.isnan(held), np.isnan(now)):
            return (yield from self._relearn(until_s))  # a gap was filled: its errors count
        trained.revise(now)
        self._trained, self._trained_until_s = trained, until_s
        return trained

    def _relearn(self, until_s: float) -> Incremental[Forecaster]:
        made = Forecaster(self._model, self._step_s, self._horizon_s + LATE_S)
        first_s = self._history.arrays(self._as_of_s)[0][0]
        reach = (WINDOW_DAYS + DAYS) * self._per_day + made.steps
        count = min(reach, max(1, math.ceil((until_s - first_s) / self._wall_s - SLACK_STEPS)))
        count -= (count - 1) % self._per_day  # then the daily look at the errors is at the last step
        yield from _observe(made, self._means(until_s - count * self._wall_s, count))
        self._trained, self._trained_until_s = made, until_s
        return made

    def _step_begin(self, newest: CarbonReading, now_s: float) -> float:
        """The start of the step that holds now."""
        anchor_s = 0.0 if self._speedup == 1.0 else newest.starts_at_s
        return anchor_s + math.floor((now_s - anchor_s) / self._wall_s + SLACK_STEPS) * self._wall_s

    def _means(self, begin_s: float, count: int) -> Values:
        return self._history.means(begin_s, self._wall_s, count, self._as_of_s)

    def _is_complete(self, begin_s: float) -> bool:
        """Whether all of a step is known."""
        end_s = begin_s + self._wall_s
        pieces = self._history.between(begin_s, end_s, self._as_of_s)
        return sum(p.ends_at_s - p.starts_at_s for p in pieces) >= self._wall_s * (1 - SLACK_STEPS)

    def _reason(self, skip: int, own: int, ahead: int) -> str:
        hour = self._step_s / 3600
        reasons = []
        if ahead < self._steps:
            reasons.append(f"the newest value is {skip * hour:g} h old: only {ahead * hour:g} h ahead")
        if own < skip + ahead:
            reasons.append(
                f"the history is short: bands beyond {own * hour:g} h after its end are those of {own * hour:g} h"
            )
        return "; ".join(reasons)


def bands_of(whole: QuantileForecast, starts_at_s: float, step_s: float) -> tuple[CarbonBand, ...]:
    """Bands of a quantile forecast on the wall clock."""
    return tuple(
        CarbonBand(starts_at_s + i * step_s, starts_at_s + (i + 1) * step_s, *(float(v) for v in column))
        for i, column in enumerate(whole.values.T)
    )


def _observe(forecaster: Forecaster, values: Values) -> Incremental[None]:
    for i, value in enumerate(values, 1):
        forecaster.observe(float(value))
        if i % STEPS_BETWEEN_BREAKS == 0:
            yield


def _provenance(newest: CarbonReading, model: Model) -> Provenance:
    return Provenance(
        basis=Basis.SIMULATED if newest.simulated else Basis.MODELLED,
        source=f"own {model.name} of {newest.provider}",
        version=VERSION,
        as_of_s=newest.fetched_at_s,
    )
