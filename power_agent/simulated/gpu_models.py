"""What simulated GPU models look like to NVML: MIG profiles, placements, clocks, limits. A new model is a row.

`constant` is the argument of nvmlDeviceGetGpuInstanceProfileInfo, `id` that of create and list: they differ.
Sources: MIG user guide r580 (placements, engines), go-nvml's DGX A100 dump (A100-40 memory and SMs), `nvidia-smi -lgip`
transcripts (A100-80, H100: where 3g has 60 SMs, not 48). Driver branches shift memory by a few hundred MiB. GPUs
without MIG have no profiles; clocks and limits of V100, T4 and P4 are those that nvidia-smi lists for these boards. An
A100 whose MIG mode is off is no row of its own: NVML calls it what it is called in MIG mode.
"""

from dataclasses import dataclass
from typing import Final

MEMORY_SLICES: Final = 8
COMPUTE_SLICES: Final = 7

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
REV1_CI_ID: Final = 7  # the compute instance of 1g+me has a constant of its own

# GPU instance ids per size in memory slices: opaque to users, lowest free first, reused at once.
GI_IDS: Final = {8: (0,), 4: (1, 2), 2: (3, 4, 5, 6), 1: (7, 8, 9, 10, 11, 12, 13, 14)}

KNOWN_PROFILE_CONSTANTS: Final = 0xA  # this driver branch (R535) knows 0..9; a larger constant is INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class GiProfile:
    """A GPU-instance profile. engines = (copy, decoder, encoder, jpeg, optical flow)."""

    name: str
    constant: int
    id: int
    compute_slices: int
    memory_slices: int
    instances_max: int
    sm_count: int
    memory_mib: int
    starts: tuple[int, ...]  # in the driver's default order
    engines: tuple[int, int, int, int, int]

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
    """One GPU model as its driver presents it. `name` is that of its DeviceType; NVML spells it otherwise."""

    name: str
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
    memory_lockable: bool = True  # since Ampere
    energy_counter: bool = True  # since Volta
    gpm: bool = False  # GPU performance monitoring; since Hopper
    power_average_s: float = 0.0  # window of nvmlDeviceGetPowerUsage; 0: instantaneous (GA100 and older)
    power_duty: tuple[float, float] | None = None  # (sampled, period) [s]: GA100 looks a quarter of the time only

    @property
    def mig_capable(self) -> bool:
        """Whether the model has MIG profiles."""
        return bool(self.profiles)

    @property
    def clock_min_mhz(self) -> int:
        """Lowest SM clock."""
        return self.clocks_mhz[0]

    @property
    def clock_max_mhz(self) -> int:
        """Highest SM clock."""
        return self.clocks_mhz[-1]

    def profile(self, profile_id: int) -> GiProfile | None:
        """MIG profile by its id; None when the model lacks it."""
        return next((profile for profile in self.profiles if profile.id == profile_id), None)


Sizes = tuple[tuple[int, int], ...]
Engines = tuple[tuple[int, int, int, int, int], ...]


def _profiles(unit_gb: tuple[int, int, int, int], sizes: Sizes, engines: Engines) -> tuple[GiProfile, ...]:
    """The seven profiles that all 8-slice GPUs share; `sizes` = (SMs, MiB) for 1g, 1g double, 2g, 3g, 4g, 7g."""
    one, two, half, whole = unit_gb
    rows = (
        (f"1g.{one}gb", 0, 19, 1, 1, 7, sizes[0], _ONES),
        (f"1g.{one}gb+me", 7, 20, 1, 1, 1, sizes[0], _ONES),
        (f"1g.{two}gb", 9, 15, 1, 2, 4, sizes[1], _DOUBLE_ONES),
        (f"2g.{two}gb", 1, 14, 2, 2, 3, sizes[2], _TWOS),
        (f"3g.{half}gb", 2, 9, 3, 4, 2, sizes[3], _THREES),
        (f"4g.{half}gb", 3, 5, 4, 4, 1, sizes[4], _FIRST),
        (f"7g.{whole}gb", 4, 0, 7, 8, 1, sizes[5], _FIRST),
    )
    return tuple(
        GiProfile(name, constant, profile_id, compute, memory, most, size[0], size[1], starts, engine)
        for (name, constant, profile_id, compute, memory, most, size, starts), engine in zip(rows, engines, strict=True)
    )


