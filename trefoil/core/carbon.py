"""Grid carbon intensity: readings, forecasts, ratios."""

from dataclasses import dataclass
from enum import IntEnum

from trefoil.core.common import Provenance


class Method(IntEnum):
    """How intensity is accounted."""

    UNSPECIFIED = 0
    AVERAGE = 1
    MARGINAL = 2


class Factors(IntEnum):
    """Which emissions count."""

    UNSPECIFIED = 0
    DIRECT = 1
    LIFECYCLE = 2


class Quality(IntEnum):
    """How good a reading is, best first."""

    UNSPECIFIED = 0
    MEASURED = 1
    ESTIMATED = 2
    FORECAST = 3
    CARRIED = 4
    CLIMATOLOGY = 5
    STATIC = 6


@dataclass(frozen=True, slots=True)
class Series:
    """One comparable series of intensities. Joining two different ones raises `SeriesMismatch`."""

    zone: str = ""
    method: Method = Method.UNSPECIFIED
    factors: Factors = Factors.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class CarbonReading:
    """One intensity [gCO2/kWh] valid in [starts_at_s, ends_at_s); rung 0 = normal."""

    series: Series = Series()
    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    intensity_g_per_kwh: float = 0.0
    quality: Quality = Quality.UNSPECIFIED
    provider: str = ""
    api_version: str = ""
    estimation_method: str = ""
    observed_at_s: float = 0.0
    fetched_at_s: float = 0.0
    rung: int = 0
    fallback_reason: str = ""
    simulated: bool = False
    as_of: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CarbonBand:
    """Forecast quantiles of one interval."""

    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    p10_g_per_kwh: float = 0.0
    p50_g_per_kwh: float = 0.0
    p90_g_per_kwh: float = 0.0


@dataclass(frozen=True, slots=True)
class CarbonForecast:
    """Bands in time order, as issued at `issued_at_s`."""

    series: Series = Series()
    model: str = ""
    issued_at_s: float = 0.0
    bands: tuple[CarbonBand, ...] = ()
    provenance: Provenance | None = None
    fallback_reason: str = ""


@dataclass(frozen=True, slots=True)
class CarbonRatio:
    """CARBONDIS: current intensity over its trailing mean."""

    series: Series = Series()
    aci_g_per_kwh: float = 0.0
    cir: float = 0.0
    window: str = ""
    samples: int = 0
    observed_at_s: float = 0.0
