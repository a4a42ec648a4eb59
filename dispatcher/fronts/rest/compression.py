"""gzip and deflate of whole bodies, as Triton's clients use them: "deflate" is the zlib format."""

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any, Final

import grpc

from dispatcher.request.admission import StatusError
from trefoil.core.errors import InvalidInput

THREAD_BYTES: Final = 32 * 1024
PART_BYTES: Final = 4 * 2**20  # of a body that is decompressed, before they are counted
_WINDOW: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def decompress(body: bytes, encoding: str, bytes_max: float, take: Callable[[int], None]) -> bytes:
    """Decompress a request's body; of one that is larger than `bytes_max` its beginning, of one byte more.

    `take`: counts bytes that are held, part by part (below 0: that are not held any more), or raises.

    Raises:
        StatusError: UNIMPLEMENTED for another encoding.
        InvalidInput: it is damaged.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW:
        raise StatusError(
            grpc.StatusCode.UNIMPLEMENTED, f"Unsupported compression type '{encoding}'. Remedy: use gzip or deflate"
        )
    stream, rest, parts, left = zlib.decompressobj(_WINDOW[encoding]), body, list[bytes](), bytes_max + 1
    while left and not stream.eof:
        # A small body may hold a large one.
        part = await asyncio.to_thread(_expand, stream, rest, int(min(PART_BYTES, left)))
        if not part:
            break
        take(len(part))
        parts.append(part)
        rest, left = stream.unconsumed_tail, left - len(part)
    if left and (not stream.eof or stream.unused_data):
        raise InvalidInput("is cut off, or goes on after its end", field="body", remedy="send one compressed stream")
    take(-len(body))
    return parts[0] if len(parts) == 1 else await asyncio.to_thread(b"".join, parts)


def _expand(stream: Any, data: bytes, bytes_max: int) -> bytes:
    try:
        part: bytes = stream.decompress(data, bytes_max)
    except zlib.error as error:
        raise InvalidInput(f"cannot be decompressed ({error})", field="body", remedy="send it plain") from error
    return part


def chosen(accept_encoding: str) -> str:
    """Choose the encoding that the client likes best, "" = none: the first of the highest weight, as Triton chooses."""
    best, weight = "", 0.0
    for each in accept_encoding.split(","):
        name, _, q = each.strip().partition(";q=")
        try:
            given = float(q) if q else 1.0
        except ValueError:
            continue
        if name.strip() in ("gzip", "deflate", "identity") and given > weight:
            best, weight = name.strip(), given
    return "" if best == "identity" else best


async def compress(body: bytes, encoding: str) -> bytes:
    """Compress a response's body with gzip or deflate."""
    if len(body) < THREAD_BYTES:
        return _compress(body, encoding)
    return await asyncio.to_thread(_compress, body, encoding)


def _compress(body: bytes, encoding: str) -> bytes:
    return gzip.compress(body, mtime=0) if encoding == "gzip" else zlib.compress(body)
