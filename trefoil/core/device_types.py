"""Device types: slices, placements and power, from device_types.toml in this folder (docs/device-types.md).

A GPU without MIG is one slice, `whole`; so is one whose MIG mode is off, as a separate type, `<board>-nomig`. A board
without a table is `gpu:<board>:<memory>:<power limit>[:<clocks>]`: the name has all that its driver reports. The
CPUs of a node are one device, `cpu:<cores>`. It is cut into contiguous core ranges (`cpu:4`) or into quotas in steps of
a tenth of a core (`quota:0.5`), not both at once.
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from trefoil.core.common import Basis, Provenance
from trefoil.core.errors import NotFound, SettingError, one_of
from trefoil.core.fleet import Configuration, DeviceKind, DeviceType, SliceKey, SliceType
from trefoil.core.outside.ranges import Ranged

WHOLE: Final = "whole"
UNKNOWN: Final = "gpu:"  # begins the name of a board that no table describes
NO_MIG: Final = "-nomig"  # ends the name of a board's type with MIG mode off
LESS: Final = ":less:"  # in the name of a type of which a device does not offer everything (`limited_type`)
ENGINE: Final = "engine:"  # begins the name of the one slice type of a device with an adopted engine
SLEEPS: Final = ":sleeps"  # ends the name of its type where a command puts it to sleep
MEMORY_SLICES: Final = 8  # of every MIG-capable GPU so far
COMPUTE_SLICES: Final = 7
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]*")


class ClockRange(Ranged):
    """SM clocks [MHz] from `min` to `max` in steps that need not be whole; halves are rounded up."""

    min: int = Field(ge=1, le=100_000)
    max: int = Field(ge=1, le=100_000)
    step: float = Field(ge=0.5, le=100_000)

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The clocks, ascending."""
        return tuple(int(self.min + self.step * i + 0.5) for i in range(int((self.max - self.min) / self.step) + 1))


class SliceSize(Ranged):
    """What a slice has. `memory_mib` is what its driver shows to a process."""

    sm_count: int = Field(ge=1)
    memory_mib: int = Field(ge=1)


class SliceRow(SliceSize):
    """Slice type of a board; without MIG the only one is `whole`, and only its size is said."""

    compute_slices: int = Field(default=1, ge=1, le=COMPUTE_SLICES)
    memory_slices: int = Field(default=1, ge=1, le=MEMORY_SLICES)
    starts: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Memory slices at which it may begin."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        for start in self.starts:
            if not 0 <= start <= MEMORY_SLICES - self.memory_slices:
                raise ValueError(f"start {start} does not leave {self.memory_slices} of {MEMORY_SLICES} memory slices")
        return self


class DriverRow(Ranged):
    """What NVML says of a board, for simulated nodes."""

    nvml_name: str
    architecture: int = Field(ge=2)
    """NVML_DEVICE_ARCH_*: Pascal 4, Volta 5, Turing 6, Ampere 7, Ada 8, Hopper 9."""
    compute_capability: tuple[int, int]
    pci_device_id: int = Field(ge=0)
    memory_mib: int = Field(ge=1)
    memory_clocks_mhz: tuple[int, ...] = Field(min_length=1)
    """Descending."""
    clocks_mhz: ClockRange | None = None
    """SM clocks of a board that cannot be locked to them; else those of its type."""
    double_1g: SliceSize | None = None
    """The slice of one compute slice and two memory slices, which no plan uses."""
    power_average_s: float = Field(default=0.0, ge=0)
    """Window of nvmlDeviceGetPowerUsage; 0: instantaneous (GA100 and older)."""
    power_duty_s: tuple[float, float] | None = None
    """Power is looked at for the first of these in every second of them."""


