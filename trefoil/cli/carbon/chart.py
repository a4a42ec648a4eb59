"""Charts of carbon intensity and of forecast errors: plotext in the terminal, matplotlib for PNG files."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from trefoil.core.carbon import CarbonBand, CarbonReading

Values: TypeAlias = NDArray[np.float64]
HEIGHT: Final = 16
WIDTH_MIN: Final = 24
WIDTH_MAX: Final = 110
POINTS_A_COLUMN: Final = 2  # what a braille character can show
PNG_POINTS: Final = 2_000
TICKS_MAX: Final = 7
TICKS_S: Final = (1, 10, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86_400)
LINE: Final = "braille"
BAND: Final = "░"


@dataclass(frozen=True, slots=True)
class IntensityCurves:
    """Mean intensities [g/kWh] of the past and of a forecast with its band, of equal steps around `times_s`; NaN where
    nothing is known."""

    times_s: Values
    past: Values
    p10: Values
    p50: Values
    p90: Values
    now_s: float

    @property
    def has_band(self) -> bool:
        """Whether the forecast is more than a line."""
        return bool((self.p90 > self.p10).any())


def sample_curves(
    readings: Iterable[CarbonReading], bands: Sequence[CarbonBand], now_s: float, points: int
) -> IntensityCurves | None:
    """Time-weighted means of readings and forecast bands over equal steps; None where there are neither.

    Of several versions of one interval the last one counts.
    """
    past = [r for _, r in sorted({reading.starts_at_s: reading for reading in readings}.items())]
    starts = [r.starts_at_s for r in past] + [b.starts_at_s for b in bands]
    ends = [r.ends_at_s for r in past] + [b.ends_at_s for b in bands]
    if not starts:
        return None
    begin_s, end_s = min(starts), max(ends)
    edges = np.linspace(begin_s, end_s if bands else max(end_s, now_s), points + 1)
    return IntensityCurves(
        (edges[:-1] + edges[1:]) / 2,
        _sample(past, [r.intensity_g_per_kwh for r in past], edges),
        _sample(bands, [b.p10_g_per_kwh for b in bands], edges),
        _sample(bands, [b.p50_g_per_kwh for b in bands], edges),
        _sample(bands, [b.p90_g_per_kwh for b in bands], edges),
        now_s,
    )


def fitting_width(out: Console) -> int:
    """Columns of a chart that fits a terminal."""
    return max(WIDTH_MIN, min(WIDTH_MAX, out.width))


def draw_intensity(curves: IntensityCurves, width: int) -> str:
    """The past, now, and a forecast in its band as lines of text, from zero; times in UTC."""
    figure, times = _terminal_figure(width), curves.times_s
    if curves.has_band:
        high, low = (_signal(figure, times, values, BAND) for values in (curves.p90, curves.p10))
        figure.draw(high.fill(low))
    for values in (curves.past, curves.p50):
        figure.draw(_line(figure, times, values))
    figure.line(curves.now_s, orientation="vertical")
    figure.ruler("x").lim(times[0], max(times[-1], curves.now_s))
    figure.ruler("x").ticks(*_time_ticks(float(times[0]), float(times[-1])))
    title = "g CO2/kWh, UTC; past │ forecast" if not np.isnan(curves.p50).all() else "g CO2/kWh, UTC"
    figure.title(title + (f", {BAND} 10-90 %" if curves.has_band else ""))
    return _text(figure)


def draw_errors(errors_by_model: Mapping[str, tuple[Sequence[float], Sequence[float]]], width: int) -> str:
    """Mean absolute errors [g/kWh] over hours ahead as lines of text, one letter a model: its first."""
    figure = _terminal_figure(width)
    for model, (hours, errors) in errors_by_model.items():
        figure.draw(figure.signal(list(hours), list(errors), marker=model[0]).label(model))
    figure.title(f"MAE in g/kWh by hours ahead: {', '.join(f'{model[0]} = {model}' for model in errors_by_model)}")
    return _text(figure)


def save_intensity_png(path: Path, title: str, curves: IntensityCurves | None) -> None:
    """The same as `draw_intensity` as a PNG file; times in UTC."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots()
    if curves is not None:
        times = date2num([_utc(at_s) for at_s in curves.times_s])
        for values, colour, label in ((curves.past, "#5b6470", "past"), (curves.p50, "#2f9e6e", "50 %")):
            if not np.isnan(values).all():
                axes.plot(times, values, linewidth=1.6, color=colour, label=label)
        if curves.has_band:
            axes.fill_between(times, curves.p10, curves.p90, color="#2f9e6e", alpha=0.2, linewidth=0, label="10-90 %")
        axes.axvline(date2num(_utc(curves.now_s)), color="grey", linewidth=0.8)
        locator = AutoDateLocator()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.legend(frameon=False)
    axes.set_title(title)
    axes.set_ylabel("g CO2 / kWh")
    axes.set_xlabel("UTC")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    figure.savefig(path, dpi=110, format="png")


def _sample(spans: Sequence[CarbonReading] | Sequence[CarbonBand], values: Sequence[float], edges: Values) -> Values:
    from carbon_feed.core.history import Integral

    starts, ends = (np.array([getattr(x, name) for x in spans], dtype=float) for name in ("starts_at_s", "ends_at_s"))
    return Integral(starts, ends, np.array(values, dtype=float)).means(edges[:-1], edges[1:], covered_min=0.0)


def _terminal_figure(width: int) -> Any:
    """An empty chart without colours or legend; its values begin at zero."""
    import plotext

    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, HEIGHT)
    figure.legend(False)
    figure.ruler("y").lim(0, None)
    return figure


def _signal(figure: Any, times_s: Values, values: Values, marker: str) -> Any:
    """The known points of a curve for plotext, whose kernel ends the process at a NaN."""
    known = np.flatnonzero(~np.isnan(values))
    return figure.signal(times_s[known].tolist(), values[known].tolist(), marker=marker)


def _line(figure: Any, times_s: Values, values: Values) -> Any:
    """A line through the known points, broken where something is unknown."""
    line = _signal(figure, times_s, values, LINE).lines(True)
    known = np.flatnonzero(~np.isnan(values))
    for index in np.flatnonzero(np.diff(known) > 1) + 1:
        line.line(int(index), False)
    return line


def _text(figure: Any) -> str:
    return "\n".join(line.rstrip() for line in figure.build().string(colorless=True).rstrip().splitlines())


def _time_ticks(begin_s: float, end_s: float) -> tuple[list[float], list[str]]:
    """Round times of UTC and their labels."""
    step_s = next((s for s in TICKS_S if (end_s - begin_s) / s <= TICKS_MAX), 0.0)
    step_s = step_s or TICKS_S[-1] * math.ceil((end_s - begin_s) / TICKS_S[-1] / TICKS_MAX)
    form = "%H:%M:%S" if step_s < 60 else "%a %H:%M" if step_s < TICKS_S[-1] else "%a %d %b"
    times = np.arange(math.ceil(begin_s / step_s) * step_s, end_s, step_s).tolist()
    return times, [_utc(at_s).strftime(form) for at_s in times]


def _utc(at_s: float) -> datetime:
    return datetime.fromtimestamp(float(at_s), UTC)
