"""Trace context from clients to slices, over gRPC and HTTP; and spans of requests, where asked for."""

import json
from concurrent import futures
from dataclasses import replace

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from tritonclient.utils import InferenceServerException

from dispatcher.request import traced_inference
from dispatcher.request.admission import Caller
from dispatcher.request.peer_links import _caller, caller_of
from dispatcher.settings import DispatcherSettings
from tests.support.dispatching import dispatcher_system, image, request, until
from tests.support.fake_triton import BACKEND, FakeTriton
from tests.unit.dispatcher.worlds import status
from trefoil.core.errors import SettingError

pytestmark = pytest.mark.integration
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT, STATE = f"00-{TRACE_ID}-{SPAN_ID}-01", "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
CALLED = {"traceparent": PARENT, "tracestate": STATE}


def serving(state, folder, **settings):
    """One slice and a dispatcher with both fronts."""
    return dispatcher_system(
        state, folder, FakeTriton(version=1), rest_address="127.0.0.1:0", idle_probe_s=0.0, **settings
    )


async def by_http(system, **headers) -> int:
    tensor = {"name": "IMAGE", "datatype": "UINT8", "shape": [1, 8, 8], "data": [0] * 64}
    body = json.dumps({"inputs": [tensor]}).encode()
    return (await system.http("POST", "/v2/models/digits/infer", body, **headers))[0]


async def test_a_clients_trace_context_reaches_its_slice_as_it_is(state, tmp_path):
    async with serving(state, tmp_path) as system:
        await system.infer(headers=CALLED)
        await system.infer(headers=CALLED, client_timeout=30.0)
        async with grpc.aio.insecure_channel(system.address) as channel:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(metadata=CALLED.items())
            await call.write(request().SerializeToString())
            await call.read()
            await call.done_writing()
        assert await by_http(system, Traceparent=PARENT, Tracestate=STATE) == 200
        assert [{k: v for k, v in told.items() if k in CALLED} for told in system.slice.metadata] == [CALLED] * 4


KEY = "triton-grpc-protocol-agent"  # opens what of a Triton is its agent's


async def test_what_is_no_trace_context_stays_here_and_the_request_is_answered(state, tmp_path):
    wrong = [
        {"traceparent": "00-nonsense-01"},
        {"traceparent": f"00-{'0' * 32}-{SPAN_ID}-01"},
        {"traceparent": f"ff-{TRACE_ID}-{SPAN_ID}-01"},
        {"tracestate": STATE},
        {KEY: "secret"},
    ]
    async with serving(state, tmp_path) as system:
        for headers in wrong:
            await system.infer(headers=headers)
            assert await by_http(system, **headers) == 200
        assert await by_http(system, traceparent=PARENT, tracestate="née") == 200
        *others, last = system.slice.metadata
        assert not any(told.keys() & {*CALLED, KEY} for told in others)
        assert (last["traceparent"], "tracestate" in last) == (PARENT, False)


def test_another_worker_is_told_of_it():
    caller = Caller("t", 1.0, 0, tuple(CALLED.items()), ("t", "ipv4:10.0.0.1:5000"), 3.0)
    assert caller_of(_caller(caller), 1.0) == replace(caller, hops=1)
    assert caller_of(b'{"tenant": "t", "hops": 1}', None) == Caller("t", None, 1)  # of a worker of before


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    """What dispatchers of this test export."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traced_inference, "tracer_provider", lambda _: provider)
    return exporter


COLLECTOR = "http://127.0.0.1:1"


async def test_spans_stand_below_the_clients_and_the_slice_is_told_of_the_last(state, tmp_path, spans):
    async with serving(state, tmp_path, otel_endpoint=COLLECTOR) as system:
        await system.infer(headers=CALLED)
        found = {span.name: span for span in spans.get_finished_spans()}
        whole = found["ModelInfer"]
        assert list(found) == ["admit", "wait", "infer", "ModelInfer"]
        assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE_ID}
        assert (f"{whole.parent.span_id:016x}", whole.kind) == (SPAN_ID, SpanKind.SERVER)
        assert {found[name].parent.span_id for name in ("admit", "wait", "infer")} == {whole.context.span_id}
        told = system.slice.metadata[-1]
        assert told["traceparent"] == f"00-{TRACE_ID}-{found['infer'].context.span_id:016x}-01"
        assert told["tracestate"] == STATE
        slice_name = status(0).key.name
        placed = {"trefoil.family": "digits", "trefoil.variant": "digits-xs", "trefoil.slice": slice_name}
        for name in ("wait", "infer", "ModelInfer"):
            assert dict(found[name].attributes) == {**placed, "trefoil.code": "OK"}
        times = [found[name].start_time for name in ("ModelInfer", "admit", "wait", "infer")]
        assert times == sorted(times)
        assert found["infer"].end_time <= whole.end_time


async def test_what_fails_says_with_which_code_and_what_has_no_parent_begins_a_trace(state, tmp_path, spans):
    async with serving(state, tmp_path, otel_endpoint=COLLECTOR) as system:
        system.slice.error = BACKEND
        with pytest.raises(InferenceServerException):
            await system.infer()
        with pytest.raises(InferenceServerException):
            await system.client.infer("cats", [image()])
        system.slice.error = None
        system.slice.gate.clear()
        with pytest.raises(InferenceServerException):
            await system.infer(client_timeout=0.2)
        system.slice.gate.set()
        await until(lambda: len(spans.get_finished_spans()) == 10)
        found = [(span.name, span.attributes["trefoil.code"]) for span in spans.get_finished_spans()]
        failed = [("admit", "OK"), ("wait", "OK"), ("infer", "INTERNAL"), ("ModelInfer", "INTERNAL")]
        unknown = [("admit", "NOT_FOUND"), ("ModelInfer", "NOT_FOUND")]
        late = [("admit", "OK"), ("wait", "OK"), ("infer", "CANCELLED"), ("ModelInfer", "CANCELLED")]
        assert found in ([*failed, *unknown, *late], [*failed, *unknown, *late[:2], *_deadline(late[2:])])
        roots = [span for span in spans.get_finished_spans() if span.parent is None]
        assert len({span.context.trace_id for span in roots}) == len(roots) == 3
        assert system.running.fronts.inference._open == {}


def _deadline(spans):
    return [(name, "DEADLINE_EXCEEDED") for name, _ in spans]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OpenTelemetry collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += [(named["service.name"], span.name) for span in spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_go_to_a_collector_over_otlp(state, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms between two batches
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        async with serving(state, tmp_path, otel_endpoint=endpoint) as system:
            await system.infer()
            await until(lambda: len(collector.spans) == 4)
    finally:
        server.stop(0)
    assert collector.spans == [("trefoil-dispatcher", name) for name in ("admit", "wait", "infer", "ModelInfer")]


def test_without_the_extra_the_setting_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("dispatcher.settings.find_spec", lambda _: None)
    with pytest.raises(SettingError, match=r"otel_endpoint.*pip install 'trefoil\[otel\]'"):
        DispatcherSettings(otel_endpoint=COLLECTOR)
    assert DispatcherSettings().otel_endpoint == ""
    with pytest.raises(SettingError, match="http://host:4317"):
        DispatcherSettings(otel_endpoint="127.0.0.1:4317")
