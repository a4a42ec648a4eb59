"""Device types: slices, placements and power. Placements and memory: NVML on a DGX A100, MIG user guide r580.

Memory differs by a few hundred MiB between driver branches; agents read it at run time. Power: `power_provenance`.
A GPU without MIG is one slice, `whole`. The CPUs of a node are one device, `cpu:<cores>`, cut into contiguous core
ranges (`cpu:4`) or into quotas in steps of a tenth of a core (`quota:0.5`), not both at once.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Final

from trefoil.core.common import Basis, Provenance
from trefoil.core.errors import NotFound
from trefoil.core.fleet import Configuration, DeviceKind, DeviceType, SliceType

A100_40GB: Final = DeviceType(
    name="A100-SXM4-40GB",
    kind=DeviceKind.MIG_GPU,
    slice_types=(
        SliceType("1g.5gb", 1, 1, 14, 4864, 0, (0, 1, 2, 3, 4, 5, 6)),
        SliceType("2g.10gb", 2, 2, 28, 9856, 0, (0, 2, 4)),
        SliceType("3g.20gb", 3, 4, 42, 19968, 0, (0, 4)),
        SliceType("4g.20gb", 4, 4, 56, 19968, 0, (0,)),
        SliceType("7g.40gb", 7, 8, 98, 40192, 0, (0,)),
    ),
    clocks_mhz=tuple(range(210, 1411, 15)),
    clock_lockable=True,
    energy_counter=True,
    idle_w=55.0,
    sleep_w=35.0,
    max_w=400.0,
    wake_s=1.0,
    power_limit_min_w=100.0,
    power_limit_max_w=400.0,
    tier="high",
    embodied_g=26357.0,
    power_provenance=Provenance(
        Basis.SYNTHETIC,
        "idle 55 W: CARBONDIS Table III (A100); sleep 35 W (no context, clocks dropped) is an assumption",
    ),
)

_UNMEASURED: Final = "idle and sleep watts are assumptions; board limit: data sheet"

A100_80GB: Final = replace(
    A100_40GB,
    name="A100-SXM4-80GB",
    slice_types=(
        SliceType("1g.10gb", 1, 1, 14, 9728, 0, (0, 1, 2, 3, 4, 5, 6)),
        SliceType("2g.20gb", 2, 2, 28, 19968, 0, (0, 2, 4)),
        SliceType("3g.40gb", 3, 4, 42, 40192, 0, (0, 4)),
        SliceType("4g.40gb", 4, 4, 56, 40192, 0, (0,)),
        SliceType("7g.80gb", 7, 8, 98, 80896, 0, (0,)),
    ),
    idle_w=60.0,
    sleep_w=40.0,
    embodied_g=0.0,
    power_provenance=Provenance(Basis.SYNTHETIC, _UNMEASURED),
)

H100_80GB: Final = replace(
    A100_80GB,
    name="H100-SXM5-80GB",
    slice_types=(
        SliceType("1g.10gb", 1, 1, 16, 9984, 0, (0, 1, 2, 3, 4, 5, 6)),
        SliceType("2g.20gb", 2, 2, 32, 20096, 0, (0, 2, 4)),
        SliceType("3g.40gb", 3, 4, 60, 40448, 0, (0, 4)),
        SliceType("4g.40gb", 4, 4, 64, 40448, 0, (0,)),
        SliceType("7g.80gb", 7, 8, 132, 81152, 0, (0,)),
    ),
    clocks_mhz=tuple(range(345, 1981, 15)),
    idle_w=70.0,
    sleep_w=50.0,
    max_w=700.0,
    power_limit_min_w=200.0,
    power_limit_max_w=700.0,
)

WHOLE: Final = "whole"


def _whole(sm_count: int, memory_mib: int) -> tuple[SliceType, ...]:
    return (SliceType(WHOLE, 1, 1, sm_count, memory_mib, 0, (0,)),)


# An A100 whose MIG mode is off: its slice has the 10 SMs that MIG leaves idle. NVML reports one product name in both
# modes and agents map it to the type that can be cut, so that this type exists in simulations and plans only.
A100_40GB_WHOLE: Final = replace(
    A100_40GB,
    name="A100-SXM4-40GB-nomig",
    kind=DeviceKind.WHOLE_GPU,
    slice_types=_whole(108, 40536),
)

V100_32GB: Final = DeviceType(
    name="Tesla V100-SXM2-32GB",
    kind=DeviceKind.WHOLE_GPU,
    slice_types=_whole(80, 32510),
    clocks_mhz=tuple(135 + (15 * step + 1) // 2 for step in range(187)),  # 135 to 1530 in steps of 7.5
    clock_lockable=True,
    energy_counter=True,
    idle_w=53.5,
    sleep_w=40.0,
    max_w=300.0,
    wake_s=1.0,
    power_limit_min_w=150.0,
    power_limit_max_w=300.0,
    tier="high",
    embodied_g=19949.0,
    power_provenance=Provenance(Basis.SYNTHETIC, "idle 53.5 W, 300 W: iGniter (V100); sleep 40 W is an assumption"),
)

T4: Final = DeviceType(
    name="Tesla T4",
    kind=DeviceKind.WHOLE_GPU,
    slice_types=_whole(40, 15360),
    clocks_mhz=tuple(range(300, 1591, 15)),
    clock_lockable=True,
    energy_counter=True,
    idle_w=30.0,
    sleep_w=10.0,
    max_w=70.0,
    wake_s=1.0,
    power_limit_min_w=60.0,
    power_limit_max_w=70.0,
    tier="low",
    power_provenance=Provenance(Basis.SYNTHETIC, "idle 30 W: CARBONDIS Table III (T4); sleep 10 W is an assumption"),
)

# Pascal: no energy counter, no locked clocks (both came with Volta).
P4: Final = DeviceType(
    name="Tesla P4",
    kind=DeviceKind.WHOLE_GPU,
    slice_types=_whole(20, 7611),
    clocks_mhz=(),
    clock_lockable=False,
    energy_counter=False,
    idle_w=25.0,
    sleep_w=7.0,
    max_w=75.0,
    wake_s=1.0,
    power_limit_min_w=60.0,
    power_limit_max_w=75.0,
    tier="low",
    power_provenance=Provenance(Basis.SYNTHETIC, "idle 25 W: CARBONDIS Table III (P4); sleep 7 W is an assumption"),
)

DEVICE_TYPES: Final = {
    kind.name: kind for kind in (A100_40GB, A100_80GB, H100_80GB, A100_40GB_WHOLE, V100_32GB, T4, P4)
}
NEVER_LIVE: Final = frozenset({A100_40GB_WHOLE.name})  # no driver reports these names, a simulated one neither

MEMORY_SLICES: Final = 8  # of every MIG-capable GPU so far


CPU_CORES_MAX: Final = 1024
CPU_MIB_PER_CORE: Final = 4096  # an assumption until a node says what it has
CPU_IDLE_W_PER_CORE: Final = 1.5  # assumptions of a server package; RAPL measures what is really drawn
CPU_MAX_W_PER_CORE: Final = 5.0
TENTHS: Final = 10  # a quota counts tenths of a core

_CPU_DEVICE: Final = re.compile(r"cpu:([1-9]\d{0,3})")
_CPU_SLICE: Final = re.compile(r"cpu:([1-9]\d{0,3})")
_QUOTA_SLICE: Final = re.compile(r"quota:(0|[1-9]\d{0,3})\.(\d)")


def device_type(name: str) -> DeviceType:
    """Device type of a name; `cpu:<cores>` are the CPUs of a node.

    Raises:
        NotFound: naming those that are known.
    """
    if name in DEVICE_TYPES:
        return DEVICE_TYPES[name]
    cpu = _CPU_DEVICE.fullmatch(name)
    if cpu is not None and int(cpu[1]) <= CPU_CORES_MAX:
        return _cpu_device(int(cpu[1]))
    raise NotFound(f"unknown device type {name!r}", remedy=f"one of {sorted(DEVICE_TYPES)}, or cpu:<cores>")


@cache
def _cpu_device(cores: int) -> DeviceType:
    idle_w = CPU_IDLE_W_PER_CORE * cores
    return DeviceType(
        name=f"cpu:{cores}",
        kind=DeviceKind.CPU,
        slice_types=tuple(_core_range(width, cores) for width in range(1, cores + 1)),
        energy_counter=True,
        idle_w=idle_w,
        sleep_w=idle_w,  # nobody can switch the host's CPUs off
        max_w=CPU_MAX_W_PER_CORE * cores,
        cores=cores,
        power_provenance=Provenance(Basis.SYNTHETIC, "watts per core are assumptions; RAPL measures"),
    )


def _core_range(width: int, cores: int) -> SliceType:
    starts = tuple(range(cores - width + 1))
    return SliceType(f"cpu:{width}", 0, width, 0, CPU_MIB_PER_CORE * width, width, starts)


def slice_type(device: DeviceType, name: str) -> SliceType:
    """Slice type of a name on a device type.

    Raises:
        NotFound: naming those that exist.
    """
    for candidate in device.slice_types:
        if candidate.name == name:
            return candidate
    quota = _QUOTA_SLICE.fullmatch(name) if device.kind == DeviceKind.CPU else None
    if quota is not None and 0 < (tenths := TENTHS * int(quota[1]) + int(quota[2])) <= TENTHS * device.cores:
        starts = tuple(range(TENTHS * device.cores - tenths + 1))
        memory_mib = CPU_MIB_PER_CORE * tenths // TENTHS
        return SliceType(name, 0, tenths, 0, memory_mib, -(-tenths // TENTHS), starts)
    known = [s.name for s in device.slice_types]
    quotas = ", or quota:<cores with one decimal>" if device.kind == DeviceKind.CPU else ""
    raise NotFound(f"{device.name} has no slice type {name!r}", remedy=f"one of {known}{quotas}")


def device_share(device: DeviceType, name: str) -> float:
    """Share of its device's compute that a slice has: of its SMs, or of its cores.

    Raises:
        NotFound: the device has no such slice type.
    """
    shape = slice_type(device, name)
    if device.kind == DeviceKind.CPU:
        return shape.memory_slices / (device.cores * (TENTHS if cpu_quota(name) is not None else 1))
    return shape.sm_count / max(s.sm_count for s in device.slice_types)


def cpu_quota(slice_type_name: str) -> float | None:
    """Cores of a `quota:X.Y` slice; None for every other slice type."""
    quota = _QUOTA_SLICE.fullmatch(slice_type_name)
    return int(quota[1]) + int(quota[2]) / TENTHS if quota else None


def cpu_range(slice_type_name: str, start: int) -> tuple[int, ...] | None:
    """Cores that a `cpu:N` slice at `start` is pinned to; None for every other slice type."""
    cores = _CPU_SLICE.fullmatch(slice_type_name)
    return tuple(range(start, start + int(cores[1]))) if cores else None


Placement = tuple[tuple[str, int, int], ...]  # ((slice_type, start, size), ...) by start


@cache
def placements(device: DeviceType) -> tuple[Placement, ...]:
    """Placements: every maximal position-aware set of slices (19 on an A100: CLOVER Fig. 1); not for CPUs."""
    assert device.kind != DeviceKind.CPU, device.name
    options = [(s.name, start, s.memory_slices, s.compute_slices) for s in device.slice_types for start in s.starts]
    found: list[Placement] = []

    def grow(chosen: tuple[tuple[str, int, int, int], ...], position: int) -> None:
        used = sum(c for _, _, _, c in chosen)
        fits = [
            o
            for o in options
            if o[1] >= position and used + o[3] <= 7 and all(o[1] >= c[1] + c[2] or c[1] >= o[1] + o[2] for c in chosen)
        ]
        for option in fits:
            grow((*chosen, option), option[1] + option[2])
        if chosen and not _extensible(chosen, options):
            found.append(tuple((n, s, m) for n, s, m, _ in chosen))

    grow((), 0)
    return tuple(sorted(set(found)))


def _extensible(chosen: tuple[tuple[str, int, int, int], ...], options: list[tuple[str, int, int, int]]) -> bool:
    used = sum(c for _, _, _, c in chosen)
    return any(used + o[3] <= 7 and all(o[1] >= c[1] + c[2] or c[1] >= o[1] + o[2] for c in chosen) for o in options)


@cache
def configurations(device: DeviceType) -> tuple[Configuration, ...]:
    """Distinct multisets of `placements` (14 on an A100)."""
    multisets = {tuple(sorted(Counter(n for n, _, _ in p).items())) for p in placements(device)}
    return tuple(Configuration(device.name, m) for m in sorted(multisets))


@cache
def placements_of(device: DeviceType, configuration: Configuration) -> tuple[Placement, ...]:
    """Placements, position-aware, of one multiset."""
    return tuple(
        p for p in placements(device) if tuple(sorted(Counter(n for n, _, _ in p).items())) == configuration.slices
    )
