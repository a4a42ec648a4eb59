"""Streams and decoupled models through unmodified clients: what Triton itself answers is the measure."""

import asyncio
import contextlib
import json
import queue
import socket
from collections import defaultdict

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_sync
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from dispatcher.fronts.rest import calls
from tests.support.dispatching import until
from tests.support.special_world import START_FLAG, in_sequence, item, number, raw, serving
from tests.unit.dispatcher.worlds import key

pytestmark = [pytest.mark.integration, pytest.mark.slow]


FINAL = {"triton_enable_empty_final_response": True}
CONVERSATION = [
    raw("repeat", "two", COUNT=2, DELAY_MS=0),
    raw("repeat", "two and the end", FINAL, COUNT=2, DELAY_MS=0),
    raw("repeat", "none", COUNT=0, DELAY_MS=0),
    raw("repeat", "none and the end", FINAL, COUNT=0, DELAY_MS=0),
    raw("repeat", "an error", COUNT=-1, DELAY_MS=0),
    raw("repeat", "an error and the end", FINAL, COUNT=-1, DELAY_MS=0),
    raw("repeat", "half", COUNT=1),
    raw("accumulator", "start", in_sequence(70, start=True), VALUE=1),
    raw("accumulator", "middle", in_sequence(70), VALUE=10),
    raw("accumulator", "stranger", in_sequence(71), VALUE=10),
    raw("accumulator", "end", in_sequence(70, end=True), VALUE=100),
    raw("accumulator", "after", in_sequence(70), VALUE=1),
    raw("accumulator", "no sequence", VALUE=1),
    raw("running", "both", in_sequence(72, start=True), VALUE=5),
    raw("running", "both again", in_sequence(72, end=True), VALUE=6),
    raw("nothing", "unknown", VALUE=1),
    raw("accumulator", "half of it"),
]


async def converse(address: str) -> list[list]:
    """The answers to each, without what is ours or the slice's own. Each has a separate stream: this Triton aborts
    itself when decoupled and other requests are mixed on one."""
    told = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for request in CONVERSATION:
            answers = [answer async for answer in stub.ModelStreamInfer(iter([request]), timeout=30)]
            told.append([_plain(answer) for answer in answers])
    return told


def _plain(answer):
    inner = answer.infer_response
    inner.ClearField("model_version")
    inner.parameters.pop("trefoil_variant", None)
    for at, output in enumerate(inner.outputs):
        if output.name == "SLICE":
            inner.raw_output_contents[at] = b""
    answer.error_message = answer.error_message.partition(". Remedy:")[0]  # Triton has none
    return answer


@pytest.mark.gate
async def test_a_stream_is_told_what_triton_itself_tells(world, tritons):
    expected, told = await converse(tritons[0].target), await converse(world.address)
    for request, mine, theirs in zip(CONVERSATION, told, expected, strict=True):
        assert mine == theirs, request.id
    assert sum(bool(answer.error_message) for answers in told for answer in answers) == 8
    await until(lambda: world.idle)
    assert world.open_on(0) + world.open_on(1) == 0


async def test_answers_and_errors_on_one_stream_are_in_the_order_of_the_requests(world):
    asked = [each for each in CONVERSATION if each.model_name in ("accumulator", "nothing")] * 5
    async with grpc.aio.insecure_channel(world.address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(asked), timeout=30)
        told = [answer.infer_response.id async for answer in call]
    assert told == [each.id for each in asked]


async def test_one_public_version_the_variant_and_the_clients_own_id_stand_on_every_answer(world):
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = [raw("repeat", f"r{i}", COUNT=2, DELAY_MS=0) for i in range(8)]
        answers = [answer.infer_response async for answer in stub.ModelStreamInfer(iter(asked), timeout=30)]
    assert {answer.model_version for answer in answers} == {"1"}
    assert {answer.id for answer in answers} == {each.id for each in asked}
    assert {answer.parameters["trefoil_variant"].string_param for answer in answers} == {"v3", "v5"}
    assert {answer.raw_output_contents[1] for answer in answers} == {np.int32(0).tobytes(), np.int32(1).tobytes()}


