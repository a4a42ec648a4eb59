"""What the agent says it can do, on every kind of GPU, driver and permission."""

from contextlib import contextmanager

import pynvml
import pytest

from power_agent.devices.inventory import Inventory
from power_agent.watch.capabilities import (
    NOT_ROOT,
    Capabilities,
    effective_root,
    mig_device,
    probe_devices,
)
from tests.support.simulated_driver import A100_40GB, H100_80GB, P4, T4, V100_32GB, make_driver, pynvml_on

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"
ALL = ("clock_lock", "energy_counter", "events", "gpm", "mig", "persistence", "power_limit", "root")


@contextmanager
def opened(driver, *symbols_missing):
    with pynvml_on(driver):
        for symbol in symbols_missing:
            delattr(pynvml.nvmlLib, symbol)
        inventory = Inventory("node0", None)
        inventory.open()
        yield inventory


def probe(driver, *symbols_missing, not_root="", no_mig_device=""):
    with opened(driver, *symbols_missing) as inventory:
        return probe_devices(inventory, inventory.list_devices(), not_root, no_mig_device)


def test_a_hopper_can_do_everything():
    found = probe(make_driver(H100_80GB))
    assert (found.have, found.missing) == (ALL, {})
    assert all(not found.devices[GPU0][name] for name in ALL if name != "root")


def test_each_type_lacks_what_its_generation_lacks():
    found = probe(make_driver(A100_40GB, V100_32GB, T4, P4))
    lacks = {
        device.removeprefix("node0/"): sorted(name for name, why in whys.items() if why)
        for device, whys in found.devices.items()
    }
    assert lacks == {
        "gpu0": ["gpm"],
        "gpu1": ["gpm", "mig"],
        "gpu2": ["gpm", "mig"],
        "gpu3": ["clock_lock", "energy_counter", "gpm", "mig"],
    }
    assert found.have == ("clock_lock", "energy_counter", "events", "mig", "persistence", "power_limit", "root")
    assert found.missing["mig gpu2"] == "Tesla T4 is not MIG capable. Remedy: none needed, it is one slice"
    assert "power is integrated" in found.missing["energy_counter gpu3"]
    assert "older than Volta" in found.devices["node0/gpu3"]["clock_lock"]


def test_one_reason_for_all_is_said_once():
    found = probe(make_driver(T4, T4))
    assert "mig" in found.missing
    assert not [name for name in found.missing if name.startswith("mig ")]


def test_without_privileges_it_reads_only():
    found = probe(make_driver(H100_80GB), not_root=NOT_ROOT, no_mig_device=NOT_ROOT)
    assert found.have == ("energy_counter", "events", "gpm", "persistence")
    assert set(found.missing) == {"mig", "clock_lock", "power_limit", "root"}
    assert "systemd unit" in found.missing["root"]


def test_mig_may_be_closed_although_the_rest_is_open():
    found = probe(make_driver(H100_80GB), no_mig_device="/dev/nvidia-caps/nvidia-cap1 cannot be opened")
    assert found.devices[GPU0]["mig"].startswith("/dev/nvidia-caps/nvidia-cap1")
    assert not found.devices[GPU0]["clock_lock"]


@pytest.mark.parametrize(
    ("symbol", "capability", "says"),
    [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", "mig", "update it to R470"),
        ("nvmlDeviceGetMigMode", "mig", "not MIG capable"),
        ("nvmlDeviceSetGpuLockedClocks", "clock_lock", "update it to R418"),
        ("nvmlDeviceGetPowerManagementLimitConstraints", "power_limit", "cannot be changed"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_counter", "power is integrated"),
        ("nvmlGpmQueryDeviceSupport", "gpm", "R520"),
        ("nvmlDeviceGetSupportedEventTypes", "events", "noticed by polling"),
    ],
)
def test_an_old_driver_costs_one_capability_and_no_more(symbol, capability, says):
    found = probe(make_driver(H100_80GB), symbol)
    assert [name for name in ALL if name not in found.have] == [capability]
    assert says in found.missing[capability]


def test_mig_mode_that_is_off_or_pending_says_how_to_switch_it_on():
    driver = make_driver(A100_40GB, mig_enabled=False)
    assert f"nvidia-smi -i {driver.gpus[0].uuid} -mig 1" in probe(driver).missing["mig"]
    driver.gpus[0].mig_pending = True
    assert f"nvidia-smi --gpu-reset -i {driver.gpus[0].uuid}" in probe(driver).missing["mig"]


def test_a_vgpu_guest_is_told_to_go_to_the_host(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetVirtualizationMode", lambda _handle: 2)
    found = probe(make_driver(H100_80GB))
    assert found.have == ("energy_counter", "events", "gpm", "persistence", "root")
    assert "run the agent on the host" in found.missing["mig"]


def test_a_gpu_that_is_lost_in_the_middle_hides_no_other():
    driver = make_driver(H100_80GB, H100_80GB)
    with opened(driver) as inventory:
        devices = inventory.list_devices()
        driver.gpus[0].lost = True
        found = probe_devices(inventory, devices, "")
    assert found.have == ALL
    assert "fence the device" in found.devices[GPU0]["mig"]
    assert not found.devices[GPU1]["mig"]


def test_probing_changes_nothing_and_works_without_gpus():
    assert (probe_devices(Inventory("node0"), (), "").have, Capabilities().missing) == ((), {})
    driver = make_driver(H100_80GB, P4)
    before = [(gpu.locked_mhz, gpu.power_limit_w, gpu.mig_current, gpu.creations) for gpu in driver.gpus]
    probe(driver)
    assert before == [(gpu.locked_mhz, gpu.power_limit_w, gpu.mig_current, gpu.creations) for gpu in driver.gpus]


def test_the_capability_counts_and_not_the_user(tmp_path):
    status = tmp_path / "self" / "status"
    status.parent.mkdir()
    for bits, says in (("000001ffffffffff", ""), ("0000000000200000", ""), ("00000000a80425fb", NOT_ROOT)):
        status.write_text(f"Name:\tpython\nUid:\t0\t0\t0\t0\nCapEff:\t{bits}\n")
        assert effective_root(tmp_path) == says
    assert effective_root() in ("", NOT_ROOT)


def test_mig_needs_its_device_or_the_capability_that_includes_it(tmp_path):
    """Whoever has CAP_SYS_ADMIN lacks nothing where the device is not there yet, as after a boot."""
    status = tmp_path / "self" / "status"
    status.parent.mkdir()
    status.write_text(f"CapEff:\t{0:016x}\n")
    assert mig_device(tmp_path, tmp_path) == NOT_ROOT
    config = tmp_path / "driver/nvidia/capabilities/mig/config"
    config.parent.mkdir(parents=True)
    config.write_text("DeviceFileMinor: 1\n")
    assert mig_device(tmp_path, tmp_path).endswith(
        f"nvidia-cap1 cannot be opened (No such file or directory): {NOT_ROOT}"
    )
    status.write_text(f"CapEff:\t{1 << 21:016x}\n")
    assert mig_device(tmp_path, tmp_path) == ""
    status.write_text(f"CapEff:\t{0:016x}\n")
    (tmp_path / "nvidia-caps").mkdir()
    (tmp_path / "nvidia-caps" / "nvidia-cap1").touch()
    assert mig_device(tmp_path, tmp_path) == ""
