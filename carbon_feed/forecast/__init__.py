"""Own forecasts: three closed forms, empirical bands, scores. A new model is one file and one line of MODELS."""

from collections.abc import Mapping
from typing import Final

from carbon_feed.forecast.blend import Blend
from carbon_feed.forecast.climatology import Climatology
from carbon_feed.forecast.forecaster import Model
from carbon_feed.forecast.persistence import Persistence

MODELS: Final[Mapping[str, Model]] = {model.name: model for model in (Blend(), Climatology(), Persistence())}

__all__ = ["MODELS", "Model"]
