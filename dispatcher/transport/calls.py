"""Types of a channel's calls: what they send, how they fail, what becomes of one whose caller leaves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

Parts = Sequence[bytes | memoryview]
Metadata = Iterable[tuple[str, Any]]
Trailers = tuple[tuple[str, Any], ...]


class NotTaken(grpc.aio.AioRpcError):  # type: ignore[misc]  # grpc has no types
    """Call that the server never processed. The channel knows this itself: no connection, GOAWAY, REFUSED_STREAM."""


class ConnectionDied(grpc.aio.AioRpcError):  # type: ignore[misc]
    """Call whose connection died under it. The server may have processed it."""


def call_error(
    code: str,
    details: str,
    trailers: Iterable[tuple[str, Any]] = (),
    kind: type[grpc.aio.AioRpcError] = grpc.aio.AioRpcError,
) -> grpc.aio.AioRpcError:
    """Error of a call that ended with a status."""
    return kind(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details)


class Leaving(NamedTuple):
    """What becomes of a call whose caller is cancelled before its end, or closes its stream: it continues to its end,
    for `grace_s` at most, then it is cancelled on its server. `ended(code)` is called once, when it has ended: with
    the name of its server's status, "" = it was cut."""

    grace_s: float
    ended: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Pings of a connection, also without calls: a host that vanished refuses nothing, it is silent."""

    every_s: float
    timeout_s: float
