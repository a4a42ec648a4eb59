"""A simulated node without its socket: driver, energy and processes, advanced by `tick`.

Once per tick each process's pace file tells how long each version computed; that becomes power, power becomes energy,
and energy is booked where it truly went. NVML sees the counter and the last tick's power; the split is for tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from power_agent.devices.driver import Driver, Gpu, NvmlFault
from power_agent.devices.energy import DeviceEnergy, Draw, SliceAccount, VersionAccount
from power_agent.devices.errors import NodeRefused
from power_agent.devices.pace import PaceFile, Work
from power_agent.devices.processes import Child, ProcessTable
from power_agent.devices.workload import Workload
from trefoil.core.power import WHOLE

CONTEXT_MIB: Final = 450  # what a CUDA context, cuDNN and a Triton cost before any model; modelled
TICK_S_MIN: Final = 1e-3
NO_GENERATION: Final = 0  # of a whole GPU
WHOLE_SIZE: Final = 1  # as in its SliceKey


@dataclass(slots=True)
class Tenant:
    """One process on one slice."""

    child: Child
    gpu: Gpu
    pace: PaceFile
    account: SliceAccount
    clock_mhz: int
    batches: int = 0
    mean_batch: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def serving(self) -> bool:
        """Past its first batch, which is the warm-up."""
        return self.batches > 0


class SimulatedNode:
    """Everything that lives and dies with the node's process."""

    def __init__(
        self,
        name: str,
        driver: Driver,
        workloads: Mapping[str, Workload],
        energies: Sequence[DeviceEnergy],
        pace_dir: Path,
        seed: int,
        now_s: float,
    ) -> None:
        self.name = name
        self.driver = driver
        self.processes = ProcessTable()
        self.energies = tuple(energies)
        self.foreign_w = [0.0] * len(driver.gpus)
        self._workloads = workloads
        self._pace_dir = pace_dir
        self._seeds = np.random.default_rng(seed)
        self._tenants: dict[int, Tenant] = {}
        self._starts = 0
        self._last_s = now_s
        self._counter_zero_j = [0.0] * len(driver.gpus)
        self._paced = Work(0, 0, 0.0, 0, 0, 0, 0.0)
        for gpu, energy in zip(driver.gpus, self.energies, strict=True):
            gpu.power_w = energy.at_rest_w  # until the first tick

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
        gpu, account, target = self._resolve(env.get("CUDA_VISIBLE_DEVICES", ""))
        self._starts += 1
        pace = PaceFile(
            self._pace_dir / f"gpu{gpu.index}-{account.slice_type}-{account.start}-{self._starts}.pace",
            int(self._seeds.integers(2**63)),
        )
        clock_mhz = gpu.serving_clock_mhz
        try:
            pace.write_table(clock_mhz, self._workloads[gpu.model.name].entries(account.slice_type, clock_mhz))
            whole_env = {**env, "TREFOIL_PACE_FILE": str(pace.path)}
            child = self.processes.start(tag, argv, whole_env, log_path, cwd, account.mig_uuid, now_s)
        except BaseException:
            pace.close()
            raise
        self.driver.attach(child.pid, target, CONTEXT_MIB)
        self._tenants[child.pid] = Tenant(child, gpu, pace, account, clock_mhz)
        return child

    def _resolve(self, wanted: str) -> tuple[Gpu, SliceAccount, Any]:
        try:
            target = self.driver.by_uuid(wanted)
        except NvmlFault as error:
            message = f"CUDA_VISIBLE_DEVICES={wanted!r} names no device of {self.name}"
            raise NodeRefused(message, remedy="the UUID that NVML reports for the slice") from error
        if isinstance(target, Gpu):
            if target.mig_current:
                raise NodeRefused(f"{wanted} is in MIG mode", remedy="name one of its MIG devices")
            return target, self._account(target.index, WHOLE, 0, WHOLE_SIZE, NO_GENERATION, target.uuid), target
        gi = target.gi
        account = self._account(gi.gpu.index, gi.profile.name, gi.start, gi.size, gi.generation, target.mig_uuid)
        return gi.gpu, account, target

    def _account(self, index: int, slice_type: str, start: int, size: int, generation: int, uuid: str) -> SliceAccount:
        for account in self.energies[index].slices:
            if account.generation == generation and account.mig_uuid == uuid:
                return account
        account = SliceAccount(slice_type, start, size, generation, uuid)
        self.energies[index].slices.append(account)
        return account

    # --- time ---

    def tick(self, now_s: float) -> list[Child]:
        """Integrate up to `now_s` (monotonic), then notice exits; returns the children whose session has ended."""
        dt_s = now_s - self._last_s
        if dt_s < TICK_S_MIN:
            return []
        self._last_s = now_s
        for gpu in self.driver.gpus:
            self._integrate(gpu, dt_s, int(now_s * 1e9))
        ended = self.processes.poll()
        for child in ended:
            tenant = self._tenants.pop(child.pid)
            tenant.pace.close()
            self.driver.detach(child.pid)
        return ended

    def _integrate(self, gpu: Gpu, dt_s: float, now_ns: int) -> None:
        tenants = [tenant for tenant in self._tenants.values() if tenant.gpu is gpu]
        draws = []
        for tenant in tenants:
            if tenant.clock_mhz != gpu.serving_clock_mhz:
                tenant.clock_mhz = gpu.serving_clock_mhz
                workload = self._workloads[gpu.model.name]
                tenant.pace.write_table(tenant.clock_mhz, workload.entries(tenant.account.slice_type, tenant.clock_mhz))
            draws += self._draws(tenant, dt_s, now_ns)
        energy = self.energies[gpu.index]
        tick = energy.step(
            dt_s,
            clock_mhz=gpu.clock_mhz,
            limit_w=gpu.power_limit_w,
            occupied=bool(tenants),
            serving=any(tenant.serving for tenant in tenants),
            draws=draws,
            foreign_w=self.foreign_w[gpu.index],
        )
        gpu.power_w, gpu.capped = tick.power_w, tick.capped
        gpu.energy_mj = int((energy.counter_j - self._counter_zero_j[gpu.index]) * 1e3)

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
            draws.append(Draw(tenant.account.slice_type, work.busy_s * scale, density, account if warm else None))
        return draws

    def _version(self, tenant: Tenant, key: tuple[int, int]) -> tuple[VersionAccount, float]:
        workload = self._workloads[tenant.gpu.model.name]
        loaded = workload.loaded(tenant.account.slice_type, tenant.clock_mhz).get(key)
        if loaded is None:  # a model that the catalogue does not know: it computes all the same
            return VersionAccount(f"crc32:{key[0]:08x}", "", key[1]), 1.0
        density = loaded.density(tenant.mean_batch.get(key, 1.0))
        return VersionAccount(loaded.family, loaded.variant, loaded.version), density

    # --- what others may see ---

    def reset(self, gpu: Gpu) -> None:
        """A GPU reset by a person: the counter starts anew, the true split goes on."""
        self.driver.reset(gpu)
        self._counter_zero_j[gpu.index] = self.energies[gpu.index].counter_j

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
        """The hidden split since the node started; all terms of a device stem from the same ticks."""
        return {"node": self.name, "devices": [self._truth_of(gpu) for gpu in self.driver.gpus]}

    def _truth_of(self, gpu: Gpu) -> dict[str, Any]:
        energy = self.energies[gpu.index]
        return {
            "device": f"{self.name}/gpu{gpu.index}",
            "uuid": gpu.uuid,
            "counter_j": energy.counter_j,
            "active_j": energy.active_j,
            "idle_j": energy.idle_j,
            "unallocated_j": energy.unallocated_j,
            "unallocated": {
                "asleep_j": energy.asleep_j,
                "starting_j": energy.starting_j,
                "warm_up_j": energy.warm_up_j,
                "foreign_j": energy.foreign_j,
            },
            "slices": [_truth_of_slice(account) for account in energy.slices],
        }


def _truth_of_slice(account: SliceAccount) -> dict[str, Any]:
    versions = [
        {
            "family": version.family,
            "variant": version.variant,
            "version": version.version,
            "active_j": version.active_j,
            "busy_s": version.busy_s,
            "batches": version.batches,
            "items": version.items,
        }
        for version in account.versions.values()
    ]
    return {
        "slice_type": account.slice_type,
        "start": account.start,
        "size": account.size,
        "generation": account.generation,
        "mig_uuid": account.mig_uuid,
        "active_j": sum(version["active_j"] for version in versions),
        "versions": versions,
    }


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
