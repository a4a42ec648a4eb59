"""Families as their scripts export them, with random weights, served by the real Triton, compared value by value.

EfficientNet B1, B3, B5, B7 and ALBERT base, large, xlarge, xxlarge: the architectures of CLOVER's applications that may
be shipped. Yolo's licence lets us ship neither; how far its script runs is told in model_repository/yolo/README.md.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype

from tests.support.exported import exported
from tests.support.triton_process import ENVIRONMENT, MODELS, TritonProcess
from trefoil.core.fleet import Hosted
from trefoil.runtime.repository import load_family

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LOAD_S = 240.0
VERSIONS = (1, 2, 3, 4)
EXPECT = """
import sys
import numpy, onnxruntime
inputs = dict(numpy.load(sys.argv[1]))
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
answers = {}
for version in "1234":
    session = onnxruntime.InferenceSession(
        f"{sys.argv[2]}/{version}/model.onnx", options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    for name, values in zip(names, session.run(names, inputs)):
        answers[version + " " + name] = values
    del session
numpy.savez(sys.argv[3], **answers)
"""
Tensors = Mapping[str, np.ndarray]


def two_pictures() -> Tensors:
    """Two smooth pictures uint8 [2,224,224,3]."""
    coarse = np.random.default_rng(5).integers(0, 256, (2, 7, 7, 3), np.uint8)
    return {"IMAGE": np.ascontiguousarray(coarse.repeat(32, axis=1).repeat(32, axis=2))}


def two_questions() -> Tensors:
    """Two questions of another length than the one that the script traced; the second one is padded."""
    ids = np.random.default_rng(5).integers(5, 30000, (2, 20))
    mask, types = np.ones_like(ids), np.zeros_like(ids)
    types[:, 8:] = 1
    mask[1, 15:] = 0
    return {"INPUT_IDS": ids, "ATTENTION_MASK": mask, "TOKEN_TYPE_IDS": types}


@dataclass(frozen=True)
class Case:
    """A family, what it is asked, and what it answers."""

    family: str
    inputs: Callable[[], Tensors]
    outputs: tuple[str, ...]

    def hosted(self, version: int) -> Hosted:
        variant = next(v for v in load_family(MODELS / self.family)[0].variants if v.version == version)
        return Hosted(self.family, variant.name, version, 0, 1, 1, 8)

    def repository(self, root: Path) -> Path:
        """The shipped family with its exported versions, as its script leaves it."""
        root.mkdir()
        (root / "_shared").symlink_to(MODELS / "_shared")
        (root / self.family).mkdir()
        for name in ("config.pbtxt", "family.toml"):
            shutil.copyfile(MODELS / self.family / name, root / self.family / name)
        for version in exported(self.family).iterdir():
            shutil.copytree(version, root / self.family / version.name)  # files are below their repository
        return root

    def expected(self, models: Path, folder: Path) -> dict[int, Tensors]:
        """Answers of every version, by onnxruntime itself in Triton's environment."""
        np.savez(folder / "inputs.npz", **self.inputs())
        argv = [ENVIRONMENT / "bin" / "python3", "-c", EXPECT, folder / "inputs.npz", models / self.family]
        done = subprocess.run(
            [*argv, folder / "o.npz"], capture_output=True, text=True, timeout=900, check=False, cwd=folder
        )
        assert done.returncode == 0, done.stderr
        with np.load(folder / "o.npz") as data:
            return {v: {name: data[f"{v} {name}"] for name in self.outputs} for v in VERSIONS}

    def infer(self, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> tuple[str, Tensors]:
        message = service_pb2.ModelInferRequest(model_name=self.family)
        for name, values in self.inputs().items():
            message.inputs.add(name=name, datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
            message.raw_input_contents.append(values.tobytes())
        reply = stub.ModelInfer(message, timeout=LOAD_S)
        shapes = {output.name: tuple(output.shape) for output in reply.outputs}
        raw = zip(shapes, reply.raw_output_contents, strict=True)
        return reply.model_version, {name: np.frombuffer(data, "<f4").reshape(shapes[name]) for name, data in raw}


EFFICIENTNET = Case("efficientnet", two_pictures, ("LOGITS",))
ALBERT = Case("albert", two_questions, ("START_LOGITS", "END_LOGITS"))


@pytest.mark.timeout(2400)  # a new machine first creates the environment that exports, and exports
@pytest.mark.parametrize("case", [EFFICIENTNET, ALBERT], ids=lambda case: case.family)
async def test_all_four_variants_load_and_answer_what_onnxruntime_answers(case: Case, tmp_path: Path) -> None:
    models = case.repository(tmp_path / "models")
    expected = case.expected(models, tmp_path)
    for name in case.outputs:
        say_something({version: answers[name] for version, answers in expected.items()})

    triton = TritonProcess(tmp_path / "triton", 1, source=models, serving=case.hosted(1))
    server = triton.client()
    try:
        await server.wait_ready([case.hosted(1)], LOAD_S)
        with grpc.insecure_channel(triton.launch.grpc_target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for version in VERSIONS:
                if version > 1:
                    await server.swap(case.hosted(version - 1), case.hosted(version), timeout_s=LOAD_S)
                served, answers = case.infer(stub)
                assert served == str(version)
                for name in case.outputs:
                    scale = np.abs(expected[version][name]).max()
                    np.testing.assert_allclose(answers[name], expected[version][name], rtol=0, atol=2e-3 * scale)
        assert [(c.family, c.version) for c in await server.statistics()] == [(case.family, 4)]
    finally:
        await server.close()
        triton.close()


def say_something(values: Mapping[int, np.ndarray]) -> None:
    """Values that vanish, ignore their input or are the same for all versions would make equality prove nothing."""
    for version, logits in values.items():
        largest = np.abs(logits).max()
        assert np.isfinite(logits).all()
        assert logits.std() > 0.01, f"version {version}: these logits vanish"
        assert np.abs(logits[0] - logits[1]).max() > 0.01 * largest, f"version {version} hardly looks at its input"
        for other in values:
            assert other == version or not np.allclose(logits, values[other], rtol=0.1, atol=0.1 * largest)
