"""Audit log of commands: one line of JSON before and one after each call that changes something.

The line before the call is on disk before anything happens, so that a crash in mid-call leaves a trace. Two files of
bounded size: `audit.jsonl` and, before it, `audit.1.jsonl`. Requests are kept whole up to `REQUEST_CHARS_MAX`.
"""

import json
import os
from itertools import count
from pathlib import Path
from typing import IO, Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message

from trefoil.runtime.clock import Clock

FILE_BYTES_MAX: Final = 16 * 2**20
REQUEST_CHARS_MAX: Final = 2000
REQUEST_BYTES_MAX: Final = 256 * 1024
"""Of a request that is written out, to be kept up to REQUEST_CHARS_MAX; a larger one is named by its size."""


class AuditLog:
    """Audit log, append-only; safe on one event loop."""

    def __init__(self, directory: Path, clock: Clock, bytes_max: int = FILE_BYTES_MAX) -> None:
        self._path = directory / "audit.jsonl"
        self._clock = clock
        self._bytes_max = bytes_max
        self._numbers = count(1)
        self._file: IO[str] | None = None

    def record_request(self, method: str, peer: str, scope: str, request: Any) -> str:
        """Note a call before it is carried out; returns its id."""
        call = f"{os.getpid()}-{next(self._numbers)}"
        self._write({"call": call, "method": method, "peer": peer, "scope": scope, "request": _text(request)})
        return call

    def record_outcome(self, call: str, code: str, why: str, took_ms: float) -> None:
        """Note what came of it: the status code, and the error's text."""
        self._write({"call": call, "code": code, "why": why, "took_ms": round(took_ms, 1)})

    def close(self) -> None:
        """Close the file; a later entry opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8")
        at_s = self._clock.now_s() + self._clock.calendar_ahead_s()
        self._file.write(json.dumps({"at_s": at_s, **entry}, separators=(",", ":")) + "\n")
        self._file.flush()
        if self._file.tell() > self._bytes_max:
            self.close()
            self._path.replace(self._path.with_name("audit.1.jsonl"))


def _text(request: Any) -> str:
    if not isinstance(request, Message):
        return ""
    if (size := request.ByteSize()) > REQUEST_BYTES_MAX:
        return f"({size} bytes)"
    text = json_format.MessageToJson(request, indent=None, preserving_proto_field_name=True)
    return text if len(text) <= REQUEST_CHARS_MAX else f"{text[:REQUEST_CHARS_MAX]}... ({len(text)} characters)"
