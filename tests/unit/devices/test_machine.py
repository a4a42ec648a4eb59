"""A machine in a test's own hands: whole GPUs and slices, limits and lifetimes, sensors, and where the joules go."""

import pynvml
import pytest

from power_agent.devices.errors import NodeRefused
from tests.support.simulated_driver import pynvml_on
from trefoil.simulated_node.gpu_state import Nvml
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import Load, Machine

A100, H100, V100, T4, P4 = "A100-SXM4-40GB", "H100-SXM5-80GB", "Tesla V100-SXM2-32GB", "Tesla T4", "Tesla P4"


def opened(machine, index=0):
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def split_j(machine, index=0):
    device = machine.truth()["devices"][index]
    return device, device["active_j"] + device["idle_j"] + device["unallocated_j"]


# --- whole GPUs ---


@pytest.mark.parametrize(("model", "busy_w"), [(V100, 53.5 + 180.0), (T4, 68.0), (P4, 70.0)])
def test_a_process_on_a_whole_gpu_draws_its_dynamic_power(model, busy_w):
    machine = Machine(devices=[model])
    (gpu,) = machine.driver.gpus
    machine.attach(11, gpu.uuid)
    machine.advance(10.0, [Load(gpu.uuid, busy_s=10.0, variant="digits-l")])
    device, total_j = split_j(machine)
    assert device["counter_j"] == pytest.approx(10 * busy_w) == pytest.approx(total_j)
    (account,) = device["slices"]
    assert (account["slice_type"], account["start"], account["size"]) == ("whole", 0, 1)
    assert account["active_j"] == pytest.approx(10 * (busy_w - machine.energies[0].device.idle_w))
    assert [version["variant"] for version in account["versions"]] == ["digits-l"]


def test_a_p4_lacks_what_came_with_volta():
    machine = Machine(devices=[P4])
    with pynvml_on(machine):
        gpu = opened(machine)
        machine.advance(1.0)
        assert pynvml.nvmlDeviceGetPowerUsage(gpu) == 7000
        for refused in (
            lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
            lambda: pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 600, 900),
            lambda: pynvml.nvmlDeviceResetGpuLockedClocks(gpu),
            lambda: pynvml.nvmlDeviceGetMigMode(gpu),
            lambda: pynvml.nvmlDeviceSetMigMode(gpu, 1),
            lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0),
        ):
            with pytest.raises(pynvml.NVMLError_NotSupported):
                refused()
        assert [value.nvmlReturn for value in pynvml.nvmlDeviceGetFieldValues(gpu, [83, 185, 186, 191])] == [3, 3, 0, 3]


def test_the_v100_locks_its_half_steps():
    machine = Machine(devices=[V100])
    with pynvml_on(machine):
        gpu = opened(machine)
        pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 135, 1000)
        assert machine.driver.gpus[0].locked_mhz == (135, 998)
        assert str(pynvml.nvmlDeviceGetName(gpu)) == V100


# --- several slices, warm-up and strangers ---


def test_each_slice_gets_its_own_joules_and_warm_up_is_nobodys():
    machine = Machine()
    small, large = (Interference(machine).create_gi(0, name, start) for name, start in (("1g.5gb", 0), ("3g.20gb", 4)))
    machine.attach(1, small, serving=False)
    machine.attach(2, large)
    machine.advance(1.0, [Load(small, 1.0), Load(large, 0.5)])
    machine.mark_serving(1)
    machine.advance(
        1.0, [Load(small, 0.5, "a", 0.9, version=3), Load(small, 0.5, "b", 1.0, version=2), Load(large, 0.5, "b")]
    )
    device, total_j = split_j(machine)
    by_type = {account["slice_type"]: account for account in device["slices"]}
    assert total_j == pytest.approx(device["counter_j"])
    assert device["unallocated"]["warm_up_j"] > 0
    assert {v["variant"] for v in by_type["1g.5gb"]["versions"]} == {"v", "a", "b"}
    shares = by_type["3g.20gb"]["active_j"] / by_type["1g.5gb"]["active_j"]
    assert shares == pytest.approx(2 * 0.5 * 42 / (0.95 * 14), rel=0.03)  # concavity bends both ticks a little
    machine.detach(2)
    Interference(machine).foreign_load(0, 40.0)
    machine.advance(1.0)
    assert machine.truth()["devices"][0]["unallocated"]["foreign_j"] == pytest.approx(40.0, rel=0.03)


def test_an_instance_that_no_plan_knows_draws_by_its_multiprocessors():
    machine = Machine(devices=[H100])
    uuid = Interference(machine).create_gi(0, "1g.20gb", 0)  # 26 SMs of 132
    machine.attach(1, uuid)
    machine.advance(1.0, [Load(uuid, 1.0)])
    device, _ = split_j(machine)
    assert device["active_j"] == pytest.approx(455 * 26 / 132, rel=0.02)


