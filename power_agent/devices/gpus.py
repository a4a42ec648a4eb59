"""GPUs of a node behind pynvml: open, list, name; read energy, power and clocks; lock clocks, set power limits.

A GPU is identified by its UUID. Its name `<node>/gpu<i>` is from its first sight and is never given to another GPU: a
driver that is loaded again without a broken GPU renumbers the others. All slices of a GPU share its readings and
settings. A reading that a device lacks is None (or empty), never an error: a P4 has no energy counter, a vGPU guest no
clocks. Setters raise. Settings outlive this process, and clocks have no getter: a caller of a setter must hold a lease
and a journal entry. `inventory` adds the MIG slices.

A GPU that a process has open cannot be reset, and NVML releases only all GPUs at once. `let_go` ends the session and
begins another, in which the other GPUs are attached at their next use. NVML attaches a GPU with its first handle: by
PCI address (or index) that GPU alone, by UUID possibly others too [NVML API, "Device Queries"]. Not seen on
hardware."""

import contextlib
import ctypes
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import pynvml

from power_agent.devices.errors import (
    DeviceError,
    DeviceReleased,
    DeviceUnsupported,
    DriverUnavailable,
    SliceMissing,
    translate_nvml_errors,
)
from power_agent.devices.nvml_words import (
    CLOCK_EVENT_REASONS,
    RECOVERY_ACTIONS,
    VALUE_FIELDS,
    VIRTUALIZATION,
    device_type_name,
)
from power_agent.devices.session import Session

T = TypeVar("T")
D = TypeVar("D")
ACTIVE_MAX: Final = 2.0  # of a busy share: a little above 1 is measured, far above is not a value
MEBIBYTE: Final = 2**20
QUIET_MAX_S: Final = 3.0  # how long calls in flight may keep the session from being ended
DRIVER_MODULE: Final = Path("/sys/module/nvidia")


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a GPU is: its PCI address, the N of /dev/nvidiaN and NVML's index; each of it as far as it is known."""

    bus_id: str = ""
    minor: int | None = None
    index: int | None = None


