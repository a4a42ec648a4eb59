"""What simulated GPU models look like to NVML: MIG profiles, placements, clocks, limits. A new model is a table of
trefoil/core/device_types.toml with what its driver says.

`constant` is the argument of nvmlDeviceGetGpuInstanceProfileInfo, `id` that of create and list: they differ.
Sources: MIG user guide r580 (placements, engines). GPUs without MIG have no profiles. An A100 whose MIG mode is off is
no model of its own: NVML calls it what it is called in MIG mode. A board that no table describes is simulated by the
name of its type, `gpu:<board>:...`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

from trefoil.core.device_types import DRIVERS, UNKNOWN, DriverRow, SliceSize, reported_type
from trefoil.core.errors import NotFound
from trefoil.core.fleet import DeviceKind, DeviceType, SliceType

MEMORY_SLICES: Final = 8
COMPUTE_SLICES: Final = 7
HOPPER: Final = 9

# Legal starts of a GPU instance in memory slices, in the order that the driver's own placement tries them.
_ONES: Final = (6, 4, 5, 0, 1, 2, 3)
_DOUBLE_ONES: Final = (6, 4, 0, 2)
_TWOS: Final = (4, 0, 2)
_THREES: Final = (4, 0)
_FIRST: Final = (0,)

# Compute instances inside a GPU instance: width in compute slices -> (profile id = constant, legal starts).
CI_PROFILES: Final[dict[int, tuple[int, tuple[int, ...]]]] = {
    1: (0, (0, 1, 2, 3, 4, 5, 6)),
    2: (1, (0, 2, 4)),
    3: (2, (0, 4)),
    4: (3, (0,)),
    7: (4, (0,)),
}
CI_WIDTHS: Final = {1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 4), 7: (1, 2, 3, 4, 7)}  # 4g has no 3c
REV1_CI_ID: Final = 7  # the compute instance of 1g+me has a separate constant

# GPU instance ids per size in memory slices: opaque to users, lowest free first, reused at once.
GI_IDS: Final = {8: (0,), 4: (1, 2), 2: (3, 4, 5, 6), 1: (7, 8, 9, 10, 11, 12, 13, 14)}

KNOWN_PROFILE_CONSTANTS: Final = 0xA  # this driver branch (R535) knows 0..9; a larger constant is INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class GiProfile:
    """A GPU-instance profile. Media engines are left out."""

    name: str
    constant: int
    id: int
    compute_slices: int
    memory_slices: int
    instances_max: int
    sm_count: int
    memory_mib: int
    starts: tuple[int, ...]  # in the driver's default order

    @property
    def ci_widths(self) -> tuple[int, ...]:
        """Widths in compute slices that a compute instance in it may have."""
        return CI_WIDTHS[self.compute_slices]

    def ci_id(self, width: int) -> int:
        """Id of the compute-instance profile of that width."""
        return REV1_CI_ID if self.constant == REV1_CI_ID else CI_PROFILES[width][0]

    def ci_starts(self, width: int) -> tuple[int, ...]:
        """Legal starts of a compute instance of that width."""
        return tuple(start for start in CI_PROFILES[width][1] if start + width <= self.compute_slices)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU model as its driver presents it; NVML spells the name of its type otherwise."""

    type: DeviceType
    nvml_name: str
    architecture: int  # NVML_DEVICE_ARCH_*
    compute_capability: tuple[int, int]
    pci_device_id: int
    memory_mib: int
    profiles: tuple[GiProfile, ...]  # none: not MIG capable
    clocks_mhz: tuple[int, ...]  # SM clocks, ascending
    memory_clocks_mhz: tuple[int, ...]  # descending
    power_limit_w: tuple[float, float, float]  # min, default, max
    mig_mode_immediate: bool = False  # Hopper: at once, lost at reset; A100: pending until the reset of an idle GPU
    lockable: bool = True  # SM clocks; since Volta
    energy_counter: bool = True  # since Volta
    gpm: bool = False  # GPU performance monitoring; since Hopper
    power_average_s: float = 0.0  # window of nvmlDeviceGetPowerUsage; 0: instantaneous (GA100 and older)
    power_duty: tuple[float, float] | None = None  # (sampled, period) [s]: GA100 looks a quarter of the time only

    @property
    def mig_capable(self) -> bool:
        """Whether the model has MIG profiles."""
        return bool(self.profiles)

    def profile(self, profile_id: int) -> GiProfile | None:
        """MIG profile by its id; None when the model lacks it."""
        return next((profile for profile in self.profiles if profile.id == profile_id), None)


