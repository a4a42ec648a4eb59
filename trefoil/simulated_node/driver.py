"""A GPU driver without GPUs: handles, MIG placement rules, clocks and limits, with NVML's error codes.

Pure state: no pynvml, no clock (`now_s` is set by its owner), no files. A refused call raises NvmlFault with the
code that NVML documents for it. Handles are opaque integers that are never reused. A destroyed instance leaves a handle
that is refused. A handle of an earlier driver load is recognised (UNINITIALIZED), so a client notices that its driver
went away. `calls` puts NVML's symbols over it, `machine` adds power, faults and time.
"""

import uuid
from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np

from power_agent.devices.instance_holders import PERSISTENCED
from power_agent.devices.xid_events import FATAL_XIDS, LOST_XID
from trefoil.simulated_node.clients import PERSISTENCED_PID, Clients
from trefoil.simulated_node.gpu_models import COMPUTE_SLICES, GI_IDS, GiProfile, GpuModel
from trefoil.simulated_node.gpu_state import (
    ComputeInstance,
    DriverProcess,
    Gpu,
    GpuInstance,
    Nvml,
    NvmlFault,
)
from trefoil.simulated_node.monitoring import EventSets, GpmSamples

UUID_NAMESPACE: Final = uuid.UUID("6f1c2f5e-0a53-5e0b-9d0c-7c1f6b1f7a10")
LOAD_SHIFT: Final = 32
STALE_MIG_DEVICE: Final = -1  # in place of a profile id: what is listed is a MIG device
DRIVER_VERSION: Final = "535.161.08"
FOUR_WITH_THREE_SINCE: Final = 510  # older drivers refuse 4g beside 3g: 18 maximal configurations instead of 19


GPU_RESET: Final = 1  # NVML_GPU_RECOVERY_ACTION_GPU_RESET

Target = Gpu | GpuInstance | ComputeInstance
TargetT = TypeVar("TargetT", bound=Target)


