"""KServe v2 over HTTP: the unmodified tritonclient.http in front of slices that do as they are told."""

import asyncio
import contextlib
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.http import aio as triton_aio
from tritonclient.utils import InferenceServerException

from dispatcher.fronts.rest import http1, json_text
from dispatcher.fronts.rest.http1 import HEAD_BYTES_MAX
from tests.support.dispatching import DispatcherSystem, dispatcher_system, until
from tests.support.fake_triton import QUEUE_FULL, FakeTriton
from tests.unit.dispatcher.worlds import node
from trefoil.core.demand import JOB_CLASS
from trefoil.core.errors import InvalidInput

pytestmark = pytest.mark.integration
ROUNDS_MAX = 5


async def ask(system: DispatcherSystem, use, **options):
    """Run `use(client)` with the sync client, in a thread: gevent does not know our event loop."""

    def run():
        with triton.InferenceServerClient(system.running.rest_address, **options) as client:
            return use(client)

    return await asyncio.to_thread(run)


@pytest.fixture
async def system(state, tmp_path) -> AsyncIterator[DispatcherSystem]:
    bounds = {"message_bytes_max": 2**20, "rest_json_bytes_max": 2**16}
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), rest_address="127.0.0.1:0", **bounds) as made:
        yield made


def image(first=3, items=1, binary=True):
    made = np.zeros((items, 8, 8), np.uint8)
    made[:, 0, 0] = first
    tensor = triton.InferInput("IMAGE", list(made.shape), "UINT8")
    tensor.set_data_from_numpy(made, binary_data=binary)
    return tensor


BODY = json.dumps({"inputs": [image(4, binary=False)._get_tensor()]}).encode()
INFER = "/v2/models/digits/infer"
AS_JOB = {"trefoil_class": JOB_CLASS}
INFER_AS_JOB = json.dumps(json.loads(BODY) | {"parameters": AS_JOB}).encode()
GENERATE_AS_JOB = json.dumps({"IMAGE": [0] * 64} | AS_JOB).encode()


async def test_health_metadata_configuration_statistics_and_the_index(system):
    def look(client):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("digits")
        assert client.is_model_ready("digits", "1")
        assert not client.is_model_ready("digits", "2")
        assert not client.is_model_ready("another")
        server = client.get_server_metadata()
        assert (server["name"], "binary_tensor_data" in server["extensions"]) == ("trefoil", True)
        for infers in (0, 1):
            if infers:
                client.infer("digits", [image(items=2)])
            stats = client.get_inference_statistics("digits")["model_stats"][0]
            assert (stats["name"], stats["version"], stats["inference_count"]) == ("digits", "1", 2 * infers)
            assert stats["inference_stats"]["queue"]["count"] == infers
        assert (
            client.get_inference_statistics()["model_stats"] == client.get_inference_statistics("digits")["model_stats"]
        )
        assert client.get_model_repository_index() == [{"name": "digits", "version": "1", "state": "READY"}]
        assert client.get_system_shared_memory_status() == []
        return client.get_model_metadata("digits"), client.get_model_config("digits", "1")

    metadata, config = await ask(system, look)
    assert metadata == {
        "name": "digits", "versions": ["1"], "platform": "python",
        "inputs": [{"name": "IMAGE", "datatype": "UINT8", "shape": [-1, 8, 8]}],
        "outputs": [{"name": "PROBABILITIES", "datatype": "FP32", "shape": [-1, 10]}],
    }  # fmt: skip
    assert (config["name"], config["max_batch_size"], config["backend"]) == ("digits", 8, "python")
    assert config["input"][0]["dims"] == [8, 8]
    assert config["input"][0]["data_type"] == "TYPE_UINT8"
    assert "secret" not in json.dumps(config)


