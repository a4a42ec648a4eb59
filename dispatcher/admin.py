"""The admin service trefoil.dispatcher.v1.Dispatcher."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from dispatcher import asked
from dispatcher.hub import Hub
from dispatcher.loop import Loop
from dispatcher.siblings import Siblings, table_of
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from trefoil.runtime import codec

NAME = "trefoil.dispatcher.v1.Dispatcher"


class DispatcherAdmin(dispatcher_pb2_grpc.DispatcherServicer):  # type: ignore[misc]
    """Errors become statuses in the server's interceptor."""

    def __init__(self, hub: Hub, loop: Loop, siblings: Siblings | None = None) -> None:
        self._hub = hub
        self._loop = loop
        self._siblings = siblings

    async def GetTable(self, request: Any, context: Any) -> Any:
        """The routes in force with what is known of each target, over all workers."""
        return await self._siblings.table() if self._siblings is not None else table_of(self._hub)

    async def Drain(self, request: Any, context: Any) -> Any:
        """Take all workers of this dispatcher out of service, or back into it."""
        assert self._siblings is not None
        return await self._siblings.drain(request)

    async def ExplainRequest(self, request: Any, context: Any) -> Any:
        """Where a request would go now, and how every target of its family stands."""
        return await self._siblings.explain(request) if self._siblings is not None else asked.answer(self._hub, request)

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Each load window of all workers as it is flushed."""
        own = self._loop.subscribe()
        try:
            if self._siblings is None:
                while True:
                    yield dispatcher_pb2.WatchLoadResponse(window=codec.to_proto(await own.get()))
            async with contextlib.aclosing(self._siblings.windows(own)) as windows:
                async for window in windows:
                    yield dispatcher_pb2.WatchLoadResponse(window=codec.to_proto(window))
        finally:
            self._loop.unsubscribe(own)
