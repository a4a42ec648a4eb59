"""The GPUs of a node behind pynvml: open, list, name, handle. `gauges` reads and sets them, `inventory` cuts them.

A GPU is known by its UUID; `<node>/gpu<i>` is the name it had when it was first seen, kept as long as this process
lives, because a driver that is loaded again without a broken GPU counts the others anew.
"""

import contextlib
import ctypes
from pathlib import Path
from typing import Any, Final

import pynvml

from power_agent.devices.errors import DeviceError, DeviceUnsupported, SliceMissing
from power_agent.devices.nvml_errors import translated
from power_agent.devices.observed import ObservedDevice

MEBIBYTE: Final = 2**20

# NVML's product names, without the vendor, whose device type goes by another name. Sources: `nvidia-smi -L` of the
# respective boards; drivers before R470 left "NVIDIA" out, and R450 wrote A100-SXM-80GB.
TYPE_OF_NAME: Final = {
    "H100 80GB HBM3": "H100-SXM5-80GB",
    "A100-SXM-40GB": "A100-SXM4-40GB",
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "V100-SXM2-32GB": "Tesla V100-SXM2-32GB",
    "T4": "Tesla T4",
    "P4": "Tesla P4",
}
VIRTUALIZATION: Final = {0: "none", 1: "passthrough", 2: "vgpu", 3: "vgpu_host", 4: "vsga_host"}


def type_of(nvml_name: str) -> str:
    """Name of the DeviceType of a product name; an unknown one is returned without its vendor.

    An A100 goes by the type that can be cut, whatever its MIG mode (the driver's name is the same): one whose mode is
    off is reported so and left out of plans. `A100-SXM4-40GB-nomig` is never the answer; it is for simulations.
    """
    name = " ".join(nvml_name.split()).removeprefix("NVIDIA ")
    return TYPE_OF_NAME.get(name, name)


