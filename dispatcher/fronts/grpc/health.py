"""grpc.health.v1 of the inference port: the server's readiness, whichever service a client names.

Triton ignores the name in `Check`. Probes therefore send any: "inference.GRPCInferenceService", "triton", the name of a
Kubernetes service.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from trefoil.runtime.clock import Clock

TICK_S: Final = 0.1


class ServerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """Health of a server as a whole. `ready`: as `ServerReady` answers."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._published = False
        self._changed = asyncio.Condition()

    async def Check(self, request: Any, context: Any) -> Any:
        """Readiness now."""
        return _answer(self._ready())

    async def Watch(self, request: Any, context: Any) -> None:
        """Readiness now, and after each change."""
        await self.publish()
        sent = None
        while True:
            async with self._changed:
                while self._published is sent:
                    await self._changed.wait()
                sent = self._published
            await context.write(_answer(sent))

    async def publish(self) -> None:
        """Report a change to watchers."""
        if self._published != (ready := self._ready()):
            async with self._changed:
                self._published = ready
                self._changed.notify_all()

    async def follow(self, clock: Clock) -> None:
        """Report every change, until cancelled."""
        while True:
            await self.publish()
            await clock.sleep(TICK_S)


def _answer(ready: bool) -> Any:
    states = health_pb2.HealthCheckResponse
    return states(status=states.SERVING if ready else states.NOT_SERVING)
