"""What the meter is told: one device and its slices at one moment, as the drivers, sensors and Tritons say it."""

from dataclasses import dataclass

from trefoil.core.energy import AttributionMethod, EnergyMethod
from trefoil.core.fleet import DeviceState, SliceKey


@dataclass(frozen=True, slots=True)
class Work:
    """Cumulative counters of one hosted model in one Triton process."""

    family: str
    variant: str
    busy_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class SliceReading:
    """One slice at the time of a reading. A new `incarnation` (another process) starts its counters at 0.

    `overhead_*`: how much of the work since the last reading was warm-up or probing.
    `sm_share`: of the device's multiprocessors; of a CPU slice its cores over those of the node.
    `gpm`, `dcgm`: mean activity since the last reading, 0..1 of the slice; None where no fresh value covers that time.
    """

    key: SliceKey
    generation: int
    incarnation: str
    sm_share: float
    serving: bool
    work: tuple[Work, ...] = ()
    overhead_s: float = 0.0
    overhead_requests: int = 0
    gpm: float | None = None
    dcgm: float | None = None

    def activity(self, method: AttributionMethod) -> float | None:
        """What that sensor says of this slice."""
        return self.dcgm if method == AttributionMethod.DCGM else self.gpm


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at the time of a reading. counter_j None: nothing measures it.

    `monotonic_s` counts from the boot of the machine, so two agents on one boot continue each other.
    `driver` names what the counter counts from (boot, driver load, start of an integral): counters of different ones
    have nothing in common. `counter_doubt`: relative error of the counter itself. `busy_s`: what anybody used of the
    device since the last reading, in seconds of all of it, where the operating system tells (CPUs).
    `active_w_max`: what all of the device draws above its baseline when it computes without pause, at this clock.
    `power_max_w`: what it can draw at all; 0: not known.
    """

    device: str
    at_s: float
    monotonic_s: float
    driver: str
    counter_j: float | None
    baseline_w: float
    active_w_max: float
    state: DeviceState
    clock_mhz: int
    serving_s: float | None = None  # since the last reading; None: nobody watched (the agent was not there)
    foreign: bool = False
    slices: tuple[SliceReading, ...] = ()
    method: EnergyMethod = EnergyMethod.NVML_COUNTER
    counter_doubt: float = 0.0
    attribution: str = "auto"
    learn_baseline: bool = False
    busy_s: float | None = None
    power_max_w: float = 0.0
