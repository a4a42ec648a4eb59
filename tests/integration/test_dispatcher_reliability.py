"""Deadlines, retries, outliers and draining of a running dispatcher, in front of slices that misbehave.

Slices that are stopped with SIGSTOP are separate processes: their kernel continues taking connections and bytes.
"""

import asyncio
import math
import signal
import statistics
import time
from collections import Counter
from functools import partial

import grpc
import pytest
import tritonclient.grpc.aio as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from dispatcher.fronts.admin import table_of
from dispatcher.fronts.grpc.streams import ClientLeft
from dispatcher.request import prober
from dispatcher.request.admission import StatusError
from dispatcher.request.decoupled import DecoupledRequest
from dispatcher.request.inference import Caller
from dispatcher.slice_health.core.ejection import Failure
from tests.support import fake_triton as fake
from tests.support.dispatching import (
    DispatcherSystem,
    Plane,
    dispatcher_system,
    dispatching,
    image,
    request,
    stop_idle,
    until,
)
from tests.support.fake_triton import FakeTriton
from tests.support.fake_triton import FakeTritonProcess as Process
from tests.support.workers import Dispatcher
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.errors import Unavailable
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration


class Load:
    """Clients in a closed loop; `codes` counts how their requests ended, `answered_at_s` when one last did well."""

    def __init__(self, system: DispatcherSystem, clients: int, **more) -> None:
        self.codes: Counter[str] = Counter()
        self.answered_at_s = 0.0
        self._more = more
        self._client = triton.InferenceServerClient(system.address)
        self._users = [asyncio.create_task(self._use()) for _ in range(clients)]

    async def _use(self) -> None:
        while True:
            try:
                await self._client.infer("digits", [image(3)], **self._more)
                self.codes["OK"] += 1
                self.answered_at_s = time.monotonic()
            except InferenceServerException as error:
                self.codes[error.status().removeprefix("StatusCode.")] += 1

    async def more(self, count: int = 50) -> None:
        before = self.codes["OK"]
        await until(lambda: self.codes["OK"] >= before + count)

    async def stop(self) -> None:
        for user in self._users:
            user.cancel()
        await asyncio.gather(*self._users, return_exceptions=True)
        await self._client.close()


# A slice that is stopped


@pytest.mark.slow
async def test_a_stopped_slice_costs_two_seconds_at_most_and_loses_nothing_when_it_goes_on(state, tmp_path, awake):
    async with dispatcher_system(state, tmp_path, Process(), Process()) as system:
        processes = system.slices
        load = Load(system, 12)
        took_s = []
        for _ in range(3):
            await load.more()
            processes[1].send(signal.SIGSTOP)
            stopped_s = time.monotonic()
            await until(lambda: system.live == [key(0)])
            took_s.append(awake.between(stopped_s, time.monotonic()))
            assert system.local.health.ejections.get(key(1)).failure is Failure.HUNG
            await load.more()
            assert load.codes.keys() == {"OK"}, "what it had waits for it"
            assert system.local.routing.in_flight()[key(1)] == 2
            processes[1].send(signal.SIGCONT)
            await until(lambda: len(system.live) == 2)
            await until(lambda: not system.local.health.evidence.slow_start.limits())
        await load.more()
        await load.stop()
        assert load.codes.keys() == {"OK"}
        print(f"recovered from SIGSTOP in {took_s} s, {load.codes['OK']} answered, 0 failed")
        assert statistics.median(took_s) <= 2.0, "one may meet a machine that is busy with other tests"


@pytest.mark.slow
async def test_what_a_hung_slice_keeps_fails_after_a_bound_and_names_it(state, tmp_path):
    async with dispatcher_system(state, tmp_path, Process(), Process(), hung_fail_s=0.5) as system:
        processes = system.slices
        load = Load(system, 8)
        await load.more()
        processes[1].send(signal.SIGSTOP)
        await until(lambda: load.codes["UNAVAILABLE"] == 2)
        await load.more()
        assert load.codes.keys() == {"OK", "UNAVAILABLE"}
        assert not system.local.routing.in_flight()[key(1)], "its credits are back"
        await load.stop()
        assert system.local.accounting.load.totals["digits"].by_code["UNAVAILABLE"] == 2


