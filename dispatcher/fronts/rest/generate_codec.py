"""JSON of the generate extension on one side, ModelInferRequest and -Response on the other. Pure.

A key of the JSON object is an input of the model, or else a parameter; so are those of its member `parameters`. An
answer is one object: id, model, parameters and outputs by name; an output of one element stands without its list.
"""

from collections.abc import Mapping
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.rest import codec, json_text, tensors
from dispatcher.transport.core import kserve_wire
from trefoil.core.errors import InvalidInput, TrefoilError

PARAMETERS: Final = "parameters"


def read(body: bytes, metadata: bytes, model: str, version: str) -> bytes:
    """Read a body as the bytes of a ModelInferRequest; `metadata`: bytes of a ModelMetadataResponse. Raises like
    `json_text.parse` and `encode`."""
    return encode(json_text.parse(body), pb.ModelMetadataResponse.FromString(metadata), model, version)


def write(answer: bytes) -> bytes:
    """Write the bytes of a ModelInferResponse as a body. Raises like `decode`."""
    return codec.dumps(decode(pb.ModelInferResponse.FromString(answer)))


def encode(given: Mapping[str, Any], metadata: Any, model: str, version: str = "") -> bytes:
    """Encode a JSON object as the bytes of a ModelInferRequest for a model with this metadata.

    Raises:
        InvalidInput: naming the key.
    """
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    inputs = {tensor.name: tensor for tensor in metadata.inputs}
    if PARAMETERS in inputs:
        raise InvalidInput(
            "keyword for nested schema also given as input tensor name", field=PARAMETERS, remedy="use /infer"
        )
    message.id = codec.member(given, "id", str, "request", "")
    rest = {name: value for name, value in given.items() if name not in ("id", PARAMETERS)}
    for values in (rest, codec.member(given, PARAMETERS, dict, "request", {})):
        for name, value in values.items():
            if name in inputs:
                _add(message, inputs[name], value)
        codec.set_parameters(message, {name: value for name, value in values.items() if name not in inputs})
    return bytes(message.SerializeToString())


def _add(message: Any, tensor: Any, value: Any) -> None:
    """Add an input: elements fill fixed sizes, what is left goes to the innermost open one."""
    elements = value if type(value) is list else [value]
    left, odd = len(elements), 0
    for size in tensor.shape:
        if size >= 0 and not odd:
            left, odd = divmod(left, size) if size else (0, 1)
    shape = []
    for size in reversed(tensor.shape):
        shape.append(left if size < 0 else size)
        left = 1 if size < 0 else left
    if odd or left != 1:
        raise InvalidInput(
            f"{len(elements)} elements do not fill the shape {list(tensor.shape)}", field=tensor.name,
            remedy="send one value, or a list of as many as the shape has (-1 = any number)",
        )  # fmt: skip
    raw = tensors.to_bytes(tensor.name, tensor.datatype, shape[::-1], elements)
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape[::-1])
    message.raw_input_contents.append(raw)


def decode(answer: Any) -> dict[str, Any]:
    """Decode a ModelInferResponse; texts that are not UTF-8 keep their bytes as lone surrogates.

    Raises:
        InvalidInput, TrefoilError: as `tensors.from_bytes`.
    """
    if len(answer.raw_output_contents) != len(answer.outputs):
        raise TrefoilError(f"{len(answer.outputs)} outputs came with {len(answer.raw_output_contents)} contents")
    found = {name: codec.parameter_value(each) for name, each in answer.parameters.items()}
    found.pop(kserve_wire.IS_FINAL, None)
    for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        elements = tensors.from_bytes(tensor.name, tensor.datatype, tensor.shape, raw)
        found[tensor.name] = elements[0] if len(elements) == 1 else elements
    found |= {"model_name": answer.model_name, "model_version": answer.model_version}
    if answer.id:
        found["id"] = answer.id
    return dict(sorted(found.items()))
