"""Limits of requests to the command ports: what any operator may send, checked before anybody converts it.

Whatever a message holds, looking at it costs a bounded amount: its parts are counted before they are looked at. Numbers
are finite, times are times, texts have a length: the services' own checks need not think of the rest.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from trefoil.core.errors import InvalidInput

PARTS_MAX: Final = 50_000
"""Messages, and members of lists and maps, of one request. A plan of 1,000 GPUs of 7 slices has 37,000."""
TEXT_CHARS_MAX: Final = 16_384
SECONDS_MIN, SECONDS_MAX = -62_135_596_800, 253_402_300_799  # the years 1 to 9999: what protobuf calls a time
_TIMESTAMP: Final = Timestamp.DESCRIPTOR.full_name


def check_request(request: Message) -> None:
    """Check a request's size and values.

    Raises:
        InvalidInput: more than PARTS_MAX parts, a text above TEXT_CHARS_MAX, a number that is not finite, or no time.
    """
    left = PARTS_MAX
    waiting: list[tuple[str, Any]] = [("", request)]
    while waiting:
        path, message = waiting.pop()
        if message.DESCRIPTOR.full_name == _TIMESTAMP:
            _check_time(path, message)
            continue
        for field, value in message.ListFields():
            here = f"{path}.{field.name}" if path else field.name
            left -= len(value) if field.is_repeated else field.message_type is not None
            if left < 0:
                raise InvalidInput(f"the request has more than {PARTS_MAX} parts", field=here, remedy="send fewer")
            for each in _members(field, value):
                if isinstance(each, Message):
                    waiting.append((here, each))
                else:
                    _check_scalar(here, each)


def _members(field: Any, value: Any) -> Sequence[Any]:
    """What a field holds: itself, or its members; of a map its keys and values."""
    if not field.is_repeated:
        return (value,)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return (*value.keys(), *value.values())
    return value  # type: ignore[no-any-return]


def _check_scalar(field: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput("is not a number", field=field, value=value, remedy="send a finite one")
    if isinstance(value, str | bytes) and len(value) > TEXT_CHARS_MAX:
        raise InvalidInput(f"is longer than {TEXT_CHARS_MAX}", field=field, value=value, remedy="send a shorter text")


def _check_time(field: str, time: Any) -> None:
    if not (SECONDS_MIN <= time.seconds <= SECONDS_MAX and 0 <= time.nanos < 1_000_000_000):
        value = f"{time.seconds} s and {time.nanos} ns"
        raise InvalidInput("is not a time", field=field, value=value, remedy="send one of the years 1 to 9999")
