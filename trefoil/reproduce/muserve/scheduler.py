"""mu-Serve's scheduler: completion times and throughput of one model instance, and what it is worth in power.

Source: mu-Serve section 4.3, Figs. 3, 9, 10, 15, 16, Tables 2, 3; A.3, Figs. 17, 18. A job of N tokens takes CONST_S +
    TOKEN_S * N, as in the authors' public simulator. A job that waited `AGING` mean times of a job longer goes before
    one a class shorter. Theirs goes by waiting time from 100 s on. Gamma gaps, not sorted; load is the rate over
    1 / (mean time of a job).
Order: the turn of the queue that serves live (dispatcher/queues/ssjf.py); `oracle`: the shortest first.
Throughput: what is answered while jobs arrive, over that time.
Deviations: the paper names neither its rates nor its spreads; here LOADS and SPREADS. LMSYS is not public: lengths.py.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.planners.muserve.pipelines import Arrival, Pipelines, Stage
from dispatcher.queues.ssjf import AGING
from trefoil.reproduce import plots
from trefoil.reproduce.muserve import study as no_scheduler
from trefoil.reproduce.muserve.experiment import POLICIES, turn_s
from trefoil.reproduce.muserve.lengths import (
    CLASSES,
    FAMILY,
    PREDICTORS,
    TASKS,
    TASKS_CARD,
    Drawn,
    Lengths,
    card,
    card_digest,
)
from trefoil.reproduce.muserve.models import TOP_MHZ
from trefoil.reproduce.muserve.study import ATTAINED, BASE, SETTINGS, TURNED, MuserveOptions
from trefoil.reproduce.runs import StudyRun, key_of, run_all, source_hash
from trefoil.reproduce.scores import SeedStatistics, over_seeds
from trefoil.reproduce.tables import markdown

OPTIONS: Final = replace(no_scheduler.OPTIONS, slo_scales=(5, 10), rates=(1, 2, 3, 4))
QUICK: Final = replace(no_scheduler.QUICK, slo_scales=(5, 10), rates=(1, 3))
METHODS: Final = (
    "fifo", "oracle", "ssjf", "multi", "classes", "binary", "regression", "right classes", "paper's accuracy",
)  # fmt: skip
LOADS: Final = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)
SPREADS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
SPREAD_LOAD: Final = 0.9  # at which gaps are spread
CONST_S, TOKEN_S = 0.1, 0.02
JOBS: Final = 2000
SOURCES: Final = ("azure_conv", "azure_code", FAMILY, TASKS)
TASK_METHODS: Final = ("fifo", "oracle", "ssjf", "right classes")
REPEATED: Final = (0.0, 0.25, 0.5, 0.75)
UNAGED: Final = 2000.0  # mean service times: no job of these runs waits so long
UNAGED_LOADS: Final = (0.9, 1.5, 3.0)
COUNTS: Final = (2, 3, 4, 5, 7, 10, 20)  # of classes
SCORES: Final = ("accuracy", "f1", "l1", "mse", "rank_correlation")
PAPER: Final = {
    "load": ["paper, rates", "", "-49.8 %, 3.6x", "-41.3 %, 2.5x"],
    "CV of gaps": ["paper, spreads", "", "-43.8 %, 3.6x", "-38.6 %, 2.2x"],
}
PAPER_TABLES: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {  # accuracy and F1 of Tables 2 and 3
    "minilm": {
        "ordinal_mse": (0.4290, 0.3563), "ordinal_l1": (0.4272, 0.3332), "classes": (0.4599, 0.4021),
        "regression_mse": (0.4014, 0.3318), "regression_l1": (0.4383, 0.3477),
    },
    "tiny": {
        "ordinal_mse": (0.3947, 0.3121), "ordinal_l1": (0.4097, 0.3193), "classes": (0.4193, 0.3687),
        "regression_mse": (0.2425, 0.0781), "regression_l1": (0.2425, 0.0781),
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """Spec of one run of one model instance. `repeated`: share of requests that repeat a prompt, of lengths `tasks`."""

    method: str
    seed: int
    load: float = 0.9
    cv: float = 1.0
    lengths: str = "azure_conv"
    encoder: str = "minilm"
    classes: int = CLASSES
    repeated: float = 0.0
    jobs: int = JOBS
    aging: float = AGING
    const_s: float = CONST_S
    token_s: float = TOKEN_S

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.method} load {self.load:g} CV {self.cv:g} seed {self.seed}"

    @property
    def work(self) -> float:
        """About how many requests are played."""
        return float(self.jobs)

    @property
    def key(self) -> str:
        """Key of the run, whatever process computes it."""
        return key_of(self, source_hash("", __name__) + card_digest())

    def play(self) -> StudyRun:
        """Simulate it."""
        drawn = Lengths.of(self.lengths).draw(self.jobs, self.seed, self.classes, self.repeated)
        service_s = self.const_s + self.token_s * drawn.tokens
        mean_s = self.const_s + self.token_s * float(Lengths.of(self.lengths).tokens.mean())
        rng, shape = np.random.default_rng((self.seed, 1)), self.cv**-2
        at_s = np.cumsum(rng.gamma(shape, mean_s / (shape * self.load), self.jobs))
        requests = zip(at_s.tolist(), service_s.tolist(), self._turns(drawn, at_s, mean_s), strict=True)
        arrivals = [Arrival(at, "", service, turn_s) for at, service, turn_s in requests]
        answers = Pipelines({"": ((Stage(0, 1.0),),)}, 1, TOP_MHZ).serve(arrivals, math.inf)
        answers.sort(key=lambda answer: answer.arrived_s)
        jct_s = np.array([answer.latency_s for answer in answers])
        done = sum(answer.answered_s <= at_s[-1] for answer in answers)
        found = {
            "jct_s": float(jct_s.mean()),
            "jct_s_p99": float(np.quantile(jct_s, 0.99)),
            "throughput_per_s": done / float(at_s[-1]),
        }
        return StudyRun(self, found, {})

    def _turns(self, drawn: Drawn, at_s: Any, mean_s: float) -> list[float]:
        if self.method == "fifo":
            return [float(s) for s in at_s]
        if self.method == "oracle":
            return [float(tokens) for tokens in drawn.tokens]
        classes = drawn.predicted(self.method, self.encoder)
        wide = (CLASSES - 1) / (self.classes - 1)  # the last class waits as long, whatever the number of classes
        if wide != 1.0:
            return [float(s) + self.aging * mean_s * wide * float(c) for s, c in zip(at_s, classes, strict=True)]
        return [turn_s(float(s), mean_s, float(class_), self.aging) for s, class_ in zip(at_s, classes, strict=True)]


def about() -> dict[str, str]:
    """What the study is of."""
    return {
        "paper": "mu-Serve",
        "basis": "simulated on modelled operators, errors by the measured confusion matrix",
        "data": "gamma gaps; generated tokens of Azure's LLM traces, of pydoc",
    }


def methods() -> tuple[str, ...]:
    """Methods whose predictors were trained on the larger encoder."""
    trained = card()["minilm"]
    return tuple(method for method in METHODS if method not in PREDICTORS or PREDICTORS[method] in trained)


def study(options: MuserveOptions, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play everything; figures as CSV and PNG in `out`, kept runs below it."""
    base = SchedulerSpec("fifo", 1)
    axes = {
        "load": {x: replace(base, load=x) for x in LOADS},
        "CV of gaps": {x: replace(base, load=SPREAD_LOAD, cv=x) for x in SPREADS},
    }
    cases = {"unchanged": base, **{f"lengths of {name}": replace(base, lengths=name) for name in SOURCES[1:3]}}
    for name in ("aging", "const_s", "token_s"):
        for factor in (1 - TURNED, 1 + TURNED):
            cases[f"{name} x {factor:g}"] = replace(base, **{name: getattr(base, name) * factor})
    specs = [
        replace(spec, method=method, seed=seed)
        for spec in (*(spec for points in axes.values() for spec in points.values()), *cases.values())
        for method in methods()
        for seed in options.seeds
    ]
    encoders = {
        f"{encoder}, {method}": replace(base, method=method, encoder=encoder)
        for encoder in ("minilm", "tiny")
        for method in ("multi", "ordinal L1", "classes", "binary", "regression", "regression L1")
        if PREDICTORS[method] in card().get(encoder, {})
    }
    specs += [replace(spec, seed=seed) for spec in encoders.values() for seed in options.seeds]
    tasks = _task_points(replace(base, lengths=TASKS))
    specs += [
        replace(spec, method=method, seed=seed)
        for points in tasks.values()
        for spec in points.values()
        for method in TASK_METHODS
        for seed in options.seeds
    ]
    runs = run_all(specs, out / "runs", 1, lambda _text: None)  # milliseconds each

    def at(spec: SchedulerSpec, played: Sequence[str] = methods()) -> dict[str, Any]:
        return {method: _point(runs, replace(spec, method=method), options.seeds) for method in played}

    found: dict[str, Any] = {
        "axes": {axis: {f"{x:g}": at(spec) for x, spec in points.items()} for axis, points in axes.items()},
        "cases": {label: at(spec) for label, spec in cases.items()},
        "tasks": {
            axis: {f"{x:g}": at(spec, TASK_METHODS) for x, spec in points.items()} for axis, points in tasks.items()
        },
        "task_scores": {
            family: {name: one[name] for name in ("accuracy", "rank_correlation")}
            for family, one in json.loads(TASKS_CARD.read_text(encoding="utf-8"))["families"].items()
        },
        "encoders": {label: _point(runs, spec, options.seeds) for label, spec in encoders.items()},
        "lengths": {name: _quantiles(name) for name in SOURCES},
        "predictors": {name: each for name, each in card().items() if name != "data"},
        "power": _power(options, out, say),
    }
    found["headline"] = _headline(found)
    _figures(found, out)
    return found


