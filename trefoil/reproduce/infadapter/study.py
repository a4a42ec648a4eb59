"""Figures of InfAdapter's experiment over seeds, and what of its claims comes out.

Fig. 3 is a drawing. Fig. 4 was measured once (`fig04.json`). A second with p99 over 750 ms is a violation.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.planners.infadapter.capacity import Capacity, line
from controller.planners.infadapter.cpu_slices import InfAdapterSettings, Room
from controller.planners.infadapter.planner import best_sizes
from trefoil.core.device_types import slice_cores
from trefoil.reproduce import plots
from trefoil.reproduce.infadapter.experiment import ACCURACY_BEST, BASE, FAMILY, SCHEMES, InfAdapterSpec, load
from trefoil.reproduce.infadapter.published import CAPACITY_PER_S, CORES, FITTED, QUANTILE, catalog
from trefoil.reproduce.runs import StudyRun, run_all
from trefoil.reproduce.scores import over_seeds

BETAS: Final = (0.0125, 0.025, 0.05, 0.1, 0.2)
BETA: Final = 0.05
FIG_1: Final = (8, 14, 20)  # cores
FIG_2_PER_S: Final = 75.0
FORECASTERS: Final = ("last_max", "minute_max", "ewma", "holt_winters", "lstm", "oracle")
TRACES: Final = ("twitter", "steady")
BARE: Final = (("capacity_share", 1.0), ("load_margin", 0.0))  # without the public code's headroom
NO_HEADROOM: Final = f"{TRACES[0]}, no headroom"
PAPER: Final = {"fewer_violations_pct": 65, "less_cost_pct": 33, "less_loss_pct": 4}
LOADS_PER_S: Final = range(5, 500, 20)  # at which several variants are compared with one
EQUAL: Final = 0.02  # of cores: what counts as the same cost
ALIKE: Final = 0.2  # of a throughput: "almost the same load"
LEAST: Final = 0.01  # points of accuracy below which a difference is none


@dataclass(frozen=True, slots=True)
class InfadapterOptions:
    """Options of the study. `seconds`: of each trace, 0 for all of it."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    seconds: int = 0
    betas: tuple[float, ...] = BETAS
    sweeps: bool = True
    jobs: int = 0


OPTIONS: Final = InfadapterOptions()
QUICK: Final = InfadapterOptions((1,), 780, (0.0125, BETA, 0.2), sweeps=False)
Specs = Mapping[str, Sequence[InfAdapterSpec]]


def about() -> dict[str, str]:
    """What the study is of."""
    return {"paper": "InfAdapter", "basis": "simulated on published capacities", "data": load("twitter")[1]}


