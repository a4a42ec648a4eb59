"""Fields of a protobuf message as they lie on the wire."""

from collections import Counter
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.decoder import _DecodeVarint

FIXED = {1: 8, 5: 4}
"""Bytes of a value, by wire type."""
VARINT, BYTES = 0, 2


def fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each field of a message, in the order in which they were written."""
    at = 0
    while at < len(data):
        tag, begins = _DecodeVarint(data, at)
        if tag & 7 == VARINT:
            _, at = _DecodeVarint(data, begins)
        elif tag & 7 == BYTES:
            size, begins = _DecodeVarint(data, begins)
            at = begins + size
        else:
            at = begins + FIXED[tag & 7]
        yield tag >> 3, data[begins:at]


def repeated_messages(data: bytes, kind: Descriptor) -> list[str]:
    """Singular message fields, at any depth, that are written more than once: some parsers keep the last one only."""
    count: Counter[str] = Counter()
    found = []
    for number, value in fields(data):
        field = kind.fields_by_number.get(number)
        if field is not None and field.message_type is not None:
            found += repeated_messages(value, field.message_type)
            if not field.is_repeated:
                count[field.full_name] += 1
    return found + [name for name, times in count.items() if times > 1]
