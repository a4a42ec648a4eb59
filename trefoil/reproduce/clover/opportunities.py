"""CLOVER's two motives (Figs. 2 and 3) by the request-level kernel: mixes of variants, and partitions of one GPU."""

from itertools import combinations_with_replacement
from typing import Any, Final

import numpy as np

from controller.planners.profile_rows import effective_row
from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import A100_40GB, slice_type
from trefoil.core.queueing import ServerClass, arrivals_s, serve_shared, service_time
from trefoil.core.units import MS_PER_S
from trefoil.reproduce.experiment import DEVICE, ITEMS, LOAD, capacity_per_s
from trefoil.reproduce.runs import REPOSITORY
from trefoil.runtime.repository import load_family

KERNEL_REQUESTS: Final = 20_000
LARGEST: Final = "7g.40gb"
LAYOUTS: Final = {
    "C1 7g": (("7g.40gb", 1),),
    "C2 4g+2g+1g": (("4g.20gb", 1), ("2g.10gb", 1), ("1g.5gb", 1)),
    "C3 7x1g": (("1g.5gb", 7),),
}


def mixes(family: str) -> list[dict[str, Any]]:
    """Mixes of Fig. 2: all mixes of variants on four whole GPUs, grams and accuracy over those of the best variant."""
    rate = LOAD * capacity_per_s(family, 4)
    found, catalog = load_family(REPOSITORY / family), _catalog(family)
    names = [v.name for v in found[0].by_accuracy()]
    rows: list[dict[str, Any]] = []
    for mix in combinations_with_replacement(names, 4):
        joules, accuracy, p95 = _served(catalog, family, [(n, LARGEST, mix.count(n)) for n in dict.fromkeys(mix)],
                                        rate, 4)  # fmt: skip
        rows.append({"mix": " + ".join(mix), "joules": joules, "accuracy": accuracy, "p95_ms": p95})
    best = rows[-1]
    for row in rows:
        row["carbon_saving_pct"] = 100 * (1 - row["joules"] / best["joules"])
        row["relative_accuracy"] = row["accuracy"] / best["accuracy"]
    return rows


def partitions(family: str) -> list[dict[str, Any]]:
    """Partitions of Fig. 3: the smallest variant on C1 = 7g, C2 = 4g + 2g + 1g, C3 = 7 x 1g, twice.

    At one load an awake GPU draws its idle power whatever it is cut into, and C1 waits where C3 does not. Figures with
    `busy` are of a GPU without pauses: a client sends "the same number of requests" as fast as they are answered. Then
    all requests answered meanwhile share the idle power, and a request takes as long as its slice is slow.
    """
    catalog = _catalog(family)
    variant = catalog.family(family).by_accuracy()[0].name
    kind = A100_40GB
    profiles = {
        name: [(_row(catalog, family, variant, shape), n) for shape, n in layout] for name, layout in LAYOUTS.items()
    }
    capacities = {name: sum(n * _rate(row) for row, n in layout) for name, layout in profiles.items()}
    rate = LOAD * min(capacities.values())
    rows: list[dict[str, Any]] = []
    for name, layout in LAYOUTS.items():
        joules, _, p95 = _served(catalog, family, [(variant, shape, n) for shape, n in layout], rate, 1)
        full, profile = capacities[name], profiles[name]
        active = sum(n * _rate(row) / full * row.energy_active_j_per_batch for row, n in profile)
        rows.append({
            "layout": name, "variant": variant, "joules": joules, "p95_ms": p95, "busy_per_s": full,
            "busy_joules": kind.idle_w / full + active, "busy_p95_ms": max(row.latency_ms_p95 for row, _ in profile),
        })  # fmt: skip
    first = rows[0]
    for row in rows:
        row["carbon_saving_pct"] = 100 * (1 - row["joules"] / first["joules"])
        row["p95_over_c1"] = row["p95_ms"] / first["p95_ms"]
        row["busy_carbon_saving_pct"] = 100 * (1 - row["busy_joules"] / first["busy_joules"])
        row["busy_p95_over_c1"] = row["busy_p95_ms"] / first["busy_p95_ms"]
    return rows


def _catalog(family: str) -> Catalog:
    found, rows = load_family(REPOSITORY / family)
    return Catalog((found,), tuple(r for r in rows if r.device_type == DEVICE))


def _row(catalog: Catalog, family: str, variant: str, shape: str) -> ProfileRow:
    kind, found = A100_40GB, catalog.family(family)
    row = effective_row(catalog, kind, slice_type(kind, shape), found, found.variant(variant), ITEMS[family])
    assert row is not None, f"{variant} on {shape} has no profile"
    return row


def _rate(row: ProfileRow) -> float:
    """Requests that one slice answers in a second when it never waits."""
    return MS_PER_S / service_time(row).mean_ms


def _served(
    catalog: Catalog, family: str, classes: list[tuple[str, str, int]], rate: float, gpus: int
) -> tuple[float, float, float]:
    """Joules per request with idle power, accuracy, p95 [ms] of one FIFO before these slices."""
    rows = [_row(catalog, family, variant, shape) for variant, shape, _ in classes]
    rng = np.random.default_rng(0)
    servers = [ServerClass(n, service_time(row)) for row, (_, _, n) in zip(rows, classes, strict=True)]
    served = serve_shared(servers, arrivals_s(rate, 1.0, KERNEL_REQUESTS, rng), rng)
    shares = np.bincount(served.chosen, minlength=len(classes)) / served.chosen.size
    accuracies = [catalog.family(family).variant(variant).accuracy for variant, _, _ in classes]
    active = sum(float(s) * row.energy_active_j_per_batch for s, row in zip(shares, rows, strict=True))
    accuracy = sum(float(s) * a for s, a in zip(shares, accuracies, strict=True))
    return A100_40GB.idle_w * gpus / rate + active, accuracy, served.quantile_ms(0.95)