@pytest.mark.slow
async def test_what_a_hung_slice_keeps_is_tried_elsewhere_where_its_agent_is_silent_too(state, tmp_path):
    async with dispatcher_system(state, tmp_path, Process(), Process(), hung_fail_s=0.5, node_stale_s=0.1) as system:
        processes = system.slices
        load = Load(system, 8)
        await load.more()
        processes[1].send(signal.SIGSTOP)
        await until(lambda: system.local.accounting.retries_total["digits", "retried"] == 2)
        await load.more()
        await load.stop()
        assert load.codes.keys() == {"OK"}
        assert not system.local.routing.in_flight()[key(1)], "its credits are back"


@pytest.mark.slow
async def test_a_stopped_slice_without_any_work_is_found_before_it_gets_some(state, tmp_path, monkeypatch):
    monkeypatch.setattr(prober, "PROBE_TIMEOUT_S", 0.5)
    async with dispatcher_system(state, tmp_path, Process(), Process(), idle_probe_s=0.2) as system:
        processes = system.slices
        processes[1].send(signal.SIGSTOP)
        await until(lambda: system.live == [key(0)])
        for _ in range(6):
            await system.infer()


@pytest.mark.slow
async def test_when_all_slices_hang_half_of_them_stay(state, tmp_path, monkeypatch):
    monkeypatch.setattr(prober, "PROBE_TIMEOUT_S", 0.4)
    async with dispatcher_system(state, tmp_path, Process(), Process(), idle_probe_s=0.2) as system:
        processes = system.slices
        for each in processes:
            each.send(signal.SIGSTOP)
        await until(lambda: sum(system.local.health.kept_total.values()))
        assert len(system.live) == 1
        assert len(system.local.health.ejections.outliers()) == 1
        for each in processes:
            each.send(signal.SIGCONT)
        await until(lambda: len(system.live) == 2)


# Outliers


async def test_late_and_sick_slices_are_ejected_and_come_back_by_an_inference(state, tmp_path, monkeypatch, awake):
    monkeypatch.setattr(prober, "STUCK_MIN_S", math.inf)  # which of two true causes comes first is not asked here
    monkeypatch.setattr(prober, "HANG_PROBE_S", 30.0)
    async with dispatcher_system(state, tmp_path, FakeTriton(), FakeTriton(), credits=4, fault_strikes=4) as system:
        ill = system.slices[1]
        load = Load(system, 4)
        await load.more(20)
        ill.gate.clear()  # a good answer that is still on its way would clear the strikes
        await until(lambda: system.local.routing.in_flight()[key(1)] == len(ill.requests) - ill.executed > 0)
        ill.error, sick_s = fake.BACKEND, time.monotonic()
        ill.gate.set()
        await until(lambda: system.live == [key(0)])
        assert system.local.health.ejections.get(key(1), "digits").failure is Failure.SICK
        assert awake.between(sick_s, time.monotonic()) < 2.0, "it serves until a probe has proved it"
        await load.more()
        ill.error = None
        await until(lambda: len(system.live) == 2)
        await load.more(20)
        await load.stop()
        late = Load(system, 4, client_timeout=0.5)
        await late.more(20)
        ill.latency_s = 5.0
        await until(lambda: system.live == [key(0)])
        assert system.local.health.ejections.get(key(1), "digits").failure is Failure.LATE
        await late.more()
        ill.latency_s = 0.0
        await until(lambda: len(system.live) == 2)
        await late.stop()


async def test_a_server_that_lives_and_answers_nothing_is_stuck_until_an_inference_works(state, tmp_path, monkeypatch):
    monkeypatch.setattr(prober, "HANG_PROBE_S", 30.0)
    async with dispatcher_system(state, tmp_path, FakeTriton(), FakeTriton()) as system:
        ill = system.slices[1]
        load = Load(system, 8)
        await load.more(20)
        ill.gate.clear()
        await until(lambda: system.live == [key(0)])
        assert system.local.health.ejections.get(key(1), "digits").failure is Failure.STUCK
        await load.more()
        ill.gate.set()
        await until(lambda: len(system.live) == 2)
        await load.more(20)
        await load.stop()
        assert load.codes.keys() == {"OK"}


async def test_errors_that_every_slice_gives_are_the_clients_and_half_go_on(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(), FakeTriton(), fault_strikes=2) as system:
        one, other = system.slices
        one.error = other.error = fake.BACKEND
        for _ in range(20):
            with pytest.raises(InferenceServerException, match="a tensor went wrong"):
                await system.infer()
        assert system.live


# Deadlines


