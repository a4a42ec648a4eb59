"""What a request takes here beyond the two gRPC calls, in steps of Python; for microseconds `make bench-dispatcher`."""

from functools import partial

import pytest
from opentelemetry.sdk.trace import TracerProvider
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.request.contracts import Contracts
from dispatcher.request.inference import Inference
from dispatcher.request.traced_inference import TracedInference
from dispatcher.service.local_worker import LocalWorker
from dispatcher.settings import DispatcherSettings
from tests.support.steps import Steps
from tests.unit.dispatcher.worlds import OK, node, plan, route, routing, status, target, ticket
from trefoil.runtime.clock import WallClock

STEPS_MAX = 3000  # measured 2020
TRACE = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),)


class Slice:
    def __init__(self) -> None:
        answer = pb.ModelInferResponse(model_name="digits", model_version="4", id="x")
        answer.outputs.add(name="PROBABILITIES", datatype="FP32", shape=[1, 10])
        answer.raw_output_contents.append(bytes(40))
        self.answer = answer.SerializeToString()

    async def infer(self, parts, timeout_s, metadata, leaving):
        return self.answer, ()


class Context:
    def __init__(self, trace):
        self.trace = trace

    def time_remaining(self):
        return None


async def steps_of_a_request(monkeypatch, trace=(), make=Inference, count=200):
    local = LocalWorker(DispatcherSettings(), "d", WallClock())
    local.routing.set_nodes([node([status(n) for n in range(14)])])
    local.routing.set_plan(plan([route([target(n, "digits-l" if n % 2 else "digits-xs", 1 / 14) for n in range(14)])]))
    slice_ = Slice()
    monkeypatch.setattr(local.routing.connections, "connection", lambda _: slice_)
    inference, context, steps = make(local, Contracts(local)), Context(trace), Steps()
    request = pb.ModelInferRequest(model_name="digits", id="x")
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
    request.raw_input_contents.append(bytes(64))
    data = request.SerializeToString()
    await inference.infer(data, context)  # the first one reads contracts
    with steps:
        for _ in range(count):
            await inference.infer(data, context)
    await local.routing.connections.close()
    assert local.accounting.load.totals["digits"].answered == count + 1
    return steps.count / count


async def test_admitting_routing_and_booking_a_request_stays_within_its_budget(monkeypatch):
    steps = await steps_of_a_request(monkeypatch)
    print(f"{steps:.1f} steps")
    assert steps < STEPS_MAX


async def test_a_trace_that_passes_through_costs_nothing_and_spans_only_where_they_are_asked_for(monkeypatch):
    """Without otel_endpoint there is no code of theirs on the way: not even a question whether to make any."""
    off, passing = [await steps_of_a_request(monkeypatch, trace) for trace in ((), TRACE)]
    on = await steps_of_a_request(monkeypatch, TRACE, partial(TracedInference, provider=TracerProvider()))
    print(f"{off:.1f} steps, with a traceparent {passing:.1f}, with spans {on:.1f}")
    assert abs(passing - off) < 2
    assert on > 2 * off
    local = LocalWorker(DispatcherSettings(), "d", WallClock())
    assert type(Fronts.build(local, Contracts(local)).inference) is Inference


@pytest.mark.parametrize("name", ["fifo", "weighted"])
def test_a_decision_for_seven_hundred_slices_takes_about_as_many_steps_as_one_for_seven(name):
    counts = {}
    for slices in (7, 700):
        router, tickets = routing(name), [ticket(n) for n in range(2000)]
        router.on_table(route([target(n, f"v{n % 3}", 1 / slices) for n in range(slices)], name), 0.0)
        with Steps() as steps:
            for one in tickets:
                router.on_done(one, router.on_arrival(one, 0.0), OK, 0.0)
        counts[slices] = steps.count / len(tickets)
    print(name, counts)
    assert counts[700] < 2 * counts[7]
