"""Daily rows of a series: the last days, one row a day, so that a column is one hour of the day."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

DAYS: Final = 7  # one of each weekday: more days average the season in, fewer leave a weekend to chance


def last_days(values: Values, per_day: int, days: int = DAYS) -> Values:
    """The newest `days * per_day` values as [days, per_day], oldest day first; NaN before the first value.

    The last column ends with the last value, so column j is the hour of the day of the (j + 1)-th step to come.
    """
    wanted = days * per_day
    held = values[-wanted:]
    if len(held) < wanted:
        held = np.concatenate([np.full(wanted - len(held), np.nan), held])
    return held.reshape(days, per_day)


def same_hour_newest(rows: Values) -> Values:
    """Per column the newest value that is known; NaN where none is."""
    newest: Values = rows[-1]
    for row in rows[-2::-1]:
        if not np.isnan(newest).any():
            break
        newest = np.where(np.isnan(newest), row, newest)
    return newest


def same_hour_mean(rows: Values) -> Values:
    """Per column the mean of what is known; NaN where nothing is."""
    known = ~np.isnan(rows)
    count = known.sum(axis=0)
    total = np.where(known, rows, 0.0).sum(axis=0)
    mean: Values = np.divide(total, count, out=np.full(rows.shape[1], np.nan), where=count > 0)
    return mean


def fill_unknown_hours(curve: Values) -> Values:
    """A day's curve whose unknown hours take the mean of the known ones; all NaN stays so."""
    unknown = np.isnan(curve)
    if not unknown.any() or unknown.all():
        return curve
    return np.where(unknown, curve[~unknown].mean(), curve)


def repeat_day(curve: Values, steps: int) -> Values:
    """A day's curve, day after day, for `steps` steps."""
    return np.resize(curve, steps)
