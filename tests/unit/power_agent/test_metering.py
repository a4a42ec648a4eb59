"""The shell of the meter: periods, devices that hang or vanish, successors, and what is published and counted."""

import asyncio
import json
import threading

import pytest

from power_agent.devices.errors import DeviceLost
from power_agent.durability.journal import Journal
from power_agent.energy import metering
from power_agent.energy.device_meters import DeviceMeasurement
from power_agent.energy.energy_log import EnergyLog
from power_agent.energy.metering import Metering
from power_agent.settings import PowerAgentSettings
from power_agent.slices.node_state import SLICE_STATES, Device, Node
from power_agent.triton.client import VersionCounters
from tests.support.plans import CATALOG
from trefoil.core.device_types import A100_40GB, P4, device_type
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState, Hosted, SliceKey, SliceState
from trefoil.core.outside.plausible import power_fault, sample_fault
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

GPU0, GPU1, P4_0, CPU = "node0/gpu0", "node0/gpu1", "node0/gpu2", "node0/cpu"
WATTS = {GPU0: 100.0, GPU1: 60.0, P4_0: 30.0, CPU: 20.0}


class Meters:
    """Devices that draw a constant power since the clock began; each can be made to hang or to fail."""

    def __init__(self, clock):
        self.clock = clock
        self.gates, self.errors, self.polls, self.closed = {}, {}, [], False
        self.asked = []

    def integrates(self, device, origin):
        return device == P4_0

    def poll(self, device, origin):
        self.polls.append(device)

    def read(self, device, kind, origin, generations, slow):
        self.asked.append((device, slow))
        if device in self.gates:
            assert self.gates[device].wait(10)
        if device in self.errors:
            raise self.errors[device]
        now_s = self.clock.monotonic_s()
        method = EnergyMethod.RAPL if device == CPU else EnergyMethod.NVML_COUNTER
        return DeviceMeasurement(
            self.clock.now_s(), now_s, method, origin, WATTS[device] * now_s, 0.0, WATTS[device], 1410
        )

    def close(self):
        self.closed = True


class Bench:
    def __init__(self, folder):
        self.folder, self.clock, self.published = folder, ManualClock(1e9), []
        self.clock.move(1000.0)
        self.start()

    def start(self):
        settings = PowerAgentSettings(node_socket=self.folder / "node.sock", state_dir=self.folder)
        self.metrics = Metrics("power_agent", simulated=True)
        self.node = Node(settings, self.clock, Journal(self.folder, "boot", "1"), CATALOG, self.metrics)
        self.node.boot_id, self.node.driver_load_id = "boot", "1"
        kinds = {GPU0: A100_40GB, GPU1: A100_40GB, P4_0: P4, CPU: device_type("cpu:4")}
        for name, kind in kinds.items():
            self.node.devices[name] = Device(name, kind, DeviceState.ASLEEP)
        self.meters = Meters(self.clock)
        self.energy_log = EnergyLog(self.folder, 100)
        self.metering = Metering(self.node, self.meters, self.energy_log, self.published.extend)
        self.metering.open()

    async def read(self, after_s=1.0):
        self.clock.move(after_s)
        before = len(self.published)
        await self.metering.read()
        return {sample.device: sample for sample in self.published[before:]}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(metering, "READ_TIMEOUT_S", 60.0)  # of real time: a busy machine is not a driver that hangs
    return Bench(tmp_path)


def value(bench, name, **labels):
    return next(
        float(line.rsplit(" ", 1)[1])
        for line in bench.metrics.text().splitlines()
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    )


async def test_each_device_gets_a_sample_per_period_from_the_second_reading_on(bench):
    assert await bench.read() == {}
    samples = await bench.read()
    assert {name: sample.counter_j for name, sample in samples.items()} == pytest.approx(WATTS)
    assert all(sample.unallocated_j == pytest.approx(sample.counter_j) for sample in samples.values())
    assert samples[CPU].method == EnergyMethod.RAPL
    assert len({sample.seq for sample in samples.values()}) == 1, (
        "a new energy log starts where no earlier one can have come"
    )


async def test_a_slice_of_cpus_has_used_what_its_group_counted_since_the_sample_before(bench):
    part = bench.node.new_slice(SliceKey(CPU, "quota:0.5", 0, 5), 3, SliceState.READY)
    part.running, counted, told = True, {part.tag: 7.0}, []
    made = (bench.node, bench.meters, bench.energy_log, bench.published.extend)
    bench.metering = Metering(*made, used_cpu_s=counted.get)
    await bench.read()
    for used_s in (7.0, 7.25, 7.75, None, 0.5, 0.75):  # the fourth time nothing counts, then another process does
        counted[part.tag] = used_s
        samples = await bench.read()
        told.append([one.cpu_s for one in samples[CPU].slices])
        assert all(one.cpu_s == 0 for one in samples[GPU0].slices)
    assert told == [[0.0], [0.25], [0.5], [0.0], [0.0], [0.25]]


async def test_what_differs_from_the_plan_is_shown_by_kind_until_it_is_over(bench):
    await bench.read()
    for drift, expected in ((("clock range 210-900 MHz is not honoured: software_power_cap",), 1), ((), 0)):
        bench.node.devices[GPU0].clock_drift = drift
        await bench.read()
        shown = {kind: value(bench, "trefoil_device_drift", device=GPU0, kind=kind) for kind in ("clocks", "instances")}
        assert shown == {"clocks": expected, "instances": 0}


