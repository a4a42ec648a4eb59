"""The simulated driver knows who has its GPUs open: nobody resets one that is in use by another client."""

import pynvml
import pytest

from power_agent.devices.errors import NodeRefused
from tests.support.simulated_driver import pynvml_on
from trefoil.simulated_node.clients import OWN, PERSISTENCED_PID
from trefoil.simulated_node.gpu_state import Nvml
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import Machine

A100 = "A100-SXM4-40GB"
OTHER = 4711


@pytest.fixture
def machine():
    made = Machine(devices=[A100, A100, A100])
    with pynvml_on(made):
        yield made


def attached(machine) -> list[bool]:
    return [OWN in machine.driver.clients.attached_to(gpu.index) for gpu in machine.driver.gpus]


def is_reset(machine, index=0) -> bool:
    try:
        Interference(machine).reset(index)
    except NodeRefused:
        return False
    return True


def test_opening_nvml_attaches_nothing_and_a_handle_attaches_its_gpu_until_as_many_shutdowns_as_inits(machine):
    pynvml.nvmlInit()
    assert is_reset(machine)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert not is_reset(machine), "an init without its shutdown keeps it open"
    assert is_reset(machine, 1)
    pynvml.nvmlShutdown()
    assert is_reset(machine)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetUUID(gpu)


def test_a_gpu_is_attached_alone_by_its_address_and_with_others_by_its_uuid(machine):
    third = machine.driver.gpus[2]
    pynvml.nvmlInit()
    address = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(2)).busId
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    pynvml.nvmlDeviceGetHandleByPciBusId(address)
    assert attached(machine) == [False, False, True]
    pynvml.nvmlDeviceGetHandleByUUID(third.uuid)
    assert attached(machine) == [True, True, True]


def test_a_handle_kept_from_before_attaches_its_gpu_again(machine):
    pynvml.nvmlInit()
    kept = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    pynvml.nvmlDeviceGetPowerUsage(kept)
    assert not is_reset(machine)


def test_a_client_that_ends_lets_go(machine):
    pending = machine.begin_call("nvmlDeviceGetHandleByIndex_v2", [0])
    assert machine.execute_call(pending, [0], OTHER)[0] == Nvml.SUCCESS
    assert machine.driver.holders(machine.gpu(0)) == ((OTHER, ""),)
    assert not is_reset(machine)
    machine.end_client(OTHER)
    assert is_reset(machine)


def test_persistenced_holds_the_gpus_whose_persistence_mode_is_on(machine):
    Interference(machine).persistenced(True)
    assert machine.driver.holders(machine.gpu(0)) == ((PERSISTENCED_PID, "nvidia-persistenced"),)
    assert not is_reset(machine)
    Interference(machine).set_persistence(0, False)
    assert is_reset(machine)
    assert not is_reset(machine, 1)
    Interference(machine).persistenced(False)
    assert is_reset(machine, 1)


@pytest.mark.parametrize("persistence", [True, False])
def test_the_last_client_takes_locks_and_counter_along_unless_persistence_mode_is_on(machine, persistence):
    Interference(machine).set_persistence(0, persistence)
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 210, 900)
    machine.advance(10.0)
    counted_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == (counted_mj if persistence else 0)
    assert (machine.driver.gpus[0].locked_mhz is not None) == persistence


@pytest.mark.parametrize(("version", "asked"), [("535.161.08", None), ("570.86.15", 1)])
def test_newer_drivers_ask_for_the_reset_after_a_fatal_error(version, asked):
    machine = Machine(driver_version=version)
    with pynvml_on(machine):
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        for xid, expected in ((13, 0), (48, 1)):
            Interference(machine).xid(0, xid)
            (found,) = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
            if asked is None:
                assert found.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
            else:
                assert (found.nvmlReturn, found.value.ullVal) == (0, expected)
