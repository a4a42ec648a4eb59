"""STAIRS: down a step each second, from the plan's clock to its lowest, and up again."""

from trefoil.core.brains import ClockDecision, GovernorView
from trefoil.core.parts import PartSettings


class StairsSettings(PartSettings):
    step_mhz: int = 15


class Stairs:
    settings = StairsSettings

    def __init__(self, settings: StairsSettings) -> None:
        self._step_mhz, self._clock_mhz = settings.step_mhz, 0

    def step(self, view: GovernorView) -> ClockDecision:
        low, high = view.range_mhz if view.range_mhz[1] else (view.supported_mhz[0], view.supported_mhz[-1])
        wanted = self._clock_mhz - self._step_mhz
        self._clock_mhz = max(low, wanted) if low < self._clock_mhz <= high else high
        return ClockDecision(self._clock_mhz, f"{len(view.stages)} stages on stairs", view.now_s + 1.0, scale_out=False)
