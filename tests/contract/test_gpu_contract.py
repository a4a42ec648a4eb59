"""What holds of every node's GPUs, whoever answers: a machine in this process, a simulated node over its socket, and,
with TREFOIL_REAL_NVML=1, the hardware of this host. On hardware nothing is created, locked or set.
"""

import os
from contextlib import contextmanager

import pytest

from power_agent.devices.errors import DeviceError, DeviceUnsupported, NoRoom, SliceMissing
from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_shim import install_simulated_node, uninstall_simulated
from power_agent.doctor.hardware_report import hardware_report
from power_agent.watch.capabilities import probe_devices
from tests.support.simulated_driver import NodeProcess, create_slice, destroy_slice, pynvml_on
from trefoil.core.device_types import DEVICE_TYPES, device_type, slice_type
from trefoil.core.fleet import DeviceKind
from trefoil.runtime.clock import WallClock
from trefoil.simulated_node.machine import Machine

TYPES = ("A100-SXM4-40GB", "H100-SXM5-80GB", "Tesla V100-SXM2-32GB", "Tesla T4", "Tesla P4")
ANSWERING = ("machine", "socket", *(("real",) if os.environ.get("TREFOIL_REAL_NVML") == "1" else ()))
AMPERE, HOPPER, VOLTA, TURING, PASCAL = (f"node0/gpu{index}" for index in range(len(TYPES)))


@contextmanager
def in_process(_folder):
    machine = Machine(devices=TYPES)
    machine.advance(1.0)
    with pynvml_on(machine):
        yield Inventory("node0", None)


@contextmanager
def over_socket(folder):
    devices = "[" + ",".join(f'"{name}"' for name in TYPES) + "]"
    node = NodeProcess(folder, f"devices={devices}")
    node.start()
    install_simulated_node(node.socket)
    try:
        yield Inventory("node0", None)
    finally:
        uninstall_simulated()
        node.end()


@contextmanager
def real(_folder):
    uninstall_simulated()
    yield Inventory("node0")


BACKENDS = {"machine": in_process, "socket": over_socket, "real": real}


@pytest.fixture(scope="module", params=ANSWERING)
def inventory(request, tmp_path_factory):
    with BACKENDS[request.param](tmp_path_factory.mktemp("node")) as opened:
        opened.open()
        yield opened
        opened.close()


@pytest.fixture
def simulated(inventory, request):
    if "real" in request.node.name:
        pytest.skip("nothing is changed on hardware")
    return inventory


@pytest.fixture
def devices(inventory):
    found = inventory.list_devices()
    assert found
    assert inventory.lost == {}
    return found


# --- read-only: also on hardware --------------------------------------------------------------------------------------


def test_devices_have_names_uuids_and_memory(inventory, devices):
    assert [device.device for device in devices] == [f"node0/gpu{index}" for index in range(len(devices))]
    assert len({device.uuid for device in devices}) == len(devices)
    for device in devices:
        assert device.uuid.startswith("GPU-")
        assert device.memory_mib > 4000
        assert inventory.uuid(device.device) == device.uuid
        assert inventory.observe(device.device) == device
    with pytest.raises(SliceMissing):
        inventory.uuid(f"node0/gpu{len(devices)}")


def test_known_types_are_what_their_description_says(inventory, devices):
    for device in devices:
        if device.type not in DEVICE_TYPES:
            continue
        kind = device_type(device.type)
        assert (kind.kind == DeviceKind.MIG_GPU) == device.mig_capable
        assert kind.energy_counter == (inventory.energy_j(device.device) is not None)
        limits = inventory.power_limits(device.device)
        assert limits is not None
        assert (limits.min_w, limits.max_w) == (kind.power_limit_min_w, kind.power_limit_max_w)
        if kind.kind == DeviceKind.WHOLE_GPU:
            whole = inventory.whole_slice(device.device)
            assert (whole.key.slice_type, whole.key.start, whole.key.size) == ("whole", 0, 1)
            assert whole.mig_uuid == device.uuid
            assert inventory.pids(whole.mig_uuid) == ()


def test_the_energy_counter_grows_and_gauges_make_sense(inventory, devices):
    for device in devices:
        name = device.device
        before_j = inventory.energy_j(name)
        power_w, limit_w = inventory.power_w(name), inventory.power_limit_w(name)
        if before_j is not None:
            assert inventory.energy_j(name) >= before_j
        if power_w is not None:
            assert 1 < power_w < 2000
        assert limit_w is None or limit_w > 20
        assert 0 <= (inventory.temperature_c(name) or 0) < 110
        assert isinstance(inventory.clock_event_reasons(name), tuple)


def test_clocks_are_listed_in_ascending_order(inventory, devices):
    for device in devices:
        clocks = inventory.clocks_supported_mhz(device.device)
        assert list(clocks) == sorted(set(clocks))
        memory = inventory.memory_clocks_supported_mhz(device.device)
        assert list(memory) == sorted(set(memory))
        assert inventory.clock_mhz(device.device) >= 0
        if clocks:
            assert inventory.clock_mhz(device.device) <= clocks[-1]


