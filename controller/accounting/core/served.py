"""What was served of late, by family and by request class: rate, p95, attainment, accuracy, joules and grams a request.

Data: load windows of all workers over one span, what the family's devices drew in it.
Formulation: as `LoadWindows.measured_in`, for the cells of each class alone. Each answer was counted against its own
objective (its request's, its class's, else its family's) by the dispatcher that gave it. Classes are shown where a
family has any but the default one; meters know none, so joules and grams are the family's.
Unanswered or unmetered is None, never 0.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from controller.observe.core.load_windows import measured_cells
from trefoil.core.accounting import per_request
from trefoil.core.catalog import Catalog, Family
from trefoil.core.demand import LoadCell, LoadWindow, TokenTimes, merged
from trefoil.core.latency import bucket, merge
from trefoil.core.objective import Objective
from trefoil.core.queueing import service_time

DEFAULT_CLASS: Final = "(default)"  # requests that name no class, of a family that has classes
WAITED_MS: Final = 50.0  # from which on an answer waited for a place: a predictor of lengths takes at most that long


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Tokens of what was served, with the objectives that they are counted against; `ttft_ms`, `tpot_ms` 0: none."""

    tokens: int
    prompt_tokens: int
    ttft_ms: float
    ttft_quantile: float
    ttft_ms_p95: float | None
    ttft_attainment: float | None
    tpot_ms: float
    tpot_quantile: float
    tpot_ms_p95: float | None
    tpot_attainment: float | None
    joules_per_token: float | None
    grams_per_token: float | None


@dataclass(frozen=True, slots=True)
class Served:
    """Served of one family, or of one class of its requests (`slo_class`; "" = all of them).

    `waited_share`: of answers, those that waited for a place; `length_cv`: of the family's answers, by its profile.
    """

    family: str
    slo_class: str
    slo_ms: float
    rate_per_s: float | None
    answered: int
    failed: int
    latency_ms_p95: float | None
    slo_attainment: float | None
    accuracy: float | None
    joules_per_request: float | None
    grams_per_request: float | None
    tokens: ServedTokens | None = None
    waited_share: float | None = None
    wait_ms_mean: float | None = None
    length_cv: float | None = None


def served_by_class(
    windows: Sequence[LoadWindow],
    objective: Objective,
    catalog: Catalog,
    span_s: float,
    joules: float | None,
    co2: float | None,
) -> list[Served]:
    """Served of a family over windows that cover `span_s`: all of it first, then each class that it has or was asked
    for. `joules` and `co2` [g]: what it drew and emitted in that time."""
    name, known = objective.family, catalog.family(objective.family)
    cells = [cell for window in windows for cell in window.cells if cell.key.family == name]
    classes = sorted({each for each in (*known.classes, *(cell.key.slo_class for cell in cells)) if each})
    found = [_served(cells, "", objective, known, catalog, span_s, joules, co2)]
    for slo_class in ["", *classes] if classes else []:
        own = known.classes.get(slo_class) if slo_class else None
        asked = replace(objective, slo_ms=own[0]) if own else objective
        asked = replace(asked, **asdict(known.token_classes.get(slo_class, objective.token_slo)))
        mine = [cell for cell in cells if cell.key.slo_class == slo_class]
        found.append(_served(mine, slo_class or DEFAULT_CLASS, asked, known, catalog, span_s, None, None))
    return found


def _served(
    cells: Sequence[LoadCell],
    name: str,
    asked: Objective,
    family: Family,
    catalog: Catalog,
    span_s: float,
    joules: float | None,
    co2: float | None,
) -> Served:
    measured = measured_cells(cells, family.name, span_s, catalog) if span_s > 0 else None
    answered = sum(cell.answered for cell in cells)
    failed = sum(sum(cell.failed_by_code.values()) for cell in cells)
    waits = merge([cell.queue for cell in cells])
    waited = sum(n for i, n in zip(waits.index, waits.count, strict=True) if i > bucket(WAITED_MS))
    return Served(
        family=family.name,
        slo_class=name,
        slo_ms=asked.slo_ms,
        rate_per_s=measured.rate_per_s if measured is not None else 0.0,
        answered=answered,
        failed=failed,
        latency_ms_p95=measured.latency_ms_p95 if measured is not None and answered else None,
        slo_attainment=measured.slo_attainment if measured is not None and answered + failed else None,
        accuracy=measured.accuracy if measured is not None and answered else None,
        joules_per_request=per_request(joules, answered),
        grams_per_request=per_request(co2, answered),
        tokens=_tokens(cells, asked, joules, co2) if family.generative else None,
        waited_share=waited / waits.total if waits.total else None,
        wait_ms_mean=waits.sum_ms / waits.total if waits.total else None,
        length_cv=_length_cv(family, catalog) if family.generative else None,
    )


def _length_cv(family: Family, catalog: Catalog) -> float | None:
    row = next((row for row in catalog.rows if row.family == family.name and not row.stage), None)
    return None if row is None else service_time(row).cv


def _tokens(cells: Sequence[LoadCell], asked: Objective, joules: float | None, co2: float | None) -> ServedTokens:
    streams, tokens = merged([cell.streams for cell in cells]), sum(cell.tokens_out for cell in cells)
    return ServedTokens(
        tokens=tokens,
        prompt_tokens=streams.tokens_in,
        joules_per_token=per_request(joules, tokens),
        grams_per_token=per_request(co2, tokens),
        **asdict(asked.token_slo),
        **asdict(TokenTimes.of(streams)),
    )