async def test_what_cannot_be_met_any_more_is_dropped_before_it_is_sent_while_others_wait(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(version=4), credits=1) as system:
        slice_ = system.slice
        for slice_.latency_s in (0.0, 3.0):  # the first is left out
            await system.stub.ModelInfer(request(1))
        slice_.latency_s = 0.0
        slice_.gate.clear()
        first = asyncio.ensure_future(system.stub.ModelInfer(request(1)))
        await until(lambda: len(slice_.requests) == 3)
        late = asyncio.ensure_future(system.stub.ModelInfer(request(1), timeout=2.0))  # less than it took before
        await until(lambda: system.queue.waiting == 1)
        behind = asyncio.ensure_future(system.stub.ModelInfer(request(1)))
        await until(lambda: system.queue.waiting == 2)
        slice_.gate.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late
        await asyncio.gather(first, behind)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "dropped before dispatch: it waited" in caught.value.details()
        assert "is predicted to take" in caught.value.details()
        assert len(slice_.requests) == 4, "it was never sent"
        assert system.local.accounting.load.totals["digits"].by_code == {"DEADLINE_EXCEEDED": 1}
        assert not system.local.routing.in_flight()


async def test_short_requests_with_a_deadline_between_long_ones_are_all_served_on_an_idle_slice(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(version=4), credits=1) as system:
        slice_ = system.slice
        for long_s in (2.0, 0.9, 0.9, 0.9):  # the first is a cold one
            slice_.latency_s = long_s
            await system.stub.ModelInfer(request(1))
            slice_.latency_s = 0.0
            for _ in range(3):
                await system.stub.ModelInfer(request(1), timeout=0.8)
        assert system.local.accounting.load.totals["digits"].by_code == {}


async def test_a_slow_first_call_ejects_no_slice_and_has_no_later_request_dropped(state, tmp_path):
    """Its batch of four is the first there, and takes 2.5 s; one takes 20 ms."""
    slices = FakeTriton(version=4), FakeTriton(version=4)
    async with dispatcher_system(state, tmp_path, *slices, credits=2, hang_quiet_s=0.2) as system:
        one, other = system.slices
        one.latency_s = other.latency_s = 0.02
        for _ in range(20):
            await asyncio.gather(*(system.stub.ModelInfer(request(1)) for _ in range(2)))
        one.latency_s = 2.5
        cold = [asyncio.ensure_future(system.stub.ModelInfer(request(1, items=4))) for _ in range(2)]
        await until(lambda: one._one_at_a_time.locked())
        one.latency_s = 0.02
        behind = [asyncio.ensure_future(system.stub.ModelInfer(request(1, items=4), timeout=0.3)) for _ in range(4)]
        await asyncio.gather(*behind, return_exceptions=True)
        await asyncio.gather(*cold)
        answers = await asyncio.gather(*(system.stub.ModelInfer(request(1, items=4), timeout=1.0) for _ in range(24)))
        assert len(answers) == 24
        assert not system.local.health.ejected_total
        assert not any("dropped before dispatch" in str(each) for each in behind)


# Cancels


async def test_cancels_are_no_silence_and_their_credit_is_free_when_they_have_ended(state, tmp_path):
    """Every request is cancelled before it is answered, for two seconds, beside a client that waits."""
    async with dispatcher_system(state, tmp_path, FakeTriton(), FakeTriton(), credits=1, hang_quiet_s=0.2) as system:
        one, other = system.slices
        load = Load(system, 1)
        await load.more(20)
        one.latency_s = other.latency_s = 0.03
        for _ in range(100):
            call = system.stub.ModelInfer(request(1))
            await asyncio.sleep(0.02)
            call.cancel()
        await load.more(10)
        await load.stop()
        await until(lambda: not system.local.routing.in_flight())
        assert load.codes.keys() == {"OK"}
        assert not system.local.health.ejected_total
        assert one.cancelled + other.cancelled == 0, "what has begun is left to finish"
        assert one._one_at_a_time.locked() is other._one_at_a_time.locked() is False


