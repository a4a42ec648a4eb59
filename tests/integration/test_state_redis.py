"""Leases, fencing, streams and hints against a real Redis, also one that dies or is emptied."""

import asyncio

import pytest

from tests.support.redis_server import RedisServer
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.common import Revision
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.plan import Plan, Rollout
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.state import Append, Delete, Increment, Put, State

pytestmark = pytest.mark.integration

SERIES = Series("US-CAL-CISO", Method.AVERAGE, Factors.LIFECYCLE)


def reading(value: float) -> CarbonReading:
    return CarbonReading(series=SERIES, intensity_g_per_kwh=value)


async def raw(state: State, *command: str) -> object:
    return await state._client.execute_command(*command)


async def test_put_and_get(state):
    lease = await state.acquire("controller", "a")
    plan = Plan(revision=Revision(lease.epoch, 1), why="first")
    await state.put(lease, state.keys.plan(), plan)
    assert await state.get(state.keys.plan(), Plan) == plan
    assert await state.get(state.keys.rollout(), Rollout) is None
    assert await raw(state, "PTTL", state.keys.plan()) == -1, "nothing expires that serving needs"


async def test_only_one_holds_a_role(state):
    first = await state.acquire("controller", "a")
    assert first.epoch == 1
    assert await state.acquire("controller", "b") is None
    assert (await state.holder("controller")).holder == "a"
    other_role = await state.acquire("feed:GB", "b")
    assert other_role.epoch == 1


async def test_released_role_is_free_at_once_under_a_higher_epoch(state):
    first = await state.acquire("controller", "a")
    await state.release(first)
    assert not state.holds(first)
    second = await state.acquire("controller", "b")
    assert second.epoch == first.epoch + 1
    await state.release(first)  # late and harmless
    assert (await state.holder("controller")).holder == "b"


async def test_expired_lease_is_taken_over_and_the_old_holder_is_fenced(shared_redis, state):
    old = State.connect(shared_redis.url, state.keys.cluster)
    lease = await old.acquire("controller", "old", ttl_s=0.1)
    for _ in range(100):
        taken = await state.acquire("controller", "new")
        if taken is not None:
            break
        await asyncio.sleep(0.02)
    assert taken is not None
    assert taken.epoch == lease.epoch + 1
    # Even if the old holder's clock stood still, the script refuses it and changes nothing.
    old._held_until_s["controller", lease.epoch] = float("inf")
    await state.put(taken, state.keys.plan(), Plan(why="new"))
    with pytest.raises(errors.Fenced, match=f"epoch {lease.epoch} refused, stored epoch is {taken.epoch}"):
        await old.write(
            lease,
            [
                Put(old.keys.plan(), Plan(why="old")),
                Append(old.keys.decisions(), Plan(), maxlen=10),
                Delete(old.keys.rollout()),
                Increment(old.keys.totals("digits", "h"), {"joules": 1.0}),
            ],
        )
    assert (await state.get(state.keys.plan(), Plan)).why == "new"
    assert await state.stream(state.keys.decisions(), Plan) == []
    assert await state.totals(state.keys.totals("digits", "h")) == {}
    assert not await old.renew(lease)
    await old.close()


async def test_holder_stops_by_its_own_monotonic_clock(shared_redis):
    clock = ManualClock(1_795_000_000.0)
    state = State.connect(shared_redis.url, "monotonic", clock=clock)
    lease = await state.acquire("controller", "a", ttl_s=5.0)
    clock.jump(3600.0)  # the wall clock is corrected: no reason to stop
    assert state.holds(lease)
    clock.move(5.0)
    assert not state.holds(lease)
    with pytest.raises(errors.Fenced, match="not held any more"):
        await state.put(lease, state.keys.plan(), Plan())
    assert not await state.renew(lease)
    await state.close()


