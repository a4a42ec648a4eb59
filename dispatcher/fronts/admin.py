"""The admin service trefoil.dispatcher.v1.Dispatcher: table, drain and ExplainRequest over all workers.

A client's connection is with one worker of a dispatcher, its questions are not: counters and loads are summed; of a
worker that does not answer, the table says so and the rest is added up. ExplainRequest is answered by a worker that
serves the family, for each has its own queue, credits and turns.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.kserve import local_model_statistics
from dispatcher.request.contracts import unknown_model
from dispatcher.request.peer_links import Peers
from dispatcher.routing import request_parameters
from dispatcher.routing.core import membership
from dispatcher.routing.core.explain import explain
from dispatcher.routing.request_parameters import RequestParameters
from dispatcher.service.local_worker import LocalWorker
from dispatcher.service.metrics import exposition
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from trefoil.core.brains import Ticket
from trefoil.core.demand import LoadWindow
from trefoil.core.errors import InvalidInput, StaleRevision
from trefoil.runtime import codec
from trefoil.runtime.telemetry import Metrics

PRIORITY: Final = "priority"
PRIORITY_DIGITS_MAX: Final = 20  # of 64 bits
NAME: Final = "trefoil.dispatcher.v1.Dispatcher"


class AllWorkers(dispatcher_pb2_grpc.DispatcherServicer):  # type: ignore[misc]
    """Servicer of tables, drain and ExplainRequest over all workers of this dispatcher, whose metrics and load windows
    it has, too. Belongs to one event loop. Errors become statuses in the server's interceptor."""

    def __init__(self, local: LocalWorker, peers: Peers, metrics: Metrics) -> None:
        self._local = local
        self._peers = peers
        self._metrics = metrics

    def answers(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """Methods that other workers may call on this one, by name."""
        return {
            "Statistics": self._statistics,
            "Table": self._table,
            "Drain": self._drain,
            "Metrics": self._text,
            "Explain": self._explain,
        }

    async def ExplainRequest(self, request: Any, context: Any) -> Any:
        """Explain where a request would go now, by a worker that serves the family: it is the one that would choose.

        Raises:
            TrefoilError: as `explain_request` does.
        """
        table = self._local.routing.table
        first = table.chains.get(request.family, (request.family,))[0]
        for worker in table.elsewhere.get(first, ()):
            if isinstance(told := await self._peers.ask_one(worker, "Explain", request.SerializeToString()), bytes):
                answer = dispatcher_pb2.ExplainRequestResponse.FromString(told)
                answer.why = f"forwarded to worker {membership.worker_name(worker)}: {answer.why}"
                return answer
        return explain_request(self._local, request)

    async def windows(self, own: asyncio.Queue[LoadWindow]) -> AsyncGenerator[LoadWindow, None]:
        """Stream the load windows of all workers of all dispatchers, as each is flushed. `own`: a subscription to this
        worker's."""
        relays: dict[membership.WorkerId, asyncio.Task[None]] = {}
        try:
            while True:
                for worker in self._peers.linked_workers():
                    if worker not in relays or relays[worker].done():
                        relays[worker] = asyncio.create_task(self._relay(worker, own), name=f"windows of {worker}")
                yield await own.get()
        finally:
            for task in relays.values():
                task.cancel()
            await asyncio.gather(*relays.values(), return_exceptions=True)

    async def _relay(self, worker: membership.WorkerId, into: asyncio.Queue[LoadWindow]) -> None:
        async for data in self._peers.watch(worker, "Watch"):
            if into.full():
                into.get_nowait()
            into.put_nowait(codec.decode(LoadWindow, data))

    async def GetTable(self, request: Any, context: Any) -> Any:
        """Return the routes in force with what is known of each target: sums over all workers."""
        whole = table_of(self._local)
        for worker, told in (await self._peers.ask("Table", b"")).items():
            if isinstance(told, str):
                whole.workers.add(dispatcher=worker[0], worker=worker[1], why=told)
            else:
                add_table(whole, dispatcher_pb2.GetTableResponse.FromString(told))
        return whole

    async def Drain(self, request: Any, context: Any) -> Any:
        """Take all workers of this dispatcher out of service, or back into it.

        Raises:
            InvalidInput: no reason is given.
            StaleRevision: the request is of an older epoch than the table.
        """
        if not request.release and not request.why:
            raise InvalidInput("is empty", field="why", remedy="say why: clients and operators read it")
        epoch = self._local.routing.table.revision.epoch
        if request.epoch < epoch:
            raise StaleRevision(
                f"epoch {request.epoch} is older than that of the table, {epoch}", remedy="read it with GetTable"
            )
        self._local.drain("" if request.release else request.why)
        told = await self._peers.ask("Drain", request.SerializeToString())
        answer = dispatcher_pb2.DrainResponse(workers=[status_of(self._local)])
        for worker, said in told.items():
            if isinstance(said, str):
                answer.workers.add(dispatcher=worker[0], worker=worker[1], why=said)
            else:
                answer.workers.add().MergeFromString(said)
        return answer

    async def metrics(self) -> bytes:
        """Prometheus text of all workers, each sample labelled with the place of its worker."""
        told = await self._peers.ask("Metrics", b"")
        texts = {worker: text for worker, text in told.items() if isinstance(text, bytes)}
        return exposition({place(w): t for w, t in {**texts, self._local.id: self._metrics.text().encode()}.items()})

    async def _statistics(self, _: bytes) -> bytes:
        return bytes(local_model_statistics(self._local).SerializeToString())

    async def _table(self, _: bytes) -> bytes:
        return bytes(table_of(self._local).SerializeToString())

    async def _drain(self, data: bytes) -> bytes:
        request = dispatcher_pb2.DrainRequest.FromString(data)
        self._local.drain("" if request.release else request.why)
        return bytes(status_of(self._local).SerializeToString())

    async def _explain(self, data: bytes) -> bytes:
        return bytes(
            explain_request(self._local, dispatcher_pb2.ExplainRequestRequest.FromString(data)).SerializeToString()
        )

    async def _text(self, _: bytes) -> bytes:
        return self._metrics.text().encode()


def place(worker: membership.WorkerId) -> int:
    """Place of a worker in its dispatcher, as people know it: it stays when the worker is started again."""
    return membership.worker_place(worker)[1]


def table_of(local: LocalWorker) -> Any:
    """Build GetTableResponse of this worker alone."""
    table = local.routing.table
    return dispatcher_pb2.GetTableResponse(
        table=codec.to_proto(table.revision),
        routes=[codec.to_proto(table.routes[family]) for family in sorted(table.routes)],
        slices=[codec.to_proto(load) for load in local.routing.loads()],
        why=local.status_line,
        workers=[status_of(local)],
    )


def status_of(local: LocalWorker) -> Any:
    """Build WorkerStatus of this worker."""
    return dispatcher_pb2.WorkerStatus(
        dispatcher=local.id[0],
        worker=local.id[1],
        table=codec.to_proto(local.routing.table.revision),
        draining=local.draining,
        in_flight=sum(local.routing.in_flight().values()),
        waiting=sum(queue.waiting for queue in local.routing.each_queue),
        peer_target=local.peer_target,
        why=local.not_ready(),
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
    loads = {(_key(load.slice), load.family): load for load in whole.slices}
    for load in other.slices:
        if (same := loads.get((_key(load.slice), load.family))) is None:
            whole.slices.add().CopyFrom(load)
            continue
        same.in_flight += load.in_flight
        same.open_sequences += load.open_sequences
        same.ejected = same.ejected or load.ejected
    whole.workers.extend(other.workers)
    whole.why = whole.why or other.why


def _key(slice_: Any) -> bytes:
    return bytes(slice_.SerializeToString(deterministic=True))


def explain_request(local: LocalWorker, request: Any) -> Any:
    """ExplainRequestResponse.

    Raises:
        NotFound: no slice serves the family.
        InvalidInput: a parameter that a request could not have.
    """
    family, table = request.family, local.routing.table
    if family not in table.chains:
        raise unknown_model(family)
    model = table.chains[family][0]  # of a family that is split, its first stage
    asked, priority = _explained_parameters(request.params)
    ticket = Ticket(
        id=0, family=model, slo_class=asked.slo_class, tenant="", items=1, bytes=0,
        arrived_s=local.clock.monotonic_s(), deadline_s=None, min_accuracy=asked.min_accuracy, priority=priority,
        sequence_id="", sequence_start=False, sequence_end=False, length_score=None,
        slo_ms=local.routing.slo_ms(family, asked),
    )  # fmt: skip
    standing = local.routing.queues[model].snapshot(ticket, table.planned[model], table.missing.get(model, {}))
    found = explain(standing, ticket)
    return dispatcher_pb2.ExplainRequestResponse(
        table=codec.to_proto(table.revision),
        router=found.router,
        waiting=standing.waiting,
        why=found.why,
        targets=[
            dispatcher_pb2.ScoredTarget(
                target=codec.to_proto(each.target), eligible=each.eligible, score=each.score, in_flight=each.in_flight,
                why=each.why,
            )
            for each in found.targets
        ],
    )  # fmt: skip


def _explained_parameters(params: Mapping[str, str]) -> tuple[RequestParameters, int]:
    message = pb.ModelInferRequest()
    for name, value in params.items():
        if name != PRIORITY and not name.startswith(request_parameters.PREFIX):
            remedy = f"one of {', '.join((*sorted(request_parameters.KNOWN), PRIORITY))}"
            raise InvalidInput("does not affect where a request goes", field=name, value=value, remedy=remedy)
        if name != PRIORITY:
            message.parameters[name].string_param = value
    text = params.get(PRIORITY, "0")
    if not (text.isdecimal() and len(text) <= PRIORITY_DIGITS_MAX):
        raise InvalidInput("is not a whole number", field=PRIORITY, value=text, remedy="1 = highest, 0 = the default")
    return request_parameters.extract(message.parameters), int(text)
