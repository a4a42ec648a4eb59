"""Fallback ladder: from providers' answers to the reading in force, with provenance, and never in silence.

Rungs (`trefoil.core.carbon.Rung`): 0 the provider; 1 a second provider of the same method and factors. 2 the last
accepted value while it is younger than `carry_max_s`; 3 the zone's own hour-of-week profile. 4 a configured value; 5
the last accepted value, however old: only where neither a profile nor a configured value is known.
Each rung below 0 says in `fallback_reason` which provider failed by which cause, as `provider cause: message`.
Stateless: what was accepted and what is suspected come with the view.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from carbon_feed.core.hour_of_week import HourOfWeekProfile
from carbon_feed.core.observation import Observation, is_unchanged, next_as_of, reading_of
from carbon_feed.core.validation import (
    CLOCK_SLACK_S,
    Cause,
    JumpReference,
    Refusal,
    check_forecast,
    check_observation,
)
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Quality, Rung, Series
from trefoil.core.common import Basis, Provenance
from trefoil.core.units import HOUR_S

RETRY_S: Final = 1.0
PROVIDERS_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """Answer of one provider: an observation, or why there is none."""

    provider: str
    observation: Observation | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class FallbackView:
    """Input of a decision. `answers` holds the first provider, and the second if the first was refused."""

    now_s: float
    series: Series
    answers: tuple[ProviderAnswer, ...]
    last: CarbonReading | None = None
    """The reading in force."""
    accepted: CarbonReading | None = None
    """The last reading that a provider gave."""
    suspect: Observation | None = None
    """Refused for its jump the last time."""
    profile: HourOfWeekProfile | None = None


@dataclass(frozen=True, slots=True)
class FallbackDecision:
    """Decision: the reading in force (None: nothing is known), what to remember, and when to look again."""

    reading: CarbonReading | None
    accepted: CarbonReading | None
    suspect: Observation | None
    refusals: tuple[tuple[str, Refusal], ...]
    why: str
    next_tick_at_s: float


@dataclass(frozen=True, slots=True)
class FallbackLadder:
    """Fallback ladder with the limits of its rungs; stateless."""

    carry_max_s: float = 3600.0
    static_g_per_kwh: float | None = None
    late_max_s: float = CLOCK_SLACK_S

    def refusal(self, answer: ProviderAnswer, view: FallbackView) -> Refusal | None:
        """Why a provider's answer does not hold now; None = it does, and the second provider need not be asked."""
        if answer.observation is None:
            return answer.refusal or Refusal(Cause.UNAVAILABLE, "said nothing")
        last = view.accepted.intensity_g_per_kwh if view.accepted is not None else None
        return check_observation(
            answer.observation, view.series, view.now_s, JumpReference(last, view.suspect), self.late_max_s
        )

    def decide(self, view: FallbackView) -> FallbackDecision:
        """Decide which reading is in force now, and why."""
        assert 1 <= len(view.answers) <= PROVIDERS_MAX
        refusals: list[tuple[str, Refusal]] = []
        for rung, answer in zip((Rung.NORMAL, Rung.SECONDARY), view.answers, strict=False):
            refusal = self.refusal(answer, view)
            if refusal is None:
                assert answer.observation is not None
                return self._accept(view, answer.observation, rung, tuple(refusals))
            refusals.append((answer.provider, refusal))
        return self._degrade(view, tuple(refusals))

    def _accept(
        self, view: FallbackView, answer: Observation, rung: Rung, refusals: tuple[tuple[str, Refusal], ...]
    ) -> FallbackDecision:
        fresh = reading_of(answer, view.series, view.now_s)
        fresh = replace(fresh, rung=int(rung), fallback_reason=fallback_reason_of(refusals))
        suspect = _suspect(view, refusals)
        next_s = max(answer.ends_at_s, view.now_s) if rung is Rung.NORMAL else view.now_s + RETRY_S
        if view.last is not None and is_unchanged(view.last, fresh):
            return FallbackDecision(view.last, view.last, suspect, refusals, "unchanged", next_s)
        fresh = replace(fresh, as_of=next_as_of(view.last))
        before = "" if view.last is None else f"{view.last.intensity_g_per_kwh:.0f} -> "
        why = f"{before}{fresh.intensity_g_per_kwh:.0f} g/kWh by {answer.provider}"
        return FallbackDecision(fresh, fresh, suspect, refusals, why, next_s)

    def _degrade(self, view: FallbackView, refusals: tuple[tuple[str, Refusal], ...]) -> FallbackDecision:
        accepted = _newest(view, refusals)
        reason = fallback_reason_of(refusals)
        fallback = self._fallback(view, accepted)
        reading = view.last
        if fallback is not None:
            fallback = replace(fallback, fallback_reason=reason, fetched_at_s=view.now_s, epoch=0)
            reading = fallback
            if view.last is not None and is_unchanged(view.last, fallback):
                reading = view.last
            else:
                reading = replace(fallback, as_of=next_as_of(view.last))
        wait_s = max([RETRY_S, *(refusal.retry_after_s for _, refusal in refusals)])
        return FallbackDecision(reading, accepted, _suspect(view, refusals), refusals, reason, view.now_s + wait_s)

    def _fallback(self, view: FallbackView, accepted: CarbonReading | None) -> CarbonReading | None:
        if accepted is not None and view.now_s - accepted.observed_at_s <= self.carry_max_s:
            return replace(accepted, quality=Quality.CARRIED, rung=int(Rung.CARRIED))
        if view.profile is not None and view.profile.ready:
            return self._profile(view, view.profile)
        if self.static_g_per_kwh is not None:
            return self._static(view, self.static_g_per_kwh)
        if accepted is not None:
            return replace(accepted, quality=Quality.CARRIED, rung=int(Rung.EXPIRED))
        return None

    def _profile(self, view: FallbackView, profile: HourOfWeekProfile) -> CarbonReading:
        start_s = view.now_s // HOUR_S * HOUR_S
        return CarbonReading(
            series=view.series,
            starts_at_s=start_s,
            ends_at_s=start_s + HOUR_S,
            intensity_g_per_kwh=profile.at(view.now_s),
            quality=Quality.CLIMATOLOGY,
            provider="own profile",
            estimation_method="mean of this hour of the week, drawn towards the last value",
            observed_at_s=profile.newest_s,
            rung=int(Rung.PROFILE),
        )

    def _static(self, view: FallbackView, intensity_g_per_kwh: float) -> CarbonReading:
        last = view.last
        if last is not None and last.rung == Rung.STATIC and view.now_s < last.ends_at_s:
            return last
        return CarbonReading(
            series=view.series,
            starts_at_s=view.now_s,
            ends_at_s=view.now_s + self.carry_max_s,
            intensity_g_per_kwh=intensity_g_per_kwh,
            quality=Quality.STATIC,
            provider="setting static_g_per_kwh",
            observed_at_s=view.now_s,
            rung=int(Rung.STATIC),
        )


