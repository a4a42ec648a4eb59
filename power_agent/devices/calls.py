"""NVML's C symbols over the driver: one row per symbol, plain JSON values in and out.

A symbol without a row is a symbol that this driver lacks. Structures cross as dicts of their field names, handles as
integers, arrays as lists; power in milliwatts and energy in millijoules, as NVML has them.
"""

from collections.abc import Callable
from typing import Any, Final

from power_agent.devices import calls_mig as mig
from power_agent.devices import calls_power as power
from power_agent.devices import calls_watch as watch
from power_agent.devices.driver import ComputeInstance, Driver, DriverProcess, Gpu, Nvml, NvmlFault

CUDA_VERSION: Final = 12020
MEBIBYTE: Final = 2**20
RESERVED_MIB: Final = 600  # what the driver itself keeps of a GPU's memory

Call = Callable[..., list[Any]]


# --- system and identity ---


def init(driver: Driver, *_flags: int) -> list[Any]:
    """A new session sees what is there; older ones may have been shown what was (see Driver.stale_listing)."""
    for gpu in driver.gpus:
        gpu.ghosts.clear()
    return []


def device_count(driver: Driver) -> list[Any]:
    return [len(driver.gpus)]


def handle_by_index(driver: Driver, index: int) -> list[Any]:
    if index >= len(driver.gpus):
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return [driver.handle(_present(driver.gpus[index]))]


def handle_by_uuid(driver: Driver, wanted: str) -> list[Any]:
    target = driver.by_uuid(wanted)
    _present(target if isinstance(target, Gpu) else target.gi.gpu)
    return [driver.handle(target)]


def handle_by_pci(driver: Driver, bus_id: str) -> list[Any]:
    for gpu in driver.gpus:
        pci = _pci(gpu)
        if bus_id.upper() in (pci["busId"], pci["busIdLegacy"]):
            return [driver.handle(_present(gpu))]
    raise NvmlFault(Nvml.NOT_FOUND)


def _present(gpu: Gpu) -> Gpu:
    if gpu.lost:
        raise NvmlFault(Nvml.GPU_IS_LOST)
    return gpu


def name(driver: Driver, handle: int) -> list[Any]:
    target = driver.device(handle)
    if isinstance(target, Gpu):
        return [target.model.nvml_name]
    return [f"{target.gi.gpu.model.nvml_name} MIG {target.gi.profile.name}"]


def device_uuid(driver: Driver, handle: int) -> list[Any]:
    target = driver.device(handle)
    return [target.uuid if isinstance(target, Gpu) else target.mig_uuid]


def index(driver: Driver, handle: int) -> list[Any]:
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
    driver.gpu(handle).persistence = bool(mode)
    return []


def _read(pick: Callable[[Gpu], Any]) -> Call:
    """A getter on a physical GPU."""

    def call(driver: Driver, handle: int) -> list[Any]:
        value = pick(driver.gpu(handle))
        return list(value) if isinstance(value, tuple) else [value]

    return call


def _constant(value: Any) -> Call:
    return lambda _driver: [value]


def _nothing(_driver: Driver, *_args: Any) -> list[Any]:
    return []


def is_mig_device(driver: Driver, handle: int) -> list[Any]:
    return [int(isinstance(driver.device(handle), ComputeInstance))]


CALLS: Final[dict[str, Call]] = {
    "nvmlInitWithFlags": init,
    "nvmlShutdown": _nothing,
    "nvmlSystemGetDriverVersion": lambda driver: [driver.version],
    "nvmlSystemGetNVMLVersion": lambda driver: [f"12.{driver.version}"],
    "nvmlSystemGetCudaDriverVersion": _constant(CUDA_VERSION),
    "nvmlSystemGetCudaDriverVersion_v2": _constant(CUDA_VERSION),
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
    "nvmlDeviceGetUtilizationRates": power.utilization,
    "nvmlDeviceGetTemperature": power.temperature,
    "nvmlDeviceGetTemperatureV": power.temperature,
    "nvmlDeviceGetTotalEnergyConsumption": power.energy,
    "nvmlDeviceGetPowerUsage": _read(lambda gpu: power.milli(gpu.power_w)),
    "nvmlDeviceGetFieldValues": power.field_values,
    "nvmlDeviceGetPowerManagementLimit": _read(lambda gpu: power.milli(gpu.power_limit_w)),
    "nvmlDeviceGetEnforcedPowerLimit": _read(lambda gpu: power.milli(gpu.power_limit_w)),
    "nvmlDeviceGetPowerManagementDefaultLimit": _read(lambda gpu: power.milli(gpu.model.power_limit_w[1])),
    "nvmlDeviceGetPowerManagementLimitConstraints": power.power_limit_bounds,
    "nvmlDeviceSetPowerManagementLimit": power.set_power_limit,
    "nvmlDeviceGetClockInfo": power.clock_info,
    "nvmlDeviceGetMaxClockInfo": power.max_clock_info,
    "nvmlDeviceGetSupportedMemoryClocks": _read(lambda gpu: list(gpu.model.memory_clocks_mhz)),
    "nvmlDeviceGetSupportedGraphicsClocks": power.graphics_clocks,
    "nvmlDeviceGetCurrentClocksEventReasons": power.event_reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": power.event_reasons,
    "nvmlDeviceSetGpuLockedClocks": power.lock_clocks,
    "nvmlDeviceResetGpuLockedClocks": power.reset_clocks,
    "nvmlDeviceSetMemoryLockedClocks": power.lock_memory_clocks,
    "nvmlDeviceResetMemoryLockedClocks": power.reset_memory_clocks,
    "nvmlEventSetCreate": watch.event_set_create,
    "nvmlEventSetFree": watch.event_set_free,
    "nvmlEventSetWait_v2": watch.event_wait,
    "nvmlDeviceRegisterEvents": watch.register_events,
    "nvmlDeviceGetSupportedEventTypes": watch.supported_events,
    "nvmlGpmQueryDeviceSupport": watch.gpm_support,
    "nvmlGpmSampleAlloc": watch.gpm_allocate,
    "nvmlGpmSampleFree": watch.gpm_free,
    "nvmlGpmSampleGet": watch.gpm_sample,
    "nvmlGpmMigSampleGet": watch.gpm_mig_sample,
    "nvmlGpmMetricsGet": watch.gpm_metrics,
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
    "nvmlDeviceGetGpuInstanceById": mig.gi_by_id,
    "nvmlGpuInstanceGetInfo": mig.gi_info,
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": mig.ci_profile,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": mig.ci_profile,
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": mig.ci_capacity,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": mig.ci_placements,
    "nvmlGpuInstanceCreateComputeInstance": mig.create_ci,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": mig.create_ci,
    "nvmlComputeInstanceDestroy": mig.destroy_ci,
    "nvmlGpuInstanceGetComputeInstances": mig.cis,
    "nvmlGpuInstanceGetComputeInstanceById": mig.ci_by_id,
    "nvmlComputeInstanceGetInfo_v2": mig.ci_info,
    "nvmlDeviceIsMigDeviceHandle": is_mig_device,
    "nvmlDeviceGetGpuInstanceId": mig.gi_id_of,
    "nvmlDeviceGetComputeInstanceId": mig.ci_id_of,
    "nvmlDeviceGetMaxMigDeviceCount": mig.devices_max,
    "nvmlDeviceGetMigDeviceHandleByIndex": mig.mig_by_index,
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": mig.parent_of,
    "nvmlDeviceGetAttributes_v2": mig.attributes,
}
