"""What one energy sample adds to the books of each family: joules and grams, and of which quality they are.

Data: one sample of one device, the carbon reading of its time, families with an objective.
Formulation: joules by `trefoil.core.accounting.by_variant`; grams = joules x intensity x PUE. Quality of joules:
measured by a counter, of a device that one variant had alone; attributed, where a counter's joules were
split; estimated, where power was integrated. Embodied carbon: the maker's grams x time of the sample / lifetime, split
as the joules are, evenly where nothing was metered. A device type without that figure makes it unknown, never 0.
Deviations: none.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from trefoil.core.accounting import by_variant
from trefoil.core.carbon import CarbonReading, rung_name
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.units import DAY_S, grams

YEAR_S: Final = 365.25 * DAY_S
Booking = tuple[str, str, float]
"""Family, name of the sum, what it grows by."""


def bookings(sample: EnergySample, reading: CarbonReading, families: Sequence[str], pue: float) -> Iterator[Booking]:
    """Bookings of a metered sample, all but embodied carbon. Variant "" is what was drawn while nothing computed."""
    age_s = max(0.0, (sample.starts_at_s + sample.ends_at_s) / 2 - reading.observed_at_s)
    rung, quality = rung_name(reading.rung), reading.quality.name.lower()
    of_families: dict[str, float] = {}
    for (family, variant), joules in by_variant(sample, families).items():
        of_families[family] = of_families.get(family, 0.0) + joules
        yield family, f"variant_joules:{variant}", joules
        yield family, f"variant_grams:{variant}", grams(joules, reading.intensity_g_per_kwh, pue)
    for family, joules in of_families.items():
        co2 = grams(joules, reading.intensity_g_per_kwh, pue)
        yield family, "joules", joules
        yield family, "facility_joules", joules * pue
        yield family, f"quality_joules:{_quality(sample, families)}", joules
        yield family, f"meter_joules:{sample.method.name.lower()}", joules
        yield family, "carbon_age_joule_s", joules * age_s
        yield family, "grams", co2
        yield family, f"grams:{quality}", co2
        yield family, f"rung_grams:{rung}", co2
        if sample.simulated:
            yield family, "simulated_joules", joules


def embodied_bookings(
    sample: EnergySample, families: Sequence[str], embodied_g: float, lifetime_years: float, metered: bool
) -> Iterator[Booking]:
    """Bookings of the device's embodied carbon for the time of a sample; `embodied_g` 0: unknown."""
    seconds, drawn = sample.ends_at_s - sample.starts_at_s, dict.fromkeys(families, 1.0)
    if metered and sample.counter_j > 0:
        drawn = {}
        for (family, _), joules in by_variant(sample, families).items():
            drawn[family] = drawn.get(family, 0.0) + joules
    total = sum(drawn.values())
    for family, part in drawn.items():
        if embodied_g:
            yield family, "embodied_grams", embodied_g * seconds / (lifetime_years * YEAR_S) * part / total
        else:
            yield family, "embodied_unknown_s", seconds


def _quality(sample: EnergySample, families: Sequence[str]) -> str:
    if sample.method == EnergyMethod.POWER_INTEGRAL:
        return "estimated"
    active = {(h.family, h.variant) for part in sample.slices for h in part.hosted if h.active_j > 0}
    return "measured" if len(active or families) == 1 else "attributed"
