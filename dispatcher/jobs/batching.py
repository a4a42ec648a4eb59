"""Items of a job as batches for a slice, and the answer to a batch as answers to its items.

Items are ModelInferRequests in bytes, or KServe v2's JSON. Items that differ only in their tensors' data and number of
rows go to a slice as one request. Heads are parsed once for many items; tensors are joined and cut, never converted.
Items are checked against the family's contract here, so that a wrong item does not fail its batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.rest import codec
from dispatcher.fronts.rest.codec_process import PROCESS_BYTES
from dispatcher.request.contracts import Contract
from dispatcher.routing.request_parameters import CLASS, MIN_ACCURACY, SLO_MS
from dispatcher.transport.core import kserve_wire
from trefoil.core.errors import InvalidInput

RAW_INPUT_FIELD: Final = bytes((kserve_wire.RAW_INPUT_TAG,))
RAW_OUTPUT_FIELD: Final = b"\x32"  # field 6, length-delimited, in ModelInferResponse
HEADS_MAX: Final = 64
SHARED: Final = ("trefoil_energy_j_estimate", "trefoil_carbon_mg_estimate")
"""Parameters of a receipt that are of the whole batch; an item has its share by rows."""
OF_REQUESTS: Final = ("timeout", CLASS, MIN_ACCURACY, SLO_MS)
"""Parameters of requests that items of jobs cannot have."""
JSON: Final = b"{"  # no message begins so
TEXT_HEAD: Final = 4  # bytes of an element's length before it


@dataclass(frozen=True, slots=True)
class Head:
    """What items that may be joined have in common."""

    message: Any
    rows: int
    sizes: tuple[int | None, ...]  # bytes of each raw content; None: of texts
    kind: bytes  # equal for heads that may be joined; empty: alone


@dataclass(slots=True)
class Item:
    """One item that its family can take. `size`: its bytes; `alone`: it is not joined with others."""

    number: int
    size: int
    raws: tuple[bytes, ...]
    head: Head
    alone: bool
    attempts: int = 0
    not_before_s: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of it that a batch counts."""
        return self.head.rows


