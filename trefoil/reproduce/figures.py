"""CLOVER's figures from the runs: numbers first (JSON, CSV), pictures of the same numbers beside them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from carbon_feed.providers.trace import load_trace
from carbon_feed.settings import TraceSettings
from trefoil.core.carbon import Factors
from trefoil.core.units import grams
from trefoil.reproduce import plots, sweeps
from trefoil.reproduce.clover import Study, curves, headline, paper_method, schemes_of, traces
from trefoil.reproduce.judge import explored, over, saving_pct
from trefoil.reproduce.runs import PUE
from trefoil.reproduce.setting import BASE_INTENSITY, data_folder

WINDOW_S: Final = 8 * 3600.0
FORTNIGHT_H: Final = 14 * 24
FIG4: Final = {  # CLOVER's fortnights themselves are not public: the same grids and months of the nearest public year
    "CISO, March 2022": ("em_US-CAL-CISO_2022_hourly.csv", 59 * 24),
    "CISO, September 2022": ("em_US-CAL-CISO_2022_hourly.csv", 243 * 24),
    "GB, March 2021": ("em_GB_2021_hourly.csv", 59 * 24),
    "GB, September 2021": ("em_GB_2021_hourly.csv", 243 * 24),
}
LCA: Final = "Carbon Intensity gCO₂eq/kWh (LCA)"


def all_figures(study: Study, folder: Path) -> dict[str, Any]:
    """Play everything and draw it; the summary."""
    study.refer()
    equal = headline(study)
    found: dict[str, Any] = {"equal": equal, "paper_method": paper_method(study)}
    figures: dict[str, Any] = {"fig02": _fig02(study, folder), "fig03": _fig03(study, folder)}
    figures["fig04"] = _fig04(folder)
    figures |= _fig09_to_11(study, equal, folder)
    figures |= {"fig12": _fig12(study, folder), "fig13": _fig13(study, folder)}
    if study.options.sweeps:
        floor = {f: equal[f]["rows"]["clover"]["accuracy"]["mean"] for f in study.options.families}
        figures |= _sweeps(study, folder)
        found["ablation"] = {f: sweeps.ablation(study, f, floor[f]) for f in study.options.families}
        found["loads"] = {f: sweeps.loads(study, f, floor[f]) for f in study.options.families}
        found["turned_by_30_pct"] = {f: sweeps.turned(study, f, floor[f]) for f in study.options.families}
        plots.bars(
            {f: {k: v["saving_pct"] for k, v in found["ablation"][f].items()} for f in study.options.families},
            folder, "ablation", "saving against BASE, %",
        )  # fmt: skip
    return found | {"figures": figures}


def table(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The same numbers as CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["empty"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _fig02(study: Study, folder: Path) -> Any:
    rows = {f: sweeps.mixes(f) for f in study.options.families}
    table(folder, "fig02", [{"family": f, **row} for f, found in rows.items() for row in found])
    plots.scatter(rows, folder, "fig02")
    return rows


def _fig03(study: Study, folder: Path) -> Any:
    rows = {f: sweeps.partitions(f) for f in study.options.families}
    table(folder, "fig03", [{"family": f, **row} for f, found in rows.items() for row in found])
    plots.bars(
        {f: {r["layout"]: r["carbon_saving_pct"] for r in found} for f, found in rows.items()},
        folder, "fig03", "carbon saving, %",
    )  # fmt: skip
    return rows


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
    table(folder, "fig04", rows)
    plots.lines({"intensity": lines}, folder, "fig04", "day", "g/kWh")
    return found


def _fig09_to_11(study: Study, equal: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    nine, ten = [], []
    for family in study.options.families:
        rows = equal[family]["rows"]
        base = rows["base"]["grams_per_request"]["all"]
        for label, row in rows.items():
            mine = row["grams_per_request"]["all"]
            saved = over([saving_pct(m, b) for m, b in zip(mine, base, strict=True)])
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
    table(folder, "fig09", nine)
    table(folder, "fig10", ten)
    plots.bars(
        {f: {r["scheme"]: r["saving_pct"] for r in ten if r["family"] == f} for f in study.options.families},
        folder, "fig09", "carbon saving, %",
    )  # fmt: skip
    plots.schemes({f: equal[f]["rows"] for f in study.options.families}, folder, "fig10")
    seed = study.options.seeds[0]
    over_time = {f: curves(study, f, seed) for f in study.options.families}
    plots.objective(over_time, folder, "fig11")
    lines = [
        {"family": f, "scheme": label, "at_s": at, "intensity": ci, "dC_pct": c, "dA_pct": a, "f_pct": value}
        for f, by in over_time.items()
        for label, one in by.items()
        for at, ci, c, a, value in zip(
            one.at_s, one.intensity, one.carbon, one.accuracy, one.objective, strict=True)
    ]  # fmt: skip
    table(folder, "fig11", lines)
    return {"fig09": nine, "fig10": ten, "fig11": {"seed": seed, "see": "fig11.csv"}}


def _fig12(study: Study, folder: Path) -> Any:
    """Time spent optimising and candidates within the SLO, in windows of eight hours."""
    found: dict[str, Any] = {}
    pictures: dict[str, dict[str, Sequence[float]]] = {}
    windows = max(1, round(study.options.hours * 3600 / WINDOW_S))
    for family in study.options.families:
        found[family], pictures[family] = {}, {}
        for scheme in ("blover", "clover"):
            runs = [study.runs[s] for s in schemes_of(study, family)[scheme]]
            time_pct, inside, count = [0.0] * windows, 0, 0
            for run in runs:
                for e in explored(run, study.reference(family, run.spec.seed).slo_ms):
                    at = min(windows - 1, max(0, int(e["at_s"] * study.options.speedup // WINDOW_S)))
                    time_pct[at] += 100 * e["spent_s"] / (run.spec.span_s / windows) / len(runs)
                    inside, count = inside + e["within_slo"], count + 1
            spent = [run["exploration_s"] for run in runs]
            found[family][scheme] = {
                "time_pct_by_window": time_pct,
                "time_pct": over([100 * s / runs[0].spec.span_s for s in spent]).mean,
                "evaluations": count / len(runs),
                "within_slo_pct": 100 * inside / count if count else None,
            }
            pictures[family][scheme] = time_pct
    plots.windows(pictures, folder, "fig12", "time in optimisation, %")
    rows = [
        {"family": f, "scheme": s, "window": n, "time_pct": t}
        for f, by in found.items()
        for s, one in by.items()
        for n, t in enumerate(one["time_pct_by_window"])
    ]
    table(folder, "fig12", rows)
    return found


def _fig13(study: Study, folder: Path) -> Any:
    """What the first, the second and the last round looked at."""
    family, seed = study.options.families[-1], study.options.seeds[0]
    run = study.runs[next(s for s in schemes_of(study, family)["clover"] if s.seed == seed)]
    reference = study.reference(family, seed)
    base_g = grams(reference.joules, BASE_INTENSITY, PUE)
    rounds: dict[int, list[dict[str, Any]]] = {}
    for e in explored(run, reference.slo_ms):
        if e["joules"] is None or e["accuracy"] is None:
            continue
        carbon = grams(e["joules"], e["intensity"], PUE)
        point = {
            "saving_pct": 100 * (1 - carbon / base_g),
            "accuracy_loss_pct": 100 * (1 - e["accuracy"] / reference.accuracy),
            **e,
        }
        rounds.setdefault(e["round"], []).append(point)
    order = sorted(rounds)
    chosen = dict.fromkeys([*order[:2], *order[-1:]])
    shown = {f"round {n + 1} of {len(order)}": rounds[n] for n in chosen}
    plots.evaluated(shown, folder, "fig13")
    table(folder, "fig13", [{"round": name, **p} for name, points in shown.items() for p in points])
    return shown


def _sweeps(study: Study, folder: Path) -> dict[str, Any]:
    fourteen = {f: sweeps.weights(study, f) for f in study.options.families}
    fifteen = {f: sweeps.fleets(study, f) for f in study.options.families}
    sixteen = traces(study)
    plots.lines(
        {
            f: {
                name: ([p["accuracy_loss_pct"] for p in by.values()], [p["saving_pct"] for p in by.values()])
                for name, by in found.items()
            }
            for f, found in fourteen.items()
        },
        folder, "fig14", "accuracy lost, %", "carbon saving, %",
    )  # fmt: skip
    plots.bars(
        {f: {f"{p} {n}": one["p95_over_slo"] for n, by in found.items() for p, one in by.items()}
         for f, found in fifteen.items()},
        folder, "fig15", "p95 over that of BASE on ten",
    )  # fmt: skip
    plots.bars(
        {f: {f"{p} {t}": one["saving_pct"] for t, by in found.items() for p, one in by.items() if p != "base"}
         for f, found in sixteen.items()},
        folder, "fig16", "carbon saving, %",
    )  # fmt: skip
    for name, found in (("fig15", fifteen), ("fig16", sixteen)):
        rows = [{"family": f, "case": c, "scheme": p, **one} for f, by in found.items() for c, ps in by.items()
                for p, one in ps.items()]  # fmt: skip
        table(folder, name, rows)
    table(folder, "fig14", [{"family": f, "sweep": s, "value": v, **one} for f, by in fourteen.items()
                            for s, vs in by.items() for v, one in vs.items()])  # fmt: skip
    bases = {f: sweeps.bases(study, f) for f in study.options.families}
    table(folder, "bases", [{"family": f, "base": b, **one} for f, by in bases.items() for b, one in by.items()])
    return {"fig14": fourteen, "fig15": fifteen, "fig16": sixteen, "bases": bases}