def forecast_of(
    provider: str, points: Sequence[Observation], series: Series, now_s: float, horizon_s: float, licence: str = ""
) -> CarbonForecast | Refusal:
    """Forecast from a provider's points, or why the zone's own takes its place. Without bands all three are equal."""
    refusal = check_forecast(points, series, now_s, horizon_s)
    if refusal is not None:
        return refusal
    bands = tuple(
        CarbonBand(p.starts_at_s, p.ends_at_s, p.intensity_g_per_kwh, p.intensity_g_per_kwh, p.intensity_g_per_kwh)
        for p in points
    )
    version = points[0].api_version
    provenance = Provenance(Basis.MODELLED, provider, version, licence, as_of_s=points[0].observed_at_s)
    return CarbonForecast(series, provider, now_s, bands, provenance)


def fallback_reason_of(refusals: Sequence[tuple[str, Refusal]]) -> str:
    """Fallback reason in words: `provider cause: message; provider cause: message`."""
    return "; ".join(f"{provider} {refusal}".replace(";", ",") for provider, refusal in refusals)


def _newest(view: FallbackView, refusals: Sequence[tuple[str, Refusal]]) -> CarbonReading | None:
    """The last accepted reading, or one that is sound, has ended and is newer: a provider that publishes late."""
    newest = view.accepted
    for answer, (_, refusal) in zip(view.answers, refusals, strict=True):
        observation = answer.observation
        if refusal.cause is not Cause.ENDED or observation is None:
            continue
        if newest is None or observation.starts_at_s > newest.starts_at_s:
            newest = reading_of(observation, view.series, view.now_s)
    return newest


def _suspect(view: FallbackView, refusals: Sequence[tuple[str, Refusal]]) -> Observation | None:
    """The observation to compare the next one with: the first of those that a provider repeated for one interval."""
    for answer, (_, refusal) in zip(view.answers, refusals, strict=False):
        if refusal.cause is Cause.JUMP:
            old = view.suspect
            fresh = answer.observation
            repeated = old is not None and fresh is not None and old.starts_at_s == fresh.starts_at_s
            return old if repeated else fresh
    return None
