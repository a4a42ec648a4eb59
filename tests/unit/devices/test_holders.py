"""Who holds an instance that is in use: NVML's pids, else whoever has a capability device open, else a hint."""

import os
from pathlib import Path

import pytest

from power_agent.devices.errors import DeviceBusy
from power_agent.devices.instance_holders import (
    HIDDEN_HOLDER,
    capability_minor,
    find_holders,
    gpu_openers,
    instance_devices,
    openers,
    reset_remedy,
)
from power_agent.devices.inventory import Inventory
from tests.support.simulated_driver import create_slice, destroy_slice, make_driver, pynvml_on
from trefoil.simulated_node.faults import FaultPlan
from trefoil.simulated_node.gpu_state import Nvml


@pytest.fixture
def proc(tmp_path):
    """A proc file system with the driver's folder, DCGM's host engine and a Triton."""
    root = tmp_path / "proc"
    for path, number in (("mig/config", 1), ("mig/monitor", 2), ("gpu0/mig/gi3/access", 30)):
        file = root / "driver/nvidia/capabilities" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    ci = root / "driver/nvidia/capabilities/gpu0/mig/gi3/ci0/access"
    ci.parent.mkdir()
    ci.write_text("DeviceFileMinor: 31\n")
    process(root, 812, "nv-hostengine", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap2")
    process(root, 900, "bash", "/dev/null")
    (root / "self").mkdir()
    (root / "901").mkdir()  # ended: no fd any more
    return root


def process(root, pid, name, *files):
    folder = root / str(pid) / "fd"
    folder.mkdir(parents=True)
    (folder.parent / "comm").write_text(f"{name}\n")
    for number, file in enumerate(files):
        (folder / str(number)).symlink_to(file)


def test_an_instance_has_devices_of_its_own(proc):
    assert instance_devices(proc, 0, 3) == {"/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"}
    assert instance_devices(proc, 1, 3) == set()
    assert capability_minor(proc / "driver/nvidia/capabilities/mig/config") == 1
    assert capability_minor(proc / "absent") is None


def test_openers_are_found_and_named(proc):
    assert [(o.pid, o.command, o.path) for o in openers(proc)] == [
        (812, "nv-hostengine", "/dev/nvidia-caps/nvidia-cap2")
    ]


def test_pids_of_nvml_come_first(proc):
    process(proc, 4711, "tritonserver")
    held = find_holders([4711], proc, 0, 3, own_pid=1)
    assert (held.pids, held.text) == ((4711,), "processes 4711 (tritonserver)")


def test_whoever_has_the_instance_open_comes_next(proc):
    process(proc, 77, "tritonserver", "/dev/nvidia-caps/nvidia-cap31")
    held = find_holders([], proc, 0, 3, own_pid=1)
    assert held.pids == (77,)
    assert held.text == "no compute process, but 77 (tritonserver) has /dev/nvidia-caps/nvidia-cap31 open"


def test_then_whoever_may_watch_all_instances_but_never_ourselves(proc):
    held = find_holders([], proc, 0, 3, own_pid=1)
    assert held.pids == (812,)
    assert "812 (nv-hostengine) may hold a handle through /dev/nvidia-caps/nvidia-cap2" in held.text
    assert find_holders([], proc, 0, 3, own_pid=812).text == HIDDEN_HOLDER


def test_a_simulated_node_does_not_blame_this_machine():
    assert find_holders([], None, 0, 3, own_pid=1).text == HIDDEN_HOLDER
    assert find_holders([5], None, 0, 3, own_pid=1).text == "processes 5"


def test_the_refusal_names_the_holder(proc):
    driver, faults = make_driver(), FaultPlan()
    with pynvml_on(driver, faults):
        inventory = Inventory("node0", proc)
        inventory.open()
        made = create_slice(inventory, "node0/gpu0", "2g.10gb", 2)
        faults.plan("nvmlGpuInstanceDestroy", code=Nvml.IN_USE, times=1)
        with pytest.raises(DeviceBusy, match=r"812 \(nv-hostengine\).*stop it, then retry") as caught:
            destroy_slice(inventory, made.key)
        assert caught.value.holders == (812,)


def test_this_machines_proc_can_be_searched():
    assert os.getpid() not in {opener.pid for opener in openers(Path("/proc"))}


def test_who_has_a_gpu_open_is_told_with_what_to_do_and_our_own_process_too(proc):
    process(proc, 640, "nvidia-persiste", "/dev/nvidia0", "/dev/nvidia1")
    process(proc, 77, "tritonserver", "/dev/nvidia0", "/dev/nvidiactl")
    process(proc, 78, "tritonserver", "/dev/nvidia10", "/dev/nvidia0-x")
    found = gpu_openers(proc, 0)
    assert found == ((77, "tritonserver"), (640, "nvidia-persiste"))
    assert reset_remedy("GPU-1", found, own_pid=1) == (
        "stop who has it open: 77 (tritonserver); then "
        "sudo nvidia-smi -i GPU-1 -pm 0, as nvidia-persistenced has it open; then "
        "sudo nvidia-smi -i GPU-1 --gpu-reset; then sudo nvidia-smi -i GPU-1 -pm 1"
    )
    assert reset_remedy("GPU-1", found, own_pid=77).startswith("restart this agent, 77, which has it open in spite of")
    assert reset_remedy("GPU-1", (), own_pid=1) == "sudo nvidia-smi -i GPU-1 --gpu-reset"
