"""From what a provider said to the reading that everyone plans by, with provenance, and never in silence.

Ladder (rung): 0 the provider's value; 1 `carried`, the last accepted value, while the provider fails or says nonsense;
2 `static`, a configured value, when there never was one or it is older than `carry_max_s`. Without a configured value
the last one is carried on: its age tells the reader.
Validation before acceptance: finite, not negative, at most 1,500 g/kWh, and the interval must hold now.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from carbon_feed.trace import INTENSITY_MAX_G_PER_KWH
from trefoil.core.carbon import CarbonReading, Quality, Series

RUNG_NORMAL: Final = 0
RUNG_CARRIED: Final = 1
RUNG_STATIC: Final = 2
RETRY_S: Final = 1.0
CLOCK_SLACK_S: Final = 1.0  # a provider's interval may begin this much after our now


@dataclass(frozen=True, slots=True)
class Observation:
    """What a provider says. `record` = it belongs to the history."""

    starts_at_s: float
    ends_at_s: float
    intensity_g_per_kwh: float
    quality: Quality
    provider: str
    api_version: str
    estimation_method: str
    observed_at_s: float
    simulated: bool
    record: bool = True


@dataclass(frozen=True, slots=True)
class FeedView:
    """What the brain may know. `observation` None: the provider failed, `failure` says how."""

    now_s: float
    series: Series
    observation: Observation | None
    failure: str
    last: CarbonReading | None


@dataclass(frozen=True, slots=True)
class FeedDecision:
    """The reading in force (None: nothing is known at all), and when to look again."""

    reading: CarbonReading | None
    accepted: bool
    why: str
    next_tick_at_s: float


@dataclass(frozen=True, slots=True)
class Feed:
    """Stateless: the last reading comes with the view."""

    carry_max_s: float = 3600.0
    static_g_per_kwh: float | None = None

    def decide(self, view: FeedView) -> FeedDecision:
        """The reading in force now, and why."""
        observation = view.observation
        refusal = view.failure if observation is None else nonsense(observation, view.now_s)
        if observation is None or refusal:
            return self._degrade(view, refusal or "the provider said nothing")
        fresh = reading_of(observation, view.series, view.now_s)
        if view.last is not None and same(view.last, fresh):
            return FeedDecision(view.last, True, "unchanged", fresh.ends_at_s)
        fresh = replace(fresh, as_of=next_as_of(view.last))
        before = "" if view.last is None else f"{view.last.intensity_g_per_kwh:.0f} -> "
        why = f"{before}{fresh.intensity_g_per_kwh:.0f} g/kWh by {observation.provider}"
        return FeedDecision(fresh, True, why, fresh.ends_at_s)

    def _degrade(self, view: FeedView, reason: str) -> FeedDecision:
        last, retry_at_s = view.last, view.now_s + RETRY_S
        aged = last is None or view.now_s - last.observed_at_s > self.carry_max_s
        if self.static_g_per_kwh is not None and aged:
            return FeedDecision(self._static(view, self.static_g_per_kwh, reason), False, reason, retry_at_s)
        if last is None or last.rung >= RUNG_CARRIED:
            return FeedDecision(last, False, reason, retry_at_s)
        carried = replace(
            last,
            quality=Quality.CARRIED,
            rung=RUNG_CARRIED,
            fallback_reason=reason,
            fetched_at_s=view.now_s,
            as_of=next_as_of(last),
        )
        return FeedDecision(carried, False, reason, retry_at_s)

    def _static(self, view: FeedView, intensity_g_per_kwh: float, reason: str) -> CarbonReading:
        return CarbonReading(
            series=view.series,
            starts_at_s=view.now_s,
            ends_at_s=view.now_s + self.carry_max_s,
            intensity_g_per_kwh=intensity_g_per_kwh,
            quality=Quality.STATIC,
            provider="setting static_g_per_kwh",
            observed_at_s=view.now_s,
            fetched_at_s=view.now_s,
            rung=RUNG_STATIC,
            fallback_reason=reason,
            as_of=next_as_of(view.last),
        )


def nonsense(observation: Observation, now_s: float) -> str:
    """Why an observation cannot be accepted; empty = it can."""
    value = observation.intensity_g_per_kwh
    if not math.isfinite(value) or not 0 <= value <= INTENSITY_MAX_G_PER_KWH:
        return f"{observation.provider} said {value} g/kWh, outside 0..{INTENSITY_MAX_G_PER_KWH:.0f}"
    if not observation.starts_at_s < observation.ends_at_s:
        return f"{observation.provider} gave an interval that ends before it starts"
    if observation.starts_at_s > now_s + CLOCK_SLACK_S:
        return f"{observation.provider} gave an interval that starts in {observation.starts_at_s - now_s:.0f} s"
    if observation.ends_at_s < now_s - CLOCK_SLACK_S:
        return f"{observation.provider} gave an interval that ended {now_s - observation.ends_at_s:.0f} s ago"
    return ""


def reading_of(observation: Observation, series: Series, fetched_at_s: float, as_of: int = 0) -> CarbonReading:
    """An accepted observation as a reading on rung 0."""
    return CarbonReading(
        series=series,
        starts_at_s=observation.starts_at_s,
        ends_at_s=observation.ends_at_s,
        intensity_g_per_kwh=observation.intensity_g_per_kwh,
        quality=observation.quality,
        provider=observation.provider,
        api_version=observation.api_version,
        estimation_method=observation.estimation_method,
        observed_at_s=observation.observed_at_s,
        fetched_at_s=fetched_at_s,
        simulated=observation.simulated,
        as_of=as_of,
    )


def same(last: CarbonReading, fresh: CarbonReading) -> bool:
    """Whether a fresh reading says nothing new."""
    return replace(last, fetched_at_s=0.0, as_of=0, epoch=0) == replace(fresh, fetched_at_s=0.0, as_of=0, epoch=0)


def next_as_of(last: CarbonReading | None) -> int:
    """The revision counter: it grows with every change of what is known."""
    return 1 if last is None else last.as_of + 1
