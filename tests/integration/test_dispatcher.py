"""A real dispatcher on a real Redis, in front of slices that do as they are told."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from dispatcher.fronts.admin import NAME
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from tests.support import fake_triton as fake
from tests.support.dispatching import (
    DispatcherSystem,
    Plane,
    dispatcher_system,
    dispatching,
    image,
    request,
    until,
)
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.common import Revision
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.fleet import SliceState
from trefoil.core.latency import merge
from trefoil.runtime import rpc

pytestmark = pytest.mark.integration
NO_SHM = "shared memory is disabled"


@pytest.fixture
async def system(state, tmp_path) -> AsyncIterator[DispatcherSystem]:
    """Slices of digits-xs and digits-l, which a test's `serve` publishes."""
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), FakeTriton(version=4), serve=False) as made:
        yield made


def requests_of(system: DispatcherSystem) -> list:
    """What the slices were sent."""
    return system.slices[0].requests + system.slices[1].requests


def close_gates(system: DispatcherSystem) -> None:
    for slice_ in system.slices:
        slice_.gate.clear()


def open_gates(system: DispatcherSystem) -> None:
    for slice_ in system.slices:
        slice_.gate.set()


def variant(result) -> str:
    return result.get_response().parameters["trefoil_variant"].string_param


def code(error: InferenceServerException) -> str:
    return error.status().removeprefix("StatusCode.")


# What clients see


async def test_an_unmodified_client_gets_right_values_the_variant_and_its_own_id(system):
    await system.serve()
    seen = Counter()
    for first in range(10):
        result = await system.infer(first, request_id=f"r{first}", model_version="1" if first % 2 else "")
        assert int(np.argmax(result.as_numpy("PROBABILITIES"))) == first
        response = result.get_response()
        assert (response.model_name, response.model_version, response.id) == ("digits", "1", f"r{first}")
        seen[variant(result)] += 1
    assert seen == {"digits-xs": 5, "digits-l": 5}
    assert {request.model_version for request in requests_of(system)} == {""}


async def test_what_perf_analyzer_asks_at_its_start_and_around_every_window(system):
    await system.serve()
    metadata = await system.client.get_model_metadata("digits")
    config = (await system.client.get_model_config("digits")).config
    server = await system.client.get_server_metadata()
    before = (await system.client.get_inference_statistics("digits")).model_stats[0]
    assert list(metadata.versions) == ["1"]
    assert [tensor.name for tensor in metadata.inputs] == ["IMAGE"]
    assert (config.name, config.max_batch_size, config.platform) == ("digits", 8, "")
    assert not config.parameters, "a slice's own configuration must not leak"
    assert not config.default_model_filename
    assert "statistics" in server.extensions
    assert not any("shared_memory" in extension for extension in server.extensions)
    for _ in range(6):
        await system.client.infer("digits", [image(1, items=2)])
    after = (await system.client.get_inference_statistics("digits", "1")).model_stats[0]
    assert (after.name, after.version) == ("digits", "1")
    stats = after.inference_stats
    counts = {stats.success.count, stats.queue.count, stats.compute_input.count, stats.compute_infer.count}
    assert counts == {before.inference_stats.queue.count + 6} == {stats.compute_output.count}
    assert (after.inference_count, after.execution_count) == (12, 6)
    assert after.last_inference > 0
    assert stats.compute_infer.ns > 0
    asked = len(system.slices[0].requests) + len(system.slices[1].requests)
    assert asked == 6, "the contract was asked of a slice once, not on every call"


