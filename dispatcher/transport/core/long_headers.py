"""Shortens header values of more than 64 KiB in what an HTTP/2 server sends, before libnghttp2 reads it.

libnghttp2 takes no value of more than 65,536 bytes (a constant) and ends the connection for one, with all calls on it.
A slice's error text may be longer. HPACK (RFC 7541) decodes a connection's header blocks in order, so a block cannot
be left out: its long values are replaced. A replaced value that enters the dynamic table stays larger than the table.
So it empties the table as the long one would (RFC 7541, 4.4).
"""

from collections.abc import Sequence
from typing import Final

from dispatcher.transport.core.kserve_wire import varint

VALUE_MAX: Final = 65_536
SHORT_BYTES: Final = 16 * 1024  # what stays of a long value; more than the dynamic table, which holds 4,096
HELD_MAX: Final = 256 * 1024  # of a longer block only what stays of it is held
BLOCK_MAX: Final = 512 * 1024  # that may stay of a block: the connection of a longer one ends
FRAME_MAX: Final = 1 << 20
UNREADABLE: Final = b"(more than 64 KiB of text, coded)"
_LONG: Final = VALUE_MAX * 5 // 8  # coded by Huffman's code, whose shortest symbol has 5 bits, a value is no shorter
_HEADERS, _CONTINUATION = 1, 9
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 32
_HEAD_BYTES: Final = 9


class LongHeaders:
    """Frames of one connection in the pieces in which they are read."""

    __slots__ = ("_block", "_held", "_left", "_off")

    def __init__(self) -> None:
        self._left = 0  # bytes of the last frame that are still to come
        self._held = b""  # part of a frame's head, or of a header block
        self._block: _Block | None = None  # a block that is too long to be held
        self._off = False

    def passed(self, data: memoryview) -> Sequence[bytes | memoryview]:
        """What libnghttp2 is to read of a piece, and of what was held before."""
        if self._off:
            return (data,)
        if self._held:
            data, self._held = memoryview(self._held + bytes(data)), b""
        if self._block is not None:
            return self._shortened(self._block, data)
        size, at, made, begun = len(data), self._left, [], 0
        while at + _HEAD_BYTES <= size:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if data[at + 3] == _HEADERS and (length > _LONG or not data[at + 4] & _END_HEADERS):
                end = _block_end(data, at)
                if end > size:
                    break
                made += [data[begun:at], _short_block(data[at:end])]
                at = begun = end
            else:
                at += _HEAD_BYTES + length
        if at >= size:
            self._left = at - size
            made.append(data[begun:])
        else:
            self._left = 0
            made.append(data[begun:at])
            self._hold(data[at:], made)
        return made

    def _hold(self, data: memoryview, made: list[bytes | memoryview]) -> None:
        if len(data) <= HELD_MAX:
            self._held = bytes(data)
            return
        self._block = _Block(data[4], bytes(data[5:9]))
        made += self._shortened(self._block, data)

    def _shortened(self, block: "_Block", data: memoryview) -> Sequence[bytes | memoryview]:
        """What libnghttp2 is to read of a piece that continues with a block."""
        at = 0
        while at + _HEAD_BYTES <= len(data):
            end = at + _HEAD_BYTES + int.from_bytes(data[at : at + 3])
            fits = data[at + 3] == (_CONTINUATION if block.begun else _HEADERS) and end - at <= FRAME_MAX + _HEAD_BYTES
            if fits and end > len(data):
                break
            if not fits or not block.feed(_fragment(data[at:end], first=not block.begun)):
                self._off = True  # libnghttp2 is to refuse it
                return block.frame(0), data[at:]
            flags, at = data[at + 4], end
            if flags & _END_HEADERS:
                self._block = None
                return block.frame(_END_HEADERS), *self.passed(data[at:])
        self._held = bytes(data[at:])
        return ()


