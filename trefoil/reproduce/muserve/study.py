"""Figures of mu-Serve's experiment over seeds, without its scheduler, and what each constant and choice is worth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.planners.muserve.alpaserve import joined
from trefoil.core import power
from trefoil.core.fleet import DeviceState
from trefoil.reproduce import plots
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.muserve.experiment import GPU, HELD, POLICIES, MuServeSpec
from trefoil.reproduce.muserve.models import MODELS, TOP_MHZ, operators, units
from trefoil.reproduce.runs import StudyRun, run_all
from trefoil.reproduce.scores import over_seeds
from trefoil.reproduce.tables import markdown

PAPER: Final[Mapping[str, Mapping[str, float]]] = {  # largest factor over AlpaServe, A.3
    "SLO scale": {"alpaserve_scaling": 1.42, "muserve": 1.8},
    "rate [1/s]": {"alpaserve_scaling": 1.42, "muserve": 1.92},
    "GPUs": {"alpaserve_scaling": 1.28, "muserve": 1.49},
}
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "axes": {},
    "busy": {"waits_active": True, "group_size": 4},
}
"""What GPUs draw while they wait, and AlpaServe's groups: as modelled and chosen; as the paper's power suggests. Four
GPUs have no room for all models in pipelines over four: there the second is not played."""
SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # of insensitive operators, Fig. 14(a)
DRAWN: Final = (1, 2, 3, 4, 5)  # draws of which models are
LENGTHS: Final = (0.5, 1.0, 1.5, 2.0)  # of answers, Fig. 14(b)
TITLES: Final = {"SLO scale": "scale", "rate [1/s]": "rate", "GPUs": "gpus"}
FIG2_MHZ: Final = tuple(range(200, 1301, 100))
ATTAINED: Final = 0.99
TURNED: Final = 0.3
FORGETFUL: Final = (("remembers_s", 1.0),)
BASE: Final = MuServeSpec("alpaserve", 1, slo_scale=10.0, rate_per_s=3.0)


@dataclass(frozen=True, slots=True)
class MuserveOptions:
    """Options of the study."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    duration_s: float = 400.0
    slo_scales: tuple[float, ...] = (2, 3, 5, 10, 15)
    rates: tuple[float, ...] = (1, 2, 3, 4, 6)
    gpus: tuple[int, ...] = (4, 8, 10, 14)
    sweeps: bool = True
    jobs: int = 0


OPTIONS: Final = MuserveOptions()
QUICK: Final = MuserveOptions((1,), 300.0, (2, 5, 10), (1, 3), (8,), sweeps=False)


def about() -> dict[str, str]:
    """What the study is of."""
    azure = "Azure's functions (TREFOIL_DATA)" if data_folder() else "Azure's are not here"
    return {"paper": "mu-Serve", "basis": "simulated on modelled operators", "data": f"gamma gaps; {azure}"}


