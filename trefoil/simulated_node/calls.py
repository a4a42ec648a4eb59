"""NVML's C symbols over the driver: one row per symbol, plain JSON values in and out.

A symbol without a row is a symbol that this driver lacks. Structures cross as dicts of their field names, handles as
integers, arrays as lists; power in milliwatts and energy in millijoules, as NVML has them. A call returns its one out
value, a tuple of several, or None.
"""

from collections.abc import Callable
from typing import Any, Final

from trefoil.simulated_node.calls_mig import MIG_CALLS
from trefoil.simulated_node.driver import Driver
from trefoil.simulated_node.energy import settled_c
from trefoil.simulated_node.gpu_state import ComputeInstance, DriverProcess, Gpu, Nvml, NvmlFault
from trefoil.simulated_node.monitoring import XID_EVENT

MEBIBYTE: Final = 2**20
RESERVED_MIB: Final = 600  # what the driver itself keeps of a GPU's memory

CLOCK_KINDS: Final = 4
CLOCK_MEMORY: Final = 2
ADA_ARCHITECTURE: Final = 8
FIELD_ENERGY, FIELD_ENERGY_SINCE_LOAD = 83, 191
FIELD_POWER_AVERAGE, FIELD_POWER_INSTANT, FIELD_POWER_LIMIT = 185, 186, 190
FIELD_RECOVERY_ACTION, RECOVERY_ACTION_SINCE = 230, 565  # and the driver branch that has it
IDLE, LOCKED, POWER_CAP, THERMAL = 0x1, 0x2, 0x4, 0x20  # clock event reasons

Call = Callable[..., Any]


# --- system and identity ---


def init(driver: Driver, *_flags: int) -> None:
    """Answer nvmlInitWithFlags: forget what `Driver.stale_listing` kept listed, as a new session does."""
    driver.clients.open()
    for gpu in driver.gpus:
        gpu.stale_listed.clear()


def handle_by_index(driver: Driver, index: int) -> int:
    """Answer nvmlDeviceGetHandleByIndex_v2."""
    if index >= len(driver.gpus):
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    driver.clients.attach(index)
    return driver.handle(_present(driver.gpus[index]))


def handle_by_uuid(driver: Driver, wanted: str) -> int:
    """Answer nvmlDeviceGetHandleByUUID."""
    target = driver.by_uuid(wanted)
    for index in range(target.gpu.index + 1):
        driver.clients.attach(index)
    _present(target.gpu)
    return driver.handle(target)


def handle_by_pci(driver: Driver, bus_id: str) -> int:
    """Answer nvmlDeviceGetHandleByPciBusId_v2."""
    for gpu in driver.gpus:
        pci = _pci(gpu)
        if bus_id.upper() in (pci["busId"], pci["busIdLegacy"]):
            driver.clients.attach(gpu.index)
            return driver.handle(_present(gpu))
    raise NvmlFault(Nvml.NOT_FOUND)


def _present(gpu: Gpu) -> Gpu:
    if gpu.lost:
        raise NvmlFault(Nvml.GPU_IS_LOST)
    return gpu


def name(driver: Driver, handle: int) -> str:
    """Answer nvmlDeviceGetName."""
    target = driver.device(handle)
    nvml_name = target.gpu.model.nvml_name
    return nvml_name if isinstance(target, Gpu) else f"{nvml_name} MIG {target.gi.profile.name}"


def device_uuid(driver: Driver, handle: int) -> str:
    """Answer nvmlDeviceGetUUID."""
    target = driver.device(handle)
    return target.uuid if isinstance(target, Gpu) else target.mig_uuid


def index(driver: Driver, handle: int) -> int:
    """Answer nvmlDeviceGetIndex."""
    target = driver.device(handle)
    return target.index if isinstance(target, Gpu) else list(target.gpu.computes()).index(target)


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


def memory_info(driver: Driver, handle: int) -> dict[str, int]:
    """Answer nvmlDeviceGetMemoryInfo: bytes of a GPU or of a MIG device."""
    target = driver.device(handle)
    if isinstance(target, Gpu):
        total_mib, processes = target.model.memory_mib, list(target.processes.values())
    else:
        total_mib, processes = target.gi.profile.memory_mib, _processes_of(target)
    reserved_mib = RESERVED_MIB if isinstance(target, Gpu) else 0
    used_mib = min(reserved_mib + sum(process.memory_mib for process in processes), total_mib)
    info = {"total": total_mib, "reserved": reserved_mib, "used": used_mib, "free": total_mib - used_mib}
    return {field: mib * MEBIBYTE for field, mib in info.items()}


# --- processes ---


def _processes_of(compute: ComputeInstance) -> list[DriverProcess]:
    return [process for process in compute.gpu.processes.values() if process.compute is compute]


def running_processes(driver: Driver, handle: int) -> list[dict[str, int]]:
    """Answer nvmlDeviceGetComputeRunningProcesses_v3: of a GPU or of a MIG device."""
    target = driver.device(handle)
    processes = list(target.processes.values()) if isinstance(target, Gpu) else _processes_of(target)
    none = 0xFFFFFFFF
    return [
        {
            "pid": process.pid,
            "usedGpuMemory": process.memory_mib * MEBIBYTE,
            "gpuInstanceId": process.compute.gi.id if process.compute else none,
            "computeInstanceId": process.compute.id if process.compute else none,
        }
        for process in processes
    ]


