"""The wrapper that the agent uses, over the unmodified pynvml, over the driver model."""

import ctypes

import pynvml
import pytest

from power_agent.devices.errors import (
    DeviceBusy,
    DeviceError,
    DeviceLost,
    DeviceUnsupported,
    DriverUnavailable,
    NodeUnreachable,
    NoRoom,
    SliceMissing,
)
from power_agent.devices.gpus import boot_id, driver_load_id
from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_shim import SYMBOLS, NvmlShim, uninstall_simulated
from tests.support.simulated_driver import A100_40GB, H100_80GB, create_slice, destroy_slice, make_driver, pynvml_on
from trefoil.core.fleet import SliceKey
from trefoil.simulated_node.calls import CALLS
from trefoil.simulated_node.faults import FaultPlan
from trefoil.simulated_node.gpu_state import Nvml

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"


@pytest.fixture
def driver():
    return make_driver(A100_40GB, A100_40GB)


@pytest.fixture
def faults():
    return FaultPlan()


@pytest.fixture
def inventory(driver, faults):
    with pynvml_on(driver, faults):
        opened = Inventory("node0")
        opened.open()
        yield opened
        opened.close()


def test_shim_and_driver_know_the_same_symbols_and_pynvml_asks_for_them_by_these_names():
    assert set(SYMBOLS) == set(CALLS)
    with open(pynvml.__file__, encoding="utf-8") as file:
        source = file.read()
    assert [symbol for symbol in SYMBOLS if f'"{symbol}"' not in source] == []


def test_devices_are_named_by_node_and_index(inventory, driver):
    first, second = inventory.list_devices()
    assert (first.device, first.index, first.type, first.memory_mib) == (GPU0, 0, "A100-SXM4-40GB", 40960)
    assert (first.mig_capable, first.mig_current, first.mig_pending) == (True, True, True)
    assert [first.uuid, second.uuid] == [gpu.uuid for gpu in driver.gpus]


def test_profiles_are_read_by_constant_and_carry_their_id(inventory):
    found = {profile.name: (profile.constant, profile.id) for profile in inventory.profiles(GPU0)}
    assert found == {
        "1g.5gb": (0, 19),
        "1g.5gb+me": (7, 20),
        "1g.10gb": (9, 15),
        "2g.10gb": (1, 14),
        "3g.20gb": (2, 9),
        "4g.20gb": (3, 5),
        "7g.40gb": (4, 0),
    }
    three = next(profile for profile in inventory.profiles(GPU0) if profile.name == "3g.20gb")
    assert sorted(three.placements) == [(0, 4), (4, 4)]


def test_a_slice_is_created_listed_and_destroyed(inventory):
    made = create_slice(inventory, GPU0, "3g.20gb", 4)
    assert made.key == SliceKey(GPU0, "3g.20gb", 4, 4)
    assert made.mig_uuid.startswith("MIG-")
    assert (made.memory_mib, made.sm_count, made.ci_id) == (19968, 42, 0)
    assert inventory.gpu_instances(GPU0) == (made,)
    assert inventory.gpu_instances(GPU1) == ()
    assert create_slice(inventory, GPU0, "3g.20gb", 4) == made
    destroy_slice(inventory, made.key)
    assert inventory.gpu_instances(GPU0) == ()
    destroy_slice(inventory, made.key)
    assert create_slice(inventory, GPU0, "3g.20gb", 4).mig_uuid != made.mig_uuid


@pytest.mark.parametrize("name", ["1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"])
def test_every_slice_type_gets_one_full_width_compute_instance(inventory, driver, name):
    made = create_slice(inventory, GPU0, name, 0)
    (instance,) = driver.gpus[0].instances.values()
    (compute,) = instance.computes.values()
    assert compute.width == instance.profile.compute_slices
    assert compute.mig_uuid == made.mig_uuid
    destroy_slice(inventory, made.key)


def test_seven_small_slices_fill_a_gpu(inventory):
    for start in range(7):
        create_slice(inventory, GPU0, "1g.5gb", start)
    assert [found.key.start for found in inventory.gpu_instances(GPU0)] == list(range(7))
    with pytest.raises(NoRoom, match=r"no room for 7g.40gb at 0, it holds 1g.5gb@0, 1g.5gb@1"):
        create_slice(inventory, GPU0, "7g.40gb", 0)


