"""A multipart/form-data body (RFC 7578), read as it comes: fields in memory, one file part by part. Pure."""

import re
from collections.abc import Iterator
from typing import Final

from trefoil.core.errors import InvalidInput

PART_HEAD_BYTES_MAX: Final = 16 * 1024
FIELD_BYTES_MAX: Final = 16 * 1024
FIELDS_MAX: Final = 32
FILE: Final = "file"
"""Name of the part that is a file."""
_BOUNDARY: Final = re.compile(r'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70})).*', re.I)
_NAME: Final = re.compile(r'(?:^|[;\s])name="((?:[^"\\]|\\.)*)"', re.I)
_FILENAME: Final = re.compile(r'[;\s]filename="((?:[^"\\]|\\.)*)"', re.I)
_HEAD_END: Final = b"\r\n\r\n"


class Form:
    """Reader of one body: `feed` gives the bytes of its file, `fields` and `filename` are known at its end."""

    def __init__(self, content_type: str) -> None:
        """Raises InvalidInput: it is not a form."""
        found = _BOUNDARY.fullmatch(content_type)
        if found is None:
            remedy = "send multipart/form-data with a boundary, as OpenAI's clients do"
            raise InvalidInput("is not a form", field="content-type", value=content_type, remedy=remedy)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None: it has no file."""
        self.ended = False
        self._mark = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
        self._held = b"\r\n"  # the first mark has no line end before it
        self._name: str | None = None  # of the part that is read; None: none has begun
        self._value = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Read what came next; yields bytes of the file. What follows the last mark is dropped.

        Raises:
            InvalidInput: it is not a form, or its fields are too many or too large.
        """
        self._held = b"" if self.ended else self._held + data
        while not self.ended:
            at = self._held.find(self._mark)
            content = self._held[:at] if at >= 0 else self._held[: max(0, len(self._held) - len(self._mark) + 1)]
            self._held = self._held[len(content) :]
            if content and self._name == FILE:
                yield content
            elif self._name is not None:
                self._value += content
                if len(self._value) > FIELD_BYTES_MAX:
                    remedy = f"at most {FIELD_BYTES_MAX} bytes"
                    raise InvalidInput(
                        "is too large", field=self._name, value=f"{len(self._value)} bytes", remedy=remedy
                    )
            if at < 0 or not self._next_part():
                return

    def _next_part(self) -> bool:
        """Begin the part after a mark; False: its head has not come yet."""
        rest = self._held[len(self._mark) :]
        if len(rest) < 2:
            return False
        if rest.startswith(b"--"):
            self._end_part()
            self.ended = True
            return True
        head, end, content = rest.partition(_HEAD_END)
        if not end:
            if len(rest) > PART_HEAD_BYTES_MAX:
                raise InvalidInput("headers of a part are too long", field="body", remedy="send a whole form")
            return False
        self._end_part()
        lines = head.decode("utf-8", "replace").split("\r\n")
        disposition = next((line for line in lines if line.lower().startswith("content-disposition:")), "")
        name, filename = _NAME.search(disposition), _FILENAME.search(disposition)
        if name is None or name[1] in self.fields or (name[1] == FILE and self.filename is not None):
            raise InvalidInput("a part has no name, or that of another one", field="body", value=disposition,
                               remedy="name each part once")  # fmt: skip
        if len(self.fields) >= FIELDS_MAX:
            raise InvalidInput("has too many parts", field="body", remedy=f"at most {FIELDS_MAX}")
        self._name, self._value = name[1], b""
        if self._name == FILE:
            self.filename = filename[1] if filename is not None else ""
        self._held = content
        return True

    def _end_part(self) -> None:
        if self._name not in (None, FILE):
            assert self._name is not None
            self.fields[self._name] = self._value.decode("utf-8", "replace")
        self._name = None
