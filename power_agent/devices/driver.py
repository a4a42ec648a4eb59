"""A GPU driver without GPUs: handles, MIG placement rules, clocks and limits, with NVML's error codes.

Pure state: no pynvml, no clock, no files. A refused call raises NvmlFault with the code that NVML documents for it.
Handles are opaque integers that are never reused; a destroyed instance leaves a handle that is refused, and a handle of
an earlier driver load is told apart (UNINITIALIZED), so a client notices that its driver went away.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeVar

from power_agent.devices.tables import COMPUTE_SLICES, GI_IDS, GiProfile, GpuModel

UUID_NAMESPACE: Final = uuid.UUID("6f1c2f5e-0a53-5e0b-9d0c-7c1f6b1f7a10")
LOAD_SHIFT: Final = 32


class Nvml(IntEnum):
    """The return codes that this driver gives (nvmlReturn_t)."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    IN_USE = 19
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


class NvmlFault(Exception):
    """A refused call."""

    def __init__(self, code: Nvml) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True, eq=False)
class ComputeInstance:
    """A compute instance; its MIG device has the same life."""

    gi: "GpuInstance"
    id: int
    width: int
    start: int
    mig_uuid: str


@dataclass(slots=True, eq=False)
class GpuInstance:
    """A GPU instance. `generation` counts creations on its device and is never reused."""

    gpu: "Gpu"
    profile: GiProfile
    id: int
    start: int
    generation: int
    computes: dict[int, ComputeInstance] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.profile.memory_slices

    def overlaps(self, start: int, size: int) -> bool:
        return self.start < start + size and start < self.start + self.size


@dataclass(slots=True)
class DriverProcess:
    """A process with a context: on a compute instance, or on a whole GPU while MIG is off."""

    pid: int
    compute: ComputeInstance | None
    memory_mib: int


