"""A device whose true energy split is known, under the real meter: no processes, no sockets, no wall clock.

`DeviceEnergy` (the simulated driver's books) integrates what slices do tick by tick. The meter sees what an agent sees:
NVML's counter in millijoules or power readings, Triton's counters, which grow when a batch ends, and, where the device
has them, activity sensors. The books are only compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from power_agent.energy.core.meter import MeterState, PowerIntegral, advance
from power_agent.slices.core.attribution import DeviceReading, SliceReading, Work
from trefoil.core import power
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState, DeviceType, SliceKey
from trefoil.simulated_node.energy import DeviceEnergy, PowerDraw, SliceAccount, VersionAccount

DEVICE = "node0/gpu0"
Place = tuple[SliceKey, int]


@dataclass(slots=True)
class Loaded:
    """One slice with one Triton and one model. `load`: share of the time that it is asked to compute."""

    key: SliceKey
    generation: int
    service_s: float
    density: float
    account: VersionAccount
    load: float = 0.0
    incarnation: int = 1
    serving: bool = True
    backlog_s: float = 0.0
    in_batch_s: float = 0.0  # of the batch that runs
    busy_s: float = 0.0  # Triton's counter
    requests: int = 0
    sensed_s: float = 0.0  # true activity since the last reading

    def work(self, dt_s: float) -> float:
        """Compute for as long as there is something to do; batches count when they end."""
        self.backlog_s = min(self.backlog_s + self.load * dt_s, 10 * self.service_s + dt_s)
        busy_s = min(dt_s, self.backlog_s)
        self.backlog_s -= busy_s
        self.in_batch_s += busy_s
        batches = int(self.in_batch_s / self.service_s + 1e-9)
        self.in_batch_s = max(0.0, self.in_batch_s - batches * self.service_s)
        self.busy_s += batches * self.service_s
        self.requests += batches
        self.sensed_s += busy_s
        return busy_s


@dataclass(slots=True)
class Books:
    """Joules, by the driver's own account."""

    counter_j: float = 0.0
    idle_j: float = 0.0
    unallocated_j: float = 0.0
    active_j: dict[Place, float] = field(default_factory=dict)

    def add(self, later: "Books", earlier: "Books", sign: float = 1.0) -> None:
        """What was spent between two moments."""
        self.counter_j += sign * (later.counter_j - earlier.counter_j)
        self.idle_j += sign * (later.idle_j - earlier.idle_j)
        self.unallocated_j += sign * (later.unallocated_j - earlier.unallocated_j)
        for place, joules in later.active_j.items():
            spent_j = joules - earlier.active_j.get(place, 0.0)
            self.active_j[place] = self.active_j.get(place, 0.0) + sign * spent_j


