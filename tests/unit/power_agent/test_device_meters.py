"""What measures a device is asked of it: counter, power, RAPL or nothing; on the simulated driver behind pynvml."""

import pytest

from power_agent.devices.errors import DeviceUnsupported
from power_agent.devices.gpm import Gpm
from power_agent.devices.rapl import RaplCounter
from power_agent.energy.core.meter import MeterState, advance
from power_agent.energy.device_meters import DeviceMeasurement, DeviceMeters
from power_agent.slices.core.attribution import DeviceReading
from tests.support.powercap import Powercap
from tests.support.simulated_driver import A100_40GB, H100_80GB, P4, create_slice, inventory_on, make_driver
from trefoil.core import device_types
from trefoil.core.energy import AttributionMethod, EnergyMethod
from trefoil.core.fleet import DeviceState
from trefoil.runtime.clock import ManualClock

GPU0, GPU1, CPU = "node0/gpu0", "node0/gpu1", "node0/cpu"
ORIGIN = "boot/1"


@pytest.fixture
def clock():
    clock = ManualClock(1e9)
    clock.move(100.0)
    return clock


@pytest.fixture
def driver():
    return make_driver(A100_40GB, P4)


@pytest.fixture
def inventory(driver):
    with inventory_on(driver) as opened:
        yield opened


def a100(sources: DeviceMeters, **more) -> DeviceMeasurement:
    return sources.read(GPU0, device_types.A100_40GB, ORIGIN, {}, True, **more)


def p4(sources: DeviceMeters, origin: str = ORIGIN) -> DeviceMeasurement:
    return sources.read(GPU1, device_types.P4, origin, {}, False)


def test_a_counter_is_read_where_there_is_one(inventory, driver, clock):
    sources = DeviceMeters(inventory, clock)
    driver.gpus[0].energy_mj, driver.gpus[0].power_w = 123_456, 80.0
    found = a100(sources)
    assert (found.method, found.counter_j, found.power_w) == (EnergyMethod.NVML_COUNTER, pytest.approx(123.456), 80.0)
    assert (found.at_s, found.monotonic_s, found.origin) == (clock.now_s(), 100.0, ORIGIN)
    assert found.temperature_c is not None
    assert not sources.integrates(GPU0, ORIGIN)


def test_power_is_integrated_where_there_is_no_counter_and_the_doubt_is_stated(inventory, driver, clock):
    sources = DeviceMeters(inventory, clock)
    driver.gpus[1].power_w = 30.0
    first = p4(sources)
    assert (first.method, first.counter_j) == (EnergyMethod.POWER_INTEGRAL, 0.0)
    assert sources.integrates(GPU1, ORIGIN)
    for watts in (30.0, 50.0, 50.0):
        driver.gpus[1].power_w = watts
        clock.move(0.1)
        sources.poll(GPU1, ORIGIN)
    clock.move(0.1)
    second = p4(sources)
    assert second.counter_j == pytest.approx(3 + 4 + 5 + 5)
    assert 0.05 < second.counter_uncertainty == pytest.approx(0.05 + 1 / 17)
    assert second.origin == first.origin
    assert p4(sources, "boot/2").origin != first.origin, "another load of the driver, another integral"
    assert DeviceMeters(inventory, ManualClock()).integrates(GPU1, ORIGIN) is False


def test_nothing_is_known_when_nobody_may_measure(inventory, driver, clock):
    sources = DeviceMeters(inventory, clock, metered=False)
    for found in (a100(sources), p4(sources)):
        assert (found.method, found.counter_j, found.power_w) == (EnergyMethod.NONE, None, 0.0)


def test_a_sensor_that_does_not_answer_costs_no_reading(inventory, clock):
    class Broken:
        method = AttributionMethod.DCGM

        def activity(self, device, generations):
            raise DeviceUnsupported("not today")

    assert a100(DeviceMeters(inventory, clock, sensors=[Broken()])).activity == {AttributionMethod.DCGM: {}}


