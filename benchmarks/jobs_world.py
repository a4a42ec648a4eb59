"""World of `make bench-jobs`: real carbon of a year, a modelled fleet with interactive load, and jobs that arrive.

Fleet: `GPUS` A100s from the repository's profile of EfficientNet-B7 (7g.40gb, batches of 8): an item is an image. So
many are awake that interactive load takes `BUSY` of them, and jobs may fill those up to `FULL`; the rest sleeps and can
be woken, at idle power above sleep and the joules of a start. Load and jobs follow the made-up day of
`scenarios/day_of_requests.csv` in the zone's time, with hourly noise that lasts. Forecasts are the feed's own blend.
"""

import csv
import math
import os
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from carbon_feed.forecast import MODELS
from carbon_feed.forecast.forecaster import Forecaster
from trefoil.core.carbon import CarbonBand
from trefoil.core.device_types import device_type
from trefoil.core.jobs.planned import DevicePool, ItemCost, Slot
from trefoil.core.units import HOUR_S, MS_PER_S
from trefoil.runtime.repository import load_catalog

ROOT: Final = Path(__file__).parents[1]
DATA: Final = Path(os.environ.get("TREFOIL_DATA", ROOT / ".." / "shared" / "data")) / "carbon"
CASPER: Final = "casper_7awsregions_2021-10_2022-09_hourly.csv"
DEVICE: Final = device_type("A100-SXM4-40GB")
FAMILY, VARIANT, SHAPE, BATCH, CLOCK_MHZ = "efficientnet", "efficientnet-b7", "7g.40gb", 8, 1410
GPUS: Final = 20
WORK: Final = 6.0  # mean device hours an hour, of requests and jobs together
BUSY: Final = 0.6
FULL: Final = 0.9
NOISE, LASTS = 0.10, 0.9  # of the logarithm of load: its deviation, and its correlation from hour to hour
LEADS: Final = 24
WARM_UP_H: Final = 14 * 24  # the forecasts' first two weeks
SEED: Final = 20261129

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Zone:
    """Zone whose trace is played."""

    name: str
    file: str
    column: str
    utc_offset_h: int


ZONES: Final = (
    Zone("CISO", "em_US-CAL-CISO_2022_hourly.csv", "LCA", -8),
    Zone("PJM", CASPER, "us-east-1", -5),
    Zone("AU-NSW", "em_AU-NSW_2022_hourly.csv", "LCA", 10),
    Zone("DE", CASPER, "eu-central-1", 1),
    Zone("GB", "em_GB_2021_hourly.csv", "LCA", 0),
)
PAIRS: Final = (
    (Zone("CISO", CASPER, "us-west-1", -8), Zone("PJM", CASPER, "us-east-1", -5)),
    (Zone("DE", CASPER, "eu-central-1", 1), Zone("FR", CASPER, "eu-west-3", 1)),
)


@cache
def trace(zone: Zone) -> tuple[datetime, Values]:
    """Beginning and hourly intensities [g/kWh] of a zone."""
    with (DATA / zone.file).open(encoding="utf-8") as lines:
        head, *rows = csv.reader(lines)
    column = next(number for number, name in enumerate(head) if zone.column in name)
    begin = datetime.fromisoformat(rows[0][0].replace("Z", "+00:00"))
    return begin, np.array([float(row[column]) for row in rows])


