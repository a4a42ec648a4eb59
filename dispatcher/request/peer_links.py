"""Links to the other workers: which of them live, and requests that they answer for this one.

A worker may have no credits of a family, or may not keep its sequences. It then forwards the whole request to a worker
that does, as bytes over a separate socket (`peer_server` is the other end). The link also shows dead workers: a refused
connection is a proof, long before the acknowledgement in Redis ends.
"""

import asyncio
import itertools
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from dispatcher.request.admission import Caller, StatusError
from dispatcher.routing.core import membership
from dispatcher.routing.core.membership import WorkerId
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.calls import Keepalive, NotTaken
from dispatcher.transport.h2_channel import H2Channel, open_channel
from protos.dispatcher.v1 import dispatcher_pb2
from trefoil.core.brains import Ticket
from trefoil.core.fleet import SliceKey
from trefoil.runtime import codec, rpc

LOG = structlog.get_logger()
SERVICE: Final = "trefoil.dispatcher.v1.Peers"
CALLER: Final = "trefoil-caller-bin"
ANSWERED_BY: Final = "trefoil-worker"  # a trailer: the status came from the worker itself, not from the way to it
VARIANT: Final = "trefoil-variant-bin"
SLICE: Final = "trefoil-slice-bin"
NOT_MINE: Final = "trefoil-not-mine"
INTERNAL_TRAILERS: Final = frozenset({ANSWERED_BY, NOT_MINE, VARIANT, SLICE})
ASK_TIMEOUT_S: Final = 1.0
TICK_S: Final = 0.5
SEQUENCES_MAX: Final = 100_000
KEEPALIVE: Final = Keepalive(every_s=2.0, timeout_s=1.0)


class NotDelivered(Exception):
    """Forwarded request that the other worker certainly never took."""


class NoCredits(StatusError):
    """Answer of a worker that has no credits of the family either: it has heard of a change that we have not, or we of
    one that it has not."""

    def __init__(self, who: str) -> None:
        text = f"worker {who} has no credits of the family"
        super().__init__(grpc.StatusCode.UNAVAILABLE, text, ((NOT_MINE, "1"),))


class ConnectionLost(StatusError):
    """Connection to another worker that broke under a request."""


@dataclass(frozen=True, slots=True)
class ForwardedAnswer:
    """Answer that another worker gave to a forwarded request."""

    data: bytes
    trailers: Any
    variant: str
    slice: SliceKey


class PeerLink:
    """Connection to one other worker."""

    def __init__(self, worker: WorkerId, target: str, channel: H2Channel) -> None:
        self.worker = worker
        self.target = target
        self.channel = channel
        self.up = False
        self.watch: asyncio.Task[None] | None = None

    async def ask(self, method: str, request: bytes, metadata: Sequence[tuple[str, str]]) -> bytes:
        """Call any other method of a worker; raises AioRpcError."""
        data, _ = await self.channel.unary(f"/{SERVICE}/{method}", (request,), ASK_TIMEOUT_S, metadata)
        return data


