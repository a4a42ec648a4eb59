"""Observations of providers, and the readings that they become."""

from dataclasses import dataclass, replace

from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of one interval by a provider. `record` = it belongs to the history.

    What it cannot tell stays empty: no method or factors = those that were asked for, no zone = it does not echo one.
    """

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
    method: Method = Method.UNSPECIFIED
    factors: Factors = Factors.UNSPECIFIED
    zone_asked: str = ""
    """The zone in the provider's words."""
    zone_echoed: str = ""
    """The zone that its answer is for."""
    beside_g_per_kwh: tuple[float, ...] = ()
    """All values of the same answer: they tell an outage, which is zero throughout, from a clean quarter of an hour."""
    left_out: int = 0
    """Rows of the same answer that had no value."""


def reading_of(observation: Observation, series: Series, fetched_at_s: float, as_of: int = 0) -> CarbonReading:
    """Reading on rung 0 of an accepted observation."""
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


def is_unchanged(last: CarbonReading, fresh: CarbonReading) -> bool:
    """Whether a fresh reading says nothing new: only the wording of why it stands in may differ."""
    return _bare(last) == _bare(fresh) and causes(last.fallback_reason) == causes(fresh.fallback_reason)


def causes(reason: str) -> tuple[str, ...]:
    """Causes in a fallback reason, which is `provider cause: message; provider cause: message`."""
    return tuple(part.partition(":")[0] for part in reason.split("; "))


def next_as_of(last: CarbonReading | None) -> int:
    """Next revision number: it grows with every change of what is known."""
    return 1 if last is None else last.as_of + 1


def _bare(reading: CarbonReading) -> CarbonReading:
    return replace(reading, fetched_at_s=0.0, as_of=0, epoch=0, fallback_reason="")
