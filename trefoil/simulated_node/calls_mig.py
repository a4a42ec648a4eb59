"""MIG symbols over the driver: modes, GPU instances, compute instances and their devices (see `calls`)."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from trefoil.simulated_node.driver import STALE_MIG_DEVICE, Driver
from trefoil.simulated_node.gpu_models import KNOWN_PROFILE_CONSTANTS, MEMORY_SLICES, GiProfile
from trefoil.simulated_node.gpu_state import Gpu, Nvml, NvmlFault

MIG_DEVICES_MAX: Final = MEMORY_SLICES - 1


def mig_mode(driver: Driver, handle: int) -> tuple[int, int]:
    """Answer nvmlDeviceGetMigMode: current and pending mode."""
    gpu = driver.gpu(handle)
    if not gpu.model.mig_capable:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return int(gpu.mig_current), int(gpu.mig_pending)


def set_mig_mode(driver: Driver, handle: int, mode: int) -> int:
    """Answer nvmlDeviceSetMigMode."""
    gpu = driver.gpu(handle)
    if mode not in (0, 1):
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return int(driver.set_mig_mode(gpu, bool(mode)))


def _gi_profile(profile: GiProfile) -> dict[str, Any]:
    return {
        "id": profile.id,
        "isP2pSupported": 0,
        "sliceCount": profile.compute_slices,
        "instanceCount": profile.instances_max,
        "multiprocessorCount": profile.sm_count,
        "memorySizeMB": profile.memory_mib,
        "name": f"MIG {profile.name}",
    }


def gi_profile_by_constant(driver: Driver, handle: int, constant: int) -> dict[str, Any]:
    """Answer nvmlDeviceGetGpuInstanceProfileInfo."""
    gpu = driver.gpu(handle, Nvml.INVALID_ARGUMENT)
    if not 0 <= constant < KNOWN_PROFILE_CONSTANTS:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    for profile in gpu.model.profiles:
        if profile.constant == constant:
            return _gi_profile(profile)
    raise NvmlFault(Nvml.NOT_SUPPORTED)


def _profile(driver: Driver, handle: int, profile_id: int) -> GiProfile:
    return driver.profile(driver.gpu(handle, Nvml.INVALID_ARGUMENT), profile_id)


def gi_placements(driver: Driver, handle: int, profile_id: int) -> list[dict[str, int]]:
    """Answer nvmlDeviceGetGpuInstancePossiblePlacements_v2: all legal placements, occupied or not, by start."""
    profile = _profile(driver, handle, profile_id)
    return [{"start": start, "size": profile.memory_slices} for start in sorted(profile.starts)]


def _mig_gpu(driver: Driver, handle: int) -> Gpu:
    gpu = driver.gpu(handle, Nvml.INVALID_ARGUMENT)
    if not gpu.mig_current:
        raise NvmlFault(Nvml.NOT_SUPPORTED)
    return gpu


def gi_capacity(driver: Driver, handle: int, profile_id: int) -> int:
    """Answer nvmlDeviceGetGpuInstanceRemainingCapacity: how many more would fit."""
    gpu = _mig_gpu(driver, handle)
    return driver.remaining_capacity(gpu, driver.profile(gpu, profile_id))


def gis(driver: Driver, handle: int, profile_id: int) -> list[int]:
    """Answer nvmlDeviceGetGpuInstances: handles of one profile's instances, stale ones too."""
    gpu = _mig_gpu(driver, handle)
    profile = driver.profile(gpu, profile_id)
    found = [instance for _, instance in sorted(gpu.instances.items()) if instance.profile is profile]
    stale_listed = [handle for stale_id, handle in gpu.stale_listed if stale_id == profile_id]
    return [driver.handle(instance) for instance in found] + stale_listed


def gi_info(driver: Driver, handle: int) -> dict[str, Any]:
    """Answer nvmlGpuInstanceGetInfo."""
    instance = driver.gpu_instance(handle)
    return {
        "device": driver.handle(instance.gpu),
        "id": instance.id,
        "profileId": instance.profile.id,
        "placement": {"start": instance.start, "size": instance.size},
    }


def ci_profile(driver: Driver, handle: int, constant: int, engine: int) -> dict[str, Any]:
    """Answer nvmlGpuInstanceGetComputeInstanceProfileInfo."""
    instance = driver.gpu_instance(handle)
    if engine != 0:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    width = driver.ci_width(instance, constant)  # ids of compute-instance profiles equal their constants
    profile = instance.profile
    full = width == profile.compute_slices
    one_g = min(peer.sm_count for peer in instance.gpu.model.profiles)
    return {
        "id": profile.ci_id(width),
        "sliceCount": width,
        "instanceCount": len(profile.ci_starts(width)),
        "multiprocessorCount": profile.sm_count if full else one_g * width,
        "name": f"MIG {profile.name}" if full else f"MIG {width}c.{profile.name}",
    }


