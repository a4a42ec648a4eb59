"""gzip and deflate of whole bodies, as Triton's clients use them: "deflate" is the zlib format."""

import asyncio
import gzip
import math
import zlib
from typing import Final

import grpc

from dispatcher.request.admission import StatusError
from trefoil.core.errors import InvalidInput

THREAD_BYTES: Final = 32 * 1024
_WINDOW: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def decompress(body: bytes, encoding: str, bytes_max: float) -> bytes:
    """Decompress a request's body; of one that is larger than `bytes_max` its beginning, of one byte more.

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
    # A small body may hold a large one.
    return await asyncio.to_thread(_expand, body, _WINDOW[encoding], bytes_max)


def _expand(body: bytes, window: int, bytes_max: float) -> bytes:
    stream = zlib.decompressobj(window)
    try:
        whole = stream.decompress(body, 0 if math.isinf(bytes_max) else int(bytes_max) + 1)
    except zlib.error as error:
        raise InvalidInput(f"cannot be decompressed ({error})", field="body", remedy="send it plain") from error
    if len(whole) > bytes_max:
        return whole
    if not stream.eof or stream.unused_data:
        raise InvalidInput("is cut off, or goes on after its end", field="body", remedy="send one compressed stream")
    return whole


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