def set_persistence(driver: Driver, handle: int, mode: int) -> None:
    """Answer nvmlDeviceSetPersistenceMode."""
    driver.gpu(handle).persistence = bool(mode)


# --- power, energy, clocks and sensors: of physical GPUs only ---


def to_milli(value: float) -> int:
    """Watts to milliwatts, as NVML has them."""
    return round(value * 1e3)


def temperature(gpu: Gpu, _sensor: int) -> int:
    """Answer nvmlDeviceGetTemperature: whole degrees Celsius."""
    return round(settled_c(gpu.power_w) if gpu.temperature_c is None else gpu.temperature_c)


def energy(gpu: Gpu) -> int:
    """Answer nvmlDeviceGetTotalEnergyConsumption [mJ]."""
    if not gpu.model.energy_counter:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return gpu.energy_mj


def _value_or(watts: float | None, otherwise_w: float) -> float:
    return otherwise_w if watts is None else watts


def field_values(driver: Driver, handle: int, field_ids: list[int]) -> list[dict[str, int]]:
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
    return [{"nvmlReturn": 0, "value": known[i]} if i in known else missing for i in field_ids]


# --- clocks ---


def clock_info(driver: Driver, handle: int, kind: int) -> int:
    """Answer nvmlDeviceGetClockInfo [MHz]."""
    gpu = driver.gpu(handle)
    if kind >= CLOCK_KINDS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return gpu.model.memory_clocks_mhz[0] if kind == CLOCK_MEMORY else gpu.clock_at_mhz(driver.now_s)


def default_application_clock(gpu: Gpu, kind: int) -> int:
    """Answer nvmlDeviceGetDefaultApplicationsClock [MHz]; NOT_SUPPORTED where the board has none."""
    if kind == CLOCK_MEMORY:
        return gpu.model.memory_clocks_mhz[0]
    if gpu.application_mhz is None:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return gpu.application_mhz


def graphics_clocks(gpu: Gpu, memory_mhz: int) -> list[int]:
    """Answer nvmlDeviceGetSupportedGraphicsClocks: descending [MHz]."""
    if memory_mhz not in gpu.model.memory_clocks_mhz:
        raise NvmlFault(Nvml.NOT_FOUND)
    return list(reversed(gpu.model.clocks_mhz))


def event_reasons(driver: Driver, handle: int) -> int:
    """Answer nvmlDeviceGetCurrentClocksEventReasons: bits of what holds the clock."""
    gpu = driver.gpu(handle)
    bits = {
        IDLE: not gpu.processes,
        LOCKED: gpu.lock_mhz(driver.now_s) is not None or bool(gpu.application_mhz and gpu.processes),
        POWER_CAP: gpu.capped or gpu.throttle_mhz is not None,
        THERMAL: gpu.thermal_mhz is not None,
    }
    return sum(bit for bit, holds in bits.items() if holds)


# --- events ---


def _current(driver: Driver, handle: int) -> int:
    if driver.is_earlier_load(handle):
        raise NvmlFault(Nvml.UNINITIALIZED)
    return handle


def register_events(driver: Driver, handle: int, mask: int, event_set: int) -> None:
    """Answer nvmlDeviceRegisterEvents."""
    driver.events.register(_current(driver, event_set), driver.gpu(handle).index, mask)


def event_wait(driver: Driver, event_set: int, _timeout_ms: int) -> dict[str, int]:
    """Answer nvmlEventSetWait_v2: TIMEOUT at once where hardware would block: no call can wait inside a driver
    model."""
    event = driver.events.pop(_current(driver, event_set))
    fields = {"device": event.device, "eventType": event.kind, "eventData": event.data}
    return {**fields, "gpuInstanceId": event.gi_id, "computeInstanceId": 0xFFFFFFFF}


# --- performance monitoring ---


def _monitored(driver: Driver, handle: int) -> Gpu:
    gpu = driver.gpu(handle)
    if not gpu.model.gpm:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return gpu


def gpm_sample(driver: Driver, handle: int, sample: int) -> None:
    """Answer nvmlGpmSampleGet."""
    driver.gpm.record(_current(driver, sample), _monitored(driver, handle), None, driver.now_s)


def gpm_mig_sample(driver: Driver, handle: int, gi_id: int, sample: int) -> None:
    """Answer nvmlGpmMigSampleGet."""
    gpu = _monitored(driver, handle)
    if not gpu.mig_current:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    if gi_id not in gpu.instances:
        raise NvmlFault(Nvml.NOT_FOUND)
    driver.gpm.record(_current(driver, sample), gpu, gpu.instances[gi_id], driver.now_s)


# --- the table ---


def _of_gpu(answer: Call) -> Call:
    """A call about a physical GPU, whose handle comes first; the driver has no part in it."""
    return lambda driver, handle, *args: answer(driver.gpu(handle), *args)


