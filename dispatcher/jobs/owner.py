"""Owns the jobs of a folder: holds its lease, runs jobs, ends cancelled ones, removes old results and files.

One of the workers that share a folder holds its lease in Redis and owns all its jobs. If it dies, another worker takes
the jobs over when the lease has expired. Its epoch is higher than all epochs in the folder, also after Redis was
emptied; so the writes of an earlier owner are ignored (core/journal.py). Without Redis jobs pause when the lease
expires; interactive requests go on. A worker without credits for a waiting job gives the lease up to other workers.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Set
from typing import Final

import structlog

from dispatcher.fronts.admin import AllWorkers
from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.openai.completions import Completions
from dispatcher.jobs.core.job import Job, JobState
from dispatcher.jobs.core.turns import JobTurns
from dispatcher.jobs.entries import sweep
from dispatcher.jobs.files import FilesFolder
from dispatcher.jobs.folder import JobReader, JobsFolder, OwnedJob, Stored, highest_epoch, on_disk
from dispatcher.jobs.idle_slices import IdleSlices
from dispatcher.jobs.job_run import AT_ONCE, JobRun, stuck, unfit
from dispatcher.jobs.line_run import LineRun
from dispatcher.jobs.planned_hours import Left, PlannedHours
from dispatcher.jobs.zones import Zones
from dispatcher.routing.core.membership import worker_name
from dispatcher.service.state_sync import StateSync
from trefoil.core.common import Lease
from trefoil.core.errors import Fenced, StateUnavailable, TrefoilError
from trefoil.runtime.state import LEASE_TTL_S, State
from trefoil.runtime.telemetry import Metrics

LOG = structlog.get_logger()
LOOK_S: Final = 0.5
POLL_S: Final = 0.01  # how often a slice that was not idle is looked at again
SETTLE_S: Final = 1.0
RUNS_MAX: Final = 16  # jobs that run at once: each has files open and items in memory
OWNED_S: Final = 5.0  # least time before a worker gives its jobs to another one that has credits for them
LEFT_S: Final = 2.0  # time for the others to take them
FILES_S: Final = 60.0  # how often old files are removed
UPLOAD_MAX_S: Final = 3600.0  # an upload without a byte for so long is left over
GONE: Final = "its items are not on disk any more"


class JobsOwner:
    """Owner of the jobs of this worker's folder, while it holds their lease. A part of the service."""

    def __init__(
        self,
        fronts: Fronts,
        sync: StateSync,
        all_workers: AllWorkers,
        state: State,
        folder: JobsFolder,
        metrics: Metrics,
    ) -> None:
        local = self._local = fronts.local
        self._inference, self._contracts = fronts.inference, fronts.contracts
        self._sync, self._all_workers = sync, all_workers
        self._state, self._folder, self._metrics = state, folder, metrics
        self._completions, self._weight_of, self._clock = Completions(fronts), fronts.access.weight, local.clock
        self._files = FilesFolder(folder.root, folder.bounds, local.settings.jobs_keep_s)
        self._files_at_s = -math.inf  # when old ones were removed
        self.idle = IdleSlices(local)
        self.hours = PlannedHours(state, local.clock, sync.verify_jobs)
        self.zones = Zones(local, self.hours)
        self.runs: dict[str, JobRun] = {}
        self._turns = JobTurns(self._weight_of)
        self._left: dict[str, tuple[int, float]] = {}  # items and grams of jobs that do not run
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended_at_s: dict[str, float] = {}
        self._waiting: dict[str, str] = {}  # why a job is not run, by its name
        self._wake = asyncio.Event()  # a batch has ended, or items are read
        self._lease: Lease | None = None
        self._role = ""
        self._owned_s = self._left_s = -math.inf  # when the lease was acquired, and left to others
        self.why = ""  # all jobs wait

    @property
    def name(self) -> str:
        """Name of this worker, as readers see who owns a job."""
        return worker_name(self._local.id)

    @property
    def owns(self) -> bool:
        """Whether this worker holds the lease."""
        return self._lease is not None and self._state.holds(self._lease)

    def alive(self, owner: str) -> str:
        """An owner's name, if that may still hold the lease; else empty."""
        alive = self.owns if owner == self.name else owner in self._local.routing.membership.sharer_names
        return owner if alive else ""

    async def init(self) -> None:
        """Nothing to acquire: the lease is taken when there is a job."""

    async def run(self) -> None:
        """Run jobs, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew(), name="lease of jobs")
            group.create_task(self._follow_load(), name="load beside jobs")
            group.create_task(self._keep(), name="jobs")
            group.create_task(self._schedule(), name="batches of jobs")
            group.create_task(self.zones.run(lambda: self.runs.values() if self.owns else ()), name="parcels of jobs")

    async def shutdown(self) -> None:
        """Let another worker own the jobs."""
        await self._give_up()
        await self.zones.close()
        await self._completions.close()

    async def _give_up(self) -> None:
        """Write what is under way, and let another worker own the jobs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await asyncio.gather(*map(self._settle, self.runs))
        await self._drop_all()
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                await self._state.release(lease)
            except StateUnavailable as error:
                LOG.warning("lease of jobs left to expire", why=str(error))

    async def _renew(self) -> None:
        while True:
            await self._clock.sleep(LEASE_TTL_S / 4)
            if self._lease is not None:
                with contextlib.suppress(StateUnavailable):  # it holds until its time is over
                    await self._state.renew(self._lease)

    async def _follow_load(self) -> None:
        own = self._sync.subscribe()
        try:
            async with contextlib.aclosing(self._all_workers.windows(own)) as windows:
                async for window in windows:
                    self.idle.on_window(window)
        finally:
            self._sync.unsubscribe(own)

    # --- which jobs are ours ------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            try:
                if self._inference.zones:
                    await self.hours.read()
                    self._inference.zones.follow(self.hours.requests())
                await self._look()
                await self._expire_files()
                self.why = ""
            except Exception as error:  # requests are served whatever jobs break on
                known = isinstance(error, TrefoilError | OSError)
                if (why := str(error) if known else f"{error!r}, see the log") != self.why:
                    self.why = why
                    LOG.warning("jobs wait", why=why, exc_info=None if known else error)
            await self._clock.sleep(LOOK_S)

    async def _expire_files(self) -> None:
        now_s = self._clock.now_s()
        if self._clock.monotonic_s() - self._files_at_s > FILES_S:
            await on_disk(self._files.expire, now_s, min(now_s, self.calendar_s()) - UPLOAD_MAX_S)
            self._files_at_s = self._clock.monotonic_s()

    async def _look(self) -> None:
        names = set(await on_disk(self._folder.ids))
        jobs = await on_disk(self._read, names)
        if names:
            if not self._role:
                self.hours.folder = await on_disk(self._folder.name)
                self._role = f"jobs:{self.hours.folder}"
            await self.hours.read()
        if not await self._hold_lease(bool(names), [each.job for each in jobs.values()]):
            return
        await self._tell(jobs)
        waits = await self._waits(jobs)
        chosen = self._chosen(jobs, waits)
        for name in (self.runs.keys() & jobs.keys()) - set(chosen):
            if await self._settle(name):
                await self._stop(name)
        for name in jobs:
            async with self._alone(name):
                if name in self.runs:
                    await self._step(name)
                elif name in chosen or await on_disk(self._folder.cancelled, name) is not None:
                    await self._take_over(name)
                else:
                    await self._wait(name, waits[name] or "other jobs go first")
                    continue
                self._waiting.pop(name, None)
        for name in self.runs.keys() - names:
            await self._stop(name)
        await self._expire(names)
        self._show()

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """Keep a fault of one job from the others; its readers are told."""
        try:
            yield
        except (TrefoilError, OSError) as error:
            await self._wait(name, str(error))
        except Exception as error:
            LOG.exception("job failed", job=name)
            await self._wait(name, f"its files cannot be used: {error!r}")

    async def _settle(self, name: str) -> bool:
        """As `JobRun.settle`."""
        settled = False
        async with self._alone(name):
            settled = await self.runs[name].settle()
        return settled

    def _read(self, names: Set[str]) -> dict[str, Stored]:
        """Jobs that may not have ended."""
        found = {}
        for name in sorted(names):
            try:
                if name not in self._ended_at_s:
                    found[name] = self._folder.stored(name)
            except (TrefoilError, OSError) as error:
                self._waiting[name] = str(error)
        return found

    def _chosen(self, jobs: Mapping[str, Stored], waits: Mapping[str, str]) -> list[str]:
        """Jobs that run at once: those that can go on before those that cannot, the first of each family and tenant
        before the second ones, else in turn."""
        before: Counter[tuple[bool, str, str]] = Counter()
        rank = {}
        for name in sorted(jobs, key=lambda name: jobs[name].job.turn):
            job = jobs[name].job
            kind = (bool(waits[name]), job.family, job.tenant)
            rank[name] = (kind[0], before[kind])
            before[kind] += 1
        return sorted(rank, key=lambda name: rank[name])[:RUNS_MAX]

    async def _waits(self, jobs: Mapping[str, Stored]) -> dict[str, str]:
        """Why jobs have to wait, whatever is idle; empty: they do not."""
        found = {}
        for name, stored in jobs.items():
            found[name] = stuck(self._local, self.idle, stored.job)
            if not found[name]:
                run = self.runs.get(name)
                waiting = run.waiting if run is not None else self._left.get(name, (0, 0.0))[0]
                room, why = self._may_start(stored, waiting)
                found[name] = why if room < 1 else ""
            if len(found) % AT_ONCE == 0:  # there may be a thousand
                await asyncio.sleep(0)
        return found

    def _may_start(self, stored: Stored, waiting: int) -> tuple[float, str]:
        """As `PlannedHours.may_start`, asked in the event loop: no file is read."""
        return self.hours.may_start(stored.job, stored.items, waiting, self.zones.usable(stored.job))

    async def _tell(self, jobs: dict[str, Stored]) -> None:
        """Tell the controller which jobs have not ended, without those that a budget holds back: no device is to be
        awake for them. Those that have ended are taken out of `jobs`."""
        assert self._lease is not None
        for name in list(jobs):
            if name in self.runs:
                ledger = self.runs[name].owned.ledger
                self._left[name] = ledger.left, jobs[name].job.grams_max - ledger.grams
            elif name not in self._left:
                self._left[name] = await on_disk(self._left_of, name)
                if name in self._ended_at_s:
                    del jobs[name]
        self._left = {name: left for name, left in self._left.items() if name in jobs}
        budgets, now_s, found = self._local.budgets, self._clock.now_s(), list[Left]()
        for name, (items, grams) in self._left.items():
            job, run = jobs[name].job, self.runs.get(name)
            if items and budgets.find(job.tenant, job.family, now_s) is None:
                abroad = (run.states.away, run.transfer_j) if run is not None and run.abroad else ()
                found.append(Left(job, items, grams, *abroad))
        with contextlib.suppress(StateUnavailable, Fenced):  # the lease's keeper says so; then no plan is followed
            await self.hours.write(self._lease, found)

    def _left_of(self, name: str) -> tuple[int, float]:
        """Items and grams that are left of a job by its files; its end is noted, if it has ended."""
        try:
            reader = JobReader(self._folder, name)
        except (TrefoilError, OSError) as error:
            self._waiting[name] = str(error)
            return 0, 0.0
        if reader.ledger.ended and not self._folder.has_items(name):
            self._note_end(name, reader)
        return reader.ledger.left, reader.stored.job.grams_max - reader.ledger.grams

    async def _wait(self, name: str, why: str) -> None:
        """Note why a job is not run, for readers too."""
        if self._waiting.get(name) == why:
            return
        self._waiting[name] = why
        try:
            await on_disk(self._folder.say, name, self.name, why, 0.0)
        except OSError as error:
            LOG.warning("why a job waits cannot be written", job=name, why=why, error=str(error))

    def _show(self) -> None:
        counts = dict.fromkeys(("running", "waiting", "ended"), 0)
        for run in self.runs.values():
            counts["waiting" if run.why else "running"] += 1
        counts["waiting"] += len(self._waiting.keys() - self.runs.keys())
        counts["ended"] = len(self._ended_at_s)
        for state, count in counts.items():
            self._metrics.set("trefoil_jobs", count, state=state)

    async def _hold_lease(self, wanted: bool, jobs: Iterable[Job]) -> bool:
        now_s = self._clock.monotonic_s()
        kinds = {(job.family, job.min_accuracy, job.zones): job for job in jobs}
        elsewhere = [self.idle.elsewhere(job) for job in kinds.values()]  # none of them can go on here
        if self._lease is None:
            wanted = wanted and not (elsewhere and all(elsewhere)) and now_s - self._left_s >= LEFT_S
        elif any(elsewhere) and now_s - self._owned_s >= OWNED_S:
            wanted, self._left_s = False, now_s
        if self._lease is not None and not self.owns:
            LOG.warning("lease lost", role=self._role, epoch=self._lease.epoch)
            self._lease = None
            await self._drop_all()
        if not wanted or self._local.draining:
            if self._lease is not None:
                await self._give_up()
            return False
        if self._lease is not None:
            return True
        floor = await on_disk(highest_epoch, self._folder)
        self._lease = await self._state.acquire(self._role, self.name, LEASE_TTL_S, floor)
        if self._lease is not None:
            self._owned_s = self._clock.monotonic_s()
            LOG.info("lease acquired", role=self._role, epoch=self._lease.epoch)
        return self._lease is not None

    async def _take_over(self, name: str) -> None:
        assert self._lease is not None
        stored = await on_disk(self._folder.stored, name)
        job, contract = stored.job, None
        why = await on_disk(self._folder.cancelled, name) or ""
        if not why and not await on_disk(self._folder.has_items, name):
            why = GONE
        if not why:
            contract = self._contracts.known(job.family) or await self._contracts.fetch(job.family)
            models = self._local.routing.table.chains.get(job.family, (job.family,))
            why = str(unfit(job, contract, models) or "")
        owned = await on_disk(OwnedJob, self._folder, name, self._lease.epoch, self.name)
        if owned.ledger.ended or why:
            try:
                if not owned.ledger.ended:
                    await on_disk(owned.end, JobState.CANCELLED, self.calendar_s(), why)
                self._note_end(name, owned)
            finally:
                owned.close()
            return
        assert contract is not None
        weight = self._weight_of(job.tenant)
        parts = (
            self._local, self._inference, self.idle, owned, contract, weight, self._metrics, self._wake,
            self._may_start, self.hours.variants,
        )  # fmt: skip
        try:
            await on_disk(lambda: owned.items)
            run = LineRun(self._completions, *parts) if job.endpoint else JobRun(*parts)
        except BaseException:
            owned.close()
            raise
        self.runs[name] = run
        self._tasks[name] = asyncio.create_task(run.run(), name=f"job {name}")
        LOG.info("job begun", job=name, epoch=self._lease.epoch, items=stored.items, left=owned.ledger.left)

    async def _step(self, name: str) -> None:
        """End a job that is done, cancelled or has spent its grams; tell readers how it stands."""
        run = self.runs[name]
        cancelled = await on_disk(self._folder.cancelled, name)
        if run.fault is not None:
            first = run.fault.exceptions[0] if isinstance(run.fault, BaseExceptionGroup) else run.fault
            cancelled = f"the dispatcher cannot run it, see its log: {first!r}"
        if run.finished:
            await self._end(name, JobState.DONE, "")
        elif cancelled is not None and await run.settle():
            await self._end(name, JobState.DONE if run.finished else JobState.CANCELLED, cancelled)
        elif run.spent():
            ledger = run.owned.ledger
            why = f"grams_max = {run.job.grams_max:g}: spent, {ledger.left} of {ledger.items} items were not run"
            await self._end(name, JobState.CANCELLED, why)
        else:
            run.blocked()  # says why
            left_s = run.expected_s()
            if left_s:
                self.hours.note_pace(run.job.family, run.owned.ledger.left / left_s)
            expected_s = 0.0 if left_s is None else round(self.calendar_s() + left_s, 1)
            why = "; ".join(filter(None, (run.why, self.zones.troubles(run.job))))
            await on_disk(run.owned.say, self.name, why, expected_s)

    async def _end(self, name: str, state: JobState, why: str) -> None:
        run = self.runs[name]
        await run.end(state, self.calendar_s(), why)
        self.zones.leave(run.states.parcels)
        LOG.info("job ended", job=name, state=state.name, answered=run.owned.ledger.answered,
                 failed=run.owned.ledger.failed, why=why)  # fmt: skip
        self._note_end(name, run.owned)
        await self._stop(name)

    def _note_end(self, name: str, owned: JobReader) -> None:
        """Note when a job ended, if not another owner has it, by the clock that no later step of the calendar moves."""
        if owned.ledger.ended:
            self._ended_at_s[name] = owned.ledger.ended_at_s - self._clock.calendar_ahead_s()

    async def _stop(self, name: str) -> None:
        run, task = self.runs.pop(name), self._tasks.pop(name)
        try:
            await run.drop()
        except OSError as error:
            LOG.warning("files of a job cannot be closed", job=name, why=str(error))
        task.cancel()
        await asyncio.wait((task,))

    async def _drop_all(self) -> None:
        for name in list(self.runs):
            await self._stop(name)
        self._ended_at_s.clear()
        self._waiting.clear()
        self._left.clear()  # another owner continues

    async def _expire(self, names: Set[str]) -> None:
        """Remove jobs that ended long ago, and what uploads left; a step of the wall clock moves neither."""
        now_s = self._clock.now_s()
        self._ended_at_s = {name: at_s for name, at_s in self._ended_at_s.items() if name in names}
        self._waiting = {name: why for name, why in self._waiting.items() if name in names}
        for name, at_s in list(self._ended_at_s.items()):
            if now_s - at_s > self._local.settings.jobs_keep_s:
                async with self._alone(name):
                    await on_disk(self._folder.remove, name)
                    del self._ended_at_s[name]
                    LOG.info("results removed", job=name)
        await on_disk(sweep, self._folder.root, min(now_s, self.calendar_s()) - UPLOAD_MAX_S)

    # --- when -------------------------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            runs = [run for run in self.runs.values() if run.fault is None]
            for run in runs:
                with run.guarded():
                    run.make_room()
            if self.runs and self.owns and not self._local.draining and (busy := self.idle.busy()) is not None:
                busy.update(*(run.busy for run in self.runs.values()))
                slice_s = {run.job: run.slice_s for run in runs}
                waiting = {run.job for run in runs if run.why}
                for job in self._turns.order(slice_s, waiting, self.calendar_s()):
                    with self.runs[job.id].guarded():
                        self.runs[job.id].start_batches(busy)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self.runs else LOOK_S / 2):
                    await self._wake.wait()

    def calendar_s(self) -> float:
        """Time of the calendar [UTC s], which deadlines are of."""
        return self._clock.now_s() + self._clock.calendar_ahead_s()
