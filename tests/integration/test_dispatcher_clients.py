"""Clients of other makers, unmodified, ask the dispatcher and Triton alone: their answers must be equal.

They need java, node, npm and curl; a test skips, and names the package, where one is not installed.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.integration.test_dispatcher_rest_real import SAME_BYTES, SCORES, without_ours
from tests.support import http_clients
from tests.support.http_clients import HttpRequest
from tests.support.special_models import SpecialTriton
from tests.support.special_world import raw, serving

pytestmark = [pytest.mark.integration, pytest.mark.slow]
MODELS = ("scores", "kinds", "repeat")
PATH = "/v2/models/scores/infer"
INPUT = {"name": "SCORES", "shape": [1, 4], "datatype": "FP32"}
IN_JSON = json.dumps({"inputs": [INPUT | {"data": [0.5, 1, 2, 3]}]}).encode()
HEAD = json.dumps({"inputs": [INPUT | {"parameters": {"binary_data_size": 16}}]}).encode()
BINARY = {"Inference-Header-Content-Length": str(len(HEAD)), "Content-Type": "application/octet-stream"}
REQUESTS = [
    *(HttpRequest("POST", path, body, headers) for path, body, headers in SAME_BYTES.values()),
    HttpRequest("GET", "/v2/models/scores"),
    HttpRequest("GET", "/v2/models/nobody"),
    HttpRequest("POST", PATH, IN_JSON),
    HttpRequest("POST", PATH, IN_JSON, {"Content-Type": "application/json"}),
    HttpRequest("POST", PATH, HEAD + SCORES[0].tobytes(), BINARY),
    HttpRequest("POST", PATH, IN_JSON + b" " * 200_000),
    HttpRequest("POST", PATH, IN_JSON, chunked=True),
    HttpRequest("POST", PATH, HEAD + SCORES[0].tobytes(), BINARY, chunked=True),
    HttpRequest("POST", "/v2/models/repeat/generate_stream", b'{"COUNT": 3, "DELAY_MS": 5}'),
    HttpRequest("POST", "/v2/models/repeat/generate_stream", b'{"COUNT": -2, "DELAY_MS": 0}'),
    HttpRequest("POST", "/v2/models/repeat/generate_stream", b'{"COUNT": 3}'),
]


@dataclass(frozen=True)
class Both:
    """Addresses of the dispatcher and of the Triton behind it."""

    rest: tuple[str, str]
    grpc: tuple[str, str]


@pytest.fixture
async def both(state, tmp_path) -> AsyncIterator[Both]:
    triton = SpecialTriton(tmp_path, 0, 1, MODELS, http=True)
    try:
        await triton.ready()
        async with serving(state, tmp_path, [triton], rest_address="127.0.0.1:0") as world:
            running = world.running
            yield Both((running.rest_address, f"127.0.0.1:{triton.http_port}"), (running.address, triton.target))
    finally:
        triton.close()


CURLS = {
    "curl --http1.1": ("--http1.1",),
    "curl --http2": ("--http2",),
    "curl that expects 100": ("--http1.1", "-H", "Expect: 100-continue"),
    "curl that offers and expects": ("--http2", "-H", "Expect: 100-continue"),
}
REST_CLIENTS = {
    "jdk": http_clients.jdk,
    "node:http": http_clients.node_http,
    "node fetch": http_clients.node_fetch,
    **{
        name: lambda address, requests, options=options: http_clients.curl(address, requests, *options)
        for name, options in CURLS.items()
    },
}


@pytest.mark.parametrize("client", REST_CLIENTS)
async def test_a_rest_client_cannot_tell_the_dispatcher_from_triton(both, client):
    ours, theirs = [await asyncio.to_thread(REST_CLIENTS[client], address, REQUESTS) for address in both.rest]
    different = {
        (request.path, request.body[:80]): (got, expected)
        for request, got, expected in zip(REQUESTS, ours, theirs, strict=True)
        if without_ours(got) != without_ours(expected)
    }
    assert not different
    assert [answer[0] for answer in ours].count(200) >= 7


async def test_http2_with_prior_knowledge_is_refused_at_the_rest_port_as_triton_does(both):
    asked = [HttpRequest("POST", PATH, IN_JSON)]
    for address in both.rest:
        (got,) = await asyncio.to_thread(http_clients.curl, address, asked, "--http2-prior-knowledge")
        assert got[0] in (0, 400)


def messages() -> list[tuple[str, bytes]]:
    """Calls by path: right ones, one of an unknown model, one of another shape."""
    service = "/inference.GRPCInferenceService/"
    infer = pb.ModelInferRequest(model_name="scores", id="7", raw_input_contents=[SCORES[0].tobytes()])
    infer.inputs.add(name="SCORES", datatype="FP32", shape=[1, 4])
    unknown, shape = pb.ModelInferRequest(), pb.ModelInferRequest()
    unknown.CopyFrom(infer)
    unknown.model_name = "nobody"
    shape.CopyFrom(infer)
    shape.inputs[0].shape[1] = 3
    calls = {"ServerLive": [pb.ServerLiveRequest()], "ModelInfer": [infer, unknown, shape]}
    return [(service + name, one.SerializeToString()) for name, asked in calls.items() for one in asked]


@pytest.mark.parametrize("library", ["http2", "grpc-js"])
async def test_a_grpc_client_of_node_cannot_tell_the_dispatcher_from_triton(both, library):
    calls = messages()
    ours, theirs = [await asyncio.to_thread(http_clients.grpc, library, address, calls) for address in both.grpc]
    assert [status for status, _ in ours] == [status for status, _ in theirs]
    (_, live), (_, got), *_ = ours
    (_, live_theirs), (_, expected), *_ = theirs
    assert live == live_theirs
    answers = [pb.ModelInferResponse.FromString(data) for data in (got, expected)]
    for answer in answers:
        answer.parameters.clear()
    assert answers[0] == answers[1]
    assert np.frombuffer(answers[0].raw_output_contents[0], np.float32).tolist() == SCORES[0].tolist()


FINAL = {"triton_enable_empty_final_response": True}
STREAMED = [
    raw("repeat", "two", COUNT=2, DELAY_MS=0),
    raw("repeat", "two and the end", FINAL, COUNT=2, DELAY_MS=0),
    raw("repeat", "none and the end", FINAL, COUNT=0, DELAY_MS=0),
    raw("repeat", "an error", COUNT=-1, DELAY_MS=0),
]


async def test_node_with_protobuf_js_reads_the_answers_of_a_decoupled_family(both, tmp_path):
    """It keeps the last occurrence of a message field, where Python merges all."""
    descriptors = tmp_path / "kserve.binpb"
    files = FileDescriptorSet()
    for module in (model_config_pb2, pb):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    descriptors.write_bytes(files.SerializeToString())
    asked = [each.SerializeToString() for each in STREAMED]
    ours, theirs = [
        await asyncio.to_thread(http_clients.node_streams, address, descriptors, asked) for address in both.grpc
    ]
    variants = []
    for answer in (answer["infer_response"] for answers in ours for answer in answers):
        named = {each["key"]: each["value"] for each in answer.get("parameters", ())}
        if "trefoil_variant" in named:
            variants.append(named.pop("trefoil_variant")["string_param"])
            answer["parameters"] = [{"key": key, "value": value} for key, value in named.items()]
    assert variants == ["v1"] * 5
    assert ours == theirs
    assert [len(answers) for answers in ours] == [2, 3, 1, 2]
