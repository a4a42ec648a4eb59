"""Figures of CARBONDIS's experiment over seeds, its saving taken apart, and what each modelled constant is worth."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from trefoil.core.units import HOUR_S, MS_PER_S
from trefoil.reproduce import plots
from trefoil.reproduce.carbondis.experiment import A100, CHANGED, OURS, PAPERS, SETS, JobsSpec, intensity, trace_path
from trefoil.reproduce.carbondis.printed import printed
from trefoil.reproduce.runs import StudyRun, run_all
from trefoil.reproduce.scores import over_seeds, saving_pct
from trefoil.simulator.scenario.carbon import ForecastFeed

PAPER: Final = {  # grams of CARBONDIS, and jobs over their SLA
    "Set 1": {"below_highperf_pct": 16.21, "above_dybatch_pct": 5.39, "jobs_over": 0},
    "Set 2": {"below_highperf_pct": 11.22, "above_dybatch_pct": 4.72, "jobs_over": 0},
}
FIG_2: Final = {"lowenergy": 9.32, "uniform": 12.65, "highperf": 14.56}  # grams; uniform: both GPUs, evenly
REQUESTS: Final = 20_000  # of each job
JANUARY: Final = 744  # hours
CITS: Final = (0.8, 0.9, 1.0, 1.1, 1.2)
TURNED: Final = 0.3
TURNED_IN: Final = ("highperf", "lowenergy", "dybatch", "carbondis", *OURS)
SETTINGS: Final = {"carbondis, literal": ("literal", True), "carbondis, quantile 0.95": ("quantile", 0.95)}
SEEDS_OF_CIT: Final = 3


@dataclass(frozen=True, slots=True)
class CarbondisOptions:
    """Options of the study. `speedup`: hours of a week's trace in an hour; `quick`: a tenth, a day, no sweeps."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    requests: int = REQUESTS
    trace_h: float = 168.0
    speedup: float = 24.0
    sweeps: bool = True
    jobs: int = 0


