"""Inference that leaves OpenTelemetry spans of every request: an extra (`trefoil[otel]`), only where it is asked for.

A request is a span `ModelInfer`, below the client's own where its traceparent names one. Below it: `admit` (parse,
check, the turn of a sequence) and `wait` (until its router gives it a slice). Last comes `infer` (at the slice, which
gets this span as its parent). What goes to a second slice waits and infers again; what another worker answers has its
spans there.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dispatcher.request.admission import Caller, Request, StatusError
from dispatcher.request.contracts import Contracts
from dispatcher.request.inference import FlowOf, Forward, Inference, Result, Serve, refusal
from dispatcher.request.peer_links import Peers
from dispatcher.routing.core.membership import WorkerId, worker_name
from dispatcher.service.local_worker import LocalWorker
from dispatcher.transport.core.trace_context import Trace
from trefoil import direct
from trefoil.core.brains import Outcome, Pick
from trefoil.core.errors import TrefoilError

OK: Final = "OK"
EXPORT_S: Final = 2.0
"""How long a batch is tried: a worker that stops waits as long for a collector that is away."""
_propagator: Final = TraceContextTextMapPropagator()


def tracer_provider(local: LocalWorker) -> TracerProvider:
    """Provider that sends spans in batches to the configured collector, from a thread. Spans that it cannot send in
    EXPORT_S, nor keep (2048), are dropped. The rest is sent at the end of the process. OTEL_* variables apply, e.g. for
    the sampler.
    """
    endpoint = local.settings.otel_endpoint
    resource = Resource.create({SERVICE_NAME: "trefoil-dispatcher", SERVICE_INSTANCE_ID: worker_name(local.id)})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(
        endpoint,
        endpoint.startswith("http://"),
        timeout=EXPORT_S,
        channel_options=(direct.NO_PROXY,),  # type: ignore[arg-type]  # it says texts; gRPC takes numbers
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


@dataclass(slots=True)
class _Spans:
    """Spans of a request under way."""

    whole: Span
    below: Context
    infer: Span | None = None


class TracedInference(Inference):
    """Inference with spans. Belongs to one event loop."""

    def __init__(
        self,
        local: LocalWorker,
        contracts: Contracts,
        peers: Peers | None = None,
        flow_of: FlowOf | None = None,
        provider: TracerProvider | None = None,
    ) -> None:
        super().__init__(local, contracts, peers, flow_of)
        self._tracer = (provider or tracer_provider(local)).get_tracer("trefoil.dispatcher")
        self._open: dict[int, _Spans] = {}  # by identity of their requests

    async def handle(self, data: bytes, caller: Caller, serve: Serve[Result], forward: Forward[Result]) -> Result:
        """Admit a request and serve it, as `Inference` does, within its spans."""
        parent = _propagator.extract(dict(caller.trace))
        whole = self._tracer.start_span("ModelInfer", parent, SpanKind.SERVER)
        spans = _Spans(whole, set_span_in_context(whole, Context()))
        inside = replace(caller, trace=_trace(spans.below))
        if not whole.is_recording():  # the sampler left it out, and slices get that decision
            return await super().handle(data, inside, serve, forward)
        admit = self._tracer.start_span("admit", spans.below)

        async def served(request: Request) -> Result:
            if admit.is_recording():  # else it was asked for here before
                _end(admit, OK)
            whole.set_attributes(_named(request))
            self._open[id(request)] = spans
            try:
                return await serve(request)
            finally:
                del self._open[id(request)]
                if spans.infer is not None:  # its client has left
                    _end(spans.infer, "CANCELLED")

        async def forwarded(worker: WorkerId, request: Request) -> Result:
            if admit.is_recording():
                _end(admit, OK)
            whole.set_attribute("trefoil.worker", worker_name(worker))
            return await forward(worker, request)

        code = "UNKNOWN"
        try:
            result = await super().handle(data, inside, served, forwarded)
            code = OK
            return result
        except StatusError as refused:
            code = refused.code.name
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            if admit.is_recording():
                _end(admit, code)
            _end(whole, code)

    async def pick(self, request: Request) -> Pick:
        """Wait for a slice, as `Inference` does."""
        spans = self._open.get(id(request))
        if spans is None:
            return await super().pick(request)
        span = self._tracer.start_span("wait", spans.below, attributes=_named(request))
        code = "CANCELLED"
        try:
            pick = await super().pick(request)
            span.set_attributes(_placed(pick))
            code = OK
            return pick
        except StatusError as refused:
            code = refused.code.name
            raise
        except TrefoilError as error:
            code = refusal(error).code.name
            raise
        finally:
            _end(span, code)

    def upstream_request(self, request: Request) -> tuple[tuple[bytes | memoryview, ...], float | None, Trace]:
        """Parts, timeout and metadata of a request to its slice, with the span `infer`."""
        parts, timeout_s, trace = super().upstream_request(request)
        if (spans := self._open.get(id(request))) is not None:
            assert request.pick is not None
            named = {**_named(request), **_placed(request.pick)}
            spans.infer = self._tracer.start_span("infer", spans.below, SpanKind.CLIENT, named)
            trace = _trace(set_span_in_context(spans.infer, Context()))
        return parts, timeout_s, trace

    def end(self, request: Request, code: str, executed: bool) -> Outcome:
        """End a picked request, as `Inference` does."""
        spans = self._open.get(id(request))
        if spans is not None and spans.infer is not None:
            _end(spans.infer, code)
            spans.infer = None
        return super().end(request, code, executed)

    def record_answer(self, request: Request, version: str, usual: bool = True) -> str:
        """Book an answer, as `Inference` does."""
        variant = super().record_answer(request, version, usual)
        if (spans := self._open.get(id(request))) is not None:
            assert request.pick is not None
            spans.whole.set_attributes({**_placed(request.pick), "trefoil.variant": variant})
        return variant


def _named(request: Request) -> dict[str, Any]:
    ticket = request.ticket
    return {"trefoil.family": ticket.family, **({"trefoil.tenant": ticket.tenant} if ticket.tenant else {})}


def _placed(pick: Pick) -> dict[str, Any]:
    return {"trefoil.slice": pick.slice.name, "trefoil.variant": pick.variant}


def _trace(context: Context) -> Trace:
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return tuple(carrier.items())


def _end(span: Span, code: str) -> None:
    span.set_attribute("trefoil.code", code)
    if code != OK:
        span.set_status(StatusCode.ERROR, code)
    span.end()