class ItemReader:
    """Reads the items of one job, for a family with this contract. Belongs to one thread."""

    def __init__(self, contract: Contract) -> None:
        self._family, self._contract = str(contract.metadata.name), contract
        self._inputs = {tensor.name: tensor for tensor in contract.metadata.inputs}
        self._needed = self._inputs.keys() - {each.name for each in contract.config.config.input if each.optional}
        self._heads: dict[bytes, Head] = {}

    def read(self, number: int, data: bytes) -> Item:
        """Read an item.

        Raises:
            InvalidInput: its family cannot take it; names field, value and remedy.
        """
        if data.startswith(JSON):
            if len(data) >= PROCESS_BYTES:  # the event loop reads it, and serves no request meanwhile
                remedy = f"less than {PROCESS_BYTES} bytes: send it in binary, from a .npz or as a ModelInferRequest"
                raise InvalidInput("is too large for JSON", field="item", value=f"{len(data)} bytes", remedy=remedy)
            data, _ = codec.decode(data, len(data), self._family, "")
        beside, fields, spans = kserve_wire.head_size(data)
        if beside >= PROCESS_BYTES or fields > kserve_wire.FIELDS_MAX:  # the event loop parses it
            most = f"less than {PROCESS_BYTES} bytes, at most {kserve_wire.FIELDS_MAX} tensors and parameters"
            value, remedy = f"{beside} bytes, {fields} fields", f"{most}: send tensors as raw_input_contents"
            raise InvalidInput("is too large beside its raw contents", field="item", value=value, remedy=remedy)
        raws = tuple(data[begin:end] for begin, end in spans)
        head_bytes = kserve_wire.without(data, spans) if spans else data
        head = self._heads.get(head_bytes)
        if head is None:
            head = self._parse(head_bytes, bool(spans))
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            if spans:  # else its data are in it
                self._heads[head_bytes] = head
        if not spans:
            return Item(number, len(data), (), head, alone=True)
        contents = tuple(_content(raw) for raw in raws)
        if len(contents) != len(head.sizes):
            remedy = "send one raw content for each input"
            raise InvalidInput("inputs and raw contents differ", field="inputs", value=len(contents), remedy=remedy)
        for tensor, content, size in zip(head.message.inputs, contents, head.sizes, strict=True):
            if size is not None and len(content) != size:
                raise InvalidInput(
                    f"its shape {list(tensor.shape)} takes {size} bytes", field=f"inputs.{tensor.name}",
                    value=f"{len(content)} bytes", remedy="send as many as its shape says",
                )  # fmt: skip
        return Item(number, len(data), contents, head, alone=not head.kind)

    def _parse(self, data: bytes, raw: bool) -> Head:
        try:
            message = pb.ModelInferRequest.FromString(data)
        except DecodeError as error:
            remedy = "send a KServe v2 ModelInferRequest"
            raise InvalidInput("is not a request", field="item", value=f"{len(data)} bytes", remedy=remedy) from error
        if message.model_name not in ("", self._family):
            remedy = f"leave it out, or write {self._family}"
            raise InvalidInput("is another family's", field="model_name", value=message.model_name, remedy=remedy)
        if any(name in message.parameters for name in ("sequence_id", "sequence_start", "sequence_end")):
            raise InvalidInput("items of jobs have no order", field="sequence_id", remedy="send it as a request")
        if (name := next((name for name in OF_REQUESTS if name in message.parameters), "")) != "":
            raise InvalidInput("is not for items of jobs", field=name, remedy="leave it out: a job has its own fields")
        names = [tensor.name for tensor in message.inputs]
        if len(set(names)) != len(names) or not self._needed <= set(names) <= self._inputs.keys():
            remedy = f"give {', '.join(sorted(self._inputs))}"
            raise InvalidInput(f"{self._family} takes other inputs", field="inputs", value=names, remedy=remedy)
        for tensor in message.inputs:
            self._check(tensor)
        rows = {tensor.shape[0] for tensor in message.inputs} if self._contract.batches else {1}
        if len(rows) != 1:
            remedy = "give each input the same first size"
            raise InvalidInput("inputs differ in their rows", field="inputs.shape", value=sorted(rows), remedy=remedy)
        if (count := rows.pop()) > self._contract.items_max:
            remedy = f"at most {self._contract.items_max}: split it into several items"
            raise InvalidInput("has too many rows", field="inputs.shape", value=count, remedy=remedy)
        sizes = tuple(_bytes_of(tensor) for tensor in message.inputs)
        message.model_name = self._family
        return Head(message, count, sizes, self._kind(message) if raw and self._contract.batches else b"")

    def _check(self, tensor: Any) -> None:
        known, field = self._inputs[tensor.name], f"inputs.{tensor.name}"
        datatype, shape = known.datatype, known.shape
        if tensor.datatype != datatype:
            remedy = f"send {datatype}"
            raise InvalidInput("is another type", field=f"{field}.datatype", value=tensor.datatype, remedy=remedy)
        own = tuple(tensor.shape)
        fits = len(own) == len(shape) and all(
            size >= 1 and wanted in (-1, size) for size, wanted in zip(own, shape, strict=True)
        )
        if not fits:
            remedy = f"send {list(shape)}, -1 for any size"
            raise InvalidInput("is another shape", field=f"{field}.shape", value=list(own), remedy=remedy)

    @staticmethod
    def _kind(message: Any) -> bytes:
        same = pb.ModelInferRequest()
        same.CopyFrom(message)
        same.id = ""
        for tensor in same.inputs:
            tensor.shape[0] = 0
        return bytes(same.SerializeToString(deterministic=True))


def join(items: Sequence[Item], suffix: bytes = b"") -> bytes:
    """Join items to one request, with fields of a ModelInferRequest after it; one that is alone stays unchanged but for
    its family's name."""
    first = items[0]
    message = pb.ModelInferRequest()
    message.CopyFrom(first.head.message)
    message.id = ""
    if first.alone and not first.raws:
        return bytes(message.SerializeToString()) + suffix
    if len(items) > 1:
        rows = sum(item.rows for item in items)
        for tensor in message.inputs:
            tensor.shape[0] = rows
    parts: list[bytes] = [message.SerializeToString()]
    for index in range(len(first.raws)):
        content = b"".join([item.raws[index] for item in items])
        parts += (RAW_INPUT_FIELD, kserve_wire.length(len(content)), content)
    return b"".join((*parts, suffix))


