"""Carbon in simulated time: intensities of zones, and what the feed would report in addition to the reading.

Forecasts are none, the feed's own models, or a perfect one for comparison. The models get what a live feed would
get: each interval when it begins, the lead-in of the trace before that, nothing after it. The controller plans by the
trace's value of the interval. `perfect` reads the trace ahead: no forecast can be better.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from carbon_feed.core.history import History
from carbon_feed.core.trace_playback import Bin, Playback, Trace, bin_fits, playback
from carbon_feed.forecast import MODELS
from carbon_feed.forecast.forecaster import HORIZON_S, STEP_S
from carbon_feed.forecast.live_forecaster import LiveForecaster
from carbon_feed.history.core.ratio import ratio
from carbon_feed.providers.trace import load_trace
from carbon_feed.settings import DEFAULT_TRACE, TraceReading, TraceSettings
from trefoil.core import errors
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Basis, Provenance
from trefoil.core.units import HOUR_S
from trefoil.simulator.scenario.schema import Carbon, Zone

NONE: Final = "none"
PERFECT: Final = "perfect"
LEAD_IN_MAX: Final = 24_000  # intervals before time zero: 80 days of five minutes, more than a model looks back


@dataclass(slots=True)
class Intensity:
    """Carbon intensity of one zone over simulated time."""

    series: Series
    played: Playback
    source: str
    filled: bool = False
    """Some of its rows are filled in."""

    def reading(self, at_s: float, step: int = 0) -> CarbonReading:
        """Reading in force, or the one `step` intervals later."""
        held = self.played.at(at_s + step * self.played.wall_s)
        assert held is not None, "a looping playback never ends"
        return self._reading(held)

    def history(self, at_s: float, count: int) -> list[CarbonReading]:
        """Readings that have begun, oldest first."""
        return [self._reading(held) for held in self.played.history(at_s, count)]

    def next_s(self, at_s: float) -> float:
        """Time at which the next reading comes [s]."""
        return self.reading(at_s).ends_at_s

    def _reading(self, held: Bin) -> CarbonReading:
        return CarbonReading(
            self.series,
            held.starts_at_s,
            held.ends_at_s,
            held.intensity_g_per_kwh,
            Quality.ESTIMATED if held.estimated or self.filled else Quality.MEASURED,
            self.source,
            observed_at_s=held.starts_at_s,
            simulated=True,
        )


def intensity_of(zone: str, carbon: Carbon, given: tuple[float, Sequence[float]] | None = None) -> Intensity:
    """Intensity of a zone as the scenario names it, or `given`: (seconds per value, values [g/kWh]).

    Raises:
        errors.TraceError: the trace cannot be read, or is too short for offset and step.
    """
    series = _series(zone, carbon)
    if given is not None:
        step_s, values = given
        return Intensity(series, Playback((), tuple(map(float, values)), step_s, 0.0, 0.0), "given")
    wanted: Zone = carbon.zones[zone]
    if wanted.constant_g_per_kwh is not None:
        return Intensity(series, Playback((), (wanted.constant_g_per_kwh,), HOUR_S, 0.0, 0.0), "constant")
    trace = zone_trace(wanted, series)
    trace = replace(trace, lead_in_s=trace.lead_in_s + wanted.offset_h * HOUR_S)
    step_s = carbon.step_h * HOUR_S or trace.step_s
    if not bin_fits(trace, step_s):
        raise errors.TraceError(
            f"only {trace.body_s / HOUR_S:g} h are left of {trace.source}",
            field=f"carbon.zones.{zone}.offset_h, carbon.step_h",
            value=(wanted.offset_h, carbon.step_h),
            remedy="begin earlier, or use a smaller step or a longer trace",
        )
    played = playback(trace, bin_s=step_s, speedup=carbon.speedup, starts_at_s=0.0, created_at_s=0.0, loop=True)
    return Intensity(series, played, trace.source, trace.filled > 0)


def zone_trace(wanted: Zone, series: Series) -> Trace:
    """Trace of a zone, read as its settings say.

    Raises:
        errors.TraceError: it cannot be read.
    """
    path = wanted.trace or DEFAULT_TRACE
    reading = {name: getattr(wanted, name) for name in TraceReading.model_fields}
    options = TraceSettings(path=path, **reading)
    return load_trace(path, options, series.factors, series.method)


def carbon_read(carbon: Carbon, zones: Sequence[str]) -> tuple[str, ...]:
    """What the traces of these zones were read as, a line each."""
    return tuple(
        f"{zone}: {zone_trace(carbon.zones[zone], _series(zone, carbon)).read_as}"
        for zone in zones
        if carbon.zones[zone].trace is not None
    )


def _series(zone: str, carbon: Carbon) -> Series:
    return Series(zone, Method[carbon.method.upper()], Factors[carbon.factors.upper()])


@dataclass(slots=True)
class ForecastFeed:
    """Forecasts of one zone, issued whenever its reading changes; and its ratio to the average so far."""

    name: str
    intensity: Intensity
    ratio_after_h: float = 24.0
    _played: Playback | None = None
    _forecaster: LiveForecaster | None = None
    _history: History | None = None

    def at(self, now_s: float) -> CarbonForecast | None:
        """Forecast in force; without bands, and with the reason, where there cannot be one yet."""
        if self.name == NONE:
            return None
        if self.name == PERFECT:
            return self._perfect_forecast(now_s)
        history, series = self._history_until(now_s), self.intensity.series
        if self._forecaster is None:
            self._forecaster = LiveForecaster(
                history, MODELS[self.name], STEP_S, HORIZON_S, self.intensity.played.speedup
            )
        issued = self._forecaster.forecast(now_s)
        return issued.forecast or CarbonForecast(series, self.name, now_s, fallback_reason=issued.why)

    def ratio(self, now_s: float) -> float | None:
        """Intensity now over its average so far (carbon_feed/history/core/ratio.py); None before enough is known."""
        history, reading = self._history_until(now_s), self.intensity.reading(now_s)
        found = ratio(history, reading, speedup=self.intensity.played.speedup, known_h=self.ratio_after_h)
        return None if found is None else found.cir

    def _history_until(self, now_s: float) -> History:
        """Every interval that has begun; computed again for another trace."""
        played, history, count = self.intensity.played, self._history, 2
        if history is None or self._played is not played:
            history, count = History(self.intensity.series), LEAD_IN_MAX
            self._played, self._history, self._forecaster = played, history, None
        for reading in self.intensity.history(now_s, count):
            history.add(replace(reading, fetched_at_s=reading.starts_at_s))
        return history

    def _perfect_forecast(self, now_s: float) -> CarbonForecast:
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
