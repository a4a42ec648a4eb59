"""Converts bodies of /infer to ModelInferRequest and from ModelInferResponse, and all other messages to JSON.

A body of /infer is JSON with the binary tensor extension, or only the data of the only input (Triton's raw binary
request).

Pure. It reads a body as Triton's own HTTP server does (its src/http_server.cc). It neither parses nor copies tensors
that came in binary before it joins them to the message.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.rest import tensors
from dispatcher.fronts.rest.json_text import parse
from dispatcher.transport.core import kserve_wire
from trefoil.core.errors import InvalidInput, TrefoilError, shown

Json = Mapping[str, Any]
INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
RAW_INPUT_FIELD: Final = b"\x3a"  # field 7, length-delimited, in ModelInferRequest
_FLAGS: Final = ("sequence_start", "sequence_end")


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Form of the outputs: which go back in binary, those that were asked for by name, and all others."""

    named: Mapping[str, bool] = field(default_factory=dict)
    others: bool = False

    def binary(self, output: str) -> bool:
        """True = after the JSON, False = in it."""
        return self.named.get(output, self.others)

    @property
    def all_binary(self) -> bool:
        """Whether no output's data go back in JSON."""
        return self.others and all(self.named.values())


def decode(body: bytes, header_length: int, model: str, version: str) -> tuple[bytes, OutputForm]:
    """Decode a body into the bytes of a ModelInferRequest, and how its answer is to be written.

    `header_length`: bytes of JSON at the beginning of the body; binary tensors follow.

    Raises:
        InvalidInput: Triton would refuse it too, or would read something else than what was written.
    """
    given = parse(body[:header_length])
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    if "id" in given:
        message.id = member(given, "id", str, "request")
    binary = set_parameters(message, member(given, "parameters", dict, "request", {}))
    raw: list[bytes | memoryview] = []
    rest = memoryview(body)[header_length:]
    for index, each in enumerate(_tensors(given, "inputs")):
        rest = _input(message, index, each, rest, raw)
    if rest.nbytes:
        raise InvalidInput(
            f"unexpected additional input data for model '{model}': {rest.nbytes} bytes belong to no tensor",
            field="Inference-Header-Content-Length", remedy="say every tensor's binary_data_size",
        )  # fmt: skip
    form = OutputForm(_outputs(message, _tensors(given, "outputs", [])), binary)
    parts: list[bytes | memoryview] = [message.SerializeToString()]
    for tensor in raw:
        parts += (RAW_INPUT_FIELD, kserve_wire.length(len(tensor)), tensor)
    return b"".join(parts), form


def encode(data: bytes, form: OutputForm) -> tuple[bytes, int | None]:
    """Encode the bytes of a ModelInferResponse as a body; also the length of its JSON if binary tensors follow it.

    Raises:
        InvalidInput: an output has no JSON form and was not asked for in binary.
        TrefoilError: the message is not sound.
    """
    message = pb.ModelInferResponse.FromString(data)
    answer: dict[str, Any] = {"id": message.id} if message.id else {}
    answer |= {"model_name": message.model_name, "model_version": message.model_version}
    if message.parameters:
        answer["parameters"] = {name: parameter_value(each) for name, each in sorted(message.parameters.items())}
    answer["outputs"], binary = [], []
    contents = message.raw_output_contents
    if len(contents) != len(message.outputs):
        raise TrefoilError(f"{len(message.outputs)} outputs came with {len(contents)} contents")
    for tensor, raw in zip(message.outputs, contents, strict=True):
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if form.binary(tensor.name):
            output["parameters"] = {"binary_data_size": len(raw)}
            if raw:
                binary.append(raw)
        else:
            output["data"] = tensors.from_bytes(tensor.name, tensor.datatype, tensor.shape, raw)
        answer["outputs"].append(output)
    header = dumps(answer)
    return (b"".join((header, *binary)), len(header)) if binary else (header, None)


