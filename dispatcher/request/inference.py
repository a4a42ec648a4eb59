"""ModelInfer: admit, wait for a slice, forward the bytes, answer. The hot path; nothing else belongs here.

The only retry loop is here. A request goes to another slice in two cases only. Its slice certainly did not take it
(connection or stream refused), or it hangs on a host that is gone. Retries stay within a budget and the deadline. A
status from a slice goes to the client. Requests in flight on a slice that died fail.

If a client leaves, its request keeps the credit until its slice has answered, or its stream has ended, for at most
`CANCEL_GRACE_S`: Triton continues to execute it, and another request in its place would wait behind it.

A split family has a Triton model for each stage. The request goes from stage to stage through this worker; each stage
has a queue, credits, retries and a slice. Triton's ensembles would save the way here and back, without queues and
retries between stages. If all stages are on one slice, serve the family whole there: the function is equal.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.queues.fifo import QueueFull
from dispatcher.request import stages
from dispatcher.request.admission import Admission, Caller, Request, StatusError, overdue
from dispatcher.request.contracts import Contracts
from dispatcher.request.core.retry_budget import RetryBudget
from dispatcher.request.core.tenants import EVERYBODY, Tenant
from dispatcher.request.idle import pick_idle
from dispatcher.request.peer_links import ConnectionLost, NoCredits, NotDelivered, Peers
from dispatcher.request.token_times import record_stream, token_receipt
from dispatcher.request.zone_requests import ZoneRequests
from dispatcher.routing.async_queue import ServedElsewhere
from dispatcher.routing.core import membership
from dispatcher.routing.core.membership import WorkerId
from dispatcher.routing.core.receipts import BUDGET_RUNG
from dispatcher.routing.core.sequences import missing_start
from dispatcher.routing.request_parameters import MIN_ACCURACY
from dispatcher.routing.sequence_queue import AsyncSequenceQueue
from dispatcher.routing.slices import Connection
from dispatcher.service.ejector import proof_of
from dispatcher.service.local_worker import LocalWorker
from dispatcher.slice_health.core.ejection import Failure
from dispatcher.slice_health.core.suspicion import is_overload
from dispatcher.transport.calls import Leaving
from dispatcher.transport.core import kserve_wire
from dispatcher.transport.core.grpc_framing import JOIN
from dispatcher.transport.core.trace_context import Trace
from trefoil.core.brains import Outcome, Pick
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.runtime.rpc import status_of

LOG = structlog.get_logger()
Result = TypeVar("Result")
Serve = Callable[[Request], Awaitable[Result]]
"""Serves an admitted request here."""
Forward = Callable[[WorkerId, Request], Awaitable[Result]]
"""Lets another worker answer an admitted request."""
LEFT: Final = frozenset({"CANCELLED", "DEADLINE_EXCEEDED"})
"""How requests end on their slice whose client waits no longer."""
FlowOf = Callable[[Tenant, str, Callable[[], Any]], tuple[str, str]]
"""What a caller shares a full queue as, by its tenant, address and metadata."""
VERSION_DIGITS_MAX: Final = 18
CANCEL_GRACE_S: Final = 0.5  # how long a request whose client left may still run on its slice
LOG_EVERY_REQUESTS: Final = 1000  # of a family, one has a canonical log line
NEWS_S: Final = 0.02  # in which two workers may disagree about a family's owner: state spreads in ms
_parse_answer = pb.ModelInferResponse.FromString
_parse_request = pb.ModelInferRequest.FromString


@dataclass(frozen=True, slots=True)
class Answer:
    """`parts`, one after the other, are a ModelInferResponse under the public version with our parameters, `trailers`
    what the slice sent."""

    parts: tuple[bytes, ...]
    trailers: Any
    variant: str
    slice: SliceKey

    @property
    def data(self) -> bytes:
        """The parts as one."""
        return JOIN(self.parts)


class Inference:
    """Inference of one request: admit, route, forward, answer. Raw bytes in, raw bytes out. Belongs to one event
    loop."""

    def __init__(
        self, local: LocalWorker, contracts: Contracts, peers: Peers | None = None, flow_of: FlowOf | None = None
    ) -> None:
        self.admission = Admission(local, contracts)
        self._flow_of = flow_of
        self._costs = local.costs
        self.peers = peers
        self.zones = ZoneRequests(local)
        self._id = local.id
        self._clock = local.clock
        self._settings = local.settings
        self._routing = local.routing
        self._connections = local.routing.connections
        self._health = local.health
        self._evidence = local.health.evidence
        self._accounting = local.accounting
        self._load = local.accounting.load
        self._retry_budget = RetryBudget(local.settings.retry_ratio)
        self._log_tokens = local.settings.log_failures_per_s
        self._log_at_s = 0.0

    async def infer(self, data: bytes, context: Any, tenant: Tenant = EVERYBODY) -> tuple[bytes, ...]:
        """Handle a unary ModelInfer over gRPC; its answer is in parts. Raises like `answer`."""
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else self._clock.monotonic_s() + remaining_s
        flow = self._flow_of(tenant, context.peer(), context.invocation_metadata) if self._flow_of else ("", "")
        caller = Caller(tenant.name, deadline_s, 0, context.trace, flow, tenant.weight)
        answer = await self.handle(data, caller, self.serve, partial(self._forward, data, caller))
        if answer.trailers:
            context.set_trailing_metadata(answer.trailers)
        return answer.parts

    async def answer(self, data: bytes, caller: Caller) -> Answer:
        """Answer one request (bytes of a ModelInferRequest), for whichever front it came through.

        Cancelling it takes the request out of the queue, or cancels it on its slice. It is then booked as CANCELLED, or
        as DEADLINE_EXCEEDED if the caller's time was up.

        Raises:
            StatusError: a status for the client, already booked and logged.
        """
        return await self.handle(data, caller, self.serve, partial(self._forward, data, caller))

    async def _forward(self, data: bytes, caller: Caller, worker: WorkerId, request: Request) -> Answer:
        """Let another worker answer a request, which no zone is asked for twice."""
        assert self.peers is not None
        told = await self.peers.forward(worker, data, replace(caller, went_away=request.went_away))
        return Answer((told.data,), told.trailers, told.variant, told.slice)

    async def handle(self, data: bytes, caller: Caller, serve: Serve[Result], forward: Forward[Result]) -> Result:
        """Admit a request and serve it here, or let another worker; raises like `answer`."""
        request: Request | None = None
        try:
            request = self.admission.admit(data, caller, self._clock.monotonic_s())
            self._retry_budget.on_request()
            if request.ticket.sequence_id:
                await self.admission.queue_in_sequence(request)
            if self.peers is None or request.idle_slice is not None:
                return await serve(request)
            if not (request.ticket.sequence_id or self._routing.table.elsewhere.get(request.ticket.family)):
                try:
                    return await serve(request)
                except ServedElsewhere:
                    request.ticket = replace(request.ticket, id=self.admission.next_id())
            return await self._serve_or_forward(request, caller, self.peers, serve, forward)
        except StatusError as refused:
            self.record_failure(request, refused.code.name, refused.details)
            raise
        except TrefoilError as error:
            said = refusal(error)
            self.record_failure(request, said.code.name, said.details)
            raise said from error
        except asyncio.CancelledError:
            now_s = self._clock.monotonic_s()
            late = overdue(caller.deadline_s, request.ticket.arrived_s if request is not None else now_s, now_s)
            self.record_failure(
                request, "DEADLINE_EXCEEDED" if late else "CANCELLED", "the client's time ran out or it left"
            )
            raise

    async def pick(self, request: Request) -> Pick:
        """Wait for a slice for the request, as soon as its router gives it one; `end` reports its end.

        Raises:
            QueueFull, Unavailable: it gets none.
            StatusError: its deadline passed in the queue, or cannot be met on that slice any more.
        """
        queue, ticket = request.queue, request.ticket
        request.pick, request.sent_s = None, 0.0
        if request.idle_slice is not None:
            return self._sent(request, pick_idle(request, request.idle_slice, self._routing))
        picked, contended = queue.submit(ticket), False
        if isinstance(picked, asyncio.Future):
            pick = await self._wait(request, picked)
            contended = queue.waiting > 0
        else:
            pick = picked
        request.pick = pick
        if ticket.deadline_s is not None:
            now_s = self._clock.monotonic_s()
            self._drop_if_late(request, pick, ticket.deadline_s - now_s, now_s, contended)
        return self._sent(request, pick)

    def _sent(self, request: Request, pick: Pick) -> Pick:
        ticket, in_flight = request.ticket, request.queue.in_flight_on(pick.slice)
        request.pick, request.sent_s = pick, self._clock.monotonic_s()
        self._evidence.times.record_sent(pick.slice, pick.variant, ticket.items, request.sent_s)
        self._load.sent(request.family, pick.variant, pick.slice, ticket.slo_class, in_flight, ticket.tenant)
        return pick

    async def _wait(self, request: Request, future: "asyncio.Future[Pick]") -> Pick:
        ticket = request.ticket
        now_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(None if ticket.deadline_s is None else max(0.0, ticket.deadline_s - now_s)):
                return await future
        except TimeoutError as error:
            request.queue.abandon(ticket, future)
            if request.timeout_binds:
                raise Unavailable("Request timeout expired") from error  # Triton's own words for its queue timeout
            waited_ms = (self._clock.monotonic_s() - ticket.arrived_s) * 1e3
            why = f"its deadline passed after {waited_ms:.1f} ms in the queue of {ticket.family}"
            raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, why) from error
        except asyncio.CancelledError:
            request.queue.abandon(ticket, future)
            raise

    def _drop_if_late(self, request: Request, pick: Pick, left_s: float, now_s: float, contended: bool) -> None:
        """Drop a request whose deadline has passed. While others wait for a credit (`contended`), also drop one that
        its slice is predicted to answer too late."""
        ticket, times = request.ticket, self._evidence.times
        predicted_s = times.predicted_s(pick.slice, pick.variant, ticket.items, now_s) if contended else 0.0
        if left_s > predicted_s:
            return
        times.record_drop(pick.slice, pick.variant, ticket.items, now_s)
        self.end(request, "DEADLINE_EXCEEDED", executed=False)
        request.pick = None
        raise StatusError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"dropped before dispatch: it waited {(now_s - ticket.arrived_s) * 1e3:.1f} ms, of its deadline "
            f"{max(0.0, left_s) * 1e3:.1f} ms are left, and {pick.slice.name} is predicted to take "
            f"{predicted_s * 1e3:.1f} ms",
        )

    def end(self, request: Request, code: str, executed: bool) -> Outcome:
        """End a picked request, in whichever way: its credit goes back. What its slice executed without an answer is
        its tenant's."""
        assert request.pick is not None
        now_s = request.enough_s or self._clock.monotonic_s()
        latency_ms = (now_s - request.ticket.arrived_s) * 1e3
        service_ms = (now_s - request.sent_s) * 1e3 if request.sent_s else 0.0
        outcome = Outcome(code, latency_ms, service_ms, request.tokens_out, executed)
        request.queue.done(request.ticket, request.pick, outcome)
        if executed:
            ticket = request.ticket
            self._costs.record(ticket.family, ticket.items, service_ms / 1e3, ticket.flow[0])
        if executed and code != "OK":
            self._record_unanswered(request, code, service_ms)
        return outcome

    def _record_unanswered(self, request: Request, code: str, service_ms: float) -> None:
        """Account for what a slice executed of a request without an answer. Triton continues an abandoned request to
        its end, so it counts whole. A failed one counts by its time, as a share of that of like requests: of this slice
        and variant, else of its family. Tokens count as they come; the prompt of a stream without tokens counts as
        one."""
        ticket, pick = request.ticket, request.pick
        assert pick is not None
        share = 1.0
        if code not in LEFT:
            usual_s = self._evidence.times.usual_s(pick.slice, pick.variant, ticket.items)
            usual_s = usual_s or self._costs.expected_s(ticket.family, ticket.items)
            share = min(1.0, service_ms / (1e3 * usual_s))
        done = share, share * ticket.items, 0.0 if request.tokens_out else share
        self._load.unanswered(request.family, pick.variant, pick.slice, ticket.slo_class, done, ticket.tenant)

    def _stage_done(self, request: Request, version: str, usual: bool = True) -> tuple[str, Outcome]:
        """End a request at a slice that answered under a version: the variant that did, and what it took."""
        ticket, pick = request.ticket, request.pick
        assert pick is not None
        variant = self.variant(ticket.family, version, pick)
        outcome = self.end(request, "OK", executed=True)
        self._costs.record(ticket.family, ticket.items, outcome.service_ms / 1e3)
        service_s = outcome.service_ms / 1e3 if usual else None
        place = pick.slice, ticket.family
        if self._evidence.on_answer(place, variant, ticket.items, service_s, self._clock.monotonic_s()):
            self._routing.rebuild()
        return variant, outcome

    def record_answer(self, request: Request, version: str, usual: bool = True) -> str:
        """Book an answer that a slice gave under a version; the variant that gave it. `usual`: others take as long."""
        ticket, pick = request.ticket, request.pick
        assert pick is not None
        variant, outcome = self._stage_done(request, version, usual)
        self._load.answered(
            request.family, variant, pick.slice, ticket.slo_class, ticket.items, outcome.latency_ms,
            outcome.latency_ms - outcome.service_ms - request.served_ms,
            ticket.slo_ms, self._clock.now_s(), ticket.tenant, request.served_ms,
        )  # fmt: skip
        record_stream(self._load, self._routing, request, "OK", (variant, pick.slice), self._clock.monotonic_s())
        if ticket.id % LOG_EVERY_REQUESTS == 0:
            self._log("request", request, "OK", outcome.latency_ms, variant)
        return variant

    def answer_suffix(self, request: Request, variant: str) -> bytes:
        """Bytes that turn a slice's answer into ours, with its receipt if that was asked for."""
        data = kserve_wire.answer_suffix(variant)
        if request.parameters.receipt:
            ticket, pick = request.ticket, request.pick
            assert pick is not None
            receipts = self._accounting.receipts
            data += receipts.suffix(pick.slice, request.family, variant, ticket.items, request.tokens_out)
            data += token_receipt(request) + budget_receipt(request)
        return data

    def slice_failed(
        self, request: Request, refused: StatusError, proof: Failure | None = None, usual: bool = True
    ) -> None:
        """End a request at a slice that did not answer it well. `proof`: what the channel saw, which ejects the slice;
        None = the slice answered with this status. `usual`: as of an answer."""
        pick = request.pick
        assert pick is not None
        code, details = refused.code.name, refused.details
        # Before the credit is free: the next request must not be given to it.
        if proof is not None:
            self._health.eject(pick.slice, proof, f"{code} {details}")
        elif code == "DEADLINE_EXCEEDED":
            self._record_late(request, pick, usual)
        else:
            self._evidence.on_status((pick.slice, request.ticket.family), code, details)
        self.end(request, code, executed=proof is not Failure.UNREACHABLE and not is_overload(details))

    def is_pinned(self, request: Request) -> bool:
        """Whether only one slice may have the request: what came before it in its sequence is there."""
        return bool(request.ticket.sequence_id) and not request.ticket.sequence_start

    def client_status(self, request: Request, refused: StatusError, proof: Failure | None) -> StatusError:
        """Status for a client whose request came back: that its sequence is gone, if it is."""
        if proof is Failure.UNREACHABLE and self.is_pinned(request):
            return refusal(missing_start(request.ticket, f"its slice is lost: {refused.details}"))
        return refused

    def leaving(self, request: Request) -> Leaving:
        """What becomes of the call of a picked request whose client leaves: its credit comes back when it has ended."""
        return Leaving(CANCEL_GRACE_S, partial(self._left_ended, request))

    def call_cancelled(self, request: Request, connection: Connection | None, usual: bool = True) -> StatusError | None:
        """The call of a picked request was cancelled. If its client left, the call continues as `leaving` says. If the
        connection was closed, the call has ended. Returns the status to refuse with if it was cut."""
        pick, task = request.pick, asyncio.current_task()
        assert pick is not None
        if task is None or not task.cancelling():  # this end closed the connection
            why = connection.cut_reason if connection is not None else ""
            self.end(request, "UNAVAILABLE" if why else "CANCELLED", executed=True)
            return StatusError(grpc.StatusCode.UNAVAILABLE, why) if why else None
        if overdue(request.ticket.deadline_s, request.ticket.arrived_s, self._clock.monotonic_s()):
            self._record_late(request, pick, usual)
        return None

    def _left_ended(self, request: Request, code: str) -> None:
        """The call of a client that has left has ended; "": it was cut."""
        assert request.pick is not None
        if code:
            self._evidence.answer_counts[request.pick.slice, request.ticket.family] += 1
        self.end(request, "CANCELLED" if code in ("", "OK") else code, executed=True)  # what was refused costs its time

    def _record_late(self, request: Request, pick: Pick, usual: bool) -> None:
        ticket, now_s = request.ticket, self._clock.monotonic_s()
        place, waited_s = (pick.slice, ticket.family), now_s - request.sent_s
        self._evidence.on_deadline(place, pick.variant, ticket.items, waited_s, now_s, usual)

    def record_failure(self, request: Request | None, code: str, details: str) -> None:
        """Account for and log a request without an answer, unless no slice serves its family."""
        if request is None or request.forwarded:
            return
        ticket, pick = request.ticket, request.pick
        latency_ms = (self._clock.monotonic_s() - ticket.arrived_s) * 1e3
        variant, slice_ = (pick.variant, pick.slice) if pick is not None else ("", None)
        self._load.failed(request.family, variant, slice_, ticket.slo_class, code, latency_ms, ticket.tenant)
        record_stream(self._load, self._routing, request, code, (variant, slice_), self._clock.monotonic_s())
        if self._may_log():
            self._log("request failed", request, code, latency_ms, variant, details)

    async def _serve_or_forward(
        self,
        request: Request,
        caller: Caller,
        peers: Peers,
        serve: Serve[Result],
        forward: Forward[Result],
    ) -> Result:
        """Serve a request here, or let another worker: one that has credits of the family, or that keeps the sequence.

        Raises:
            NoCredits: another worker forwarded it here, and only others have credits.
            And what `serve` and `forward` raise.
        """
        sequenced = isinstance(request.queue, AsyncSequenceQueue)
        give_up_s = request.ticket.arrived_s + self._settings.no_slice_wait_s
        while True:
            try:
                worker = peers.forward_target(request.ticket, caller.hops, sequenced)
                if worker is None:
                    return await serve(request)
                request.forwarded = True  # from here on its end is booked there
                result = await forward(worker, request)
                self._accounting.forwarded_total[request.family] += 1
                return result
            except ServedElsewhere as moved:
                if caller.hops:
                    raise NoCredits(membership.worker_name(self._id)) from moved
            except NotDelivered:  # its worker is gone: there are others, or it is ours now
                pass
            except NoCredits as error:  # the sharers have changed, and one worker does not know it yet
                if caller.hops:
                    request.forwarded = True
                    raise
                request.forwarded, request.went_away = False, True  # it may have asked another zone
                if self._clock.monotonic_s() > give_up_s:
                    raise Unavailable(f"no worker serves {request.family} now", remedy="try again") from error
                await self._clock.sleep(NEWS_S)
            except ConnectionLost:
                request.forwarded = False
                raise
            request.forwarded = False
            request.ticket = replace(request.ticket, id=self.admission.next_id())

    async def serve(self, request: Request) -> Answer:
        """Answer of another zone, or else of slices here."""
        went_before = request.went_away
        if self.zones.offers and not went_before:
            if (away := await self.zones.answer(request)) is not None:
                rung = budget_receipt(request) if request.parameters.receipt else b""
                return Answer((away[0], away[1] + rung), (), away[2], SliceKey(away[3]))
            moved = self._routing.table.elsewhere.get(request.ticket.family)  # since it went there
            if request.went_away != went_before and moved:
                raise ServedElsewhere(f"{request.family} is served by other workers", remedy="try again")
        if len(request.chain) > 1:
            return await self._serve_stages(request)
        data, trailers, version = await self._at_slice(request)
        variant = self.record_answer(request, version)
        assert request.pick is not None
        return Answer((data, self.answer_suffix(request, variant)), trailers, variant, request.pick.slice)

    async def _serve_stages(self, request: Request) -> Answer:
        """One stage after the other. What was done before is lost where a later one fails; who tries again with another
        worker begins at the first."""
        whole, ticket, passed = request.payload, request.ticket, list[tuple[Pick, str, float]]()
        data, kept = stages.first_request(JOIN(whole), request.chain[0])
        request.served_ms = 0.0
        try:
            for model in request.chain:
                if passed:
                    data = stages.next_request(kept, data, model, last=model == request.chain[-1])
                    request.queue = self._routing.queues[model]
                    request.ticket = replace(ticket, id=self.admission.next_id(), family=model, bytes=len(data))
                request.payload = (data,)
                data, trailers, version = await self._at_slice(request)
                if len(passed) + 1 < len(request.chain):
                    passed.append(self._stage_passed(request, version))
        except BaseException as error:
            for place, used, _ in passed:
                done = 1.0, float(ticket.items), 0.0
                self._load.unanswered(request.family, used, place.slice, ticket.slo_class, done, ticket.tenant)
            if isinstance(error, ServedElsewhere):
                request.payload, request.queue, request.ticket = whole, self._routing.queues[ticket.family], ticket
            raise
        variant, pick = self.record_answer(request, version), request.pick
        assert pick is not None
        self._record_passed(request, passed)
        places = [*((each.slice, used) for each, used, _ in passed), (pick.slice, variant)]
        suffix = kserve_wire.answer_suffix(variant)
        suffix += kserve_wire.stages_suffix(request.family, tuple(slice_.name for slice_, _ in places))
        if request.parameters.receipt:
            suffix += self._accounting.receipts.suffix_of_stages(places, request.family, request.ticket.items)
            suffix += budget_receipt(request)
        return Answer((data, suffix), trailers, variant, pick.slice)

    def _stage_passed(self, request: Request, version: str) -> tuple[Pick, str, float]:
        """End a request at a stage that is not its last: where and by which variant it was done, and in which time."""
        pick = request.pick
        assert pick is not None
        variant, outcome = self._stage_done(request, version)
        request.served_ms += outcome.service_ms
        return pick, variant, outcome.service_ms

    def _record_passed(self, request: Request, passed: list[tuple[Pick, str, float]]) -> None:
        """Book what the stages before the last had of an answer: their time, and their part of its receipt."""
        ticket = request.ticket
        latency_ms = (self._clock.monotonic_s() - ticket.arrived_s) * 1e3
        for pick, variant, service_ms in passed:
            rate = self._accounting.receipts.rate(pick.slice, request.family, variant)
            self._load.passed(
                request.family, variant, pick.slice, ticket.slo_class, ticket.items, latency_ms, service_ms,
                rate.energy_j(ticket.items) if rate is not None else 0.0, ticket.tenant,
            )  # fmt: skip

    async def _at_slice(self, request: Request) -> tuple[bytes, Any, str]:
        """Answer of the slice that a request gets, its trailers and the version that gave it."""
        while True:
            pick = await self.pick(request)
            connection = None
            try:
                connection = self._connections.connection(pick.slice)
                data, trailers = await connection.infer(*self.upstream_request(request), self.leaving(request))
                version = _parse_answer(data).model_version
            except (grpc.aio.AioRpcError, Unavailable, DecodeError) as error:
                refused, proof = status(error), proof_of(error)
                self.slice_failed(request, refused, proof)
                if proof is not Failure.UNREACHABLE or not self.begin_retry(request):
                    raise self.client_status(request, refused, proof) from error
                continue
            except asyncio.CancelledError as error:
                cut = self.call_cancelled(request, connection)
                if cut is None:
                    raise
                if connection is None or not connection.gone or not self.begin_retry(request):
                    raise cut from error
                continue
            except BaseException:
                self.end(request, "CANCELLED", executed=True)  # a bug: the credit must come back whatever happens
                raise
            return data, trailers, version

    def upstream_request(self, request: Request) -> tuple[tuple[bytes | memoryview, ...], float | None, Trace]:
        """Parts, timeout and metadata of a request to its slice: what is left of the deadline, for gRPC and for
        Triton's own queue; the trace that it belongs to."""
        deadline_s = request.ticket.deadline_s
        if deadline_s is None:
            return request.payload, None, request.trace
        left_s = max(0.0, deadline_s - request.sent_s)
        timeout = kserve_wire.int64_parameter("timeout", max(1, int(left_s * 1e6)))
        return (*request.payload, timeout), left_s, request.trace

    def begin_retry(self, request: Request) -> bool:
        """Whether a request that no slice has taken may be offered to another one; then it has a new ticket."""
        ticket = request.ticket
        if self.is_pinned(request):
            return False
        if ticket.deadline_s is not None and self._clock.monotonic_s() >= ticket.deadline_s:
            return False
        allowed = self._retry_budget.try_spend()
        self._accounting.retries_total[ticket.family, "retried" if allowed else "refused"] += 1
        if allowed:
            request.ticket = replace(ticket, id=self.admission.next_id())
        return allowed

    def variant(self, family: str, version: str, pick: Pick) -> str:
        """Variant that answered. While a slice swaps that need not be the one of the table."""
        if not version.isdecimal() or len(version) > VERSION_DIGITS_MAX:
            return pick.variant
        return self._routing.variants.get((family, int(version))) or f"version {version}"

    def _may_log(self) -> bool:
        now_s, per_s = self._clock.monotonic_s(), self._settings.log_failures_per_s
        self._log_tokens = min(per_s, self._log_tokens + (now_s - self._log_at_s) * per_s)
        self._log_at_s = now_s
        if self._log_tokens < 1:
            return False
        self._log_tokens -= 1
        return True

    def _log(self, event: str, request: Request, code: str, latency_ms: float, variant: str, details: str = "") -> None:
        pick, ticket = request.pick, request.ticket
        LOG.info(
            event, family=ticket.family, id=ticket.id, request_id=_parse_request(JOIN(request.payload)).id, code=code,
            latency_ms=round(latency_ms, 2), variant=variant,
            slice=pick.slice.name if pick is not None else "", why=pick.why if pick is not None else "",
            bytes=ticket.bytes, slo_class=ticket.slo_class, tokens_out=request.tokens_out, details=details,
        )  # fmt: skip


def budget_receipt(request: Request) -> bytes:
    """Parameters of a receipt that tell the rung of the tenant's budget and the floor that holds; none without one.
    The budget that a zone has here is not its clients'."""
    if request.rung is None or request.parameters.forwarded:
        return b""
    data = kserve_wire.string_parameter(BUDGET_RUNG, request.rung.rung.text)
    floor = request.parameters.min_accuracy
    return data + (kserve_wire.double_parameter(MIN_ACCURACY, floor) if floor else b"")


def refusal(error: TrefoilError) -> StatusError:
    """Convert an operating error to the status that a client gets."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(error, QueueFull) else status_of(error)
    return StatusError(code, str(error))


def status(error: grpc.aio.AioRpcError | Unavailable | DecodeError) -> StatusError:
    """Convert what came back from a slice to a status to be passed on unchanged: an AioRpcError that escapes would
    become UNKNOWN."""
    if isinstance(error, DecodeError):
        return StatusError(grpc.StatusCode.INTERNAL, f"what the slice answered is not an inference response: {error}")
    if isinstance(error, Unavailable):
        return StatusError(grpc.StatusCode.UNAVAILABLE, str(error))
    return StatusError(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
