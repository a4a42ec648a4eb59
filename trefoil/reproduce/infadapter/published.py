"""Published capacities of InfAdapter's residual networks, as a family with a CPU profile.

Source: reconfigurable-ml-pipeline/InfAdapter, capacity_result_Feb_21.csv: requests/s with p99 <= 750 ms, batch 1, on a
Xeon Gold 6126; accuracies and load times: its starter.py. Figures only: the repository names no licence.
Deviations: service times are not published. Each is taken such that the queueing law carries what was published, of a
CV that is assumed; memory is assumed, joules are unknown: 0.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import Basis, ProfileRow, Provenance
from trefoil.core.queueing import ServiceTime, pool_rate_max
from trefoil.core.units import MS_PER_S

SLO_MS: Final = 750.0
QUANTILE: Final = 0.99
CORES: Final = (1, 2, 4, 8, 12, 16, 20)
FITTED: Final = (1, 2, 4, 8, 16)
"""Sizes that the paper's regression is over."""
CAPACITY_PER_S: Final[Mapping[str, tuple[float, ...]]] = {
    "resnet18": (19, 43, 90, 190, 289, 385, 473),
    "resnet34": (12, 25, 54, 94, 162, 210, 259),
    "resnet50": (8, 17, 36, 78, 118, 162, 200),
    "resnet101": (5, 10, 22, 39, 65, 82, 98),
    "resnet152": (1, 5, 15, 27, 39, 59, 67),
}
ACCURACY: Final = (0.69758, 0.73314, 0.7613, 0.77374, 0.78312)
LOAD_S: Final = (6.44, 6.79, 6.82, 7.77, 8.52)
CV: Final = 0.1
MARGIN: Final = 1.005
"""By which the law carries more than was published, so that what was published binds."""
UNSERVED_MS: Final = 4.0
"""Of the SLO that is none of the slice's: two each of a request's way to it, and of its client's."""
PROVENANCE: Final = Provenance(Basis.MEASURED, "published capacities of InfAdapter's artifact; joules unknown")


def catalog(cores: Sequence[int] = FITTED, family: str = "resnets") -> Catalog:
    """Catalogue of the five variants with the published capacities at these cores."""
    variants = tuple(
        Variant(name, i, accuracy, "InfAdapter's artifact", 256, load_s, 0, "none: figures only")
        for i, (name, accuracy, load_s) in enumerate(zip(CAPACITY_PER_S, ACCURACY, LOAD_S, strict=True), 1)
    )
    rows = tuple(
        _row(family, name, n, per_s)
        for name, carried in CAPACITY_PER_S.items()
        for n, per_s in zip(CORES, carried, strict=True)
        if n in cores
    )
    return Catalog((Family(family, "top-1 accuracy", variants, {"": (SLO_MS, QUANTILE)}),), rows)


def _row(family: str, variant: str, cores: int, per_s: float) -> ProfileRow:
    service = ServiceTime(_mean_ms(cores, per_s), CV)
    middle = service.mean_ms * (1 - CV * CV / 9) ** 3
    return ProfileRow(
        device_type="cpu:48",
        slice_type=f"cpu:{cores}",
        family=family,
        variant=variant,
        stage=0,
        batch=1,
        clock_mhz=0,
        cohosted=(),
        latency_ms_p50=middle,
        latency_ms_p95=service.mean_ms * (1 - CV * CV / 9 + 1.645 * CV / 3) ** 3,
        latency_ms_p99=service.mean_ms * (1 - CV * CV / 9 + 2.326 * CV / 3) ** 3,
        throughput_per_s=per_s,
        energy_active_j_per_batch=0.0,
        power_w=0.0,
        memory_mib=256,
        provenance=PROVENANCE,
    )


def _mean_ms(cores: int, per_s: float) -> float:
    """Mean service time at which so many cores, one request each, carry a rate within the SLO."""
    low, high = 0.0, cores / per_s * MS_PER_S
    for _ in range(60):
        middle = (low + high) / 2
        taken = ServiceTime(middle + UNSERVED_MS / 2, CV * middle / (middle + UNSERVED_MS / 2))
        carries = pool_rate_max(taken, SLO_MS - UNSERVED_MS / 2, QUANTILE, 1.0, cores) >= MARGIN * per_s
        low, high = (middle, high) if carries else (low, middle)
    return low
