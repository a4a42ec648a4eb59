"""Audit log of commands: one line of JSON before and one after each call that changes something.

The line before the call is on disk before anything happens, so that a crash in mid-call leaves a trace: a call that
cannot be noted is refused. Two files of bounded size: `audit.jsonl` and, before it, `audit.1.jsonl`. Requests are kept
whole up to `REQUEST_CHARS_MAX`.
"""

import contextlib
import json
import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message

from trefoil.core import errors
from trefoil.runtime.clock import Clock
from trefoil.runtime.files import FileTrouble, LineFile

if TYPE_CHECKING:
    from trefoil.runtime.telemetry import Metrics

FILE_BYTES_MAX: Final = 16 * 2**20
REQUEST_CHARS_MAX: Final = 2000
REQUEST_BYTES_MAX: Final = 256 * 1024
"""Of a request that is written out, to be kept up to REQUEST_CHARS_MAX; a larger one is named by its size."""


class AuditLog:
    """Audit log, append-only; safe on one event loop."""

    def __init__(
        self, directory: Path, clock: Clock, metrics: "Metrics | None" = None, bytes_max: int = FILE_BYTES_MAX
    ) -> None:
        self._file = LineFile(directory / "audit.jsonl", mode=0o600)
        self._clock = clock
        self._bytes_max = bytes_max
        self._numbers = count(1)
        self._trouble = FileTrouble("audit", "no command is carried out that cannot be noted", metrics)

    def record_request(self, method: str, peer: str, scope: str, request: Any) -> str:
        """Note a call before it is carried out; returns its id.

        Raises:
            errors.DiskUnavailable: it is not noted, so it must not be carried out.
        """
        call = f"{os.getpid()}-{next(self._numbers)}"
        self._write({"call": call, "method": method, "peer": peer, "scope": scope, "request": _text(request)})
        return call

    def record_outcome(self, call: str, code: str, why: str, took_ms: float) -> None:
        """Note its outcome: the status code, and the error's text. It has happened, noted or not."""
        with contextlib.suppress(errors.DiskUnavailable):  # said by `_write`
            self._write({"call": call, "code": code, "why": why, "took_ms": round(took_ms, 1)})

    def close(self) -> None:
        """Close the file; a later entry opens it again."""
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        at_s = self._clock.now_s() + self._clock.calendar_ahead_s()
        line = json.dumps({"at_s": at_s, **entry}, separators=(",", ":"))
        try:
            self._file.append(line.encode())
            if self._file.size > self._bytes_max:
                self.close()
                self._file.path.replace(self._file.path.with_name("audit.1.jsonl"))
        except OSError as error:
            raise self._trouble.begin(self._file.path, error) from error
        self._trouble.end()


def _text(request: Any) -> str:
    if not isinstance(request, Message):
        return ""
    if (size := request.ByteSize()) > REQUEST_BYTES_MAX:
        return f"({size} bytes)"
    text = json_format.MessageToJson(request, indent=None, preserving_proto_field_name=True)
    return text if len(text) <= REQUEST_CHARS_MAX else f"{text[:REQUEST_CHARS_MAX]}... ({len(text)} characters)"
