"""Joules of the CPU packages, by the kernel's powercap files (Intel RAPL, and AMD by the same driver).

    counter = RaplCounter(root, clock, boot_id, state_dir / "rapl.json")    # raises RaplUnavailable with a remedy.
    counter.energy_j()    # joules of all packages; begins again at 0 when what was in between cannot be known.
    counter.identity      # changes when it does.
    counter.save()        # at the end of the agent.

    /sys/class/powercap/intel-rapl:0/{name,energy_uj,max_energy_range_uj}

Only zones named `package-*` are summed: `core`, `uncore` and `dram` are inside or next to them, `psys` contains them.
Zones of one name are one package that several drivers show (MSR, TPMI, MMIO): one of them counts, and none of a
`package-0-die-1` next to a `package-0`, which contains it. A zone wraps to 0 at max_energy_range_uj (a minute to an
hour at full power), so a fall is a wrap. If that would be more than a package can draw, the counter restarted (the
machine slept). After a pause in which it may have wrapped unseen, counting begins again at 0. A small file bridges a
pause shorter than that, also from one agent to the next. Under one `identity` the count never falls, and it is never
negative. energy_uj is readable by root only since CVE-2020-8694. Source: Documentation/power/powercap/powercap.rst.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from trefoil.core.errors import Unavailable, system_words
from trefoil.runtime.clock import Clock
from trefoil.runtime.files import FileTrouble, replace_file
from trefoil.runtime.state_files import of_shape, read_state

PACKAGE_W_MAX: Final = 1000.0  # no package draws more; bounds what a fall of its counter can mean
SLACK_J: Final = 20.0  # zones are read one after the other, and are updated every millisecond or so
SAVE_S: Final = 30.0
OWN: Final = "intel-rapl:"  # zones of the CPU's own registers; others are `intel-rapl-mmio:`, `intel-rapl-tpmi:`
MICRO: Final = 1e-6


class RaplUnavailable(Unavailable):
    """No package energy can be read here; the remedy says what would change that."""


@dataclass(frozen=True, slots=True)
class Zone:
    """One CPU package; its counter runs from 0 to range_uj."""

    name: str
    path: Path
    range_uj: int


@dataclass(frozen=True, slots=True)
class RaplReading:
    """Reading of the counters: raw values, and what they stood for."""

    boot: str
    identity: str
    monotonic_s: float
    total_uj: int
    raw_uj: Mapping[str, int]


def find_zones(root: Path) -> tuple[Zone, ...]:
    """Find the CPU packages below a powercap root.

    Raises:
        RaplUnavailable: none, or not readable; says why and what to do.
    """
    packages: dict[str, Zone] = {}
    failures: dict[str, RaplUnavailable] = {}
    for folder in sorted(root.glob("intel-rapl*:*"), key=_place):
        if folder.name.count(":") != 1:
            continue  # a part of a package
        name = folder.name
        try:
            name = (folder / "name").read_text().strip()
            if not name.startswith("package") or name in packages:
                continue
            zone = Zone(folder.name, folder, int((folder / "max_energy_range_uj").read_text()))
            if zone.range_uj <= 0:
                raise ValueError(f"max_energy_range_uj is {zone.range_uj}")
            read_zone(zone)
        except (OSError, ValueError) as error:
            if folder.name.startswith(OWN) or name.startswith("package"):
                failures.setdefault(name, _unreadable(folder, error))
            continue
        packages[name] = zone
    for name, failure in failures.items():
        if name not in packages:
            raise failure
    whole = [zone for name, zone in packages.items() if not _inside(name, packages)]
    if not whole:
        message = f"no CPU package below {root}"
        raise RaplUnavailable(message, remedy="load the module intel_rapl_msr (virtual machines have no RAPL)")
    return tuple(whole)


def _place(folder: Path) -> tuple[bool, str]:
    """Order in which zones of one package are taken: the CPU's own registers before those of its memory map."""
    return not folder.name.startswith(OWN), folder.name


