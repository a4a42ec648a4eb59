"""Grams, joules and shares from energy samples (CONTRACTS: definitions that code and tests share).

grams = sum over samples of counter_j / 3.6e6 x intensity at the sample x PUE, idle, sleep and moves included;
per request: divided by the requests answered. A sample without a method makes joules and grams None, never 0.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from trefoil.core.carbon import CarbonReading, Series
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.errors import SeriesMismatch
from trefoil.core.units import grams

CONSERVATION_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Account:
    """What an interval cost. None where nothing measured it; `unknown_s` is device time without any sample."""

    counter_j: float | None
    active_j: float | None
    idle_j: float | None
    unallocated_j: float | None
    grams: float | None
    idle_share: float | None
    unknown_s: float


def active_j(sample: EnergySample) -> float:
    """Active energy of all slices of a sample [J]."""
    return sum(part.active_j for part in sample.slices)


def check_conservation(sample: EnergySample) -> None:
    """Assert counter_j = sum(active_j) + idle_j + unallocated_j, each term >= 0.

    Raises:
        AssertionError: the meter broke the definition: a bug.
    """
    total = active_j(sample) + sample.idle_j + sample.unallocated_j
    assert abs(total - sample.counter_j) <= CONSERVATION_TOLERANCE * max(1.0, sample.counter_j), (total, sample)
    assert min([sample.idle_j, sample.unallocated_j, *(part.active_j for part in sample.slices)]) >= 0, sample


def intensity_at(readings: Sequence[CarbonReading], at_s: float) -> float:
    """The intensity in force at a time [g/kWh]; readings ordered by `observed_at_s`, the first one reaches back.

    Raises:
        SeriesMismatch: the readings are not of one series.
        ValueError: no reading at all.
    """
    if not readings:
        raise ValueError("no carbon reading")
    same_series(readings)
    position = bisect_right([r.observed_at_s for r in readings], at_s)
    return readings[max(0, position - 1)].intensity_g_per_kwh


def same_series(readings: Sequence[CarbonReading]) -> Series:
    """The one series of all readings.

    Raises:
        SeriesMismatch: naming two that differ.
    """
    first = readings[0].series
    for reading in readings:
        if reading.series != first:
            raise SeriesMismatch(
                f"readings of {first} and {reading.series} cannot be joined",
                remedy="choose one zone, method and factors",
            )
    return first


def account(
    samples: Sequence[EnergySample],
    readings: Sequence[CarbonReading],
    starts_at_s: float,
    ends_at_s: float,
    pue: float,
) -> Account:
    """Sum the part of each sample that lies in [starts_at_s, ends_at_s), with the intensity at its middle.

    A sample across the border counts by its share of time. Gaps are booked as `unknown_s`, never interpolated.
    """
    counter = idle = unallocated = active = co2 = 0.0
    covered: dict[str, float] = {}
    measured = bool(samples)
    for sample in samples:
        length = sample.ends_at_s - sample.starts_at_s
        inside = min(sample.ends_at_s, ends_at_s) - max(sample.starts_at_s, starts_at_s)
        if inside <= 0 or length <= 0:
            continue
        if sample.method in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED):
            measured = False
            continue
        share = inside / length
        covered[sample.device] = covered.get(sample.device, 0.0) + inside
        counter += share * sample.counter_j
        active += share * active_j(sample)
        idle += share * sample.idle_j
        unallocated += share * sample.unallocated_j
        middle_s = max(sample.starts_at_s, starts_at_s) + inside / 2
        co2 += grams(share * sample.counter_j, intensity_at(readings, middle_s), pue)
    unknown_s = sum(max(0.0, (ends_at_s - starts_at_s) - seconds) for seconds in covered.values())
    if not measured or not covered:
        return Account(None, None, None, None, None, None, ends_at_s - starts_at_s)
    idle_share = (idle + unallocated) / counter if counter else None
    return Account(counter, active, idle, unallocated, co2, idle_share, unknown_s)


def per_request(total: float | None, answered: int) -> float | None:
    """A total per answered request; None when it was not measured or nothing was answered."""
    return None if total is None or answered == 0 else total / answered