def _task_points(base: SchedulerSpec) -> dict[str, dict[float, SchedulerSpec]]:
    """Runs on the lengths of the three tasks: Figs. 9 and 10, hot inputs, and the ablation of the number of classes."""
    return {
        "load": {x: replace(base, load=x) for x in LOADS},
        "CV of gaps": {x: replace(base, load=SPREAD_LOAD, cv=x) for x in SPREADS},
        "repeated prompts": {x: replace(base, repeated=x) for x in REPEATED},
        "classes": {float(x): replace(base, classes=x) for x in COUNTS},
        "unaged at a load of": {x: replace(base, load=x, aging=UNAGED) for x in UNAGED_LOADS},
    }


def _headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the paper states of Figs. 9, 10 and 3, section 3.3 and Table 2, of the three tasks."""
    tasks, result = found["tasks"], dict[str, Any]()
    for axis, name in (("load", "load"), ("CV of gaps", "spread"), ("unaged at a load of", "unaged")):
        for method in TASK_METHODS[1:]:
            each = [by[method] for by in tasks[axis].values()]
            result[f"{name}_{method.replace(' ', '_')}"] = {
                "jct_pct": sum(one["jct_pct"]["mean"] for one in each) / len(each),
                "jct_pct_most": min(one["jct_pct"]["mean"] for one in each),
                "throughput_times_most": max(one["throughput_times"]["mean"] for one in each),
            }
    power = [by for label, by in found["power"].items() if label.startswith(("rate", "scale"))]
    ssjf = [by["muserve"]["ssjf"] for by in power if by["muserve"]["ssjf"]["attainment"]["mean"] >= ATTAINED]
    scaled = [by["alpaserve_scaling"]["ssjf"] for by in power]
    later = [
        by["alpaserve"]["ssjf"]["p99_over_slo"]["mean"] / by["alpaserve"]["fifo"]["p99_over_slo"]["mean"]
        for by in power
    ]
    result["power"] = {
        "muserve_times_most": max((one["times"]["mean"] for one in ssjf), default=1.0),
        "scaling_times_most": max(one["times"]["mean"] for one in scaled),
        "scheduler_saves_pct_most": max((-one["against_fcfs_pct"]["mean"] for one in ssjf), default=0.0),
        "p99_of_sched_pct": 100 * (min(later) - 1),
    }
    jct = {int(x): by["ssjf"]["jct_pct"]["mean"] for x, by in tasks["classes"].items()}
    mean_s = {label: one["jct_s"]["mean"] for label, one in found["encoders"].items()}
    small = found["predictors"]["tiny"]
    repeated = [by["ssjf"]["jct_s"]["mean"] for by in tasks["repeated prompts"].values()]
    return result | {
        "best_classes": min(jct, key=lambda classes: jct[classes]),
        "two_classes_are_worse_than_five": jct[2] > jct[CLASSES],
        "encoder_jct_pct": 100 * (mean_s["minilm, multi"] / mean_s["tiny, multi"] - 1),
        "classes_are_right_more_often": small["classes"]["accuracy"] > small["ordinal_mse"]["accuracy"],
        "cache_jct_pct": 100 * (repeated[2] / repeated[0] - 1),  # at half of the prompts repeated
        "accuracy": found["task_scores"][TASKS]["accuracy"],
    }


def _point(runs: Mapping[Any, StudyRun], spec: SchedulerSpec, seeds: Sequence[int]) -> dict[str, Any]:
    """Completion times and throughput over seeds; `jct_pct`, `throughput_times`: against first come, first served."""
    own = [runs[replace(spec, seed=seed)] for seed in seeds]
    first = [runs[replace(spec, method="fifo", encoder="minilm", seed=seed)] for seed in seeds]
    pairs = list(zip(own, first, strict=True))
    return {
        "jct_s": asdict(over_seeds([run["jct_s"] for run in own])),
        "jct_s_p99": asdict(over_seeds([run["jct_s_p99"] for run in own])),
        "jct_pct": asdict(over_seeds([100 * (run["jct_s"] / base["jct_s"] - 1) for run, base in pairs])),
        "throughput_times": asdict(over_seeds([a["throughput_per_s"] / b["throughput_per_s"] for a, b in pairs])),
    }


def _quantiles(name: str) -> dict[str, float]:
    tokens = Lengths.of(name).tokens
    found = {f"p{q}": float(np.percentile(tokens, q)) for q in (5, 25, 50, 75, 95, 99)}
    return {"mean": float(tokens.mean()), **found, "p95_over_p50": found["p95"] / found["p50"]}


def _power(options: MuserveOptions, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Power and time of all policies at varying lengths, by queue, with the paper's power. Then one seed with one
    constant changed, and with idle GPUs."""
    base = replace(BASE, duration_s=options.duration_s, lengths="azure_conv", **SETTINGS["busy"])
    points = {f"rate {x:g}": replace(base, rate_per_s=x) for x in options.rates}
    points |= {f"scale {x:g}": replace(base, slo_scale=x) for x in options.slo_scales if x != base.slo_scale}
    turned: dict[str, dict[str, Any]] = {}
    for name in ("active", "idle", "aging") if options.sweeps else ():
        for factor in (1 - TURNED, 1 + TURNED):
            turned[f"{name} x {factor:g}"] = {name: getattr(base, name) * factor}
    turned["GPUs idle while they wait, groups as AlpaServe chooses"] = {"waits_active": False, "group_size": 0}
    seeds = dict.fromkeys(points, options.seeds) | dict.fromkeys(turned, options.seeds[:1])
    points |= {label: replace(base, **change) for label, change in turned.items()}
    specs = {
        (label, policy, queue, seed): replace(spec, policy=policy, queue=queue, seed=seed)
        for label, spec in points.items()
        for policy in POLICIES
        for queue in ("fifo", "ssjf", *(("oracle",) if label == f"rate {base.rate_per_s:g}" else ()))
        for seed in seeds[label]
    }
    runs = run_all(specs.values(), out / "runs", options.jobs, say)

    def point(label: str, policy: str, queue: str) -> dict[str, Any]:
        own = [runs[specs[label, policy, queue, seed]] for seed in seeds[label]]
        first = [runs[specs[label, "alpaserve", "fifo", seed]] for seed in seeds[label]]
        fcfs = [runs[specs[label, policy, "fifo", seed]] for seed in seeds[label]]
        result: dict[str, SeedStatistics] = {
            name: over_seeds([run[name] for run in own])
            for name in ("power_w_per_gpu", "attainment", "p99_over_slo", "jct_s")
        }
        result["times"] = over_seeds([a["power_w"] / b["power_w"] for a, b in zip(first, own, strict=True)])
        result["against_fcfs_pct"] = over_seeds(
            [100 * (b["power_w"] / a["power_w"] - 1) for a, b in zip(fcfs, own, strict=True)]
        )
        return {name: asdict(each) for name, each in result.items()}

    found: dict[str, Any] = {}
    for label, policy, queue, _ in specs:
        found.setdefault(label, {}).setdefault(policy, {}).setdefault(queue, point(label, policy, queue))
    return found


