"""Schema of messages and RPCs, bytes of one value of each kind that Redis holds, names of keys, signatures."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto

import protos
from trefoil.core.carbon import Factors, Method, Series
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime import codec
from trefoil.runtime.keys import Keys
from trefoil.runtime.security.plan_keys import PlanKeys

SERIES = Series("GB", Method.MARGINAL, Factors.LIFECYCLE)
ARGUMENTS = {"series": SERIES, "worker": 2, "hour": "2026-11-28T10", "window": "1h", "model": "blend"}


def wire() -> Iterator[tuple[str, Any]]:
    """Each schema, value, key and signature."""
    for module in pkgutil.walk_packages(protos.__path__, "protos."):
        if module.name.endswith("_pb2"):
            schema = FileDescriptorProto()
            importlib.import_module(module.name).DESCRIPTOR.CopyToProto(schema)
            yield f"schema {module.name}", str(schema).split("\n")
    values = {kind: codec.from_proto(filled(message())) for kind, message in codec.MESSAGES.items()}
    for kind, value in values.items():
        yield f"value {kind.__name__}", [codec.to_json(value), codec.encode(value).hex()]
    for name, make in inspect.getmembers(Keys("c"), callable):
        if not name.startswith("_"):
            yield f"key {name}", make(*(ARGUMENTS.get(each, each) for each in inspect.signature(make).parameters))
    keys = PlanKeys("c", ["k" * 32])
    yield "signatures", [keys.sign_routes(values[Plan]).signature, keys.sign(values[NodePlan]).signature]


def filled(message: Any) -> Any:
    """The message with every field set, by its number, so that no two neighbours have the same value."""
    for field in message.DESCRIPTOR.fields:
        held, inner = getattr(message, field.name), field.message_type
        if inner is None:
            held.append(scalar(field)) if field.is_repeated else setattr(message, field.name, scalar(field))
        elif inner.GetOptions().map_entry:
            key, value = (scalar(inner.fields_by_name[part]) for part in ("key", "value"))
            filled(held[key]) if inner.fields_by_name["value"].message_type else held.update({key: value})
        else:
            filled(held.add() if field.is_repeated else held)
    return message


def scalar(field: FieldDescriptor) -> Any:
    """Value of a field that holds no message."""
    if field.enum_type is not None:
        values = field.enum_type.values
        return values[field.number % len(values)].number
    by_type = {
        FieldDescriptor.CPPTYPE_STRING: b"\x00" if field.type == FieldDescriptor.TYPE_BYTES else f"{field.name}é",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_DOUBLE: field.number + 0.1,
        FieldDescriptor.CPPTYPE_FLOAT: field.number + 0.5,
    }
    return by_type.get(field.cpp_type, 300 + field.number)
