"""Runs one job: reads its items ahead, sends batches to idle slices, writes the results.

The event loop also serves interactive requests. So it works on a few items at a time, and threads read and write files.
A failed batch is tried again item by item, so that each item has its own answer or error.
"""

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from dispatcher.fronts.openai.bodies import EMBEDDINGS
from dispatcher.fronts.openai.embeddings import check_embeds
from dispatcher.fronts.openai.engines import text_api
from dispatcher.jobs.batching import Item, ItemReader, Split, join
from dispatcher.jobs.core.job import Job, JobState, Rate
from dispatcher.jobs.core.journal import Result
from dispatcher.jobs.core.parcels import ItemStates, Parcel
from dispatcher.jobs.folder import OwnedJob, Stored, on_disk, to_its_end
from dispatcher.jobs.idle_slices import IdleSlices, Size
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.contracts import Contract
from dispatcher.request.idle import NotIdle
from dispatcher.request.inference import Inference
from dispatcher.routing.request_parameters import MIN_ACCURACY, RECEIPT
from dispatcher.service.core.tenant_rungs import jobs_wait
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.core import kserve_wire
from protos.dispatcher.v1 import jobs_pb2
from trefoil.core.carbon import Quality
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import RouteTarget
from trefoil.runtime.files import FileTrouble
from trefoil.runtime.telemetry import Metrics

LOG = structlog.get_logger()
CHUNK: Final = 64  # items read from disk at once
AT_ONCE: Final = 8  # items that the event loop works on before it looks at requests, at most AT_ONCE_BYTES
AT_ONCE_BYTES: Final = 128 * 1024
READ_AHEAD: Final = 512
UNWRITTEN_MAX: Final = 2048  # results that wait for the disk
HELD_BYTES: Final = 32 * 2**20  # of items that are read ahead; and again of results that wait for the disk
WRITE_S: Final = 0.2
DISK_RETRY_S: Final = 1.0
ATTEMPTS_MAX: Final = 5
RETRY_S: Final = 0.5  # after the first failure of an item; then twice as long each time
SLO_SHARE: Final = 0.2  # longest batch beside interactive requests, of their latency objective
TRIED: Final = 1.25  # by which a batch of twice the rows is taken to be longer, before one was seen
BATCH_MAX_S: Final = 0.25  # longest batch where no requests come
BATCH_UNKNOWN_S: Final = 0.02  # beside requests without an objective
FINAL: Final = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OUT_OF_RANGE,
    )
)  # fmt: skip
"""Statuses that another attempt would give again."""