def _inside(name: str, packages: Mapping[str, Zone]) -> bool:
    package, die, _ = name.partition("-die-")
    return bool(die) and package in packages


def read_zone(zone: Zone) -> int:
    """Read the counter of a package: microjoules, from 0 to the zone's range."""
    return int((zone.path / "energy_uj").read_text())


def _unreadable(path: Path, error: Exception) -> RaplUnavailable:
    if isinstance(error, PermissionError):
        remedy = "run as root, or give the agent's user read access to energy_uj (a udev rule or tmpfiles.d)"
    else:
        remedy = "see the kernel's log"
    return RaplUnavailable(f"{path} cannot be read ({system_words(error)})", remedy=remedy)


class RaplCounter:
    """Energy counter of all packages of the machine, that only grows."""

    def __init__(self, root: Path, clock: Clock, boot: str, reading_path: Path | None = None) -> None:
        """reading_path: where to leave the last reading for a successor; None: nowhere.

        Raises:
            RaplUnavailable: no package can be read.
        """
        self.zones = find_zones(root)
        self._clock = clock
        self._boot = boot
        self._reading_path = reading_path
        self._last = self._load_reading()
        self._saved_s = float("-inf")
        self._trouble = FileTrouble("rapl", "the CPUs' energy has a gap if the agent restarts meanwhile")
        self._starts = 0

    @property
    def gap_max_s(self) -> float:
        """Longest pause between two readings in which no package can have wrapped twice."""
        return min(zone.range_uj for zone in self.zones) * MICRO / PACKAGE_W_MAX

    @property
    def identity(self) -> str:
        """Identity of the last reading; counts under different identities have nothing in common."""
        return "" if self._last is None else self._last.identity

    def energy_j(self) -> float:
        """Energy of all packages since the identity began [J]. Blocking.

        Raises:
            RaplUnavailable: the files have become unreadable.
        """
        try:
            raw_uj = {zone.name: read_zone(zone) for zone in self.zones}
        except (OSError, ValueError) as error:
            raise _unreadable(self.zones[0].path, error) from error
        now_s = self._clock.monotonic_s()
        delta_uj = self._delta_uj(raw_uj, now_s)
        if self._last is None or delta_uj is None:
            self._starts += 1
            identity = f"rapl-{self._boot}-{now_s:.3f}-{self._starts}"
            self._last = RaplReading(self._boot, identity, now_s, 0, raw_uj)
        else:
            self._last = RaplReading(self._boot, self._last.identity, now_s, self._last.total_uj + delta_uj, raw_uj)
        if now_s - self._saved_s >= SAVE_S:
            self._saved_s = now_s
            self.save()
        return self._last.total_uj * MICRO

    def save(self) -> None:
        """Save the last reading for a successor; also at the end of the agent."""
        if self._reading_path is None or self._last is None:
            return
        try:
            replace_file(self._reading_path, json.dumps(asdict(self._last)))
        except OSError as error:
            self._trouble.begin(self._reading_path, error)
        else:
            self._trouble.end()

    def _delta_uj(self, raw_uj: Mapping[str, int], now_s: float) -> int | None:
        """Microjoules since the last reading; None if unknown."""
        last = self._last
        if last is None or last.boot != self._boot or set(last.raw_uj) != set(raw_uj):
            return None
        elapsed_s = now_s - last.monotonic_s
        if not 0 <= elapsed_s <= self.gap_max_s:
            return None
        total_uj = 0
        for zone in self.zones:
            delta_uj = raw_uj[zone.name] - last.raw_uj[zone.name]
            if delta_uj < 0:
                delta_uj += zone.range_uj
            if not 0 <= delta_uj * MICRO <= PACKAGE_W_MAX * elapsed_s + SLACK_J:
                return None
            total_uj += delta_uj
        return total_uj

    def _load_reading(self) -> RaplReading | None:
        if self._reading_path is None:
            return None
        try:
            return read_state(self._reading_path, partial(of_shape, RaplReading))
        except OSError as error:
            structlog.get_logger().warning("RAPL reading is not usable", path=str(self._reading_path), why=str(error))
            return None
