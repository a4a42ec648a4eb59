"""Inputs and outputs of an ONNX file: names, types and shapes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tritonclient.grpc import model_config_pb2

from trefoil.core.errors import CatalogError
from trefoil.runtime.given.onnx_file import Malformed, Message, opened_model
from trefoil.runtime.model_files import DIMS_MAX, graph_dims

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


Graph = tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]
"""Inputs and outputs of a graph."""


def graph_tensors(path: Path, below: Path | None = None) -> Graph:
    """Inputs and outputs of an ONNX graph; weights that older files list among the inputs are left out.

    Raises:
        CatalogError: it is not an ONNX model.
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
        raise CatalogError(f"{path} is not an ONNX model: it has no outputs", remedy="export it again")
    return tuple(one for one in inputs if one.name not in weights), tuple(outputs)


def _tensor_info(value: Message) -> TensorInfo:
    kind, dims = 0, list[int]()  # 0: no tensor
    for tensor in (tensor for type_ in value.messages(2) for tensor in type_.messages(1)):
        kind = tensor.number(1) or 0
        for dim in (dim for shape in tensor.messages(2) for dim in shape.messages(1)):
            size = dim.number(1)
            dims.append(ANY if size is None else size)
            if len(dims) > DIMS_MAX:
                raise Malformed(f"has a tensor of more than {DIMS_MAX} dimensions")
    return TensorInfo(value.text(1), TYPES.get(kind, f"ONNX type {kind}" if kind else "a sequence or map"), tuple(dims))


def differences(config: model_config_pb2.ModelConfig, graph: Graph) -> list[tuple[str, object, str, str]]:
    """Where a graph differs from a configuration: field, its value there, why it cannot be served, what to do."""
    found = list[tuple[str, object, str, str]]()
    for kind, configured, tensors in (("input", config.input, graph[0]), ("output", config.output, graph[1])):
        there = {tensor.name: tensor for tensor in tensors}
        for tensor in configured:
            if tensor.name not in there:
                why = f"{tensor.name} is not in its graph, which has {', '.join(there)}"
                found.append((kind, tensor.name, why, "write the graph's names into its config.pbtxt"))
            else:
                found += _difference(config.max_batch_size, tensor, there[tensor.name])
        if kind == "input" and (more := sorted(set(there) - {tensor.name for tensor in configured})):
            why = f"its graph also wants {', '.join(more)}"
            found.append((kind, more, why, "list all inputs of the graph in its config.pbtxt"))
    return found


def _difference(batch_max: int, configured: Any, graph: TensorInfo) -> list[tuple[str, object, str, str]]:
    name, kind = str(configured.name), model_config_pb2.DataType.Name(configured.data_type)
    if graph.data_type != kind:
        why = f"{name} is {graph.data_type} in its graph, the contract says {kind}"
        return [(f"{name}.data_type", kind, why, f"write {graph.data_type} into its config.pbtxt")]
    dims = [*([ANY] if batch_max > 0 else []), *graph_dims(configured)]
    have = list(graph.dims)
    batch_fits = batch_max < 1 or have[:1] in ([ANY], [batch_max if batch_max == 1 else ANY])
    rest = (have[1:], dims[1:]) if batch_max > 0 else (have, dims)
    fits = len(have) == len(dims) and all(ANY in pair or pair[0] == pair[1] for pair in zip(*rest, strict=True))
    if not graph.dims or (fits and batch_fits):
        return []
    why = f"{name} is {have} in its graph, the contract says {dims}"
    remedy = "fix its config.pbtxt, or export it with these shapes"
    if fits:
        remedy = "export it with a batch dimension of any size, or write max_batch_size: 0 and dims with the first one"
    return [(f"{name}.dims", list(configured.dims), why, remedy)]