def dumps(value: Any) -> bytes:
    """Encode compact JSON in UTF-8; bytes that were not UTF-8 come out as they were."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")


def _input(message: Any, index: int, given: Any, rest: memoryview, raw: list[bytes | memoryview]) -> memoryview:
    """Add one input; what is left of the binary data."""
    where = f"inputs[{index}]"
    if type(given) is not dict:
        raise InvalidInput("is not an object", field=where, remedy="send name, datatype, shape and data")
    name = member(given, "name", str, where)
    where = f"inputs[{shown(name)}]"
    parameters = _lenient(given)
    ways = [
        way for way, there in (("data", given), ("binary_data_size", parameters), ("shared_memory_region", parameters))
        if way in there
    ]  # fmt: skip
    if len(ways) != 1:
        raise InvalidInput(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {'set ' + ' '.join(ways) if ways else 'no field is set'}",
            field=where, remedy="send its data one way",
        )  # fmt: skip
    datatype, shape = member(given, "datatype", str, where), member(given, "shape", list, where)
    if len(shape) > kserve_wire.DIMENSIONS_MAX:
        raise InvalidInput(
            "'shape' is longer than any tensor's", field=where, value=len(shape),
            remedy=f"at most {kserve_wire.DIMENSIONS_MAX} sizes",
        )  # fmt: skip
    if not all(type(size) is int and 0 <= size <= INT64_MAX for size in shape):
        raise InvalidInput("Unable to parse 'shape'", field=where, remedy="a list of sizes that are not negative")
    tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
    if ways == ["data"]:
        raw.append(tensors.to_bytes(name, datatype, shape, given["data"]))
    elif ways == ["binary_data_size"]:
        size = _unsigned(parameters, "binary_data_size", where)
        if size > rest.nbytes:
            raise InvalidInput(
                f"unexpected size for input {shown(name)}, expecting {size - rest.nbytes} additional bytes for model "
                f"'{message.model_name}'", field=where, remedy="send binary_data_size bytes after the JSON",
            )  # fmt: skip
        raw.append(rest[:size])
        return rest[size:]
    else:
        _shared_memory(tensor.parameters, parameters, where)
    return rest


def _outputs(message: Any, given: Sequence[Any]) -> dict[str, bool]:
    binary = {}
    for index, each in enumerate(given):
        where = f"outputs[{index}]"
        if type(each) is not dict:
            raise InvalidInput("is not an object", field=where, remedy="send at least a name")
        name = member(each, "name", str, where)
        parameters = _lenient(each)
        tensor = message.outputs.add(name=name)
        # 0 by HTTP is none, by gRPC an error
        if "classification" in parameters and (count := _unsigned(parameters, "classification", where)):
            tensor.parameters["classification"].int64_param = min(count, INT64_MAX)
        if "shared_memory_region" in parameters:
            _shared_memory(tensor.parameters, parameters, where)
        binary[name] = member(parameters, "binary_data", bool, where, False)
    return binary


def _lenient(given: Json) -> Json:
    """Parameters of a tensor: what is not an object, such as null, counts as none, as in Triton; not so a request's."""
    found = given.get("parameters")
    return found if type(found) is dict else {}


def _shared_memory(target: Any, parameters: Json, where: str) -> None:
    """Passed on as it was asked: admission refuses it in its own words."""
    target["shared_memory_region"].string_param = member(parameters, "shared_memory_region", str, where)


def set_parameters(message: Any, given: Json) -> bool:
    """Set a request's parameters; whether outputs that are not named go back in binary."""
    for name, value in given.items():
        where = f"parameters[{shown(name)}]"
        if name == "binary_data_output":
            continue
        target = message.parameters[name]
        if name == "sequence_id" and type(value) is str:
            target.string_param = value
        elif name == "sequence_id":
            number = _unsigned(given, name, "parameters")
            target.int64_param = number if number <= INT64_MAX else number - 2**64  # Triton reads it unsigned
        elif name in _FLAGS:
            target.bool_param = member(given, name, bool, "parameters")
        elif name == "priority":
            target.uint64_param = _unsigned(given, name, "parameters")
        elif name == "timeout":
            target.int64_param = min(_unsigned(given, name, "parameters"), INT64_MAX)
        elif name.startswith("triton_"):
            raise InvalidInput(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified",
                field=where, remedy="leave it out",
            )  # fmt: skip
        elif type(value) is str:
            target.string_param = value
        elif type(value) is bool:
            target.bool_param = value
        elif type(value) is int and INT64_MIN <= value <= INT64_MAX:
            target.int64_param = value
        elif type(value) in (int, float):
            target.double_param = value
        else:
            raise InvalidInput(
                "has invalid type", field=where, remedy="send an integer of 64 bits, a number, true, false or a string"
            )
    return bool(member(given, "binary_data_output", bool, "parameters", False))