class DeviceTypeRow(Ranged):
    """One table of device_types.toml, by the name of the type."""

    kind: Literal["mig_gpu", "whole_gpu"]
    slices: dict[str, SliceRow] = Field(min_length=1)
    whole: SliceSize | None = None
    """The one slice of a `mig_gpu` whose MIG mode is off; None: it serves in MIG mode only."""
    clocks_mhz: ClockRange | None = None
    """SM clocks that it can be locked to."""
    clock_lockable: bool
    energy_counter: bool
    """Whether its driver counts joules (since Volta)."""
    idle_w: float = Field(gt=0)
    sleep_w: float = Field(gt=0)
    """Without a context, clocks dropped."""
    max_w: float = Field(gt=0)
    wake_s: float = Field(ge=0)
    power_limit_min_w: float = Field(gt=0)
    power_limit_max_w: float = Field(gt=0)
    tier: Literal["high", "low", ""] = ""
    """Of CARBONDIS's two."""
    embodied_g: float = Field(default=0.0, ge=0)
    """Grams of CO2 of making it; 0: unknown."""
    power_basis: Literal["measured", "modelled", "synthetic"]
    power_source: str = Field(min_length=1)
    """Who says the watts."""
    driver: DriverRow | None = None
    """None: for plans and `trefoil simulate` only."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.kind == "whole_gpu" and (self.slices.keys() != {WHOLE} or self.slices[WHOLE].memory_slices != 1):
            raise ValueError(f"a whole_gpu has one slice, slices.{WHOLE} = {{ sm_count, memory_mib }}")
        if self.kind == "whole_gpu" and self.whole is not None:
            raise ValueError("whole is of a mig_gpu with its MIG mode off; a whole_gpu says slices.whole")
        if not self.sleep_w <= self.idle_w < self.max_w:
            raise ValueError(f"sleep_w {self.sleep_w} <= idle_w {self.idle_w} < max_w {self.max_w} does not hold")
        if self.power_limit_min_w > self.power_limit_max_w:
            raise ValueError(f"power_limit_min_w {self.power_limit_min_w} is above power_limit_max_w")
        if self.clock_lockable != (self.clocks_mhz is not None):
            raise ValueError("clocks_mhz are those that it can be locked to; set them where clock_lockable is true")
        if self.driver is not None and self.clocks_mhz is None and self.driver.clocks_mhz is None:
            raise ValueError("driver.clocks_mhz is missing, of a board that is not clock_lockable")
        widths = sorted(row.compute_slices for row in self.slices.values())
        as_a30, as_others = widths == [1, 2, 4], widths == [1, 2, 3, 4, 7]
        if self.driver is not None and self.kind == "mig_gpu":
            if not as_a30 and not as_others:
                raise ValueError("a simulated driver cuts into 1, 2, 3, 4 and 7 compute slices, or into 1, 2 and 4")
            if as_others != (self.driver.double_1g is not None):
                raise ValueError("driver.double_1g applies only to a board of seven compute slices")
        return self

    def outside_mig(self) -> "DeviceTypeRow | None":
        """Row of the same board with its MIG mode off; None where `whole` is not said."""
        if self.whole is None:
            return None
        whole = SliceRow(**self.whole.model_dump())
        return self.model_copy(update={"kind": "whole_gpu", "slices": {WHOLE: whole}, "whole": None, "driver": None})

    def device_type(self, name: str) -> DeviceType:
        """Device type of this row."""
        told = self.model_dump(
            include={
                "clock_lockable", "energy_counter", "idle_w", "sleep_w", "max_w", "wake_s", "power_limit_min_w",
                "power_limit_max_w", "tier", "embodied_g",
            }
        )  # fmt: skip
        return DeviceType(
            name=name,
            kind=DeviceKind[self.kind.upper()],
            slice_types=tuple(SliceType(name=of, **row.model_dump()) for of, row in self.slices.items()),
            clocks_mhz=self.clocks_mhz.clocks_mhz if self.clocks_mhz else (),
            power_provenance=Provenance(Basis[self.power_basis.upper()], self.power_source),
            **told,
        )


def parse_rows(tables: Mapping[str, Any], source: str) -> dict[str, DeviceTypeRow]:
    """Rows of a device types file by name; `source` names it in errors.

    Raises:
        SettingError: names the file, device type, field, value and remedy.
    """
    rows = {}
    for name, table in tables.items():
        if not NAME.fullmatch(name):
            raise SettingError(
                f"is not a name of a device type (in {source})", field=name,
                remedy="call it as NVML does, without 'NVIDIA': letters, digits, blanks, dots, - and _",
            )  # fmt: skip
        try:
            rows[name] = DeviceTypeRow.model_validate(table)
        except ValidationError as error:
            complaint = error.errors(include_url=False)[0]
            unknown, missing = (complaint["type"] == kind for kind in ("extra_forbidden", "missing"))
            message = complaint["msg"].removeprefix("Value error, ")
            raise SettingError(
                f"{'no such field' if unknown else message} (in {source})",
                field=".".join([name, *map(str, complaint["loc"])]),
                value=None if missing or isinstance(complaint["input"], dict) else complaint["input"],
                remedy="remove it, or write it as docs/device-types.md does" if unknown else "see docs/device-types.md",
            ) from error
    return rows


DEVICE_TYPES: Final[dict[str, DeviceType]] = {}
DRIVERS: Final[dict[str, DriverRow]] = {}
"""Of the types that a driver reports, a simulated one too."""


def register(rows: Mapping[str, DeviceTypeRow], source: str) -> None:
    """Register device types beside those that there are.

    Raises:
        SettingError: a name that another type has, whose results must not change under that name.
    """
    known: dict[str, DeviceTypeRow] = {}
    for name, row in rows.items():
        uncut = row.outside_mig()
        known |= {name: row} if uncut is None else {name: row, name + NO_MIG: uncut}
    for name in known:
        if name in DEVICE_TYPES:
            remedy = "give the board a name of its own"
            raise SettingError(f"is a device type already (in {source})", field=name, remedy=remedy)
    DEVICE_TYPES.update({name: row.device_type(name) for name, row in known.items()})
    DRIVERS.update({name: row.driver for name, row in rows.items() if row.driver is not None})


_SHIPPED: Final = "device_types.toml"
register(parse_rows(tomllib.loads((resources.files(__package__) / _SHIPPED).read_text("utf-8")), _SHIPPED), _SHIPPED)
A100_40GB: Final = DEVICE_TYPES["A100-SXM4-40GB"]
A100_80GB: Final = DEVICE_TYPES["A100-SXM4-80GB"]
H100_80GB: Final = DEVICE_TYPES["H100-SXM5-80GB"]
A100_40GB_WHOLE: Final = DEVICE_TYPES[A100_40GB.name + NO_MIG]
V100_32GB: Final = DEVICE_TYPES["Tesla V100-SXM2-32GB"]
T4: Final = DEVICE_TYPES["Tesla T4"]
P4: Final = DEVICE_TYPES["Tesla P4"]

CPU_CORES_MAX: Final = 1024
CPU_MIB_PER_CORE: Final = 4096  # an assumption until a node says what it has
CPU_IDLE_W_PER_CORE: Final = 1.5  # assumptions of a server package; RAPL measures what is really drawn
CPU_MAX_W_PER_CORE: Final = 5.0
CPUS: Final = "cpu"
"""What profile rows of every `cpu:<cores>` are looked up by."""
QUOTA_PLACES: Final = 2
"""Places of quotas are names: as many times the cores as this, so that a quota's successor starts beside it. While a
rollout lasts, and no longer, quotas may so add up to this many times the cores."""
TENTHS: Final = 10  # a quota counts tenths of a core
RANGED_CORES_MAX: Final = 12  # of a CPU of which all ways to cut it in ranges of cores are listed: 2,048

UNKNOWN_IDLE_SHARE: Final = 0.15  # of the power limit, of a board that no table describes: assumptions, as its sleep
UNKNOWN_SLEEP_SHARE: Final = 0.1
UNKNOWN_MAX_W: Final = 300.0  # where its driver tells no limit

_BOARD: Final = re.compile(
    r"gpu:([A-Za-z0-9][A-Za-z0-9 ._-]*):([1-9]\d{0,3})GiB:([1-9]\d{0,3})W"
    r"(?::([1-9]\d{0,3})-([1-9]\d{0,3})MHz/([1-9]\d{0,2}(?:\.\d{1,3})?))?"
)
_CPU_DEVICE: Final = re.compile(r"cpu:([1-9]\d{0,3})")
_CPU_SLICE: Final = re.compile(r"cpu:([1-9]\d{0,3})")
_ENGINE: Final = re.compile(f"{ENGINE}([A-Za-z0-9._-]+):([A-Za-z0-9._-]+)({SLEEPS})?")
_QUOTA_SLICE: Final = re.compile(r"quota:(0|[1-9]\d{0,3})\.(\d)")


def device_type(name: str) -> DeviceType:
    """Device type of a name; `cpu:<cores>` are the CPUs of a node, `gpu:<board>:...` a board that no table describes.

    Raises:
        NotFound: naming those that are known.
    """
    found = reported_type(name)
    if found.unknown:
        raise NotFound(f"unknown device type {name!r}", remedy=one_of(sorted(DEVICE_TYPES), name, also="cpu:<cores>"))
    return found


def reported_type(name: str) -> DeviceType:
    """Device type that a node reports by name; an `unknown` one where there is no such type."""
    if name in DEVICE_TYPES:
        return DEVICE_TYPES[name]
    whole, less, limits = name.partition(LESS)
    if engine := _ENGINE.fullmatch(limits):
        known = reported_type(whole)
        return known if known.unknown else engine_type(known, engine[1], engine[2], bool(engine[3]))
    if less and whole in DEVICE_TYPES:
        return _limited(DEVICE_TYPES[whole], limits)
    if name.startswith(UNKNOWN) and (board := _unknown_board(name)) is not None:
        return board
    cpu = _CPU_DEVICE.fullmatch(name)
    return _cpu_device(int(cpu[1])) if cpu is not None and int(cpu[1]) <= CPU_CORES_MAX else DeviceType(name)


def is_outside_mig(name: str) -> bool:
    """Whether a type stands for a board that serves whole only while its MIG mode is off, as far as a name tells."""
    return name.endswith(NO_MIG) or name.startswith(UNKNOWN)


def unknown_board_name(board: str, memory_mib: int, max_w: float, clocks_mhz: Sequence[int]) -> str:
    """Name of the type of a board that no table describes, by what its driver says of it.

    Memory in whole GiB, because drivers differ by some MiB and profiles go by the name; no clocks where they are not
    evenly spaced: such a board keeps its own.
    """
    title = re.sub(r"[^A-Za-z0-9 ._-]", "-", board).strip(" ._-") or "GPU"
    name = f"{UNKNOWN}{title}:{max(1, memory_mib // 1024)}GiB:{max(1, round(max_w))}W"
    if len(clocks_mhz) < 2:
        return name
    least, most = min(clocks_mhz), max(clocks_mhz)
    step = round((most - least) / (len(clocks_mhz) - 1), 3)
    even = ClockRange(min=least, max=most, step=step).clocks_mhz == tuple(sorted(clocks_mhz))
    return f"{name}:{least}-{most}MHz/{step:g}" if even else name


@lru_cache(maxsize=64)
def _unknown_board(name: str) -> DeviceType | None:
    told = _BOARD.fullmatch(name)
    if told is None:
        return None
    try:
        clocks = ClockRange(min=int(told[4]), max=int(told[5]), step=float(told[6])).clocks_mhz if told[4] else ()
    except ValidationError:
        return None
    max_w = float(told[3])
    return DeviceType(
        name=name,
        kind=DeviceKind.WHOLE_GPU,
        slice_types=(SliceType(WHOLE, 1, 1, 1, 1024 * int(told[2]), 0, (0,)),),  # SMs: all there are, however many
        clocks_mhz=clocks,
        clock_lockable=bool(clocks),
        energy_counter=True,  # an agent integrates power where there is none
        idle_w=UNKNOWN_IDLE_SHARE * max_w,
        sleep_w=UNKNOWN_SLEEP_SHARE * max_w,
        max_w=max_w,
        wake_s=1.0,
        power_limit_min_w=max_w,
        power_limit_max_w=max_w,
        power_provenance=Provenance(Basis.SYNTHETIC, "idle and sleep watts are assumed shares of its power limit"),
    )


@cache
def _cpu_device(cores: int) -> DeviceType:
    idle_w = CPU_IDLE_W_PER_CORE * cores
    return DeviceType(
        name=f"cpu:{cores}",
        kind=DeviceKind.CPU,
        slice_types=tuple(_core_range(width, cores) for width in range(1, cores + 1)),
        energy_counter=True,
        idle_w=idle_w,
        sleep_w=idle_w,  # the host's CPUs cannot be switched off
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
    found = find_slice_type(device, name)
    if found is not None:
        return found
    known = [s.name for s in device.slice_types]
    quotas = "quota:<cores with one decimal>" if device.kind == DeviceKind.CPU else ""
    raise NotFound(f"{device.name} has no slice type {name!r}", remedy=one_of(known, name, also=quotas))


def find_slice_type(device: DeviceType, name: str) -> SliceType | None:
    """Slice type of a name on a device type; None where it has no such one."""
    for candidate in device.slice_types:
        if candidate.name == name:
            return candidate
    quota = _QUOTA_SLICE.fullmatch(name) if device.kind == DeviceKind.CPU else None
    if quota is not None and 0 < (tenths := TENTHS * int(quota[1]) + int(quota[2])) <= TENTHS * device.cores:
        starts = tuple(range(QUOTA_PLACES * TENTHS * device.cores - tenths + 1))
        memory_mib = CPU_MIB_PER_CORE * tenths // TENTHS
        return SliceType(name, 0, tenths, 0, memory_mib, -(-tenths // TENTHS), starts)
    return None


def device_share(device: DeviceType, name: str) -> float:
    """Share of its device's compute that a slice has: of its SMs, or of its cores.

    Raises:
        NotFound: the device has no such slice type.
    """
    shape = slice_type(device, name)
    if device.kind == DeviceKind.CPU:
        return shape.memory_slices / (device.cores * (TENTHS if cpu_quota(name) is not None else 1))
    return shape.sm_count / max(s.sm_count for s in device.slice_types)


def profile_type(name: str) -> str:
    """Device type that profile rows are looked up by: those of a CPU hold for any number of its cores."""
    return CPUS if _CPU_SLICE.fullmatch(name) else name.partition(LESS)[0]


def limited_type(kind: DeviceType, taken: Iterable[SliceKey], lacks: Iterable[str] = ()) -> DeviceType:
    """Type of a device on which the places of `taken` and the slice types of `lacks` are not to be had.

    It has a name, so that planners count such devices apart, and every slice type, some without a start.
    """
    places = [p for p in range(MEMORY_SLICES) if any(key.start <= p < key.start + key.size for key in taken)]
    missing = sorted({shape.name for shape in kind.slice_types} & set(lacks))
    limits = ",".join([*map(str, places), *missing])
    return _limited(kind, limits) if limits else kind


@lru_cache(maxsize=1024)
def _limited(kind: DeviceType, limits: str) -> DeviceType:
    found = limits.split(",")
    places = {int(limit) for limit in found if limit.isdecimal()}
    shapes = (
        replace(
            shape,
            starts=tuple(
                start
                for start in shape.starts
                if shape.name not in found and places.isdisjoint(range(start, start + shape.memory_slices))
            ),
        )
        for shape in kind.slice_types
    )
    return replace(kind, name=f"{kind.name}{LESS}{limits}", slice_types=tuple(shapes))


def engine_slice(family: str, variant: str) -> str:
    """Slice type of devices on which an engine that already runs serves this variant, and nothing else."""
    return f"{ENGINE}{family}:{variant}"


@lru_cache(maxsize=1024)
def engine_type(kind: DeviceType, family: str, variant: str, sleeps: bool) -> DeviceType:
    """Type of a whole GPU with an engine that already runs. `sleeps`: a command puts it to sleep; else it continues to
    draw its idle watts, whatever is planned."""
    shape = replace(kind.largest, name=engine_slice(family, variant), compute_slices=1, memory_slices=1, starts=(0,))
    return replace(
        kind,
        name=f"{kind.name}{LESS}{shape.name}{SLEEPS * sleeps}",
        kind=DeviceKind.WHOLE_GPU,
        slice_types=(shape,),
        sleep_w=kind.sleep_w if sleeps else kind.idle_w,
    )


def engine_of(kind: DeviceType) -> tuple[str, str] | None:
    """Family and variant that the engine of a device serves; None: it has none."""
    engine = _ENGINE.fullmatch(kind.name.partition(LESS)[2])
    return (engine[1], engine[2]) if engine else None


@lru_cache(maxsize=1024)
def slice_cores(slice_type_name: str) -> float:
    """Cores of a `cpu:N` or `quota:X.Y` slice; 0.0 for every other slice type."""
    cores = _CPU_SLICE.fullmatch(slice_type_name)
    return float(cores[1]) if cores else cpu_quota(slice_type_name) or 0.0


def slice_servers(slice_type_name: str) -> int:
    """Requests that a slice serves at once: one for each core that it has or begins, else one."""
    return max(1, math.ceil(slice_cores(slice_type_name)))


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
    """Placements: every maximal position-aware set of slices (19 on an A100: CLOVER Fig. 1).

    Of CPUs: ranges of cores, with `RANGED_CORES_MAX` cores at most, because their number doubles with each core.
    """
    assert device.cores <= RANGED_CORES_MAX, device.name
    options = [(s.name, start, s.memory_slices, s.compute_slices) for s in device.slice_types for start in s.starts]
    found: list[Placement] = []

    def grow(chosen: tuple[tuple[str, int, int, int], ...], position: int) -> None:
        used = sum(c for _, _, _, c in chosen)
        fits = [
            o
            for o in options
            if o[1] >= position
            and used + o[3] <= COMPUTE_SLICES
            and all(o[1] >= c[1] + c[2] or c[1] >= o[1] + o[2] for c in chosen)
        ]
        for option in fits:
            grow((*chosen, option), option[1] + option[2])
        if chosen and not _extensible(chosen, options):
            found.append(tuple((n, s, m) for n, s, m, _ in chosen))

    grow((), 0)
    return tuple(sorted(set(found)))


def _extensible(chosen: tuple[tuple[str, int, int, int], ...], options: list[tuple[str, int, int, int]]) -> bool:
    used = sum(c for _, _, _, c in chosen)
    return any(
        used + o[3] <= COMPUTE_SLICES and all(o[1] >= c[1] + c[2] or c[1] >= o[1] + o[2] for c in chosen)
        for o in options
    )


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
