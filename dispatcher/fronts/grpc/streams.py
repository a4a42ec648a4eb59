"""ModelStreamInfer: each message of a client's stream is a separate request, and is routed on its own.

Ordinary families: the message goes the way of every unary request; answers leave in the order of the requests, as
Triton writes them. Decoupled families: each request has one stream to the slice, which ends with Triton's final
response. The dispatcher always asks for that response, because it holds the credit until then. It passes the response
on only if the client asked for it.

Errors are answers (`error_message`, the stream continues), or, for a stream that began with `triton_grpc_error: true`,
end it with their status. Back-pressure: no message is read while stream_requests_max are under way.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request.admission import Caller, StatusError, parse_request
from dispatcher.request.contracts import Contracts
from dispatcher.request.decoupled import Enough, answer_stream
from dispatcher.request.inference import Inference
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.core import kserve_wire
from trefoil.core.errors import InvalidInput, TrefoilError

SEQUENCE: Final = "sequence_id"
GRPC_ERROR: Final = "triton_grpc_error"
CLOSED: Final = "the connection to its slice was closed"
STOPPING: Final = StatusError(grpc.StatusCode.UNAVAILABLE, "the dispatcher is stopping. Remedy: open the stream again")

Write = Callable[[bytes], Awaitable[None]]


class ClientLeft(asyncio.CancelledError):
    """Client that left its stream."""


class Streams:
    """Client streams (ModelStreamInfer) of this worker. Belongs to one event loop."""

    def __init__(self, local: LocalWorker, contracts: Contracts, inference: Inference) -> None:
        self.local = local
        self.inference = inference
        self._contracts = contracts
        self._open: set[_Stream] = set()

    async def serve(self, caller: Caller, context: Any, admit: Callable[[int], None]) -> None:
        """One stream, from its first message until the client has half-closed it and everything is answered. `admit`
        gets the bytes of each message and may raise StatusError.

        Raises:
            StatusError: the stream ends with it.
        """
        metadata = dict(context.invocation_metadata() or ())
        stream = _Stream(self, caller, metadata.get(GRPC_ERROR) == "true", context.write, admit)
        self._open.add(stream)
        self.local.accounting.open_streams += 1
        try:
            await stream.run(context.read)
        except* StatusError as closed:
            (stream.ended, *_) = closed.exceptions
        finally:
            self._open.discard(stream)
            self.local.accounting.open_streams -= 1
        if stream.ended is not None:
            raise stream.ended

    async def answer(self, family: str, data: bytes, caller: Caller, take: Callable[[Any], Awaitable[None]]) -> None:
        """Answer one request of any family outside a client's stream: each ModelInferResponse goes to `take`, the last
        one of a decoupled family too if it is empty. `take` may raise `Enough`.

        Raises:
            InvalidInput: it is larger than message_bytes_max.
            StatusError: a status for the client, also after answers; already booked and logged.
        """
        most = self.local.settings.message_bytes_max
        if 0 <= most < len(data):
            raise InvalidInput(f"the tensors have {len(data)} bytes", remedy=f"send at most message_bytes_max = {most}")
        if not await self.decoupled(family):
            answer = await self.inference.answer(data, caller)
            with suppress(Enough):  # it is all there is
                await take(pb.ModelInferResponse.FromString(answer.data))
            return

        async def send(answer: bytes) -> None:
            await take(pb.ModelStreamInferResponse.FromString(answer).infer_response)

        self.local.accounting.open_streams += 1
        try:
            await answer_stream(self.local, self.inference, data, caller, send, wants_final=True, grpc_error=True)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if isinstance(error, ClientLeft) or (task is not None and task.cancelling()):
                raise
            raise StatusError(grpc.StatusCode.UNAVAILABLE, CLOSED) from error
        finally:
            self.local.accounting.open_streams -= 1

    def close(self) -> None:
        """Close all streams since the process stops: what is under way is answered, and clients open them again
        elsewhere."""
        for stream in self._open:
            stream.end(STOPPING)

    @property
    def forwards(self) -> bool:
        """Whether other workers may answer in our place: on the way to them requests could overtake each other."""
        return self.inference.peers is not None and len(self.local.routing.membership.sharers) > 1

    async def decoupled(self, family: str) -> bool:
        """Whether a family is decoupled (any number of answers); False for one that admission will refuse."""
        try:
            return (self._contracts.known(family) or await self._contracts.fetch(family)).decoupled
        except TrefoilError:
            return False


@dataclass(slots=True)
class _Message:
    """One request of a stream. `before` is set once all requests that must be answered before this one are answered.
    `answered` is the `before` of the next request. A decoupled family's requests have neither."""

    data: bytes
    id: str
    decoupled: bool
    wants_final: bool
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    before: asyncio.Event | None = None
    answered: asyncio.Event | None = None
    sequence: tuple[str, bytes] | None = None  # whose turns are taken here, as another worker keeps it
    turn: asyncio.Event | None = None  # set when the request before it in its sequence has been answered