def test_a_slice_made_anew_has_books_of_its_own():
    machine = Machine()
    for pid in (1, 2):
        uuid = Interference(machine).create_gi(0, "3g.20gb", 4)
        machine.attach(pid, uuid)
        machine.advance(1.0, [Load(uuid, 1.0)])
        machine.detach(pid)
        Interference(machine).destroy(0, 4)
    first, second = machine.truth()["devices"][0]["slices"]
    assert (first["generation"], second["generation"]) == (1, 2)
    assert first["active_j"] == pytest.approx(second["active_j"]) != 0


# --- the power limit and heat ---


def test_a_limit_that_clamps_lowers_the_clock_and_says_so():
    machine = Machine()
    uuid = Interference(machine).create_gi(0, "7g.40gb", 0)
    machine.attach(1, uuid)
    with pynvml_on(machine):
        gpu = opened(machine)
        pynvml.nvmlDeviceSetPowerManagementLimit(gpu, 200_000)
        for _ in range(60):
            machine.advance(0.04, [Load(uuid, 0.04)])
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & 0x4
        assert 900 < pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) < 1300
        assert pynvml.nvmlDeviceGetPowerUsage(gpu) <= 200_000
        pynvml.nvmlDeviceSetPowerManagementLimit(gpu, 400_000)
        for _ in range(60):
            machine.advance(0.04, [Load(uuid, 0.04)])
        assert pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) == 1410
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) == 0


def test_heat_holds_a_locked_clock_back():
    machine = Machine()
    machine.attach(1, Interference(machine).create_gi(0, "7g.40gb", 0))
    with pynvml_on(machine):
        gpu = opened(machine)
        pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 1410, 1410)
        Interference(machine).overheat(0, 810)
        assert pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) == 810
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) == 0x2 | 0x20
        Interference(machine).overheat(0, 0)
        assert pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) == 1410


# --- time ---


def test_a_clock_follows_its_lock_after_a_moment():
    machine = Machine(settle_s=(0.005, 0.050))
    machine.attach(1, Interference(machine).create_gi(0, "7g.40gb", 0))
    with pynvml_on(machine):
        gpu = opened(machine)
        pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 210, 900)
        assert pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) == 1410
        machine.advance(0.051)
        assert pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) == 900


def test_the_sensor_of_ga100_looks_a_quarter_of_the_time_and_that_of_hopper_averages():
    seen = {}
    for model in (A100, H100, T4):
        machine = Machine(devices=[model])
        (gpu,) = machine.driver.gpus
        uuid = Interference(machine).create_gi(0, gpu.model.profiles[-1].name, 0) if gpu.model.profiles else gpu.uuid
        machine.attach(1, uuid)
        readings = set()
        for step in range(400):  # busy in 50 ms of each 100 ms, in step with the sensor
            machine.advance(0.01, [Load(uuid, 0.01)] if step % 10 < 5 else [])
            readings.add(round(gpu.power_w))
        seen[model] = readings
        true_w = machine.truth()["devices"][0]["counter_j"] / 4.0
        if model == H100:
            assert gpu.power_w == pytest.approx(true_w, rel=0.05)
        if model == A100:
            assert gpu.power_w == pytest.approx(55.0 + 250.0, rel=0.01)  # it never looks at the other half
            assert gpu.power_w > 1.5 * true_w
    assert seen[T4] == {30, 68}


def test_the_counter_moves_in_steps():
    machine = Machine(counter_period_s=0.1)
    (gpu,) = machine.driver.gpus
    seen = []
    for _ in range(40):
        machine.advance(0.01)
        seen.append(gpu.energy_mj)
    assert len(set(seen)) <= 6
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(400 * 35, abs=35 * 110)


def test_temperature_follows_power_slowly():
    machine = Machine()
    (gpu,) = machine.driver.gpus
    cold_c = gpu.temperature_c
    uuid = Interference(machine).create_gi(0, "7g.40gb", 0)
    machine.attach(1, uuid)
    machine.advance(1.0, [Load(uuid, 1.0)])
    assert cold_c < gpu.temperature_c < cold_c + 5
    for _ in range(100):
        machine.advance(1.0, [Load(uuid, 1.0)])
    assert gpu.temperature_c == pytest.approx(30 + 0.11 * 305, abs=1)


# --- lifetimes ---


