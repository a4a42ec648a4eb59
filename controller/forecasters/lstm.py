"""Forecaster lstm: the largest second of the next minute, by a small recurrent network from the last ten minutes.

Source: InfAdapter section 5: ten minutes per second in, the maximum of the next minute out, LSTM(25) and Dense(1).
Data: arrivals per second of the last ten minutes; a model that `trefoil forecast train` made, with its card.
Result: the network's answer, planned for unchanged; no margin is added.
Deviations: the paper trained on two weeks of Twitter; these weights know generated, Azure Functions and SWIM load.
    Their output is added to the last minute's maximum (trefoil/forecasting/fit.py).
    While ten minutes are not there yet, or the model is unusable, the forecaster answers with `last_max` and says why.
    A model is unusable if it is missing, has another hash than its card, is late, or answers with no number. After
    trouble, the forecaster asks the model again a minute later.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from pydantic import Field

from controller.forecasters.minutes import last_max_instead, next_maximum
from trefoil.core.demand import LoadForecast
from trefoil.core.errors import SettingError, TrefoilError
from trefoil.core.parts import PartSettings

INPUT_S: Final = 600
HORIZON_S: Final = 60
AGAIN_S: Final = 60.0  # after trouble

Network = Callable[[Sequence[float]], float]
OpenNetwork = Callable[[str], Network]
"""Opens the model of a path, or where that is empty the shipped one; raises TrefoilError."""


class LstmSettings(PartSettings):
    """What can be set of it."""

    REMOVED: ClassVar = {"weights": "one model ships; name your own as parts.forecaster.model"}

    model: str = ""
    """Your model instead, an ONNX file of `trefoil forecast train` with its card."""
    late_ms: float = Field(default=50.0, gt=0)
    """A slower answer is not used, and the model left alone for a minute."""


class Lstm:
    """Forecaster by a network that the shell opens and times; without a clock, as in a simulation, it is never late."""

    history_s = float(INPUT_S)

    def __init__(
        self,
        settings: LstmSettings,
        open_network: OpenNetwork | None = None,
        monotonic_s: Callable[[], float] | None = None,
    ) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise SettingError(
                "onnxruntime is not installed", field="forecaster", value="lstm",
                remedy="pip install 'trefoil[forecast]', or take another one",
            )  # fmt: skip
        self._settings, self._open, self._monotonic_s = settings, open_network, monotonic_s
        self._network: Network | None = None
        self._trouble, self._again_s = "", -math.inf

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        """Forecast from bins of a second, the newest last."""
        if abs(bin_s - 1.0) > 1e-6:
            why = f"lstm needs arrivals per second, these are per {bin_s:g} s"
        elif len(arrivals) < INPUT_S:
            why = f"lstm needs {INPUT_S} s of history, there are {len(arrivals)} s"
        else:
            found, why = self._ask(arrivals[-INPUT_S:], now_s)
            if not why:
                return next_maximum("lstm", family, arrivals, bin_s, now_s, lead_s, found)
        return last_max_instead(why, family, arrivals, bin_s, now_s, lead_s)

    def _ask(self, arrivals: Sequence[float], now_s: float) -> tuple[float, str]:
        """What the network answers, or why that is not used."""
        if now_s < self._again_s:
            return math.nan, self._trouble
        found, self._trouble = math.nan, ""
        try:
            if self._network is None:
                assert self._open is not None, "the caller sets how a model is opened"
                self._network = self._open(self._settings.model)
            began_s = self._monotonic_s() if self._monotonic_s is not None else 0.0
            found = self._network(arrivals)
            took_ms = (self._monotonic_s() - began_s) * 1e3 if self._monotonic_s is not None else 0.0
            if took_ms > self._settings.late_ms:
                self._trouble = f"the model took {took_ms:.0f} ms, late_ms = {self._settings.late_ms:g}"
            elif not math.isfinite(found):
                self._trouble = f"the model answered {found}"
        except TrefoilError as error:
            self._trouble = str(error)
        if self._trouble:
            self._again_s = now_s + AGAIN_S
        return found, self._trouble
