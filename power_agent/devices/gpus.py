"""GPUs of a node behind pynvml: open, list, name; read energy, power and clocks; lock clocks, set power limits.

A GPU is known by its UUID; `<node>/gpu<i>` is the name it had when it was first seen, and it is never another's,
because a driver that is loaded again without a broken GPU counts the others anew. All slices of a GPU share its
readings and settings. A reading that a device lacks is None (or empty), never an error: a P4 has no energy counter, a
vGPU guest no clocks. The setters raise; what they set outlives this process and, for clocks, has no getter: whoever
sets must hold a lease and a journal entry. `inventory` adds the MIG slices."""

import contextlib
import ctypes
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pynvml

from power_agent.devices.errors import (
    DeviceError,
    DeviceUnsupported,
    DriverUnavailable,
    SliceMissing,
    translate_nvml_errors,
)

MEBIBYTE: Final = 2**20
DRIVER_MODULE: Final = Path("/sys/module/nvidia")

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

CLOCK_EVENT_REASONS: Final = {
    0x1: "idle",
    0x2: "locked_or_application_clocks",
    0x4: "software_power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
# What nvmlDeviceGetFieldValues' recovery action asks for, where that is more than an application can do.
RECOVERY_ACTIONS: Final = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a reset of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a reboot of the node",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "a reset of the GPU once it is drained",
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "a reset of its bus",
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "a reboot of the system",
}
# Where NVML puts the value of a field, by its type tag (nvmlValueType_t).
VALUE_FIELDS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def device_type_name(nvml_name: str) -> str:
    """Name of the DeviceType of a product name; an unknown one is returned without its vendor.

    An A100 goes by the type that can be cut, whatever its MIG mode (the driver's name is the same): one whose mode is
    off serves whole, as `A100-SXM4-40GB-nomig`: `boards` says so.
    """
    name = " ".join(nvml_name.split()).removeprefix("NVIDIA ")
    return TYPE_OF_NAME.get(name, name)


@dataclass(frozen=True, slots=True)
class ObservedDevice:
    """One GPU as the driver reports it now."""

    device: str  # "<node>/gpu<index>"
    index: int
    uuid: str
    type: str  # name of the DeviceType, or what NVML calls a GPU that no type describes
    memory_mib: int
    mig_capable: bool
    mig_current: bool
    mig_pending: bool


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """Power limits that a GPU can be set to [W], and the one after a reset."""

    min_w: float
    default_w: float
    max_w: float


