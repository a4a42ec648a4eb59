"""A simulated node without its socket: a machine and the processes on it, advanced by `tick`.

Once per tick each process's pace file tells how long each version computed; that becomes power, power becomes energy,
and energy is booked where it truly went. NVML sees the counter and the last tick's power; the split is for tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from power_agent.devices.energy import Draw, SliceAccount, VersionAccount
from power_agent.devices.errors import NodeRefused
from power_agent.devices.gpu_state import Gpu
from power_agent.devices.machine import CONTEXT_MIB, Machine
from power_agent.devices.pace import PaceFile, Work
from power_agent.devices.processes import Child, ProcessTable, kill_session
from power_agent.devices.workload import Workload

TICK_S_MIN: Final = 1e-3
LOAD_MODEL: Final = "--load-model="  # what a Triton's command line says it will serve; a swap changes only the variant


@dataclass(slots=True)
class Tenant:
    """One process on one slice."""

    child: Child
    gpu: Gpu
    pace: PaceFile
    account: SliceAccount
    clock_mhz: int
    families: frozenset[str]
    batches: int = 0
    mean_batch: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def serving(self) -> bool:
        """Past its first batch, which is the warm-up."""
        return self.batches > 0


class SimulatedNode:
    """Everything that lives and dies with the node's process."""

    def __init__(
        self, machine: Machine, workloads: Mapping[str, Workload], pace_dir: Path, seed: int, now_s: float
    ) -> None:
        self.name = machine.node
        self.machine = machine
        self.driver = machine.driver
        self.energies = machine.energies
        self.processes = ProcessTable()
        self._workloads = workloads
        self._pace_dir = pace_dir
        self._seeds = np.random.default_rng(seed)
        self._tenants: dict[int, Tenant] = {}
        self._starts = 0
        self._last_s = machine.driver.now_s = now_s
        self._paced = Work(0, 0, 0.0, 0, 0, 0, 0.0)

    # --- processes ---

    def start(
        self, tag: str, argv: Sequence[str], env: Mapping[str, str], log_path: str, cwd: str, now_s: float
    ) -> Child:
        """Idempotent by tag. `env` names the slice; the pace file is added to it."""
        running = self.processes.find_alive(tag)
        if running is not None:
            if running.argv == tuple(argv):
                return running
            raise NodeRefused(f"{tag} runs already with another command line", remedy="stop it first")
        target = self.machine.target(env.get("CUDA_VISIBLE_DEVICES", ""))
        gpu = target if isinstance(target, Gpu) else target.gi.gpu
        account = self.machine.account(target)
        self._starts += 1
        pace = PaceFile(
            self._pace_dir / f"gpu{gpu.index}-{account.slice_type}-{account.start}-{self._starts}.pace",
            int(self._seeds.integers(2**63)),
        )
        clock_mhz = gpu.serving_clock_mhz
        families = frozenset(word.removeprefix(LOAD_MODEL) for word in argv if word.startswith(LOAD_MODEL))
        try:
            workload = self._workloads[gpu.model.name]
            pace.write_table(clock_mhz, workload.entries(account.slice_type, clock_mhz, families))
            whole_env = {**env, "TREFOIL_PACE_FILE": str(pace.path)}
            child = self.processes.start(tag, argv, whole_env, log_path, cwd, account.mig_uuid, now_s)
        except BaseException:
            pace.close()
            raise
        self.driver.attach(child.pid, target, CONTEXT_MIB)
        self._tenants[child.pid] = Tenant(child, gpu, pace, account, clock_mhz, families)
        return child

    # --- time ---

    def tick(self, now_s: float) -> list[Child]:
        """Integrate up to `now_s` (monotonic), then notice exits; returns the children whose session has ended."""
        dt_s = now_s - self._last_s
        if dt_s < TICK_S_MIN:
            return []
        self._last_s = self.driver.now_s = now_s
        for gpu in self.driver.gpus:
            self._integrate(gpu, dt_s, int(now_s * 1e9))
        ended = self.processes.poll()
        for child in ended:
            tenant = self._tenants.pop(child.pid)
            tenant.pace.close()
            self.machine.detach(child.pid)
        return ended

    def _integrate(self, gpu: Gpu, dt_s: float, now_ns: int) -> None:
        tenants = [tenant for pid, tenant in self._tenants.items() if tenant.gpu is gpu and pid in gpu.processes]
        clock_mhz = gpu.serving_clock_at_mhz(self.driver.now_s)
        draws = []
        for tenant in tenants:
            if tenant.clock_mhz != clock_mhz:
                tenant.clock_mhz = clock_mhz
                workload = self._workloads[gpu.model.name]
                entries = workload.entries(tenant.account.slice_type, clock_mhz, tenant.families)
                tenant.pace.write_table(clock_mhz, entries)
            draws += self._draws(tenant, dt_s, now_ns)
        self.machine.integrate(gpu, dt_s, draws, any(tenant.serving for tenant in tenants))

    def _draws(self, tenant: Tenant, dt_s: float, now_ns: int) -> list[Draw]:
        works = tenant.pace.advance(now_ns)
        busy_s = sum(work.busy_s for work in works)
        # Two versions at once (a swap) share the slice: together they cannot compute longer than the tick.
        scale = min(1.0, dt_s / busy_s) if busy_s else 1.0
        warm = tenant.serving
        draws = []
        for work in works:
            key = (work.family_crc32, work.version)
            if work.batches:
                tenant.mean_batch[key] = work.items / work.batches
            version, density = self._version(tenant, key)
            account = tenant.account.versions.setdefault(key, version)
            account.busy_s += work.busy_s
            account.batches += work.batches
            account.items += work.items
            tenant.batches += work.batches
            self._paced = _add(self._paced, work)
            booked = account if warm else None
            generation = tenant.account.generation
            draws.append(Draw(tenant.account.slice_type, work.busy_s * scale, density, booked, generation))
        return draws

    def _version(self, tenant: Tenant, key: tuple[int, int]) -> tuple[VersionAccount, float]:
        workload = self._workloads[tenant.gpu.model.name]
        loaded = workload.loaded(tenant.account.slice_type, tenant.clock_mhz).get(key)
        if loaded is None:  # a model that the catalogue does not know: it computes all the same
            return VersionAccount(f"crc32:{key[0]:08x}", "", key[1]), 1.0
        density = loaded.density(tenant.mean_batch.get(key, 1.0))
        return VersionAccount(loaded.family, loaded.variant, loaded.version), density

    # --- what others may see ---

    def reload(self, load_number: int) -> None:
        """The driver restarts: whatever computes on its slices dies with it."""
        for child in self.processes:
            if child.alive:
                child.popen.kill()
                kill_session(child.pid)
        self.machine.reload(load_number)

    def pace_summary(self) -> dict[str, Any]:
        total = self._paced
        return {
            "batches": total.batches,
            "items": total.items,
            "overruns": total.overruns,
            "overrun_s": total.overrun_s,
            "busy_s": total.busy_s,
        }

    def truth(self) -> dict[str, Any]:
        """The hidden split since the node started."""
        return self.machine.truth()


def _add(total: Work, work: Work) -> Work:
    return Work(
        0,
        0,
        total.busy_s + work.busy_s,
        total.batches + work.batches,
        total.items + work.items,
        total.overruns + work.overruns,
        total.overrun_s + work.overrun_s,
    )
