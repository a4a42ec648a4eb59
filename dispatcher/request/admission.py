"""What a request asks for: its bytes are parsed once, checked, and become a ticket, a payload and what to answer with.

Every front (unary gRPC, streams, REST, other workers) comes through here, so that a request means the same on each.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request.contracts import Contracts, unknown_model
from dispatcher.routing import request_parameters
from dispatcher.routing.async_queue import AsyncFamilyQueue
from dispatcher.routing.request_parameters import RequestParameters
from dispatcher.routing.sequence_queue import AsyncSequenceQueue
from dispatcher.service.core.tenant_rungs import whose
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.core import kserve_wire
from dispatcher.transport.core.kserve_wire import DIMENSIONS_MAX, FIELDS_MAX
from dispatcher.transport.core.trace_context import NO_TRACE, Trace
from dispatcher.transport.h2_call import Aborted
from trefoil.core.brains import Pick, Ticket
from trefoil.core.demand import JOB_CLASS, PROBE_ID, PROBE_TENANT
from trefoil.core.errors import InvalidInput, NotFound, Unavailable, brief
from trefoil.core.fleet import SliceKey
from trefoil.core.objective import BudgetRung, TenantRung

_parse = pb.ModelInferRequest.FromString
SMALL_BYTES: Final = 64 * 1024
"""A request up to here is parsed at once; of a larger one it is seen first what parsing will make of it."""
VALUES_MAX: Final = 2**14
"""Of a larger request: fields, texts, and numbers that are not packed. Each costs the event loop."""
TEXT_CHARS_MAX: Final = 1024
"""Of an id, a tensor's name or datatype, and a parameter's name: slices say them again in their errors."""
SEQUENCE_CHARS_MAX: Final = 128
"""Of a sequence's id: Triton's own limit."""
ELEMENTS_MAX: Final = 2**56
"""Of one tensor, empty dimensions left out: bytes are counted in 64 bits by everybody after us."""
FEW, SMALL_SIZE = 4, 2**14
"""So few dimensions of so small a size are never more elements than that."""
DEADLINE_MAX_S: Final = 30 * 86_400.0
"""Upper bound of a deadline [s]: gRPC's clock has an end, beyond which a deadline has passed."""
ITEMS_MAX: Final = 64
"""What one request counts for at most in loads and receipts until its family's contract is known."""
ROUNDING_S: Final = 0.005
ROUNDING_RATIO: Final = 0.01  # 1,491 ms are sent as 150 times 10 ms


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a request. `deadline_s` is on the monotonic clock, None = it waits forever. `hops`: how often other
    workers have passed the request on. `trace` is metadata for its slice; `flow` and `weight` as a ticket has them.
    `idle_slice`: it asks for an item of a job, which is not demand; that slice alone may answer, while it is idle.
    `went_away`: another worker has sent it to another zone, which has not answered it."""

    tenant: str = ""
    deadline_s: float | None = None
    hops: int = 0
    trace: Trace = NO_TRACE
    flow: tuple[str, str] = ("", "")
    weight: float = 1.0
    idle_slice: SliceKey | None = None
    went_away: bool = False


def overdue(deadline_s: float | None, arrived_s: float, now_s: float) -> bool:
    """Whether a cancelled call was cancelled by its deadline, all on the monotonic clock.

    gRPC writes a timeout with two or three digits, rounded up, and it counts again from when it arrives: a client whose
    time is up leaves a little before our own clock says so.
    """
    return deadline_s is not None and now_s >= deadline_s - ROUNDING_S - ROUNDING_RATIO * (deadline_s - arrived_s)


class StatusError(Aborted):
    """Request refused with a gRPC status that goes to the client unchanged; a handler of gRPC may raise it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        super().__init__(code, brief(details), trailers)