def _out_values(call: Call) -> Callable[..., list[Any]]:
    def listed(*args: Any) -> list[Any]:
        value = call(*args)
        return [] if value is None else list(value) if isinstance(value, tuple) else [value]

    return listed


_CALLS: Final[dict[str, Call]] = {
    "nvmlInitWithFlags": init,
    "nvmlShutdown": lambda driver: driver.clients.close(),
    "nvmlSystemGetDriverVersion": lambda driver: driver.version,
    "nvmlDeviceGetCount_v2": lambda driver: len(driver.gpus),
    "nvmlDeviceGetHandleByIndex_v2": handle_by_index,
    "nvmlDeviceGetHandleByUUID": handle_by_uuid,
    "nvmlDeviceGetHandleByPciBusId_v2": handle_by_pci,
    "nvmlDeviceGetName": name,
    "nvmlDeviceGetUUID": device_uuid,
    "nvmlDeviceGetIndex": index,
    "nvmlDeviceGetMinorNumber": _of_gpu(lambda gpu: gpu.index),
    "nvmlDeviceGetArchitecture": _of_gpu(lambda gpu: gpu.model.architecture),
    "nvmlDeviceGetCudaComputeCapability": _of_gpu(lambda gpu: gpu.model.compute_capability),
    "nvmlDeviceGetPciInfo_v3": _of_gpu(_pci),
    "nvmlDeviceGetMemoryInfo": memory_info,
    "nvmlDeviceGetMemoryInfo_v2": memory_info,
    "nvmlDeviceGetPersistenceMode": _of_gpu(lambda gpu: int(gpu.persistence)),
    "nvmlDeviceSetPersistenceMode": set_persistence,
    "nvmlDeviceGetVirtualizationMode": _of_gpu(lambda _gpu: 0),
    "nvmlDeviceGetComputeRunningProcesses_v3": running_processes,
    "nvmlDeviceGetTemperature": _of_gpu(temperature),
    "nvmlDeviceGetTotalEnergyConsumption": _of_gpu(energy),
    "nvmlDeviceGetPowerUsage": _of_gpu(lambda gpu: to_milli(gpu.power_w)),
    "nvmlDeviceGetFieldValues": field_values,
    "nvmlDeviceGetPowerManagementLimit": _of_gpu(lambda gpu: to_milli(gpu.power_limit_w)),
    "nvmlDeviceGetEnforcedPowerLimit": _of_gpu(lambda gpu: to_milli(gpu.power_limit_w)),
    "nvmlDeviceGetPowerManagementDefaultLimit": _of_gpu(lambda gpu: to_milli(gpu.model.power_limit_w[1])),
    "nvmlDeviceGetPowerManagementLimitConstraints": _of_gpu(
        lambda gpu: (to_milli(gpu.model.power_limit_w[0]), to_milli(gpu.model.power_limit_w[2]))
    ),
    "nvmlDeviceSetPowerManagementLimit": lambda d, handle, limit_mw: d.set_power_limit(d.gpu(handle), limit_mw / 1e3),
    "nvmlDeviceGetClockInfo": clock_info,
    "nvmlDeviceGetDefaultApplicationsClock": _of_gpu(default_application_clock),
    "nvmlDeviceGetSupportedMemoryClocks": _of_gpu(lambda gpu: list(gpu.model.memory_clocks_mhz)),
    "nvmlDeviceGetSupportedGraphicsClocks": _of_gpu(graphics_clocks),
    "nvmlDeviceGetCurrentClocksEventReasons": event_reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": event_reasons,
    "nvmlDeviceSetGpuLockedClocks": lambda driver, handle, *mhz: driver.lock_clocks(driver.gpu(handle), *mhz),
    "nvmlDeviceResetGpuLockedClocks": lambda driver, handle: driver.reset_clocks(driver.gpu(handle)),
    "nvmlEventSetCreate": lambda driver: driver.events.create(driver.new_handle()),
    "nvmlEventSetFree": lambda driver, event_set: driver.events.free(_current(driver, event_set)),
    "nvmlEventSetWait_v2": event_wait,
    "nvmlDeviceRegisterEvents": register_events,
    "nvmlDeviceGetSupportedEventTypes": _of_gpu(lambda _gpu: XID_EVENT),
    "nvmlGpmQueryDeviceSupport": _of_gpu(lambda gpu: {"isSupportedDevice": int(gpu.model.gpm)}),
    "nvmlGpmSampleAlloc": lambda driver: driver.gpm.allocate(driver.new_handle()),
    "nvmlGpmSampleFree": lambda driver, sample: driver.gpm.free(_current(driver, sample)),
    "nvmlGpmSampleGet": gpm_sample,
    "nvmlGpmMigSampleGet": gpm_mig_sample,
    "nvmlGpmMetricsGet": lambda d, one, two, wanted: d.gpm.metrics(_current(d, one), _current(d, two), wanted),
    **MIG_CALLS,
}
CALLS: Final = {symbol: _out_values(call) for symbol, call in _CALLS.items()}
