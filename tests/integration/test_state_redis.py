"""A Redis that dies, hangs, is emptied or refuses. What every store does: tests/contract/test_state_contract.py."""

import asyncio
import errno

import pytest
import uvloop

from tests.support.redis_server import RedisServer
from trefoil.core import errors
from trefoil.core.demand import TableAck
from trefoil.core.plan import Plan
from trefoil.runtime.state import Put, State

pytestmark = pytest.mark.integration


TIMEOUT_S = 30.0  # where no call is to be late
HINTS = 2_000


async def raw(state: State, *command: str) -> object:
    return await state._client.execute_command(*command)


@pytest.mark.gate
async def test_whoever_was_cut_off_hears_of_each_changed_key_once(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
    changes, heard = state.changes(poll_s=TIMEOUT_S), []
    assert await anext(changes) is None
    for number in range(HINTS):  # a minute's hints, that arrive together
        await raw(state, "PUBLISH", state.keys.changed(), f"key{number % 3}")
    await raw(state, "PUBLISH", state.keys.changed(), "last")
    while "last" not in heard:
        heard.append(await anext(changes))
    assert set(heard) == {"key0", "key1", "key2", "last"}
    assert len(heard) <= HINTS / 50, "read again for every hint, they would be read for a minute"
    await state.close()


@pytest.mark.gate
async def test_a_subscription_whose_connection_timed_out_is_made_anew(redis_server: RedisServer, monkeypatch):
    state, made = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S), []
    subscribe = state._client.pubsub
    monkeypatch.setattr(state._client, "pubsub", lambda: made.append(subscribe()) or made[-1])
    changes = state.changes(poll_s=0.5)
    assert await anext(changes) is None
    lost = TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # a host that was cut off: what the event loop tells
    made[0].connection._reader.set_exception(lost)
    heard = [await anext(changes), await anext(changes)]
    assert heard == [None, None], "it has subscribed again"
    assert len(made) == 2
    await raw(state, "PUBLISH", state.keys.changed(), "key")
    while heard[-1] != "key":
        heard.append(await anext(changes))
    await state.close()


@pytest.mark.gate
def test_no_quiet_poll_counts_as_a_lost_subscription(redis_server: RedisServer, monkeypatch):
    """uvloop counts in whole milliseconds: a wait for the rest of one ends at once."""
    made = []

    async def polls() -> None:
        state = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
        subscribe = state._client.pubsub
        monkeypatch.setattr(state._client, "pubsub", lambda: made.append(subscribe()) or made[-1])
        changes = state.changes(poll_s=0.0204)
        for _ in range(50):
            assert await anext(changes) is None
        await changes.aclose()
        await state.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(polls())
    assert len(made) == 1


async def test_changes_survive_the_death_of_redis(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
    changes = state.changes(poll_s=0.05)
    assert await anext(changes) is None
    redis_server.kill()
    assert [await anext(changes) for _ in range(3)] == [None, None, None]
    redis_server.start()

    async def until_seen() -> None:
        lease = None
        while lease is None:
            lease = await state.acquire("controller", "a")
        async for key in changes:
            if key == state.keys.plan():
                return
            await state.put(lease, state.keys.plan(), Plan())

    await asyncio.wait_for(until_seen(), timeout=60)
    await changes.aclose()
    await state.close()


async def test_every_call_without_redis_is_one_clear_error(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
    lease = await state.acquire("controller", "a")
    redis_server.kill()
    calls = (
        state.ping(),
        state.get(state.keys.plan(), Plan),
        state.scan(state.keys.node_prefix(), Plan),
        state.stream(state.keys.decisions(), Plan),
        state.put(lease, state.keys.plan(), Plan()),
        state.put_unfenced(state.keys.ack("d", 0), TableAck()),
        state.acquire("feed:GB", "a"),
        state.renew(lease),
    )
    for call in calls:
        with pytest.raises(errors.StateUnavailable, match="Remedy: start Redis"):
            await call
    redis_server.start()
    await state.ping()
    await state.close()


async def test_a_hung_redis_is_given_up_after_the_timeout(tmp_path):
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, tmp_path / "s")
    state = State.connect(f"unix://{tmp_path / 's'}", "c", timeout_s=0.1)
    with pytest.raises(errors.StateUnavailable):
        await asyncio.wait_for(state.get("x", Plan), timeout=30)
    await state.close()
    server.close()


async def test_a_late_answer_is_never_taken_for_the_next_one(redis_server: RedisServer):
    patient = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
    state = State.connect(redis_server.url, "c", timeout_s=0.2)
    lease = await patient.acquire("controller", "a", ttl_s=60)
    await patient.write(lease, [Put("one", Plan(why="one")), Put("two", Plan(why="two"))])

    async def answered(key: str) -> Plan:
        while True:
            try:
                return await state.get(key, Plan)
            except errors.StateUnavailable:
                continue

    assert (await answered("one")).why == "one"  # on the connection that is late next
    await raw(patient, "CLIENT", "PAUSE", "2000", "ALL")
    with pytest.raises(errors.StateUnavailable):
        await state.get("one", Plan)
    assert (await answered("two")).why == "two"
    await state.close()
    await patient.close()


async def test_cancelling_a_call_ends_it(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
    await raw(state, "CLIENT", "PAUSE", "20000", "ALL")
    for _ in range(20):
        call = asyncio.create_task(state.get("one", Plan))
        await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.wait((call,), timeout=30)
        assert call.cancelled()
    await state.close()


async def test_wrong_password_is_named(redis_server: RedisServer):
    admin = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
    await raw(admin, "CONFIG", "SET", "requirepass", "secret")
    intruder = State.connect(redis_server.url, "c", timeout_s=TIMEOUT_S)
    with pytest.raises(errors.StateUnavailable, match="password"):
        await intruder.ping()
    await intruder.close()
    await admin.close()


def test_nonsense_url_is_a_setting_error():
    with pytest.raises(errors.SettingError, match="redis_url"):
        State.connect("http://example", "c")
