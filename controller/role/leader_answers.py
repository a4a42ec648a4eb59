"""Guard of a controller's gRPC service: only the controller that leads answers."""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from trefoil.core import errors


class LeaderAnswers:
    """Servicer that answers only while no other controller leads: what a standby remembers is of before."""

    def __init__(self, servicer: Any, leader: Callable[[], str]) -> None:
        self._servicer, self._leader = servicer, leader

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._servicer, name)

        async def answer(request: Any, context: Any) -> Any:
            self._require_no_other()
            return await method(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            self._require_no_other()
            async for each in method(request, context):
                self._require_no_other()
                yield each

        return stream if inspect.isasyncgenfunction(method) else answer

    def _require_no_other(self) -> None:
        if leader := self._leader():
            raise errors.Unavailable(f"this controller stands by, {leader} leads", remedy="ask that one")
