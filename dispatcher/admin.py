"""The admin service trefoil.dispatcher.v1.Dispatcher: read-only today."""

from collections.abc import AsyncIterator
from typing import Any

from dispatcher.hub import Hub
from dispatcher.loop import Loop
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from trefoil.runtime import codec

NAME = "trefoil.dispatcher.v1.Dispatcher"


class DispatcherAdmin(dispatcher_pb2_grpc.DispatcherServicer):  # type: ignore[misc]
    """Errors become statuses in the server's interceptor."""

    def __init__(self, hub: Hub, loop: Loop) -> None:
        self._hub = hub
        self._loop = loop

    async def GetTable(self, request: Any, context: Any) -> Any:
        """The routes in force with what is known of each target."""
        table = self._hub.table
        return dispatcher_pb2.GetTableResponse(
            table=codec.to_proto(table.revision),
            routes=[codec.to_proto(table.routes[family]) for family in sorted(table.routes)],
            slices=[codec.to_proto(load) for load in self._hub.loads()],
            why=table.summary or self._hub.not_ready(),
        )

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Each load window as it is flushed."""
        windows = self._loop.subscribe()
        try:
            while True:
                yield dispatcher_pb2.WatchLoadResponse(window=codec.to_proto(await windows.get()))
        finally:
            self._loop.unsubscribe(windows)