class Gpus:
    """GPUs of one node: lifecycle, identity, readings, settings. `lost` says which GPUs do not answer, and why."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._initialised = False
        self._handles: dict[str, Any] = {}  # by UUID
        self._uuids: dict[str, str] = {}  # by device, never forgotten
        self.lost: dict[str, DeviceError] = {}

    # --- lifecycle ---

    def open(self) -> None:
        """Initialise NVML. Raises DriverUnavailable when there is no driver; may be called again after that."""
        with translate_nvml_errors(self._node, "initialise NVML"):
            pynvml.nvmlInit()
        self._initialised = True
        self._forget_handles()

    def close(self) -> None:
        """Shut NVML down; locks and limits stay as they are."""
        if self._initialised:
            self._initialised = False
            with translate_nvml_errors(self._node, "shut NVML down"):
                pynvml.nvmlShutdown()

    def driver_version(self) -> str:
        """Version of the driver, as in `535.161.08`."""
        with translate_nvml_errors(self._node, "read the driver version"):
            return str(pynvml.nvmlSystemGetDriverVersion())

    def has_symbol(self, symbol: str) -> bool:
        """Whether the driver's library exports a C function; nothing is called."""
        with translate_nvml_errors(self._node, f"look {symbol} up"):
            try:
                pynvml._nvmlGetFunctionPointer(symbol)
            except pynvml.NVMLError_FunctionNotFound:
                return False
        return True

    # --- devices ---

    def remember_names(self, uuids: Mapping[str, str]) -> None:
        """Remember names of GPUs, each with its UUID, that an earlier process gave; before the devices are listed."""
        self._uuids |= uuids

    def list_devices(self) -> tuple[ObservedDevice, ...]:
        """List every GPU that answers; one that does not is named in `lost` and does not hide the others."""
        with translate_nvml_errors(self._node, "list devices"):
            count = pynvml.nvmlDeviceGetCount()
        found: list[ObservedDevice] = []
        silent: dict[int, DeviceError] = {}
        lost: dict[str, DeviceError] = {}
        for index in range(count):
            name = ""
            try:
                with translate_nvml_errors(f"{self._node}: GPU at index {index}", "open it"):
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                    name = self._name(index, uuid)
                    self._handles[uuid] = handle
                    found.append(self._observe(name, index, handle))
            except DriverUnavailable:
                raise  # gone for all of them
            except DeviceError as error:
                if name:
                    lost[name] = error
                else:
                    silent[index] = error
        self.lost = lost | self._named({device.device for device in found} | set(lost), silent)
        return tuple(found)

    def _named(self, answering: Collection[str], silent: Mapping[int, DeviceError]) -> dict[str, DeviceError]:
        """Names of GPUs that are counted but do not even tell their UUID: those of the known ones that are missing.

        Where more are missing than are counted, those that the driver does not find by their UUID are not there at all.
        """
        missing = [device for device in self._uuids if device not in answering]
        if silent and len(missing) > len(silent):
            missing.sort(key=self._is_unlisted)
        named: dict[str, DeviceError] = {}
        for index, error in silent.items():
            name = missing.pop(0) if missing else self._free_name(index, named)
            named[name] = error
        return named

    def _is_unlisted(self, device: str) -> bool:
        try:
            pynvml.nvmlDeviceGetHandleByUUID(self._uuids[device])
        except pynvml.NVMLError_NotFound:
            return True
        except pynvml.NVMLError:
            return False  # as of one that is lost
        return False

    def observe(self, device: str) -> ObservedDevice:
        """State of one GPU as the driver reports it now."""
        with translate_nvml_errors(device, "look at it"):
            handle = self._handle(device)
            return self._observe(device, int(pynvml.nvmlDeviceGetIndex(handle)), handle)

    def uuid(self, device: str) -> str:
        """UUID of a GPU by its name on this node."""
        return self._uuid(device)

    def device_of_handle(self, handle: Any) -> str:
        """Name of the GPU behind a handle that NVML gave (an event's); empty when it is none of ours."""
        with contextlib.suppress(pynvml.NVMLError):
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            return next((device for device, known in self._uuids.items() if known == uuid), "")
        # A GPU that fell off the bus does not tell its UUID any more, but its handle is the same pointer.
        for device, uuid in self._uuids.items():
            if uuid in self._handles and handle_address(self._handles[uuid]) == handle_address(handle):
                return device
        return ""

    def minor(self, device: str) -> int:
        """Minor number of a GPU: the N of /dev/nvidiaN."""
        with translate_nvml_errors(device, "read the minor number"):
            return int(pynvml.nvmlDeviceGetMinorNumber(self._handle(device)))

    def architecture(self, device: str) -> int:
        """Architecture of a GPU as NVML_DEVICE_ARCH_*: 4 Pascal, 5 Volta, 6 Turing, 7 Ampere, 9 Hopper."""
        with translate_nvml_errors(device, "read the architecture"):
            return int(pynvml.nvmlDeviceGetArchitecture(self._handle(device)))

    def virtualization(self, device: str) -> str:
        """Virtualization mode: `none` (also where NVML cannot tell), `passthrough`, `vgpu` (a guest) or a host's."""
        try:
            with translate_nvml_errors(device, "read the virtualization mode"):
                mode = int(pynvml.nvmlDeviceGetVirtualizationMode(self._handle(device)))
        except DeviceUnsupported:
            return VIRTUALIZATION[0]
        return VIRTUALIZATION.get(mode, f"mode {mode}")

    def persistence_mode(self, device: str) -> bool | None:
        """Whether the driver stays loaded while nobody uses the GPU; None where it does not tell (Windows)."""
        mode = self._read_optional(device, "read its persistence mode", pynvml.nvmlDeviceGetPersistenceMode, 1.0)
        return None if mode is None else bool(mode)

    def mig_mode(self, device: str) -> tuple[bool, bool]:
        """MIG mode as (current, pending); both False where the GPU has no such mode."""
        with translate_nvml_errors(device, "read its MIG mode"):
            try:
                current, pending = pynvml.nvmlDeviceGetMigMode(self._handle(device))
            except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
                return False, False
        return bool(current), bool(pending)

    # --- energy and power ---

    def energy_j(self, device: str) -> float | None:
        """Energy since the driver was loaded [J]; None where there is no counter. A decrease means a driver reload."""
        return self._read_optional(device, "read the energy counter", pynvml.nvmlDeviceGetTotalEnergyConsumption, 1e-3)

    def power_w(self, device: str) -> float | None:
        """Power now where the driver can say so (field 186), else its average over up to a second."""
        instant_mw = self._field(device, pynvml.NVML_FI_DEV_POWER_INSTANT)
        if instant_mw is not None:
            return instant_mw * 1e-3
        return self._read_optional(device, "read power", pynvml.nvmlDeviceGetPowerUsage, 1e-3)

    def power_limit_w(self, device: str) -> float | None:
        """Power limit in force: the lowest of what was set and what the board enforces."""
        return self._read_optional(device, "read the power limit", pynvml.nvmlDeviceGetEnforcedPowerLimit, 1e-3)

    def power_limits(self, device: str) -> PowerLimits | None:
        """Power limits that may be set, and the default; None where the limit cannot be changed."""
        try:
            with translate_nvml_errors(device, "read the range of power limits"):
                handle = self._handle(device)
                least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                default = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
        except DeviceUnsupported:
            return None
        return PowerLimits(least * 1e-3, default * 1e-3, most * 1e-3)

    def temperature_c(self, device: str) -> float | None:
        """Temperature of the GPU die."""

        def read(handle: Any) -> int:
            return int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))

        return self._read_optional(device, "read the temperature", read, 1.0)

    # --- clocks ---

    def clock_mhz(self, device: str) -> int:
        """SM clock now; 0 where the device does not tell."""
        return self._clock(device, pynvml.NVML_CLOCK_SM, "SM")

    def default_application_clock_mhz(self, device: str) -> int:
        """Application clock of the SMs that the board comes with; 0 where driver or device has none (CUDA 14)."""

        def read(handle: Any) -> int:
            return int(pynvml.nvmlDeviceGetDefaultApplicationsClock(handle, pynvml.NVML_CLOCK_GRAPHICS))

        return int(self._read_optional(device, "read its default application clock", read, 1.0) or 0)

    def memory_clock_mhz(self, device: str) -> int:
        """Memory clock now; 0 where the device does not tell."""
        return self._clock(device, pynvml.NVML_CLOCK_MEM, "memory")

    def memory_clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        """Supported memory clocks, ascending; empty where the device has no choice."""
        try:
            with translate_nvml_errors(device, "list supported memory clocks"):
                return tuple(sorted(pynvml.nvmlDeviceGetSupportedMemoryClocks(self._handle(device))))
        except DeviceUnsupported:
            return ()

    def clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        """Supported SM clocks at the highest memory clock, ascending; empty where none can be chosen."""
        memory_mhz = self.memory_clocks_supported_mhz(device)
        if not memory_mhz:
            return ()
        try:
            with translate_nvml_errors(device, "list supported clocks"):
                found = pynvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle(device), memory_mhz[-1])
                return tuple(sorted(found))
        except DeviceUnsupported:
            return ()

    def lock_clock(self, device: str, min_mhz: int, max_mhz: int) -> None:
        """Lock the SM clock; it survives this process and has no getter: hold a lease and a journal entry."""
        with translate_nvml_errors(device, f"lock clocks to {min_mhz}-{max_mhz} MHz"):
            pynvml.nvmlDeviceSetGpuLockedClocks(self._handle(device), min_mhz, max_mhz)

    def reset_clock(self, device: str) -> None:
        """Unlock the SM clock, back to the driver's own choice; idempotent."""
        with translate_nvml_errors(device, "reset locked clocks"):
            pynvml.nvmlDeviceResetGpuLockedClocks(self._handle(device))

    def clock_event_reasons(self, device: str) -> tuple[str, ...]:
        """Reasons why the clock is where it is; empty where the device does not tell."""
        try:
            with translate_nvml_errors(device, "read clock event reasons"):
                handle = self._handle(device)
                try:
                    bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
                except pynvml.NVMLError_FunctionNotFound:  # their name before R535
                    bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except DeviceUnsupported:
            return ()
        return tuple(name for bit, name in CLOCK_EVENT_REASONS.items() if bits & bit)

    # --- events and activity: whether there are any ---

    def event_types(self, device: str) -> int:
        """Event types that the device can report, as bits of nvmlEventType*; 0 where it reports none."""
        return int(
            self._read_optional(device, "list event types", pynvml.nvmlDeviceGetSupportedEventTypes, 1.0)
            or 0  # fits 2**53
        )

    def register_events(self, device: str, types: int, events: Any) -> None:
        """Register an event set for events of this GPU."""
        with translate_nvml_errors(device, "register for events"):
            pynvml.nvmlDeviceRegisterEvents(self._handle(device), types, events)

    def recovery_action(self, device: str) -> str:
        """Recovery action that the GPU needs before it can be used again (R565 and newer); empty: none."""
        action = self._field(device, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        return RECOVERY_ACTIONS.get(int(action or 0), "")

    def gpm_supported(self, device: str) -> bool:
        """Whether the GPU counts activity per GPU instance (GPM: Hopper and newer)."""

        def read(handle: Any) -> int:
            return int(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)

        return bool(self._read_optional(device, "ask for GPM", read, 1.0))

    def gpm_sample(self, device: str, gi_id: int | None) -> Any:
        """GPM sample of a GPU instance (None: of the whole GPU) at this moment; to be given to `gpm_free`."""
        with translate_nvml_errors(device, "take a GPM sample"):
            handle = self._handle(device)
            sample = pynvml.nvmlGpmSampleAlloc()
            try:
                if gi_id is None:
                    pynvml.nvmlGpmSampleGet(handle, sample)
                else:
                    pynvml.nvmlGpmMigSampleGet(handle, gi_id, sample)
            except pynvml.NVMLError:
                pynvml.nvmlGpmSampleFree(sample)
                raise
            return sample

    def gpm_sm_activity(self, device: str, before: Any, after: Any) -> float | None:
        """Mean share of multiprocessors that were busy between two samples, 0..1; None where it was not counted."""
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = 1
        query.sample1, query.sample2 = before, after
        query.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
        with translate_nvml_errors(device, "compare GPM samples"):
            pynvml.nvmlGpmMetricsGet(query)
        found = query.metrics[0]
        if found.nvmlReturn != pynvml.NVML_SUCCESS or not math.isfinite(found.value):
            return None
        return min(1.0, max(0.0, float(found.value) / 100.0))

    def gpm_free(self, sample: Any) -> None:
        """Free a GPM sample; a driver that is gone has taken it along."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlGpmSampleFree(sample)

    # --- helpers ---

    def _forget_handles(self) -> None:
        self._handles.clear()

    def _name(self, index: int, uuid: str) -> str:
        for device, known in self._uuids.items():
            if known == uuid:
                return device
        name = self._free_name(index)
        self._uuids[name] = uuid
        return name

    def _free_name(self, index: int, taken: Collection[str] = ()) -> str:
        while (name := f"{self._node}/gpu{index}") in self._uuids or name in taken:  # another GPU had that name first
            index += 1
        return name

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
        """The GPU's handle; pynvml's own errors come out of here, so call it inside `translate_nvml_errors`."""
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
            type=device_type_name(str(pynvml.nvmlDeviceGetName(handle))),
            memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MEBIBYTE,
            mig_capable=capable,
            mig_current=bool(current),
            mig_pending=bool(pending),
        )

    def _read_optional(self, device: str, verb: str, read: Callable[[Any], Any], scale: float) -> float | None:
        try:
            with translate_nvml_errors(device, verb):
                return float(read(self._handle(device))) * scale
        except DeviceUnsupported:
            return None

    def _clock(self, device: str, domain: int, name: str) -> int:
        return int(
            self._read_optional(
                device, f"read the {name} clock", lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, domain), 1.0
            )
            or 0
        )

    def _field(self, device: str, field: int) -> float | None:
        """One of nvmlDeviceGetFieldValues; None where this device or driver has no such field."""
        try:
            with translate_nvml_errors(device, f"read field {field}"):
                (found,) = pynvml.nvmlDeviceGetFieldValues(self._handle(device), [field])
        except DeviceUnsupported:
            return None
        if found.nvmlReturn != pynvml.NVML_SUCCESS:
            return None  # a lost GPU fails the call itself
        where = VALUE_FIELDS.get(found.valueType)
        return None if where is None else float(getattr(found.value, where))


def handle_address(handle: Any) -> int:
    """Address behind an opaque NVML handle."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def driver_load_id(marker: Path = DRIVER_MODULE) -> str:
    """Identity of a driver load: GPU instances, locks and the energy counter do not survive a change of it.

    `marker` is the driver's module in sysfs on hardware, and `<node dir>/driver_load_id` of a simulated node. Sysfs
    gives each load of a module an inode number that no other had since the boot, and the same one in every container;
    the times of that inode say only when it was first looked at. (Device nodes outlive the driver, and are new in every
    container.) `srcversion` names the build.
    """
    if marker.is_file():
        return marker.read_text().strip()
    try:
        number = marker.stat().st_ino
    except FileNotFoundError:
        return ""  # no driver loaded
    build = marker / "srcversion"
    return f"{number}-{build.read_text().strip()}" if build.is_file() else str(number)


def boot_id() -> str:
    """Identity of the machine's boot (Linux)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
