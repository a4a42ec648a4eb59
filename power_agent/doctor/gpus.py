"""GPUs as the doctor sees them: driver, MIG, persistence, energy and clocks of each, by the agent's own code."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from power_agent.devices.errors import DeviceError, DriverUnavailable
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.inventory import Inventory
from power_agent.doctor.findings import Finding, broken, of_reason, unknown, works
from power_agent.doctor.hardware_report import hardware_report
from power_agent.watch.capabilities import Capabilities, probe_devices

NVIDIA: Final = "0x10de"
DISPLAY: Final = "0x03"  # PCI class of display and 3D controllers
DRIVER_LEAST: Final = 525  # Hopper's; explicit MIG placements came with R470
CAPABILITIES: Final = {
    "MIG": "mig",
    "persistence": "persistence",
    "clocks": "clock_lock",
    "limit": "power_limit",
    "energy": "energy_counter",
}


def check_gpus(
    inventory: Inventory,
    root: Path,
    pause: Callable[[float], None],
    rights: tuple[str, str],
    *,
    cpu_serves: bool,
) -> tuple[list[Finding], dict[str, Any] | None]:
    """Check driver and GPUs; returns the findings, and what the driver tells of its GPUs (None: it does not answer).

    Args:
        root: where /dev, /proc and /sys are.
        pause: waits for so many seconds, between two readings of each counter.
        rights: why nothing may be changed, and why MIG may not be configured; empty = it may.
        cpu_serves: whether this node is meant to serve without a GPU.
    """
    try:
        inventory.open()
        try:
            devices = inventory.list_devices()
            capabilities = probe_devices(inventory, devices, *rights)
            report = hardware_report(inventory, capabilities, pause)
            found = [_driver(inventory, len(devices)), *_lost(inventory)]
            return found + [line for one in devices for line in _gpu(inventory, one, capabilities)], report
        finally:
            inventory.close()
    except DeviceError as error:
        untold = [unknown(subject, "no GPU answers") for subject in CAPABILITIES]
        return [_no_driver(error, root, cpu_serves), *untold], None


def nvidia_gpus(root: Path) -> int:
    """Count NVIDIA's GPUs on the PCI bus, driver or not."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    seen = [(_text(one / "vendor"), _text(one / "class")) for one in devices]
    return sum(vendor == NVIDIA and kind.startswith(DISPLAY) for vendor, kind in seen)


def _no_driver(error: DeviceError, root: Path, cpu_serves: bool) -> Finding:
    gpus = nvidia_gpus(root)
    if not gpus:
        seen = "no NVIDIA GPU on this machine's PCI bus"
        if cpu_serves:
            return works("driver", f"{seen}: none is needed, its CPUs serve")
        return broken("driver", seen, 'run the agent where one is; or cpu = "serve"; or simulate one: trefoil up')
    if not (root / "sys/module/nvidia").exists():
        remedy = "modprobe nvidia && modprobe nvidia-uvm; where there is no such module, install the driver"
        return broken("driver", f"{gpus} NVIDIA GPUs, and the kernel module is not loaded", remedy)
    return of_reason("driver", error, "")


def _driver(inventory: Inventory, gpus: int) -> Finding:
    version = inventory.driver_version()
    seen = f"{version}, {gpus} GPU{'' if gpus == 1 else 's'}"
    number = re.match(r"\d+", version)
    if number and int(number[0]) < DRIVER_LEAST:
        return broken("driver", seen, f"update it to R{DRIVER_LEAST} or newer")
    if not gpus and not inventory.lost:
        return broken("driver", f"{seen}: it lists none", "nvidia-smi -L; journalctl -k | grep -i nvrm")
    return works("driver", seen)


def _lost(inventory: Inventory) -> list[Finding]:
    return [of_reason(f"driver {_short(device)}", error, "") for device, error in inventory.lost.items()]


def _gpu(inventory: Inventory, device: ObservedDevice, capabilities: Capabilities) -> list[Finding]:
    name, short, whys = device.device, _short(device.device), capabilities.devices[device.device]
    seen: dict[str, Callable[[], str]] = {
        "persistence": lambda: "on",
        "MIG": lambda: f"on, {len(inventory.gpu_instances(name))} instances",
        "energy": lambda: "counted by the driver",
        "clocks": lambda: _clocks(inventory, name),
        "limit": lambda: _limit(inventory, name),
    }
    found = []
    for subject, capability in CAPABILITIES.items():
        why = whys[capability]
        try:
            found.append(of_reason(f"{subject} {short}", why, "" if why else seen[subject]()))
        except DriverUnavailable:
            raise
        except DeviceError as error:
            found.append(of_reason(f"{subject} {short}", error, ""))
    return found


def _clocks(inventory: Inventory, name: str) -> str:
    supported, reasons = inventory.clocks_supported_mhz(name), inventory.clock_event_reasons(name)
    held = f", {', '.join(reasons)}" if reasons else ""
    return f"{inventory.clock_mhz(name)} MHz of {supported[0]}-{supported[-1]}{held}"


def _limit(inventory: Inventory, name: str) -> str:
    limits = inventory.power_limits(name)
    span = f" of {limits.min_w:g}-{limits.max_w:g} W" if limits is not None else ""
    return f"{inventory.power_limit_w(name) or 0.0:g} W{span}"


def _short(device: str) -> str:
    return device.rpartition("/")[2]


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
