"""Report of what this agent reads of a node's devices, ready for JSON: `hardware` of `trefoil node doctor --json`.

The same code runs on hardware and on a simulated node, so that a transcript of one can be compared with the other.
Each answer stands beside its question; a refusal is an answer too: {"error": kind, "code": nvmlReturn_t}.
Nothing is changed: nothing here creates, destroys, locks or sets anything, and no library is loaded but NVML.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from power_agent.devices.cpu import Cpu
from power_agent.devices.errors import DeviceError
from power_agent.devices.gpm import Gpm
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.inventory import Inventory
from power_agent.devices.rapl import RaplCounter, RaplUnavailable
from power_agent.watch.capabilities import Capabilities
from trefoil.core.device_types import reported_type
from trefoil.runtime.clock import WallClock

BETWEEN_S: Final = 0.5  # between the two readings of each counter


def answer_of(read: Callable[[], Any]) -> Any:
    """Answer of a read, or its refusal in its place."""
    try:
        return read()
    except DeviceError as error:
        return {"error": type(error).__name__, "code": error.code}


def hardware_report(inventory: Inventory, found: Capabilities, pause: Callable[[float], None]) -> dict[str, Any]:
    """Report of all that is read of the GPUs of an open inventory, and what they can do. Blocking for `BETWEEN_S`.

    Raises:
        DeviceError: the driver does not even list its devices.
    """
    devices = inventory.list_devices()
    gpm = Gpm(inventory)
    before = {device.device: _counters(inventory, gpm, device) for device in devices}
    pause(BETWEEN_S)
    after = {device.device: _counters(inventory, gpm, device) for device in devices}
    gpm.close()
    return {
        "driver_version": answer_of(inventory.driver_version),
        "lost": {device: str(error) for device, error in inventory.lost.items()},
        "capabilities": list(found.have),
        "missing": found.missing,
        "devices": [
            {
                **_identity(inventory, device),
                "counters": [before[device.device], after[device.device]],
                "clocks": _clocks(inventory, device.device),
                "power": _power(inventory, device.device),
                "mig": _mig(inventory, device),
                "capabilities": {name: why or "yes" for name, why in found.devices[device.device].items()},
            }
            for device in devices
        ],
    }


def _identity(inventory: Inventory, device: ObservedDevice) -> dict[str, Any]:
    kind = reported_type(device.type)
    name = device.device
    return {
        "device": name,
        "index": device.index,
        "uuid": device.uuid,
        "type": device.type,
        "kind": "unknown" if kind.unknown else kind.kind.name,
        "memory_mib": device.memory_mib,
        "minor": answer_of(lambda: inventory.minor(name)),
        "architecture": answer_of(lambda: inventory.architecture(name)),
        "virtualization": answer_of(lambda: inventory.virtualization(name)),
        "recovery_action": answer_of(lambda: inventory.recovery_action(name)),
        "processes": answer_of(lambda: len(inventory.pids(device.uuid))),
    }


def _counters(inventory: Inventory, gpm: Gpm, device: ObservedDevice) -> dict[str, Any]:
    name = device.device
    whole = {} if device.mig_current else {inventory.whole_slice(name).key: 0}
    return {
        "energy_j": answer_of(lambda: inventory.energy_j(name)),
        "power_w": answer_of(lambda: inventory.power_w(name)),
        "clock_mhz": answer_of(lambda: inventory.clock_mhz(name)),
        "temperature_c": answer_of(lambda: inventory.temperature_c(name)),
        "event_reasons": answer_of(lambda: list(inventory.clock_event_reasons(name))),
        "gpm_activity": answer_of(lambda: list(gpm.activity(name, whole).values())),
    }


def _clocks(inventory: Inventory, name: str) -> dict[str, Any]:
    def span(clocks: Sequence[int]) -> dict[str, Any]:
        steps = sorted({after - before for before, after in pairwise(clocks)})
        return {"count": len(clocks), "range": [clocks[0], clocks[-1]] if clocks else [], "steps": steps}

    return {
        "supported": answer_of(lambda: span(inventory.clocks_supported_mhz(name))),
        "memory_mhz": answer_of(lambda: inventory.memory_clock_mhz(name)),
        "memory_supported": answer_of(lambda: list(inventory.memory_clocks_supported_mhz(name))),
    }


def _power(inventory: Inventory, name: str) -> dict[str, Any]:
    def limits() -> list[float] | None:
        found = inventory.power_limits(name)
        return None if found is None else [found.min_w, found.default_w, found.max_w]

    return {"limit_w": answer_of(lambda: inventory.power_limit_w(name)), "min_default_max_w": answer_of(limits)}


def _mig(inventory: Inventory, device: ObservedDevice) -> dict[str, Any]:
    def profiles() -> list[dict[str, Any]]:
        found = inventory.profiles(device.device)
        return [{**asdict(profile), "placements": sorted(profile.placements)} for profile in found]

    def instances() -> list[dict[str, Any]]:
        return [
            {"slice_type": seen.key.slice_type, "start": seen.key.start, "size": seen.key.size, "gi_id": seen.gi_id}
            for seen in inventory.gpu_instances(device.device)
        ]

    return {
        "capable": device.mig_capable,
        "current": device.mig_current,
        "pending": device.mig_pending,
        "profiles": answer_of(profiles),
        "instances": answer_of(instances),
    }


def cpu_report(node: str, powercap: Path, clock: WallClock) -> dict[str, Any]:
    """Report of the CPUs, ready for JSON. Blocking for `BETWEEN_S` where RAPL can be read."""
    cpu = Cpu(node)
    seen: dict[str, Any] = {
        "type": cpu.type.name,
        "memory_mib": cpu.memory_mib,
        "clock_mhz": cpu.clock_mhz(),
        "temperature_c": cpu.temperature_c(),
    }
    try:
        counter = RaplCounter(powercap, clock, "inspect")
        before_j = counter.energy_j()
        clock.block(BETWEEN_S)
        seen["rapl"] = {"packages": len(counter.zones), "watts": (counter.energy_j() - before_j) / BETWEEN_S}
    except RaplUnavailable as error:
        seen["rapl"] = str(error)
    return seen