def test_gpm_tells_the_activity_of_each_slice_on_hopper(clock):
    driver = make_driver(H100_80GB)
    with inventory_on(driver) as inventory:
        key = create_slice(inventory, GPU0, "3g.40gb", 4).key
        sources = DeviceMeters(inventory, clock, sensors=[Gpm(inventory)])
        first = sources.read(GPU0, device_types.H100_80GB, ORIGIN, {key: 1}, False)
        driver.now_s += 1.0
        driver.gpus[0].busy_s[1] = (0.4, 0.4)
        second = sources.read(GPU0, device_types.H100_80GB, ORIGIN, {key: 1}, False)
    assert first.activity[AttributionMethod.GPM] == {}
    assert second.activity[AttributionMethod.GPM] == {key: pytest.approx(0.4)}


# --- CPUs -------------------------------------------------------------------------------------------------------------


class Host:
    """A machine of 4 cores: RAPL and /proc/stat."""

    def __init__(self, folder, clock):
        self.tree, self.clock, self.stat, self.ticks = Powercap(folder / "powercap"), clock, folder / "stat", 0
        self.rapl = RaplCounter(folder / "powercap", clock, "boot")
        self.sources = DeviceMeters(None, clock, rapl=self.rapl, proc_stat=self.stat)
        self.kind = device_types.device_type("cpu:4")
        self.state = MeterState(CPU)
        self.stat.write_text("cpu 0 0 0 0 0 0 0 0 0 0\n")

    def second(self, joules, busy_cores=1.0, seconds=1.0):
        self.tree.draw(joules)
        self.clock.move(seconds)
        self.ticks += round(100 * busy_cores * seconds)
        self.stat.write_text(f"cpu {self.ticks - 1} 0 1 777 888 0 0 0 55 66\ncpu0 1 2 3\n")

    def read(self):
        found = self.sources.read(CPU, self.kind, ORIGIN, {}, True)
        reading = DeviceReading(
            CPU, found.at_s, found.monotonic_s, found.origin, found.counter_j, self.kind.idle_w, 14.0,
            DeviceState.AWAKE, found.clock_mhz, serving_s=0.0, method=found.method, busy_s=found.busy_s,
        )  # fmt: skip
        self.state, sample = advance(self.state, reading, "node0", False)
        return found, sample


def test_cpu_packages_are_metered_by_rapl_and_unallocated_when_they_host_nothing(tmp_path, clock):
    host = Host(tmp_path, clock)
    host.read()
    host.second(42.0, busy_cores=2.0)
    found, sample = host.read()
    assert (found.method, found.power_w, found.busy_s) == (EnergyMethod.RAPL, pytest.approx(42.0), pytest.approx(0.5))
    assert sample.counter_j == sample.unallocated_j == pytest.approx(42.0)
    assert sample.idle_j == 0
    host.sources.close()


def test_a_rapl_counter_that_began_anew_leaves_one_interval_unknown_and_goes_on(tmp_path, clock):
    host = Host(tmp_path, clock)
    host.read()
    methods, joules = [], []
    for seconds in (1.0, 10_000.0, 1.0, 1.0):  # in the long one the counter may have wrapped unseen
        host.second(40.0, seconds=seconds)
        _, sample = host.read()
        methods.append(sample.method)
        joules.append(sample.counter_j)
    assert methods == [EnergyMethod.RAPL, EnergyMethod.NONE, EnergyMethod.RAPL, EnergyMethod.RAPL]
    assert joules == pytest.approx([40.0, 0.0, 40.0, 40.0])


def test_cpus_without_rapl_have_no_joules(tmp_path, clock):
    sources = DeviceMeters(None, clock, proc_stat=tmp_path / "missing")
    found = sources.read(CPU, device_types.device_type("cpu:4"), ORIGIN, {}, False)
    assert (found.method, found.counter_j, found.busy_s) == (EnergyMethod.NONE, None, None)
