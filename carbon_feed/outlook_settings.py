"""Settings of forecasts, ratios and what is looked up of the past (`[outlook]` of a zone)."""

from typing import Literal

from pydantic import Field, field_validator

from carbon_feed.forecast.archive import FORECASTS_MAX
from carbon_feed.forecast.forecaster import HORIZON_S, STEP_S, grid
from trefoil.core import errors
from trefoil.runtime.config import Settings


class OutlookSettings(Settings):
    """What is to come, what it was worth, and what providers say of the past."""

    model: Literal["blend", "climatology", "persistence", "none"] = "blend"
    """Ours that is served where no provider forecasts; all three are archived and scored. `none`: none of ours."""
    step_s: float = STEP_S
    """Of our forecasts, in the source's time: 900, 1800 or 3600."""
    horizon_s: float = Field(default=HORIZON_S, gt=0, le=14 * 86_400.0)
    """How far ahead ours look, in the source's time."""
    provider_every_s: float = Field(default=1800.0, ge=300)
    """How often a provider is asked for its forecast, where it has one. Counts towards a quota."""
    age_max_s: float = Field(default=3 * 3600.0, gt=0)
    """How long a forecast is served when no newer one can be had, in the source's time."""
    past_every_s: float = Field(default=3600.0, ge=300)
    """How often a provider is asked for the last day again: values are revised for a day or more."""
    past_h: float = Field(default=14 * 24.0, ge=24, le=60 * 24)
    """How far back a provider is asked at the start where nothing is known."""
    archive_max: int = Field(default=FORECASTS_MAX, ge=24, le=20_000)
    """Issued forecasts that are kept and scored, of each model."""

    @field_validator("step_s")
    @classmethod
    def _a_step(cls, value: float) -> float:
        try:
            grid(value, HORIZON_S)
        except errors.SettingError as error:
            raise ValueError(str(error)) from error
        return value
