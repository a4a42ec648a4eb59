"""JSON text as Triton's RapidJSON reads it (flag `kParseNanAndInfFlag`), by Python's `json`.

Where the two differ, it follows Triton. It skips a byte order mark, ends the text at a NUL, and takes the first of
equal keys. `Inf`, `-Inf` and `-NaN` are numbers, as `Infinity` and `NaN` are. It refuses a number beyond a double, and
half a surrogate pair.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from trefoil.core.errors import InvalidInput

_BYTE_ORDER_MARK: Final = re.compile(rb"\xef?\xbb?\xbf?")  # each byte of it counts
_OTHER_NAMES: Final = re.compile(rb"Inf(?!inity)|-NaN")
_STRING_OR_NAME: Final = re.compile(rb'"(?:[^"\\]++|(?:\\.)++)*+"?|Inf(?!inity)|-NaN', re.DOTALL)
_MAY_OVERFLOW: Final = re.compile(rb"[eE]\+?0*[1-9]\d\d|(?<!\d)\d{300}")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(text: bytes) -> Mapping[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidInput: it is none.
    """
    begin, end = _BYTE_ORDER_MARK.match(text), text.find(b"\0")
    assert begin is not None, "it matches an empty text too"
    text = text[begin.end() : end if end >= 0 else None]
    if _OTHER_NAMES.search(text):
        text = _STRING_OR_NAME.sub(_as_python_has_it, text)
    bounded: dict[str, Any] = {}
    if _MAY_OVERFLOW.search(text):
        bounded = {"parse_float": _finite, "parse_int": _whole}
    try:
        given = json.loads(text.decode(), object_pairs_hook=_first_wins, **bounded)
        if _SURROGATE.search(text):
            json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidInput(
            f"failed to parse the request JSON buffer: a text is not Unicode, {half!r} is half a surrogate pair",
            remedy="send both halves, or UTF-8",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"failed to parse the request JSON buffer: {error}", remedy="send a JSON object") from error
    if type(given) is not dict:
        raise InvalidInput("the request is not a JSON object", remedy="send {'inputs': [...]}")
    return given


def _as_python_has_it(found: re.Match[bytes]) -> bytes:
    return {b"Inf": b"Infinity", b"-NaN": b"NaN"}.get(found[0], found[0])


def _first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("Number too big to be stored in double")
    return number


def _whole(digits: str) -> int:
    _finite(digits)
    return int(digits)