class Streamed(FakeTriton):
    """Decoupled: one answer to each request, and it ends what it has begun, whoever has left."""

    begun = most = 0
    tasks: set[asyncio.Task[None]]

    def _methods(self):
        self.tasks = set()
        handler = grpc.stream_stream_rpc_method_handler(
            self.ModelStreamInfer,
            request_deserializer=pb.ModelInferRequest.FromString,
            response_serializer=pb.ModelStreamInferResponse.SerializeToString,
        )
        return super()._methods() | {"ModelStreamInfer": handler}

    async def ModelConfig(self, request, context):
        answer = await super().ModelConfig(request, context)
        answer.config.model_transaction_policy.decoupled = True
        return answer

    async def ModelStreamInfer(self, asked, context):
        async for request_ in asked:
            self.begun += 1
            self.most = max(self.most, self.begun - self.executed)
            self.tasks.add(task := asyncio.create_task(self._execute()))
            await asyncio.shield(task)
            answer = pb.ModelStreamInferResponse(infer_response=self._answer(request_))
            answer.infer_response.parameters["triton_final_response"].bool_param = True
            yield answer

    async def _execute(self):
        async with self._one_at_a_time:
            await asyncio.sleep(self.latency_s)
            self.executed += 1


async def test_streams_whose_client_leaves_keep_their_credit_until_their_slice_has_answered(state, tmp_path):
    async with dispatcher_system(state, tmp_path, Streamed(latency_s=0.05), credits=1) as system:
        slice_ = system.slice
        for _ in range(40):
            call = system.stub.ModelStreamInfer(iter([request(1)]))
            await asyncio.sleep(0.02)
            call.cancel()
        answers = [answer async for answer in system.stub.ModelStreamInfer(iter([request(1)]))]
        assert [answer.error_message for answer in answers] == [""]
        await until(lambda: not system.local.routing.in_flight())
        assert slice_.most == 1, "no more at once than it has credits"
        assert 1 < slice_.executed == slice_.begun


async def unreached(*_: object) -> None:
    raise AssertionError("no other worker is there")


class TwoAnswers(Streamed):
    """Decoupled: two answers to each request, the first before its slice executes it."""

    async def ModelStreamInfer(self, asked, context):
        async def begun():
            async for request_ in asked:
                await context.write(pb.ModelStreamInferResponse(infer_response=self._answer(request_)))
                yield request_

        async for answer in super().ModelStreamInfer(begun(), context):
            yield answer


@pytest.mark.parametrize("error", [ClientLeft, grpc.aio.InternalError, Unavailable])
async def test_an_answer_that_cannot_be_written_ends_its_request_once_and_is_no_fault_of_its_slice(
    state, tmp_path, error
):
    """Its credit comes back when its slice has executed it, not before."""
    async with dispatcher_system(state, tmp_path, TwoAnswers(latency_s=0.05), credits=1) as system:
        slice_ = system.slice
        inference = system.running.fronts.inference

        async def gone(_: bytes) -> None:
            raise error("gone")

        for count in range(1, 4):
            serving = DecoupledRequest(system.local, inference, gone, False).serve
            with pytest.raises((error, StatusError)):
                await inference.handle(request(1).SerializeToString(), Caller(), partial(serving, False), unreached)
            assert not system.local.health.ejected_total
            assert system.local.routing.in_flight()
            await until(lambda: not system.local.routing.in_flight())
            assert slice_.executed == count


class NoMessages(Streamed):
    """Decoupled: its answers are not messages."""

    def _methods(self):
        made = super()._methods()
        handler = grpc.stream_stream_rpc_method_handler(self.ModelStreamInfer, pb.ModelInferRequest.FromString, bytes)
        return made | {"ModelStreamInfer": handler}

    async def ModelStreamInfer(self, asked, context):
        async for _ in super().ModelStreamInfer(asked, context):
            yield b"\xff"


async def test_an_answer_of_a_stream_that_is_no_message_fails_its_request_alone_and_once(state, tmp_path):
    async with dispatcher_system(state, tmp_path, NoMessages(), credits=1) as system:
        for _ in range(3):
            (answer,) = [answer async for answer in system.stub.ModelStreamInfer(iter([request(1)]))]
            assert "is not an inference response" in answer.error_message
        await until(lambda: not system.local.routing.in_flight())
        assert system.local.accounting.load.totals["digits"].by_code == {"INTERNAL": 3}
        assert not system.local.health.ejected_total


async def test_the_earliest_of_all_deadlines_counts_and_is_forwarded(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(), deadlines_s={"digits": 9.0}) as system:
        slice_ = system.slice
        await system.infer()
        await system.infer(client_timeout=7.0)
        await system.infer(client_timeout=7.0, timeout=5_000_000)
        await system.infer(client_timeout=3.0, timeout=5_000_000)
        for seen_s, parameters, expected_s in zip(
            slice_.deadlines_s, (each.parameters for each in slice_.requests), (9, 7, 5, 3), strict=True
        ):
            assert expected_s - 1.9 < seen_s <= expected_s + 0.1, "gRPC rounds up"
            assert expected_s - 1.9 < parameters["timeout"].int64_param / 1e6 <= expected_s + 0.1


