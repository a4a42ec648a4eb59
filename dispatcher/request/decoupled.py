"""One request of a decoupled family: any number of answers, from one stream to its slice.

The credit is held until Triton's final response; where the client leaves before, until the stream has ended, for
CANCEL_GRACE_S at most. A request that the channel knows was not taken is tried on another slice. If the connection dies
later, the request ends with the status that came back.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request.admission import Caller, Request, StatusError
from dispatcher.request.inference import Inference, status
from dispatcher.request.token_times import record_tokens
from dispatcher.routing.core.membership import WorkerId
from dispatcher.routing.slices import Connection
from dispatcher.service.ejector import proof_of
from dispatcher.service.local_worker import LocalWorker
from dispatcher.slice_health.core.ejection import Failure
from dispatcher.slice_health.core.suspicion import is_dead_stub, is_overload
from dispatcher.transport.core import kserve_wire
from dispatcher.transport.core.grpc_framing import JOIN
from trefoil.core.errors import Unavailable
from trefoil.runtime.given.llm_backends import TOKENS_IN, TOKENS_OUT

REFUSED: Final = "INVALID_ARGUMENT: "  # a model's word for what is the request's own fault (`_shared/decoder.py`)
COUNT_MAX: Final = 1 << 20  # tokens of one answer that are taken for true
COUNT_TYPES: Final = {"INT32": "<i4", "UINT32": "<u4", "INT64": "<i8", "UINT64": "<u8"}
TEXT_BEFORE_MAX: Final = 300  # Triton may put the request's id before it
_VLLM_REFUSED: Final = re.compile(
    r"Error generating stream: .*(longer than the maximum|maximum (model|context) length|'lora_name'|is not allowed)"
    r"|LoRA .*(is not supported|is not enabled)",
    re.DOTALL,
)
"""What Triton's vLLM backend says of a request's own fault: its errors have no code."""
_NOT_SERVED: Final = re.compile(r"unknown model|server not ready|server exiting|not at ready state", re.IGNORECASE)
_parse = pb.ModelStreamInferResponse.FromString
Send = Callable[[bytes], Awaitable[None]]
"""Takes one ModelStreamInferResponse; may raise `Enough`."""


class Enough(Exception):
    """The client needs no more answers (a stop sequence was found): the slice's stream is cancelled, and the request
    counts as answered. If it asked for a receipt, one more response brings it."""


async def answer_stream(
    local: LocalWorker,
    inference: Inference,
    data: bytes,
    caller: Caller,
    send: Send,
    *,
    wants_final: bool,
    grpc_error: bool,
) -> None:
    """Answer one request of a decoupled family, here or by another worker; as `DecoupledRequest` does.

    Raises:
        StatusError: a status for the client, already booked and logged.
    """
    flow = DecoupledRequest(local, inference, send, grpc_error)

    async def forward(worker: WorkerId, _: Request) -> None:
        assert inference.peers is not None
        asked = {"final": wants_final, "grpc-error": grpc_error}
        with suppress(Enough):  # booked as CANCELLED there
            await inference.peers.stream(worker, data, caller, asked, send)

    await inference.handle(data, caller, partial(flow.serve, wants_final), forward)


class DecoupledRequest:
    """Passes what a slice answers to `send`. With `grpc_error` the first error ends it with its status."""

    def __init__(self, local: LocalWorker, inference: Inference, send: Send, grpc_error: bool) -> None:
        self._clock, self._load = local.clock, local.accounting.load
        self._connections = local.routing.connections
        self._evidence = local.health.evidence
        self._lengths, self._reads_lengths = local.lengths, local.routing.reads_lengths
        self._inference = inference
        self._send = send
        self._grpc_error = grpc_error
        self._sent = 0
        self._sending = False
        self._over = False
        self._version = ""  # that answered last, as the slice has it
        self._error: StatusError | None = None  # an error among its answers

    async def serve(self, wants_final: bool, request: Request) -> None:
        """Everything that answers one request. `wants_final`: also the empty response that ends it.

        Raises:
            StatusError: it failed with a status, before or after the first answer.
            QueueFull, Unavailable, InvalidInput: it got no slice.
        """
        request.streams = True
        if self._reads_lengths(request.ticket.family):
            request.ticket = await self._lengths.scored(request.ticket, JOIN(request.payload))
        while True:
            pick = await self._inference.pick(request)
            connection = None
            try:
                connection = self._connections.connection(pick.slice)
                await self._run(request, connection, wants_final)
            except (grpc.aio.AioRpcError, Unavailable) as error:
                if self._sending:  # of the way to the client: no fault of the slice, whose stream `leaving` ends
                    raise
                if self._over:
                    return
                refused, proof = status(error), proof_of(error)
                self._inference.slice_failed(request, refused, proof, usual=False)
                may_retry = proof is Failure.UNREACHABLE and not self._sent
                if not may_retry or not self._inference.begin_retry(request):
                    raise self._inference.client_status(request, refused, proof) from error
                continue
            except asyncio.CancelledError as error:
                left = self._over or self._sending  # while an answer was written: booked as `leaving` says
                cut = None if left else self._inference.call_cancelled(request, connection, usual=False)
                if cut is None:
                    raise
                may_retry = connection is not None and connection.gone and not self._sent
                if not may_retry or not self._inference.begin_retry(request):
                    raise cut from error
                continue
            except BaseException:  # an error among the answers is booked; a bug is not
                if not self._over and not self._sending:
                    self._over = True
                    self._inference.end(request, "CANCELLED", executed=True)
                raise
            return

    async def _run(self, request: Request, connection: Connection, wants_final: bool) -> None:
        """Raises AioRpcError; StatusError for an invalid answer and, with `grpc_error`, for any error among answers."""
        parts, timeout_s, trace = self._inference.upstream_request(request)
        # Never with triton_grpc_error: Triton 2.51 dies of a model that continues after its first error then.
        leaving = self._inference.leaving(request)
        grace_s = leaving.grace_s if request.idle_slice is None else 0.0  # an item of a job makes room at once
        leaving = leaving._replace(grace_s=grace_s, ended=partial(self._left_ended, request, leaving.ended))
        stream = connection.stream((*parts, kserve_wire.ASK_FINAL), timeout_s, trace, leaving)
        async with aclosing(stream) as answers:
            async for data in answers:  # to the end of the stream, which follows the final response
                await self._pass(request, data, wants_final)
                if request.enough_s:
                    return  # it ends when its stream has: `_left_ended`
        self._end(request)
        if self._error is not None and self._grpc_error:
            raise self._error

    async def _pass(self, request: Request, data: bytes, wants_final: bool) -> None:
        assert request.pick is not None
        place = request.pick.slice, request.ticket.family
        self._evidence.answer_counts[place] += 1  # it lives, however long the whole takes
        try:
            answer = _parse(data)
        except DecodeError as undecoded:
            self._over, refused = True, status(undecoded)
            self._inference.slice_failed(request, refused, proof_of(undecoded), usual=False)
            raise refused from undecoded
        inner = answer.infer_response
        final = kserve_wire.IS_FINAL in inner.parameters and inner.parameters[kserve_wire.IS_FINAL].bool_param
        if (error := error_of(answer)) is not None:
            self._error = error
            data = b"" if self._grpc_error else data
        elif inner.outputs or inner.model_version:
            self._version = inner.model_version
            if inner.outputs:
                request.tokens_in = max(request.tokens_in, engine_count(inner, TOKENS_IN) or 0)
                counted = engine_count(inner, TOKENS_OUT)
                variant = self._inference.variant(request.ticket.family, self._version, request.pick)
                count = 1 if counted is None else counted
                record_tokens(self._load, request, variant, count, self._clock.monotonic_s())
            data = self._with_suffix(request, inner, final)
        elif not wants_final:
            data = b""
        elif request.parameters.receipt:  # empty: a model's own response tells its version
            data = self._with_suffix(request, inner, final)
        if final:
            self._end(request)
        if data:
            self._sent += 1
            self._sending = True
            try:
                await self._send(data)
            except Enough:
                enough_s = self._clock.monotonic_s()
                if request.parameters.receipt and not final:
                    await self._send(self._with_suffix(request, pb.ModelInferResponse(id=inner.id), final=True))
                request.enough_s = enough_s  # now that nothing is sent any more: until here it may leave
            self._sending = False

    def _with_suffix(self, request: Request, answer: Any, final: bool) -> bytes:
        """A slice's ModelInferResponse as ours, for a stream. The receipt covers all tokens of the request: it stands
        on the final response."""
        assert request.pick is not None
        variant = self._inference.variant(request.ticket.family, self._version, request.pick)
        suffix = self._inference.answer_suffix(request, variant) if final else kserve_wire.answer_suffix(variant)
        return kserve_wire.stream_answer(answer.SerializeToString() + suffix)

    def _left_ended(self, request: Request, ended: Callable[[str], None], code: str) -> None:
        """Its client left, or had enough, before the end of its stream, which has come."""
        if request.enough_s:
            self._end(request)
        elif not self._over:
            self._over = True
            ended(code)

    def _end(self, request: Request) -> None:
        """Book it, once."""
        if self._over:
            return
        self._over = True
        if self._error is None:
            # How many answers there are is up to each request: none predicts anything for the deadline of another one.
            self._inference.record_answer(request, self._version, usual=False)
            if self._reads_lengths(request.ticket.family):
                self._lengths.learn(request.ticket, JOIN(request.payload), request.tokens_out)
        else:
            self._inference.slice_failed(request, self._error, usual=False)
            if not self._grpc_error:  # else it is still to be refused
                self._inference.record_failure(request, self._error.code.name, self._error.details)


def engine_count(answer: Any, name: str) -> int | None:
    """Tokens that an engine says by an output of this name, of all choices together; None: it does not say.

    Without the engine's count an answer that has outputs is one token: exact for engines that stream token by token.
    """
    for index, output in enumerate(answer.outputs):
        if output.name == name and output.datatype in COUNT_TYPES and index < len(answer.raw_output_contents):
            raw, kind = answer.raw_output_contents[index], np.dtype(COUNT_TYPES[output.datatype])
            if len(raw) % kind.itemsize or len(raw) > COUNT_MAX:
                return None
            count = int(np.frombuffer(raw, kind).astype(object).sum())
            return count if 0 <= count <= COUNT_MAX else None
    return None


def error_of(answer: Any) -> StatusError | None:
    """The error that a ModelStreamInferResponse is, with the code that Triton left out: by its text, else by whether
    the model gave it."""
    if not answer.error_message:
        return None
    return StatusError(_code_of(answer.error_message, bool(answer.infer_response.model_name)), answer.error_message)


def _code_of(text: str, executed: bool) -> grpc.StatusCode:
    if REFUSED in text[:TEXT_BEFORE_MAX] or _VLLM_REFUSED.search(text):
        return grpc.StatusCode.INVALID_ARGUMENT
    if is_dead_stub(text):
        return grpc.StatusCode.INTERNAL
    if is_overload(text) or _NOT_SERVED.search(text):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.INTERNAL if executed else grpc.StatusCode.INVALID_ARGUMENT