def _profiles(kind: DeviceType, driver: DriverRow) -> tuple[GiProfile, ...]:
    """The seven profiles that all 8-slice GPUs share, or the five of an A30, with a board's names and sizes."""
    of = {slice_type.compute_slices: slice_type for slice_type in kind.slice_types}
    rows: tuple[tuple[str, int, int, int, int, int, SliceType | SliceSize, tuple[int, ...]], ...]
    if driver.double_1g is None:
        rows = (  # starts of an A30: the order in which its driver tries them is unknown
            (of[1].name, 0, 14, 1, 1, 4, of[1], of[1].starts),
            (of[1].name + "+me", 7, 21, 1, 1, 1, of[1], of[1].starts),
            (of[2].name, 1, 5, 2, 2, 2, of[2], of[2].starts),
            (of[2].name + "+me", 8, 6, 2, 2, 1, of[2], of[2].starts),
            (of[4].name, 3, 0, 4, 4, 1, of[4], of[4].starts),
        )
    else:
        rows = (
            (of[1].name, 0, 19, 1, 1, 7, of[1], _ONES),
            (of[1].name + "+me", 7, 20, 1, 1, 1, of[1], _ONES),
            ("1g." + of[2].name.partition(".")[2], 9, 15, 1, 2, 4, driver.double_1g, _DOUBLE_ONES),
            (of[2].name, 1, 14, 2, 2, 3, of[2], _TWOS),
            (of[3].name, 2, 9, 3, 4, 2, of[3], _THREES),
            (of[4].name, 3, 5, 4, 4, 1, of[4], _FIRST),
            (of[7].name, 4, 0, 7, 8, 1, of[7], _FIRST),
        )
    return tuple(
        GiProfile(name, constant, profile_id, compute, memory, most, size.sm_count, size.memory_mib, starts)
        for name, constant, profile_id, compute, memory, most, size, starts in rows
    )


def _unknown_driver(kind: DeviceType) -> DriverRow:
    """What the driver of a board says that no table describes: what its type's name says, on an Ada."""
    (whole,) = kind.slice_types
    return DriverRow(
        nvml_name=f"NVIDIA {kind.name.split(':')[1]}", architecture=8, compute_capability=(8, 9), pci_device_id=0x10DE,
        memory_mib=whole.memory_mib, memory_clocks_mhz=(6251,),
    )  # fmt: skip


@cache
def gpu_model(name: str) -> GpuModel:
    """Model of a device type as its driver presents it.

    Raises:
        NotFound: no driver reports such a type; the message names those that are reported.
    """
    kind, driver = reported_type(name), DRIVERS.get(name)
    if kind.clocks_mhz and name.startswith(UNKNOWN):
        driver = _unknown_driver(kind)
    if kind.unknown or driver is None:
        raise NotFound(f"no simulated device {name!r}", remedy=f"one of {', '.join(DRIVERS)}")
    return GpuModel(
        type=kind,
        nvml_name=driver.nvml_name,
        architecture=driver.architecture,
        compute_capability=driver.compute_capability,
        pci_device_id=driver.pci_device_id,
        memory_mib=driver.memory_mib,
        profiles=_profiles(kind, driver) if kind.kind == DeviceKind.MIG_GPU else (),
        clocks_mhz=driver.clocks_mhz.clocks_mhz if driver.clocks_mhz else kind.clocks_mhz,
        memory_clocks_mhz=driver.memory_clocks_mhz,
        power_limit_w=(kind.power_limit_min_w, kind.power_limit_max_w, kind.power_limit_max_w),
        mig_mode_immediate=driver.architecture >= HOPPER,
        lockable=kind.clock_lockable,
        energy_counter=kind.energy_counter,
        gpm=driver.architecture >= HOPPER,
        power_average_s=driver.power_average_s,
        power_duty=driver.power_duty_s,
    )