async def test_health_is_answered_in_json_as_kserves_own_client_reads_it(system):
    """KServe's InferenceRESTClient takes the JSON key; Triton's client takes the status and ignores the body."""
    for what in ("live", "ready"):
        status, headers, body = await system.http("GET", f"/v2/health/{what}")
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(body) == {what: True}
    await system.plane.node(node([]))
    await until(lambda: not system.local.routing.table.live("digits"))
    status, _, body = await system.http("GET", "/v2/health/ready")
    assert (status, json.loads(body)) == (400, {"ready": False})


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
async def test_values_in_binary_and_json_compressed_and_not(system, algorithm, binary_in, binary_out):
    def infer(client):
        return client.infer(
            "digits", [image(7, 3, binary_in)], request_id="mine", model_version="1",
            outputs=[triton.InferRequestedOutput("PROBABILITIES", binary_data=binary_out)],
            request_compression_algorithm=algorithm, response_compression_algorithm=algorithm,
        )  # fmt: skip

    result = await ask(system, infer)
    assert result.as_numpy("PROBABILITIES").argmax(axis=1).tolist() == [7, 7, 7]
    answer = result.get_response()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("mine", "digits", "1")
    assert answer["parameters"] == {"trefoil_variant": "digits-xs"}
    assert ("data" in answer["outputs"][0]) == (not binary_out)
    (asked,) = system.slice.requests
    assert (asked.id, asked.model_version) == ("mine", "")
    assert [output.name for output in asked.outputs] == ["PROBABILITIES"]


async def test_without_outputs_named_everything_comes_in_binary_as_the_client_asks(system):
    result = await ask(system, lambda client: client.infer("digits", [image(5)]))
    assert result.as_numpy("PROBABILITIES").argmax() == 5
    assert result.get_response()["outputs"][0]["parameters"] == {"binary_data_size": 40}
    assert not system.slice.requests[0].outputs
    assert "binary_data_output" not in system.slice.requests[0].parameters


async def test_knobs_are_checked_and_stripped_and_other_parameters_reach_the_slice(system):
    def infer(client, **parameters):
        return client.infer("digits", [image()], parameters=parameters, priority=2, timeout=5_000_000)

    answer = await ask(system, lambda client: infer(client, mine=7, trefoil_class="bulk", trefoil_receipt=True))
    assert {"trefoil_variant", "trefoil_slice"} <= set(answer.get_response()["parameters"])
    parameters = system.slice.requests[0].parameters
    assert parameters["mine"].int64_param == 7
    assert parameters["priority"].uint64_param == 2
    assert not [name for name in parameters if name.startswith("trefoil_")]
    with pytest.raises(InferenceServerException, match=r"trefoil_min_accuracy = 2\.0.*Remedy") as refused:
        await ask(system, lambda client: infer(client, trefoil_min_accuracy=2.0))
    assert refused.value.status() == "400"


async def test_the_async_client_and_many_requests_at_once(system):
    async with triton_aio.InferenceServerClient(system.running.rest_address, conn_limit=20) as client:
        results = await asyncio.gather(*(client.infer("digits", [image(first)]) for first in range(40)))
    assert [int(result.as_numpy("PROBABILITIES").argmax()) for result in results] == [i % 10 for i in range(40)]


async def test_the_sync_clients_own_async_calls(system):
    def infer(client):
        asked = [client.async_infer("digits", [image(first)]) for first in range(8)]
        return [int(one.get_result().as_numpy("PROBABILITIES").argmax()) for one in asked]

    assert await ask(system, infer, concurrency=4) == list(range(8))


@pytest.mark.parametrize(
    ("use", "status", "words"),
    [
        (lambda c: c.infer("nobody", [image()]), "404", "unknown model: 'nobody' is not found"),
        (lambda c: c.infer("digits", [image()], model_version="7"), "404", "version 7 is not found"),
        (lambda c: c.get_model_metadata("nobody"), "404", "unknown model"),
        (lambda c: c.get_inference_statistics("nobody"), "404", "unknown model"),
        (lambda c: c.load_model("digits"), "501", "the controller decides"),
        (lambda c: c.unload_model("digits"), "501", "the controller decides"),
        (lambda c: c.register_system_shared_memory("a", "/a", 8), "501", "Client shared memory is disabled"),
        (lambda c: c.unregister_cuda_shared_memory(), "501", "Client shared memory is disabled"),
        (lambda c: c.get_log_settings(), "501", "log settings"),
        (lambda c: c.get_trace_settings("digits"), "501", "traces"),
    ],
)  # fmt: skip
async def test_errors_have_tritons_statuses_and_form(system, use, status, words):
    with pytest.raises(InferenceServerException, match=words) as refused:
        await ask(system, use)
    assert refused.value.status() == status