@dataclass(slots=True)
class Request:
    """One request on its way. `sent_s` is when it last went to a slice, 0.0 = never. `timeout_binds`: its deadline is
    that of the request's `timeout` parameter, for which Triton has a separate error text. `payload` is in parts.
    `trace` is metadata for its slice. For a family that is split, `chain` names the models of all its stages. Ticket,
    queue, payload and pick are those of the stage that it is at. `served_ms` is what the stages before took."""

    family: str
    chain: tuple[str, ...]
    queue: AsyncFamilyQueue | AsyncSequenceQueue
    ticket: Ticket
    payload: tuple[bytes | memoryview, ...]
    parameters: RequestParameters
    timeout_binds: bool = False
    trace: Trace = NO_TRACE
    pick: Pick | None = None
    sent_s: float = 0.0
    streams: bool = False  # of a decoupled family: its tokens are timed
    tokens_out: int = 0  # of its stream so far
    tokens_first: int = 0  # of these in the first answer that had any
    tokens_in: int = 0  # of its prompt, as the engine counts them; 0: it does not
    first_token_s: float = 0.0  # when the first and the last token left
    last_token_s: float = 0.0
    forwarded: bool = False  # to another worker, which books its end
    went_away: bool = False  # to another zone, which has not answered it
    rung: TenantRung | None = None  # of its tenant's budget
    idle_slice: SliceKey | None = None  # of a job: the slice that it may have while that is idle
    served_ms: float = 0.0
    enough_s: float = 0.0  # when its client needed no more answers of its stream; 0.0 = it is read to its end