class MeteredDevice:
    """One device, its true books and its meter."""

    def __init__(
        self,
        kind: DeviceType,
        chance: np.random.Generator,
        *,
        noise_ratio: float = 0.01,
        sensor: str = "",
        attribution: str = "auto",
        learn: bool = False,
    ) -> None:
        self.kind, self.chance = kind, chance
        self.energy = DeviceEnergy(kind, chance, noise_ratio)
        self.method = EnergyMethod.NVML_COUNTER if kind.energy_counter else EnergyMethod.POWER_INTEGRAL
        self.sensor, self.attribution, self.learn = sensor, attribution, learn
        self.clock_mhz = max(kind.clocks_mhz, default=0)
        self.now_s = 100.0
        self.slices: list[Loaded] = []
        self.gone: list[SliceReading] = []
        self.foreign_w, self.limit_w = 0.0, kind.max_w
        self.load_id = self.agent = 1
        self.zero_j = 0.0  # where the counter began
        self.dip_j = 0.0
        self.integral = PowerIntegral()
        self.served_s = 0.0
        self.generations = 0
        self.state = MeterState(DEVICE)
        self.samples: list[EnergySample] = []
        self._accounts: dict[Place, VersionAccount] = {}

    # --- what happens -------------------------------------------------------------------------------------------------

    def start(self, slice_type: str, start: int, size: int, service_s: float, density: float, load: float) -> Loaded:
        """A new slice that serves at once."""
        self.generations += 1
        key = SliceKey(DEVICE, slice_type, start, size)
        account = VersionAccount("digits", "digits-m", 3)
        books = SliceAccount(slice_type, start, size, self.generations, f"MIG-{self.generations}")
        books.versions[0, 3] = account
        self.energy.slices.append(books)
        self._accounts[key, self.generations] = account
        part = Loaded(key, self.generations, service_s, density, account, load)
        self.slices.append(part)
        return part

    def end_process(self, part: Loaded, *, noticed: bool = True) -> None:
        """Its Triton ends; the agent has read its counters a last time if it noticed."""
        if noticed:
            self.gone.append(self._reading_of(part))
        part.incarnation += 1
        part.busy_s = part.in_batch_s = part.sensed_s = part.backlog_s = 0.0
        part.requests = 0

    def recreate(self, part: Loaded) -> Loaded:
        """Destroy it and make it again in the same place."""
        self.end_process(part)
        self.slices.remove(part)
        key = part.key
        return self.start(key.slice_type, key.start, key.size, part.service_s, part.density, part.load)

    def reload(self) -> None:
        """The driver is loaded again: counter at zero, under another load id."""
        self.load_id += 1
        self.reset()

    def reset(self) -> None:
        """The counter begins again and says nothing about it."""
        self.zero_j = self.energy.counter_j

    def new_agent(self) -> None:
        """Another process of the agent continues from the energy log; nobody has watched in between."""
        self.agent += 1
        self.integral = PowerIntegral()

    def run(self, seconds: float, tick_s: float, poll_every: int = 1) -> None:
        """Let time pass."""
        for tick in range(round(seconds / tick_s)):
            draws = []
            for part in self.slices:
                busy_s = part.work(tick_s)
                account = part.account if part.serving else None
                draws.append(PowerDraw(part.key.slice_type, busy_s, part.density, account))
            serving = any(part.serving for part in self.slices)
            drawn = self.energy.step(
                tick_s,
                clock_mhz=self.clock_mhz,
                limit_w=self.limit_w,
                occupied=bool(self.slices),
                serving=serving,
                draws=draws,
                foreign_w=self.foreign_w,
            )
            self.now_s += tick_s
            self.served_s += tick_s if serving else 0.0
            if tick % poll_every == 0:
                self.integral.add(self.now_s, drawn.power_w)

    # --- what the agent sees ------------------------------------------------------------------------------------------

    def _reading_of(self, part: Loaded, *, silent: bool = False) -> SliceReading:
        work = Work("digits", "digits-m", part.busy_s, part.requests)
        return SliceReading(
            key=part.key,
            generation=part.generation,
            incarnation=str(part.incarnation),
            sm_share=power.sm_share(self.kind, part.key.slice_type),
            serving=part.serving,
            work=() if silent else (work,),
        )

    def counter_j(self) -> float:
        """As NVML tells it, in whole millijoules; or the integral of the power readings."""
        if self.method == EnergyMethod.POWER_INTEGRAL:
            return self.integral.joules
        return int((self.energy.counter_j - self.zero_j) * 1e3) * 1e-3 - self.dip_j

    def read(
        self, *, watched: bool = True, foreign: bool = False, silent: Sequence[Loaded] = (), stale: bool = False
    ) -> EnergySample | None:
        """One reading of the agent, accounted."""
        length_s = max(1e-9, self.now_s - self.state.monotonic_s)
        parts = []
        for part in self.slices:
            seen = self._reading_of(part, silent=part in silent)
            if self.sensor and not stale:
                a = part.sensed_s / length_s * (1 + 0.01 * float(self.chance.standard_normal()))
                gpm, dcgm = (a, None) if self.sensor == "gpm" else (None, a)
                seen = replace(seen, gpm=gpm, dcgm=dcgm)
            part.sensed_s = 0.0
            parts.append(seen)
        origin = f"boot/{self.load_id}"
        if self.method == EnergyMethod.POWER_INTEGRAL:
            origin += f"/integral {self.agent}"
        reading = DeviceReading(
            device=DEVICE,
            at_s=1e9 + self.now_s,
            monotonic_s=self.now_s,
            driver=origin,
            counter_j=self.counter_j(),
            baseline_w=power.idle_w(self.kind, DeviceState.AWAKE, self.clock_mhz),
            active_w_max=power.dynamic_w(self.kind) * power.clock_law(self.kind, self.clock_mhz),
            power_max_w=self.kind.max_w,
            state=DeviceState.AWAKE,
            clock_mhz=self.clock_mhz,
            serving_s=self.served_s if watched else None,
            foreign=foreign,
            slices=(*self.gone, *parts),
            method=self.method,
            counter_uncertainty=self.integral.take_uncertainty() if self.method == EnergyMethod.POWER_INTEGRAL else 0.0,
            attribution=self.attribution,
            learn_baseline=self.learn,
        )
        self.gone, self.served_s = [], 0.0
        self.state, sample = advance(self.state, reading, "node0", True)
        if sample is not None:
            self.samples.append(sample)
        return sample

    # --- comparison ---------------------------------------------------------------------------------------------------

    def books(self) -> Books:
        """The driver's own account up to now."""
        energy = self.energy
        active_j = {place: account.active_j for place, account in self._accounts.items()}
        return Books(energy.counter_j, energy.idle_j, energy.unallocated_j, active_j)

    def metered(self) -> Books:
        """The same by the meter, all samples together."""
        found = Books()
        for sample in self.samples:
            found.counter_j += sample.counter_j
            found.idle_j += sample.idle_j
            found.unallocated_j += sample.unallocated_j
            for part in sample.slices:
                place = (part.key, part.generation)
                found.active_j[place] = found.active_j.get(place, 0.0) + part.active_j
        return found
