"""PROMISED: the rate that somebody promised, whatever arrives."""

from collections.abc import Sequence

from trefoil.core.demand import LoadForecast
from trefoil.core.parts import PartSettings


class PromisedSettings(PartSettings):
    rate_per_s: float = 5.0


class Promised:
    settings = PromisedSettings

    def __init__(self, settings: PromisedSettings) -> None:
        self._rate_per_s = settings.rate_per_s

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        rate = self._rate_per_s
        return LoadForecast(family, "promised", now_s, lead_s, rate, rate, rate, "" if arrivals else "no data")