def cleanest_third(values: Values) -> float:
    """By how much the cleanest third of a day's hours is below the day's mean, over all days [%]."""
    days = np.sort(values[: len(values) // 24 * 24].reshape(-1, 24), axis=1)
    return float(100 * (1 - days[:, :8].mean() / days.mean()))


@cache
def item() -> ItemCost:
    """An image, from the profile."""
    catalog = load_catalog(ROOT / "model_repository")
    row = next(
        r
        for r in catalog.rows
        if (r.device_type, r.slice_type, r.variant, r.batch, r.clock_mhz)
        == (DEVICE.name, SHAPE, VARIANT, BATCH, CLOCK_MHZ)
    )
    accuracy = catalog.family(FAMILY).variant(VARIANT).accuracy
    return ItemCost(FAMILY, row.latency_ms_p50 / MS_PER_S / BATCH, row.energy_active_j_per_batch / BATCH, accuracy)


def items(device_h: float) -> int:
    """Items that take so many device hours."""
    return round(device_h * HOUR_S / item().device_s)


IDLE_W: Final = DEVICE.idle_w - DEVICE.sleep_w
LOAD_S: Final = 7.0  # of B7, family.toml


def wake_j() -> float:
    """Joules of a start: waking and loading weights at the power of inference."""
    return (DEVICE.wake_s + LOAD_S) * (DEVICE.idle_w + item().active_j / item().device_s)


def forecasts(values: Values) -> Values:
    """Quantiles [T, 3, LEADS] of what follows each hour, by the feed's own model and nothing later than that hour."""
    forecaster, found = Forecaster(MODELS["blend"], horizon_s=LEADS * HOUR_S), np.full((len(values), 3, LEADS), np.nan)
    for hour, value in enumerate(values):
        forecaster.observe(float(value))
        found[hour] = forecaster.quantile_forecast().values
    return found


@dataclass(frozen=True, slots=True)
class World:
    """Year of one zone: carbon [g/kWh], interactive load and arriving jobs [device hours], and the forecasts."""

    zone: str
    carbon: Values
    load: Values
    arriving: Values
    carbon_ahead: Values
    load_ahead: Values

    @property
    def hours(self) -> int:
        """Hours that there are."""
        return len(self.carbon)

    def part(self, first: int, hours: int) -> "World":
        """Hours from a first one on; forecasts made in them know all hours before."""
        cut = {one.name: getattr(self, one.name)[first : first + hours] for one in fields(self) if one.name != "zone"}
        return replace(self, **cut)

    def free(self, load: float) -> tuple[float, int]:
        """Device hours left on awake devices, and devices asleep."""
        awake = min(GPUS, math.ceil(load / BUSY))
        return max(0.0, FULL * awake - load), GPUS - awake

    def slots(self, hour: int, count: int, woken: int, knows: str = "forecast") -> list[Slot]:
        """Slots from an hour on, as they are known then: the hour itself, and forecasts; or `none`, or `truth`."""
        found = []
        for lead in range(min(count, self.hours - hour)):
            if lead == 0:
                carbon, likely, most = self.carbon[hour], self.load[hour], self.load[hour]
            else:
                _, likely, most = self.load_ahead[hour, :, lead - 1]
                ahead = {"forecast": self.carbon_ahead[hour, 1, lead - 1], "truth": self.carbon[hour + lead]}
                carbon = ahead.get(knows, self.carbon[hour])
            idle, asleep = self.free(likely)
            sure_idle, sure_asleep = self.free(most)
            pools = (
                DevicePool("awake", idle * HOUR_S, min(idle, sure_idle) * HOUR_S, (item(),)),
                DevicePool("asleep", asleep * HOUR_S, sure_asleep * HOUR_S, (item(),), IDLE_W, wake_j(), woken),
            )
            band = CarbonBand((hour + lead) * HOUR_S, (hour + lead + 1) * HOUR_S, carbon, carbon, carbon)
            found.append(Slot(self.zone, band, pools))
        return found


@cache
def _carbon(zone: Zone) -> tuple[Values, Values]:
    _, values = trace(zone)
    return values, forecasts(values)


@cache
def world(zone: Zone, share: float) -> World:
    """World of a zone in which jobs are so much of all work."""
    with (ROOT / "benchmarks/scenarios/day_of_requests.csv").open(encoding="utf-8") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        day = np.array([float(row["requests"]) for row in rows])
    carbon, ahead = _carbon(zone)
    begin, _ = trace(zone)
    local = (np.arange(len(carbon)) + begin.hour + zone.utc_offset_h) % 24
    rng = np.random.default_rng([SEED, *zone.name.encode()])
    load, arriving = (WORK * part * (day / day.mean())[local] * _noise(rng, len(carbon)) for part in (1 - share, share))
    whole = (carbon, load, arriving, ahead, forecasts(load))
    return World(zone.name, *(one[WARM_UP_H:] for one in whole))


def _noise(rng: np.random.Generator, hours: int) -> Values:
    """Factors around 1 that last for hours."""
    steps, logs = rng.normal(0.0, NOISE * math.sqrt(1 - LASTS**2), hours), np.zeros(hours)
    for hour in range(1, hours):
        logs[hour] = LASTS * logs[hour - 1] + steps[hour]
    return np.exp(logs - NOISE**2 / 2)
