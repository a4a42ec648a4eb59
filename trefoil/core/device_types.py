"""Device types: slices, placements and power. Placements and memory: NVML on a DGX A100, MIG user guide r580.

Memory differs by a few hundred MiB between driver branches; agents read it at run time. Power: `power_provenance`.
"""

from collections import Counter
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

DEVICE_TYPES: Final = {A100_40GB.name: A100_40GB}

MEMORY_SLICES: Final = 8  # of every MIG-capable GPU so far


def device_type(name: str) -> DeviceType:
    """The device type of that name.

    Raises:
        NotFound: naming those that are known.
    """
    if name not in DEVICE_TYPES:
        raise NotFound(f"unknown device type {name!r}", remedy=f"one of {sorted(DEVICE_TYPES)}")
    return DEVICE_TYPES[name]


def slice_type(device: DeviceType, name: str) -> SliceType:
    """The slice type of that name on a device type.

    Raises:
        NotFound: naming those that exist.
    """
    for candidate in device.slice_types:
        if candidate.name == name:
            return candidate
    raise NotFound(f"{device.name} has no slice type {name!r}", remedy=f"one of {[s.name for s in device.slice_types]}")


Placement = tuple[tuple[str, int, int], ...]  # ((slice_type, start, size), ...) by start


@cache
def placements(device: DeviceType) -> tuple[Placement, ...]:
    """Every maximal position-aware set of slices (19 on an A100: CLOVER Fig. 1)."""
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
    """The position-aware placements of one multiset."""
    return tuple(
        p for p in placements(device) if tuple(sorted(Counter(n for n, _, _ in p).items())) == configuration.slices
    )