def study(options: InfadapterOptions, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play everything; figures as CSV and PNG in `out`, kept runs below it."""
    blocks = {trace: _by_beta(trace, options) for trace in TRACES}
    blocks[NO_HEADROOM] = _by_beta(TRACES[0], replace(options, betas=(BETA,)), BARE)
    if options.sweeps:
        for trace in TRACES:
            blocks[f"{trace}, artifact"] = {
                s: _seeds(options, scheme=s, trace=trace, preset="artifact") for s in SCHEMES
            }
            blocks[f"{trace}, arrivals repeated"] = {
                s: _seeds(options, scheme=s, trace=trace, arrivals="repeated") for s in SCHEMES
            }
            blocks[f"{trace}, forecasters"] = {
                f"infadapter, {one}": _seeds(options, scheme="infadapter", trace=trace, forecaster=one)
                for one in forecasters()
            }
    specs = [spec for by in blocks.values() for each in by.values() for spec in each]
    runs = run_all(specs, out / "runs", options.jobs, say)
    found: dict[str, Any] = {
        "paper": PAPER,
        "loads": {trace: load(trace)[1] for trace in TRACES},
        "fig1": fig1(),
        "fig2": fig2(),
        "accuracy": accuracy(),
        "fig4": fig4(),
        "fig6": fig6(),
        "blocks": {
            block: {name: row_of([runs[s] for s in each]) for name, each in by.items()} for block, by in blocks.items()
        },
    }
    found["claims"] = {block: claims(found["blocks"][block]) for block in (*TRACES, NO_HEADROOM)}
    found["says"] = {trace: says(found["blocks"][trace]) for trace in TRACES}
    found["says"]["published"] = _published(found)
    _figures(found, {trace: {name: runs[each[0]] for name, each in blocks[trace].items()} for trace in TRACES}, out)
    return found


def forecasters() -> tuple[str, ...]:
    """Forecasters that are installed."""
    return tuple(f for f in FORECASTERS if f != "holt_winters" or importlib.util.find_spec("statsmodels"))


def _seeds(options: InfadapterOptions, **of: Any) -> list[InfAdapterSpec]:
    return [InfAdapterSpec(seed=seed, seconds=options.seconds, **of) for seed in options.seeds]


def _by_beta(
    trace: str, options: InfadapterOptions, planner: tuple[tuple[str, float], ...] = ()
) -> dict[str, list[InfAdapterSpec]]:
    """Both planners of Eq. 1 at each beta, with further settings; VPA+ once: it knows none."""
    found = {scheme: _seeds(options, scheme=scheme, trace=trace) for scheme in BASE}
    for scheme in ("infadapter", "ms_plus"):
        of = _seeds(options, scheme=scheme, trace=trace)
        found |= {
            named(scheme, beta): [replace(s, planner=(*planner, ("beta", beta))) for s in of] for beta in options.betas
        }
    return found


def named(scheme: str, beta: float) -> str:
    """Name of a planner of Eq. 1 at a beta."""
    return f"{scheme}, beta {beta:g}"


def row_of(runs: Sequence[StudyRun]) -> dict[str, Any]:
    """Row of a scheme over its seeds: late or refused requests, seconds with p99 over the SLO, cores, accuracy loss."""

    def each(pick: Callable[[StudyRun], float]) -> dict[str, Any]:
        return asdict(over_seeds([pick(run) for run in runs]))

    return {
        "late_pct": each(lambda run: 100 * (1 - run["families"][FAMILY]["slo_attainment"])),
        "violated_s": each(lambda run: float(np.sum(np.array(run.series[f"{FAMILY}.attainment"]) < QUANTILE))),
        "cores": each(lambda run: run["core_s"] / run["duration_s"]),
        "cores_planned": each(lambda run: run["planned_core_s"] / run["duration_s"]),
        "loss_pct": each(lambda run: 100 * (ACCURACY_BEST - run["families"][FAMILY]["accuracy"])),
        "p99_ms": each(lambda run: run["families"][FAMILY]["p99_ms"]),
        "rejected": each(lambda run: run["families"][FAMILY]["rejected"]),
        "requests": each(lambda run: run["families"][FAMILY]["arrived"]),
    }


def claims(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the paper claims of InfAdapter, at each beta: against each VPA+ that costs no more, each that is at least as
    accurate, and MS+ at equal cost (between its betas: a line)."""
    mean = {name: {key: one["mean"] for key, one in row.items()} for name, row in rows.items()}
    single = sorted((one["cores"], one["loss_pct"]) for name, one in mean.items() if name.startswith("ms_plus"))
    found = {}
    for name, mine in mean.items():
        if not name.startswith("infadapter"):
            continue
        cheaper = [one for one in BASE if mean[one]["cores"] <= mine["cores"] * (1 + EQUAL)]
        better = [one for one in BASE if mean[one]["loss_pct"] <= mine["loss_pct"]]
        found[name] = {
            "fewer_violations_pct": {one: _below(mine["violated_s"], mean[one]["violated_s"]) for one in cheaper},
            "less_cost_pct": {one: _below(mine["cores"], mean[one]["cores"]) for one in better},
            "less_cost_planned_pct": {one: _below(mine["cores_planned"], mean[one]["cores_planned"]) for one in better},
            "less_loss": {
                one: mean[one]["loss_pct"] - mine["loss_pct"] for one in (*BASE, name.replace("infadapter", "ms_plus"))
            },
            "less_loss_than_ms_plus": _loss_at(single, mine["cores"]) - mine["loss_pct"],
        }
    return found


def says(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """What the paper says of a load without a number, on the cores that are planned."""
    mean = {name: {key: one["mean"] for key, one in row.items()} for name, row in rows.items()}
    betas = [name.partition(", ")[2] for name in mean if name.startswith("infadapter")]
    mine = [mean[f"infadapter, {beta}"] for beta in betas]
    single = [mean[f"ms_plus, {beta}"] for beta in betas]
    return {
        "infadapter loses less accuracy than ms_plus": all(
            one["loss_pct"] <= other["loss_pct"] for one, other in zip(mine, single, strict=True)
        ),
        "infadapter violates no longer than any vpa_plus": all(
            one["violated_s"] <= mean[vpa]["violated_s"] for one in mine for vpa in BASE
        ),
        "a larger beta costs less and loses more accuracy": all(
            a["cores_planned"] >= b["cores_planned"] and a["loss_pct"] <= b["loss_pct"] + LEAST
            for a, b in pairwise(mine)
        ),
        "vpa_plus-18 costs least and loses most": all(
            mean["vpa_plus-18"]["cores_planned"] <= one["cores_planned"]
            and mean["vpa_plus-18"]["loss_pct"] >= one["loss_pct"]
            for one in mean.values()
        ),
    }


def _published(found: Mapping[str, Any]) -> dict[str, bool]:
    """What the paper says of Figs. 1, 2 and 4."""
    few, many = found["fig1"]["8 cores"], found["fig1"]["20 cores"]
    pairs = (few["resnet18"], many["resnet50"]), (few["resnet50"], many["resnet152"])
    best, most = found["fig2"]["14 cores"], {name: one["most_per_s"] for name, one in found["fig4"].items()}
    return {
        "eight cores of a smaller network carry what twenty of a larger one do": all(
            abs(a / b - 1) < ALIKE for a, b in pairs
        ),
        "ms_plus takes resnet50 for 14 cores": list(best["ms_plus"]["cores"]) == ["resnet50"],
        "infadapter takes three networks for 14 cores": len(best["infadapter"]["cores"]) == 3,
        "one thread an instance answers most": most["batch 1, 2 x 1"] == max(most.values()),
    }


def _below(mine: float, other: float) -> float:
    return 100 * (1 - mine / other) if other else 0.0


def _loss_at(points: Sequence[tuple[float, float]], cores: float) -> float:
    """Loss of MS+ at a cost: on the line between its points, beyond them the nearest one's."""
    return float(np.interp(cores, [cost for cost, _ in points], [loss for _, loss in points]))


def fits() -> dict[str, tuple[float, float, float]]:
    """Slope, intercept and R squared of each variant's published capacities, over the sizes that the paper fits."""
    return {
        name: line([float(n) for n in FITTED], [float(c) for n, c in zip(CORES, per_s, strict=True) if n in FITTED])
        for name, per_s in CAPACITY_PER_S.items()
    }


def fig1() -> dict[str, dict[str, float]]:
    """Fig. 1: requests/s of three variants on 8, 14 and 20 cores; 14 were not published: their line's."""
    lines = fits()
    return {
        f"{n} cores": {
            name: float(per_s[CORES.index(n)]) if n in CORES else lines[name][0] * n + lines[name][1]
            for name, per_s in CAPACITY_PER_S.items()
            if name in ("resnet18", "resnet50", "resnet152")
        }
        for n in FIG_1
    }


def fig2(share: float = 1.0) -> dict[str, dict[str, Any]]:
    """Fig. 2: least accuracy loss at 75 requests/s within a budget, of several variants and of one. `share`: of the
    fitted capacity that is counted on."""
    return {f"{budget} cores": _best(budget, FIG_2_PER_S, share) for budget in FIG_1}


def accuracy() -> dict[str, dict[str, float]]:
    """What several variants lose less of accuracy than one, in points, within a budget and over all loads that one
    carries: most, at which load, and in the mean (section 1: "up to 4 %")."""
    found = {}
    for budget in FIG_1:
        gains = [
            (by["ms_plus"]["loss_pct"] - by["infadapter"]["loss_pct"], float(per_s))
            for per_s, by in ((per_s, _best(budget, per_s)) for per_s in LOADS_PER_S)
            if by["ms_plus"] is not None
        ]
        most, at_per_s = max(gains)
        mean = sum(gain for gain, _ in gains) / len(gains)
        found[f"{budget} cores"] = {"most": most, "at_per_s": at_per_s, "mean": mean, "up_to_per_s": gains[-1][1]}
    return found


def _best(budget: int, per_s: float, share: float = 1.0) -> dict[str, Any]:
    """Least accuracy loss of several variants and of one that carry a load within a budget, whatever they cost."""
    variants = {v.name: v for v in catalog().families[0].variants}
    known = tuple(Capacity(variants[n], share * s, share * i, r2, 1.0) for n, (s, i, r2) in fits().items())
    settings = InfAdapterSettings(beta=0.0, gamma=0.0, start_s=0.0)
    room = Room({"node/cpu": float(budget)}, float(budget), 1.0)
    several = best_sizes(room, {FAMILY: known}, {FAMILY: float(per_s)}, settings)
    each = [best_sizes(room, {FAMILY: (one,)}, {FAMILY: float(per_s)}, settings) for one in known]
    single = max((one for one in each if one is not None), key=lambda one: one.value, default=None)
    return {
        name: None
        if one is None
        else {
            "loss_pct": 100 * (ACCURACY_BEST - one.value),
            "cores": {choice.variant: choice.cores for choice in one.chosen},
        }
        for name, one in (("infadapter", several), ("ms_plus", single))
    }


def fig4() -> dict[str, dict[str, Any]]:
    """Fig. 4: most images/s of one network on a slice; images/s answered and mean latency [ms] at several loads.

    By batch size and by how the slice's cores are shared out. `trefoil family profile` wrote the figures: with one
    instance a core, and with a single instance.
    """
    points = json.loads(resources.files("trefoil.reproduce.infadapter").joinpath("fig04.json").read_text("utf-8"))
    found = {}
    for point in points:
        batch, instances = point["batch"], point["instances"]
        threads = int(slice_cores(point["slice_type"])) // instances
        found[f"batch {batch}, {instances} x {threads}"] = {
            "most_per_s": point["throughput_per_s"],
            "answered_per_s": [batch * one["answered_per_s"] for one in point["rates"]],
            "mean_ms": [one["latency_ms"][-1] for one in point["rates"]],
        }
    return found


def fig6() -> dict[str, dict[str, float]]:
    """Fig. 6: the regression's slope, intercept and R squared, and its largest error over all published sizes."""
    found = {}
    for name, (slope, intercept, r2) in fits().items():
        wrong = [slope * n + intercept - per_s for n, per_s in zip(CORES, CAPACITY_PER_S[name], strict=True)]
        found[name] = {"slope": slope, "intercept": intercept, "r2": r2, "error_max_per_s": max(map(abs, wrong))}
    return found


def _figures(found: Mapping[str, Any], first: Mapping[str, Mapping[str, StudyRun]], out: Path) -> None:
    plots.write_csv(out, "fig01", [{"cores": cores, **by} for cores, by in found["fig1"].items()])
    plots.grouped({"p99 within 750 ms": found["fig1"]}, out, "fig01", ("requests/s",))
    losses = {cores: {name: one["loss_pct"] for name, one in by.items() if one} for cores, by in found["fig2"].items()}
    plots.write_csv(out, "fig02", [{"cores": c, "infadapter": None, "ms_plus": None, **b} for c, b in losses.items()])
    plots.grouped({"75 requests/s": losses}, out, "fig02", ("accuracy loss, points",))
    plots.write_csv(out, "fig04", [{"configuration": name, **one} for name, one in found["fig4"].items()])
    curves = {name: (one["answered_per_s"], one["mean_ms"]) for name, one in found["fig4"].items()}
    plots.lines({"measured": curves}, out, "fig04", "images/s", "mean latency, ms", marked=True)
    plots.write_csv(out, "fig06", [{"variant": name, **one} for name, one in found["fig6"].items()])
    sizes, lines = [float(n) for n in CORES], fits()
    fitted: Any = {
        name: {
            "published": (sizes, CAPACITY_PER_S[name]),
            "line": (sizes, [lines[name][0] * n + lines[name][1] for n in sizes]),
        }
        for name in ("resnet18", "resnet50")
    }
    plots.lines(fitted, out, "fig06", "cores", "requests/s", marked=True)
    rows = [
        {"block": block, "scheme": scheme, **{key: one["mean"] for key, one in row.items()}}
        for block, by in found["blocks"].items()
        for scheme, row in by.items()
    ]
    plots.write_csv(out, "fig07_10", rows)
    for trace, name in zip(TRACES, ("fig07", "fig08_10"), strict=True):
        plots.grouped(_bars(found["blocks"][trace]), out, name, ("",))
    shown = {"infadapter": named("infadapter", BETA), "ms_plus": named("ms_plus", BETA)} | {b: b for b in BASE}
    for trace, name in zip(TRACES, ("fig05", "fig08"), strict=True):
        plots.lines(_over_time({label: first[trace][key] for label, key in shown.items()}), out, name, "s", "")


def _bars(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Bars of Figs. 7 to 10: a panel for each figure of merit, a group for each beta."""
    betas = [name.partition("beta ")[2] for name in rows if name.startswith("infadapter")]
    panels = {"late_pct": "late, %", "cores": "cores", "loss_pct": "accuracy loss, points"}
    return {
        label: {
            f"beta {beta}": {
                scheme: rows[scheme if scheme in BASE else named(scheme, float(beta))][key]["mean"]
                for scheme in SCHEMES
            }
            for beta in betas
        }
        for key, label in panels.items()
    }


def _over_time(runs: Mapping[str, StudyRun], bin_s: int = 10) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Panels of Figs. 5 and 8: load, late requests, cores and accuracy loss over time, in bins."""

    def series(run: StudyRun, name: str) -> np.ndarray:
        return np.array(run.series[name], dtype=float)

    def binned(values: Iterable[float]) -> tuple[list[float], list[float]]:
        whole = np.array(list(values))
        cut = whole[: whole.size // bin_s * bin_s].reshape(-1, bin_s)
        return [float(at) for at in range(0, cut.shape[0] * bin_s, bin_s)], np.nanmean(cut, axis=1).tolist()

    return {
        "requests/s": {"load": binned(series(next(iter(runs.values())), f"{FAMILY}.rate_per_s"))},
        "late, %": {n: binned(100 * (1 - series(run, f"{FAMILY}.attainment"))) for n, run in runs.items()},
        "cores": {n: binned(series(run, "cores")) for n, run in runs.items()},
        "accuracy loss, points": {
            n: binned(100 * (ACCURACY_BEST - series(run, f"{FAMILY}.accuracy"))) for n, run in runs.items()
        },
    }
