"""Figure of a run over time. Made without pyplot, so that only the figure itself is touched."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from trefoil.core.units import HOUR_S

PANEL_IN: Final = (9.0, 1.7)  # width of the figure, height of each panel
MISSED: Final = "#d64545"


def series_figure(series: Mapping[str, npt.NDArray[np.float64]], families: Mapping[str, Any], title: str) -> Any:
    """matplotlib Figure of a run: intensity [g/kWh], load [1/s], power [W], p95 [ms] against the SLO, accuracy.

    `series` and `families` are those of a `Result`: by name, and the family's summary.
    """
    unit, unit_s = ("hours", HOUR_S) if series["at_s"][-1] >= 2 * HOUR_S else ("minutes", 60.0)
    times = series["at_s"] / unit_s
    figure = Figure(figsize=(PANEL_IN[0], 5 * PANEL_IN[1]), layout="constrained")
    carbon, load, power, latency, accuracy = figure.subplots(5, 1, sharex=True)
    carbon.step(times, series["intensity_g_per_kwh"], where="post", color="#5b6470")
    power.plot(times, series["power_w"], color="#5b6470")
    for n, (name, family) in enumerate(families.items()):
        colour = f"C{n}"
        load.plot(times, series[f"{name}.rate_per_s"], color=colour, label=name)
        latency.plot(times, series[f"{name}.p95_ms"], color=colour, label=name)
        latency.axhline(family.slo_ms, color=MISSED if family.slo_missed else colour, linestyle="--", linewidth=1)
        label = name if family.accuracy is None else f"{name}, mean {family.accuracy:.4f}"
        accuracy.plot(times, series[f"{name}.accuracy"], color=colour, label=label)
        accuracy.axhline(family.floor, color=MISSED if family.floor_missed else colour, linestyle="--", linewidth=1)
    named = ("g CO2/kWh", "requests/s", "W", "p95 ms (-- SLO)", "accuracy (-- floor)")
    for axes, label in zip((carbon, load, power, latency, accuracy), named, strict=True):
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0)
        if axes is not accuracy:
            axes.set_ylim(bottom=0)
    if len(families) > 1:
        load.legend(frameon=False, ncols=len(families))
    accuracy.set_xlabel(f"{unit} simulated")
    figure.suptitle(title)
    return figure