def ci_capacity(driver: Driver, handle: int, profile_id: int) -> int:
    """Answer nvmlGpuInstanceGetComputeInstanceRemainingCapacity: how many more would fit."""
    instance = driver.gpu_instance(handle)
    return len(driver.free_ci_starts(instance, driver.ci_width(instance, profile_id)))


def cis(driver: Driver, handle: int, profile_id: int) -> list[int]:
    """Answer nvmlGpuInstanceGetComputeInstances: handles of one profile's instances."""
    instance = driver.gpu_instance(handle)
    width = driver.ci_width(instance, profile_id)
    return [driver.handle(compute) for _, compute in sorted(instance.computes.items()) if compute.width == width]


def ci_info(driver: Driver, handle: int) -> dict[str, Any]:
    """Answer nvmlComputeInstanceGetInfo_v2."""
    compute = driver.compute_instance(handle)
    return {
        "device": driver.handle(compute),
        "gpuInstance": driver.handle(compute.gi),
        "id": compute.id,
        "profileId": compute.gi.profile.ci_id(compute.width),
        "placement": {"start": compute.start, "size": compute.width},
    }


def mig_by_index(driver: Driver, handle: int, position: int) -> int:
    """Answer nvmlDeviceGetMigDeviceHandleByIndex: NOT_FOUND where that place is empty."""
    gpu = _mig_gpu(driver, handle)
    if position >= MIG_DEVICES_MAX:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    listed = [driver.handle(compute) for compute in gpu.computes()]
    listed += [stale for profile_id, stale in gpu.stale_listed if profile_id == STALE_MIG_DEVICE]
    if position >= len(listed):
        raise NvmlFault(Nvml.NOT_FOUND)
    return listed[position]


def create_gi(driver: Driver, handle: int, profile_id: int, *placement: Sequence[int]) -> int:
    """Answer nvmlDeviceCreateGpuInstance, ...WithPlacement."""
    gpu = driver.gpu(handle, Nvml.INVALID_ARGUMENT)
    return driver.handle(driver.create_gpu_instance(gpu, profile_id, *placement))


def create_ci(driver: Driver, handle: int, profile_id: int, *placement: Sequence[int]) -> int:
    """Answer nvmlGpuInstanceCreateComputeInstance, ...WithPlacement."""
    return driver.handle(driver.create_compute_instance(driver.gpu_instance(handle), profile_id, *placement))


MIG_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "nvmlDeviceGetMigMode": mig_mode,
    "nvmlDeviceSetMigMode": set_mig_mode,
    "nvmlDeviceGetGpuInstanceProfileInfo": gi_profile_by_constant,
    "nvmlDeviceGetGpuInstanceProfileInfoV": gi_profile_by_constant,
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV": lambda driver, *ids: _gi_profile(_profile(driver, *ids)),
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": gi_placements,
    "nvmlDeviceGetGpuInstanceRemainingCapacity": gi_capacity,
    "nvmlDeviceCreateGpuInstance": create_gi,
    "nvmlDeviceCreateGpuInstanceWithPlacement": create_gi,
    "nvmlGpuInstanceDestroy": lambda driver, handle: driver.destroy_gpu_instance(driver.gpu_instance(handle)),
    "nvmlDeviceGetGpuInstances": gis,
    "nvmlGpuInstanceGetInfo": gi_info,
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": ci_profile,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": ci_profile,
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": ci_capacity,
    "nvmlGpuInstanceCreateComputeInstance": create_ci,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": create_ci,
    "nvmlComputeInstanceDestroy": lambda driver, ci: driver.destroy_compute_instance(driver.compute_instance(ci)),
    "nvmlGpuInstanceGetComputeInstances": cis,
    "nvmlComputeInstanceGetInfo_v2": ci_info,
    "nvmlDeviceGetGpuInstanceId": lambda driver, handle: driver.mig_device(handle).gi.id,
    "nvmlDeviceGetMaxMigDeviceCount": lambda driver, handle: driver.gpu(handle) and MIG_DEVICES_MAX,
    "nvmlDeviceGetMigDeviceHandleByIndex": mig_by_index,
}
