"""A foreign Triton repository, imported by the command and served from the repository that the agent generates."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from tests.support.foreign_models import LINEAR, add, graph
from tests.support.triton_process import ENVIRONMENT, TritonProcess
from trefoil.cli.main import app
from trefoil.core.fleet import Hosted
from trefoil.runtime.repository import load_family

pytestmark = pytest.mark.integration
READY_S = 60.0
EXPECT = """
import sys
import numpy, onnxruntime
inputs = numpy.load(sys.argv[1])
for graph in sys.argv[2:]:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    numpy.save(graph + ".npy", session.run(None, {"x": inputs})[0])
"""


@pytest.fixture(scope="module")
def inputs() -> np.ndarray:
    return np.random.default_rng(9).normal(size=(8, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, inputs: np.ndarray) -> Path:
    """The foreign repository; beside each graph lies what onnxruntime makes of the inputs."""
    root = tmp_path_factory.mktemp("theirs")
    models = {"small": "linear", "large": "mlp"}
    graphs = [add(root, name, LINEAR, graph(kind)) / "model.onnx" for name, kind in models.items()]
    np.save(root / "inputs.npy", inputs)
    argv = [ENVIRONMENT / "bin" / "python3", "-c", EXPECT, root / "inputs.npy", *graphs]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def ours(tmp_path: Path, theirs: Path) -> Path:
    root = tmp_path / "models"
    words = ["--as", "toy=small,large", "--accuracy", "small=0.7", "--accuracy", "large=0.9", "--slo-latency-ms", "50"]
    done = CliRunner().invoke(app, ["family", "import", str(theirs), *words, "--repository", str(root), "--assume"])
    assert done.exit_code == 0, done.output
    assert "large: 3.5e-05 M multiply-adds, 4 kernels" in done.output, "4 x 5 + 5 x 3, as ONNX Runtime counts"
    assert {row.variant for row in load_family(root / "toy")[1]} == {"small", "large"}
    return root


@pytest.fixture
def start(tmp_path: Path, ours: Path) -> Iterator[TritonProcess]:
    started: list[TritonProcess] = []

    def launch(hosted: Hosted) -> TritonProcess:
        started.append(TritonProcess(tmp_path, hosted.version, source=ours, serving=hosted))
        return started[-1]

    yield launch
    for one in started:
        one.close()


def infer(target: str, family: str, tensors: dict[str, np.ndarray], output: str) -> tuple[str, np.ndarray]:
    message = service_pb2.ModelInferRequest(model_name=family)
    for name, array in tensors.items():
        message.inputs.add(name=name, datatype="FP32", shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    with grpc.insecure_channel(target) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=READY_S)
    assert [one.name for one in reply.outputs] == [output]
    return reply.model_version, np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(reply.outputs[0].shape)


@pytest.mark.gate
async def test_imported_variants_answer_under_one_name_what_they_answered_before(start, theirs, inputs):
    small, large = Hosted("toy", "small", 1, 0, 1, 1, 8), Hosted("toy", "large", 2, 0, 1, 1, 8)
    triton = start(small)
    server = triton.client()
    await server.wait_ready([small], READY_S)
    answers = {}
    for serving, before in ((small, small), (large, small)):
        await server.swap(before, serving)
        version, answers[serving.variant] = infer(triton.launch.grpc_target, "toy", {"x": inputs}, "y")
        assert version == str(serving.version)
        expected = np.load(theirs / serving.variant / "1" / "model.onnx.npy")
        np.testing.assert_allclose(answers[serving.variant], expected, atol=1e-6)
    assert not np.allclose(answers["small"], answers["large"], atol=1e-3)
    await server.close()