async def test_a_shared_memory_region_is_refused(system):
    tensor = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
    tensor.set_shared_memory("region", 64)
    with pytest.raises(InferenceServerException, match="'IMAGE' is in shared memory") as refused:
        await ask(system, lambda client: client.infer("digits", [tensor]))
    assert refused.value.status() == "400"


async def test_a_slices_own_error_comes_through_with_its_status(system):
    system.slice.error = QUEUE_FULL
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as refused:
        await ask(system, lambda client: client.infer("digits", [image()]))
    assert refused.value.status() == "503"


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "words"),
    [
        ("GET", INFER, {}, b"", 405, "Method Not Allowed"),
        ("POST", "/v2", {}, b"", 405, "Method Not Allowed"),
        ("GET", "/v3", {}, b"", 404, "Not Found"),
        ("GET", "/v2/models/digits/generate", {}, b"", 405, "Method Not Allowed"),
        ("POST", "/v2/models/digits/generate", {}, b"[]", 400, "not a JSON object"),
        ("POST", "/v2/models/digits/generate_stream", {}, b'{"IMAGE":[1,2]}', 400, "IMAGE: 2 elements do not fill"),
        ("POST", "/v2/models/digits/generate", {}, b'{"IMAGE":"a"}', 400, "do not fill the shape [-1, 8, 8]"),
        ("POST", "/v2/models/digits/generate", {}, b'{"trefoil_slo":1}', 400, "unknown request parameter trefoil_slo"),
        ("POST", "/v2/models/digits/generate", {}, GENERATE_AS_JOB, 400, "trefoil_class = '(job)': is a name of"),
        ("POST", INFER, {}, INFER_AS_JOB, 400, "trefoil_class = '(job)': is a name of"),
        ("POST", "/v2/models/nobody/generate", {}, b"{}", 404, "unknown model: 'nobody'"),
        ("POST", "/v2/models/digits/generate_stream", {}, b" " * (2**16 + 1), 413, "rest_json_bytes_max"),
        ("POST", INFER, {}, b"{", 400, "failed to parse the request JSON buffer"),
        ("POST", INFER, {}, b"[]", 400, "not a JSON object"),
        ("POST", INFER, {}, b"", 400, "failed to parse"),
        ("POST", INFER, {}, b'{"inputs":[{"name":"IMAGE"}]}', 400, "no field is set"),
        ("POST", INFER, {"Inference_Header_Content_Length": "9999"}, BODY, 400, "should be in range"),
        ("POST", INFER, {"Inference_Header_Content_Length": "x"}, BODY, 400, "should be in range"),
        ("POST", INFER, {"Inference_Header_Content_Length": str(len(BODY))}, BODY + b"!", 400, "additional input data"),
        ("POST", INFER, {"Content_Encoding": "br"}, BODY, 501, "Unsupported compression type 'br'"),
        ("POST", INFER, {"Content_Encoding": "gzip"}, BODY, 400, "cannot be decompressed"),
        ("POST", INFER, {"Content_Encoding": "gzip"}, gzip.compress(BODY)[:-9], 400, "cut off"),
        ("POST", INFER, {"Content_Encoding": "deflate"}, zlib.compress(bytes(2**20 + 1)), 413, "once decompressed"),
        ("POST", INFER, {"Content_Encoding": "gzip"}, gzip.compress(BODY + bytes(2**16)), 413, "rest_json_bytes_max"),
        ("POST", INFER, {}, b" " * (2**16 + 1), 413, "rest_json_bytes_max"),
        ("POST", INFER, {}, bytes(2**20 + 1), 413, "rest_json_bytes_max"),
        ("POST", INFER, {"Inference_Header_Content_Length": "9"}, bytes(2**20 + 1), 413, "message_bytes_max"),
        ("POST", "/v2/repository/index", {}, b'{"ready":1}', 400, "expected a boolean"),
    ],
)  # fmt: skip
async def test_what_is_malformed_is_told_so(system, method, path, headers, body, status, words):
    got, fields, answer = await system.http(method, path, body, **headers)
    assert (got, fields["content-type"]) == (status, "application/json")
    assert words in json.loads(answer)["error"]
    assert not system.slice.requests


