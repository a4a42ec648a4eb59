"""What was served of late, by family and by request class: rate, p95, attainment, accuracy, joules and grams a request.

Data: load windows of all workers over one span, what the family's devices drew in it.
Formulation: as `LoadWindows.measured_in`, for the cells of each class alone. Each answer was counted against its own
objective (its request's, its class's, else its family's) by the dispatcher that gave it. Classes are shown where a
family has any but the default one; meters know none, so joules and grams are the family's.
What nobody answered or metered is None, never 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controller.observe.core.load_windows import measured_cells
from trefoil.core.accounting import per_request
from trefoil.core.catalog import Catalog
from trefoil.core.demand import LoadCell, LoadWindow
from trefoil.core.objective import Objective

DEFAULT_CLASS: Final = "(default)"  # requests that name no class, of a family that has classes


@dataclass(frozen=True, slots=True)
class Served:
    """Served of one family, or of one class of its requests (`slo_class`; "" = all of them)."""

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
    family = objective.family
    cells = [cell for window in windows for cell in window.cells if cell.key.family == family]
    classes = catalog.family(family).classes
    named = sorted({name for name in (*classes, *(cell.key.slo_class for cell in cells)) if name})
    found = [_served(cells, "", objective.slo_ms, family, catalog, span_s, joules, co2)]
    for name in ["", *named] if named else []:
        slo_ms = classes[name][0] if name in classes and name else objective.slo_ms
        mine = [cell for cell in cells if cell.key.slo_class == name]
        found.append(_served(mine, name or DEFAULT_CLASS, slo_ms, family, catalog, span_s, None, None))
    return found


def _served(
    cells: Sequence[LoadCell],
    name: str,
    slo_ms: float,
    family: str,
    catalog: Catalog,
    span_s: float,
    joules: float | None,
    co2: float | None,
) -> Served:
    measured = measured_cells(cells, family, span_s, catalog) if span_s > 0 else None
    answered = sum(cell.answered for cell in cells)
    failed = sum(sum(cell.failed_by_code.values()) for cell in cells)
    return Served(
        family=family,
        slo_class=name,
        slo_ms=slo_ms,
        rate_per_s=measured.rate_per_s if measured is not None else 0.0,
        answered=answered,
        failed=failed,
        latency_ms_p95=measured.latency_ms_p95 if measured is not None and answered else None,
        slo_attainment=measured.slo_attainment if measured is not None and answered + failed else None,
        accuracy=measured.accuracy if measured is not None and answered else None,
        joules_per_request=per_request(joules, answered),
        grams_per_request=per_request(co2, answered),
    )
