"""Bands from empirical error quantiles at each lead time: nothing is assumed about the errors.

Data: errors e(t, h) = actual of step t - its forecast at lead h = 1..H steps, of the last `window` actuals. An error is
booked when its actual is known, so a band never knows more than its origin did.
Formulation: band(h) = forecast(h) + the 10 %, 50 % and 90 % quantile of e(., h), learnt again once a day.
A sort of 96 x 1,440 errors takes milliseconds, and a day changes a sixtieth of them.
From the first lead with fewer than ERRORS_MIN errors on, all leads borrow the band of the last lead before, and say so.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from carbon_feed.forecast.daily_rows import Values
from carbon_feed.forecast.incremental import Incremental, run_to_end

LEVELS: Final = (0.1, 0.5, 0.9)
ERRORS_MIN: Final = 24  # a day of hourly origins: fewer cannot tell a tenth
LEADS_BETWEEN_BREAKS: Final = 24  # sorted between two places where others may have their turn: a millisecond or two


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of the errors [g/kWh], as [3, H]; `own` leads have enough errors, all later ones borrow."""

    values: Values
    own: int

    @property
    def known(self) -> bool:
        """Whether any lead has a band at all."""
        return self.own > 0


class LeadErrors:
    """Errors by lead: rings of open forecasts and of the errors that the last `window` actuals settled."""

    def __init__(self, window: int, steps: int) -> None:
        self._open = steps + 1
        self._window = window
        self._leads = np.arange(1, steps + 1)
        self._forecasts = np.full((self._open, steps), np.nan)
        self._errors = np.full((steps, window), np.nan)  # one row a lead, one column an actual
        self._learnt = self._errors.copy()

    def forecast(self, origin: int, curve: Values) -> None:
        """Keep the forecast made at an origin; origins count up by one."""
        self._forecasts[origin % self._open] = curve

    def last(self, origin: int) -> Values:
        """Forecast made at an origin."""
        kept: Values = self._forecasts[origin % self._open]
        return kept

    def actual(self, index: int, value: float) -> None:
        """Settle the errors that the value of step `index` (= origin + lead) decides; NaN settles nothing."""
        origins = index - self._leads
        made = self._forecasts[origins % self._open, self._leads - 1]
        self._errors[:, index % self._window] = np.where(origins >= 0, value - made, np.nan)

    def refresh(self) -> None:
        """Refresh the copy of the errors that bands are learnt from."""
        self._learnt = self._errors.copy()

    def quantiles(self) -> Quantiles:
        """Quantiles of the errors held at the last refresh."""
        return run_to_end(self.quantiles_incrementally())

    def quantiles_incrementally(self) -> Incremental[Quantiles]:
        """Quantiles with breaks: of the errors held when it begins."""
        learnt, sorted_rows = self._learnt, []
        for first in range(0, len(learnt), LEADS_BETWEEN_BREAKS):
            sorted_rows.append(np.sort(learnt[first : first + LEADS_BETWEEN_BREAKS], axis=1))  # NaN goes last
            yield
        ordered = np.concatenate(sorted_rows)
        counts = (~np.isnan(ordered)).sum(axis=1)
        enough = counts >= ERRORS_MIN
        own = int(len(enough) if enough.all() else np.argmin(enough))
        found = np.full((len(LEVELS), len(enough)), np.nan)
        if own:
            for i, level in enumerate(LEVELS):
                found[i, :own] = _quantile(ordered[:own], counts[:own], level)
            found[:, own:] = found[:, own - 1 : own]
        return Quantiles(found, own)


def _quantile(ordered: Values, counts: NDArray[np.int64], level: float) -> Values:
    """Linear interpolation between order statistics of each row's first `counts` entries."""
    place = level * (counts - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, counts - 1)
    rows = np.arange(len(ordered))
    share = place - below
    mixed: Values = ordered[rows, below] * (1 - share) + ordered[rows, above] * share
    return mixed
