"""Parcels of jobs in peers' zones: submits them there as jobs, fetches results, takes back what a peer does not do.

A parcel's id is its idempotency key: submitted again, it is the same job there. Its results are written here before
that zone is asked to remove them. A peer loses a parcel if it does not answer for LOST_S, or if the parcel is over its
time. Later answers count only for items that are not run here yet (core/parcels.py).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from tritonclient.grpc import service_pb2 as pb

from dispatcher.jobs.batching import SHARED
from dispatcher.jobs.core.job import ENDED, Job
from dispatcher.jobs.core.journal import Result
from dispatcher.jobs.core.parcels import PEER, Parcel, check_answer
from dispatcher.jobs.job_run import AT_ONCE, FINAL, JobRun
from dispatcher.jobs.planned_hours import PlannedHours
from dispatcher.request.core.zone_choice import moved
from dispatcher.service.local_worker import LocalWorker
from protos.dispatcher.v1 import jobs_pb2, jobs_pb2_grpc
from trefoil.core.errors import InvalidInput, NotFound, TrefoilError, Unavailable
from trefoil.core.units import MG_PER_G
from trefoil.runtime import rpc
from trefoil.runtime.security.other_zones import OtherZone
from trefoil.runtime.security.zone_channel import ZoneChannel

LOG = structlog.get_logger()
LOOK_S: Final = 0.5
LOST_S: Final = 30.0  # without an answer; then its items run here
REFUSED_S: Final = 600.0  # in which a job that a peer has refused is not offered to it again
TIMEOUT_S: Final = 10.0
SUBMIT_S: Final = 20.0
FETCH_S: Final = 60.0  # of results of a parcel at a time; what came by then is kept
PROBE: Final = "-"  # no job has this name
PARCEL_ITEMS: Final = 4000
PARCEL_BYTES: Final = 4 * 2**20
PARCELS_MAX: Final = 16  # of one zone: a tenant there has at most jobs_tenant_max jobs
CHUNK_BYTES: Final = 256 * 1024
FINAL_CODES: Final = frozenset(code.name for code in FINAL)


class ZoneParcels:
    """Parcels of all jobs that one peer has."""

    def __init__(self, peer: OtherZone, local: LocalWorker, hours: PlannedHours) -> None:
        """Raises SettingError: the peer's certificates cannot be used, or its token would leave in clear text."""
        self.zone, self._channel = peer.zone, ZoneChannel(peer, local.settings)
        self._hours, self._clock = hours, local.clock
        self._transfer_j_per_mb = local.settings.transfer_j_per_mb
        self._silent_s = 0.0  # since when it does not answer
        self._refused: dict[str, tuple[float, str]] = {}  # when and why it refused a job
        self.unneeded: list[str] = []
        """Ids of parcels that it may remove."""
        self._runs: tuple[JobRun, ...] = ()
        self._trouble = ""  # why it does not answer

    def why_not(self, job: str) -> str:
        """Why it takes no items of a job; empty: it does."""
        refused_s, why = self._refused.get(job, (-math.inf, ""))
        refused = self._clock.monotonic_s() - refused_s < REFUSED_S
        return self._trouble or (why if refused else "")

    async def run(self, runs: Callable[[], Iterable[JobRun]]) -> None:
        """Look after the parcels of jobs, until cancelled."""
        while True:
            self._runs = tuple(runs())
            if self._trouble:
                await self._probe()
            for run in self._runs:
                try:
                    await self._step(run)
                except OSError as error:
                    LOG.warning("parcels of a job cannot be written", job=run.job.id, why=str(error))
                except Exception:  # the other jobs go on
                    LOG.exception("parcel of a job failed", job=run.job.id, zone=self.zone)
                    self._refuse(run, "a bug here, see the log")
                    for parcel in (one for one in run.states.parcels if one.zone == self.zone):
                        run.states.take_back(parcel)
            await self._remove()
            await self._clock.sleep(LOOK_S)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _step(self, run: JobRun) -> None:
        for parcel in [one for one in run.states.parcels if one.zone == self.zone]:
            if not self._trouble and not run.closing:
                await self._ask(run, parcel)
            if parcel in run.states.parcels and not run.closing:
                await self._reclaim(run, parcel)
        if self.zone not in run.abroad or run.closing or self.why_not(run.job.id):
            return
        held = sum(parcel.zone == self.zone for one in self._runs for parcel in one.states.parcels)
        count, until_s = self._hours.to_send(run.job, self.zone, PARCEL_ITEMS)
        if count and held < PARCELS_MAX and (packed := await run.pack(self.zone, count, until_s, PARCEL_BYTES)):
            parcel, data = packed
            self._hours.note_sent(run.job, self.zone, parcel.count)
            LOG.info("parcel sent", job=run.job.id, zone=self.zone, parcel=parcel.id, items=parcel.count)
            await self._ask(run, parcel, data)

    async def _reclaim(self, run: JobRun, parcel: Parcel) -> None:
        """Run the items of a parcel here if its peer is silent, or it is over its time."""
        late, silent_s = self._late(parcel), self._clock.monotonic_s() - self._silent_s
        if not parcel.back and self._trouble and (late or silent_s >= LOST_S):
            why = f"no answer for {silent_s:.0f} s: {self._trouble}"
            LOG.warning("parcel taken back", job=run.job.id, zone=self.zone, parcel=parcel.id, why=why)
            run.states.take_back(parcel)
            await run.write_parcels()
        elif parcel.back and self._now_s() >= parcel.complete_by_s + REFUSED_S:
            await self._forget(run, parcel)

    async def _ask(self, run: JobRun, parcel: Parcel, data: list[bytes] | None = None) -> None:
        """Submit a parcel if it may not be there; fetch its results; end it."""
        try:
            if parcel.sent or parcel.back:
                status = (await self._call("Get", jobs_pb2.GetRequest(id=parcel.id))).status
            else:
                status = await self._submit(run, parcel, data)
            self._check(status, run, parcel)
            parcel.sent, ended = True, status.state in ENDED
            if (status.answered + status.failed > parcel.seen or ended) and await self._fetch(run, parcel):
                parcel.seen = status.answered + status.failed
            if parcel.seen == status.answered + status.failed and (ended or parcel.back or self._late(parcel)):
                await run.flush()
                if run.written(parcel):
                    await self._forget(run, parcel)
        except Unavailable as error:
            self._silent(str(error))
        except (TrefoilError, DecodeError) as error:
            if not (isinstance(error, NotFound) and (parcel.sent or parcel.back)):  # else it has removed the parcel
                self._refuse(run, str(error))
            await self._forget(run, parcel)

    async def _call(self, method: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        stub = jobs_pb2_grpc.JobsStub(await self._channel.get())
        return await rpc.call(getattr(stub, method), request, timeout_s)

    async def _submit(self, run: JobRun, parcel: Parcel, data: list[bytes] | None) -> Any:
        data = data or await run.items_of(parcel, PARCEL_BYTES)  # None: a process before this one made the parcel
        by = Timestamp()
        by.FromMicroseconds(round(parcel.complete_by_s * 1e6))
        job = jobs_pb2.Job(
            id=parcel.id, family=run.job.family, complete_by=by, priority=run.job.priority,
            min_accuracy=run.job.min_accuracy, zones=[self.zone],
        )  # fmt: skip
        return (await self._call("Submit", _messages(job, data), SUBMIT_S)).status

    @staticmethod
    def _check(status: Any, run: JobRun, parcel: Parcel) -> None:
        """Raises InvalidInput: the status is not that of the parcel."""
        if (status.job.id, status.job.family, status.items) != (parcel.id, run.job.family, parcel.count):
            value = f"{status.job.id}, {status.items} items of {status.job.family}"
            raise InvalidInput(f"asked for {parcel.id}, {parcel.count} items", field="job", value=value, remedy=PEER)

    async def _fetch(self, run: JobRun, parcel: Parcel) -> bool:
        """Fetch results from the first one on that has not come; whether all have that are there."""
        stub = jobs_pb2_grpc.JobsStub(await self._channel.get())
        stream = stub.GetResults(jobs_pb2.GetResultsRequest(id=parcel.id, first=parcel.after))
        try:
            async with asyncio.timeout(FETCH_S):
                return await self._take(run, parcel, stream)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        except TimeoutError as error:
            why = f"no result came for {TIMEOUT_S:g} s, or not all within {FETCH_S:g} s"
            raise Unavailable(why) from error
        finally:
            stream.cancel()

    async def _take(self, run: JobRun, parcel: Parcel, stream: Any) -> bool:
        """Results as they come, in the order of items. Raises TimeoutError: none comes."""
        least, count = parcel.after, 0
        while True:
            async with asyncio.timeout(TIMEOUT_S):
                message = await stream.read()
            if message is grpc.aio.EOF:
                return True
            if not message.results:
                raise InvalidInput("a message has none", field="results", remedy=PEER)
            for told in message.results:
                if told.item < least:
                    why = f"is not after item {least - 1}, which came before"
                    raise InvalidInput(why, field="results.item", value=told.item, remedy=PEER)
                if (result := self._result(run, parcel, told)) is not None:
                    run.deliver(parcel, result)
                    parcel.after += told.item == parcel.after
                least, count = told.item + 1, count + 1
                if count % AT_ONCE == 0:
                    await asyncio.sleep(0)
            if run.full or run.closing:
                return False  # from there on, once they are written

    def _result(self, run: JobRun, parcel: Parcel, told: Any) -> Result | None:
        """Result of an item as it is kept; None: the item has to be run.

        Raises:
            InvalidInput, DecodeError: it is not what a dispatcher answers.
        """
        check_answer(parcel, told.item, 0.0, 0.0)
        kept = jobs_pb2.ItemResult(item=parcel.first + told.item, zone=self.zone)
        if told.code:
            if told.code not in FINAL_CODES:
                return None
            kept.code, kept.error = told.code, told.error
            error = f"{told.code}: {told.error}"
            return Result(kept.item, kept.SerializeToString(), failed=True, error=error)
        answer = pb.ModelInferResponse.FromString(told.response)
        if not answer.outputs or len(answer.outputs) != len(answer.raw_output_contents):
            raise InvalidInput("has no outputs", field="results.response", value=told.item, remedy=PEER)
        joules, mg = (answer.parameters[name].double_param if name in answer.parameters else 0.0 for name in SHARED)
        check_answer(parcel, told.item, joules, mg / MG_PER_G)
        size = run.item_bytes + len(told.response)
        kept.moved_j, kept.moved_g = moved(size, self._transfer_j_per_mb, joules, mg / MG_PER_G)
        kept.response = told.response
        carbon_g = mg / MG_PER_G + kept.moved_g
        return Result(kept.item, kept.SerializeToString(), False, joules + kept.moved_j, carbon_g, zone=self.zone)

    async def _forget(self, run: JobRun, parcel: Parcel) -> None:
        """A parcel has ended here; its zone may remove it."""
        LOG.info("parcel ended", job=run.job.id, zone=self.zone, parcel=parcel.id, results=run.states.ended(parcel))
        run.states.forget(parcel)
        self.unneeded.append(parcel.id)
        await run.write_parcels()

    async def _remove(self) -> None:
        """Have parcels that are not needed ended and removed, each until the peer has none of its name."""
        for name in [] if self._trouble else list(self.unneeded):
            try:
                await self._call("Cancel", jobs_pb2.CancelRequest(id=name, why="not needed", remove=True))
            except Unavailable as error:
                self._silent(str(error))
                return
            except TrefoilError:  # it has none of that name any more
                self.unneeded.remove(name)

    async def _probe(self) -> None:
        """Ask a peer that does not answer whether it is back."""
        try:
            await self._call("Get", jobs_pb2.GetRequest(id=PROBE))
        except Unavailable as error:
            self._trouble = str(error)
            return
        except TrefoilError:
            pass  # it has no job of that name
        LOG.info("a peer answers again", zone=self.zone)
        self._trouble = ""

    def _refuse(self, run: JobRun, why: str) -> None:
        LOG.warning("a peer does not run a parcel", job=run.job.id, zone=self.zone, why=why)
        now_s = self._clock.monotonic_s()
        self._refused = {job: one for job, one in self._refused.items() if now_s - one[0] < REFUSED_S}
        self._refused[run.job.id] = now_s, why

    def _silent(self, why: str) -> None:
        if not self._trouble:
            self._silent_s = self._clock.monotonic_s()
            LOG.warning("a peer does not answer", zone=self.zone, why=why)
        self._trouble = why

    def _late(self, parcel: Parcel) -> bool:
        return self._now_s() >= parcel.complete_by_s

    def _now_s(self) -> float:
        return self._clock.now_s() + self._clock.calendar_ahead_s()


class Zones:
    """All peers of a dispatcher."""

    def __init__(self, local: LocalWorker, hours: PlannedHours) -> None:
        """Raises SettingError: as ZoneParcels."""
        self.others = {peer.zone: ZoneParcels(peer, local, hours) for peer in local.settings.other_zones}

    def usable(self, job: Job) -> set[str]:
        """Peers' zones that take items of a job."""
        return {zone for zone in job.zones if zone in self.others and not self.others[zone].why_not(job.id)}

    def troubles(self, job: Job) -> str:
        """Why peers' zones that a job names take no items of it."""
        found = {zone: self.others[zone].why_not(job.id) for zone in job.zones if zone in self.others}
        return "; ".join(f"zone {zone}: {why}" for zone, why in found.items() if why)

    async def run(self, runs: Callable[[], Iterable[JobRun]]) -> None:
        """Look after all parcels, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for zone, peer in self.others.items():
                group.create_task(peer.run(runs), name=f"parcels in zone {zone}")

    def leave(self, parcels: Iterable[Parcel]) -> None:
        """Parcels of a job that has ended: nothing of them is needed."""
        for parcel in (one for one in parcels if one.zone in self.others):
            self.others[parcel.zone].unneeded.append(parcel.id)

    async def close(self) -> None:
        """Close all connections."""
        for peer in self.others.values():
            await peer.close()


async def _messages(job: Any, data: list[bytes]) -> AsyncIterator[Any]:
    """Messages of Submit."""
    yield jobs_pb2.SubmitRequest(job=job)
    chunk, size = list[bytes](), 0
    for one in data:
        chunk.append(one)
        size += len(one)
        if size >= CHUNK_BYTES:
            yield jobs_pb2.SubmitRequest(items=jobs_pb2.Items(requests=chunk))
            chunk, size = [], 0
    if chunk:
        yield jobs_pb2.SubmitRequest(items=jobs_pb2.Items(requests=chunk))
    yield jobs_pb2.SubmitRequest(total=len(data))
