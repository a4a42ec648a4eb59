"""Past of CLOVER's traces: what a feed would have known before the 48 h began.

CLOVER's traces have none. A week of the same grid and the same days of the year stands in for it, by Electricity Maps:
for Great Britain the very days, for California those of 2022, the year at hand. Columns: the nearest to the traces in
level. It is a series of another maker, so that forecasts from it are worse than of a feed that knows its own past.
"""

import csv
from typing import Final

from trefoil.core import errors
from trefoil.reproduce.experiment import data_folder

HOURS: Final = 7 * 24
LCA: Final = "Carbon Intensity gCO₂eq/kWh (LCA)"
DIRECT: Final = "Carbon Intensity gCO₂eq/kWh (direct)"
PASTS: Final = {  # trace: file, column, the hour at which the trace begins
    "ciso-march": ("em_US-CAL-CISO_2022_hourly.csv", LCA, "2022-03-26 21:00:00"),
    "ciso-september": ("em_US-CAL-CISO_2022_hourly.csv", LCA, "2022-09-16 20:00:00"),
    "eso-march": ("em_GB_2021_hourly.csv", DIRECT, "2021-03-13 22:00:00"),
}


def past_of(trace: str) -> tuple[float, ...]:
    """Past of a trace [g/kWh], hour by hour, oldest first; empty without the real traces, and of a user's own.

    Raises:
        errors.TraceError: the file does not hold the week.
    """
    folder = data_folder()
    if trace not in PASTS:
        return ()
    file, column, begins = PASTS[trace]
    if folder is None or not (folder / "carbon" / file).exists():
        return ()
    path = folder / "carbon" / file
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    at = next((i for i, row in enumerate(rows) if row["Datetime (UTC)"] == begins), 0)
    if at < HOURS:
        raise errors.TraceError("not a week before the trace", field=str(path), value=begins, remedy="fetch it again")
    return tuple(float(row[column]) for row in rows[at - HOURS : at])
