"""The one table of forecasters, and what one is: arrivals in bins in, a `LoadForecast` out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from controller.forecasters.last_max import LastMax
from trefoil.core.demand import LoadForecast
from trefoil.core.errors import NotFound


class Forecaster(Protocol):
    """Predicts the rate of a family `lead_s` ahead from its arrivals in bins of `bin_s`, oldest first."""

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast: ...


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """Settings of the forecasters; each uses what it names."""

    smooth_s: float = 4.0
    lookback_s: float = 6.0
    slope_s: float = 5.0
    slope_sigmas: float = 2.0
    growth_ratio_max: float = 0.5


FORECASTERS: Final[Mapping[str, Callable[[ForecastSettings], Forecaster]]] = {
    "last_max": lambda s: LastMax(s.smooth_s, s.lookback_s, s.slope_s, s.slope_sigmas, s.growth_ratio_max),
}


def forecaster(name: str, settings: ForecastSettings) -> Forecaster:
    """The forecaster of that name.

    Raises:
        NotFound: naming those that exist.
    """
    if name not in FORECASTERS:
        raise NotFound(
            f"unknown forecaster {name!r}", field="forecaster", value=name, remedy=f"one of {sorted(FORECASTERS)}"
        )
    return FORECASTERS[name](settings)
