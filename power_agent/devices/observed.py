"""What a driver reports, as values: nothing here is kept, all of it is read anew."""

from dataclasses import dataclass

from trefoil.core.fleet import SliceKey


@dataclass(frozen=True, slots=True)
class ObservedDevice:
    """One GPU as the driver reports it now."""

    device: str  # "<node>/gpu<index>"
    index: int
    uuid: str
    type: str  # name of the DeviceType, or what NVML calls a GPU that no type describes
    memory_mib: int
    mig_capable: bool
    mig_current: bool
    mig_pending: bool


@dataclass(frozen=True, slots=True)
class ObservedSlice:
    """One GPU instance, or a whole GPU (gi_id -1, `mig_uuid` is the GPU's own).

    `mig_uuid` is empty while an instance has no compute instance (an interrupted creation).
    """

    key: SliceKey
    gi_id: int
    ci_id: int | None
    mig_uuid: str
    memory_mib: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    pid: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """What a GPU's power limit may be set to [W], and what it is after a reset."""

    min_w: float
    default_w: float
    max_w: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A GPU-instance profile of one device. `constant` asks for the profile, `id` creates and lists: they differ."""

    name: str
    constant: int
    id: int
    compute_slices: int
    instances_max: int
    sm_count: int
    memory_mib: int
    placements: tuple[tuple[int, int], ...]  # (start, size) in memory slices
