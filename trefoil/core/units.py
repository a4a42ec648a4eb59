"""Units and their conversion, in one place. Names elsewhere end in their unit."""

from typing import Final

J_PER_KWH: Final = 3.6e6
MG_PER_G: Final = 1e3
MS_PER_S: Final = 1e3
HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
G_PER_LB: Final = 453.59237


def kwh(energy_j: float) -> float:
    """Kilowatt hours of joules."""
    return energy_j / J_PER_KWH


def grams(energy_j: float, intensity_g_per_kwh: float, pue: float) -> float:
    """Grams of CO2 of an energy at the plug of the IT equipment (CLOVER Eq. 1: C = E * CI * PUE)."""
    return kwh(energy_j) * intensity_g_per_kwh * pue


def ms(seconds: float) -> float:
    """Milliseconds of seconds."""
    return seconds * MS_PER_S


def seconds(milliseconds: float) -> float:
    """Seconds of milliseconds."""
    return milliseconds / MS_PER_S


def g_per_kwh_of_lbs_per_mwh(lbs_per_mwh: float) -> float:
    """Grams per kilowatt hour of pounds per megawatt hour (870 -> 394.6)."""
    return lbs_per_mwh * G_PER_LB / J_PER_KWH * 3.6e3
