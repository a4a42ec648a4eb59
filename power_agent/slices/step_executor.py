"""Step executor: carries out the reconciler's steps on one slice, one step at a time.

An error of a step is a TrefoilError with a remedy; the caller marks the slice FAILED and tries again later. Blocking
calls (driver, node process, files) run in threads.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from power_agent.devices.cpu import Cpu
from power_agent.durability.journal import Journal
from power_agent.runtimes.base import RunningTriton, Runtime
from power_agent.settings import PowerAgentSettings
from power_agent.slices.adopted_engine import AdoptedEngine, AdoptedEngines
from power_agent.slices.core.drain import NOTICE_S, drain_blocker, required_table, routed_by, still_routed
from power_agent.slices.core.patience import load_timeout_s
from power_agent.slices.core.proof import Expected, restricted_key
from power_agent.slices.core.reconcile import Task
from power_agent.slices.mig import MigInstances
from power_agent.slices.slice_state import Slice
from power_agent.triton.access import TritonAccess
from power_agent.triton.client import TritonClient, TritonUnready, VersionCounters
from power_agent.triton.installation import TritonInstall
from power_agent.triton.log_errors import log_size, read_first_error
from power_agent.triton.model_digests import ModelDigests
from power_agent.triton.slice_launch import (
    SliceLaunch,
    SliceSpec,
    clean_shared_memory,
    grpc_port,
    launch_of,
    prepare_slice,
    repository_name,
)
from trefoil.core.catalog import Catalog
from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.device_types import ENGINE, cpu_quota
from trefoil.core.errors import CatalogError, PlanError, StartError, StateUnavailable, TrefoilError
from trefoil.core.fleet import Hosted, SliceKey, SliceState, split_model
from trefoil.core.plan import Plan
from trefoil.runtime.clock import Clock
from trefoil.runtime.given.llm_backends import LLM_FILES
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.sightings import LiveAcks
from trefoil.runtime.state import State

T = TypeVar("T")
PROBE_TIMEOUT_S: Final = 4.0  # of a real inference on a slice
SWAP_TIMEOUT_S: Final = 30.0  # of loading another variant; where three times its load_s is more, that
DRAIN_POLL_S: Final = 0.1  # how often a draining slice is looked at
STOP_KILL_AFTER_S: Final = 5.0  # SIGKILL follows SIGTERM after this
IDLE_KILL_AFTER_S: Final = 0.5  # ... of a Triton that every dispatcher has drained
LOADS: Final = ("start", "load", "warm_up")  # steps that fail by what a model is
NO_INSTALL: Final = TritonInstall(*(Path("/nonexistent"),) * 4)  # of a Triton that runs, where none could be started


def _started_in(argv: Sequence[str], repository: Path) -> bool:
    """Whether a Triton's command names this repository; where its command is not known it is believed."""
    return not argv or f"--model-repository={repository_name(repository)}" in argv


