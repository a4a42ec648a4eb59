"""Capacity and latency of a variant on any number of cores, fitted to the sizes that are profiled.

Source: InfAdapter (Salmani et al., EuroMLSys 23), sections 3 and 5: linear regression over a few sizes instead of
profiling all. Data: profile rows of CPU slices, the SLO. Result, by least squares:
  th(n) = slope x n + intercept   requests/s that a slice of n cores answers within the SLO.
  p(n)  = flat + falling / n      latency [ms] at the SLO's quantile of a request alone.
A size's th is its operating point (`columns.operating_point`).
Deviations: p is a line in 1 / n, not in n: below one core a request takes its core seconds over the quota, above it one
core. Gaps are Poisson: a capacity is the profile's, not the load's of now.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from controller.planners.columns import operating_point, terms_of
from controller.planners.planner_settings import PlannerSettings
from controller.planners.planning_input import PlanningInput, Task
from controller.planners.profile_rows import CatalogKey, effective_row
from trefoil.core.catalog import Variant
from trefoil.core.cpus.rows import QUOTAS, slice_name
from trefoil.core.device_types import CPU_MIB_PER_CORE, device_type, slice_cores, slice_type
from trefoil.core.errors import CatalogError
from trefoil.core.plan_check import CONTEXT_MIB

SIZES_MIN: Final = 2  # through one point there is no line
P99_FROM: Final = 0.97  # quantile of the SLO from which on a row's p99 is looked at, below its p95


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a variant by cores. `least`: cores from which on the SLO is met and memory suffices; inf: none."""

    variant: Variant
    slope: float
    intercept: float
    r2: float
    least: float

    def per_s(self, cores: float) -> float:
        """Requests/s on so many cores."""
        return max(0.0, self.slope * cores + self.intercept) if cores > 0 else 0.0

    @property
    def words(self) -> str:
        """The fit, for people."""
        return f"{self.variant.name} {self.slope:.3f} n {self.intercept:+.3f} (R2 {self.r2:.3f})"


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Line through points by least squares: slope, intercept, R squared."""
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - mean_x) ** 2 for a in x)
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    left = math.fsum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    total = math.fsum((b - mean_y) ** 2 for b in y)
    return slope, intercept, 1 - left / total if total else 1.0


def capacities(inputs: PlanningInput, task: Task, cut: str, settings: PlannerSettings) -> tuple[Capacity, ...]:
    """Capacities of a family's variants that are profiled on CPUs cut so, by accuracy.

    Raises:
        CatalogError: none is, one has a single size, or carries less on more cores.
    """
    found = []
    for variant in inputs.view.catalog.family(task.family).by_accuracy():
        sizes = sorted(inputs.view.catalog.cpu_rows.sizes(cut, task.family, variant.name))
        if sizes:
            found.append(_fit(inputs, task, variant, [slice_name(cut, cores) for cores in sizes], settings))
    if not found:
        kind = "quota:<cores with one decimal>" if cut == QUOTAS else "cpu:<cores>"
        raise CatalogError(
            "no CPU profile", field=f"family {task.family}", value=kind,
            remedy=f"profile it with `trefoil family profile` on two sizes of {kind}, or change core_step",
        )  # fmt: skip
    return tuple(found)


def _fit(
    inputs: PlanningInput, task: Task, variant: Variant, shapes: Sequence[str], settings: PlannerSettings
) -> Capacity:
    field, remedy = f"profile of {variant.name}", "profile it on two sizes or more, e.g. 1, 2, 4, 8 and 16 cores"
    if len(shapes) < SIZES_MIN:
        raise CatalogError("one size gives no line", field=field, value=shapes[0], remedy=remedy)
    cores = [slice_cores(shape) for shape in shapes]
    carried, latency_ms = zip(*(_point(inputs, task, variant, shape, settings) for shape in shapes), strict=True)
    slope, intercept, r2 = line(cores, carried)
    if slope <= 0:
        raise CatalogError(
            "its capacity does not grow with cores", field=field, value=f"{slope:.3f} requests/s a core",
            remedy="profile it again, without other load",
        )  # fmt: skip
    falling, flat, _ = line([1 / n for n in cores], latency_ms)
    fitting = (variant.memory_mib + CONTEXT_MIB) / CPU_MIB_PER_CORE
    return Capacity(variant, slope, intercept, r2, max(fitting, _least(flat, falling, cores[0], task.objective.slo_ms)))


def _least(flat_ms: float, falling: float, smallest: float, slo_ms: float) -> float:
    """Cores from which on flat + falling / n is within the SLO."""
    if falling <= 0:
        return 0.0 if flat_ms + falling / smallest <= slo_ms else math.inf
    return falling / (slo_ms - flat_ms) if slo_ms > flat_ms else math.inf


def _point(
    inputs: PlanningInput, task: Task, variant: Variant, shape_name: str, settings: PlannerSettings
) -> tuple[float, float]:
    """Requests/s that a profiled size carries within the SLO, and the latency [ms] of a request alone on it."""
    catalog, kind = inputs.view.catalog, device_type(f"cpu:{math.ceil(slice_cores(shape_name))}")
    shape = slice_type(kind, shape_name)
    row = effective_row(catalog, kind, shape, catalog.family(task.family), variant, task.demand.items_mean)
    poisson = replace(task, demand=replace(task.demand, gap_scv=1.0))
    terms = terms_of(poisson, settings, catalog.family(task.family).tokens_mean)
    column = operating_point(CatalogKey(catalog), task.family, kind, shape, variant, 0, 1, terms)
    assert row is not None, "its size is profiled"
    assert column is not None
    own = settings.of(task.objective)
    alone_ms = row.latency_ms_p99 if task.objective.slo_quantile >= P99_FROM else row.latency_ms_p95
    return column.capacity_per_s(1), alone_ms + own.transport_gap_ms + own.overhead_ms
