"""Jobs of a dispatcher in the test's event loop: their owner and the admin port of `Running`, and a client of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc
import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp
from tritonclient.grpc import service_pb2 as pb

from dispatcher.jobs.batches import BatchApi
from dispatcher.jobs.folder import JobsFolder
from dispatcher.jobs.owner import JobsOwner
from dispatcher.jobs.service import NAME, JobsAdmin, add_jobs
from protos.dispatcher.v1 import jobs_pb2, jobs_pb2_grpc
from tests.support.dispatching import Running
from trefoil.runtime import rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State


class Jobs:
    """Owner, admin port and client. `guarded`: the port asks for tokens of the tenants file."""

    def __init__(self, running: Running, state: State, guarded: bool = False) -> None:
        self._tokens = running.fronts.access if guarded else None
        self.running, self.state = running, state
        self.folder = JobsFolder.of(running.settings)
        self.owner = JobsOwner(
            running.fronts, running.loop, running.siblings, state, self.folder, running.metrics
        )  # fmt: skip
        self.admin = JobsAdmin(running.fronts, self.folder, self.owner)
        self.batches = BatchApi(running.fronts, self.folder, self.admin)
        running.routes.update(self.batches.routes)
        self.settings = running.settings.model_copy(update={"admin_address": "127.0.0.1:0"})
        self._services = [(add_jobs, self.admin, NAME)]
        self._task: asyncio.Task[None] | None = None
        self.stub: Any = None

    async def start(self) -> None:
        self._server = rpc.make_server(self.settings, self._services, tokens=self._tokens)
        await self._server.start()
        self.address = f"127.0.0.1:{self._server.port}"
        self._channel = grpc.aio.insecure_channel(self.address)
        self.stub = jobs_pb2_grpc.JobsStub(self._channel)
        await self.own()

    async def own(self) -> None:
        self._task = asyncio.create_task(self.owner.run())

    async def disown(self) -> None:
        """As a worker that ends in order."""
        await self._cancel()
        await self.owner.shutdown()

    async def kill(self) -> None:
        """As a worker that is killed: nothing more is written, the lease is left to run out."""
        await self._cancel()
        await self.owner._drop_all()

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                raise error
            self._task = None

    async def stop(self) -> None:
        await self.disown()
        await self.batches.shutdown()
        await self._channel.close()
        await self._server.stop(0.1)

    async def submit(self, items: Iterable[bytes], complete_in_s: float = 600.0, **job: Any) -> Any:
        """Status of a job of the digits, submitted now."""
        return (await self.stub.Submit(messages(items, complete_in_s, **job))).status

    async def status(self, name: str) -> Any:
        return (await self.stub.Get(jobs_pb2.GetRequest(id=name))).status

    async def ended(self, name: str, timeout_s: float = 60.0) -> Any:
        """Last status of a job that ends."""
        async with asyncio.timeout(timeout_s):
            async for told in self.stub.Watch(jobs_pb2.WatchRequest(id=name)):
                last = told.status
        return last

    async def results(self, name: str, first: int = 0) -> list[Any]:
        stream = self.stub.GetResults(jobs_pb2.GetResultsRequest(id=name, first=first))
        return [result async for told in stream for result in told.results]


@contextlib.asynccontextmanager
async def jobs_of(running: Running, state: State, guarded: bool = False) -> AsyncIterator[Jobs]:
    jobs = Jobs(running, state, guarded)
    await jobs.start()
    try:
        yield jobs
    finally:
        await jobs.stop()


def messages(items: Iterable[bytes], complete_in_s: float = 600.0, **job: Any) -> Iterator[Any]:
    """Messages of Submit."""
    by = Timestamp()
    by.FromMicroseconds(round((WallClock().now_s() + complete_in_s) * 1e6))
    yield jobs_pb2.SubmitRequest(job=jobs_pb2.Job(**{"family": "digits", "complete_by": by, **job}))
    sent = list(items)
    yield jobs_pb2.SubmitRequest(items=jobs_pb2.Items(requests=sent))
    yield jobs_pb2.SubmitRequest(total=len(sent))


def item(first: int, rows: int = 1, **more: Any) -> bytes:
    """Item of the digits whose first pixel says what a fake slice answers."""
    message = pb.ModelInferRequest(**more)
    message.inputs.add(name="IMAGE", datatype="UINT8", shape=[rows, 8, 8])
    message.raw_input_contents.append(bytes([first]) + bytes(rows * 64 - 1))
    return bytes(message.SerializeToString())


def digit(result: Any) -> int:
    """What a fake slice answered to the first row of an item."""
    answer = pb.ModelInferResponse.FromString(result.response)
    return int(np.frombuffer(answer.raw_output_contents[0], np.float32)[:10].argmax())
