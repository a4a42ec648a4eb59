"""Metering loop: reads all counters once per period and meters each device. The shell of `core/meter.py`.

It reads Triton's counters first, then the device's counter, as close together as possible. Then it writes one line in
the energy log. Then the samples go to the publisher and to watchers. Each device has a separate thread.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeVar

import structlog

from power_agent.devices.errors import DeviceError, DeviceReleased
from power_agent.energy.core.meter import MeterState, advance, is_possible, recover
from power_agent.energy.device_meters import DeviceMeasurement, DeviceMeters
from power_agent.energy.energy_log import EnergyLog
from power_agent.slices.core.attribution import DeviceReading, SliceReading
from power_agent.slices.node_state import Device, Node
from power_agent.slices.slice_state import Slice
from trefoil.core import power
from trefoil.core.energy import AttributionMethod, EnergyMethod, EnergySample
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import DeviceKind, DeviceState, SliceKey

POWER_POLL_S: Final = 0.1  # how often the power of a device without an energy counter is read, to be integrated
STATISTICS_TIMEOUT_S: Final = 0.7
READ_TIMEOUT_S: Final = 0.9
SLOW_EVERY: Final = 5  # temperature and event reasons change slowly: each n-th reading

T = TypeVar("T")


class Metering:
    """Metering of all devices: one reading per period."""

    def __init__(
        self,
        node: Node,
        meters: DeviceMeters,
        energy_log: EnergyLog,
        *publish: Callable[[Sequence[EnergySample]], None],
        used_cpu_s: Callable[[str], float | None] | None = None,
    ) -> None:
        """`used_cpu_s`: CPU seconds of a process by its tag, since it was started; None: nothing counts them."""
        self._node = node
        self._meters = meters
        self._energy_log = energy_log
        self._publish = publish
        self._states: dict[str, MeterState] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._hung: dict[str, asyncio.Future[DeviceMeasurement]] = {}
        self._watched: set[str] = set()  # read before by this process
        self._readings = 0
        self._used_cpu_s = used_cpu_s
        self._cpu_s: dict[tuple[SliceKey, int], float] = {}  # as last reported, by slice and generation
        self._log = structlog.get_logger()

    def open(self) -> None:
        """Go on from the energy log; a new energy log starts its `seq` where no earlier one can have come."""
        self._energy_log.open()
        clock, found = self._node.clock, self._energy_log.states
        now = clock.now_s(), clock.monotonic_s()
        self._states = {name: state for name, state in found.items() if is_possible(state, name, self._origin, *now)}
        if wrong := sorted(found.keys() - self._states.keys()):
            self._log.warning("meter states in the energy log are invalid: treated as lost", devices=wrong)

    def catch_up(self, published: Mapping[str, EnergySample]) -> None:
        """Go on from the last samples that were published, where the energy log was lost or is older than they are."""
        clock = self._node.clock
        for device, sample in published.items():
            state = recover(self._states.get(device), sample, clock.now_s(), clock.monotonic_s())
            if state is not None:
                goes_on = "from the last published sample; what slices did since is unallocated"
                how = goes_on if state.recovered else "as a gap: the last published sample is too old"
                self._log.warning("energy log lost or older than what was published", device=device, goes_on=how)
                self._states[device] = state

    async def run(self) -> None:
        """Read each period, on whole multiples of it; readings of power in between where there is no counter."""
        clock, period_s = self._node.clock, self._node.settings.sample_period_s
        polling = asyncio.create_task(self._poll())
        try:
            while True:
                await self.read()
                await clock.sleep(period_s - clock.monotonic_s() % period_s)
                if polling.done():
                    polling.result()  # a bug ends the service
        finally:
            polling.cancel()

    async def _poll(self) -> None:
        """Power of the devices without a counter, several times per period."""
        while True:
            await self._node.clock.sleep(POWER_POLL_S)
            origin = self._origin
            names = [name for name in self._node.devices if self._meters.integrates(name, origin)]
            await asyncio.gather(*(self._poll_one(name, origin) for name in names if name not in self._hung))

    async def _poll_one(self, name: str, origin: str) -> None:
        with contextlib.suppress(DeviceError, Unavailable):  # the reading of the period says what is wrong
            await self._in_thread(name, lambda: self._meters.poll(name, origin))

    async def read(self) -> None:
        """Read everything once."""
        await asyncio.gather(*(self._read_statistics(part) for part in self._node.slices.values() if part.running))
        self._readings += 1
        devices = list(self._node.devices.values())
        found = await asyncio.gather(*(self._meter_device(device) for device in devices))
        samples = [sample for sample in found if sample is not None]
        durable = self._energy_log.append(samples, self._states)
        if durable:
            for publish in self._publish:
                publish(durable)

    async def _read_statistics(self, part: Slice) -> None:
        if part.triton is None:
            return
        triton = part.triton
        with contextlib.suppress(Unavailable, TimeoutError):  # not up yet, or going: the next reading covers it
            async with asyncio.timeout(STATISTICS_TIMEOUT_S):
                counters = await triton.statistics()
            if part.triton is triton:
                part.record_counters(counters, self._node.clock.now_s())

    async def _meter_device(self, device: Device) -> EnergySample | None:
        name = device.device
        measured = await self._measure(device)
        if name not in self._states:
            self._states[name] = MeterState(name, seq=int(self._node.clock.now_s()))
        if measured is None:
            return None
        reading = self._reading(device, measured)
        self._watched.add(name)
        state, sample = advance(self._states[name], reading, self._node.settings.node, self._node.metrics.simulated)
        resets = state.counter_resets - self._states[name].counter_resets
        self._states[name] = state
        if sample is not None:
            sample = self._with_cpu_s(device, sample)
            self._export_metrics(device, sample, reading, resets)
        return sample

    def _with_cpu_s(self, device: Device, sample: EnergySample) -> EnergySample:
        """The sample of CPUs with what control groups counted of each slice since the one before."""
        if device.type.kind != DeviceKind.CPU or self._used_cpu_s is None:
            return sample
        running = {(p.key, p.generation): p.tag for p in self._node.slices.values() if p.running}
        counted = {place: self._used_cpu_s(tag) for place, tag in running.items()}
        before = self._cpu_s
        self._cpu_s = {place: used_s for place, used_s in counted.items() if used_s is not None}
        since = {place: used_s - before[place] for place, used_s in self._cpu_s.items() if place in before}
        parts = (replace(part, cpu_s=max(0.0, since.get((part.key, part.generation), 0.0))) for part in sample.slices)
        return replace(sample, slices=tuple(parts))

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def _origin(self) -> str:
        return f"{self._node.boot_id}/{self._node.driver_load_id}"

    def _in_thread(self, name: str, call: Callable[[], T]) -> asyncio.Future[T]:
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, f"gauges {name}")
        return asyncio.get_running_loop().run_in_executor(self._threads[name], call)

    async def _measure(self, device: Device) -> DeviceMeasurement | None:
        """None when the device does not answer in time: the next reading covers the time since the last one."""
        name, origin, slow = device.device, self._origin, self._readings % SLOW_EVERY == 1
        generations = {p.key: p.generation for p in self._node.slices.values() if p.key.device == name}
        if name in self._hung:
            if not self._hung[name].done():
                return None
            self._hung.pop(name).exception()  # it came too late to be of use
        future = self._in_thread(name, lambda: self._meters.read(name, device.type, origin, generations, slow))
        done, _ = await asyncio.wait({future}, timeout=READ_TIMEOUT_S)
        if not done:
            self._hung[name] = future
            self._log.warning("no reading", device=name, why=f"the driver took longer than {READ_TIMEOUT_S:g} s")
            return None
        try:
            return future.result()
        except (DeviceError, Unavailable) as error:
            if device.state != DeviceState.LOST and not isinstance(error, DeviceReleased):
                self._log.warning("no reading", device=name, why=str(error))
            return None

    def _reading(self, device: Device, measured: DeviceMeasurement) -> DeviceReading:
        node, kind = self._node, device.type
        device.power_w, device.clock_mhz = measured.power_w, measured.clock_mhz
        if measured.temperature_c is not None:
            device.temperature_c = measured.temperature_c
        if measured.clock_event_reasons is not None:
            device.clock_event_reasons = measured.clock_event_reasons
        served_s = device.take_served_s(measured.monotonic_s)
        ended, device.ended_readings = device.ended_readings, []
        own = [
            node.take_reading(part)
            for part in node.slices.values()
            if part.key.device == device.device and part.running
        ]
        return DeviceReading(
            device=device.device,
            at_s=measured.at_s,
            monotonic_s=measured.monotonic_s,
            driver=measured.origin,
            counter_j=measured.counter_j,
            baseline_w=power.idle_w(kind, DeviceState.AWAKE, measured.clock_mhz),
            active_w_max=power.dynamic_w(kind) * power.clock_law(kind, measured.clock_mhz),
            power_max_w=0.0 if kind.kind == DeviceKind.CPU else kind.max_w,  # of CPUs only an assumption is known
            state=device.state,
            clock_mhz=measured.clock_mhz,
            serving_s=served_s if device.device in self._watched else None,
            # Others use a host's CPUs all the time: while that use is unknown, slices get what they can draw.
            foreign=bool(device.foreign) or (kind.kind == DeviceKind.CPU and measured.busy_s is None),
            slices=(*ended, *(_with_activity(part, measured) for part in own)),
            method=measured.method,
            counter_uncertainty=measured.counter_uncertainty,
            attribution=node.settings.attribution,
            learn_baseline=node.settings.learn_baseline,
            busy_s=measured.busy_s,
        )

    def _export_metrics(self, device: Device, sample: EnergySample, reading: DeviceReading, resets: int) -> None:
        metrics, name = self._node.metrics, device.device
        metrics.set("trefoil_device_clock_hertz", sample.clock_mhz_mean * 1e6, device=name)
        metrics.set("trefoil_device_temperature_celsius", device.temperature_c, device=name)
        metrics.set("trefoil_device_drift", len(device.foreign), device=name, kind="instances")
        metrics.set("trefoil_device_drift", len(device.clock_drift), device=name, kind="clocks")
        metrics.inc(
            "trefoil_energy_samples_total",
            device=name,
            method=sample.method.name,
            attribution=sample.attribution.name,
        )
        metrics.inc("trefoil_energy_counter_resets_total", resets, device=name)
        if sample.method == EnergyMethod.NONE:
            return
        active_j = sum(part.active_j for part in sample.slices)
        metrics.set("trefoil_device_power_watts", device.power_w, device=name)
        metrics.set("trefoil_energy_uncertainty_ratio", sample.uncertainty_ratio, device=name)
        baseline = self._states[name].baseline
        watts = (
            baseline.watts_at(reading.clock_mhz, reading.baseline_w) if reading.learn_baseline else reading.baseline_w
        )
        metrics.set("trefoil_device_baseline_watts", watts, device=name)
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
        """Stop after a last reading, so that the successor's gap is short."""
        await self.read()
        self._energy_log.close()
        await asyncio.to_thread(self._meters.close)
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _with_activity(part: SliceReading, measured: DeviceMeasurement) -> SliceReading:
    """Reading of a slice with what the sensors say of it."""
    gpm = measured.activity.get(AttributionMethod.GPM, {}).get(part.key)
    dcgm = measured.activity.get(AttributionMethod.DCGM, {}).get(part.key)
    return replace(part, gpm=gpm, dcgm=dcgm)
