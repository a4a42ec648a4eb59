"""Common values of every module: revisions, leases, provenance, profile rows."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

__all__ = ["Basis", "IdentityKey", "KeptFile", "Lease", "ProfileRow", "Provenance", "Revision"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class IdentityKey(Generic[T]):
    """Memo key by the identity of a value, which is never changed and too long to compare.

    A memo that holds the key holds the value, so that nothing else can have its address.
    """

    value: T

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value


@dataclass(frozen=True, slots=True, order=True)
class Revision:
    """Revision, totally ordered: a newer epoch beats any number; step = position inside one rollout."""

    epoch: int = 0
    number: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}.{self.step}"


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease of a role for a bounded time; `epoch` is its fencing token."""

    name: str = ""
    holder: str = ""
    epoch: int = 0
    expires_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KeptFile:
    """File of a role's holder, for the next holder. `written`: epoch and count of the write that it came
    with.
    """

    name: str = ""
    written: Revision = Revision()
    json: str = ""
    signature: str = ""


class Basis(IntEnum):
    """Basis of a number; never mixed in silence."""

    UNSPECIFIED = 0
    MEASURED = 1
    MODELLED = 2
    SYNTHETIC = 3
    SIMULATED = 4
    NONE = 5


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance: what a number rests on."""

    basis: Basis = Basis.UNSPECIFIED
    source: str = ""
    version: str = ""
    licence: str = ""
    as_of_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Profile of one operating point. Latency is of a whole executed batch; energy per batch excludes idle power.

    `clock_mhz`: the clock that was held; below 0: the power limit of the board that was set instead [-W].
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
