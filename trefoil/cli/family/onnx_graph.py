"""Inputs and outputs of an ONNX file: names, types and shapes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trefoil.core.errors import CatalogError
from trefoil.runtime.given.onnx_file import Malformed, Message, opened_model
from trefoil.runtime.model_files import DIMS_MAX

GRAPH, INITIALIZER, INPUT, OUTPUT = 7, 5, 11, 12  # fields of a model, and of its graph
VALUES_MAX: Final = 1_000_000
ANY: Final = -1
TYPES: Final = {
    1: "TYPE_FP32", 2: "TYPE_UINT8", 3: "TYPE_INT8", 4: "TYPE_UINT16", 5: "TYPE_INT16", 6: "TYPE_INT32",
    7: "TYPE_INT64", 8: "TYPE_STRING", 9: "TYPE_BOOL", 10: "TYPE_FP16", 11: "TYPE_FP64", 12: "TYPE_UINT32",
    13: "TYPE_UINT64", 16: "TYPE_BF16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, type and shape of one input or output of a graph; `dims` with the batch dimension, -1 = any."""

    name: str
    data_type: str
    dims: tuple[int, ...]


def graph_tensors(path: Path, below: Path | None = None) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of an ONNX graph; weights that older files list among the inputs are left out.

    Raises:
        CatalogError: it is no ONNX model.
        OSError: it cannot be read.
    """
    inputs, outputs, weights = list[TensorInfo](), list[TensorInfo](), set[str]()
    with opened_model(path, below) as model:
        for graph in model.messages(GRAPH):
            for number, value in graph.fields():
                if number in (INPUT, OUTPUT) and isinstance(value, Message):
                    (inputs if number == INPUT else outputs).append(_tensor_info(value))
                elif number == INITIALIZER and isinstance(value, Message):
                    weights.add(value.text(8))
                if len(inputs) + len(outputs) + len(weights) > VALUES_MAX:
                    raise Malformed(f"has more than {VALUES_MAX} inputs, outputs and weights")
    if not outputs:
        raise CatalogError(f"{path} is no ONNX model: it has no outputs", remedy="export it again")
    return tuple(one for one in inputs if one.name not in weights), tuple(outputs)


def _tensor_info(value: Message) -> TensorInfo:
    kind, dims = 0, list[int]()
    for tensor in (tensor for type_ in value.messages(2) for tensor in type_.messages(1)):
        kind = tensor.number(1) or 0
        for dim in (dim for shape in tensor.messages(2) for dim in shape.messages(1)):
            size = dim.number(1)
            dims.append(ANY if size is None else size)
            if len(dims) > DIMS_MAX:
                raise Malformed(f"has a tensor of more than {DIMS_MAX} dimensions")
    return TensorInfo(value.text(1), TYPES.get(kind, f"ONNX type {kind}"), tuple(dims))
