"""Random commands to Redis and to Redis in this process: every answer and everything that stands there is the same."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.redis_server import RedisServer
from tests.support.stores import RedisStores, Stores, VirtualStores
from trefoil.core import errors
from trefoil.core.common import Lease
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.plan import Plan
from trefoil.runtime.fenced import Append, Delete, Put, SetFields
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration

CLIENTS = range(2)
ROLES = ("controller", "feed:GB")
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))
WRITES = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 2), st.text("ab", max_size=3)),
    st.tuples(st.just("append"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("delete"), st.integers(0, 2), st.none()),
    st.tuples(st.just("increment"), st.sampled_from("xy"), NUMBERS),
)
COMMANDS = st.one_of(
    st.tuples(st.just("acquire"), st.sampled_from(ROLES), st.integers(0, 6)),
    st.tuples(st.just("renew"), st.sampled_from(ROLES), st.none()),
    st.tuples(st.just("release"), st.sampled_from(ROLES), st.none()),
    st.tuples(st.just("write"), st.sampled_from(ROLES), st.lists(WRITES, max_size=4)),
    st.tuples(st.just("ack"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("load"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("flush"), st.none(), st.none()),
)


class World:
    """Two clients of one store, and the leases that each was given."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.clients: list[State] = []
        self.leases: dict[tuple[int, str], Lease] = {}
        self.appended = 0

    async def do(self, client: int, verb: str, what: Any, more: Any) -> Any:
        """One command; an operating error is an answer too."""
        store, lease = self.clients[client], self.leases.get((client, what))
        try:
            match verb:
                case "acquire":
                    taken = await store.acquire(what, f"client{client}", ttl_s=60, floor_epoch=more)
                    if taken is not None:
                        self.leases[client, what] = taken
                    return taken and (taken.name, taken.holder, taken.epoch)
                case "renew":
                    return lease and await store.renew(lease, ttl_s=60)
                case "release":
                    return lease and await store.release(lease)
                case "write":
                    return lease and [bool(i) for i in await store.write(lease, [self._write(store, w) for w in more])]
                case "ack" if more:
                    return await store.put_unfenced(
                        store.keys.ack("d", what), TableAck(dispatcher=f"d{what}"), ttl_s=60
                    )
                case "ack":
                    return await store.delete_unfenced(store.keys.ack("d", what))
                case "load":
                    return await store.append_unfenced(store.keys.load("d", what), LoadWindow(seq=more), maxlen=3)
            await self.stores.flush()
        except errors.TrefoilError as error:
            return type(error).__name__, str(error)

    def _write(self, store: State, write: tuple[str, Any, Any]) -> Any:
        kind, what, value = write
        match kind:
            case "put":
                return Put(store.keys.plan_node(str(what)), Plan(why=value))
            case "append":
                self.appended += 1
                return Append(store.keys.demand(str(what)), Plan(why=str(self.appended)), maxlen=value)
            case "delete":
                return Delete(store.keys.plan_node(str(what)))
        return SetFields(store.keys.totals("digits", "h"), {what: value})

    async def everything(self) -> dict[str, Any]:
        """All that stands there, without times and ids."""
        store = self.clients[0]
        keys, found = store.keys, dict[str, Any]()
        for name in await store.names(keys.prefix):
            short = name.removeprefix(keys.prefix)
            match short.split(":")[0]:
                case "plan":
                    found[short] = await store.get(name, Plan)
                case "demand":
                    found[short] = [plan for _, plan in await store.stream(name, Plan)]
                    assert await store.tail(name, Plan, 100) == await store.stream(name, Plan)
                case "load":
                    found[short] = [window.seq for _, window in await store.stream(name, LoadWindow)]
                case "totals":
                    found[short] = await store.totals(name), await store.raw(name, 1)
                case "epoch":
                    found[short] = await store.raw(name, 1)
                case "lease":
                    lease = await store.holder(short.removeprefix("lease:"))
                    found[short] = lease and (lease.holder, lease.epoch)
                case "writes":
                    found[short] = [(e["epoch"], e["key"].split(":", 2)[2]) for e in await store.raw(name, 1000)]
                case _:
                    found[short] = "there"
        return found


@pytest.mark.gate
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commands=st.lists(st.tuples(st.sampled_from(CLIENTS), COMMANDS), max_size=20))
def test_redis_and_memory_agree(shared_redis: RedisServer, commands: list[tuple[int, tuple[str, Any, Any]]]) -> None:
    async def both() -> None:
        worlds = [World(RedisStores(shared_redis)), World(VirtualStores())]
        for world in worlds:
            world.clients = [await world.stores.connect() for _ in CLIENTS]
        try:
            for client, (verb, what, more) in commands:
                answers = [await world.do(client, verb, what, more) for world in worlds]
                assert answers[0] == answers[1]
            stands = [await world.everything() for world in worlds]
            assert stands[0] == stands[1]
        finally:
            for world in worlds:
                await world.stores.close()

    asyncio.run(both())