class Peers:
    """Links to all other workers. A part of the service, on one event loop: it keeps the links as the membership
    changes."""

    def __init__(self, local: LocalWorker) -> None:
        self._local = local
        self._routing = local.routing
        self._clock = local.clock
        self._links: dict[WorkerId, PeerLink] = {}
        self._turn = itertools.count()
        self._sequence_workers: OrderedDict[tuple[str, str], WorkerId] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        settings = local.settings
        self._token = settings.token
        self._insecure = settings.insecure

    # Where a request goes

    def owner(self, family: str) -> WorkerId | None:
        """Worker that keeps a family's sequences; None: this one."""
        served_by = self._routing.table.served_by.get(family, ())
        if not served_by:
            return None
        chosen = membership.sequence_owner(family, served_by, self._local.id[0])
        return None if chosen == self._local.id else chosen

    def forward_target(self, ticket: Ticket, hops: int, sequenced: bool) -> WorkerId | None:
        """Worker that a request is to be forwarded to; None: it is answered, or waits, here.

        Raises:
            NoCredits: it was forwarded to us, and would have to be once more.
        """
        if sequenced:
            return self._sequence_worker(ticket) if hops == 0 else None
        others = self._routing.table.elsewhere.get(ticket.family)
        if not others:
            return None
        if hops:
            raise NoCredits(membership.worker_name(self._local.id))
        up = [worker for worker in others if (link := self._links.get(worker)) is not None and link.up]
        return up[next(self._turn) % len(up)] if up else None

    async def forward(self, worker: WorkerId, data: bytes, caller: Caller) -> ForwardedAnswer:
        """Let another worker answer a request (bytes of a ModelInferRequest).

        Raises:
            NotDelivered: it is gone, and never saw it.
            NoCredits: it cannot answer either.
            ConnectionLost: it may have seen it.
            StatusError: what it answered.
        """
        link = self._link(worker)
        try:
            named, timeout_s = self._metadata(link, caller), self._timeout_s(caller)
            answer, trailers = await link.channel.unary(f"/{SERVICE}/Infer", (data,), timeout_s, named)
        except grpc.aio.AioRpcError as error:
            raise self._failed(link, error) from error
        told = dict(trailers)
        slice_ = codec.decode(SliceKey, told[SLICE]) if SLICE in told else SliceKey()
        variant = bytes(told.get(VARIANT, b"")).decode()
        return ForwardedAnswer(answer, client_trailers(trailers), variant, slice_)

    async def stream(
        self,
        worker: WorkerId,
        data: bytes,
        caller: Caller,
        asked: dict[str, bool],
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Let another worker answer a request of a decoupled family, `asked` for as `DecoupledRequest` is: its answers
        (ModelStreamInferResponse) go to `send`. Raises like `forward`."""
        link = self._link(worker)
        told = [*self._metadata(link, caller), *((f"trefoil-{name}", "1") for name, yes in asked.items() if yes)]
        try:
            async with aclosing(
                link.channel.stream(f"/{SERVICE}/Flow", (data,), self._timeout_s(caller), told)
            ) as answers:
                async for answer in answers:
                    await send(answer)
        except grpc.aio.AioRpcError as error:
            raise self._failed(link, error) from error

    def _link(self, worker: WorkerId) -> PeerLink:
        if (link := self._links.get(worker)) is None:
            raise NotDelivered
        return link

    def _metadata(self, link: PeerLink, caller: Caller) -> list[tuple[str, Any]]:
        return [(CALLER, _caller(caller)), *self._authorization(link)]

    def _timeout_s(self, caller: Caller) -> float | None:
        if caller.deadline_s is None:
            return None
        return max(0.0, caller.deadline_s - self._clock.monotonic_s())

    def _failed(self, link: PeerLink, error: grpc.aio.AioRpcError) -> Exception:
        trailers = tuple(error.trailing_metadata() or ())
        if NOT_MINE in dict(trailers):
            return NoCredits(membership.worker_name(link.worker))
        if ANSWERED_BY in dict(trailers):
            return StatusError(error.code(), error.details() or "", client_trailers(trailers))
        if isinstance(error, NotTaken):
            self._mark_down(link, f"{error.code().name} {error.details()}")
            return NotDelivered()
        return ConnectionLost(error.code(), f"worker {membership.worker_name(link.worker)}: {error.details()}")

    def _sequence_worker(self, ticket: Ticket) -> WorkerId | None:
        """Worker of a sequence: the one that got its first message, while it lives, even if the family has another
        owner."""
        key = (ticket.family, ticket.sequence_id)
        kept = self._sequence_workers.pop(key, None)
        if kept is None or ticket.sequence_start or (kept != self._local.id and kept not in self._links):
            kept = self.owner(ticket.family) or self._local.id
            if kept != self._local.id and not ((link := self._links.get(kept)) is not None and link.up):
                kept = self._local.id
        if not ticket.sequence_end:
            self._sequence_workers[key] = kept
            if len(self._sequence_workers) > SEQUENCES_MAX:
                self._sequence_workers.popitem(last=False)
        return None if kept == self._local.id else kept

    # What others know

    async def ask(self, method: str, request: bytes) -> dict[WorkerId, bytes | str]:
        """Ask all other workers of this dispatcher one question at once: their answers, or why there is none, as
        text."""
        self.refresh()
        workers = [worker for worker in self._links if worker[0] == self._local.id[0]]
        answers = await asyncio.gather(*(self.ask_one(worker, method, request) for worker in workers))
        return dict(zip(workers, answers, strict=True))

    async def ask_one(self, worker: WorkerId, method: str, request: bytes) -> bytes | str:
        """Ask one worker one question: its answer, or why there is none, as text."""
        if (link := self._links.get(worker)) is None:
            return "it has no link"
        try:
            return await link.ask(method, request, self._authorization(link))
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"

    async def watch(self, worker: WorkerId, method: str) -> AsyncIterator[bytes]:
        """Stream what a worker tells as it happens, until it is gone."""
        if (link := self._links.get(worker)) is None:
            return
        try:
            async with aclosing(
                link.channel.stream(f"/{SERVICE}/{method}", (b"",), metadata=self._authorization(link))
            ) as told:
                async for data in told:
                    yield data
        except grpc.aio.AioRpcError as error:
            LOG.debug(
                "not reported", worker=membership.worker_name(worker), why=f"{error.code().name} {error.details()}"
            )

    def linked_workers(self) -> tuple[WorkerId, ...]:
        """Other workers, of any dispatcher, whose link stands."""
        return tuple(worker for worker, link in self._links.items() if link.up)

    # A part of the service

    async def init(self) -> None:
        """Nothing to acquire."""

    async def run(self) -> None:
        """Keep a link to every member, until cancelled."""
        while True:
            self.refresh()
            await self._clock.sleep(TICK_S)

    async def shutdown(self) -> None:
        """Close all links to other workers."""
        for worker in list(self._links):
            self._close_link(worker)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def refresh(self) -> None:
        """Link to who is a member now, and let go of who is not."""
        members = self._routing.membership.members
        for worker in list(self._links):
            if worker not in members or members[worker].target != self._links[worker].target:
                self._close_link(worker)
        for worker, member in members.items():
            if worker not in self._links and member.target and _may_reach(member.target):
                self._links[worker] = link = PeerLink(worker, member.target, self._channel(member.target))
                link.watch = asyncio.create_task(self._watch(link), name=f"watch {membership.worker_name(worker)}")

    def _close_link(self, worker: WorkerId) -> None:
        link = self._links.pop(worker)
        self._routing.membership.mark_disconnected(worker)
        task = asyncio.create_task(_close(link))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _watch(self, link: PeerLink) -> None:
        """Follow the state of a connection. Refused after it stood, or on a socket of this host: the worker is dead."""
        ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        stood = False
        while True:
            state = link.channel.get_state(try_to_connect=True)
            if state is ready and not link.up:
                link.up = stood = True
                self._routing.membership.mark_connected(link.worker)
                self._routing.redirect_waiting()
                await self._pass_on_drain(link)
            elif state is not ready:
                link.up = False
                self._routing.membership.mark_disconnected(link.worker)
                if state is failed and (stood or link.target.startswith("unix:")):
                    self._mark_down(link, "it refuses connections")
                    return
            await link.channel.wait_for_state_change(state)

    async def _pass_on_drain(self, link: PeerLink) -> None:
        """A sibling that started after this dispatcher was drained learns of it now."""
        if self._local.drained_why and link.worker[0] == self._local.id[0]:
            request = dispatcher_pb2.DrainRequest(why=self._local.drained_why)
            await self.ask_one(link.worker, "Drain", request.SerializeToString())

    def _mark_down(self, link: PeerLink, why: str) -> None:
        link.up = False
        if self._links.get(link.worker) is link:
            LOG.warning("worker lost", worker=membership.worker_name(link.worker), why=why)
            self._routing.remove_worker(link.worker)
            self.refresh()

    def _channel(self, target: str) -> H2Channel:
        if target.startswith("unix:"):
            return open_channel(target, None)
        return open_channel(target, self._local.tls, name=self._local.settings.peer_name, keepalive=KEEPALIVE)

    def _authorization(self, link: PeerLink) -> list[tuple[str, str]]:
        if self._token is None or link.target.startswith("unix:"):
            return []
        tls = self._local.tls
        if (tls is None or not tls.mutual) and not self._insecure and not rpc.is_loopback(link.target):
            return []  # it would leave this machine in clear text, for an address that any writer to Redis could set
        return [("authorization", f"Bearer {self._token.get_secret_value()}")]


def _may_reach(target: str) -> bool:
    """A socket of another host's file system is not ours to connect to."""
    return not target.startswith("unix:") or Path(target.removeprefix("unix:")).exists()


def _caller(caller: Caller) -> bytes:
    told = {"tenant": caller.tenant, "hops": caller.hops + 1, "trace": caller.trace}
    told |= {"flow": caller.flow, "weight": caller.weight, "went_away": caller.went_away}
    return json.dumps(told).encode()


def caller_of(data: bytes, deadline_s: float | None) -> Caller:
    """Decode the caller that another worker forwards for."""
    told = json.loads(data)
    trace = tuple((str(key), str(value)) for key, value in told.get("trace", ()))  # a worker of before has none
    host, connection = told.get("flow", ("", ""))
    return Caller(
        tenant=str(told["tenant"]), deadline_s=deadline_s, hops=int(told["hops"]), trace=trace,
        flow=(str(host), str(connection)), weight=float(told.get("weight", 1.0)),
        went_away=told.get("went_away") is True,
    )  # fmt: skip


def client_trailers(trailers: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Trailers without those that workers exchange among themselves."""
    return tuple((key, value) for key, value in trailers if key not in INTERNAL_TRAILERS)


async def _close(link: PeerLink) -> None:
    if link.watch is not None and link.watch is not asyncio.current_task():
        link.watch.cancel()
        await asyncio.wait((link.watch,))
    await link.channel.close(ASK_TIMEOUT_S)
