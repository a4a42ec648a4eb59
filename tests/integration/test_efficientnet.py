"""EfficientNet B1, B3, B5 and B7 as their script exports them, served by the real Triton, compared value by value."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.exported import efficientnet
from tests.support.triton_process import ENVIRONMENT, MODELS, TritonProcess
from trefoil.core.fleet import Hosted
from trefoil.runtime.repository import load_family

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LOAD_S = 120.0
EXPECT = """
import sys
import numpy, onnxruntime
pictures = numpy.load(sys.argv[1])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 2
answers = {}
for version in "1234":
    graph = f"{sys.argv[2]}/{version}/model.onnx"
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    answers[version] = session.run(["LOGITS"], {"IMAGE": pictures})[0]
numpy.savez(sys.argv[3], **answers)
"""


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    """Two smooth pictures uint8 [2,224,224,3]."""
    coarse = np.random.default_rng(5).integers(0, 256, (2, 7, 7, 3), np.uint8)
    return np.ascontiguousarray(coarse.repeat(32, axis=1).repeat(32, axis=2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped family with its exported versions, as `make export-efficientnet` leaves it."""
    root = tmp_path_factory.mktemp("models")
    (root / "_shared").symlink_to(MODELS / "_shared")
    (root / "efficientnet").mkdir()
    for name in ("config.pbtxt", "family.toml"):
        (root / "efficientnet" / name).symlink_to(MODELS / "efficientnet" / name)
    for version in efficientnet().iterdir():
        (root / "efficientnet" / version.name).symlink_to(version)
    return root


@pytest.fixture(scope="module")
def expected(models: Path, pictures: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> dict[int, np.ndarray]:
    folder = tmp_path_factory.mktemp("expected")
    np.save(folder / "pictures.npy", pictures)
    argv = [
        ENVIRONMENT / "bin" / "python3",
        "-c",
        EXPECT,
        folder / "pictures.npy",
        models / "efficientnet",
        folder / "o.npz",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "o.npz") as data:
        return {int(version): data[version] for version in data}


@pytest.fixture
def triton(tmp_path: Path, models: Path) -> Iterator[TritonProcess]:
    started = TritonProcess(tmp_path, 1, source=models, serving=hosted(1))
    yield started
    started.close()


def hosted(version: int) -> Hosted:
    variant = next(v for v in load_family(MODELS / "efficientnet")[0].variants if v.version == version)
    return Hosted("efficientnet", variant.name, version, 0, 1, 1, 8)


def infer(stub: service_pb2_grpc.GRPCInferenceServiceStub, pictures: np.ndarray) -> tuple[str, np.ndarray]:
    message = service_pb2.ModelInferRequest(model_name="efficientnet")
    message.inputs.add(name="IMAGE", datatype="UINT8", shape=pictures.shape)
    message.raw_input_contents.append(pictures.tobytes())
    reply = stub.ModelInfer(message, timeout=LOAD_S)
    return reply.model_version, np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(-1, 1000)


@pytest.mark.timeout(1500)  # a new machine first creates the environment that exports
async def test_all_four_variants_load_and_answer_what_onnxruntime_answers(triton, expected, pictures):
    for version, logits in expected.items():
        assert np.isfinite(logits).all()
        assert logits.std() > 0.1, f"version {version}: these logits vanish, so equality would prove nothing"
        spread = np.abs(logits[0] - logits[1]).max()
        assert spread > 0.01 * np.abs(logits).max(), f"version {version} hardly looks at its picture"
    for one in expected:
        for other in expected:
            assert one == other or not np.allclose(expected[one], expected[other], rtol=0.1, atol=0.1)

    server = triton.client()
    await server.wait_ready([hosted(1)], LOAD_S)
    with grpc.insecure_channel(triton.launch.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for version in (1, 2, 3, 4):
            if version > 1:
                await server.swap(hosted(version - 1), hosted(version), timeout_s=LOAD_S)
            served, logits = infer(stub, pictures)
            assert served == str(version)
            scale = np.abs(expected[version]).max()
            np.testing.assert_allclose(logits, expected[version], rtol=0, atol=2e-3 * scale)
    assert [(c.family, c.version) for c in await server.statistics()] == [("efficientnet", 4)]
    await server.close()
