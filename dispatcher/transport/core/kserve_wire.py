"""Bytes of KServe v2 messages, without parsing or copying their tensors.

In the protobuf wire format the last value of a scalar field, or of a map key, wins: appending a field overrides it. A
message field is never written twice: some parsers merge its occurrences (C++, Python, Go), others keep the last one
(protobuf.js).
"""

import functools
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

VERSION_FIELD: Final = b"\x12"  # field 2, length-delimited, in ModelInferRequest and ModelInferResponse
PARAMETERS_FIELD: Final = b"\x22"  # field 4, a map entry, in both
PUBLIC_VERSION: Final = "1"
BYTES_PER_ELEMENT: Final = {
    "BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4, "INT32": 4,
    "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8, "BYTES": 4,
}  # fmt: skip
"""BYTES: an empty element is its 4-byte length."""

CLEAR_VERSION: Final = VERSION_FIELD + b"\x00"  # upstream serves whichever version it has loaded


def length(count: int) -> bytes:
    """Encode a varint: what stands before a length-delimited field's bytes."""
    out = bytearray()
    while count > 0x7F:
        out.append(count & 0x7F | 0x80)
        count >>= 7
    out.append(count)
    return bytes(out)


FIELDS_MAX: Final = 4096
"""Tensors, their raw contents, and parameters of one request."""
DIMENSIONS_MAX: Final = 64
"""Of one tensor."""
VARINT_BYTES_MAX: Final = 10
"""Of 64 bits; reading a longer number would cost the square of its bytes."""
RAW_INPUT_TAG: Final = 0x3A  # field 7, length-delimited, in ModelInferRequest
_Messages = Mapping[int, "_Messages"]
_ENTRY: Final[_Messages] = {0x12: {}}  # of a map of parameters: its value
_MESSAGES: Final[_Messages] = {
    0x22: _ENTRY,  # parameters
    0x2A: {0x22: _ENTRY, 0x2A: {}},  # inputs: parameters, contents
    0x32: {0x12: _ENTRY},  # outputs: parameters
}
"""Messages in a ModelInferRequest by their fields' tags."""


def head_size(data: bytes) -> tuple[int, int, list[tuple[int, int]]]:
    """Size of a ModelInferRequest without its raw contents, its number of fields (at most FIELDS_MAX + 1), and where
    raw contents begin and end. Unreadable bytes count as size, without raw contents: the parser reports their error."""
    at = beside = fields = 0
    raw: list[tuple[int, int]] = []
    with suppress(IndexError):  # it is cut off, or no message
        while at < len(data) and fields <= FIELDS_MAX:
            begins, fields = at, fields + 1
            tag, _, at = field(data, at)
            if tag != RAW_INPUT_TAG:
                beside += at - begins
            else:
                raw.append((begins, at))
    return beside + max(0, len(data) - at), fields, raw if at == len(data) else []


def count_fields(head: bytes, most: int) -> int:
    """Number of fields of a ModelInferRequest and of the messages in it, up to one more than `most`.

    Raises:
        IndexError: it is cut off, no message, or has groups, which no version of the protocol has.
    """
    return most - _left(head, 0, len(head), _MESSAGES, most)


def _left(data: bytes, at: int, end: int, messages: _Messages, left: int) -> int:
    """What is left of a number of fields after those from `at` to `end`; -1: there are more."""
    while at < end and left >= 0:
        tag, begins, at = field(data, at)
        left -= 1
        if (inner := messages.get(tag)) is not None:
            left = _left(data, begins, at, inner, left)
    if at > end:
        raise IndexError("a field is cut off")
    return left


def field(data: bytes, at: int) -> tuple[int, int, int]:
    """Tag of a field, and where its value begins and ends; IndexError for none."""
    tag, at = varint(data, at)
    if tag & 7 == 2:
        size, begins = varint(data, at)
        return tag, begins, begins + size
    if tag & 7 == 0:
        return tag, at, varint(data, at)[1]
    if tag & 7 not in (1, 5):
        raise IndexError("a group")
    return tag, at, at + (8 if tag & 7 == 1 else 4)


def without(data: bytes, spans: list[tuple[int, int]]) -> bytes:
    """What lies beside these places, as one."""
    ends = [0, *(end for _, end in spans)]
    begins = [*(begin for begin, _ in spans), len(data)]
    return b"".join(data[end:begin] for end, begin in zip(ends, begins, strict=True))


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Value, and where it ends; IndexError for one that is cut off, or longer than VARINT_BYTES_MAX."""
    value = 0
    for shift in range(0, 7 * VARINT_BYTES_MAX, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a number is too long")


def _string(tag: bytes, text: str) -> bytes:
    data = text.encode()
    return tag + length(len(data)) + data


def string_parameter(key: str, value: str) -> bytes:
    """Encode a `parameters` entry with an InferParameter.string_param (its field 3)."""
    return _parameter(key, _string(b"\x1a", value))


def double_parameter(key: str, value: float) -> bytes:
    """Encode a `parameters` entry with an InferParameter.double_param (its field 4)."""
    return _parameter(key, b"\x21" + struct.pack("<d", value))


def int64_parameter(key: str, value: int) -> bytes:
    """Encode a `parameters` entry with an InferParameter.int64_param (its field 2) >= 0."""
    return _parameter(key, b"\x10" + length(value))


def _parameter(key: str, parameter: bytes) -> bytes:
    entry = _string(b"\x0a", key) + b"\x12" + length(len(parameter)) + parameter
    return PARAMETERS_FIELD + length(len(entry)) + entry


def bool_parameter(key: str, value: bool) -> bytes:
    """Encode a `parameters` entry with an InferParameter.bool_param (its field 1)."""
    return _parameter(key, b"\x08" + bytes((value,)))


WANTS_FINAL: Final = "triton_enable_empty_final_response"
ASK_FINAL: Final = bool_parameter(WANTS_FINAL, True)
"""Appended to a ModelInferRequest: its final response comes even if it is empty."""
IS_FINAL: Final = "triton_final_response"
FINAL: Final = bool_parameter(IS_FINAL, True)
"""Appended to a ModelInferResponse: what Triton's streams say of the last response of a request."""


def stream_answer(answer: bytes) -> bytes:
    """A ModelStreamInferResponse of a ModelInferResponse (its field 2)."""
    return b"\x12" + length(len(answer)) + answer


def stream_error(details: str, id_: str) -> bytes:
    """A ModelStreamInferResponse with error_message (its field 1) and only the id of the request."""
    return _string(b"\x0a", details) + stream_answer(_string(b"\x1a", id_))


def model_suffix(name: str, version: str) -> bytes:
    """Encode a model's name and version: fields 1 and 2 of a ModelInferRequest, its response, or a question."""
    return _string(b"\x0a", name) + _string(VERSION_FIELD, version)


STAGES: Final = "trefoil_stage_slices"


@functools.lru_cache(maxsize=1024)
def stages_suffix(family: str, slices: tuple[str, ...]) -> bytes:
    """Encode what turns the answer of a last stage into its family's: the name, and the slice of each stage."""
    return _string(b"\x0a", family) + string_parameter(STAGES, ", ".join(slices))


@functools.lru_cache(maxsize=1024)
def answer_suffix(variant: str) -> bytes:
    """Encode what turns a slice's answer into ours: the public version, and the variant that gave it."""
    return _string(VERSION_FIELD, PUBLIC_VERSION) + string_parameter("trefoil_variant", variant)
