"""What the feed would say of intensity in simulated time beside the reading: forecasts, and the ratio to the average.

Forecasts: none, the feed's own models, or a perfect one for comparison.

The models are those of the carbon feed, told what a live feed would have been told: each interval when it begins (the
trace's value of it is what the controller plans by), the lead-in of the trace before that, nothing after it. `perfect`
reads the trace ahead: what no forecast can be better than.
"""

from dataclasses import dataclass, replace
from typing import Final

from carbon_feed.core.history import History
from carbon_feed.core.ratio import ratio
from carbon_feed.core.trace import Playback
from carbon_feed.forecast import MODELS
from carbon_feed.forecast.forecaster import HORIZON_S, STEP_S
from carbon_feed.forecast.issue import LiveForecaster
from trefoil.core.carbon import CarbonBand, CarbonForecast
from trefoil.core.common import Basis, Provenance
from trefoil.simulator.inputs import Intensity

NONE: Final = "none"
PERFECT: Final = "perfect"
LEAD_IN_MAX: Final = 24_000  # intervals before time zero: 80 days of five minutes, more than a model looks back


@dataclass(slots=True)
class Forecasts:
    """What is forecast of one zone, issued whenever its reading changes; and its ratio to the average so far."""

    name: str
    intensity: Intensity
    _played: Playback | None = None
    _forecaster: LiveForecaster | None = None
    _history: History | None = None

    def at(self, now_s: float) -> CarbonForecast | None:
        """The forecast in force; without bands, and with the reason, where there cannot be one yet."""
        if self.name == NONE:
            return None
        if self.name == PERFECT:
            return self._perfect(now_s)
        history, series = self._past(now_s), self.intensity.series
        if self._forecaster is None:
            self._forecaster = LiveForecaster(
                history, MODELS[self.name], STEP_S, HORIZON_S, self.intensity.played.speedup
            )
        issued = self._forecaster.forecast(now_s)
        return issued.forecast or CarbonForecast(series, self.name, now_s, fallback_reason=issued.why)

    def ratio(self, now_s: float) -> float | None:
        """Intensity now over its average so far (carbon_feed/core/ratio.py); None before a day of it is known."""
        found = ratio(self._past(now_s), self.intensity.reading(now_s), speedup=self.intensity.played.speedup)
        return None if found is None else found.cir

    def _past(self, now_s: float) -> History:
        """Every interval that has begun; told anew when another trace is played."""
        played, history, count = self.intensity.played, self._history, 2
        if history is None or self._played is not played:
            history, count = History(self.intensity.series), LEAD_IN_MAX
            self._played, self._history, self._forecaster = played, history, None
        for reading in self.intensity.history(now_s, count):
            history.add(replace(reading, fetched_at_s=reading.starts_at_s))
        return history

    def _perfect(self, now_s: float) -> CarbonForecast:
        played = self.intensity.played
        steps = max(1, round(HORIZON_S / played.bin_s))
        ahead = (self.intensity.reading(now_s, step) for step in range(steps))
        return CarbonForecast(
            self.intensity.series,
            PERFECT,
            now_s,
            tuple(CarbonBand(r.starts_at_s, r.ends_at_s, *3 * (r.intensity_g_per_kwh,)) for r in ahead),
            Provenance(Basis.SIMULATED, f"the trace itself: {self.intensity.source}", as_of_s=now_s),
        )
