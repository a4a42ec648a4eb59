"""Least pace of a client that sends a large request by parts, so that slow ones do not hold the places of others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

SILENT_S: Final = 60.0
"""How long it may send nothing."""
BYTES_PER_S_MIN: Final = 4096
"""In the mean, after the first SILENT_S."""

T = TypeVar("T")


async def paced(receive: Callable[[], Awaitable[T]], size: Callable[[T], int]) -> AsyncIterator[T]:
    """Parts of a request without end; `size`: bytes of one. Raises TimeoutError for a client that is too slow."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + SILENT_S
    while True:
        async with asyncio.timeout_at(min(ends_s, loop.time() + SILENT_S)):
            part = await receive()
        yield part
        ends_s += size(part) / BYTES_PER_S_MIN
