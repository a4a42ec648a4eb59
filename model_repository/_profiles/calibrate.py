"""Fit the constants of the modelled A100 profiles to public measurements; print every error; write constants.json.

Run: `python model_repository/_profiles/calibrate.py [--data FOLDER] [--write]`. The data stay where they are (README.md
names them); TREFOIL_DATA or ../shared/data is their default folder. What is fitted to what:

1. LatencyLaw, eight constants of a whole A100-80GB, to one process per MIG slice of the ten convolutional networks in
   profiles/parvagpu_a100-80gb_mig.csv, batches 1 to 64. Error: every model predicted by a fit without it; BERT, the one
   transformer, is never fitted (the file's BERT hardly scales with the slice, and does not say its sequence length).
2. Work scale, CV and the share that no slice shortens (host_ms where images are decoded; launch_scale for questions,
   which need no decoding) of each application, to the p95 of the five rows of profiles/clover_arrival_sweep.csv that
   are not saturated, by serving the artifact's arrivals again (its generator seeds them with 1; FIFO; 2 or 4 slices).
3. Idle watts of two A100, joules per request of six (application, mix), to the same 15 rows, relative errors squared.
   joules and gamma of each family then reproduce its two joules exactly, given eta.
4. BASE at its fastest rate apart: how much slower it serves and how many joules it takes when it never rests.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cost_law_fit import (
    Floats,
    Replayed,
    Timing,
    bisect,
    fit_latency,
    log_errors,
    replay,
    simplex,
)

from trefoil.core.device_types import A100_40GB, A100_80GB, slice_type
from trefoil.core.units import MS_PER_S
from trefoil.profiler import cost_law

HERE = Path(__file__).resolve().parent
TIMINGS, SWEEP = "profiles/parvagpu_a100-80gb_mig.csv", "profiles/clover_arrival_sweep.csv"
BATCH_MOST = 64
ETA, MU = 0.5, 0.2  # assumed; see trefoil/profiler/cost_law.py
DECODES = ("efficientnet", "yolo")  # their services decode images while they hold the slice
BANDWIDTH = 1555.0 / 2039.0  # data sheets: HBM of the 40 GB over that of the 80 GB board
NEVER_FITTED = "bert"
GPUS = 2
SEED = 1  # of the artifact's generator
REQUESTS = (2000, 1000, 1000)  # of the artifact's sweep, slowest rate first
# Items of a request; the mix of BASE and of the fixed configuration as (variant, slice) per GPU.
APPLICATIONS: dict[str, tuple[int, dict[str, tuple[tuple[str, str], ...]]]] = {
    "efficientnet": (
        8,
        {
            "base": (("efficientnet-b7", "7g.40gb"),),
            "clover": (("efficientnet-b3", "3g.20gb"), ("efficientnet-b3", "4g.20gb")),
        },
    ),
    "albert": (
        1,
        {
            "base": (("albert-xxlarge", "7g.40gb"),),
            "clover": (("albert-base", "3g.20gb"), ("albert-large", "4g.20gb")),
        },
    ),
    "yolo": (
        8,
        {"base": (("yolov5x6", "7g.40gb"),), "clover": (("yolov5l", "3g.20gb"), ("yolov5x", "4g.20gb"))},
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the sweep. `saturated`: BASE at its fastest rate."""

    service: str
    scheme: str
    gap_s: float
    requests: int
    p95_ms: float
    joules: float
    saturated: bool


def read_timings(data: Path) -> list[Timing]:
    """One process per slice, batches up to BATCH_MOST, what fitted the memory. Times from throughput: more digits."""
    timings = []
    for cells in csv.DictReader((data / TIMINGS).read_text().splitlines()):
        batch, gpcs, rate = int(cells["batch"]), cells["mig_gpcs"], float(cells["throughput_inf_per_s_per_proc"])
        if cells["n_mps_procs"] != "1" or batch > BATCH_MOST or rate <= 0:
            continue
        shape = next(s for s in A100_80GB.slice_types if s.name.startswith(f"{gpcs}g."))
        on = cost_law.machine(A100_80GB, shape, max(A100_80GB.clocks_mhz), 1.0)
        timings.append(Timing(cells["model"], on, batch, MS_PER_S * batch / rate))
    return timings