class StepExecutor:
    """Executor of steps: driver through MigInstances, processes through the runtime, Triton through its gRPC."""

    def __init__(
        self,
        settings: PowerAgentSettings,
        clock: Clock,
        mig: MigInstances,
        runtime: Runtime,
        threads: Executor,
        state: State,
        journal: Journal,
        digests: ModelDigests,
        catalog: Catalog,
        keep_last_reading: Callable[[Slice], None],
        access: TritonAccess,
        plan_keys: PlanKeys,
    ) -> None:
        self._settings = settings
        self._access = access
        self._plan_keys = plan_keys
        self._routes: Plan | None = None
        self._cpu = Cpu(settings.node)
        self._clock = clock
        self._mig = mig
        self.runtime = runtime
        self._threads = threads
        self.install: TritonInstall | None = None  # found at start, before the first step
        self.install_failure = ""  # why there is none
        self._state = state
        self.acks = LiveAcks(state, clock)
        self._journal = journal
        self._digests = digests
        self.catalog = catalog
        self._keep_last_reading = keep_last_reading
        self._engines = AdoptedEngines(settings, clock)
        self._by_name: Mapping[str, Callable[[Slice, Task], Awaitable[None]]] = {
            "drain": self._drain,
            "stop": self._stop,
            "destroy_ci": self._destroy_ci,
            "destroy_gi": self._destroy_gi,
            "create_gi": self._create_gi,
            "create_ci": self._create_ci,
            "start": self._start,
            "load": self._load,
            "warm_up": self._warm_up,
        }
        self._log = structlog.get_logger()

    async def run(self, part: Slice, task: Task) -> None:
        """Run one step.

        Raises:
            TrefoilError: it did not work; the slice is as it was before, or FAILED by the caller.
        """
        try:
            await self._by_name[task.verb](part, task)
        except TrefoilError as error:
            if task.verb not in LOADS or part.launch is None or not (words := await self.triton_words(part)):
                raise
            raise error.with_cause(words) from error

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call of the runtime or the file system in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def processes(self) -> dict[str, RunningTriton]:
        """Processes that the runtime runs, and engines that are adopted, by tag."""
        found = {process.tag: process for process in await self.in_thread(self.runtime.list)}
        records = self._journal.state.slices.values()
        adopted = (record for record in records if record.key.slice_type.startswith(ENGINE))
        return found | {record.tag: self._engines.process(record.key, record.tag) for record in adopted}

    # --- instances ---------------------------------------------------------------------------------------------------

    async def _claim(self, part: Slice, task: Task) -> None:
        """Remember a slice as ours before anything of it exists."""
        part.generation = self._journal.next_generation()
        await self._journal.sync()
        part.hosted = task.hosted
        self._journal.remember_slice(part.record())

    async def _create_gi(self, part: Slice, task: Task) -> None:
        await self._claim(part, task)
        observed = await self._mig.create_gi(part.key)
        part.has_instance, part.has_compute = True, observed.ci_id is not None
        part.mig_uuid = observed.mig_uuid
        self._journal.remember_slice(part.record())  # again, should the driver have been loaded again since the claim

    async def _create_ci(self, part: Slice, task: Task) -> None:
        observed = await self._mig.create_ci(part.key)
        part.has_compute, part.mig_uuid = True, observed.mig_uuid

    async def _destroy_ci(self, part: Slice, task: Task) -> None:
        process = (await self.processes()).get(part.tag)
        if process is not None and process.alive:  # of an agent that was killed while it started it
            await self.end_orphan(part.tag)
        await self._mig.destroy_ci(part.key)
        part.has_compute, part.mig_uuid = False, ""

    async def _destroy_gi(self, part: Slice, task: Task) -> None:
        await self._mig.destroy_gi(part.key)
        part.has_instance = part.has_compute = False
        part.mig_uuid = ""

    # --- processes ---------------------------------------------------------------------------------------------------

    async def attach(self, part: Slice, process: RunningTriton) -> None:
        """Attach a slice to its process, which runs already; it needs its files only when it starts again."""
        if self._engines.on(part.key):
            part.attach_engine(self._engines.engine(part.key, part.hosted), process.incarnation)
            return
        spec = self._spec(part, part.hosted, process.argv)
        was_there = spec.repository.is_dir()
        part.launch = launch_of(self.install or NO_INSTALL, spec).at(process.host)
        await self.renew_files(part)
        part.stale_files = not was_there or not _started_in(process.argv, spec.repository)
        part.log_from = log_size(self._log_path(part))
        part.adopted = True
        self._attached(part, process)

    async def renew_files(self, part: Slice) -> None:
        """Write the files of a slice again; where that fails, what runs continues."""
        try:
            install = self._install()
            spec = self._spec(part, part.hosted, part.launch.argv if part.launch else ())
            await self.in_thread(lambda: prepare_slice(install, spec))
            if spec.tls is not None and not spec.tls.certificate.exists():
                await self.in_thread(lambda: self._access.write(part.key.name))
        except (CatalogError, StartError, OSError) as error:
            self._log.warning(
                "files of a slice cannot be renewed; it keeps running", slice=part.key.name, why=str(error)
            )

    async def ask_hosted(
        self, part: Slice, process: RunningTriton, variant_of: Callable[[str, int], str], timeout_s: float
    ) -> tuple[Hosted, ...]:
        """Ask a Triton that no journal knows what it hosts, and for an inference of each.

        Raises:
            TrefoilError, TimeoutError: it does not answer, or hosts what this node's repository lacks.
        """
        launch = launch_of(self.install or NO_INSTALL, self._spec(part, (), process.argv)).at(process.host)
        triton, found = self._client(replace(launch, repository=launch.source)), []
        try:
            async with asyncio.timeout(timeout_s):
                versions: dict[str, int] = {}
                for counted in await triton.statistics():
                    versions[counted.family] = max(counted.version, versions.get(counted.family, 0))
                for model, version in sorted(versions.items()):
                    family, stage, stages = split_model(model)
                    variant, instances = variant_of(family, version), await triton.instances(model, version)
                    await triton.probe(model, version, timeout_s)
                    found.append(Hosted(family, variant, version, stage, stages, instances))
        finally:
            await triton.close()
        return tuple(found)

    def expected(self, key: SliceKey, gpu_uuid: str) -> Expected:
        """What the Triton of a slice must be.

        Raises:
            SettingError: there is no port for it.
        """
        owner = f"{self._settings.cluster}/{self._settings.node}"
        port = grpc_port(self._settings.triton_port_base, key)
        return Expected(key, owner, gpu_uuid, port, self._access.own is not None)

    def _client(self, launch: SliceLaunch) -> TritonClient:
        return TritonClient(
            launch.grpc_target, launch.metrics_url, launch.repository, self._clock,
            key=launch.key, tls=self._access.own, name=self._access.name,
        )  # fmt: skip

    def _attached(self, part: Slice, process: RunningTriton) -> None:
        assert part.launch is not None
        part.running, part.incarnation = True, process.incarnation
        part.triton = self._client(part.launch)

    def _install(self) -> TritonInstall:
        if self.install is None:
            raise StartError(
                f"no Triton can be started here: {self.install_failure}", remedy="then start the agent again"
            )
        return self.install

    def _prepare(self, part: Slice, hosted: Sequence[Hosted]) -> SliceLaunch:
        launch = prepare_slice(self._install(), self._spec(part, hosted))  # says first what is not there at all
        self._check_files(hosted)
        self._access.write(part.key.name)
        return launch

    def _check_files(self, hosted: Sequence[Hosted]) -> None:
        for one in hosted:
            self._digests.check(one.model, one.version)

    def untimed(self, part: Slice) -> set[str]:
        """Families of a slice whose work Triton does not time: backends of LLMs take requests over at once."""
        return {hosted.family for hosted in part.hosted if self._digests.backend(hosted.family) in LLM_FILES}

    def _spec(self, part: Slice, hosted: Sequence[Hosted], argv: Sequence[str] = ()) -> SliceSpec:
        """`argv`: the command of its Triton, if it runs: by its key it was started, whatever became of the secret."""
        settings = self._settings
        port = grpc_port(settings.triton_port_base, part.key)
        return SliceSpec(
            name=part.key.name,
            repository=(settings.state_dir / "slices" / part.key.name).absolute(),
            source=settings.model_repository.absolute(),
            hosted=hosted,
            grpc_port=port,
            metrics_port=port + 1,
            gpu_uuid=part.mig_uuid,
            cpu_cores=self._cpu.pinned_cores(part.key) if part.key.device == self._cpu.device else None,
            cpu_quota=cpu_quota(part.key.slice_type),
            listen=settings.triton_listen,
            published_host=settings.advertise_host or settings.triton_listen,
            key=restricted_key(argv) if argv else self._access.key(part.tag),
            tls=self._access.files(part.key.name),
            launched_as=f"{settings.cluster}/{settings.node}/{part.tag}",
        )

    async def _start(self, part: Slice, task: Task) -> None:
        if part.state == SliceState.FAILED:
            part.move(SliceState.PENDING, task.why, self._clock.now_s())
        if not part.generation:  # a whole GPU, or cores: what runs there is all that there is of it
            if part.key.device != self._cpu.device and not self._engines.on(part.key):
                await self._mig.check_unused(part.key, part.mig_uuid)
            await self._claim(part, task)
        part.hosted = task.hosted
        part.move(SliceState.STARTING, task.why, self._clock.now_s())
        if self._engines.on(part.key):
            engine = self._engines.engine(part.key, part.hosted)
            await self._engines.wake(part.key, engine)
            part.attach_engine(engine, part.tag)
            return
        part.log_from = log_size(self._log_path(part))
        part.launch = await self.in_thread(lambda: self._prepare(part, task.hosted))
        launch, log_path = part.launch, self._log_path(part)
        process = await self.in_thread(lambda: self.runtime.start(part.tag, launch, log_path))
        part.launch = launch.at(process.host)
        self._attached(part, process)

    def _log_path(self, part: Slice) -> Path:
        return (self._settings.state_dir / "logs" / f"{part.key.name}.log").absolute()

    async def triton_words(self, part: Slice, *, process_gone: bool = False) -> str:
        """First error that a slice's Triton has logged since its start, as a cause; "" for none.

        `process_gone`: it is forgotten first, for only then a container's log is in the file.
        """

        def read() -> str:
            if process_gone:
                self.runtime.forget(part.tag)
            return read_first_error(self._log_path(part), part.log_from)

        try:
            words = await self.in_thread(read)
        except TrefoilError as error:
            self._log.warning("the log of a Triton is not read", slice=part.key.name, why=str(error))
            return ""
        return f"its Triton logged: {words}" if words else ""

    async def _stop(self, part: Slice, task: Task) -> None:
        await self._engines.sleep(part.key)
        await self.stop_process(part)
        if part.state != SliceState.DRAINING:
            part.fail(task.why, self._clock.now_s())
        part.move(SliceState.GONE, task.why, self._clock.now_s())

    async def stop_process(self, part: Slice, patience_s: float | None = None) -> None:
        """Stop a slice's Triton and all that belongs to it; no-op when it is gone. SIGKILL after `patience_s`.

        An adopted engine continues.
        """
        if not part.running:
            return
        if isinstance(part.triton, AdoptedEngine):
            await self.process_ended(part)
            return
        if part.triton is not None:
            try:
                part.record_counters(await part.triton.statistics(), self._clock.now_s())
            except TrefoilError as error:
                self._log.info("no last counters", slice=part.key.name, why=str(error))
        # A Triton takes 2 s to end by itself; one that surely has nothing in flight need not be waited for.
        kill_after_s = IDLE_KILL_AFTER_S if part.proved_idle else STOP_KILL_AFTER_S
        prefix = part.launch.shm_prefix if part.launch else ""
        await self._end(part.tag, kill_after_s if patience_s is None else patience_s, prefix)
        await self.process_ended(part)

    async def end_orphan(self, tag: str) -> None:
        """End a process that belongs to no slice."""
        await self._end(tag, STOP_KILL_AFTER_S)

    async def _end(self, tag: str, kill_after_s: float, shm_prefix: str = "") -> None:
        def end() -> None:
            self.runtime.stop(tag, kill_after_s)
            self.runtime.forget(tag)
            clean_shared_memory(shm_prefix)

        await self.in_thread(end)

    async def process_ended(self, part: Slice) -> None:
        """Note that a slice's Triton is gone, with what it did last."""
        triton = part.triton
        self._keep_last_reading(part)
        part.on_process_ended()
        if triton is not None:
            await triton.close()

    # --- models ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _triton(part: Slice) -> TritonClient | AdoptedEngine:
        """Client of the slice's Triton, which may have ended between the decision for a step and the step.

        Raises:
            TritonUnready: it has.
        """
        if part.triton is None:
            raise TritonUnready(f"the Triton of {part.key.name} has ended")
        return part.triton

    async def _load(self, part: Slice, task: Task) -> None:
        triton = self._triton(part)
        if part.state == SliceState.FAILED:
            await self._heal(part, task)
        elif part.state in (SliceState.PENDING, SliceState.STARTING):
            if part.state == SliceState.PENDING:
                part.move(SliceState.STARTING, task.why, self._clock.now_s())
            timeout_s = load_timeout_s(part.hosted, self.catalog, self._settings.ready_timeout_s)
            await triton.wait_ready(part.hosted, timeout_s)
        else:
            await self._swap(part, task)
        part.loaded = part.running

    async def _heal(self, part: Slice, task: Task) -> None:
        """A dead python stub comes back by unload and load. Only a new Triton helps where that fails, and where a model
        has separate processes: they outlive the stub, and keep the GPU's memory."""
        triton = self._triton(part)
        part.move(SliceState.PENDING, task.why, self._clock.now_s())
        if part.heal_failure or part.stale_files or any(triton.has_processes(one.model) for one in part.hosted):
            await self.stop_process(part)
            return
        part.move(SliceState.STARTING, task.why, self._clock.now_s())
        try:
            await self.in_thread(lambda: self._check_files(part.hosted))
            for hosted in part.hosted:
                await triton.heal(hosted, self._swap_timeout_s(hosted))
        except TrefoilError as error:
            part.heal_failure = str(error)
            raise

    def _swap_timeout_s(self, new: Hosted) -> float:
        return load_timeout_s((new,), self.catalog, SWAP_TIMEOUT_S)

    async def _swap(self, part: Slice, task: Task) -> None:
        triton = self._triton(part)
        assert isinstance(triton, TritonClient), "an engine serves one variant"
        if part.state == SliceState.READY:
            part.move(SliceState.SWAPPING, task.why, self._clock.now_s())

        def on_counters(counters: tuple[VersionCounters, ...]) -> None:
            part.record_counters(counters, self._clock.now_s())

        serving = {hosted.model: hosted for hosted in part.hosted}
        for new in task.hosted:
            old = serving.pop(new.model, None)
            if new == old:
                continue
            try:
                await self.in_thread(partial(self._check_files, (new,)))
                if old is None:
                    await self.in_thread(partial(self._prepare, part, (new,)))
                    await triton.add(new, self._swap_timeout_s(new))
                    part.hosted = (*part.hosted, new)
                    continue
                before = await triton.swap(old, new, self._swap_timeout_s(new), on_counters)
            except TrefoilError as error:
                # What it served it continues serving: the slice is as good as before, unless its Triton is gone.
                if part.state == SliceState.SWAPPING and part.running:
                    part.move(SliceState.READY, f"could not load {new.variant}: {error}", self._clock.now_s())
                raise
            part.record_counters(before, self._clock.now_s())
            part.hosted = tuple(new if hosted == old else hosted for hosted in part.hosted)
        for gone in serving.values():  # its neighbours serve on
            await self._until_drained(part, gone.model)
            await triton.remove(gone, SWAP_TIMEOUT_S)
        part.hosted = task.hosted
        self._journal.remember_slice(part.record())

    async def _warm_up(self, part: Slice, task: Task) -> None:
        triton = self._triton(part)
        for hosted in part.hosted:
            await triton.probe(hosted.model, hosted.version, PROBE_TIMEOUT_S)
        counters = await triton.statistics()
        if part.triton is not triton:
            raise TritonUnready(f"the Triton of {part.key.name} has ended")
        if part.state == SliceState.STARTING:
            part.record_overhead(counters)
        else:
            part.overhead_requests += len(part.hosted)
        now_s = self._clock.now_s()
        part.record_counters(counters, now_s)
        part.last_success_s, part.failing = now_s, False
        part.move(SliceState.READY, "", now_s)

    # --- drain -------------------------------------------------------------------------------------------------------

    async def _drain(self, part: Slice, task: Task) -> None:
        if part.state != SliceState.DRAINING:
            part.move(SliceState.DRAINING, task.why, self._clock.now_s())
        await self._until_drained(part)
        part.drained = True

    async def _until_drained(self, part: Slice, model: str = "") -> None:
        """Wait until no request of a model, or of any, is on the slice or can still come; not forever."""
        deadline_s = self._clock.monotonic_s() + self._settings.drain_timeout_s
        revision = self._journal.state.plan.revision if self._journal.state.plan else Revision()
        while waiting := await self._drain_blocker(part, revision, model):
            if self._clock.monotonic_s() >= deadline_s:
                self._log.warning("drain gave up", slice=part.key.name, model=model, waiting_for=waiting)
                did = f"{model} unloaded" if model else "stopped"
                part.why = f"{did} after {self._settings.drain_timeout_s:g} s although {waiting}"
                break
            if part.why != waiting:
                part.why = waiting
                part.on_move(part, part.state)
            await self._clock.sleep(DRAIN_POLL_S)

    async def _read_routes(self, live: Sequence[TableAck]) -> Plan | None:
        """Plan that workers route by: the one in Redis, or the last one before where that is not the controller's."""
        plan = await self._state.get(self._state.keys.plan(), Plan)
        try:
            verified = self._plan_keys.verify_routes(plan) if plan is not None else None
        except PlanError as error:
            self._log.warning("the plan in Redis is not used for drains", why=str(error))
            verified = None
        self._routes = routed_by(verified, live) or routed_by(self._routes, live)
        return self._routes

    async def _drain_blocker(self, part: Slice, revision: Revision, model: str) -> str:
        try:
            live = await self.acks.read()
            published = await self._read_routes(live)
        except StateUnavailable as error:
            return f"no acknowledgement can be read: {error}"
        required = required_table(part.key, revision, published, model)
        routed = still_routed(part.key, published, model)
        if model:  # its slice serves on: only routes can tell dispatchers to leave
            waiting = f"{model} is routed here" if routed else drain_blocker(part.key, required, live, model=model)
            return waiting or self.acks.blind
        waiting = drain_blocker(part.key, required, live, part.published_s + NOTICE_S if routed else -math.inf)
        waiting = waiting or self.acks.blind
        part.proved_idle = bool(live) and not waiting
        if waiting or part.triton is None:
            return waiting
        try:
            pending = await part.triton.pending()
        except TrefoilError as error:
            self._log.warning("drained a Triton that does not answer", slice=part.key.name, why=str(error))
            return ""
        return f"Triton has {pending} requests pending" if pending else ""

    # --- adoption ----------------------------------------------------------------------------------------------------

    async def read_hosted(self, part: Slice, variant_of: Callable[[str, int], str]) -> tuple[Hosted, ...]:
        """Read what a running Triton really serves: a swap may have ended unnoticed."""
        assert part.triton is not None
        counters = await part.triton.statistics()
        part.record_counters(counters, self._clock.now_s())
        versions: dict[str, list[int]] = {}
        for counted in counters:
            versions.setdefault(counted.family, []).append(counted.version)
        found = []
        for hosted in part.hosted:
            loaded = versions.pop(hosted.model, [])
            if hosted.version not in loaded and loaded:
                version = max(loaded)
                hosted = replace(hosted, version=version, variant=variant_of(hosted.family, version))
            if loaded or not counters:
                found.append(hosted)
        for model, loaded in sorted(versions.items()):
            family, stage, stages = split_model(model)
            found.append(Hosted(family, variant_of(family, max(loaded)), max(loaded), stage, stages))
        return tuple(found)
