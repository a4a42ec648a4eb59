"""Triton's generate extension: /generate and /generate_stream (docs/protocol/extension_generate.md, http_server.cc)."""

import asyncio
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.rest import generate_codec
from dispatcher.fronts.rest.calls import STOPPING, EventStream, HttpReply, HttpRequest, error_body, while_there
from dispatcher.fronts.rest.codec_process import ProcessOf, here_or_there
from dispatcher.request.admission import Caller, StatusError
from dispatcher.routing.core.receipts import SLICE
from dispatcher.transport.core import kserve_wire
from trefoil.core.errors import InvalidInput

NOT_ONE: Final = "generate expects model to produce exactly 1 response"


class Generate:
    """Generate extension of the REST port. Belongs to one event loop. `process`: codec of large bodies by bytes."""

    def __init__(self, fronts: Fronts, process: ProcessOf) -> None:
        self._process = process
        self._contracts, self._streams, self._local = fronts.contracts, fronts.streams, fronts.local

    async def reply(
        self, ask: HttpRequest, caller: Caller, body: bytes, model: str, version: str, one: bool
    ) -> HttpReply | None:
        """Reply with the `one` answer that there must be, or with an event for each; None: they have been sent.

        Raises:
            TrefoilError, StatusError, ClientDisconnected: before the first event.
        """
        reply: HttpReply | None = await while_there(ask.receive, self._reply(ask, caller, body, model, version, one))
        return reply

    async def _reply(
        self, ask: HttpRequest, caller: Caller, body: bytes, model: str, version: str, one: bool
    ) -> HttpReply | None:
        metadata = (await self._contracts.fetch(model)).metadata.SerializeToString()
        size, line = len(body), caller.flow[0]
        data = await here_or_there(self._process, size, line, generate_codec.read, body, metadata, model, version)
        if one:
            return await self._one(model, data, caller)
        await self._events(ask, model, data, caller)
        return None

    async def _written(self, answer: Any, caller: Caller) -> bytes:
        data = answer.SerializeToString()
        return await here_or_there(self._process, len(data), caller.flow[0], generate_codec.write, data)

    async def _one(self, model: str, data: bytes, caller: Caller) -> HttpReply:
        found = pb.ModelInferResponse()
        answers = 0

        async def take(answer: Any) -> None:
            nonlocal answers
            answers += not ends(answer)
            if answers > 1:
                raise InvalidInput(NOT_ONE, remedy="ask generate_stream, which brings any number of responses")
            if tells(answer):
                found.MergeFrom(answer)

        await self._streams.answer(model, data, caller, take)
        if not answers:
            raise InvalidInput(f"{NOT_ONE}, and it gave none", remedy="ask generate_stream")
        return HttpReply(200, await self._written(found, caller))

    async def _events(self, ask: HttpRequest, model: str, data: bytes, caller: Caller) -> None:
        events = EventStream(ask.send)

        async def take(answer: Any) -> None:
            if tells(answer):
                await events.event(await self._written(answer, caller))

        try:
            await self._streams.answer(model, data, caller, take)
        except StatusError as refused:
            if not events.started:
                raise
            await events.event(error_body(refused.details))
        except asyncio.CancelledError:
            if self._local.draining:
                await events.cut(error_body(STOPPING.details))
            raise
        await events.end()


def tells(answer: Any) -> bool:
    """Whether a response says more than that a stream ends: outputs, or a receipt."""
    return SLICE in answer.parameters or not ends(answer)


def ends(answer: Any) -> bool:
    """Whether a response only ends a stream."""
    return not answer.outputs and kserve_wire.IS_FINAL in answer.parameters