def study(options: MuserveOptions, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play everything; figures as CSV and PNG in `out`, kept runs below it."""
    base = replace(BASE, duration_s=options.duration_s)
    cases = _cases(base) if options.sweeps else {}
    busy = replace(base, **SETTINGS["busy"])
    shares, lengths = (
        (SHARES, LENGTHS) if options.sweeps else (SHARES[:: len(SHARES) - 1], LENGTHS[:: len(LENGTHS) - 1])
    )
    fig14 = {
        "insensitive share": {
            x: [replace(busy, insensitive=_drawn(x, seed), seed=seed) for seed in DRAWN] for x in shares
        },
        "length of answers": {x: [replace(busy, lengthened=x)] for x in lengths},
    }
    shown = [replace(base, trace="azure", policy=policy) for policy in POLICIES]
    one = (*cases.values(), *(spec for points in fig14.values() for specs in points.values() for spec in specs))
    played = _axes(options, base)
    wanted = [
        replace(spec, policy=policy, seed=seed)
        for own in played.values()
        for points in own.values()
        for spec in points.values()
        for policy in POLICIES
        for seed in options.seeds
    ]
    wanted += [replace(spec, policy=policy) for spec in one for policy in POLICIES] + shown
    runs = run_all(wanted, out / "runs", options.jobs, say)

    def point(specs: Sequence[MuServeSpec]) -> dict[str, dict[str, Any]]:
        return {policy: _point(runs, [replace(spec, policy=policy) for spec in specs]) for policy in POLICIES}

    def seeds(spec: MuServeSpec) -> list[MuServeSpec]:
        return [replace(spec, seed=seed) for seed in options.seeds]

    models = _models()
    found: dict[str, Any] = {
        "models": models,
        "fig2": _fig2(models),
        **{
            name: {axis: {f"{x:g}": point(seeds(spec)) for x, spec in points.items()} for axis, points in own.items()}
            for name, own in played.items()
        },
        "cases": {label: point([spec]) for label, spec in cases.items()},
        "fig14": {axis: {f"{x:g}": point(specs) for x, specs in points.items()} for axis, points in fig14.items()},
        "paper": PAPER,
    }
    found["headline"] = {**headline(found), **_headline_fig14(found["fig14"])}
    _figures(found, {spec.policy: runs[spec] for spec in shown}, out)
    return found


def _axes(options: MuserveOptions, base: MuServeSpec) -> dict[str, dict[str, dict[float, MuServeSpec]]]:
    """Specs by setting, axis and value."""
    axes: dict[str, dict[float, MuServeSpec]] = {
        "SLO scale": {x: replace(base, slo_scale=x) for x in options.slo_scales},
        "rate [1/s]": {x: replace(base, rate_per_s=x) for x in options.rates},
        "GPUs": {float(x): replace(base, gpus=x, replicas=2) for x in options.gpus},
    }
    return {
        name: {
            axis: {
                x: replace(spec, **setting) for x, spec in points.items() if spec.gpus > setting.get("group_size", 0)
            }
            for axis, points in axes.items()
        }
        for name, setting in SETTINGS.items()
    }


def headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the paper states of Figs. 7, 8, 17 and 18, by setting and axis, over points where all policies attain."""
    result: dict[str, Any] = {}
    for setting in SETTINGS:
        for axis, points in found[setting].items():
            held = [by for by in points.values() if all(by[p]["attainment"]["mean"] >= ATTAINED for p in POLICIES)]
            times = {policy: [by[policy]["times"]["mean"] for by in held] for policy in POLICIES[1:]}
            over = [by["muserve"]["times"]["mean"] / by["alpaserve_scaling"]["times"]["mean"] for by in held]
            later = [
                100 * (by["muserve"]["p99_over_slo"]["mean"] / by["alpaserve_scaling"]["p99_over_slo"]["mean"] - 1)
                for by in held
            ]
            result.setdefault(setting, {})[TITLES[axis]] = {
                "points_held": len(held),
                **{f"{policy}_most": max(each, default=1.0) for policy, each in times.items()},
                **{f"{policy}_least": min(each, default=1.0) for policy, each in times.items()},
                "muserve_over_scaling": sum(over) / len(over) if over else 1.0,
                "p99_over_scaling_pct": max(later, default=0.0),
            }
    return result


def _headline_fig14(fig14: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the paper states of Fig. 14: at its ends, the share of power saved."""

    def saved_pct(axis: str, at: float, of: str, policy: str = "muserve") -> float:
        by = fig14[axis][f"{at:g}"]
        return 100 * float(1 - by[of]["times"]["mean"] / by[policy]["times"]["mean"])

    few, many = (saved_pct("insensitive share", x, "alpaserve_scaling") for x in (SHARES[0], SHARES[-1]))
    short, long = (saved_pct("length of answers", x, "alpaserve") for x in (LENGTHS[0], LENGTHS[-1]))
    return {
        "fig14a": {"saved_pct_at_10": few, "saved_pct_at_60": many, "times": many / few if few > 0 else 0.0},
        "fig14b": {"saved_pct_short": short, "saved_pct_long": long},
    }


def _drawn(share: float, seed: int) -> tuple[str, ...]:
    """Models whose operators are insensitive, drawn."""
    chosen = np.random.default_rng((seed, 14)).permutation(len(MODELS))[: round(share * len(MODELS))]
    return tuple(list(MODELS)[at] for at in sorted(chosen.tolist()))


def _cases(base: MuServeSpec) -> dict[str, MuServeSpec]:
    """Runs of one seed in which one thing is otherwise."""
    changes: dict[str, Mapping[str, Any]] = {
        "unchanged": {},
        "MIAD as published: slack 0.05 of the mean": {"governor": ()},
        "and of the answers of a second": {"governor": FORGETFUL},
        "and literal": {"governor": (*FORGETFUL, ("literal", True))},
        "Algorithm 2 inside AlpaServe's groups": {"grouped": True},
        "hosting GPUs draw active power while they wait": {"waits_active": True},
        "and AlpaServe pipelines over 4 GPUs": SETTINGS["busy"],
        "AlpaServe pipelines over 4 GPUs": {"group_size": 4},
        "AlpaServe pipelines over 8 GPUs": {"group_size": 8},
        "time that no roofline explains follows no clock": {"overhead": True},
        "memory follows no clock": {"follows": 0.0},
        "everything follows the clock": {"follows": 1.0},
        "Azure's functions": {"trace": "azure"},
        "gaps of CV 3": {"cv": 3.0},
    }
    for name in ("active", "idle", "transfer", "follows"):
        for factor in (1 - TURNED, 1 + TURNED):
            changes[f"{name} x {factor:g}"] = {name: getattr(base, name) * factor}
    for slack in (0.35, 0.65):
        changes[f"slack {slack:g}"] = {"governor": (*HELD, ("slack", slack))}
    return {label: replace(base, **change) for label, change in changes.items()}


def _point(runs: Mapping[MuServeSpec, StudyRun], specs: Sequence[MuServeSpec]) -> dict[str, Any]:
    """Figures of a policy at a point, over its seeds; `times`: the power of AlpaServe over its own."""

    def each(name: str) -> dict[str, Any]:
        return asdict(over_seeds([runs[spec][name] for spec in specs]))

    times = [runs[replace(spec, policy="alpaserve")]["power_w"] / runs[spec]["power_w"] for spec in specs]
    clocks = [sum(runs[spec].series["clock_mhz"]) / len(runs[spec].series["clock_mhz"]) for spec in specs]
    return {
        "power_w_per_gpu": each("power_w_per_gpu"),
        "attainment": each("attainment"),
        "p99_over_slo": each("p99_over_slo"),
        "busy": each("busy"),
        "times": asdict(over_seeds(times)),
        "clock_mhz": asdict(over_seeds(clocks)),
        "groups": runs[specs[0]]["groups"],
    }


def _models() -> dict[str, dict[str, float]]:
    """Of each model: s, the share of its operators that are insensitive, its clusters."""
    found = {}
    for name, shape in MODELS.items():
        those = operators(name)
        s = joined([one.unit for one in those]).s
        share = sum(one.score < 1.0 for one in those) / len(those)
        found[name] = {
            "latency_ms": shape.latency_ms, "operators": len(those), "clusters": len(units(name, True)), "s": s,
            "insensitive_share": share,
        }  # fmt: skip
    return found


def _fig2(models: Mapping[str, Mapping[str, float]]) -> list[dict[str, float | str]]:
    """Latency and power of each model alone at each clock."""
    return [
        {
            "model": name,
            "clock_mhz": mhz,
            "latency_ms": row["latency_ms"] * power.stretch(TOP_MHZ, mhz, row["s"]),
            "power_w": power.idle_w(GPU, DeviceState.AWAKE, mhz) + power.active_w(GPU, power.WHOLE, mhz),
        }
        for name, row in models.items()
        for mhz in FIG2_MHZ
    ]


def _figures(found: Mapping[str, Any], shown: Mapping[str, StudyRun], out: Path) -> None:
    plots.write_csv(out, "fig02", found["fig2"])
    latencies = {
        name: (list(FIG2_MHZ), [row["latency_ms"] for row in found["fig2"] if row["model"] == name]) for name in MODELS
    }
    watts = {"every model": (list(FIG2_MHZ), [row["power_w"] for row in found["fig2"]][: len(FIG2_MHZ)])}
    plots.lines({"latency [ms]": latencies, "power [W]": watts}, out, "fig02", "clock [MHz]", "")
    rows = [
        {"axis": axis, "at": x, "policy": policy, **{name: row[name]["mean"] for name in row if name != "groups"}}
        for axis, points in {**_flat(found), "case": found["cases"], **found["fig14"]}.items()
        for x, by in points.items()
        for policy, row in by.items()
    ]
    plots.write_csv(out, "fig07_08", rows)
    for figure, name, label in (("fig07", "power_w_per_gpu", "W a GPU"), ("fig08", "p99_over_slo", "p99 over the SLO")):
        panels = {
            axis: {
                policy: ([float(x) for x in points], [by[policy][name]["mean"] for by in points.values()])
                for policy in POLICIES
            }
            for axis, points in _flat(found).items()
        }
        plots.lines(panels, out, figure, "", label, marked=True)
    panels = {
        axis: {
            policy: ([float(x) for x in points], [by[policy]["power_w_per_gpu"]["mean"] for by in points.values()])
            for policy in POLICIES
        }
        for axis, points in found["fig14"].items()
    }
    plots.lines(panels, out, "fig14", "", "W a GPU", marked=True)
    series = {
        "mean clock [MHz]": {policy: (run.series["at_s"], run.series["clock_mhz"]) for policy, run in shown.items()},
        "power [W]": {policy: (run.series["at_s"], run.series["power_w"]) for policy, run in shown.items()},
        "arrivals [1/s]": {"all": (shown["muserve"].series["at_s"], shown["muserve"].series["arrived_per_s"])},
    }
    plots.lines(series, out, "fig13", "s", "")


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Points of an axis by the axis' name and the setting's."""
    return {f"{axis}, {name}": points for name in SETTINGS for axis, points in found[name].items()}


def muserve_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `trefoil reproduce muserve` by name: power of AlpaServe over it, W a GPU, requests in time."""

    def row(label: str, by: Mapping[str, Any]) -> list[str]:
        cells = [label]
        for policy in POLICIES:
            at = by[policy]
            missed = "" if at["attainment"]["mean"] >= ATTAINED else " (missed)"
            times = "" if policy == "alpaserve" else f"{at['times']['mean']:.2f}x, "
            cells.append(f"{times}{at['power_w_per_gpu']['mean']:.1f} W, {at['attainment']['mean']:.1%}{missed}")
        return cells

    head = ["", *POLICIES]
    result = {}
    for setting in SETTINGS:
        for axis, points in found[setting].items():
            rows = [row(x, points[x]) for x in sorted(points, key=float)]
            paper = ["paper, at most", "", *(f"{times:g}x" for times in found["paper"][axis].values())]
            name = TITLES[axis] if setting == "axes" else f"{TITLES[axis]}_{setting}"
            result[name] = markdown([axis, *POLICIES], [*rows, paper])
    rows = [row(f"{axis} {x}", by) for axis, points in found["fig14"].items() for x, by in points.items()]
    result["fig14"] = markdown(head, rows)
    if found["cases"]:
        result["cases"] = markdown(head, [row(name, by) for name, by in found["cases"].items()])
    models = [
        [name, *(f"{one[key]:.3g}" for key in ("latency_ms", "operators", "clusters", "s", "insensitive_share"))]
        for name, one in found["models"].items()
    ]
    columns = ["model", "ms", "operators", "clusters", "s", "insensitive operators"]
    return {**result, "models": markdown(columns, models)}