def read_sweep(data: Path) -> list[Row]:
    """The 18 rows, slowest rate of each (service, scheme) first."""
    cells = list(csv.DictReader((data / SWEEP).read_text().splitlines()))
    rows: list[Row] = []
    for one in sorted(cells, key=lambda c: (c["service"], c["scheme"], -float(c["mean_interarrival_s"]))):
        seen = sum(1 for r in rows if (r.service, r.scheme) == (one["service"], one["scheme"]))
        saturated = one["scheme"] == "base" and seen == len(REQUESTS) - 1
        numbers = (float(one["mean_interarrival_s"]), REQUESTS[seen], float(one["p95_ms"]))
        rows.append(Row(one["service"], one["scheme"], *numbers, float(one["J_per_request"]), saturated))
    return rows


def means_ms(
    model: cost_law.LawConstants, features: dict[str, cost_law.Features], row: Row, slower: float = 1.0
) -> list[float]:
    """Mean service time of a request on each of the slices that served this row."""
    items, mixes = APPLICATIONS[row.service]
    found = []
    for variant, name in mixes[row.scheme] * GPUS:
        shape = slice_type(A100_40GB, name)
        point = cost_law.point(
            model, row.service, features[variant], A100_40GB, shape, max(A100_40GB.clocks_mhz), items
        )
        found.append(point.mean_ms * slower)
    return found


class Sweep:
    """The artifact's load sweep, to be served again with any constants."""

    def __init__(self, rows: list[Row], features: dict[str, dict[str, cost_law.Features]]) -> None:
        self.rows, self.features = rows, features
        most = max(REQUESTS)
        self._gaps = np.random.RandomState(SEED).exponential(1.0, most)
        self._normals = np.random.default_rng(SEED).standard_normal(most)
        self._kept: dict[tuple[Row, float, tuple[float, ...]], Replayed] = {}

    def serve(self, model: cost_law.LawConstants, row: Row, slower: float = 1.0) -> Replayed:
        """One row with these constants."""
        means, cv = tuple(means_ms(model, self.features[row.service], row, slower)), model.families[row.service].cv
        if (row, cv, means) not in self._kept:
            arrivals = np.concatenate(([0.0], np.cumsum(self._gaps[: row.requests - 1]))) * row.gap_s
            self._kept[row, cv, means] = replay(arrivals, self._normals[: row.requests], means, cv)
        return self._kept[row, cv, means]

    def of(self, service: str, saturated: bool) -> list[Row]:
        """The rows of one application."""
        return [r for r in self.rows if r.service == service and r.saturated == saturated]


def with_family(latency: cost_law.LatencyLaw, service: str, times: Floats, largest: float) -> cost_law.LawConstants:
    """A model with one family whose energy is not fitted yet; `times`: logs of fixed part, work_scale, cv."""
    fixed, work_scale, cv = np.exp(times).tolist()
    host_ms, launch_scale = (fixed, 1.0) if service in DECODES else (0.0, fixed)
    family = cost_law.FamilyLaw(APPLICATIONS[service][0], host_ms, launch_scale, work_scale, cv, 1.0, 0.0, largest)
    return cost_law.LawConstants(latency, {service: family}, ETA, MU, BANDWIDTH, A100_40GB.idle_w)


def fit_times(sweep: Sweep, latency: cost_law.LatencyLaw, service: str) -> cost_law.LawConstants:
    """host_ms or launch_scale, work_scale and cv from the p95 of the rows that are not saturated."""
    largest = max(f.macs for f in sweep.features[service].values())

    def loss(times: Floats) -> float:
        if float(np.abs(times - start).max()) > 5:
            return math.inf
        model = with_family(latency, service, times, largest)
        rows = sweep.of(service, saturated=False)
        return sum(math.log(sweep.serve(model, row).p95_ms / row.p95_ms) ** 2 for row in rows)

    start = np.log(np.array([100.0 if service in DECODES else 5.0, 2.0, 0.15]))
    return with_family(latency, service, simplex(loss, start), largest)


