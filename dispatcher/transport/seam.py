"""What the dispatcher asks of a transport, and which one it is: `h2` (libnghttp2) or `grpc` (grpc.aio)."""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import grpc

TRANSPORTS: Final = ("h2", "grpc")

Parts = Sequence[bytes | memoryview]
Metadata = Iterable[tuple[str, Any]]
Trailers = tuple[tuple[str, Any], ...]


class NotTaken(grpc.aio.AioRpcError):  # type: ignore[misc]  # grpc has no types
    """Call that the server never processed. The channel knows this itself: no connection, GOAWAY, REFUSED_STREAM."""


class ConnectionDied(grpc.aio.AioRpcError):  # type: ignore[misc]
    """Call whose connection died under it. The server may have processed it."""


class Leaving(NamedTuple):
    """What becomes of a call whose caller is cancelled before its end, or closes its stream: it goes on to its end, for
    `grace_s` at most, then it is cancelled on its server. `ended(answered)` is called once, when it has ended."""

    grace_s: float
    ended: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Pings of a connection, also without calls: a host that vanished refuses nothing, it is silent."""

    every_s: float
    timeout_s: float


class Channel(Protocol):
    """Client's end: one server (`host:port`, or `unix:path`), connected at once, and again when the connection breaks.

    Messages go out in parts, one after the other. Errors are `grpc.aio.AioRpcError`: `NotTaken` or `ConnectionDied`
    where the channel itself knows of it, else an answer of the server, whatever its status and text.
    """

    def get_state(self, try_to_connect: bool = False) -> Any:
        """State of the connection (`grpc.ChannelConnectivity`)."""
        ...

    async def wait_for_state_change(self, last: Any) -> None:
        """Wait until the state is not this one."""
        ...

    async def unary(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> tuple[bytes, Trailers]:  # fmt: skip
        """Answer and trailing metadata. Cancelling it cancels the call on the server, at once or as `leaving` says."""
        ...

    def stream(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Answers to one message. Closing it does as cancelling it: see `unary`."""
        ...

    async def close(self, grace_s: float | None = None) -> None:
        """Take no more calls; those under way may finish within the grace, and are then cancelled."""
        ...


class Server(Protocol):
    """Server's end, bound; `port` is the real one when its address asked for port 0, and 0 for a Unix socket."""

    port: int

    async def start(self) -> None:
        """Serve."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let calls in flight finish within the grace, end the rest. Called again, before it has ended:
        the shorter grace counts."""
        ...
