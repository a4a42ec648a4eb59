"""Capabilities of this node: what the agent can do, probed by reading, never assumed, never changing anything.

    found = probe_devices(inventory, names, root)           # blocking
    found.have               # ("clock_lock", "energy_counter", ...): some device has it
    found.missing            # {"clock_lock gpu2": "why. Remedy: ...", "gpm": "..."}: without " gpuN" no device has it
    found.devices["node0/gpu2"]["clock_lock"]   # reason why not; "": it can

The agent runs with whatever is there. Without `clock_lock` clocks do not change, without `power_limit` limits do not,
and a plan that wants others is refused with the reason. Without `mig` whole GPUs are served, or nothing. Without
`energy_counter` power is integrated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from power_agent.devices.errors import DeviceError
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.instance_holders import capability_minor
from power_agent.devices.inventory import Inventory
from trefoil.core.errors import system_words

CAP_SYS_ADMIN: Final = 21  # bit of CapEff
ARCHITECTURE_VOLTA: Final = 5
XID_EVENT: Final = 0x8  # nvmlEventTypeXidCriticalError
NOT_ROOT: Final = "needs root or CAP_SYS_ADMIN. Remedy: run the agent as its systemd unit does"
VGPU: Final = "this is a vGPU guest, whose host owns the GPU. Remedy: run the agent on the host"
OLD: Final = "driver {version} has no {symbol}. Remedy: update it to {branch} or newer"
PLACEMENT_SYMBOL: Final = "nvmlDeviceCreateGpuInstanceWithPlacement"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a node. `devices`: for each device and capability why it is missing there; empty: it is had."""

    devices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    node: Mapping[str, str] = field(default_factory=dict)

    @property
    def have(self) -> tuple[str, ...]:
        """Names of what the node, or at least one of its devices, can do; sorted."""
        of_devices = {name for whys in self.devices.values() for name, why in whys.items() if not why}
        return tuple(sorted(of_devices | {name for name, why in self.node.items() if not why}))

    @property
    def missing(self) -> dict[str, str]:
        """Reasons for what is missing, by name; one entry where all devices have the same reason."""
        found = {name: why for name, why in self.node.items() if why}
        for name in {name for whys in self.devices.values() for name in whys}:
            reasons = {device: whys[name] for device, whys in self.devices.items() if whys.get(name)}
            if len(set(reasons.values())) == 1 and len(reasons) == len(self.devices):
                found[name] = next(iter(reasons.values()))
            else:
                found |= {f"{name} {device.rpartition('/')[2]}": why for device, why in reasons.items()}
        return found