@dataclass(slots=True, eq=False)
class Gpu:
    """One simulated GPU."""

    index: int
    model: GpuModel
    uuid: str
    mig_current: bool
    mig_pending: bool
    persistence: bool = True
    lost: bool = False
    locked_mhz: tuple[int, int] | None = None
    power_limit_w: float = 0.0
    capped: bool = False  # the power limit held the last tick back
    power_w: float = 0.0
    energy_mj: int = 0
    creations: int = 0
    instances: dict[int, GpuInstance] = field(default_factory=dict)
    processes: dict[int, DriverProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.power_limit_w = self.power_limit_w or self.model.power_limit_w[1]

    @property
    def clock_mhz(self) -> int:
        """With a context the clock goes to the top of its range, without one to the bottom; locks narrow the range."""
        low, high = self.locked_mhz or (self.model.clock_min_mhz, self.model.clock_max_mhz)
        return high if self.processes else low

    @property
    def serving_clock_mhz(self) -> int:
        return (self.locked_mhz or (0, self.model.clock_max_mhz))[1]

    def computes(self) -> Iterator[ComputeInstance]:
        """In GPU-instance order."""
        for gi_id in sorted(self.instances):
            yield from self.instances[gi_id].computes.values()


Target = Gpu | GpuInstance | ComputeInstance
LivingT = TypeVar("LivingT", GpuInstance, ComputeInstance)


class Driver:
    """Everything that a driver load owns; `load_number` makes the handles of another load recognisable."""

    def __init__(
        self,
        node: str,
        models: tuple[GpuModel, ...],
        *,
        load_number: int,
        mig_enabled: bool = True,
        fresh_uuids: bool = True,
    ) -> None:
        self.load_number = load_number
        self._fresh_uuids = fresh_uuids
        self._handles: dict[int, Target] = {}
        self._handle_of: dict[Target, int] = {}
        self._next_handle = (load_number << LOAD_SHIFT) + 0x1000
        self.gpus = tuple(
            Gpu(index, model, f"GPU-{uuid.uuid5(UUID_NAMESPACE, f'{node}/{index}')}", mig_enabled, mig_enabled)
            for index, model in enumerate(models)
        )

    # --- handles ---

    def handle(self, target: Target) -> int:
        """The handle of an object; the same one for as long as it lives."""
        if target not in self._handle_of:
            self._next_handle += 0x10
            self._handle_of[target] = self._next_handle
            self._handles[self._next_handle] = target
        return self._handle_of[target]

    def _forget(self, target: Target) -> None:
        handle = self._handle_of.pop(target, None)
        if handle is not None:
            del self._handles[handle]

    def _resolve(self, handle: int, stale: Nvml) -> Target:
        if handle in self._handles:
            return self._handles[handle]
        raise NvmlFault(Nvml.UNINITIALIZED if handle >> LOAD_SHIFT not in (0, self.load_number) else stale)

    def device(self, handle: int) -> Gpu | ComputeInstance:
        """A GPU, or a MIG device (which is its compute instance)."""
        target = self._resolve(handle, Nvml.NOT_FOUND)
        if isinstance(target, GpuInstance):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        if (target if isinstance(target, Gpu) else target.gi.gpu).lost:
            raise NvmlFault(Nvml.GPU_IS_LOST)
        return target

    def gpu(self, handle: int, mig_refusal: Nvml = Nvml.NOT_SUPPORTED) -> Gpu:
        """A physical GPU; power, energy and clocks know no MIG device."""
        target = self.device(handle)
        if isinstance(target, ComputeInstance):
            raise NvmlFault(mig_refusal)
        return target

    def mig_device(self, handle: int) -> ComputeInstance:
        target = self.device(handle)
        if isinstance(target, Gpu):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return target

    def gpu_instance(self, handle: int) -> GpuInstance:
        target = self._resolve(handle, Nvml.INVALID_ARGUMENT)
        if not isinstance(target, GpuInstance):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return self._unless_lost(target, target.gpu)

    def compute_instance(self, handle: int) -> ComputeInstance:
        target = self._resolve(handle, Nvml.INVALID_ARGUMENT)
        if not isinstance(target, ComputeInstance):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return self._unless_lost(target, target.gi.gpu)

    @staticmethod
    def _unless_lost(target: LivingT, gpu: Gpu) -> LivingT:
        if gpu.lost:
            raise NvmlFault(Nvml.GPU_IS_LOST)
        return target

    def by_uuid(self, wanted: str) -> Gpu | ComputeInstance:
        for gpu in self.gpus:
            if gpu.uuid == wanted:
                return gpu
            for compute in gpu.computes():
                if compute.mig_uuid == wanted:
                    return compute
        raise NvmlFault(Nvml.NOT_FOUND)

    # --- MIG ---

    def set_mig_mode(self, gpu: Gpu, enabled: bool) -> Nvml:
        """The activation status; the call itself succeeds. A100 changes mode only with `reset` of the idle GPU."""
        gpu.mig_pending = enabled
        if gpu.mig_current == enabled:
            return Nvml.SUCCESS
        if gpu.instances or gpu.processes:
            return Nvml.IN_USE
        if not gpu.model.mig_mode_immediate:
            return Nvml.RESET_REQUIRED
        gpu.mig_current = enabled
        return Nvml.SUCCESS

    def reset(self, gpu: Gpu) -> None:
        """A GPU reset: pending MIG mode applies (Ampere) or is lost (Hopper); locks, limits and counter start anew."""
        if gpu.processes:
            raise NvmlFault(Nvml.IN_USE)
        for instance in list(gpu.instances.values()):
            for compute in list(instance.computes.values()):
                self._drop_compute(compute)
            self._drop_instance(instance)
        gpu.mig_current = gpu.mig_pending = gpu.mig_pending and not gpu.model.mig_mode_immediate
        gpu.locked_mhz, gpu.lost, gpu.energy_mj = None, False, 0
        gpu.power_limit_w = gpu.model.power_limit_w[1]

    def profile(self, gpu: Gpu, profile_id: int) -> GiProfile:
        profile = gpu.model.profile(profile_id)
        if profile is None:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return profile

    def free_starts(self, gpu: Gpu, profile: GiProfile) -> tuple[int, ...]:
        """Starts where an instance of this profile fits now, in the order in which the driver would take them."""
        peers = sum(instance.profile is profile for instance in gpu.instances.values())
        compute_used = sum(instance.profile.compute_slices for instance in gpu.instances.values())
        if peers >= profile.instances_max or compute_used + profile.compute_slices > COMPUTE_SLICES:
            return ()
        return tuple(
            start
            for start in profile.starts
            if not any(instance.overlaps(start, profile.memory_slices) for instance in gpu.instances.values())
        )

    def remaining_capacity(self, gpu: Gpu, profile: GiProfile) -> int:
        peers = sum(instance.profile is profile for instance in gpu.instances.values())
        compute_used = sum(instance.profile.compute_slices for instance in gpu.instances.values())
        by_compute = (COMPUTE_SLICES - compute_used) // profile.compute_slices
        return min(len(self.free_starts(gpu, profile)), profile.instances_max - peers, by_compute)

    def create_gpu_instance(self, gpu: Gpu, profile_id: int, placement: tuple[int, int] | None = None) -> GpuInstance:
        """INSUFFICIENT_RESOURCES also when the very same instance exists already, as on hardware."""
        if not gpu.mig_current:
            raise NvmlFault(Nvml.NOT_SUPPORTED)
        profile = self.profile(gpu, profile_id)
        if placement is not None:
            start, size = placement
            if start not in profile.starts or size != profile.memory_slices:
                raise NvmlFault(Nvml.INVALID_ARGUMENT)
        free = self.free_starts(gpu, profile)
        if not free or (placement is not None and placement[0] not in free):
            raise NvmlFault(Nvml.INSUFFICIENT_RESOURCES)
        gi_id = next(i for i in GI_IDS[profile.memory_slices] if i not in gpu.instances)
        gpu.creations += 1
        instance = GpuInstance(gpu, profile, gi_id, free[0] if placement is None else placement[0], gpu.creations)
        gpu.instances[gi_id] = instance
        return instance

    def destroy_gpu_instance(self, instance: GpuInstance) -> None:
        if instance.computes or any(p.compute and p.compute.gi is instance for p in instance.gpu.processes.values()):
            raise NvmlFault(Nvml.IN_USE)
        self._drop_instance(instance)

    def free_ci_starts(self, instance: GpuInstance, width: int) -> tuple[int, ...]:
        taken = {start for ci in instance.computes.values() for start in range(ci.start, ci.start + ci.width)}
        return tuple(
            start for start in instance.profile.ci_starts(width) if taken.isdisjoint(range(start, start + width))
        )

    def ci_width(self, instance: GpuInstance, ci_profile_id: int) -> int:
        for width in instance.profile.ci_widths:
            if instance.profile.ci_id(width) == ci_profile_id:
                return width
        raise NvmlFault(Nvml.NOT_SUPPORTED)

    def create_compute_instance(
        self, instance: GpuInstance, ci_profile_id: int, placement: tuple[int, int] | None = None
    ) -> ComputeInstance:
        width = self.ci_width(instance, ci_profile_id)
        if placement is not None and (placement[1] != width or placement[0] not in instance.profile.ci_starts(width)):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        free = self.free_ci_starts(instance, width)
        if not free or (placement is not None and placement[0] not in free):
            raise NvmlFault(Nvml.INSUFFICIENT_RESOURCES)
        ci_id = next(i for i in range(COMPUTE_SLICES) if i not in instance.computes)
        seed = f"{instance.gpu.uuid}/{instance.id}/{ci_id}"
        if self._fresh_uuids:  # as the DRA driver reports; R470 repeated them
            seed += f"/{self.load_number}/{instance.generation}/{self._next_handle}"
            self._next_handle += 0x10
        mig_uuid = f"MIG-{uuid.uuid5(UUID_NAMESPACE, seed)}"
        compute = ComputeInstance(instance, ci_id, width, free[0] if placement is None else placement[0], mig_uuid)
        instance.computes[ci_id] = compute
        return compute

    def destroy_compute_instance(self, compute: ComputeInstance) -> None:
        if any(process.compute is compute for process in compute.gi.gpu.processes.values()):
            raise NvmlFault(Nvml.IN_USE)
        self._drop_compute(compute)

    def _drop_compute(self, compute: ComputeInstance) -> None:
        del compute.gi.computes[compute.id]
        self._forget(compute)

    def _drop_instance(self, instance: GpuInstance) -> None:
        del instance.gpu.instances[instance.id]
        self._forget(instance)

    # --- processes, clocks, limits ---

    def attach(self, pid: int, target: Gpu | ComputeInstance, memory_mib: int) -> None:
        """A process made a context. CUDA refuses a whole GPU whose MIG mode is on."""
        gpu = target if isinstance(target, Gpu) else target.gi.gpu
        if isinstance(target, Gpu) and gpu.mig_current:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        gpu.processes[pid] = DriverProcess(pid, None if isinstance(target, Gpu) else target, memory_mib)

    def detach(self, pid: int) -> None:
        """The process is gone; so are its contexts."""
        for gpu in self.gpus:
            gpu.processes.pop(pid, None)

    def lock_clocks(self, gpu: Gpu, low_mhz: int, high_mhz: int) -> None:
        """Snaps down to supported clocks, as in-range values do on hardware."""
        clocks = gpu.model.clocks_mhz
        if low_mhz > high_mhz or low_mhz < clocks[0] or high_mhz > clocks[-1]:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        gpu.locked_mhz = (max(c for c in clocks if c <= low_mhz), max(c for c in clocks if c <= high_mhz))

    def set_power_limit(self, gpu: Gpu, limit_w: float) -> None:
        low_w, _, high_w = gpu.model.power_limit_w
        if not low_w <= limit_w <= high_w:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        gpu.power_limit_w = limit_w
