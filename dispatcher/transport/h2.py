"""One HTTP/2 connection of either end in asyncio, on libnghttp2 (wheel ngh2). Nothing else imports ngh2.

What is written in one turn of the event loop goes out as one. Data counts as received only once a reader has `taken`
it: until then the peer's window stays closed by as much, so no peer can fill our memory with unread data.

ngh2 is young (0.3): what is used of it is held by tests/contract/test_ngh2.py. It forgets what came of a frame whose
stream is reset before the frame's end, and the connection's window would stay that much closed: a reset waits for that
end.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import ngh2

NO_ERROR: Final = 0
REFUSED_STREAM: Final = 7
CANCEL: Final = 8

Headers = Sequence[tuple[bytes, bytes]]
WRITE_BYTES: Final = 36 * 1024  # in one piece, two frames: ngh2 lengthens it by a frame at a time, and copies it
ALL_WRITTEN_BYTES: Final = 4096  # in the last piece: any other ends where a whole frame of 16 KiB does not fit in
READ_BYTES: Final = 256 * 1024
READ_BYTES_MIN: Final = 4096
FIRST_READ_BYTES: Final = 16 * 1024
READ_S: Final = 0.002
"""Time of one read, beyond which the next is smaller: 256 KiB may hold 50,000 messages, or begin 4,000 calls."""
FRAME_BYTES: Final = 1 << 20  # that a peer may send in one frame
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 3, 4, 5, 6
_PING: Final = b"trefoil!"
_PREFACE_BYTES: Final = 24  # that a client sends before its first frame (RFC 9113, 3.4)
_HEAD_BYTES: Final = 9  # of a frame: its length, its type, flags, its stream
_DATA: Final = 0

_read_buffer: Final = memoryview(bytearray(READ_BYTES))
"""What a read fills is used up before the next one begins, on whichever connection."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one connection."""

    streams_max: int = 4096
    header_bytes_max: int = 64 * 1024
    stream_window_bytes: int = 1 << 20
    connection_window_bytes: int = 1 << 24
    resets_per_s: int = 1000
    resets_burst: int = 10_000


class Held:
    """Bytes of unread messages, either way, over all connections of a worker, and of requests of its REST port."""

    def __init__(self, bytes_max: int = 1 << 62) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.unsent_bytes = 0  # of these: answers that their clients do not read

    @property
    def unsent_full(self) -> bool:
        """Whether answers alone take half of it."""
        return 2 * self.unsent_bytes > self.bytes_max

    @property
    def full(self) -> str:
        """Reason to refuse what there is no room for; empty: there is room."""
        if self.bytes <= self.bytes_max:
            return ""
        return f"{self.bytes} bytes of messages are held here, at most {self.bytes_max}: try again later"

    def add_unsent(self, count: int) -> None:
        """Count what is not read, or, below 0, what has been."""
        self.bytes += count
        self.unsent_bytes += count


