"""ONNX files, read by the few fields that are needed, without the package onnx and without loading the weights.

Walks protobuf's wire format (onnx.proto3 of onnx/onnx) through the file: what is not asked for is passed over by its
length. Of a field that stands several times each is read, as by a reader that merges messages.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from trefoil.core.errors import CatalogError
from trefoil.runtime.given.repository_names import ONNX_BYTES_MAX, check_place, opened

DEPTH_MAX: Final = 100  # as protobuf itself
VARINT_BYTES_MAX: Final = 10
TEXT_BYTES_MAX: Final = 4096
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Shape = Mapping[int, Any]
LOCATION: Final = "location"
TENSOR: Final[dict[int, Any]] = {13: {}}  # external_data
TENSORS: Final[dict[int, Any]] = {1: TENSOR, 2: TENSOR}  # values and indices of a sparse tensor
GRAPH: Final[dict[int, Any]] = {5: TENSOR, 15: TENSORS}
ATTRIBUTE: Final[dict[int, Any]] = {5: TENSOR, 6: GRAPH, 10: TENSOR, 11: GRAPH, 22: TENSORS, 23: TENSORS}
NODE: Final[dict[int, Any]] = {5: ATTRIBUTE}
GRAPH[1] = NODE
MODEL: Final[dict[int, Any]] = {7: GRAPH, 20: {1: GRAPH, 2: GRAPH}, 25: {7: NODE, 11: ATTRIBUTE}}
"""Where tensors stand: by field, in graph, training and functions."""


class Malformed(Exception):
    """Bytes that are not a protobuf message."""


class Message(NamedTuple):
    """Part of a file that is a message, or a text."""

    file: BinaryIO
    begin: int
    end: int

    def fields(self) -> Iterator[tuple[int, "int | Message"]]:
        """Fields: number, and its varint or its message; fixed numbers are passed over. Raises Malformed."""
        at = self.begin
        while at < self.end:
            self.file.seek(at)
            head = self.file.read(min(2 * VARINT_BYTES_MAX, self.end - at))
            tag, used = _varint(head, 0)
            number, kind = tag >> 3, tag & 7
            if kind in (VARINT, BYTES):
                value, used = _varint(head, used)
                if kind == VARINT:
                    at += used
                    yield number, value
                    continue
                begin, at = at + used, at + used + value
                if at > self.end:
                    raise Malformed("is cut off")
                yield number, Message(self.file, begin, at)
            elif kind in (FIXED32, FIXED64):
                at += used + (4 if kind == FIXED32 else 8)
            else:
                raise Malformed(f"has a field of the unknown kind {kind}")

    def messages(self, number: int) -> Iterator["Message"]:
        """Messages of one field."""
        return (value for found, value in self.fields() if found == number and isinstance(value, Message))

    def text(self, number: int) -> str:
        """Text of one field; "" where it is not set."""
        found = b""
        for part in self.messages(number):
            if part.end - part.begin > TEXT_BYTES_MAX:
                raise Malformed(f"has a name of more than {TEXT_BYTES_MAX} bytes")
            self.file.seek(part.begin)
            found = self.file.read(part.end - part.begin)
        return found.decode("utf-8", "replace")

    def number(self, number: int) -> int | None:
        """Signed whole number of one field; None where it is not set."""
        found = [value for at, value in self.fields() if at == number and isinstance(value, int)]
        return None if not found else found[-1] - (2**64 if found[-1] >= 2**63 else 0)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(VARINT_BYTES_MAX):
        if at >= len(data):
            raise Malformed("is cut off")
        value |= (data[at] & 0x7F) << (7 * shift)
        at += 1
        if data[at - 1] < 0x80:
            return value & (2**64 - 1), at
    raise Malformed("has a number without an end")


@contextmanager
def opened_model(path: Path, below: Path | None = None) -> Iterator[Message]:
    """Open an ONNX file.

    Raises:
        CatalogError: it, or what is read of it, is not an ONNX model.
        OSError: it cannot be read.
    """
    with opened(path, below, ONNX_BYTES_MAX) as file:
        try:
            yield Message(file, 0, file.seek(0, 2))
        except Malformed as error:
            raise CatalogError(f"{path} is not an ONNX model: it {error}", remedy="export it again") from error


def check_external_data(path: Path, below: Path | None = None) -> frozenset[str]:
    """Files in which weights of a model lie, by their places below the model's folder.

    Raises:
        CatalogError: one could lie elsewhere, or it is not an ONNX model.
        OSError: it cannot be read.
    """
    with opened_model(path, below) as model:
        found = frozenset(_locations(model, MODEL, 0))
    return frozenset(check_place(name, f"{path}: external_data.location") for name in sorted(found))


def _locations(message: Message, shape: Shape, depth: int) -> Iterator[str]:
    if depth > DEPTH_MAX:
        raise Malformed(f"is nested deeper than {DEPTH_MAX}")
    for number, value in message.fields():
        if number not in shape or not isinstance(value, Message):
            continue
        if shape is not TENSOR:
            yield from _locations(value, shape[number], depth + 1)
        elif value.text(1) == LOCATION:
            yield value.text(2)