class _Block:
    """A header block of which its long values are left out while it comes. `begun`: its first frame has come."""

    __slots__ = ("_flags", "_made", "_rest", "_skip", "_stream", "begun")

    def __init__(self, flags: int, stream: bytes) -> None:
        self._flags, self._stream = flags & ~(_PADDED | _PRIORITY | _END_HEADERS), stream
        self._made, self._rest = bytearray(), b""  # fields; the begin of one
        self._skip = 0  # bytes of a long value that are still to come
        self.begun = False

    def feed(self, data: memoryview) -> bool:
        """Take a part of the block; False: too much would stay of it."""
        self.begun = True
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        rest, at = self._rest + bytes(data[skipped:]), 0
        try:
            while at < len(rest):
                value_at, text_at, end, limit = _field(rest, at)
                if end - text_at > limit:
                    if len(rest) < min(end, text_at + SHORT_BYTES):
                        break
                    self._made += rest[at:value_at] + _short(rest, value_at, text_at)
                    self._skip = max(0, end - len(rest))
                elif end > len(rest):
                    break
                else:
                    self._made += rest[at:end]
                at = min(end, len(rest))
        except IndexError:  # the begin of a field
            pass
        self._rest = rest[at:]
        return len(self._made) + len(self._rest) <= BLOCK_MAX

    def frame(self, flags: int) -> bytes:
        """The block as one frame."""
        block = bytes(self._made) + self._rest
        return len(block).to_bytes(3) + bytes((_HEADERS, self._flags | flags)) + self._stream + block


def _block_end(data: memoryview, at: int) -> int:
    """Where a header block ends: its frames go up to there; beyond the data: it is not complete."""
    size = len(data)
    while at + _HEAD_BYTES <= size:
        flags, at = data[at + 4], at + _HEAD_BYTES + int.from_bytes(data[at : at + 3])
        if flags & _END_HEADERS:
            return at
        if at + _HEAD_BYTES <= size and data[at + 3] != _CONTINUATION:
            return at  # no valid sequence of frames: libnghttp2's to refuse
    return size + 1


def _fragment(frame: memoryview, first: bool) -> memoryview:
    """Part of a header block that a frame holds."""
    begin, end, flags = _HEAD_BYTES, len(frame), frame[4]
    if first and flags & _PADDED and end > begin:
        begin, end = begin + 1, end - frame[begin]
    if first and flags & _PRIORITY:
        begin += 5
    return frame[begin:end]


def _short_block(frames: memoryview) -> bytes | memoryview:
    """The frames of a header block with its long values replaced; themselves where none is long, or it is invalid."""
    flags, stream, block, at = frames[4], bytes(frames[5:9]), b"", 0
    try:
        while at < len(frames):
            end = at + _HEAD_BYTES + int.from_bytes(frames[at : at + 3])
            block += bytes(_fragment(frames[at:end], first=at == 0))
            at = end
        short = shorten(block)
    except IndexError:
        return frames
    if short is block:
        return frames
    kept_flags = flags & ~(_PADDED | _PRIORITY) | _END_HEADERS
    return len(short).to_bytes(3) + bytes((_HEADERS, kept_flags)) + stream + short


def shorten(block: bytes) -> bytes:
    """A header block (RFC 7541, 6) with its long values replaced; itself where there is none.

    Raises:
        IndexError: it ends within a field.
    """
    made, begun, at = [], 0, 0
    while at < len(block):
        value_at, text_at, at, limit = _field(block, at)
        if at - text_at > limit:
            made += [block[begun:value_at], _short(block, value_at, text_at)]
            begun = at
    if at > len(block):
        raise IndexError("a field is longer than its block")
    return b"".join((*made, block[begun:])) if made else block


def _field(block: bytes, at: int) -> tuple[int, int, int, int]:
    """Where the value of a field begins, and its text; where the field ends; and what its text is too long above.
    Raises IndexError: it is cut off before its text."""
    first = block[at]
    if first & 0x80 or first & 0xE0 == 0x20:  # an indexed field; the size of the table
        _, end = _integer(block, at, 7 if first & 0x80 else 5)
        return end, end, end, 0
    index, at = _integer(block, at, 6 if first & 0x40 else 4)
    if not index:
        length, at = _integer(block, at, 7)
        at += length
    length, text_at = _integer(block, at, 7)
    return at, text_at, text_at + length, _LONG if block[at] & 0x80 else VALUE_MAX


def _short(block: bytes, value_at: int, text_at: int) -> bytes:
    """What a long value becomes."""
    value = UNREADABLE if block[value_at] & 0x80 else block[text_at : text_at + SHORT_BYTES]
    return _string(value.ljust(SHORT_BYTES, b".") + b"...")


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """An integer with a prefix of so many bits (RFC 7541, 5.1), and where it ends; raises like `varint`."""
    whole = (1 << bits) - 1
    value, at = block[at] & whole, at + 1
    if value < whole:
        return value, at
    more, at = varint(block, at)
    return whole + more, at


def _string(value: bytes) -> bytes:
    made, rest = bytearray((0x7F,)), len(value) - 0x7F  # not coded; of more than 126 bytes
    while rest >= 0x80:
        made.append(rest & 0x7F | 0x80)
        rest >>= 7
    made.append(rest)
    return bytes(made) + value