async def test_json_has_the_limit_of_any_body(state, tmp_path):
    """As many numbers as an image of 640 x 640 x 3 has, in lists of 8."""
    pixels = np.random.default_rng(1).integers(0, 256, (19_200, 8, 8), np.uint8)
    tensor = {"name": "IMAGE", "datatype": "UINT8", "shape": list(pixels.shape), "data": pixels.tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), rest_address="127.0.0.1:0") as system:
        got, _, answer = await system.http("POST", INFER, body)
        assert got == 200, answer[:500]
        assert system.slice.requests[-1].raw_input_contents[0] == pixels.tobytes()
        zeros = {"name": "IMAGE", "datatype": "FP64", "shape": [9 * 2**20], "data": [0] * (9 * 2**20)}
        got, _, answer = await system.http("POST", INFER, json.dumps({"inputs": [zeros]}).encode())
        assert (got, "the tensors have 7" in json.loads(answer)["error"]) == (413, True), "a digit is 8 bytes"


KEYS = b",".join(b'"trefoil_%d":1' % n for n in range(150_000))
LARGE = (
    b'{"model":"digits","messages":[%b]}' % b",".join([b'{"role":"user","content":""}'] * 70_000),
    b'{"model":"digits","messages":[],%b}' % KEYS,
    b'{"model":[%b]}' % b",".join([b"[" * 900 + b"]" * 900] * 1000),
    b'{"model":-NaN ' + b'"' * 2_000_000,
)


async def test_large_texts_of_any_shape_are_read_beside_the_loop(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), rest_address="127.0.0.1:0") as system:
        for path in ("/v1/chat/completions", "/v2/models/digits/generate"):
            await system.http("POST", path, b" " * 2**17)  # the process has started
            for body in LARGE:
                began_s = time.thread_time()
                with contextlib.suppress(InvalidInput):
                    json_text.parse(body)
                here_s, turns_s = time.thread_time() - began_s, [float("inf")]
                while min(turns_s) >= here_s / 3 and len(turns_s) <= ROUNDS_MAX:
                    longest_s, asking = 0.0, asyncio.create_task(system.http("POST", path, body))
                    while not asking.done():
                        began_s = time.thread_time()
                        await asyncio.sleep(0)
                        longest_s = max(longest_s, time.thread_time() - began_s)
                    status, _, answer = asking.result()
                    assert (status, b"error" in answer) == (400, True)
                    turns_s.append(longest_s)
                assert min(turns_s) < here_s / 3, "CPU time of this thread between two turns, of the best of rounds"


async def test_a_body_without_json_is_the_only_inputs_data(system):
    status, fields, body = await system.http("POST", INFER, bytes([6]) + bytes(63), Inference_Header_Content_Length="0")
    assert status == 200
    length = int(fields["inference-header-content-length"])
    assert np.frombuffer(body[length:], np.float32).argmax() == 6
    status, _, body = await system.http("POST", INFER, bytes(65), Inference_Header_Content_Length="0")
    assert (status, "65 bytes of UINT8" in json.loads(body)["error"]) == (400, True)


async def test_what_a_worker_holds_of_both_ports_bounds_bodies(system):
    held = system.running.fronts.held
    bounds, held.bytes_max = held.bytes_max, 1000
    held.bytes += 1001  # of gRPC
    try:
        status, _, body = await system.http("POST", INFER, BODY)
    finally:
        held.bytes -= 1001
    assert (status, "at most 1000" in json.loads(body)["error"]) == (429, True)
    held.bytes_max = bounds
    assert (await system.http("POST", INFER, BODY))[0] == 200
    assert held.bytes == 0


async def test_what_the_client_likes_best_is_how_it_is_compressed(system):
    for accept, encoding in (
        ("gzip;q=0.5, deflate", "deflate"), ("gzip, deflate", "gzip"), ("br, gzip;q=x", None), ("identity, gzip", None),
    ):  # fmt: skip
        status, fields, body = await system.http("POST", INFER, BODY, Accept_Encoding=accept)
        assert (status, fields.get("content-encoding")) == (200, encoding)
        plain = zlib.decompress(body, 32 + zlib.MAX_WBITS) if encoding else body
        assert json.loads(plain)["outputs"][0]["data"][4] == 1.0


