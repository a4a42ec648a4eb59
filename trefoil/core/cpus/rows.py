"""Profile rows of CPU slices of any size: those that are profiled, and what is between and beyond them.

A row of n cores is of n requests at once, one thread each (of a quota: as many as it has cores or begins), and holds on
CPUs of any number of cores. Data: the rows of a catalogue. Result: the rows of a slice type by batch.
Formulation: straight lines in the cores between two profiled sizes, level beyond the first and last, of these figures.
  - core seconds of a request   w = latency x cores / requests at once
  - throughput a core           T / cores
  - active joules, memory.
Ranges of cores and quotas have separate profiles: a throttled slice waits otherwise than a pinned one.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from trefoil.core.common import ProfileRow
from trefoil.core.device_types import CPUS, cpu_quota, profile_type, slice_cores, slice_servers

Sizes = Mapping[float, Mapping[int, ProfileRow]]
"""Rows by cores, and by batch."""
QUOTAS: Final = "quota"
RANGES: Final = "cpu"


def cut_of(slice_type: str) -> str:
    """How a CPU is cut: by ranges of cores, or by quotas."""
    return RANGES if cpu_quota(slice_type) is None else QUOTAS


def slice_name(cut: str, cores: float) -> str:
    """Slice type of so many cores of a CPU that is cut so."""
    return f"quota:{cores:.1f}" if cut == QUOTAS else f"cpu:{cores:.0f}"


@dataclass(frozen=True)
class CpuRows:
    """Rows of CPU slices in a catalogue's rows."""

    all: tuple[ProfileRow, ...]

    @cached_property
    def _sizes(self) -> Mapping[tuple[str, str, str], Sizes]:
        found: dict[tuple[str, str, str], dict[float, dict[int, ProfileRow]]] = {}
        for row in self.all:
            if profile_type(row.device_type) == CPUS and row.stage == 0 and not row.cohosted:
                sizes = found.setdefault((cut_of(row.slice_type), row.family, row.variant), {})
                sizes.setdefault(slice_cores(row.slice_type), {})[row.batch] = row
        return {key: dict(sorted(sizes.items())) for key, sizes in found.items()}

    @cached_property
    def _known(self) -> dict[tuple[str, str, str], tuple[ProfileRow, ...]]:
        return {}

    def sizes(self, cut: str, family: str, variant: str) -> Sizes:
        """Profiled sizes of a variant, ascending."""
        return self._sizes.get((cut, family, variant), {})

    def rows(self, slice_type: str, family: str, variant: str) -> tuple[ProfileRow, ...]:
        """Rows of a slice type by batch; empty where nothing like it is profiled."""
        key = (slice_type, family, variant)
        if key not in self._known:
            self._known[key] = _interpolated(self.sizes(cut_of(slice_type), family, variant), slice_type)
        return self._known[key]


def _interpolated(sizes: Sizes, slice_type: str) -> tuple[ProfileRow, ...]:
    known, cores = list(sizes), slice_cores(slice_type)
    if not known or not cores:
        return ()
    above = min(bisect_left(known, cores), len(known) - 1)
    below = above if known[above] <= cores else max(0, above - 1)
    part = (cores - known[below]) / (known[above] - known[below]) if above > below else 0.0
    low, high = sizes[known[below]], sizes[known[above]]
    return tuple(_between(low[batch], high[batch], part, slice_type) for batch in sorted(low.keys() & high.keys()))


def _between(low: ProfileRow, high: ProfileRow, part: float, slice_type: str) -> ProfileRow:
    ends: Sequence[tuple[float, int]] = [(slice_cores(r.slice_type), slice_servers(r.slice_type)) for r in (low, high)]
    (low_cores, low_servers), (high_cores, high_servers) = ends
    cores, servers = slice_cores(slice_type), slice_servers(slice_type)

    def mix(a: float, b: float) -> float:
        return a + part * (b - a)

    def latency_ms(a: float, b: float) -> float:
        return mix(a * low_cores / low_servers, b * high_cores / high_servers) * servers / cores

    return replace(
        low,
        slice_type=slice_type,
        latency_ms_p50=latency_ms(low.latency_ms_p50, high.latency_ms_p50),
        latency_ms_p95=latency_ms(low.latency_ms_p95, high.latency_ms_p95),
        latency_ms_p99=latency_ms(low.latency_ms_p99, high.latency_ms_p99),
        throughput_per_s=mix(low.throughput_per_s / low_cores, high.throughput_per_s / high_cores) * cores,
        energy_active_j_per_batch=mix(low.energy_active_j_per_batch, high.energy_active_j_per_batch),
        power_w=mix(low.power_w / low_cores, high.power_w / high_cores) * cores,
        memory_mib=round(mix(low.memory_mib, high.memory_mib)),
    )