async def test_an_adopted_slice_shows_its_state_before_it_ever_moves(bench):
    part = bench.node.new_slice(SliceKey(GPU0, "3g.20gb", 0, 4), 1, SliceState.READY)
    states = {state: value(bench, "trefoil_slice_state", slice=part.key.name, state=state) for state in SLICE_STATES}
    assert [state for state, holds in states.items() if holds] == ["READY"]


async def test_a_driver_that_hangs_on_one_gpu_delays_no_other_and_loses_no_joule(bench, monkeypatch):
    monkeypatch.setattr(metering, "READ_TIMEOUT_S", 1.0)
    await bench.read()
    bench.meters.gates[GPU0] = threading.Event()
    for _ in range(3):
        assert set(await bench.read()) == {GPU1, P4_0, CPU}
    assert [device for device, _ in bench.meters.asked].count(GPU0) == 2, "it is not asked again while it hangs"
    bench.meters.gates.pop(GPU0).set()
    async with asyncio.timeout(60):
        while GPU0 not in (samples := await bench.read(0.0)):
            await asyncio.sleep(0.01)
    assert samples[GPU0].counter_j == pytest.approx(3 * WATTS[GPU0])


async def test_a_lost_gpu_has_no_samples_and_books_the_gap_when_it_is_back(bench):
    await bench.read()
    bench.meters.errors[GPU1] = DeviceLost("gone", code=15)
    assert GPU1 not in await bench.read()
    assert GPU1 not in await bench.read()
    del bench.meters.errors[GPU1]
    assert (await bench.read())[GPU1].counter_j == pytest.approx(3 * WATTS[GPU1])


async def test_a_successor_goes_on_from_the_ledger_by_seq_and_joule(bench):
    await bench.read()
    first = (await bench.read())[GPU0]
    bench.start()  # the first was killed
    gap = (await bench.read(60.0))[GPU0]
    assert gap.seq == first.seq + 1
    assert gap.counter_j == pytest.approx(60 * WATTS[GPU0])
    assert (gap.starts_at_s, gap.ends_at_s) == (first.ends_at_s, first.ends_at_s + 60)


WRONG = (-1, 10**13, 2**70, -1.0, 1e12, 1e300, "", "node0/gpu9")


def spoilt(tree, at=()):
    """The tree with one value, at any depth, replaced by another of its type."""
    if isinstance(tree, dict | list):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            for made, where in spoilt(inner, (*at, key)):
                whole = tree.copy()
                whole[key] = made
                yield whole, where
    for wrong in WRONG:
        if type(wrong) is type(tree) and wrong != tree:
            yield wrong, f"{at} = {wrong!r}"


async def test_one_wrong_value_in_the_energy_log_ends_no_agent_and_stops_no_stream(bench):
    for _ in range(3):
        await bench.read()
    path = bench.folder / "energy.0.jsonl"
    *before, last = path.read_text().splitlines()
    for tree, where in spoilt(json.loads(last)):
        path.write_text("\n".join([*before, json.dumps(tree), ""]))
        (bench.folder / "energy.1.jsonl").unlink(missing_ok=True)
        bench.start()
        try:
            for _ in range(3):
                found = await bench.read()
        except Exception as error:
            raise AssertionError(f"{where}: {error!r}") from error
        assert found.keys() == WATTS.keys(), where
        for sample in found.values():
            assert codec.decode(EnergySample, codec.encode(sample)) == sample, where
            assert not sample_fault(sample), where
            assert not power_fault(sample, bench.node.devices[sample.device].type), where
        for sample in bench.energy_log.ring:
            assert not sample_fault(sample), where


async def test_a_slice_is_metered_whose_family_the_repository_has_lost(bench):
    part = bench.node.new_slice(SliceKey(CPU, "quota:0.5", 0, 5), 3, SliceState.READY)
    part.running, part.incarnation, part.hosted = True, "one", (Hosted("gone", "s", 2),)
    for requests in (0, 0, 10):
        part.record_counters((VersionCounters("gone", 2, requests, 0, requests, requests * 1_000_000),), 1e9)
        samples = await bench.read()
    done = [(one.family, one.variant, one.requests) for one in samples[CPU].slices[0].hosted]
    assert done == [("gone", "version-2", 10)]


async def test_power_is_polled_between_readings_only_where_there_is_no_counter(bench):
    async def both_sleep():
        async with asyncio.timeout(60):
            while len(bench.clock._sleepers) < 2:  # the readings and the polls
                await asyncio.sleep(0.001)

    running = asyncio.create_task(bench.metering.run())
    await both_sleep()
    for _ in range(12):
        bench.clock.move(0.1)
        await both_sleep()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(bench.meters.polls) == {P4_0}
    assert len(bench.meters.polls) >= 8


async def test_what_is_published_is_counted_by_share_method_and_attribution(bench):
    await bench.read()
    await bench.read()
    total = sum(
        value(bench, "trefoil_device_energy_joules_total", device=GPU0, share=share)
        for share in ("active", "idle", "unallocated")
    )
    assert total == pytest.approx(100)
    assert value(bench, "trefoil_energy_samples_total", device=CPU, method="RAPL", attribution="SOLE") == 1
    assert value(bench, "trefoil_energy_counter_resets_total", device=GPU0) == 0
    assert value(bench, "trefoil_device_baseline_watts", device=GPU0) == pytest.approx(A100_40GB.idle_w)
    await bench.metering.stop()
    assert bench.meters.closed