async def test_the_index_lists_families_with_the_reason_why_one_is_not_ready(system):
    await system.serve()
    (only,) = (await system.client.get_model_repository_index()).models
    assert (only.name, only.version, only.state, only.reason) == ("digits", "1", "READY", "")
    failed, gone = system.statuses((SliceState.FAILED, SliceState.GONE))
    await system.plane.node(node([replace(failed, why="no memory"), gone]))
    await until(lambda: len(system.live) == 0)
    (only,) = (await system.client.get_model_repository_index()).models
    assert only.state == "UNAVAILABLE"
    assert "FAILED (no memory)" in only.reason
    assert not await system.client.is_model_ready("digits")
    assert not await system.client.is_server_ready()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda s: s.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="digits")), "controller"),
        (lambda s: s.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="digits")), "controller"),
        (lambda s: s.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest()), NO_SHM),
        (lambda s: s.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest()), NO_SHM),
        (lambda s: s.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest()), NO_SHM),
        (lambda s: s.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest()), NO_SHM),
        (lambda s: s.TraceSetting(pb.TraceSettingRequest()), "trace"),
        (lambda s: s.LogSettings(pb.LogSettingsRequest()), "log"),
    ],
)  # fmt: skip
async def test_what_is_not_offered_says_why(system, call, reason):
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
        await call(system.stub)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_shared_memory_status_is_empty_as_tritons_is(system):
    assert not (await system.client.get_system_shared_memory_status()).regions
    assert not (await system.client.get_cuda_shared_memory_status()).regions


async def test_health_and_reflection_stand_on_the_inference_port(system):
    channel = grpc.aio.insecure_channel(system.address)
    health = health_pb2_grpc.HealthStub(channel)

    async def serving(name=""):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    names = ("", "inference.GRPCInferenceService", "grpc.health.v1.Health", "triton", "née")
    watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]

    async def seen():
        return [(await watch.read()).status == health_pb2.HealthCheckResponse.SERVING for watch in watches]

    assert not any([await serving(name) for name in names])
    async with asyncio.timeout(60):
        assert not any(await seen())
        await system.serve()
        assert all(await seen())
        assert all([await serving(name) for name in names])
        watches.pop().cancel()  # the others are told all the same
        system.local.drain("test")
        assert not any(await seen())
    from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
    from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

    stream = ServerReflectionStub(channel).ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")]))
    names = {service.name for service in (await stream.read()).list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
    await channel.close()


async def test_before_any_plan_it_says_so(system):
    assert await system.client.is_server_live()
    assert not await system.client.is_server_ready()
    with pytest.raises(InferenceServerException, match="no plan has been read") as caught:
        await system.infer()
    assert code(caught.value) == "UNAVAILABLE"


async def test_planned_but_not_up_yet_is_unavailable_with_the_slices_state(system):
    await system.plane.node(node([status(0, "", SliceState.STARTING)]))
    await system.plane.plan(plan([route([target(0)])]))
    await until(lambda: system.local.routing.table.routes)
    with pytest.raises(
        InferenceServerException, match=r"no slice serves digits now: no live slice: .*STARTING"
    ) as caught:
        await system.infer()
    assert code(caught.value) == "UNAVAILABLE"


# Bad input


@pytest.mark.parametrize(
    ("more", "expected", "text"),
    [
        ({"model_name": "letters"}, "NOT_FOUND", "unknown model: 'letters'"),
        ({"model_version": "4"}, "NOT_FOUND", "version 4"),
        ({"parameters": {"trefoil_min_acuracy": 0.9}}, "INVALID_ARGUMENT", "trefoil_min_acuracy"),
        ({"parameters": {"trefoil_min_accuracy": 1.5}}, "INVALID_ARGUMENT", "trefoil_min_accuracy"),
        ({"parameters": {"trefoil_slo_ms": "soon"}}, "INVALID_ARGUMENT", "trefoil_slo_ms"),
        ({"parameters": {"trefoil_class": 3}}, "INVALID_ARGUMENT", "trefoil_class"),
    ],
)
async def test_bad_requests_are_refused_by_name(system, more, expected, text):
    await system.serve()
    arguments = {"model_name": "digits", "inputs": [image()], **more}
    with pytest.raises(InferenceServerException, match=text) as caught:
        await system.client.infer(**arguments)
    assert code(caught.value) == expected
    assert not system.slices[0].requests
    assert not system.slices[1].requests


async def test_tensors_in_shared_memory_are_refused(system):
    await system.serve()
    tensor = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
    tensor.set_shared_memory("region", 64)
    with pytest.raises(InferenceServerException, match="'IMAGE' is in shared memory") as caught:
        await system.client.infer("digits", [tensor])
    assert code(caught.value) == "INVALID_ARGUMENT"


async def test_bytes_that_are_no_request_are_refused(system):
    await system.serve()
    raw = grpc.aio.insecure_channel(system.address).unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.aio.AioRpcError, match="not a ModelInferRequest") as caught:
        await raw(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# Errors, deadlines, cancellation


async def test_status_details_and_trailers_of_a_slice_arrive_unchanged(system):
    await system.serve()
    for slice_ in (system.slices[0], system.slices[1]):
        slice_.error, slice_.error_trailers = (grpc.StatusCode.FAILED_PRECONDITION, "not tonight"), (("moon", "full"),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await system.stub.ModelInfer(request())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "not tonight"
    assert ("moon", "full") in [tuple(pair) for pair in caught.value.trailing_metadata()]
    assert len(system.slices[0].requests) + len(system.slices[1].requests) == 1, "not retried"
    assert len(system.live) == 2, "a model's own error says nothing of its slice"


async def test_the_deadline_is_forwarded_and_reported(system):
    await system.serve()
    close_gates(system)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        # As `timeout` is sent, but not counted here as well: a client that leaves early may be one that lost patience.
        await system.stub.ModelInfer(request(), metadata=(("grpc-timeout", "3S"),))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: system.slices[0].cancelled + system.slices[1].cancelled == 1)
    (deadline_s,) = system.slices[0].deadlines_s + system.slices[1].deadlines_s
    assert 0 < deadline_s < 3.05
    await until(lambda: not system.local.routing.in_flight())
    assert system.local.accounting.load.totals["digits"].by_code == {"DEADLINE_EXCEEDED": 1}


async def test_a_client_that_leaves_while_its_request_waits_costs_nothing(system):
    await system.serve(credits=1)
    close_gates(system)
    first = [asyncio.create_task(system.infer()) for _ in range(2)]
    pump = system.queue
    await until(lambda: pump.in_flight_count == 2)
    waiting = [system.stub.ModelInfer(request()) for _ in range(4)]
    tasks = [asyncio.ensure_future(call) for call in waiting]
    await until(lambda: pump.waiting == 4)
    for call in waiting:
        call.cancel()
    await until(lambda: pump.waiting == 0)
    await asyncio.gather(*tasks, return_exceptions=True)
    open_gates(system)
    await asyncio.gather(*first)
    assert system.slices[0].executed + system.slices[1].executed == 2
    assert system.local.accounting.load.totals["digits"].by_code == {"CANCELLED": 4}
    assert not system.local.routing.in_flight()


async def test_a_client_that_leaves_while_its_request_runs_frees_the_credit(system):
    await system.serve(credits=1)
    close_gates(system)
    calls = [system.stub.ModelInfer(request()) for _ in range(2)]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await until(lambda: system.slices[0].requests and system.slices[1].requests)
    for call in calls:
        call.cancel()
    await until(lambda: system.slices[0].cancelled == system.slices[1].cancelled == 1)
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not system.local.routing.in_flight())
    open_gates(system)
    await system.infer()


