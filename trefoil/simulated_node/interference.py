"""Interference with simulated GPUs: what an operator, another tool or a broken board does to them.

It has no faults, no latency and needs no permission; it is refused where the driver would refuse it.
"""

from collections.abc import Callable

from power_agent.devices.errors import NodeRefused
from trefoil.simulated_node.gpu_state import Gpu, GpuInstance, Nvml, NvmlFault
from trefoil.simulated_node.machine import Machine


class Interference:
    """Changes by others to a machine; each method is an admin verb. `index` names a GPU, `start` a GPU instance on it.

    Raises:
        NodeRefused: no such GPU or instance, or the driver says no; the text names its code.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    # --- drift ---

    def create_gi(self, index: int, slice_type: str, start: int, compute: bool = True) -> str:
        """Create a GPU instance, with a full-width compute instance if `compute`; returns the MIG UUID, or ""."""
        gpu, driver = self._machine.gpu(index), self._machine.driver
        profile = next((found for found in gpu.model.profiles if found.name == slice_type), None)
        if profile is None:
            known = ", ".join(found.name for found in gpu.model.profiles) or "none"
            raise NodeRefused(f"GPU {index} has no profile {slice_type!r}", remedy=f"one of {known}")
        try:
            instance = driver.create_gpu_instance(gpu, profile.id, (start, profile.memory_slices))
            if not compute:
                return ""
            return driver.create_compute_instance(instance, profile.ci_id(profile.compute_slices)).mig_uuid
        except NvmlFault as error:
            raise _refused(f"create {slice_type} at {start}", error) from error

    def destroy(self, index: int, start: int, compute_only: bool = False) -> None:
        """Destroy compute instances, then the GPU instance; with `stale_listing`, older sessions continue listing
        it."""
        driver, instance = self._machine.driver, self._instance(index, start)
        try:
            for compute in list(instance.computes.values()):
                driver.keep_listed(compute)
                driver.destroy_compute_instance(compute)
            if not compute_only:
                driver.keep_listed(instance)
                driver.destroy_gpu_instance(instance)
        except NvmlFault as error:
            raise _refused(f"destroy the instance at {start}", error) from error

    def lock_clocks(self, index: int, min_mhz: int, max_mhz: int) -> None:
        """Lock the SM clocks of a GPU."""
        self._do(index, "lock clocks", lambda gpu: self._machine.driver.lock_clocks(gpu, min_mhz, max_mhz))

    def reset_clocks(self, index: int) -> None:
        """Unlock the SM clocks of a GPU."""
        self._do(index, "reset clocks", self._machine.driver.reset_clocks)

    def application_clock(self, index: int, mhz: int) -> None:
        """Make it a board that comes with this application clock (0: with none)."""
        self._machine.gpu(index).application_mhz = mhz or None

    def set_power_limit(self, index: int, watts: float) -> None:
        """Set the power limit of a GPU."""
        self._do(index, "set the power limit", lambda gpu: self._machine.driver.set_power_limit(gpu, watts))

    def set_persistence(self, index: int, enabled: bool) -> None:
        """Set the persistence mode of a GPU."""
        self._machine.gpu(index).persistence = enabled

    def persistenced(self, running: bool) -> None:
        """Start nvidia-persistenced, which holds the GPUs whose persistence mode is on; its end switches that off."""
        self._machine.driver.clients.persistenced = running
        if not running:
            for gpu in self._machine.driver.gpus:
                gpu.persistence = False

    def set_mig_mode(self, index: int, enabled: bool) -> int:
        """Set the MIG mode; returns the activation status, as nvidia-smi would see it."""
        gpu = self._machine.gpu(index)
        if not gpu.model.mig_capable:
            raise NodeRefused(f"GPU {index} ({gpu.model.type.name}) has no MIG", remedy="choose a MIG capable GPU")
        return int(self._machine.driver.set_mig_mode(gpu, enabled))

    # --- holders ---

    def attach(self, index: int, pid: int, start: int | None = None, memory_mib: int = 450) -> None:
        """Attach a foreign process with a context to an instance or a whole GPU; NVML lists it."""
        gpu = self._machine.gpu(index)
        if start is None:
            self._do(index, "attach", lambda _: self._machine.driver.attach(pid, gpu, memory_mib))
            return
        instance = self._instance(index, start)
        if not instance.computes:
            raise NodeRefused(f"the instance at {start} has no compute instance", remedy="create one first")
        self._machine.driver.attach(pid, next(iter(instance.computes.values())), memory_mib)

    def detach(self, pid: int) -> None:
        """End a foreign process."""
        self._machine.detach(pid)

    def leak_handle(self, index: int, start: int | None = None) -> None:
        """Keep an instance, or the GPU, IN_USE by a client that NVML does not list (a handle that DCGM leaked)."""
        (self._machine.gpu(index) if start is None else self._instance(index, start)).handle_leaked = True

    def release_handles(self, index: int) -> None:
        """Release all leaked handles of a GPU (DCGM was restarted)."""
        gpu = self._machine.gpu(index)
        gpu.handle_leaked = False
        for instance in gpu.instances.values():
            instance.handle_leaked = False

    # --- the board ---

    def foreign_load(self, index: int, watts: float) -> None:
        """Set the power that foreign processes draw [W]."""
        self._machine.foreign_w[self._machine.gpu(index).index] = watts

    def overheat(self, index: int, mhz: int) -> None:
        """Hold the clock at `mhz` by heat, until it is called with 0."""
        self._machine.gpu(index).thermal_mhz = mhz or None

    def xid(self, index: int, code: int, start: int | None = None) -> None:
        """Report an Xid error to clients that wait for events; the GPU continues."""
        gpu = self._machine.gpu(index)
        self._machine.driver.xid(gpu, code, None if start is None else self._instance(index, start))

    def lose(self, index: int) -> None:
        """Let a GPU fall off the bus (Xid 79); back after a reset."""
        self._machine.driver.lose(self._machine.gpu(index))

    def deinitialise(self, index: int) -> None:
        """Let go of a GPU without persistence mode: locks, limits and counter start again, handles stay."""
        gpu = self._machine.gpu(index)
        if gpu.persistence or gpu.processes:
            why = "persistence mode is on" if gpu.persistence else "processes are on it"
            raise NodeRefused(f"GPU {index} stays initialised: {why}", remedy="set_persistence off, end its processes")
        self._machine.deinitialise(gpu)

    def reset(self, index: int) -> None:
        """Reset a GPU."""
        self._do(index, "reset", self._machine.reset)

    # --- helpers ---

    def _instance(self, index: int, start: int) -> GpuInstance:
        gpu = self._machine.gpu(index)
        for instance in gpu.instances.values():
            if instance.start == start:
                return instance
        starts = ", ".join(str(instance.start) for instance in gpu.instances.values()) or "none"
        raise NodeRefused(f"GPU {index} has no instance at {start}", remedy=f"one of {starts}")

    def _do(self, index: int, what: str, act: Callable[[Gpu], None]) -> None:
        try:
            act(self._machine.gpu(index))
        except NvmlFault as error:
            raise _refused(f"{what} of GPU {index}", error) from error


def _refused(what: str, error: NvmlFault) -> NodeRefused:
    reasons = {Nvml.IN_USE: "is in use: stop its processes first", Nvml.INSUFFICIENT_RESOURCES: "the place is taken"}
    return NodeRefused(f"could not {what}: {error.code.name}", remedy=reasons.get(error.code, "see the driver's rules"))
