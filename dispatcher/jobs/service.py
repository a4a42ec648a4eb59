"""The admin service trefoil.dispatcher.v1.Jobs. All workers that share the jobs folder answer by its files.

Files are read and written in threads. An upload lies aside until its last item is on disk; what breaks off is removed.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.jobs.core.job import ENDED, Job, JobState, World, check_items, check_job
from dispatcher.jobs.core.journal import ZoneSum
from dispatcher.jobs.core.places import Places
from dispatcher.jobs.folder import JobReader, JobsFolder, Upload, arriving, on_disk, to_its_end
from dispatcher.jobs.job_run import unfit
from dispatcher.jobs.owner import JobsOwner
from dispatcher.request.contracts import Contract
from dispatcher.request.pace import BYTES_PER_S_MIN, SILENT_S, paced
from dispatcher.transport.core import kserve_wire
from protos.dispatcher.v1 import jobs_pb2, jobs_pb2_grpc
from trefoil.core.errors import InvalidInput, NotFound, Unavailable
from trefoil.runtime import codec
from trefoil.runtime.files import disk_error
from trefoil.runtime.rpc import STREAMS_MAX
from trefoil.runtime.security.scopes import check_request

LOG = structlog.get_logger()
NAME: Final = "trefoil.dispatcher.v1.Jobs"
WATCH_S: Final = 0.5
SAID_S: Final = 30.0  # how often a status is sent again that has not changed
MESSAGE_BYTES: Final = 256 * 1024  # of results at once
PART_BYTES_MAX: Final = 64 * 1024  # of a message of Submit that is not of items
ITEMS_TAG, REQUEST_TAG = b"\x12", 0x0A  # SubmitRequest.items, Items.requests
BY_PROTO: Final = "send what protos/dispatcher/v1/jobs.proto says, and nothing else"
UPLOADS_MAX: Final = 8
READERS_MAX: Final = 16  # clients that read results at once; as many may read files of batches
UNRESULTED: Final = "CANCELLED"
"""Code of items that were not run because their job had ended."""


class JobsAdmin(jobs_pb2_grpc.JobsServicer):  # type: ignore[misc]
    """Errors become statuses in the server's interceptor."""

    def __init__(self, fronts: Fronts, folder: JobsFolder, owner: JobsOwner) -> None:
        self._local, self._contracts, self._folder, self._owner = fronts.local, fronts.contracts, folder, owner
        self._tenants, self._only_own = fronts.access.names, fronts.access.only_own_jobs
        self._uploads = Places(UPLOADS_MAX, "jobs are being submitted")
        self._readers = Places(READERS_MAX, "clients read results")
        self._watchers = Places(STREAMS_MAX - READERS_MAX, "clients watch jobs")

    async def Submit(self, request_iterator: Any, context: Any) -> Any:
        """Store a job with its items."""
        tenant = self._only_own(context.invocation_metadata())
        with self._uploads.one(tenant):
            try:
                return jobs_pb2.SubmitResponse(status=await self._submit(request_iterator, tenant))
            except OSError as error:
                raise disk_error(self._folder.root, error, "written", "nothing of the job was kept") from error

    async def _submit(self, messages: AsyncIterator[bytes], tenant: str) -> Any:
        messages = self._messages(messages)
        first = _part(await anext(messages, b""))
        if first.WhichOneof("part") != "job":
            raise InvalidInput("comes first", field="job", remedy="send the job, then its items")
        check_request(first)
        if tenant and first.job.tenant not in ("", tenant):
            remedy = f"leave it out, or write {tenant}"
            raise InvalidInput("is not the token's", field="tenant", value=first.job.tenant, remedy=remedy)
        first.job.tenant = tenant or first.job.tenant
        job = self._job(first.job)
        contract = None
        if await on_disk(self._folder.find, job.id) is None:  # else it was checked then, and only has to be the same
            contract = await self.check(job)
        async with arriving(Upload, self._folder, job) as upload:
            total = None
            async for message in messages:
                if message.startswith(ITEMS_TAG) and total is None:
                    await to_its_end(upload.add, requests_of(message))
                elif (part := _part(message)).WhichOneof("part") == "total":
                    total = part.total
                else:
                    raise InvalidInput("comes once", field="job", remedy="send items after it, then their total")
            if total != upload.count:
                remedy = "send all items, then how many they were"
                raise InvalidInput(f"{upload.count} items came", field="total", value=total or 0, remedy=remedy)
            if contract is not None:
                check_items(job, upload.count, self._world(job))
            await to_its_end(upload.commit, self.calendar_s())
        return await self.status(job.id)

    async def check(self, job: Job) -> Contract:
        """Check that a job may be submitted; returns the contract of its family.

        Raises:
            InvalidInput, NotFound: naming the field.
            Unavailable: no slice tells the contract.
        """
        check_job(job, self._world(job))
        models = self._local.routing.table.chains[job.family]
        contract = self._contracts.known(job.family) or await self._contracts.fetch(job.family)
        if (why := unfit(job, contract, models)) is not None:
            raise why
        await on_disk(self._folder.check_room, job)
        return contract

    @staticmethod
    async def _messages(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A client's messages. Raises Unavailable: it is slower than `pace` allows."""
        end: Any = None
        try:
            async for message in paced(lambda: anext(messages, end), len):
                if message is end:
                    return
                yield message
        except TimeoutError as error:
            why = f"its parts did not come at {BYTES_PER_S_MIN} bytes/s, nothing was kept"
            raise Unavailable(why, remedy="submit it again, faster") from error

    async def _permit(self, name: str, context: Any) -> None:
        """Check that the caller may see a job; raises NotFound, also where it is another tenant's."""
        if tenant := self._only_own(context.invocation_metadata()):
            stored = await on_disk(self._folder.stored, name)
            if stored.job.tenant != tenant:
                raise NotFound(f"is not a job of tenant {tenant}", field="id", value=name, remedy="name one of its own")

    async def Get(self, request: Any, context: Any) -> Any:
        """How a job stands."""
        await self._permit(request.id, context)
        return jobs_pb2.GetResponse(status=await self.status(request.id))

    async def List(self, request: Any, context: Any) -> Any:
        """All jobs, or those of a tenant."""
        tenant, found = self._only_own(context.invocation_metadata()) or request.tenant, list[Any]()
        for name in await on_disk(self._folder.ids):
            try:
                if tenant in ("", (await on_disk(self._folder.stored, name)).job.tenant):
                    found.append(await self.status(name))
            except NotFound:  # removed meanwhile
                continue
            except OSError as error:  # the others can be read
                LOG.warning("a job is left out of a list", job=name, why=str(error))
        found.sort(key=lambda each: each.job.complete_by.ToMicroseconds())
        return jobs_pb2.ListResponse(jobs=found)

    async def Cancel(self, request: Any, context: Any) -> Any:
        """End a job, or remove one that has ended."""
        await self._permit(request.id, context)
        status = await self.status(request.id)
        try:
            if status.state not in ENDED:
                await on_disk(self._folder.cancel, request.id, request.why or "cancelled")
            elif request.remove:
                await on_disk(self._folder.remove, request.id)
                return jobs_pb2.CancelResponse(status=status)
        except OSError as error:
            raise disk_error(self._folder.root, error, "written", "the job goes on") from error
        return jobs_pb2.CancelResponse(status=await self.status(request.id))

    async def Watch(self, request: Any, context: Any) -> None:
        """How a job stands, whenever that changes and every SAID_S, until it has ended."""
        await self._permit(request.id, context)
        reader, clock = await on_disk(JobReader, self._folder, request.id), self._local.clock
        last, said_s = None, 0.0
        with self._watchers.one(self._only_own(context.invocation_metadata())):
            while last is None or last.state not in ENDED:
                status = await on_disk(self.read_status, reader)
                if status != last or clock.monotonic_s() - said_s >= SAID_S:
                    await _end_unread(await _unread(context, jobs_pb2.WatchResponse(status=status)), "watch it again")
                    last, said_s = status, clock.monotonic_s()
                if status.state not in ENDED:
                    await clock.sleep(WATCH_S)

    async def GetResults(self, request: Any, context: Any) -> None:
        """Results in the order of items, each once."""
        await self._permit(request.id, context)
        with self._readers.one(self._only_own(context.invocation_metadata())):
            try:
                unread = await self._send_results(request, context)
            except OSError as error:
                so = "ask again from the item after the last one that came"
                raise disk_error(self._folder.root / request.id, error, "read", so) from error
        await _end_unread(unread, "ask again from the next item")

    async def _send_results(self, request: Any, context: Any) -> Any:
        """Send results; returns the message that the client did not read in time, or None."""
        reader, item = await on_disk(lambda: JobReader(self._folder, request.id, kept=True)), request.first
        if reader.stored.job.endpoint:
            remedy = "read its output file: GET /v1/batches names it"
            raise InvalidInput("is a batch of OpenAI's API", field="id", value=request.id, remedy=remedy)
        if item > (items := reader.stored.items):
            remedy = f"0 to {items}, or leave it out"
            raise InvalidInput(f"the job has {items} items", field="first", value=item, remedy=remedy)
        while item < reader.stored.items:
            message, item = await on_disk(self._results, reader, item)
            if message.results and (unread := await _unread(context, message)) is not None:
                return unread
        return None

    def _results(self, reader: JobReader, first: int) -> tuple[Any, int]:
        message = jobs_pb2.GetResultsResponse()
        found, after = reader.results(first, MESSAGE_BYTES)
        known, ledger = dict(found), reader.ledger
        for item in range(first, after):
            if item in known:
                message.results.add().MergeFromString(known[item])
            elif ledger.ended:
                message.results.add(item=item, code=UNRESULTED, error=f"its job ended before it was run: {ledger.why}")
        return message, after

    # ------------------------------------------------------------------------------------------------------------------

    def _job(self, given: Any) -> Job:
        return Job(
            id=given.id or f"{given.family}-{uuid.uuid4().hex[:12]}",
            family=given.family,
            complete_by_s=given.complete_by.ToMicroseconds() / 1e6,
            tenant=given.tenant,
            priority=given.priority,
            min_accuracy=given.min_accuracy,
            zones=tuple(dict.fromkeys(given.zones)),
            grams_max=given.grams_max,
        )

    def calendar_s(self) -> float:
        """Time of the calendar [UTC s], which deadlines are of."""
        return self._owner.calendar_s()

    def _world(self, job: Job) -> World:
        routing, times = self._local.routing, self._local.health.evidence.times
        reach = routing.table.reach.get(job.family)
        accuracy = 1.0 if reach is None else max(reach.live, reach.planned)
        zones = {node.zone for node in routing.nodes.values()}.union(self._owner.zones.others)
        live = routing.table.live(job.family)
        item_s = min((times.usual_s(each.slice, each.variant, 1) for each in live), default=0.0)
        return World(self.calendar_s(), routing.table.chains.keys(), zones, self._tenants(), accuracy, item_s)

    async def status(self, name: str) -> Any:
        """How a job stands. Raises NotFound."""
        return await on_disk(lambda: self.read_status(JobReader(self._folder, name)))

    def read_status(self, reader: JobReader) -> Any:
        """How a job stands by its files. Blocks."""
        reader.refresh()
        stored, ledger, (owner, why, expected_s) = reader.stored, reader.ledger, reader.owner()
        job, state = stored.job, reader.state
        status = jobs_pb2.JobStatus(
            job=jobs_pb2.Job(
                id=job.id, family=job.family, complete_by=_time(job.complete_by_s), tenant=job.tenant,
                priority=job.priority, min_accuracy=job.min_accuracy, zones=job.zones, grams_max=job.grams_max,
            ),
            state=f"JOB_STATE_{state.name}", items=stored.items, answered=ledger.answered, failed=ledger.failed,
            joules=ledger.joules, grams=ledger.grams, submitted_at=_time(stored.submitted_at_s),
            first_error=ledger.first_error,
        )  # fmt: skip
        away = Counter[str]()
        for parcel in reader.parcels():
            away[parcel.zone] += 0 if parcel.back else parcel.count - ledger.done[parcel.first : parcel.end].count(1)
        for zone in sorted({*ledger.zones, *away}):
            known = ledger.zones.get(zone, ZoneSum())
            status.zones.add(
                zone=zone, away=away[zone], answered=known.answered, joules=known.joules, grams=known.grams
            )
        if state in ENDED:
            status.ended_at.CopyFrom(_time(ledger.ended_at_s))
            status.late = ledger.ended_at_s > job.complete_by_s and state == JobState.DONE
            status.why = ledger.why
            return status
        status.late = self.calendar_s() > job.complete_by_s
        planned = self._owner.hours.of(job.id)
        if planned is not None:
            status.prospect, status.in_danger = planned.reason, not planned.in_time
            status.at_once_grams, status.evenly_grams = planned.at_once_grams, planned.evenly_grams
            status.hours.extend(codec.to_proto(replace(one, variants=())) for one in planned.hours)
        status.owner, status.why = self._owner.alive(owner), why
        if not status.owner:
            status.why = self._owner.why or "no dispatcher has it now: one takes it within seconds"
            return status
        if expected_s > 0:
            status.expected_at.CopyFrom(_time(expected_s))
            if expected_s > job.complete_by_s and not status.why:
                status.why = "at its rate it will be late"
        elif planned is not None and planned.finishes_at_s > 0:
            status.expected_at.CopyFrom(_time(planned.finishes_at_s))
        if planned is not None and not planned.in_time and not status.why:
            status.why = planned.reason
        return status


def add_jobs(jobs: JobsAdmin, server: Any) -> None:
    """Add the service to a server. Messages of Submit come in bytes: parsing a large one holds up the event loop."""

    made: dict[str, Any] = {}
    taking = SimpleNamespace(
        add_generic_rpc_handlers=lambda _: None,
        add_registered_method_handlers=lambda _, handlers: made.update(handlers),
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(jobs, taking)
    made["Submit"] = made["Submit"]._replace(request_deserializer=None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, made),))


