"""The one place where units are converted. Names elsewhere end in their unit."""

from typing import Final

J_PER_KWH: Final = 3.6e6
MG_PER_G: Final = 1e3
MS_PER_S: Final = 1e3
G_PER_LB: Final = 453.59237


def kwh(energy_j: float) -> float:
    """Joules to kilowatt hours."""
    return energy_j / J_PER_KWH


def grams(energy_j: float, intensity_g_per_kwh: float, pue: float) -> float:
    """Grams of CO2 of an energy at the plug of the IT equipment (CLOVER Eq. 1: C = E * CI * PUE)."""
    return kwh(energy_j) * intensity_g_per_kwh * pue


def ms(seconds: float) -> float:
    """Seconds to milliseconds."""
    return seconds * MS_PER_S


def seconds(milliseconds: float) -> float:
    """Milliseconds to seconds."""
    return milliseconds / MS_PER_S


def g_per_kwh_of_lbs_per_mwh(lbs_per_mwh: float) -> float:
    """Pounds per megawatt hour to grams per kilowatt hour (870 -> 394.6)."""
    return lbs_per_mwh * G_PER_LB / J_PER_KWH * 3.6e3