async def test_errors_are_statuses_for_a_stream_that_asks_for_them(world):
    as_status = (("triton_grpc_error", "true"),)
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def ask(*requests):
            seen = []
            call = stub.ModelStreamInfer(iter(requests), metadata=as_status, timeout=30)
            with contextlib.suppress(grpc.aio.AioRpcError):
                seen.extend([answer async for answer in call])
            return seen, await call.code(), await call.details()

        _, code, details = await ask(raw("accumulator", "a", in_sequence(5), VALUE=1))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert START_FLAG in details
        _, code, details = await ask(raw("nothing", "a", VALUE=1))
        assert code is grpc.StatusCode.NOT_FOUND
        _, code, details = await ask(raw("repeat", "a", COUNT=-1, DELAY_MS=0))
        assert (code, details) == (grpc.StatusCode.INTERNAL, "no more than that")
        seen, code, _ = await ask(raw("repeat", "a", COUNT=3, DELAY_MS=0))
        assert (len(seen), code) == (3, grpc.StatusCode.OK)
    await until(lambda: world.idle)


async def test_the_sync_clients_stream_has_its_answers_in_order(world):
    def ask():
        answers: queue.Queue = queue.Queue()
        with triton_sync.InferenceServerClient(world.address) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for i in range(60):
                tensor = triton_sync.InferInput("SCORES", [1, 4], "FP32")
                tensor.set_data_from_numpy(np.array([[i, 0, 0, 0]], np.float32))
                client.async_stream_infer("scores", [tensor], request_id=f"r{i}")
            return [answers.get(timeout=30) for _ in range(60)]

    told = await asyncio.to_thread(ask)
    assert not [error for _, error in told if error]
    assert [result.get_response().id for result, _ in told] == [f"r{i}" for i in range(60)]
    assert [result.as_numpy("SCORES")[0, 0] for result, _ in told] == list(range(60))
    assert {result.get_response().parameters["trefoil_variant"].string_param for result, _ in told} == {"v3", "v5"}


async def test_the_aio_clients_stream_carries_decoupled_and_plain_requests_side_by_side(world):
    async def asked():
        for i in range(20):
            inputs = [number(triton, "COUNT", 3), number(triton, "DELAY_MS", 1)]
            yield {"model_name": "repeat", "inputs": inputs, "request_id": f"d{i}"}
            tensor = triton.InferInput("SCORES", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.array([[i, 0, 0, 0]], np.float32))
            yield {"model_name": "scores", "inputs": [tensor], "request_id": f"p{i}"}

    plain, decoupled = [], defaultdict(list)
    async with triton.InferenceServerClient(world.address) as client:
        async for result, error in client.stream_infer(asked(), stream_timeout=30):
            assert error is None
            id_ = result.get_response().id
            if id_[0] == "p":
                plain.append((id_, float(result.as_numpy("SCORES")[0, 0])))
            else:
                decoupled[id_].append(item(result, "INDEX"))
    assert plain == [(f"p{i}", float(i)) for i in range(20)]
    assert decoupled == {f"d{i}": [0, 1, 2] for i in range(20)}


async def test_a_stream_that_waits_for_more_is_told_when_the_dispatcher_stops(world):
    async with grpc.aio.insecure_channel(world.address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=30)
        await call.write(raw("repeat", "slow", COUNT=4, DELAY_MS=50))
        await call.read()
        world.running.fronts.streams.close()
        assert world.local.accounting.open_streams == 1
        told = [(await call.read()).infer_response.id for _ in range(3)]
        assert told == ["slow"] * 3, "what was under way is answered"
        with pytest.raises(grpc.aio.AioRpcError, match="open the stream again") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await until(lambda: world.local.accounting.open_streams == 0)


