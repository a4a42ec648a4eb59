"""Forecast scores as text, JSON and rows of a CSV. A mean of nothing is a dash or null, never a 0."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from trefoil.core.carbon import CarbonScore, CarbonScores
from trefoil.core.units import DAY_S, HOUR_S

PCT: Final = 100.0
PARTS: Final = 4
COLUMNS: Final = ("model", "ahead", "MAPE %", "MAE g/kWh", "bias g/kWh", "in 10-90 % band", "samples")
CSV_COLUMNS: Final = ("model", "horizon_h", "samples", "mape_pct", "mae_g_per_kwh", "bias_g_per_kwh", "coverage_pct",
                      "basis")  # fmt: skip


def score_cells(score: CarbonScore) -> list[str]:
    """Score as the last columns of `COLUMNS`."""
    return [
        f"{PCT * score.mape_ratio:.2f}" if score.mape_samples else "-",
        f"{score.mae_g_per_kwh:.1f}" if score.samples else "-",
        f"{score.bias_g_per_kwh:+.1f}" if score.samples else "-",
        f"{PCT * score.coverage_ratio:.1f} %" if score.coverage_samples else "-",
        str(score.samples),
    ]


def score_row(score: CarbonScore) -> dict[str, Any]:
    """Score as plain values."""
    return {
        "horizon_h": score.horizon_s / HOUR_S,
        "samples": score.samples,
        "mape_pct": PCT * score.mape_ratio if score.mape_samples else None,
        "mae_g_per_kwh": score.mae_g_per_kwh if score.samples else None,
        "bias_g_per_kwh": score.bias_g_per_kwh if score.samples else None,
        "coverage_pct": PCT * score.coverage_ratio if score.coverage_samples else None,
    }


def by_day(scores: Sequence[CarbonScore]) -> list[tuple[int, CarbonScore]]:
    """Scores pooled by day ahead, 1 = the first; days without a sample are left out. Less than a day has none."""
    from carbon_feed.forecast.scores import pool_scores

    if not scores or scores[-1].horizon_s < DAY_S:
        return []
    days: dict[int, list[CarbonScore]] = {}
    for score in scores:
        days.setdefault(max(1, math.ceil(score.horizon_s / DAY_S)), []).append(score)
    by_number = [(day, pool_scores(tuple(some))) for day, some in sorted(days.items())]
    return [(day, score) for day, score in by_number if score.samples]


def by_part(scores: Sequence[CarbonScore]) -> list[tuple[str, CarbonScore]]:
    """Scores pooled by day ahead, or in four parts where a fast replay looks ahead less than a day."""
    from carbon_feed.forecast.scores import pool_scores

    if not scores or scores[-1].horizon_s >= DAY_S:
        return [(f"day {day}", score) for day, score in by_day(scores)]
    width = math.ceil(len(scores) / PARTS)
    parts = [pool_scores(tuple(scores[at : at + width])) for at in range(0, len(scores), width)]
    return [(f"to {part.horizon_s:.0f} s", part) for part in parts if part.samples]


def table_rows(scores: Iterable[CarbonScores]) -> list[list[str]]:
    """Rows of a table with `COLUMNS`; models without a sample say how many forecasts wait for one."""
    rows = []
    for scored in scores:
        parts = by_part(scored.scores)
        rows += [[scored.model, part, *score_cells(score)] for part, score in parts]
        if not parts:
            waiting = f"{scored.forecasts} forecast{'s' if scored.forecasts != 1 else ''}, none settled"
            rows.append([scored.model, waiting, "-", "-", "-", "-", "0"])
    return rows


def scores_document(scored: CarbonScores) -> dict[str, Any]:
    """Scores of one model as plain JSON values."""
    return {
        "model": scored.model,
        "forecasts": scored.forecasts,
        "issued_from_at_s": scored.issued_from_at_s,
        "issued_to_at_s": scored.issued_to_at_s,
        "observed_at_s": scored.observed_at_s,
        "days": [{"day": day} | score_row(score) for day, score in by_day(scored.scores)],
        "leads": [score_row(score) for score in scored.scores],
    }


def csv_rows(scores: Iterable[tuple[str, Iterable[CarbonScore]]], basis: str) -> list[dict[str, Any]]:
    """Rows of a CSV: one a model and lead time. `scores`: by model; `basis`: of the intensities that came."""
    return [{"model": name} | score_row(score) | {"basis": basis} for name, of in scores for score in of]
