"""From `trefoil up` to the first right answer, through clients that know nothing of Trefoil."""

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as rest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.system.conftest import Serving
from tests.support.system import FAMILY, pss_bytes
from tests.support.triton_process import NAMES, expected, heldout

pytestmark = pytest.mark.integration

FIRST_ANSWER_S_MAX = 30.0
MEMORY_BYTES_MAX = 3 * 2**30
VERSION_OF = {name: version for version, name in enumerate(NAMES, 1)}
ENOUGH = 48  # requests: both variants of the plan answer some


def inputs(rows: np.ndarray) -> list[triton.InferInput]:
    tensor = triton.InferInput("IMAGE", list(rows.shape), "UINT8")
    tensor.set_data_from_numpy(rows)
    return [tensor]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[int, np.ndarray]:
    """Probabilities by onnxruntime itself."""
    return expected(tmp_path_factory.mktemp("expected"))


def check(answer: triton.InferResult, index: slice, right: dict[int, np.ndarray]) -> str:
    """The very numbers that the variant which answered gives; returns its name."""
    variant: str = answer.get_response().parameters["trefoil_variant"].string_param
    got = answer.as_numpy("PROBABILITIES")
    assert got.shape == (index.stop - index.start, 10)
    np.testing.assert_allclose(got, right[VERSION_OF[variant]][index], atol=1e-5)
    return variant


def test_the_first_answer_comes_within_thirty_seconds_of_up(running: Serving):
    system = running.system
    print(f"first answer after {system.started['first_answer_s']} s, `trefoil up` took {system.up_took_s:.1f} s")
    assert system.started["first_answer_s"] <= FIRST_ANSWER_S_MAX
    assert system.up_took_s <= FIRST_ANSWER_S_MAX


@pytest.mark.gate
def test_a_plain_client_gets_right_values(serving: Serving, right: dict[int, np.ndarray]):
    images, labels = heldout()
    variants, correct = set(), 0
    with triton.InferenceServerClient(serving.system.inference) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(FAMILY)
        for start in range(ENOUGH):
            answer = client.infer(FAMILY, inputs(images[start : start + 1]), client_timeout=10)
            variants.add(check(answer, slice(start, start + 1), right))
            correct += int(answer.as_numpy("PROBABILITIES").argmax() == labels[start])
        whole = client.infer(FAMILY, inputs(images[:8]), request_id="eight", client_timeout=10)
        check(whole, slice(0, 8), right)
        assert whole.get_response().id == "eight"
        with pytest.raises(triton.InferenceServerException, match="no-such-model"):
            client.infer("no-such-model", inputs(images[:1]), client_timeout=10)
    assert variants == {"digits-m", "digits-l"}
    assert correct / ENOUGH > 0.9


def test_a_plain_http_client_gets_right_values(serving: Serving, right: dict[int, np.ndarray]):
    images, _ = heldout()
    tensor = rest.InferInput("IMAGE", [8, 8, 8], "UINT8").set_data_from_numpy(images[:8])
    with rest.InferenceServerClient(serving.system.launch.addresses["rest"]) as client:
        assert client.is_server_ready()
        answer = client.infer(FAMILY, [tensor])
    variant = answer.get_response()["parameters"]["trefoil_variant"]
    np.testing.assert_allclose(answer.as_numpy("PROBABILITIES"), right[VERSION_OF[variant]][:8], atol=1e-5)


def test_perf_analyzer_finds_what_it_asks_for(serving: Serving):
    """Its calls, in its order; what it reads from each stands in src/inference_profiler.cc and client_backend."""
    images, _ = heldout()
    with grpc.insecure_channel(serving.system.inference) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=FAMILY), timeout=10)
        assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("IMAGE", "UINT8", [-1, 8, 8])]
        assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [("PROBABILITIES", "FP32", [-1, 10])]
        assert all(version.isdigit() for version in metadata.versions)
        config = stub.ModelConfig(service_pb2.ModelConfigRequest(name=FAMILY), timeout=10).config
        assert config.name == FAMILY
        assert config.max_batch_size == 8
        assert not config.HasField("ensemble_scheduling")
        assert not config.model_transaction_policy.decoupled
        server = stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=10)
        assert "statistics" in server.extensions
        before = statistics(stub)
        for _ in range(12):
            request = service_pb2.ModelInferRequest(model_name=FAMILY)
            request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
            request.raw_input_contents.append(images[0].tobytes())
            assert len(stub.ModelInfer(request, timeout=10).raw_output_contents[0]) == 40
        after = statistics(stub)
    grown = {part: after[part] - before[part] for part in after}
    assert grown == dict.fromkeys(after, 12), "each window must show its own requests, equal in every part"


def statistics(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> dict[str, int]:
    """Counts of the one public version."""
    answer = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=FAMILY), timeout=10)
    (own,) = answer.model_stats
    assert own.name == FAMILY
    assert int(own.version) == 1
    assert own.inference_stats.queue.ns + own.inference_stats.compute_infer.ns <= own.inference_stats.success.ns * 1.01
    counts = {
        part: getattr(own.inference_stats, part).count
        for part in ("success", "queue", "compute_input", "compute_infer", "compute_output")
    }
    return counts | {"inferences": own.inference_count, "executions": own.execution_count}


def test_everything_together_fits_in_three_gibibytes(serving: Serving):
    used = pss_bytes(serving.system.processes())
    total = sum(used.values())
    print(f"{total / 2**20:.0f} MiB of PSS: " + ", ".join(f"{k} {v / 2**20:.0f}" for k, v in sorted(used.items())))
    assert used["tritonserver"] > 0
    assert total <= MEMORY_BYTES_MAX
