"""Reads counters once per period and keeps the books: the shell of `meter`.

Triton's counters first, then the device's counter, as close together as possible; then one line in the ledger; then the
samples go to whoever publishes them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import structlog

from power_agent.devices.errors import DeviceError
from power_agent.devices.inventory import Inventory
from power_agent.ledger import Ledger
from power_agent.meter import MeterState, advance
from power_agent.node import Device, Node
from power_agent.readings import DeviceReading
from power_agent.slices import Slice
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import DeviceState

STATISTICS_TIMEOUT_S: Final = 0.7
SLOW_EVERY: Final = 5  # temperature and event reasons change slowly: each n-th reading


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the driver says of one device now."""

    monotonic_s: float
    counter_j: float | None
    power_w: float
    clock_mhz: int
    temperature_c: float | None = None
    clock_event_reasons: tuple[str, ...] | None = None


class Metering:
    """A part of the service: one reading per period."""

    def __init__(
        self,
        node: Node,
        inventory: Inventory,
        thread: Executor,
        ledger: Ledger,
        publish: Callable[[Sequence[EnergySample]], None],
    ) -> None:
        self._node = node
        self._inventory = inventory
        self._thread = thread
        self._ledger = ledger
        self._publish = publish
        self._states: dict[str, MeterState] = {}
        self._first = True
        self._readings = 0
        self._log = structlog.get_logger()

    def open(self) -> None:
        """Go on from the ledger; a new ledger starts its `seq` where no earlier one can have come."""
        self._ledger.open()
        now = int(self._node.clock.now_s())
        for device in self._node.devices:
            self._states[device] = self._ledger.states.get(device) or MeterState(device, seq=now)

    async def run(self) -> None:
        """A reading each period, on whole multiples of it."""
        clock, period_s = self._node.clock, self._node.settings.sample_period_s
        while True:
            await self.read()
            await clock.sleep(period_s - clock.monotonic_s() % period_s)

    async def read(self) -> None:
        """One reading of everything."""
        await asyncio.gather(*(self._statistics(part) for part in self._node.slices.values() if part.running))
        self._readings += 1
        slow = self._readings % SLOW_EVERY == 1
        samples = []
        for device in self._node.devices.values():
            gauges = await self._gauges(device, slow)
            if gauges is None:
                continue
            reading = self._reading(device, gauges)
            state, sample = advance(
                self._states[device.device], reading, self._node.settings.node, self._node.metrics.simulated
            )
            self._states[device.device] = state
            if sample is not None:
                samples.append(sample)
                self._count(device, sample)
        self._first = False
        self._ledger.append(samples, self._states)
        if samples:
            self._publish(samples)

    async def _statistics(self, part: Slice) -> None:
        if part.server is None:
            return
        server = part.server
        with contextlib.suppress(Unavailable, TimeoutError):  # not up yet, or going: the next reading covers it
            async with asyncio.timeout(STATISTICS_TIMEOUT_S):
                counters = await server.statistics()
            if part.server is server:
                part.note(counters, self._node.clock.now_s())

    async def _gauges(self, device: Device, slow: bool) -> Gauges | None:
        name, metered = device.device, self._node.settings.meter == "nvml"

        def read() -> Gauges:
            return Gauges(
                counter_j=self._inventory.energy_j(name) if metered else None,
                monotonic_s=self._node.clock.monotonic_s(),
                power_w=(self._inventory.power_w(name) or 0.0) if metered else 0.0,
                clock_mhz=self._inventory.clock_mhz(name),
                temperature_c=self._inventory.temperature_c(name) if slow else None,
                clock_event_reasons=self._inventory.clock_event_reasons(name) if slow else None,
            )

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        except (DeviceError, Unavailable) as error:
            if device.state != DeviceState.LOST:
                self._log.warning("no reading", device=name, why=str(error))
            return None

    def _reading(self, device: Device, gauges: Gauges) -> DeviceReading:
        node = self._node
        device.power_w, device.clock_mhz = gauges.power_w, gauges.clock_mhz
        if gauges.temperature_c is not None:
            device.temperature_c = gauges.temperature_c
        if gauges.clock_event_reasons is not None:
            device.clock_event_reasons = gauges.clock_event_reasons
        served_s = device.take_served_s(gauges.monotonic_s)
        departed, device.departed = device.departed, []
        own = [node.reading(part) for part in node.slices.values() if part.key.device == device.device and part.running]
        return DeviceReading(
            device=device.device,
            at_s=node.clock.now_s(),
            monotonic_s=gauges.monotonic_s,
            driver=f"{node.boot_id}/{node.driver_load_id}",
            counter_j=gauges.counter_j,
            baseline_w=device.type.idle_w,
            active_w_max=device.type.max_w - device.type.idle_w,
            state=device.state,
            clock_mhz=gauges.clock_mhz,
            serving_s=None if self._first else served_s,
            foreign=bool(device.foreign),
            slices=tuple(departed + own),
        )

    def _count(self, device: Device, sample: EnergySample) -> None:
        metrics, name = self._node.metrics, device.device
        metrics.set("trefoil_device_clock_hertz", sample.clock_mhz_mean * 1e6, device=name)
        metrics.set("trefoil_device_temperature_celsius", device.temperature_c, device=name)
        if sample.method == EnergyMethod.NONE:
            return
        active_j = sum(part.active_j for part in sample.slices)
        metrics.set("trefoil_device_power_watts", device.power_w, device=name)
        metrics.set("trefoil_energy_uncertainty_ratio", sample.uncertainty_ratio, device=name)
        for share, joules in (("active", active_j), ("idle", sample.idle_j), ("unallocated", sample.unallocated_j)):
            metrics.inc("trefoil_device_energy_joules_total", joules, device=name, share=share)
        for part in sample.slices:
            for hosted in part.hosted:
                metrics.inc(
                    "trefoil_slice_energy_joules_total",
                    hosted.active_j,
                    slice=part.key.name,
                    family=hosted.family,
                    variant=hosted.variant,
                )

    async def stop(self) -> None:
        """A last reading, so that the successor's gap is short."""
        await self.read()
        self._ledger.close()
