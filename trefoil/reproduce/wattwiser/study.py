"""Figures of WattWiser's experiment over seeds, and what each modelled constant and each suspected cause is worth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from controller.planners.gpu_sharing import sharing_load_weights, sharing_weights
from trefoil.core.device_types import V100_32GB
from trefoil.reproduce import plots
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.runs import StudyRun, run_all
from trefoil.reproduce.scores import over_seeds
from trefoil.reproduce.wattwiser.experiment import (
    CHANGED,
    GPUS,
    GPUS_PER_MODEL,
    HIGH,
    HOST_W,
    HOUR_MIN,
    LOW,
    MODELS,
    PAIRS,
    PAPERS,
    POLICIES,
    PairSpec,
    shares_of_gpus,
    swim,
)

PAPER_SAVING_PCT: Final = {"packed_uniform": 24.0, "sharing_aware": 20.0, "wattwiser": 34.0}
FITS: Final = 0.75  # of two GPUs: what is left of one family's when the other may use half of the shared one
TURNED: Final = 0.3
AT_ONCE: Final = (("start_s", 0.0), ("load_s", 0.0))  # a GPU still wakes
BESIDE: Final = ("nothing turned", f"loads up to {FITS:.0%}", "both")  # cases in which `exact` plays too
WAKE_UP_S: Final = 6.0  # wake, start, load
BINS_MIN: Final = (HOUR_MIN, 30, 10, 5, 2)
BIN_LEAST: Final = 1 / 6  # of the step of an hour, that load may change no faster than GPUs wake
COUNTED: Final = 0.9  # of model_max_rps
ASSUMED: Final = f"bins of {BINS_MIN[-1]} min, a sleeping GPU draws nothing, started at once, {COUNTED:g} counted on"
"""Case nearest to the paper's: its 34 % are more than GPUs of hourly sums can sleep."""


@dataclass(frozen=True, slots=True)
class WattwiserOptions:
    """Options of the study. `quick`: a tenth of each hour, one seed, one pair, no sweeps."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    pairs: tuple[tuple[str, str], ...] = PAIRS
    step_s: float = 60.0
    sweeps: bool = True
    jobs: int = 0


OPTIONS: Final = WattwiserOptions()
QUICK: Final = WattwiserOptions((1,), PAIRS[:1], 20.0, sweeps=False)
Loads = tuple[tuple[float, ...], tuple[float, ...]]


def about() -> dict[str, str]:
    """What the study is of."""
    data = "SWIM (TREFOIL_DATA)" if data_folder() else "a made-up day: SWIM is not here"
    return {"paper": "WattWiser", "basis": "simulated on modelled GPUs", "data": data}


def study(options: WattwiserOptions, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play everything; figures as CSV and PNG in `out`, kept runs below it."""
    loads = swim(0), swim(1)
    base = {
        (pair, policy): [PairSpec(*pair, policy, seed, loads, step_s=options.step_s) for seed in options.seeds]
        for pair in options.pairs
        for policy in POLICIES
    }
    cases = _cases(options.pairs[:2], loads, options.step_s) if options.sweeps else {}
    assumed = {pair: _by_bins(pair, options.step_s)[ASSUMED] for pair in options.pairs} if options.sweeps else {}
    cases |= {f"{'-'.join(pair)}: {ASSUMED}": by for pair, by in assumed.items()}
    wanted = [spec for each in base.values() for spec in each] + [s for by in cases.values() for s in by.values()]
    runs = run_all(wanted, out / "runs", options.jobs, say)
    found: dict[str, Any] = {
        "loads": {"FB-2009": loads[0], "FB-2010": loads[1]},
        "hours_above_three_gpus": sum(GPUS_PER_MODEL * (a + b) > 3 for a, b in zip(*loads, strict=True)),
        "hours_one_family_above_its_share": sum(max(a, b) > FITS for a, b in zip(*loads, strict=True)),
        "asleep_at_most_pct": {str(width): asleep_at_most_pct((swim(0, width), swim(1, width))) for width in BINS_MIN},
        "fig2": _fig2(),
        "fig3": _fig3(base[options.pairs[0], "wattwiser"][0]),
        "pairs": {
            "-".join(pair): {policy: _row([runs[spec] for spec in base[pair, policy]]) for policy in POLICIES}
            for pair in options.pairs
        },
    }
    for rows in found["pairs"].values():
        for row in rows.values():
            pairs = zip(row["power_w"]["all"], rows["uniform"]["power_w"]["all"], strict=True)
            row["saving_pct"] = asdict(over_seeds([100 * (1 - mine / theirs) for mine, theirs in pairs]))
    found["mean_saving_pct"] = {
        policy: sum(rows[policy]["saving_pct"]["mean"] for rows in found["pairs"].values()) / len(found["pairs"])
        for policy in POLICIES[1:]
    }
    found["paper_saving_pct"] = PAPER_SAVING_PCT
    found["cases"] = {
        name: {label: _case(runs, by, label) for label in by if by[label].policy != "uniform"}
        for name, by in cases.items()
    }
    found["assumed"] = {
        policy: {
            key: sum(found["cases"][f"{'-'.join(pair)}: {ASSUMED}"][policy][key] for pair in assumed) / len(assumed)
            for key in ("saving_pct", "slo_attainment", "hours_missed", "rejected")
        }
        for policy in PAPERS[1:] if assumed
    }  # fmt: skip
    found["says"] = _says(found["pairs"])
    _figures(found, {key: [runs[spec] for spec in each] for key, each in base.items()}, out)
    return found


