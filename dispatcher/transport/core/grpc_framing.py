"""gRPC over HTTP/2: messages in a stream's bytes, compression, deadlines, metadata, and statuses.

Source: gRPC's PROTOCOL-HTTP2.md and compression.md (grpc/grpc, doc/), statuses of HTTP in http-grpc-status-mapping.md.
Data: headers, data and trailers of a stream, in the order in which they come.
Decision: the messages they hold, or the status with which they are refused.
Formulation: a message is one byte (1 = compressed), its length in four, and so many bytes. A timeout is at most eight
    digits and a unit. `grpc-message` is percent-coded UTF-8. Values of keys in -bin are base64 without padding.
Deviations: none.
"""

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

JOIN: Final = b"".join
"""Serializer of a message in parts; HTTP/2 sends them one after the other instead."""
PREFIX: Final = struct.Struct(">BI")
PREFIX_BYTES: Final = PREFIX.size
ENCODINGS: Final = ("identity", "deflate", "gzip")
ACCEPTED: Final = b"identity, deflate, gzip"
TIMEOUT_DIGITS: Final = 8
JOINED_BYTES: Final = 16 * 1024
SMALL_BYTES: Final = 1024
"""Smaller parts of a message are joined while it is not whole: an object each would cost more than what it holds."""
STATUS_NAMES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""By their numbers."""

_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_OF_HTTP: Final = {
    400: "INTERNAL", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "UNIMPLEMENTED", 429: "UNAVAILABLE",
    502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "UNAVAILABLE",
}  # fmt: skip
_OF_RESET: Final = {3: "INTERNAL", 7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
_NOT_METADATA: Final = frozenset(
    (b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-status",
     b"grpc-message")
)  # fmt: skip
_KEY: Final = re.compile("[0-9a-zA-Z_.-]+")
_PLAIN: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"
"""Beside what is always plain: all that can be printed, but for the percent sign."""


class FramingError(Exception):
    """Bytes that are not what gRPC says. `code` is the name of the status that they are refused with."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code, self.details = code, details


@dataclass(frozen=True, slots=True)
class Compressed:
    """A message that is still compressed; others are plain bytes."""

    data: bytes

    def __len__(self) -> int:
        return len(self.data)


Message = bytes | Compressed


def framed(parts: Sequence[bytes | memoryview]) -> tuple[bytes | memoryview, ...]:
    """Parts of an uncompressed message with what stands before them: as one where they are small."""
    size = sum(map(len, parts))
    whole = (PREFIX.pack(0, size), *parts)
    return whole if size >= JOINED_BYTES else (b"".join(whole),)


def sole_message(data: bytes, bytes_max: int) -> bytes | None:
    """The message that this is, if it is one, whole, uncompressed and within the bound; else None."""
    size = len(data) - PREFIX_BYTES
    if size < 0 or int.from_bytes(data[:PREFIX_BYTES]) != size or size > bytes_max >= 0:  # its flag is its first byte
        return None
    return data[PREFIX_BYTES:]


