"""Offline optimum of a budget: the fewest grams at a mean accuracy, with every hour known beforehand.

Source: DESIGN section 7.2, "an LP over the 48 h". It is the yardstick for `exact` in budget mode, not a scheme.
Data: the intensities of the window, and a frontier of plans. Each plan is *measured* by a separate run on the schemes'
truth, fleet, load and SLO, at a constant intensity. Decision: the share of its time that each intensity gives to each
plan.
Formulation: min sum_i w_i CI_i sum_p x_ip J_p  subject to  sum_p x_ip = 1,  sum_i w_i sum_p x_ip A_p >= floor.
A plan of the frontier is the planner's own at one price v of accuracy, min J - v A: none of its plans is below the
line of slope v through it. With these lines instead of the points the same program bounds what a frontier without end
would give: the difference is the error of the grid. Where it is open whether a plan is below the line between two,
its slope is the next price, until it is known everywhere.
Deviations: moves are free and take no time, the load is constant: no policy reaches the optimum.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from controller.planners.exact.milp import Limits, Program
from trefoil.core.units import grams
from trefoil.reproduce.experiment import BASE_INTENSITY, CONSTANT_G, Reference, spec_of
from trefoil.reproduce.runs import PUE, Spec, StudyRun

FRONTIER_HOURS: Final = 1.0
PRICES: Final = (1.0, 200.0)  # of BASE's joules for all of its accuracy: only energy counts, then only accuracy
ROUNDS_MAX: Final = 8
ALIKE_PRICE: Final = 0.02  # relative
ALIKE_ACCURACY: Final = 2e-4


@dataclass(frozen=True, slots=True)
class FrontierPlan:
    """Plan of the frontier as measured; `price_j`: the price of accuracy that it is the best for [J per request]."""

    accuracy: float
    joules: float
    slo_attainment: float
    price_j: float


@dataclass(frozen=True, slots=True)
class Optimum:
    """Optimum of one window. `grid_error_ratio`: at most so much of it a finer frontier would save."""

    grams_per_request: float
    accuracy: float
    slo_attainment: float
    grid_error_ratio: float
    accuracy_at: Mapping[float, float]
    """Mean accuracy by intensity [g/kWh]."""


def measured_frontiers(
    run: Callable[[Sequence[Spec]], list[StudyRun]], references: Sequence[Reference], **changes: Any
) -> dict[Reference, list[FrontierPlan]]:
    """Frontiers, measured side by side: `run` plays specs; `changes` are of every spec."""
    plans: dict[Reference, list[FrontierPlan]] = {r: [] for r in references}
    prices = {r: [p * r.joules / r.accuracy for p in PRICES] for r in references}
    for _ in range(ROUNDS_MAX):
        asked = [(r, price) for r, wanted in prices.items() for price in wanted]
        found = run([_spec(r, price, changes) for r, price in asked])
        for (r, price), one in zip(asked, found, strict=True):
            plans[r].append(FrontierPlan(one["accuracy"], one["joules_per_request"], one["slo_attainment"], price))
        prices = {r: open_prices(known) for r, known in plans.items()}
        if not any(prices.values()):
            break
    return plans


def _spec(reference: Reference, price_j: float, changes: Mapping[str, Any]) -> Spec:
    """The run of the plan that is the best at a price: CLOVER's lambda (Eq. 3) is one."""
    worth = price_j * reference.accuracy * CONSTANT_G / (reference.joules * BASE_INTENSITY)
    settings: dict[str, Any] = {
        "constant_g_per_kwh": CONSTANT_G, "knows_truth": True, "lambda_weight": 1 / (1 + worth), "bins": 12
    } | dict(changes)  # fmt: skip
    return spec_of(reference, "frontier", "exact", FRONTIER_HOURS, "", **settings)


def open_prices(plans: Sequence[FrontierPlan]) -> list[float]:
    """Prices at which a plan may be below the line between two neighbours [J per request and unit of accuracy]."""
    distinct: list[FrontierPlan] = []
    for plan in sorted(plans, key=lambda p: (p.accuracy, p.joules)):
        if not distinct or plan.accuracy - distinct[-1].accuracy > ALIKE_ACCURACY:
            distinct.append(plan)
    slopes = [(b.joules - a.joules) / (b.accuracy - a.accuracy) for a, b in pairwise(distinct)]
    return [s for s in slopes if s > 0 and all(abs(p.price_j / s - 1) > ALIKE_PRICE for p in plans)]


def optimum_of(plans: Sequence[FrontierPlan], intensities: Sequence[float], floor: float) -> Optimum | None:
    """Optimum over a window of equal intervals [g/kWh]; None: no plan of the frontier reaches the floor."""
    weights = {ci: n / len(intensities) for ci, n in sorted(Counter(intensities).items())}
    program = Program()
    at = {ci: [program.variable(w * ci * p.joules, 0.0, 1.0) for p in plans] for ci, w in weights.items()}
    for variables in at.values():
        program.row([(v, 1.0) for v in variables], 1.0, 1.0)
    program.row([(v, weights[ci] * p.accuracy) for ci in at for v, p in zip(at[ci], plans, strict=True)], low=floor)
    found = program.solve(Limits())
    if found is None:
        return None

    def mean(ci: float, values: Sequence[float]) -> float:
        return sum(found.values[v] * value for v, value in zip(at[ci], values, strict=True))

    accuracy = {ci: mean(ci, [p.accuracy for p in plans]) for ci in weights}
    attained = {ci: mean(ci, [p.slo_attainment for p in plans]) for ci in weights}
    return Optimum(
        grams(found.objective, 1.0, PUE),
        sum(w * accuracy[ci] for ci, w in weights.items()),
        sum(w * attained[ci] for ci, w in weights.items()),
        1 - _bound(plans, weights, floor) / found.objective,
        accuracy,
    )


def _bound(plans: Sequence[FrontierPlan], weights: Mapping[float, float], floor: float) -> float:
    """What no frontier goes below: joules times intensity, every accuracy at what the lines of all prices leave."""
    low, high = min(p.accuracy for p in plans), max(p.accuracy for p in plans)
    program, terms = Program(), []
    for ci, w in weights.items():
        accuracy, joules = program.variable(0.0, low, high), program.variable(w * ci, 0.0, 1e9)
        for p in plans:
            program.row([(joules, 1.0), (accuracy, -p.price_j)], low=p.joules - p.price_j * p.accuracy)
        terms.append((accuracy, w))
    program.row(terms, low=floor)
    found = program.solve(Limits())
    assert found is not None, "the plans themselves keep all lines, nearly"
    return found.objective


def optimum_row(
    plans: Sequence[FrontierPlan], runs: Mapping[str, StudyRun], intensities: Sequence[float], accuracy: float
) -> dict[str, Any]:
    """Row of one seed: the optimum at an accuracy, and each run's grams above the optimum at its own accuracy [%].

    None stands for an accuracy that no plan of the frontier has.
    """
    best = optimum_of(plans, intensities, accuracy - 1e-9)
    above: dict[str, float | None] = {}
    for label, run in runs.items():
        own = optimum_of(plans, intensities, run["accuracy"] - 1e-9)
        above[label] = None if own is None else 100 * (run["grams_per_request"] / own.grams_per_request - 1)
    values = None if best is None else {k: v for k, v in asdict(best).items() if k != "accuracy_at"}
    return {"at_accuracy": accuracy, "plans": len(plans), "optimum": values, "above_optimum_pct": above}
