"""Bytes of KServe v2 messages, without parsing or copying their tensors.

In the protobuf wire format the last value of a singular field, or of a map key, wins: appending a field overrides it.
"""

import functools
from typing import Final

VERSION_FIELD: Final = b"\x12"  # field 2, length-delimited, in ModelInferRequest and ModelInferResponse
PARAMETERS_FIELD: Final = b"\x22"  # field 4, a map entry, in both
PUBLIC_VERSION: Final = "1"

CLEAR_VERSION: Final = VERSION_FIELD + b"\x00"  # upstream serves whichever version it has loaded


def _length(count: int) -> bytes:
    out = bytearray()
    while count > 0x7F:
        out.append(count & 0x7F | 0x80)
        count >>= 7
    out.append(count)
    return bytes(out)


def _string(tag: bytes, text: str) -> bytes:
    data = text.encode()
    return tag + _length(len(data)) + data


def string_parameter(key: str, value: str) -> bytes:
    """A `parameters` entry with an InferParameter.string_param (its field 3)."""
    parameter = _string(b"\x1a", value)
    entry = _string(b"\x0a", key) + b"\x12" + _length(len(parameter)) + parameter
    return PARAMETERS_FIELD + _length(len(entry)) + entry


@functools.lru_cache(maxsize=1024)
def answer_suffix(variant: str) -> bytes:
    """What turns a slice's answer into ours: the public version, and the variant that gave it."""
    return _string(VERSION_FIELD, PUBLIC_VERSION) + string_parameter("trefoil_variant", variant)
