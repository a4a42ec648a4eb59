"""What all workers of one dispatcher say together: a client's connection is with one of them, its questions are not.

Counters and loads are summed; of a sibling that does not answer, the table says so and the rest is added up.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from dispatcher import asked
from dispatcher.core import crew
from dispatcher.exposition import exposition
from dispatcher.hub import Hub
from dispatcher.peers import Peers
from dispatcher.statistics import local_statistics
from protos.dispatcher.v1 import dispatcher_pb2
from trefoil.core.demand import LoadWindow
from trefoil.core.errors import InvalidInput, StaleRevision
from trefoil.runtime import codec
from trefoil.runtime.telemetry import Metrics


class Siblings:
    """Belongs to one event loop."""

    def __init__(self, hub: Hub, peers: Peers, metrics: Metrics) -> None:
        self._hub = hub
        self._peers = peers
        self._metrics = metrics

    def answers(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """What other workers may ask of this one."""
        return {
            "Statistics": self._statistics,
            "Table": self._table,
            "Drain": self._drain,
            "Metrics": self._text,
            "Explain": self._explain,
        }

    async def explain(self, request: Any) -> Any:
        """ExplainRequestResponse of a worker that serves the family: it is the one that would choose.

        Raises:
            TrefoilError: as `asked.answer` does.
        """
        for worker in self._hub.table.elsewhere.get(request.family, ()):
            if isinstance(told := await self._peers.ask_one(worker, "Explain", request.SerializeToString()), bytes):
                answer = dispatcher_pb2.ExplainRequestResponse.FromString(told)
                answer.why = f"forwarded to worker {crew.name(worker)}: {answer.why}"
                return answer
        return asked.answer(self._hub, request)

    async def windows(self, own: asyncio.Queue[LoadWindow]) -> AsyncGenerator[LoadWindow, None]:
        """The windows of all workers, as each is flushed. `own`: a subscription to this worker's."""
        relays: dict[crew.Worker, asyncio.Task[None]] = {}
        try:
            while True:
                for worker in self._peers.siblings():
                    if worker not in relays or relays[worker].done():
                        relays[worker] = asyncio.create_task(self._relay(worker, own), name=f"windows of {worker}")
                yield await own.get()
        finally:
            for task in relays.values():
                task.cancel()
            await asyncio.gather(*relays.values(), return_exceptions=True)

    async def _relay(self, worker: crew.Worker, into: asyncio.Queue[LoadWindow]) -> None:
        async for data in self._peers.watch(worker, "Watch"):
            if into.full():
                into.get_nowait()
            into.put_nowait(codec.decode(LoadWindow, data))

    async def table(self) -> Any:
        """GetTableResponse of all workers: credits, requests in flight and open sequences are sums."""
        whole = table_of(self._hub)
        for worker, told in (await self._peers.ask("Table", b"")).items():
            if isinstance(told, str):
                whole.workers.add(dispatcher=worker[0], worker=worker[1], why=told)
            else:
                add_table(whole, dispatcher_pb2.GetTableResponse.FromString(told))
        return whole

    async def drain(self, request: Any) -> Any:
        """Drain this dispatcher, or end that.

        Raises:
            InvalidInput: no reason is given.
            StaleRevision: the request is of an older epoch than the table.
        """
        if not request.release and not request.why:
            raise InvalidInput("is empty", field="why", remedy="say why: clients and operators read it")
        epoch = self._hub.table.revision.epoch
        if request.epoch < epoch:
            raise StaleRevision(
                f"epoch {request.epoch} is older than that of the table, {epoch}", remedy="read it with GetTable"
            )
        self._hub.drain("" if request.release else request.why)
        told = await self._peers.ask("Drain", request.SerializeToString())
        answer = dispatcher_pb2.DrainResponse(workers=[status_of(self._hub)])
        for worker, said in told.items():
            if isinstance(said, str):
                answer.workers.add(dispatcher=worker[0], worker=worker[1], why=said)
            else:
                answer.workers.add().MergeFromString(said)
        return answer

    async def metrics(self) -> bytes:
        """The Prometheus text of all workers, each sample with the place of its worker."""
        told = await self._peers.ask("Metrics", b"")
        texts = {worker: text for worker, text in told.items() if isinstance(text, bytes)}
        return exposition({place(w): t for w, t in {**texts, self._hub.me: self._metrics.text().encode()}.items()})

    async def _statistics(self, _: bytes) -> bytes:
        return bytes(local_statistics(self._hub).SerializeToString())

    async def _table(self, _: bytes) -> bytes:
        return bytes(table_of(self._hub).SerializeToString())

    async def _drain(self, data: bytes) -> bytes:
        request = dispatcher_pb2.DrainRequest.FromString(data)
        self._hub.drain("" if request.release else request.why)
        return bytes(status_of(self._hub).SerializeToString())

    async def _explain(self, data: bytes) -> bytes:
        return bytes(asked.answer(self._hub, dispatcher_pb2.ExplainRequestRequest.FromString(data)).SerializeToString())

    async def _text(self, _: bytes) -> bytes:
        return self._metrics.text().encode()


def place(worker: crew.Worker) -> int:
    """The number of a worker as people know it: it stays when the worker is started again."""
    return crew.place(worker)[1]


def table_of(hub: Hub) -> Any:
    """GetTableResponse of this worker alone."""
    table = hub.table
    return dispatcher_pb2.GetTableResponse(
        table=codec.to_proto(table.revision),
        routes=[codec.to_proto(table.routes[family]) for family in sorted(table.routes)],
        slices=[codec.to_proto(load) for load in hub.loads()],
        why=hub.standing,
        workers=[status_of(hub)],
    )


def status_of(hub: Hub) -> Any:
    """How this worker stands."""
    return dispatcher_pb2.WorkerStatus(
        dispatcher=hub.me[0],
        worker=hub.me[1],
        table=codec.to_proto(hub.table.revision),
        draining=hub.draining,
        in_flight=sum(hub.in_flight().values()),
        waiting=sum(pump.waiting for pump in hub.each_pump),
        peer_target=hub.peer_target,
        why=hub.not_ready(),
    )


def add_table(whole: Any, other: Any) -> None:
    """Add one worker's table to that of others."""
    routes = {route.family: route for route in whole.routes}
    for route in other.routes:
        if route.family not in routes:
            whole.routes.add().CopyFrom(route)
            continue
        known = {_key(target.slice): target for target in routes[route.family].targets}
        for target in route.targets:
            if (same := known.get(_key(target.slice))) is not None:
                same.credits += target.credits
            else:
                routes[route.family].targets.add().CopyFrom(target)
    loads = {_key(load.slice): load for load in whole.slices}
    for load in other.slices:
        if (same := loads.get(_key(load.slice))) is None:
            whole.slices.add().CopyFrom(load)
            continue
        same.in_flight += load.in_flight
        same.open_sequences += load.open_sequences
        same.ejected = same.ejected or load.ejected
    whole.workers.extend(other.workers)
    whole.why = whole.why or other.why


def _key(slice_: Any) -> bytes:
    return bytes(slice_.SerializeToString(deterministic=True))