def test_mig_profiles_have_legal_placements(inventory, devices):
    for device in devices:
        profiles = inventory.profiles(device.device)
        if not device.mig_capable:
            assert profiles == ()
        for profile in profiles:
            assert profile.placements
            assert all(start >= 0 and start + size <= 8 for start, size in profile.placements)
        if device.type in DEVICE_TYPES and profiles:
            kind = device_type(device.type)
            by_name = {profile.name: profile for profile in profiles}
            for part in kind.slice_types:
                assert sorted(start for start, _ in by_name[part.name].placements) == list(part.starts)
                assert by_name[part.name].sm_count == slice_type(kind, part.name).sm_count


def test_what_exists_is_listed_without_being_touched(inventory, devices):
    for device in devices:
        seen = inventory.gpu_instances(device.device)
        assert inventory.gpu_instances(device.device) == seen
        assert device.mig_current or seen == ()


def test_probing_and_the_report_answer_for_every_device(inventory, devices):
    found = probe_devices(inventory, devices, "")
    assert set(found.devices) == {device.device for device in devices}
    transcript = hardware_report(inventory, found, WallClock().block)
    assert [device["device"] for device in transcript["devices"]] == [device.device for device in devices]


# --- simulated nodes --------------------------------------------------------------------------------------------------


def test_types_are_known_by_the_names_that_nvml_gives(simulated):
    assert tuple(device.type for device in simulated.list_devices()) == TYPES


def test_what_each_generation_can_do(simulated):
    assert simulated.clocks_supported_mhz(PASCAL) != ()
    for name, architecture in ((AMPERE, 7), (HOPPER, 9), (VOLTA, 5), (TURING, 6), (PASCAL, 4)):
        assert simulated.architecture(name) == architecture
        assert simulated.gpm_supported(name) == (name == HOPPER)
    assert simulated.energy_j(PASCAL) is None
    assert simulated.power_w(PASCAL) is not None


def test_a_whole_gpu_has_clocks_and_limits_and_no_instances(simulated):
    clocks = simulated.clocks_supported_mhz(TURING)
    simulated.lock_clock(TURING, clocks[0], clocks[3])
    assert simulated.clock_mhz(TURING) <= clocks[3]
    simulated.reset_clock(TURING)
    limits = simulated.power_limits(TURING)
    simulated.set_power_limit_w(TURING, limits.min_w)
    assert simulated.power_limit_w(TURING) == simulated.power_limit_set_w(TURING) == limits.min_w
    with pytest.raises(DeviceError, match="could not set the power limit to 1 W"):
        simulated.set_power_limit_w(TURING, 1.0)
    simulated.set_power_limit_w(TURING, limits.default_w)
    assert simulated.power_limit_set_w(TURING) == limits.default_w
    assert simulated.gpu_instances(TURING) == ()
    with pytest.raises(DeviceUnsupported):
        create_slice(simulated, TURING, "1g.5gb", 0)
    with pytest.raises(DeviceUnsupported):
        simulated.lock_clock(PASCAL, 500, 600)


@pytest.mark.parametrize(("device", "name"), [(AMPERE, "3g.20gb"), (HOPPER, "3g.40gb")])
def test_slices_come_and_go(simulated, device, name):
    made = create_slice(simulated, device, name, 4)
    assert simulated.gpu_instances(device) == (made,)
    assert create_slice(simulated, device, name, 4) == made
    with pytest.raises(NoRoom):
        create_slice(simulated, device, next(p.name for p in simulated.profiles(device) if p.compute_slices == 7), 0)
    destroy_slice(simulated, made.key)
    assert simulated.gpu_instances(device) == ()


def test_the_transcript_of_a_simulated_node_keeps_its_shape(simulated):
    found = probe_devices(simulated, simulated.list_devices(), "")
    transcript = hardware_report(simulated, found, WallClock().block)
    hopper, pascal = transcript["devices"][1], transcript["devices"][4]
    assert set(transcript) == {"driver_version", "lost", "capabilities", "missing", "devices"}
    assert set(hopper) == {
        *("device", "index", "uuid", "type", "kind", "memory_mib", "minor", "architecture", "virtualization"),
        *("recovery_action", "processes", "counters", "clocks", "power", "mig", "capabilities"),
    }
    assert [profile["id"] for profile in hopper["mig"]["profiles"]] == [19, 14, 9, 5, 0, 20, 15]
    assert (pascal["kind"], pascal["mig"]["profiles"], pascal["counters"][0]["energy_j"]) == ("WHOLE_GPU", [], None)
    assert hopper["capabilities"]["mig"] == "yes"
    assert pascal["capabilities"]["clock_lock"].startswith("Tesla P4 is older than Volta")
