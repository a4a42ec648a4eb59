"""A foreign Triton repository, adopted by the command and served from the repository that the agent generates."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from tests.support.foreign_models import LINEAR, MINUS, MINUS2, MLP, add, graph
from tests.support.triton_process import ENVIRONMENT, TritonProcess
from trefoil.cli.main import app
from trefoil.core.fleet import Hosted

pytestmark = pytest.mark.integration
READY_S = 60.0
EXPECT = """
import sys
import numpy, onnxruntime
inputs = numpy.load(sys.argv[1])
for graph in sys.argv[2:]:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    feed = {tensor.name: inputs[str(i)] for i, tensor in enumerate(session.get_inputs())}
    numpy.save(graph + ".npy", session.run(None, feed)[0])
"""


@pytest.fixture(scope="module")
def inputs() -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(9)
    return tuple(chance.normal(size=(8, 4)).astype(np.float32) for _ in range(2))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, inputs: tuple[np.ndarray, ...]) -> Path:
    """The foreign repository; beside each graph lies what onnxruntime makes of the inputs, in the graph's own order."""
    root = tmp_path_factory.mktemp("theirs")
    models = {"small": (LINEAR, "linear"), "large": (MLP, "mlp"), "once": (MINUS, "minus"), "twice": (MINUS2, "minus2")}
    graphs = [add(root, name, config, graph(kind)) / "model.onnx" for name, (config, kind) in models.items()]
    np.savez(root / "inputs.npz", **{str(i): array for i, array in enumerate(inputs)})
    argv = [ENVIRONMENT / "bin" / "python3", "-c", EXPECT, root / "inputs.npz", *graphs]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def ours(tmp_path: Path, theirs: Path) -> Path:
    root = tmp_path / "models"
    for words in (
        ["toy=small,large", "--accuracy", "small=0.7", "--accuracy", "large=0.9"],
        ["minus=once,twice", "--accuracy", "once=0.5", "--accuracy", "twice=0.6", "--rename", "twice:right=a"],
    ):
        done = CliRunner().invoke(
            app, ["family", "import", str(theirs), "--slo-ms", "50", "--repository", str(root), "--as", *words]
        )
        assert done.exit_code == 0, done.output
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
async def test_adopted_variants_answer_under_one_name_what_they_answered_before(start, theirs, inputs):
    small, large = Hosted("toy", "small", 1, 0, 1, 1, 8), Hosted("toy", "large", 2, 0, 1, 1, 8)
    triton = start(small)
    server = triton.client()
    await server.wait_ready([small], READY_S)
    answers = {}
    for serving, before in ((small, small), (large, small)):
        await server.swap(before, serving)
        version, answers[serving.variant] = infer(triton.launch.grpc_target, "toy", {"x": inputs[0]}, "y")
        assert version == str(serving.version)
        expected = np.load(theirs / serving.variant / "1" / "model.onnx.npy")
        np.testing.assert_allclose(answers[serving.variant], expected, atol=1e-6)
    assert not np.allclose(answers["small"], answers["large"], atol=1e-3)
    await server.close()


async def test_inputs_that_only_the_user_can_tell_apart_are_not_mixed_up(start, theirs, inputs):
    twice = Hosted("minus", "twice", 2, 0, 1, 1, 8)
    triton = start(twice)
    server = triton.client()
    await server.wait_ready([twice], READY_S)
    left, right = inputs
    _, answer = infer(triton.launch.grpc_target, "minus", {"a": right, "b": left}, "d")
    np.testing.assert_allclose(answer, 2 * (left - right), atol=1e-6)
    np.testing.assert_allclose(answer, np.load(theirs / "twice" / "1" / "model.onnx.npy"), atol=1e-6)
    await server.close()
