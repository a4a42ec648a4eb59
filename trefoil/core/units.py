"""Units and their conversion, in one place. Names elsewhere end in their unit."""

import re
import unicodedata
from datetime import UTC, datetime
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


def format_time(at_s: float) -> str:
    """UTC time for people, as fine as it needs to be; a dash for what is unset."""
    if not at_s:
        return "-"
    at = datetime.fromtimestamp(at_s, UTC)
    return at.strftime("%Y-%m-%d %H:%MZ" if at.second == 0 and at.microsecond == 0 else "%Y-%m-%d %H:%M:%SZ")


def format_minute(at_s: float) -> str:
    """UTC time for people, to the minute."""
    return format_time(at_s // 60 * 60)


def format_duration(seconds: float) -> str:
    """Duration for people, in the unit that suits it."""
    if abs(seconds) < 120:
        return f"{seconds:.0f} s"
    if abs(seconds) < 2 * HOUR_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.1f} h" if abs(seconds) < 5 * DAY_S else f"{seconds / DAY_S:.1f} d"


def ms(seconds: float) -> float:
    """Milliseconds of seconds."""
    return seconds * MS_PER_S


def seconds(milliseconds: float) -> float:
    """Seconds of milliseconds."""
    return milliseconds / MS_PER_S


def g_per_kwh_of_lbs_per_mwh(lbs_per_mwh: float) -> float:
    """Grams per kilowatt hour of pounds per megawatt hour (870 -> 394.6)."""
    return lbs_per_mwh * G_PER_LB / J_PER_KWH * 3.6e3


_MASS_G: Final = {
    **dict.fromkeys(("g", "gram", "grams"), 1.0),
    **dict.fromkeys(("kg", "kgs", "kilogram", "kilograms"), 1e3),
    **dict.fromkeys(("t", "tonne", "tonnes"), 1e6),
    **dict.fromkeys(("lb", "lbs", "pound", "pounds"), G_PER_LB),
    "mg": 1e-3,
}
_ENERGY_KWH: Final = {"wh": 1e-3, "kwh": 1.0, "mwh": 1e3, "gwh": 1e6, "twh": 1e9, "mj": 1 / 3.6, "gj": 1e3 / 3.6}
_WRITTEN: Final = {"wh": "Wh", "kwh": "kWh", "mwh": "MWh", "gwh": "GWh", "twh": "TWh", "mj": "MJ", "gj": "GJ"}
_INTENSITY: Final = re.compile(
    rf"(?<![^\W\d_])({'|'.join(sorted(_MASS_G, key=len, reverse=True))})"
    r"(?:[\s_.-]*(?:of[\s_]*)?(?:co2|carbon|ghg))?(?:[\s_.-]*(?:equivalent|equiv|eq|e))?"
    rf"(?:\s*/\s*|[\s_.-]*per[\s_.-]*|[\s_.-]+)({'|'.join(_ENERGY_KWH)})(?![^\W\d_])",
    re.IGNORECASE,
)
_MASS_OF_CASE: Final = {"Mg": "t", "MG": ""}  # a megagram is a tonne; MG can be that or a milligram
INTENSITY_UNITS: Final = ("g/kWh", "kg/kWh", "g/MWh", "kg/MWh", "t/MWh", "t/GWh", "lb/MWh", "lb/kWh", "g/MJ")


def intensity_unit(text: str) -> str:
    """Unit of carbon intensity in a text, as mass/energy (`lbs_co2_per_mwh`: lbs/MWh); empty: none."""
    found = _INTENSITY.search(unicodedata.normalize("NFKC", text))
    mass = _MASS_OF_CASE.get(found[1], found[1].lower()) if found else ""
    return f"{mass}/{_WRITTEN[found[2].lower()]}" if found and mass else ""


def g_per_kwh_per(unit: str) -> float:
    """Grams per kWh of one unit of `intensity_unit`."""
    mass, _, energy = unit.lower().partition("/")
    return _MASS_G[mass] / _ENERGY_KWH[energy]
