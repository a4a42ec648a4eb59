"""What a simulated GPU is: its instances, processes, clocks, limits and sensors, as values. The rules are the driver's.

Clocks move a moment after the command (`settles_at_s`); time is the driver's last `now_s`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from trefoil.simulated_node.gpu_models import GiProfile, GpuModel


class Nvml(IntEnum):
    """Return codes that this driver gives (nvmlReturn_t)."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    NO_DATA = 21
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


class NvmlFault(Exception):
    """A driver call refused with an NVML return code."""

    def __init__(self, code: Nvml) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True, eq=False)
class ComputeInstance:
    """A compute instance; its MIG device has the same life."""

    gi: "GpuInstance"
    id: int
    width: int
    start: int
    mig_uuid: str

    @property
    def gpu(self) -> "Gpu":
        """GPU that it is on."""
        return self.gi.gpu


@dataclass(slots=True, eq=False)
class GpuInstance:
    """A GPU instance. `generation` counts creations on its device and is never reused."""

    gpu: "Gpu"
    profile: GiProfile
    id: int
    start: int
    generation: int
    computes: dict[int, ComputeInstance] = field(default_factory=dict)
    handle_leaked: bool = False  # by a client that NVML does not list, such as a leaked handle of DCGM

    @property
    def size(self) -> int:
        """Size in memory slices."""
        return self.profile.memory_slices

    def overlaps(self, start: int, size: int) -> bool:
        """Whether it takes any of these memory slices."""
        return self.start < start + size and start < self.start + self.size


@dataclass(slots=True)
class DriverProcess:
    """A process with a context: on a compute instance, or on a whole GPU while MIG is off."""

    pid: int
    compute: ComputeInstance | None
    memory_mib: int


@dataclass(slots=True, eq=False)
class Gpu:
    """State of one simulated GPU."""

    index: int
    model: GpuModel
    uuid: str
    mig_current: bool
    mig_pending: bool
    persistence: bool = True
    lost: bool = False
    recovery_action: int = 0  # nvmlDeviceGpuRecoveryAction_t that the driver asks for
    handle_leaked: bool = False  # by a hidden client: no MIG mode change and no reset until it is gone
    locked_mhz: tuple[int, int] | None = None
    locked_before_mhz: tuple[int, int] | None = None  # holds until settles_at_s
    settles_at_s: float = 0.0
    application_mhz: int | None = None  # application clock that the board comes with; a lock goes before it
    throttle_mhz: int | None = None  # what the power limit leaves of the clock
    thermal_mhz: int | None = None  # what an overheated GPU leaves of it
    power_limit_w: float = 0.0
    capped: bool = False  # the power limit held the last tick back
    power_w: float = 0.0  # as nvmlDeviceGetPowerUsage reports it
    instant_w: float | None = None  # None: as power_w
    average_w: float | None = None
    temperature_c: float | None = None  # None: where it would settle at power_w
    energy_mj: int = 0
    creations: int = 0
    instances: dict[int, GpuInstance] = field(default_factory=dict)
    processes: dict[int, DriverProcess] = field(default_factory=dict)
    busy_s: dict[int, tuple[float, float]] = field(default_factory=dict)  # for GPM: generation (0: GPU) -> busy, dense
    stale_listed: list[tuple[int, int]] = field(default_factory=list)  # (profile id, dead handle) still listed

    def __post_init__(self) -> None:
        self.power_limit_w = self.power_limit_w or self.model.power_limit_w[1]

    @property
    def gpu(self) -> "Gpu":
        """Itself, as an instance names the GPU that it is on."""
        return self

    def lock_mhz(self, now_s: float) -> tuple[int, int] | None:
        """Locked clock range that the clock follows now; None: not locked."""
        return self.locked_before_mhz if now_s < self.settles_at_s else self.locked_mhz

    def clock_at_mhz(self, now_s: float) -> int:
        """SM clock: with a context the top of its range, without one the bottom; locks narrow the range."""
        low, _ = self.lock_mhz(now_s) or (self.model.clocks_mhz[0], 0)
        return self.serving_clock_at_mhz(now_s) if self.processes else low

    def serving_clock_at_mhz(self, now_s: float) -> int:
        """SM clock of a GPU that computes: the top of the range, unless power or heat hold it back."""
        _, high = self.lock_mhz(now_s) or (0, self.application_mhz or self.model.clocks_mhz[-1])
        return min([high, *(cap for cap in (self.throttle_mhz, self.thermal_mhz) if cap is not None)])

    @property
    def serving_clock_mhz(self) -> int:
        """SM clock of a GPU that computes, once it has settled."""
        return self.serving_clock_at_mhz(float("inf"))

    def computes(self) -> Iterator[ComputeInstance]:
        """Compute instances in GPU-instance order."""
        for gi_id in sorted(self.instances):
            yield from self.instances[gi_id].computes.values()
