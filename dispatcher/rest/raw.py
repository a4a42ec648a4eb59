"""A body that is nothing but the data of a model's only input: Triton's raw binary request. Pure."""

import math
from collections.abc import Sequence
from typing import Any, Final

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from dispatcher import wire
from dispatcher.contracts import BYTES_PER_ELEMENT
from dispatcher.rest.codec import RAW_INPUT_FIELD, Form
from trefoil.core.errors import InvalidInput

ALL_BINARY: Final = Form(others=True)


def decode(body: bytes, config: Any, version: str) -> bytes:
    """The bytes of a ModelInferRequest whose shape follows from the body's size. `config`: the model's ModelConfig.

    Raises:
        InvalidInput: the model has several inputs, or the size fits no shape.
    """
    if len(config.input) != 1:
        raise InvalidInput(
            f"Raw request must only have 1 input to be deduced, and '{config.name}' has {len(config.input)}",
            field="Inference-Header-Content-Length", remedy="send a JSON header",
        )  # fmt: skip
    (only,) = config.input
    datatype = model_config_pb2.DataType.Name(only.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
    shape = _shape(only.dims, datatype, len(body))
    message = pb.ModelInferRequest(model_name=config.name, model_version=version)
    message.inputs.add(name=only.name, datatype=datatype, shape=[1, *shape] if config.max_batch_size else shape)
    if datatype == "BYTES":
        body = len(body).to_bytes(4, "little") + body
    return b"".join((message.SerializeToString(), RAW_INPUT_FIELD, wire.length(len(body)), body))


def _shape(dims: Sequence[int], datatype: str, size: int) -> list[int]:
    """One item's shape: at most one dimension is open."""
    elements, odd = (1, 0) if datatype == "BYTES" else divmod(size, BYTES_PER_ELEMENT[datatype])
    known = math.prod(dim for dim in dims if dim >= 0)
    open_ones = sum(dim < 0 for dim in dims)
    free = elements // known if open_ones and known else 1
    if odd or open_ones > 1 or known * free != elements:
        raise InvalidInput(
            f"{size} bytes of {datatype} are not one item of shape {list(dims)}", field="body",
            remedy="send a JSON header with the shape",
        )  # fmt: skip
    return [free if dim < 0 else dim for dim in dims]
