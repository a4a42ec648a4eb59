"""A simulated node without its socket: a machine and the processes on it, advanced by `tick`.

Once per tick each process's pace file tells how long each version computed. That becomes power, power becomes energy,
and energy is booked where it truly went. NVML sees the counter and the last tick's power; the split is for tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import structlog

from power_agent.devices.node_client import PaceSummary
from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.confinement import Confinement
from power_agent.runtimes.process import ProcessRuntime
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.fleet import family_of
from trefoil.simulated_node.energy import PowerDraw, SliceAccount, VersionAccount
from trefoil.simulated_node.gpu_state import Gpu
from trefoil.simulated_node.machine import CONTEXT_MIB, Machine
from trefoil.simulated_node.pace_file import PacedWork, PaceFile
from trefoil.simulated_node.workload import Workload

log = structlog.get_logger()

TICK_S_MIN: Final = 1e-3


@dataclass(slots=True)
class SliceProcess:
    """A process on a slice, with its pace file and its account."""

    tag: str
    pid: int
    gpu: Gpu
    pace: PaceFile
    account: SliceAccount
    clock_mhz: int
    batches: int = 0
    mean_batch: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def serving(self) -> bool:
        """Whether it is past its first batch, which is the warm-up."""
        return self.batches > 0


class SimulatedNode:
    """A simulated node: a machine and the processes on its slices."""

    def __init__(
        self,
        machine: Machine,
        runtime: ProcessRuntime,
        workloads: Mapping[str, Workload],
        pace_dir: Path,
        seed: int,
        now_s: float,
    ) -> None:
        self.name = machine.node
        self.machine = machine
        self.driver = machine.driver
        self.energies = machine.energies
        self.runtime = runtime
        self._workloads = workloads
        self._pace_dir = pace_dir
        self._seeds = np.random.default_rng(seed)
        self._slice_processes: dict[str, SliceProcess] = {}  # by the incarnation of their Triton
        self._starts = 0
        self._last_s = machine.driver.now_s = now_s
        self.work_total = PaceSummary()

    # --- processes ---

    def start(self, tag: str, launch: SliceLaunch, log_path: Path, confinement: Confinement) -> RunningTriton:
        """Start a process on the slice that its environment names; idempotent by tag. It gets a pace file beside.

        Raises:
            NodeRefused: there is no such slice.
            StartError: the program does not start, or the tag runs another.
        """
        target = self.machine.target(launch.env.get("CUDA_VISIBLE_DEVICES", ""))
        gpu = target.gpu
        account = self.machine.account(target)
        self._starts += 1
        workload, clock_mhz = self._workloads[gpu.model.type.name], gpu.serving_clock_mhz
        pace = PaceFile(
            self._pace_dir / f"gpu{gpu.index}-{account.slice_type}-{account.start}-{self._starts}.pace",
            int(self._seeds.integers(2**63)),
            workload.entries_max(account.slice_type),
        )
        started: RunningTriton | None = None
        try:
            pace.write_table(clock_mhz, workload.entries(account.slice_type, clock_mhz))
            env = {**launch.env, "TREFOIL_PACE_FILE": str(pace.path)}
            paced = replace(launch, env=env, files=(*launch.files, pace.path))
            started = self.runtime.start(tag, paced, log_path, confinement, writes=(pace.path,))
        finally:
            if started is None or started.incarnation in self._slice_processes:  # it runs already
                pace.close()
        if started.incarnation not in self._slice_processes:
            process = SliceProcess(tag, int(started.id), gpu, pace, account, clock_mhz)
            self.driver.attach(process.pid, target, CONTEXT_MIB)
            self._slice_processes[started.incarnation] = process
        return started

    def list_processes(self) -> Sequence[RunningTriton]:
        """List all processes; those that have ended let go of their slices."""
        found = {one.incarnation: one for one in self.runtime.list()}
        for incarnation in tuple(self._slice_processes):
            one = found.get(incarnation)
            if one is None or not one.alive:
                process = self._slice_processes.pop(incarnation)
                process.pace.close()
                self.machine.detach(process.pid)
                log.info("process ended", tag=process.tag, pid=process.pid, exit_code=one and one.exit_code)
        return tuple(found.values())

    def families(self) -> set[str]:
        """Families that have computed where a process runs now."""
        accounts = [process.account for process in self._slice_processes.values()]
        return {family_of(version.family) for account in accounts for version in account.versions.values()}

    def learn(self, workloads: Mapping[str, Workload]) -> None:
        """Go by another catalogue from now on, on slices that run too."""
        self._workloads = workloads
        for process in self._slice_processes.values():
            process.clock_mhz = 0  # its table is written again at the next tick

    # --- time ---

    def tick(self, now_s: float) -> None:
        """Integrate up to `now_s` (monotonic), then notice exits."""
        dt_s = now_s - self._last_s
        if dt_s < TICK_S_MIN:
            return
        self._last_s = self.driver.now_s = now_s
        for gpu in self.driver.gpus:
            self._integrate(gpu, dt_s, int(now_s * 1e9))
        if self.runtime.reap():
            self.list_processes()

    def _integrate(self, gpu: Gpu, dt_s: float, now_ns: int) -> None:
        slice_processes = [
            process for process in self._slice_processes.values() if process.gpu is gpu and process.pid in gpu.processes
        ]
        clock_mhz = gpu.serving_clock_at_mhz(self.driver.now_s)
        draws = []
        for process in slice_processes:
            if process.clock_mhz != clock_mhz:
                process.clock_mhz = clock_mhz
                entries = self._workloads[gpu.model.type.name].entries(process.account.slice_type, clock_mhz)
                if process.pace.holds(entries):
                    process.pace.write_table(clock_mhz, entries)
                else:
                    log.warning("families that came later do not fit a slice that runs", tag=process.tag)
            draws += self._draws(process, dt_s, now_ns)
        self.machine.integrate(gpu, dt_s, draws, any(process.serving for process in slice_processes))

    def _draws(self, process: SliceProcess, dt_s: float, now_ns: int) -> list[PowerDraw]:
        done = process.pace.collect_work(now_ns)
        keys = [(work.family_crc32, work.version) for work in done]
        process.mean_batch |= {k: work.items / work.batches for k, work in zip(keys, done, strict=True) if work.batches}
        known = [self._version(process, key) for key in keys]
        busy_s = sum(work.busy_s * min(1.0, density) for work, (_, density) in zip(done, known, strict=True))
        # Together they cannot keep more than the slice busy: a batch that overruns computed for real, not here.
        scale = min(1.0, dt_s / busy_s) if busy_s else 1.0
        warm = process.serving
        draws = []
        for key, work, (version, density) in zip(keys, done, known, strict=True):
            account = process.account.versions.setdefault(key, version)
            account.busy_s += work.busy_s
            account.batches += work.batches
            account.items += work.items
            process.batches += work.batches
            self.work_total = _add(self.work_total, work)
            booked = account if warm else None
            generation = process.account.generation
            draws.append(PowerDraw(process.account.slice_type, work.busy_s * scale, density, booked, generation))
        return draws

    def _version(self, process: SliceProcess, key: tuple[int, int]) -> tuple[VersionAccount, float]:
        workload = self._workloads[process.gpu.model.type.name]
        loaded = workload.versions(process.account.slice_type, process.clock_mhz).get(key)
        if loaded is None:  # a model that the catalogue does not know: it computes all the same
            return VersionAccount(f"crc32:{key[0]:08x}", "", key[1]), 1.0
        density = loaded.density(process.mean_batch.get(key, 1.0))
        return VersionAccount(loaded.family, loaded.variant, loaded.version), density

    def reload(self, load_number: int) -> None:
        """Reload the driver: whatever computes on its slices dies with it."""
        self.runtime.kill_all()
        self.machine.reload(load_number)


def _add(total: PaceSummary, work: PacedWork) -> PaceSummary:
    return PaceSummary(
        total.batches + work.batches,
        total.items + work.items,
        total.overruns + work.overruns,
        total.overrun_s + work.overrun_s,
        total.busy_s + work.busy_s,
    )
