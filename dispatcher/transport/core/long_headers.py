"""Shortens header values of more than 64 KiB in what an HTTP/2 server sends, before libnghttp2 reads it.

libnghttp2 takes no value of more than 65,536 bytes (a constant) and ends the connection for one, with all calls on it.
A slice's error text may be longer. HPACK (RFC 7541) decodes a connection's header blocks in order, so a block cannot
be left out: its long values are replaced. A replaced value that enters the dynamic table stays larger than the table,
so that it empties it as the long one would (RFC 7541, 4.4).
"""

from collections.abc import Sequence
from typing import Final

VALUE_MAX: Final = 65_536
SHORT_BYTES: Final = 16 * 1024  # what stays of a long value; more than the dynamic table, which holds 4,096
BLOCK_MAX: Final = 4 << 20  # a longer block is not held: its connection ends
UNREADABLE: Final = b"(more than 64 KiB of text, coded)"
_LONG: Final = VALUE_MAX * 5 // 8  # coded by Huffman's code, whose shortest symbol has 5 bits, a value is no shorter
_HEADERS, _CONTINUATION = 1, 9
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 32
_HEAD_BYTES: Final = 9


class LongHeaders:
    """Frames of one connection in the pieces in which they are read."""

    __slots__ = ("_held", "_left", "_off")

    def __init__(self) -> None:
        self._left = 0  # bytes of the last frame that are still to come
        self._held = b""  # part of a frame's head, or of a header block
        self._off = False

    def passed(self, data: memoryview) -> Sequence[bytes | memoryview]:
        """What libnghttp2 is to read of a piece, and of what was held before."""
        if self._off:
            return (data,)
        if self._held:
            data, self._held = memoryview(self._held + bytes(data)), b""
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
        self._held = bytes(data)
        if len(self._held) > BLOCK_MAX:
            made.append(self._held)
            self._held, self._off = b"", True


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


def _short_block(frames: memoryview) -> bytes | memoryview:
    """The frames of a header block with its long values replaced; themselves where none is long, or it is invalid."""
    flags, stream, block, at = frames[4], bytes(frames[5:9]), b"", 0
    try:
        while at < len(frames):
            end = at + _HEAD_BYTES + int.from_bytes(frames[at : at + 3])
            first, kept = at + _HEAD_BYTES, end
            if at == 0 and flags & _PADDED:
                first, kept = first + 1, kept - frames[first]
            if at == 0 and flags & _PRIORITY:
                first += 5
            block += bytes(frames[first:kept])
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
        first = block[at]
        if first & 0x80:  # an indexed field
            _, at = _integer(block, at, 7)
            continue
        if first & 0xE0 == 0x20:  # the size of the table
            _, at = _integer(block, at, 5)
            continue
        index, at = _integer(block, at, 6 if first & 0x40 else 4)
        if not index:
            length, at = _integer(block, at, 7)
            at += length
        value_at = at
        length, at = _integer(block, at, 7)
        coded = bool(block[value_at] & 0x80)
        if length > (_LONG if coded else VALUE_MAX):
            value = UNREADABLE if coded else block[at : at + SHORT_BYTES]
            made += [block[begun:value_at], _string(value.ljust(SHORT_BYTES, b".") + b"...")]
            begun = at + length
        at += length
    if at > len(block):
        raise IndexError("a field is longer than its block")
    return b"".join((*made, block[begun:])) if made else block


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """An integer with a prefix of so many bits (RFC 7541, 5.1), and where it ends."""
    whole = (1 << bits) - 1
    value, at = block[at] & whole, at + 1
    if value < whole:
        return value, at
    shift = 0
    while True:
        value += (block[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not block[at - 1] & 0x80:
            return value, at


def _string(value: bytes) -> bytes:
    made, rest = bytearray((0x7F,)), len(value) - 0x7F  # not coded; of more than 126 bytes
    while rest >= 0x80:
        made.append(rest & 0x7F | 0x80)
        rest >>= 7
    made.append(rest)
    return bytes(made) + value
