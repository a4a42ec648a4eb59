"""Plots of a report over time, as inline SVG. Text and axes take the page's own colour, to read in light and dark."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from controller.planners.table import PLANNERS
from trefoil.cli.demo.results import DemoSeries
from trefoil.comparison.comparison import subject_of
from trefoil.core.parts import Kind, find
from trefoil.core.policies import policy
from trefoil.page import svg_of

INK: Final = "#010203"  # replaced by the page's text colour
RULE: Final = "#040506"  # replaced by the page's line colour
OTHER_COLOURS: Final = ("#7a5fc4", "#c2447a", "#3a8fb7")
VARIANT_COLOURS: Final = ("#f2c14e", "#7fb77e", "#3d8d9e", "#3b5b92", "#6d4c91", "#a3476b")
CAUSE_COLOURS: Final = {"carbon": "#2f9e6e", "load": "#3a8fb7", "slo": "#d64545", "objective": "#7a5fc4"}
WIDTH_IN: Final = 9.2
NUMBERED_MAX: Final = 60  # decisions; the numbers of more would lie on each other
WALL_TIME: Final = "seconds of wall time"

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": RULE,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.grid": True,
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
)


def run_colour(name: str) -> str:
    """Colour of a run, the same in every plot: its planner's if it is named like it, else one by its name."""
    return _own(name, "colour") or OTHER_COLOURS[sum(map(ord, name)) % len(OTHER_COLOURS)]


def run_label(name: str) -> str:
    """Label of a run in plots: its planner's if it is named like it, else its policy's name."""
    return _own(name, "label") or name


def _own(name: str, what: str) -> str:
    """What the planner that a policy is named like has of its own; "" for other policies."""
    return getattr(find(Kind.PLANNER, name, PLANNERS), what) if policy(name).planner == name else ""


def plot_carbon_and_load(runs: Mapping[str, DemoSeries], speedup: float) -> str:
    """Plot carbon and load, which every run met alike, with the decisions of the report's subject by cause.

    `speedup` of the carbon trace, for a second axis.
    """
    series = runs[subject_of(runs)]

    def draw(axes: Sequence[Axes]) -> None:
        carbon, load = axes
        carbon.step(series.t_s, _gaps(series.intensity_g_per_kwh), where="post", color="#5b6470", linewidth=1.8)
        carbon.set_ylabel("g CO2 / kWh")
        _from_zero(carbon)
        _mark_events(carbon, series)
        _trace_hours(carbon, speedup)
        load.plot(series.t_s, series.offered_per_s, color="#3a8fb7", linewidth=1.2)
        load.set_ylabel("offered requests / s")
        _from_zero(load)

    return _figure("carbon", 4.2, 2, draw, "Grid carbon intensity and offered load over time")


def plot_power(runs: Mapping[str, DemoSeries]) -> str:
    """Plot the power of all GPUs together [W]."""
    watts = {name: [_total(column) for column in zip(*one.power_w.values(), strict=True)] for name, one in runs.items()}
    return _by_run("power", 2.5, runs, watts, 1.6, "W, all GPUs", "Power of all GPUs over time, by run")


def plot_grams(runs: Mapping[str, DemoSeries]) -> str:
    """Plot grams since the start of each run."""
    grams = {name: one.grams for name, one in runs.items()}
    return _by_run("grams", 2.5, runs, grams, 1.8, "g CO2, cumulative", "Cumulative grams of CO2 over time, by run")


def plot_latency(runs: Mapping[str, DemoSeries], family: str, slo_ms: float, percentile: float) -> str:
    """Plot the p95 of what was due of a family in each second, against its SLO."""

    def draw_slo(axes: Axes) -> None:
        axes.axhline(slo_ms, color="#d64545", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"SLO p{percentile:g} {slo_ms:.0f} ms", (1, slo_ms), xycoords=("axes fraction", "data"),
            xytext=(0, 4), textcoords="offset points", ha="right", color="#d64545",
        )  # fmt: skip

    described = f"95th percentile of latency of {family} against the SLO, by run"
    latencies = {name: one.latency_ms_p95[family] for name, one in runs.items()}
    return _by_run(f"latency-{family}", 2.7, runs, latencies, 1.1, "p95, ms", described, draw_slo)


