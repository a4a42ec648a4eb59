"""The CPUs of a node as one device, `<node>/cpu` of type `cpu:<cores>`: what they are, and their gauges.

Cores are logical CPUs that this process may use, in ascending order: core k of a plan is `cores[k]`, whatever its
number in the machine. `rapl` counts their joules.

    cpu = Cpu(node)
    cpu.device, cpu.type, cpu.cores         # "node0/cpu", DeviceType, (0, 1, ...)
    cpu.clock_mhz(), cpu.temperature_c()
"""

import os
from pathlib import Path
from typing import Final, Literal

from power_agent.devices.errors import SliceMissing
from trefoil.core.device_types import cpu_range, device_type
from trefoil.core.fleet import DeviceType, SliceKey

Mode = Literal["off", "meter", "serve"]
SENSORS: Final = ("coretemp", "k10temp", "zenpower")
KHZ_PER_MHZ: Final = 1000
MEBIBYTE: Final = 2**20


def cpu_mode(wanted: Literal["off", "meter", "serve", "auto"], *, simulated: bool, readable: bool) -> Mode:
    """Mode that the setting `cpu` means here: auto does not meter this machine's CPUs as those of a simulated node."""
    if wanted != "auto":
        return wanted
    return "meter" if readable and not simulated else "off"


class Cpu:
    """CPUs that this process may use, as one device."""

    def __init__(self, node: str, sys_root: Path = Path("/sys")) -> None:
        self.device = f"{node}/cpu"
        self.cores = tuple(sorted(os.sched_getaffinity(0)))
        self.type: DeviceType = device_type(f"cpu:{len(self.cores)}")
        self.memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MEBIBYTE
        self._sys = sys_root

    def pinned_cores(self, key: SliceKey) -> tuple[int, ...] | None:
        """Kernel numbers of the cores of a `cpu:N` slice; None for a quota, which is pinned nowhere.

        Raises:
            SliceMissing: cores beyond those that this process may use.
        """
        wanted = cpu_range(key.slice_type, key.start)
        if wanted is None:
            return None
        if wanted[-1] >= len(self.cores):
            message = f"{key.name} wants cores {wanted[0]}-{wanted[-1]}, {self.device} has {len(self.cores)}"
            raise SliceMissing(message, remedy="plan inside the device, or widen the agent's CPU affinity")
        return tuple(self.cores[core] for core in wanted)

    def clock_mhz(self) -> int:
        """Clock now, as the mean over the cores [MHz]; 0 where the kernel does not tell."""
        found = [self._number(f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq") for core in self.cores]
        khz = [value for value in found if value]
        return round(sum(khz) / len(khz) / KHZ_PER_MHZ) if khz else 0

    def temperature_c(self) -> float | None:
        """Temperature of the hottest package; None without a sensor."""
        hottest = None
        for sensor in (self._sys / "class" / "hwmon").glob("hwmon*"):
            name = _text(sensor / "name")
            millidegrees = self._number(f"class/hwmon/{sensor.name}/temp1_input")
            if name in SENSORS and millidegrees is not None:
                hottest = max(hottest or 0.0, millidegrees / 1e3)
        return hottest

    def _number(self, path: str) -> int | None:
        text = _text(self._sys / path)
        return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
