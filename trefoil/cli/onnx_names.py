"""Tensor names of an ONNX file: read them, and give a copy others.

Reads the few fields of ONNX's protobuf that are needed (onnx.proto3 of onnx/onnx; protobuf keeps what it does not
know), so that the package onnx need not be installed. A tensor gets its new name by one Identity node between the new
name and the old one: no other node, and no subgraph, has to be touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from trefoil.core.errors import CatalogError

PACKAGE: Final = "trefoil.onnx_view"
ANY: Final = -1
TYPES: Final = {
    1: "TYPE_FP32", 2: "TYPE_UINT8", 3: "TYPE_INT8", 4: "TYPE_UINT16", 5: "TYPE_INT16", 6: "TYPE_INT32",
    7: "TYPE_INT64", 8: "TYPE_STRING", 9: "TYPE_BOOL", 10: "TYPE_FP16", 11: "TYPE_FP64", 12: "TYPE_UINT32",
    13: "TYPE_UINT64", 16: "TYPE_BF16",
}  # fmt: skip
# message -> field -> (number, type, repeated)
FIELDS: Final[dict[str, dict[str, tuple[int, str, bool]]]] = {
    "Dim": {"dim_value": (1, "int64", False)},
    "Shape": {"dim": (1, "Dim", True)},
    "Tensor": {"elem_type": (1, "int32", False), "shape": (2, "Shape", False)},
    "Type": {"tensor_type": (1, "Tensor", False)},
    "Value": {"name": (1, "string", False), "type": (2, "Type", False)},
    "Weights": {"name": (8, "string", False)},
    "Node": {"input": (1, "string", True), "output": (2, "string", True), "op_type": (4, "string", False)},
    "Graph": {
        "node": (1, "Node", True),
        "initializer": (5, "Weights", True),
        "input": (11, "Value", True),
        "output": (12, "Value", True),
    },
    "Model": {"graph": (7, "Graph", False)},
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output of a graph; `dims` with the batch dimension, -1 = any."""

    name: str
    data_type: str
    dims: tuple[int, ...]


@cache
def _model_class() -> Any:
    """The message class of a model, with these fields only."""
    field_type = descriptor_pb2.FieldDescriptorProto
    scalars = {"int32": field_type.TYPE_INT32, "int64": field_type.TYPE_INT64, "string": field_type.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(name="trefoil_onnx_view.proto", package=PACKAGE, syntax="proto2")
    for message, fields in FIELDS.items():
        entry = file.message_type.add(name=message)
        for name, (number, kind, repeated) in fields.items():
            label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            field = entry.field.add(
                name=name, number=number, label=label, type=scalars.get(kind, field_type.TYPE_MESSAGE)
            )
            if kind not in scalars:
                field.type_name = f".{PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Model"))


def _read(path: Path) -> Any:
    try:
        model = _model_class().FromString(path.read_bytes())
    except DecodeError as error:
        raise CatalogError(f"{path} is no ONNX model: {error}", remedy="export it again") from error
    if not model.graph.output:
        raise CatalogError(f"{path} is no ONNX model: it has no outputs", remedy="export it again")
    return model


def tensors(path: Path) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of a graph; weights that older files list among the inputs are left out.

    Raises:
        CatalogError: it is no ONNX model.
        OSError: it cannot be read.
    """
    graph = _read(path).graph
    weights = {one.name for one in graph.initializer}
    return tuple(_info(v) for v in graph.input if v.name not in weights), tuple(_info(v) for v in graph.output)


def _info(value: Any) -> TensorInfo:
    tensor = value.type.tensor_type
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else ANY for dim in tensor.shape.dim)
    return TensorInfo(value.name, TYPES.get(tensor.elem_type, f"ONNX type {tensor.elem_type}"), dims)


def renamed(path: Path, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> bytes:
    """The graph with its tensors under new names (old -> new; names that stay need no entry).

    Raises:
        CatalogError: it is no ONNX model, or has another tensor of a new name inside.
    """
    model = _read(path)
    graph = model.graph
    inside = {name for node in graph.node for name in node.output} | {one.name for one in graph.initializer}
    inside |= {value.name for value in graph.input}
    for old, new in (*inputs.items(), *outputs.items()):
        if old != new and new in inside:
            raise CatalogError(
                f"{path}: {old} cannot become {new}, because the graph has another tensor of that name inside",
                field="name",
                value=old,
                remedy="export it again with the family's names",
            )
    before = [_identity(new, old) for old, new in inputs.items() if old != new]
    after = [_identity(old, new) for old, new in outputs.items() if old != new]
    for values, names in ((graph.input, inputs), (graph.output, outputs)):
        for value in values:
            value.name = names.get(value.name, value.name)
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def _identity(source: str, target: str) -> Any:
    node = type(_model_class()().graph.node.add())()
    node.input.append(source)
    node.output.append(target)
    node.op_type = "Identity"
    return node