_AMPERE_ENGINES: Final = (
    (1, 0, 0, 0, 0),
    (1, 1, 0, 1, 1),
    (1, 1, 0, 0, 0),
    (2, 1, 0, 0, 0),
    (3, 2, 0, 0, 0),
    (4, 2, 0, 0, 0),
    (7, 5, 0, 1, 1),
)
_HOPPER_ENGINES: Final = (
    (1, 1, 0, 1, 0),
    (1, 1, 0, 1, 1),
    (1, 1, 0, 1, 0),
    (2, 2, 0, 2, 0),
    (3, 3, 0, 3, 0),
    (4, 4, 0, 4, 0),
    (8, 7, 0, 7, 1),
)

A100_40GB: Final = GpuModel(
    name="A100-SXM4-40GB",
    nvml_name="NVIDIA A100-SXM4-40GB",
    architecture=7,
    compute_capability=(8, 0),
    pci_device_id=0x20B010DE,
    memory_mib=40960,
    profiles=_profiles(
        (5, 10, 20, 40),
        ((14, 4864), (14, 9856), (28, 9856), (42, 19968), (56, 19968), (98, 40192)),
        _AMPERE_ENGINES,
    ),
    clocks_mhz=tuple(range(210, 1411, 15)),
    memory_clocks_mhz=(1215,),
    power_limit_w=(100.0, 400.0, 400.0),
    power_duty=(0.025, 0.1),
)

A100_80GB: Final = GpuModel(
    name="A100-SXM4-80GB",
    nvml_name="NVIDIA A100-SXM4-80GB",
    architecture=7,
    compute_capability=(8, 0),
    pci_device_id=0x20B210DE,
    memory_mib=81920,
    profiles=_profiles(
        (10, 20, 40, 80),
        ((14, 9728), (14, 19968), (28, 19968), (42, 40192), (56, 40192), (98, 80896)),
        _AMPERE_ENGINES,
    ),
    clocks_mhz=tuple(range(210, 1411, 15)),
    memory_clocks_mhz=(1593,),
    power_limit_w=(100.0, 400.0, 400.0),
    power_duty=(0.025, 0.1),
)

H100_80GB: Final = GpuModel(
    name="H100-SXM5-80GB",
    nvml_name="NVIDIA H100 80GB HBM3",
    architecture=9,
    compute_capability=(9, 0),
    pci_device_id=0x233010DE,
    memory_mib=81559,
    profiles=_profiles(
        (10, 20, 40, 80),
        ((16, 9984), (26, 20096), (32, 20096), (60, 40448), (64, 40448), (132, 81152)),
        _HOPPER_ENGINES,
    ),
    clocks_mhz=tuple(range(345, 1981, 15)),
    memory_clocks_mhz=(2619, 1593),
    power_limit_w=(200.0, 700.0, 700.0),
    mig_mode_immediate=True,
    gpm=True,
    power_average_s=1.0,
)

V100_32GB: Final = GpuModel(
    name="Tesla V100-SXM2-32GB",
    nvml_name="Tesla V100-SXM2-32GB",
    architecture=5,
    compute_capability=(7, 0),
    pci_device_id=0x1DB510DE,
    memory_mib=32768,
    profiles=(),
    clocks_mhz=tuple(135 + (15 * step + 1) // 2 for step in range(187)),  # 135 to 1530 in steps of 7.5
    memory_clocks_mhz=(877,),
    power_limit_w=(150.0, 300.0, 300.0),
    memory_lockable=False,
)

T4: Final = GpuModel(
    name="Tesla T4",
    nvml_name="Tesla T4",
    architecture=6,
    compute_capability=(7, 5),
    pci_device_id=0x1EB810DE,
    memory_mib=15360,
    profiles=(),
    clocks_mhz=tuple(range(300, 1591, 15)),
    memory_clocks_mhz=(5001, 405),
    power_limit_w=(60.0, 70.0, 70.0),
    memory_lockable=False,
)

P4: Final = GpuModel(
    name="Tesla P4",
    nvml_name="Tesla P4",
    architecture=4,
    compute_capability=(6, 1),
    pci_device_id=0x1BB310DE,
    memory_mib=7680,
    profiles=(),
    clocks_mhz=tuple(456 + (25 * step + 1) // 2 for step in range(87)),  # 456 to 1531 in steps of about 12.5
    memory_clocks_mhz=(3003, 405),
    power_limit_w=(60.0, 75.0, 75.0),
    lockable=False,
    memory_lockable=False,
    energy_counter=False,
)

GPU_MODELS: Final = {model.name: model for model in (A100_40GB, A100_80GB, H100_80GB, V100_32GB, T4, P4)}
