"""Profile row: what one operating point costs."""

from dataclasses import dataclass

from trefoil.core.common import Provenance


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Profile of one operating point. Latency is of a whole executed batch; energy per batch excludes idle power.

    `clock_sensitivity`: the part of its time that follows the clock (`power.stretch`); 1: all of it.
    """

    device_type: str
    slice_type: str
    family: str
    variant: str
    stage: int
    batch: int
    clock_mhz: int
    cohosted: tuple[str, ...]
    latency_ms_p50: float
    latency_ms_p95: float
    latency_ms_p99: float
    throughput_per_s: float
    energy_active_j_per_batch: float
    power_w: float
    memory_mib: int
    provenance: Provenance | None = None
    clock_sensitivity: float = 1.0