async def test_renewing_keeps_the_role(shared_redis):
    clock = ManualClock(1_795_000_000.0)
    state = State.connect(shared_redis.url, "renewing", clock=clock)
    lease = await state.acquire("controller", "a", ttl_s=5.0)
    for _ in range(4):
        clock.move(4.0)
        assert await state.renew(lease, ttl_s=5.0)
    await state.put(lease, state.keys.plan(), Plan())
    assert (await state.holder("controller")).expires_at_s == pytest.approx(clock.now_s() + 5.0)
    await state.close()


async def test_emptied_redis_never_sends_epochs_back(shared_redis, redis_server: RedisServer):
    holder = State.connect(redis_server.url, "c")
    for _ in range(3):
        lease = await holder.acquire("controller", "a")
        await holder.release(lease)
    lease = await holder.acquire("controller", "a")
    assert lease.epoch == 4
    redis_server.flush()
    with pytest.raises(errors.Fenced, match="Redis lost its data"):
        await holder.put(lease, holder.keys.plan(), Plan())
    again = await holder.acquire("controller", "a")
    assert again.epoch == 5, "this process remembers"
    redis_server.flush()
    stranger = State.connect(redis_server.url, "c")
    taken = await stranger.acquire("controller", "b", floor_epoch=7)
    assert taken.epoch == 8, "agents' highest_epoch_seen or the own disk are the floor"
    await holder.close()
    await stranger.close()


async def test_of_many_candidates_one_wins(shared_redis, state):
    others = [State.connect(shared_redis.url, state.keys.cluster) for _ in range(5)]
    leases = await asyncio.gather(*(other.acquire("controller", f"h{i}") for i, other in enumerate(others)))
    assert sum(lease is not None for lease in leases) == 1
    for other in others:
        await other.close()


async def test_several_writes_are_one(state):
    lease = await state.acquire("controller", "a")
    ids = await state.write(
        lease,
        [
            Put(state.keys.plan(), Plan(why="x")),
            Append(state.keys.decisions(), Plan(why="d"), maxlen=10),
            Increment(state.keys.totals("digits", "h"), {"joules": 1.5, "requests": 2}, ttl_s=60),
        ],
    )
    assert ids[0] == ids[2] == ""
    assert await state.stream(state.keys.decisions(), Plan) == [(ids[1], Plan(why="d"))]
    await state.increment(lease, state.keys.totals("digits", "h"), {"joules": 0.1})
    assert await state.totals(state.keys.totals("digits", "h")) == {"joules": 1.6, "requests": 2.0}
    await state.delete(lease, state.keys.plan())
    assert await state.get(state.keys.plan(), Plan) is None


async def test_each_write_is_audited(state):
    lease = await state.acquire("controller", "a")
    await state.write(lease, [Put(state.keys.plan(), Plan()), Put(state.keys.rollout(), Rollout())])
    entries = await raw(state, "XRANGE", state.keys.writes("controller"), "-", "+")
    written = [fields for _, fields in entries]
    assert [entry[b"key"].decode() for entry in written] == [state.keys.plan(), state.keys.rollout()]
    assert {entry[b"epoch"] for entry in written} == {b"1"}


async def test_streams_are_bounded_and_read_in_order(state):
    lease = await state.acquire("feed:GB", "a")
    key = state.keys.carbon_history(SERIES)
    for value in range(10):
        await state.append(lease, key, reading(value), maxlen=6)
    entries = await state.stream(key, CarbonReading)
    assert [entry.intensity_g_per_kwh for _, entry in entries] == [4, 5, 6, 7, 8, 9]
    after = await state.stream(key, CarbonReading, after_id=entries[2][0], count=2)
    assert [entry.intensity_g_per_kwh for _, entry in after] == [7, 8]
    assert await state.tail(key, CarbonReading, count=2) == entries[-2:]
    assert await state.stream(key, CarbonReading, after_id=entries[-1][0]) == []


