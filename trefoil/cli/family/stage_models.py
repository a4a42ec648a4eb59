"""Stages of a family's graph as separate Triton models, in a model repository."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trefoil.cli.family.onnx_graph import graph_tensors
from trefoil.core.errors import CatalogError
from trefoil.core.fleet import stage_model
from trefoil.runtime.model_files import CONFIG, FILES, contract


def write_stage_models(
    model: Path, stages: Sequence[Path], shapes: Sequence[tuple[int, ...]], batch: int, repository: Path
) -> list[str]:
    """Write stages of `<family>/<version>/model.onnx` as `<family>@<n>of<stages>`; returns these names. The first
    stage's inputs and the last stage's outputs are as in the family's contract. `shapes`: of each stage's output, for
    `batch` items.

    Raises:
        CatalogError: the model is in no family, or its family has no tensor contract. Or items are not the first
            dimension of what one stage passes to the next.
    """
    source, version, names = model.absolute().parent.parent, model.absolute().parent.name, list[str]()
    if not version.isdecimal():
        remedy = "name <family>/<version>/model.onnx, or leave out --repository"
        raise CatalogError("is not a version of a family", field="MODEL", value=str(model), remedy=remedy)
    family = contract(source.parent, source.name)
    for shape in shapes[:-1]:
        if shape[:1] != (batch,):
            remedy = "another number of stages, or serve it whole"
            raise CatalogError(f"{batch} items are not first in what is cut", field="shape", value=shape, remedy=remedy)
    for stage, path in enumerate(stages):
        config = model_config_pb2.ModelConfig()
        config.CopyFrom(family)
        config.name = stage_model(source.name, stage, len(stages))
        between = (shapes[stage - 1][1:], shapes[stage][1:])
        for whole, tensors, dims in zip((config.input, config.output), graph_tensors(path), between, strict=True):
            own = {tensor.name: list(tensor.dims) for tensor in whole}
            del whole[:]
            for one in tensors:
                kind = model_config_pb2.DataType.Value(one.data_type)
                whole.add(name=one.name, data_type=kind, dims=own.get(one.name, dims))
        folder = repository / config.name
        (folder / version).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / version / FILES["onnxruntime"])
        (folder / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")
        names.append(config.name)
    return names