async def test_a_connection_that_is_closed_under_a_request_is_told_on_the_stream(world):
    """Closing cancels our call: for the stream that is an error of one request, and not that its client left."""
    async with grpc.aio.insecure_channel(world.address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=30)
        await call.write(raw("repeat", "cut", COUNT=100, DELAY_MS=20))
        first = await call.read()
        number_of_slice = int.from_bytes(first.infer_response.raw_output_contents[1], "little")
        await world.local.routing.connections.connection(key(number_of_slice)).channel.close()
        while not (last := await call.read()).error_message:
            assert last.infer_response.id == "cut"
        assert (last.error_message, last.infer_response.id) == ("the connection to its slice was closed", "cut")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    await until(lambda: world.idle)


# Decoupled models


async def test_a_decoupled_request_holds_its_credit_until_the_final_response_and_no_longer(state, tmp_path, tritons):
    async with serving(state, tmp_path, tritons, credits=1) as world:
        asked = [raw("repeat", f"r{i}", COUNT=5, DELAY_MS=20) for i in range(6)]
        most, seen = 0, 0
        async with grpc.aio.insecure_channel(world.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            async for _ in stub.ModelStreamInfer(iter(asked), timeout=30):
                seen += 1
                most = max(most, *world.local.routing.in_flight().values(), 0)
        assert (seen, most) == (30, 1)
        await until(lambda: world.idle)
        assert world.local.accounting.load.totals["repeat"].answered == 6


async def test_a_client_that_leaves_cancels_what_its_stream_had_under_way(world):
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(timeout=60)
        for i in range(2):
            await call.write(raw("repeat", f"r{i}", COUNT=1000, DELAY_MS=20))
        await call.read()
        await until(lambda: sum(world.local.routing.in_flight().values()) == 2)
        call.cancel()
    await until(lambda: world.idle)
    assert world.local.accounting.load.totals["repeat"].by_code == {"CANCELLED": 2}
    async with triton.InferenceServerClient(world.address) as client:  # the models are free again

        async def asked():
            for i in range(4):
                inputs = [number(triton, "COUNT", 1), number(triton, "DELAY_MS", 0)]
                yield {"model_name": "repeat", "inputs": inputs, "request_id": f"{i}"}

        async for _, error in client.stream_infer(asked(), stream_timeout=10):
            assert error is None


async def test_no_more_of_a_stream_is_read_than_may_be_under_way(state, tmp_path, tritons):
    async with serving(state, tmp_path, tritons, stream_requests_max=4) as world:
        asked = [raw("repeat", f"r{i}", COUNT=1, DELAY_MS=5) for i in range(24)]
        most, seen = 0, set()
        async with grpc.aio.insecure_channel(world.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            async for answer in stub.ModelStreamInfer(iter(asked), timeout=30):
                seen.add(answer.infer_response.id)
                pump = world.local.routing.queues["repeat"]
                most = max(most, pump.in_flight_count + pump.waiting)
        assert len(seen) == 24
        assert most <= 4


async def test_unary_requests_to_a_decoupled_model_are_refused_in_tritons_words(world):
    async with triton.InferenceServerClient(world.address) as client:
        inputs = [number(triton, "COUNT", 1), number(triton, "DELAY_MS", 0)]
        with pytest.raises(InferenceServerException, match="doesn't support models with decoupled") as caught:
            await client.infer("repeat", inputs)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert not world.local.health.ejections.reasons()


async def test_a_client_of_http_that_does_not_read_stops_its_stream_and_is_let_go_of(
    state, tmp_path, tritons, monkeypatch
):
    """Buffers of the kernel and of the connections fill up; then no answer is taken from the slice."""
    monkeypatch.setattr(calls, "UNREAD_S", 3.0)
    async with serving(state, tmp_path, tritons, rest_address="127.0.0.1:0") as world:
        taken = world.local.health.evidence.answer_counts
        body = json.dumps({"COUNT": 1_000_000, "DELAY_MS": 0, "id": "x" * 1000}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", world.running.rest.port))
            head = f"POST /v2/models/repeat/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            await until(lambda: sum(taken.values()) > 50)
            await until(lambda: world.idle)
        assert sum(taken.values()) < 20_000
        assert world.local.accounting.load.totals["repeat"].by_code == {"CANCELLED": 1}
