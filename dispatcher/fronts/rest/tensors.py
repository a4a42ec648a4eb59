"""The data of one tensor: JSON numbers and strings on one side, Triton's little-endian bytes on the other. Pure.

FP16 and BF16 have no JSON form, as in Triton. Where Triton cuts a number that its type cannot hold, we refuse it.
"""

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dispatcher.transport.core.kserve_wire import DIMENSIONS_MAX
from trefoil.core.errors import InvalidInput, TrefoilError, shown

NESTING_MAX: Final = 100
"""Triton's limit for lists within lists."""

_INTEGERS: Final = {
    "UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
}  # fmt: skip
_FLOATS: Final = {"FP32": "<f4", "FP64": "<f8"}
_BINARY_ONLY: Final = ("FP16", "BF16")
_LENGTH: Final = struct.Struct("<I")


def to_bytes(name: str, datatype: str, shape: Sequence[int], data: Any) -> bytes:
    """Encode an input whose `data` came as JSON: a list, nested in any way, of as many elements as the shape has. The
    shape has at most DIMENSIONS_MAX sizes.

    Raises:
        InvalidInput: they do not fit each other.
    """
    field = f"inputs[{shown(name)}]"
    if datatype in _BINARY_ONLY:
        raise InvalidInput(
            f"receiving {datatype} data via JSON is not supported", field=field, remedy="use the binary data format"
        )
    if type(data) is not list:
        raise InvalidInput("'data' is not a list", field=field, remedy="send a JSON array of elements")
    flat, kinds = _flat(field, data)
    count = math.prod(shape)
    if len(flat) != count:
        raise InvalidInput(
            f"'data' has {len(flat)} elements and the shape {list(shape)} has {count}", field=field,
            remedy="send as many elements as the shape has",
        )  # fmt: skip
    if datatype in _INTEGERS:
        return _numbers(field, datatype, _INTEGERS[datatype], flat, kinds <= {int})
    if datatype in _FLOATS:
        return _numbers(field, datatype, _FLOATS[datatype], flat, kinds <= {int, float})
    if datatype == "BOOL":
        return _numbers(field, datatype, "?", flat, kinds <= {bool})
    if datatype == "BYTES":
        if not kinds <= {str}:
            raise _wrong(field, datatype)
        return b"".join(_prefixed(field, text) for text in flat)
    raise InvalidInput("invalid datatype", field=field, value=datatype, remedy=f"use one of {', '.join(DATATYPES)}")


DATATYPES: Final = ("BOOL", *_INTEGERS, *_BINARY_ONLY, *_FLOATS, "BYTES")


def from_bytes(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> list[Any]:
    """Decode an output into one flat list of elements, as Triton writes them.

    Strings that are not UTF-8 keep their bytes as lone surrogates, which an encoder with `surrogateescape` undoes.

    Raises:
        InvalidInput: the datatype has no JSON form.
        TrefoilError: the bytes are not what datatype and shape say.
    """
    if datatype not in DATATYPES or datatype in _BINARY_ONLY:
        raise InvalidInput(
            f"sending {datatype} data via JSON is not supported", field=f"outputs[{name!r}]",
            remedy="ask for the binary data format",
        )  # fmt: skip
    if datatype == "BYTES":
        elements: list[Any] = _strings(raw)
    elif datatype == "BOOL":
        elements = (np.frombuffer(raw, np.uint8) != 0).tolist()
    else:
        kind = np.dtype(_INTEGERS.get(datatype) or _FLOATS[datatype])
        if len(raw) % kind.itemsize:
            raise TrefoilError(f"output {name!r} has {len(raw)} bytes, which are no {datatype}")
        elements = np.frombuffer(raw, kind).tolist()
    if len(shape) > DIMENSIONS_MAX or len(elements) != math.prod(shape):
        sizes = list(shape[:DIMENSIONS_MAX])
        raise TrefoilError(f"output {name!r} has {len(elements)} elements and the shape {sizes}")
    return elements


def _flat(field: str, data: list[Any]) -> tuple[list[Any], set[type]]:
    """The elements, and what they are."""
    for depth in range(NESTING_MAX):
        kinds = set(map(type, data))
        if list not in kinds:
            return data, kinds
        if len(kinds) > 1:
            flat, kinds = list[Any](), set[type]()
            _add_mixed(field, data, depth, flat, kinds)
            return flat, kinds
        data = list(itertools.chain.from_iterable(data))
    raise _too_deep(field)


def _add_mixed(field: str, data: list[Any], depth: int, flat: list[Any], kinds: set[type]) -> None:
    """Add the elements of lists beside which elements stand: each is looked at once, however deep it lies."""
    if depth == NESTING_MAX:
        raise _too_deep(field)
    for each in data:
        if type(each) is list:
            _add_mixed(field, each, depth + 1, flat, kinds)
        else:
            flat.append(each)
            kinds.add(type(each))


def _too_deep(field: str) -> InvalidInput:
    return InvalidInput(f"lists are nested deeper than {NESTING_MAX}", field=field, remedy="send a flat list")


def _numbers(field: str, datatype: str, dtype: str, flat: list[Any], fits: bool) -> bytes:
    if not fits:
        raise _wrong(field, datatype)
    try:
        with np.errstate(over="ignore"):  # a double beyond FP32 becomes infinite, as in Triton
            return np.array(flat, dtype=dtype).tobytes()
    except (OverflowError, ValueError) as error:
        raise InvalidInput(f"{error}", field=field, remedy=f"send numbers that {datatype} can hold") from error


def _wrong(field: str, datatype: str) -> InvalidInput:
    return InvalidInput(
        f"an element of 'data' is not what {datatype} holds", field=field,
        remedy="strings for BYTES, true and false for BOOL, numbers for the rest, integers for integers",
    )  # fmt: skip


def _prefixed(field: str, text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"a string of 'data' is not Unicode text ({error.reason})", field=field, remedy="use the binary data format"
        ) from error
    return _LENGTH.pack(len(data)) + data


def _strings(raw: bytes) -> list[Any]:
    elements = []
    offset = 0
    while offset < len(raw):
        if offset + 4 > len(raw):
            raise TrefoilError("a string's length is cut off")
        end = offset + 4 + _LENGTH.unpack_from(raw, offset)[0]
        if end > len(raw):
            raise TrefoilError("a string is cut off")
        elements.append(raw[offset + 4 : end].decode("utf-8", "surrogateescape"))
        offset = end
    return elements