class Gpus:
    """Lifecycle, identity and handles. `lost` says which listed GPUs do not answer, and why."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._initialised = False
        self._handles: dict[str, Any] = {}  # by UUID
        self._uuids: dict[str, str] = {}  # by device, never forgotten
        self.lost: dict[str, DeviceError] = {}

    # --- lifecycle ---

    def open(self) -> None:
        """Initialise NVML. Raises DriverUnavailable when there is no driver; may be called again after that."""
        with translated(self._node, "initialise NVML"):
            pynvml.nvmlInit()
        self._initialised = True
        self._forget_handles()

    def close(self) -> None:
        """Shut NVML down; locks and limits stay as they are."""
        if self._initialised:
            self._initialised = False
            with translated(self._node, "shut NVML down"):
                pynvml.nvmlShutdown()

    def driver_version(self) -> str:
        """As in `535.161.08`."""
        with translated(self._node, "read the driver version"):
            return str(pynvml.nvmlSystemGetDriverVersion())

    def has_symbol(self, symbol: str) -> bool:
        """Whether the driver's library exports a C function; nothing is called."""
        with translated(self._node, f"look {symbol} up"):
            try:
                pynvml._nvmlGetFunctionPointer(symbol)
            except pynvml.NVMLError_FunctionNotFound:
                return False
        return True

    # --- devices ---

    def list_devices(self) -> tuple[ObservedDevice, ...]:
        """Every GPU that answers; one that does not is named in `lost` and does not hide the others."""
        with translated(self._node, "list devices"):
            count = pynvml.nvmlDeviceGetCount()
        found = []
        lost: dict[str, DeviceError] = {}
        for index in range(count):
            name = f"{self._node}/gpu{index}"
            try:
                with translated(name, "open it"):
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                    name = self._name(index, uuid)
                    self._handles[uuid] = handle
                    found.append(self._observe(name, index, handle))
            except DeviceError as error:
                lost[name] = error
        self.lost = lost
        return tuple(found)

    def observe(self, device: str) -> ObservedDevice:
        """One GPU as it is now."""
        with translated(device, "look at it"):
            handle = self._handle(device)
            return self._observe(device, int(pynvml.nvmlDeviceGetIndex(handle)), handle)

    def uuid(self, device: str) -> str:
        """UUID of a GPU by its name on this node."""
        return self._uuid(device)

    def device_of(self, handle: Any) -> str:
        """Name of the GPU behind a handle that NVML gave (an event's); empty when it is none of ours."""
        with contextlib.suppress(pynvml.NVMLError):
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            return next((device for device, known in self._uuids.items() if known == uuid), "")
        # A GPU that fell off the bus does not tell its UUID any more, but its handle is the same pointer.
        for device, uuid in self._uuids.items():
            if uuid in self._handles and pointer(self._handles[uuid]) == pointer(handle):
                return device
        return ""

    def minor(self, device: str) -> int:
        """N of /dev/nvidiaN."""
        with translated(device, "read the minor number"):
            return int(pynvml.nvmlDeviceGetMinorNumber(self._handle(device)))

    def architecture(self, device: str) -> int:
        """NVML_DEVICE_ARCH_*: 4 Pascal, 5 Volta, 6 Turing, 7 Ampere, 9 Hopper."""
        with translated(device, "read the architecture"):
            return int(pynvml.nvmlDeviceGetArchitecture(self._handle(device)))

    def virtualization(self, device: str) -> str:
        """`none`, `passthrough`, `vgpu` (a guest), `vgpu_host`, `vsga_host`; `none` where NVML cannot tell."""
        try:
            with translated(device, "read the virtualization mode"):
                mode = int(pynvml.nvmlDeviceGetVirtualizationMode(self._handle(device)))
        except DeviceUnsupported:
            return VIRTUALIZATION[0]
        return VIRTUALIZATION.get(mode, f"mode {mode}")

    def mig_mode(self, device: str) -> tuple[bool, bool]:
        """(current, pending); both False where the GPU has no such mode."""
        with translated(device, "read its MIG mode"):
            try:
                current, pending = pynvml.nvmlDeviceGetMigMode(self._handle(device))
            except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
                return False, False
        return bool(current), bool(pending)

    # --- helpers ---

    def _forget_handles(self) -> None:
        self._handles.clear()

    def _name(self, index: int, uuid: str) -> str:
        for device, known in self._uuids.items():
            if known == uuid:
                return device
        number = index
        while f"{self._node}/gpu{number}" in self._uuids:  # another GPU had that name first
            number += 1
        self._uuids[f"{self._node}/gpu{number}"] = uuid
        return f"{self._node}/gpu{number}"

    def _uuid(self, device: str) -> str:
        if device not in self._uuids:
            node, _, name = device.rpartition("/")
            if node != self._node or not name.startswith("gpu") or not name[3:].isdigit():
                raise SliceMissing(f"{device!r} is not a GPU of {self._node}", remedy=f"'{self._node}/gpu<index>'")
            self.list_devices()
        if device not in self._uuids:
            known = ", ".join(sorted(self._uuids)) or "none"
            if device in self.lost:
                raise self.lost[device]
            raise SliceMissing(f"no GPU {device}; {self._node} has {known}", remedy="list the devices again")
        return self._uuids[device]

    def _handle(self, device: str) -> Any:
        """The GPU's handle; pynvml's own errors come out of here, so call it inside `translated`."""
        uuid = self._uuids.get(device) or self._uuid(device)
        if uuid not in self._handles:
            self._handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def _observe(self, device: str, index: int, handle: Any) -> ObservedDevice:
        try:
            current, pending = pynvml.nvmlDeviceGetMigMode(handle)
            capable = True
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            current, pending, capable = 0, 0, False
        return ObservedDevice(
            device=device,
            index=index,
            uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
            type=type_of(str(pynvml.nvmlDeviceGetName(handle))),
            memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MEBIBYTE,
            mig_capable=capable,
            mig_current=bool(current),
            mig_pending=bool(pending),
        )


def pointer(handle: Any) -> int:
    """Address behind an opaque NVML handle."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def driver_load_id(marker: Path = Path("/dev/nvidiactl")) -> str:
    """Changes with each load of the driver: GPU instances, locks and the energy counter do not survive it.

    `marker` is the driver's control node on hardware, and `<node dir>/driver_load_id` of a simulated node.
    """
    if marker.is_file():
        return marker.read_text().strip()
    try:
        status = marker.stat()
    except FileNotFoundError:
        return ""  # no driver loaded
    return f"{status.st_ino}-{status.st_ctime_ns}"


def boot_id() -> str:
    """Changes with each boot of the machine (Linux)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
