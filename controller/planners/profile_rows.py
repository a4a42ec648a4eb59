"""Profile rows as planners read them: of one class at any clock, for requests of any number of items."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Final

from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import CPUS, profile_type
from trefoil.core.fleet import DeviceType, SliceType
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.power import rows_at

CLOCK_SHARES: Final = (0.6, 0.7, 0.8, 0.9)  # of the only clock that was profiled


def fits(shape: SliceType, *variants: Variant) -> bool:
    """Whether these variants and a Triton fit the slice's memory."""
    return sum(variant.memory_mib for variant in variants) + CONTEXT_MIB <= shape.memory_mib


def effective_row(
    catalog: Catalog,
    kind: DeviceType,
    shape: SliceType,
    family: Family,
    variant: Variant,
    items: float,
    clock_mhz: int = 0,
) -> ProfileRow | None:
    """The profile at a clock (0: the highest; below 0: a power limit [-W]) for requests of that many items: batches are
    interpolated, the largest continues.

    `batch` of the result is the largest batch in the profile. None: not profiled.
    """
    rows = CatalogKey(catalog).rows(kind, shape.name, family.name, variant.name, clock_mhz)
    if not rows:
        return None
    largest = rows[-1].batch
    if items >= largest:
        return _scaled(rows[-1], rows[-1], 0.0, items / largest, largest)
    upper = next(i for i, row in enumerate(rows) if row.batch >= items)
    if upper == 0:
        return _scaled(rows[0], rows[0], 0.0, 1.0, largest)
    low, high = rows[upper - 1], rows[upper]
    return _scaled(low, high, (items - low.batch) / (high.batch - low.batch), 1.0, largest)


@dataclass(frozen=True, slots=True, eq=False)
class CatalogKey:
    """Key of a memo by the identity of a catalogue: it is never changed, and too long to compare."""

    catalog: Catalog

    def __hash__(self) -> int:
        return id(self.catalog.rows)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CatalogKey)
            and other.catalog.rows is self.catalog.rows
            and other.catalog.families is self.catalog.families
        )

    def rows(self, kind: DeviceType, shape: str, family: str, variant: str, clock_mhz: int) -> tuple[ProfileRow, ...]:
        """Rows of whole models alone on their slice at a clock (0: the highest that is profiled), by batch.

        At a clock or power limit that is not profiled by the law of trefoil/core/power.py.
        """
        by_clock = _index(self).get((profile_type(kind.name), shape, family, variant), {})
        if not by_clock and profile_type(kind.name) == CPUS:
            return self.catalog.cpu_rows.rows(shape, family, variant)
        wanted_mhz = clock_mhz or max(by_clock, default=0)
        if wanted_mhz in by_clock or not by_clock:
            return by_clock.get(wanted_mhz, ())
        return _rows_at(self, kind, shape, family, variant, wanted_mhz)

    def clocks(self, kind: DeviceType) -> tuple[int, ...]:
        """Clocks to choose from: those that are profiled, else some shares of the only one; the highest is 0, because
        it needs no lock.
        """
        known = {c for (k, _, _, _), rows in _index(self).items() if k == profile_type(kind.name) for c in rows}
        if not kind.clock_lockable or max(known, default=0) <= 0:
            return (0,)
        lower = [c for c in known if c in kind.clocks_mhz and c < max(known)]
        if not lower:
            lower = [max(c for c in kind.clocks_mhz if c <= share * max(known)) for share in CLOCK_SHARES]
        return (0, *sorted(set(lower)))

    def limits(self, kind: DeviceType, shape: str) -> tuple[int, ...]:
        """Power limits to choose from [-W]: those that are profiled on that slice type and that the board takes."""
        low_w, high_w = kind.power_limit_min_w, kind.power_limit_max_w
        name, index = profile_type(kind.name), _index(self).items()
        known = {held for (k, s, _, _), rows in index if (k, s) == (name, shape) for held in rows}
        return tuple(sorted(held for held in known if held < 0 and low_w <= -held < high_w))


@lru_cache(maxsize=4096)
def _rows_at(
    same: CatalogKey, kind: DeviceType, shape: str, family: str, variant: str, clock_mhz: int
) -> tuple[ProfileRow, ...]:
    by_clock = _index(same)[profile_type(kind.name), shape, family, variant]
    return rows_at(kind, chain.from_iterable(by_clock.values()), clock_mhz)


@lru_cache(maxsize=16)
def _index(same: CatalogKey) -> dict[tuple[str, str, str, str], dict[int, tuple[ProfileRow, ...]]]:
    found: dict[tuple[str, str, str, str], dict[int, list[ProfileRow]]] = {}
    for row in same.catalog.rows:
        if row.stage == 0 and not row.cohosted:
            key = (profile_type(row.device_type), row.slice_type, row.family, row.variant)
            found.setdefault(key, {}).setdefault(row.clock_mhz, []).append(row)
    return {
        key: {clock: tuple(sorted(rows, key=lambda row: row.batch)) for clock, rows in by_clock.items()}
        for key, by_clock in found.items()
    }


def _scaled(low: ProfileRow, high: ProfileRow, part: float, factor: float, batch: int) -> ProfileRow:
    def mix(a: float, b: float) -> float:
        return (a + part * (b - a)) * factor

    return replace(
        low,
        batch=batch,
        latency_ms_p50=mix(low.latency_ms_p50, high.latency_ms_p50),
        latency_ms_p95=mix(low.latency_ms_p95, high.latency_ms_p95),
        latency_ms_p99=mix(low.latency_ms_p99, high.latency_ms_p99),
        throughput_per_s=low.throughput_per_s + part * (high.throughput_per_s - low.throughput_per_s),
        energy_active_j_per_batch=mix(low.energy_active_j_per_batch, high.energy_active_j_per_batch),
    )
