"""NVML's C symbols over the driver: one row per symbol, plain JSON values in and out.

A symbol without a row is a symbol that this driver lacks. Structures cross as dicts of their field names, handles as
integers, arrays as lists; power in milliwatts and energy in millijoules, as NVML has them.
"""

from collections.abc import Callable
from typing import Any, Final

from power_agent.devices import calls_mig as mig
from power_agent.devices.driver import ComputeInstance, Driver, DriverProcess, Gpu, Nvml, NvmlFault

DRIVER_VERSION: Final = "535.161.08"
NVML_VERSION: Final = "12.535.161.08"
CUDA_VERSION: Final = 12020
MEBIBYTE: Final = 2**20
RESERVED_MIB: Final = 600  # what the driver itself keeps of a GPU's memory
CLOCK_KINDS: Final = 4
CLOCK_MEMORY: Final = 2
TEMPERATURE_AT_REST_C: Final = 30.0
TEMPERATURE_C_PER_W: Final = 0.11
FIELD_ENERGY, FIELD_POWER_AVERAGE, FIELD_POWER_INSTANT, FIELD_POWER_LIMIT = 83, 185, 186, 190

Call = Callable[..., list[Any]]


def _mw(watts: float) -> int:
    return round(watts * 1e3)


# --- system and identity ---


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
        if _pci(gpu)["busId"].lower() == bus_id.lower():
            return [driver.handle(_present(gpu))]
    raise NvmlFault(Nvml.NOT_FOUND)


def _present(gpu: Gpu) -> Gpu:
    if gpu.lost:
        raise NvmlFault(Nvml.GPU_IS_LOST)
    return gpu


def name(driver: Driver, handle: int) -> list[Any]:
    target = driver.device(handle)
    if isinstance(target, Gpu):
        return [f"NVIDIA {target.model.name}"]
    return [f"NVIDIA {target.gi.gpu.model.name} MIG {target.gi.profile.name}"]


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


def utilization(driver: Driver, handle: int) -> list[Any]:
    """Simulated only as far as MIG needs it: with MIG on it is not supported, and MIG is the point."""
    driver.gpu(handle)
    raise NvmlFault(Nvml.NOT_SUPPORTED)


# --- power, energy, clocks: physical GPUs only ---


def temperature(driver: Driver, handle: int, *_sensor: int) -> list[Any]:
    gpu = driver.gpu(handle)
    return [round(TEMPERATURE_AT_REST_C + TEMPERATURE_C_PER_W * gpu.power_w)]


def clock_info(driver: Driver, handle: int, kind: int) -> list[Any]:
    gpu = driver.gpu(handle)
    if kind >= CLOCK_KINDS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return [gpu.model.memory_clocks_mhz[0] if kind == CLOCK_MEMORY else gpu.clock_mhz]


def max_clock_info(driver: Driver, handle: int, kind: int) -> list[Any]:
    gpu = driver.gpu(handle)
    if kind >= CLOCK_KINDS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return [gpu.model.memory_clocks_mhz[0] if kind == CLOCK_MEMORY else gpu.model.clock_max_mhz]


def graphics_clocks(driver: Driver, handle: int, memory_mhz: int) -> list[Any]:
    model = driver.gpu(handle).model
    if memory_mhz not in model.memory_clocks_mhz:
        raise NvmlFault(Nvml.NOT_FOUND)
    return [list(reversed(model.clocks_mhz))]


def event_reasons(driver: Driver, handle: int) -> list[Any]:
    gpu = driver.gpu(handle)
    idle = 0x0 if gpu.processes else 0x1
    return [idle | (0x2 if gpu.locked_mhz else 0x0) | (0x4 if gpu.capped else 0x0)]


def lock_clocks(driver: Driver, handle: int, low_mhz: int, high_mhz: int) -> list[Any]:
    driver.lock_clocks(driver.gpu(handle), low_mhz, high_mhz)
    return []


def reset_clocks(driver: Driver, handle: int) -> list[Any]:
    driver.gpu(handle).locked_mhz = None
    return []


def set_power_limit(driver: Driver, handle: int, limit_mw: int) -> list[Any]:
    driver.set_power_limit(driver.gpu(handle), limit_mw / 1e3)
    return []


def field_values(driver: Driver, handle: int, field_ids: list[int]) -> list[Any]:
    gpu = driver.gpu(handle)
    known = {
        FIELD_ENERGY: gpu.energy_mj,
        FIELD_POWER_AVERAGE: _mw(gpu.power_w),
        FIELD_POWER_INSTANT: _mw(gpu.power_w),
        FIELD_POWER_LIMIT: _mw(gpu.power_limit_w),
    }
    missing = {"nvmlReturn": int(Nvml.NOT_SUPPORTED), "value": 0}
    return [[{"nvmlReturn": 0, "value": known[i]} if i in known else missing for i in field_ids]]


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
    "nvmlInitWithFlags": _nothing,
    "nvmlShutdown": _nothing,
    "nvmlSystemGetDriverVersion": _constant(DRIVER_VERSION),
    "nvmlSystemGetNVMLVersion": _constant(NVML_VERSION),
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
    "nvmlDeviceGetComputeRunningProcesses_v3": running_processes,
    "nvmlDeviceGetUtilizationRates": utilization,
    "nvmlDeviceGetTemperature": temperature,
    "nvmlDeviceGetTemperatureV": temperature,
    "nvmlDeviceGetTotalEnergyConsumption": _read(lambda gpu: gpu.energy_mj),
    "nvmlDeviceGetPowerUsage": _read(lambda gpu: _mw(gpu.power_w)),
    "nvmlDeviceGetFieldValues": field_values,
    "nvmlDeviceGetPowerManagementLimit": _read(lambda gpu: _mw(gpu.power_limit_w)),
    "nvmlDeviceGetEnforcedPowerLimit": _read(lambda gpu: _mw(gpu.power_limit_w)),
    "nvmlDeviceGetPowerManagementDefaultLimit": _read(lambda gpu: _mw(gpu.model.power_limit_w[1])),
    "nvmlDeviceGetPowerManagementLimitConstraints": _read(
        lambda gpu: (_mw(gpu.model.power_limit_w[0]), _mw(gpu.model.power_limit_w[2]))
    ),
    "nvmlDeviceSetPowerManagementLimit": set_power_limit,
    "nvmlDeviceGetClockInfo": clock_info,
    "nvmlDeviceGetMaxClockInfo": max_clock_info,
    "nvmlDeviceGetSupportedMemoryClocks": _read(lambda gpu: list(gpu.model.memory_clocks_mhz)),
    "nvmlDeviceGetSupportedGraphicsClocks": graphics_clocks,
    "nvmlDeviceGetCurrentClocksEventReasons": event_reasons,
    "nvmlDeviceSetGpuLockedClocks": lock_clocks,
    "nvmlDeviceResetGpuLockedClocks": reset_clocks,
    "nvmlDeviceGetMigMode": mig.mig_mode,
    "nvmlDeviceSetMigMode": mig.set_mig_mode,
    "nvmlDeviceGetGpuInstanceProfileInfo": mig.gi_profile_by_constant,
    "nvmlDeviceGetGpuInstanceProfileInfoV": mig.gi_profile_by_constant,
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
