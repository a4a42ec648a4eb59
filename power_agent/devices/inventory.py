"""MIG slices of a node's GPUs: one typed wrapper over the unmodified pynvml, for real and simulated hardware alike.

Slices are named by (profile, start, size) as in plans. GPU-instance ids and MIG UUIDs are read again at each listing
and never kept, because drivers reuse ids and change UUIDs. A kept handle is asked what it stands for before it is used.
NVML keeps no generation: the agent counts re-creations in its journal. Nothing here retries: the caller knows how long
it may wait (errors say who holds what). `gpus` opens and names the devices, reads and sets them."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pynvml

from power_agent.devices.errors import DeviceError, DeviceUnsupported, NoRoom, SliceMissing, translate_nvml_errors
from power_agent.devices.gpus import MEBIBYTE, Gpus, ObservedDevice
from power_agent.devices.instance_holders import Holders, find_holders, gpu_openers, reset_remedy
from trefoil.core.device_types import WHOLE
from trefoil.core.fleet import DeviceType, SliceKey

# NVML's constant of the compute-instance profile that fills a GPU instance of that many compute slices.
FULL_WIDTH_CI_CONSTANT: Final = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
# A long-lived NVML session may list instances that another process has destroyed (github.com/NVIDIA/libcudacxx 224).
STALE_HANDLE_ERRORS: Final = (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument)
REV1_GI_CONSTANT: Final = 7  # 1g with the media engines: its compute instance has a separate constant, also 7


@dataclass(frozen=True, slots=True)
class ObservedSlice:
    """One GPU instance, or a whole GPU (gi_id -1, `mig_uuid` is the GPU's own).

    `mig_uuid` is empty while an instance has no compute instance (an interrupted creation).
    """

    key: SliceKey
    gi_id: int
    ci_id: int | None
    mig_uuid: str
    memory_mib: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A GPU-instance profile of one device. `constant` asks for the profile, `id` creates and lists: they differ."""

    name: str
    constant: int
    id: int
    compute_slices: int
    instances_max: int
    sm_count: int
    memory_mib: int
    placements: tuple[tuple[int, int], ...]  # (start, size) in memory slices


class Inventory(Gpus):
    """GPUs and MIG slices of one node. Every method raises a DeviceError subclass when the driver refuses.

    `proc`: where to look for processes that hold an instance that NVML calls in use; None on a simulated node. There
    `holders` gives the processes that have the GPU of an index open, as (pid, name).
    """

    def __init__(
        self,
        node: str,
        proc: Path | None = Path("/proc"),
        holders: Callable[[int], Collection[tuple[int, str]]] | None = None,
    ) -> None:
        super().__init__(node)
        self._proc = proc
        self._gpu_holders = holders
        self._profiles: dict[str, tuple[Profile, ...]] = {}
        self._instance_handles: dict[SliceKey, tuple[Any, int]] = {}  # handle and id of a GPU instance
        self._compute_profiles: dict[tuple[str, str, int], int | None] = {}

    def _forget_handles(self) -> None:
        super()._forget_handles()
        self._profiles.clear()
        self._instance_handles.clear()
        self._compute_profiles.clear()

    def set_mig_mode(self, device: str, enabled: bool) -> ObservedDevice:
        """Set MIG mode and read it back: on A100 `mig_current` changes only with the reset of an idle GPU."""
        with translate_nvml_errors(device, "set MIG mode"):
            pynvml.nvmlDeviceSetMigMode(self._handle(device), int(enabled))  # returns a status, not an error: re-read
        self._forget_handles()  # a change of mode may void them
        return self.observe(device)

    def reset_remedy(self, device: str) -> str:
        """What a person has to do to reset a GPU, by who has it open now. Needs no session."""
        place = self.place(device)
        found: Collection[tuple[int, str]] = ()
        if place.minor is not None and self._proc is not None:
            found = gpu_openers(self._proc, place.minor)
        elif place.index is not None and self._gpu_holders is not None:
            found = self._gpu_holders(place.index)
        return reset_remedy(self.uuid(device), found, os.getpid())

    # --- slices ---

    def profiles(self, device: str) -> tuple[Profile, ...]:
        """MIG profiles of this device, read once per driver load; none without MIG or with its mode off."""
        if device not in self._profiles:
            with translate_nvml_errors(device, "read MIG profiles"):
                found = self._read_profiles(device)
            if not found:
                return ()  # not remembered: the mode may be switched on
            self._profiles[device] = found
        return self._profiles[device]

    def lacks(self, device: str, kind: DeviceType) -> tuple[str, ...]:
        """Slice types of a device type that the driver does not offer on this device, or not at the type's starts."""
        offered = {profile.name: {start for start, _ in profile.placements} for profile in self.profiles(device)}
        return tuple(s.name for s in kind.slice_types if not offered.get(s.name, set()).issuperset(s.starts))

    def whole_slice(self, device: str) -> ObservedSlice:
        """Slice of a GPU that is not cut: all of it, addressed by the GPU's own UUID."""
        with translate_nvml_errors(device, "read its memory"):
            memory_mib = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle(device)).total) // MEBIBYTE
        return ObservedSlice(SliceKey(device, WHOLE, 0, 1), -1, None, self.uuid(device), memory_mib, 0)

    def gpu_instances(self, device: str) -> tuple[ObservedSlice, ...]:
        """List every GPU instance that exists now, by start; also those without a compute instance."""
        found = []
        with translate_nvml_errors(device, "list GPU instances"):
            for profile in self.profiles(device):
                for instance in self._instances(device, profile):
                    with contextlib.suppress(*STALE_HANDLE_ERRORS):
                        found.append(self._observe_slice(device, profile, instance))
        return tuple(sorted(found, key=lambda observed: observed.key.start))

    def create_gpu_instance(self, device: str, slice_type: str, start: int) -> ObservedSlice:
        """Create a GPU instance at that start, or return the one that is there; it has no compute instance yet.

        Raises:
            DeviceUnsupported: no such profile, or it cannot start there.
            NoRoom: something else occupies the place; the text names it.
        """
        profile = self._profile(device, slice_type)
        sizes = dict(profile.placements)
        if start not in sizes:
            starts = ", ".join(str(begin) for begin, _ in profile.placements)
            raise DeviceUnsupported(f"{device}: {slice_type} cannot start at {start}", remedy=f"one of {starts}")
        key = SliceKey(device, slice_type, start, sizes[start])
        placement = pynvml.c_nvmlGpuInstancePlacement_t(start, sizes[start])
        try:
            with translate_nvml_errors(device, f"create {slice_type} at {start}"):
                instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                    self._handle(device), profile.id, ctypes.byref(placement)
                )
                gi_id = int(pynvml.nvmlGpuInstanceGetInfo(instance).id)
                self._instance_handles[key] = (instance, gi_id)
                return ObservedSlice(key, gi_id, None, "", profile.memory_mib, profile.sm_count)
        except NoRoom as error:
            existing = self._find_instance(key)  # the same answer is given when the very instance exists
            if existing is not None:
                return self._read_slice(key, profile, existing[0])
            held = ", ".join(f"{other.key.slice_type}@{other.key.start}" for other in self.gpu_instances(device))
            message = f"{device}: no room for {slice_type} at {start}, it holds {held or 'nothing'}"
            raise NoRoom(message, remedy="list the instances and plan around them", code=error.code) from error

    def create_compute_instance(self, key: SliceKey) -> ObservedSlice:
        """Create a full-width compute instance, or return the one that is there; its UUID is read after creation.

        Raises:
            SliceMissing: no such GPU instance.
        """
        profile = self._profile(key.device, key.slice_type)
        known = self._instance_handle(key)
        if known is None:
            raise SliceMissing(f"{key.name}: no such GPU instance", remedy="create it first")
        instance, gi_id = known
        try:
            with translate_nvml_errors(key.device, f"create the compute instance of {key.name}"):
                compute_id = self._compute_id(key.device, profile, instance, profile.compute_slices)
                if compute_id is None:
                    raise DeviceUnsupported(f"{key.name}: no compute instance fills it", remedy="plan another profile")
                compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, compute_id)
                made = pynvml.nvmlComputeInstanceGetInfo(compute)
                uuid = str(pynvml.nvmlDeviceGetUUID(made.device))
                return ObservedSlice(key, gi_id, made.id, uuid, profile.memory_mib, profile.sm_count)
        except NoRoom:
            observed = self._read_slice(key, profile, instance)
            if observed.ci_id is None:
                raise
            return observed  # it had one already

    def destroy_compute_instances(self, key: SliceKey) -> None:
        """Destroy all compute instances of a GPU instance; idempotent.

        Raises:
            DeviceBusy: processes still run there; `holders` names their pids.
        """
        known = self._instance_handle(key)
        if known is None:
            return
        profile = self._profile(key.device, key.slice_type)
        with translate_nvml_errors(key.device, f"list the compute instances of {key.name}"):
            computes = self._compute_instances(key.device, profile, known[0])
        for compute in computes:
            with translate_nvml_errors(
                key.device, f"destroy the compute instance of {key.name}", lambda: self._holders(key)
            ):
                pynvml.nvmlComputeInstanceDestroy(compute)

    def destroy_gpu_instance(self, key: SliceKey) -> None:
        """Destroy a GPU instance, and prove by a listing that it is gone; idempotent.

        Raises:
            DeviceBusy: something holds it; `holders` names the pids as far as known.
            DeviceError: the driver reported success but the instance is still listed.
        """
        known = self._instance_handle(key)
        if known is None:
            return
        with translate_nvml_errors(key.device, f"destroy {key.name}", lambda: self._holders(key)):
            pynvml.nvmlGpuInstanceDestroy(known[0])
        self._instance_handles.pop(key, None)
        if self._find_instance(key) is not None:
            message = f"{key.name}: the driver reported the instance destroyed, but still lists it"
            raise DeviceError(message, remedy="retry; if it stays, reset the GPU")

    def pids(self, mig_uuid: str) -> tuple[int, ...]:
        """Pids of the compute processes on a MIG device (or, with MIG off, on a whole GPU by its UUID).

        Raises:
            SliceMissing: no such MIG device any more.
        """
        with translate_nvml_errors(mig_uuid, "list processes"):
            handle = self._by_uuid(mig_uuid)
            return tuple(int(row.pid) for row in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))

    # --- helpers ---

    def _profile(self, device: str, slice_type: str) -> Profile:
        for profile in self.profiles(device):
            if profile.name == slice_type:
                return profile
        names = ", ".join(profile.name for profile in self.profiles(device))
        raise DeviceUnsupported(f"{device} has no MIG profile {slice_type!r}", remedy=f"one of {names or 'none'}")

    def _read_profiles(self, device: str) -> tuple[Profile, ...]:
        handle = self._handle(device)
        found = []
        for constant in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, constant)
            except pynvml.NVMLError_NotSupported:
                continue
            except pynvml.NVMLError_FunctionNotFound:
                break  # a driver from before MIG
            except pynvml.NVMLError_InvalidArgument:
                break  # an older driver knows fewer constants than this pynvml
            ask = partial(pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, handle, info.id)
            count = ctypes.c_uint(0)
            ask(None, ctypes.byref(count))
            placements = _filled(pynvml.c_nvmlGpuInstancePlacement_t, count.value, ask)
            found.append(
                Profile(
                    name=str(info.name).removeprefix("MIG "),
                    constant=constant,
                    id=info.id,
                    compute_slices=info.sliceCount,
                    instances_max=info.instanceCount,
                    sm_count=info.multiprocessorCount,
                    memory_mib=info.memorySizeMB,
                    placements=tuple((place.start, place.size) for place in placements),
                )
            )
        return tuple(found)

    def _instances(self, device: str, profile: Profile) -> list[Any]:
        ask = partial(pynvml.nvmlDeviceGetGpuInstances, self._handle(device), profile.id)
        return _filled(pynvml.c_nvmlGpuInstance_t, profile.instances_max, ask)

    def _compute_instances(self, device: str, profile: Profile, instance: Any) -> list[Any]:
        """All compute instances, whatever their width: a foreign tool may have cut the GPU instance differently."""
        found: list[Any] = []
        for width in FULL_WIDTH_CI_CONSTANT:
            compute_id = self._compute_id(device, profile, instance, width) if width <= profile.compute_slices else None
            if compute_id is None:
                continue
            ask = partial(pynvml.nvmlGpuInstanceGetComputeInstances, instance, compute_id)
            # An id that the driver does not take says nothing of the instance, which is there.
            with contextlib.suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
                found += _filled(pynvml.c_nvmlComputeInstance_t, profile.compute_slices // width, ask)
        return found

    def _observe_slice(self, device: str, profile: Profile, instance: Any) -> ObservedSlice:
        info = pynvml.nvmlGpuInstanceGetInfo(instance)
        key = SliceKey(device, profile.name, info.placement.start, info.placement.size)
        self._instance_handles[key] = (instance, int(info.id))
        ci_id, mig_uuid = None, ""
        for compute in self._compute_instances(device, profile, instance):
            compute_info = pynvml.nvmlComputeInstanceGetInfo(compute)
            if ci_id is None:
                ci_id, mig_uuid = compute_info.id, str(pynvml.nvmlDeviceGetUUID(compute_info.device))
        return ObservedSlice(key, info.id, ci_id, mig_uuid, profile.memory_mib, profile.sm_count)

    def _read_slice(self, key: SliceKey, profile: Profile, instance: Any) -> ObservedSlice:
        with translate_nvml_errors(key.device, f"look at {key.name}"):
            return self._observe_slice(key.device, profile, instance)

    def _compute_id(self, device: str, profile: Profile, instance: Any, width: int) -> int | None:
        """Id of the compute-instance profile of that many slices in such an instance; read once per driver load.

        None where there is none, as of three slices in a 4g. Boards so far number ids as NVML numbers its constants.
        """
        kept = (device, profile.name, width)
        if kept not in self._compute_profiles:
            rev1 = profile.constant == REV1_GI_CONSTANT
            constant = REV1_GI_CONSTANT if rev1 else FULL_WIDTH_CI_CONSTANT[width]
            try:
                info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                    instance, constant, pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
                )
                self._compute_profiles[kept] = int(info.id)
            except pynvml.NVMLError_NotSupported:
                self._compute_profiles[kept] = None
            except pynvml.NVMLError_InvalidArgument:  # a constant that this driver does not know
                return None
        return self._compute_profiles[kept]

    def _instance_handle(self, key: SliceKey) -> tuple[Any, int] | None:
        """The instance in that very place. A handle that we hold may by now name another process's instance."""
        kept = self._instance_handles.get(key)
        if kept is None:
            return self._find_instance(key)
        profile = self._profile(key.device, key.slice_type)
        with translate_nvml_errors(key.device, f"look at {key.name}"), contextlib.suppress(*STALE_HANDLE_ERRORS):
            info = pynvml.nvmlGpuInstanceGetInfo(kept[0])
            if (info.profileId, info.placement.start, info.id) == (profile.id, key.start, kept[1]):
                return kept
        self._instance_handles.pop(key)
        return self._find_instance(key)

    def _find_instance(self, key: SliceKey) -> tuple[Any, int] | None:
        profile = self._profile(key.device, key.slice_type)
        with translate_nvml_errors(key.device, f"look for {key.name}"):
            for instance in self._instances(key.device, profile):
                with contextlib.suppress(*STALE_HANDLE_ERRORS):
                    info = pynvml.nvmlGpuInstanceGetInfo(instance)
                    if info.placement.start == key.start:
                        self._instance_handles[key] = (instance, int(info.id))
                        return self._instance_handles[key]
        return None

    def _holders(self, key: SliceKey) -> Holders:
        """Processes that hold it, as far as known; looked up only when the driver has said IN_USE."""
        for observed in self.gpu_instances(key.device):
            if observed.key == key:
                pids = self.pids(observed.mig_uuid) if observed.mig_uuid else ()
                return find_holders(pids, self._proc, self.minor(key.device), observed.gi_id, os.getpid())
        return find_holders((), self._proc, None, None, os.getpid())


def _filled(kind: Any, room: int, ask: Callable[[Any, Any], Any]) -> list[Any]:
    """What a call of NVML writes into an array with room for so many, and counts."""
    count, rows = ctypes.c_uint(room), (kind * room)()
    ask(rows, ctypes.byref(count))
    return list(rows[: count.value])