class H2Connection(asyncio.BufferedProtocol):
    """One end of a connection; subclasses say what streams do. Belongs to one event loop."""

    ROLE: ClassVar[Any]
    EVENTS: ClassVar[Mapping[type, str]] = {}
    """Name of the method that takes each event."""

    def __init__(self, limits: ConnectionLimits, held: Held) -> None:
        self.limits = limits
        self.held = held
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.unsent_bytes = 0  # that the peer has not read
        self._h2 = ngh2.Connection(
            self.ROLE,
            ngh2.Configuration(
                auto_window_update=False,
                stream_reset_rate_limit=(limits.resets_burst, limits.resets_per_s),
                max_inbound_header_list_size=limits.header_bytes_max,
                max_send_header_block_length=max(65_536, limits.header_bytes_max),
            ),
        )
        self._takers = {event: getattr(self, name) for event, name in self.EVENTS.items()}
        self._read_bytes = FIRST_READ_BYTES  # at once
        self._scheduled = False
        self._paused = False
        self._ping_answered: Callable[[], None] | None = None
        self._writes: list[asyncio.Future[None]] = []  # wait for the next one
        self._head = b""  # begin of a frame's head
        self._left = _PREFACE_BYTES if self.ROLE is SERVER else 0  # bytes of the last frame that are still to come
        self._coming = 0  # the stream whose data they are, if they are data
        self._resets: dict[int, int] = {}  # of streams, by error code, that wait for that frame's end

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self.transport = cast(asyncio.Transport, transport)
        limits = self.limits
        self._h2.initiate_connection(
            {
                _MAX_CONCURRENT_STREAMS: limits.streams_max,
                _INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                _MAX_FRAME_SIZE: FRAME_BYTES,
                _MAX_HEADER_LIST_SIZE: limits.header_bytes_max,
            }
        )
        self._h2.set_local_window_size(limits.connection_window_bytes)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return _read_buffer[: self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has come."""
        if self.closed:
            return
        began_s = self.loop.time()
        try:
            data = _read_buffer[:nbytes]
            self._follow(data)
            self.receive(data)
            takers = self._takers
            for event in self._h2.events():
                take = takers.get(type(event))
                if take is not None:
                    take(event)
            for stream_id in [each for each in self._resets if each != self._coming]:
                self.reset(stream_id, self._resets[stream_id])
        except ngh2.NGH2Error as error:
            self.lost(f"its peer does not speak HTTP/2 as it should: {error}")
            return
        if self.loop.time() - began_s > READ_S:
            self._read_bytes = max(READ_BYTES_MIN, self._read_bytes // 4)
        elif nbytes == self._read_bytes:
            self._read_bytes = min(READ_BYTES, 2 * self._read_bytes)
        if self._h2.want_write or self.unsent_bytes or not self._h2.want_read:
            self.schedule()

    def receive(self, data: memoryview) -> None:
        """Pass what has come to libnghttp2."""
        self._h2.receive_data(data)

    def _follow(self, data: memoryview) -> None:
        """Note of which stream a frame of data has begun and not ended."""
        if self._head:
            data = memoryview(self._head + bytes(data))
        at, size, begun = self._left, len(data), -1
        while at + _HEAD_BYTES <= size:
            begun = at
            at += _HEAD_BYTES + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
        self._head = bytes(data[at:])
        self._left = max(0, at - size)
        if not self._left:
            self._coming = 0
        elif begun >= 0:
            is_data = data[begun + 3] == _DATA
            self._coming = int.from_bytes(data[begun + 5 : begun + _HEAD_BYTES]) & 0x7FFFFFFF if is_data else 0

    def eof_received(self) -> bool:
        """Half a connection is none."""
        return False

    def pause_writing(self) -> None:
        """The peer reads more slowly than we write."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._paused = False
        self.schedule()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self.lost(f"Socket closed ({exc})" if exc else "Socket closed")

    # What subclasses call

    def schedule(self) -> None:
        """Write at the end of this turn."""
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write as much as the peer's windows and the socket take."""
        self._scheduled = False
        if self.closed or self.transport is None or self.transport.is_closing():
            return
        h2, transport, wrote = self._h2, self.transport, False
        try:
            while not self._paused:
                data = h2.data_to_send(WRITE_BYTES)
                if data:
                    transport.write(data)
                    wrote = True
                if len(data) < ALL_WRITTEN_BYTES:
                    break
            unsent = h2.queued_body_size() + (transport.get_write_buffer_size() if self._paused else 0)
            done = not h2.want_read and not h2.want_write
        except ngh2.NGH2Error as error:
            self.lost(f"HTTP/2 broke: {error}")
            return
        if unsent or self.unsent_bytes:
            self.held.add_unsent(unsent - self.unsent_bytes)
            self.unsent_bytes = unsent
            self.on_unsent()
        if wrote and self._writes:
            writes, self._writes = self._writes, []
            for each in writes:
                if not each.done():
                    each.set_result(None)
        if done:
            self.end()

    @property
    def dying(self) -> bool:
        """Whether it has ended but for what its peer does not read."""
        try:
            return not self.closed and not self._h2.want_read
        except ngh2.NGH2Error:
            return True

    def end(self) -> None:
        """Close the socket once everything has been written."""
        if not self.closed and self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def send_parts(self, stream_id: int, parts: Sequence[bytes | memoryview], end_stream: bool = False) -> None:
        """Send parts one after the other, without a copy. Raises `Http2Error`."""
        if len(parts) > 1:
            for part in parts[:-1]:
                self._h2.send_data(stream_id, part)
        self._h2.send_data(stream_id, parts[-1], end_stream=end_stream)

    def acknowledge(self, stream_id: int, count: int) -> None:
        """So many bytes of a stream have been taken where its event was: its peer may send as many more."""
        try:
            self._h2.acknowledge_received_data(count, stream_id)
        except ngh2.ConnectionStateError:
            return  # it is ending: no more is sent

    def taken(self, stream_id: int, count: int) -> None:
        """The same, later."""
        if count and not self.closed:
            self.acknowledge(stream_id, count)
            if self._h2.want_write:  # else the window is still wide
                self.schedule()

    def reset(self, stream_id: int, error_code: int = CANCEL) -> None:
        """End a stream both ways, once the frame has ended in whose midst its peer is; nothing happens if it has
        ended."""
        if self.closed:
            return
        if stream_id == self._coming:
            self._resets[stream_id] = error_code
            return
        self._resets.pop(stream_id, None)
        try:
            self._h2.reset_stream(stream_id, error_code)
        except (ngh2.StreamUnavailableError, ngh2.ConnectionStateError):
            return
        self.schedule()

    def unsent_of(self, stream_id: int) -> int:
        """Bytes of a stream that still wait for its peer's window."""
        return 0 if self.closed else int(self._h2.queued_body_size(stream_id))

    def next_write(self) -> asyncio.Future[None]:
        """Done when something has been written; never, if the connection ends first."""
        written = self.loop.create_future()
        self._writes.append(written)
        return written

    def say_goodbye(self, last: bool) -> None:
        """GOAWAY: a notice first, with which nothing is lost; then, `last`, that no new stream is taken."""
        if self.closed:
            return
        try:
            if last:
                self._h2.send_goaway(NO_ERROR)
            else:
                self._h2.send_shutdown_notice()
        except ngh2.NGH2Error:
            return  # it is ending already
        self.schedule()

    def ping(self, answered: Callable[[], None]) -> None:
        """Ask whether the peer is there."""
        if not self.closed:
            self._ping_answered = answered
            try:
                self._h2.ping(_PING)
            except ngh2.ConnectionStateError:
                return  # it is ending and does not answer
            self.schedule()

    def on_pong(self, event: Any) -> None:
        """The peer is there."""
        if self._ping_answered is not None:
            answered, self._ping_answered = self._ping_answered, None
            answered()

    def lost(self, why: str) -> None:
        """The connection has ended, for whichever reason: once, and for good."""
        if self.closed:
            return
        self.closed = True
        self._takers.clear()  # what else has come says nothing any more
        self.held.add_unsent(-self.unsent_bytes)
        self.unsent_bytes = 0
        if self.transport is not None:
            self.transport.abort()
        self.on_lost(why)

    # What subclasses do

    def on_lost(self, why: str) -> None:
        """Everything under way has ended."""

    def on_unsent(self) -> None:
        """Something waits for the peer to read, or did."""


CLIENT: Final = ngh2.Role.CLIENT
SERVER: Final = ngh2.Role.SERVER
RequestReceived: Final = ngh2.RequestReceived
ResponseReceived: Final = ngh2.ResponseReceived
DataReceived: Final = ngh2.DataReceived
TrailersReceived: Final = ngh2.TrailersReceived
StreamReset: Final = ngh2.StreamReset
StreamClosed: Final = ngh2.StreamClosed
SettingsReceived: Final = ngh2.SettingsReceived
PingAcknowledged: Final = ngh2.PingAcknowledged
GoAwayReceived: Final = ngh2.GoAwayReceived
Http2Error: Final = ngh2.NGH2Error