OPTIONS: Final = CarbondisOptions()
QUICK: Final = CarbondisOptions((1,), REQUESTS // 10, 24.0, sweeps=False)
Specs = Mapping[tuple[str, str], Sequence[JobsSpec]]
Runs = Mapping[JobsSpec, StudyRun]


def about() -> dict[str, str]:
    """What the study is of."""
    data = "Electricity Maps by CASPER (TREFOIL_DATA)" if trace_path() else "synthetic curve: no trace is here"
    return {"paper": "CARBONDIS", "basis": "simulated on modelled profiles", "data": data}


def study(options: CarbondisOptions, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play everything; figures as CSV and PNG in `out`, kept runs below it."""
    published = {
        (name, policy): [_published(name, policy, seed, options) for seed in options.seeds]
        for name in PAPER
        for policy in (*PAPERS, *OURS)
    }
    longer = {  # nothing else reads the average of carbon
        (name, "carbondis"): [replace(s, history="2021-10") for s in published[name, "carbondis"]] for name in PAPER
    }
    week = {key: [_week(spec, options) for spec in specs] for key, specs in published.items()}
    fig2 = {policy: _published("Fig. 2", policy, 1, CarbondisOptions()) for policy in FIG_2}
    fewer_joules = replace(fig2["lowenergy"], changed=(("low joules", 1 - TURNED),))
    turned = _turned(options) if options.sweeps else {}
    cits = {
        (how, cit): [replace(one, settings=(("cit", cit),)) for one in by["Set 1", "carbondis"][:SEEDS_OF_CIT]]
        for how, by in (("fig10_published", published), ("fig10", week))
        for cit in CITS
        if options.sweeps
    }
    faster = (("low ms per item", 1 - TURNED),)  # a P4's time is modelled: with less of it Fig. 10(c) is as printed
    for cit in (CITS[0], CITS[-1]) if options.sweeps else ():
        cits["fig10_faster", cit] = [replace(cits["fig10_published", cit][0], changed=faster)]
    wanted = [spec for by in (published, longer, week, cits) for specs in by.values() for spec in specs]
    runs = run_all(
        [*wanted, *fig2.values(), fewer_joules, *(spec for by in turned.values() for spec in by.values())],
        out / "runs", options.jobs, say,
    )  # fmt: skip
    found: dict[str, Any] = {
        "paper": PAPER,
        "published": _rows(runs, published),
        "history_2021_10": {
            name: {"carbondis": by["carbondis"]} for name, by in _rows(runs, {**published, **longer}).items()
        },
        "week": _rows(runs, week),
        "cir_above_1_pct": {
            how: {name: _high_pct(by[name, "carbondis"]) for name in PAPER}
            for how, by in (("published", published), ("history_2021_10", longer), ("week", week))
        },
        "fig2": {policy: _alone(runs[spec]) | {"paper_g": FIG_2[policy]} for policy, spec in fig2.items()},
        "fig2_fewer_joules": _alone(runs[fewer_joules]),
        "fig10_published": {},
        "fig10_faster": {},
        "fig10": {},
        "turned": {case: _case(runs, by) for case, by in turned.items()},
    }
    for (how, cit), specs in cits.items():
        highperf = (week if how == "fig10" else published)["Set 1", "highperf"][: len(specs)]
        found[how][f"{cit:g}"] = _row([runs[spec] for spec in specs], [runs[spec] for spec in highperf])
    _figures(found, {key: runs[specs[0]] for key, specs in published.items()}, out)
    return found | {"printed": printed(found)}


def _published(name: str, policy: str, seed: int, options: CarbondisOptions) -> JobsSpec:
    """Spec of a run that lasts until the slowest job has sent its requests."""
    slowest_ms = max(job.gap_ms for job in SETS[name].jobs)
    return JobsSpec(name, policy, seed, options.requests * slowest_ms / MS_PER_S, "as published", trace=trace_path())


def _week(spec: JobsSpec, options: CarbondisOptions) -> JobsSpec:
    """Spec of the same with more of the trace, and requests that know nothing of each other."""
    duration_s = options.trace_h * HOUR_S / options.speedup
    return replace(spec, label="week", arrivals="poisson", duration_s=duration_s, speedup=options.speedup)


def _turned(options: CarbondisOptions) -> dict[str, dict[str, JobsSpec]]:
    """Specs of one seed and a day of the trace in which one constant is otherwise."""
    cases: dict[str, tuple[tuple[str, float], ...]] = {"nothing turned": ()}
    cases |= {f"{name} x {x:g}": ((name, x),) for name in CHANGED for x in (1 - TURNED, 1 + TURNED)}
    found = {}
    for name in PAPER:
        base = replace(_published(name, "", 1, options), duration_s=24 * HOUR_S / options.speedup)
        for case, changed in cases.items():
            one = replace(base, label=case, speedup=options.speedup, changed=changed)
            found[f"{name}: {case}"] = {policy: replace(one, policy=policy) for policy in TURNED_IN}
        plain = found[f"{name}: nothing turned"]
        plain |= {how: replace(plain["carbondis"], settings=(setting,)) for how, setting in SETTINGS.items()}
    return found


def _by_job(run: StudyRun) -> dict[str, dict[str, float]]:
    """Of each job its p95 over the SLA, late requests, median, and requests of a thousand that an A100 answered."""
    found = {}
    for number, job in enumerate(SETS[run.spec.jobs].jobs, 1):
        one = run["families"][job.model]
        found[f"{number} {job.model}"] = {
            "p95_over_sla": one["p95_ms"] / job.sla_ms,
            "late": one["late"],
            "median_ms": one["centiles_ms"][49],
            "high_uses": 1000 * one["by_device_type"].get(A100.name, 0.0),
        }
    return found


def _jobs_over(run: StudyRun) -> int:
    return sum(one["p95_over_sla"] > 1 for one in _by_job(run).values())


def _row(runs: Sequence[StudyRun], highperf: Sequence[StudyRun]) -> dict[str, Any]:
    """Row of a policy over its seeds, each against HIGHPERF at the same requests and intensities."""
    jobs = [_by_job(run) for run in runs]

    def each(pick: Callable[[StudyRun], float]) -> dict[str, Any]:
        return asdict(over_seeds([pick(run) for run in runs]))

    def idle_g(run: StudyRun) -> float:
        return float(run["grams"] * run["idle_share"])

    saved_g = sum(run["grams"] for run in highperf) - sum(run["grams"] for run in runs)
    saved_idle_g = sum(map(idle_g, highperf)) - sum(map(idle_g, runs))
    return {
        "grams": each(lambda run: run["grams"]),
        "idle_g": each(idle_g),
        "active_g": each(lambda run: run["grams"] - idle_g(run)),
        "power_w": each(lambda run: run["power_w"]),
        "below_highperf_pct": _paired(runs, highperf, saving_pct),
        "idle_share_of_saving": saved_idle_g / saved_g if saved_g else math.nan,
        "jobs_over": each(_jobs_over),
        "late_pct": each(lambda run: 100 * sum(one["late"] for one in _by_job(run).values()) / run["answered"]),
        "requests": each(lambda run: run["answered"]),
        **{
            key: {job: asdict(over_seeds([one[job][key] for one in jobs])) for job in jobs[0]}
            for key in ("p95_over_sla", "late", "high_uses", "median_ms")
        },
    }


def _paired(
    runs: Sequence[StudyRun], others: Sequence[StudyRun], score: Callable[[float, float], float]
) -> dict[str, Any]:
    return asdict(over_seeds([score(a["grams"], b["grams"]) for a, b in zip(runs, others, strict=True)]))


def _rows(runs: Runs, specs: Specs) -> dict[str, dict[str, Any]]:
    """Rows of all policies, by set."""
    found: dict[str, dict[str, Any]] = {}
    for (name, policy), chosen in specs.items():
        mine, highperf, dybatch = (
            [runs[spec] for spec in each] for each in (chosen, specs[name, "highperf"], specs[name, "dybatch"])
        )
        above = _paired(mine, dybatch, lambda a, b: 100 * (a / b - 1))
        found.setdefault(name, {})[policy] = _row(mine, highperf) | {"above_dybatch_pct": above}
    return found


def _alone(run: StudyRun) -> dict[str, float]:
    (one,) = run["families"].values()
    return {"grams": run["grams"], "power_w": run["power_w"], "mean_ms": one["mean_ms"], "p95_ms": one["p95_ms"]}


def _case(runs: Runs, by: Mapping[str, JobsSpec]) -> dict[str, Any]:
    base = runs[by["highperf"]]["grams"]
    return {
        policy: {
            "below_highperf_pct": saving_pct(runs[spec]["grams"], base),
            "jobs_over": _jobs_over(runs[spec]),
        }
        for policy, spec in by.items()
    }


def intensities(spec: JobsSpec, hours: int) -> list[dict[str, float]]:
    """CCI, ACI and CIR of a run hour by hour of its trace, as routers get them; NaN before there is an average."""
    feed, found = ForecastFeed("none", intensity(spec), 0.0), []
    for hour in range(hours):
        at_s = hour * HOUR_S / spec.speedup
        cci, cir = feed.intensity.reading(at_s).intensity_g_per_kwh, feed.ratio(at_s) or math.nan
        found.append({"hour": hour, "cci": cci, "aci": cci / cir, "cir": cir})
    return found


def _high_pct(specs: Sequence[JobsSpec]) -> dict[str, Any]:
    """Part of the time in which CIR is above 1, where CARBONDIS does as DYBATCH does [%]."""
    found = []
    for spec in specs:
        hours = intensities(spec, math.ceil(spec.duration_s * spec.speedup / HOUR_S))
        found.append(100 * sum(row["cir"] > 1 for row in hours) / len(hours))
    return asdict(over_seeds(found))


def _figures(found: Mapping[str, Any], first: Mapping[tuple[str, str], StudyRun], out: Path) -> None:
    """Figures as published, of what was published: Fig. 1 without Ontario, of which there is no series here."""
    rows = {name: intensities(first[name, "carbondis"].spec, JANUARY) for name in PAPER}
    plots.write_csv(out, "fig01", [{"set": name, **row} for name, each in rows.items() for row in each])
    plots.write_csv(out, "fig04", rows["Set 1"])
    hours = list(range(JANUARY))
    of = {key: (hours, [row[key] for row in rows["Set 1"]]) for key in ("cci", "aci", "cir")}
    zones: Any = {"g/kWh": {name: (hours, [row["cci"] for row in each]) for name, each in rows.items()}}
    plots.lines(zones, out, "fig01", "hour of January", "")
    known: Any = {"g/kWh": {"CCI": of["cci"], "ACI": of["aci"]}, "CIR": {"CIR": of["cir"]}}
    plots.lines(known, out, "fig04", "hour of January", "")
    plots.write_csv(out, "fig02", [{"policy": policy, **row} for policy, row in found["fig2"].items()])
    jobs = [
        {
            "arrivals": how, "set": name, "policy": policy, "job": model, "p95_over_sla": ratio["mean"],
            "high_uses": row["high_uses"][model]["mean"],
        }
        for how in ("published", "history_2021_10", "week")
        for name, by in found[how].items()
        for policy, row in by.items()
        for model, ratio in row["p95_over_sla"].items()
    ]  # fmt: skip
    plots.write_csv(out, "fig06_09", jobs)

    def by_job(key: str) -> Any:
        return {
            name: {m: {p: row[key][m]["mean"] for p, row in by.items()} for m in by["carbondis"][key]}
            for name, by in found["published"].items()
        }

    plots.grouped(by_job("p95_over_sla"), out, "fig06", ("p95 over the SLA",), line=1.0)
    plots.grouped(by_job("high_uses"), out, "fig09", ("of 1,000 requests on the A100",))
    grams = {
        name: {key: {p: row[f"{key}_g"]["mean"] for p, row in by.items()} for key in ("idle", "active")}
        for name, by in found["published"].items()
    }
    plots.grouped(grams, out, "fig08", ("g",))
    plots.write_csv(out, "fig08", [
        {"set": name, "policy": policy, "idle_g": by["idle"][policy], "active_g": by["active"][policy]}
        for name, by in grams.items() for policy in by["idle"]
    ])  # fmt: skip
    _fig07(first, out)
    if found["fig10_published"]:
        _fig10(found["fig10_published"], out)


def _fig07(first: Mapping[tuple[str, str], StudyRun], out: Path) -> None:
    """Fig. 7: distribution of the latencies of job 1 of Set 1, one seed."""
    model = SETS["Set 1"].jobs[0].model
    cdf: Any = {
        f"{model}, SLA {SETS['Set 1'].jobs[0].sla_ms:g} ms": {
            policy: (run["families"][model]["centiles_ms"], list(range(1, 100)))
            for (name, policy), run in first.items()
            if name == "Set 1"
        }
    }
    plots.lines(cdf, out, "fig07", "ms", "% of requests")
    plots.write_csv(out, "fig07", [
        {"policy": policy, "pct_of_requests": pct, "ms": ms}
        for by in cdf.values() for policy, (centiles_ms, pcts) in by.items()
        for ms, pct in zip(centiles_ms, pcts, strict=True)
    ])  # fmt: skip


def _fig10(by: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Fig. 10: high-end uses, grams and late requests by CIT."""
    at, models = [float(cit) for cit in by], list(next(iter(by.values()))["high_uses"])
    panels: Any = {
        "of 1,000 requests on the A100": {m: (at, [r["high_uses"][m]["mean"] for r in by.values()]) for m in models},
        "g": {key: (at, [row[f"{key}_g"]["mean"] for row in by.values()]) for key in ("idle", "active")},
        "late": {m: (at, [row["late"][m]["mean"] for row in by.values()]) for m in models},
    }
    plots.lines(panels, out, "fig10", "CIT", "", marked=True)
    plots.write_csv(out, "fig10", [
        {
            "cit": cit, "job": model, "high_uses": row["high_uses"][model]["mean"], "late": row["late"][model]["mean"],
            "idle_g": row["idle_g"]["mean"], "active_g": row["active_g"]["mean"],
        }
        for cit, row in by.items() for model in models
    ])  # fmt: skip