def parameter_value(parameter: Any) -> Any:
    """Value of an InferParameter."""
    return getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")


def _unsigned(given: Json, name: str, where: str) -> int:
    value = given[name]
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise InvalidInput(f"Unable to parse '{name}'", field=where, remedy="an integer of 64 bits, not negative")
    return value


_NEEDED: Final = object()
_NAMES: Final = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}


def member(given: Json, name: str, kind: type, where: str, default: Any = _NEEDED) -> Any:
    """Member of a JSON object, of one kind; raises InvalidInput."""
    value = given.get(name, default)
    if value is _NEEDED or (value is not default and type(value) is not kind):
        raise InvalidInput(f"Unable to parse '{name}'", field=where, remedy=f"send {_NAMES[kind]}")
    return value


def _tensors(given: Json, name: str, *default: Any) -> Sequence[Any]:
    found: Sequence[Any] = member(given, name, list, "request", *default)
    if len(found) > kserve_wire.FIELDS_MAX:
        raise InvalidInput(f"has more than {kserve_wire.FIELDS_MAX}", field=name, value=len(found), remedy="send fewer")
    return found


ALL_BINARY: Final = OutputForm(others=True)


def decode_raw(body: bytes, config: Any, version: str) -> bytes:
    """Decode a raw binary body into the bytes of a ModelInferRequest whose shape follows from its size. `config`: the
    model's ModelConfig.

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
    shape = _raw_shape(only.dims, datatype, len(body))
    message = pb.ModelInferRequest(model_name=config.name, model_version=version)
    message.inputs.add(name=only.name, datatype=datatype, shape=[1, *shape] if config.max_batch_size else shape)
    if datatype == "BYTES":
        body = len(body).to_bytes(4, "little") + body
    return b"".join((message.SerializeToString(), RAW_INPUT_FIELD, kserve_wire.length(len(body)), body))


def _raw_shape(dims: Sequence[int], datatype: str, size: int) -> list[int]:
    """One item's shape: at most one dimension is open."""
    elements, odd = (1, 0) if datatype == "BYTES" else divmod(size, kserve_wire.BYTES_PER_ELEMENT[datatype])
    known = math.prod(dim for dim in dims if dim >= 0)
    open_ones = sum(dim < 0 for dim in dims)
    free = elements // known if open_ones and known else 1
    if odd or open_ones > 1 or known * free != elements:
        raise InvalidInput(
            f"{size} bytes of {datatype} are not one item of shape {list(dims)}", field="body",
            remedy="send a JSON header with the shape",
        )  # fmt: skip
    return [free if dim < 0 else dim for dim in dims]


def to_json(message: Any) -> dict[str, Any]:
    """Convert a protobuf message to Triton's JSON: proto names, 64-bit numbers as numbers, defaults spelt out.

    Fields with presence (messages, members of a oneof) stand only if they are set.
    """
    found: dict[str, Any] = {}
    for each in message.DESCRIPTOR.fields:
        if each.has_presence and not message.HasField(each.name):
            continue
        value = getattr(message, each.name)
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            of_value = each.message_type.fields[1]
            found[each.name] = {str(key): _json_value(of_value, value[key]) for key in sorted(value)}
        elif each.is_repeated:
            found[each.name] = [_json_value(each, one) for one in value]
        else:
            found[each.name] = _json_value(each, value)
    return found


def _json_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
