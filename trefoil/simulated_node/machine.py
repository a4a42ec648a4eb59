"""A simulated machine: the GPUs of a node with their driver, faults and true energy, but without processes and sockets.

Synchronous and in-process, so that a test may own one. Time is an argument, never read:

    machine = Machine(devices=("A100-SXM4-40GB", "Tesla T4"))
    with pynvml_on(machine.send): ...             # tests/support: the unmodified pynvml answers from it.
    machine.attach(4711, uuid)                    # A process on a MIG device or a whole GPU.
    machine.advance(0.5, [Load(uuid, busy_s=0.2, variant="digits-l", density=0.9)])
    machine.truth()                               # Where the joules went.
    machine.faults.plan("nvmlGpuInstanceDestroy", code=19, times=3)
    machine.reload()                              # The driver restarts.

`interference` adds what others do to it, `node` processes with pace files, `node_server` the socket.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from power_agent.devices.errors import NodeRefused
from trefoil.core import power
from trefoil.simulated_node.calls import CALLS
from trefoil.simulated_node.clients import OWN
from trefoil.simulated_node.driver import DRIVER_VERSION, Driver
from trefoil.simulated_node.energy import DeviceEnergy, PowerDraw, Sensors, SliceAccount, VersionAccount
from trefoil.simulated_node.faults import Fault, FaultPlan
from trefoil.simulated_node.gpu_models import gpu_model
from trefoil.simulated_node.gpu_state import ComputeInstance, Gpu, Nvml, NvmlFault
from trefoil.simulated_node.monitoring import WHOLE_GPU
from trefoil.simulated_node.pace_file import family_crc32

CONTEXT_MIB: Final = 450  # what a CUDA context, cuDNN and a Triton cost before any model; modelled
WHOLE_SIZE: Final = 1  # as in its SliceKey
SETTLE_S: Final = (0.005, 0.050)  # how long clocks take to follow a lock
THROTTLE_STEPS: Final = 4  # supported clocks that the power governor moves per tick
RELAX_RATIO: Final = 0.97  # of the power limit: below it the governor lets the clock rise
SYMBOLS_PRIVILEGED: Final = frozenset(
    {
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstance",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceDestroy",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
        "nvmlComputeInstanceDestroy",
        "nvmlDeviceSetGpuLockedClocks",
        "nvmlDeviceResetGpuLockedClocks",
        "nvmlDeviceSetPowerManagementLimit",
        "nvmlDeviceSetPersistenceMode",
    }
)
# Modelled on measurements of nvidia-smi and on driver developers' comments: mean and half-width [s].
LATENCY_S: Final = {
    "nvmlDeviceCreateGpuInstance": (0.015, 0.005),
    "nvmlDeviceCreateGpuInstanceWithPlacement": (0.015, 0.005),
    "nvmlGpuInstanceCreateComputeInstance": (0.010, 0.003),
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": (0.010, 0.003),
    "nvmlComputeInstanceDestroy": (0.020, 0.005),
    "nvmlGpuInstanceDestroy": (0.040, 0.010),
    "nvmlDeviceSetMigMode": (1.0, 0.2),
    "nvmlDeviceSetGpuLockedClocks": (0.008, 0.003),
    "nvmlDeviceResetGpuLockedClocks": (0.008, 0.003),
    "nvmlDeviceSetPowerManagementLimit": (0.008, 0.003),
}
SLOW_MIG_MODE_FACTOR: Final = 6.0  # before Hopper


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one version on one slice during a step. Loads that come before a slice serves are its warm-up."""

    uuid: str  # of the MIG device or the whole GPU
    busy_s: float
    variant: str = "v"
    density: float = 1.0
    family: str = "f"
    version: int = 1
    batches: int = 1
    items: int = 1


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that has met its fault, if any, and has not been executed."""

    symbol: str
    fault: Fault | None
    delay_s: float


class Machine:
    """A simulated machine: GPUs, driver, faults and energy of one node."""

    def __init__(
        self,
        node: str = "node0",
        devices: Sequence[str] = ("A100-SXM4-40GB",),
        *,
        seed: int = 0,
        noise_ratio: float = 0.0,
        mig_enabled: bool = True,
        fresh_uuids: bool = True,
        driver_version: str = DRIVER_VERSION,
        root: bool = True,
        symbols_missing: Sequence[str] = (),
        stale_listing: bool = False,
        settle_s: tuple[float, float] = (0.0, 0.0),
        call_latency: bool = False,
        counter_period_s: float = 0.0,
        load_number: int = 1,
    ) -> None:
        models = tuple(gpu_model(name) for name in devices)
        self.node = node
        self.driver = Driver(
            node,
            models,
            load_number=load_number,
            mig_enabled=mig_enabled,
            fresh_uuids=fresh_uuids,
            version=driver_version,
            settle_s=settle_s,
            stale_listing=stale_listing,
            seed=seed + 2,
        )
        self.root = root
        self.symbols_missing = frozenset(symbols_missing)
        self.faults = FaultPlan(seed + 3)
        self.foreign_w = [0.0] * len(models)
        self.energies = tuple(
            DeviceEnergy(model.type, chance, noise_ratio)
            for model, chance in zip(models, np.random.default_rng(seed).spawn(len(models)), strict=True)
        )
        self.on_reload: Callable[[], None] = self.reload  # what the fault `reload` does; a node replaces it
        self.calls = 0
        self._latency = np.random.default_rng(seed + 1) if call_latency else None
        self._sensors = tuple(
            Sensors(gpu, energy.at_rest_w) for gpu, energy in zip(self.driver.gpus, self.energies, strict=True)
        )
        self._counter_period_s = counter_period_s
        self._counter_zero_j = [0.0] * len(models)
        self._serving: set[int] = set()
        self._lock = threading.RLock()

    # --- NVML ---

    def begin_call(self, symbol: str, args: Sequence[Any]) -> PendingCall:
        """Begin a driver call: meet the fault plan; the caller waits `delay_s` before it executes the call."""
        fault = self.faults.next_fault(symbol)
        delay_s = fault.delay_s if fault else 0.0
        if self._latency is not None and symbol in LATENCY_S:
            mean_s, spread_s = LATENCY_S[symbol]
            own_s = mean_s + spread_s * (2 * float(self._latency.random()) - 1)
            delay_s += own_s * (SLOW_MIG_MODE_FACTOR if self._resets_for_mig(symbol, args) else 1.0)
        return PendingCall(symbol, fault, delay_s)

    def _resets_for_mig(self, symbol: str, args: Sequence[Any]) -> bool:
        if symbol != "nvmlDeviceSetMigMode":
            return False
        try:
            return not self.driver.gpu(args[0]).model.mig_mode_immediate
        except NvmlFault:
            return False

    def execute_call(self, pending: PendingCall, args: Sequence[Any], client: int = OWN) -> tuple[int, list[Any]]:
        """Execute a driver call of a client, by its pid; returns (nvmlReturn_t, out values)."""
        self.calls += 1
        clients, in_use = self.driver.clients, self._in_use() if pending.symbol == "nvmlShutdown" else ()
        clients.caller = client
        try:
            return self._execute(pending, args)
        finally:
            clients.caller = None
            self._deinitialise_unused(in_use)

    def end_client(self, pid: int) -> None:
        """End a client whose process is gone; what it had attached is closed."""
        in_use = self._in_use()
        self.driver.clients.end(pid)
        self._deinitialise_unused(in_use)

    def _in_use(self) -> list[Gpu]:
        return [gpu for gpu in self.driver.gpus if not self.driver.is_unused(gpu)]

    def _deinitialise_unused(self, before: Sequence[Gpu]) -> None:
        for gpu in before:
            if self.driver.is_unused(gpu):
                self.deinitialise(gpu)

    def _execute(self, pending: PendingCall, args: Sequence[Any]) -> tuple[int, list[Any]]:
        fault, symbol = pending.fault, pending.symbol
        if symbol not in CALLS or symbol in self.symbols_missing:
            return int(Nvml.FUNCTION_NOT_FOUND), []
        if fault is not None and fault.effect == "lose":
            self.driver.lose(self.gpu(fault.index))
        if fault is not None and fault.effect == "reload":
            self.on_reload()
        if fault is not None and fault.effect in ("fail", "pretend"):
            return (fault.code if fault.effect == "fail" else 0), []
        if not self.root and symbol in SYMBOLS_PRIVILEGED:
            return int(Nvml.NO_PERMISSION), []
        try:
            out = CALLS[symbol](self.driver, *args)
        except NvmlFault as refusal:
            return int(refusal.code), []
        return (fault.code, []) if fault is not None and fault.effect == "fail_after" else (0, out)

    def send(self, symbol: str, args: Sequence[Any]) -> tuple[int, list[Any]]:
        """Send one driver call as NvmlShim does, from any thread; a wait moves the machine's time, without a sleep."""
        with self._lock:
            pending = self.begin_call(symbol, args)
            self.driver.now_s += pending.delay_s
            return self.execute_call(pending, args)

    # --- processes and time ---

    def target(self, uuid: str) -> Gpu | ComputeInstance:
        """What CUDA would open by that UUID.

        Raises:
            NodeRefused: no such device, or a whole GPU whose MIG mode is on.
        """
        try:
            target = self.driver.by_uuid(uuid)
        except NvmlFault as error:
            message = f"CUDA_VISIBLE_DEVICES={uuid!r} names no device of {self.node}"
            raise NodeRefused(message, remedy="the UUID that NVML reports for the slice") from error
        if isinstance(target, Gpu) and target.mig_current:
            raise NodeRefused(f"{uuid} is in MIG mode", remedy="name one of its MIG devices")
        return target

    def account(self, target: Gpu | ComputeInstance) -> SliceAccount:
        """Account where the energy of this creation of a slice is booked."""
        if isinstance(target, Gpu):
            return self.energies[target.index].account(power.WHOLE, 0, WHOLE_SIZE, WHOLE_GPU, target.uuid)
        gi = target.gi
        energy = self.energies[gi.gpu.index]
        return energy.account(gi.profile.name, gi.start, gi.size, gi.generation, target.mig_uuid)

    def attach(self, pid: int, uuid: str, memory_mib: int = CONTEXT_MIB, serving: bool = True) -> None:
        """Attach a process to a slice; until it serves, what it draws is start-up and warm-up."""
        with self._lock:
            self.driver.attach(pid, self.target(uuid), memory_mib)
            if serving:
                self.mark_serving(pid)

    def mark_serving(self, pid: int) -> None:
        """Mark a process as serving: its warm-up is over."""
        self._serving.add(pid)

    def detach(self, pid: int) -> None:
        """Detach a process that has ended."""
        with self._lock:
            self.driver.detach(pid)
            self._serving.discard(pid)

    def advance(self, dt_s: float, loads: Sequence[Load] = ()) -> None:
        """Advance time by one step of constant power: `dt_s` seconds in which the slices computed `loads`."""
        with self._lock:
            self.driver.now_s += dt_s
            draws: dict[int, list[PowerDraw]] = {gpu.index: [] for gpu in self.driver.gpus}
            for load in loads:
                target = self.target(load.uuid)
                draws[target.gpu.index].append(self._draw(target, load))
            for gpu in self.driver.gpus:
                serving = any(pid in self._serving for pid in gpu.processes)
                self.integrate(gpu, dt_s, draws[gpu.index], serving)

    def _draw(self, target: Gpu | ComputeInstance, load: Load) -> PowerDraw:
        account = self.account(target)
        key = (family_crc32(load.family), load.version)
        version = account.versions.setdefault(key, VersionAccount(load.family, load.variant, load.version))
        version.busy_s += load.busy_s
        version.batches += load.batches
        version.items += load.items
        compute = None if isinstance(target, Gpu) else target
        on = (process.pid for process in target.gpu.processes.values() if process.compute is compute)
        warm = any(pid in self._serving for pid in on)
        return PowerDraw(account.slice_type, load.busy_s, load.density, version if warm else None, account.generation)

    def integrate(self, gpu: Gpu, dt_s: float, draws: Sequence[PowerDraw], serving: bool) -> None:
        """Book `dt_s` seconds of one GPU until now, and let its sensors see them."""
        now_s = self.driver.now_s
        energy = self.energies[gpu.index]
        tick = energy.step(
            dt_s,
            clock_mhz=gpu.clock_at_mhz(now_s),
            limit_w=gpu.power_limit_w,
            occupied=bool(gpu.processes),
            serving=serving,
            draws=draws,
            foreign_w=self.foreign_w[gpu.index],
        )
        gpu.capped = tick.capped
        _throttle(gpu, tick.power_w)
        self._sensors[gpu.index].update(now_s, dt_s, tick.power_w)
        for draw in draws:
            _add_busy_time(gpu, draw.generation, draw.busy_s, draw.density, 1.0)
            if draw.generation != WHOLE_GPU:
                _add_busy_time(gpu, WHOLE_GPU, draw.busy_s, draw.density, energy.sm_share(draw.slice_type))
        period_s = self._counter_period_s
        if not period_s or (now_s - dt_s) // period_s != now_s // period_s:
            gpu.energy_mj = int((energy.counter_j - self._counter_zero_j[gpu.index]) * 1e3)

    # --- trouble ---

    def gpu(self, index: int) -> Gpu:
        """GPU by its index."""
        if not 0 <= index < len(self.driver.gpus):
            raise NodeRefused(f"no GPU {index}", remedy=f"0 to {len(self.driver.gpus) - 1}")
        return self.driver.gpus[index]

    def reset(self, gpu: Gpu) -> None:
        """Reset a GPU as a person does: the counter starts again, the true split continues."""
        self.driver.reset(gpu)
        self._counter_zero_j[gpu.index] = self.energies[gpu.index].counter_j

    def deinitialise(self, gpu: Gpu) -> None:
        """Deinitialise an unused GPU as the driver does: what is not persistent starts again."""
        self.driver.deinitialise(gpu)
        self._counter_zero_j[gpu.index] = self.energies[gpu.index].counter_j

    def reload(self, load_number: int | None = None) -> None:
        """Reload the driver: see Driver.reload. The true split continues."""
        with self._lock:
            self.driver.reload(self.driver.load_number + 1 if load_number is None else load_number)
            self._serving.clear()
            self._counter_zero_j = [energy.counter_j for energy in self.energies]

    def truth(self) -> dict[str, Any]:
        """True energy split since the machine started; all terms of a device stem from the same steps."""
        devices = [
            {"device": f"{self.node}/gpu{gpu.index}", "uuid": gpu.uuid, **energy.truth()}
            for gpu, energy in zip(self.driver.gpus, self.energies, strict=True)
        ]
        return {"node": self.node, "devices": devices}


def _add_busy_time(gpu: Gpu, key: int, busy_s: float, density: float, share: float) -> None:
    busy, dense = gpu.busy_s.get(key, (0.0, 0.0))
    gpu.busy_s[key] = (busy + busy_s * share, dense + busy_s * density * share)


def _throttle(gpu: Gpu, power_w: float) -> None:
    """The power governor: lower the clock while the limit holds, raise it again when there is room."""
    clocks = gpu.model.clocks_mhz
    if gpu.capped:
        below = [clock for clock in clocks if clock < gpu.serving_clock_mhz]
        gpu.throttle_mhz = below[-min(THROTTLE_STEPS, len(below))] if below else clocks[0]
    elif gpu.throttle_mhz is not None and power_w < RELAX_RATIO * gpu.power_limit_w:
        above = [clock for clock in clocks if clock > gpu.throttle_mhz]
        gpu.throttle_mhz = above[min(THROTTLE_STEPS, len(above)) - 1] if above else None
