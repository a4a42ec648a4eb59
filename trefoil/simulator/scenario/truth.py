"""Truth and estimate: what the simulated hardware does, and what the planner expects. Two objects, never one.

Formulation: every (device type, slice type, variant) has a factor exp(sigma z) on its latency and another on its active
    energy. Every device has one on all that it draws. Factors are drawn from a separate generator, in canonical order.
    So equal seeds give an equal truth whatever else the scenario says.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.plan import plain
from trefoil.simulator.scenario.schema import Noise


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate: what the planner may know."""

    catalog: Catalog
    hash: str


@dataclass(frozen=True, slots=True)
class Truth:
    """Truth: what happens. `power` is the factor of each device on all that it draws."""

    catalog: Catalog
    power: Mapping[str, float]
    hash: str


def pair(
    known: Catalog,
    devices: Sequence[str],
    noise: Noise,
    seed: int,
    actual: Catalog | None = None,
    *,
    blind: bool = False,
    knows_truth: bool = False,
) -> tuple[Truth, Estimate]:
    """Pair of truth and estimate from what is known of the families; `actual`: the truth before noise, if another.

    `knows_truth`: the estimate has the true figures of every row that is known, as who has profiled the very hardware.
    """
    rng = np.random.default_rng([seed if noise.seed is None else noise.seed, 0x7241])
    source = actual or known
    points = sorted({(r.device_type, r.slice_type, r.family, r.variant) for r in source.rows})
    factors = {point: np.exp([noise.latency, noise.energy] * rng.standard_normal(2)) for point in points}
    power = {name: float(np.exp(noise.device_power * rng.standard_normal())) for name in devices}
    rows = tuple(
        _changed(r, *map(float, factors[r.device_type, r.slice_type, r.family, r.variant])) for r in source.rows
    )
    catalog = Catalog(source.families, rows)
    told = () if blind else tuple(known.rows)
    if knows_truth:
        wanted = {_point(row) for row in told}
        told = tuple(row for row in rows if _point(row) in wanted)
    estimated = Catalog(known.families, told)
    truth = Truth(catalog, power, _hash([_rows(catalog), power]))
    estimate = Estimate(estimated, _hash([_rows(estimated), dict.fromkeys(devices, 1.0)]))
    assert truth.catalog is not estimate.catalog, "the planner must never hold the truth"
    errs = max(noise.latency, noise.energy) > 0 and bool(told) and not knows_truth
    assert not errs or _rows(catalog) != _rows(estimated), "noise was requested, and the planner gets the truth"
    return truth, estimate


def _point(row: ProfileRow) -> tuple[str, str, str, str, int]:
    return row.device_type, row.slice_type, row.family, row.variant, row.batch


def _changed(row: ProfileRow, latency: float, energy: float) -> ProfileRow:
    return replace(
        row,
        latency_ms_p50=row.latency_ms_p50 * latency,
        latency_ms_p95=row.latency_ms_p95 * latency,
        latency_ms_p99=row.latency_ms_p99 * latency,
        throughput_per_s=row.throughput_per_s / latency,
        energy_active_j_per_batch=row.energy_active_j_per_batch * energy,
        power_w=row.power_w * energy / latency,
    )


def _rows(catalog: Catalog) -> list[object]:
    return [plain(replace(row, provenance=None)) for row in catalog.rows]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:16]
