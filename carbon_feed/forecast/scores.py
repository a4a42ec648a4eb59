"""Scores by lead time: sums of errors. What is not known adds nothing, and every mean keeps its count."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from carbon_feed.forecast.daily_rows import Values
from trefoil.core.carbon import CarbonScore

MAPE_FLOOR_G_PER_KWH: Final = 1.0  # below, a percentage of the actual says nothing


class ScoreSums:
    """Sums of scores by lead; memory does not grow with what is added."""

    def __init__(self, steps: int) -> None:
        self._sums = {name: np.zeros(steps) for name in ("n", "abs", "bias", "mape_n", "mape", "band_n", "inside")}

    def add(self, quantiles: Values, actual: Values, leads: NDArray[np.int64] | None = None) -> None:
        """Add one forecast as [3, H] and its actuals, NaN where unknown or without a forecast.

        `leads`: where each column belongs, 0 = the first lead; None = column by column.
        """
        low, middle, high = quantiles
        error = middle - actual
        known = ~np.isnan(error)
        size = np.abs(error)
        large = known & (actual >= MAPE_FLOOR_G_PER_KWH)
        banded = ~np.isnan(low) & ~np.isnan(high) & ~np.isnan(actual)
        amounts = {
            "n": known,
            "abs": np.where(known, size, 0.0),
            "bias": np.where(known, error, 0.0),
            "mape_n": large,
            "mape": np.divide(size, actual, out=np.zeros_like(size), where=large),
            "band_n": banded,
            "inside": banded & (low <= actual) & (actual <= high),
        }
        for name, amount in amounts.items():
            if leads is None:
                self._sums[name] += amount
            else:
                np.add.at(self._sums[name], leads, amount.astype(np.float64))

    def scores(self, step_s: float) -> tuple[CarbonScore, ...]:
        """Scores, one a lead: 1, 2, ... steps."""
        sums = self._sums

        def mean(total: str, count: str, at: int) -> float:
            return float(sums[total][at] / sums[count][at]) if sums[count][at] else 0.0

        return tuple(
            CarbonScore(
                horizon_s=(at + 1) * step_s,
                samples=int(sums["n"][at]),
                mae_g_per_kwh=mean("abs", "n", at),
                bias_g_per_kwh=mean("bias", "n", at),
                mape_ratio=mean("mape", "mape_n", at),
                mape_samples=int(sums["mape_n"][at]),
                coverage_ratio=mean("inside", "band_n", at),
                coverage_samples=int(sums["band_n"][at]),
            )
            for at in range(len(sums["n"]))
        )


def pool_scores(scores: tuple[CarbonScore, ...]) -> CarbonScore:
    """Pool several leads into one score, weighted by their samples; the horizon is the longest."""
    samples = sum(s.samples for s in scores)
    mape_samples = sum(s.mape_samples for s in scores)
    inside = sum(s.coverage_samples for s in scores)
    return CarbonScore(
        horizon_s=max(s.horizon_s for s in scores),
        samples=samples,
        mae_g_per_kwh=sum(s.mae_g_per_kwh * s.samples for s in scores) / max(1, samples),
        bias_g_per_kwh=sum(s.bias_g_per_kwh * s.samples for s in scores) / max(1, samples),
        mape_ratio=sum(s.mape_ratio * s.mape_samples for s in scores) / max(1, mape_samples),
        mape_samples=mape_samples,
        coverage_ratio=sum(s.coverage_ratio * s.coverage_samples for s in scores) / max(1, inside),
        coverage_samples=inside,
    )