def _figures(found: Mapping[str, Any], out: Path) -> None:
    plots.write_csv(out, "fig03", [{"lengths": name, **row} for name, row in found["lengths"].items()])
    shares = np.linspace(0, 1, 101)
    curves = {name: (list(np.quantile(Lengths.of(name).tokens, shares)), list(shares)) for name in SOURCES}
    plots.lines({"share of answers": curves}, out, "fig03", "tokens", "")
    for figure, axis in (("fig09", "load"), ("fig10", "CV of gaps")):
        points = found["axes"][axis]
        panels = {
            label: {
                method: ([float(x) for x in points], [by[method][name]["mean"] for by in points.values()])
                for method in methods()
            }
            for label, name in (("mean completion [s]", "jct_s"), ("throughput over FCFS", "throughput_times"))
        }
        plots.lines(panels, out, figure, axis, "", marked=True)
        rows = [
            {axis: x, "method": method, **{name: row[name]["mean"] for name in row}}
            for x, by in points.items()
            for method, row in by.items()
        ]
        plots.write_csv(out, figure, rows)
    rows = [
        {"encoder": size, "loss": loss, **{key: row[key] for key in SCORES}}
        for size in ("minilm", "tiny")
        for loss, row in found["predictors"].get(size, {}).items()
    ]
    plots.write_csv(out, "table2_3_fig15", rows)
    rows = [
        {"predictor": label, "jct_s": row["jct_s"]["mean"], "throughput_times": row["throughput_times"]["mean"]}
        for label, row in found["encoders"].items()
    ]
    plots.write_csv(out, "fig16", rows)
    rows = [
        {"at": at, "policy": policy, "queue": queue, **{name: each["mean"] for name, each in row.items()}}
        for at, by in found["power"].items()
        for policy, queues in by.items()
        for queue, row in queues.items()
    ]
    plots.write_csv(out, "fig07_08_17_18", rows)


