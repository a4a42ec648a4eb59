"""CLOVER's figures from the runs: numbers first (JSON, CSV), pictures of the same numbers beside them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from carbon_feed.providers.trace import load_trace
from carbon_feed.settings import TraceSettings
from trefoil.core.carbon import Factors
from trefoil.core.units import HOUR_S, grams
from trefoil.reproduce import plots
from trefoil.reproduce.clover import opportunities, sweeps
from trefoil.reproduce.clover.printed import printed
from trefoil.reproduce.clover.study import (
    SEARCHES,
    CloverOptions,
    Study,
    at_code_lambda,
    curves,
    headline,
    paper_method,
    schemes_of,
    traces,
)
from trefoil.reproduce.experiment import BASE_INTENSITY, data_folder
from trefoil.reproduce.plots import write_csv
from trefoil.reproduce.runs import PUE
from trefoil.reproduce.scores import evaluations_of, over_seeds, saving_pct

WINDOW_H: Final = 8.0
FIG13_FAMILY: Final = "efficientnet"  # the paper's image classification
FORTNIGHT_H: Final = 14 * 24
FIG4: Final = {  # CLOVER's fortnights themselves are not public: the same grids and months of the nearest public year
    "CISO, March 2022": ("em_US-CAL-CISO_2022_hourly.csv", 59 * 24),
    "CISO, September 2022": ("em_US-CAL-CISO_2022_hourly.csv", 243 * 24),
    "GB, March 2021": ("em_GB_2021_hourly.csv", 59 * 24),
    "GB, September 2021": ("em_GB_2021_hourly.csv", 243 * 24),
}
LOOSE_SLO: Final = 2.0  # times BASE's p95: where levers other than the variant have room
CASES: Final = ("case", "scheme")
LCA: Final = "Carbon Intensity gCO₂eq/kWh (LCA)"


def all_figures(options: CloverOptions, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play everything; figures of the whole paper as CSV and PNG in `folder`, kept runs below it.

    Of policies of a user's own: their rows alone. Of another fleet, load or families: what needs no A100 of the paper.
    """
    study = Study(options, folder, say)
    study.run_references()
    equal, of = headline(study), options.experiment
    figures = _fig09_to_11(study, equal, folder)
    found: dict[str, Any] = {"experiment": asdict(of), "equal": equal, "figures": figures}
    if of.policies:
        return found
    found |= {"at_code_lambda": at_code_lambda(study), "paper_method": _paper_method(study, equal, folder)}
    figures |= {"fig12": _fig12(study, folder), "fig13": _fig13(study, folder)}
    if not of.as_printed:
        return found
    figures |= {"fig02": _fig02(study, folder), "fig03": _fig03(study, folder), "fig04": _fig04(folder)}
    if options.sweeps:
        floor = {f: equal[f]["rows"]["clover"]["accuracy"]["mean"] for f in study.families}
        swept = sweep_figures(study, folder, floor)
        figures |= swept.pop("figures")
        found |= swept
    return found | {"printed": printed(study, found)}


def _fig02(study: Study, folder: Path) -> Any:
    rows = {f: opportunities.mixes(f) for f in study.families}
    write_csv(folder, "fig02", [{"family": f, **row} for f, found in rows.items() for row in found])
    plots.scatter(rows, folder, "fig02")
    return rows


def _fig03(study: Study, folder: Path) -> Any:
    rows = {f: opportunities.partitions(f) for f in study.families}
    write_csv(folder, "fig03", [{"family": f, **row} for f, found in rows.items() for row in found])
    shown = {
        "saving at one load, %": "carbon_saving_pct",
        "p95 at one load": "p95_over_c1",
        "saving kept busy, %": "busy_carbon_saving_pct",
        "p95 kept busy": "busy_p95_over_c1",
    }
    plots.grouped(
        {title: {f: {r["layout"]: r[key] for r in found} for f, found in rows.items()} for title, key in shown.items()},
        folder, "fig03", ("%", "over C1", "%", "over C1"),
    )  # fmt: skip
    return rows