def requests_of(message: bytes) -> Iterator[bytes]:
    """Items of a message of Submit, one by one. Raises InvalidInput: it is none."""
    try:
        _, at, end = kserve_wire.field(message, 0)
        if end != len(message):
            raise IndexError
        while at < end:
            tag, begin, at = kserve_wire.field(message, at)
            if tag != REQUEST_TAG or at > end:
                raise IndexError
            yield message[begin:at]
    except IndexError as error:
        raise InvalidInput("is not a message of items", field="items", remedy=BY_PROTO) from error


def _part(message: bytes) -> Any:
    """A message of Submit without items. Raises InvalidInput."""
    try:
        if len(message) < PART_BYTES_MAX:
            return jobs_pb2.SubmitRequest.FromString(message)
        why = f"a message of {len(message)} bytes without items, at most {PART_BYTES_MAX}"
    except DecodeError:
        why = "is not a SubmitRequest"
    raise InvalidInput(why, field="job", remedy=BY_PROTO)


async def _unread(context: Any, message: Any) -> Any:
    """Send a message; returns its writing if the client does not read it in time, else None."""
    writing = asyncio.ensure_future(context.write(message))
    writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # the client may leave
    if not (await asyncio.wait((writing,), timeout=SILENT_S))[0]:
        return writing
    await writing
    return None


async def _end_unread(writing: Any, remedy: str) -> None:
    """End a call whose client does not read, if it does not. Raises Unavailable."""
    if writing is not None:
        await writing  # no status can be sent before
        raise Unavailable(f"nothing was read for {SILENT_S:g} s", remedy=remedy)


def _time(at_s: float) -> Timestamp:
    found = Timestamp()
    found.FromMicroseconds(round(at_s * 1e6))
    return found
