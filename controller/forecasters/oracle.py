"""Forecaster oracle: what a simulation knows will come. A bound on what any forecast can be worth; never live.

Source: DESIGN section 4, InfAdapter's comparison of forecasters.
Data: the mean rate of a family between two times, from the simulation.
Result: the largest mean over a second of the next `horizon_s`, or of the lead where that is longer.
Deviations: what chance adds to a rate is not foreseen; the slices' queues count with it.
"""

from collections.abc import Callable, Sequence

from pydantic import Field

from trefoil.core.brains import HISTORY_MAX_S
from trefoil.core.demand import LoadForecast
from trefoil.core.errors import SettingError
from trefoil.core.parts import PartSettings

Truth = Callable[[str, float, float], float]
"""Mean rate [1/s] of a family between two times."""


class OracleSettings(PartSettings):
    """What can be set of it."""

    horizon_s: float = Field(default=60.0, ge=1, le=3600)
    """How far it sees."""


class Oracle:
    """Forecaster that knows the true load."""

    history_s = HISTORY_MAX_S  # so that a simulation takes no step for idle: what is to come is no matter of the past

    def __init__(self, settings: OracleSettings, truth: Truth | None = None) -> None:
        if truth is None:
            raise SettingError(
                "knows what only a simulation knows", field="forecaster", value="oracle", remedy="lstm, or another one"
            )
        self._horizon_s, self._truth = settings.horizon_s, truth

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        """Forecast from the truth; arrivals only say whether anything was seen."""
        seconds = round(max(self._horizon_s, lead_s))
        rates = [self._truth(family, now_s + i, now_s + i + 1) for i in range(seconds)]
        why = "" if arrivals else "no data; the truth all the same"
        return LoadForecast(family, "oracle", now_s, lead_s, sum(rates) / seconds, max(rates), max(rates), why)