async def test_a_client_that_leaves_frees_its_place_in_the_queue_and_on_the_slice(system):
    system.slice.gate.clear()
    writers = []
    for _ in range(4):  # two go to the slice, two wait
        _, writer = await asyncio.open_connection("127.0.0.1", system.running.rest.port)
        writer.write(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        writers.append(writer)
    pump = system.queue
    await until(lambda: (pump.in_flight_count, pump.waiting, len(system.slice.requests)) == (2, 2, 2))
    for writer in writers:
        writer.close()
    await until(lambda: (pump.in_flight_count, pump.waiting) == (0, 0))
    # A place that is freed first goes to one who waits and leaves a moment later.
    await until(lambda: system.slice.cancelled == len(system.slice.requests))
    system.slice.gate.set()
    assert (await ask(system, lambda client: client.infer("digits", [image(2)]))).as_numpy(
        "PROBABILITIES"
    ).argmax() == 2


async def test_an_endless_head_is_cut_off_and_large_bodies_on_one_connection_are_not(system):
    reader, writer = await asyncio.open_connection("127.0.0.1", system.running.rest.port)
    writer.write(f"POST {INFER} HTTP/1.1\r\nX: ".encode() + bytes(2 * HEAD_BYTES_MAX).replace(b"\0", b"x"))
    with contextlib.suppress(ConnectionResetError):  # it may have more to send than is read
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 431 ")
    writer.close()

    def twice(client):
        for _ in range(3):
            with pytest.raises(InferenceServerException, match="message_bytes_max"):
                client.infer("digits", [image(items=2**15)])
            assert client.infer("digits", [image(items=2**13)]).as_numpy("PROBABILITIES").shape == (2**13, 10)

    await ask(system, twice)


async def test_a_head_that_never_ends_is_cut_off_in_time(system, monkeypatch):
    monkeypatch.setattr(http1, "HEAD_S", 1.0)  # longer than a machine stands still between accepting and reading
    for sent in (b"", b"GET /v2 HTTP/1.1\r\n", b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\nGET /"):
        reader, writer = await asyncio.open_connection("127.0.0.1", system.running.rest.port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 200") == (b"live" in sent)
        writer.close()


async def converse(system, *pieces: bytes) -> list[int]:
    """Statuses of all answers to what is sent on one connection, until the dispatcher closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", system.running.rest.port)
    for piece in pieces:
        writer.write(piece)
    answered = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return [int(part[:3]) for part in answered.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]


def request(body: bytes, *headers: str, path: str = INFER) -> bytes:
    return (
        "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers, f"Content-Length: {len(body)}", "", ""]).encode()
        + body
    )


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA")


async def test_an_upgrade_offer_is_ignored_and_what_stands_in_its_body_is_no_request(system):
    assert await converse(system, request(BODY, *H2C) * 2, request(BODY, "Connection: close")) == [200] * 3
    assert len(system.slice.requests) == 3
    assert await converse(system, request(request(BODY), *H2C), request(BODY, "Connection: close")) == [400, 200]
    assert len(system.slice.requests) == 4


async def test_a_client_that_is_refused_before_its_body_is_not_read_on(system):
    """It may send its body or, as it was not asked for it, its next request."""
    hidden, expect = request(BODY), "Expect: 100-continue"
    assert await converse(system, request(hidden, expect, path="/v2/nothing").removesuffix(hidden), hidden) == [404]
    assert not system.slice.requests
    assert await converse(system, request(BODY, expect), request(BODY, "Connection: close")) == [100, 200, 200]


async def test_a_length_of_thousands_of_digits_is_a_number_like_others(system):
    reader, writer = await asyncio.open_connection("127.0.0.1", system.running.rest.port)
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(BODY):05000}\r\n\r\n"
    writer.write(head.encode() + BODY)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_lines_of_one_header_are_one_list(system):
    length = "Inference-Header-Content-Length"
    assert await converse(system, request(BODY, f"{length}: 0", f"{length}: {len(BODY)}", "Connection: close")) == [400]
    assert await converse(system, request(BODY, "Accept: a", "Accept: b", "Connection: close")) == [200]


async def test_stopping_lets_what_is_under_way_finish_and_closes_idle_connections(system):
    local = system.local
    local.settings = local.settings.model_copy(update={"stop_grace_s": 60.0})
    system.slice.latency_s = 0.1
    reader, writer = await asyncio.open_connection("127.0.0.1", system.running.rest.port)
    writer.write(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
    await until(lambda: system.slice.requests)
    await system.running.rest.shutdown()
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    writer.close()
