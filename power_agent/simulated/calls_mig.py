"""MIG symbols over the driver: modes, GPU instances, compute instances and their devices (see `calls`)."""

from typing import Any, Final

from power_agent.simulated.driver import STALE_MIG_DEVICE, Driver
from power_agent.simulated.gpu_models import KNOWN_PROFILE_CONSTANTS, MEMORY_SLICES, GiProfile
from power_agent.simulated.gpu_state import Gpu, Nvml, NvmlFault

MIG_DEVICES_MAX: Final = MEMORY_SLICES - 1


def mig_mode(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetMigMode: current and pending mode."""
    gpu = driver.gpu(handle)
    if not gpu.model.mig_capable:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return [int(gpu.mig_current), int(gpu.mig_pending)]


def set_mig_mode(driver: Driver, handle: int, mode: int) -> list[Any]:
    """Answer nvmlDeviceSetMigMode."""
    gpu = driver.gpu(handle)
    if mode not in (0, 1):
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return [int(driver.set_mig_mode(gpu, bool(mode)))]


def _gi_profile(profile: GiProfile) -> list[Any]:
    return [
        {
            "id": profile.id,
            "isP2pSupported": 0,
            "sliceCount": profile.compute_slices,
            "instanceCount": profile.instances_max,
            "multiprocessorCount": profile.sm_count,
            "memorySizeMB": profile.memory_mib,
            "name": f"MIG {profile.name}",
        }
    ]


def gi_profile_by_constant(driver: Driver, handle: int, constant: int) -> list[Any]:
    """Answer nvmlDeviceGetGpuInstanceProfileInfo."""
    gpu = driver.gpu(handle, Nvml.INVALID_ARGUMENT)
    if not 0 <= constant < KNOWN_PROFILE_CONSTANTS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    for profile in gpu.model.profiles:
        if profile.constant == constant:
            return _gi_profile(profile)
    raise NvmlFault(Nvml.NOT_SUPPORTED)


def gi_profile_by_id(driver: Driver, handle: int, profile_id: int) -> list[Any]:
    """Answer nvmlDeviceGetGpuInstanceProfileInfoByIdV."""
    return _gi_profile(driver.profile(driver.gpu(handle, Nvml.INVALID_ARGUMENT), profile_id))


def gi_placements(driver: Driver, handle: int, profile_id: int) -> list[Any]:
    """Answer nvmlDeviceGetGpuInstancePossiblePlacements_v2: all legal placements, occupied or not, by start."""
    profile = driver.profile(driver.gpu(handle, Nvml.INVALID_ARGUMENT), profile_id)
    return [[{"start": start, "size": profile.memory_slices} for start in sorted(profile.starts)]]


def gi_capacity(driver: Driver, handle: int, profile_id: int) -> list[Any]:
    """Answer nvmlDeviceGetGpuInstanceRemainingCapacity: how many more would fit."""
    gpu = _mig_gpu(driver, handle)
    return [driver.remaining_capacity(gpu, driver.profile(gpu, profile_id))]


def _mig_gpu(driver: Driver, handle: int) -> Gpu:
    gpu = driver.gpu(handle, Nvml.INVALID_ARGUMENT)
    if not gpu.mig_current:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return gpu


def create_gi(driver: Driver, handle: int, profile_id: int, placement: list[int] | None = None) -> list[Any]:
    """Answer nvmlDeviceCreateGpuInstance."""
    gpu = driver.gpu(handle, Nvml.INVALID_ARGUMENT)
    place = (placement[0], placement[1]) if placement else None
    return [driver.handle(driver.create_gpu_instance(gpu, profile_id, place))]


def destroy_gi(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlGpuInstanceDestroy."""
    driver.destroy_gpu_instance(driver.gpu_instance(handle))
    return []


def gis(driver: Driver, handle: int, profile_id: int) -> list[Any]:
    """Answer nvmlDeviceGetGpuInstances: handles of one profile's instances, stale ones too."""
    gpu = _mig_gpu(driver, handle)
    profile = driver.profile(gpu, profile_id)
    found = [instance for _, instance in sorted(gpu.instances.items()) if instance.profile is profile]
    stale_listed = [handle for stale_id, handle in gpu.stale_listed if stale_id == profile_id]
    return [[driver.handle(instance) for instance in found] + stale_listed]


def gi_info(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlGpuInstanceGetInfo."""
    instance = driver.gpu_instance(handle)
    return [
        {
            "device": driver.handle(instance.gpu),
            "id": instance.id,
            "profileId": instance.profile.id,
            "placement": {"start": instance.start, "size": instance.size},
        }
    ]


def ci_profile(driver: Driver, handle: int, constant: int, engine: int) -> list[Any]:
    """Answer nvmlGpuInstanceGetComputeInstanceProfileInfo."""
    instance = driver.gpu_instance(handle)
    if engine != 0:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    width = driver.ci_width(instance, constant)  # ids of compute-instance profiles equal their constants
    profile = instance.profile
    full = width == profile.compute_slices
    one_g = min(peer.sm_count for peer in instance.gpu.model.profiles)
    return [
        {
            "id": profile.ci_id(width),
            "sliceCount": width,
            "instanceCount": len(profile.ci_starts(width)),
            "multiprocessorCount": profile.sm_count if full else one_g * width,
            "name": f"MIG {profile.name}" if full else f"MIG {width}c.{profile.name}",
        }
    ]


def ci_capacity(driver: Driver, handle: int, ci_profile_id: int) -> list[Any]:
    """Answer nvmlGpuInstanceGetComputeInstanceRemainingCapacity: how many more would fit."""
    instance = driver.gpu_instance(handle)
    return [len(driver.free_ci_starts(instance, driver.ci_width(instance, ci_profile_id)))]


def create_ci(driver: Driver, handle: int, ci_profile_id: int, placement: list[int] | None = None) -> list[Any]:
    """Answer nvmlGpuInstanceCreateComputeInstance."""
    instance = driver.gpu_instance(handle)
    place = (placement[0], placement[1]) if placement else None
    return [driver.handle(driver.create_compute_instance(instance, ci_profile_id, place))]


def destroy_ci(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlComputeInstanceDestroy."""
    driver.destroy_compute_instance(driver.compute_instance(handle))
    return []


def cis(driver: Driver, handle: int, ci_profile_id: int) -> list[Any]:
    """Answer nvmlGpuInstanceGetComputeInstances: handles of one profile's instances."""
    instance = driver.gpu_instance(handle)
    width = driver.ci_width(instance, ci_profile_id)
    return [[driver.handle(ci) for _, ci in sorted(instance.computes.items()) if ci.width == width]]


def ci_info(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlComputeInstanceGetInfo_v2."""
    compute = driver.compute_instance(handle)
    return [
        {
            "device": driver.handle(compute),
            "gpuInstance": driver.handle(compute.gi),
            "id": compute.id,
            "profileId": compute.gi.profile.ci_id(compute.width),
            "placement": {"start": compute.start, "size": compute.width},
        }
    ]


def mig_by_index(driver: Driver, handle: int, position: int) -> list[Any]:
    """Answer nvmlDeviceGetMigDeviceHandleByIndex: NOT_FOUND where that place is empty."""
    gpu = _mig_gpu(driver, handle)
    if position >= MIG_DEVICES_MAX:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    listed = [driver.handle(compute) for compute in gpu.computes()]
    listed += [stale for profile_id, stale in gpu.stale_listed if profile_id == STALE_MIG_DEVICE]
    if position >= len(listed):
        raise NvmlFault(Nvml.NOT_FOUND)
    return [listed[position]]


def gi_id_of(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetGpuInstanceId."""
    return [driver.mig_device(handle).gi.id]


def devices_max(driver: Driver, handle: int) -> list[Any]:
    """Answer nvmlDeviceGetMaxMigDeviceCount."""
    driver.gpu(handle)
    return [MIG_DEVICES_MAX]