@dataclass(slots=True)
class Split:
    """The answer to a batch, cut by its rows. What all items share is encoded once."""

    joules: float | None
    grams: float | None
    _heads: dict[int, bytes]
    _message: Any
    _rows: int
    _pieces: list[list[bytes]]  # of each output, by row; of an answer to one item the output as a whole

    @classmethod
    def of(cls, data: bytes, items: Sequence[Item]) -> "Split":
        """Cut an answer (bytes of a ModelInferResponse).

        Raises:
            InvalidInput: its outputs do not have the rows of the batch.
        """
        message = pb.ModelInferResponse.FromString(data)
        rows = sum(item.rows for item in items)
        contents = list(message.raw_output_contents)
        del message.raw_output_contents[:]
        pieces = [[content] for content in contents]
        if len(items) > 1:
            if len(contents) != len(message.outputs):
                raise InvalidInput("outputs and contents differ", field="outputs", value=len(contents))
            pairs = zip(message.outputs, contents, strict=True)
            pieces = [_rows_of(tensor, content, rows) for tensor, content in pairs]
        told = {name: message.parameters[name].double_param for name in SHARED if name in message.parameters}
        mg = told.get(SHARED[1])
        return cls(
            told.get(SHARED[0]), None if mg is None else mg / 1e3, {}, message, rows, pieces,
        )  # fmt: skip

    def answer(self, item: Item, first_row: int) -> bytes:
        """Bytes of a ModelInferResponse for the item whose rows begin at a place of the batch."""
        whole = item.rows == self._rows
        head = self._heads.get(item.rows)
        if head is None:
            head = self._heads[item.rows] = self._head(item.rows)
        parts = [head]
        for piece in self._pieces:
            content = piece[0] if whole and len(piece) == 1 else b"".join(piece[first_row : first_row + item.rows])
            parts += (RAW_OUTPUT_FIELD, kserve_wire.length(len(content)), content)
        return b"".join(parts)

    def _head(self, rows: int) -> bytes:
        message = pb.ModelInferResponse()
        message.CopyFrom(self._message)
        if rows != self._rows:
            for tensor in message.outputs:
                tensor.shape[0] = rows
            for name in SHARED:
                if name in message.parameters:
                    message.parameters[name].double_param *= rows / self._rows
        return bytes(message.SerializeToString())


def _content(field: bytes) -> bytes:
    """Content of a length-delimited field with its tag."""
    at = 1
    while field[at] & 0x80:
        at += 1
    return field[at + 1 :]


def _bytes_of(tensor: Any) -> int | None:
    if tensor.datatype == "BYTES":
        return None
    return int(math.prod(tensor.shape)) * kserve_wire.BYTES_PER_ELEMENT[tensor.datatype]


def _rows_of(tensor: Any, content: bytes, rows: int) -> list[bytes]:
    """Content of each row of an output."""
    if not 1 <= len(tensor.shape) <= kserve_wire.DIMENSIONS_MAX or tensor.shape[0] != rows:
        raise InvalidInput(
            "does not have the rows of its batch", field=f"outputs.{tensor.name}", value=list(tensor.shape)
        )
    if tensor.datatype != "BYTES":
        size = len(content) // rows
        return [content[at * size : (at + 1) * size] for at in range(rows)]
    per_row, at, found = math.prod(tensor.shape[1:]), 0, list[bytes]()
    for _ in range(rows):
        begin = at
        for _ in range(min(per_row, (len(content) - at) // TEXT_HEAD + 1)):  # up to the first that is cut off
            at += TEXT_HEAD + int.from_bytes(content[at : at + TEXT_HEAD], "little")
        found.append(content[begin:at])
    if at != len(content):
        raise InvalidInput("its texts are incomplete", field=f"outputs.{tensor.name}", value=f"{len(content)} bytes")
    return found