def _paper_method(study: Study, equal: Mapping[str, Any], folder: Path) -> Any:
    """BASE at a fifth of the load, beside the same runs at equal load."""
    found = paper_method(study)
    ours = "saving_of_clover_against_base_pct"
    rows = [
        {
            "family": f,
            "seed": seed,
            "equal_load_grams_saving_pct": equal[f]["claims"][ours][n],
            "papers_method_saving_pct": one["saving_pct"][n],
            "of_which_base_alone_by_its_load_pct": one["of_which_base_alone_by_its_load_pct"][n],
        }
        for f, one in found.items()
        for n, seed in enumerate(study.options.seeds)
    ]
    write_csv(folder, "paper_method", rows)
    names = list(rows[0])[2:]
    plots.grouped(
        {"CLOVER against BASE, joules (grams at equal load)":
         {f: {name: over_seeds([r[name] for r in rows if r["family"] == f]).mean for name in names} for f in found}},
        folder, "paper_method", ("saving, %",),
    )  # fmt: skip
    return found


def _fig04(folder: Path) -> Any:
    data = data_folder()
    if data is None:
        return {"note": "the real traces are not here (TREFOIL_DATA); the runs used the synthetic curve"}
    found: dict[str, Any] = {}
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    rows = []
    for name, (file, first) in FIG4.items():
        path = data / "carbon" / file
        trace = load_trace(path, TraceSettings(path=path, value_column=LCA), Factors.LIFECYCLE)
        values = [float(v) for v in trace.values_g_per_kwh[first : first + FORTNIGHT_H]]
        found[name] = {
            "mean": sum(values) / len(values),
            "low": min(values),
            "high": max(values),
            "largest_change_in_12_h": max(abs(a - b) for i, a in enumerate(values) for b in values[i : i + 13]),
        }
        lines[name] = ([h / 24 for h in range(len(values))], values)
        rows += [{"trace": name, "hour": h, "g_per_kwh": v} for h, v in enumerate(values)]
    write_csv(folder, "fig04", rows)
    plots.lines({"intensity": lines}, folder, "fig04", "day", "g/kWh")
    return found


def _fig09_to_11(study: Study, equal: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    nine, ten = [], []
    for family in study.families:
        rows = equal[family]["rows"]
        base = rows["base"]["grams_per_request"]["all"]
        for label, row in rows.items():
            mine = row["grams_per_request"]["all"]
            saved = over_seeds([saving_pct(m, b) for m, b in zip(mine, base, strict=True)])
            line = {
                "family": family, "scheme": label, "saving_pct": saved.mean, "saving_low": saved.low,
                "saving_high": saved.high, "accuracy_loss_pct": row["accuracy_loss_pct"]["mean"],
                "p95_over_slo": row["p95_over_slo"]["mean"], "slo_attainment": row["slo_attainment"]["mean"],
                "objective": row["objective"]["mean"], "objective_after_8h": row["objective_after_8h"]["mean"],
                "evaluations": row["evaluations"]["mean"],
            }  # fmt: skip
            ten.append(line)
            if label in ("base", "clover"):
                nine.append(line)
    write_csv(folder, "fig09", nine)
    write_csv(folder, "fig10", ten)
    shown: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "accuracy over BASE, %": lambda r: 100 - r["accuracy_loss_pct"],
        "carbon over BASE, %": lambda r: 100 - r["saving_pct"],
        "p95 over the SLO": lambda r: r["p95_over_slo"],
    }
    plots.grouped(
        {title: {f: {r["scheme"]: pick(r) for r in nine if r["family"] == f} for f in study.families}
         for title, pick in shown.items()},
        folder, "fig09", tuple(shown),
    )  # fmt: skip
    plots.schemes({f: equal[f]["rows"] for f in study.families}, folder, "fig10")
    seed = study.options.seeds[0]
    over_time = {f: curves(study, f, seed) for f in study.families}
    plots.objective(over_time, folder, "fig11")
    lines = [
        {"family": f, "scheme": label, "at_s": at, "intensity": ci, "dC_pct": c, "dA_pct": a, "f_pct": value}
        for f, by in over_time.items()
        for label, one in by.items()
        for at, ci, c, a, value in zip(
            one.at_s, one.intensity, one.carbon, one.accuracy, one.objective, strict=True)
    ]  # fmt: skip
    write_csv(folder, "fig11", lines)
    return {"fig09": nine, "fig10": ten, "fig11": {"seed": seed, "see": "fig11.csv"}}


