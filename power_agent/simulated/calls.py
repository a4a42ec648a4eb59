"""NVML's C symbols over the driver: one row per symbol, plain JSON values in and out.

A symbol without a row is a symbol that this driver lacks. Structures cross as dicts of their field names, handles as
integers, arrays as lists; power in milliwatts and energy in millijoules, as NVML has them.
"""

from collections.abc import Callable
from typing import Any, Final

from power_agent.simulated import calls_mig as mig
from power_agent.simulated.driver import Driver
from power_agent.simulated.energy import settled_c
from power_agent.simulated.gpu_state import ComputeInstance, DriverProcess, Gpu, Nvml, NvmlFault
from power_agent.simulated.monitoring import XID_EVENT

MEBIBYTE: Final = 2**20
RESERVED_MIB: Final = 600  # what the driver itself keeps of a GPU's memory

CLOCK_KINDS: Final = 4
CLOCK_MEMORY: Final = 2
ADA_ARCHITECTURE: Final = 8
FIELD_ENERGY, FIELD_ENERGY_SINCE_LOAD = 83, 191
FIELD_POWER_AVERAGE, FIELD_POWER_INSTANT, FIELD_POWER_LIMIT = 185, 186, 190
FIELD_RECOVERY_ACTION, RECOVERY_ACTION_SINCE = 230, 565  # and the driver branch that has it
IDLE, LOCKED, POWER_CAP, THERMAL = 0x1, 0x2, 0x4, 0x20  # clock event reasons

Call = Callable[..., list[Any]]


# --- system and identity ---


def init(driver: Driver, *_flags: int) -> list[Any]:
    """Answer nvmlInitWithFlags: forget what `Driver.stale_listing` kept listed, as a new session does."""
    driver.clients.open()
    for gpu in driver.gpus:
        gpu.stale_listed.clear()
    return []


def shutdown(driver: Driver) -> list[Any]:
    """Answer nvmlShutdown."""
    driver.clients.close()
    return []


def device_count(driver: Driver) -> list[Any]:
    """Answer nvmlDeviceGetCount_v2."""
    return [len(driver.gpus)]


def handle_by_index(driver: Driver, index: int) -> list[Any]:
    """Answer nvmlDeviceGetHandleByIndex_v2."""
    if index >= len(driver.gpus):
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    driver.clients.attach(index)
    return [driver.handle(_present(driver.gpus[index]))]


def handle_by_uuid(driver: Driver, wanted: str) -> list[Any]:
    """Answer nvmlDeviceGetHandleByUUID."""
    target = driver.by_uuid(wanted)
    gpu = target if isinstance(target, Gpu) else target.gi.gpu
    for index in range(gpu.index + 1):
        driver.clients.attach(index)
    _present(gpu)
    return [driver.handle(target)]


def handle_by_pci(driver: Driver, bus_id: str) -> list[Any]:
    """Answer nvmlDeviceGetHandleByPciBusId_v2."""
    for gpu in driver.gpus:
        pci = _pci(gpu)
        if bus_id.upper() in (pci["busId"], pci["busIdLegacy"]):
            driver.clients.attach(gpu.index)
            return [driver.handle(_present(gpu))]
    raise NvmlFault(Nvml.NOT_FOUND)


def _present(gpu: Gpu) -> Gpu:
    if gpu.lost:
        raise NvmlFault(Nvml.GPU_IS_LOST)
    return gpu