class MessageReader:
    """Cuts the data of a stream into messages; each is joined once, and one that came whole in one piece is cut once.

    `bytes_max` bounds one message as it came; -1 = no limit."""

    __slots__ = ("_compressed", "_have", "_head", "_parts", "_size", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._head = b""
        self._parts: list[bytes | bytearray | memoryview] = []
        self._size = -1  # of the message that is being read; -1 = its prefix is not whole
        self._have = 0
        self._compressed = False

    @property
    def unfinished(self) -> bool:
        """Whether a part of a message is here, and the rest is not."""
        return self._size >= 0 or bool(self._head)

    @property
    def held_bytes(self) -> int:
        """Of the message that is not whole yet."""
        return self._have + len(self._head)

    def more(self, data: bytes) -> bool:
        """Take a large piece from within a message, which continues after it; False: `feed` it."""
        have = self._have + len(data)
        if have >= self._size or len(data) < SMALL_BYTES:
            return False
        self._parts.append(data)
        self._have = have
        return True

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole with this data.

        Raises:
            FramingError: a prefix that is none (INTERNAL), or a length beyond the bound (RESOURCE_EXHAUSTED).
        """
        whole: list[Message] = []
        at, end = 0, len(data)
        while True:
            if self._size < 0:
                take = PREFIX.size - len(self._head)
                self._head += data[at : at + take]
                at += take
                if len(self._head) < PREFIX.size:
                    return whole
                self._begin()
            take = min(self._size - self._have, end - at)
            if take > 0:
                self._parts.append(data if take == end else memoryview(data)[at : at + take])
                self._have += take
                at += take
            if self._have < self._size:
                if take > 0:
                    self._keep()
                return whole
            message = b"".join(self._parts)
            whole.append(Compressed(message) if self._compressed else message)
            self._size, self._have, self._parts = -1, 0, []
            if at >= end:
                return whole

    def _keep(self) -> None:
        """The last part waits for those after it: as bytes of its own, and small ones as one."""
        parts, last = self._parts, self._parts[-1]
        if len(last) < SMALL_BYTES:
            del parts[-1]
            if parts and isinstance(parts[-1], bytearray):
                parts[-1].extend(last)
            else:
                parts.append(bytearray(last))
        elif isinstance(last, memoryview) and 2 * last.nbytes < memoryview(last.obj).nbytes:
            parts[-1] = bytes(last)

    def _begin(self) -> None:
        flag, size = PREFIX.unpack(self._head)
        if flag > 1:
            raise FramingError("INTERNAL", f"the first byte of a message is {flag}, not 0 or 1")
        if 0 <= self.bytes_max < size:
            raise FramingError("RESOURCE_EXHAUSTED", too_large(size, self.bytes_max))
        self._head, self._size, self._compressed = b"", size, bool(flag)


def too_large(size_bytes: int, bytes_max: int) -> str:
    """Refuse a message for its size, in gRPC's own words."""
    return f"SERVER: Received message larger than max ({size_bytes} vs. {bytes_max})"


def inflate(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """Decompress a message; never makes more than `bytes_max` (-1 = no limit) of it.

    Raises:
        FramingError: INTERNAL where no encoding was named or the data is broken, UNIMPLEMENTED for an unknown encoding,
            RESOURCE_EXHAUSTED beyond the bound.
    """
    if encoding in ("", "identity"):
        raise FramingError("INTERNAL", "a message says that it is compressed, and its stream names no encoding")
    if encoding not in ENCODINGS:
        raise FramingError("UNIMPLEMENTED", unknown_encoding(encoding))
    inflater = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        made = inflater.decompress(data, 0 if bytes_max < 0 else bytes_max + 1)
    except zlib.error as error:
        raise FramingError("INTERNAL", f"a message cannot be decompressed ({encoding}): {error}") from error
    if 0 <= bytes_max < len(made):
        raise FramingError("RESOURCE_EXHAUSTED", f"SERVER: Received decompressed message larger than max ({bytes_max})")
    if not inflater.eof or inflater.unused_data:
        raise FramingError("INTERNAL", f"a message cannot be decompressed ({encoding}): it is cut off, or goes on")
    return made


def unknown_encoding(encoding: str) -> str:
    """Refuse an encoding."""
    return f"compression {encoding!r} is not known; known are {', '.join(ENCODINGS)}"


def parse_timeout(value: bytes) -> float:
    """Timeout of a call [s] as `grpc-timeout` names it.

    Raises:
        FramingError: INTERNAL, it is none.
    """
    digits, unit = value[:-1], value[-1:]
    if unit not in _UNITS_S or not digits.isdigit() or len(digits) > TIMEOUT_DIGITS:
        shown = value[:32].decode("ascii", "backslashreplace")
        raise FramingError("INTERNAL", f"grpc-timeout is {shown!r}, not up to eight digits and one of H, M, S, m, u, n")
    return int(digits) * _UNITS_S[unit]


def encode_timeout(timeout_s: float) -> bytes:
    """`grpc-timeout` of a call, as exact as eight digits can say it, and no shorter."""
    for unit, per_s in ((b"u", 1e6), (b"m", 1e3), (b"S", 1.0)):
        count = -int(-timeout_s * per_s // 1)
        if count < 10**TIMEOUT_DIGITS:
            return b"%d%s" % (max(0, count), unit)
    return b"99999999H"


def encode_details(details: str) -> bytes:
    """`grpc-message` of a status. Spaces at its ends are coded: no field of HTTP/2 may begin or end with one."""
    told = quote(details, safe=_PLAIN, errors="replace")
    return re.sub("^ +| +$", lambda spaces: "%20" * len(spaces[0]), told).encode("ascii")


def decode_details(value: bytes) -> str:
    """Text of a `grpc-message`; what is not UTF-8 is replaced."""
    return unquote_to_bytes(value).decode("utf-8", "replace")


def decode_metadata(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, Any], ...]:
    """Metadata among headers or trailers: keys in lower case, values as text, or bytes for keys that end in -bin. What
    gRPC uses itself is left out, and so is a value that is not base64."""
    found: list[tuple[str, Any]] = []
    for key, value in headers:
        if key[:1] == b":" or key in _NOT_METADATA:
            continue
        name = key.decode("ascii", "replace")
        if not key.endswith(b"-bin"):
            found.append((name, value.decode("latin-1")))
            continue
        for each in value.split(b","):
            try:
                found.append((name, base64.b64decode(each + b"=" * (-len(each) % 4), validate=True)))
            except binascii.Error:
                continue
    return tuple(found)


def encode_metadata(pairs: Iterable[tuple[str, Any]]) -> list[tuple[bytes, bytes]]:
    """Headers or trailers of metadata; a pair whose key no header can have is left out."""
    made = []
    for key, value in pairs:
        if not _KEY.fullmatch(key):
            continue
        data = value if isinstance(value, bytes) else str(value).encode()
        name = key.lower().encode("ascii")
        made.append((name, base64.b64encode(data).rstrip(b"=") if name.endswith(b"-bin") else data))
    return made


def status_of_trailers(told: dict[bytes, bytes]) -> tuple[str, str]:
    """Name of the status that headers or trailers end a call with, and its details."""
    number = told.get(b"grpc-status")
    if number is None:
        return status_of_http(told.get(b":status", b"200"))
    code = int(number) if number.isdigit() and len(number) < 4 else -1
    if not 0 <= code < len(STATUS_NAMES):
        return "UNKNOWN", f"grpc-status is {number[:32].decode('latin-1')!r}, which is not a status"
    details = told.get(b"grpc-message")
    return STATUS_NAMES[code], decode_details(details) if details else ""


def status_of_http(status: bytes) -> tuple[str, str]:
    """Name and details for an answer of HTTP that is none of gRPC."""
    number = int(status) if status.isdigit() and len(status) == 3 else 0
    if number == 200:
        return "UNKNOWN", "the answer ended without a grpc-status"
    return _OF_HTTP.get(number, "UNKNOWN"), f"answered by HTTP status {number}, not by gRPC"


def status_of_reset(error_code: int) -> tuple[str, str]:
    """Name and details for a stream that was reset, or closed, with an error code of HTTP/2."""
    if error_code == 7:
        return "UNAVAILABLE", "shutting down: the stream was refused before anything was done with it"
    return _OF_RESET.get(error_code, "INTERNAL"), f"the stream was reset with HTTP/2 error code {error_code}"
