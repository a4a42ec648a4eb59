"""Leases, fencing, streams, totals and hints: every store, in Redis or in memory, keeps the same rules."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from tests.support.stores import START_S, RedisStores, Stores, VirtualStores
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.common import Revision
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.plan import Plan, Rollout
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.fenced import Append, Delete, Put, SetFields
from trefoil.runtime.state import State

SERIES = Series("US-CAL-CISO", Method.AVERAGE, Factors.LIFECYCLE)


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.integration), "memory"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    found: Stores = (
        RedisStores(request.getfixturevalue("shared_redis")) if request.param == "redis" else VirtualStores()
    )
    yield found
    await found.close()


@pytest.fixture
async def store(stores: Stores) -> State:
    return await stores.connect()


def window(dispatcher: str, seq: int) -> LoadWindow:
    return LoadWindow(dispatcher=dispatcher, seq=seq, starts_at_s=START_S, ends_at_s=START_S + 0.5)


def reading(value: float) -> CarbonReading:
    return CarbonReading(series=SERIES, intensity_g_per_kwh=value)


# --- Leases -----------------------------------------------------------------------------------------------------------


async def test_only_one_holds_a_role(store):
    first = await store.acquire("controller", "a")
    assert first.epoch == 1
    assert await store.acquire("controller", "b") is None
    assert (await store.holder("controller")).holder == "a"
    other_role = await store.acquire("feed:GB", "b")
    assert other_role.epoch == 1


async def test_of_two_that_got_one_epoch_the_later_keeps_the_role(stores):
    first, second = await stores.connect(), await stores.connect()
    lost = await first.acquire("controller", "host:1")
    await stores.flush()  # a Redis that lost its last second
    lease = await second.acquire("controller", "host:12")
    assert lease.epoch == lost.epoch
    await first.release(lost)
    assert (await second.holder("controller")).holder == "host:12"
    assert not await first.renew(lost)
    assert await first.acquire("controller", "host:1") is None
    assert await second.renew(lease)


async def test_released_role_is_free_at_once_under_a_higher_epoch(store):
    first = await store.acquire("controller", "a")
    await store.release(first)
    assert not store.holds(first)
    second = await store.acquire("controller", "b")
    assert second.epoch == first.epoch + 1
    await store.release(first)  # late and harmless
    assert (await store.holder("controller")).holder == "b"


async def test_an_expired_lease_is_taken_over_and_the_old_holder_is_fenced(stores, store):
    old = await stores.connect()
    lease = await old.acquire("controller", "old", ttl_s=60)
    assert 0 < await stores.ttl_s(store.keys.lease("controller")) <= 60
    assert await old.renew(lease, ttl_s=0.1)
    taken = None
    for _ in range(3000):
        taken = await store.acquire("controller", "new")
        if taken is not None:
            break
        await stores.pass_s(0.02)
    assert taken is not None
    assert taken.epoch == lease.epoch + 1
    # Even if the old holder's clock stood still, it is refused, and nothing changes.
    old._held_until_s["controller", lease.epoch] = float("inf")
    await store.put(taken, store.keys.plan(), Plan(why="new"))
    with pytest.raises(errors.Fenced, match=f"epoch {lease.epoch} refused, stored epoch is {taken.epoch}"):
        await old.write(
            lease,
            [
                Put(old.keys.plan(), Plan(why="old")),
                Append(old.keys.decisions(), Plan(), maxlen=10),
                Delete(old.keys.rollout()),
                SetFields(old.keys.totals("digits", "h"), {"joules": 1.0}),
            ],
        )
    assert (await store.get(store.keys.plan(), Plan)).why == "new"
    assert await store.stream(store.keys.decisions(), Plan) == []
    assert await store.totals(store.keys.totals("digits", "h")) == {}
    assert not await old.renew(lease)


async def test_the_holder_stops_by_its_own_monotonic_clock(stores):
    clock = ManualClock(START_S)
    store = await stores.connect(clock)
    lease = await store.acquire("controller", "a", ttl_s=5.0)
    clock.jump(3600.0)  # the wall clock is corrected: no reason to stop
    assert store.holds(lease)
    clock.move(5.0)
    assert not store.holds(lease)
    with pytest.raises(errors.Fenced, match="not held any more"):
        await store.put(lease, store.keys.plan(), Plan(why="x"))
    assert not await store.renew(lease)


async def test_renewing_keeps_the_role(stores):
    clock = ManualClock(START_S)
    store = await stores.connect(clock)
    lease = await store.acquire("controller", "a", ttl_s=5.0)
    for _ in range(4):
        clock.move(4.0)
        assert await store.renew(lease, ttl_s=5.0)
    await store.put(lease, store.keys.plan(), Plan(why="x"))
    assert (await store.holder("controller")).expires_at_s == pytest.approx(clock.now_s() + 5.0)


async def test_a_store_that_lost_its_data_never_sends_epochs_back(stores, store):
    for _ in range(3):
        lease = await store.acquire("controller", "a")
        await store.release(lease)
    lease = await store.acquire("controller", "a")
    assert lease.epoch == 4
    await stores.flush()
    with pytest.raises(errors.Fenced, match="lost its data"):
        await store.put(lease, store.keys.plan(), Plan(why="x"))
    assert not store.holds(lease)
    again = await store.acquire("controller", "a")
    assert again.epoch == 5, "this process remembers"
    await stores.flush()
    stranger = await stores.connect()
    taken = await stranger.acquire("controller", "b", floor_epoch=7)
    assert taken.epoch == 8, "agents' highest_epoch_seen or the own disk are the floor"


async def test_of_many_candidates_one_wins(stores):
    others = [await stores.connect() for _ in range(6)]
    leases = await asyncio.gather(*(other.acquire("controller", f"h{i}") for i, other in enumerate(others)))
    assert sum(lease is not None for lease in leases) == 1


# --- Fenced writes ----------------------------------------------------------------------------------------------------


async def test_put_and_get(stores, store):
    lease = await store.acquire("controller", "a")
    plan = Plan(revision=Revision(lease.epoch, 1), why="first")
    await store.put(lease, store.keys.plan(), plan)
    assert await store.get(store.keys.plan(), Plan) == plan
    assert await store.get(store.keys.rollout(), Rollout) is None
    assert await stores.ttl_s(store.keys.plan()) == math.inf, "nothing expires that serving needs"


async def test_what_is_put_with_a_lifetime_is_gone_after_it(stores, store):
    lease = await store.acquire("controller", "a")
    await store.put(lease, store.keys.rollout(), Rollout(step=1), ttl_s=60)
    assert await store.get(store.keys.rollout(), Rollout) is not None
    assert 0 < await stores.ttl_s(store.keys.rollout()) <= 60
    await store.put(lease, store.keys.rollout(), Rollout(step=1), ttl_s=0.05)
    await stores.pass_s(0.06)
    assert await store.get(store.keys.rollout(), Rollout) is None
    assert await store.names(store.keys.rollout()) == []
    await store.put(lease, store.keys.rollout(), Rollout(step=1), ttl_s=60)
    await store.put(lease, store.keys.rollout(), Rollout(step=1))
    assert await stores.ttl_s(store.keys.rollout()) == math.inf, "the last write says how long"


async def test_several_writes_are_one(store):
    lease = await store.acquire("controller", "a")
    ids = await store.write(
        lease,
        [
            Put(store.keys.plan(), Plan(why="x")),
            Append(store.keys.decisions(), Plan(why="d"), maxlen=10),
            SetFields(store.keys.totals("digits", "h"), {"joules": 1.5, "requests": 2}, ttl_s=60),
        ],
    )
    assert ids[0] == ids[2] == ""
    assert await store.stream(store.keys.decisions(), Plan) == [(ids[1], Plan(why="d"))]
    again = SetFields(store.keys.totals("digits", "h"), {"joules": 0.1, "grams": 1e-9})
    for _ in range(2):
        await store.write(lease, [again])
    assert await store.totals(store.keys.totals("digits", "h")) == {"joules": 0.1, "requests": 2.0, "grams": 1e-9}
    await store.delete(lease, store.keys.plan())
    assert await store.get(store.keys.plan(), Plan) is None


async def test_fields_that_replace_leave_no_other_field(store):
    lease, key = await store.acquire("controller", "a"), store.keys.totals("digits", "h")
    await store.write(lease, [SetFields(key, {"joules": 1.0, "requests": 2}, ttl_s=60)])
    await store.write(lease, [SetFields(key, {"joules": 3.0}, ttl_s=60, replace=True)])
    assert await store.totals(key) == {"joules": 3.0}
    assert [entry["key"] for entry in await store.raw(store.keys.writes("controller"), 10)] == [key, key]


async def test_totals_keep_the_last_lifetime(stores, store):
    lease, key = await store.acquire("controller", "a"), store.keys.totals("digits", "h")
    await store.write(lease, [SetFields(key, {"joules": 1.0}, ttl_s=60)])
    await store.write(lease, [SetFields(key, {"joules": 2.0})])
    assert 30 < await stores.ttl_s(key) <= 60


async def test_each_write_is_audited(store):
    lease = await store.acquire("controller", "a")
    await store.write(lease, [Put(store.keys.plan(), Plan(why="x")), Put(store.keys.rollout(), Rollout(step=1))])
    written = await store.raw(store.keys.writes("controller"), 10)
    assert [entry["key"] for entry in written] == [store.keys.plan(), store.keys.rollout()]
    assert {entry["epoch"] for entry in written} == {"1"}
    assert all(float(entry["at_ms"]) > 1e12 for entry in written)


# --- Reads ------------------------------------------------------------------------------------------------------------


async def test_streams_are_bounded_and_read_in_order(store):
    lease = await store.acquire("feed:GB", "a")
    key = store.keys.carbon_history(SERIES)
    for value in range(10):
        await store.append(lease, key, reading(value), maxlen=6)
    entries = await store.stream(key, CarbonReading)
    assert [entry.intensity_g_per_kwh for _, entry in entries] == [4, 5, 6, 7, 8, 9]
    after = await store.stream(key, CarbonReading, after_id=entries[2][0], count=2)
    assert [entry.intensity_g_per_kwh for _, entry in after] == [7, 8]
    assert await store.tail(key, CarbonReading, count=2) == entries[-2:]
    assert await store.stream(key, CarbonReading, after_id=entries[-1][0]) == []
    assert await store.tail(store.keys.decisions(), Plan) == []


async def test_scan_finds_the_keys_of_a_prefix_only(store):
    lease = await store.acquire("feed:GB", "a")
    await store.put(lease, store.keys.carbon_now(SERIES), reading(1))
    await store.put(lease, store.keys.plan(), Plan(why="x"))
    assert await store.scan(store.keys.carbon_now_prefix(), CarbonReading) == {
        store.keys.carbon_now(SERIES): reading(1)
    }
    assert await store.scan(store.keys.node_prefix(), Plan) == {}
    assert await store.scan(store.keys.prefix + "*", Plan) == {}, "a prefix is not a pattern"


async def test_any_kind_of_key_is_shown_as_text(store):
    lease = await store.acquire("controller", "a")
    await store.write(lease, [SetFields(store.keys.totals("digits", "h"), {"joules": 2.5, "requests": 2})])
    assert await store.raw(store.keys.totals("digits", "h"), 1) == {"joules": "2.5", "requests": "2"}
    assert await store.raw(store.keys.epoch("controller"), 1) == "1"
    assert await store.raw("nothing", 1) == "(none)"
    assert len(await store.raw(store.keys.writes("controller"), 1)) == 1


async def test_loads_and_acks_need_no_lease_and_expire(stores, store):
    await store.append_unfenced(store.keys.load("d1", 0), window("d1", 1))
    await store.append_unfenced(store.keys.load("d1", 0), window("d1", 2))
    await store.put_unfenced(store.keys.ack("d1", 0), TableAck(dispatcher="d1"))
    assert [window.seq for _, window in await store.stream(store.keys.load("d1", 0), LoadWindow)] == [1, 2]
    assert await store.names(store.keys.load_prefix()) == [store.keys.load("d1", 0)]
    assert 0 < await stores.ttl_s(store.keys.ack("d1", 0)) <= 5
    assert 0 < await stores.ttl_s(store.keys.load("d1", 0)) <= 900
    await store.delete_unfenced(store.keys.ack("d1", 0))
    assert await store.scan(store.keys.ack_prefix(), TableAck) == {}
    with pytest.raises(AssertionError, match="leased writer"):
        await store.put_unfenced(store.keys.plan(), Plan(why="x"))


# --- Hints ------------------------------------------------------------------------------------------------------------


async def test_changes_carry_key_names_and_tick(store):
    changes = store.changes(poll_s=0.2)
    assert await anext(changes) is None, "whatever changed before"
    lease = await store.acquire("controller", "a")
    await store.put(lease, store.keys.plan(), Plan(why="x"))
    await store.delete(lease, store.keys.plan())
    await store.put_unfenced(store.keys.ack("d1", 0), TableAck())
    seen = [await anext(changes)]
    while not {None, store.keys.ack("d1", 0)} <= {*seen}:
        seen.append(await anext(changes))
    wanted = [store.keys.plan(), store.keys.ack("d1", 0)]
    assert list(dict.fromkeys(key for key in seen if key)) == wanted, "what piled up may come once"
    await changes.aclose()


# --- Time -------------------------------------------------------------------------------------------------------------


async def test_a_clock_is_compared_with_the_stores_own(stores: Stores):
    one, other = await stores.connect(ManualClock(START_S)), await stores.connect(ManualClock(START_S + 1000.0))
    apart_s = await other.clock_offset_s() - await one.clock_offset_s()
    assert apart_s == pytest.approx(1000.0, abs=60.0), "the store's own time goes on meanwhile"