def effective_root(proc: Path = Path("/proc")) -> str:
    """Reason why this process may not change GPUs; empty when it may: the capability counts, not the user's number."""
    for line in (proc / "self" / "status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return "" if int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1 else NOT_ROOT
    return NOT_ROOT


def mig_device(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> str:
    """Reason why MIG may not be configured; empty when it may.

    CAP_SYS_ADMIN includes every capability of the driver, also where its device is not there or not allowed yet. A
    process without it needs the one device ["Device Nodes and Capabilities", NVIDIA's MIG guide].
    """
    not_root = effective_root(proc)
    minor = capability_minor(proc / "driver" / "nvidia" / "capabilities" / "mig" / "config")
    if not not_root or minor is None:
        return not_root
    path = dev / "nvidia-caps" / f"nvidia-cap{minor}"
    try:
        path.open("rb").close()
    except OSError as error:
        return f"{path} cannot be opened ({system_words(error)}): {NOT_ROOT}"
    return ""


def probe_devices(
    inventory: Inventory, devices: Sequence[ObservedDevice], not_root: str, no_mig_device: str = ""
) -> Capabilities:
    """Probe what each GPU can do. Blocking; reads only.

    not_root: why nothing may be changed (`effective_root`); empty when it may.
    no_mig_device: why MIG may not be configured (`mig_device`), which is a separate right.
    """
    probes: dict[str, Callable[[ObservedDevice], str]] = {
        "mig": lambda device: _mig(inventory, device, no_mig_device),
        "energy_counter": lambda device: _energy_counter(inventory, device),
        "clock_lock": lambda device: _clock_lock(inventory, device, not_root),
        "power_limit": lambda device: _power_limit(inventory, device, not_root),
        "gpm": lambda device: _gpm(inventory, device),
        "events": lambda device: _events(inventory, device),
        "persistence": lambda device: persistence_reason(inventory, device),
    }
    found = {}
    for device in devices:
        found[device.device] = {name: _guarded(probe, device) for name, probe in probes.items()}
    return Capabilities(found, {"root": not_root} if devices else {})


def _guarded(probe: Callable[[ObservedDevice], str], device: ObservedDevice) -> str:
    try:
        return probe(device)
    except DeviceError as error:
        return str(error)


def _mig(inventory: Inventory, device: ObservedDevice, no_mig_device: str) -> str:
    if not device.mig_capable:
        return f"{device.type} is not MIG capable. Remedy: none needed, it is one slice"
    if not inventory.has_symbol(PLACEMENT_SYMBOL):
        return OLD.format(version=inventory.driver_version(), symbol=PLACEMENT_SYMBOL, branch="R470")
    if inventory.virtualization(device.device) == "vgpu":
        return VGPU
    if no_mig_device:
        return no_mig_device
    if not device.mig_current and device.mig_pending:
        return (
            "MIG mode is on, but waits for a reset of the GPU. Remedy: stop whatever uses it, also DCGM and "
            f"persistenced, then nvidia-smi --gpu-reset -i {device.uuid}"
        )
    if not device.mig_current:
        return f"MIG mode is off. Remedy: set mig_mode = enable, or nvidia-smi -i {device.uuid} -mig 1"
    if not device.mig_pending:
        return f"MIG mode ends with the next reset. Remedy: nvidia-smi -i {device.uuid} -mig 1"
    return ""


def _energy_counter(inventory: Inventory, device: ObservedDevice) -> str:
    if inventory.energy_j(device.device) is not None:
        return ""
    if inventory.power_w(device.device) is not None:
        return f"{device.type} has none. Remedy: none needed, its power is integrated instead"
    return f"{device.type} has none, and no power reading either. Remedy: none, its energy stays unknown"


def _clock_lock(inventory: Inventory, device: ObservedDevice, not_root: str) -> str:
    for symbol in ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"):
        if not inventory.has_symbol(symbol):
            return OLD.format(version=inventory.driver_version(), symbol=symbol, branch="R418")
    if inventory.architecture(device.device) < ARCHITECTURE_VOLTA:
        return f"{device.type} is older than Volta. Remedy: none, its clock stays as it is"
    if inventory.virtualization(device.device) == "vgpu":
        return VGPU
    if not inventory.clocks_supported_mhz(device.device):
        return f"{device.type} lists no clocks to choose from. Remedy: none, its clock stays as it is"
    return not_root


def _power_limit(inventory: Inventory, device: ObservedDevice, not_root: str) -> str:
    limits = inventory.power_limits(device.device)
    if limits is None or limits.min_w >= limits.max_w:
        return f"the limit of {device.type} cannot be changed. Remedy: none, it stays as it is"
    if inventory.virtualization(device.device) == "vgpu":
        return VGPU
    return not_root


def persistence_reason(inventory: Inventory, device: ObservedDevice) -> str:
    """Reason why locks, limits and the energy counter of a GPU may be gone at any time; empty where they stay.

    Raises:
        DeviceError: it does not answer.
    """
    if inventory.persistence_mode(device.device) is not False:
        return ""
    return (
        "persistence mode is off: clocks, limits and the energy counter are lost while no process uses the GPU. "
        f"Remedy: nvidia-smi -i {device.uuid} -pm 1, or systemctl enable --now nvidia-persistenced"
    )


def _gpm(inventory: Inventory, device: ObservedDevice) -> str:
    if inventory.gpm_supported(device.device):
        return ""
    return f"{device.type} or its driver has none (Hopper, R520). Remedy: dcgm_exporter_url, or activity is Triton's"


def _events(inventory: Inventory, device: ObservedDevice) -> str:
    if inventory.event_types(device.device) & XID_EVENT:
        return ""
    return "the driver reports no Xids. Remedy: none, a lost GPU is noticed by polling"