def test_an_interrupted_creation_is_seen_and_completed(inventory):
    half = inventory.create_gpu_instance(GPU0, "2g.10gb", 2)
    assert (half.ci_id, half.mig_uuid) == (None, "")
    assert inventory.gpu_instances(GPU0) == (half,)
    whole = create_slice(inventory, GPU0, "2g.10gb", 2)
    assert whole.gi_id == half.gi_id
    assert whole.mig_uuid


def test_a_busy_slice_names_who_holds_it(inventory, driver):
    made = create_slice(inventory, GPU0, "2g.10gb", 2)
    driver.attach(4711, driver.by_uuid(made.mig_uuid), 450)
    assert inventory.pids(made.mig_uuid) == (4711,)
    with pytest.raises(DeviceBusy, match="processes 4711") as caught:
        destroy_slice(inventory, made.key)
    assert caught.value.holders == (4711,)
    driver.detach(4711)
    destroy_slice(inventory, made.key)
    with pytest.raises(SliceMissing):
        inventory.pids(made.mig_uuid)


def test_a_gpu_instance_that_a_foreign_process_holds_stays_half_destroyed(inventory, faults):
    made = create_slice(inventory, GPU0, "2g.10gb", 2)
    faults.plan("nvmlGpuInstanceDestroy", code=Nvml.IN_USE, times=2)
    for _ in range(2):
        with pytest.raises(DeviceBusy, match="no visible process: a client such as DCGM"):
            destroy_slice(inventory, made.key)
    destroy_slice(inventory, made.key)
    assert inventory.gpu_instances(GPU0) == ()


def test_a_destroy_that_only_claims_success_is_found_out(inventory, faults):
    made = create_slice(inventory, GPU0, "2g.10gb", 2)
    faults.plan("nvmlGpuInstanceDestroy", effect="pretend")
    with pytest.raises(DeviceError, match="still lists it"):
        destroy_slice(inventory, made.key)
    destroy_slice(inventory, made.key)


def test_wrong_names_and_starts_say_what_would_be_right(inventory):
    with pytest.raises(DeviceUnsupported, match="one of 0, 2, 4"):
        create_slice(inventory, GPU0, "2g.10gb", 3)
    with pytest.raises(DeviceUnsupported, match=r"no MIG profile '2g.20gb'.*2g.10gb"):
        create_slice(inventory, GPU0, "2g.20gb", 0)
    with pytest.raises(SliceMissing, match="node0/gpu<index>"):
        inventory.gpu_instances("node1/gpu0")


def test_energy_power_clocks_and_limits(inventory, driver):
    driver.gpus[0].energy_mj, driver.gpus[0].power_w = 12_345, 60.5
    assert inventory.energy_j(GPU0) == pytest.approx(12.345)
    assert inventory.power_w(GPU0) == pytest.approx(60.5)
    assert inventory.clock_mhz(GPU0) == 210
    assert inventory.clock_event_reasons(GPU0) == ("idle",)
    assert inventory.clocks_supported_mhz(GPU0) == tuple(range(210, 1411, 15))
    inventory.lock_clock(GPU0, 600, 900)
    assert inventory.clock_mhz(GPU0) == 600
    inventory.reset_clock(GPU0)
    assert inventory.clock_mhz(GPU0) == 210
    assert inventory.power_limit_w(GPU0) == pytest.approx(inventory.power_limits(GPU0).default_w)
    assert inventory.temperature_c(GPU0) == pytest.approx(37)
    assert inventory.driver_version()


def test_a_missing_symbol_is_an_old_driver(inventory):
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetFanSpeed(handle)


def test_energy_and_power_know_no_mig(inventory):
    made = create_slice(inventory, GPU0, "2g.10gb", 2)
    mig = pynvml.nvmlDeviceGetHandleByUUID(made.mig_uuid)
    for call in (pynvml.nvmlDeviceGetTotalEnergyConsumption, pynvml.nvmlDeviceGetPowerUsage):
        with pytest.raises(pynvml.NVMLError_NotSupported):
            call(mig)


