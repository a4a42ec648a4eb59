"""Scopes of callers on a command port: who may call what, which methods only ask, and how much a request may hold.

Whatever a request holds, looking at it costs a bounded amount: its parts are counted before they are looked at. Numbers
are finite, times are times, texts have a length: the services' own checks need not think of the rest.
"""

import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import SecretStr

from trefoil.core import errors
from trefoil.core.errors import InvalidInput
from trefoil.core.outside.ranges import complaint
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.secret_files import accepted

READ_VERBS: Final = ("Get", "Watch", "List", "Explain", "Preview")


def asks_only(method: str) -> bool:
    """True if a method changes nothing, by the verb its name begins with; what is not known to ask, commands."""
    return method.rpartition("/")[2].startswith(READ_VERBS)


class Scopes(Protocol):
    """Scopes: what a caller may do, by its metadata."""

    def scope(self, metadata: Any) -> str:
        """Scope of a caller: "control", "read", "open" (no token demanded), "denied" (known, may nothing), "", or the
        path that all methods begin with which it may call, as "/trefoil.dispatcher.v1.Jobs/"."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that callers must present: `control` opens everything, `read` what only asks. None: no demand."""

    control: SecretStr | None = None
    read: SecretStr | None = None

    @classmethod
    def from_settings(cls, settings: ServiceSettings) -> "Tokens":
        """Tokens of settings; errors.SettingError for a read token without a control token: all could command."""
        if settings.read_token is not None and settings.token is None:
            remedy = "set token too: it guards commands"
            raise errors.SettingError("set without token", field="read_token", remedy=remedy)
        return cls(settings.token, settings.read_token)

    def scope(self, metadata: Any) -> str:
        """Scope of a caller: "control", "read", "open" (no token demanded), or "" without a valid token."""
        if self.control is None:
            return "open"
        given = str(dict(metadata or ()).get("authorization", "")).encode()
        if _shows(given, self.control):
            return "control"
        return "read" if self.read is not None and _shows(given, self.read) else ""


def _shows(authorization: bytes, token: SecretStr) -> bool:
    return any(hmac.compare_digest(authorization, f"Bearer {each}".encode()) for each in accepted(token))


PARTS_MAX: Final = 50_000
"""Messages, and members of lists and maps, of one request. A plan of 1,000 GPUs of 7 slices has 37,000."""
TEXT_CHARS_MAX: Final = 16_384
SECONDS_MIN, SECONDS_MAX = -62_135_596_800, 253_402_300_799  # the years 1 to 9999: what protobuf calls a time
_TIMESTAMP: Final = Timestamp.DESCRIPTOR.full_name


def check_request(request: Message) -> None:
    """Check a request's size and values.

    Raises:
        InvalidInput: more than PARTS_MAX parts, a text above TEXT_CHARS_MAX, a number that is not finite or out of the
            range of its name, or no time.
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
    computed = isinstance(value, float) and field.startswith("plan.")  # figures of a plan, e.g. its optimality gap
    if why := complaint(field.rpartition(".")[2], value, computed=computed):
        raise InvalidInput(why, field=field, value=value, remedy="correct that value")
    if isinstance(value, str | bytes) and len(value) > TEXT_CHARS_MAX:
        raise InvalidInput(f"is longer than {TEXT_CHARS_MAX}", field=field, value=value, remedy="send a shorter text")


def _check_time(field: str, time: Any) -> None:
    if not (SECONDS_MIN <= time.seconds <= SECONDS_MAX and 0 <= time.nanos < 1_000_000_000):
        value = f"{time.seconds} s and {time.nanos} ns"
        raise InvalidInput("is not a time", field=field, value=value, remedy="send one of the years 1 to 9999")


def _with_token(details: grpc.aio.ClientCallDetails, token: SecretStr) -> grpc.aio.ClientCallDetails:
    shown = ("authorization", f"Bearer {token.get_secret_value()}")
    metadata = grpc.aio.Metadata(*(details.metadata or ()), shown)
    return details._replace(metadata=metadata)


class UnaryToken(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Interceptor that adds the token to calls with one answer."""

    def __init__(self, token: SecretStr) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class StreamToken(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Interceptor that adds the token to calls with a stream of answers."""

    def __init__(self, token: SecretStr) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class UploadToken(grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[misc]
    """Interceptor that adds the token to calls with a stream of requests."""

    def __init__(self, token: SecretStr) -> None:
        self._token = token

    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request_iterator)
