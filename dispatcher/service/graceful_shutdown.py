"""The end of a dispatcher: first it says that it is leaving, then it continues serving for a while, then it stops.

Load balancers and clients with health checks have drain_s to go elsewhere; requests that come
all the same are answered. Then the ports close, and what is in flight has stop_grace_s to end. A second signal skips
both.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from dispatcher.service.local_worker import LocalWorker

LOG = structlog.get_logger()


class GracefulShutdown:
    """A part of the service: the last in the list, so that it is the first to be shut down."""

    def __init__(self, local: LocalWorker) -> None:
        self._local = local
        self._hurry = asyncio.Event()

    @property
    def patience_s(self) -> float:
        """Beyond what every part has to shut down."""
        return self._local.settings.drain_s + 2 * self._local.settings.stop_grace_s  # of gRPC, and of REST

    def hurry(self) -> None:
        """A second signal."""
        LOG.info("the grace period is over: calls in flight are cancelled")
        self._hurry.set()

    async def stop_within(self, stop: Callable[[float], Awaitable[None]], grace_s: float) -> None:
        """Stop something that takes a grace, at once when a second signal comes or has come."""
        if self._hurry.is_set():
            await stop(0.0)
            return
        stopping = asyncio.ensure_future(stop(grace_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((stopping, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            await stop(0.0)
        await stopping

    async def init(self) -> None:
        """Nothing to acquire."""

    async def run(self) -> None:
        """Nothing to do before the end."""

    async def shutdown(self) -> None:
        """Not ready from now on, and serving still."""
        self._local.draining = True
        LOG.info("draining", for_s=self._local.settings.drain_s)
        try:
            async with asyncio.timeout(self._local.settings.drain_s):
                await self._hurry.wait()
        except TimeoutError:
            return