def name(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetName."""
    target = driver.device(handle)
    if isinstance(target, Gpu):
        return [target.model.nvml_name]
    return [f"{target.gi.gpu.model.nvml_name} MIG {target.gi.profile.name}"]


def device_uuid(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetUUID."""
    target = driver.device(handle)
    return [target.uuid if isinstance(target, Gpu) else target.mig_uuid]


def index(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetIndex."""
    target = driver.device(handle)
    return [target.index if isinstance(target, Gpu) else list(target.gi.gpu.computes()).index(target)]


def _pci(gpu: Gpu) -> dict[str, Any]:
    bus = 0x07 + gpu.index
    return {
        "busIdLegacy": f"0000:{bus:02X}:00.0",
        "busId": f"00000000:{bus:02X}:00.0",
        "domain": 0,
        "bus": bus,
        "device": 0,
        "pciDeviceId": gpu.model.pci_device_id,
        "pciSubSystemId": 0x144E10DE,
    }


def memory_info(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetMemoryInfo: bytes of a GPU or of a MIG device."""
    target = driver.device(handle)
    if isinstance(target, Gpu):
        total_mib, processes = target.model.memory_mib, list(target.processes.values())
    else:
        total_mib, processes = target.gi.profile.memory_mib, _processes_of(target)
    reserved_mib = RESERVED_MIB if isinstance(target, Gpu) else 0
    used_mib = min(reserved_mib + sum(process.memory_mib for process in processes), total_mib)
    info = {"total": total_mib, "reserved": reserved_mib, "used": used_mib, "free": total_mib - used_mib}
    return [{field: mib * MEBIBYTE for field, mib in info.items()}]


# --- processes ---


def _processes_of(compute: ComputeInstance) -> list[DriverProcess]:
    return [process for process in compute.gi.gpu.processes.values() if process.compute is compute]


def running_processes(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetComputeRunningProcesses_v3: of a GPU or of a MIG device."""
    target = driver.device(handle)
    processes = list(target.processes.values()) if isinstance(target, Gpu) else _processes_of(target)
    none = 0xFFFFFFFF
    return [
        [
            {
                "pid": process.pid,
                "usedGpuMemory": process.memory_mib * MEBIBYTE,
                "gpuInstanceId": process.compute.gi.id if process.compute else none,
                "computeInstanceId": process.compute.id if process.compute else none,
            }
            for process in processes
        ]
    ]


def set_persistence(driver: Driver, handle: int, mode: int) -> list[Any]:
    """Answer nvmlDeviceSetPersistenceMode."""
    driver.gpu(handle).persistence = bool(mode)
    return []


# --- power, energy, clocks and sensors: of physical GPUs only ---


def to_milli(value: float) -> int:
    """Watts to milliwatts, as NVML has them."""
    return round(value * 1e3)


def temperature(driver: Driver, handle: int, _sensor: int) -> list[Any]:
    """Answer nvmlDeviceGetTemperature: whole degrees Celsius."""
    gpu = driver.gpu(handle)
    return [round(settled_c(gpu.power_w) if gpu.temperature_c is None else gpu.temperature_c)]


# --- energy and power ---


def energy(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetTotalEnergyConsumption [mJ]."""
    gpu = driver.gpu(handle)
    if not gpu.model.energy_counter:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return [gpu.energy_mj]


def power_limit_bounds(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetPowerManagementLimitConstraints: least and most [mW]."""
    low_w, _, high_w = driver.gpu(handle).model.power_limit_w
    return [to_milli(low_w), to_milli(high_w)]


def set_power_limit(driver: Driver, handle: int, limit_mw: int) -> list[Any]:
    """Answer nvmlDeviceSetPowerManagementLimit [mW]."""
    driver.set_power_limit(driver.gpu(handle), limit_mw / 1e3)
    return []


def _value_or(watts: float | None, otherwise_w: float) -> float:
    return otherwise_w if watts is None else watts


def field_values(driver: Driver, handle: int, field_ids: list[int]) -> list[Any]:
    """Answer nvmlDeviceGetFieldValues: each with a return code of its own. The 1 s average came after GA100."""
    gpu = driver.gpu(handle)
    known = {
        FIELD_POWER_INSTANT: to_milli(_value_or(gpu.instant_w, gpu.power_w)),
        FIELD_POWER_LIMIT: to_milli(gpu.power_limit_w),
    }
    if gpu.model.energy_counter:
        known |= {FIELD_ENERGY: gpu.energy_mj, FIELD_ENERGY_SINCE_LOAD: gpu.energy_mj}
    if gpu.model.architecture >= ADA_ARCHITECTURE:
        known[FIELD_POWER_AVERAGE] = to_milli(_value_or(gpu.average_w, gpu.power_w))
    if int(driver.version.split(".")[0]) >= RECOVERY_ACTION_SINCE:
        known[FIELD_RECOVERY_ACTION] = gpu.recovery_action
    missing = {"nvmlReturn": int(Nvml.NOT_SUPPORTED), "value": 0}
    return [[{"nvmlReturn": 0, "value": known[i]} if i in known else missing for i in field_ids]]


# --- clocks ---


def clock_info(driver: Driver, handle: int, kind: int) -> list[Any]:
    """Answer nvmlDeviceGetClockInfo [MHz]."""
    gpu = driver.gpu(handle)
    if kind >= CLOCK_KINDS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    if kind != CLOCK_MEMORY:
        return [gpu.clock_at_mhz(driver.now_s)]
    return [gpu.model.memory_clocks_mhz[0]]


def default_application_clock(driver: Driver, handle: int, kind: int) -> list[Any]:
    """Answer nvmlDeviceGetDefaultApplicationsClock [MHz]; NOT_SUPPORTED where the board has none."""
    gpu = driver.gpu(handle)
    if kind == CLOCK_MEMORY:
        return [gpu.model.memory_clocks_mhz[0]]
    if gpu.application_mhz is None:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return [gpu.application_mhz]


def graphics_clocks(driver: Driver, handle: int, memory_mhz: int) -> list[Any]:
    """Answer nvmlDeviceGetSupportedGraphicsClocks: descending [MHz]."""
    model = driver.gpu(handle).model
    if memory_mhz not in model.memory_clocks_mhz:
        raise NvmlFault(Nvml.NOT_FOUND)
    return [list(reversed(model.clocks_mhz))]


def event_reasons(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetCurrentClocksEventReasons: bits of what holds the clock."""
    gpu = driver.gpu(handle)
    bits = {
        IDLE: not gpu.processes,
        LOCKED: gpu.lock_mhz(driver.now_s) is not None or bool(gpu.application_mhz and gpu.processes),
        POWER_CAP: gpu.capped or gpu.throttle_mhz is not None,
        THERMAL: gpu.thermal_mhz is not None,
    }
    return [sum(bit for bit, holds in bits.items() if holds)]


def lock_clocks(driver: Driver, handle: int, low_mhz: int, high_mhz: int) -> list[Any]:
    """Answer nvmlDeviceSetGpuLockedClocks."""
    driver.lock_clocks(driver.gpu(handle), low_mhz, high_mhz)
    return []


def reset_clocks(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceResetGpuLockedClocks."""
    driver.reset_clocks(driver.gpu(handle))
    return []


# --- events ---


def event_set_create(driver: Driver) -> list[Any]:
    """Answer nvmlEventSetCreate."""
    handle = driver.new_handle()
    driver.events.create(handle)
    return [handle]


def _current(driver: Driver, handle: int) -> int:
    if driver.is_earlier_load(handle):
        raise NvmlFault(Nvml.UNINITIALIZED)
    return handle


def event_set_free(driver: Driver, event_set: int) -> list[Any]:
    """Answer nvmlEventSetFree."""
    driver.events.free(_current(driver, event_set))
    return []


def register_events(driver: Driver, handle: int, mask: int, event_set: int) -> list[Any]:
    """Answer nvmlDeviceRegisterEvents."""
    driver.events.register(_current(driver, event_set), driver.gpu(handle).index, mask)
    return []


def supported_events(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetSupportedEventTypes."""
    driver.gpu(handle)
    return [XID_EVENT]


def event_wait(driver: Driver, event_set: int, _timeout_ms: int) -> list[Any]:
    """Answer nvmlEventSetWait_v2: TIMEOUT at once where hardware would block: nobody can wait inside a driver model."""
    event = driver.events.pop(_current(driver, event_set))
    fields = {"device": event.device, "eventType": event.kind, "eventData": event.data}
    return [{**fields, "gpuInstanceId": event.gi_id, "computeInstanceId": 0xFFFFFFFF}]


# --- performance monitoring ---


def _monitored(driver: Driver, handle: int) -> Gpu:
    gpu = driver.gpu(handle)
    if not gpu.model.gpm:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return gpu


def gpm_support(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlGpmQueryDeviceSupport: Hopper and newer."""
    return [{"isSupportedDevice": int(driver.gpu(handle).model.gpm)}]


def gpm_allocate(driver: Driver) -> list[Any]:
    """Answer nvmlGpmSampleAlloc."""
    handle = driver.new_handle()
    driver.gpm.allocate(handle)
    return [handle]


def gpm_free(driver: Driver, sample: int) -> list[Any]:
    """Answer nvmlGpmSampleFree."""
    driver.gpm.free(_current(driver, sample))
    return []


def gpm_sample(driver: Driver, handle: int, sample: int) -> list[Any]:
    """Answer nvmlGpmSampleGet."""
    driver.gpm.record(_current(driver, sample), _monitored(driver, handle), None, driver.now_s)
    return []


def gpm_mig_sample(driver: Driver, handle: int, gi_id: int, sample: int) -> list[Any]:
    """Answer nvmlGpmMigSampleGet."""
    gpu = _monitored(driver, handle)
    if not gpu.mig_current:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    if gi_id not in gpu.instances:
        raise NvmlFault(Nvml.NOT_FOUND)
    driver.gpm.record(_current(driver, sample), gpu, gpu.instances[gi_id], driver.now_s)
    return []


def gpm_metrics(driver: Driver, first: int, second: int, wanted: list[int]) -> list[Any]:
    """Answer nvmlGpmMetricsGet between two samples."""
    return [driver.gpm.metrics(_current(driver, first), _current(driver, second), wanted)]


# --- the table ---


def _read(pick: Callable[[Gpu], Any]) -> Call:
    """A getter on a physical GPU."""

    def call(driver: Driver, handle: int) -> list[Any]:
        value = pick(driver.gpu(handle))
        return list(value) if isinstance(value, tuple) else [value]

    return call


CALLS: Final[dict[str, Call]] = {
    "nvmlInitWithFlags": init,
    "nvmlShutdown": shutdown,
    "nvmlSystemGetDriverVersion": lambda driver: [driver.version],
    "nvmlDeviceGetCount_v2": device_count,
    "nvmlDeviceGetHandleByIndex_v2": handle_by_index,
    "nvmlDeviceGetHandleByUUID": handle_by_uuid,
    "nvmlDeviceGetHandleByPciBusId_v2": handle_by_pci,
    "nvmlDeviceGetName": name,
    "nvmlDeviceGetUUID": device_uuid,
    "nvmlDeviceGetIndex": index,
    "nvmlDeviceGetMinorNumber": _read(lambda gpu: gpu.index),
    "nvmlDeviceGetArchitecture": _read(lambda gpu: gpu.model.architecture),
    "nvmlDeviceGetCudaComputeCapability": _read(lambda gpu: gpu.model.compute_capability),
    "nvmlDeviceGetPciInfo_v3": _read(_pci),
    "nvmlDeviceGetMemoryInfo": memory_info,
    "nvmlDeviceGetMemoryInfo_v2": memory_info,
    "nvmlDeviceGetPersistenceMode": _read(lambda gpu: int(gpu.persistence)),
    "nvmlDeviceSetPersistenceMode": set_persistence,
    "nvmlDeviceGetVirtualizationMode": _read(lambda _gpu: 0),
    "nvmlDeviceGetComputeRunningProcesses_v3": running_processes,
    "nvmlDeviceGetTemperature": temperature,
    "nvmlDeviceGetTotalEnergyConsumption": energy,
    "nvmlDeviceGetPowerUsage": _read(lambda gpu: to_milli(gpu.power_w)),
    "nvmlDeviceGetFieldValues": field_values,
    "nvmlDeviceGetPowerManagementLimit": _read(lambda gpu: to_milli(gpu.power_limit_w)),
    "nvmlDeviceGetEnforcedPowerLimit": _read(lambda gpu: to_milli(gpu.power_limit_w)),
    "nvmlDeviceGetPowerManagementDefaultLimit": _read(lambda gpu: to_milli(gpu.model.power_limit_w[1])),
    "nvmlDeviceGetPowerManagementLimitConstraints": power_limit_bounds,
    "nvmlDeviceSetPowerManagementLimit": set_power_limit,
    "nvmlDeviceGetClockInfo": clock_info,
    "nvmlDeviceGetDefaultApplicationsClock": default_application_clock,
    "nvmlDeviceGetSupportedMemoryClocks": _read(lambda gpu: list(gpu.model.memory_clocks_mhz)),
    "nvmlDeviceGetSupportedGraphicsClocks": graphics_clocks,
    "nvmlDeviceGetCurrentClocksEventReasons": event_reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": event_reasons,
    "nvmlDeviceSetGpuLockedClocks": lock_clocks,
    "nvmlDeviceResetGpuLockedClocks": reset_clocks,
    "nvmlEventSetCreate": event_set_create,
    "nvmlEventSetFree": event_set_free,
    "nvmlEventSetWait_v2": event_wait,
    "nvmlDeviceRegisterEvents": register_events,
    "nvmlDeviceGetSupportedEventTypes": supported_events,
    "nvmlGpmQueryDeviceSupport": gpm_support,
    "nvmlGpmSampleAlloc": gpm_allocate,
    "nvmlGpmSampleFree": gpm_free,
    "nvmlGpmSampleGet": gpm_sample,
    "nvmlGpmMigSampleGet": gpm_mig_sample,
    "nvmlGpmMetricsGet": gpm_metrics,
    "nvmlDeviceGetMigMode": mig.mig_mode,
    "nvmlDeviceSetMigMode": mig.set_mig_mode,
    "nvmlDeviceGetGpuInstanceProfileInfo": mig.gi_profile_by_constant,
    "nvmlDeviceGetGpuInstanceProfileInfoV": mig.gi_profile_by_constant,
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV": mig.gi_profile_by_id,
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": mig.gi_placements,
    "nvmlDeviceGetGpuInstanceRemainingCapacity": mig.gi_capacity,
    "nvmlDeviceCreateGpuInstance": mig.create_gi,
    "nvmlDeviceCreateGpuInstanceWithPlacement": mig.create_gi,
    "nvmlGpuInstanceDestroy": mig.destroy_gi,
    "nvmlDeviceGetGpuInstances": mig.gis,
    "nvmlGpuInstanceGetInfo": mig.gi_info,
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": mig.ci_profile,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": mig.ci_profile,
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": mig.ci_capacity,
    "nvmlGpuInstanceCreateComputeInstance": mig.create_ci,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": mig.create_ci,
    "nvmlComputeInstanceDestroy": mig.destroy_ci,
    "nvmlGpuInstanceGetComputeInstances": mig.cis,
    "nvmlComputeInstanceGetInfo_v2": mig.ci_info,
    "nvmlDeviceGetGpuInstanceId": mig.gi_id_of,
    "nvmlDeviceGetMaxMigDeviceCount": mig.devices_max,
    "nvmlDeviceGetMigDeviceHandleByIndex": mig.mig_by_index,
}
