"""Times of a stream's tokens, as they leave for the client: booked, and on its receipt.

TTFT: from the request's arrival here to its first answer with a token. TPOT: from there to the last token, over the
tokens after that answer; none without any. Of a stream that failed the wait since its last token counts too.
"""

from dispatcher.request.admission import Request
from dispatcher.routing.core.receipts import stream_suffix
from dispatcher.routing.routing_state import Routing
from dispatcher.service.accounting import LoadCounters, StreamEnd
from trefoil.core.demand import JOB_CLASS
from trefoil.core.fleet import SliceKey
from trefoil.core.objective import NO_TOKEN_SLO


def record_tokens(load: LoadCounters, request: Request, variant: str, count: int, now_s: float) -> None:
    """Book the tokens of one answer of a stream, before it is passed on to the client."""
    ticket, pick = request.ticket, request.pick
    assert pick is not None
    if not count:
        return
    request.last_token_s = now_s
    if not request.tokens_out:
        request.first_token_s, request.tokens_first = now_s, count
    request.tokens_out += count
    load.tokens(ticket.family, variant, pick.slice, ticket.slo_class, count, ticket.tenant)


def record_stream(
    load: LoadCounters,
    routing: Routing,
    request: Request,
    code: str,
    by: tuple[str, SliceKey | None],
    now_s: float,
) -> None:
    """Book what the tokens of a stream that ended took; nothing of another request. `by`: variant and slice."""
    if not request.streams:
        return
    ticket = request.ticket
    slo = routing.token_slo(request.family, ticket.slo_class)
    if code == "OK" and not request.tokens_out:  # an answer of no tokens has no first one to wait for
        slo = NO_TOKEN_SLO
    end = stream_end(request, 0.0 if code in ("OK", "CANCELLED") else now_s)
    if ticket.slo_class == JOB_CLASS:  # no client waits for its tokens: their times say nothing of an objective
        slo, end = NO_TOKEN_SLO, StreamEnd(tokens_in=request.tokens_in)
    load.streamed(request.family, *by, ticket.slo_class, end, slo, ticket.tenant)


def stream_end(request: Request, failed_s: float = 0.0) -> StreamEnd:
    """What the tokens of a stream took. `failed_s`: when it failed; 0: it did not."""
    if not request.tokens_out:
        return StreamEnd(tokens_in=request.tokens_in)
    later, last_s = request.tokens_out - request.tokens_first, max(request.last_token_s, failed_s)
    return StreamEnd(
        1e3 * (request.first_token_s - request.ticket.arrived_s),
        1e3 * (last_s - request.first_token_s) / later if later else None,
        request.tokens_in,
    )


def token_receipt(request: Request) -> bytes:
    """Parameters of a receipt that tell what the tokens of a stream took; none of another request."""
    if not request.streams:
        return b""
    end = stream_end(request)
    return stream_suffix(end.ttft_ms, end.tpot_ms, end.tokens_in)