def fit_joules(
    sweep: Sweep, models: dict[str, cost_law.LawConstants], without: Row | None = None
) -> tuple[float, dict[tuple[str, str], float]]:
    """Idle watts of one GPU and joules per request of each (application, mix), from the rows that are not saturated."""
    rows = [r for r in sweep.rows if not r.saturated and r != without]
    mixes = sorted({(r.service, r.scheme) for r in rows})
    matrix = np.zeros((len(rows), 1 + len(mixes)))
    for i, row in enumerate(rows):
        matrix[i, 0] = gpu_seconds(sweep, models[row.service], row)
        matrix[i, 1 + mixes.index((row.service, row.scheme))] = 1.0
    measured = np.array([r.joules for r in rows])
    solved = np.linalg.lstsq(matrix / measured[:, None], np.ones(len(rows)), rcond=None)[0]
    return float(solved[0]), dict(zip(mixes, solved[1:].tolist(), strict=True))


def gpu_seconds(sweep: Sweep, model: cost_law.LawConstants, row: Row, slower: float = 1.0) -> float:
    """Seconds of GPU, busy or not, that each request of a row has to itself."""
    served = sweep.serve(model, row, slower)
    return GPUS * served.duration_s / served.requests


def fit_energy(
    model: cost_law.LawConstants, service: str, features: dict[str, cost_law.Features], base_j: float, mix_j: float
) -> cost_law.FamilyLaw:
    """joules and gamma that give BASE and the fixed mix their joules per request."""
    items, mixes = APPLICATIONS[service]

    def shaped(variant: str, name: str) -> float:
        """Energy with joules = 1, gamma = 0."""
        return cost_law.energy_j(model, service, features[variant], A100_40GB, slice_type(A100_40GB, name), items)

    family = model.families[service]
    joules = base_j / shaped(*mixes["base"][0])

    def excess(gamma: float) -> float:
        """Measured over modelled joules of the mix, whose slices take equal shares; rises with gamma."""
        powers = [(features[v].macs / family.macs_largest) ** gamma * shaped(v, s) for v, s in mixes["clover"]]
        return math.log(mix_j / (joules * sum(powers) / len(powers)))

    values = asdict(family) | {"joules": joules, "gamma": bisect(excess, 0.0, 6.0)}
    return cost_law.FamilyLaw(**values)


def slower_when_saturated(sweep: Sweep, model: cost_law.LawConstants, row: Row) -> float:
    """How much longer BASE serves at its fastest rate than the unsaturated rows say, to give its p95."""
    return bisect(lambda slower: sweep.serve(model, row, slower).p95_ms - row.p95_ms, 0.5, 2.0, rounds=30)


def leave_one_out(
    features: dict[str, cost_law.Features], timings: list[Timing], fitted: cost_law.LatencyLaw
) -> dict[str, Any]:
    """Errors of every measured model under a fit without it."""
    errors = {}
    for name in features:
        train = [t for t in timings if t.model not in (name, NEVER_FITTED)]
        own = [t for t in timings if t.model == name]
        held = log_errors(fitted if name == NEVER_FITTED else fit_latency(features, train), features, own)
        inside = log_errors(fitted, features, own)
        errors[name] = {
            "rows": len(own),
            "held_out_median": float(np.median(np.abs(np.expm1(held)))),
            "held_out_p90": float(np.quantile(np.abs(np.expm1(held)), 0.9)),
            "held_out_bias": float(np.expm1(np.mean(held))),
            "fitted_median": float(np.median(np.abs(np.expm1(inside)))),
        }
    return errors


