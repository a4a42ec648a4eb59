"""Lines of a batch's input file: {"custom_id", "method", "url", "body"}, one request each. Checked in a process, since
a file may have a million.

Source: OpenAI's guide to the Batch API. Codes of errors are those that OpenAI and Azure document.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dispatcher.fronts.openai import bodies
from dispatcher.fronts.openai.bodies import Asked, AskedVectors
from dispatcher.fronts.rest import json_text
from dispatcher.routing.request_parameters import CLASS, MIN_ACCURACY, SLO_MS
from trefoil.core.errors import VALUE_CHARS_MAX, InvalidInput, TrefoilError, Unavailable
from trefoil.runtime.files import open_regular

ERRORS_MAX: Final = 50
"""Errors of a file that are named; it is read no further."""
ID_CHARS_MAX: Final = 512
_KEYS: Final = frozenset(("custom_id", "method", "url", "body"))
_REFUSED: Final = ("timeout", "priority", CLASS, MIN_ACCURACY, SLO_MS)
"""Parameters of requests that lines cannot have: a batch has a deadline, and no other objective."""


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch cannot be run, as OpenAI has it. `line` counts from 1; 0: the file."""

    code: str
    message: str
    line: int = 0
    param: str = ""


@dataclass(slots=True)
class Checked:
    """What a file holds: its requests and their one model; errors, with which it is not a batch."""

    model: str = ""
    requests: int = 0
    errors: list[LineError] = field(default_factory=list)


def lines_of(file: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file that are not empty, without line ends."""
    return (line for line in map(bytes.strip, file) if line)


def check_file(path: str, endpoint: str, requests_max: int, line_bytes_max: int) -> Checked:
    """Check all lines of a file. Raises Unavailable: the disk does not give it."""
    found, seen = Checked(), set[bytes]()
    try:
        with open(open_regular(Path(path)), "rb") as file:
            for number, line in enumerate(_bounded(file, line_bytes_max), 1):
                if len(line) <= line_bytes_max and not line.strip():
                    continue
                found.requests += 1
                error = _check(line, endpoint, line_bytes_max, seen, found)
                if found.requests > requests_max:
                    remedy = "make several batches, or raise the dispatcher's jobs_items_max"
                    error = LineError("too_many_tasks", f"more than {requests_max} requests. Remedy: {remedy}")
                if error is not None:
                    found.errors.append(LineError(error.code, error.message, number, error.param))
                if found.requests > requests_max or len(found.errors) >= ERRORS_MAX:
                    break
    except OSError as error:
        why = f"the file cannot be read: {error.strerror}; no batch was made"
        raise Unavailable(why, remedy="try again") from error
    if not found.requests:
        found.errors.append(LineError("empty_file", "the file holds no request. Remedy: write one a line"))
    return found


def _bounded(file: Any, line_bytes_max: int) -> Iterator[bytes]:
    """Lines of a file without their ends; of one that is too long its beginning, longer than the bound."""
    while line := file.readline(line_bytes_max + 2):
        yield line.removesuffix(b"\n").removesuffix(b"\r")
        while line and not line.endswith(b"\n"):
            line = file.readline(line_bytes_max)


def _check(line: bytes, endpoint: str, line_bytes_max: int, seen: set[bytes], found: Checked) -> LineError | None:
    if len(line) > line_bytes_max:  # also of spaces: the line is copied whole
        return LineError("invalid_request", f"the line is too large. Remedy: at most {line_bytes_max} bytes")
    try:
        given = json_text.parse(line)
    except InvalidInput as error:
        return LineError("invalid_json_line", f"this line is not a JSON object: {error.message}")
    custom_id, body = given.get("custom_id"), given.get("body")
    if type(custom_id) is not str or not 0 < len(custom_id) <= ID_CHARS_MAX:
        return _wrong("custom_id", custom_id, f"send a text of 1 to {ID_CHARS_MAX} characters")
    if given.get("method") != "POST":
        return _wrong("method", given.get("method"), "send POST")
    if given.get("url") != endpoint:
        return _wrong("url", given.get("url"), f"send {endpoint}, the batch's endpoint", "url_mismatch")
    if type(body) is not dict:
        return _wrong("body", body, f"send the body of a request to {endpoint}")
    if unknown := sorted(given.keys() - _KEYS):
        return _wrong(unknown[0][:VALUE_CHARS_MAX], given[unknown[0]], f"a line has {', '.join(sorted(_KEYS))}")
    digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        return _wrong("custom_id", custom_id, "give each line its own", "duplicate_custom_id")
    seen.add(digest)
    model = body.get("model")
    if type(model) is not str or not 0 < len(model) <= ID_CHARS_MAX:
        return _wrong("body.model", model, "name a family: GET /v1/models")
    found.model = found.model or model
    if model != found.model:
        return _wrong("body.model", model, f"send {found.model}, as the lines before, or make two batches",
                      "model_mismatch")  # fmt: skip
    return None


def _wrong(param: str, value: Any, remedy: str, code: str = "invalid_request") -> LineError:
    shown = "missing" if value is None else value
    return LineError(code, str(InvalidInput("is not taken", field=param, value=shown, remedy=remedy)), param=param)


def read_line(line: bytes) -> tuple[str, Asked | AskedVectors | TrefoilError]:
    """Read a line of a file that was checked: its custom_id, and what it asks for or why that is refused.

    Raises:
        InvalidInput: it is none.
    """
    given = json_text.parse(line)
    custom_id, body = str(given.get("custom_id", "")), given.get("body")
    try:
        for name in _REFUSED:
            if type(body) is dict and name in body:
                raise InvalidInput("is not for batches", field=name, value=body[name], remedy="leave it out")
        asked = bodies.read(body if type(body) is dict else {}, {}, str(given.get("url")))
        if isinstance(asked, Asked) and asked.stream:
            raise InvalidInput("a batch has no stream", field="stream", value=True, remedy="leave it out")
        return custom_id, asked
    except InvalidInput as error:
        return custom_id, error
