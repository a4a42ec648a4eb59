"""Pictures and tables of figures, of the same numbers that the JSON holds."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trefoil.reproduce.scores import ScoreCurve

WIDTH: Final = 12.0
HEIGHT: Final = 3.8
GREY: Final = "0.25"
STYLE: Final[Mapping[str, Any]] = {  # said here: reports in the same process have a separate style
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 7,
}
MARKERS: Final = "osD^vP*X<>h"  # eleven schemes stand in one picture, and colours repeat after ten
WITHIN: Final = "tab:green"
BROKE: Final = "tab:red"


def write_csv(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write numbers of a figure as CSV, with the columns of the first row; all are simulated."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*(rows[0] if rows else ["empty"]), "basis"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "basis": "simulated"} for row in rows)


def save(figure: Figure, folder: Path, name: str) -> None:
    """Save a figure as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _axes(columns: int, rows: int = 1) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    with matplotlib.rc_context(dict(STYLE)):
        figure, found = pyplot.subplots(rows, columns, figsize=(WIDTH, HEIGHT * rows), squeeze=False)
    return figure, [list(row) for row in found]


def _below(figure: Figure, axis: Axes) -> None:
    """One legend for all panels, under them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=6, fontsize=7, frameon=False)


def scatter(rows: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path, name: str) -> None:
    """Fig. 2: carbon saving against relative accuracy, one panel per application."""
    figure, (axes,) = _axes(len(rows))
    for axis, (family, points) in zip(axes, rows.items(), strict=True):
        axis.scatter([p["carbon_saving_pct"] for p in points], [p["relative_accuracy"] for p in points], s=14)
        axis.scatter([0], [1], marker="*", s=120, color="tab:orange")
        axis.set(title=family, xlabel="carbon saving, %", ylabel="accuracy over the best")
    save(figure, folder, name)


def bars(groups: Mapping[str, Mapping[str, float]], folder: Path, name: str, label: str) -> None:
    """Plot one group of bars per application."""
    figure, (axes,) = _axes(len(groups))
    for axis, (title, values) in zip(axes, groups.items(), strict=True):
        axis.bar(range(len(values)), list(values.values()), color="tab:green")
        axis.set_xticks(range(len(values)), list(values), rotation=40, ha="right", fontsize=7)
        axis.set(title=title, ylabel=label)
    save(figure, folder, name)


def grouped(panels: Mapping[str, Mapping[str, Mapping[str, float]]], folder: Path, name: str, labels: Sequence[str],
            log: bool = False, line: float | None = None) -> None:  # fmt: skip
    """Bars of every scheme side by side, group by group; every bar with its number.

    labels   of the panels' axes, or one for all
    line     a level to be compared with
    """
    figure, (axes,) = _axes(len(panels))
    for i, (axis, (title, groups)) in enumerate(zip(axes, panels.items(), strict=True)):
        schemes = list(dict.fromkeys(s for by in groups.values() for s in by))
        width = 0.84 / len(schemes)
        for n, scheme in enumerate(schemes):
            at = [g + (n + 0.5) * width - 0.42 for g, by in enumerate(groups.values()) if scheme in by]
            drawn = axis.bar(at, [by[scheme] for by in groups.values() if scheme in by], width * 0.94, label=scheme)
            axis.bar_label(drawn, fmt="%.3g", fontsize=5 if len(groups) * len(schemes) > 12 else 6)
        axis.set_xticks(range(len(groups)), list(groups), fontsize=7)
        axis.set(title=title, ylabel=labels[min(i, len(labels) - 1)], yscale="log" if log else "linear")
        if line is not None:
            axis.axhline(line, color="tab:red", linewidth=0.9, linestyle="--")
    _below(figure, axes[0])
    save(figure, folder, name)


def dots(panels: Mapping[str, Mapping[str, Mapping[str, float]]], folder: Path, name: str, label: str) -> None:
    """Plot one line per case with a mark of every scheme: where marks change places, a ranking does."""
    figure, (axes,) = _axes(len(panels))
    for n, (axis, (title, cases)) in enumerate(zip(axes, panels.items(), strict=True)):
        schemes = list(dict.fromkeys(s for by in cases.values() for s in by))
        for scheme, marker in zip(schemes, MARKERS, strict=False):
            rows = [(by[scheme], row) for row, by in enumerate(cases.values()) if scheme in by]
            axis.scatter([x for x, _ in rows], [y for _, y in rows], marker=marker, s=26, label=scheme)
        axis.set_yticks(range(len(cases)), list(cases) if n == 0 else [""] * len(cases), fontsize=7)
        axis.invert_yaxis()
        axis.set(title=title, xlabel=label)
    _below(figure, axes[0])
    save(figure, folder, name)


def lines(panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], folder: Path, name: str,
          x_label: str, y_label: str, marked: bool = False) -> None:  # fmt: skip
    """Lines by name in one panel per application; `marked`: few points, each of which was run."""
    figure, (axes,) = _axes(len(panels))
    for axis, (title, by_name) in zip(axes, panels.items(), strict=True):
        for label, (x, y) in by_name.items():
            axis.plot(x, y, label=label, linewidth=1.1, marker="o" if marked else "", markersize=3)
        axis.set(title=title, xlabel=x_label, ylabel=y_label)
    _below(figure, axes[0])
    save(figure, folder, name)


def schemes(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: Path, name: str) -> None:
    """Fig. 10: carbon saved against accuracy lost; every seed is a mark."""
    figure, (axes,) = _axes(len(rows))
    for axis, (family, by_scheme) in zip(axes, rows.items(), strict=True):
        base = by_scheme["base"]["grams_per_request"]["all"]
        for (label, row), marker in zip(by_scheme.items(), MARKERS, strict=False):
            saved = [100 * (1 - g / b) for g, b in zip(row["grams_per_request"]["all"], base, strict=True)]
            lost = row["accuracy_loss_pct"]["all"]
            axis.scatter(saved, [-x for x in lost], s=26, label=label, marker=marker, alpha=0.75, linewidths=0)
        axis.set(title=family, xlabel="carbon saving, %", ylabel="accuracy change, %")
    _below(figure, axes[0])
    save(figure, folder, name)


def objective(curves: Mapping[str, Mapping[str, ScoreCurve]], folder: Path, name: str) -> None:
    """Fig. 11: f over time."""
    panels = {
        family: {label: ([at / 3600 for at in c.at_s], c.objective) for label, c in by.items() if label != "co2opt"}
        for family, by in curves.items()
    }
    lines(panels, folder, name, "hour", "objective f, %")


def windows(found: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: Path, name: str) -> None:
    """Fig. 12: (a) time in windows of eight hours, scheme beside scheme; (b) candidates within the SLO and outside."""
    figure, (upper, lower) = _axes(len(found), 2)
    for above, below, (family, by) in zip(upper, lower, found.items(), strict=True):
        width = 0.8 / len(by)
        for i, (scheme, one) in enumerate(by.items()):
            shares = one["time_pct_by_window"]
            above.bar([n + (i + 0.5) * width - 0.4 for n in range(1, len(shares) + 1)], shares, width, label=scheme)
        above.xaxis.set_major_locator(MaxNLocator(integer=True))
        above.set(title=family, xlabel="window of 8 h", ylabel="time in optimisation, %")
        above.legend(fontsize=7, frameon=False)
        inside = [one["evaluations_within_slo"] for one in by.values()]
        outside = [one["evaluations"] - one["evaluations_within_slo"] for one in by.values()]
        below.bar(list(by), inside, color=WITHIN, width=0.5, label="within the SLO")
        below.bar(list(by), outside, bottom=inside, color=BROKE, width=0.5, label="outside, or broken off")
        below.set(ylabel="candidates in a run")
        below.legend(fontsize=7, frameon=False)
    save(figure, folder, name)


def evaluated(rounds: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path, name: str) -> None:
    """Fig. 13: what three rounds looked at, numbered in order; crosses broke the SLO."""
    figure, (axes,) = _axes(max(1, len(rounds)))
    for axis, (title, points) in zip(axes, rounds.items(), strict=False):
        seen = [(n, p) for n, p in enumerate(points, 1) if p["saving_pct"] is not None]
        for n, p in seen:
            axis.scatter([p["saving_pct"]], [p["accuracy_loss_pct"]], marker="o" if p["within_slo"] else "x",
                         color=WITHIN if p["within_slo"] else BROKE)  # fmt: skip
            axis.annotate(str(n), (p["saving_pct"], p["accuracy_loss_pct"]), xytext=(4, 3), textcoords="offset points",
                          fontsize=7)  # fmt: skip
        away = len(points) - len(seen)
        axis.set(title=f"{title}, {away} broken off" if away else title)
        axis.set(xlabel="carbon saving against C_base, %", ylabel="accuracy lost, %")
    save(figure, folder, name)


def weights(found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]], folder: Path, name: str) -> None:
    """Fig. 14: (a) what each lambda loses and saves; (b) what may be lost, and what is saved for it."""
    figure, (upper, lower) = _axes(len(found), 2)
    for above, below, (family, by) in zip(upper, lower, found.items(), strict=True):
        points = by["lambda"]
        above.plot([p["accuracy_loss_pct"] for p in points.values()], [p["saving_pct"] for p in points.values()], "o-",
                   linewidth=0.8, markersize=4)  # fmt: skip
        for weight, p in points.items():
            above.annotate(weight, (p["accuracy_loss_pct"], p["saving_pct"]), xytext=(4, 4), textcoords="offset points",
                           fontsize=7)  # fmt: skip
        above.set(title=f"{family}: clover, by lambda", xlabel="accuracy lost, %", ylabel="carbon saving, %")
        for label, sweep in (("clover", "threshold_pct"), ("exact", "threshold_pct_exact")):
            rows = by[sweep]
            below.plot([float(v) for v in rows], [p["saving_pct"] for p in rows.values()], "o-", linewidth=0.8,
                       markersize=4, label=label)  # fmt: skip
        below.set(xlabel="accuracy that may be lost, %", ylabel="carbon saving, %")
        below.legend(fontsize=7, frameon=False)
    save(figure, folder, name)