def asleep_at_most_pct(loads: Loads) -> float:
    """Most of the GPUs' time that can be slept through [%], however they draw: all of the fourth GPU's, and the shared
    one's while no family asks for more than its own GPU answers."""
    asleep = [1 + (max(a, b) <= 1 / GPUS_PER_MODEL) for a, b in zip(*loads, strict=True)]
    return 100 * sum(asleep) / len(asleep) / GPUS


def _says(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """What the paper says without a number, of Figs. 4 and 5; high-high is its first pair."""
    saved = [[rows[policy]["saving_pct"]["mean"] for policy in reversed(PAPERS)] for rows in pairs.values()]
    in_slo = {pair: {p: row["slo_attainment"]["mean"] for p, row in rows.items()} for pair, rows in pairs.items()}
    missed = {
        pair: sum(one["mean"] for one in rows["packed_uniform"]["hours_missed"].values())
        for pair, rows in pairs.items()
    }
    high = "-".join(PAIRS[0])
    return {
        "wattwiser saves most, packed_uniform more than sharing_aware": all(
            ours > packed > aware > 0 for ours, aware, packed, _ in saved
        ),
        "packed_uniform misses the SLO in most pairs": 2 * sum(hours > 0 for hours in missed.values()) > len(pairs),
        "sharing_aware misses more than packed_uniform, high-high": in_slo[high]["sharing_aware"]
        < in_slo[high]["packed_uniform"],
    }


def _fig3(spec: PairSpec) -> dict[str, Any]:
    """Fig. 3(c): shares of each family's requests by GPU and bin. Also whether the shared GPU serves only families that
    ask for more than one GPU answers. Loads from 0.9 of that up to it are not judged: the hysteresis holds there."""
    shares, own = shares_of_gpus(spec), 1 / GPUS_PER_MODEL
    serves = [
        (load, shares[family]["gpu1"][at] > 0)
        for family, loads in zip((spec.first, spec.second), spec.loads, strict=True)
        for at, load in enumerate(loads)
    ]
    as_drawn = all(used == (load > own) for load, used in serves if not 0.9 * own <= load <= own)
    return {"shares": shares, "shared_gpu_serves_above_half_alone": as_drawn}


def _by_bins(pair: tuple[str, str], step_s: float) -> dict[str, dict[str, PairSpec]]:
    """Runs of one seed by the width of SWIM's bins, and with what the paper leaves open assumed in its favour."""
    found = {}
    for width in BINS_MIN[1:]:
        loads = swim(0, width), swim(1, width)
        step = step_s * max(width / HOUR_MIN, BIN_LEAST)
        found[f"bins of {width} min"] = {
            policy: PairSpec(*pair, policy, 1, loads, f"bins of {width} min", step) for policy in PAPERS
        }
    slept = f"bins of {BINS_MIN[-1]} min, a sleeping GPU draws nothing"
    found[slept] = {
        policy: replace(spec, label=slept, sleep=0.0) for policy, spec in found[f"bins of {BINS_MIN[-1]} min"].items()
    }
    found[ASSUMED] = {
        policy: replace(spec, label=ASSUMED, changed=AT_ONCE, max_rps=COUNTED) for policy, spec in found[slept].items()
    }
    return found


def _cases(pairs: Sequence[tuple[str, str]], loads: Loads, step_s: float) -> dict[str, dict[str, PairSpec]]:
    """Runs of one seed in which one thing is otherwise, each beside its own uniform."""
    kind = V100_32GB
    lower: Loads = tuple(tuple(LOW + (x - LOW) * (FITS - LOW) / (HIGH - LOW) for x in each) for each in loads)  # type: ignore[assignment]
    changes: dict[str, dict[str, Any]] = {
        "nothing turned": {},
        "no contention on a shared GPU": {"contention": False},
        f"loads up to {FITS:.0%}": {"loads": lower},
        "started and loaded at once": {"changed": AT_ONCE},
        "both": {"changed": AT_ONCE, "loads": lower},
        "model_max_rps taken for 0.8 of it": {"max_rps": 0.8},
        "SLO halved": {"slo": 0.5},
        "a sleeping GPU draws as an idle one": {"sleep": kind.idle_w / kind.sleep_w},
        "a sleeping GPU draws nothing": {"sleep": 0.0},
        f"with {HOST_W:g} W of host": {"host_w": HOST_W},
    }
    for name in CHANGED:
        for factor in (1 - TURNED, 1 + TURNED):
            changes[f"{name} x {factor:g}"] = {"changed": ((name, factor),)}
    found: dict[str, dict[str, PairSpec]] = {}
    for pair in pairs:
        found |= {f"{'-'.join(pair)}: {label}": by for label, by in _by_bins(pair, step_s).items()}
    for label, change in changes.items():
        turned = " x " in label
        for pair in pairs[:1] if turned else pairs:
            spec = PairSpec(*pair, "uniform", 1, loads, step_s=step_s)
            compared = POLICIES if label in BESIDE else PAPERS
            by = {policy: replace(spec, policy=policy, label=label, **change) for policy in compared}
            if turned:
                by = {policy: by[policy] for policy in ("uniform", "packed_uniform", "wattwiser")}
            if label == "nothing turned":
                ahead = (("wake_lookahead_s", WAKE_UP_S),)
                by["wattwiser, looking ahead"] = replace(by["wattwiser"], label="looking ahead", planner=ahead)
                literal = (("literal", True),)
                by["wattwiser, preset literal"] = replace(by["wattwiser"], label="literal", planner=literal)
                left = (("share_left", True),)
                by["wattwiser, preset shared_left"] = replace(by["wattwiser"], label="shared_left", planner=left)
            found[f"{spec.pair}: {label}"] = by
    return found


def _case(runs: Mapping[PairSpec, StudyRun], by: Mapping[str, PairSpec], label: str) -> dict[str, float]:
    mine, theirs = runs[by[label]], runs[by["uniform"]]
    return {
        "saving_pct": 100 * (1 - mine["power_w"] / theirs["power_w"]),
        "slo_attainment": mine["slo_attainment"],
        "hours_missed": sum(_missed(mine).values()),
        "rejected": mine["rejected"],
    }


def _over_slo(run: StudyRun) -> dict[str, list[float]]:
    """P95 of every hour over the SLO, by family; of a histogram of 4 % bins."""
    spec = run.spec
    return {
        family: [ms / (MODELS[family].slo_ms * spec.slo) for ms in run.series[f"{family}.p95_ms"]]
        for family in (spec.first, spec.second)
    }


def _missed(run: StudyRun) -> dict[str, int]:
    return {family: sum(ratio > 1 for ratio in each) for family, each in _over_slo(run).items()}


def _row(runs: Sequence[StudyRun]) -> dict[str, Any]:
    """Row of a policy for one pair, over its seeds."""
    families = (runs[0].spec.first, runs[0].spec.second)

    def each(pick: Callable[[StudyRun], float]) -> dict[str, Any]:
        return asdict(over_seeds([pick(run) for run in runs]))

    return {
        "power_w": each(lambda run: run["power_w"]),
        "joules_per_request": each(lambda run: run["joules_per_request"]),
        "slo_attainment": each(lambda run: run["slo_attainment"]),
        "rejected": each(lambda run: run["rejected"]),
        "requests": each(lambda run: run["answered"]),
        "replans": each(lambda run: run["reconfigurations"]),
        "p95_over_slo": {f: each(lambda run, f=f: run["families"][f]["p95_ms"] / MODELS[f].slo_ms) for f in families},  # type: ignore[misc]
        "hours_missed": {f: each(lambda run, f=f: _missed(run)[f]) for f in families},  # type: ignore[misc]
    }


def _fig2() -> dict[str, list[float]]:
    """Weights of an unshared GPU to a shared one as the planner deals them, at 1.2 x model_max_rps: Fig. 2(c), (d)."""

    gpus: Any = [SimpleNamespace(cap_rps=1.0, sharing_factor=1), SimpleNamespace(cap_rps=0.5, sharing_factor=2)]
    found = {"sharing_aware": sharing_weights(1.2, gpus), "wattwiser": sharing_load_weights(1.2, gpus)}
    return {name: [weight / weights[-1] for weight in weights] for name, weights in found.items()}


def _figures(found: Mapping[str, Any], runs: Mapping[Any, Sequence[StudyRun]], out: Path) -> None:
    power = [
        {
            "pair": pair,
            "policy": policy,
            "power_w": row["power_w"]["mean"],
            "of_uniform": 1 - row["saving_pct"]["mean"] / 100,
        }
        for pair, rows in found["pairs"].items()
        for policy, row in rows.items()
    ]
    plots.write_csv(out, "fig05", power)
    hours = [
        {
            "pair": "-".join(pair),
            "policy": policy,
            "seed": run.spec.seed,
            "family": family,
            "hour": hour,
            "p95_over_slo": ratio,
        }
        for (pair, policy), each in runs.items()
        for run in each
        for family, ratios in _over_slo(run).items()
        for hour, ratio in enumerate(ratios)
    ]
    plots.write_csv(out, "fig04", hours)
    pair = next(iter(runs))[0]
    first = {policy: runs[pair, policy][0] for policy in POLICIES}
    bins = len(found["loads"]["FB-2009"])
    at = list(range(bins))
    panels: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]] = {
        f"{family}: p95 over SLO": {
            policy: (at, [min(ratio, 3.0) for ratio in _over_slo(run)[family][:bins]]) for policy, run in first.items()
        }
        for family in pair
    }
    panels["power [W]"] = {policy: (at, run.series["power_w"][:bins]) for policy, run in first.items()}
    shares = found["fig3"]["shares"]
    panels |= {f"{f}: share of its requests": {g: (at, each) for g, each in by.items()} for f, by in shares.items()}
    rows = [
        {"family": family, "gpu": gpu, "hour": hour, "share": share}
        for family, by in shares.items()
        for gpu, each in by.items()
        for hour, share in enumerate(each)
    ]
    plots.write_csv(out, "fig03c", rows)
    plots.lines(panels, out, "fig03", "hour of SWIM", "")
