"""Imported models of public kinds, answered by the real Triton: without batches, reshaped, labelled, open, of texts."""

import re
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from power_agent.triton.client import probe_request
from tests.public_reports.imports import ADOPTED
from tests.public_reports.test_imports import imported
from tests.support.triton_process import TritonProcess
from trefoil.core.fleet import Hosted
from trefoil.runtime.model_files import ENGINES, contract, label_files

pytestmark = pytest.mark.integration
READY_S = 120.0
WORDS = ("quickstart", "without batches", "batches of one", "without a config", "open sizes", "folder below", "scalar",
         "texts in", "a python backend", "a label for each")  # fmt: skip


async def test_imported_models_load_and_answer_in_their_shapes(tmp_path: Path) -> None:
    models = [report.input for report in ADOPTED if any(words in report.source for words in WORDS)]
    assert len(models) == len(WORDS)
    served = []
    for number, model in enumerate(models):
        folder = tmp_path / str(number)
        result = imported(model, folder, family=f"f{number}", repository=tmp_path / "ours")
        assert result.exit_code == 0, result.output
        served.append(Hosted(f"f{number}", "m", 1, 0, 1, 1, 8))
    source = tmp_path / "ours"
    triton = TritonProcess(tmp_path, 1, source=source, serving=served[0], more=served[1:])
    server = triton.client()
    try:
        await server.wait_ready(served, READY_S)
        for each in served:
            await server.probe(each.model, 1, READY_S)
        with grpc.insecure_channel(triton.launch.grpc_target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for each in served:
                config = contract(source, each.model)
                assert config.backend != ENGINES
                request = probe_request(config, 1)
                reply = stub.ModelInfer(request, timeout=READY_S)
                batch = [1] if config.max_batch_size else []
                for tensor, answer in zip(config.output, reply.outputs, strict=True):
                    want = [*batch, *tensor.dims]
                    assert all(b in (-1, a) for a, b in zip(answer.shape, want, strict=True)), (each, answer.shape)
                if label_files(config):
                    _classified(stub, request)
    finally:
        await server.close()
        triton.close()


def _classified(stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest) -> None:
    """Triton names the classes by the file of labels."""
    output = request.outputs.add(name="fc6_1")
    output.parameters["classification"].int64_param = 2
    (answer,) = stub.ModelInfer(request, timeout=READY_S).raw_output_contents
    named = re.findall(rb"0\.000000:(\d+):class (\d+)", answer)
    assert len(named) == 2
    assert all(index == name for index, name in named)