def calibrate(data: Path) -> dict[str, Any]:
    """Everything: constants and errors, as constants.json holds them."""
    features = cost_law.read_features(tomllib.loads((HERE / "features.toml").read_text()))
    timings = read_timings(data)
    fitted = fit_latency(features["measured"], [t for t in timings if t.model != NEVER_FITTED])
    sweep = Sweep(read_sweep(data), features)
    models = {service: fit_times(sweep, fitted, service) for service in APPLICATIONS}
    idle_w, joules = fit_joules(sweep, models)
    families, errors = {}, []
    for service, model in models.items():
        own = fit_energy(model, service, features[service], joules[service, "base"], joules[service, "clover"])
        (row,) = sweep.of(service, saturated=True)
        slower = slower_when_saturated(sweep, model, row)
        each_s = gpu_seconds(sweep, model, row, slower)
        families[service] = {
            "law": asdict(own),
            "joules_per_request": {mix: joules[service, mix] for mix in APPLICATIONS[service][1]},
            "saturated": {
                "slower": slower,
                "joules_per_request": row.joules - idle_w * each_s,
                "gpu_w": row.joules / each_s,
            },
        }
        errors += [row_error(sweep, models, r, idle_w, joules) for r in sweep.rows if r.service == service]
    hashes = {name: hashlib.sha256((data / name).read_bytes()).hexdigest() for name in (TIMINGS, SWEEP)}
    return {
        "sources_sha256": hashes,
        "machine_of_latency": "A100-SXM4-80GB, MIG, eager PyTorch",
        "machine_of_energy": "2 x A100-40GB, MIG, CLOVER's Flask services",
        "eta": ETA,
        "mu": MU,
        "bandwidth": BANDWIDTH,
        "idle_w": idle_w,
        "latency": asdict(fitted),
        "families": families,
        "errors": {"latency": leave_one_out(features["measured"], timings, fitted), "sweep": errors},
    }


def row_error(
    sweep: Sweep,
    models: dict[str, cost_law.LawConstants],
    row: Row,
    idle_w: float,
    joules: dict[tuple[str, str], float],
) -> dict[str, Any]:
    """Measured and modelled figures of one row. `joules_held_out`: by a fit of joules without this row."""
    served = sweep.serve(models[row.service], row)
    each_s = gpu_seconds(sweep, models[row.service], row)
    modelled = each_s * idle_w + joules[row.service, row.scheme]
    other_w, others = fit_joules(sweep, models, without=row)
    return {
        "service": row.service,
        "scheme": row.scheme,
        "gap_s": row.gap_s,
        "saturated": row.saturated,
        "joules": row.joules,
        "joules_model": modelled,
        "joules_error": modelled / row.joules - 1.0,
        "joules_held_out": (each_s * other_w + others[row.service, row.scheme]) / row.joules - 1.0,
        "p95_ms": row.p95_ms,
        "p95_ms_model": served.p95_ms,
        "p95_error": served.p95_ms / row.p95_ms - 1.0,
    }


def rounded(value: Any) -> Any:
    """Six significant digits: what a fit can be reproduced to on another machine."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def report(found: dict[str, Any]) -> None:
    """Print constants and errors."""
    print("latency law (whole A100-80GB):", json.dumps(found["latency"]))
    print(f"{'held-out model':14s} rows  median   p90   bias  | in the fit")
    for name, e in found["errors"]["latency"].items():
        held = f"{e['held_out_median']:6.1%} {e['held_out_p90']:6.1%} {e['held_out_bias']:+6.1%}"
        print(f"{name:14s} {e['rows']:4d} {held}  | {e['fitted_median']:6.1%}")
    print(f"idle: {found['idle_w']:.2f} W a GPU")
    for name, family in found["families"].items():
        print(name, json.dumps(family))
    print("service      mix    gap_s  J measured  modelled  error  held out    p95 measured  modelled  error [ms]")
    for e in found["errors"]["sweep"]:
        energy = f"{e['joules']:10.1f} {e['joules_model']:9.1f} {e['joules_error']:+7.1%} {e['joules_held_out']:+7.1%}"
        latency = f"{e['p95_ms']:14.1f} {e['p95_ms_model']:9.1f} {e['p95_error']:+7.1%}"
        note = "   fastest BASE: fitted apart" if e["saturated"] else ""
        print(f"{e['service']:12s} {e['scheme']:6s} {e['gap_s']:5.2f} {energy} {latency}{note}")


def main() -> None:
    """Fit, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("TREFOIL_DATA", HERE.parents[1] / ".." / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=default)
    parser.add_argument("--write", action="store_true", help="write constants.json")
    arguments = parser.parse_args()
    missing = [name for name in (TIMINGS, SWEEP) if not (arguments.data / name).is_file()]
    if missing:
        parser.error(f"no {' and no '.join(missing)} in {arguments.data}; name it: --data or TREFOIL_DATA")
    found = rounded(calibrate(arguments.data))
    report(found)
    if arguments.write:
        (HERE / "constants.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
