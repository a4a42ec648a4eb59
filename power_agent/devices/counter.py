"""One interface for everything that counts joules, so that the meter reads a GPU and a CPU alike.

    reading = counter.read()        # blocking; call it in the device's thread
    reading is None                 # nothing counts here (no counter, no permission): the energy is unknown, not 0
    reading.joules                  # grows as long as `identity` stays the same
    reading.identity                # another one: the readings have nothing in common (reload, reboot, unseen wraps)

A decrease under one identity means that the counter was reset and has counted `joules` since.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from power_agent.devices.gauges import Gauges
from trefoil.core.energy import EnergyMethod


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Joules of one counter, comparable with other readings of the same identity."""

    joules: float
    identity: str


class Counter(Protocol):
    """Counts the joules of one device."""

    @property
    def method(self) -> EnergyMethod:
        """How samples of it are labelled."""
        ...

    def read(self) -> CounterReading | None:
        """The count now; None when there is none.

        Raises:
            DeviceError: the device does not answer.
        """
        ...


class GpuCounter:
    """NVML's counter of one GPU: joules since the driver was loaded."""

    method = EnergyMethod.NVML_COUNTER

    def __init__(self, gauges: Gauges, device: str, identity: Callable[[], str]) -> None:
        """identity: boot and driver load."""
        self._gauges = gauges
        self._device = device
        self._identity = identity

    def read(self) -> CounterReading | None:
        joules = self._gauges.energy_j(self._device)
        return None if joules is None else CounterReading(joules, self._identity())
