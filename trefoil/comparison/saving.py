"""Saving: grams per request of one run against another at equal load, at equal accuracy.

When it may be stated: `trefoil/core/objective.py`.

Two runs seldom end at the same mean accuracy, and accuracy costs grams. So savings are compared at the accuracy of the
run they are of: the other run's grams are corrected by the price of accuracy, which is what `OBLIVIOUS` pays for
`PRICE_STEP` more of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from trefoil.core.objective import FLOOR_TOLERANCE

OBLIVIOUS: Final = "static_mix"
PRICE_STEP: Final = 0.005
MARGIN: Final = "accuracy_margin"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of one run, as far as savings are made of it."""

    grams_per_request: float
    joules_per_request: float
    accuracy: float
    slo_attainment: float


def saving_pct(ours: RunOutcome, theirs: RunOutcome, price_g: float) -> float | None:
    """Saving in grams per request at equal accuracy, in percent of what the other run had needed at ours.

    None: grams are not metered, or the other run had needed none, or fewer than none, of which there are no percents.
    """
    there = theirs.grams_per_request + price_g * (ours.accuracy - theirs.accuracy)
    if not there > 0 or math.isnan(ours.grams_per_request):
        return None
    return 100 * (1 - ours.grams_per_request / there)


def no_percent(ours: RunOutcome, theirs: RunOutcome, price_g: float) -> str:
    """Why a saving against a run, as it ran and at equal accuracy, is not a percentage; "" where it is one."""
    if math.isnan(ours.grams_per_request + theirs.grams_per_request):
        return "grams are not metered here"
    if saving_pct(ours, theirs, price_g) is None or saving_pct(ours, theirs, 0.0) is None:
        return f"{1e3 * theirs.grams_per_request:.4g} mg/request is nothing to save a share of"
    return ""


def price_g(pairs: Sequence[tuple[RunOutcome, RunOutcome]]) -> float | None:
    """Price of accuracy [g per request and unit], by pairs of a run and one with a higher floor.

    None: the higher floor has bought no accuracy that is worth the name, as where nothing is more accurate.
    """
    bought = sum(dear.accuracy - cheap.accuracy for cheap, dear in pairs)
    if bought <= FLOOR_TOLERANCE * len(pairs):
        return None
    return sum(dear.grams_per_request - cheap.grams_per_request for cheap, dear in pairs) / bought


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation of one draw, lowest and highest; all NaN where one of the values is."""
    if any(map(math.isnan, values)):
        return dict.fromkeys(("mean", "deviation", "lowest", "highest"), math.nan)
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {"mean": fmean(values), "deviation": deviation, "lowest": min(values), "highest": max(values)}
