"""ModelInfer: admit, wait for a slice, forward the bytes, answer. The hot path; nothing else belongs here.

A request is retried once, on another slice, and only if its slice certainly never took it (connection refused, exiting,
model not loaded). Whatever was in flight on a slice that died fails with the status that came back.
"""

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher import knobs, wire
from dispatcher.contracts import Contracts, unknown_model
from dispatcher.ejection import Failure, classify
from dispatcher.hub import Hub
from dispatcher.pump import Pump
from dispatcher.queues.fifo import QueueFull
from trefoil.core.brains import Outcome, Pick, Ticket
from trefoil.core.errors import InvalidInput, NotFound, TrefoilError, Unavailable
from trefoil.runtime.rpc import status_of

LOG = structlog.get_logger()
_parse_request = pb.ModelInferRequest.FromString
_parse_answer = pb.ModelInferResponse.FromString


@dataclass(slots=True)
class _Request:
    """One request on its way. `sent_s` is when it last went to a slice, 0.0 = never."""

    pump: Pump
    ticket: Ticket
    payload: bytes
    queue_timeout_s: float | None
    pick: Pick | None = None
    sent_s: float = 0.0


class Refused(Exception):
    """A status that goes to the client as it is."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        super().__init__(code, details)
        self.code, self.details, self.trailers = code, details, trailers


class Inference:
    """Raw bytes in, raw bytes out. Belongs to one event loop."""

    def __init__(self, hub: Hub, contracts: Contracts) -> None:
        self._hub = hub
        self._contracts = contracts
        self._ids = itertools.count(1)
        self._log_tokens = hub.settings.log_failures_per_s
        self._log_at_s = 0.0

    async def infer(self, data: bytes, context: Any) -> bytes:
        """The gRPC handler."""
        clock = self._hub.clock
        arrived_s = clock.monotonic_s()
        request: _Request | None = None
        try:
            request = self._admit(data, arrived_s, context.time_remaining())
            return await self._serve(request, context)
        except Refused as refused:
            code, details, trailers = refused.code, refused.details, refused.trailers
        except TrefoilError as error:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(error, QueueFull) else status_of(error)
            details, trailers = str(error), ()
        except asyncio.CancelledError:
            remaining_s = context.time_remaining()
            late = remaining_s is not None and remaining_s <= 0
            self._failed(request, "DEADLINE_EXCEEDED" if late else "CANCELLED", "the client's time ran out or it left")
            raise
        self._failed(request, code.name, details)
        await context.abort(code, details, trailers)
        raise AssertionError("abort returned")

    def _admit(self, data: bytes, arrived_s: float, remaining_s: float | None) -> _Request:
        """Check a request and make its ticket.

        Raises:
            InvalidInput, NotFound, Unavailable, Refused: it cannot be served as it is. It does not count as arrived:
                demand is what could be answered.
        """
        try:
            message = _parse_request(data)
        except DecodeError as error:
            raise InvalidInput(f"these {len(data)} bytes are not a ModelInferRequest") from error
        family = message.model_name
        pump = self._hub.pumps.get(family)
        if pump is None or family not in self._hub.table.routes:
            raise unknown_model(family) if self._hub.table.routes else Unavailable(self._hub.not_ready())
        if message.model_version not in ("", wire.PUBLIC_VERSION):
            raise NotFound(
                f"Request for unknown model: '{family}' version {message.model_version} is not found",
                remedy=f"leave the version out, or ask for {wire.PUBLIC_VERSION}: the variant is ours to choose",
            )
        queue_timeout_s = None
        asked = knobs.NONE
        payload = data
        if message.parameters:
            _refuse_sequences(message.parameters)
            micros = message.parameters["timeout"].int64_param if "timeout" in message.parameters else 0
            queue_timeout_s = micros / 1e6 if micros > 0 else None
            count = len(message.parameters)
            asked = knobs.take(message.parameters)
            if len(message.parameters) != count:
                payload = message.SerializeToString()
        for tensor in (*message.inputs, *message.outputs):
            if tensor.parameters and "shared_memory_region" in tensor.parameters:
                raise InvalidInput(
                    f"tensor '{tensor.name}' is in shared memory, which slices cannot reach",
                    remedy="send it in the request",
                )
        if message.model_version:
            payload += wire.CLEAR_VERSION
        shape = message.inputs[0].shape if message.inputs else ()
        ticket = Ticket(
            id=next(self._ids),
            family=family,
            slo_class=self._hub.book.class_name(asked.slo_class),
            tenant="",
            items=max(1, shape[0]) if shape and self._batches(family) else 1,
            bytes=len(data),
            arrived_s=arrived_s,
            deadline_s=None if remaining_s is None else arrived_s + remaining_s,
            min_accuracy=asked.min_accuracy,
            priority=0,
            sequence_id="",
            sequence_start=False,
            sequence_end=False,
            length_score=None,
        )
        self._hub.book.arrived(family, ticket.slo_class, self._hub.clock.now_s())
        return _Request(pump, ticket, payload, queue_timeout_s)

    async def _serve(self, request: _Request, context: Any) -> bytes:
        tried_again = False
        while True:
            pick = await self._pick(request)
            try:
                call = self._hub.transport.to(pick.slice).infer(request.payload, timeout=context.time_remaining())
                answer = await call
                trailers = await call.trailing_metadata()
            except (grpc.aio.AioRpcError, Unavailable) as error:
                refused = _status(error)
                failure = self._came_back(request, refused)
                if failure is not Failure.UNREACHABLE or tried_again:
                    raise refused from error
                tried_again = True
                request.ticket = replace(request.ticket, id=next(self._ids))
                continue
            except BaseException:
                # Cancelled (or a bug): the credit must come back whatever happens. gRPC cancels the call upstream.
                request.pump.done(request.ticket, pick, self._outcome(request, "CANCELLED", executed=True))
                raise
            if trailers:
                context.set_trailing_metadata(tuple(trailers))
            return self._answered(request, answer)

    async def _pick(self, request: _Request) -> Pick:
        """A slice for the request, as soon as its router gives it one."""
        pump, ticket = request.pump, request.ticket
        request.pick, request.sent_s = None, 0.0
        picked = pump.submit(ticket)
        if isinstance(picked, asyncio.Future):
            try:
                async with asyncio.timeout(request.queue_timeout_s):
                    pick = await picked
            except TimeoutError as error:
                pump.abandon(ticket, picked)
                raise Unavailable("Request timeout expired") from error  # Triton's own words for its queue timeout
            except asyncio.CancelledError:
                pump.abandon(ticket, picked)
                raise
        else:
            pick = picked
        request.pick, request.sent_s = pick, self._hub.clock.monotonic_s()
        self._hub.book.sent(ticket.family, pick.variant, pick.slice, ticket.slo_class, pump.in_flight[pick.slice])
        return pick

    def _answered(self, request: _Request, answer: bytes) -> bytes:
        """Book an answer and make it ours."""
        ticket, pick = request.ticket, request.pick
        assert pick is not None
        hub = self._hub
        variant = self._variant(ticket.family, _parse_answer(answer).model_version, pick)
        outcome = self._outcome(request, "OK", executed=True)
        request.pump.done(ticket, pick, outcome)
        objective = hub.table.objectives.get(ticket.family)
        hub.book.answered(
            ticket.family, variant, pick.slice, ticket.slo_class, ticket.items, outcome.latency_ms,
            outcome.latency_ms - outcome.service_ms, objective.slo_ms if objective is not None else 0.0,
            hub.clock.now_s(),
        )  # fmt: skip
        if ticket.id % hub.settings.log_every_requests == 0:
            self._log("request", request, "OK", outcome.latency_ms, variant)
        return answer + wire.answer_suffix(variant)

    def _variant(self, family: str, version: str, pick: Pick) -> str:
        """Which variant answered. While a slice swaps that need not be the one of the table."""
        if not version.isdigit():
            return pick.variant
        return self._hub.variants.get((family, int(version))) or f"version {version}"

    def _came_back(self, request: _Request, refused: Refused) -> Failure:
        """A slice answered with a status: what it says of the slice."""
        pick = request.pick
        assert pick is not None
        code, details = refused.code.name, refused.details
        failure = classify(code, details)
        if failure is not Failure.OWN:
            # Before the credit is free: the next request must not be given to it.
            self._hub.eject(pick.slice, failure, f"{code} {details}")
        executed = failure is not Failure.UNREACHABLE
        request.pump.done(request.ticket, pick, self._outcome(request, code, executed))
        return failure

    def _outcome(self, request: _Request, code: str, executed: bool) -> Outcome:
        now_s = self._hub.clock.monotonic_s()
        latency_ms = (now_s - request.ticket.arrived_s) * 1e3
        service_ms = (now_s - request.sent_s) * 1e3 if request.sent_s else 0.0
        return Outcome(code, latency_ms, service_ms, 0, executed)

    def _failed(self, request: _Request | None, code: str, details: str) -> None:
        """Book and log a request without an answer. Requests for families that nobody serves are not booked."""
        if request is None:
            return
        ticket, pick = request.ticket, request.pick
        latency_ms = (self._hub.clock.monotonic_s() - ticket.arrived_s) * 1e3
        variant, slice_ = (pick.variant, pick.slice) if pick is not None else ("", None)
        self._hub.book.failed(ticket.family, variant, slice_, ticket.slo_class, code, latency_ms)
        if self._may_log():
            self._log("request failed", request, code, latency_ms, variant, details)

    def _may_log(self) -> bool:
        now_s, per_s = self._hub.clock.monotonic_s(), self._hub.settings.log_failures_per_s
        self._log_tokens = min(per_s, self._log_tokens + (now_s - self._log_at_s) * per_s)
        self._log_at_s = now_s
        if self._log_tokens < 1:
            return False
        self._log_tokens -= 1
        return True

    def _log(
        self, event: str, request: _Request, code: str, latency_ms: float, variant: str, details: str = ""
    ) -> None:
        pick, ticket = request.pick, request.ticket
        LOG.info(
            event, family=ticket.family, id=ticket.id, code=code, latency_ms=round(latency_ms, 2), variant=variant,
            slice=pick.slice.name if pick is not None else "", why=pick.why if pick is not None else "",
            bytes=ticket.bytes, slo_class=ticket.slo_class, details=details,
        )  # fmt: skip

    def _batches(self, family: str) -> bool:
        """Whether the first dimension counts items; taken as true until the contract is known."""
        contract = self._contracts.known(family)
        return contract is None or contract.config.config.max_batch_size > 0


def _status(error: grpc.aio.AioRpcError | Unavailable) -> Refused:
    """What came back from a slice, to be passed on unchanged: an AioRpcError that escapes would become UNKNOWN."""
    if isinstance(error, Unavailable):
        return Refused(grpc.StatusCode.UNAVAILABLE, str(error))
    return Refused(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


def _refuse_sequences(parameters: Any) -> None:
    if "sequence_id" not in parameters:
        return
    given = parameters["sequence_id"]
    if given.int64_param or given.uint64_param or given.string_param:
        raise Refused(
            grpc.StatusCode.UNIMPLEMENTED,
            "sequences are not routed yet: their requests would reach different slices. Remedy: leave sequence_id out",
        )
