"""Metrics of a zone, and the log line of each of its readings."""

from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from carbon_feed.core.polling import Breaker
from carbon_feed.core.validation import Cause, Refusal
from carbon_feed.forecast.scores import pool_scores
from carbon_feed.providers import PolledProvider, Provider
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core.carbon import RUNGS, CarbonForecast, CarbonRatio, CarbonReading, CarbonScores, rung_name
from trefoil.core.units import DAY_S
from trefoil.runtime.state import series_name
from trefoil.runtime.telemetry import Metrics

BREAKERS: Final = tuple(state.value for state in Breaker)
UPDATE_S: Final = 0.5


class ZoneMetrics:
    """Metrics of one zone: its reading, its providers and its forecasts."""

    def __init__(self, metrics: Metrics, settings: CarbonFeedSettings) -> None:
        self._metrics, self._zone = metrics, settings.zone
        self._step_s = settings.outlook.step_s
        self._counted: dict[str, tuple[int, set[Cause]]] = {}
        self._requests: dict[str, int] = {}
        self._left_out: dict[str, int] = {}
        self._updated_at_s = float("-inf")
        zone, method, factors = series_name(settings.series).rsplit(":", 2)
        self._labels = {"zone": zone, "method": method, "factors": factors}
        self._log = structlog.get_logger().bind(zone=settings.zone)

    def set_speedup(self, speedup: float) -> None:
        """Set how many times as fast as the wall clock the provider's source runs."""
        self._metrics.set("trefoil_carbon_trace_speedup_ratio", speedup, zone=self._zone)

    def count_reading(self, reading: CarbonReading, why: str) -> None:
        """Count and log a reading that came into force."""
        quality, rung = reading.quality.name.lower(), str(reading.rung)
        held = rung_name(reading.rung)
        self._metrics.set_one_of("trefoil_carbon_rung", "rung", held, RUNGS, zone=self._zone)
        self._metrics.simulated = self._metrics.simulated or reading.simulated
        intensity = self._metrics.bind("trefoil_carbon_intensity_grams_per_kwh", **self._labels)
        intensity.set(reading.intensity_g_per_kwh)
        self._metrics.inc("trefoil_carbon_readings_total", zone=self._zone, quality=quality, rung=rung)
        self._log.info(
            "reading",
            intensity_g_per_kwh=round(reading.intensity_g_per_kwh, 2),
            quality=quality,
            rung=reading.rung,
            until_s=round(reading.ends_at_s, 3),
            as_of=reading.as_of,
            simulated=reading.simulated,
            why=why,
        )

    def count_refusals(self, refusals: Sequence[tuple[str, Refusal]], providers: Sequence[Provider | None]) -> None:
        """Count each refusal once; of a polled provider once a question, also where an older answer still holds."""
        for provider, (name, refusal) in zip(providers, refusals, strict=False):
            if isinstance(provider, PolledProvider):
                self._count_polled_refusal(provider, refusal)
            else:
                self.count_error(name, refusal.cause)
        for provider in providers:
            if isinstance(provider, PolledProvider) and provider.refusal is not None:
                self._count_polled_refusal(provider, provider.refusal)

    def count_error(self, provider: str, cause: Cause) -> None:
        """Count a provider's failure under its cause."""
        self._metrics.inc("trefoil_carbon_provider_errors_total", zone=self._zone, provider=provider, cause=cause.value)

    def update_state(
        self, now_s: float, reading: CarbonReading | None, leading: bool, polled: Sequence[PolledProvider]
    ) -> None:
        """Set age of the reading, leadership, quota and breakers; twice a second at most."""
        if 0 <= now_s - self._updated_at_s < UPDATE_S:
            return
        self._updated_at_s = now_s
        if reading is not None:
            age_s = max(0.0, now_s - reading.observed_at_s)
            self._metrics.set("trefoil_carbon_reading_age_seconds", age_s, zone=self._zone)
        self._metrics.set("trefoil_carbon_leading", float(leading), zone=self._zone)
        for provider in polled:
            labels = {"zone": self._zone, "provider": provider.name}
            sent = provider.polling.requests - self._requests.get(provider.name, 0)
            self._requests[provider.name] = provider.polling.requests
            self._metrics.inc("trefoil_carbon_requests_total", sent, **labels)
            left_out = provider.left_out - self._left_out.get(provider.name, 0)
            self._left_out[provider.name] = provider.left_out
            self._metrics.inc("trefoil_carbon_rows_left_out_total", left_out, **labels)
            left = provider.polling.requests_left(now_s)
            if left is not None:
                self._metrics.set("trefoil_carbon_quota_left_requests", left, **labels)
            state = provider.polling.breaker(now_s).value
            self._metrics.set_one_of("trefoil_carbon_breaker", "state", state, BREAKERS, **labels)

    def count_forecast(self, model: str) -> None:
        """Count an issued forecast."""
        self._metrics.inc("trefoil_carbon_forecasts_issued_total", zone=self._zone, model=model)

    def update_forecasts(
        self, now_s: float, intervals: int, ratios: Iterable[CarbonRatio], forecast: CarbonForecast | None
    ) -> None:
        """Set the length of the history, the ratios, and the age of the forecast in force."""
        self._metrics.set("trefoil_carbon_history_intervals", intervals, zone=self._zone)
        for ratio in ratios:
            self._metrics.set("trefoil_carbon_ratio", ratio.cir, zone=self._zone, window=ratio.window)
        if forecast is not None:
            age_s = max(0.0, now_s - forecast.issued_at_s)
            self._metrics.set("trefoil_carbon_forecast_age_seconds", age_s, zone=self._zone)

    def update_scores(self, scores: Iterable[CarbonScores]) -> None:
        """Set errors of past forecasts by model and day ahead."""
        per_day = round(DAY_S / self._step_s)
        for scored in scores:
            for day in range(-(-len(scored.scores) // per_day)):
                one = pool_scores(scored.scores[day * per_day : (day + 1) * per_day])
                labels = {"zone": self._zone, "model": scored.model, "day": str(day + 1)}
                if one.samples:
                    self._metrics.set("trefoil_carbon_forecast_mae_grams_per_kwh", one.mae_g_per_kwh, **labels)
                if one.mape_samples:
                    self._metrics.set("trefoil_carbon_forecast_mape_ratio", one.mape_ratio, **labels)
                if one.coverage_samples:
                    self._metrics.set("trefoil_carbon_forecast_coverage_ratio", one.coverage_ratio, **labels)

    def _count_polled_refusal(self, provider: PolledProvider, refusal: Refusal) -> None:
        outcomes, causes = self._counted.get(provider.name, (0, set()))
        if outcomes != provider.outcomes:
            outcomes, causes = self._counted[provider.name] = (provider.outcomes, set())
        if outcomes and refusal.cause not in causes:
            causes.add(refusal.cause)
            self.count_error(provider.name, refusal.cause)
