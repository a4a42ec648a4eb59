"""Protobuf messages as Triton's JSON: proto names, 64-bit numbers as numbers, defaults spelt out. Pure."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor


def plain(message: Any) -> dict[str, Any]:
    """What `json.dumps` takes. Fields with presence (messages, members of a oneof) stand only if they are set."""
    answer: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            answer[field.name] = {str(key): _one(field.message_type.fields[1], value[key]) for key in sorted(value)}
        elif field.is_repeated:
            answer[field.name] = [_one(field, each) for each in value]
        else:
            answer[field.name] = _one(field, value)
    return answer


def _one(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