async def test_scan_finds_the_keys_of_a_prefix_only(state):
    lease = await state.acquire("feed:GB", "a")
    await state.put(lease, state.keys.carbon_now(SERIES), reading(1))
    await state.put(lease, state.keys.plan(), Plan())
    assert await state.scan(state.keys.carbon_now_prefix(), CarbonReading) == {
        state.keys.carbon_now(SERIES): reading(1)
    }
    assert await state.scan(state.keys.node_prefix(), Plan) == {}
    assert await state.scan(state.keys.prefix + "*", Plan) == {}, "a prefix is no pattern"


async def test_loads_and_acks_need_no_lease_and_expire(state):
    await state.append_unfenced(state.keys.load("d1", 0), LoadWindow(seq=1))
    await state.append_unfenced(state.keys.load("d1", 0), LoadWindow(seq=2))
    await state.put_unfenced(state.keys.ack("d1", 0), TableAck(dispatcher="d1"))
    assert [window.seq for _, window in await state.stream(state.keys.load("d1", 0), LoadWindow)] == [1, 2]
    assert await state.names(state.keys.load_prefix()) == [state.keys.load("d1", 0)]
    assert 0 < await raw(state, "PTTL", state.keys.ack("d1", 0)) <= 5_000
    assert 0 < await raw(state, "PTTL", state.keys.load("d1", 0)) <= 900_000
    await state.delete_unfenced(state.keys.ack("d1", 0))
    assert await state.scan(state.keys.ack_prefix(), TableAck) == {}
    with pytest.raises(AssertionError, match="leased writer"):
        await state.put_unfenced(state.keys.plan(), Plan())


async def test_changes_carry_key_names_and_tick(state):
    changes = state.changes(poll_s=0.2)
    assert await anext(changes) is None, "whatever changed before"
    lease = await state.acquire("controller", "a")
    await state.put(lease, state.keys.plan(), Plan())
    seen = [await anext(changes) for _ in range(3)]
    assert state.keys.plan() in seen
    assert None in seen
    await changes.aclose()


async def test_changes_survive_the_death_of_redis(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c")
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

    await asyncio.wait_for(until_seen(), timeout=20)
    await changes.aclose()
    await state.close()


async def test_every_call_without_redis_is_one_clear_error(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c")
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
        await asyncio.wait_for(state.get("x", Plan), timeout=5)
    await state.close()
    server.close()


async def test_a_late_answer_is_never_taken_for_the_next_one(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c", timeout_s=0.2)
    lease = await state.acquire("controller", "a", ttl_s=60)
    await state.write(lease, [Put("one", Plan(why="one")), Put("two", Plan(why="two"))])
    await raw(state, "CLIENT", "PAUSE", "600", "ALL")
    with pytest.raises(errors.StateUnavailable):
        await state.get("one", Plan)
    answered: Plan | None = None
    while answered is None:
        try:
            answered = await state.get("two", Plan)
        except errors.StateUnavailable:
            continue
    assert answered.why == "two"
    await state.close()


async def test_cancelling_a_call_ends_it(redis_server: RedisServer):
    state = State.connect(redis_server.url, "c", timeout_s=30)
    await raw(state, "CLIENT", "PAUSE", "20000", "ALL")
    for _ in range(20):
        call = asyncio.create_task(state.get("one", Plan))
        await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.wait((call,), timeout=5)
        assert call.cancelled()
    await state.close()


async def test_wrong_password_is_named(redis_server: RedisServer):
    admin = State.connect(redis_server.url, "c")
    await raw(admin, "CONFIG", "SET", "requirepass", "secret")
    intruder = State.connect(redis_server.url, "c")
    with pytest.raises(errors.StateUnavailable, match="password"):
        await intruder.ping()
    await intruder.close()
    await admin.close()


def test_nonsense_url_is_a_setting_error():
    with pytest.raises(errors.SettingError, match="redis_url"):
        State.connect("http://example", "c")
