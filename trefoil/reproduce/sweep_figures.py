"""The sweeps' tables and pictures: Figs. 14 to 16, bases, ablation, loads, and assumptions turned by 30 %."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trefoil.reproduce import plots, sweeps
from trefoil.reproduce.clover import Study, traces
from trefoil.reproduce.tables import table

LOOSE_SLO: Final = 2.0  # times BASE's p95: where levers other than the variant have room
CASES: Final = ("case", "scheme")


def sweep_figures(study: Study, folder: Path, floor: Mapping[str, float]) -> dict[str, Any]:
    """Play every sweep and draw it. `floor`: CLOVER's mean accuracy by application.

    The summary's parts `ablation`, `ablation_loose_slo`, `loads` and `turned_by_30_pct`, and its `figures`.
    """
    families = study.options.families
    figures = {
        "fig14": _fig14(study, folder),
        "fig15": _fig15(study, folder),
        "fig16": _fig16(study, folder),
        "bases": _bases(study, folder),
    }
    found: dict[str, Any] = {
        "ablation": {f: sweeps.ablation(study, f, floor[f]) for f in families},
        "ablation_loose_slo": {f: sweeps.ablation(study, f, floor[f], LOOSE_SLO) for f in families},
        "loads": {f: sweeps.loads(study, f) for f in families},
        "turned_by_30_pct": {f: sweeps.turned(study, f) for f in families},
        "figures": figures,
    }
    _ablation(found, folder)
    _loads(found["loads"], folder)
    _turned(found["turned_by_30_pct"], folder)
    return found


def _flat(found: Mapping[str, Any], names: tuple[str, str] = CASES) -> list[dict[str, Any]]:
    """Application, then two levels of names, then numbers: one row each."""
    return [
        {"family": f, names[0]: outer, names[1]: inner, **one}
        for f, by in found.items()
        for outer, ones in by.items()
        for inner, one in ones.items()
    ]


def _fig14(study: Study, folder: Path) -> Any:
    found = {f: sweeps.weights(study, f) for f in study.options.families}
    table(folder, "fig14", _flat(found, ("sweep", "value")))
    plots.weights(found, folder, "fig14")
    return found


def _fig15(study: Study, folder: Path) -> Any:
    found = {f: sweeps.fleets(study, f) for f in study.options.families}
    table(folder, "fig15", _flat(found))
    plots.grouped(
        {f: {f"{n} GPUs": {p: one["p95_over_slo"] for p, one in by.items()} for n, by in cases.items()}
         for f, cases in found.items()},
        folder, "fig15", ("p95 of what was answered, over that of BASE on ten",), log=True, line=1.0,
    )  # fmt: skip
    return found


def _fig16(study: Study, folder: Path) -> Any:
    found = traces(study)
    table(folder, "fig16", _flat(found))
    plots.grouped(
        {f: {t: {p: one["saving_pct"] for p, one in by.items() if p != "base"} for t, by in cases.items()}
         for f, cases in found.items()},
        folder, "fig16", ("carbon saving, %",),
    )  # fmt: skip
    return found


def _bases(study: Study, folder: Path) -> Any:
    found = {f: sweeps.bases(study, f) for f in study.options.families}
    table(folder, "bases", [{"family": f, "base": b, **one} for f, by in found.items() for b, one in by.items()])
    plots.bars(
        {f: {name: one["joules_over_7g_pct"] for name, one in by.items()} for f, by in found.items()},
        folder, "bases", "joules per request over 7g, %",
    )  # fmt: skip
    return found


def _ablation(found: Mapping[str, Any], folder: Path) -> None:
    by_slo = {"BASE's p95": found["ablation"], f"{LOOSE_SLO:g} x BASE's p95": found["ablation_loose_slo"]}
    table(folder, "ablation", [
        {"family": f, "slo": slo, "levers": levers, **one}
        for slo, by_family in by_slo.items() for f, by in by_family.items() for levers, one in by.items()
    ])  # fmt: skip
    plots.dots(
        {f: {levers: {slo: by[f][levers]["saving_pct"] for slo, by in by_slo.items()} for levers in ones}
         for f, ones in found["ablation"].items()},
        folder, "ablation", "saving against BASE, %",
    )  # fmt: skip


def _loads(found: Mapping[str, Any], folder: Path) -> None:
    """The picture leaves out who does not serve or misses its accuracy: its grams are no saving."""
    table(folder, "loads", _flat(found, ("load", "scheme")))
    drawn: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for family, by in found.items():
        drawn[family] = {}
        for scheme in sweeps.LOADED[1:]:
            kept = {load: ones[scheme] for load, ones in by.items() if sweeps.held(ones[scheme])}
            drawn[family][scheme] = ([float(load) for load in kept], [one["saving_pct"] for one in kept.values()])
    plots.lines(drawn, folder, "loads", "load over BASE's capacity", "saving against BASE, %", marked=True)


def _turned(found: Mapping[str, Any], folder: Path) -> None:
    runs = {f: one["runs"] for f, one in found.items()}
    table(folder, "turned", _flat(runs))
    for name, key, label in (("turned", "saving_pct", "saving against BASE, %"), ("turned_f", "objective", "f, %")):
        cases = {f: {t: {p: one[key] for p, one in by.items()} for t, by in turns.items()} for f, turns in runs.items()}
        plots.dots(cases, folder, name, label)
