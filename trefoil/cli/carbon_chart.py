"""The past and a forecast of carbon intensity as a few lines of text, or as a PNG. Pure but for writing the PNG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from trefoil.core.carbon import CarbonBand, CarbonReading

PAST: Final = "•"
AHEAD: Final = "◦"
BAND: Final = "░"
NOW: Final = "│"
LEGEND: Final = f"{PAST} past   {AHEAD} forecast   {BAND} 10-90 %   {NOW} now"
HOUR_S: Final = 3600.0
TICKS_S: Final = (1, 5, 10, 30, 60, 300, 600, 1800, HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, 24 * HOUR_S)
LABEL_WIDTH: Final = 12  # columns of the chart that one label of the time axis takes, with room
TOPS: Final = (1.0, 1.2, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Span:
    """Intensities [g/kWh] of [starts_at_s, ends_at_s); all three equal where there is no band."""

    starts_at_s: float
    ends_at_s: float
    low: float
    middle: float
    high: float


Cell = tuple[float, float, float] | None  # low, middle, high of one column; None: nobody knows it


def of_readings(readings: Iterable[CarbonReading]) -> tuple[Span, ...]:
    """Readings as spans, in time order; a later version of an interval stands for it."""
    by_start = {reading.starts_at_s: reading for reading in readings}
    return tuple(
        Span(r.starts_at_s, r.ends_at_s, r.intensity_g_per_kwh, r.intensity_g_per_kwh, r.intensity_g_per_kwh)
        for _, r in sorted(by_start.items())
    )


def of_bands(bands: Iterable[CarbonBand]) -> tuple[Span, ...]:
    """A forecast's bands as spans."""
    return tuple(Span(b.starts_at_s, b.ends_at_s, b.p10_g_per_kwh, b.p50_g_per_kwh, b.p90_g_per_kwh) for b in bands)


def chart(past: Sequence[Span], ahead: Sequence[Span], now_s: float, *, width: int = 96, height: int = 12) -> list[str]:
    """Lines of text: the past as points, the forecast as points in its band, both from zero; times in UTC.

    Each column is the time-weighted mean of what it covers. Nothing known gives no line.
    """
    if not past and not ahead:
        return []
    begin_s = min(s.starts_at_s for s in (*past, *ahead))
    end_s = max(s.ends_at_s for s in (*past, *ahead))
    if past and not ahead:
        end_s = max(end_s, now_s)
    column_s = (end_s - begin_s) / width
    now_at = min(width - 1, max(-1, math.floor((now_s - begin_s) / column_s)))
    then, later = _columns(past, begin_s, column_s, width), _columns(ahead, begin_s, column_s, width)
    cells = [_shown(then[i], later[i], i <= now_at) for i in range(width)]
    top = nice_top(max(cell[2] for _, cell in cells if cell is not None))
    label = len(f"{top:g}")
    lines = []
    for row in range(height, 0, -1):
        low, high = top * (row - 1) / height, top * row / height
        text = "".join(_drawn(mark, cell, low, high, i == now_at) for i, (mark, cell) in enumerate(cells))
        lines.append(f"{_level(high, top, row, height):>{label}} ┤{text}".rstrip())
    lines.append(f"{0:>{label}} └{'─' * width}")
    lines.append(" " * (label + 2) + _axis(begin_s, column_s, width))
    return lines


