"""Redis, and Redis in this process, behind one face: one suite of tests holds both to the same behaviour."""

import asyncio
import itertools
import math
from typing import Protocol

from tests.support.redis_server import RedisServer
from tests.support.virtual.redis import Server
from trefoil.runtime.clock import Clock, ManualClock, WallClock
from trefoil.runtime.state import TIMEOUT_S, State
from trefoil.runtime.telemetry import Metrics

_CLUSTERS = itertools.count()
START_S = 1_795_000_000.0


class Stores(Protocol):
    """One shared state and everything a test needs to do to it from outside."""

    async def connect(self, clock: Clock | None = None) -> State:
        """One more client, of the same cluster."""
        ...

    async def flush(self) -> None:
        """The store loses everything of this cluster."""
        ...

    async def ttl_s(self, key: str) -> float | None:
        """How long a key lives yet; inf forever, None not there."""
        ...

    async def pass_s(self, seconds: float) -> None:
        """Let the store's time pass."""
        ...

    async def close(self) -> None:
        """End every client."""
        ...


class RedisStores:
    """A cluster of a real Redis, whose time is real."""

    def __init__(self, server: RedisServer) -> None:
        self._server, self._cluster = server, f"contract{next(_CLUSTERS)}"
        self._clients: list[State] = []

    async def connect(self, clock: Clock | None = None) -> State:
        self._clients.append(State.connect(self._server.url, self._cluster, clock=clock, timeout_s=30.0))
        return self._clients[-1]

    async def flush(self) -> None:
        client = State.connect(self._server.url, self._cluster, timeout_s=30.0)
        self._clients.append(client)
        for name in await client.names(client.keys.prefix):
            await client._client.delete(name)

    async def ttl_s(self, key: str) -> float | None:
        left_ms = int(await self._clients[0]._client.pttl(key))
        return None if left_ms == -2 else math.inf if left_ms == -1 else left_ms / 1000

    async def pass_s(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class VirtualStores:
    """A cluster of a Redis in this process, whose time is moved by hand. Clients have separate clocks."""

    def __init__(self) -> None:
        self._clock = ManualClock(START_S)
        self._server = Server(self._clock)

    async def connect(self, clock: Clock | None = None) -> State:
        return state_on(self._server, "contract", clock or WallClock())

    async def flush(self) -> None:
        self._server.flush()

    async def ttl_s(self, key: str) -> float | None:
        return self._server.ttl_s(key)

    async def pass_s(self, seconds: float) -> None:
        await self._clock.advance(seconds)

    async def close(self) -> None:
        pass


def state_on(server: Server, cluster: str, clock: Clock, metrics: Metrics | None = None) -> State:
    """A client of a Redis in this process."""
    return State(server.client(), cluster, clock, TIMEOUT_S, metrics)
