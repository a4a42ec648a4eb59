"""One picture per figure, drawn from the same numbers that the JSON holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trefoil.reproduce.judge import Curve

WIDTH: Final = 10.0
HEIGHT: Final = 3.6
WINDOW_S: Final = 8 * 3600.0


def save(figure: Figure, folder: Path, name: str) -> None:
    """As PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=110)
    pyplot.close(figure)


def _axes(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure, found = pyplot.subplots(1, count, figsize=(WIDTH, HEIGHT), squeeze=False)
    return figure, list(found[0])


def scatter(rows: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path, name: str) -> None:
    """Fig. 2: carbon saving against relative accuracy, one panel per application."""
    figure, axes = _axes(len(rows))
    for axis, (family, points) in zip(axes, rows.items(), strict=True):
        axis.scatter([p["carbon_saving_pct"] for p in points], [p["relative_accuracy"] for p in points], s=14)
        axis.scatter([0], [1], marker="*", s=120, color="tab:orange")
        axis.set(title=family, xlabel="carbon saving, %", ylabel="accuracy over the best")
    save(figure, folder, name)


def bars(groups: Mapping[str, Mapping[str, float]], folder: Path, name: str, label: str) -> None:
    """One group of bars per application."""
    figure, axes = _axes(len(groups))
    for axis, (title, values) in zip(axes, groups.items(), strict=True):
        axis.bar(range(len(values)), list(values.values()), color="tab:green")
        axis.set_xticks(range(len(values)), list(values), rotation=40, ha="right", fontsize=7)
        axis.set(title=title, ylabel=label)
    save(figure, folder, name)


def lines(panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], folder: Path, name: str,
          x_label: str, y_label: str) -> None:  # fmt: skip
    """Lines by name in one panel per application."""
    figure, axes = _axes(len(panels))
    for axis, (title, by_name) in zip(axes, panels.items(), strict=True):
        for label, (x, y) in by_name.items():
            axis.plot(x, y, label=label, linewidth=1.1)
        axis.set(title=title, xlabel=x_label, ylabel=y_label)
        axis.legend(fontsize=6)
    save(figure, folder, name)


def schemes(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: Path, name: str) -> None:
    """Fig. 10: carbon saved against accuracy lost; whiskers: all seeds."""
    figure, axes = _axes(len(rows))
    for axis, (family, by_scheme) in zip(axes, rows.items(), strict=True):
        base = by_scheme["base"]["grams_per_request"]["all"]
        for label, row in by_scheme.items():
            saved = [100 * (1 - g / b) for g, b in zip(row["grams_per_request"]["all"], base, strict=True)]
            lost = row["accuracy_loss_pct"]["all"]
            axis.scatter(saved, [-x for x in lost], s=16, label=label)
        axis.set(title=family, xlabel="carbon saving, %", ylabel="accuracy change, %")
        axis.legend(fontsize=5)
    save(figure, folder, name)


def objective(curves: Mapping[str, Mapping[str, Curve]], folder: Path, name: str) -> None:
    """Fig. 11: f over time."""
    panels = {
        family: {label: ([at / 3600 for at in c.at_s], c.objective) for label, c in by.items() if label != "co2opt"}
        for family, by in curves.items()
    }
    lines(panels, folder, name, "hour", "objective f, %")


def windows(shares: Mapping[str, Mapping[str, Sequence[float]]], folder: Path, name: str, label: str) -> None:
    """Fig. 12: bars in six windows of eight hours, scheme beside scheme."""
    figure, axes = _axes(len(shares))
    for axis, (family, by) in zip(axes, shares.items(), strict=True):
        width = 0.8 / len(by)
        for i, (scheme, values) in enumerate(by.items()):
            axis.bar([n + i * width for n in range(len(values))], values, width, label=scheme)
        axis.set(title=family, xlabel="window of 8 h", ylabel=label)
        axis.legend(fontsize=6)
    save(figure, folder, name)


def evaluated(rounds: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path, name: str) -> None:
    """Fig. 13: what three rounds looked at, numbered in order; crosses broke the SLO."""
    figure, axes = _axes(max(1, len(rounds)))
    for axis, (title, points) in zip(axes, rounds.items(), strict=False):
        for n, p in enumerate(points, 1):
            axis.scatter([p["saving_pct"]], [p["accuracy_loss_pct"]], marker="o" if p["within_slo"] else "x",
                         color="tab:green" if p["within_slo"] else "tab:red")  # fmt: skip
            axis.annotate(str(n), (p["saving_pct"], p["accuracy_loss_pct"]), fontsize=7)
        axis.set(title=title, xlabel="carbon saving, %", ylabel="accuracy lost, %")
    save(figure, folder, name)