def test_the_walk_over_mig_devices_agrees_with_the_listing(inventory, driver):
    made = [
        create_slice(inventory, GPU0, name, start) for name, start in (("3g.20gb", 4), ("2g.10gb", 0), ("1g.5gb", 2))
    ]
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    seen = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except pynvml.NVMLError_NotFound:
            continue
        seen[pynvml.nvmlDeviceGetUUID(mig)] = (
            pynvml.nvmlDeviceGetGpuInstanceId(mig),
            pynvml.nvmlDeviceGetMemoryInfo(mig).total // 2**20,
        )
    assert seen == {s.mig_uuid: (s.gi_id, s.memory_mib) for s in made}


def test_every_other_getter_answers_through_pynvml(inventory):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
    uuid = pynvml.nvmlDeviceGetUUID(gpu)
    bus_id = pynvml.nvmlDeviceGetPciInfo(gpu).busId
    for handle in (pynvml.nvmlDeviceGetHandleByUUID(uuid), pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)):
        assert pynvml.nvmlDeviceGetIndex(handle) == pynvml.nvmlDeviceGetMinorNumber(handle) == 1
    assert pynvml.nvmlDeviceGetArchitecture(gpu) == pynvml.NVML_DEVICE_ARCH_AMPERE
    assert pynvml.nvmlDeviceGetCudaComputeCapability(gpu) == (8, 0)
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).reserved > 0
    assert pynvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu) == [100_000, 400_000]
    assert pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) == 400_000
    values = pynvml.nvmlDeviceGetFieldValues(gpu, [83, (pynvml.NVML_FI_DEV_POWER_INSTANT, 0), 999])
    assert [value.nvmlReturn for value in values] == [0, 0, pynvml.NVML_ERROR_NOT_SUPPORTED]
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19) == 7
    assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 2, version=1).multiprocessorCount == 42
    pynvml.nvmlDeviceSetPersistenceMode(gpu, 0)
    assert pynvml.nvmlDeviceGetPersistenceMode(gpu) == 0
    assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_IN_USE)


def test_a_placement_by_value_raises_instead_of_crashing(inventory):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(ctypes.ArgumentError, match="a real driver would crash"):
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, pynvml.c_nvmlGpuInstancePlacement_t(4, 4))


def test_an_array_that_is_too_small_is_refused_with_the_size(inventory):
    for start in range(3):
        create_slice(inventory, GPU0, "1g.5gb", start)
    instances, count = (pynvml.c_nvmlGpuInstance_t * 2)(), ctypes.c_uint(2)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_InsufficientSize):
        pynvml.nvmlDeviceGetGpuInstances(gpu, 19, instances, ctypes.byref(count))
    assert count.value == 3


def test_mig_mode_of_a100_is_pending_and_of_h100_immediate():
    for model, immediate in ((A100_40GB, False), (H100_80GB, True)):
        with pynvml_on(make_driver(model, mig_enabled=False)):
            inventory = Inventory("node0")
            inventory.open()
            observed = inventory.set_mig_mode(GPU0, True)
            assert (observed.mig_current, observed.mig_pending) == (immediate, True)
            if not immediate:
                with pytest.raises(DeviceUnsupported, match="is MIG mode on"):
                    create_slice(inventory, GPU0, "3g.20gb", 4)


def test_a_lost_gpu_is_told_apart(inventory, driver):
    driver.gpus[0].lost = True
    with pytest.raises(DeviceLost, match="fence the device"):
        inventory.energy_j(GPU0)
    assert inventory.energy_j(GPU1) == 0


def test_nothing_works_before_open_or_after_the_driver_went():
    with pynvml_on(make_driver()), pytest.raises(DriverUnavailable, match="open the inventory"):
        Inventory("node0").list_devices()

    def gone(_symbol, _args):
        raise NodeUnreachable("nobody listens")

    pynvml.nvmlLib = NvmlShim(gone)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        with pytest.raises(DriverUnavailable):
            Inventory("node0").open()
    finally:
        uninstall_simulated()


def test_boot_and_driver_load_have_identities(tmp_path):
    assert len(boot_id()) == 36
    marker = tmp_path / "driver_load_id"
    assert driver_load_id(marker) == ""
    marker.write_text("abc\n")
    assert driver_load_id(marker) == "abc"
    assert driver_load_id(tmp_path)  # a device node on hardware: identity and time of its creation