def scheduler_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of the scheduler by name."""

    def cells(by: Mapping[str, Any]) -> list[str]:
        return [f"{by['fifo']['jct_s']['mean']:.1f} s"] + [
            f"{by[method]['jct_pct']['mean']:+.1f} %, {by[method]['throughput_times']['mean']:.2f}x"
            for method in list(by)[1:]
        ]

    result = {}
    methods_ = list(next(iter(found["cases"].values())))
    for name, points in (*found["axes"].items(), ("case", found["cases"])):
        rows = [[x, *cells(by)] for x, by in points.items()]
        if name in PAPER:
            rows.append([*PAPER[name], *[""] * (len(methods_) - 3)])
        result[{"load": "load", "CV of gaps": "spread", "case": "turned"}[name]] = markdown([name, *methods_], rows)
    for axis, points in found["tasks"].items():
        columns = [axis, *next(iter(points.values()))]
        result[f"tasks-{axis.split()[0].lower()}"] = markdown(columns, [[x, *cells(by)] for x, by in points.items()])
    rows = []
    for size in ("minilm", "tiny"):
        for loss, row in found["predictors"].get(size, {}).items():
            paper = PAPER_TABLES[size].get(loss)
            numbers = [f"{row[key]:.3f}" for key in SCORES]
            rows.append([f"{size}, {loss}", *numbers, "" if paper is None else f"{paper[0]:.3f}, {paper[1]:.3f}"])
    for name, row in found["predictors"]["controls"].items():
        rows.append([name, *(f"{row[key]:.3f}" for key in SCORES), ""])
    head = ["predictor", "accuracy", "F1", "L1", "MSE", "rank correlation", "paper: accuracy, F1"]
    result["predictors"] = markdown(head, rows)
    rows = [
        [label, f"{row['jct_s']['mean']:.1f} s", f"{row['jct_pct']['mean']:+.1f} %"]
        for label, row in found["encoders"].items()
    ]
    result["encoders"] = markdown(["encoder and loss, no cache", "mean completion", "against FCFS"], rows)
    rows = []
    for at, by in found["power"].items():
        for policy, queues in by.items():
            for queue, row in queues.items():
                missed = "" if row["attainment"]["mean"] >= ATTAINED else " (missed)"
                numbers = [f"{row['power_w_per_gpu']['mean']:.1f} W", f"{row['times']['mean']:.2f}x"]
                numbers += [f"{row['attainment']['mean']:.1%}{missed}", f"{row['p99_over_slo']['mean']:.2f}"]
                numbers += [f"{row['jct_s']['mean']:.2f} s", f"{row['against_fcfs_pct']['mean']:+.1f} %"]
                rows.append([at, f"{policy}, {queue}", *numbers])
    head = ["", "policy, queue", "power a GPU", "AlpaServe's over it", "in time", "p99 over SLO", "completion"]
    head.append("power, against FCFS")
    result["power"] = markdown(head, rows)
    rows = [[name, *(f"{each:.4g}" for each in row.values())] for name, row in found["lengths"].items()]
    result["lengths"] = markdown(["lengths", *next(iter(found["lengths"].values()))], rows)
    return result
