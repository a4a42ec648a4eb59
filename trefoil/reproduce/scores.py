"""Scores of runs: CLOVER's objective over time (Eq. 1 to 3), and means over seeds that show their spread."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.planners.clover.objective import delta_accuracy, delta_carbon, weighted
from trefoil.core.units import grams
from trefoil.reproduce.experiment import BASE_INTENSITY, Reference
from trefoil.reproduce.runs import PUE, StudyRun

SETTLED_S = 8 * 3600.0  # CLOVER's first window


@dataclass(frozen=True, slots=True)
class SeedStatistics:
    """Statistics of one figure over several seeds."""

    mean: float
    low: float
    high: float
    all: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def over_seeds(values: Sequence[float]) -> SeedStatistics:
    """Mean and range; NaN where there is nothing."""
    if not values:
        return SeedStatistics(math.nan, math.nan, math.nan, ())
    return SeedStatistics(sum(values) / len(values), min(values), max(values), tuple(values))


@dataclass(frozen=True, slots=True)
class ScoreCurve:
    """Curve of one run bin by bin (`at_s` in trace time): intensity, dC, dA, f [%], p95; empty bins left out."""

    at_s: tuple[float, ...]
    intensity: tuple[float, ...]
    carbon: tuple[float, ...]
    accuracy: tuple[float, ...]
    objective: tuple[float, ...]
    p95_ms: tuple[float, ...]

    def mean(self, from_s: float = 0.0) -> float:
        """Mean of the objective from a time on [%]; NaN without a bin."""
        values = [f for at, f in zip(self.at_s, self.objective, strict=True) if at >= from_s]
        return sum(values) / len(values) if values else math.nan


def objective_curve(result: StudyRun, reference: Reference) -> ScoreCurve:
    """Objective (Eq. 3) of every bin, from what was really drawn and answered in it; who was refused is a miss."""
    family, series = result.spec.family, result.series
    width_s = result.spec.span_s / result.spec.bins
    base_g = grams(reference.joules, BASE_INTENSITY, PUE)
    rows = []
    for at, ci, co2, rate, accuracy, p95 in zip(
        series["at_s"],
        series["intensity_g_per_kwh"],
        series["grams"],
        series[f"{family}.answered_per_s"],
        series[f"{family}.accuracy"],
        series[f"{family}.p95_ms"],
        strict=True,
    ):
        if rate <= 0 or accuracy is None:
            continue
        c, a = delta_carbon(co2 / (rate * width_s), base_g), delta_accuracy(accuracy, reference.accuracy)
        rows.append((at * result.spec.speedup, ci, c, a, weighted(result.spec.lambda_weight, c, a), p95))
    columns = zip(*rows, strict=True) if rows else [()] * 6
    return ScoreCurve(*(tuple(column) for column in columns))


def mean_objective(result: StudyRun, reference: Reference) -> float:
    """Objective (Eq. 3) of a whole run at a constant load: f is linear in grams and in accuracy.

    For flows, whose steps are longer than the bins of a curve and put all of their grams into one.
    """
    base_g = grams(reference.joules, BASE_INTENSITY, PUE)
    lost = delta_accuracy(result["accuracy"], reference.accuracy)
    return weighted(result.spec.lambda_weight, delta_carbon(result["grams_per_request"], base_g), lost)


def evaluations_of(result: StudyRun, slo_ms: float) -> list[dict[str, Any]]:
    """Evaluations with their round (those between two decisions), the intensity of then, and whether each kept the SLO.

    `p95_ms` None: refused or broken off.
    """
    decided = [d["at_s"] for d in result.decisions]
    series = result.series
    found = []
    for e in result.evaluations:
        mine = e["measured"].get(result.spec.family, {})
        p95_ms = mine.get("p95_ms")
        at = max(0, bisect_right(series["at_s"], e["at_s"]) - 1)
        found.append(
            {
                "at_s": e["at_s"],
                "round": bisect_left(decided, e["at_s"]),
                "intensity": series["intensity_g_per_kwh"][at],
                "outcome": e["outcome"],
                "spent_s": e["spent_s"],
                "spent_j": e["spent_j"],
                "violations": e["violations"],
                "p95_ms": p95_ms,
                "accuracy": mine.get("accuracy"),
                "joules": mine.get("joules_per_request"),
                "within_slo": p95_ms is not None and p95_ms <= slo_ms,
            }
        )
    return found


def scheme_row(runs: Sequence[StudyRun], references: Mapping[int, Reference]) -> dict[str, Any]:
    """Row of one scheme over all of its seeds. `held`: to an accuracy."""

    def each(pick: Callable[[StudyRun], float]) -> dict[str, Any]:
        return asdict(over_seeds([pick(run) for run in runs]))

    curves = {run.spec.seed: objective_curve(run, references[run.spec.seed]) for run in runs}
    return {
        "scheme": runs[0].spec.label,
        "knows_truth": runs[0].spec.knows_truth,
        "held": runs[0].spec.mode == "budget",
        "seeds": [run.spec.seed for run in runs],
        "grams_per_request": each(lambda r: r["grams_per_request"]),
        "joules_per_request": each(lambda r: r["joules_per_request"]),
        "idle_share": each(lambda r: r["idle_share"]),
        "accuracy": each(lambda r: r["accuracy"]),
        "accuracy_loss_pct": each(lambda r: -delta_accuracy(r["accuracy"], references[r.spec.seed].accuracy)),
        "p50_ms": each(lambda r: r["p50_ms"]),
        "p95_over_slo": each(lambda r: r["p95_ms"] / references[r.spec.seed].slo_ms),
        "p99_ms": each(lambda r: r["p99_ms"]),
        "slo_attainment": each(lambda r: r["slo_attainment"]),
        "floor_missed": each(lambda r: float(r["floor_missed"])),
        "rejected": each(lambda r: r["rejected"]),
        "objective": each(lambda r: curves[r.spec.seed].mean()),
        "objective_after_8h": each(lambda r: curves[r.spec.seed].mean(SETTLED_S)),
        "reconfigurations": each(lambda r: r["reconfigurations"]),
        "rollout_s": each(lambda r: r["rollout_s"]),
        "rollout_j": each(lambda r: r["rollout_j"]),
        "evaluations": each(lambda r: r["evaluations"]),
        "exploration_s": each(lambda r: r["exploration_s"]),
        "exploration_j": each(lambda r: r["exploration_j"]),
    }


def saving_pct(mine: float, other: float) -> float:
    """Grams that `mine` takes less than `other` [%]."""
    return 100.0 * (1 - mine / other) if other else math.nan


def json_finite(value: Any) -> Any:
    """Value with None for NaN and infinities, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: json_finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