async def test_a_queue_timeout_of_the_request_counts_here_too(system):
    await system.serve(credits=1)
    close_gates(system)
    first = [asyncio.create_task(system.infer()) for _ in range(2)]
    await until(lambda: system.queue.in_flight_count == 2)
    with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
        await system.infer(timeout=100_000)
    assert code(caught.value) == "UNAVAILABLE"
    assert system.queue.waiting == 0
    open_gates(system)
    await asyncio.gather(*first)


async def test_a_message_of_ten_megabytes_passes_and_a_cap_is_kept(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(), message_bytes_max=12 * 2**20) as system:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.aio.insecure_channel(system.address, options=options))
        items = 10 * 2**20 // 64
        answer = await stub.ModelInfer(request(items=items))
        assert len(answer.raw_output_contents[0]) == items * 40
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            await stub.ModelInfer(request(items=13 * 2**20 // 64))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# Tables, acknowledgements, windows


async def test_a_draining_slice_gets_nothing_new_while_what_it_has_finishes(system, state):
    await system.serve(credits=1)
    system.slices[1].gate.clear()
    running = [asyncio.create_task(system.infer()) for _ in range(2)]
    await until(lambda: system.slices[1].requests and system.local.routing.in_flight() == {key(1): 1})
    draining = [target(0, "digits-xs", 1.0), target(1, "digits-l", 0.0, draining=True)]
    await system.plane.plan(plan([route(draining)], number=2))

    async def ack():
        return await state.get(state.keys.ack("d1", 0), TableAck)

    async with asyncio.timeout(60):
        while (await ack()).table < Revision(1, 2, 0):
            await asyncio.sleep(0.01)
    assert {load.slice: load.in_flight for load in (await ack()).slices} == {key(0): 0, key(1): 1}
    for _ in range(10):
        assert variant(await system.infer()) == "digits-xs"
    system.slices[1].gate.set()
    assert {variant(result) for result in await asyncio.gather(*running)} == {"digits-xs", "digits-l"}
    async with asyncio.timeout(60):
        while any(load.in_flight for load in (await ack()).slices):
            await asyncio.sleep(0.01)
    assert len(system.slices[1].requests) == 1


async def test_windows_add_up_to_what_was_done(system, state):
    await system.serve((0.25, 0.75), slo_ms=60_000.0)
    for _ in range(20):
        await system.infer(parameters={"trefoil_class": "gold"})
    system.slices[0].error = system.slices[1].error = fake.BACKEND
    with pytest.raises(InferenceServerException):
        await system.infer()

    async def cells():
        windows = [window for _, window in await state.stream(state.keys.load("d1", 0), LoadWindow)]
        assert [window.seq for window in windows] == list(range(1, len(windows) + 1))
        assert all(a.ends_at_s == b.starts_at_s for a, b in itertools.pairwise(windows))
        return [cell for window in windows for cell in window.cells]

    async with asyncio.timeout(60):
        while not any(cell.failed_by_code for cell in await cells()):
            await asyncio.sleep(0.02)
    found = await cells()
    answered: Counter = Counter()
    for cell in found:
        answered[cell.key.variant] += cell.answered
        assert sum(cell.arrived_per_s) == cell.arrived
    assert answered == {"": 0, "digits-xs": 5, "digits-l": 15}
    assert sum(cell.arrived for cell in found) == 21
    assert sum(cell.arrived for cell in found if cell.key.slo_class == "gold") == 20
    assert sum(cell.within_slo for cell in found) == sum(cell.items for cell in found) == 20
    assert merge(cell.latency for cell in found).total == 20
    assert sum(cell.failed_by_code.get("INTERNAL", 0) for cell in found if cell.key.slice is not None) == 1


async def test_another_router_takes_over_in_mid_flight(system):
    await system.serve(credits=1)
    close_gates(system)
    running = [asyncio.create_task(system.infer()) for _ in range(12)]
    await until(lambda: system.queue.waiting == 10)
    await system.serve(credits=1, number=2, router="fifo")
    open_gates(system)
    assert len(await asyncio.gather(*running)) == 12
    assert not system.local.routing.in_flight()


@pytest.mark.parametrize(
    "broken",
    [
        plan([route([target(0)], router="fastest")], number=2),
        plan([route([target(0, weight=float("nan"))])], number=2),
        plan([route([target(0, credits=0)])], number=2),
        plan([replace(route([target(0)]), queue="lifo")], number=2),
        plan([route([target(0), target(0)])], number=2),
        plan([route([target(0)]), route([target(1)])], number=2),
        plan([route([target(0)])], number=0),
    ],
)
async def test_a_plan_that_cannot_be_routed_leaves_the_last_good_table(system, broken):
    await system.serve()
    await system.plane.plan(broken)
    await until(lambda: system.running.loop.trouble)
    assert system.local.routing.table.revision == Revision(1, 1, 0)
    await system.infer()
    await system.serve(number=3)
    await until(lambda: not system.running.loop.trouble)


# Redis and process deaths


@pytest.mark.gate
async def test_serving_goes_on_when_redis_dies_and_when_it_comes_back_empty(redis_server, tmp_path):
    from trefoil.runtime.state import State

    state = State.connect(redis_server.url, "mortal", timeout_s=30.0)
    async with dispatcher_system(state, tmp_path, FakeTriton(), serve=False) as system:
        await system.serve(number=5)
        loop = system.running.loop
        redis_server.kill()
        for _ in range(20):
            await system.infer()
        await until(lambda: loop.trouble)
        redis_server.start()
        await until(lambda: not loop.trouble, 60)
        for _ in range(20):
            await system.infer()
        assert system.local.routing.table.revision == Revision(1, 5, 0)
        assert await system.client.is_server_ready()
        await Plane(state).plan(plan([route(system.targets())], number=1))  # a controller that forgot everything
        await until(lambda: "older than" in loop.trouble)
        assert system.local.routing.table.revision == Revision(1, 5, 0)

        async def answered():
            windows = await state.stream(state.keys.load("d1", 0), LoadWindow)
            return sum(cell.answered for _, window in windows for cell in window.cells)

        async with asyncio.timeout(60):
            while await answered() < 40:  # windows of the outage were kept and sent
                await asyncio.sleep(0.05)
    await state.close()


async def test_a_dispatcher_that_starts_without_redis_serves_what_it_last_knew(redis_server, tmp_path):
    from trefoil.runtime.state import State

    state = State.connect(redis_server.url, "mortal", timeout_s=30.0)
    async with FakeTriton() as slice_, FakeTriton() as dead:
        async with dispatching(state, tmp_path) as running:
            await DispatcherSystem(running, state, [slice_, dead]).serve(number=5)
        redis_server.kill()
        await dead.stop()
        async with dispatching(state, tmp_path) as again, triton.InferenceServerClient(again.address) as client:
            await until(lambda: again.local.routing.table.live("digits"))
            assert [each.slice for each in again.local.routing.table.live("digits")] == [key(0)]
            for _ in range(5):
                await client.infer("digits", [image()])
    await state.close()


async def test_slices_of_a_silent_agent_are_probed_from_here(state, tmp_path):
    settings = {"node_stale_s": 0.1, "stale_probe_s": 0.1}
    async with dispatcher_system(state, tmp_path, FakeTriton(), FakeTriton(), serve=False, **settings) as system:
        await system.serve(fresh=False)
        system.slices[1].ready = False
        await until(lambda: system.live == [key(0)])
        system.slices[1].ready = True
        await until(lambda: len(system.live) == 2)


async def test_stopping_turns_clients_away_and_lets_what_is_in_flight_finish(state, tmp_path):
    async with FakeTriton(latency_s=0.3) as slice_:
        async with dispatching(state, tmp_path, stop_grace_s=3.0) as running:
            await DispatcherSystem(running, state, [slice_]).serve()
            client = triton.InferenceServerClient(running.address)
            last = asyncio.create_task(client.infer("digits", [image(4)]))
            await until(lambda: slice_.requests)
        assert (await last).as_numpy("PROBABILITIES").argmax() == 4
        await client.close()
        assert await state.get(state.keys.ack("d1", 0), TableAck) is None, "nobody waits for a dispatcher that is gone"


# The admin port


async def test_the_table_says_what_is_routed(system):
    await system.serve()
    admin = (
        dispatcher_pb2_grpc.add_DispatcherServicer_to_server,
        system.running.siblings,
        NAME,
    )
    server = rpc.make_server(system.running.settings, [admin], address="127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        stub = dispatcher_pb2_grpc.DispatcherStub(channel)
        table = await stub.GetTable(dispatcher_pb2.GetTableRequest())
        assert (table.table.epoch, table.table.number, table.why) == (1, 1, "")
        assert [len(each.targets) for each in table.routes] == [2]
        assert len(table.slices) == 2
    await server.stop(0.1)


async def test_metrics_follow_the_windows(system):
    await system.serve()
    for _ in range(4):
        await system.infer()

    def text():
        return system.running.metrics.text()

    await until(lambda: 'trefoil_requests_total{code="OK",family="digits",simulated="true"} 4.0' in text())
    assert 'trefoil_request_duration_seconds_count{family="digits",simulated="true"} 4.0' in text()
    assert f'trefoil_credits{{simulated="true",slice="{key(0).name}"}} 2.0' in text()
