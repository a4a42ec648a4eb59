"""The carbon ratio that routers are told: the intensity of now over its mean, of the series that receipts name.

Data: the last `CarbonRatio` and the `CarbonReading` that it was made of. Formulation: the ratio as it stands, for as
long as receipts take that reading for current (twice its interval). None: not known, or old; a router that weighs
carbon must then do without, and not go by what held hours ago.
"""

from dispatcher.core.receipts import STALE_INTERVALS
from trefoil.core.carbon import CarbonRatio, CarbonReading


def ratio_now(found: CarbonRatio | None, reading: CarbonReading | None, now_s: float) -> float | None:
    """The ratio in force at a time [UTC s]; None: unknown or stale."""
    if found is None or reading is None or found.series != reading.series:
        return None
    interval_s = reading.ends_at_s - reading.starts_at_s
    return found.cir if now_s - found.observed_at_s <= STALE_INTERVALS * interval_s else None