def _fig12(study: Study, folder: Path) -> Any:
    """Time spent optimising, in windows of eight hours (the last one may be shorter), and candidates within the SLO."""
    found: dict[str, Any] = {}
    hours, speedup = study.options.hours, study.options.speedup
    widths_s = [min(WINDOW_H, hours - n * WINDOW_H) * HOUR_S / speedup for n in range(math.ceil(hours / WINDOW_H))]
    for family in study.families:
        found[family] = {}
        for scheme in SEARCHES:
            runs = [study.runs[s] for s in schemes_of(study, family)[scheme]]
            time_pct, inside, count = [0.0] * len(widths_s), 0, 0
            for run in runs:
                for e in evaluations_of(run, study.reference(family, run.spec.seed).slo_ms):
                    at = min(len(widths_s) - 1, max(0, int(e["at_s"] * speedup // (WINDOW_H * HOUR_S))))
                    time_pct[at] += 100 * e["spent_s"] / widths_s[at] / len(runs)
                    inside, count = inside + e["within_slo"], count + 1
            spent = [run["exploration_s"] for run in runs]
            found[family][scheme] = {
                "time_pct_by_window": time_pct,
                "time_pct": over_seeds([100 * s / runs[0].spec.span_s for s in spent]).mean,
                "evaluations": count / len(runs),
                "evaluations_within_slo": inside / len(runs),
                "within_slo_pct": 100 * inside / count if count else None,
            }
    plots.windows(found, folder, "fig12")
    write_csv(folder, "fig12", [
        {"family": f, "scheme": s, "window": n, "time_pct": t}
        for f, by in found.items() for s, one in by.items() for n, t in enumerate(one["time_pct_by_window"], 1)
    ])  # fmt: skip
    write_csv(folder, "fig12b", [
        {"family": f, "scheme": s, **{name: value for name, value in one.items() if name != "time_pct_by_window"}}
        for f, by in found.items() for s, one in by.items()
    ])  # fmt: skip
    return found


def _fig13(study: Study, folder: Path) -> Any:
    """What the first, the second and the last search looked at, those that measured nothing left out.

    Joules are priced at the intensity of the moment, C_base is BASE at 250 g/kWh: a clean hour saves by itself.
    """
    family = FIG13_FAMILY if FIG13_FAMILY in study.families else study.families[-1]
    seed = study.options.seeds[0]
    run = study.runs[next(s for s in schemes_of(study, family)["clover"] if s.seed == seed)]
    reference = study.reference(family, seed)
    base_g = grams(reference.joules, BASE_INTENSITY, PUE)
    rounds: dict[int, list[dict[str, Any]]] = {}
    for e in evaluations_of(run, reference.slo_ms):
        measured = e["joules"] is not None and e["accuracy"] is not None
        point = {
            "saving_pct": 100 * (1 - grams(e["joules"], e["intensity"], PUE) / base_g) if measured else None,
            "accuracy_loss_pct": 100 * (1 - e["accuracy"] / reference.accuracy) if measured else None,
            **e,
        }
        rounds.setdefault(e["round"], []).append(point)
    searches = list(rounds.values())
    chosen = dict.fromkeys([*range(min(2, len(searches))), max(0, len(searches) - 1)]) if searches else {}
    shown = {f"{family}: search {n + 1} of {len(searches)}": searches[n] for n in chosen}
    plots.evaluated(shown, folder, "fig13")
    write_csv(folder, "fig13", [
        {"search": name, "number": n, **p} for name, points in shown.items() for n, p in enumerate(points, 1)
    ])  # fmt: skip
    return shown


def sweep_figures(study: Study, folder: Path, floor: Mapping[str, float]) -> dict[str, Any]:
    """Figures of the sweeps, each run and drawn. `floor`: CLOVER's mean accuracy by application.

    The summary's parts `ablation`, `ablation_loose_slo`, `loads` and `turned_by_30_pct`, and its `figures`.
    """
    families = study.families
    figures = {
        "fig14": _fig14(study, folder),
        "fig15": _fig15(study, folder),
        "fig16": _fig16(study, folder),
        "bases": _bases(study, folder),
    }
    found: dict[str, Any] = {
        "ablation": {f: sweeps.ablation(study, f, floor[f]) for f in families},
        "ablation_loose_slo": {f: sweeps.ablation(study, f, floor[f], LOOSE_SLO) for f in families},
        "loads": {f: sweeps.load_sweep(study, f) for f in families},
        "turned_by_30_pct": {f: sweeps.sensitivity(study, f) for f in families},
        "figures": figures,
    }
    _ablation(found, folder)
    _loads(found["loads"], folder)
    _sensitivity(found["turned_by_30_pct"], folder)
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
    found = {f: sweeps.lambda_sweep(study, f) for f in study.families}
    write_csv(folder, "fig14", _flat(found, ("sweep", "value")))
    plots.weights(found, folder, "fig14")
    return found


def _fig15(study: Study, folder: Path) -> Any:
    found = {f: sweeps.fleet_sweep(study, f) for f in study.families}
    write_csv(folder, "fig15", _flat(found))
    plots.grouped(
        {f: {f"GPUs: {n}": {p: one["p95_over_slo"] for p, one in by.items()} for n, by in cases.items()}
         for f, cases in found.items()},
        folder, "fig15", ("p95 of what was answered, over that of BASE on ten",), log=True, line=1.0,
    )  # fmt: skip
    return found


def _fig16(study: Study, folder: Path) -> Any:
    found = traces(study)
    write_csv(folder, "fig16", _flat(found))
    plots.grouped(
        {f: {t: {p: one["saving_pct"] for p, one in by.items() if p != "base"} for t, by in cases.items()}
         for f, cases in found.items()},
        folder, "fig16", ("carbon saving, %",),
    )  # fmt: skip
    return found


def _bases(study: Study, folder: Path) -> Any:
    found = {f: sweeps.base_variants(study, f) for f in study.families}
    write_csv(folder, "bases", [{"family": f, "base": b, **one} for f, by in found.items() for b, one in by.items()])
    plots.bars(
        {f: {name: one["joules_over_7g_pct"] for name, one in by.items()} for f, by in found.items()},
        folder, "bases", "joules per request over 7g, %",
    )  # fmt: skip
    return found


def _ablation(found: Mapping[str, Any], folder: Path) -> None:
    by_slo = {"BASE's p95": found["ablation"], f"{LOOSE_SLO:g} x BASE's p95": found["ablation_loose_slo"]}
    write_csv(folder, "ablation", [
        {"family": f, "slo": slo, "levers": levers, **one}
        for slo, by_family in by_slo.items() for f, by in by_family.items() for levers, one in by.items()
    ])  # fmt: skip
    plots.dots(
        {f: {levers: {slo: by[f][levers]["saving_pct"] for slo, by in by_slo.items()} for levers in ones}
         for f, ones in found["ablation"].items()},
        folder, "ablation", "saving against BASE, %",
    )  # fmt: skip


def _loads(found: Mapping[str, Any], folder: Path) -> None:
    """The picture leaves out who does not serve or misses its accuracy: its grams are not a saving."""
    write_csv(folder, "loads", _flat(found, ("load", "scheme")))
    drawn: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for family, by in found.items():
        drawn[family] = {}
        for scheme in sweeps.LOADED[1:]:
            kept = {load: ones[scheme] for load, ones in by.items() if sweeps.meets_accuracy(ones[scheme])}
            drawn[family][scheme] = ([float(load) for load in kept], [one["saving_pct"] for one in kept.values()])
    plots.lines(drawn, folder, "loads", "load over BASE's capacity", "saving against BASE, %", marked=True)


def _sensitivity(found: Mapping[str, Any], folder: Path) -> None:
    runs = {f: one["runs"] for f, one in found.items()}
    write_csv(folder, "turned", _flat(runs))
    for name, key, label in (("turned", "saving_pct", "saving against BASE, %"), ("turned_f", "objective", "f, %")):
        cases = {f: {t: {p: one[key] for p, one in by.items()} for t, by in turns.items()} for f, turns in runs.items()}
        plots.dots(cases, folder, name, label)
