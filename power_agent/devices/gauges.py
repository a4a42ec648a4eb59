"""What a physical GPU measures, and the two things that can be set on it: clocks and the power limit.

All slices of a GPU share them. A gauge that a device lacks is None (or an empty list), never an error: a P4 has no
energy counter, a vGPU guest no clocks. The setters raise; what they set outlives this process and, for clocks, has no
getter: whoever sets must hold a lease and a journal entry.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, Final

import pynvml

from power_agent.devices.errors import DeviceUnsupported
from power_agent.devices.gpus import Gpus
from power_agent.devices.nvml_errors import translated
from power_agent.devices.observed import PowerLimits

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


class Gauges(Gpus):
    """Reads and sets physical GPUs by name."""

    # --- energy and power ---

    def energy_j(self, device: str) -> float | None:
        """Joules since the driver was loaded; None where there is no counter. A decrease means a driver reload."""
        return self._optional(device, "read the energy counter", pynvml.nvmlDeviceGetTotalEnergyConsumption, 1e-3)

    def power_w(self, device: str) -> float | None:
        """Watts now where the driver can say so (field 186), else its average over up to a second."""
        instant_mw = self._field(device, pynvml.NVML_FI_DEV_POWER_INSTANT)
        if instant_mw is not None:
            return instant_mw * 1e-3
        return self._optional(device, "read power", pynvml.nvmlDeviceGetPowerUsage, 1e-3)

    def power_limit_w(self, device: str) -> float | None:
        """The limit in force: the lowest of what was set and what the board enforces."""
        return self._optional(device, "read the power limit", pynvml.nvmlDeviceGetEnforcedPowerLimit, 1e-3)

    def power_limit_set_w(self, device: str) -> float | None:
        """The limit that somebody has set, or the default: what the board enforces for now may be lower."""
        return self._optional(device, "read the set power limit", pynvml.nvmlDeviceGetPowerManagementLimit, 1e-3)

    def power_limits(self, device: str) -> PowerLimits | None:
        """What may be set and what is the default; None where the limit cannot be changed."""
        try:
            with translated(device, "read the range of power limits"):
                handle = self._handle(device)
                least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                default = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
        except DeviceUnsupported:
            return None
        return PowerLimits(least * 1e-3, default * 1e-3, most * 1e-3)

    def set_power_limit_w(self, device: str, limit_w: float) -> None:
        """Survives this process; lost when the driver unloads."""
        with translated(device, f"set the power limit to {limit_w:g} W"):
            pynvml.nvmlDeviceSetPowerManagementLimit(self._handle(device), round(limit_w * 1e3))

    def temperature_c(self, device: str) -> float | None:
        """Of the GPU die."""

        def read(handle: Any) -> int:
            return int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))

        return self._optional(device, "read the temperature", read, 1.0)

    # --- clocks ---

    def clock_mhz(self, device: str) -> int:
        """The SM clock now; 0 where the device does not tell."""
        return self._clock(device, pynvml.NVML_CLOCK_SM, "SM")

    def memory_clock_mhz(self, device: str) -> int:
        """The memory clock now; 0 where the device does not tell."""
        return self._clock(device, pynvml.NVML_CLOCK_MEM, "memory")

    def memory_clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        """Ascending; empty where the device has no choice."""
        try:
            with translated(device, "list supported memory clocks"):
                return tuple(sorted(pynvml.nvmlDeviceGetSupportedMemoryClocks(self._handle(device))))
        except DeviceUnsupported:
            return ()

    def clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        """Ascending SM clocks at the highest memory clock; empty where none can be chosen."""
        memory_mhz = self.memory_clocks_supported_mhz(device)
        if not memory_mhz:
            return ()
        try:
            with translated(device, "list supported clocks"):
                found = pynvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle(device), memory_mhz[-1])
                return tuple(sorted(found))
        except DeviceUnsupported:
            return ()

    def lock_clock(self, device: str, min_mhz: int, max_mhz: int) -> None:
        """Survives this process and has no getter: whoever locks must hold a lease and a journal entry."""
        with translated(device, f"lock clocks to {min_mhz}-{max_mhz} MHz"):
            pynvml.nvmlDeviceSetGpuLockedClocks(self._handle(device), min_mhz, max_mhz)

    def reset_clock(self, device: str) -> None:
        """Back to the driver's own choice; idempotent."""
        with translated(device, "reset locked clocks"):
            pynvml.nvmlDeviceResetGpuLockedClocks(self._handle(device))

    def clock_event_reasons(self, device: str) -> tuple[str, ...]:
        """Why the clock is where it is; empty where the device does not tell."""
        try:
            with translated(device, "read clock event reasons"):
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
        """Bits of nvmlEventType* that the device can report; 0 where it reports none."""
        return int(
            self._optional(device, "list event types", pynvml.nvmlDeviceGetSupportedEventTypes, 1.0) or 0  # fits 2**53
        )

    def register_events(self, device: str, types: int, events: Any) -> None:
        """Let an event set hear of this GPU."""
        with translated(device, "register for events"):
            pynvml.nvmlDeviceRegisterEvents(self._handle(device), types, events)

    def recovery_action(self, device: str) -> str:
        """What the driver says the GPU needs before it can be used again (R565 and newer); empty: nothing."""
        action = self._field(device, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        return RECOVERY_ACTIONS.get(int(action or 0), "")

    def gpm_supported(self, device: str) -> bool:
        """Whether the GPU counts activity per GPU instance (Hopper and newer)."""

        def read(handle: Any) -> int:
            return int(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)

        return bool(self._optional(device, "ask for GPM", read, 1.0))

    def gpm_sample(self, device: str, gi_id: int | None) -> Any:
        """Counters of a GPU instance (None: of the whole GPU) at this moment; to be given to `gpm_free`."""
        with translated(device, "take a GPM sample"):
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
        with translated(device, "compare GPM samples"):
            pynvml.nvmlGpmMetricsGet(query)
        found = query.metrics[0]
        if found.nvmlReturn != pynvml.NVML_SUCCESS or not math.isfinite(found.value):
            return None
        return min(1.0, max(0.0, float(found.value) / 100.0))

    def gpm_free(self, sample: Any) -> None:
        """Give a sample's memory back; a driver that is gone has taken it along."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlGpmSampleFree(sample)

    # --- helpers ---

    def _optional(self, device: str, verb: str, read: Callable[[Any], Any], scale: float) -> float | None:
        try:
            with translated(device, verb):
                return float(read(self._handle(device))) * scale
        except DeviceUnsupported:
            return None

    def _clock(self, device: str, domain: int, name: str) -> int:
        return int(
            self._optional(
                device, f"read the {name} clock", lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, domain), 1.0
            )
            or 0
        )

    def _field(self, device: str, field: int) -> float | None:
        """One of nvmlDeviceGetFieldValues; None where this device or driver has no such field."""
        try:
            with translated(device, f"read field {field}"):
                (found,) = pynvml.nvmlDeviceGetFieldValues(self._handle(device), [field])
        except DeviceUnsupported:
            return None
        if found.nvmlReturn != pynvml.NVML_SUCCESS:
            return None  # a lost GPU fails the call itself
        where = VALUE_FIELDS.get(found.valueType)
        return None if where is None else float(getattr(found.value, where))
