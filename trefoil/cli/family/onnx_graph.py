"""Inputs and outputs of an ONNX file: names, types and shapes.

Reads the few fields of ONNX's protobuf that are needed (onnx.proto3 of onnx/onnx; protobuf skips what it does not
know), so that the package onnx need not be installed.
"""

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
    "Graph": {
        "initializer": (5, "Weights", True),
        "input": (11, "Value", True),
        "output": (12, "Value", True),
    },
    "Model": {"graph": (7, "Graph", False)},
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, type and shape of one input or output of a graph; `dims` with the batch dimension, -1 = any."""

    name: str
    data_type: str
    dims: tuple[int, ...]


@cache
def _model_class() -> Any:
    """The protobuf class of a model, with the fields of FIELDS only."""
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


def _read_model(path: Path) -> Any:
    try:
        model = _model_class().FromString(path.read_bytes())
    except DecodeError as error:
        raise CatalogError(f"{path} is no ONNX model: {error}", remedy="export it again") from error
    if not model.graph.output:
        raise CatalogError(f"{path} is no ONNX model: it has no outputs", remedy="export it again")
    return model


def graph_tensors(path: Path) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of an ONNX graph; weights that older files list among the inputs are left out.

    Raises:
        CatalogError: it is no ONNX model.
        OSError: it cannot be read.
    """
    graph = _read_model(path).graph
    weights = {one.name for one in graph.initializer}
    return tuple(_tensor_info(v) for v in graph.input if v.name not in weights), tuple(
        _tensor_info(v) for v in graph.output
    )


def _tensor_info(value: Any) -> TensorInfo:
    tensor = value.type.tensor_type
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else ANY for dim in tensor.shape.dim)
    return TensorInfo(value.name, TYPES.get(tensor.elem_type, f"ONNX type {tensor.elem_type}"), dims)