class JobRun:
    """One job while this worker owns it. Belongs to one event loop."""

    def __init__(
        self,
        local: LocalWorker,
        inference: Inference,
        idle: IdleSlices,
        owned: OwnedJob,
        contract: Contract,
        weight: float,
        metrics: Metrics,
        wake: asyncio.Event,
        may_start: Callable[[Stored, int], tuple[float, str]],
        variants: Callable[[Job], frozenset[str]],
    ) -> None:
        """`may_start`: items of a job that may start now, of so many that wait, and why no more. `variants`: that they
        are planned on."""
        self.owned, self.job = owned, owned.stored.job
        self._local, self._inference, self._idle, self._metrics = local, inference, idle, metrics
        self._clock, self._weight = local.clock, weight
        self._reader, self._rows_max = ItemReader(contract), contract.items_max
        peers = {peer.zone for peer in local.settings.other_zones}
        self.abroad = frozenset() if self.job.grams_max or self.job.endpoint else peers.intersection(self.job.zones)
        """Peers' zones that items may go to."""
        self.states = ItemStates(owned.ledger.done, [parcel for parcel in owned.away if parcel.zone in peers])
        self.item_bytes = owned.items.size / owned.stored.items
        self._answers = self._answer_bytes = 0
        self._ready: deque[Item] = deque()
        self._later: list[Item] = []
        self._results: list[Result] = []
        self._running: dict[SliceKey, asyncio.Task[None]] = {}
        self._reading = False  # items are claimed that are not in `_ready` yet
        self._held_bytes = self._unwritten_bytes = 0  # of items without a result, of results
        self._writing = asyncio.Lock()
        self._spending_g = 0.0  # of batches under way
        self._room = math.inf  # items that may start
        self._may_start, self._variants = may_start, variants
        self._group: asyncio.TaskGroup | None = None
        self._rate = Rate()
        self._disk = FileTrouble("jobs", "the job waits, with all that is written", metrics)
        self._wake = wake
        self.slice_s = 0.0
        """Time of slices that its batches have had [s]."""
        self.why = ""
        self.closing = False
        self.fault: Exception | None = None
        """What it broke on."""

    # --- what it does now ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> Collection[SliceKey]:
        """Slices that have a batch of it."""
        return self._running.keys()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep a fault of this job from all others: it begins nothing more, and its owner ends it."""
        try:
            yield
        except Exception as error:
            LOG.exception("job failed", job=self.job.id)
            self.closing, self.fault = True, error

    def start_batches(self, busy: set[SliceKey]) -> None:
        """Start as many batches as idle slices allow. `busy`: slices that have something to do; a batch's is added."""
        self._ripen(self._clock.monotonic_s())
        while not self.blocked() and self._ready:
            targets = self._affordable(self._planned(self._idle.idle(self.job, busy)))
            taken = self._idle.take(targets, self._sizes)
            if taken is None:
                break
            target, rows = taken
            busy.add(target.slice)
            batch = self._form(max(1, int(min(rows, self._affordable_rows(target)))), self._room)
            name = f"batch of {self.job.id}"
            price_g = (self._price_g(target) or 0.0) * sum(item.rows for item in batch)
            self._spending_g += price_g
            assert self._group is not None
            self._running[target.slice] = self._group.create_task(self._answer(batch, target, price_g), name=name)

    @property
    def waiting(self) -> int:
        """Items that have not started."""
        return self.states.free + len(self._ready) + len(self._later)

    def make_room(self) -> None:
        """Give credits back to requests that wait. A batch of tensors is over too soon for that."""

    def blocked(self) -> bool:
        """Whether it has to wait, whatever is idle; then `why` says so."""
        self._room, later = self._may_start(self.owned.stored, self.waiting)
        held = self._room < 1
        if held:
            self._rate = Rate()  # what is held back says nothing of how quick it is
        no_slice = stuck(self._local, self._idle, self.job)
        if no_slice and self.abroad:
            self._room = 0.0  # its items are left to peers
        self.why = self._disk.why or no_slice or (later if held else "")
        return bool(self.why) or self.closing or self._group is None or self.full

    @property
    def full(self) -> bool:
        """Whether results have to be written first."""
        return len(self._results) >= UNWRITTEN_MAX or self._unwritten_bytes >= HELD_BYTES

    def _planned(self, targets: list[RouteTarget]) -> list[RouteTarget]:
        """Slices of the variants that items which are held back are planned on; the others wait for the next plan."""
        planned = frozenset[str]() if math.isinf(self._room) else self._variants(self.job)
        found = [each for each in targets if each.variant in planned] if planned else targets
        if len(found) < len(targets):
            self._rate = Rate()  # on fewer slices it says nothing of how quick it is
        return found

    def _affordable(self, targets: list[RouteTarget]) -> list[RouteTarget]:
        """Slices on which the job's grams last for the next item."""
        rows = self._ready[0].rows if self._ready else 1
        return [each for each in targets if self._affordable_rows(each) >= rows]

    def _affordable_rows(self, target: RouteTarget) -> float:
        """Rows that the job's grams last for on a slice."""
        if not self.job.grams_max:
            return math.inf
        price_g, left_g = self._price_g(target), self.job.grams_max - self.owned.ledger.grams - self._spending_g
        left_g -= sum(result.grams for result in self._results)
        return 0.0 if price_g is None else left_g / price_g if price_g else math.inf

    def _price_g(self, target: RouteTarget) -> float | None:
        return price_g(self._local, self.job, target)

    def spent(self) -> bool:
        """Whether its grams do not last for the next item."""
        if not self.job.grams_max or self._running or self._results:
            return False
        priced = [each for each in self._idle.allowed(self.job) if self._price_g(each) is not None]
        return bool(priced) and not self._affordable(priced)

    def _sizes(self, target: RouteTarget) -> list[Size]:
        """Sizes that a batch may have: doubled from one row as long as they do not take too long."""
        objective = self._local.routing.table.objectives.get(self.job.family)
        limit_s = BATCH_MAX_S
        if self._idle.rate_per_s(self.job.family) > 0:
            slo_ms = objective.slo_ms if objective is not None else 0.0
            limit_s = SLO_SHARE * slo_ms / 1e3 if slo_ms else BATCH_UNKNOWN_S
        times, place = self._local.health.evidence.times, (target.slice, target.variant)
        found = [(1, times.usual_s(*place, 1) or self._local.costs.expected_s(self.job.family, 1))]
        while (rows := 2 * found[-1][0]) <= self._rows_max:
            batch_s = times.usual_s(*place, rows) or TRIED * found[-1][1]
            if batch_s > limit_s:
                break
            found.append((rows, batch_s))
        return found

    def _form(self, rows_max: int, items_max: float) -> list[Item]:
        """The next items that go to a slice together."""
        batch = [self._ready.popleft()]
        rows = batch[0].rows
        while self._ready and len(batch) < items_max and not batch[0].alone and not self._ready[0].alone:
            item = self._ready[0]
            if item.head.kind != batch[0].head.kind or rows + item.rows > rows_max:
                break
            rows += item.rows
            batch.append(self._ready.popleft())
        return batch

    # --- one batch ----------------------------------------------------------------------------------------------------

    async def _answer(self, batch: list[Item], target: RouteTarget, price_g: float) -> None:
        began_s = self._clock.monotonic_s()
        with self.guarded():
            try:
                await self._send(batch, target)
            finally:
                self.slice_s += self._clock.monotonic_s() - began_s
                self._spending_g -= price_g
                del self._running[target.slice]
                self._wake.set()

    async def _send(self, batch: list[Item], target: RouteTarget) -> None:
        suffix = kserve_wire.bool_parameter(RECEIPT, True)
        if self.job.min_accuracy:
            suffix += kserve_wire.double_parameter(MIN_ACCURACY, self.job.min_accuracy)
        try:
            answer = await self._inference.answer(join(batch, suffix), self._caller(target))
            await self._split(batch, answer.data)
        except NotIdle:
            self._ready.extendleft(reversed(batch))
        except StatusError as refused:
            self._failed(batch, refused)

    def _caller(self, target: RouteTarget) -> Caller:
        """Caller of its items on a slice, which answers them while it is idle, or raises NotIdle."""
        flow = (self.job.tenant or "(job)", "")
        return Caller(self.job.tenant, flow=flow, weight=self._weight, idle_slice=target.slice)

    async def _split(self, batch: list[Item], data: bytes) -> None:
        try:
            split = Split.of(data, batch)
        except (InvalidInput, DecodeError) as error:
            self._failed(batch, StatusError(grpc.StatusCode.INTERNAL, f"the answer to a batch: {error}"))
            return
        rows, row = sum(item.rows for item in batch), 0
        for at, item in enumerate(batch):
            share = item.rows / rows
            result = jobs_pb2.ItemResult(item=item.number, response=split.answer(item, row)).SerializeToString()
            joules, grams = (share * (known or 0.0) for known in (split.joules, split.grams))
            self._add(Result(item.number, result, False, joules, grams), item.size)
            row += item.rows
            if at % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        self._count("answered", len(batch))

    def _failed(self, batch: Sequence[Item], refused: StatusError) -> None:
        """Try items again, each alone; one that cannot be answered ends with its error."""
        for item in batch:
            item.alone = True
            if len(batch) > 1 and refused.code in FINAL:
                self._ready.appendleft(item)
                continue
            item.attempts += 1
            if refused.code in FINAL or item.attempts >= ATTEMPTS_MAX:
                self._error(item.number, refused, item)
            else:
                item.not_before_s = self._clock.monotonic_s() + RETRY_S * 2 ** (item.attempts - 1)
                self._later.append(item)

    def _error(self, number: int, refused: StatusError, item: Item | None = None) -> None:
        result = jobs_pb2.ItemResult(item=number, code=refused.code.name, error=refused.details)
        error = f"{refused.code.name}: {refused.details}"
        found = Result(number, result.SerializeToString(), failed=True, error=error)
        self._add(found, item.size if item is not None else 0)
        self._count("failed", 1)

    def _count(self, outcome: str, items: int) -> None:
        self._metrics.inc("trefoil_job_items_total", items, family=self.job.family, outcome=outcome)

    def _add(self, result: Result, size: int) -> None:
        """Add the result of an item of so many bytes, which was run here."""
        self.states.end(result.item)
        self._keep(result, size)

    def _keep(self, result: Result, size: int = 0) -> None:
        self._results.append(result)
        self._answers += 1
        self._answer_bytes += len(result.data)
        self._unwritten_bytes += len(result.data)
        self._held_bytes -= size

    def _ripen(self, now_s: float) -> None:
        """Items that may be tried again now."""
        if self._later:
            self._ready.extendleft(item for item in self._later if item.not_before_s <= now_s)
            self._later = [item for item in self._later if item.not_before_s > now_s]

    # --- files --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read ahead and write results, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._read_ahead(), name=f"items of {self.job.id}")
            with self.guarded():
                await self._write_results()

    async def _read_ahead(self) -> None:
        with self.guarded():
            await self._read_all()

    async def _read_all(self) -> None:
        while self.states.next < self.owned.stored.items or self.abroad or self.states.parcels:  # items may come back
            held = len(self._ready) + len(self._later)
            waits = held >= READ_AHEAD or self._held_bytes >= HELD_BYTES or self.full
            if waits or (self.abroad and held >= self._room) or not (claimed := self.states.claim(CHUNK)):
                await self._clock.sleep(0.01)
                continue
            first, count = claimed[0], claimed[-1] + 1 - claimed[0]
            self._reading = True
            try:
                read = await on_disk(self.owned.items.read, first, count)
            except OSError as error:
                self._reading = False
                self.states.release(claimed)
                self._disk.begin(self.owned.path, error)
                await self._clock.sleep(DISK_RETRY_S)
                continue
            self.states.release(number for number in claimed if number >= first + len(read))
            mine, at_once = set(claimed), 0
            for number, data in enumerate(read, first):
                if number in mine:
                    self._take(number, data)
                at_once += max(AT_ONCE_BYTES // AT_ONCE, len(data or b""))
                if at_once >= AT_ONCE_BYTES:
                    at_once = 0
                    await asyncio.sleep(0)
            self._reading = False
            self._wake.set()

    def _take(self, number: int, data: bytes | None) -> None:
        try:
            if data is None:
                raise InvalidInput(
                    "its bytes on disk are not those that were submitted", field="item", value=number,
                    remedy="submit it again",
                )  # fmt: skip
            item = self._read(number, data)
            self._ready.append(item)
            self._held_bytes += item.size
        except InvalidInput as error:
            self._error(number, StatusError(grpc.StatusCode.INVALID_ARGUMENT, str(error)))

    def _read(self, number: int, data: bytes) -> Item:
        return self._reader.read(number, data)

    async def _write_results(self) -> None:
        while True:
            await self._clock.sleep(WRITE_S if not self._disk.why else DISK_RETRY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is not written yet, as far as the disk takes it."""
        async with self._writing:
            results = self._results[:UNWRITTEN_MAX]
            if not results:
                return
            try:
                await to_its_end(self.owned.write, results)
            except OSError as error:
                self._disk.begin(self.owned.path, error)
                return
            del self._results[: len(results)]
            self._unwritten_bytes -= sum(len(result.data) for result in results)
        ledger = self.owned.ledger
        self._rate.add(self._clock.monotonic_s(), ledger.answered + ledger.failed)
        self._disk.end()
        self._wake.set()

    # --- parcels in peers' zones --------------------------------------------------------------------------------------

    async def pack(self, zone: str, count: int, until_s: float, bytes_max: int) -> tuple[Parcel, list[bytes]] | None:
        """Make a parcel of at most so many items and bytes, on disk before a peer gets it; None: there is none.

        Raises:
            OSError: the disk refuses; the items stay here.
        """
        if self.closing or self._reading:  # soon they can be given back
            return None
        self._unread(count)
        parcel = self.states.pack(zone, count, self.job.id, until_s)
        if parcel is None:
            return None
        try:
            read = await on_disk(self.owned.items.read, parcel.first, parcel.count, bytes_max)
            data = list(itertools.takewhile(lambda one: one is not None, read))
            if not data:  # its error is said where it is run
                self.abroad = frozenset()
                self.states.forget(parcel)
                return None
            self.states.shorten(parcel, len(data))
            await self.write_parcels()
        except BaseException:
            self.states.forget(parcel)
            raise
        return parcel, [one for one in data if one is not None]

    def _unread(self, count: int) -> None:
        """Give items back that were read ahead, if a parcel needs them."""
        if self.states.free < count:
            self._held_bytes -= sum(item.size for item in self._ready)
            self.states.release([item.number for item in self._ready])
            self._ready.clear()

    async def items_of(self, parcel: Parcel, bytes_max: int) -> list[bytes]:
        """Items of a parcel that was made by another process.

        Raises:
            InvalidInput: they are not those any more.
            OSError: the disk refuses.
        """
        read = await on_disk(self.owned.items.read, parcel.first, parcel.count, bytes_max)
        data = [one for one in read if one is not None]
        if len(data) < parcel.count:
            remedy = "nothing: they are run here"
            raise InvalidInput("its items cannot be read", field="parcel", value=parcel.id, remedy=remedy)
        return data

    async def write_parcels(self) -> None:
        """Write which parcels there are, while the job continues. Raises OSError."""
        async with self._writing:
            if not self.closing:
                await to_its_end(self.owned.write_parcels, list(self.states.parcels))

    def deliver(self, parcel: Parcel, result: Result) -> None:
        """Keep the result of an item of a parcel; one that has come already, or is run here now, is dropped."""
        if not self.closing and self.states.deliver(parcel, result.item):
            self._keep(result)
            self._count("failed" if result.failed else "other_zone", 1)

    def written(self, parcel: Parcel) -> bool:
        """Whether all results that have come of a parcel are on disk."""
        done = self.owned.ledger.done[parcel.first : parcel.end]
        return done.count(1) == self.states.ended(parcel)

    @property
    def transfer_j(self) -> float:
        """Joules that move one item to another zone, and its answer back, by the sizes that are known."""
        answer_bytes = self._answer_bytes / self._answers if self._answers else 0.0
        return (self.item_bytes + answer_bytes) / 1e6 * self._local.settings.transfer_j_per_mb

    # --- how it stands ------------------------------------------------------------------------------------------------

    def expected_s(self) -> float | None:
        """Time until its last item at its rate of the last minute [s]; None: not known."""
        return self._rate.seconds_for(self.owned.ledger.left)

    @property
    def finished(self) -> bool:
        """Whether all items have their results on disk."""
        return not self.owned.ledger.left and not self._running

    async def settle(self) -> bool:
        """Begin nothing more; wait for what is under way, and write it. Whether the disk took it."""
        self.closing = True
        while self._running:
            await asyncio.wait(self._running.values())
            await asyncio.sleep(0)
        while self._results:
            await self.flush()
            if self._disk.why:
                self.closing = self.fault is not None  # it goes on, should it not have to end any more
                return False
        return True

    async def end(self, state: JobState, at_s: float, why: str) -> None:
        """End the job at a time [UTC s], with all its results on disk. Raises OSError."""
        async with self._writing:
            await to_its_end(self.owned.end, state, at_s, why)

    async def drop(self) -> None:
        """Stop at once: another worker may own it. What is not written is done again."""
        self.closing = True
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._writing:
            self._results.clear()  # a flush to come would open the files again
            self.owned.close()


def stuck(local: LocalWorker, idle: IdleSlices, job: Job) -> str:
    """Why a job has to wait, whatever is idle; empty: it does not."""
    if (rung := local.budgets.find(job.tenant, job.family, local.clock.now_s())) is not None:
        return jobs_wait(rung)
    allowed = idle.allowed(job)
    if not allowed:
        reason = local.routing.table.why.get(job.family, "")
        return f"no live slice of {job.family} may have it{f': {reason}' if reason else ''}"
    if job.grams_max and all(price_g(local, job, each) is None for each in allowed):
        return "grams_max is set and what its answers emit is not known: no receipt rates, or no carbon reading"
    return ""


def price_g(local: LocalWorker, job: Job, target: RouteTarget) -> float | None:
    """Grams of one row on a slice by its receipt; None: not known."""
    receipt = local.accounting.receipts.price(target.slice, job.family, target.variant, 1)
    if receipt is None or receipt.quality == Quality.UNSPECIFIED:
        return None
    return receipt.carbon_mg / 1e3


def unfit(job: Job, contract: Contract, models: Sequence[str]) -> TrefoilError | None:
    """Why the family of a job cannot have it; None: it can."""
    family, why = job.family, ""
    if job.endpoint:
        try:
            (check_embeds if job.endpoint == EMBEDDINGS else text_api)(contract, family)
        except InvalidInput as error:
            return error
        return None
    if contract.decoupled:
        why = "answers in streams"
    elif contract.sequence_idle_s is not None:
        why = "has sequences, whose requests have an order"
    elif len(models) > 1:
        why = "is split into stages"
    if not why:
        return None
    remedy = "send its requests to the inference port"
    return InvalidInput(f"{why}: jobs take families that answer each request alone", field="family", value=family,
                        remedy=remedy)  # fmt: skip
