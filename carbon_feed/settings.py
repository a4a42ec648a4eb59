"""Settings of the carbon feed (`TREFOIL_CARBON_FEED_...`, deploy/config)."""

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from carbon_feed.trace import INTENSITY_MAX_G_PER_KWH
from trefoil.core.carbon import Factors, Method, Series
from trefoil.runtime.config import ServiceSettings, Settings

DEFAULT_TRACE = Path(__file__).parent / "data" / "synthetic_duck_72h.csv"


class TraceSettings(Settings):
    """A recorded or synthetic trace, replayed."""

    path: Path = DEFAULT_TRACE
    """CSV with a header line: a column of times and one of intensities [g/kWh]."""
    speedup: float = Field(default=1.0, gt=0)
    """Trace seconds per wall second. Only the feed's clock is scaled."""
    starts_at_s: float = Field(default=0.0, ge=0, allow_inf_nan=True)
    """UTC seconds at which trace time zero plays; before, its first value holds. 0 = at start; inf = hold for ever."""
    step_s: float = Field(default=0.0, ge=0)
    """Resample to the mean over steps of this much trace time; 0 = as in the file."""
    at_end: Literal["loop", "stop"] = "loop"
    """Start again at time zero, or carry the last value on a named rung."""
    lead_in_h: float | None = Field(default=None, ge=0)
    """Hours at the head of the file that are history. None = what the file's header says, else 0."""
    time_column: str = ""
    """Empty = found by its name."""
    value_column: str = ""
    """Empty = found by its name, and by `factors` where there are several."""

    @model_validator(mode="after")
    def _a_time(self) -> Self:
        if math.isnan(self.starts_at_s):
            raise ValueError("starts_at_s is not a time")
        return self


class ConstantSettings(Settings):
    """One value for ever."""

    intensity_g_per_kwh: float = Field(default=400.0, ge=0, le=INTENSITY_MAX_G_PER_KWH)
    interval_s: float = Field(default=300.0, gt=0)
    """How long a reading counts as fresh."""
    source: str = "setting constant.intensity_g_per_kwh"
    """Where the value comes from; stands in every reading."""


class CarbonFeedSettings(ServiceSettings):
    """The carbon feed: reads the intensity of one zone and publishes it."""

    admin_address: str = "127.0.0.1:8101"
    metrics_address: str = "127.0.0.1:8111"
    zone: str = Field(default="demo", pattern=r"^[A-Za-z0-9._-]+$")
    method: Literal["average", "marginal"] = "average"
    factors: Literal["direct", "lifecycle"] = "lifecycle"
    provider: Literal["trace", "constant"] = "trace"
    trace: TraceSettings = TraceSettings()
    constant: ConstantSettings = ConstantSettings()
    carry_max_s: float = Field(default=3600.0, gt=0)
    """How long the last value stands in for a provider that fails, before static_g_per_kwh does."""
    static_g_per_kwh: float | None = Field(default=None, ge=0, le=INTENSITY_MAX_G_PER_KWH)
    """The last rung. None: the last value is carried on."""
    history_max: int = Field(default=115_200, ge=1)
    """Entries of carbon:history: 400 days of five minutes."""
    backfill_max: int = Field(default=2_000, ge=1)
    """Entries written at once when the history was lost."""

    @property
    def series(self) -> Series:
        """What is read."""
        return Series(self.zone, Method[self.method.upper()], Factors[self.factors.upper()])