async def test_a_familys_own_deadline_ends_what_waits(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(), credits=1, deadline_s=0.5) as system:
        slice_ = system.slice
        slice_.gate.clear()
        first = asyncio.ensure_future(system.infer(client_timeout=20.0))
        await until(lambda: slice_.requests)
        with pytest.raises(InferenceServerException, match=r"its deadline passed after .* ms in the queue of digits"):
            await system.infer()
        slice_.gate.set()
        await first


# Retries


async def test_retries_stop_where_the_budget_ends(state, tmp_path):
    settings = {"retry_ratio": 0.0, "no_slice_wait_s": 0.0}
    async with dispatcher_system(state, tmp_path, FakeTriton(), FakeTriton(), **settings) as system:
        await stop_idle(system.running, key(0), system.slice)
        load = Load(system, 4)
        await until(lambda: system.live == [key(1)])
        await load.more(10)
        await load.stop()
        totals = system.local.accounting.retries_total
        assert totals["digits", "retried"] == 0
        assert load.codes["UNAVAILABLE"] == totals["digits", "refused"] <= 2


async def test_a_request_is_offered_to_slices_until_one_takes_it(state, tmp_path):
    async with dispatcher_system(state, tmp_path, *(FakeTriton() for _ in range(6)), credits=1) as system:
        *dead, busy = system.slices
        busy.gate.clear()
        first = [asyncio.ensure_future(system.infer()) for _ in system.slices]
        await until(lambda: busy.requests and sum(call.done() for call in first) == len(dead))
        for n, slice_ in enumerate(dead):
            await stop_idle(system.running, key(n), slice_)
        last = asyncio.ensure_future(system.infer())
        await until(lambda: system.live == [key(len(dead))])
        busy.gate.set()
        await asyncio.gather(last, *first)
        assert system.local.accounting.retries_total["digits", "retried"] == len(dead)


# What is away


async def test_whatever_is_away_is_named_where_operators_look_while_serving_goes_on(redis_server, tmp_path):
    state = State.connect(redis_server.url, "rungs", timeout_s=30.0)
    async with FakeTriton(version=4) as slice_:
        async with dispatching(state, tmp_path, node_stale_s=0.6, stale_probe_s=0.1) as running:
            system = DispatcherSystem(running, state, [slice_])
            await system.serve()
            local = system.local

            def shown(cause: str) -> bool:
                line = f'trefoil_dispatcher_rung{{cause="{cause}",simulated="true"}} 1.0'
                return line in system.running.metrics.text() and local.active_rungs[cause] in table_of(local).why

            async with triton.InferenceServerClient(running.address) as client:
                await until(lambda: shown("agent"))
                await client.infer("digits", [image(3)])
                redis_server.kill()
                await until(lambda: shown("redis"))
                await client.infer("digits", [image(3)])
                redis_server.start()
                await until(lambda: shown("controller"))
                assert "redis" not in local.active_rungs
                await client.infer("digits", [image(3)])
        redis_server.kill()
        async with dispatching(state, tmp_path) as running:
            await until(lambda: running.local.routing.table.live("digits"))
            assert set(running.local.active_rungs) >= {"redis", "disk"}
    await state.close()


# The end


async def test_a_stopping_dispatcher_says_so_at_once_serves_on_and_ends_fast_when_told_twice(
    shared_redis, state, tmp_path
):
    one = Dispatcher(tmp_path, shared_redis.url, state.keys.cluster, 1, "one", drain_s=30.0, stop_grace_s=30.0)
    await one.start()
    async with FakeTriton() as slice_, triton.InferenceServerClient(one.inference) as client:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0)])]))
        await one.serving(client)
        async with grpc.aio.insecure_channel(one.inference) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
            async with asyncio.timeout(60):  # health follows readiness at its next tick
                while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                    pass
            one.process.send_signal(signal.SIGTERM)
            assert (await asyncio.wait_for(watch.read(), 20)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not await client.is_server_ready()
            watch.cancel()
        for _ in range(5):
            await client.infer("digits", [image(3)])
        slice_.gate.clear()
        last = asyncio.ensure_future(client.infer("digits", [image(3)]))
        await until(lambda: len(slice_.requests) == 6)
        one.process.send_signal(signal.SIGTERM)
        code, log = await one.ended(20.0)
        assert code == 0, log
        with pytest.raises(InferenceServerException):
            await last
