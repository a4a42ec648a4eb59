"""What the feed of a zone tells those who look after it: its log line a reading, and its metrics."""

from collections.abc import Sequence
from typing import Final

import structlog

from carbon_feed.core.polling import Breaker
from carbon_feed.core.validate import Cause, Refusal
from carbon_feed.providers import Polled, Provider
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core.carbon import CarbonReading, Rung
from trefoil.runtime.state import series_name
from trefoil.runtime.telemetry import Metrics

RUNG_NAMES: Final = tuple(rung.name.lower() for rung in Rung)
BREAKERS: Final = tuple(state.value for state in Breaker)
STANDING_S: Final = 0.5


class Shown:
    """Of one zone."""

    def __init__(self, metrics: Metrics, settings: CarbonFeedSettings) -> None:
        self._metrics, self._zone = metrics, settings.zone
        self._counted: dict[str, tuple[int, set[Cause]]] = {}
        self._requests: dict[str, int] = {}
        self._standing_at_s = float("-inf")
        zone, method, factors = series_name(settings.series).rsplit(":", 2)
        self._labels = {"zone": zone, "method": method, "factors": factors}
        self._log = structlog.get_logger().bind(zone=settings.zone)

    def start(self, speedup: float) -> None:
        self._metrics.set("trefoil_carbon_trace_speedup_ratio", speedup, zone=self._zone)

    def told(self, reading: CarbonReading, why: str) -> None:
        """A reading is in force."""
        quality, rung = reading.quality.name.lower(), str(reading.rung)
        held = Rung(reading.rung).name.lower()
        self._metrics.set_one_of("trefoil_carbon_rung", "rung", held, RUNG_NAMES, zone=self._zone)
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

    def refused(self, refusals: Sequence[tuple[str, Refusal]], providers: Sequence[Provider | None]) -> None:
        """Each refusal once: of a provider that is polled, once a question, also where an older answer still holds."""
        for provider, (name, refusal) in zip(providers, refusals, strict=False):
            if isinstance(provider, Polled):
                self._of_polled(provider, refusal)
            else:
                self._count(name, refusal.cause)
        for provider in providers:
            if isinstance(provider, Polled) and provider.refusal is not None:
                self._of_polled(provider, provider.refusal)

    def standing(self, now_s: float, reading: CarbonReading | None, leading: bool, polled: Sequence[Polled]) -> None:
        """How things stand, twice a second at most."""
        if 0 <= now_s - self._standing_at_s < STANDING_S:
            return
        self._standing_at_s = now_s
        if reading is not None:
            age_s = max(0.0, now_s - reading.observed_at_s)
            self._metrics.set("trefoil_carbon_reading_age_seconds", age_s, zone=self._zone)
        self._metrics.set("trefoil_carbon_leading", float(leading), zone=self._zone)
        for one in polled:
            labels = {"zone": self._zone, "provider": one.name}
            sent = one.polling.requests - self._requests.get(one.name, 0)
            self._requests[one.name] = one.polling.requests
            self._metrics.inc("trefoil_carbon_requests_total", sent, **labels)
            left = one.polling.left(now_s)
            if left is not None:
                self._metrics.set("trefoil_carbon_quota_left_requests", left, **labels)
            state = one.polling.breaker(now_s).value
            self._metrics.set_one_of("trefoil_carbon_breaker", "state", state, BREAKERS, **labels)

    def _of_polled(self, provider: Polled, refusal: Refusal) -> None:
        outcomes, causes = self._counted.get(provider.name, (0, set()))
        if outcomes != provider.outcomes:
            outcomes, causes = self._counted[provider.name] = (provider.outcomes, set())
        if outcomes and refusal.cause not in causes:
            causes.add(refusal.cause)
            self._count(provider.name, refusal.cause)

    def _count(self, name: str, cause: Cause) -> None:
        self._metrics.inc("trefoil_carbon_provider_errors_total", zone=self._zone, provider=name, cause=cause.value)