def _by_run(
    name: str,
    height_in: float,
    runs: Mapping[str, DemoSeries],
    values: Mapping[str, Sequence[float | None]],
    width: float,
    unit: str,
    described: str,
    draw_more: Callable[[Axes], None] = lambda _: None,
) -> str:
    """Plot one line a run, from zero."""

    def draw(axes: Sequence[Axes]) -> None:
        for run, series in runs.items():
            seen = _gaps(values[run])
            label, color = run_label(run), run_colour(run)
            axes[0].plot(series.t_s[: len(seen)], seen, label=label, color=color, linewidth=width)
        draw_more(axes[0])
        axes[0].set_ylabel(unit)
        _from_zero(axes[0])
        _legend(axes[0])

    return _figure(name, height_in, 1, draw, described)


def plot_variant_mix(runs: Mapping[str, DemoSeries], order: Sequence[str]) -> str:
    """Plot which variant answered, stacked, one panel a run; most accurate at the bottom."""
    colours = {name: VARIANT_COLOURS[i % len(VARIANT_COLOURS)] for i, name in enumerate(order)}

    def draw(axes: Sequence[Axes]) -> None:
        for panel, (name, series) in zip(axes, runs.items(), strict=True):
            stacked = [v for v in reversed(order) if any(series.answered_by_variant.get(v, ()))]
            rows = [series.answered_by_variant[variant] for variant in stacked]
            if rows:
                panel.stackplot(series.t_s, rows, labels=stacked, colors=[colours[v] for v in stacked], linewidth=0)
            panel.set_ylabel("answers / s")
            panel.set_title(run_label(name), loc="left", fontsize=10, fontweight="bold")
            _from_zero(panel)
            if name == subject_of(runs):
                _mark_events(panel, series)
            if rows:
                _legend(panel)

    return _figure("variants", 1.9 * len(runs) + 0.4, len(runs), draw, "Answers per second by variant, by run")


def _figure(
    name: str,
    height_in: float,
    rows: int,
    draw: Callable[[Sequence[Axes]], None],
    described: str,
) -> str:
    # Its own salt: ids of several figures in one page must not meet, and the same data gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        panels = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        draw(list(panels))
        panels[-1].set_xlabel(WALL_TIME)
        for panel in panels:
            panel.margins(x=0)
        svg = svg_of(figure, transparent=True)
    return _inline(svg, name, described)


def _inline(svg: str, name: str, described: str) -> str:
    body = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    body = re.sub(r'\sid="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend)[^"]*"', "", body)
    body = body.replace(INK, "currentColor").replace(RULE, "var(--rule)")
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', body).groups()  # type: ignore[union-attr]
    start = f'<svg role="img" aria-label="{described}" class="plot plot-{name}" viewBox="0 0 {width} {height}"'
    return re.sub(
        r"<svg[^>]*>",
        f'{start} xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg">',
        body,
        count=1,
    )


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, handlelength=1.2)


def _mark_events(axes: Axes, series: DemoSeries) -> None:
    seen: dict[str, Any] = {}
    for number, event in enumerate(series.events, 1):
        colour = CAUSE_COLOURS.get(event.cause, "#5b6470")
        style = ":" if event.superseded else "-"
        line = axes.axvline(event.at_s, color=colour, linewidth=1.0, alpha=0.85, linestyle=style)
        seen.setdefault(event.cause, line)
        if len(series.events) > NUMBERED_MAX:
            continue
        axes.annotate(
            str(number),
            (event.at_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 1),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=colour,
        )
    if seen and not axes.get_legend_handles_labels()[0]:
        axes.legend(
            seen.values(),
            [f"replanned: {cause}" for cause in seen],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            fontsize=9,
        )


def _trace_hours(axes: Axes, speedup: float) -> None:
    per_h = speedup / 3600
    hours = axes.secondary_xaxis("top", functions=(lambda t: np.asarray(t) * per_h, lambda h: np.asarray(h) / per_h))
    hours.set_xlabel("hour of the carbon trace", fontsize=9, labelpad=8)
    hours.tick_params(labelsize=8, pad=8)
