"""Table of forecasters: what `Policy.forecaster` names, beside module:Class."""

from typing import Final

from controller.forecasters.ewma import Ewma, EwmaSettings
from controller.forecasters.holt_winters import HoltWinters, HoltWintersSettings
from controller.forecasters.last_max import LastMax, LastMaxSettings
from controller.forecasters.lstm import Lstm, LstmSettings
from controller.forecasters.minute_max import MinuteMax, MinuteMaxSettings
from controller.forecasters.oracle import Oracle, OracleSettings
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
        Part(Kind.FORECASTER, "minute_max", MinuteMax, settings=MinuteMaxSettings),
        Part(Kind.FORECASTER, "ewma", Ewma, settings=EwmaSettings),
        Part(Kind.FORECASTER, "holt_winters", HoltWinters, settings=HoltWintersSettings),
        Part(Kind.FORECASTER, "lstm", Lstm, settings=LstmSettings),
        Part(Kind.FORECASTER, "oracle", Oracle, settings=OracleSettings),
    )
}
