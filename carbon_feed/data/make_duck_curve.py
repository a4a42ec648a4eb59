"""Write synthetic_duck_72h.csv: a solar grid's duck curve, 24 h of lead-in and 48 h, from one seed.

Shape of a day (local hour h): a solar trough around 12.5 h of about 90 g/kWh and an evening peak around 20 h of about
380 g/kWh. A night shelf near 255 g/kWh and a morning shoulder complete it, as on the Californian grid in spring.
Day-to-day noise scales trough and peak; hourly noise is an AR(1) process. Nothing here is measured.
"""

import datetime
import math
from pathlib import Path
from typing import Final

import numpy as np

SEED: Final = 20261121
HOURS: Final = 72
LEAD_IN_H: Final = 24
STARTS: Final = datetime.datetime(2026, 4, 6, 0, 0, tzinfo=datetime.UTC)
SHELF_G: Final = 255.0
TROUGH_G: Final = 90.0
PEAK_G: Final = 380.0
MORNING_G: Final = 285.0
FLOOR_G: Final = 60.0
DAY_SIGMA: Final = 0.06
HOUR_SIGMA_G: Final = 5.0
HOUR_MEMORY: Final = 0.6

HEADER: Final = f"""# basis: synthetic
# source: carbon_feed/data/make_duck_curve.py
# seed: {SEED}
# licence: Apache-2.0
# lead_in_h: {LEAD_IN_H}
# A made-up grid with much sun: nothing here was measured. Times are UTC and stand for local time; unit gCO2eq/kWh.
time,carbon_intensity_g_per_kwh
"""


def shape(hour: float, trough_g: float, peak_g: float) -> float:
    """Intensity of a noiseless day at a local hour in [0, 24)."""
    solar = math.exp(-0.5 * ((hour - 12.5) / 2.9) ** 4)
    evening = math.exp(-0.5 * ((hour - 20.0) / 2.0) ** 2)
    morning = math.exp(-0.5 * ((hour - 6.5) / 1.3) ** 2)
    base = SHELF_G + (peak_g - SHELF_G) * evening + (MORNING_G - SHELF_G) * morning
    return base + (trough_g - base) * solar


def values(seed: int = SEED) -> list[float]:
    """Hourly intensities of all days [g/kWh]."""
    rng = np.random.default_rng(seed)
    days = HOURS // 24
    troughs = TROUGH_G * (1 + DAY_SIGMA * 2 * rng.standard_normal(days))
    peaks = PEAK_G * (1 + DAY_SIGMA * rng.standard_normal(days))
    noise, result = 0.0, []
    for i in range(HOURS):
        noise = HOUR_MEMORY * noise + HOUR_SIGMA_G * float(rng.standard_normal())
        day = i // 24
        result.append(max(FLOOR_G, shape(i % 24, float(troughs[day]), float(peaks[day])) + noise))
    return result


def text() -> str:
    """Text of the whole CSV file."""
    rows = (f"{STARTS + datetime.timedelta(hours=i):%Y-%m-%dT%H:%MZ},{value:.1f}\n" for i, value in enumerate(values()))
    return HEADER + "".join(rows)


if __name__ == "__main__":
    Path(__file__).with_name("synthetic_duck_72h.csv").write_text(text(), encoding="utf-8")
