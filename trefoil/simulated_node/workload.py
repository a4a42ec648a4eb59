"""From profile rows to what the simulated driver needs: service times for pace files, and each variant's density.

Both by the laws of trefoil/core (queueing.service_time, power), as in the simulator and in every plan.

Density is derived, not stated: energy of a batch over (service time x power of that slice fully busy). So a profile
that gives all variants equal joules makes a world in which they cost equal joules.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from trefoil.core import power
from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import NO_MIG
from trefoil.core.fleet import DeviceType, family_of, stage_model
from trefoil.core.queueing import service_time
from trefoil.simulated_node.pace_file import PaceEntry, family_crc32


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """Service time and power density of a version on a slice at one batch size."""

    batch: int
    service_ms_mean: float
    service_cv: float
    density: float


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version as a slice of one type at one clock runs it; `family` is the name of its model, a stage's too."""

    family: str
    variant: str
    version: int
    operations: tuple[BatchPoint, ...]  # ascending batch

    def density(self, batch: float) -> float:
        """Power density at a batch size: interpolated between listed batches, constant outside them."""
        points = self.operations
        at = bisect_left([point.batch for point in points], batch)
        if at == 0:
            return points[0].density
        if at == len(points):
            return points[-1].density
        low, high = points[at - 1], points[at]
        share = (batch - low.batch) / (high.batch - low.batch)
        return low.density + share * (high.density - low.density)


class Workload:
    """Catalogue of models as one type of device runs it, in MIG mode or, where it has one, outside it."""

    def __init__(self, device: DeviceType, catalog: Catalog) -> None:
        self._device = device
        self._rows: dict[str, list[ProfileRow]] = defaultdict(list)
        self._versions = {(f.name, v.name): v.version for f in catalog.families for v in f.variants}
        self._cache: dict[tuple[str, int], dict[tuple[int, int], LoadedVersion]] = {}
        self._stages: dict[tuple[str, str], int] = defaultdict(int)  # into which a variant is split
        for row in catalog.rows:
            if row.device_type in (device.name, device.name + NO_MIG) and not row.cohosted:
                self._rows[row.slice_type].append(row)
                self._stages[row.family, row.variant] = max(self._stages[row.family, row.variant], row.stage)

    def versions(self, slice_type: str, clock_mhz: int) -> dict[tuple[int, int], LoadedVersion]:
        """Versions of the catalogue on that slice at that clock, by (crc32 of the model, version)."""
        key = (slice_type, clock_mhz)
        if key not in self._cache:
            self._cache[key] = self._load(slice_type, clock_mhz)
        return self._cache[key]

    def entries_max(self, slice_type: str) -> int:
        """As many operating points as that slice has at any clock."""
        return len(self._rows[slice_type])

    def entries(self, slice_type: str, clock_mhz: int) -> list[PaceEntry]:
        """Service times of the whole catalogue."""
        return [
            PaceEntry(
                version.family, version.version, op.batch, op.service_ms_mean, op.service_cv, min(1.0, op.density)
            )
            for version in self.versions(slice_type, clock_mhz).values()
            for op in version.operations
        ]

    def _load(self, slice_type: str, clock_mhz: int) -> dict[tuple[int, int], LoadedVersion]:
        by_variant: dict[tuple[str, str], list[ProfileRow]] = defaultdict(list)
        for row in self._rows[slice_type]:
            stages = self._stages[row.family, row.variant] if row.stage else 1
            by_variant[stage_model(row.family, row.stage - 1, stages), row.variant].append(row)
        found = {}
        for (model, variant), rows in sorted(by_variant.items()):
            version = self._versions[family_of(model), variant]
            at = power.rows_at(self._device, rows, clock_mhz)
            points = tuple(self._operating_point(row) for row in at)
            found[family_crc32(model), version] = LoadedVersion(model, variant, version, points)
        return found

    def _operating_point(self, row: ProfileRow) -> BatchPoint:
        service, joules = service_time(row), row.energy_active_j_per_batch
        density = power.density(self._device, row.slice_type, row.clock_mhz, service.mean_ms / 1e3, joules)
        return BatchPoint(row.batch, service.mean_ms, service.cv, density)