class _Stream:
    def __init__(
        self, streams: Streams, caller: Caller, grpc_error: bool, write: Write, admit: Callable[[int], None]
    ) -> None:
        self._streams = streams
        self._caller = caller
        self._grpc_error = grpc_error
        self._write = write
        self._admit = admit
        self._room = asyncio.Semaphore(streams.local.settings.stream_requests_max)
        self._writing = asyncio.Lock()
        self._last: asyncio.Event | None = None  # of the last message that is answered in order
        self._reading: asyncio.Task[None] | None = None
        self.ended: Exception | None = None  # what its client hears once everything is answered
        self._turns: dict[tuple[str, bytes], asyncio.Event] = {}  # of the last message of each sequence

    async def run(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Until the client has no more to ask and nothing is under way."""
        async with asyncio.TaskGroup() as group:
            self._reading = group.create_task(self._read(read, group))

    def end(self, why: StatusError) -> None:
        """Read no more."""
        self.ended = why
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, read: Callable[[], Awaitable[Any]], group: asyncio.TaskGroup) -> None:
        while True:
            await self._room.acquire()
            data = await read()
            if data is grpc.aio.EOF:
                return
            # Here, not in the task: the requests of a stream are admitted in their order.
            message = await self._message(data)
            group.create_task(self._answer(message))

    async def _message(self, data: bytes) -> _Message:
        try:
            parsed, *_ = parse_request(data, self._streams.local.settings.head_bytes_max)
        except InvalidInput:
            parsed = pb.ModelInferRequest()  # admission refuses it
        parameters = parsed.parameters
        wants_final = kserve_wire.WANTS_FINAL in parameters and parameters[kserve_wire.WANTS_FINAL].bool_param
        decoupled = await self._streams.decoupled(parsed.model_name)
        message = _Message(data, parsed.id, decoupled, wants_final)
        if not decoupled:
            message.before, self._last = self._last, asyncio.Event()
            message.answered = self._last
        if self._streams.forwards and SEQUENCE in parameters:
            message.sequence = (parsed.model_name, parameters[SEQUENCE].SerializeToString())
            message.turn = self._turns.get(message.sequence)
            self._turns[message.sequence] = message.finished
        return message

    async def _answer(self, message: _Message) -> None:
        try:
            await self._serve(message)
        except StatusError as refused:
            await self._refuse(message, refused)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if isinstance(error, ClientLeft) or (task is not None and task.cancelling()):
                raise
            await self._refuse(message, StatusError(grpc.StatusCode.CANCELLED, CLOSED))
        finally:
            if message.answered is not None:
                message.answered.set()
            message.finished.set()
            if message.sequence is not None and self._turns[message.sequence] is message.finished:
                del self._turns[message.sequence]
            self._room.release()

    async def _refuse(self, message: _Message, refused: StatusError) -> None:
        if self._grpc_error:
            raise refused
        await self._send_in_turn(message, kserve_wire.stream_error(refused.details, message.id))

    async def _serve(self, message: _Message) -> None:
        inference = self._streams.inference
        self._admit(len(message.data))
        if message.turn is not None:
            await message.turn.wait()
        if message.decoupled:
            await answer_stream(
                self._streams.local, inference, message.data, self._caller, self._send,
                wants_final=message.wants_final, grpc_error=self._grpc_error,
            )  # fmt: skip
        else:
            answer = await inference.answer(message.data, self._caller)
            await self._send_in_turn(message, kserve_wire.stream_answer(answer.data + kserve_wire.FINAL))

    async def _send_in_turn(self, message: _Message, data: bytes) -> None:
        if message.before is not None:
            await message.before.wait()
        await self._send(data)

    async def _send(self, data: bytes) -> None:
        async with self._writing:
            try:
                await self._write(data)
            except grpc.aio.InternalError as error:  # the client left; gRPC cancels this stream's handler as well
                raise ClientLeft from error
