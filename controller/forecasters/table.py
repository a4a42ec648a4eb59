"""Table of forecasters: what `Policy.forecaster` names, beside module:Class."""

from typing import Final

from controller.forecasters.last_max import LastMax, LastMaxSettings
from trefoil.core.brains import Forecaster
from trefoil.core.parts import Kind, Part, Parts

FORECASTERS: Final[Parts[Forecaster]] = {
    part.name: part
    for part in (
        Part(
            Kind.FORECASTER,
            "last_max",
            lambda settings: LastMax(**settings.model_dump()),
            settings=LastMaxSettings,
        ),
    )
}
