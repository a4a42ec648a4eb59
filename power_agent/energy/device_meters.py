"""Device meters: read what measures each device: NVML's counter, an integral of NVML's power, RAPL, or nothing.

Everything here blocks and runs in the one thread of its device, so that a driver that is stuck on one GPU delays no
other. Which method a device has is found out by asking it, and asked again after each load of the driver.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from power_agent.devices.cpu import Cpu
from power_agent.devices.dcgm import Dcgm
from power_agent.devices.errors import DeviceError
from power_agent.devices.gpm import Gpm
from power_agent.devices.inventory import Inventory
from power_agent.devices.rapl import RaplCounter
from power_agent.energy.core.meter import PowerIntegral
from trefoil.core.energy import AttributionMethod, EnergyMethod
from trefoil.core.fleet import DeviceKind, DeviceType, SliceKey
from trefoil.runtime.clock import Clock

USER_HZ: Final = 100.0  # of /proc/stat, on every Linux that serves
IDLE_COLUMNS: Final = (3, 4)  # idle, iowait
COUNTED_COLUMNS: Final = 8  # guest time is part of user time


@dataclass(frozen=True, slots=True)
class DeviceMeasurement:
    """Measurement of one device at one moment."""

    at_s: float
    monotonic_s: float
    method: EnergyMethod
    origin: str  # what the counter counts from
    counter_j: float | None
    counter_uncertainty: float = 0.0
    power_w: float = 0.0
    clock_mhz: int = 0
    busy_s: float | None = None
    activity: Mapping[AttributionMethod, Mapping[SliceKey, float]] = field(default_factory=dict)
    temperature_c: float | None = None
    clock_event_reasons: tuple[str, ...] | None = None


class DeviceMeters:
    """Meters of all devices of a node. `metered` False: joules are not to be known."""

    def __init__(
        self,
        inventory: Inventory,
        clock: Clock,
        *,
        metered: bool = True,
        rapl: RaplCounter | None = None,
        cpu: Cpu | None = None,
        sensors: Sequence[Dcgm | Gpm] = (),
        proc_stat: Path = Path("/proc/stat"),
    ) -> None:
        self._inventory = inventory
        self._clock = clock
        self._metered = metered
        self._rapl = rapl
        self._cpu = cpu
        self._sensors = tuple(sensors)
        self._proc_stat = proc_stat
        self._started_s = clock.monotonic_s()
        self._methods: dict[tuple[str, str], EnergyMethod] = {}
        self._integrals: dict[tuple[str, str], PowerIntegral] = {}
        self._last_cpu: tuple[float, float, str] | None = None  # monotonic, joules, identity
        self._host_busy_s: float | None = None

    def integrates(self, device: str, origin: str) -> bool:
        """Whether a device's energy is an integral, so that `poll` is to be called between readings."""
        return self._methods.get((device, origin)) == EnergyMethod.POWER_INTEGRAL

    def poll(self, device: str, origin: str) -> None:
        """Read the power of a device that has no counter.

        Raises:
            DeviceError: the driver did not answer.
        """
        with self._inventory.session.use():
            power_w = self._inventory.power_w(device)
        if power_w is not None:
            self._integrals[device, origin].add(self._clock.monotonic_s(), power_w)

    def read(
        self, device: str, kind: DeviceType, origin: str, generations: Mapping[SliceKey, int], slow: bool
    ) -> DeviceMeasurement:
        """Measure everything of one device. `origin` names boot and driver load.

        Raises:
            DeviceError: the driver or the counter did not answer.
        """
        if kind.kind == DeviceKind.CPU:
            return self._read_cpu(device, kind, origin, slow)
        with self._inventory.session.use():
            return self._read_gpu(device, origin, generations, slow)

    def _read_gpu(self, device: str, origin: str, generations: Mapping[SliceKey, int], slow: bool) -> DeviceMeasurement:
        method = self._method(device, origin)
        counter_j = self._inventory.energy_j(device) if method == EnergyMethod.NVML_COUNTER else None
        at_s, monotonic_s = self._clock.now_s(), self._clock.monotonic_s()  # right beside the counter
        power_w = self._inventory.power_w(device) if method != EnergyMethod.NONE else None
        uncertainty, counted_from = 0.0, origin
        if method == EnergyMethod.POWER_INTEGRAL:
            integral = self._integrals[device, origin]
            if power_w is not None:
                at_s, monotonic_s = self._clock.now_s(), self._clock.monotonic_s()
                integral.add(monotonic_s, power_w)
            counter_j, uncertainty = integral.joules, integral.take_uncertainty()
            counted_from = f"{origin}/integral {self._started_s:.3f}"
        return DeviceMeasurement(
            at_s=at_s,
            monotonic_s=monotonic_s,
            method=method,
            origin=counted_from,
            counter_j=counter_j,
            counter_uncertainty=uncertainty,
            power_w=power_w or 0.0,
            clock_mhz=self._inventory.clock_mhz(device),
            activity={sensor.method: _activity(sensor, device, generations) for sensor in self._sensors},
            temperature_c=self._inventory.temperature_c(device) if slow else None,
            clock_event_reasons=self._inventory.clock_event_reasons(device) if slow else None,
        )

    def close(self) -> None:
        """Keep on disk what a successor needs to go on, after the last reading."""
        if self._rapl is not None:
            self._rapl.save()

    def _method(self, device: str, origin: str) -> EnergyMethod:
        key = (device, origin)
        if key not in self._methods:
            if not self._metered:
                self._methods[key] = EnergyMethod.NONE
            elif self._inventory.energy_j(device) is not None:
                self._methods[key] = EnergyMethod.NVML_COUNTER
            elif self._inventory.power_w(device) is not None:
                self._methods[key] = EnergyMethod.POWER_INTEGRAL
                self._integrals[key] = PowerIntegral()
            else:
                self._methods[key] = EnergyMethod.NONE
        return self._methods[key]

    def _read_cpu(self, device: str, kind: DeviceType, origin: str, slow: bool) -> DeviceMeasurement:
        counter_j, counted_from = None, origin.split("/", maxsplit=1)[0]
        if self._metered and self._rapl is not None:
            counter_j, counted_from = self._rapl.energy_j(), self._rapl.identity
        at_s, now_s = self._clock.now_s(), self._clock.monotonic_s()
        then_s, then_j, then_from = self._last_cpu or (now_s, counter_j or 0.0, counted_from)
        self._last_cpu = (now_s, counter_j or 0.0, counted_from)
        moved_j = (counter_j or 0.0) - then_j
        if counted_from != then_from:  # it began at this moment: what was spent before it is unknown
            counter_j, counted_from, moved_j = None, then_from, 0.0
        return DeviceMeasurement(
            at_s=at_s,
            monotonic_s=now_s,
            method=EnergyMethod.NONE if self._rapl is None else EnergyMethod.RAPL,
            origin=counted_from,
            counter_j=counter_j,
            power_w=moved_j / (now_s - then_s) if now_s > then_s else 0.0,
            clock_mhz=self._cpu.clock_mhz() if self._cpu is not None else 0,
            busy_s=self._busy_s(kind.cores),
            temperature_c=self._cpu.temperature_c() if self._cpu is not None and slow else None,
        )

    def _busy_s(self, cores: int) -> float | None:
        """CPU time of all processes since the last call, in seconds of all cores."""
        try:
            words = self._proc_stat.read_text().split(maxsplit=COUNTED_COLUMNS + 1)[1 : COUNTED_COLUMNS + 1]
        except OSError:
            return None
        used = sum(int(word) for column, word in enumerate(words) if column not in IDLE_COLUMNS) / USER_HZ / cores
        before, self._host_busy_s = self._host_busy_s, used
        return max(0.0, used - before) if before is not None else None


def _activity(sensor: Dcgm | Gpm, device: str, generations: Mapping[SliceKey, int]) -> Mapping[SliceKey, float]:
    """A sensor that does not answer only makes the split less exact."""
    try:
        return sensor.activity(device, generations)
    except DeviceError:
        return {}
