"""Carbon intensity ratio (CIR): current over average intensity (ACI).

Source: CARBONDIS, section IV-A and algorithm 1, lines 1-3: ACI = mean of the history, CIR = CCI / ACI, and only then is
the current value added to the history. The paper does not say how far the history reaches; its figures fit `expanding`.
Data: pieces [s_i, e_i) with value v_i that began before the current interval, as known at `as_of_s`.
Formulation: ACI = sum v_i (e_i - s_i) / sum (e_i - s_i) over the window: `expanding` all of them; `30d` those of the
last 30 days. `same_hour`: those of the last 30 days that begin less than half an hour from the same time of day.
Deviations: the mean is weighted by time, so that a change of resolution or a gap does not tilt it. There is no ratio
before `known_h` of the window's reach are known (24; 0 as printed: from the second interval on).
A replay that runs `speedup` times as fast has days that are as much shorter on the wall clock.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from carbon_feed.core.history import History, Values, check_series
from trefoil.core import errors
from trefoil.core.carbon import CarbonRatio, CarbonReading
from trefoil.core.units import DAY_S, HOUR_S

WINDOW_DAYS: Final = 30
NEAR_DAYS: Final = 0.5 / 24
SLACK_DAYS: Final = 1e-9

EXPANDING: Final = "expanding"
MONTH: Final = "30d"
SAME_HOUR: Final = "same_hour"

WINDOWS: Final = (EXPANDING, MONTH, SAME_HOUR)


def ratio(
    history: History,
    current: CarbonReading,
    window: str = EXPANDING,
    *,
    as_of_s: float = math.inf,
    speedup: float = 1.0,
    known_h: float = 24.0,
) -> CarbonRatio | None:
    """Ratio CIR with its ACI, window and number of pieces; None: too little of the window is known, or ACI is 0.

    Raises:
        errors.SettingError: no such window.
        errors.SeriesMismatch: the reading is not of the history's series.
    """
    if window not in WINDOWS:
        raise errors.SettingError("no such window", field="window", value=window, remedy=f"one of {', '.join(WINDOWS)}")
    check_series(history.series, current.series)
    day_s = DAY_S / speedup
    starts, ends, values = history.arrays(as_of_s)
    before = int(np.searchsorted(starts, current.starts_at_s, side="left"))
    starts, ends, values = starts[:before], ends[:before], values[:before]
    ago_days = (current.starts_at_s - starts) / day_s
    reach = np.full(before, True) if window == EXPANDING else ago_days <= WINDOW_DAYS + SLACK_DAYS
    chosen = reach & (_same_hour(ago_days) if window == SAME_HOUR else True)
    lengths = ends - starts
    if float(lengths[reach].sum()) < known_h * HOUR_S / speedup * (1 - SLACK_DAYS) or not chosen.any():
        return None
    values, lengths = values[chosen], lengths[chosen]
    average = float((values * lengths).sum() / lengths.sum())
    if average <= 0:
        return None
    return CarbonRatio(
        series=history.series,
        aci_g_per_kwh=average,
        cir=current.intensity_g_per_kwh / average,
        window=window,
        samples=int(chosen.sum()),
        observed_at_s=current.observed_at_s,
    )


def _same_hour(ago_days: Values) -> NDArray[np.bool_]:
    near: NDArray[np.bool_] = np.abs(ago_days - np.round(ago_days)) < NEAR_DAYS - SLACK_DAYS
    return near
