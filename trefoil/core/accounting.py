"""Grams, joules and shares from energy samples (CONTRACTS: definitions that code and tests share).

grams = sum over samples of counter_j / 3.6e6 x intensity at the sample x PUE, idle, sleep and moves included;
per request: divided by the requests answered. A sample without a method makes joules and grams None, never 0.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.carbon import CarbonReading, Series
from trefoil.core.energy import EnergyMethod, EnergySample, HostedEnergy, SliceEnergy
from trefoil.core.errors import SeriesMismatch
from trefoil.core.fleet import SliceKey
from trefoil.core.units import grams

CONSERVATION_TOLERANCE = 1e-6
NOBODY: Final = "(nobody asked)"
"""Share of an hour in which no request came."""


@dataclass(frozen=True, slots=True)
class Account:
    """Account of what an interval cost. None where nothing measured it; `unknown_s`: device time without any sample."""

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


def reading_at(readings: Sequence[CarbonReading], at_s: float) -> CarbonReading:
    """Reading in force at a time; readings ordered by `observed_at_s`, the first one reaches back.

    Raises:
        SeriesMismatch: the readings are not of one series.
        ValueError: no reading at all.
    """
    if not readings:
        raise ValueError("no carbon reading")
    same_series(readings)
    position = bisect_right([r.observed_at_s for r in readings], at_s)
    return readings[max(0, position - 1)]


def intensity_at(readings: Sequence[CarbonReading], at_s: float) -> float:
    """Intensity in force at a time [g/kWh]; raises like `reading_at`."""
    return reading_at(readings, at_s).intensity_g_per_kwh


def same_series(readings: Sequence[CarbonReading]) -> Series:
    """Series that all readings share.

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
    """Sum the part of each sample that is in [starts_at_s, ends_at_s), with the intensity at its middle.

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


def by_variant(sample: EnergySample, families: Sequence[str]) -> dict[tuple[str, str], float]:
    """Energy of a sample by family and variant [J]: active energy to what ran, the rest in proportion to it.

    Where nothing was active the rest is split evenly over `families`, with variant ""; it never disappears unless there
    are none.
    """
    active: dict[tuple[str, str], float] = {}
    for part in sample.slices:
        for hosted in part.hosted:
            of = hosted.family, hosted.variant
            active[of] = active.get(of, 0.0) + hosted.active_j
    total = sum(active.values())
    if total > 0:
        return {of: sample.counter_j * joules / total for of, joules in active.items()}
    return {(family, ""): sample.counter_j / len(families) for family in families}


def by_family(sample: EnergySample, families: Sequence[str]) -> dict[str, float]:
    """Energy of a sample by family [J], as `by_variant`: computed of whole families, to the last bit as ever."""
    active: dict[str, float] = {}
    for part in sample.slices:
        for hosted in part.hosted:
            active[hosted.family] = active.get(hosted.family, 0.0) + hosted.active_j
    total = sum(active.values())
    if total > 0:
        return {family: sample.counter_j * joules / total for family, joules in active.items()}
    return {family: sample.counter_j / len(families) for family in families}


def fold_slices(parts: Iterable[SliceEnergy]) -> tuple[SliceEnergy, ...]:
    """Fold parts of the same slice and generation into one, with what each model has of it; sorted by slice."""
    slice_j: dict[tuple[SliceKey, int], float] = {}
    cpu_s: dict[tuple[SliceKey, int], float] = {}
    models: dict[tuple[SliceKey, int], dict[tuple[str, str], HostedEnergy]] = {}
    for part in parts:
        key = (part.key, part.generation)
        slice_j[key] = slice_j.get(key, 0.0) + part.active_j
        cpu_s[key] = cpu_s.get(key, 0.0) + part.cpu_s
        hosted = models.setdefault(key, {})
        for h in part.hosted:
            old = hosted.get((h.family, h.variant), HostedEnergy(h.family, h.variant))
            hosted[h.family, h.variant] = replace(
                old,
                active_j=old.active_j + h.active_j,
                compute_s=old.compute_s + h.compute_s,
                requests=old.requests + h.requests,
            )
    return tuple(SliceEnergy(*key, slice_j[key], tuple(models[key].values()), cpu_s[key]) for key in sorted(slice_j))


def fold(samples: Sequence[EnergySample]) -> EnergySample:
    """Fold samples of one device into one: energies add, the last state stands, the worst method names itself."""
    first, last = samples[0], samples[-1]
    assert all(s.device == first.device for s in samples)
    return replace(
        last,
        starts_at_s=first.starts_at_s,
        counter_j=sum(s.counter_j for s in samples),
        idle_j=sum(s.idle_j for s in samples),
        unallocated_j=sum(s.unallocated_j for s in samples),
        slices=fold_slices(part for sample in samples for part in sample.slices),
        method=max(samples, key=lambda s: s.method).method,
        clock_mhz_mean=sum(s.clock_mhz_mean for s in samples) / len(samples),
        uncertainty_ratio=max(s.uncertainty_ratio for s in samples),
    )


def per_request(total: float | None, answered: int) -> float | None:
    """Total per answered request; None when it was not measured or nothing was answered."""
    return None if total is None or answered == 0 else total / answered


def named_sums(sums: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Sums of an hour whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): amount for name, amount in sums.items() if name.startswith(prefix)}


def tenant_receipts(sums: Mapping[str, float]) -> dict[str, float]:
    """Joules of receipts by tenant, of answers and of what was executed without one."""
    found = named_sums(sums, "tenant_receipt_joules:")
    for name, joules in named_sums(sums, "tenant_unanswered_joules:").items():
        found[name] = found.get(name, 0.0) + joules
    return found


def tenant_shares(sums: Mapping[str, float]) -> dict[str, float]:
    """Shares of a family's hour by tenant, by what receipts say, or by answers in an hour without receipts."""
    receipts = tenant_receipts(sums)
    weights = receipts if sum(receipts.values()) > 0 else named_sums(sums, "tenant_requests:")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()} if total else {NOBODY: 1.0}