class Admission:
    """Parses and checks requests and makes their tickets. Belongs to one event loop."""

    def __init__(self, local: LocalWorker, contracts: Contracts) -> None:
        self._local = local
        self._load = local.accounting.load
        self._routing = local.routing
        self._clock = local.clock
        self._settings = local.settings
        self._contracts = contracts
        self._costs = local.costs
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        """Return a ticket number that no other ticket of this worker has."""
        return next(self._ids)

    def admit(self, data: bytes, caller: Caller, arrived_s: float) -> Request:
        """Check a request (bytes of a ModelInferRequest) and make its ticket.

        Raises:
            InvalidInput, NotFound, Unavailable: it cannot be served as it is. It does not count as arrived: demand is
                what could be answered.
            StatusError: its tenant's budget is spent.
        """
        message, head, raw = parse_request(data, self._settings.head_bytes_max)
        family = message.model_name
        chain, queue = self._route_of(family)
        if message.model_version not in ("", kserve_wire.PUBLIC_VERSION):
            raise NotFound(
                f"Request for unknown model: '{family}' version {message.model_version} is not found",
                remedy=f"leave the version out, or ask for {kserve_wire.PUBLIC_VERSION}: the variant is ours to choose",
            )
        idle, asked = caller.idle_slice, request_parameters.NO_PARAMETERS
        payload: tuple[bytes | memoryview, ...] = (data,)
        timeout_s, priority, sequence = 0.0, 0, _NO_SEQUENCE
        if parameters := message.parameters:
            if "timeout" in parameters:
                timeout_s = parameters["timeout"].int64_param / 1e6
            priority = _priority(parameters)
            sequence = _sequence(parameters)
            count = len(parameters)
            asked = request_parameters.extract(parameters)
            if len(parameters) != count:
                payload = (message.SerializeToString(), *raw)
        first_size = _check_tensors(message, parameters, head)
        if message.model_version:
            payload = (*payload, kserve_wire.CLEAR_VERSION)
        sequence_id, sequence_start, sequence_end = sequence
        deadline_s, binds = self._deadline(family, caller.deadline_s, timeout_s, arrived_s)
        items = min(first_size, self._items_max(chain[0])) if first_size > 1 else 1
        tenant = caller.tenant or (PROBE_TENANT if message.id == PROBE_ID else "")
        rung, asked = self._within_budget(caller, tenant, family, asked)
        ticket = Ticket(
            id=next(self._ids),
            family=chain[0],
            slo_class=JOB_CLASS if idle else self._load.class_name(asked.slo_class),
            tenant=tenant,
            items=items,
            bytes=len(data),
            arrived_s=arrived_s,
            deadline_s=deadline_s,
            min_accuracy=asked.min_accuracy,
            priority=priority,
            sequence_id=sequence_id,
            sequence_start=sequence_start,
            sequence_end=sequence_end,
            length_score=None,
            slo_ms=0.0 if idle else self._routing.slo_ms(family, asked),
            flow=caller.flow,
            weight=caller.weight,
            cost_s=self._costs.expected_s(chain[0], items, caller.flow[0]),
        )
        if not (caller.hops or idle):  # else it was counted where the client came in
            self._load.arrived(family, ticket.slo_class, self._clock.now_s(), tenant)
        return Request(family, chain, queue, ticket, payload, asked, binds, caller.trace,
                       went_away=caller.went_away, rung=rung, idle_slice=idle)  # fmt: skip

    def _within_budget(
        self, caller: Caller, tenant: str, family: str, asked: RequestParameters
    ) -> tuple[TenantRung | None, RequestParameters]:
        """Rung of the tenant's budget, and what a request may ask for there; raises StatusError where it is refused.
        Items of jobs, which wait before they are sent, and probes are served. Floors of other zones' requests do not
        fall: those zones serve them."""
        if caller.idle_slice is not None or tenant == PROBE_TENANT:
            return None, asked
        budgets, now_s = self._local.budgets, self._clock.now_s()
        rung = budgets.find(tenant, family, now_s)
        if rung is None:
            return None, asked
        if rung.rung is BudgetRung.REFUSED:
            budgets.refused[tenant, family] += 1
            trailers = (("retry-after", str(math.ceil(budgets.wait_s(rung, now_s)))),)
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, budgets.refusal(rung, now_s), trailers)
        if asked.forwarded and 0 < rung.least_accuracy < asked.min_accuracy:
            why = f"{whose(rung)} is on rung {rung.rung.text}: the floor of another zone's request would not be kept"
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        if rung.least_accuracy:
            asked = replace(asked, min_accuracy=min(asked.min_accuracy, rung.least_accuracy))
        return rung, asked

    async def queue_in_sequence(self, request: Request) -> None:
        """Let a request of a sequence wait for its turn and go where its sequence lives. A family without sequences
        takes no notice of them, as Triton does not.

        Raises:
            NotFound, Unavailable: no slice tells whether the family has sequences.
        """
        family = request.family
        contract = self._contracts.known(family) or await self._contracts.fetch(family)
        if contract.sequence_idle_s is not None:
            request.queue = self._routing.sequence_queue(family, contract.sequence_idle_s)

    def _deadline(
        self, family: str, deadline_s: float | None, timeout_s: float, arrived_s: float
    ) -> tuple[float | None, bool]:
        """The earliest of the caller's deadline, the request's `timeout` and, if it names neither, its family's; and
        whether it is that `timeout`."""
        if deadline_s is not None:
            deadline_s = min(deadline_s, arrived_s + DEADLINE_MAX_S)
        if timeout_s > 0:
            own_s = arrived_s + min(timeout_s, DEADLINE_MAX_S)
            return (own_s, True) if deadline_s is None or own_s < deadline_s else (deadline_s, False)
        if deadline_s is None:
            settings = self._settings
            default_s = settings.deadlines_s.get(family, settings.deadline_s)
            return (arrived_s + default_s, False) if default_s else (None, False)
        return deadline_s, False

    def _route_of(self, family: str) -> tuple[tuple[str, ...], AsyncFamilyQueue]:
        """Models of a family's stages, most often itself alone, and the queue of the first."""
        table = self._routing.table
        chain = table.chains.get(family)
        if chain is None:
            raise unknown_model(family) if table.routes else Unavailable(self._local.not_ready())
        return chain, self._routing.queues[chain[0]]

    def _items_max(self, family: str) -> int:
        """Most items that the first dimension may count: slices refuse larger batches, which then cost nothing."""
        contract = self._contracts.known(family)
        return ITEMS_MAX if contract is None else contract.items_max


_NO_SEQUENCE = ("", False, False)


def parse_request(data: bytes, head_bytes_max: int) -> tuple[Any, bytes, tuple[memoryview, ...]]:
    """Parse the bytes of a ModelInferRequest: the message, the bytes that it was made of, and raw contents beside it.
    Raw contents cost what they are; everything else may cost many times its bytes once parsed, and has a limit. Those
    of a large request are left out of the message.

    Raises:
        InvalidInput: they are none, or more than it may hold.
    """
    if len(data) > SMALL_BYTES:
        size, fields, raw = kserve_wire.head_size(data)
        if size > head_bytes_max:
            raise InvalidInput(
                f"the request has {size} bytes beside its raw_input_contents, at most {head_bytes_max} are taken",
                remedy="send tensors as raw_input_contents, or raise the dispatcher's head_bytes_max",
            )
        if fields > FIELDS_MAX:
            raise InvalidInput(f"the request has more than {FIELDS_MAX} tensors and parameters", remedy="send fewer")
        parts = tuple(memoryview(data)[begin:end] for begin, end in raw)
    else:
        raw, parts = [], ()
    head = kserve_wire.without(data, raw) if raw else data
    try:
        if len(head) > SMALL_BYTES and kserve_wire.count_fields(head, VALUES_MAX) > VALUES_MAX:
            raise InvalidInput(
                f"the request has more than {VALUES_MAX} texts and values beside its raw_input_contents",
                remedy="send tensors as raw_input_contents",
            )
        return _parse(head), head, parts
    except (DecodeError, IndexError) as error:
        raise InvalidInput(f"these {len(data)} bytes are not a ModelInferRequest") from error