class Gpus:
    """GPUs of one node: lifecycle, identity, readings, settings. `lost` says which GPUs do not answer, and why."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.is_open = False  # whether NVML is initialised
        self._handles: dict[str, Any] = {}  # by UUID
        self._uuids: dict[str, str] = {}  # by device, never forgotten
        self._places: dict[str, Place] = {}  # by device, of this driver load
        self._released: set[str] = set()
        self.lost: dict[str, DeviceError] = {}
        self.session = Session()
        self.before_closing: list[Callable[[], None]] = []
        """Called before NVML is shut down, to free what belongs to its session."""

    # --- lifecycle ---

    @property
    def released(self) -> frozenset[str]:
        """Names of the GPUs that were let go of."""
        return frozenset(self._released)

    def open(self) -> None:
        """Initialise NVML, also for a driver that was loaded again; lets go of nothing any more.

        Raises:
            DriverUnavailable: there is no driver; may be called again after that.
            DeviceBusy: a call has not returned.
        """
        with self.session.change(QUIET_MAX_S):
            self._released.clear()
            self._places.clear()
            self._begin()

    def resume(self) -> None:
        """Initialise NVML again after a `let_go` that could not; raises as `open` does."""
        with self.session.change(QUIET_MAX_S):
            self._begin()

    def close(self) -> None:
        """Shut NVML down; locks and limits stay as they are."""
        if self.is_open:
            self.is_open = False
            with translate_nvml_errors(self._node, "shut NVML down"):
                pynvml.nvmlShutdown()

    def let_go(self, device: str) -> None:
        """Let go of a GPU, so that it can be reset: it is not touched again before `take_back`.

        Raises:
            DeviceBusy: a call has not returned; nothing was changed.
            DriverUnavailable: NVML is shut down, and could not be initialised again: `resume`.
        """
        with self.session.change(QUIET_MAX_S):
            self._released.add(device)
            self._begin()

    def take_back(self, device: str) -> None:
        """Use a GPU again that was let go of; it is attached with its next call."""
        self._released.discard(device)

    def place(self, device: str) -> Place:
        """Where a GPU is, as it was last seen; a place without an address when it never answered."""
        return self._places.get(device, Place())

    def _begin(self) -> None:
        """Begin a session, after the end of the one before: NVML counts both, and is shut down by the last end."""
        if self.is_open:
            for free in self.before_closing:
                free()
            with contextlib.suppress(DeviceError):  # of a driver that is gone
                self.close()
        self._forget_handles()
        with translate_nvml_errors(self._node, "initialise NVML"):
            pynvml.nvmlInit()
        self.is_open = True

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

    def remember_names(self, uuids: Mapping[str, str], places: Mapping[str, Place] = MappingProxyType({})) -> None:
        """Remember names of GPUs, each with its UUID, that an earlier process gave; before the devices are listed.

        places: where they are, in this driver load.
        """
        self._uuids |= uuids
        self._places |= places

    def list_devices(self) -> tuple[ObservedDevice, ...]:
        """List every GPU that answers; one that does not is named in `lost` and does not hide the others."""
        with translate_nvml_errors(self._node, "list devices"):
            count = pynvml.nvmlDeviceGetCount()
        found: list[ObservedDevice] = []
        silent: dict[int, DeviceError] = {}
        lost: dict[str, DeviceError] = {}
        passed = {self.place(device).index for device in self._released}
        for index in range(count):
            if index in passed:
                continue
            name = ""
            try:
                with translate_nvml_errors(f"{self._node}: GPU at index {index}", "open it"):
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                    name = self._name(index, uuid)
                    self._handles[uuid] = handle
                    self._places[name] = _place(index, handle)
                    found.append(self._observe(name, index, handle))
            except DriverUnavailable:
                raise  # gone for all of them
            except DeviceError as error:
                if name:
                    lost[name] = error
                else:
                    silent[index] = error
        self.lost = lost | self._named({device.device for device in found} | set(lost) | self._released, silent)
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
            self._places[name] = Place(index=index)
        return named

    def _is_unlisted(self, device: str) -> bool:
        try:
            self._by_uuid(self._uuids[device])
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
        mode = self._optional(device, "read the virtualization mode", pynvml.nvmlDeviceGetVirtualizationMode, 0)
        return VIRTUALIZATION.get(mode, f"mode {mode}")

    def persistence_mode(self, device: str) -> bool | None:
        """Whether the driver stays loaded while no process uses the GPU; None where it does not tell (Windows)."""
        mode = self._optional(device, "read its persistence mode", pynvml.nvmlDeviceGetPersistenceMode, None)
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
        return self._milli(device, "read the energy counter", pynvml.nvmlDeviceGetTotalEnergyConsumption)

    def power_w(self, device: str) -> float | None:
        """Power now where the driver can say so (field 186), else its average over up to a second."""
        instant_mw = self._field(device, pynvml.NVML_FI_DEV_POWER_INSTANT)
        if instant_mw is not None:
            return instant_mw * 1e-3
        return self._milli(device, "read power", pynvml.nvmlDeviceGetPowerUsage)

    def power_limit_w(self, device: str) -> float | None:
        """Power limit in force: the lowest of what was set and what the board enforces."""
        return self._milli(device, "read the power limit", pynvml.nvmlDeviceGetEnforcedPowerLimit)

    def power_limit_set_w(self, device: str) -> float | None:
        """Power limit that was set, or the default: what the board enforces for now may be lower."""
        return self._milli(device, "read the set power limit", pynvml.nvmlDeviceGetPowerManagementLimit)

    def power_limits(self, device: str) -> PowerLimits | None:
        """Power limits that may be set, and the default; None where the limit cannot be changed."""

        def read(handle: Any) -> PowerLimits:
            least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            default = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
            return PowerLimits(least * 1e-3, default * 1e-3, most * 1e-3)

        return self._optional(device, "read the range of power limits", read, None)

    def set_power_limit_w(self, device: str, limit_w: float) -> None:
        """Set the power limit; it outlives this process and is lost when the driver unloads: hold a journal entry."""
        with translate_nvml_errors(device, f"set the power limit to {limit_w:g} W"):
            pynvml.nvmlDeviceSetPowerManagementLimit(self._handle(device), round(limit_w * 1e3))

    def temperature_c(self, device: str) -> float | None:
        """Temperature of the GPU die."""
        read, kind = pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
        found = self._optional(device, "read the temperature", read, None, kind)
        return None if found is None else float(found)

    # --- clocks ---

    def clock_mhz(self, device: str) -> int:
        """SM clock now; 0 where the device does not tell."""
        return self._clock(device, pynvml.NVML_CLOCK_SM, "SM")

    def default_application_clock_mhz(self, device: str) -> int:
        """Application clock of the SMs that the board comes with; 0 where driver or device has none (CUDA 14)."""
        read, kind = pynvml.nvmlDeviceGetDefaultApplicationsClock, pynvml.NVML_CLOCK_GRAPHICS
        return int(self._optional(device, "read its default application clock", read, 0, kind))

    def memory_clock_mhz(self, device: str) -> int:
        """Memory clock now; 0 where the device does not tell."""
        return self._clock(device, pynvml.NVML_CLOCK_MEM, "memory")

    def memory_clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        """Supported memory clocks, ascending; empty where the device has no choice."""
        read = pynvml.nvmlDeviceGetSupportedMemoryClocks
        return tuple(sorted(self._optional(device, "list supported memory clocks", read, ())))

    def clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        """Supported SM clocks at the highest memory clock, ascending; empty where none can be chosen."""
        memory_mhz = self.memory_clocks_supported_mhz(device)
        if not memory_mhz:
            return ()
        read = pynvml.nvmlDeviceGetSupportedGraphicsClocks
        return tuple(sorted(self._optional(device, "list supported clocks", read, (), memory_mhz[-1])))

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

        def read(handle: Any) -> int:
            try:
                return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
            except pynvml.NVMLError_FunctionNotFound:  # their name before R535
                return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

        bits = self._optional(device, "read clock event reasons", read, 0)
        return tuple(name for bit, name in CLOCK_EVENT_REASONS.items() if bits & bit)

    # --- events and activity: whether there are any ---

    def event_types(self, device: str) -> int:
        """Event types that the device can report, as bits of nvmlEventType*; 0 where it reports none."""
        return int(self._optional(device, "list event types", pynvml.nvmlDeviceGetSupportedEventTypes, 0))

    def register_events(self, device: str, types: int, events: Any) -> None:
        """Register an event set for events of this GPU."""
        with translate_nvml_errors(device, "register for events"):
            pynvml.nvmlDeviceRegisterEvents(self._handle(device), types, events)

    def recovery_action(self, device: str) -> str | None:
        """Recovery action that the GPU needs before it can be used again; empty: none. None before R565: unknown."""
        action = self._field(device, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        return None if action is None else RECOVERY_ACTIONS.get(int(action), "")

    def gpm_supported(self, device: str) -> bool:
        """Whether the GPU counts activity per GPU instance (GPM: Hopper and newer)."""
        found = self._optional(device, "ask for GPM", pynvml.nvmlGpmQueryDeviceSupport, None)
        return found is not None and bool(found.isSupportedDevice)

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
        share = float(found.value) / 100.0
        if found.nvmlReturn != pynvml.NVML_SUCCESS or not 0 <= share <= ACTIVE_MAX:
            return None
        return min(1.0, share)

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

    def uuid(self, device: str) -> str:
        """UUID of a GPU by its name on this node."""
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
        if device in self._released:
            raise DeviceReleased(f"{device}: this agent has let go of it until its reset", remedy="reset it")
        uuid = self._uuids.get(device) or self.uuid(device)
        if uuid not in self._handles:
            self._handles[uuid] = self._attach(device, uuid)
        return self._handles[uuid]

    def _attach(self, device: str, uuid: str) -> Any:
        bus_id = self.place(device).bus_id
        if bus_id:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            if str(pynvml.nvmlDeviceGetUUID(handle)) == uuid:
                return handle
        return self._by_uuid(uuid)

    def _by_uuid(self, uuid: str) -> Any:
        """Handle of a GPU or MIG device. NVML's own search might attach a GPU that was let go of."""
        if not self._released:
            return pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for device in self._places:
            with contextlib.suppress(pynvml.NVMLError, DeviceError):
                gpu = self._handle(device)
                for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
                    with contextlib.suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
                        found = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, position)
                        if str(pynvml.nvmlDeviceGetUUID(found)) == uuid:
                            return found
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

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

    def _optional(self, device: str, verb: str, read: Callable[..., T], lacking: D, *args: Any) -> T | D:
        """What `read` makes of the GPU's handle and `args`; `lacking` where this device or driver has no such thing."""
        try:
            with translate_nvml_errors(device, verb):
                return read(self._handle(device), *args)
        except DeviceUnsupported:
            return lacking

    def _milli(self, device: str, verb: str, read: Callable[[Any], int]) -> float | None:
        """A reading in thousandths of a watt or joule, in whole ones."""
        found = self._optional(device, verb, read, None)
        return None if found is None else found * 1e-3

    def _clock(self, device: str, domain: int, name: str) -> int:
        return int(self._optional(device, f"read the {name} clock", pynvml.nvmlDeviceGetClockInfo, 0, domain))

    def _field(self, device: str, field: int) -> float | None:
        """One of nvmlDeviceGetFieldValues; None where this device or driver has no such field."""
        read = pynvml.nvmlDeviceGetFieldValues
        (found,) = self._optional(device, f"read field {field}", read, (None,), [field])
        if found is None or found.nvmlReturn != pynvml.NVML_SUCCESS:
            return None  # a lost GPU fails the call itself
        where = VALUE_FIELDS.get(found.valueType)
        return None if where is None else float(getattr(found.value, where))


def _place(index: int, handle: Any) -> Place:
    bus_id, minor = "", None
    with contextlib.suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        bus_id = str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    return Place(bus_id, minor, index)


def handle_address(handle: Any) -> int:
    """Address behind an opaque NVML handle."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def driver_load_id(marker: Path = DRIVER_MODULE) -> str:
    """Identity of a driver load: GPU instances, locks and the energy counter do not survive a change of it.

    `marker` is the driver's module in sysfs on hardware, and `<node dir>/driver_load_id` of a simulated node. Sysfs
    gives each load of a module an inode number that no other had since the boot, equal in every container. The times of
    that inode say only when it was first looked at. (Device nodes outlive the driver, and are new in every container.)
    `srcversion` names the build.
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
