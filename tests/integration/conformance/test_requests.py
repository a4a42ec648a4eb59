"""What unary requests carry, right or wrong: what Triton itself answers is the measure."""

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support.special_models import CONFIGS, LABELS
from tests.support.special_world import raw

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def test_what_probes_send_is_answered_by_every_kind_of_model(world, tritons):
    """A probe that is refused would readmit a slice whose model is dead."""
    async with grpc.aio.insecure_channel(tritons[0].target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name in CONFIGS:
            probe = world.running.contracts.known(name).zeros(name)
            told = [answer.error_message async for answer in stub.ModelStreamInfer(iter([probe]), timeout=20)]
            assert not any(told), name


async def test_classification_comes_back_as_triton_gives_it(world, tritons):
    async def ask(address: str):
        tensor = triton.InferInput("SCORES", [2, 4], "FP32")
        tensor.set_data_from_numpy(np.array([[0.1, 0.2, 0.3, 0.4], [4, 3, 2, 1]], np.float32))
        async with triton.InferenceServerClient(address) as client:
            wanted = [triton.InferRequestedOutput("SCORES", class_count=2)]
            return (await client.infer("scores", [tensor], outputs=wanted)).as_numpy("SCORES").tolist()

    got = await ask(world.address)
    assert got == await ask(tritons[0].target)
    assert got[0][0].decode().endswith(f":3:{LABELS[3]}")


async def test_parameters_and_the_request_id_reach_the_model_without_ours(world):
    tensor = triton.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"polly"]], np.object_))
    ours = {"trefoil_class": "gold", "trefoil_min_accuracy": 0.0, "trefoil_slo_ms": 100.0, "trefoil_receipt": True}
    theirs = {"temperature": 3, "mood": "grim", "loud": True, "share": 0.25}
    async with triton.InferenceServerClient(world.address) as client:
        result = await client.infer("parrot", [tensor], request_id="mine", parameters={**ours, **theirs})
    said = result.as_numpy("PARAMETERS").ravel()[0].decode()
    assert '"mine"' in said
    for name, value in theirs.items():
        assert f'"{name}": {str(value).lower()}' in said or f'"{name}": "{value}"' in said
    assert "trefoil" not in said


def scores(id_: str = "", parameters=(), shape=(1, 4), datatype: str = "FP32", size: int = 16, name: str = "SCORES"):
    """A ModelInferRequest of the model `scores`, right or wrong."""
    request = raw("scores", id_, parameters)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(np.arange(size // 4, dtype=np.float32).tobytes())
    return request


def typed():
    request = pb.ModelInferRequest(model_name="scores", id="typed")
    tensor = request.inputs.add(name="SCORES", datatype="FP32", shape=[1, 4])
    tensor.contents.fp32_contents.extend([4, 3, 2, 1])
    return request


def wanting(name: str, **parameters: int):
    request = scores("wanting")
    output = request.outputs.add(name=name)
    for key_, value in parameters.items():
        output.parameters[key_].int64_param = value
    return request


def with_uint64(name: str, value: int):
    request = scores("uint64")
    request.parameters[name].uint64_param = value
    return request


UNARY = {
    "without an id": scores(),
    "with an id": scores("me"),
    "a batch": scores("b", shape=(3, 4), size=48),
    "typed contents": typed(),
    "one output": wanting("SCORES"),
    "classes": wanting("SCORES", classification=3),
    "priority": with_uint64("priority", 1),
    "timeout": scores("t", {"timeout": 10_000_000}),
    "own parameter": scores("o", {"mood": 3}),
    "no such output": wanting("NOTHING"),
    "no such input": scores("n", name="NOTHING"),
    "no input": raw("scores", "none"),
    "wrong type": scores("w", datatype="INT32"),
    "wrong shape": scores("w", shape=(1, 5), size=20),
    "too large a batch": scores("w", shape=(9, 4), size=9 * 16),
    "too few bytes": scores("w", size=12),
    "reserved parameter": scores("r", {"triton_mood": True}),
    "a parameter that Triton has no type for": with_uint64("mood", 7),
    "unknown model": raw("nothing", "u", VALUE=1),
    "decoupled": raw("repeat", "d", COUNT=1, DELAY_MS=0),
}


async def unary(address: str, compression=None) -> dict:
    told = {}
    async with grpc.aio.insecure_channel(address, compression=compression) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, request in UNARY.items():
            try:
                answer = await stub.ModelInfer(request, timeout=20)
            except grpc.aio.AioRpcError as error:
                told[name] = (error.code(), error.details().partition(". Remedy:")[0])
            else:
                answer.ClearField("model_version")
                answer.parameters.pop("trefoil_variant", None)
                told[name] = answer
    return told


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.gate
async def test_a_unary_request_gets_what_triton_itself_answers_right_or_wrong(world, tritons, compression):
    expected, told = await unary(tritons[0].target), await unary(world.address, compression)
    for name in UNARY:
        assert told[name] == expected[name], name
    assert sum(isinstance(answer, tuple) for answer in told.values()) == 11
    assert not world.local.health.ejections.reasons(), "what clients do wrong says nothing of a slice"


async def test_health_ignores_the_name_of_a_service_as_triton_does(world, tritons):
    names = ("", "inference.GRPCInferenceService", "grpc.health.v1.Health", "scores", "triton", "née", "x" * 5000)
    answers = []
    for address in (world.address, tritons[0].target):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20) for name in names]
            answers.append([(await each).status for each in asked])
    assert answers[0] == answers[1] == [health_pb2.HealthCheckResponse.SERVING] * len(names)


async def test_metadata_and_configuration_are_tritons_under_the_public_version(world, tritons):
    async with (
        triton.InferenceServerClient(world.address) as ours,
        triton.InferenceServerClient(tritons[0].target) as theirs,
    ):
        for name in CONFIGS:
            mine, other = await ours.get_model_metadata(name), await theirs.get_model_metadata(name)
            assert list(mine.versions) == ["1"]
            assert (mine.name, mine.platform) == (other.name, other.platform)
            assert (list(mine.inputs), list(mine.outputs)) == (list(other.inputs), list(other.outputs))
            mine, other = (await ours.get_model_config(name)).config, (await theirs.get_model_config(name)).config
            for part in ("name", "backend", "max_batch_size", "input", "output", "model_transaction_policy"):
                assert getattr(mine, part) == getattr(other, part), (name, part)
            assert mine.HasField("sequence_batching") == other.HasField("sequence_batching")
            idle = "max_sequence_idle_microseconds"
            assert getattr(mine.sequence_batching, idle) == getattr(other.sequence_batching, idle)