def draw(
    path: Path, title: str, past: Sequence[Span], ahead: Sequence[Span], now_s: float, *, width_in: float = 9.0
) -> None:
    """The same as PNG; times in UTC."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, 3.6), layout="constrained")
    axes = figure.subplots()
    for spans, colour, label in ((past, "#5b6470", "past"), (ahead, "#2f9e6e", "50 %")):
        if spans:
            times, middle = _stairs(spans, [s.middle for s in spans])
            axes.plot(date2num(times), middle, linewidth=1.6, color=colour, label=label)
    if any(s.low < s.high for s in ahead):
        times, low = _stairs(ahead, [s.low for s in ahead])
        high = _stairs(ahead, [s.high for s in ahead])[1]
        axes.fill_between(date2num(times), low, high, color="#2f9e6e", alpha=0.2, linewidth=0, label="10-90 %")
    axes.axvline(date2num(_utc(now_s)), color="grey", linewidth=0.8)
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_title(title)
    axes.set_ylabel("g CO2 / kWh")
    axes.set_xlabel("UTC")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    if past or ahead:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110, format="png")


def nice_top(value: float) -> float:
    """A round number at or above a value."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return float(f"{next(top * scale for top in TOPS if top * scale >= value * (1 - 1e-12)):.12g}")


def _columns(spans: Sequence[Span], begin_s: float, column_s: float, width: int) -> list[Cell]:
    """The time-weighted mean of each column; one pass, since spans lie in time order."""
    sums = [[0.0, 0.0, 0.0, 0.0] for _ in range(width)]
    for span in spans:
        first = max(0, math.floor((span.starts_at_s - begin_s) / column_s))
        last = min(width - 1, math.ceil((span.ends_at_s - begin_s) / column_s) - 1)
        for at in range(first, last + 1):
            left_s = begin_s + at * column_s
            held_s = min(span.ends_at_s, left_s + column_s) - max(span.starts_at_s, left_s)
            if held_s > 0:
                cell = sums[at]
                cell[0] += held_s
                cell[1] += held_s * span.low
                cell[2] += held_s * span.middle
                cell[3] += held_s * span.high
    return [(low / held, middle / held, high / held) if held else None for held, low, middle, high in sums]


def _shown(then: Cell, later: Cell, is_past: bool) -> tuple[str, Cell]:
    """Up to now what came, from then on what is forecast; where that is unknown, the other."""
    if (is_past and then is not None) or later is None:
        return PAST, then
    return AHEAD, later


def _drawn(mark: str, cell: Cell, low: float, high: float, is_now: bool) -> str:
    if cell is not None:
        if low < cell[1] <= high or (cell[1] <= 0 and low == 0):
            return mark
        if cell[0] < high and cell[2] > low and cell[0] < cell[2]:
            return BAND
    return NOW if is_now else " "


def _level(high: float, top: float, row: int, height: int) -> str:
    """A label at every third row, counted from the top."""
    return f"{high:g}" if (height - row) % 3 == 0 and len(f"{high:g}") <= len(f"{top:g}") else ""


def _axis(begin_s: float, column_s: float, width: int) -> str:
    """Labels at round times; each begins at its own column."""
    tick_s = next((t for t in TICKS_S if t >= LABEL_WIDTH * column_s), 24 * HOUR_S)
    tick_s *= max(1, math.ceil(LABEL_WIDTH * column_s / tick_s))
    form = "%H:%M:%S" if tick_s < 60 else "%a %H:%M" if tick_s < 24 * HOUR_S else "%a %d %b"
    line = [" "] * (width + LABEL_WIDTH)
    at_s = math.ceil(begin_s / tick_s) * tick_s
    while (column := round((at_s - begin_s) / column_s)) < width:
        text = f"╵{_utc(at_s).strftime(form)}"
        line[column : column + len(text)] = text
        at_s += tick_s
    return "".join(line).rstrip()


def _stairs(spans: Sequence[Span], values: Sequence[float]) -> tuple[list[datetime], list[float]]:
    """Each value from its start to its end; NaN across a gap."""
    times: list[datetime] = []
    heights: list[float] = []
    for span, value in zip(spans, values, strict=True):
        start = _utc(span.starts_at_s)
        if times and start > times[-1]:
            times.append(times[-1])
            heights.append(math.nan)
        times += [start, _utc(span.ends_at_s)]
        heights += [value, value]
    return times, heights


def _utc(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)
