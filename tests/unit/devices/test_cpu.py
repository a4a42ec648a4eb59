"""The CPUs of this machine as a device."""

import os

import pytest

from power_agent.devices.cpu import Cpu, cpu_mode
from power_agent.devices.errors import SliceMissing
from trefoil.core.fleet import DeviceKind, SliceKey


def test_it_is_a_device_of_as_many_cores_as_this_process_may_use(tmp_path):
    cpu = Cpu("node0", tmp_path)
    assert cpu.device == "node0/cpu"
    assert (cpu.type.kind, cpu.type.cores) == (DeviceKind.CPU, len(os.sched_getaffinity(0)))
    assert cpu.memory_mib > 100
    assert (cpu.clock_mhz(), cpu.temperature_c()) == (0, None)


def test_cores_of_a_plan_are_counted_among_those_allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {8, 4, 6, 10})
    cpu = Cpu("node0")
    assert cpu.type.name == "cpu:4"
    assert cpu.pinned_cores(SliceKey("node0/cpu", "cpu:2", 1, 2)) == (6, 8)
    assert cpu.pinned_cores(SliceKey("node0/cpu", "quota:0.5", 0, 5)) is None
    with pytest.raises(SliceMissing, match="node0/cpu has 4"):
        cpu.pinned_cores(SliceKey("node0/cpu", "cpu:2", 3, 2))


def test_clock_and_temperature_come_from_the_kernel(tmp_path):
    cpu = Cpu("node0", tmp_path)
    for core in cpu.cores:
        folder = tmp_path / f"devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text("2400000\n")
    for number, (name, millidegrees) in enumerate((("nvme", 90_000), ("coretemp", 41_500), ("coretemp", 47_000))):
        sensor = tmp_path / f"class/hwmon/hwmon{number}"
        sensor.mkdir(parents=True)
        (sensor / "name").write_text(f"{name}\n")
        (sensor / "temp1_input").write_text(f"{millidegrees}\n")
    assert (cpu.clock_mhz(), cpu.temperature_c()) == (2400, 47.0)


def test_this_machine_is_not_metered_as_a_simulated_node():
    assert cpu_mode("auto", simulated=False, readable=True) == "meter"
    assert cpu_mode("auto", simulated=True, readable=True) == "off"
    assert cpu_mode("auto", simulated=False, readable=False) == "off"
    assert cpu_mode("serve", simulated=True, readable=False) == "serve"