def _check_tensors(message: Any, parameters: Any, head: bytes) -> int:
    """Check what slices must never see: what no server counts rightly, and what they cannot reach. `head` are the bytes
    that were parsed. Returns the first size of the first input, 0 = it has none.

    Raises:
        InvalidInput: naming the field.
    """
    if len(head) > TEXT_CHARS_MAX:  # else no text of it is too long, and it has no more fields than may be
        _check_texts(message, parameters)
    first: list[int] | None = None
    inputs = message.inputs[:]  # a list: protobuf's own end in an IndexError with a text
    for tensor in inputs:
        sizes = tensor.shape[: DIMENSIONS_MAX + 1]
        first = sizes if first is None else first
        if len(sizes) <= FEW and (not sizes or (max(sizes) <= SMALL_SIZE and min(sizes) >= -SMALL_SIZE)):
            continue
        elements = 1
        for size in sizes:
            elements *= abs(size) or 1
        if elements > ELEMENTS_MAX or len(sizes) > DIMENSIONS_MAX:
            raise InvalidInput(
                "is larger than any tensor", field="inputs.shape", value=sizes,
                remedy=f"at most {DIMENSIONS_MAX} sizes, whose product is at most {ELEMENTS_MAX}",
            )  # fmt: skip
    if b"shared_memory_region" in head:
        for tensor in inputs + message.outputs[:]:
            if "shared_memory_region" in tensor.parameters:
                raise InvalidInput(
                    f"tensor '{tensor.name}' is in shared memory, which slices cannot reach",
                    remedy="send it in the request",
                )
    return first[0] if first else 0


def _check_texts(message: Any, parameters: Any) -> None:
    """Check how many fields a request has, and how long its texts are; raises like `_check_tensors`."""
    inputs = message.inputs[:]
    tensors = inputs + message.outputs[:]
    if len(tensors) + len(parameters) > FIELDS_MAX:
        raise InvalidInput(f"the request has more than {FIELDS_MAX} tensors and parameters", remedy="send fewer")
    texts = [("id", message.id), *(("parameters", name) for name in parameters)]
    texts += [("inputs.datatype", tensor.datatype) for tensor in inputs]
    texts += [("name", tensor.name) for tensor in tensors]
    for field, value in texts:
        if len(value) > TEXT_CHARS_MAX:
            raise InvalidInput(
                f"is longer than {TEXT_CHARS_MAX} characters", field=field, value=value, remedy="shorten it"
            )


def _priority(parameters: Any) -> int:
    """1 = highest, 0 = the default. tritonclient sends uint64_param, others int64_param."""
    if "priority" not in parameters:
        return 0
    given = parameters["priority"]
    return int(given.uint64_param or given.int64_param)


def _sequence(parameters: Any) -> tuple[str, bool, bool]:
    """The sequence that a request belongs to ("" = none, as Triton has it for 0 and ""), its start and end flags."""
    if "sequence_id" not in parameters:
        return _NO_SEQUENCE
    given = parameters["sequence_id"]
    number = given.int64_param or given.uint64_param
    name = given.string_param or (str(number) if number else "")
    if not name:
        return _NO_SEQUENCE
    if len(name) > SEQUENCE_CHARS_MAX:
        remedy = f"at most {SEQUENCE_CHARS_MAX} characters"
        raise InvalidInput("is too long", field="sequence_id", value=name, remedy=remedy)
    start = "sequence_start" in parameters and parameters["sequence_start"].bool_param
    end = "sequence_end" in parameters and parameters["sequence_end"].bool_param
    return name, start, end
