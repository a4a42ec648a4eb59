"""Many that are woken by the same news go on one after another."""

import asyncio
from collections import deque
from typing import Final

AT_ONCE: Final = 4


class Turns:
    """Few watchers at a time are told the news, so that who asks meanwhile is answered in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # its watcher may be gone
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