class Driver:
    """State of a driver load; `load_number` makes the handles of another load recognisable.

    `settle_s`: how long a clock takes to follow a lock, drawn between these two. `stale_listing`: instances that
    other software destroyed stay listed, with dead handles, until the next nvmlInit (seen: libcudacxx#224).
    """

    def __init__(
        self,
        node: str,
        models: tuple[GpuModel, ...],
        *,
        load_number: int = 1,
        mig_enabled: bool = True,
        fresh_uuids: bool = True,
        version: str = DRIVER_VERSION,
        settle_s: tuple[float, float] = (0.0, 0.0),
        stale_listing: bool = False,
        seed: int = 0,
    ) -> None:
        self.version = version
        self.now_s = 0.0
        self.events = EventSets()
        self.gpm = GpmSamples()
        self.clients = Clients()
        self.stale_listing = stale_listing
        self._settle_s = settle_s
        self._chance = np.random.default_rng(seed)
        self._fresh_uuids = fresh_uuids
        self._start_load(load_number)
        self.gpus = tuple(
            Gpu(index, model, f"GPU-{uuid.uuid5(UUID_NAMESPACE, f'{node}/{index}')}", mig, mig)
            for index, model in enumerate(models)
            for mig in (mig_enabled and model.mig_capable,)
        )
        self._by_uuid: dict[str, Gpu | ComputeInstance] = {gpu.uuid: gpu for gpu in self.gpus}

    def _start_load(self, load_number: int) -> None:
        self.load_number = load_number
        self._handles: dict[int, Target] = {}
        self._handle_of: dict[Target, int] = {}
        self._next_handle = (load_number << LOAD_SHIFT) + 0x1000
        self.events.clear()
        self.gpm.clear()
        self.clients.detach_all()

    def reload(self, load_number: int) -> None:
        """Unload and load the module: handles void, instances and processes gone, counters at zero.

        Locks, limits and the sleep of Hopper's MIG mode end too, unless persistence mode keeps the GPU's state.
        """
        for gpu in self.gpus:
            gpu.processes.clear()
            gpu.instances.clear()
            gpu.energy_mj, gpu.capped, gpu.throttle_mhz, gpu.handle_leaked = 0, False, None, False
            gpu.busy_s.clear()
            gpu.stale_listed.clear()
            gpu.recovery_action = 0
            if not gpu.persistence:
                self._to_defaults(gpu)
            if gpu.model.mig_mode_immediate:
                gpu.mig_current = gpu.mig_pending = gpu.persistence and gpu.mig_current
        self._by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        self._start_load(load_number)

    def deinitialise(self, gpu: Gpu) -> None:
        """Deinitialise a GPU that no process uses, without persistence mode: locks, limits and counter start again."""
        self._to_defaults(gpu)
        gpu.energy_mj, gpu.capped, gpu.throttle_mhz = 0, False, None

    @staticmethod
    def _to_defaults(gpu: Gpu) -> None:
        gpu.locked_mhz = gpu.locked_before_mhz = None
        gpu.power_limit_w = gpu.model.power_limit_w[1]

    def new_handle(self) -> int:
        """Number that was no handle in this load yet; also for event sets and samples, which have their own tables."""
        self._next_handle += 0x10
        return self._next_handle

    def is_earlier_load(self, handle: int) -> bool:
        """Whether a handle was given by another load of the driver."""
        return handle >> LOAD_SHIFT not in (0, self.load_number)

    # --- handles ---

    def handle(self, target: Target) -> int:
        """Handle of an object; the same one for as long as it lives."""
        if target not in self._handle_of:
            handle = self.new_handle()
            self._handle_of[target] = handle
            self._handles[handle] = target
        return self._handle_of[target]

    def _forget(self, target: Target) -> None:
        handle = self._handle_of.pop(target, None)
        if handle is not None:
            del self._handles[handle]

    def keep_listed(self, target: GpuInstance | ComputeInstance) -> None:
        """Keep an instance listed by a dead handle, when other software is about to destroy it; with
        `stale_listing`."""
        if self.stale_listing and target in self._handle_of:
            kind = target.profile.id if isinstance(target, GpuInstance) else STALE_MIG_DEVICE
            target.gpu.stale_listed.append((kind, self._handle_of[target]))

    def _target(self, handle: int, stale: Nvml) -> Target:
        if handle in self._handles:
            target = self._handles[handle]
            self.clients.attach(target.gpu.index)
            return target
        raise NvmlFault(Nvml.UNINITIALIZED if self.is_earlier_load(handle) else stale)

    def device(self, handle: int) -> Gpu | ComputeInstance:
        """GPU, or MIG device (which is its compute instance), of a handle."""
        target = self._target(handle, Nvml.NOT_FOUND)
        if isinstance(target, GpuInstance):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return _unless_lost(target)

    def gpu(self, handle: int, mig_refusal: Nvml = Nvml.NOT_SUPPORTED) -> Gpu:
        """Physical GPU of a handle; power, energy and clocks know no MIG device."""
        target = self.device(handle)
        if isinstance(target, ComputeInstance):
            raise NvmlFault(mig_refusal)
        return target

    def mig_device(self, handle: int) -> ComputeInstance:
        """MIG device of a handle; INVALID_ARGUMENT for a physical GPU."""
        target = self.device(handle)
        if isinstance(target, Gpu):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return target

    def gpu_instance(self, handle: int) -> GpuInstance:
        """GPU instance of a handle."""
        target = self._target(handle, Nvml.INVALID_ARGUMENT)
        if not isinstance(target, GpuInstance):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return _unless_lost(target)

    def compute_instance(self, handle: int) -> ComputeInstance:
        """Compute instance of a handle."""
        target = self._target(handle, Nvml.INVALID_ARGUMENT)
        if not isinstance(target, ComputeInstance):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return _unless_lost(target)

    def by_uuid(self, wanted: str) -> Gpu | ComputeInstance:
        """GPU or MIG device of a UUID; NOT_FOUND when there is none."""
        found = self._by_uuid.get(wanted)
        if found is None:
            raise NvmlFault(Nvml.NOT_FOUND)
        return found

    # --- MIG ---

    def set_mig_mode(self, gpu: Gpu, enabled: bool) -> Nvml:
        """Set MIG mode and return the activation status; A100 changes mode only with `reset` of the idle GPU.

        On A100 the mode is pending from then on, whatever the status; Hopper changes at once or not at all.
        """
        if not gpu.model.mig_capable:
            raise NvmlFault(Nvml.NOT_SUPPORTED)
        if not gpu.model.mig_mode_immediate:
            gpu.mig_pending = enabled
        if gpu.mig_current == enabled:
            return Nvml.SUCCESS
        if gpu.instances or gpu.processes or gpu.handle_leaked:
            return Nvml.IN_USE
        if not gpu.model.mig_mode_immediate:
            return Nvml.RESET_REQUIRED
        gpu.mig_current = gpu.mig_pending = enabled
        return Nvml.SUCCESS

    def reset(self, gpu: Gpu) -> None:
        """Reset a GPU: pending MIG mode applies (Ampere) or is lost (Hopper); locks, limits and counter start again.

        IN_USE while any process has it open: a context, a handle of NVML, or nvidia-persistenced.
        """
        if gpu.processes or gpu.handle_leaked or self.clients.attached_to(gpu.index) or self.is_kept(gpu):
            raise NvmlFault(Nvml.IN_USE)
        for instance in list(gpu.instances.values()):
            for compute in list(instance.computes.values()):
                self._drop_compute(compute)
            self._drop_instance(instance)
        gpu.mig_current = gpu.mig_pending = gpu.mig_pending and not gpu.model.mig_mode_immediate
        gpu.lost, gpu.energy_mj, gpu.capped, gpu.throttle_mhz, gpu.thermal_mhz = False, 0, False, None, None
        gpu.recovery_action = 0
        gpu.busy_s.clear()
        self._to_defaults(gpu)

    def is_kept(self, gpu: Gpu) -> bool:
        """Whether nvidia-persistenced has the GPU open."""
        return self.clients.persistenced and gpu.persistence

    def is_unused(self, gpu: Gpu) -> bool:
        """Whether no process uses the GPU and nothing keeps it initialised."""
        return not (gpu.persistence or gpu.processes or gpu.handle_leaked or self.clients.attached_to(gpu.index))

    def holders(self, gpu: Gpu) -> tuple[tuple[int, str], ...]:
        """Processes that have the GPU open, as (pid, name); the name only of those that are of this model alone."""
        found = dict.fromkeys((*gpu.processes, *self.clients.attached_to(gpu.index)), "")
        if self.is_kept(gpu):
            found[PERSISTENCED_PID] = PERSISTENCED
        return tuple(sorted(found.items()))

    def lose(self, gpu: Gpu) -> None:
        """Let a GPU fall off the bus: Xid 79 for listeners, GPU_IS_LOST for every call, until a reset."""
        self.xid(gpu, LOST_XID)
        gpu.lost = True

    def xid(self, gpu: Gpu, code: int, instance: GpuInstance | None = None) -> None:
        """Report an Xid error to listeners; the GPU continues. Newer drivers ask for a reset after a fatal
        one."""
        if code in FATAL_XIDS:
            gpu.recovery_action = GPU_RESET
        self.events.post(gpu.index, self.handle(gpu), code, instance.id if instance else None)

    # --- GPU instances ---

    def profile(self, gpu: Gpu, profile_id: int) -> GiProfile:
        """GPU-instance profile by its id; NOT_SUPPORTED without MIG."""
        if not gpu.model.mig_capable:
            raise NvmlFault(Nvml.NOT_SUPPORTED)
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
        if int(self.version.split(".")[0]) < FOUR_WITH_THREE_SINCE:
            beside = {instance.profile.compute_slices for instance in gpu.instances.values()}
            if (profile.compute_slices, True) in ((3, 4 in beside), (4, 3 in beside)):
                return ()
        return tuple(
            start
            for start in profile.starts
            if not any(instance.overlaps(start, profile.memory_slices) for instance in gpu.instances.values())
        )

    def remaining_capacity(self, gpu: Gpu, profile: GiProfile) -> int:
        """How many more instances of this profile would fit now."""
        peers = sum(instance.profile is profile for instance in gpu.instances.values())
        compute_used = sum(instance.profile.compute_slices for instance in gpu.instances.values())
        by_compute = (COMPUTE_SLICES - compute_used) // profile.compute_slices
        return min(len(self.free_starts(gpu, profile)), profile.instances_max - peers, by_compute)

    def create_gpu_instance(self, gpu: Gpu, profile_id: int, placement: Sequence[int] | None = None) -> GpuInstance:
        """Create a GPU instance; INSUFFICIENT_RESOURCES also when the very same one exists already, as on hardware."""
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
        """Destroy a GPU instance; IN_USE while it has compute instances, processes or a leaked handle."""
        in_use = instance.handle_leaked or any(
            p.compute and p.compute.gi is instance for p in instance.gpu.processes.values()
        )
        if instance.computes or in_use:
            raise NvmlFault(Nvml.IN_USE)
        self._drop_instance(instance)

    def free_ci_starts(self, instance: GpuInstance, width: int) -> tuple[int, ...]:
        """Starts where a compute instance of this width fits now."""
        taken = {start for ci in instance.computes.values() for start in range(ci.start, ci.start + ci.width)}
        return tuple(
            start for start in instance.profile.ci_starts(width) if taken.isdisjoint(range(start, start + width))
        )

    def ci_width(self, instance: GpuInstance, ci_profile_id: int) -> int:
        """Width in compute slices of a compute-instance profile; NOT_SUPPORTED where the instance lacks it."""
        for width in instance.profile.ci_widths:
            if instance.profile.ci_id(width) == ci_profile_id:
                return width
        raise NvmlFault(Nvml.NOT_SUPPORTED)

    def create_compute_instance(
        self, instance: GpuInstance, ci_profile_id: int, placement: Sequence[int] | None = None
    ) -> ComputeInstance:
        """Create a compute instance, and with it a MIG device under a UUID of its own."""
        width = self.ci_width(instance, ci_profile_id)
        if placement is not None and (placement[1] != width or placement[0] not in instance.profile.ci_starts(width)):
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        free = self.free_ci_starts(instance, width)
        if not free or (placement is not None and placement[0] not in free):
            raise NvmlFault(Nvml.INSUFFICIENT_RESOURCES)
        ci_id = next(i for i in range(COMPUTE_SLICES) if i not in instance.computes)
        seed = f"{instance.gpu.uuid}/{instance.id}/{ci_id}"
        if self._fresh_uuids:  # as the DRA driver reports; R470 repeated them
            seed += f"/{self.load_number}/{instance.generation}/{self.new_handle()}"
        mig_uuid = f"MIG-{uuid.uuid5(UUID_NAMESPACE, seed)}"
        compute = ComputeInstance(instance, ci_id, width, free[0] if placement is None else placement[0], mig_uuid)
        instance.computes[ci_id] = self._by_uuid[mig_uuid] = compute
        return compute

    def destroy_compute_instance(self, compute: ComputeInstance) -> None:
        """Destroy a compute instance; IN_USE while a process has a context on it."""
        if any(process.compute is compute for process in compute.gpu.processes.values()):
            raise NvmlFault(Nvml.IN_USE)
        self._drop_compute(compute)

    def _drop_compute(self, compute: ComputeInstance) -> None:
        del compute.gi.computes[compute.id]
        del self._by_uuid[compute.mig_uuid]
        self._forget(compute)

    def _drop_instance(self, instance: GpuInstance) -> None:
        del instance.gpu.instances[instance.id]
        self._forget(instance)

    # --- processes, clocks, limits ---

    def attach(self, pid: int, target: Gpu | ComputeInstance, memory_mib: int) -> None:
        """Open a context of a process on a slice. CUDA refuses a whole GPU whose MIG mode is on."""
        if isinstance(target, Gpu) and target.mig_current:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        target.gpu.processes[pid] = DriverProcess(pid, None if isinstance(target, Gpu) else target, memory_mib)

    def detach(self, pid: int) -> None:
        """Close all contexts of a process that is gone."""
        for gpu in self.gpus:
            gpu.processes.pop(pid, None)

    def lock_clocks(self, gpu: Gpu, low_mhz: int, high_mhz: int) -> None:
        """Lock the SM clocks, snapped down to supported ones, as in-range values are on hardware."""
        if not gpu.model.lockable:
            raise NvmlFault(Nvml.NOT_SUPPORTED)
        self._set_lock(gpu, _snapped(gpu.model.clocks_mhz, low_mhz, high_mhz))

    def reset_clocks(self, gpu: Gpu) -> None:
        """Unlock the SM clocks."""
        if not gpu.model.lockable:
            raise NvmlFault(Nvml.NOT_SUPPORTED)
        self._set_lock(gpu, None)

    def _set_lock(self, gpu: Gpu, locked_mhz: tuple[int, int] | None) -> None:
        low_s, high_s = self._settle_s
        gpu.locked_before_mhz = gpu.lock_mhz(self.now_s)
        gpu.settles_at_s = self.now_s + low_s + (high_s - low_s) * float(self._chance.random())
        gpu.locked_mhz = locked_mhz

    def set_power_limit(self, gpu: Gpu, limit_w: float) -> None:
        """Set the power limit; INVALID_ARGUMENT outside the range of the model."""
        low_w, _, high_w = gpu.model.power_limit_w
        if not low_w <= limit_w <= high_w:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        gpu.power_limit_w = limit_w


def _unless_lost(target: TargetT) -> TargetT:
    if target.gpu.lost:
        raise NvmlFault(Nvml.GPU_IS_LOST)
    return target


def _snapped(clocks_mhz: tuple[int, ...], low_mhz: int, high_mhz: int) -> tuple[int, int]:
    if low_mhz > high_mhz or low_mhz < clocks_mhz[0] or high_mhz > clocks_mhz[-1]:
        raise NvmlFault(Nvml.INVALID_ARGUMENT)
    return max(c for c in clocks_mhz if c <= low_mhz), max(c for c in clocks_mhz if c <= high_mhz)