def test_a_driver_restart_voids_handles_instances_and_the_counter():
    machine = Machine()
    uuid = Interference(machine).create_gi(0, "3g.20gb", 4)
    machine.attach(1, uuid)
    machine.advance(10.0, [Load(uuid, 5.0)])
    Interference(machine).lock_clocks(0, 210, 900)
    Interference(machine).set_power_limit(0, 300.0)
    with pynvml_on(machine):
        gpu = opened(machine)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) > 0
        machine.reload()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        gpu = opened(machine)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 0
        assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    (card,) = machine.driver.gpus
    assert (card.instances, card.processes) == ({}, {})
    assert (card.locked_mhz, card.power_limit_w) == ((210, 900), 300.0)  # persistence mode kept them
    Interference(machine).set_persistence(0, False)
    machine.reload()
    assert (card.locked_mhz, card.power_limit_w) == (None, 400.0)
    device, total_j = split_j(machine)
    assert total_j == pytest.approx(device["counter_j"])
    assert device["counter_j"] > 350


def test_without_persistence_mode_an_unused_gpu_forgets():
    machine = Machine()
    machine.advance(10.0)
    Interference(machine).lock_clocks(0, 210, 900)
    with pytest.raises(NodeRefused, match="persistence mode is on"):
        Interference(machine).deinitialise(0)
    with pynvml_on(machine):
        gpu = opened(machine)
        pynvml.nvmlDeviceSetPersistenceMode(gpu, 0)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 350_000
        Interference(machine).deinitialise(0)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 0
        assert machine.driver.gpus[0].locked_mhz is None
        machine.advance(1.0)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 35_000


def test_a_reset_ends_locks_and_limits_and_is_refused_while_somebody_is_there():
    machine = Machine()
    (card,) = machine.driver.gpus
    Interference(machine).lock_clocks(0, 210, 900)
    Interference(machine).set_power_limit(0, 300.0)
    machine.attach(1, Interference(machine).create_gi(0, "3g.20gb", 4))
    with pytest.raises(NodeRefused, match=r"IN_USE.*stop its processes"):
        Interference(machine).reset(0)
    machine.detach(1)
    Interference(machine).leak_handle(0)
    with pytest.raises(NodeRefused, match="IN_USE"):
        Interference(machine).reset(0)
    Interference(machine).release_handles(0)
    Interference(machine).reset(0)
    assert (card.locked_mhz, card.power_limit_w, card.instances) == (None, 400.0, {})


@pytest.mark.parametrize("holder", ["process", "instance", "hidden client"])
def test_mig_mode_of_an_a100_with_clients_is_pending_until_a_reset(holder):
    machine = Machine(mig_enabled=holder == "instance")
    (card,) = machine.driver.gpus
    wanted = not card.mig_current
    if holder == "process":
        machine.attach(1, card.uuid)
    elif holder == "instance":
        Interference(machine).create_gi(0, "3g.20gb", 4)
    else:
        Interference(machine).leak_handle(0)
    with pynvml_on(machine):
        gpu = opened(machine)
        assert pynvml.nvmlDeviceSetMigMode(gpu, int(wanted)) == pynvml.NVML_ERROR_IN_USE
        assert pynvml.nvmlDeviceGetMigMode(gpu) == [int(not wanted), int(wanted)]
        machine.detach(1)
        Interference(machine).release_handles(0)
        pynvml.nvmlShutdown()
        Interference(machine).reset(0)
        assert pynvml.nvmlDeviceGetMigMode(opened(machine)) == [int(wanted), int(wanted)]


def test_mig_mode_of_an_h100_with_clients_does_not_change():
    machine = Machine(devices=[H100])
    Interference(machine).create_gi(0, "3g.40gb", 4)
    with pynvml_on(machine):
        gpu = opened(machine)
        assert pynvml.nvmlDeviceSetMigMode(gpu, 0) == pynvml.NVML_ERROR_IN_USE
        assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    assert Interference(machine).set_mig_mode(0, False) == Nvml.IN_USE


# --- permissions and old drivers ---


def test_without_root_nothing_changes():
    machine = Machine(root=False)
    with pynvml_on(machine):
        gpu = opened(machine)
        for call, *args in (
            (pynvml.nvmlDeviceSetGpuLockedClocks, 600, 900),
            (pynvml.nvmlDeviceResetGpuLockedClocks,),
            (pynvml.nvmlDeviceSetPowerManagementLimit, 300_000),
            (pynvml.nvmlDeviceSetMigMode, 0),
            (pynvml.nvmlDeviceCreateGpuInstance, 9),
            (pynvml.nvmlDeviceSetPersistenceMode, 0),
        ):
            with pytest.raises(pynvml.NVMLError_NoPermission):
                call(gpu, *args)
        assert pynvml.nvmlDeviceGetPowerUsage(gpu) == 35_000


def test_an_old_driver_lacks_symbols_and_says_its_version():
    machine = Machine(driver_version="470.82.01", symbols_missing=["nvmlDeviceGetCurrentClocksEventReasons"])
    with pynvml_on(machine):
        gpu = opened(machine)
        assert pynvml.nvmlSystemGetDriverVersion() == "470.82.01"
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) == 0x1
